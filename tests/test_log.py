"""What is shown of the package's log, and to whom."""

import logging
import subprocess
import sys
from types import ModuleType

import pytest
from tests.messages import mentions

from trainwright.log import in_notebook, is_progress_shown, rank_log, run_log, show_log, show_log_unless_configured


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


def test_other_ranks_log_only_errors(package, capsys, monkeypatch):
    package.handlers.clear()
    monkeypatch.setenv("RANK", "1")
    show_log()
    package.info("step 3")
    package.warning("slow")
    package.error("stuck")
    assert capsys.readouterr().err == "stuck\n"


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


def test_a_run_of_a_program_without_logging_configuration_shows_warnings_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import logging, sys\n"
        "from trainwright.log import is_progress_shown, run_log\n"
        "if 'configured' in sys.argv:\n"
        "    logging.basicConfig(format='configured: %(message)s')\n"
        "with run_log(), run_log():\n"
        "    assert is_progress_shown() == ('configured' not in sys.argv)\n"
        "    logging.getLogger('trainwright.x').info('building')\n"
        "    if 'later' in sys.argv:\n"
        "        logging.basicConfig(format='later: %(message)s')\n"
        "    logging.getLogger('trainwright.x').warning('slow')\n"
        "assert not logging.getLogger('trainwright').handlers\n"
    )
    for arguments, shown in ([], "slow\n"), (["configured"], "configured: slow\n"), (["later"], "later: slow\n"):
        done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=True)
        assert done.stderr == shown


def test_the_files_of_a_run_have_what_was_logged_before_they_were_opened(package, tmp_path):
    whole, own = tmp_path / "log.txt", rank_log(tmp_path, 3)
    with run_log() as open_files:
        package.info("building")
        open_files(whole, own)
        logging.getLogger("trainwright.x").warning("slow")
    package.error("after the run")
    for path in (whole, tmp_path / "logs" / "rank-3.txt"):
        first, second = path.read_text("utf-8").splitlines()
        assert first.endswith(" INFO building")
        assert second.endswith(" WARNING slow")


def test_the_error_that_ends_a_run_is_in_its_files_with_the_traceback_and_not_on_the_terminal(
    package, tmp_path, capsys
):
    show_log()

    def run():
        with run_log() as open_files:
            open_files(rank_log(tmp_path, 0))
            raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        run()
    text = rank_log(tmp_path, 0).read_text("utf-8")
    assert "ERROR no such layer\nTraceback" in text
    assert mentions(text, "no such layer", "ValueError")
    assert capsys.readouterr().err == ""


def test_a_run_that_opens_no_file_leaves_none_and_no_handler(package, tmp_path):
    before = list(package.handlers)
    with run_log():
        package.info("nothing is left to do")
    assert package.handlers == before
    assert list(tmp_path.iterdir()) == []


def test_an_inner_run_writes_to_the_files_of_the_outer_one_and_its_error_once(package, tmp_path):
    def run():
        with run_log() as open_files:
            package.info("building")
            open_files(tmp_path / "log.txt")
            with run_log() as open_again:
                open_again(tmp_path / "log.txt")
                package.info("training")
                raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        run()
    text = (tmp_path / "log.txt").read_text("utf-8")
    assert [text.count(each) for each in ("building", "training", "ERROR no such layer")] == [1, 1, 1]


def test_a_program_with_handlers_of_its_own_shows_the_messages_itself(package, capsys):
    show_log()
    show_log_unless_configured()  # pytest has handlers of the root logger
    package.info("step 3")
    assert capsys.readouterr().err == ""


def test_progress_is_shown_unless_the_level_is_above_info(package):
    assert is_progress_shown()
    package.setLevel(logging.WARNING)
    assert not is_progress_shown()
    show_log(logging.WARNING)  # -q
    assert not is_progress_shown()
    show_log(logging.DEBUG)
    assert is_progress_shown()


def test_ipython_that_another_thread_is_importing_is_no_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))  # as Python registers it before its code runs
    assert not in_notebook()
