"""SignMomentum: every weight moves by lr, in the direction of its averaged gradient."""

import torch


class SignMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9):  # trainwright passes params; the other arguments come from run.yaml
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        """Updates the weights; the returned values are logged."""
        turned, total = [], 0
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]  # saved with each checkpoint
                average = state.setdefault("average", torch.zeros_like(weight))
                before = average.sign()
                average.lerp_(weight.grad, 1 - group["momentum"])
                weight.sub_(average.sign(), alpha=group["lr"])
                turned.append((before * average < 0).sum())
                total += weight.numel()
        return {"turned": torch.stack(turned).sum() / total}  # a tensor: .item() would synchronize in every step
