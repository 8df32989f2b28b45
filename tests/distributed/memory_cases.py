"""Two ranks of which one has less memory; for test_memory_two_processes.py."""

import json
from pathlib import Path

import torch
from torch import nn

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.errors import TrainwrightError
from trainwright.parallel import processes

PROJECT = Path(__file__).parents[1] / "project"


class Uneven(Trainer):
    """The second rank's device has memory for 3 samples, the first's for more."""

    limits = (6, 3)

    @classmethod
    def build_model(cls, build):
        model = nn.Linear(4, 2)
        torch.nn.init.ones_(model.weight)
        return model

    def forward(self, x, labels):
        if len(x) > self.limits[processes.local_rank()]:
            raise torch.OutOfMemoryError("no memory")
        return nn.functional.cross_entropy(self.model(x), labels)


class Broken(Uneven):
    """The second rank alone fails, for another reason."""

    def forward(self, x, labels):
        if processes.local_rank() == 1:
            raise KeyError("labels")
        return super().forward(x, labels)


def main(folder):
    common = [f"output_dir={folder}", "model=null", "trainer.max_steps=2", "trainer.global_batch_size=24"]
    common += ["evaluation={}", "data.eval={}", "runtime.mesh={}"]
    facts = {}
    for name, micro in (("found", "auto"), ("told", 3)):
        given = [*common, f"name={name}", f"trainer.micro_batch_size={micro}"]
        trainer = build_trainer(RunConfig.load(PROJECT / "run.yaml", given), Uneven)
        trainer.train()
        facts[name] = trainer.model.weight.tolist()
    try:
        given = [*common, "name=broken", "trainer.micro_batch_size=auto"]
        build_trainer(RunConfig.load(PROJECT / "run.yaml", given), Broken)
    except (KeyError, TrainwrightError) as error:
        facts["broken"] = f"{type(error).__name__}: {error}"
    (Path(folder) / f"{processes.local_rank()}.json").write_text(json.dumps(facts))
