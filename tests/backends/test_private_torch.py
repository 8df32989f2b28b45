"""A function that compiled code calls once: its answer is part of the graph."""

import torch

from trainwright.backends.private_torch import constant_in_compiled_code


def test_compiled_code_keeps_the_answer_and_does_not_look_into_the_function():
    calls = []

    @constant_in_compiled_code
    def factor():
        calls.append(print)  # a list of the outside that a traced function would have to change
        return len(calls) + 1

    compiled = torch.compile(lambda x: x * factor(), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [2.0, 2.0, 2.0]
    assert len(calls) == 1
    assert factor() == 3
