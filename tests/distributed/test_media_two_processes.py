"""Images, histograms and texts of two ranks: shards add up, and ranks that put different things do not wait."""

import json
from pathlib import Path

import numpy as np
import torch
from tests.distributed.forked_launch import forget_groups, launch_well
from tests.faults.runs import config_of

from trainwright import Hook, RunConfig, Trainer, Writer, build_trainer, get_event_storage
from trainwright.checkpoint.run_folder import run_id
from trainwright.events.media import Histogram
from trainwright.trainers.language_model import LanguageModelTrainer

STAGES = Path(__file__).parent / "pipeline_run.yaml"

LAYOUTS = {"replicate": {"replicate": 2}, "fsdp": {"fsdp": 2}}
QUICK = ("trainer.max_steps=2", "log.every_steps=1", "writers=[]", "trainer.schedule={type: constant}")


class Drawing(Hook):
    """Puts the weights on every rank, and other names on each."""

    def after_step(self):
        storage, rank = self.trainer.storage, self.trainer.ranks.rank
        for name, parameter in self.trainer.model.named_parameters():
            storage.put_histogram(name, parameter)
            if parameter.ndim == 2:
                storage.put_image(name, parameter, normalize=True)
        storage.put_image("rank", torch.full((2, 2), rank + 1, dtype=torch.uint8))
        storage.put_text("rank", f"rank {rank}")
        if rank == 1:
            storage.put_image("second_only", torch.ones(2, 2))
            storage.put_histogram("second_only", torch.ones(2))


class Recording(Writer):
    def begin(self, run):
        self.run = run

    def write(self, storage):
        self.images = {name: image.max() for name, image in storage.images.items() if "rank" in name or "only" in name}
        self.matrices = {name: image for name, image in storage.images.items() if name not in self.images}
        self.histograms, self.texts = storage.histograms, storage.texts


class Written(Trainer):
    @classmethod
    def build_writers(cls, build):
        return [*build.writers(), *([Recording()] if build.ranks.is_first else [])]

    @classmethod
    def build_hooks(cls, build):
        return [*super().build_hooks(build), Drawing()]

    def eval_step(self, batch):
        get_event_storage().put_text("eval", f"rank {self.ranks.rank}")
        return super().eval_step(batch)


class Stages(LanguageModelTrainer):
    @classmethod
    def build_writers(cls, build):
        return Written.build_writers(build)

    @classmethod
    def build_hooks(cls, build):
        return Written.build_hooks(build)


def full(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def act(folder):
    for name, mesh in LAYOUTS.items():
        trainer = build_trainer(config_of(folder / name, *QUICK, f"runtime.mesh={json.dumps(mesh)}"), Written)
        trainer.train()
        weights = {name: full(each).detach() for name, each in trainer.model.named_parameters()}
        if trainer.is_main_process:
            (writer,) = trainer.context.writers
            assert writer.images == {"rank": 1}
            assert writer.texts == {"rank": "rank 0", "valid/eval": "rank 0"}
            assert writer.histograms.keys() == weights.keys()
            assert writer.run.id == run_id(folder / name)
            assert writer.matrices.keys() == {each for each, values in weights.items() if values.ndim == 2}
            for parameter, image in writer.matrices.items():
                values = weights[parameter]
                pixels = (values - values.min()) / (values.max() - values.min()) * 255
                np.testing.assert_allclose(image[:, :, 0], pixels, atol=0.51)
            for parameter, values in weights.items():
                check(writer.histograms[parameter], values)
                assert writer.histograms[parameter].members == ((0, 1) if name == "fsdp" else ())
        forget_groups()
    stages(folder)


def stages(folder):
    """Each stage of a pipeline has layers of its own, and its first rank puts what these compute."""
    overrides = ("trainer.max_steps=1", "data.eval={}", "evaluation={}", "runtime.mesh={pipeline: 2}", "writers=[]")
    trainer = build_trainer(RunConfig.load(STAGES, [*overrides, f"output_dir={folder}"]), Stages)
    trainer.train()
    names = trainer.ranks.gather([name for name, _ in trainer.model.named_parameters()])
    if trainer.is_main_process:
        (writer,) = trainer.context.writers
        assert writer.histograms.keys() == {*names[0], *names[1], "second_only"}
        assert writer.images == {"rank": 1, "second_only": 255}
        assert writer.texts == {"rank": "rank 0"}


def check(histogram: Histogram, values):
    counts, right = histogram.buckets()
    assert histogram.num_values == values.numel()
    assert (histogram.minimum, histogram.maximum) == (values.min(), values.max())
    np.testing.assert_allclose(histogram.total, values.sum(), rtol=1e-4, atol=1e-6)
    below = [int((values.numpy() < edge).sum()) for edge in right[:-1]]
    assert np.abs(np.cumsum(counts)[:-1] - below).max(initial=0) <= 1  # a value may be on an edge


def test_shards_add_up_and_of_anything_else_the_first_rank_s_is_written(tmp_path):
    launch_well(tmp_path, 2, act)
