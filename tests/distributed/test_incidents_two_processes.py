"""An incident of one rank holds the update back on all, and names that rank."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_bad_loss_of_one_rank_holds_the_update_back_on_both(tmp_path):
    script = Path(__file__).with_name("incident_cases.py")
    running = [subprocess.Popen([sys.executable, script, str(rank), str(tmp_path)]) for rank in range(2)]
    try:
        assert [each.wait(60) for each in running] == [0, 0]
    finally:
        for each in running:
            each.kill()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["held"] == first["plain"]
    assert first["found"] == [[7, "non_finite", [1]], [9, "spike", [0, 1]]]
