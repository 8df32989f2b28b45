"""The live page and the report in a real browser: what is drawn, and that nothing of a run is executed."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.watch.folders import HOSTILE, write_lines
from tests.watch.test_server import serving

from trainwright.watch.report import write_report

CHROMIUM = Path("/usr/bin/chromium")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="no browser")

# The number of pixels of a canvas that have a color, such as #2563eb.
COUNT_PIXELS = """(canvas, color) => {
  const wanted = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let number = 0;
  for (let at = 0; at < data.length; at += 4) {
    number += wanted.every((each, index) => Math.abs(data[at + index] - each) < 12);
  }
  return number;
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url(runs):
    with serving(runs) as send:
        yield f"http://127.0.0.1:{send.port}"


@pytest.fixture
def open_page(browser):
    """Opens an address, and fails for an error or a blocked resource of the page."""
    pages, problems = [], []

    def show(address, *, width=1200, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        pages.append(page)
        page.goto(address)
        return page

    show.problems = problems
    yield show
    for page in pages:
        page.close()
    assert problems == []


def plot(page, title):
    return page.locator("section.plot").filter(has=page.locator("h3", has_text=re.compile(f"^{re.escape(title)}$")))


def drawn(page, title, ready="drawn.series.length > 0"):
    """What a plot has drawn, as soon as a condition is met."""
    canvas = plot(page, title).locator("canvas")
    canvas.scroll_into_view_if_needed()
    test = f"canvas => {{ const drawn = JSON.parse(canvas.dataset.drawn || '{{\"series\": []}}'); return {ready}; }}"
    handle = canvas.element_handle()
    page.wait_for_function(test, arg=handle, timeout=10_000)
    return json.loads(canvas.get_attribute("data-drawn"))


def select(*names):
    return f"#runs={json.dumps(list(names))}"


def test_curves_of_all_runs_are_overlaid_with_their_marks(open_page, url):
    page = open_page(f"{url}/{select('plain', 'group/broken')}")
    loss = drawn(page, "loss")
    assert {each["label"] for each in loss["series"]} == {
        f"{run} · {name}" for run in ("plain", "group/broken") for name in ("loss", "valid/loss")
    }
    points = {each["label"]: each["points"] for each in loss["series"]}
    assert points["plain · loss"] == 12
    assert len({each["color"] for each in loss["series"]}) == 2
    assert {"anomaly": 3, "restart": 6}.items() <= {mark["kind"]: mark["x"] for mark in loss["marks"]}.items()
    assert {mark["kind"] for mark in loss["marks"]} == {"anomaly", "restart", "checkpoint", "best"}
    canvas = plot(page, "loss").locator("canvas")
    for each in loss["series"]:
        assert canvas.evaluate(COUNT_PIXELS, each["color"]) > 100
    gold, red = (
        page.evaluate(f"getComputedStyle(document.body).getPropertyValue('--{name}')") for name in ("gold", "anomaly")
    )
    assert canvas.evaluate(COUNT_PIXELS, gold) > 20  # the best value
    assert canvas.evaluate(COUNT_PIXELS, red) > 20
    for title in ("accuracy", "lr", "grad_norm", "samples_per_second", "memory"):
        assert len(drawn(page, title)["series"]) == 2
    for name, shown in (("plain", 1), ("group/broken", 0)):
        page.get_by_label(f"Show {name}", exact=True).uncheck()
        if shown:
            drawn(page, "loss", "drawn.series.every((each) => !each.label.includes('plain'))")
        else:
            page.wait_for_selector("text=Select a run")


def test_axis_smoothing_log_scale_and_marks_are_switched(open_page, url):
    page = open_page(f"{url}/{select('plain')}")
    drawn(page, "loss")
    for number, text in enumerate(["off", "0.5 %", "1 %", "2 %", "4 %", "7 %", "10 %", "15 %", "25 %"]):
        page.locator("#smoothing").fill(str(number))
        assert page.locator("output").inner_text() == text
    assert drawn(page, "loss", "drawn.series.some((each) => each.smooth)")["series"][0]["label"] == "loss"
    page.get_by_role("button", name="checkpoints").click()
    assert drawn(page, "loss", "drawn.marks.length === 0")
    page.get_by_role("button", name="log", exact=True).click()
    assert "log=1" in page.url
    page.select_option("#axis", "time")
    drawn(page, "loss")
    canvas = plot(page, "loss").locator("canvas")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    assert re.search(r"\d s", plot(page, "loss").locator(".readout .at").inner_text())
    page.reload()
    drawn(page, "loss")
    assert page.locator("#axis").input_value() == "time"


# Whether the pixels at which the points of a curve should be, given their values on both axes, have its color.
ARE_DRAWN_AT = """([title, xs, ys, isLog, color]) => {
  const { plot } = [...plots.values()].find((each) => each.plot.title === title);
  const { box } = plot.scale, [, , lowY, highY] = plot.ranges(), scale = isLog ? Math.log : (value) => value;
  const highX = Math.max(...xs), context = plot.canvas.getContext("2d");
  return xs.every((x, at) => {
    const left = box.left + (x / highX) * (box.right - box.left);
    const share = (scale(ys[at]) - scale(lowY)) / (scale(highY) - scale(lowY));
    const top = box.bottom - share * (box.bottom - box.top);
    if (!Number.isFinite(top)) return false;
    const pixel = context.getImageData(Math.round(left - 0.5), Math.round(top - 0.5), 1, 1).data;
    return color === "#" + [...pixel.slice(0, 3)].map((each) => each.toString(16).padStart(2, "0")).join("");
  });
}"""


def test_points_are_at_their_values_on_every_axis_and_scale(open_page, tmp_path):
    steps = range(1, 31)
    losses = [10 ** (-step / 10) for step in steps]
    axes = {"step": list(steps), "time": [step * (step + 1) / 2 for step in steps], "tokens": [s**3 for s in steps]}
    lines = [
        {"step": s, "loss": loss, "seconds_per_step": s, "tokens_seen": s**3, "mfu": 0.4}
        for s, loss in zip(steps, losses, strict=True)
    ]
    write_lines(tmp_path / "known" / "metrics.json", *lines)
    write_lines(tmp_path / "odd" / "metrics.json", *({"step": s, "odd": 1000 if s == 9 else s} for s in range(60)))
    with serving(tmp_path) as send:
        page = open_page(f"http://127.0.0.1:{send.port}/{select('known')}")
        color = drawn(page, "loss")["series"][0]["color"]
        for is_log in (False, True):
            if is_log:
                page.get_by_role("button", name="log", exact=True).click()
            for axis, xs in axes.items():
                page.select_option("#axis", axis)
                page.wait_for_function(ARE_DRAWN_AT, arg=["loss", xs, losses, is_log, color], timeout=5_000)
                assert not page.evaluate(ARE_DRAWN_AT, ["loss", xs, losses, not is_log, color])
        drawn(page, "mfu")
        page = open_page(f"http://127.0.0.1:{send.port}/{select('odd')}")
        drawn(page, "odd")
        highest = "[...plots.values()].find((each) => each.plot.title === 'odd').plot.ranges()[3]"
        assert page.evaluate(highest) > 1000
        page.get_by_role("button", name="clip outliers").click()
        page.wait_for_function(f"() => {highest} < 100")


def test_hover_keyboard_zoom_reset_and_legend(open_page, url):
    page = open_page(f"{url}/{select('plain')}")
    drawn(page, "loss")
    card = plot(page, "loss")
    box = card.locator("canvas").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(*middle)
    assert {"loss", "valid/loss"} <= set(card.locator(".readout .name").all_inner_texts())
    assert re.fullmatch(r"step \d+", card.locator(".readout .at").inner_text())
    page.mouse.down()
    page.mouse.move(middle[0] + box["width"] / 4, middle[1], steps=3)
    page.mouse.up()
    zoomed = drawn(page, "loss", "drawn.series[0].points < 6")
    assert 2 <= zoomed["series"][0]["points"] < 6
    page.wait_for_selector("#reset:visible")
    assert card.locator("canvas").bounding_box() == box  # the plot stays below the pointer
    card.locator("canvas").dblclick()
    drawn(page, "loss", "drawn.series[0].points === 12")
    page.mouse.move(0, 0)
    card.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "step 2" in card.locator("[aria-live]").inner_text()
    page.keyboard.press("+")
    drawn(page, "loss", "drawn.series[0].points < 12")
    page.keyboard.press("0")
    drawn(page, "loss", "drawn.series[0].points === 12")
    card.get_by_role("button", name="valid/loss").click()
    assert [each["label"] for each in drawn(page, "loss")["series"]] == ["loss"]


def test_media_settings_log_and_facts_are_shown(open_page, url):
    page = open_page(f"{url}/{select('plain', 'group/broken')}&run=group/broken")
    page.click("#tab-media")
    page.wait_for_function(
        "() => [...document.images].some((each) => each.alt.startsWith('weights') && each.naturalWidth === 12)"
    )
    slider = page.get_by_label("Step of weights").first
    slider.fill("0")
    page.wait_for_selector("img[alt='weights at step 2']")
    assert page.locator("svg.bars rect").count() == 48
    assert f"{HOSTILE} at 12" in page.locator(".media pre").inner_text()
    page.click("#tab-settings")
    page.wait_for_selector("text=trainer.max_steps")
    page.get_by_label("only differences").check()
    assert page.locator(".settings tbody th").all_inner_texts() == ["name"]
    page.click("#tab-log")
    page.wait_for_selector("text=Resumed from")
    assert page.locator(".log .WARNING").count() >= 1
    page.click("#tab-about")
    page.wait_for_selector("text=Environment")
    assert all(row.bounding_box()["height"] < 40 for row in page.locator(".card:has-text('Checkpoints') tr").all())
    assert "step 3" in page.locator(".alert").inner_text()
    assert "58 parameters" in page.locator("main").inner_text()
    page.keyboard.press("Tab")
    page.locator("#tab-about").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-curves"


def test_a_page_of_somebody_else_s_run_executes_nothing(open_page, url, runs):
    name = HOSTILE.replace("/", "")
    page = open_page(f"{url}/{select(name)}&run={name}")
    assert len(drawn(page, "loss")["series"]) == 1
    for tab in ("media", "settings", "log", "about"):
        page.click(f"#tab-{tab}")
        page.wait_for_function("(name) => document.body.innerText.includes(name)", arg=HOSTILE)
        assert page.locator("img[src=x]").count() == 0
    assert page.title() != "1"
    # The image is a link that leads out of the run folder.
    assert all("404" in each for each in open_page.problems)
    open_page.problems.clear()


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")])
def test_the_page_fits_in_both_themes_and_widths(open_page, url, width, scheme):
    page = open_page(f"{url}/{select('plain', 'group/broken')}", width=width, scheme=scheme)
    drawn(page, "loss")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (scheme == "dark")
    assert page.locator("#list").is_visible() == (width > 860)
    if width < 860:
        page.click("#menu")
        page.locator(".run button.title", has_text="plain").click()
        assert not page.locator("#list").is_visible()


@pytest.fixture
def odd_runs(tmp_path):
    """Runs with no line, a NaN, hundreds of metrics, long names. Request it first: its server must end last."""
    config = "trainer: {max_steps: 1000}\ndata: {eval: {valid: {type: digits}}}\n"
    group = f"sweep/{'long-' * 20}"
    for name in ("empty", "diverged", "wide", f"{group}1", f"{group}2"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(config)
    steps = range(10, 210, 10)
    many = {f"layer_{number}/norm": number for number in range(300)}
    flat = ({"step": step, "loss": -1 - step, "large": 1e6 + step / 1e4, **many} for step in steps)
    write_lines(tmp_path / "wide" / "metrics.json", *flat)
    write_lines(tmp_path / "diverged" / "metrics.json", *({"step": step, "loss": None} for step in steps))
    for number in (1, 2):
        write_lines(tmp_path / f"{group}{number}" / "metrics.json", *({"step": step, "loss": 0.5} for step in steps))
    with serving(tmp_path) as send:
        yield f"http://127.0.0.1:{send.port}"


def test_each_state_is_one_line_of_the_list(odd_runs, open_page):
    page = open_page(odd_runs)
    page.wait_for_selector(".state.empty")
    assert all(state.bounding_box()["height"] < 30 for state in page.locator(".state").all())


def test_a_loss_that_is_not_finite_is_named_where_it_is_looked_for(odd_runs, open_page):
    page = open_page(f"{odd_runs}/{select('diverged')}")
    drawn(page, "loss", "canvas.getAttribute('aria-label').includes('no value')")
    assert plot(page, "loss").locator(".value").inner_text() == "not finite"
    assert "loss not finite" in page.locator(".run", has_text="diverged").inner_text()
    assert page.locator(".alarm").count() == 2
    assert page.evaluate("[...plots.values()][0].plot.reasonForNothing()") == "no finite value"


def test_a_log_scale_says_that_it_cannot_show_negative_values(odd_runs, open_page):
    page = open_page(f"{odd_runs}/{select('wide')}&log=1&metrics=loss")
    page.wait_for_function("() => [...plots.values()][0]?.curves")
    assert page.evaluate("[...plots.values()][0].plot.reasonForNothing()").startswith("no value above zero")


def test_ticks_of_values_that_are_close_together_differ(odd_runs, open_page):
    page = open_page(odd_runs)
    texts = "([ticks, unit]) => tickTexts(ticks, unit === 'bytes' ? bytesText : numberText)"
    for ticks, unit in (
        ([100.001, 100.0015, 100.002], None),
        ([1.0052e-28, 1.0056e-28], None),
        ([1_000_000.5, 1_000_001.0], None),
        ([475_301_000, 475_302_000], "bytes"),
    ):
        found = page.evaluate(texts, [ticks, unit])
        assert len(set(found)) == len(ticks), found
    assert page.evaluate(texts, [[0.1, 0.2], None]) == ["0.1", "0.2"]


def test_metrics_are_filtered_by_words_of_their_names(odd_runs, open_page):
    page = open_page(f"{odd_runs}/{select('wide')}")
    drawn(page, "loss")
    page.get_by_label("Filter metrics").fill("NORM _12")
    page.wait_for_function("() => document.querySelectorAll('section.plot').length === 11")  # 12 and 120 to 129
    assert len(drawn(page, "layer_125/norm")["series"]) == 1
    page.reload()
    page.wait_for_function("() => document.querySelectorAll('section.plot').length === 11")
    page.get_by_label("Filter metrics").fill("accuracy")
    page.wait_for_selector("text=None of the 302 metrics")
    page.get_by_label("Filter metrics").fill("")
    drawn(page, "loss")


def test_long_names_of_runs_can_be_told_apart(odd_runs, open_page):
    names = [f"sweep/{'long-' * 20}{number}" for number in (1, 2)]
    page = open_page(f"{odd_runs}/{select(*names)}")
    drawn(page, "loss", "drawn.series.length === 2")
    titles = page.locator(".run.selected .title").all_inner_texts()
    assert sorted(title[-1] for title in titles) == ["1", "2"]
    plot(page, "loss").locator("canvas").hover(position={"x": 300, "y": 100})
    shown = plot(page, "loss").locator(".readout .name")
    assert sorted(each[-1] for each in shown.all_inner_texts()) == ["1", "2"]
    for each in (*shown.all(), *page.locator(".run.selected .title").all()):
        assert each.evaluate("(name) => name.scrollWidth <= name.clientWidth + 1")


def test_a_running_run_is_followed(open_page, tmp_path, runs):
    shutil.copytree(runs / "plain", tmp_path / "live")
    config = tmp_path / "live" / "config.yaml"
    config.write_text(config.read_text().replace("max_steps: 12", "max_steps: 100"))  # so that it is running
    with serving(tmp_path) as send:
        page = open_page(f"http://127.0.0.1:{send.port}")
        assert drawn(page, "loss")["series"][0]["points"] == 12
        write_lines(tmp_path / "live" / "metrics.json", {"step": 13, "loss": 0.5, "new metric": 1.0})
        drawn(page, "loss", "drawn.series[0].points === 13")
        assert drawn(page, "new metric")["series"][0]["points"] == 1
        shutil.rmtree(tmp_path / "live")
        page.wait_for_selector("text=There is no run yet")


def test_the_command_prints_a_url_with_which_other_addresses_need_the_token(open_page, runs):
    command = [sys.executable, "-m", "trainwright", "watch", str(runs), "--port", "0", "--host", "0.0.0.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            found = re.fullmatch(
                r"Watching .* at (http://0\.0\.0\.0:\d+/\?token=\S+) \(Ctrl-C ends\)\n", process.stdout.readline()
            )
            address = found[1].replace("0.0.0.0", "127.0.0.1")
            page = open_page(address)
            assert "token" not in page.url.partition("#")[0]
            drawn(page, "loss")
            page.close()  # it would ask for newer values of a server that has ended
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_the_report_draws_its_curves_without_a_server(open_page, runs, tmp_path, browser):
    path = write_report(runs / "group" / "broken", tmp_path / "report.html")
    page = open_page(f"file://{path}")
    loss = drawn(page, "loss")
    assert [each["label"] for each in loss["series"]] == ["loss", "valid/loss"]
    assert {"anomaly", "restart", "best"} <= {mark["kind"] for mark in loss["marks"]}
    assert page.evaluate("[...document.images].every((each) => each.naturalWidth > 0)")
    page.get_by_role("button", name="smooth").click()
    assert drawn(page, "loss", "drawn.series.some((each) => each.smooth)")
    page.select_option("select", "time")
    plot(page, "loss").locator("canvas").focus()
    page.keyboard.press("+")
    assert drawn(page, "loss", "drawn.series[0].points < 12")
    hostile = write_report(runs / HOSTILE.replace("/", ""), tmp_path / "hostile.html")
    page.goto(f"file://{hostile}")
    assert page.title() == HOSTILE
    assert len(drawn(page, "loss")["series"]) == 1
    assert page.locator("img[src=x]").count() == 0
    static = browser.new_context(java_script_enabled=False).new_page()
    static.goto(f"file://{path}")
    assert static.locator("noscript svg path, svg[role=img] path").count() >= 2
    static.context.close()
