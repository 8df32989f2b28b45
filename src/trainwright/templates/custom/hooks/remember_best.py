"""RememberBest: a hook with state. The state is saved with each checkpoint and restored when the run resumes."""

from trainwright import Hook


class RememberBest(Hook):
    """Reports each new best evaluation, and the best one at the end."""

    def __init__(self, metric):
        self.metric = metric
        self.best, self.at_step = None, 0

    def after_eval(self, logs):
        if self.metric in logs and (self.best is None or logs[self.metric] < self.best):
            self.best, self.at_step = logs[self.metric], self.trainer.step
            # self.trainer.stop("good enough") would end the run here; self.trainer.save() would save it.

    def after_train(self):
        if self.trainer.is_main_process:  # with several processes, only the first one prints
            print(f"the best {self.metric} was {self.best:.4f}, at step {self.at_step}")

    def state_dict(self):
        return {"best": self.best, "at_step": self.at_step}

    def load_state_dict(self, state):
        self.best, self.at_step = state["best"], state["at_step"]
