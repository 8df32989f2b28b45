"""DrawRegions: draws the classes of the trained model, in letters. A hook is called at events of a run and does not
change the results."""

import torch

from trainwright import Hook


class DrawRegions(Hook):
    """Draws the model's class for each point of the plane, after training."""

    def __init__(self, columns=60):
        self.columns = columns

    def after_train(self):
        # Other events: before_train, before_step, after_step, before_eval, after_eval(logs), after_save(path), close.
        x = torch.linspace(-1, 1, self.columns)
        y = torch.linspace(1, -1, self.columns // 2)  # a letter is twice as high as it is wide
        plane = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).to(self.trainer.device)
        model = self.trainer.model.eval()
        with torch.no_grad():
            classes = model(plane).argmax(-1).tolist()  # on all processes, because each may have a shard of the weights
        if self.trainer.is_main_process:
            print("\n".join("".join(" .o#@%"[one % 6] for one in row) for row in classes))
