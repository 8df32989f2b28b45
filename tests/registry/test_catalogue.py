"""The catalogue reads parameters from sources; for the built-ins it must agree with Python's own signatures."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from textwrap import dedent

import pytest

from trainwright.registry import resolve as registry
from trainwright.registry.catalogue import PROVIDED, read_catalogue

BUILT_INS = [(kind, name) for kind, names in registry.BUILT_INS.items() for name in names]


def write(folder, **files):
    """Writes `kind_folder__stem=text` files."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text))


def entries_of(folder, kind):
    """The user's own entries of a kind, by type."""
    found = read_catalogue(folder, [kind]).entries
    return {entry.type: entry for entry in found if entry.type not in registry.BUILT_INS[kind]}


def shown(entry):
    return [str(one) for one in entry.signature.parameters]


@pytest.fixture(scope="module")
def built_ins(tmp_path_factory):
    return {(entry.kind, entry.type): entry for entry in read_catalogue(tmp_path_factory.mktemp("empty")).entries}


@pytest.mark.parametrize(("kind", "name"), [pair for pair in BUILT_INS if pair[0] != "trainer"])
def test_a_built_in_s_parameters_are_those_of_its_real_signature(built_ins, kind, name):
    real = inspect.signature(registry.find(kind, name, project_dir="."))
    hidden = {"project_dir", *PROVIDED.get(kind, ()), *(["kinds"] if name == "muon" else [])}
    expected = {
        one.name: one.default
        for one in real.parameters.values()
        if one.name not in hidden and one.kind is not one.VAR_KEYWORD
    }
    found = built_ins[kind, name].signature
    assert [one.name for one in found.parameters] == list(expected)
    for one in found.parameters:
        default = inspect.Parameter.empty if one.default is None else ast.literal_eval(one.default)
        assert default == expected[one.name]


@pytest.mark.parametrize(("kind", "name"), BUILT_INS)
def test_every_built_in_has_a_location_and_a_summary(built_ins, kind, name):
    entry = built_ins[kind, name]
    target = registry.find(kind, name, project_dir=".")
    file, _, line = entry.location.rpartition(":")
    assert inspect.getsourcefile(target).endswith(file.replace("../", ""))
    assert int(line) > 1
    assert len(entry.summary) > 20


def test_nothing_is_imported(tmp_path):
    write(tmp_path, models__loud="raise SystemExit('run')\nclass Net: pass\n")
    program = (
        "import sys\nfrom pathlib import Path\nfrom trainwright.registry.catalogue import read_catalogue\n"
        f"found = read_catalogue(Path({str(tmp_path)!r}))\n"
        "assert any(entry.type == 'loud.Net' for entry in found.entries)\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_user_s_parameters_defaults_and_docstring_are_read(tmp_path):
    write(
        tmp_path,
        optimizers__lion='''
        import torch
        EPS = 1e-8

        class Lion(torch.optim.Optimizer):
            """Sign momentum.

            More of it.
            """
            def __init__(self, params, lr: float, eps=EPS, *, betas=(0.9, 0.99), clip=max):
                pass
        ''',
    )
    entry = entries_of(tmp_path, "optimizer")["lion.Lion"]
    assert shown(entry) == ["lr", "eps=1e-08", "betas=(0.9, 0.99)", "clip=max"]
    assert entry.signature.parameters[0].annotation == "float"
    assert entry.summary == "Sign momentum."
    assert entry.doc.endswith("More of it.")
    assert entry.location.endswith("optimizers/lion.py:5")


def test_an_inherited_constructor_is_followed_through_the_package(tmp_path):
    write(
        tmp_path,
        schedules__mine="""
        from trainwright.optim import schedules
        from trainwright.optim.schedules import Step as Stairs

        class Bumpy(schedules.Cosine):
            pass

        class Steep(Stairs):
            pass
        """,
        hooks__info="from trainwright import Hook\nclass Info(Hook):\n    pass\n",
    )
    found = entries_of(tmp_path, "schedule")
    assert shown(found["mine.Bumpy"]) == ["minimum=0.0", "warmup_steps=None", "warmup_fraction=None"]
    assert shown(found["mine.Steep"])[0] == "every_steps=None"
    assert entries_of(tmp_path, "hook")["info.Info"].signature == ((), "")


def test_an_inherited_constructor_is_followed_through_the_project(tmp_path):
    write(
        tmp_path,
        hooks__base="class Base:\n    def __init__(self, every=5): pass\n",
        hooks__near="from .base import Base\nclass Near(Base): pass\n",
        models__far="from ..hooks import base\nclass Far(base.Base): pass\n",
        tasks__absolute="from hooks.base import Base as B\nclass Absolute(B): pass\n",
    )
    assert shown(entries_of(tmp_path, "hook")["near.Near"]) == ["every=5"]
    assert shown(entries_of(tmp_path, "model")["far.Far"]) == ["every=5"]
    assert shown(entries_of(tmp_path, "task")["absolute.Absolute"]) == ["every=5"]


def test_arguments_that_are_passed_on_to_the_base_are_the_base_s(tmp_path):
    write(
        tmp_path,
        schedules__mine="""
        from trainwright.optim.schedules import Linear

        class Half(Linear):
            def __init__(self, period, **rest):
                super().__init__(minimum=0.5, **rest)
        """,
    )
    assert shown(entries_of(tmp_path, "schedule")["mine.Half"]) == [
        "period",
        "warmup_steps=None",
        "warmup_fraction=None",
    ]


def test_a_base_that_no_file_tells_of_is_named(tmp_path):
    write(tmp_path, models__net="import missing_lib\nclass Net(missing_lib.Model): pass\n")
    assert entries_of(tmp_path, "model")["net.Net"].signature.open_to == "missing_lib.Model"


def test_a_dataclass_has_its_fields_as_parameters(tmp_path):
    write(
        tmp_path,
        collators__pad="""
        from dataclasses import dataclass, field
        from typing import ClassVar

        @dataclass(frozen=True)
        class Pad:
            length: int
            draws_nothing: ClassVar[bool] = True
            value: float = 0.0
            names: list = field(default_factory=list)
            cache: dict = field(init=False)
        """,
    )
    assert shown(entries_of(tmp_path, "collator")["pad.Pad"]) == ["length", "value=0.0", "names=list"]


def test_a_trainer_s_parameters_are_the_options_that_its_code_reads(tmp_path):
    write(
        tmp_path,
        trainers__mine="""
        from trainwright import Trainer

        class First(Trainer):
            def forward(self, **batch):
                return self.config.trainer.penalty * self.config.trainer.max_steps

        class Second(First):
            def post_init(self):
                self.bonus = getattr(self.config.trainer, "bonus", 0.5)
        """,
    )
    found = entries_of(tmp_path, "trainer")
    assert shown(found["mine.First"]) == ["penalty"]
    assert shown(found["mine.Second"]) == ["penalty", "bonus=0.5"]


def test_a_file_that_does_not_parse_is_named_and_the_rest_is_listed(tmp_path):
    write(tmp_path, hooks__a="class A: pass\n", hooks__broken="import os\n\nclass B(:\n", hooks__c="class C: pass\n")
    (tmp_path / "hooks" / "nul.py").write_bytes(b"class N: pass\n\0")
    found = read_catalogue(tmp_path, ["hook"])
    assert {"a.A", "c.C"} <= {entry.type for entry in found.entries}
    locations = [one.location for one in found.unreadable]
    assert locations[0].endswith("hooks/broken.py:3")
    assert "hooks/nul.py:" in locations[1]
    assert "invalid syntax" in found.unreadable[0].problem


def test_what_no_run_file_can_name_is_left_out(tmp_path):
    write(
        tmp_path,
        hooks__mixed="""
        import enum
        class Shown: pass
        class _Hidden: pass
        class Wrong(ValueError): pass
        class Bad(Exception): pass
        class Colour(enum.Enum): pass
        def helper(): pass
        """,
        hooks___private="class Private: pass\n",
        hooks__listed="__all__ = ['One']\nclass One: pass\nclass Two: pass\n",
    )
    assert list(entries_of(tmp_path, "hook")) == ["listed.One", "mixed.Shown"]


def test_registered_names_are_known(tmp_path):
    write(
        tmp_path,
        hooks__mine="""
        import trainwright
        @trainwright.register("hook", "mine")
        def make_mine(steps): pass
        """,
    )
    entry = entries_of(tmp_path, "hook")["mine.make_mine"]
    assert entry.registered == ("mine",)
    assert shown(entry) == ["steps"]


def test_files_that_import_each_other_in_a_circle_are_read(tmp_path):
    write(
        tmp_path,
        hooks__a="from .b import B\nclass A(B): pass\n",
        hooks__b="from .a import A\nclass B(A): pass\n",
        hooks__c="from .c import D\nclass C(D): pass\n",
    )
    found = entries_of(tmp_path, "hook")
    assert {"a.A", "b.B", "c.C"} == set(found)
