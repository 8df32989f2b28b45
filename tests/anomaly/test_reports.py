"""The bundle of an anomaly: enough to run the very step again."""

import json
import math

import numpy as np
import torch

from trainwright.anomaly.detection import Anomaly
from trainwright.anomaly.reports import Positions, write_report
from trainwright.config import RunConfig
from trainwright.parallel.collectives import Ranks

SPIKE = Anomaly(1204, "spike", "rollback", 90.0, 7.0, (0,), 2.0, 0.5, (1203, 2.1), (64, 96))


def config():
    return RunConfig.from_dict({"seed": 7, "model": {"type": "gpt2"}})


def write(folder, anomaly=SPIKE, **changes):
    arguments = {
        "config": config(),
        "data_state": {"position": 96, "left_out": []},
        "positions": Positions(64, 66, [5, 3]),
        "loss_history": [(1203, 2.1), (1204, 90.0)],
        "ranks": Ranks(),
        "checkpoint_step": 1200,
    }
    return write_report(folder, anomaly, **{**arguments, **changes})


def read(bundle):
    return json.loads((bundle / "anomaly.json").read_text("utf-8"))


def test_the_bundle_holds_all_that_the_step_depends_on(tmp_path):
    bundle = write(tmp_path)
    assert bundle == tmp_path / "anomalies" / "step-00001204"
    assert read(bundle) == {
        "step": 1204,
        "kind": "spike",
        "policy": "rollback",
        "loss": 90.0,
        "grad_norm": 7.0,
        "ranks": [0],
        "median": 2.0,
        "deviation": 0.5,
        "last_good": [1203, 2.1],
        "message": SPIKE.describe(),
        "seed": 7,
        "num_ranks": 1,
        "torch": torch.__version__,
        "newest_checkpoint": "step-00001200",
        "positions": {"start": 64, "stop": 66, "samples": [5, 3]},
        "data": {"position": 96, "left_out": []},
        "loss_history": [[1203, 2.1], [1204, 90.0]],
    }
    assert RunConfig.load(bundle / "config.yaml") == config()


def test_each_anomaly_of_a_step_has_a_folder_of_its_own(tmp_path):
    names = [write(tmp_path).name for _ in range(3)]
    assert names == ["step-00001204", "step-00001204-2", "step-00001204-3"]


def test_a_nan_is_null_and_odd_states_of_a_stream_are_written_too(tmp_path):
    nan = Anomaly(3, "non_finite", "raise", math.nan, math.inf, (1,))
    state = {"progress": {"cursors": {"0": {"row": np.int64(5), "state": torch.arange(2), "file": b"x"}}}}
    facts = read(write(tmp_path, nan, data_state=state, positions=None, checkpoint_step=None))
    assert (facts["loss"], facts["grad_norm"]) == (None, None)
    assert "nan" in facts["message"]
    assert facts["data"]["progress"]["cursors"]["0"] == {"row": 5, "state": [0, 1], "file": "b'x'"}
    assert (facts["positions"], facts["newest_checkpoint"], facts["last_good"]) == (None, None, None)


def test_a_disk_that_rejects_the_bundle_is_a_warning(tmp_path, caplog):
    (tmp_path / "anomalies").write_text("a file where the folder should be")
    write(tmp_path)
    assert "step-00001204 cannot be written" in caplog.text
    assert "The loss is 90 at step 1204" in caplog.text
