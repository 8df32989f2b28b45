"""Words: the tokens of Python's own modules in columns, each a part of the text that is read from top to bottom."""

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch

LIBRARY = Path(sysconfig.get_path("stdlib"))
VOCABULARY_OF = ["argparse.py", "ast.py"]


def read_tokens(names):
    return [token for name in names for token in re.findall(r"\w+|[^\w\s]|\n", (LIBRARY / name).read_text("utf-8"))]


class Words(torch.utils.data.Dataset):
    """Sample `chunk * num_columns + column` is a chunk of a column, so a batch is one chunk of every column."""

    def __init__(self, files, num_columns, length, vocabulary_size=400, max_chunks=None):
        common = Counter(read_tokens(VOCABULARY_OF)).most_common(vocabulary_size - 1)
        numbers = {token: number for number, (token, _) in enumerate(common, start=1)}  # 0 is any other token
        ids = torch.tensor([numbers.get(token, 0) for token in read_tokens(files)])
        self.columns = ids[: len(ids) // num_columns * num_columns].view(num_columns, -1)
        self.length, self.num_chunks = length, (self.columns.shape[1] - 1) // length
        if max_chunks is not None:
            self.num_chunks = min(self.num_chunks, max_chunks)

    def __len__(self):
        return self.num_chunks * len(self.columns)

    def __getitem__(self, index):
        chunk, column = divmod(index, len(self.columns))
        text = self.columns[column, chunk * self.length : (chunk + 1) * self.length + 1]
        return {"words": text[:-1], "next_words": text[1:]}
