"""trainwright trains any PyTorch model, lets its user change any part of the training, and never loses a step.

Public names are imported on first use, so that `import trainwright` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_PUBLIC = {
    "AutoModel": "trainwright.models.model",
    "Benchmark": "trainwright.benchmarks.benchmark",
    "CallbackHook": "trainwright.hooks.callback",
    "Component": "trainwright.config",
    "EventStorage": "trainwright.events",
    "Every": "trainwright.hooks.callback",
    "Hook": "trainwright.loop.hook",
    "Interrupted": "trainwright.api.run",
    "Mean": "trainwright.events",
    "RunConfig": "trainwright.config",
    "StepResult": "trainwright.loop.update",
    "Task": "trainwright.loop.task",
    "Trainer": "trainwright.loop.trainer",
    "Writer": "trainwright.writers.writer",
    "add_training_args": "trainwright.api.arguments",
    "build_component": "trainwright.build.run",
    "build_trainer": "trainwright.build.run",
    "experiment": "trainwright.api.experiments",
    "get_args": "trainwright.api.arguments",
    "get_event_storage": "trainwright.events",
    "load_checkpoint": "trainwright.export.load",
    "load_experiment": "trainwright.api.experiments",
    "load_hf_dataset": "trainwright.data.hf_dataset",
    "register": "trainwright.registry.resolve",
    "run_experiment": "trainwright.api.run",
    "train": "trainwright.api.functions",
    "training_main": "trainwright.api.training_main",
}

__all__ = [*_PUBLIC]  # noqa: PLE0604 # the table above is the one list of public names

if TYPE_CHECKING:
    from trainwright.api.arguments import add_training_args as add_training_args
    from trainwright.api.arguments import get_args as get_args
    from trainwright.api.experiments import experiment as experiment
    from trainwright.api.experiments import load_experiment as load_experiment
    from trainwright.api.functions import train as train
    from trainwright.api.run import Interrupted as Interrupted
    from trainwright.api.run import run_experiment as run_experiment
    from trainwright.api.training_main import training_main as training_main
    from trainwright.benchmarks.benchmark import Benchmark as Benchmark
    from trainwright.build.run import build_component as build_component
    from trainwright.build.run import build_trainer as build_trainer
    from trainwright.config import Component as Component
    from trainwright.config import RunConfig as RunConfig
    from trainwright.data.hf_dataset import load_hf_dataset as load_hf_dataset
    from trainwright.events import EventStorage as EventStorage
    from trainwright.events import Mean as Mean
    from trainwright.events import get_event_storage as get_event_storage
    from trainwright.export.load import load_checkpoint as load_checkpoint
    from trainwright.hooks.callback import CallbackHook as CallbackHook
    from trainwright.hooks.callback import Every as Every
    from trainwright.loop.hook import Hook as Hook
    from trainwright.loop.task import Task as Task
    from trainwright.loop.trainer import Trainer as Trainer
    from trainwright.loop.update import StepResult as StepResult
    from trainwright.models.model import AutoModel as AutoModel
    from trainwright.registry.resolve import register as register
    from trainwright.writers.writer import Writer as Writer


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"trainwright has no {name!r}; it has {', '.join(sorted(_PUBLIC))}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
