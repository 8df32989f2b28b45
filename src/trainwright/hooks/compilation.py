"""Tells what torch.compile does while a run goes on: each break and recompilation once, with its line, and its cost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainwright.compile.reports import Compilations
from trainwright.loop.hook import Hook

logger = logging.getLogger(__name__)


class WatchCompilation(Hook):
    """Puts `compile/seconds`, `graphs`, `graph_breaks`, `recompilations` and `cache_hits` in steps that compile.

    A log line holds the sums of its window, but for those that are 0. Nothing in other steps: they pay one look at a
    flag. Where the forward is not compiled it does nothing.
    """

    def __init__(self) -> None:
        self._compilations: Compilations | None = None
        self._notified: set[str] = set()
        self._window, self._sums = -1, dict[str, float]()

    def before_train(self) -> None:
        """Begins to listen."""
        compiled = self.trainer.compiled_forward
        self._compilations = None if compiled is None else compiled.compilations
        if self._compilations is not None:
            self._compilations.begin()

    def after_step(self) -> None:
        """Tells what this step compiled."""
        if self._compilations is not None and self._compilations.has_news:
            self._tell()

    def after_eval(self, logs: Mapping[str, Any]) -> None:
        """Tells what an evaluation compiled."""
        self.after_step()

    def close(self) -> None:
        """Stops listening."""
        if self._compilations is not None:
            self._compilations.end()

    def _tell(self) -> None:
        assert self._compilations is not None
        news = self._compilations.take()
        for each in news.breaks:
            logger.warning("The compiled forward breaks in two at %s", each)
        for again in news.recompilations:
            if str(again) not in self._notified:
                self._notified.add(str(again))
                logger.warning("The forward is compiled once more, for a guard failed at %s", again)
        counted = {
            "seconds": news.seconds,
            "graphs": news.num_graphs,
            "graph_breaks": len(news.breaks),
            "recompilations": len(news.recompilations),
            "cache_hits": news.num_cache_hits,
        }
        storage = self.trainer.storage
        window = (storage.step - 1) // self.trainer.config.log.every_steps
        if window != self._window:
            self._window, self._sums = window, dict.fromkeys(counted, 0.0)
        for name, value in counted.items():
            self._sums[name] += value
            if self._sums[name]:
                storage.put_scalar(f"compile/{name}", self._sums[name], smoothing_hint=False)
