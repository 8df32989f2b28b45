"""The line that changes a value during a step."""

import linecache

import pytest

from trainwright.user_code.mutations import line_of_change

calls = 0
table = {}


class Keeping:
    def __init__(self):
        self.count = 0  # not here
        self.held, self.holder, self.seen = {}, None, []

    def step(self, x):
        global calls
        self.count += 1
        self.kept = x
        self.held["mean"] = x
        self.holder.number = 3
        self.seen.append(x)
        calls += 1
        table.update(x=x)
        for self.index in range(3):
            self.typed: int = 4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trainer.count", "self.count += 1"),
        ("Keeping.kept", "self.kept = x"),
        ("Keeping.held.mean", 'self.held["mean"] = x'),
        ("Keeping.holder.number", "self.holder.number = 3"),
        ("layers.0.seen[17]", "self.seen.append(x)"),
        ("test_mutations.calls", "calls += 1"),
        ("test_mutations.table.x", "table.update(x=x)"),
        ("trainer.typed", "self.typed: int = 4"),
    ],
)
def test_the_line_that_changes_a_value_is_found_by_its_name(name, text):
    location = line_of_change(name, [Keeping])
    assert location.file.endswith("test_mutations.py")
    assert linecache.getline(__file__, location.line).strip() == location.text.strip() == text


def test_what_no_file_changes_has_no_line():
    assert line_of_change("trainer.other", [Keeping]) is None
    assert line_of_change("optimizer main.param_groups[0]['lr']", [Keeping, int]) is None
    made = type("Made", (), {"__module__": "nowhere"})
    assert line_of_change("trainer.count", [made]) is None
