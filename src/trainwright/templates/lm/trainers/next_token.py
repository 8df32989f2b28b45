"""NextToken: the loss and what is logged. This file only has the differences to trainwright's own Trainer."""

import math

import torch.nn.functional as F

from trainwright import Mean, Trainer


class NextToken(Trainer):
    """Predicts each token from the previous ones."""

    def forward(self, input_ids):
        """Returns the loss of one micro-batch, and further values to log."""
        logits = self.model(input_ids[:, :-1])
        targets = input_ids[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        # A Mean includes its weight: the loss is a mean over tokens, for any number of micro-batches and processes.
        loss = Mean(losses.sum(), losses.numel())
        hits = (logits.argmax(-1) == targets).sum()
        return loss, {"accuracy": Mean(hits, targets.numel())}

    def eval_end(self, aggregated):
        """Adds the perplexity to the logs of an evaluation."""
        logs = super().eval_end(aggregated)
        logs["perplexity"] = math.exp(logs["loss"])
        return logs

    # Other methods to override (`trainwright explain run.yaml` shows when each is called):
    #   train_step(self, batch)           one update
    #   eval_step(self, batch)            one batch of an evaluation → its metrics
    #   build_model(cls, build), …        how a part is built
