"""ConvNet: log-probabilities of the ten digits."""

from torch import nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
        self.dropout, self.last_dropout = nn.Dropout(0.25), nn.Dropout(0.5)
        self.hidden, self.head = nn.Linear(2 * width * 16, 64), nn.Linear(64, 10)

    def forward(self, images):
        features = F.max_pool2d(F.relu(self.second(F.relu(self.first(images)))), 2)
        hidden = F.relu(self.hidden(self.dropout(features).flatten(1)))
        return F.log_softmax(self.head(self.last_dropout(hidden)), dim=1)
