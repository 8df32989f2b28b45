"""Lion: moves each weight by a fixed amount, in the direction of the sign of its momentum (Chen et al., 2023)."""

import torch


class Lion(torch.optim.Optimizer):
    """Any torch optimizer works. trainwright passes `params`, run.yaml has the other arguments."""

    def __init__(self, params, lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                # self.state is saved and restored with each checkpoint.
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                direction = state["momentum"].lerp(parameter.grad, 1 - group["beta1"]).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(direction, alpha=group["lr"])
                state["momentum"].lerp_(parameter.grad, 1 - group["beta2"])
