"""Smooth: what is learned. This file only has the differences to trainwright's own Trainer."""

import torch.nn.functional as F

from trainwright import Trainer


class Smooth(Trainer):
    """Cross entropy with smoothed labels in training, and without smoothing in evaluation."""

    def forward(self, features, labels):
        """Returns the loss of one micro-batch, and outputs that metrics may use."""
        logits = self.model(features)
        smoothing = self.config.trainer.smoothing if self.model.training else 0.0
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        # `return loss` is enough. `return loss, {"name": value}` logs further values.
        # The outputs in a mapping are passed to evaluation.metrics of run.yaml: accuracy reads `logits`.
        return {"loss": loss, "logits": logits}

    # As small, each an override away (`trainwright explain run.yaml` shows when each is called):
    #   train_step(self, batch)           one update
    #   eval_step(self, batch)            one batch of an evaluation → its metrics
    #   train_loop_end(self)              the line that is logged
    #   build_model(cls, build), …        how a part is made
