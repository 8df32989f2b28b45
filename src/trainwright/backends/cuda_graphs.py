"""A function's work on a GPU as one CUDA graph: recorded once, then launched by one call. See recording.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.backends.recording import Run

logger = logging.getLogger(__name__)


class CudaGraph:
    """Work that was captured, with the memory that it reads and writes."""

    def __init__(
        self, run: Run, inputs: Sequence[Tensor], stream: torch.cuda.Stream, *, parameters: Sequence[Tensor] = ()
    ) -> None:
        self._inputs = [torch.empty_like(each) for each in inputs]
        self._graph = torch.cuda.CUDAGraph()
        # Threads of the data loading may pin memory meanwhile: only this thread's calls are judged.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._results = _Results(run(list(self._inputs)), stream.device)
        # Each graph writes gradients of its own, and who steps after a replay reads those of the parameters.
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copies the inputs to where the graph reads them, launches it, and copies its results out of its memory."""
        if inputs:
            torch._foreach_copy_(self._inputs, list(inputs))
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._results.copies()


class _Results:
    """The outputs of a graph: those of one element lie in one tensor for each dtype, so that one copy takes all."""

    def __init__(self, outputs: Sequence[Tensor], device: torch.device) -> None:
        self._large: dict[int, Tensor] = {}
        self._small: list[tuple[list[int], Tensor]] = []
        self._shapes = [each.shape for each in outputs]
        kinds: dict[torch.dtype, list[int]] = {}
        for number, output in enumerate(outputs):
            if output.device != device:
                logger.warning(
                    "runtime.mode graph: a metric or loss of shape %s lies on %s, where a graph of %s computes "
                    "nothing: it stays what it was when the step was recorded.",
                    tuple(output.shape),
                    output.device,
                    device,
                )
                self._large[number] = output
            elif output.numel() == 1:
                kinds.setdefault(output.dtype, []).append(number)
            else:
                self._large[number] = output
        for numbers in kinds.values():
            self._small.append((numbers, torch.stack([outputs[number].detach().reshape(()) for number in numbers])))

    def copies(self) -> list[Tensor]:
        """Returns the outputs as the last launch gives them; the next one does not change these."""
        found = {number: output.clone() for number, output in self._large.items()}
        for numbers, together in self._small:
            for number, value in zip(numbers, together.clone().unbind(), strict=True):
                shape = self._shapes[number]
                found[number] = value.reshape(shape) if shape else value
        return [found[number] for number in range(len(self._shapes))]
