"""Times each step and puts its speed into the storage: seconds, samples and tokens."""

from __future__ import annotations

import time

from trainwright.loop.hook import Hook


class TimeSteps(Hook):
    """Puts `seconds_per_step` and `samples_per_second`, and `tokens_per_second` where samples have a fixed length.

    From before the batch is fetched until after the update: evaluating, writing and saving do not count.
    On a GPU the host runs ahead of the device, so only the mean over a log window says something.
    """

    def before_train(self) -> None:
        """Looks up how many tokens a sample has."""
        data = self.trainer.train_data
        assert data is not None
        self._data = data
        self._tokens_per_sample = getattr(data.dataset, "tokens_per_sample", None)

    def before_step(self) -> None:
        """Starts the clock."""
        self._position = self._data.position
        self._start = time.perf_counter()

    def after_step(self) -> None:
        """Stops the clock."""
        seconds = time.perf_counter() - self._start
        # By position, for a step may take several batches, and the last one may be smaller.
        samples = self._data.position - self._position
        storage = self.trainer.storage
        storage.put_timing("seconds_per_step", seconds, 1.0)
        # Totals, so that a window's speed is all its samples over all its seconds, not a mean of speeds.
        storage.put_timing("samples_per_second", samples, seconds)
        if self._tokens_per_sample is not None:
            storage.put_timing("tokens_per_second", samples * int(self._tokens_per_sample), seconds)
