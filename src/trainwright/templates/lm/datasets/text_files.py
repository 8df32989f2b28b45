"""TextFiles: blocks of bytes from the .txt files of a folder, without a tokenizer."""

from pathlib import Path

import torch
from torch.utils.data import Dataset


class TextFiles(Dataset):
    """Each sample is `sequence_length` bytes; the last tenth of the blocks is the valid part.

    A byte is a token, so the model's vocab_size must be at least 256.
    """

    def __init__(self, folder, part="train", sequence_length=64, project_dir="."):
        # trainwright passes project_dir, the folder of run.yaml, independent of the current folder.
        texts = Path(project_dir, folder).resolve()
        files = sorted(texts.glob("**/*.txt"))
        data = b"\n".join(file.read_bytes() for file in files)
        num_blocks = len(data) // sequence_length
        if num_blocks < 10:
            raise ValueError(f"{texts} has {len(files)} .txt files and {num_blocks} blocks. At least 10 are needed.")
        self.tokens_per_sample = sequence_length  # lets trainwright count tokens: max_tokens, tokens per second
        blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: num_blocks * sequence_length]
        blocks = blocks.view(num_blocks, sequence_length).long()
        first_valid = num_blocks - num_blocks // 10
        self.blocks = blocks[:first_valid] if part == "train" else blocks[first_valid:]

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index]}

    def decode(self, tokens):
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")
