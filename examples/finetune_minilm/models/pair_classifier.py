"""PairClassifier: BERT with a head that compares the means of two texts, as in the pretraining of MiniLM."""

from torch import nn
from torch.nn.functional import cosine_similarity

from trainwright.models.bert import BertClassifier


class PairClassifier(BertClassifier):
    """Scores the similarity of the texts of token type 0 and 1 in a row, which do not attend to each other."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.classifier = nn.Linear(1, settings["num_labels"])

    def forward(self, input_ids, token_type_ids, attention_mask, labels=None):
        text = token_type_ids.masked_fill(attention_mask == 0, -1)
        hidden = self.bert(input_ids, text[:, None, :, None] == text[:, None, None, :])  # [B, S, D]
        first, second = (((text == number)[..., None] * hidden).sum(1) for number in (0, 1))
        logits = self.classifier(5 * cosine_similarity(first, second)[:, None])
        return {"loss": None if labels is None else self.criterion(logits, labels), "logits": logits}
