"""What a person reads: carets under the culprit, places that can be clicked, and colours only where asked."""

from __future__ import annotations

from trainwright.analysis.findings import Finding, Findings, Report
from trainwright.user_code.locations import SourceLocation


def rendered(*findings, **facts):
    found = Findings()
    for each in findings:
        found.add(each)
    return Report(found, **facts).render()


def test_a_finding_shows_its_place_its_line_the_culprit_and_the_advice():
    location = SourceLocation("run.yaml", 12, "  optimizer: {type: adamv}", (20, 25))
    assert rendered(Finding("error", 'no optimizer "adamv".', "Use adamw.", location)) == (
        'run.yaml:12: error: no optimizer "adamv".\n'
        "  12 | optimizer: {type: adamv}\n"
        "     |                   ^^^^^\n"
        "  Use adamw.\n"
        "\n"
        "1 error."
    )


def test_a_whole_line_is_marked_where_no_culprit_is_known():
    assert "  3 | a: b\n    | ^^^^" in rendered(Finding("remark", "no.", "", SourceLocation("x.py", 3, "  a: b  ")))


def test_a_culprit_far_to_the_right_is_shown_with_what_is_around_it():
    text = "x = [" + "1, " * 200 + "wrong]"
    start = text.index("wrong")
    lines = rendered(Finding("error", "no.", "", SourceLocation("x.py", 3, text, (start, start + 5)))).splitlines()
    assert len(lines[1]) < 160
    assert lines[1][lines[2].index("^") : lines[2].index("^") + 5] == "wrong"
    assert lines[2].count("^") == 5


def test_a_place_is_never_broken_over_lines():
    file = "a/very/long/path/" * 20 + "net.py"
    assert f"{file}:7: error: no." in rendered(Finding("error", "no.", "", SourceLocation(file, 7))).splitlines()


def test_the_same_problem_at_the_same_line_counts_once_and_an_error_wins():
    location = SourceLocation("x.py", 1)
    text = rendered(*(Finding(severity, "no.", "", location) for severity in ("remark", "error", "remark")))
    assert text == "x.py:1: error: no.\n\n1 error."


def test_remarks_alone_are_ok_and_are_counted():
    text = rendered(Finding("remark", "hm."), Finding("remark", "hm!"), facts=["Net with 3 parameters", "5 samples"])
    assert text.splitlines()[-1] == "ok, 2 remarks: Net with 3 parameters; 5 samples."


def test_what_was_not_checked_is_said():
    text = rendered(Finding("error", "no."), checked=["config"], skipped=["evaluation"])
    assert text.endswith("1 error.\nChecked: config.\nNot checked, for it needs what failed: evaluation.")


def test_colours_change_nothing_but_colour():
    import re

    report = Report(Findings(), facts=["Net"])
    report.findings.add(Finding("error", "no.", "Do.", SourceLocation("x.py", 3, "a = b", (0, 1))))
    coloured = report.render(colour=True)
    assert "\033[1;31merror\033[0m" in coloured
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == report.render()
