"""docs/reliability.md, done as a reader would; its exit codes and settings are those of the code."""

import signal
from pathlib import Path

import pytest
from tests.faults.table import PAGE
from tests.test_docs import Reader, blocks_of

from trainwright.config.sections import AnomaliesSection, PreemptionSection, WatchdogSection
from trainwright.errors import HANG_EXIT_CODE, exit_code_of


@pytest.fixture
def reader(in_tmp, monkeypatch, capfd):
    return Reader(monkeypatch, capfd)


def test_the_page_works_from_the_first_line_to_the_last(reader):
    for block in blocks_of(PAGE.read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    assert Path("runs/safe/anomalies/step-00000058/anomaly.json").is_file()
    reader.type("trainwright train safe.yaml")
    assert "nothing is left to do" in reader.shown


def test_the_page_names_the_exit_codes():
    page = PAGE.read_text("utf-8")
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
    codes = [exit_code_of(signal.Signals(number).name) for number in numbers]
    assert f"| {', '.join(map(str, codes))} |" in page
    assert f"| {HANG_EXIT_CODE} |" in page


def test_the_page_names_every_setting_of_what_may_go_wrong():
    page = PAGE.read_text("utf-8")
    for section in (AnomaliesSection, PreemptionSection, WatchdogSection):
        for name in section.model_fields:
            assert f"`{name}" in page or f"{name}:" in page, name
