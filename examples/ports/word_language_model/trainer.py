"""CarriesHidden: each batch continues with the hidden state of the one before."""

from torch.nn.functional import cross_entropy

from trainwright import Trainer


class CarriesHidden(Trainer):
    hidden = None

    def forward(self, words, next_words):
        scores, hidden = self.model(words, self.hidden)
        self.hidden = tuple(each.detach() for each in hidden)
        return cross_entropy(scores.flatten(0, 1), next_words.flatten())

    def eval_begin(self):
        self.hidden = None  # training continues with its own state: evaluations do not change the state below

    def state_dict(self):
        return {"hidden": self.hidden}

    def load_state_dict(self, state):
        self.hidden = state["hidden"] and tuple(each.to(self.device) for each in state["hidden"])


def forget_hidden(trainer):
    trainer.hidden = None
