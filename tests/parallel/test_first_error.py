"""Which errors only say that another rank is gone. Who speaks first is in test_processes.py, with real ranks."""

import pytest
import torch.distributed as dist

from trainwright.parallel.processes import describe_lost_connection


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError("[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:1"),
            "Connection closed by peer",
        ),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:534] Read error [::1]:1: Connection reset by peer"), None),
        (dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"), "ncclRemoteError"),
        (dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed."), None),
    ],
)
def test_a_collective_that_lost_a_rank_is_recognized_by_its_message(error, reason):
    found = describe_lost_connection(error)
    assert found is not None
    assert reason in (None, found)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),  # of a socket of the user's own
        RuntimeError("the server of the data said: Connection reset by peer"),
        dist.DistBackendError("NCCL error: invalid usage"),
        RuntimeError("[gloo] op.preamble.length <= op.nbytes"),
    ],
)
def test_every_other_error_keeps_its_traceback(error):
    assert describe_lost_connection(error) is None
