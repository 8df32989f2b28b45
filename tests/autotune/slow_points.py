"""A dataset whose samples take a while."""

import time

from tests.project.parts import Points


class SlowPoints(Points):
    """Points, each after so many seconds."""

    def __init__(self, size=100, seconds=0.0):
        super().__init__(size)
        self.seconds = seconds

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return super().__getitem__(index)
