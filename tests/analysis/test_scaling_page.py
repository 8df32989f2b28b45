"""docs/scaling.md: its commands done as a reader would, and its table the one that the benchmark wrote."""

import json
from pathlib import Path

import pytest
from tests.test_docs import DOCS, Reader, blocks_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PAGE = (DOCS / "scaling.md").read_text("utf-8")


def test_the_page_shows_what_its_commands_show(in_tmp, monkeypatch, capfd):
    reader = Reader(monkeypatch, capfd)
    for block in blocks_of(PAGE):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    assert len(reader.typed) == 2


def test_the_table_is_the_benchmark_s():
    assert (RESULTS / "scaling.md").read_text("utf-8") in PAGE


@pytest.mark.parametrize(("model", "num_parameters"), [("1b", 1.24e9), ("8b", 8.03e9), ("70b", 70.6e9)])
def test_the_table_goes_from_8_to_4096_ranks(model, num_parameters):
    cases = [case for case in json.loads((RESULTS / "scaling.json").read_text("utf-8")) if case["model"] == model]
    assert {8, 64, 512, 4096} <= {case["ranks"] for case in cases}
    for case in cases:
        assert case["num_parameters"] == pytest.approx(num_parameters, rel=0.01)
        assert 0.2 < case["efficiency"] <= 1
        # A rank's gradients go along fsdp once, in fp32: what it holds of them along tensor.
        along = [each for each in case["collectives"] if each["kind"] == "reduce-scatter" and each["axis"] == "fsdp"]
        expected = 4 * num_parameters / case["mesh"].get("tensor", 1) if case["mesh"].get("fsdp", 1) > 1 else 0
        assert sum(each["num_bytes"] for each in along) == pytest.approx(expected, rel=0.02)
