"""Builds a dataset from its component in the config: nested sources first, `data.process` on each of them.

    {type: pack, length: 512, source: {type: mix, sources: {a: {type: …, weight: 3}, b: {type: …, weight: 1}}}}

A component may hold others: `source` one, `sources` several by name, each with a `weight` beside its arguments.
Which section becomes which set is parts.py's.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainwright import registry
from trainwright.config import Component, ProcessSection
from trainwright.data.processing.fingerprint import describe_input, fingerprint_function
from trainwright.data.processing.stream import ProcessedStream
from trainwright.data.stream import is_stream
from trainwright.errors import ComponentError, ConfigError
from trainwright.user_code import parameters_of


class DatasetBuilder:
    """Builds the datasets of one run, each with its sources."""

    def __init__(
        self,
        *,
        project_dir: Path,
        seed: int,
        process: ProcessSection | None = None,
        origin_of: registry.OriginOf | None = None,
    ) -> None:
        self._project_dir = project_dir
        self._seed = seed
        self._process = process
        self._origin_of = origin_of

    def build(self, label: str, component: Component) -> Any:
        """Returns the dataset that a component names; `label` says where it stands, for errors."""
        nested = self._build_nested(label, component)
        if not nested:
            return self._apply_process(component, self._make(label, component, {}))
        return self._make(label, component, nested)

    def _make(self, label: str, component: Component, nested: Mapping[str, Any]) -> Any:
        arguments = {name: value for name, value in component.arguments.items() if name not in nested}
        target = registry.find(
            "dataset", component.type, project_dir=self._project_dir, where=component.origin, label=label
        )
        provided = dict(nested)
        names = parameters_of(target) or {}
        if "run_seed" in names:
            provided["run_seed"] = self._seed
        if "args" in names and inspect.isfunction(target):
            # create_dataset(path, args) reads them as attributes.
            arguments.pop("args", None)
            given = component.to_dict().get("args") or {}
            if not isinstance(given, dict):
                raise ConfigError(f"{label}.args: must be a mapping, got {given!r}.", where=component.origin)
            provided["args"] = Namespace(**given)
        plain = Component(component.type, **arguments).located_at(component.origin)
        return registry.instantiate(
            "dataset", plain, project_dir=self._project_dir, label=label, origin_of=self._origin_of, **provided
        )

    def _build_nested(self, label: str, component: Component) -> dict[str, Any]:
        """Returns the datasets that stand in `source` and `sources`, and the sources' weights."""
        nested: dict[str, Any] = {}
        inner = component.arguments.get("source")
        if isinstance(inner, Mapping) and _is_component(inner):
            nested["source"] = self.build(f"{label}.source", self._nested(component, inner))
        several = component.arguments.get("sources")
        if isinstance(several, Mapping) and several and all(_is_component(each) for each in several.values()):
            weights = {name: each["weight"] for name, each in several.items() if "weight" in each}
            if weights and "weights" in component.arguments:
                raise ConfigError(
                    f"{label}.weights: the sources have a weight each already. Keep one of the two.",
                    where=component.origin,
                )
            if weights and len(weights) < len(several):
                missing = ", ".join(name for name in several if name not in weights)
                raise ConfigError(f"{label}.sources: no weight for {missing}. Give all a weight, or none.")
            nested["sources"] = {
                name: self.build(f"{label}.sources.{name}", self._nested(component, each, without=("weight",)))
                for name, each in several.items()
            }
            if weights:
                nested["weights"] = weights
        return nested

    def _nested(self, outer: Component, values: Mapping[str, Any], without: tuple[str, ...] = ()) -> Component:
        kept = {name: value for name, value in values.items() if name not in without}
        return Component.from_mapping(kept).located_at(outer.origin)

    def _find_process(self, process: Component) -> Callable[..., Any]:
        try:
            return registry.find("dataset", process.type, project_dir=self._project_dir)
        except ComponentError as error:
            if error.problem.startswith("no dataset "):
                raise ComponentError(
                    f"data.process.type: no function {process.type!r}. Name one by its file, such as clean.tokenize "
                    "for one in datasets/clean.py, or by its import path, my_pkg.module:name.",
                    where=process.origin,
                ) from error
            raise ComponentError(f"data.process.type: {error.problem}", where=process.origin) from error

    def _apply_process(self, component: Component, dataset: Any) -> Any:
        process = self._process
        if process is None:
            return dataset
        function = self._find_process(process)
        arguments, options = process.arguments.to_dict(), process.options
        taken = process.reserved.keys() & set(parameters_of(function) or ())
        if taken:
            raise ConfigError(
                f"data.process.{min(taken)}: is a setting of data.process and a parameter of {process.type}, which "
                "would not get it. Rename the parameter.",
                where=process.origin,
            )
        registry.check_arguments(
            function,
            arguments,
            label="data.process",
            where=process.origin,
            provided=_first_parameter(function),
            origin_of=self._origin_of,
        )
        from trainwright.data.processing.process import processed  # needs the package datasets

        if is_stream(dataset):
            if options.num_workers:
                raise ConfigError(
                    f"data.process.num_workers: {type(dataset).__name__} is a stream, whose rows are processed as they "
                    "are read, by the loader's workers. Set data.workers instead.",
                    where=process.origin,
                )
            return ProcessedStream(dataset, function, arguments)
        target = registry.find("dataset", component.type, project_dir=self._project_dir)
        return processed(
            dataset,
            function,
            arguments=arguments,
            input_key=describe_input(
                component.to_dict(),
                dataset,
                target=target,
                project_dir=self._project_dir,
                run_seed=self._seed,
                version=options.version,
            ),
            function_key=fingerprint_function(function, version=options.version, where=process.origin),
            version=options.version,
            num_workers=options.num_workers,
        )


def _is_component(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("type"), str)


def _first_parameter(function: Callable[..., Any]) -> tuple[str, ...]:
    """The row's parameter, whatever its name: it is no argument of the run file."""
    return tuple(parameters_of(function) or ())[:1]
