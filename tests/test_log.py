"""What is shown of the package's log, and to whom."""

import logging

import pytest

from trainwright.log import show_log


@pytest.fixture
def package():
    logger = logging.getLogger("trainwright")
    before, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


def test_messages_go_to_the_stderr_of_the_time(package, capsys):
    show_log()
    show_log()  # a second call adds no second handler
    package.info("step 3")
    assert capsys.readouterr().err == "step 3\n"


def test_a_higher_level_is_quiet(package, capsys):
    show_log(logging.WARNING)
    package.info("step 3")
    package.warning("the loss is nan")
    assert capsys.readouterr().err == "the loss is nan\n"


def test_other_ranks_are_heard_only_when_something_is_wrong(package, capsys, monkeypatch):
    package.handlers.clear()
    monkeypatch.setenv("RANK", "1")
    show_log()
    package.info("step 3")
    package.warning("slow")
    assert capsys.readouterr().err == "slow\n"


def test_what_a_quiet_terminal_does_not_show_still_reaches_other_handlers(package, capsys):
    class Kept(logging.Handler):
        def emit(self, record):
            self.message = record.getMessage()

    show_log(logging.WARNING)
    kept = Kept()
    package.addHandler(kept)
    logging.getLogger("trainwright.x").info("for the log")
    assert kept.message == "for the log"
    assert capsys.readouterr().err == ""
