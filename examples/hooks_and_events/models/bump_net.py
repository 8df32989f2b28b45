"""BumpNet: a model that logs an internal value."""

from torch import nn

from trainwright import get_event_storage


class BumpNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inner, self.head = nn.Linear(1, width), nn.Linear(width, 1)
        self.criterion = nn.MSELoss()

    def forward(self, x, labels=None):
        hidden = self.inner(x).tanh()
        if self.training:  # logged with the next line; the value stays on the device until then
            get_event_storage().put_scalar("saturated", (hidden.detach().abs() > 0.95).float().mean())
        return {"logits": self.head(hidden)}
