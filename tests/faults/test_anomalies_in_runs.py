"""A loss that is nan, infinite or ten thousand times too large, in real runs: what is done about it is exact.

`skip` ends as a run whose update was not applied, `rollback` as one whose data never had that batch, `raise` saves
nothing bad; what is written about an anomaly is enough to run that very step again.
"""

import copy
import itertools
import json
import math
import signal

import pytest
import torch
from tests.faults.hooks import die, kill_at
from tests.faults.runs import (
    config_of,
    differences,
    in_child,
    lines_of,
    log_of,
    stderr_of,
    store_of,
    train,
    what_is_left,
)
from tests.messages import mentions

from trainwright import Hook, RunConfig
from trainwright.api.run import run_experiment
from trainwright.build.components import Build

COMMON = (
    *("model.type=tests.faults.parts:HurtNet", "data.eval.valid={type: tests.faults.parts:HurtPoints, num_batches: 3}"),
    *("data.shuffle=false", "hooks=[{type: ema, decay: 0.8}]", "trainer.max_steps=9"),
    *("checkpoint.every_steps=3", "checkpoint.keep_last=null", "log.every_steps=1"),
)
# Few losses say little of their spread: only what is far off is to be a spike here.
SPIKES = ("anomalies.spike_window=8", "anomalies.spike_threshold=1000")
HARM = {"nan": ".nan", "infinite": ".inf", "10⁴ times too large": "1.0e+4"}
STREAM, POINTS = "HurtStream", "HurtPoints"


def every(*lists, but=()):
    """All combinations; those of `but` have each of their values in another one, and are `make test-slow`'s alone."""
    return [pytest.param(*each, marks=[pytest.mark.slow] if each in but else []) for each in itertools.product(*lists)]


def data(kind=POINTS, **arguments):
    told = "".join(f", {name}: {value}" for name, value in arguments.items())
    return f"data.train={{type: tests.faults.parts:{kind}{told}}}"


def policy(harm, act):
    if harm == "10⁴ times too large":
        return (f"anomalies.spike={act}", *SPIKES)
    return (f"anomalies.non_finite={act}",)


class Told(Hook):
    """Writes down what `on_anomaly` is told; with `then_die`, the run is killed when its next step begins."""

    def __init__(self, *, then_die=False):
        self.then_die, self.has_heard = then_die, False

    def on_anomaly(self, anomaly):
        self.has_heard = True
        with (self.trainer.folder / "told.txt").open("a", encoding="utf-8") as file:
            file.write(f"{anomaly.step} {anomaly.kind} {anomaly.policy}\n")

    def before_step(self):
        if self.has_heard and self.then_die:
            die()


def told(run):
    return (run / "told.txt").read_text("utf-8").splitlines()


def weights_of(run):
    """What must be equal although one run met an anomaly and the other did not."""
    left = what_is_left(run)
    return {
        **{key: left[key] for key in ("step", "model", "optimizers")},
        "averages": left["training"]["hooks"],
        "generators": left["training"]["generators"],
    }


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory):
    """The folder of a run with these settings that met no anomaly, made once for all cases that must end like it."""
    made = {}

    def folder(*settings, update_not_applied_at=None):
        case = (*settings, update_not_applied_at)
        if case not in made:
            place = tmp_path_factory.mktemp("reference") / "run"
            step = update_not_applied_at
            trainer = not_applied_at(step, config_of(place, *settings)) if step else None
            assert train(place, *settings, trainer=trainer) == 0
            made[case] = place
        return made[case]

    return folder


# raise


@pytest.mark.parametrize("harm", HARM)
def test_raise_names_the_step_and_saves_nothing_bad(harm, tmp_path, tried):
    tried("a nan, infinite or 10⁴ × loss: `raise`", cases=2)
    run = tmp_path / "run"
    settings = (*COMMON, data(hurt=[6], by=HARM[harm]), "checkpoint.every_steps=1")
    for attempt in (1, 2):  # the same command meets it again: nothing was lost, and nothing is hidden
        assert train(run, *settings, *policy(harm, "raise"), hooks=[Told()]) == 2
        assert store_of(run).steps() == [1, 2, 3, 4, 5]
        assert all(bool(torch.isfinite(each).all()) for each in store_of(run).read(5, "model").values())
        assert [line["step"] for line in lines_of(run)] == [1, 2, 3, 4, 5]
        assert len(told(run)) == attempt
    said = stderr_of(run)
    assert "at step 6" in said
    assert "The newest checkpoint is step-00000005." in said
    if harm == "10⁴ times too large":
        assert "robust standard deviations above" in said
    else:
        before = lines_of(run)[-1]["loss"]
        loss = {"nan": "nan", "infinite": "inf"}[harm]
        assert mentions(said, "6", "0", "5", loss, f"{before:.6g}")


def test_a_run_that_raised_goes_on_with_another_policy(tmp_path, tried):
    tried("a nan, infinite or 10⁴ × loss: `raise`", cases=1)
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = (*COMMON, data(hurt=[5]))
    assert train(run, *settings) == 2
    assert train(run, *settings, "anomalies.non_finite=skip") == 0
    assert train(whole, *settings, "anomalies.non_finite=skip") == 0
    assert not differences(what_is_left(whole), what_is_left(run))


# skip


def not_applied_at(step, config):
    """A trainer that puts weights, buffers and optimizer state back after the update of a step."""

    class NotApplied(Build(config).trainer_class()):
        def train_step(self, batch):
            if self.step + 1 != step:
                return super().train_step(batch)
            model = copy.deepcopy(self.model.state_dict())
            optimizer = copy.deepcopy(self.optimizers["main"].state_dict())
            result = super().train_step(batch)
            self.model.load_state_dict(model)
            self.optimizers["main"].load_state_dict(optimizer)
            return result

    return NotApplied


@pytest.mark.parametrize(
    ("harm", "micro_batch_size"), every(HARM, [8, 4], but=[("infinite", 4), ("10⁴ times too large", 8)])
)
def test_skip_equals_a_run_whose_update_is_not_applied(harm, micro_batch_size, tmp_path, reference_of, tried):
    tried("a nan, infinite or 10⁴ × loss: `skip`", cases=2)
    settings = (*COMMON, f"trainer.micro_batch_size={micro_batch_size}")
    reference = reference_of(*settings, data(), update_not_applied_at=6)
    hurt = (*settings, data(hurt=[6], by=HARM[harm]), *policy(harm, "skip"))
    run, killed = tmp_path / "run", tmp_path / "killed"
    assert train(run, *hurt, hooks=[Told()]) == 0
    assert train(killed, *hurt, hooks=[kill_at(4)]) == -signal.SIGKILL
    assert train(killed, *hurt, hooks=[kill_at(8)]) == -signal.SIGKILL
    assert train(killed, *hurt) == 0
    kind = "spike" if harm == "10⁴ times too large" else "non_finite"
    assert told(run) == [f"6 {kind} skip"]
    for each in (run, killed):
        assert not differences(weights_of(reference), weights_of(each))
        assert what_is_left(each)["training"]["data"] == what_is_left(reference)["training"]["data"]
        assert what_is_left(each)["training"]["anomalies"]["num_anomalies"] == 1
        lines, expected = lines_of(each), lines_of(reference)
        assert lines[:5] + lines[6:] == expected[:5] + expected[6:]
        assert lines[5]["step"] == 6
        assert lines[5]["loss"] is None or not math.isclose(lines[5]["loss"], expected[5]["loss"])  # never hidden
    assert "The update was skipped." in log_of(run)


def test_skip_at_the_first_and_at_the_last_step(tmp_path, tried):
    tried("a nan, infinite or 10⁴ × loss: `skip`", cases=2)
    for step in (1, 9):
        reference, run = tmp_path / f"reference-{step}", tmp_path / f"run-{step}"
        trainer = not_applied_at(step, config_of(reference, *COMMON))
        assert train(reference, *COMMON, data(), trainer=trainer) == 0
        assert train(run, *COMMON, data(hurt=[step]), *policy("nan", "skip")) == 0
        assert not differences(weights_of(reference), weights_of(run))


# rollback


# Where a run goes back to depends on these; one that does not go back ends alike with all of them.
BACK_TO = {
    "a checkpoint": (),
    "a copy in memory": ("anomalies.snapshot_every_steps=2",),
    "the start": ("checkpoint.every_steps=null",),
}


def assert_ends_without(run, reference, *, num_anomalies):
    assert not differences(weights_of(reference), weights_of(run))
    assert lines_of(run) == lines_of(reference)
    assert what_is_left(run)["training"]["anomalies"]["num_anomalies"] == num_anomalies


ROLLBACKS = every(
    ["nan", "10⁴ times too large"],
    BACK_TO,
    ["true", "false"],
    but=[
        *(("nan", "a checkpoint", "false"), ("nan", "a copy in memory", "true"), ("nan", "the start", "false")),
        *(("10⁴ times too large", back_to, "true") for back_to in ("a checkpoint", "the start")),
        ("10⁴ times too large", "a copy in memory", "false"),
    ],
)


@pytest.mark.parametrize(("harm", "back_to", "saving"), ROLLBACKS)
def test_rollback_equals_a_run_whose_data_lacks_the_batch(harm, back_to, saving, tmp_path, reference_of, tried):
    tried("a nan or 10⁴ × loss: `rollback` to a checkpoint, a copy in memory, the start", cases=2)
    # Log windows of two steps, so that going back lands in the midst of one.
    common = (*COMMON, "log.every_steps=2")
    reference = reference_of(*common, data(without=[6]))
    common += (f"checkpoint.asynchronous={saving}", *BACK_TO[back_to])
    settings = (*common, data(hurt=[6], by=HARM[harm]), *policy(harm, "rollback"))
    run = tmp_path / "run"
    assert train(run, *settings, hooks=[Told()]) == 0
    assert_ends_without(run, reference, num_anomalies=1)
    assert len(told(run)) == 1
    step = {"a checkpoint": 3, "a copy in memory": 4, "the start": 0}[back_to]
    assert mentions(log_of(run), "40", "47", step)
    assert what_is_left(run)["training"]["data"]["left_out"] == [[40, 48]]
    assert what_is_left(run)["training"]["data"]["position"] == 80

    killed = tmp_path / "killed"
    assert train(killed, *settings, hooks=[Told(then_die=True)]) == -signal.SIGKILL  # what was left out is not saved
    assert train(killed, *settings, hooks=[kill_at(8)]) == -signal.SIGKILL  # it is in the checkpoint of step 6
    assert train(killed, *settings) == 0
    assert_ends_without(killed, reference, num_anomalies=1)


# Worker processes take long to begin; what is left out does not depend on where the run goes back to.
WITH_WORKERS = [(back_to, kind, 2) for back_to in BACK_TO for kind in (POINTS, STREAM)]
WITH_WORKERS.remove(("a checkpoint", STREAM, 2))


@pytest.mark.parametrize(("back_to", "kind", "workers"), every(BACK_TO, [POINTS, STREAM], [0, 2], but=WITH_WORKERS))
def test_several_anomalies_are_all_left_out(back_to, kind, workers, tmp_path, reference_of, tried):
    tried("several anomalies in one run, two of them adjacent: `rollback`")
    hurt = [3, 6, 7]
    common = (*COMMON, f"data.num_workers={workers}")
    reference, run = reference_of(*common, data(kind, without=hurt)), tmp_path / "run"
    assert (
        train(run, *common, *BACK_TO[back_to], data(kind, hurt=hurt), *policy("nan", "rollback"), hooks=[Told()]) == 0
    )
    assert_ends_without(run, reference, num_anomalies=3)
    assert [line.split()[0] for line in told(run)] == ["3", "5", "5"]
    bundles = sorted(path.name for path in (run / "anomalies").iterdir())
    assert bundles == ["step-00000003", "step-00000005", "step-00000005-2"]


def test_skip_batches_leaves_out_the_batches_behind_it_too(tmp_path, tried):
    tried("a nan with `anomalies.skip_batches`")
    reference, run = tmp_path / "reference", tmp_path / "run"
    assert train(reference, *COMMON, data(without=[5, 6, 7])) == 0
    settings = (*COMMON, data(hurt=[5]), *policy("nan", "rollback"), "anomalies.skip_batches=3")
    assert train(run, *settings) == 0
    assert_ends_without(run, reference, num_anomalies=1)


@pytest.mark.parametrize("act", ["skip", "rollback"])
def test_too_many_anomalies_end_the_run(act, tmp_path, tried):
    tried("more anomalies than `anomalies.max_anomalies`, also across a kill -9", cases=2)
    settings = (*COMMON, data(hurt=[2, 5, 8]), *policy("nan", act), "anomalies.max_anomalies=2")
    run, killed = tmp_path / "run", tmp_path / "killed"
    assert train(run, *settings) == 2
    said = "It is anomaly 3 of this run, and anomalies.max_anomalies is 2."
    assert said in stderr_of(run)
    assert train(killed, *settings, hooks=[kill_at(5)]) == -signal.SIGKILL
    assert train(killed, *settings) == 2
    assert said in stderr_of(killed)
    for each in (run, killed):
        last = store_of(each).steps()[-1]
        assert all(bool(torch.isfinite(one).all()) for one in store_of(each).read(last, "model").values())


def test_a_damaged_checkpoint_is_not_gone_back_to(tmp_path, tried):
    tried("an anomaly while the newest checkpoint is damaged")
    reference, run = tmp_path / "reference", tmp_path / "run"

    class Damage(Hook):
        def after_step(self):
            if self.trainer.step == 5:
                self.trainer._finish_save()
                path = store_of(run).path(4) / "model.safetensors"
                path.write_bytes(path.read_bytes()[:-1])

    settings = (*COMMON, "checkpoint.every_steps=2")
    assert train(reference, *settings, data(without=[6])) == 0
    assert train(run, *settings, data(hurt=[6]), *policy("nan", "rollback"), hooks=[Damage()]) == 0
    assert "Not used for the rollback:" in log_of(run)
    assert "Rolled back to step 2." in log_of(run)
    assert_ends_without(run, reference, num_anomalies=1)


# the bundle


@pytest.mark.parametrize(
    ("harm", "act"),
    every(
        ["nan", "10⁴ times too large"],
        ["raise", "skip", "rollback"],
        but=[("nan", "skip"), *(("10⁴ times too large", act) for act in ("raise", "rollback"))],
    ),
)
def test_a_bundle_is_enough_to_run_the_very_step_again(harm, act, tmp_path, tried):
    tried("the step of an anomaly is reproduced from its bundle")
    run, again = tmp_path / "run", tmp_path / "again"
    settings = (*COMMON, data(hurt=[6], by=HARM[harm]), *policy(harm, act))
    assert train(run, *settings) == (2 if act == "raise" else 0)
    bundle = run / "anomalies" / "step-00000006"
    facts = json.loads((bundle / "anomaly.json").read_text("utf-8"))
    assert facts["positions"] == {"start": 40, "stop": 48, "samples": list(range(40, 48))}
    assert facts["newest_checkpoint"] == "step-00000003"
    assert [step for step, _ in facts["loss_history"]] == [1, 2, 3, 4, 5, 6]

    # Nothing but the bundle and the checkpoint that it names.
    checkpoint = store_of(run).folder / facts["newest_checkpoint"]
    (again / "checkpoints").mkdir(parents=True)
    checkpoint.rename(again / "checkpoints" / checkpoint.name)
    config = RunConfig.load(bundle / "config.yaml")
    setting = "anomalies.spike" if facts["kind"] == "spike" else "anomalies.non_finite"
    config = config.derive({"output_dir": str(tmp_path), "name": "again", setting: "raise"})
    assert in_child(lambda: run_experiment(config), again) == 2
    assert facts["message"] in stderr_of(again)
    repeated = json.loads((again / "anomalies" / "step-00000006" / "anomaly.json").read_text("utf-8"))
    for name in ("loss", "grad_norm", "last_good", "positions", "median", "deviation", "loss_history"):
        assert not differences(facts[name], repeated[name], name)
