"""Counts what the fault tests tried and what the runs survived; `--write-table` puts it into docs/reliability.md.

A test says `tried("kill -9 before an act of a save", cases=80)`, with the fault as a literal: `test_table.py` reads
the names in the source and compares them with the page. The counts reach the controller of xdist in the reports.
"""

import functools

import pytest
from tests.faults.table import PAGE, Row, replace_table
from tests.faults.two_ranks import train_two

TRIED = "fault"


def pytest_addoption(parser):
    parser.addoption("--write-table", action="store_true", help="Write the table of faults into docs/reliability.md.")


def pytest_configure(config):
    if config.getoption("--write-table", default=False) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(TableOfFaults(), "table-of-faults")


@pytest.fixture
def tried(request, record_property):
    """Says which fault a test tries, and in how many cases; all count as survived if the test passes."""

    def note(fault, cases=1):
        record_property(TRIED, [fault, request.path.name, int(cases)])

    return note


class TableOfFaults:
    """Adds up the reports of all workers and writes the table when the last test has ended."""

    def __init__(self):
        self.rows = {}

    def pytest_runtest_logreport(self, report):
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == TRIED:
                fault, where, cases = value
                row = self.rows.setdefault((fault, where), Row(fault, where))
                row.cases += cases
                row.survived += cases if report.passed else 0

    def pytest_sessionfinish(self):
        PAGE.write_text(replace_table(PAGE.read_text("utf-8"), self.rows.values()), "utf-8")


@pytest.fixture(scope="session")
def make_undisturbed(tmp_path_factory):
    """Trains once for each tuple of overrides and number of ranks, and returns the folder of that run."""

    @functools.cache
    def folder(overrides, num_ranks):
        place = tmp_path_factory.mktemp("undisturbed") / "run"
        assert train_two(place, *overrides, num_ranks=num_ranks) == [0] * num_ranks
        return place

    return folder
