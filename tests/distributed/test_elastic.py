"""A run goes on in whatever layout it is started in again, and is the run that it would have been.

Real ranks and the real loop, in forked children (tests/faults/two_ranks.py), so that a launch takes a second or two.
"""

import signal

import pytest
from tests.faults.hooks import At
from tests.faults.runs import SMALL, assert_same_end, differences, lines_of, log_of, store_of, what_is_left
from tests.faults.two_ranks import Fault, Run, send

from trainwright import Hook, load_checkpoint

# Without dropout and noise: what a rank draws depends on how many there are.
COMMON = (
    *SMALL,
    "log.every_steps=1",
    "data.train.noise=0.0",
    "model.dropout=0.0",
    "trainer.global_batch_size=8",
    "trainer.micro_batch_size=2",
    "hooks=[{type: ema, decay: 0.5}]",
)
LAYOUTS = {
    "one": (1, "{}"),
    "two replicas": (2, "{replicate: 2}"),
    "two shards": (2, "{fsdp: 2}"),
    "four shards": (4, "{fsdp: 4}"),
    "shards and replicas": (4, "{replicate: 2, fsdp: 2}"),
}
CHAINS = {
    "2 → 1 → 4": ("two shards", "one", "four shards"),
    "1 → 2 → 4": ("one", "two shards", "shards and replicas"),
    "replicate → data → replicate": ("two replicas", "two shards", "two replicas"),
    "4 → 2 → 1": ("shards and replicas", "two shards", "one"),
}


def leave_at(step):
    return lambda: At(step, lambda trainer: trainer.interrupt("enough for now"))


def train(folder, layout, *overrides, **options):
    num_ranks, mesh = LAYOUTS[layout]
    return Run(folder, *COMMON, f"runtime.mesh={mesh}", *overrides, num_ranks=num_ranks, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folders of runs in one layout from beginning to end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for name in ("one", "two shards"):
        assert set(train(folder / name, name).wait()) == {0}
    return folder


def assert_close(left, right):
    whole, other = lines_of(left), lines_of(right)
    assert [line["step"] for line in whole] == [line["step"] for line in other]
    for one, two in zip(whole, other, strict=True):
        assert one == pytest.approx(two, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_goes_on_in_any_other_layout(chain, tmp_path, undisturbed):
    folder = tmp_path / "run"
    for layout, step in zip(CHAINS[chain], (1, 3, None), strict=True):
        hooks = () if step is None else (leave_at(step),)
        codes = train(folder, layout, hooks=hooks).wait()
        assert len(set(codes)) == 1, codes
        assert (codes[0] == 0) == (step is None)
    assert_close(undisturbed / "one", folder)
    left, right = what_is_left(undisturbed / "one"), what_is_left(folder)
    assert left["training"]["data"] == right["training"]["data"]
    for name, weight in left["model"].items():
        assert weight.tolist() == pytest.approx(right["model"][name], abs=1e-6), name
    averages = (each["training"]["hooks"]["EMA"]["averages"] for each in (left, right))
    for one, two in zip(*(each.values() for each in averages), strict=True):
        assert (one - two).abs().max() < 1e-6


def test_a_split_run_that_is_interrupted_ends_with_the_same_bits(tmp_path, undisturbed):
    folder = tmp_path / "two shards"
    assert 0 not in train(folder, "two shards", hooks=(leave_at(3),)).wait()
    assert train(folder, "two shards").wait() == [0, 0]
    assert_same_end(undisturbed / "two shards", folder)


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        *(("commit", 0), ("after_step", 1), ("after_save", 1)),
        pytest.param("evaluation", 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_a_split_run_that_is_killed_loses_nothing(phase, victim, tmp_path, undisturbed):
    folder = tmp_path / "two shards"
    fault = Fault(phase, send(signal.SIGKILL), ranks=(victim,), step=4)
    codes = train(folder, "two shards", faults=[fault]).wait()
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] != 0
    assert train(folder, "two shards").wait() == [0, 0]
    assert_same_end(undisturbed / "two shards", folder)


class HurtOnce(Hook):
    """Makes the weights nan before an update, on all ranks: the way back must bring every part of them."""

    is_done = False

    def before_step(self):
        if self.trainer.step == 4 and not self.is_done:
            self.is_done = True
            for parameter in self.trainer.model.parameters():
                parameter.data.fill_(float("nan"))


def test_a_split_run_goes_back_to_its_parts_in_memory(tmp_path):
    """As to the checkpoint of the same step, which is read from the disk."""
    settings = ("anomalies.non_finite=rollback", "checkpoint.asynchronous=false")
    ends = []
    for name, more in {"checkpoint": (), "memory": ("anomalies.snapshot_every_steps=1",)}.items():
        assert train(tmp_path / name, "two shards", *settings, *more, hooks=(HurtOnce,)).wait() == [0, 0]
        ends.append(what_is_left(tmp_path / name))
        assert ends[-1]["training"]["anomalies"]["num_anomalies"] == 1
        assert "Rolled back to step 4" in log_of(tmp_path / name)
    assert differences(*ends) == []


def test_a_split_checkpoint_is_read_by_everybody(undisturbed):
    one, split = (load_checkpoint(undisturbed / name).state_dict() for name in ("one", "two shards"))
    for name, weight in one.items():
        assert (weight - split[name]).abs().max() < 1e-6
    assert store_of(undisturbed / "two shards").path(6).joinpath("model.rank-00001.safetensors").exists()
