"""Inpainting: another loss and another log; all else is trainwright's own Trainer."""

from trainwright import Mean, Trainer


class Inpainting(Trainer):
    """Learns to draw the pixels that were hidden, and a little to repeat those that were not."""

    def forward(self, pixels, is_hidden):  # the keys of the collator's batch
        drawn = self.model(pixels.masked_fill(is_hidden, 0.0), is_hidden)
        squares = (drawn - pixels).square()
        hidden = Mean(squares[is_hidden].sum(), is_hidden.sum())  # a mean that knows its weight: exact over batches
        seen = Mean(squares[~is_hidden].sum(), (~is_hidden).sum())
        loss = hidden.value + self.config.trainer.seen_weight * seen.value
        return loss, {"hidden_error": hidden, "seen_error": seen, "variance": pixels[is_hidden].var()}

    def eval_end(self, aggregated):
        """Adds how much of the hidden pixels' variance is explained: 0 for a constant guess, 1 for a perfect one."""
        logs = super().eval_end(aggregated)
        logs["explained"] = 1 - logs["hidden_error"] / logs["variance"]
        return logs
