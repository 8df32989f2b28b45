"""The loop that the port replaces: `python original.py`."""

import torch
from model import WordLSTM
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from words import Words


def train(model, epochs, valid_batches, lr=20.0):
    best = None
    for batches in epochs:
        model.train()
        hidden = None
        for batch in batches:
            model.zero_grad()
            scores, hidden = model(batch["words"], hidden)
            hidden = tuple(each.detach() for each in hidden)
            loss = cross_entropy(scores.flatten(0, 1), batch["next_words"].flatten())
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= lr * parameter.grad
            yield loss.item(), lr
        valid_loss = evaluate(model, valid_batches)
        if best is None or valid_loss < best:
            best = valid_loss
        else:
            lr /= 4


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    total, count, hidden = 0.0, 0, None
    for batch in batches:
        scores, hidden = model(batch["words"], hidden)
        total += cross_entropy(scores.flatten(0, 1), batch["next_words"].flatten(), reduction="sum").item()
        count += batch["words"].numel()
    return total / count


if __name__ == "__main__":
    torch.manual_seed(0)
    batches = DataLoader(Words(["argparse.py", "ast.py"], num_columns=20, length=35), batch_size=20)
    valid_batches = DataLoader(Words(["shlex.py"], num_columns=10, length=35), batch_size=10)
    losses = [loss for loss, _ in train(WordLSTM(), [batches] * 6, valid_batches)]
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
