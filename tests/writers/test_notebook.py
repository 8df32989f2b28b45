"""The display of a run in a notebook: a real kernel executes the cells, and a browser renders the page."""

import io
import re
from pathlib import Path

import pytest

from trainwright.events import EventStorage
from trainwright.log import in_notebook
from trainwright.writers.console import ConsoleWriter
from trainwright.writers.notebook import CurveHistory, run_html

nbclient = pytest.importorskip("nbclient", reason="it executes notebooks")
nbformat = pytest.importorskip("nbformat")
CHROMIUM = Path("/usr/bin/chromium")

SETUP = """
import torch
from trainwright import train

data = [{"x": torch.full((4,), index / 16), "labels": torch.tensor(index % 3)} for index in range(16)]
model = torch.nn.Linear(4, 3)


def forward(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])
"""
TRAIN = """
sets = {"valid": data}
settings = ["log.every_steps=1", "evaluation.every_steps=10"]
trainer = train(model, data, forward=forward, eval_data=sets, max_steps=40, batch_size=4, overrides=settings)
"""
EDIT = """
def forward(model, batch):
    return 2 * torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


train(model, data, forward=forward, eval_data=sets, max_steps=40, batch_size=4, overrides=settings)
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A notebook that trains, shows the trainer, plots, and trains with an edited forward; and its messages."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = [SETUP, TRAIN, "trainer", 'trainer.plot("loss", "valid/loss");', EDIT]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text.strip()) for text in cells])
    messages = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg, cell, cell_index):
            messages.append(msg)
            return super().process_message(msg, cell, cell_index)

    client = Client(notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return notebook, messages


def outputs(executed, number):
    return executed[0].cells[number].outputs


def test_a_run_is_one_display_that_is_updated_in_place(executed):
    shown = [each for each in outputs(executed, 1) if each.output_type != "stream"]
    assert [each.output_type for each in shown] == ["display_data"]
    page = shown[0].data["text/html"]
    assert "step 40 of 40" in page  # the last update
    assert "valid/loss" in page
    assert page.count("<path") == 2
    kinds = [message["msg_type"] for message in executed[1]]
    assert "update_display_data" in kinds
    assert kinds.count("display_data") == 2  # the run, and the plot


def test_the_log_of_a_notebook_is_not_on_stderr(executed):
    streams = {each.name for each in outputs(executed, 1) if each.output_type == "stream"}
    assert streams == {"stdout"}
    assert all("step 1/40" not in each.get("text", "") for each in outputs(executed, 1))


def test_a_trainer_at_the_end_of_a_cell_is_shown_with_its_curve(executed):
    [result] = outputs(executed, 2)
    assert result.output_type == "execute_result"
    assert result.data["text/html"].count("<path") == 2


def test_a_plot_is_a_figure(executed):
    [plot] = outputs(executed, 3)
    assert "image/png" in plot.data


def test_an_edited_forward_of_a_cell_is_one_message_with_the_cell_and_the_options(executed):
    [error] = outputs(executed, 4)
    assert error.ename == "CheckpointError"
    [message] = error.traceback
    assert "Cell In[5], line 1" in message
    assert "ipykernel" not in message
    for option in ("another name", "accept_changes=True", "fresh=True"):
        assert option in message
    assert "--" not in message


@pytest.mark.skipif(not CHROMIUM.exists(), reason="no browser")
def test_a_browser_shows_the_page_in_light_and_dark_themes(executed, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    exporter = pytest.importorskip("nbconvert").HTMLExporter
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 800})
        page.route("http*://**", lambda route: route.abort())  # the exporter's page loads MathJax
        for theme, is_text_dark in (("light", True), ("dark", False)):
            html, _ = exporter(theme=theme).from_notebook_node(executed[0])
            (tmp_path / "page.html").write_text(html, "utf-8")
            page.goto(f"file://{tmp_path}/page.html", wait_until="domcontentloaded")
            drawing = page.locator("svg[role=img]").first
            box = drawing.bounding_box()
            assert box["width"] > 400
            assert box["height"] > 100
            color = drawing.evaluate("each => getComputedStyle(each.querySelector('text')).fill")
            red, green, blue = map(int, re.findall(r"\d+", color)[:3])
            assert (red + green + blue < 3 * 128) == is_text_dark
        alone, requests = browser.new_page(), []
        alone.on("request", lambda request: requests.append(request.url))
        alone.set_content(executed[0].cells[1].outputs[-1].data["text/html"])
        assert requests == []
        browser.close()


def test_names_and_texts_of_a_page_are_escaped():
    page = run_html(
        "<b>run</b>",
        step=1,
        max_steps=2,
        curves={"<i>/loss": [(1, 1.0)]},
        latest={"<u>": "<img src=x>", "url": "s3://me:hunter2@host"},
        details="<s>",
        texts={"<p>": "<script>\x1b[2J"},
    )
    assert not re.search(r"<(b|i|u|img|s|p|script)>.*(run|loss|src)", page.replace("<b>&lt;b&gt;run", ""))
    for tag in ("<script>", "<img", "<u>", "<i>", "<s>", "hunter2", "\x1b"):
        assert tag not in page


def test_a_page_without_values_or_limit_has_a_head_only():
    page = run_html("run", step=0, max_steps=None, curves={}, latest={})
    assert "step 0" in page
    assert "<svg" not in page


def test_the_history_of_a_long_run_has_bounded_memory_and_keeps_extremes():
    history = CurveHistory({"loss": [(step, 1.0) for step in range(5000)]})
    history.add(5000, {"loss": 99.0, "note": "text", "flag": True})
    for step in range(5001, 30_000):
        history.add(step, {"loss": 1.0})
    assert len(history.curves["loss"]) <= 5000
    assert (5000, 99.0) in history.curves["loss"]
    assert history.curves.keys() == {"loss"}


def test_outside_a_kernel_the_console_writes_lines():
    assert not in_notebook()
    stream, storage = io.StringIO(), EventStorage(max_steps=2)
    writer = ConsoleWriter(stream)
    storage.step = 1
    storage.publish({"loss": 1.0})
    writer.write(storage)
    writer.close()
    assert stream.getvalue() == "step 1/2  loss 1\n"
