"""Profiles on a GPU: kernels are shared out to what launched them, in every mode."""

import json
from pathlib import Path

import pytest
import torch

from trainwright import RunConfig, build_trainer
from trainwright.hooks.flops import known_peak, measure_matrix_rate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROJECT = Path(__file__).parents[1] / "project"
LLAMA = (
    "{type: llama, vocab_size: 512, hidden_size: 256, intermediate_size: 512, num_layers: 2, "
    "num_heads: 4, num_kv_heads: 2, max_positions: 256}"
)


def profile(tmp_path, mode):
    (tmp_path / "tokens.py").write_text(
        "import torch\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    tokens_per_sample = 256\n"
        "    def __len__(self): return 992\n"
        "    def __getitem__(self, i):\n"
        "        row = (torch.arange(256) * (i % 7 + 1)) % 512\n"
        "        return {'input_ids': row, 'labels': row}\n"
    )
    config = RunConfig.load(
        PROJECT / "run.yaml",
        [
            *(f"output_dir={tmp_path}", f"name={mode}", "runtime.device=cuda", "data.eval={}", "evaluation={}"),
            *(f"data.train={{type: {tmp_path}/tokens.py:Rows}}", f"model={LLAMA}", "trainer.type=language_model"),
            *("trainer.max_steps=30", "hooks=[{type: profiler, first: 12, steps: 8}]"),
            *(f"runtime.mode={mode}", "runtime.precision=bf16"),
        ],
    )
    build_trainer(config).train()
    return json.loads((tmp_path / mode / "profile" / "summary.json").read_text())


def test_kernels_are_shared_out_and_the_same_operations_counted_in_every_mode(tmp_path):
    figures = {mode: profile(tmp_path, mode) for mode in ("eager", "compile", "graph")}
    for mode, each in figures.items():
        print(mode, json.dumps(each))
        assert sum(each["percent"].values()) == pytest.approx(100)
        assert each["is_counted"]
        assert each["flops_per_step"] == figures["eager"]["flops_per_step"]
        assert 0 < each["share_of_matrix_rate"] < 1
        assert each["tokens_per_second"] == pytest.approx(256 * each["samples_per_second"])
    for mode in ("eager", "compile"):
        percent = figures[mode]["percent"]
        assert min(percent["forward"], percent["backward"], percent["optimizer"]) > 0
    for each in figures.values():
        assert len(each["costs"]) == 3
        assert sum(cost["percent"] for cost in each["costs"]) > 50
        assert "other" not in [cost["name"] for cost in each["costs"]], "kernels whose names costs.py does not know"
    for mode in ("eager", "compile"):
        idle = [cost["setting"] for cost in figures[mode]["costs"] if cost["name"] == "idle"]
        assert idle in ([], ["runtime.mode: graph"])
    assert figures["graph"]["percent"]["replay"] > 0
    assert "forward" not in figures["graph"]["percent"]


def test_the_measured_rate_is_below_the_vendors_and_not_far():
    device = torch.device("cuda", 0)
    peak = known_peak(torch.cuda.get_device_name(device), torch.bfloat16)
    if peak is None:
        pytest.skip("a device that the table does not know")
    rate = measure_matrix_rate(device, torch.bfloat16)
    print(rate)
    assert 0.4 * peak[1] < rate.flops_per_second < 1.05 * peak[1]
