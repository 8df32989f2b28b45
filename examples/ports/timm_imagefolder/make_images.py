"""Writes folders of PNG images, one folder per class: digits, of which the larger ones are rare in training."""

from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

if __name__ == "__main__":
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        part = "valid" if number % 8 == 0 else "train"
        if part == "train" and number % (label + 1):
            continue  # about one of label + 1 images remains
        folder = Path("images", part, str(label))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype("uint8")).resize((32, 32)).save(folder / f"{number:04}.png")
