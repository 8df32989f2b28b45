"""Elbo: the loss of original.py."""

from torch.nn import functional as F

from trainwright import Mean, Trainer


class Elbo(Trainer):
    def forward(self, pixel_values, labels):
        drawn, mean, log_variance = self.model(pixel_values)
        reconstruction = F.binary_cross_entropy(drawn, pixel_values, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        loss, num_samples = reconstruction + divergence, len(pixel_values)
        return loss, {"loss_per_sample": Mean(loss, num_samples), "divergence": Mean(divergence, num_samples)}
