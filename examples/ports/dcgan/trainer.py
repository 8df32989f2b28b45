"""Adversarial: two updates in a step, the first from two backward passes."""

import torch
from torch.nn.functional import binary_cross_entropy

from trainwright import Trainer


class Adversarial(Trainer):
    def train_step(self, batch):
        images, model = 2 * batch["pixel_values"] - 1, self.model
        real, fake = torch.ones(len(images), device=self.device), torch.zeros(len(images), device=self.device)

        update = self.begin_update()
        update.backward(binary_cross_entropy(model.discriminator(images), real))
        drawn = model.generator(model.draw_noise(images))
        update.backward(binary_cross_entropy(model.discriminator(drawn.detach()), fake))
        judged = update.apply(optimizers=("discriminator",))

        update = self.begin_update()
        update.backward(binary_cross_entropy(model.discriminator(drawn), real))
        result = update.apply(optimizers=("generator",))
        result.metrics["discriminator_loss"] = judged.loss
        return result
