"""PrintSample: prints a text that the model generates. A hook acts at events of a run and changes no result."""

import torch

from trainwright import Hook


class PrintSample(Hook):
    """Prints a sample after each evaluation."""

    def __init__(self, num_tokens=80):
        self.num_tokens = num_tokens

    def after_eval(self, logs):
        # Other events: before_train, after_train, before_step, after_step, before_eval, after_save(path), close.
        if logs:  # they are empty after a failed evaluation
            sample = self.sample()  # on all processes: each may have a part of the weights
            if self.trainer.is_main_process:
                print(f"--- step {self.trainer.step}\n{sample}\n---")

    @torch.no_grad()
    def sample(self):
        model, dataset = self.trainer.model, self.trainer.train_data.dataset
        generator = torch.Generator().manual_seed(0)  # separate, to keep the random state of the run
        tokens = dataset[0]["input_ids"][:1].tolist()
        for _ in range(self.num_tokens):
            seen = torch.tensor([tokens[-64:]], device=self.trainer.device)
            chances = model(seen)[0, -1].softmax(-1).cpu()
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
        decode = dataset.decode if hasattr(dataset, "decode") else dataset.tokenizer.decode
        return decode(tokens)
