"""The loop that the port replaces: `python original.py`, after `python prepare.py`."""

import peft
import torch
import transformers
from datasets import load_dataset
from schedulefree import AdamWScheduleFree
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAUROC


def train(model, batches, valid_batches):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamWScheduleFree(trained, lr=5e-3, warmup_steps=20)
    for number, batch in enumerate(batches, start=1):
        model.train()
        optimizer.train()
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
        if number % 50 == 0:
            optimizer.eval()
            print(f"auroc {evaluate(model, valid_batches):.3f}")


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    metric = MulticlassAUROC(num_classes=2)
    for batch in batches:
        metric.update(model(**batch).logits, batch["labels"])
    return metric.compute().item()


def load_data():
    data = load_dataset("parquet", data_files={"train": "train.parquet", "valid": "valid.parquet"})
    collate = transformers.DataCollatorWithPadding(transformers.AutoTokenizer.from_pretrained("base"))
    batches = DataLoader(data["train"], batch_size=16, shuffle=True, collate_fn=collate)
    return batches, DataLoader(data["valid"], batch_size=16, collate_fn=collate)


if __name__ == "__main__":
    torch.manual_seed(0)
    base = transformers.AutoModelForSequenceClassification.from_pretrained("base", num_labels=2)
    adapters = peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = peft.get_peft_model(base, adapters)
    batches, valid_batches = load_data()
    losses = list(train(model, (batch for _ in range(3) for batch in batches), valid_batches))
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
