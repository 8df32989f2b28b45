"""PrintSample: after training, prints the loss, that of a unigram model, and a sample of the model's code.

A hook observes a run: nothing here changes the training.
"""

from __future__ import annotations

import torch

from trainwright import Hook
from trainwright.data.sources.stdlib_code import unigram_loss

PROMPT = "def "


class PrintSample(Hook):
    """Prints the last validation loss and a sampled function, once and only on rank 0."""

    def __init__(self, *, max_new_tokens: int = 80) -> None:
        self.max_new_tokens = max_new_tokens

    def after_train(self) -> None:
        sample = self.sample_code()  # on all processes, because each may have a shard of the weights
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
        # This tokenizer treats a space as the beginning of the next word, so the model samples until there is a word.
        # The empty lines in front mark the beginning of a function.
        prompt = torch.tensor([tokenizer.encode("\n\n\n" + PROMPT.rstrip()).ids], device=device)
        generator = torch.Generator(device).manual_seed(0)  # keeps the random state of the run
        for _ in range(50):
            tokens = self.trainer.model.generate(
                prompt, max_new_tokens=self.max_new_tokens, temperature=0.5, generator=generator
            )
            text = tokenizer.decode(tokens[0].tolist()).lstrip()
            if text.startswith(PROMPT):
                break
        return text
