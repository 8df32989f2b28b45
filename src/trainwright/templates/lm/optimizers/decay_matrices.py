"""DecayMatrices: AdamW that decays only matrices, as is common for transformers, but not norms and biases."""

import torch


class DecayMatrices(torch.optim.AdamW):
    """Any torch optimizer will do. `params` is given by trainwright, the rest by run.yaml; a schedule sets `lr`."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95):
        params = list(params)
        groups = [
            {"params": [one for one in params if one.ndim >= 2], "weight_decay": weight_decay},
            {"params": [one for one in params if one.ndim < 2], "weight_decay": 0.0},
        ]
        super().__init__(groups, lr=lr, betas=(beta1, beta2))
