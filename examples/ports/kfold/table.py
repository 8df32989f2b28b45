"""Fold: the rows of a CSV file that one fold trains or validates with, standardized by the training rows."""

import csv
from pathlib import Path

import torch
from sklearn.model_selection import KFold


class Fold(torch.utils.data.Dataset):
    def __init__(self, path, fold, part, num_folds=5):
        with (Path(__file__).parent / path).open(newline="") as file:
            rows = list(csv.DictReader(file))
        names = sorted({row["species"] for row in rows})
        self.labels = torch.tensor([names.index(row.pop("species")) for row in rows])
        features = torch.tensor([[float(value) for value in row.values()] for row in rows])
        train, valid = list(KFold(num_folds, shuffle=True, random_state=0).split(rows))[fold]
        self.features = (features - features[train].mean(0)) / features[train].std(0)
        self.rows = {"train": train, "valid": valid}[part]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.features[self.rows[index]], self.labels[self.rows[index]]
