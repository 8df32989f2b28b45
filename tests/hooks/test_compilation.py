"""What torch.compile does is told once, with the line and the guard, and counted in the steps where it happened."""

import json
import logging

import pytest
import torch
from tests.compile.test_compile_mode import BREAKING, COMPILED, breaking_lines, make, run
from tests.loop.small_runs import PLAIN

from trainwright import Trainer
from trainwright.compile.reports import Compilations, listening
from trainwright.hooks.compilation import WatchCompilation
from trainwright.user_code.locations import UserFiles

SETTINGS = (*PLAIN, "log.every_steps=1", "trainer.micro_batch_size=8", *COMPILED)
LOGGERS = (
    "torch._dynamo.symbolic_convert.__graph_breaks",
    "torch._dynamo.convert_frame.__graph_breaks",
    "torch._dynamo.guards.__recompiles",
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_lines(trainer):
    """The compiler's values by step."""
    lines = [json.loads(line) for line in (trainer.folder / "metrics.json").read_text().splitlines()]
    found = {}
    for line in lines:
        own = {name.partition("/")[2]: value for name, value in line.items() if name.startswith("compile/")}
        if own:
            found[line["step"]] = own
    return found


class Shrinking(Trainer):
    """From the third step on rows are fewer."""

    def next_train_inputs(self, iterator):
        batch = next(iterator)
        return batch if self.step < 2 else {name: value[: 9 - self.step] for name, value in batch.items()}


def test_a_recompilation_is_reported_with_its_guard_and_line_and_counted_in_its_step(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "trainwright"):
        trainer = run(tmp_path / "run", *SETTINGS, trainer=Shrinking)
    found = compile_lines(trainer)
    assert list(found) == [1, 3]  # nothing at all in the others
    assert found[1]["graphs"] == 1
    assert found[1].keys() <= {"graphs", "seconds", "cache_hits"}  # what is 0 is not there
    assert found[3]["recompilations"] == found[3]["graphs"] == 1
    assert 0 < found[3]["seconds"] < 600
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("The forward is compiled again, because a guard failed at ")
    assert "parts.py:" in told  # where the model's forward is
    assert "size mismatch at index 0. expected 8, actual 7" in told


def test_each_graph_break_is_reported_once_with_its_line(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "trainwright"):
        trainer = run(tmp_path / "run", *BREAKING, *COMPILED, "log.every_steps=1")
    told = [record.getMessage() for record in caplog.records if "graph break" in record.getMessage()]
    assert len(told) == 2
    for message, line in zip(told, breaking_lines(), strict=True):
        assert line in message
    assert compile_lines(trainer)[1]["graph_breaks"] == 2


def test_a_log_line_has_the_sums_of_its_window(tmp_path):
    settings = ("log.every_steps=6", *(each for each in SETTINGS if not each.startswith("log.")))
    found = compile_lines(run(tmp_path / "run", *settings, trainer=Shrinking))
    assert list(found) == [6]
    assert (found[6]["graphs"], found[6]["recompilations"]) == (2, 1)


def test_torch_s_loggers_and_callbacks_are_restored(tmp_path, capfd):
    from torch._dynamo.callback import callback_handler

    def state():
        loggers = [logging.getLogger(name) for name in LOGGERS]
        names = set(torch._logging._internal.log_state.artifact_names)
        return [(each.level, list(each.filters)) for each in loggers], names, len(callback_handler.start_callbacks)

    before = state()
    run(tmp_path / "run", *BREAKING, *COMPILED)
    assert state() == before
    assert "Graph break" not in capfd.readouterr().err  # ours are told in our words alone


def test_torch_s_own_log_remains_if_it_was_requested(caplog):
    torch._logging.set_logs(graph_breaks=True)
    try:
        compilations = Compilations(UserFiles("/nowhere"))
        compilations.begin()
        assert torch._logging._internal.log_state.is_artifact_enabled("recompiles")
        compilations.end()
        assert torch._logging._internal.log_state.is_artifact_enabled("graph_breaks")
        assert not torch._logging._internal.log_state.is_artifact_enabled("recompiles")
    finally:
        torch._logging.set_logs()


@pytest.mark.parametrize("name", LOGGERS)
def test_records_of_torch_s_loggers_are_received_but_not_shown_if_not_requested(name):
    source, passed = logging.getLogger(name), []
    handler = logging.Handler()
    handler.emit = passed.append
    compilations = Compilations(UserFiles("/nowhere"))
    source.addHandler(handler)
    try:
        with listening(compilations), listening(compilations):  # the second one changes nothing
            source.debug("Graph Break Reason: made up")
            assert compilations.has_news
        assert not compilations.is_listening
    finally:
        source.removeHandler(handler)
    assert passed == []


def test_the_hook_is_a_default_in_compiled_modes_only(tmp_path):
    def has(*settings):
        return any(isinstance(hook, WatchCompilation) for hook in make(tmp_path / "run", *PLAIN, *settings).hooks)

    assert has("runtime.mode=compile")
    assert has("runtime.mode=graph")
    assert not has()


def test_the_hook_does_nothing_in_graph_mode_on_a_cpu(tmp_path):
    hook = WatchCompilation()
    hook.trainer = make(tmp_path / "run", *PLAIN, "runtime.mode=graph")
    hook.before_train()
    hook.after_step()
    hook.close()
    assert hook.trainer.storage.latest() == {}
