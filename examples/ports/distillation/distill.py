"""Trains a teacher, and then a small student with the teacher's scores: `python distill.py`."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

from trainwright import train
from trainwright.data.sources.digits import Digits


def classifier(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def train_on_labels(model, **options):
    def forward(model, batch):
        scores, labels = model(batch["pixel_values"]), batch["labels"]
        return cross_entropy(scores, labels), {"accuracy": (scores.argmax(1) == labels).float().mean()}

    return train_with(forward, model, name="teacher", **options)


def train_student(teacher, student, temperature=4.0, share=0.7, **options):
    teacher.eval()

    def forward(model, batch):
        scores, labels = model(batch["pixel_values"]), batch["labels"]
        with torch.no_grad():
            wanted = (teacher(batch["pixel_values"]) / temperature).softmax(1)
        given = (scores / temperature).log_softmax(1)
        distance = kl_div(given, wanted, reduction="batchmean") * temperature**2
        loss = share * distance + (1 - share) * cross_entropy(scores, labels)
        return loss, {"accuracy": (scores.argmax(1) == labels).float().mean(), "distance": distance}

    return train_with(forward, student, name="student", **options)


def train_with(forward, model, **options):
    return train(
        model, Digits(), eval_data={"valid": Digits(part="valid")}, forward=forward, max_steps=300, lr=1e-2, **options
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    teacher = train_on_labels(classifier(256))
    student = train_student(teacher.model, classifier(16))
    print(f"teacher {teacher.eval_logs['valid/accuracy']:.3f}, student {student.eval_logs['valid/accuracy']:.3f}")
