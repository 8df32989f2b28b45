"""WordLSTM: scores of the next word, and the hidden state after the last one."""

from torch import nn


class WordLSTM(nn.Module):
    def __init__(self, vocabulary_size=400, width=64, dropout=0.2):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(vocabulary_size, width), nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, vocabulary_size)

    def forward(self, words, hidden=None):
        outputs, hidden = self.lstm(self.dropout(self.embedding(words)), hidden)
        return self.head(self.dropout(outputs)), hidden
