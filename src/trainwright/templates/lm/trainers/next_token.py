"""NextToken: what is learned. Only what differs from trainwright's own Trainer stands here."""

import math

import torch.nn.functional as F

from trainwright import Mean, Trainer


class NextToken(Trainer):
    """Predicts each token from those before it."""

    def forward(self, input_ids):
        """Returns the loss of one micro-batch, and what else to log."""
        logits = self.model(input_ids[:, :-1])
        targets = input_ids[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        # A Mean knows its weight: the loss is one of tokens, however they are spread over micro-batches and processes.
        loss = Mean(losses.sum(), losses.numel())
        hits = (logits.argmax(-1) == targets).sum()
        return loss, {"accuracy": Mean(hits, targets.numel())}

    def eval_end(self, aggregated):
        """Adds the perplexity to the logs of an evaluation."""
        logs = super().eval_end(aggregated)
        logs["perplexity"] = math.exp(logs["loss"])
        return logs

    # As small, each an override away (`trainwright explain run.yaml` shows when each is called):
    #   train_step(self, batch)           one update
    #   eval_step(self, batch)            one batch of an evaluation → its metrics
    #   build_model(cls, build), …        how a part is made
