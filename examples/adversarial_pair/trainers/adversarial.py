"""Adversarial: several updates per step, each of one of two optimizers."""

import torch
from torch.nn.functional import softplus

from trainwright import Trainer


class Adversarial(Trainer):
    def train_step(self, batch):
        real, model = batch["points"], self.model
        for _ in range(self.config.trainer.critic_steps):
            update = self.begin_update()
            update.backward(self.critic_loss(real))
            critic = update.apply(optimizers=("critic",))  # the generator's weights do not change
        update = self.begin_update()
        update.backward(softplus(-model.critic(model.draw(real))).mean())
        result = update.apply(optimizers=("generator",))
        result.metrics["critic_loss"] = critic.loss  # in addition to the generator's loss and both rates
        return result

    def critic_loss(self, real):
        """Distinguishes generated from real points; a penalty on the gradient at real points prevents divergence."""
        with torch.no_grad():
            drawn = self.model.draw(real)
        real = real.requires_grad_()
        scores = self.model.critic(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        steepness = slope.square().sum(dim=1).mean()
        losses = softplus(self.model.critic(drawn)) + softplus(-scores)
        return losses.mean() + self.config.trainer.penalty * steepness

    def eval_step(self, batch):
        """Returns the energy distance between generated and real points, which is 0 for equal distributions."""
        real = batch["points"]
        drawn = self.model.draw(real)
        apart = torch.cdist(drawn, real).mean()
        distance = 2 * apart - torch.cdist(drawn, drawn).mean() - torch.cdist(real, real).mean()
        return {"distance": distance, "radius": drawn.norm(dim=1).mean()}
