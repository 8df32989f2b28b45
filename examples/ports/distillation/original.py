"""The loop that the port replaces: `python original.py`."""

import torch
from distill import classifier
from torch.nn.functional import cross_entropy, log_softmax, softmax
from torch.utils.data import DataLoader

from trainwright.data.sources.digits import Digits


def train(student, batches, teacher=None, temperature=4.0, share=0.7):
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    student.train()
    for batch in batches:
        pixels, labels = batch["pixel_values"], batch["labels"]
        scores = student(pixels)
        loss = cross_entropy(scores, labels)
        if teacher is not None:
            with torch.no_grad():
                wanted = softmax(teacher(pixels) / temperature, dim=1)
            given = log_softmax(scores / temperature, dim=1)
            distance = (wanted * (wanted.log() - given)).sum(dim=1).mean() * temperature**2
            loss = share * distance + (1 - share) * loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Digits(), batch_size=32, shuffle=True)
    teacher = classifier(256)
    list(train(teacher, (batch for _ in range(7) for batch in loader)))
    teacher.eval()
    losses = list(train(classifier(16), (batch for _ in range(7) for batch in loader), teacher))
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
