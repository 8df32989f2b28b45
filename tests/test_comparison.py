"""docs/comparison.md and the table of the README: equal values, links that exist, and values as they were measured."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "comparison.md"
LINK = re.compile(r" ?\(?\[[^\]]+\]\(([^)#:]+)(?:#[^)]*)?\)\)?")


def table_of(page):
    """The rows of the table of frameworks: what is compared → framework → value."""
    lines = page.read_text("utf-8").partition("| | trainwright |")[2].splitlines()
    frameworks = [cell.strip() for cell in f"trainwright |{lines[0]}".strip("|").split("|")]
    rows = {}
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        name, *values = (cell.strip() for cell in LINK.sub("", line).strip("|").split("|"))
        rows[name] = dict(zip(frameworks, values, strict=True))
    return rows


def measured(name):
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def test_the_readme_has_rows_of_the_page():
    short, whole = table_of(README), table_of(PAGE)
    assert len(short) >= 7
    assert short == {name: whole[name] for name in short}


@pytest.mark.parametrize("page", [README, PAGE], ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page):
    targets = LINK.findall(page.read_text("utf-8"))
    assert targets
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_resumed_runs_are_as_measured():
    results, rows = measured("peers_resume")["results"], table_of(PAGE)
    variants = {
        "trainwright": ["trainwright"],
        "HF Trainer": ["Hugging Face Trainer"],
        "Lightning": ["Lightning", "Lightning, StatefulDataLoader"],
        "Accelerate": ["Accelerate, skip_first_batches", "Accelerate, use_stateful_dataloader"],
    }

    def best(framework, kinds, key):
        return any(all(results[name][kind][key] for kind in kinds) for name in variants[framework])

    plain = rows["`kill -9`, then the same program: equal bits"]
    noisy = rows["`kill -9` with random noise in the dataset: equal bits"]
    for framework in variants:
        assert plain[framework].startswith("yes") == best(framework, ["shuffled", "workers"], "equal_bits")
        assert (noisy[framework] == "yes") == best(framework, ["noise"], "equal_bits")
    assert plain["HF Trainer"] == "yes, without random data"
    order = rows["`kill -9`: the same samples in the same order"]
    assert all((order[name] != "no") == best(name, ["shuffled", "workers"], "equal_batches") for name in variants)
    assert not results["Lightning"]["shuffled"]["equal_batches"]  # hence "with torchdata"


def test_damaged_checkpoints_are_as_measured():
    results = measured("peers_resume")["results"]
    for name, found in results.items():
        outcomes = found["damaged"].values()
        if name == "trainwright":
            assert all(outcome["fell_back"] and outcome["equal_bits"] for outcome in outcomes)
        else:
            assert any(outcome["finished"] and not outcome["as_intact"] for outcome in outcomes), name
            assert not any(outcome["finished"] and outcome["fell_back"] for outcome in outcomes), name
            assert all(outcome["finished"] for outcome in outcomes) == (name != "Hugging Face Trainer")


def test_updates_graph_breaks_and_evaluations_are_as_measured():
    checks = measured("peers_checks")
    updates = {name: found.get("difference", "error") for name, found in checks["update"].items()}
    assert updates.pop("trainwright, a loss that is a mean over labels") == "error"
    independent = {name for name, difference in updates.items() if difference < 1e-5}
    assert independent == {"trainwright, a loss that is a `Mean`", "Hugging Face Trainer, `compute_loss_func`"}
    assert {name for name, found in checks["graph_break"].items() if found["named"]} == {"trainwright"}
    means = {name: found["mean"] for name, found in checks["evaluation"].items()}
    assert {name for name, mean in means.items() if mean != pytest.approx(6.2)} == {"Lightning"}


def test_the_program_of_the_page_still_resumes_our_run_with_equal_bits(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import peers_resume

    (tmp_path / "whole" / "run").mkdir(parents=True)
    train, newest = peers_resume.CONTENDERS["trainwright"]
    assert peers_resume.run(train, tmp_path / "whole" / "run", "noise") == 0
    outcome = peers_resume.killed_and_resumed(train, tmp_path, "noise", tmp_path / "whole")
    assert outcome["equal_bits"]
    assert outcome["resumed_from"] >= 5
    assert newest(tmp_path / "killed" / "run").is_dir()
