"""Denoiser: a network that also logs an internal value."""

from torch import nn

from trainwright import get_event_storage


class Denoiser(nn.Module):
    """Its arguments come from the `model` section of run.yaml."""

    def __init__(self, length, width=48):
        super().__init__()
        self.encode = nn.Linear(length, width)
        self.decode = nn.Linear(width, length)

    def forward(self, noisy):
        hidden = self.encode(noisy).tanh()
        if self.training:  # there is a storage only during a run, and the trained model must work without one
            # A value that is put anywhere is added to the log line. It stays on the device until then, without
            # synchronization.
            get_event_storage().put_scalar("saturated", (hidden.detach().abs() > 0.9).float().mean())
        return self.decode(hidden)
