"""A hook with state, and functions that are hooks. None of them changes the training."""

from trainwright import Hook


class RememberBest(Hook):
    """Prints the best evaluation at the end; its state is saved and restored when the run resumes."""

    def __init__(self, metric):
        self.metric, self.best, self.at_step = metric, None, 0

    def after_eval(self, logs):
        if self.metric in logs and (self.best is None or logs[self.metric] < self.best):
            self.best, self.at_step = logs[self.metric], self.trainer.step

    def after_train(self):
        if self.trainer.is_main_process:  # with several processes, only the first one prints
            print(f"the best {self.metric} was {self.best:.4f}, at step {self.at_step}")

    def state_dict(self):
        return {"best": self.best, "at_step": self.at_step}

    def load_state_dict(self, state):
        self.best, self.at_step = state["best"], state["at_step"]


def say_weights(trainer):
    """Logs a value of the model in addition to those of the loop."""
    trainer.storage.put_scalar("head_norm", trainer.model.head.weight.detach().norm())


def note_checkpoint(trainer, path):
    print(f"{path.name} is safe")
