"""Prints how large and how deep the package is: `python tools/house.py`.

Sizes are read from the sources with `ast`; the figures of a step come from one real step of a small model on the CPU.
The 25 questions are in tools/questions.md: a reader who has seen only file names answers them.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "trainwright"
SMALL = 60
STEP_FILES = ("loop/trainer.py", "loop/update.py", "loop/outputs.py", "loop/task.py")


def main() -> None:
    """Prints the table, and with `--packages` the size of each package."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--packages", action="store_true", help="also print the net lines of each package")
    parser.add_argument("--list", action="store_true", help="also print what each figure counts")
    arguments = parser.parse_args()
    sources = {
        path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
        if "templates" not in path.relative_to(PACKAGE).parts
    }
    net = {name: net_lines(text) for name, text in sources.items()}
    small, assignments = small_files(sources), trainer_assignments(sources)
    names = repeated_class_names(sources)
    functions, frames, understood = trace_step()
    files = {code.co_filename for code in functions}
    lines = sum(text.count("\n") for name, text in sources.items() if str(PACKAGE / name) in files)
    rows = [
        ("net lines in src (files)", f"{sum(net.values()):,} ({len(net)})", "≤ 29,000 (≤ 230)"),
        (f"files under {SMALL} lines that are not registered components", len(small), "≤ 12"),
        ("functions of one plain CPU step", len(functions), "≤ 70"),
        ("files of one plain CPU step (lines)", f"{len(files)} ({lines:,})", "≤ 16"),
        ("files of loop/ between train_step and its result", len(understood), "4"),
        ("own frames from train_step to the model's forward", len(frames), "≤ 3"),
        ("assignments to trainer attributes outside loop/trainer.py", len(assignments), "0"),
        ("public class names used for several things, outside models/", len(names), "≤ 2"),
    ]
    width = max(len(name) for name, _, _ in rows)
    print(f"{'':{width}}  {'now':>14}  target")
    for name, value, target in rows:
        print(f"{name:{width}}  {value!s:>14}  {target}")
    if arguments.packages:
        sizes: Counter[str] = Counter()
        for name, count in net.items():
            sizes[name.split("/")[0]] += count
        print("\nnet lines by package")
        for name, count in sizes.most_common():
            print(f"{count:7,}  {name}")
    if arguments.list:
        show("small files", small)
        show("step functions", sorted(f"{Path(c.co_filename).relative_to(PACKAGE)}:{c.co_qualname}" for c in functions))
        show("frames", frames)
        show("files to read", understood)
        show("assignments", assignments)
        show("class names", [f"{name}: {', '.join(places)}" for name, places in names.items()])


def show(title: str, entries: list[str]) -> None:
    """Prints a list with its title."""
    print(f"\n{title}")
    for entry in entries:
        print(f"  {entry}")


def net_lines(text: str) -> int:
    """Counts lines of code: no blank lines, comments, docstrings or imports."""
    tree = ast.parse(text)
    left_out: set[int] = set()
    for node in ast.walk(tree):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        # A docstring, also below an attribute, is an expression that is only a string.
        is_docstring = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_import or is_docstring:
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - left_out)


def small_files(sources: dict[str, str]) -> list[str]:
    """Lists short files that hold no registered component."""
    from trainwright.config.builtin import BUILT_INS

    targets = {target.partition(":")[0] for names in BUILT_INS.values() for target in names.values()}
    components = {f"{module.removeprefix('trainwright.').replace('.', '/')}.py" for module in targets}
    return [
        name
        for name, text in sources.items()
        if text.count("\n") < SMALL
        and not name.endswith(("__init__.py", "__main__.py"))
        and name not in components
        and not name.startswith("commands/")
    ]


def trainer_assignments(sources: dict[str, str]) -> list[str]:
    """Lists where a trainer's attribute is assigned by code other than loop/trainer.py."""
    found = []
    for name, text in sources.items():
        if name == "loop/trainer.py":
            continue
        for node in ast.walk(ast.parse(text)):
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AugAssign | ast.AnnAssign)
                else []
            )
            flat = [each for target in targets for each in getattr(target, "elts", [target])]
            for target in flat:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value).split(".")[-1] in (
                    "trainer",
                    "_trainer",
                ):
                    found.append(f"{name}:{node.lineno} {ast.unparse(target)}")
    return found


def repeated_class_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Returns the public class names that more than one file defines."""
    places = defaultdict(list)
    for name, text in sources.items():
        if name.startswith("models/"):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def trace_step() -> tuple[set[CodeType], list[str], list[str]]:
    """Runs a small model; returns a plain step's functions, the frames to the forward, and the files of a step."""
    import torch

    from trainwright import train

    frames: list[str] = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            if recorder.is_inside and not frames:
                frames.extend(recorder.own_frames(sys._getframe(1)))
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

    rows = [{"x": torch.randn(4), "labels": torch.tensor(index % 2)} for index in range(64)]
    recorder = _Recorder(step=6)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # the key that signs run folders
        sys.setprofile(recorder)
        try:
            train(Net(), rows, max_steps=9, batch_size=4, lr=0.1, name="house", overrides=[f"output_dir={folder}"])
        finally:
            sys.setprofile(None)
    return recorder.functions, frames, sorted(recorder.step_files)


class _Recorder:
    """Notes the package's functions from one `train_step` to the next."""

    def __init__(self, step: int) -> None:
        self.functions: set[CodeType] = set()
        self.step_files: set[str] = set()
        self.is_inside = False
        self._number = 0
        self._step = step

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Is Python's profile function."""
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return
        is_step = code.co_qualname == "Trainer.train_step"
        if event == "return" and is_step:
            self.is_inside = False
        if event != "call":
            return
        if is_step:
            self._number += 1
            self.is_inside = self._number == self._step
        if self._number == self._step:
            self.functions.add(code)
            name = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            if self.is_inside and name.startswith("loop/"):
                self.step_files.add(name)

    def own_frames(self, frame: FrameType | None) -> list[str]:
        """Returns the package's frames from the model's caller up to `train_step`, which is left out."""
        found: list[str] = []
        while frame is not None and frame.f_code.co_qualname != "Trainer.train_step":
            if frame.f_code.co_filename.startswith(str(PACKAGE)):
                found.append(frame.f_code.co_qualname)
            frame = frame.f_back
        return found[::-1]


if __name__ == "__main__":
    main()
