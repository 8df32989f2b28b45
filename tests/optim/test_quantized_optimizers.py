"""Optimizers of torchao and bitsandbytes: their quantized state is saved exactly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.optim.quantized_optimizers import OPTIMIZERS

PACKAGES = Path(sys.prefix) / "integrations"
"""The packages of integration tests, which other tests do not import."""


@pytest.mark.slow
@pytest.mark.skipif(not (PACKAGES / "torchao").is_dir(), reason="torchao is not installed")
def test_a_resumed_run_has_the_same_bits(tmp_path):
    paths = [str(PACKAGES), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "tests.optim.quantized_optimizers", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results.keys() == {each["type"] for each in OPTIMIZERS}
    for name, result in results.items():
        assert result["is_equal"], name
    assert "OptimState8bit" in results["torchao.optim:AdamW8bit"]["kinds"]
    assert results["torchao.optim:AdamW8bit"]["rate"] == pytest.approx(0.01 * 0.9**3)
