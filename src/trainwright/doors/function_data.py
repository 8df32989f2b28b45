"""The datasets of the door for functions: one of each path by the user's function, mixed and split as the flags say."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from trainwright.data.mix import mix
from trainwright.data.split import sizes_by_ratio, split
from trainwright.data.stream import has_index, is_stream
from trainwright.doors.arguments import PARTS, as_list, attribute_of, read_ratios
from trainwright.errors import ConfigError, DataError
from trainwright.user_code import caller, name_of, place_of

logger = logging.getLogger(__name__)

CreateDataset = Callable[[Any, argparse.Namespace], Any]


class FunctionData:
    """Makes the sets train, valid and test when they are asked for; each path is given to the function once."""

    def __init__(self, create: CreateDataset, args: argparse.Namespace, flags: argparse.Namespace) -> None:
        self._create = create
        self._args = args
        self._flags = flags
        self._ratios = read_ratios(flags.split)
        self._cut: dict[str, dict[str, Any]] | None = None
        self._refuse_contradictions()

    def dataset(self, part: str) -> Any:
        """Returns a set, or None where neither a path nor the split gives one."""
        if self._ratios is not None and (part == "train" or self._is_cut_off(part)):
            sources = self._cut_sources()[part]
        else:
            sources = self._sources(getattr(self._flags, f"{part}_data"))
        if not sources:
            return None
        if len(sources) == 1:
            return next(iter(sources.values()))
        weights = self._flags.train_data_weights if part == "train" else None
        shares = None if weights is None else dict(zip(sources, weights, strict=True))
        return mix(sources, shares, run_seed=self._flags.seed)

    def _is_cut_off(self, part: str) -> bool:
        number = PARTS.index(part)
        return self._ratios is not None and 0 < number < len(self._ratios) and self._ratios[number] > 0

    def _sources(self, paths: Any) -> dict[str, Any]:
        """Returns the dataset of each path, by the path; one that is given twice has a number the second time."""
        sources: dict[str, Any] = {}
        for path in as_list(paths):
            name = str(path)
            while name in sources:
                name += "#2"
            sources[name] = self._checked(self._create(path, self._args))
        return sources

    def _cut_sources(self) -> dict[str, dict[str, Any]]:
        """Cuts each path's dataset by itself, so that every one is in every part."""
        if self._cut is None:
            assert self._ratios is not None
            self._cut = {part: {} for part in PARTS}
            for name, whole in self._sources(self._flags.train_data).items():
                if is_stream(whole) or hasattr(type(whole), "make_order"):
                    raise ConfigError(
                        f"--split: {name} is a stream or a mixture, which is not cut. Give --valid-data.",
                        where=place_of(self._create),
                    )
                sizes = sizes_by_ratio(len(whole), self._ratios)
                for part, cut in zip(PARTS, split(whole, sizes, seed=self._flags.seed), strict=False):
                    if len(cut):
                        self._cut[part][name] = cut
            for part in PARTS[1 : len(self._ratios)]:
                if not self._cut[part] and self._is_cut_off(part):
                    logger.warning("--split: there are too few samples for a set %s: there is none.", part)
        return self._cut

    def _checked(self, dataset: Any) -> Any:
        is_dataset = is_stream(dataset) or (has_index(dataset) and hasattr(dataset, "__len__"))
        if is_dataset and not isinstance(dataset, list | tuple | DataLoader):
            return dataset
        what = "None" if dataset is None else f"a {type(dataset).__name__}"
        what += f" of {len(dataset)}" if isinstance(dataset, list | tuple) else ""
        raise DataError(
            f"{name_of(self._create)} returned {what}. Return a dataset: an object with `__len__` and `__getitem__`, "
            "such as a torch.utils.data.Dataset, or an iterable one.",
            where=place_of(self._create),
        )

    def _refuse_contradictions(self) -> None:
        flags = self._flags
        paths, weights = as_list(flags.train_data), flags.train_data_weights
        if weights is not None and len(weights) != len(paths):
            raise ConfigError(
                f"--train-data-weights: there are {len(weights)} weights for {len(paths)} paths of --train-data. "
                "Give one for each.",
                where=caller(),
            )
        for part in PARTS[1:]:
            if self._is_cut_off(part) and getattr(flags, f"{part}_data"):
                raise ConfigError(
                    f"--{part}-data and --split {flags.split} both give the set {part}. Leave one out, or cut off "
                    "no such part: --split 1.",
                    where=caller(),
                )
        if not paths and flags.mode != "inference":
            problem = "--train-data: there is none. Give the path that create_dataset_function reads."
            raise ConfigError(problem, where=caller())
        if flags.mode == "inference":
            for flag in (flag for flag in ("--fresh", "--accept-changes") if getattr(flags, attribute_of(flag))):
                problem = f"{flag}: has no effect, for --mode inference trains nothing. Leave it out."
                raise ConfigError(problem, where=caller())
        else:
            self._warn_of_idle_flags()

    def _warn_of_idle_flags(self) -> None:
        """Says which flags have no effect here. They are no mistake: scripts give one line of flags to many runs."""
        flags = self._flags
        sets = [part for part in PARTS[1:] if self._is_cut_off(part) or getattr(flags, f"{part}_data")]
        needed = {"--eval-interval": "valid" in sets, "--eval-iters": sets, "--eval-batch-size": sets}
        idle = {flag: "without a set to evaluate. Give --valid-data or --split" for flag in needed if not needed[flag]}
        if getattr(self._args, "load", None) is None and flags.mode == "finetune":
            idle["--mode"] = "as finetune without --load: the model begins as it was made"
        if len(as_list(flags.train_data)) == 1:
            idle["--train-data-weights"] = "on one path"
        for flag, why in idle.items():
            if getattr(flags, attribute_of(flag)) is not None:
                logger.warning("%s: has no effect %s.", flag, why)
