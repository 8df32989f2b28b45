import pytest
from tests.fuzz.targets import TARGETS, fuzz_one, make_workshop


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return make_workshop(tmp_path_factory.mktemp("fuzz") / "shop")


@pytest.mark.parametrize("target", TARGETS)
def test_changed_files_are_read_or_rejected_cleanly(shop, target):
    # `make fuzz` tries 100,000; another seed here, so that each adds to the other.
    outcomes = [fuzz_one(shop, target, 1, number) for number in range(60)]
    assert outcomes.count("rejected") > 5
    assert {*outcomes} <= {"read", "rejected"}
