"""Runs a built trial through the real loop: one update, one batch of each evaluation set, one checkpoint.

    build → data → step (watched) → evaluation (watched) → checkpoint → trace

A failure skips only the stages that need what failed. Nothing outside the temporary folder is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainwright.build import sets_of
from trainwright.checking import forwards, places
from trainwright.checking.assembly import Assembly, assemble, is_found_by_the_run, num_steps
from trainwright.checking.batches import check_batch
from trainwright.checking.explain import Case
from trainwright.checking.findings import AlreadyReported, Finding, Severity
from trainwright.checking.report import Report
from trainwright.checking.trace import check_trace
from trainwright.config import known_data_ranks
from trainwright.data.loader import TrainData
from trainwright.errors import DataError, TrainwrightError
from trainwright.loaders import describe_size
from trainwright.loop.evaluation import evaluate_sets
from trainwright.loop.hook import Hooks
from trainwright.loop.host_uses import Sighting, Watch, watching
from trainwright.loop.outputs import CriterionError
from trainwright.loop.saving import restore_checkpoint
from trainwright.loop.trainer import Trainer

_GRAPH_MODES = ("compile", "graph")


def try_out(case: Case, folder: Path, report: Report) -> None:
    """Builds the run in `folder` and tries every stage; findings and facts go into the case and the report."""
    assembly = assemble(case, folder)
    unusable = _check_data(assembly, case)
    trainer = assembly.trainer
    if trainer is None:
        report.skipped += ["a training step", "evaluation", "a checkpoint", "graph safety"]
        return
    _state_facts(trainer, assembly, case, report)
    forwards.check_ownership(trainer, case)
    trial = Trial(trainer, case, report)
    if "train" in unusable:
        report.skipped += ["a training step", "graph safety"]
    else:
        trial.train()
    trial.evaluate(without=unusable)
    trial.save_and_restore()
    trial.report_graph_safety()


def _check_data(assembly: Assembly, case: Case) -> set[str]:
    """Tries the first batch of every set; returns the names of those that cannot be used."""
    parts = assembly.parts
    plan, collator, train_data = assembly.plan, parts.get("collator"), parts.get("train_data")
    if collator is None or train_data is None:
        return {"train"}
    is_cut = plan is not None and (plan.accumulation > 1 or is_found_by_the_run(case.config))
    check = partial(
        check_batch, collator=collator, batch_size=assembly.config.trainer.global_batch_size or 1, case=case
    )
    unusable = set() if check(train_data, label="data.train", is_cut=is_cut) else {"train"}
    for name, dataset in (parts.get("eval_data") or {}).items():
        if not check(dataset, label=f"data.eval.{name}", is_cut=False):
            unusable.add(name)
    return unusable


def _state_facts(trainer: Trainer, assembly: Assembly, case: Case, report: Report) -> None:
    """Writes what the run is into the report, and notes a batch that is larger than the data."""
    plan, data = assembly.plan, trainer.train_data
    assert data is not None
    parameters = list(trainer.model.parameters())
    total, trained = (sum(one.numel() for one in each) for each in (parameters, filter(_is_trained, parameters)))
    trains = "" if trained == total else f", {trained:,} of them trained"
    sets = [f"{name} {describe_size(each).removesuffix(' samples')}" for name, each in sets_of(trainer).items()]
    report.facts.append(f"{type(trainer.model).__name__} with {total:,} parameters{trains}")
    report.facts.append(", ".join([describe_size(data), *sets]))
    if plan is None:
        return
    ranks = known_data_ranks(case.config)
    micro, accumulation = f"{plan.micro_batch_size}", f" × accumulation {plan.accumulation}"
    if is_found_by_the_run(case.config):
        micro, accumulation = f"of at most {plan.micro_batch_size}, as the memory allows", ""
    product = " × ".join([f"micro-batch {micro}", *([f"{ranks} ranks"] if ranks > 1 else [])]) + accumulation
    report.facts.append(f"{num_steps(case.config, plan, data):,} steps of {plan.global_batch_size} samples ({product})")
    if isinstance(data, TrainData) and plan.global_batch_size > len(data):  # the trial's own batch may be smaller
        case.note(_too_large(plan.global_batch_size, len(data)), label="trainer.global_batch_size")


def _too_large(batch_size: int, num_samples: int) -> DataError:
    """What the run's own TrainData would say."""
    return DataError(
        f"trainer.global_batch_size: {batch_size} is more than the {num_samples} samples of data.train, "
        f"so that one batch would hold samples twice. Use at most {num_samples}."
    )


def _is_trained(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad


class Trial:
    """One trainer under observation: its methods are wrapped on the object, its classes stay as they are."""

    def __init__(self, trainer: Trainer, case: Case, report: Report) -> None:
        self.trainer = trainer
        self.case = case
        self.report = report
        self.doing = "step"
        """What the loop is at, to place an error that names no line."""
        self.first_batch: Any = None
        self.model_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.without_gradient: list[str] = []
        self.has_stepped = False
        self.can_save = True
        on_values = forwards.IdCheck(trainer, case)
        self.watch = Watch(case.users, on_values=on_values)
        self.eval_watch = Watch(case.users, in_forward_only=True, on_values=on_values)
        for name in ("next_train_inputs", "run_forward", "train_step", "eval_step", "save"):
            setattr(trainer, name, partial(getattr(self, f"_{name}"), getattr(trainer, name)))
        self._model_hook = trainer.model.register_forward_pre_hook(self._note_model_inputs, with_kwargs=True)

    # what the loop calls

    def _next_train_inputs(self, inner: Callable[..., Any], iterator: Iterator[Any]) -> Any:
        self.doing = "data"
        return inner(iterator)

    def _run_forward(self, inner: Callable[..., Any], batch: Any) -> Any:
        self.first_batch = batch if self.first_batch is None else self.first_batch
        forwards.check_signature(self.trainer, batch, self.case)
        return inner(batch)

    def _train_step(self, inner: Callable[..., Any], batch: Any) -> Any:
        self.doing = "step"
        with watching(self.watch):
            result = inner(batch)
        self.doing, self.has_stepped = "after the step", True
        self.without_gradient = forwards.without_gradient(self.trainer.model)
        self.trainer.stop("the check needs one step")
        forwards.check_loss(result[0], forwards.place_of_loss(self.trainer, self.case), self.case)
        return result

    def _eval_step(self, inner: Callable[..., Any], batch: Any) -> Any:
        self.doing = "evaluation"
        with watching(self.eval_watch):
            return inner(batch)

    def _save(self, inner: Callable[..., Any]) -> Any:
        before, self.doing, self.can_save = self.doing, "checkpoint", False
        path = inner()
        self.doing, self.can_save = before, True
        return path

    def _note_model_inputs(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.model_inputs is None:
            self.model_inputs = args, dict(kwargs)

    # the stages

    def train(self) -> None:
        """Runs the loop for one update, with its evaluation, its hooks and its checkpoint."""
        try:
            self.trainer.train()
        except (Exception, SystemExit) as error:
            self._note(error)
        if self.has_stepped:
            self.report.checked.append("a training step")
            forwards.check_gradients(self.trainer, self.without_gradient, self.case)
        else:
            self.report.skipped += ["gradients", "the graph's trace"]

    def evaluate(self, *, without: set[str]) -> None:
        """Evaluates what the loop did not reach, set by set and without hooks, so that one failure hides no other."""
        trainer, sets = self.trainer, sets_of(self.trainer)
        done = {name.partition("/")[0] for name in trainer.eval_logs}
        moments, trainer.moments = trainer.moments, Hooks([])
        logs: dict[str, float] = {}
        for name, data in sets.items():
            if name in done | without:
                continue
            self.doing = "evaluation"
            try:
                with trainer.storage:
                    logs.update(evaluate_sets(trainer, {name: data}))
                done.add(name)
            except (Exception, SystemExit) as error:
                self._note(error, label=f"data.eval.{name}")
        trainer.moments = moments
        if logs and set(trainer.eval_data) <= done and not trainer.eval_logs:
            try:
                trainer.best.note(trainer.step, logs)
            except Exception as error:
                self._note(error)
        if done:
            self.report.checked.append(f"evaluation of {', '.join(name for name in sets if name in done)}")

    def save_and_restore(self) -> None:
        """Writes a checkpoint where the loop did not, reads it back, and compares bit for bit."""
        trainer = self.trainer
        if not self.can_save:
            return  # it failed, and is noted
        try:
            if not trainer.surroundings.store.steps():
                trainer.checkpoints.save(metrics={})
                trainer.checkpoints.settle(must_succeed=True)
        except (Exception, SystemExit) as error:
            self.case.note(error, label="checkpoint")
            return
        advice = "Check state_dict and load_state_dict of the model and the optimizer: a resumed run would diverge."
        place = self.case.setting("trainer.optimizer")
        try:
            different = _differences(trainer)
        except TrainwrightError as error:
            self.case.note(error, label="trainer.optimizer")
        except Exception as error:
            found = places.of_traceback(error, self.case.users) or place
            problem = f"a checkpoint cannot be read back: {type(error).__name__}: {error}."
            self.case.add("error", problem, advice, found)
        else:
            if different:
                problem = f"a checkpoint reads back different: {', '.join(different[:6])}."
                self.case.add("error", problem, advice, place)
            else:
                self.report.checked.append("a checkpoint, read back bit-equal")

    def report_graph_safety(self) -> None:
        """Notes what would break a compiled graph: an error where the run's mode is one, else a remark."""
        mode = self.case.config.runtime.mode
        severity: Severity = "error" if mode in _GRAPH_MODES else "remark"
        seen = {**self.eval_watch.sightings, **self.watch.sightings}.values()
        sightings = sorted(seen, key=lambda each: (each.place.file, each.place.line, each.place.columns or ()))
        for sighting in sightings:
            self.case.findings.add(_finding_of(sighting, severity, mode))
        if not self.has_stepped or self.model_inputs is None:
            return
        self._model_hook.remove()
        args, kwargs = self.model_inputs
        forward: Callable[..., Any] = self.trainer.model
        is_trainers = forwards.loss_function(self.trainer, self.case) is type(self.trainer).forward
        if is_trainers and isinstance(self.first_batch, Mapping):
            forward, args, kwargs = self.trainer.forward, (), dict(self.first_batch)
        check_trace(
            forward,
            args,
            kwargs,
            users=self.case.users,
            severity=severity,
            noted=[str(each.place) for each in sightings if each.is_direct],
            fallback=self.case.setting("model.type", ["model"]),
            findings=self.case.findings,
        )
        self.report.checked.append("graph safety")

    def _note(self, error: BaseException, *, label: str | None = None) -> None:
        labels = {"data": "data.train", "evaluation": "evaluation", "checkpoint": "checkpoint"}
        label = label or labels.get(self.doing, "trainer.type")
        in_forward = self.doing in ("step", "evaluation") and not isinstance(error, AlreadyReported)
        place = forwards.place_of_loss(self.trainer, self.case) if in_forward else None
        if isinstance(error, CriterionError):
            place = places.of_attribute(type(self.trainer.model), "criterion", self.case.users) or place
        self.case.note(error, label=label, place=place)


def _finding_of(sighting: Sighting, severity: Severity, mode: str) -> Finding:
    use = sighting.use
    if not sighting.is_direct:
        # Library code may do otherwise when it is compiled: the trace has the last word.
        return Finding(
            "remark", f"library code called here breaks a compiled graph: {use.what}.", use.fix, sighting.place
        )
    effect = f"runtime.mode {mode} cannot capture this" if mode in _GRAPH_MODES else "this would break a compiled graph"
    return Finding(severity, f"{effect}: {use.what}.", use.fix, sighting.place)


def _differences(trainer: Trainer) -> list[str]:
    """Reads the newest checkpoint into the emptied trainer; returns what differs from before."""
    before = _snapshot(trainer)
    _forget(trainer)
    restore_checkpoint(trainer, trainer.surroundings.store.steps()[-1])
    after = _snapshot(trainer)
    return [name for name in {**before, **after} if not _same(before.get(name), after.get(name))]


def _snapshot(trainer: Trainer) -> dict[str, Any]:
    """Copies every value of the model and the optimizers, by name."""
    found: dict[str, Any] = {f"model {name}": value for name, value in trainer.model.state_dict().items()}
    for name, optimizer in trainer.optimizers.items():
        found.update(_flat(f"optimizer {name}", optimizer.state_dict()))
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _flat(f"{name}.{number}", item)
    else:
        yield name, value


def _forget(trainer: Trainer) -> None:
    """Overwrites the weights and drops the optimizers' state: what is there afterwards was read."""
    with torch.no_grad():
        for value in trainer.model.state_dict().values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    for optimizer in trainer.optimizers.values():
        optimizer.state.clear()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
    return bool(one == other) and type(one) is type(other)
