"""Builds the sets of a run as its trainer and task would, and tells what each is made of; loads no model.

Which samples they hold is reading.py's to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.config import Component, RunConfig
from trainwright.data.fetch import Collator
from trainwright.data.loader import EvalData, TrainData
from trainwright.data.randomness import seed_generators
from trainwright.data.stream_loader import EvalStream, StreamData
from trainwright.data.tokenizer import tokenizer_of
from trainwright.errors import ConfigError
from trainwright.looking.facts import Nest
from trainwright.looking.values import Decode
from trainwright.loop.task import Task, overrides
from trainwright.loop.trainer import Trainer
from trainwright.parts import Build

TRAIN, TEST = "train", "test"


@dataclass(frozen=True)
class RunSet:
    """One set as it was built: a dataset, a stream, or a loader that a trainer made."""

    name: str
    label: str
    data: Any
    component: Component | None
    """Its section; None where a trainer or a task built it."""

    @property
    def dataset(self) -> Any:
        """The dataset itself, without a loader around it."""
        is_loader = isinstance(self.data, (TrainData, StreamData, EvalData, EvalStream))
        return self.data.dataset if is_loader else self.data


def build_sets(config: RunConfig) -> tuple[dict[str, RunSet], Collator]:
    """Returns the sets by name, train first and test last, and the collator."""
    # A dataset that draws in its constructor draws the same at every look.
    seed_generators(config.seed)
    build = Build(config)
    trainer_class = build.trainer_class()
    task = trainer_class.build_task(build)
    build.take_task(task)
    task_builds = overrides(task, "build_dataset", Task)
    collator = trainer_class.build_collator(build)
    train, evaluation = trainer_class.build_train_data(build), trainer_class.build_eval_data(build)
    test = build.test_data()
    own = None if task_builds or _is_replaced(trainer_class, "build_train_data") else config.data.train
    sets = [RunSet(TRAIN, "data.train", train, own)]
    uses_section = not (task_builds or _is_replaced(trainer_class, "build_eval_data"))
    for name, data in evaluation.items():
        is_part = uses_section and name not in config.data.eval
        component = (config.data.train if is_part else config.data.eval[name]) if uses_section else None
        sets.append(RunSet(name, "data.split" if is_part else f"data.eval.{name}", data, component))
    if test is not None:
        is_part = config.data.test is None
        component = None if task_builds else config.data.train if is_part else config.data.test
        label = "data.test" if task_builds or not is_part else "data.split"
        sets.append(RunSet(TEST, label, test, component))
    return {each.name: each for each in sets}, collator


def choose(sets: Mapping[str, RunSet], name: str) -> RunSet:
    """Returns the set of this name, or says which there are."""
    if name not in sets:
        raise ConfigError(f'--set: there is no set "{name}" in this run. It has {", ".join(sets)}.')
    return sets[name]


def nest_of(dataset: Any, component: Mapping[str, Any] | None) -> Nest:
    """Returns what a dataset is made of, in the words of its section where there is one."""
    while hasattr(type(dataset), "indices_in_whole"):
        dataset = dataset.dataset
    class_name = type(dataset).__name__
    if component is None:
        inner = getattr(dataset, "dataset", None)
        sources = {"source": inner} if inner is not None else inner_datasets(dataset)
        return Nest(class_name, class_name, {name: nest_of(each, None) for name, each in sources.items()})
    parts = inner_datasets(dataset)
    section = component.get("sources")
    inner_sections = dict(section) if isinstance(section, Mapping) else {"source": component.get("source")}
    named = {name: each for name, each in inner_sections.items() if isinstance(each, Mapping) and "type" in each}
    sources = {name: nest_of(parts[name], each) for name, each in named.items() if name in parts}
    return Nest(str(component["type"]), class_name, sources)


def inner_datasets(dataset: Any) -> dict[str, Any]:
    """Returns the datasets that another one reads from, by name; a single one is called `source`."""
    several = getattr(dataset, "sources", None)
    if isinstance(several, Mapping):
        return dict(several)
    one = getattr(dataset, "source", None)
    return {} if one is None or isinstance(one, str) else {"source": one}


def decoder_of(dataset: Any, collator: Any) -> Decode:
    """Returns what decodes tokens: the dataset's tokenizer, a source's, the dataset's own `decode`, the collator's."""
    found = _find_decode(dataset) or _find_decode(collator)

    def decode(ids: list[int]) -> str | None:
        if found is None:
            return None
        try:
            return found(ids)
        except Exception:  # tokens of another vocabulary: remarks.py says so, and the ids are shown instead
            return None

    return decode


def _find_decode(owner: Any) -> Callable[[list[int]], str] | None:
    tokenizer = tokenizer_of(owner)
    if tokenizer is None:
        own = getattr(owner, "decode", None)
        return own if callable(own) else None

    def decode(ids: list[int]) -> str:
        try:
            text: str = tokenizer.decode(ids, skip_special_tokens=False)
        except TypeError:  # a user's own, which takes tokens alone
            text = tokenizer.decode(ids)
        return text

    return decode if callable(getattr(tokenizer, "decode", None)) else None


def _is_replaced(trainer_class: type[Trainer], method: str) -> bool:
    own, plain = (getattr(each, method).__func__ for each in (trainer_class, Trainer))
    return own is not plain
