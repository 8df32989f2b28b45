"""MeasuredSGD: gradient descent with momentum; step() returns the size of the update."""

import torch


class MeasuredSGD(torch.optim.Optimizer):
    """`params` is given by trainwright, the rest by run.yaml; a schedule sets `lr`."""

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        """Updates the weights; the returned metrics are logged."""
        moved = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                # What is kept in self.state is saved with each checkpoint and restored with it.
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter)
                state["velocity"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.sub_(state["velocity"], alpha=group["lr"])
                moved.append(group["lr"] * state["velocity"].norm())
        return {"distance": torch.stack(moved).norm()}  # a tensor: reading it here would make each step wait
