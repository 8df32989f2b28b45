"""Components as arguments of components: in lists and mappings, with checked signatures, lines and trust."""

import textwrap

import pytest
import torch
from tests.messages import raises

from trainwright import RunConfig, build_component
from trainwright.config import Component
from trainwright.errors import ComponentError, TrustError
from trainwright.registry import resolve as registry
from trainwright.registry.trust import reject_untrusted

PARTS = """
class Rows:
    def __init__(self, transform=None, steps=(), options=None, source=None):
        self.transform, self.steps, self.options = transform, steps, options

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"x": index}

class Chain:
    def __init__(self, transforms):
        self.transforms = transforms

class Scale:
    def __init__(self, factor, dtype=None):
        self.factor, self.dtype = factor, dtype

def shift(value, by=1):
    return value + by

def make(seed):
    raise AssertionError("not called")
"""


@pytest.fixture
def project(in_tmp):
    (in_tmp / "datasets").mkdir()
    (in_tmp / "datasets" / "parts.py").write_text(PARTS)
    return in_tmp


def run_file(folder, train):
    path = folder / "run.yaml"
    path.write_text("data:\n  train:\n" + textwrap.indent(textwrap.dedent(train), "    "))
    return path


def test_a_list_of_components_inside_a_component_is_built(project):
    path = run_file(
        project,
        """
        type: parts.Rows
        transform:
          type: parts.Chain
          transforms:
            - {type: parts.Scale, factor: 2, dtype: {type: "torch:float32"}}
            - {type: "datasets/parts.py:shift", by: 5}
        """,
    )
    chain = build_component(path, "data.train").transform
    scale, shift = chain.transforms
    assert (scale.factor, scale.dtype) == (2, torch.float32)
    assert shift(1) == 6


def test_a_mapping_with_a_type_of_the_user_s_own_is_passed_on(project):
    path = run_file(
        project, "type: parts.Rows\noptions: {type: rms, eps: 1e-5, inner: {type: parts.Scale, factor: 1}}\n"
    )
    options = build_component(path, "data.train").options
    assert (options["type"], options["eps"]) == ("rms", 1e-5)
    assert options["inner"].factor == 1


@pytest.mark.parametrize(
    ("train", "mentioned", "line"),
    [
        ("type: parts.Rows\ntransform:\n  type: parts.Scale\n  factr: 2\n", ["data.train.transform", "factr"], 6),
        ("type: parts.Rows\ntransform:\n  type: parts.Scale\n", ["data.train.transform", "factor"], 5),
        ("type: parts.Rows\nsteps:\n  - {type: parts.Scale, factor: 1}\n  - {type: parts.Scael}\n", ["Scael"], 6),
        ("type: parts.Rows\ntransform: {type: torchvision.transforms.ToTensor}\n", ["torchvision.transforms:"], 4),
        ("type: parts.Rows\ntransform: {type: tim}\n", ["data.train.transform.type", "timm"], 4),
        ("type: parts.Rows\ntransform: {type: 'os:system'}\n", ["data.train.transform.type"], 4),
        ("type: parts.Rows\ntransform: {type: 'torch:float32', x: 1}\n", ["float32", "arguments"], 4),
    ],
)
def test_a_wrong_nested_component_is_located(project, train, mentioned, line):
    with raises(ComponentError, *mentioned, at=f"run.yaml:{line}"):
        build_component(run_file(project, train), "data.train")


def test_a_function_of_two_arguments_is_not_a_transform(project):
    with raises(ComponentError, "data.train.transform", "into", at="run.yaml:4"):
        build_component(run_file(project, "type: parts.Rows\ntransform: {type: parts.shift, into: 3}\n"), "data.train")


def test_nested_types_of_an_untrusted_file_are_not_imported(project):
    config = RunConfig.load(run_file(project, "type: digits\npart: {type: 'datasets/parts.py:Scale', factor: 1}\n"))
    config._untrusted_file = "runs/x/config.yaml"
    with raises(TrustError, "data.train.part.type", "datasets/parts.py:Scale"):
        reject_untrusted(config)


def test_a_nested_component_is_the_same_from_python(project):
    transform = Component("parts.Chain", transforms=[Component("parts.Scale", factor=3)])
    options = {"project_dir": project, "label": "data.train"}
    made = registry.instantiate("dataset", Component("parts.Rows", transform=transform), **options)
    assert made.transform.transforms[0].factor == 3
