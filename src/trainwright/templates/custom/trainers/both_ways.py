"""BothWays: a different loss, a different step, further logs. This file only has the differences to trainwright's
Trainer."""

import torch

from trainwright import Trainer


class BothWays(Trainer):
    """Trains on each wave forwards and backwards in one update."""

    def forward(self, noisy, clean):
        """Returns the loss of one micro-batch and further values to log; its arguments are the batch's keys."""
        restored = self.model(noisy)
        error = (restored - clean).square().mean()
        roughness = restored.diff(dim=-1).square().mean()
        return error + self.config.trainer.roughness * roughness, {"error": error, "roughness": roughness}

    def train_step(self, batch):
        """Makes one update. Without the second `backward` this is trainwright's own step."""
        update = self.begin_update()
        for micro_batch in self.micro_batches(batch):
            update.backward(self.run_forward(micro_batch))
            turned = {name: wave.flip(-1) for name, wave in micro_batch.items()}
            update.backward(self.run_forward(turned))  # accumulates, like a second loss.backward()
        result = update.apply()  # reduces over processes, clips, steps; the loss is the sum of both directions
        result.metrics["step_loss_root"] = result.loss.sqrt()  # metrics are a dict that you may change
        return result

    def eval_end(self, aggregated):
        """Adds the removed fraction of the noise to the logs of an evaluation set."""
        logs = super().eval_end(aggregated)
        noise = self.config.data.collator.noise
        logs["noise_removed"] = 1 - logs["error"] / noise**2
        return logs

    def train_loop_end(self):
        """Returns the line that is written every log.every_steps; add or remove values here."""
        logs = super().train_loop_end()
        logs["parameter_norm"] = float(torch.stack([one.detach().norm() for one in self.model.parameters()]).norm())
        return logs
