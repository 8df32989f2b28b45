"""Reports what torch.compile does during a run: graph breaks and recompilations with their lines, and the cost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainwright.compile.reports import Compilations
from trainwright.loop.hook import Hook

logger = logging.getLogger(__name__)


class WatchCompilation(Hook):
    """Puts `compile/seconds`, `graphs`, `graph_breaks`, `recompilations` and `cache_hits` in steps that compile.

    A log line has the sums of its window, without those that are 0. Other steps only read a flag. Does nothing if the
    forward is not compiled.
    """

    def __init__(self) -> None:
        self._compilations: Compilations | None = None
        self._reported: set[str] = set()
        self._window, self._sums = -1, dict[str, float]()

    def before_train(self) -> None:
        """Registers the callbacks of torch.compile."""
        compiled = self.trainer.compiled_forward
        self._compilations = None if compiled is None else compiled.compilations
        if self._compilations is not None:
            self._compilations.begin()

    def after_step(self) -> None:
        """Reports what this step compiled."""
        if self._compilations is not None and self._compilations.has_news:
            self._report(self._compilations)

    def after_eval(self, logs: Mapping[str, Any]) -> None:
        """Reports what an evaluation compiled."""
        self.after_step()

    def close(self) -> None:
        """Removes the callbacks."""
        if self._compilations is not None:
            self._compilations.end()

    def _report(self, compilations: Compilations) -> None:
        news = compilations.take()
        for each in news.breaks:
            logger.warning("The compiled forward has a graph break at %s", each)
        for again in news.recompilations:
            if str(again) not in self._reported:
                self._reported.add(str(again))
                logger.warning("The forward is compiled again, because a guard failed at %s", again)
        counted = {
            "seconds": news.seconds,
            "graphs": news.num_graphs,
            "graph_breaks": len(news.breaks),
            "recompilations": len(news.recompilations),
            "cache_hits": news.num_cache_hits,
        }
        storage = self.trainer.storage
        window = self.trainer.state.window_start
        if window != self._window:
            self._window, self._sums = window, dict.fromkeys(counted, 0.0)
        for name, value in counted.items():
            self._sums[name] += value
            if self._sums[name]:
                storage.put_scalar(f"compile/{name}", self._sums[name], smoothing_hint=False)
