"""StdlibCode: the source code of the running Python's standard library, as blocks of tokens for language models.

Real text that is available on every machine. At first use a byte-level BPE tokenizer is trained on the train part and
both parts are encoded into a cache folder (a few seconds); later runs map those files into memory. The constructor
accesses no disk. `unigram_loss` is the loss of a unigram model, which a trained model has to beat.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.data.cache import cache_root, rename_unless_taken
from trainwright.data.fetch import positive_indices
from trainwright.data.sources.tokens import to_sample
from trainwright.errors import ConfigError, DataError

PARTS = ("train", "valid")

# Ends every file, so that a model learns where a file ends.
END_OF_FILE = "<|endoftext|>"

# The 256 bytes and END_OF_FILE, the smallest vocabulary that can encode every text.
SMALLEST_VOCABULARY = 257

# Folders that are not used: third-party packages, tests, demos, and tables (of characters, of help texts).
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
    | {"encodings", "pydoc_data", "__pycache__", "__phello__"}
)

# Increased when the tokens of the same arguments change, so that old caches are not used.
CACHE_FORMAT = 1


@dataclass(frozen=True)
class _Recipe:
    """The arguments on which the tokens depend, in addition to the interpreter; both parts of one recipe share a
    tokenizer."""

    vocab_size: int
    valid_fraction: float
    max_megabytes: float | None


class StdlibCode(Dataset[dict[str, Tensor]]):
    """Blocks of `sequence_length` tokens of Python code; `labels` equal `input_ids`, and the model shifts them.

    Each file is in one part, chosen by a hash of its path: about `valid_fraction` of the files are in valid.
    `max_megabytes` limits the source that is read, in order of path; None reads all of it. `cache_dir` defaults to
    `trainwright` in $XDG_CACHE_HOME or ~/.cache. An incomplete last block is dropped.
    """

    draws_nothing = True  # the loader need not seed each sample

    def __init__(
        self,
        *,
        sequence_length: int = 128,
        vocab_size: int = 2048,
        part: str = "train",
        valid_fraction: float = 0.05,
        max_megabytes: float | None = 8.0,
        cache_dir: str | Path | None = None,
    ) -> None:
        checks = [
            (part in PARTS, f'part is "{part}". Use one of: {", ".join(PARTS)}.'),
            (sequence_length >= 2, f"sequence_length is {sequence_length}. Use at least 2, to predict a token."),
            (vocab_size >= SMALLEST_VOCABULARY, f"vocab_size is {vocab_size}. Use at least {SMALLEST_VOCABULARY}."),
            (0.0 < valid_fraction < 1.0, f"valid_fraction is {valid_fraction}. Use a fraction between 0 and 1."),
            (max_megabytes is None or max_megabytes > 0, f"max_megabytes is {max_megabytes}. Use a positive number."),
        ]
        for is_valid, problem in checks:
            if not is_valid:
                raise ConfigError(problem, where="stdlib_code")
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.part = part
        self.recipe = _Recipe(vocab_size, float(valid_fraction), max_megabytes and float(max_megabytes))
        self.cache_dir = cache_dir
        self._tokens: npt.NDArray[Any] | None = None
        self._tokenizer: Tokenizer | None = None

    @property
    def tokens_per_sample(self) -> int:
        """The tokens in each sample, without padding."""
        return self.sequence_length

    @property
    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE tokenizer that both parts share."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self.prepare() / "tokenizer.json"))
        return self._tokenizer

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens of this part in one row, mapped from the cache file and read on access."""
        if self._tokens is None:
            tokens = np.load(self.prepare() / f"{self.part}.npy", mmap_mode="r")
            if len(tokens) < self.sequence_length:
                raise DataError(
                    f"The {self.part} part has {len(tokens)} tokens, less than one block of {self.sequence_length}. "
                    "Raise max_megabytes or valid_fraction, or lower sequence_length."
                )
            self._tokens = tokens
        return self._tokens

    def prepare(self) -> Path:
        """Creates the cache folder unless it exists, and returns it.

        Several processes may prepare it at the same time: each writes a temporary folder, the first to finish renames
        it, and the others remove theirs.
        """
        folder = cache_root(self.cache_dir) / _cache_name(self.recipe)
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                _write_tokens(self.recipe, staging)
                rename_unless_taken(staging, folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        return folder

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Returns the samples of a batch; torch's loader prefers this to one call a sample."""
        length = self.sequence_length
        blocks = positive_indices(indices, size=len(self), of=f"blocks of the {self.part} part")
        return [to_sample(self.tokens[start : start + length]) for start in (blocks * length).tolist()]

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker maps the file itself; pickling the map would copy all tokens to it.
        return {**self.__dict__, "_tokens": None, "_tokenizer": None}


def unigram_loss(train: StdlibCode, valid: StdlibCode) -> float:
    """Returns the loss on `valid`, in nats per token, of a model that uses only the token frequencies of `train`.

    Counts start at one, so the loss of a token that is not in `train` is finite.
    """
    if train.recipe != valid.recipe:
        raise DataError(
            f"The parts have different tokens: train has {train.recipe}, valid has {valid.recipe}. "
            "Use the same vocab_size, valid_fraction and max_megabytes."
        )
    seen = np.bincount(train.tokens, minlength=train.vocab_size) + 1
    wanted = np.bincount(valid.tokens, minlength=train.vocab_size)
    return float(-(wanted * np.log(seen / seen.sum())).sum() / wanted.sum())


def _library_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _cache_name(recipe: _Recipe) -> str:
    """Returns a folder name that changes with the interpreter, the recipe and this file's format."""
    # Includes the library's path, because two builds of one version may have different files.
    facts = {**asdict(recipe), "library": str(_library_folder()), "format": CACHE_FORMAT}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"stdlib-code-python-{platform.python_version()}-{digest[:12]}"


def list_source_files(library: Path) -> list[str]:
    """Returns the relative paths of the library's source files, sorted, without what SKIPPED_FOLDERS names."""
    paths: list[str] = []
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths += [(Path(folder) / name).relative_to(library).as_posix() for name in files if name.endswith(".py")]
    return sorted(paths)


def choose_files(library: Path, *, valid_fraction: float, max_megabytes: float | None) -> dict[str, list[str]]:
    """Returns the relative paths of each part's files, in order.

    Each part has its share of `max_megabytes`, because a small common limit would often be reached before the first
    file of the valid part. A file that does not fit is skipped; later, smaller ones may fit.
    """
    total = math.inf if max_megabytes is None else max_megabytes * 1e6
    room = {"train": total * (1.0 - valid_fraction), "valid": total * valid_fraction}
    chosen: dict[str, list[str]] = {part: [] for part in PARTS}
    for path in list_source_files(library):
        fraction = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") / 2**64
        part = "valid" if fraction < valid_fraction else "train"
        size = (library / path).stat().st_size
        if size <= room[part]:
            room[part] -= size
            chosen[part].append(path)
    return chosen


def _write_tokens(recipe: _Recipe, folder: Path) -> None:
    """Trains the tokenizer on the train part and writes tokenizer.json, train.npy and valid.npy into `folder`."""
    texts = _read_texts(recipe)
    tokenizer = _train_tokenizer(texts["train"], vocab_size=recipe.vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    dtype = np.uint16 if recipe.vocab_size <= 2**16 else np.uint32
    for part in PARTS:
        encodings = tokenizer.encode_batch_fast([text + END_OF_FILE for text in texts[part]])
        np.save(folder / f"{part}.npy", np.concatenate([np.array(encoding.ids, dtype) for encoding in encodings]))


def _read_texts(recipe: _Recipe) -> dict[str, list[str]]:
    """Returns the texts of each part; invalid bytes of a file that is not UTF-8 are replaced."""
    library = _library_folder()
    chosen = choose_files(library, valid_fraction=recipe.valid_fraction, max_megabytes=recipe.max_megabytes)
    for part, paths in chosen.items():
        if not paths:
            raise DataError(
                f"No file of Python's standard library in {library} is in the {part} part with max_megabytes "
                f"{recipe.max_megabytes} and valid_fraction {recipe.valid_fraction}. Raise one of them, or use a "
                "Python that is installed with its sources."
            )
    return {
        part: [(library / path).read_bytes().decode("utf-8", errors="replace") for path in paths]
        for part, paths in chosen.items()
    }


def _train_tokenizer(texts: list[str], *, vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE: every text can be encoded and decoded without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer
