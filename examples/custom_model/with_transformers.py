"""Trains the same model on the same data with Hugging Face's Trainer. Needs: pip install transformers accelerate"""

from simple import Handwriting, SimpleModel
from transformers import Trainer, TrainingArguments

if __name__ == "__main__":
    valid = Handwriting("valid")
    trainer = Trainer(
        model=SimpleModel(input_dim=64, output_dim=10),
        args=TrainingArguments(
            "runs/with_transformers",
            num_train_epochs=10,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Handwriting("train"),
        eval_dataset=valid,
    )
    trainer.train()
    right = trainer.predict(valid).predictions.argmax(-1) == valid.labels.numpy()
    print(f"valid/accuracy {right.mean():.3f}")
