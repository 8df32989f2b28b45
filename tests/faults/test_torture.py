"""The cases of `make torture`: drawn from their seed, continued from the state file, written to the page."""

import random
import time

import pytest
from tests.faults import torture
from tests.faults.runs import config_of
from tests.faults.table import PAGE
from tests.faults.torture import BEGIN, END, KINDS, LostError, State, draw_settings, play, replace_section


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_valid_and_a_function_of_its_seed(kind, tmp_path):
    for seed in range(4):
        settings = draw_settings(kind, random.Random(seed))
        assert settings == draw_settings(kind, random.Random(seed))
        assert config_of(tmp_path / "run", *settings).trainer.max_steps == 20


def test_played_cases_are_not_played_again(tmp_path, monkeypatch):
    played = []

    def play_case(folder, kind, draw):
        folder.mkdir()
        played.append((folder.name, kind))
        if folder.name == "5-2":
            raise LostError("a bit differs")
        return ["SIGKILL"]

    monkeypatch.setattr(torture, "play_case", play_case)
    path = tmp_path / "torture.json"
    assert play(State(path), tmp_path, seed=5, numbers=range(1, 4), until=time.monotonic() + 60) == 1
    assert play(State(path), tmp_path, seed=5, numbers=range(1, 6), until=time.monotonic() + 60) == 0
    assert [name for name, _ in played] == ["5-1", "5-2", "5-3", "5-4", "5-5"]
    assert (tmp_path / "5-2").exists(), "what was lost is kept"
    assert State(path).survived() == 4
    assert play(State(path), tmp_path, seed=5, numbers=range(9), until=time.monotonic() - 1) == 0


def test_the_page_has_the_counts_and_the_seeds(tmp_path):
    state = State(tmp_path / "torture.json")
    state.note("1-1", "single", survived=True, record="")
    state.note("1-2", "single", survived=False, record="")
    state.note("2-1", "packed", survived=True, record="")
    page = replace_section(f"# Page\n{BEGIN}\nold\n{END}\nrest\n", state.page_section())
    assert page.startswith(f"# Page\n{BEGIN}\n")
    assert page.endswith(f"{END}\nrest\n")
    for line in ("| single | 2 | 1 |", "| packed | 1 | 1 |", "| all | 3 | 2 |", "Seeds: 1 (2 cases), 2 (1 cases)."):
        assert line in page
    assert "old" not in page
    assert BEGIN in PAGE.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_case_of_each_kind_survives(kind, tmp_path):
    torture.play_case(tmp_path, kind, random.Random(f"test {kind}"))
