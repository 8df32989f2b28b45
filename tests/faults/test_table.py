"""The page tells of every fault that a test tries, and of no other; nothing was lost."""

import ast
import re
from pathlib import Path

import pytest
from tests.faults.table import BEGIN, END, PAGE, Row, read_table, replace_table

ADVICE = "Run `make reliability`, which writes the table."


def faults_in(path):
    """The faults that a test file names, as (fault, file)."""
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    found = set()
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id == "tried":
            assert call.args, f"{path.name}:{call.lineno}: tried() names no fault"
            fault = call.args[0]
            assert isinstance(fault, ast.Constant), f"{path.name}:{call.lineno}: the fault must be a literal"
            assert isinstance(fault.value, str), f"{path.name}:{call.lineno}: the fault must be text"
            found.add((fault.value, path.name))
    return found


@pytest.fixture
def rows(request):
    if request.config.getoption("--write-table"):
        pytest.skip("the table is being written")
    return read_table(PAGE.read_text("utf-8"))


def test_the_page_has_a_row_for_every_fault_and_no_other(rows):
    named = set().union(*(faults_in(path) for path in Path(__file__).parent.glob("test_*.py")))
    written = {(row.fault, row.where) for row in rows}
    assert named - written == set(), ADVICE
    assert written - named == set(), ADVICE


def test_every_case_on_the_page_was_survived(rows):
    for row in rows:
        assert row.cases > 0, row
        assert row.survived == row.cases, row


def test_a_table_that_was_written_reads_as_it_was():
    page = f"# Page\n{BEGIN}\nold\n{END}\nrest\n"
    rows = [Row("kill -9", "test_b.py", 3, 2), Row("a full disk", "test_a.py", 4, 4)]
    written = replace_table(page, rows)
    assert read_table(written) == rows[::-1]
    assert written.startswith("# Page\n")
    assert written.endswith(f"{END}\nrest\n")
    assert "old" not in written
    assert replace_table(written, rows) == written


def test_every_test_file_on_the_page_exists():
    files = re.findall(r"`(tests/[\w/]+\.py)`", PAGE.read_text("utf-8"))
    assert len(set(files)) > 30
    assert [file for file in files if not (PAGE.parents[1] / file).is_file()] == []
