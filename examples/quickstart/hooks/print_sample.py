"""PrintSample: after training, the loss beside what counting alone achieves, and a taste of the model's code.

A hook watches a run without taking part in it: nothing here changes what is learned.
"""

from __future__ import annotations

import torch

from trainwright import Hook
from trainwright.data.sources.stdlib_code import unigram_loss

PROMPT = "def "


class PrintSample(Hook):
    """Prints, once and from rank 0 only, the last validation loss and a sampled function."""

    def __init__(self, *, max_new_tokens: int = 80) -> None:
        self.max_new_tokens = max_new_tokens

    def after_train(self) -> None:
        sample = self.sample_code()  # on all processes: each may have a part of the weights
        if self.trainer.is_main_process:
            print(self.compare_losses())
            print(sample)

    def compare_losses(self) -> str:
        loss, _ = self.trainer.storage.latest()["valid/loss"]
        counted = unigram_loss(self.trainer.train_data.dataset, self.trainer.eval_data["valid"].dataset)
        return f"validation loss {float(loss):.3f}, unigram model {counted:.3f} nats per token"

    def sample_code(self) -> str:
        tokenizer = self.trainer.train_data.dataset.tokenizer
        device = self.trainer.device
        # To this tokenizer a space begins the next word, so the model is asked for a word until it has one; the empty
        # lines before say that a function begins here.
        prompt = torch.tensor([tokenizer.encode("\n\n\n" + PROMPT.rstrip()).ids], device=device)
        generator = torch.Generator(device).manual_seed(0)  # the run's own randomness stays as it is
        for _ in range(50):
            tokens = self.trainer.model.generate(
                prompt, max_new_tokens=self.max_new_tokens, temperature=0.5, generator=generator
            )
            text = tokenizer.decode(tokens[0].tolist()).lstrip()
            if text.startswith(PROMPT):
                break
        return text
