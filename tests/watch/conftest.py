"""A folder of real runs that the tests of this package read."""

import pytest
from tests.watch.folders import train, write_hostile_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """`plain`; `group/broken` with an anomaly at step 3 and a restart after 6; and one written by somebody else."""
    folder = tmp_path_factory.mktemp("watched") / "runs"
    train(folder, "plain")
    train(folder, "group/broken", break_at=2, stop_at=6)
    train(folder, "group/broken")
    write_hostile_run(folder)
    return folder
