"""Kills runs at random moments and damages their checkpoints, for as long as asked; says how many survived.

    make torture MINUTES=10 SEED=3

Each round draws a run (data, workers, accumulation, saving, an anomaly that is rolled back) and trains it once in
peace. Then it is killed, told to leave or let go at random moments, with damage to random files in between, and goes
on by the same command until it has ended. Lost is a run that ends otherwise than the one in peace, or not at all.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from tests.faults.damage import DAMAGE
from tests.faults.runs import differences, start, stderr_of, store_of, train, what_is_left

DATA = {
    "map": "data.train={type: tests.faults.parts:HurtPoints, hurt: HURT, num_batches: 30}",
    "iterable": "data.train={type: tests.faults.parts:HurtStream, hurt: HURT, num_batches: 30}",
}
COMMON = (
    *("model.type=tests.faults.parts:HurtNet", "data.eval.valid={type: tests.faults.parts:HurtPoints, num_batches: 3}"),
    *("data.shuffle_buffer=32", "hooks=[{type: ema, decay: 0.8}]", "trainer.max_steps=20"),
    *("checkpoint.every_steps=3", "log.every_steps=2", "evaluation.every_steps=5", "anomalies.non_finite=rollback"),
)
MOST_DEATHS = 6
# How a run may leave that was killed, told to leave before it listened, or after.
EXPECTED = {-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM}


class Lost(Exception):
    """A run did not end as it would have in peace."""


def draw_settings(draw):
    shuffles = draw.random() < 0.5
    hurt = "[]" if shuffles else draw.choice(("[]", "[4]", "[4, 11]"))  # shuffled, they would hurt many batches
    data = DATA[draw.choice(tuple(DATA))].replace("HURT", hurt)
    return (
        *(
            *COMMON,
            data,
            f"data.num_workers={draw.choice((0, 0, 2))}",
            f"trainer.micro_batch_size={draw.choice((8, 4))}",
        ),
        f"data.shuffle={str(shuffles).lower()}",
        f"checkpoint.asynchronous={draw.choice(('true', 'false'))}",
        f"checkpoint.keep_last={draw.choice((1, 2, 3))}",
    )


def damage_something(run, draw):
    """Damages files of some of the checkpoints; says what was done."""
    done = []
    if not (run / "checkpoints").is_dir():
        return done
    for step in store_of(run).steps()[-draw.randint(1, 2) :]:
        files = sorted(path for path in store_of(run).path(step).iterdir() if path.stat().st_size)
        if files:
            kind, file = draw.choice(tuple(DAMAGE)), draw.choice(files)
            DAMAGE[kind](file)
            done.append(f"step {step}: {file.name} {kind}")
    return done


def disturb(run, settings, draw, seconds):
    """Trains until the run has ended, with deaths and damage on the way; returns what was done to it."""
    done = []
    for _ in range(MOST_DEATHS):
        child = start(run, *settings)
        time.sleep(draw.uniform(0.0, 0.8 * seconds))
        number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        os.kill(child, number)  # one that has ended waits to be asked how
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        done.append(f"{signal.Signals(number).name} → {code}")
        if code == 0:
            return done
        if code not in EXPECTED:
            raise Lost(f"it left with {code}: {stderr_of(run)[-500:]}")
        if draw.random() < 0.3:
            done += damage_something(run, draw)
    if (code := train(run, *settings)) != 0:
        raise Lost(f"it left with {code}: {stderr_of(run)[-500:]}")
    return done


def play_round(folder, draw):
    """One run in peace and one that is disturbed; returns what was done to it, or raises `Lost`."""
    settings = draw_settings(draw)
    began = time.monotonic()
    if train(folder / "peace", *settings) != 0:
        raise Lost(f"even in peace: {stderr_of(folder / 'peace')[-500:]}")
    seconds = time.monotonic() - began
    done = disturb(folder / "war", settings, draw, seconds)
    found = differences(what_is_left(folder / "peace"), what_is_left(folder / "war"))
    if found:
        raise Lost(f"{'; '.join(found[:5])} after {', '.join(done)}")
    return done


def main():
    parser = argparse.ArgumentParser(description="Kills and damages runs at random; says how many survived.")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + 60.0 * arguments.minutes
    folder = Path(tempfile.mkdtemp(prefix="trainwright-torture-"))
    survived, lost, number = 0, 0, 0
    while time.monotonic() < end:
        number += 1
        name = f"{arguments.seed}-{number}"
        try:
            done = play_round(folder / name, random.Random(name))
        except Lost as loss:
            lost += 1
            print(f"round {name}: LOST: {loss} ({folder / name} is kept)", flush=True)
        else:
            survived += 1
            print(f"round {name}: survived {', '.join(done) or 'nothing'}", flush=True)
            shutil.rmtree(folder / name)
    if not lost:
        shutil.rmtree(folder)
    print(f"survived {survived}, lost {lost}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
