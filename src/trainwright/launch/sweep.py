"""Executes a sweep: selects the values of each trial with Optuna, and runs each trial in its own process.

A trial is a normal run in the sweep's folder. The sweep reads its metrics.json, and ends it with SIGTERM if it is
pruned. Optuna's study is in study.db, which only this process writes; a sweep that was ended or killed continues from
it. The settings are in config/sweep.py. Imports no torch.
"""

from __future__ import annotations

import csv
import ctypes
import hashlib
import json
import logging
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, TYPE_CHECKING, Any

from trainwright.checkpoint.folder_lock import FolderLock, set_aside
from trainwright.config import Component, RunConfig, yaml_text
from trainwright.config.frozen import thaw
from trainwright.config.groups import kind_at
from trainwright.config.problems import suggest
from trainwright.config.sweep import Range, SweepConfig
from trainwright.cpu import num_cores
from trainwright.errors import HANG_EXIT_CODE, CheckpointError, ConfigError, TrainwrightError
from trainwright.registry.catalogue import read_catalogue

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger(__name__)

STUDY_FILE, RESULTS, LOGS = "study.db", "results", "logs"
_METRICS_FILE = "metrics.json"
"""As in writers/json_lines.py, which imports torch. A test compares them."""
_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_MORE_KEYS = ("groups", "args")
"""Keys of components that are not arguments of their constructors."""
_DEFINITION, _RESTARTS, _REASON = "definition", "restarts", "reason"
_ENDED_BY_SIGNAL = {130, 137, 138, 143, 129, HANG_EXIT_CODE}
"""Exit codes of a run that was interrupted, killed or stuck; starting it again resumes it."""
_LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

RUNNING, COMPLETE, PRUNED, FAILED, WAITING = "running", "complete", "pruned", "failed", "waiting"


@dataclass(frozen=True)
class TrialResult:
    """A trial in the table of results."""

    number: int
    name: str
    state: str
    values: Mapping[str, Any]
    """The values of the parameters."""
    value: float | None = None
    """The metric: of the last evaluation so far, or the best one."""
    step: int | None = None
    """The step of that evaluation."""
    seconds: float | None = None
    reason: str | None = None
    """The reason why the trial failed."""


@dataclass(frozen=True)
class SweepResult:
    """The results of a sweep so far."""

    trials: tuple[TrialResult, ...]
    best: TrialResult | None
    command: str | None
    """The command that trains the best trial again, under the run's own name."""
    importances: Mapping[str, float]
    """The share of each parameter in the spread of the metric; empty if there are too few trials."""
    signal: int | None = None
    """The signal that interrupted the sweep."""
    num_failures: int = 0
    """Consecutive failures, if they ended the sweep."""


Report = Callable[[TrialResult], None]
Show = Callable[[Sequence[TrialResult]], None]


def import_optuna() -> ModuleType:
    """Returns the package, which logs errors only."""
    try:
        import optuna
    except ImportError as error:
        raise TrainwrightError(
            "sweep needs optuna, which is not installed. Run: pip install 'trainwright[sweep]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def check_components(sweep: SweepConfig) -> None:
    """Raises for a parameter that its component does not accept, as far as the sources of the components show."""
    for name in sweep.parameters:
        section, _, argument = name.rpartition(".")
        component, path = _value_at(sweep.base, section), tuple(section.split("."))
        kind = kind_at(path) if isinstance(component, Component) else None
        if kind is None:
            continue
        entries = {each.type: each for each in read_catalogue(sweep.base.project_dir, (kind,)).entries}
        types = sweep.parameters.get(f"{section}.type", (component.type,))
        where, has_imports = sweep.origin(name), bool(sweep.base.imports)
        for each in types:
            if argument == "type" and not has_imports and each not in entries and not {*":."} & {*str(each)}:
                raise ConfigError(f'parameters.{name}: no {kind} "{each}". {suggest(str(each), entries)}', where=where)
            signature = entries[each].signature if each in entries else None
            if signature is None or signature.open_to or argument in ("type", *component.reserved_keys, *_MORE_KEYS):
                continue
            known = [parameter.name for parameter in signature.parameters]
            if argument not in known:
                problem = f'{each} has no argument "{argument}". {suggest(argument, known)}'
                raise ConfigError(f"parameters.{name}: {problem}", where=where)


def _value_at(section: Any, path: str) -> Any:
    """Returns the setting at a dotted path; None if there is none."""
    for key in path.split(".") if path else ():
        section = section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)
    return section


def preview(sweep: SweepConfig, num_trials: int) -> list[dict[str, Any]]:
    """Returns the values of the first trials; with tpe, later values depend on the results."""
    optuna = import_optuna()
    check_components(sweep)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    distributions = _distributions(optuna, sweep)
    found = []
    for number in range(num_trials):
        study.sampler = _sampler(optuna, sweep, number, num_parallel=1)
        found.append(_decode(sweep, _ask(study, sweep, distributions, number).params))
    return found


def run_sweep(
    sweep: SweepConfig, *, fresh: bool = False, report: Report = lambda _: None, show: Show = lambda _: None
) -> SweepResult:
    """Runs or continues a sweep. `report` is called for each trial that starts or ends, `show` with those that run.

    Finished trials are kept; interrupted ones continue from their checkpoints. A signal ends the sweep after every
    trial has saved its step.
    """
    optuna = import_optuna()
    if "WORLD_SIZE" in os.environ:
        raise ConfigError("sweep starts one process for each trial, but a launcher has started this one. Run it alone.")
    check_components(sweep)
    folder = sweep.folder
    _reject_run(folder)
    if fresh and folder.exists():
        with FolderLock(folder):
            pass  # raises if another sweep uses it
        set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder):
        storage = optuna.storages.RDBStorage(f"sqlite:///{folder / STUDY_FILE}")
        study = optuna.create_study(
            storage=storage,
            study_name=sweep.name,
            direction="minimize" if sweep.mode == "min" else "maximize",
            pruner=_pruner(optuna, sweep),
            load_if_exists=True,
        )
        _check_definition(study, sweep)
        try:
            with _Signals() as signals:
                return _Sweep(optuna, storage, study, sweep, signals, report=report, show=show).run()
        finally:
            storage.engine.dispose()


class _Sweep:
    """The trials of a sweep and the slots in which they run."""

    def __init__(
        self,
        optuna_module: ModuleType,
        storage: optuna.storages.RDBStorage,
        study: optuna.Study,
        sweep: SweepConfig,
        signals: _Signals,
        *,
        report: Report,
        show: Show,
    ) -> None:
        self._optuna = optuna_module
        self._storage = storage
        self._study = study
        self._sweep = sweep
        self._signals = signals
        self._report, self._show = report, show
        devices = visible_devices(sweep.base)
        self._slots = list(range(max(1, len(devices)) if sweep.parallel == "auto" else sweep.parallel))
        self._environments = [slot_environment(slot, len(self._slots), devices) for slot in self._slots]
        self._running: dict[int, _Running] = {}
        self._num_failures = 0
        self._distributions = _distributions(optuna_module, sweep)

    def run(self) -> SweepResult:
        """Runs trials until all have ended, too many have failed, or a signal arrives."""
        interrupted = self._interrupted_trials()
        try:
            while True:
                is_ending = self._signals.received is not None or self._num_failures >= self._sweep.max_failures
                while not is_ending and len(self._running) < len(self._slots):
                    trial = interrupted.pop(0) if interrupted else self._next_trial()
                    if trial is None:
                        break
                    self._start(trial)
                if not self._running:
                    break
                self._signals.forward([each.process for each in self._running.values()])
                for slot in [slot for slot, each in self._running.items() if self._advance(each)]:
                    del self._running[slot]
                    self._write_results()
                self._show([each.result() for each in self._running.values()])
                time.sleep(_POLL_SECONDS)
        finally:
            for each in self._running.values():
                each.process.terminate()
        return self._write_results()

    def _interrupted_trials(self) -> list[optuna.Trial]:
        """Returns the trials that were running when the sweep ended, oldest first."""
        running = self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.RUNNING,))
        study_id = self._storage.get_study_id_from_name(self._sweep.name)
        numbers = [self._storage.get_trial_id_from_study_id_trial_number(study_id, each.number) for each in running]
        trials = [self._optuna.trial.Trial(self._study, number) for number in numbers]
        for trial in trials:
            self._study.sampler = _sampler(self._optuna, self._sweep, trial.number, num_parallel=len(self._slots))
            suggest_missing(trial, self._distributions)
        return trials

    def _next_trial(self) -> optuna.Trial | None:
        """Returns a trial with new values, or None if all were started."""
        waiting = self._optuna.trial.TrialState.WAITING
        number = sum(each.state != waiting for each in self._study.get_trials(deepcopy=False))
        if number >= self._sweep.num_trials:
            return None
        self._study.sampler = _sampler(self._optuna, self._sweep, number, num_parallel=len(self._slots))
        return _ask(self._study, self._sweep, self._distributions, number)

    def _start(self, trial: optuna.Trial) -> None:
        slot = next(slot for slot in self._slots if slot not in self._running)
        running = _Running(trial, self._sweep, _decode(self._sweep, trial.params), slot=slot)
        running.start(self._environments[slot], self._signals)
        self._running[slot] = running
        self._report(running.result())

    def _advance(self, running: _Running) -> bool:
        """Reads the new metrics of a trial; returns True if its process has ended."""
        code = running.process.poll()
        self._read(running)
        if code is None:
            return False
        running.close()
        if code == 0:
            self._complete(running)
        elif running.is_pruned:
            self._tell(running, PRUNED)
        elif self._signals.received is not None:
            return True  # it remains `running` in the study, and continues with the sweep
        elif (code < 0 or code in _ENDED_BY_SIGNAL) and running.num_restarts < self._sweep.max_restarts:
            running.restart(self._environments[running.slot], self._signals)
            return False
        else:
            self._tell(running, FAILED, _describe_failure(code, running))
        return True

    def _read(self, running: _Running) -> None:
        """Reports new evaluations to the study, and prunes the trial."""
        for step, value in running.read_evaluations():
            if not math.isfinite(value):
                continue
            running.trial.report(value, step)
            can_prune = self._sweep.pruner is not None and not running.is_pruned and running.process.poll() is None
            if can_prune and running.trial.should_prune():
                running.is_pruned = True
                running.process.terminate()  # once, because a second signal would end it before it has saved

    def _complete(self, running: _Running) -> None:
        found = running.found(self._sweep)
        if found is None:
            reason = "the run was not evaluated. Add an evaluation set."
            if running.names:
                hint = suggest(self._sweep.metric, sorted(running.names))
                reason = f"no evaluation returns {self._sweep.metric}. {hint}"
            self._tell(running, FAILED, reason)
        elif not math.isfinite(found[1]):
            self._tell(running, FAILED, f"{self._sweep.metric} is not finite at step {found[0]}.")
        else:
            self._tell(running, COMPLETE)

    def _tell(self, running: _Running, state: str, reason: str | None = None) -> None:
        states = self._optuna.trial.TrialState
        found = running.found(self._sweep)
        if state == COMPLETE:
            assert found is not None
            self._study.tell(running.trial, found[1])
        elif state == PRUNED:
            self._study.tell(running.trial, state=states.PRUNED)
        else:
            running.trial.set_user_attr(_REASON, reason)
            self._study.tell(running.trial, state=states.FAIL)
        self._num_failures = self._num_failures + 1 if state == FAILED else 0
        self._report(replace(running.result(), state=state, reason=reason))

    def _write_results(self) -> SweepResult:
        """Writes results.json and results.csv, and returns the results so far."""
        sweep, study = self._sweep, self._study
        trials = tuple(_result_of(sweep, each) for each in study.get_trials(deepcopy=False))
        complete = [each for each in trials if each.state == COMPLETE and each.value is not None]
        best = None
        if complete:
            select = min if sweep.mode == "min" else max
            best = select(complete, key=lambda each: each.value or 0.0)
        result = SweepResult(
            trials=trials,
            best=best,
            command=None if best is None else command_of(sweep, best.values),
            importances=_importances(self._optuna, study),
            signal=self._signals.received,
            num_failures=self._num_failures if self._num_failures >= sweep.max_failures else 0,
        )
        write_results(sweep, result)
        return result


@dataclass
class _Running:
    """A trial with a running process."""

    trial: optuna.Trial
    sweep: SweepConfig
    values: Mapping[str, Any]
    slot: int
    is_pruned: bool = False
    evaluations: dict[int, float] = field(default_factory=dict)
    """The metric by step."""
    names: set[str] = field(default_factory=set)
    """The names of all evaluation values."""
    num_restarts: int = 0

    def start(self, environment: Mapping[str, str], signals: _Signals) -> None:
        """Starts the process, which resumes the trial if it has a checkpoint."""
        self.num_restarts = int(self.trial.user_attrs.get(_RESTARTS, 0))
        self.folder = self.sweep.folder / trial_name(self.trial.number)
        self._offset, self._reported = 0, {*self._stored_steps()}
        self._started = time.monotonic()
        logs = self.sweep.folder / LOGS
        logs.mkdir(exist_ok=True)
        self.log = logs / f"{self.folder.name}.txt"
        self._output: IO[bytes] = self.log.open("ab")
        self._log_start = self._output.tell()
        _wait_for_orphan(self.folder, signals)
        arguments = self.sweep.trial_overrides(self.values, f"{self.sweep.name}/{self.folder.name}")
        own = {name: value for name, value in os.environ.items() if name not in _LAUNCH_VARIABLES}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainwright", "train", str(self.sweep.run_file), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=own | dict(environment),
            start_new_session=True,  # Ctrl-C reaches only the sweep, which then ends the trials
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )

    def _stored_steps(self) -> list[int]:
        """Returns the steps that an earlier process of the sweep has reported; Optuna keeps the first value."""
        study = self.trial.study
        return list(study.get_trials(deepcopy=False)[self.trial.number].intermediate_values)

    def restart(self, environment: Mapping[str, str], signals: _Signals) -> None:
        """Starts the process again after a signal has ended it."""
        self.trial.set_user_attr(_RESTARTS, self.num_restarts + 1)
        self.start(environment, signals)

    def close(self) -> None:
        """Closes the file of the process's output."""
        self._output.close()

    def read_evaluations(self) -> Iterator[tuple[int, float]]:
        """Yields the new values of the metric with their steps; a resumed run writes some lines again."""
        path = self.folder / _METRICS_FILE
        with suppress(FileNotFoundError), path.open("rb") as file:
            if path.stat().st_size < self._offset:  # truncated to a checkpoint
                self._offset = 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                self._offset += len(line)
                with suppress(ValueError):
                    yield from self._read_line(json.loads(line))

    def _read_line(self, logs: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
        self.names |= {name for name in logs if "/" in name}
        if self.sweep.metric not in logs:
            return
        step, value = int(logs["step"]), logs[self.sweep.metric]
        self.evaluations[step] = math.nan if value is None else float(value)
        if step not in self._reported:
            self._reported.add(step)
            yield step, self.evaluations[step]

    def found(self, sweep: SweepConfig) -> tuple[int, float] | None:
        """Returns the step and the value of the evaluation that counts; None without one."""
        return choose(self.evaluations, sweep)

    def result(self) -> TrialResult:
        """Returns the state so far."""
        step, value = self.found(self.sweep) or (None, None)
        return TrialResult(
            number=self.trial.number,
            name=self.folder.name,
            state=RUNNING,
            values=self.values,
            value=value,
            step=step,
            seconds=time.monotonic() - self._started,
        )

    def last_lines(self) -> list[str]:
        """Returns the output of the process since its start."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]


class _Signals:
    """Records the first signal and forwards it to the trials as SIGTERM; a second signal kills them."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: int | None = None
        self._num_received = self._num_forwarded = 0

    def __enter__(self) -> _Signals:
        self._previous = {number: signal.signal(number, self._note) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self._num_received += 1

    def forward(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Forwards the signals that have arrived since the last call."""
        if self._num_received > self._num_forwarded:
            self._num_forwarded = self._num_received
            for process in processes:
                process.send_signal(signal.SIGTERM if self._num_received == 1 else signal.SIGKILL)


def _end_with_parent() -> None:
    """Called in a trial's process: the kernel sends it SIGTERM if the sweep is killed, so that it saves and ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_for_orphan(folder: Path, signals: _Signals) -> None:
    """Waits until the process of a killed sweep has released the folder of its trial, or a signal ends the sweep."""
    lock, has_logged = FolderLock(folder), False
    while signals.received is None:
        try:
            lock.reject_if_held()
        except CheckpointError as error:
            if not has_logged:
                logger.warning("Waiting for the process of an earlier start of this sweep: %s", error)
            has_logged = True
            time.sleep(_POLL_SECONDS)
        else:
            return


def trial_name(number: int) -> str:
    """Returns the name of a trial's folder."""
    return f"trial-{number:04d}"


def visible_devices(base: RunConfig) -> list[str]:
    """Returns the GPUs that trials may use, as CUDA_VISIBLE_DEVICES names them; none on the CPU."""
    if not base.runtime.device.startswith(("auto", "cuda")):
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [each.strip() for each in given.split(",") if each.strip() not in ("", "-1")]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=index", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return found.stdout.split() if found.returncode == 0 else []


def slot_environment(slot: int, num_slots: int, devices: Sequence[str]) -> dict[str, str]:
    """Returns the variables of a slot's processes: one device, and a share of the cores."""
    variables = {}
    if devices:
        variables["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_slots))
    return variables


def choose(evaluations: Mapping[int, float], sweep: SweepConfig) -> tuple[int, float] | None:
    """Returns the step and the value of the evaluation that counts for a trial; None without one."""
    if not evaluations:
        return None
    finite = {step: value for step, value in evaluations.items() if math.isfinite(value)}
    if sweep.value == "last" or not finite:
        return max(evaluations), evaluations[max(evaluations)]
    select = min if sweep.mode == "min" else max
    step = select(finite, key=finite.__getitem__)
    return step, finite[step]


def command_of(sweep: SweepConfig, values: Mapping[str, Any]) -> str:
    """Returns the command that trains the run with these values, under its own name."""
    overrides = sweep.trial_overrides(values, "")[:-1]
    return shlex.join(["trainwright", "train", str(sweep.run_file), *overrides])


def write_results(sweep: SweepConfig, result: SweepResult) -> None:
    """Writes results.json and results.csv into the folder of the sweep, each atomically."""
    content = {
        "name": sweep.name,
        "metric": sweep.metric,
        "mode": sweep.mode,
        "best": None if result.best is None else result.best.name,
        "command": result.command,
        "importances": dict(result.importances),
        "trials": [asdict(each) | {"values": thaw(each.values)} for each in result.trials],
    }
    with _replacing(sweep.folder / f"{RESULTS}.json") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    with _replacing(sweep.folder / f"{RESULTS}.csv") as file:
        table = csv.writer(file)
        table.writerow(["trial", "state", sweep.metric, "step", "seconds", *sweep.parameters, "reason"])
        for each in result.trials:
            values = [yaml_text.write_inline(thaw(each.values[name])) for name in sweep.parameters]
            table.writerow([each.name, each.state, each.value, each.step, each.seconds, *values, each.reason])


@contextmanager
def _replacing(path: Path) -> Iterator[IO[str]]:
    staging = path.with_name(f".{path.name}.writing")
    with staging.open("w", encoding="utf-8", newline="") as file:
        yield file
    staging.replace(path)


# Optuna's objects.


def _distributions(optuna: ModuleType, sweep: SweepConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in sweep.parameters.items():
        if not isinstance(each, Range):
            found[name] = optuna.distributions.CategoricalDistribution([_encode(choice) for choice in each])
        elif each.is_whole:
            step = {"step": each.step} if each.step is not None else {}
            found[name] = optuna.distributions.IntDistribution(each.min, each.max, log=each.scale == "log", **step)
        else:
            limits = (float(each.min), float(each.max))
            found[name] = optuna.distributions.FloatDistribution(*limits, log=each.scale == "log", step=each.step)
    return found


def _encode(choice: Any) -> Any:
    """Returns a choice as Optuna stores it: a list or a mapping as text."""
    plain = thaw(choice)
    return yaml_text.write_inline(plain) if isinstance(plain, list | dict) else plain


def _decode(sweep: SweepConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a trial in the order of the parameters."""
    found = {}
    for name, parameter in sweep.parameters.items():
        value = params[name]
        if not isinstance(parameter, Range):
            value = next(each for each in parameter if _encode(each) == value and type(_encode(each)) is type(value))
        found[name] = value
    return found


def _sampler(optuna: ModuleType, sweep: SweepConfig, number: int, *, num_parallel: int) -> Any:
    """Returns the sampler of one trial. The seed depends on the trial's number, also in a resumed sweep."""
    section = sweep.sampler
    # Hashed, because numpy's first numbers for adjacent seeds are similar.
    seed = int.from_bytes(hashlib.sha256(f"{section.seed}/{number}".encode()).digest()[:4], "little")
    if section.type != "tpe":
        return optuna.samplers.RandomSampler(seed=seed)
    startup = {} if section.startup_trials is None else {"n_startup_trials": section.startup_trials}
    # With several trials at once, values close to those of a running trial are avoided.
    return optuna.samplers.TPESampler(seed=seed, constant_liar=num_parallel > 1, **startup)


def _pruner(optuna: ModuleType, sweep: SweepConfig) -> Any:
    section, pruners = sweep.pruner, optuna.pruners
    if section is None:
        return pruners.NopPruner()
    if section.type == "successive_halving":
        return pruners.SuccessiveHalvingPruner(reduction_factor=section.reduction_factor)
    settings = {"n_startup_trials": section.startup_trials, "n_warmup_steps": section.warmup_steps}
    if section.type == "percentile":
        return pruners.PercentilePruner(section.percentile, **settings)
    return pruners.MedianPruner(**settings)


def _ask(study: optuna.Study, sweep: SweepConfig, distributions: dict[str, Any], number: int) -> optuna.Trial:
    has_waiting = any(each.state.name == "WAITING" for each in study.get_trials(deepcopy=False))
    if sweep.sampler.type == "grid" and not has_waiting:  # one was added before the sweep was killed
        point = sweep.grid_point(number)
        # For a range, Optuna stores floats.
        study.enqueue_trial({name: _encode(value) for name, value in point.items()})
    return study.ask(fixed_distributions=distributions)


def suggest_missing(trial: optuna.Trial, distributions: Mapping[str, Any]) -> None:
    """Chooses the values that a trial lacks, because the sweep was killed while it created the trial."""
    for name, each in distributions.items():
        if name in trial.params:
            continue
        if hasattr(each, "choices"):
            trial.suggest_categorical(name, each.choices)
        elif isinstance(each.low, int):
            trial.suggest_int(name, each.low, each.high, step=each.step, log=each.log)
        else:
            trial.suggest_float(name, each.low, each.high, step=each.step, log=each.log)


def _importances(optuna: ModuleType, study: optuna.Study) -> dict[str, float]:
    """Returns the importances by PED-ANOVA, which needs no further package; empty with too few trials."""
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len({each.value for each in complete}) < 4 or len(complete[0].params) < 2:
        return {}
    try:
        found = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    except (RuntimeError, ValueError):  # no parameter differs between the trials
        return {}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def _result_of(sweep: SweepConfig, trial: Any) -> TrialResult:
    states = {"COMPLETE": COMPLETE, "PRUNED": PRUNED, "FAIL": FAILED, "RUNNING": RUNNING, "WAITING": WAITING}
    found = choose(trial.intermediate_values, sweep)
    return TrialResult(
        number=trial.number,
        name=trial_name(trial.number),
        state=states[trial.state.name],
        values=_decode(sweep, trial.params) if trial.params else dict.fromkeys(sweep.parameters),
        value=trial.value if trial.value is not None else found[1] if found else None,
        step=found[0] if found else None,
        seconds=None if trial.duration is None else trial.duration.total_seconds(),
        reason=trial.user_attrs.get(_REASON),
    )


# Changes that would make the trials of a sweep incomparable.


def _reject_run(folder: Path) -> None:
    if (folder / _METRICS_FILE).exists() or (folder / "checkpoints").exists():
        raise ConfigError(f"name: {folder} is the folder of a run. Choose another name for the sweep with name=….")


def _definition(sweep: SweepConfig) -> dict[str, Any]:
    """Returns the settings that all trials of a sweep share."""
    own = {name: thaw(value) for name, value in sweep if name not in (*_FREE, *_SECTIONS)}
    parameters = {
        name: each.to_dict() if isinstance(each, Range) else thaw(each) for name, each in sweep.parameters.items()
    }
    own["pruner"] = None if sweep.pruner is None else sweep.pruner.to_dict()
    own |= {"parameters": parameters, "sampler": sweep.sampler.to_dict()}
    run: dict[str, Any] = json.loads(json.dumps(sweep.base.masked().to_dict(), default=str))
    return {**json.loads(json.dumps(own)), **{f"run.{name}": value for name, value in run.items()}}


_FREE = ("run", "overrides", "name", "trials", "parallel", "max_failures", "max_restarts")
_SECTIONS = ("sampler", "pruner", "parameters")


def _check_definition(study: optuna.Study, sweep: SweepConfig) -> None:
    """Stores the shared settings, or raises if those of an earlier start differ."""
    now, before = _definition(sweep), study.user_attrs.get(_DEFINITION)
    if before is None:
        study.set_user_attr(_DEFINITION, now)
        return
    changed = [name for name in now if now[name] != before.get(name)]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}: differs from the earlier start of this sweep, so its trials could not be compared. "
            f"Undo the change, choose another name, or start over with --fresh; {sweep.folder} is then kept as .old."
        )


def _describe_failure(code: int, running: _Running) -> str:
    lines = running.last_lines()
    errors = [line for line in lines if "error: " in line]
    if errors:
        return errors[-1].partition("error: ")[2]
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"{ended}{f': {lines[-1].strip()}' if lines else ''}"
