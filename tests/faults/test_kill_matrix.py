"""kill -9 at random moments, twice in a row, whatever the data, the workers, the accumulation and the saving are."""

import itertools
import random
import signal

import pytest
from tests.faults.hooks import kill_at
from tests.faults.runs import assert_same_end, train

DATA = {
    "map": (),
    "iterable": ("data.train={type: tests.project.parts:PointStream, size: 90, noise: 0.1}", "data.shuffle_buffer=20"),
}
COMMON = (
    *("trainer.max_steps=9", "trainer.global_batch_size=6", "checkpoint.every_steps=2"),
    *("hooks=[{type: ema, decay: 0.8}]", "evaluation.every_steps=4"),
)
# Any value of a case is in one of these; the other combinations are `make test-slow`'s.
PAIRED = [("map", 0, 1), ("iterable", 0, 3), ("iterable", 2, 1)]
MATRIX = [
    pytest.param(*case, marks=[] if case in PAIRED else [pytest.mark.slow])
    for case in itertools.product(DATA, (0, 2), (1, 3))
]


@pytest.mark.parametrize(("data", "workers", "accumulation"), MATRIX)
def test_a_run_that_is_killed_twice_ends_as_if_nothing_had_happened(data, workers, accumulation, tmp_path, tried):
    tried("kill -9 at a random step, twice: {map, iterable} × {0, 2 workers} × {accumulation 1, 3} × {sync, async}", 2)
    settings = (*COMMON, *DATA[data], f"data.num_workers={workers}", f"trainer.micro_batch_size={6 // accumulation}")
    whole = tmp_path / "whole"
    assert train(whole, *settings) == 0
    for saving in ("true", "false"):
        # Seeded by the case's name: a failure comes again.
        draw = random.Random(f"{data} {workers} {accumulation} {saving}")
        first, second = sorted(draw.sample(range(2, 10), 2))
        events = [draw.choice(("before_step", "after_step")) for _ in range(2)]
        run = tmp_path / f"asynchronous-{saving}"
        ways = (*settings, f"checkpoint.asynchronous={saving}")
        for step, event in zip((first, second), events, strict=True):
            assert train(run, *ways, hooks=[kill_at(step, event=event)]) == -signal.SIGKILL, (step, event)
        assert train(run, *ways) == 0
        assert_same_end(whole, run)
