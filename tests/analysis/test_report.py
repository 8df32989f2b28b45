"""The text of a report: source lines with carets, clickable locations, and colours on request."""

from __future__ import annotations

import re
from pathlib import Path

from trainwright.analysis.findings import Finding, Findings, Report, line_of_setting
from trainwright.config import Origin
from trainwright.user_code.locations import SourceLocation


def rendered(*findings, **facts):
    found = Findings()
    for each in findings:
        found.add(each)
    return Report(found, **facts).render()


def test_a_finding_shows_location_source_line_mark_and_advice():
    location = SourceLocation("run.yaml", 12, "  optimizer: {type: adamv}", (20, 25))
    assert rendered(Finding("error", 'no optimizer "adamv".', "Use adamw.", location)) == (
        'run.yaml:12: error: no optimizer "adamv".\n'
        "  12 | optimizer: {type: adamv}\n"
        "     |                   ^^^^^\n"
        "  Use adamw.\n"
        "\n"
        "1 error."
    )


def test_the_whole_line_is_marked_without_columns():
    assert "  3 | a: b\n    | ^^^^" in rendered(Finding("remark", "no.", "", SourceLocation("x.py", 3, "  a: b  ")))


def test_a_long_line_is_cut_around_the_marked_columns():
    text = "x = [" + "1, " * 200 + "wrong]"
    start = text.index("wrong")
    lines = rendered(Finding("error", "no.", "", SourceLocation("x.py", 3, text, (start, start + 5)))).splitlines()
    assert len(lines[1]) < 160
    assert lines[1][lines[2].index("^") : lines[2].index("^") + 5] == "wrong"
    assert lines[2].count("^") == 5


def test_a_location_is_never_wrapped():
    file = "a/very/long/path/" * 20 + "net.py"
    assert f"{file}:7: error: no." in rendered(Finding("error", "no.", "", SourceLocation(file, 7))).splitlines()


def test_the_same_problem_at_the_same_line_counts_once_and_an_error_wins():
    location = SourceLocation("x.py", 1)
    text = rendered(*(Finding(severity, "no.", "", location) for severity in ("remark", "error", "remark")))
    assert text == "x.py:1: error: no.\n\n1 error."


def test_remarks_alone_are_ok_and_are_counted():
    text = rendered(Finding("remark", "hm."), Finding("remark", "hm!"), facts=["Net with 3 parameters", "5 samples"])
    assert text.splitlines()[-1] == "ok, 2 remarks: Net with 3 parameters; 5 samples."


def test_skipped_stages_are_listed():
    text = rendered(Finding("error", "no."), checked=["config"], skipped=["evaluation"])
    assert text.endswith("1 error.\nChecked: config.\nNot checked, because an earlier stage failed: evaluation.")


def test_colours_change_nothing_but_colour():
    report = Report(Findings(), facts=["Net"])
    report.findings.add(Finding("error", "no.", "Do.", SourceLocation("x.py", 3, "a = b", (0, 1))))
    coloured = report.render(colour=True)
    assert "\033[1;31merror\033[0m" in coloured
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == report.render()


def marked(location):
    return location.text[slice(*location.columns)]


def test_a_setting_is_marked_at_the_first_word_in_its_line(in_tmp):
    Path("run.yaml").write_text("a: 1\noptimizer: {type: adamv, lr: 1}  # type\n")
    location = line_of_setting(Origin("run.yaml", 2), ["adam", "adamv", "type"])
    assert (str(location), marked(location)) == ("run.yaml:2", "adamv")
    assert line_of_setting(Origin("run.yaml", 2), ["nothing"]).columns is None
    assert line_of_setting(None) is None


def test_a_section_that_the_file_lacks_has_no_text(in_tmp):
    Path("run.yaml").write_text("a: 1\n")
    assert line_of_setting(Origin("run.yaml", 1), ["checkpoint"]).text == ""


def test_the_source_of_an_override_is_its_text():
    location = line_of_setting(Origin("override trainer.lr=x", 0), ["lr"])
    assert (str(location), location.text, marked(location)) == ("override trainer.lr=x", "trainer.lr=x", "lr")
