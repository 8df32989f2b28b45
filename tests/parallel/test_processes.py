"""Joining a run: what a launcher's variables may say, and what ranks that do not fit together are told."""

import os
import socket
import time

import pytest
import torch.distributed as dist
from tests.faults.runs import fork
from tests.messages import mentions, raises

from trainwright.config import RunConfig
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.parallel import processes
from trainwright.parallel.processes import facts_of, note_failure

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in (*VARIABLES, "TORCHELASTIC_USE_AGENT_STORE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_a_process_is_alone():
    assert processes.rank_and_size() == (0, 1)
    assert processes.local_rank() == 0
    assert processes.join({}, collectives="gloo", device_type="cpu").size == 1


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"WORLD_SIZE": "4"},
            ("trainwright train --nproc N", "WORLD_SIZE", "4"),
        ),
        ({"RANK": "1"}, ("1", "WORLD_SIZE")),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ("4", "WORLD_SIZE", "0", "3")),
        ({"RANK": "x", "WORLD_SIZE": "4"}, ("x", "0")),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ("0", "WORLD_SIZE", "1")),
        ({"SLURM_STEP_NUM_TASKS": "8"}, ("8",)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("WORLD_SIZE", "MASTER_ADDR")),
    ],
)
def test_variables_that_contradict_each_other_are_rejected_by_name(monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with raises(ConfigError, *words):
        processes.join({}, collectives="gloo", device_type="cpu")


def test_a_rank_without_a_number_on_its_machine_would_take_another_ones_device(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with raises(ConfigError, "WORLD_SIZE", "2", "LOCAL_RANK"):
        processes.local_rank()


class Group:
    """Ranks that nobody has launched: forked, with torchrun's variables set by hand."""

    def __init__(self, folder, port=None):
        folder.mkdir(exist_ok=True)
        self.folder, self.children, self.port = folder, {}, port or free_port()

    def start(self, rank, size, act, **variables):
        def live():
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
            os.environ.update(LOCAL_RANK=str(rank), **variables)
            try:
                act(rank)
                said = "fine"
            except TrainwrightError as error:
                said = f"{'' if note_failure(error) else '(not shown) '}{error}"
            (self.folder / f"{rank}.said").write_text(said)

        self.children[rank] = fork(live, self.folder / f"rank-{rank}")

    def said(self):
        """Waits for all ranks, and returns what each said."""
        until, waiting = time.monotonic() + 30, dict(self.children)
        while waiting:
            assert time.monotonic() < until, f"ranks {sorted(waiting)} are still there"
            for rank, child in list(waiting.items()):
                if os.waitpid(child, os.WNOHANG)[0]:
                    del waiting[rank]
            time.sleep(0.02)
        return [(self.folder / f"{rank}.said").read_text() for rank in sorted(self.children)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_config(folder, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").touch()
    return RunConfig.from_dict({"model": {"type": "parts.py:Net"}, **settings}, project_dir=folder)


def facts_here(folder, **settings):
    return facts_of(run_config(folder, **settings))


def join(facts, size=2):
    processes.join({"replicate": size}, collectives="gloo", device_type="cpu", facts=facts)
    processes.leave()


def test_ranks_of_the_same_run_join_as_often_as_they_like(tmp_path):
    group, facts = Group(tmp_path / "group"), facts_here(tmp_path / "project")

    def act(rank):
        for _ in range(3):
            ranks = processes.join({"replicate": 3}, collectives="gloo", device_type="cpu", facts=facts)
            assert ranks.gather(rank) == [0, 1, 2]
            ranks.part()
            processes.leave()

    for rank in range(3):
        group.start(rank, 3, act)
    assert group.said() == ["fine"] * 3


def test_ranks_with_other_settings_are_rejected_by_name_and_one_reports_it(tmp_path):
    group, config = Group(tmp_path / "group"), run_config(tmp_path / "project", trainer={"max_steps": 5}, seed=3)
    same, other = facts_of(config), facts_of(config.derive({"trainer.max_steps": 6}))
    for rank, facts in enumerate((same, same, other)):
        group.start(rank, 3, lambda _, facts=facts: join(facts, 3))
    said = group.said()
    error = (
        f"Rank 2 (on {socket.gethostname()}) has other settings than rank 0: trainer.max_steps is 6, on rank 0 5. "
        "Start every rank with the same file and the same overrides."
    )
    assert said == [error, f"(not shown) {error}", f"(not shown) {error}"]


def test_ranks_with_other_code_are_rejected_with_the_file(tmp_path):
    group, configs = Group(tmp_path / "group"), [run_config(tmp_path / name) for name in ("here", "there")]
    (tmp_path / "there" / "parts.py").write_text("class Net: pass")
    (tmp_path / "here" / "hooks").mkdir()
    (tmp_path / "here" / "hooks" / "mine.py").touch()
    for rank, facts in enumerate(map(facts_of, configs)):
        group.start(rank, 2, lambda _, facts=facts: join(facts))
    for error in group.said():
        assert "Rank 1" in error
        assert mentions(error, "0", "hooks/mine.py", "parts.py")


def test_a_rank_that_fails_before_it_joins_takes_the_others_with_it(tmp_path):
    group, facts = Group(tmp_path / "group"), facts_here(tmp_path / "project")

    def fail(rank):
        raise ConfigError("runtime.device: 'cuda', but torch sees no GPU here.")

    group.start(0, 2, lambda rank: join(facts))
    group.start(1, 2, fail)
    assert group.said() == [
        "(not shown) Rank 1 failed at start-up: runtime.device: 'cuda', but torch sees no GPU here.",
        "runtime.device: 'cuda', but torch sees no GPU here.",
    ]


def test_a_rank_that_dies_while_it_is_compared_is_named(tmp_path, monkeypatch):
    group, facts = Group(tmp_path / "group"), facts_here(tmp_path / "project")
    monkeypatch.setattr("trainwright.parallel.processes.ANSWER_SECONDS", 1.0)

    def die(rank):
        monkeypatch.setattr(processes, "reject_other_runs", lambda *_: os._exit(0))
        (tmp_path / "group" / "1.said").write_text("dead")
        join(facts)

    group.start(0, 2, lambda rank: join(facts))
    group.start(1, 2, die)
    assert group.said()[0].startswith("Rank 1 arrived, but did not answer within 1 s: it has died at start-up.")


def test_a_second_run_on_the_port_of_another_is_rejected_and_the_first_continues(tmp_path):
    first, facts = Group(tmp_path / "first"), facts_here(tmp_path / "project")
    second = Group(tmp_path / "second", first.port)

    def stay(rank):  # and fails at the end, which must still be heard
        ranks = processes.join({"replicate": 2}, collectives="gloo", device_type="cpu", facts=facts)
        (tmp_path / f"{rank}.joined").touch()
        wait_for(tmp_path / "end")
        assert ranks.gather(rank) == [0, 1]
        if rank == 0:
            note_failure(ConfigError("the first run's own"))
        ranks.part()
        processes.leave()
        raise ConfigError("the first run's own")

    for rank in range(2):
        first.start(rank, 2, stay)
    for rank in range(2):
        wait_for(tmp_path / f"{rank}.joined")
    for rank in range(2):
        second.start(rank, 2, lambda rank: join(facts))
    taken, twin = second.said()
    assert mentions(taken, "MASTER_PORT", first.port)
    assert not twin.startswith("(not shown)")
    assert mentions(twin, "1", "127.0.0.1", first.port)
    (tmp_path / "end").touch()
    assert first.said()[0] == "the first run's own"


def wait_for(path):
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} did not come"
        time.sleep(0.02)


def test_leaving_without_a_group_is_nothing():
    assert not dist.is_initialized()
    processes.leave()
