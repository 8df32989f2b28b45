"""The pictures of an epoch, from the same noise each time, for TensorBoard."""

import torch


@torch.no_grad()
def draw(trainer):
    noise = torch.randn(8, trainer.model.noise, 1, 1, generator=torch.Generator().manual_seed(0)).to(trainer.device)
    trainer.model.eval()
    row = torch.cat([*trainer.model.generator(noise)], dim=-1)
    trainer.model.train()
    trainer.storage.put_image("drawn", row, normalize=True)
