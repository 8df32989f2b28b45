"""Evaluates MiniLM without finetuning: similar texts match, with a threshold chosen on the training data."""

import torch

from trainwright import RunConfig, build_trainer

trainer = build_trainer(RunConfig.load("run.yaml", ["name=untuned"]))  # adapters change nothing before the first step
model = trainer.model.eval()
model.classifier.weight.data = torch.tensor([[0.0], [0.2]])  # the score of class 1 is then the similarity itself
model.classifier.bias.data.zero_()


@torch.no_grad()
def score(loader):
    rows = range(len(loader.dataset))
    batches = [loader.collator([loader.dataset[row] for row in rows[start : start + 64]]) for start in rows[::64]]
    return torch.cat([model(**batch)["logits"][:, 1] for batch in batches]), torch.cat([b["labels"] for b in batches])


train, labels = score(trainer.train_data)
right = [((train > threshold) == labels).sum() for threshold in train]
threshold = train[torch.stack(right).argmax()]
valid, labels = score(trainer.eval_data["valid"])
print(f"valid/accuracy {((valid > threshold) == labels).float().mean():.4f} at threshold {threshold:.3f}")
