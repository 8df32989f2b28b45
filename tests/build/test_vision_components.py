"""torchvision's datasets and transforms, and timm's models with their data config, from YAML alone."""

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.messages import raises
from tests.vision import import_timm, import_torchvision

from trainwright import RunConfig, build_component, build_trainer
from trainwright.analysis.check import check_run
from trainwright.errors import ConfigError, DataError

IMAGES = """
data:
  train:
    type: "torchvision.datasets:ImageFolder"
    root: images
    transform:
      type: "torchvision.transforms:Compose"
      transforms:
        - {type: "torchvision.transforms:RandomHorizontalFlip", p: 0.5}
        - {type: "torchvision.transforms:RandomCrop", size: 16}
        - {type: "torchvision.transforms:ToTensor"}
        - {type: "torchvision.transforms:Normalize", mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}
  eval:
    type: "torchvision.datasets:ImageFolder"
    root: images
    transform: {type: "torchvision.transforms:ToTensor"}
trainer:
  type: classification
  max_steps: 4
  global_batch_size: 6
  micro_batch_size: 3
  loss: {type: "torch.nn:CrossEntropyLoss", label_smoothing: 0.1}
  optimizer: {type: sgd, lr: 0.01}
checkpoint: {every_steps: 2}
"""
RESNET = 'model: {type: "timm:create_model", model_name: resnet10t, num_classes: 3, args: {pretrained: false}}'


@pytest.fixture
def images(in_tmp):
    """Three classes of four small images, each with its own color."""
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for number in range(3):
        folder = Path("images", f"class{number}")
        folder.mkdir(parents=True)
        for index in range(4):
            pixels = generator.integers(0, 100, (20, 20, 3), dtype=np.uint8)
            pixels[..., number] += 100
            image.fromarray(pixels).save(folder / f"{index}.png")
    return in_tmp


def write(folder, *texts):
    (folder / "run.yaml").write_text("\n".join(map(textwrap.dedent, texts)))
    return folder / "run.yaml"


def test_an_image_folder_trains_a_timm_model_and_resumes_exactly(images):
    import_timm()
    path = write(images, RESNET, IMAGES)
    whole = build_trainer(RunConfig.load(path, ["name=whole"]))
    logs = whole.train()
    assert {"eval/loss", "eval/accuracy"} <= logs.keys()
    build_trainer(RunConfig.load(path, ["trainer.max_steps=2"])).train()
    resumed = build_trainer(RunConfig.load(path, ["data.num_workers=2"]))
    resumed.train()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, whole.model.state_dict()[name]), name


def test_check_accepts_pairs_of_images(images):
    import_timm()
    path = write(images, RESNET, IMAGES)
    found = [each for each in check_run(path).findings if each.severity == "error"]
    assert found == []


def test_a_torchvision_model_gets_pairs_by_its_first_parameter(images):
    import_torchvision()
    path = write(images, 'model: {type: "torchvision.models:squeezenet1_1", num_classes: 3}', IMAGES)
    trainer = build_trainer(RunConfig.load(path, ["trainer.max_steps=1", "data.eval=null"]))
    assert trainer.train_data.collator.names == ("x", "labels")


@pytest.mark.parametrize("is_training", [False, True])
def test_the_transform_of_a_timm_model_is_that_of_its_data_config(in_tmp, is_training):
    timm = import_timm()
    image = pytest.importorskip("PIL.Image").new("RGB", (300, 200), (255, 0, 0))
    text = f"""
    data:
      train:
        type: "torchvision.datasets:FakeData"
        size: 4
        transform: {{type: timm, model_name: resnet10t, is_training: {str(is_training).lower()}}}
    """
    transform = build_component(write(in_tmp, text), "data.train").transform
    model = timm.create_model("resnet10t")
    expected = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=is_training)
    assert str(transform) == str(expected)
    assert transform(image).shape == (3, 176, 176)


@pytest.mark.parametrize("options", ["model_name: resnet10x", "model_name: resnet10t, re_prb: 0.1"])
def test_a_wrong_name_in_a_timm_transform_is_located(in_tmp, options):
    import_timm()
    text = f'data:\n  train:\n    type: "torchvision.datasets:FakeData"\n    transform: {{type: timm, {options}}}\n'
    with raises(ConfigError, "data.train.transform", "Did you mean", at="run.yaml:4", golden=False):
        build_component(write(in_tmp, text), "data.train")


def test_images_without_a_transform_are_explained(images):
    import_timm()
    path = write(images, RESNET, IMAGES)
    with raises(DataError, "PIL", "transform"):
        build_trainer(RunConfig.load(path, ["data.train.transform=null"])).train()
