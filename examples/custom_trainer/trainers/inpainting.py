"""Inpainting: a custom loss and custom logs; everything else is inherited from Trainer."""

from trainwright import Mean, Trainer


class Inpainting(Trainer):
    """Learns to predict the hidden pixels and, with a small weight, to reproduce the visible ones."""

    def forward(self, pixels, is_hidden):  # the keys of the collator's batch
        drawn = self.model(pixels.masked_fill(is_hidden, 0.0), is_hidden)
        squares = (drawn - pixels).square()
        hidden = Mean(squares[is_hidden].sum(), is_hidden.sum())  # a mean with its weight, which is exact over batches
        seen = Mean(squares[~is_hidden].sum(), (~is_hidden).sum())
        loss = hidden.value + self.config.trainer.seen_weight * seen.value
        return loss, {"hidden_error": hidden, "seen_error": seen, "variance": pixels[is_hidden].var()}

    def eval_end(self, aggregated):
        """Adds the explained fraction of the hidden pixels' variance: 0 for a constant guess, 1 for a perfect one."""
        logs = super().eval_end(aggregated)
        logs["explained"] = 1 - logs["hidden_error"] / logs["variance"]
        return logs
