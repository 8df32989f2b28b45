"""An anomaly of one rank holds the update back on all, and names that rank."""

import json

from tests.distributed import anomaly_cases
from tests.distributed.forked_launch import launch_well


def test_a_bad_loss_of_one_rank_holds_the_update_back_on_both(tmp_path):
    launch_well(tmp_path, 2, anomaly_cases.main)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["held"] == first["plain"]
    assert first["found"] == [[7, "non_finite", [1]], [9, "spike", [0, 1]]]
