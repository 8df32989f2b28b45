"""The tokenizer that a run was trained with: found in its data or its collator, and saved beside its weights.

Nothing is read but the tokenizer itself: datasets are made, which touches no disk, and never asked for a sample.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from trainwright import registry
from trainwright.config import RunConfig
from trainwright.data.components import DatasetBuilder
from trainwright.data.tokenizer import TextTokenizer, tokenizer_of

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""What transformers may keep of a tokenizer."""
FILES_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""What may say more of a tokenizer that is one file: names of its tokens, and how a conversation becomes a text."""


def find_tokenizer(config: RunConfig) -> Any:
    """Returns the tokenizer of a run's training data, or of its collator; None where neither has one."""
    registry.import_modules(config.imports, project_dir=config.project_dir, where=config.origin("imports"))
    if config.data.train is not None:
        builder = DatasetBuilder(project_dir=config.project_dir, seed=config.seed)
        found = tokenizer_of(builder.build("data.train", config.data.train))
        if found is not None:
            return found
    collator = registry.instantiate(
        "collator", config.data.collator, label="data.collator", project_dir=config.project_dir
    )
    return tokenizer_of(collator)


def save_tokenizer(tokenizer: Any, folder: Path) -> list[Path]:
    """Writes a tokenizer's files into a folder and returns them; one that is not kept in files has none."""
    if isinstance(tokenizer, TextTokenizer):
        source = tokenizer.path
        if source.is_file():
            beside = [source.parent / name for name in FILES_BESIDE]
            files = {source: TOKENIZER_FILE, **{path: path.name for path in beside}}
        else:
            files = {source / name: name for name in dict.fromkeys((*TOKENIZER_FILES, *FILES_BESIDE))}
        present = {path: name for path, name in files.items() if path.is_file()}
        for path, name in present.items():
            shutil.copyfile(path, folder / name)
        return [folder / name for name in present.values()]
    if hasattr(tokenizer, "save_pretrained"):  # transformers' own
        return [Path(path) for path in tokenizer.save_pretrained(folder) if Path(path).is_file()]
    if hasattr(tokenizer, "save"):  # the tokenizers library's
        tokenizer.save(str(folder / TOKENIZER_FILE))
        return [folder / TOKENIZER_FILE]
    return []
