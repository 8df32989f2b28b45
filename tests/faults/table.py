"""The table of faults in docs/reliability.md: how it is read, and how it is replaced."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: made by `make reliability` -->", "<!-- faults: end -->"
HEAD = "| fault | where | cases | survived |\n|---|---|---|---|\n"
ROW = re.compile(r"^\| (.+?) \| `tests/faults/(\S+)` \| (\d+) \| (\d+) \|$", flags=re.MULTILINE)


@dataclass
class Row:
    """A fault, the file that tries it, in how many cases, and how many of them lost nothing."""

    fault: str
    where: str
    cases: int = 0
    survived: int = 0


def read_table(page):
    _, _, rest = page.partition(BEGIN)
    table, _, _ = rest.partition(END)
    return [Row(fault, where, int(cases), int(survived)) for fault, where, cases, survived in ROW.findall(table)]


def replace_table(page, rows):
    before, begin, rest = page.partition(BEGIN)
    _, end, behind = rest.partition(END)
    assert begin, f"{PAGE.name} lacks the line {BEGIN}"
    assert end, f"{PAGE.name} lacks the line {END}"
    lines = [
        f"| {row.fault} | `tests/faults/{row.where}` | {row.cases} | {row.survived} |\n"
        for row in sorted(rows, key=lambda row: (row.where, row.fault))
    ]
    return f"{before}{BEGIN}\n{HEAD}{''.join(lines)}{END}{behind}"
