"""One interface for all tokenizers: a tokenizer.json, a folder in Hugging Face's format, or plain bytes.

    load_tokenizer(name_or_path) → TextTokenizer → encode, decode, the ids of special tokens

Files are read at first use, and nothing is downloaded. Padding and truncation are in collators/.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.errors import ConfigError, DataError

BYTES = "bytes"
"""The built-in tokenizer's name: 256 byte values, then the four tokens of BYTES_SPECIAL."""

BYTES_SPECIAL: Mapping[str, int] = {"pad": 256, "bos": 257, "eos": 258, "mask": 259}

Span = tuple[int, int]
"""The first character of a range of a text, and the one after its last."""

ROLES = ("pad", "eos", "bos", "mask", "unk", "cls", "sep")

# The names of special tokens in tokenizers without a configuration file; used only for tokens marked as special.
USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "eos": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>"),
    "bos": ("<s>", "<bos>", "[BOS]", "<|begin_of_text|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>"),
    "sep": ("[SEP]", "<sep>"),
}


def load_tokenizer(
    name_or_path: str | os.PathLike[str] | TextTokenizer,
    *,
    project_dir: str | os.PathLike[str] | None = None,
    add_special_tokens: bool = True,
) -> TextTokenizer:
    """Returns the tokenizer of this name or path; a TextTokenizer is returned unchanged.

    A relative path starts at `project_dir`, the folder of the run file.

    >>> tokenizer = load_tokenizer("bytes")
    >>> tokenizer.encode("hé"), tokenizer.decode([104, 195, 169, tokenizer.eos_id]), tokenizer.vocab_size
    ([104, 195, 169], 'hé', 260)
    """
    if isinstance(name_or_path, TextTokenizer):
        return name_or_path
    return TextTokenizer(name_or_path, project_dir=project_dir, add_special_tokens=add_special_tokens)


def auto_tokenizer(path: str, *, project_dir: str | os.PathLike[str] | None = None, **options: Any) -> Any:
    """Returns the tokenizer of transformers for a folder or a name, for collators of transformers.

    A relative folder starts at the folder of the run file. `options` are arguments of AutoTokenizer.from_pretrained.
    Code in the folder is never executed; name your own tokenizer class instead.
    """
    if options.get("trust_remote_code"):
        raise ConfigError(
            "trust_remote_code: the tokenizer auto runs no code of its folder. Name the class by its import path or "
            "its file instead, as the type."
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "A tokenizer of type auto needs transformers, which is not installed. Install it: pip install "
            "'trainwright[transformers]'."
        ) from error
    folder = Path(project_dir or ".") / Path(path).expanduser()
    return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else path, **options)


def tokenizer_of(owner: Any) -> Any:
    """Returns the tokenizer of a dataset or collator, or of the first of its sources that has one; None otherwise."""
    if owner is None or isinstance(owner, str | Path):
        return None
    found = getattr(owner, "tokenizer", None)
    if found is not None:
        return found
    sources = getattr(owner, "sources", None)
    inner = [*sources.values()] if isinstance(sources, Mapping) else []
    inner += [getattr(owner, name, None) for name in ("source", "dataset", "collator", "format")]
    return next((one for one in map(tokenizer_of, inner) if one is not None), None)


class TextTokenizer:
    """A tokenizer that is read at first use, and again by each worker that it is pickled to.

    `add_special_tokens` keeps the tokens that the tokenizer adds to a text, such as [CLS] and [SEP]; `bytes` adds
    none. Truncation and padding settings of a tokenizer.json are ignored, because the collator does both.
    """

    def __init__(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        project_dir: str | os.PathLike[str] | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        self.name = os.fspath(name_or_path)
        # Absolute, because a worker or a later call may run in another folder.
        self.path = Path(os.path.abspath(Path(project_dir or ".") / Path(self.name).expanduser()))  # noqa: PTH100
        self.add_special_tokens = add_special_tokens
        self._loaded: _ByteEngine | _LibraryEngine | _TransformersEngine | None = None
        self._affixes: tuple[list[int], list[int]] | None = None
        self._chat_templates: tuple[dict[str, str], dict[str, str]] | None = None

    def __repr__(self) -> str:
        return f"TextTokenizer({self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    @property
    def vocab_size(self) -> int:
        """The number of ids, including special ones: one more than the largest."""
        return self._engine.vocab_size

    @property
    def pad_id(self) -> int | None:
        """The padding token; None if the tokenizer has none."""
        return self._engine.roles.get("pad")

    @property
    def eos_id(self) -> int | None:
        """The token at the end of a text; None if the tokenizer has none."""
        return self._engine.roles.get("eos")

    @property
    def bos_id(self) -> int | None:
        """The token at the start of a text; None if the tokenizer has none."""
        return self._engine.roles.get("bos")

    @property
    def mask_id(self) -> int | None:
        """The mask token; None if the tokenizer has none."""
        return self._engine.roles.get("mask")

    @property
    def special_ids(self) -> frozenset[int]:
        """All tokens that represent no text."""
        return self._engine.special_ids

    @property
    def affixes(self) -> tuple[list[int], list[int]]:
        """The tokens before and after the text of each sample, both empty without `add_special_tokens`."""
        if self._affixes is None:
            self._affixes = ([], [])
            if self.add_special_tokens:
                [bare] = self._engine.encode_batch(["a"], add_special_tokens=False)
                [full] = self._engine.encode_batch(["a"], add_special_tokens=True)
                starts = [start for start in range(len(full)) if full[start : start + len(bare)] == bare]
                if bare and starts:
                    self._affixes = (full[: starts[0]], full[starts[0] + len(bare) :])
        return self._affixes

    def encode(self, text: str, *, max_length: int | None = None) -> list[int]:
        """Returns the tokens of one text."""
        return self.encode_batch([text], max_length=max_length)[0]

    def encode_batch(
        self, texts: Sequence[str], *, max_length: int | None = None, add_special_tokens: bool | None = None
    ) -> list[list[int]]:
        """Returns the tokens of each text; a longer one is truncated before its closing special tokens."""
        add = self.add_special_tokens if add_special_tokens is None else add_special_tokens
        try:
            encoded = self._engine.encode_batch(texts, add_special_tokens=add)
        except (TypeError, UnicodeEncodeError) as error:
            raise _unfit_text(texts, error) from error
        if max_length is None or all(len(ids) <= max_length for ids in encoded):
            return encoded
        closing = self.affixes[1] if add else []
        return [cut_text(ids, closing, max_length) for ids in encoded]

    def encode_with_spans(self, text: str, *, add_special_tokens: bool = False) -> tuple[list[int], list[Span]]:
        """Returns the tokens of a text, and for each the index of its first character and the one after its last.

        Several tokens may represent one character; the span of a token that represents no text is empty.
        """
        try:
            return self._engine.encode_with_spans(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise _unfit_text([text], error) from error

    def find_chat_template(self, *, has_tools: bool = False) -> tuple[str | None, dict[str, str]]:
        """Returns the template of conversations, or None, and the special tokens that it may use.

        A tokenizer may have another template for conversations with tools.
        """
        if self._chat_templates is None:
            self._chat_templates = ({}, {}) if self.name == BYTES else _read_chat_templates(self.name, self.path)
        templates, special_tokens = self._chat_templates
        default = templates.get("default")
        return (templates.get("tool_use", default) if has_tools else default), special_tokens

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens, which may also be an array or a tensor."""
        plain = [int(one) for one in ids]
        wrong = next((one for one in plain if not 0 <= one < self.vocab_size), None)
        if wrong is not None:
            raise DataError(
                f"{wrong} is not a token of {self.name}, whose tokens are 0 … {self.vocab_size - 1}. "
                "Decode input_ids, not labels, which contain -100."
            )
        return self._engine.decode(plain, skip_special_tokens=skip_special_tokens)

    @property
    def _engine(self) -> _ByteEngine | _LibraryEngine | _TransformersEngine:
        if self._loaded is None:
            self._loaded = _ByteEngine() if self.name == BYTES else _read(self.name, self.path)
        return self._loaded


def cut_text(ids: list[int], closing: list[int], max_length: int) -> list[int]:
    """Returns at most `max_length` tokens; truncates the end of the text, but not the closing special tokens."""
    if len(ids) <= max_length:
        return ids
    if max_length <= len(closing):
        raise DataError(
            f"max_length is {max_length}, but the tokenizer ends each text with {len(closing)} special tokens. "
            "Raise it, or set add_special_tokens to false."
        )
    return ids[: max_length - len(closing)] + closing


@dataclass(frozen=True)
class _ByteEngine:
    """Each byte of a text's UTF-8 encoding is a token."""

    vocab_size: int = 256 + len(BYTES_SPECIAL)
    roles: Mapping[str, int] = field(default_factory=lambda: dict(BYTES_SPECIAL))
    special_ids: frozenset[int] = frozenset(BYTES_SPECIAL.values())

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("not all are texts")
        return [list(text.encode()) for text in texts]

    def encode_with_spans(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[Span]]:
        if not isinstance(text, str):
            raise TypeError("not a text")
        spans = [(place, place + 1) for place, character in enumerate(text) for _ in character.encode()]
        return list(text.encode()), spans

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        names = {} if skip_special_tokens else {number: f"<{role}>" for role, number in BYTES_SPECIAL.items()}
        chunks = [bytes([one]) if one < 256 else names.get(one, "").encode() for one in ids]
        return b"".join(chunks).decode(errors="replace")


class _LibraryEngine:
    """A tokenizer.json, read by the tokenizers library."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._file = file
        with _library_errors(file):
            self._tokenizer = Tokenizer.from_file(str(file))
            # Some files pad every text to 128 tokens, but the collator defines the width.
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
            added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may leave gaps
        self.roles = _find_roles(file.parent, vocabulary, special)
        self.special_ids = frozenset({*special.values(), *self.roles.values()})

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        with _library_errors(self._file):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]

    def encode_with_spans(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[Span]]:
        with _library_errors(self._file):
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return encoding.ids, encoding.offsets

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        with _library_errors(self._file):
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


@contextmanager
def _library_errors(file: Path) -> Iterator[None]:
    """Explains the errors of the tokenizers library, which are plain Exceptions, and panics of its Rust code."""
    try:
        yield
    except (TypeError, UnicodeEncodeError):
        raise  # about the texts
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"The tokenizers library cannot use this file: {error}.", where=file) from error


class _TransformersEngine:
    """A folder without tokenizer.json, read by transformers."""

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(
                "This folder has no tokenizer.json; other formats need transformers, which is not installed. "
                "Install it: pip install 'trainwright[transformers]'.",
                where=folder,
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # tokenizer classes raise various types
            found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
            raise DataError(
                f"This folder has no tokenizer.json, and transformers cannot read a tokenizer from it: "
                f"{type(error).__name__}: {error} The folder contains: {found}.",
                where=folder,
            ) from error
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        numbers = {role: getattr(self._tokenizer, f"{role}_token_id", None) for role in ROLES}
        self.roles = {role: number for role, number in numbers.items() if number is not None}
        added = self._tokenizer.added_tokens_decoder  # all_special_ids has only those with a role
        marked = {number for number, token in added.items() if token.special}
        self.special_ids = frozenset({*self._tokenizer.all_special_ids, *marked})

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def encode_with_spans(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[Span]]:
        if not self._tokenizer.is_fast:
            raise DataError(
                f"{type(self._tokenizer).__name__} does not report which characters its tokens represent. Use a "
                "tokenizer with a tokenizer.json."
            )
        found = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        return found["input_ids"], [tuple(span) for span in found["offset_mapping"]]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def _read(name: str, path: Path) -> _LibraryEngine | _TransformersEngine:
    """Reads a file, a folder, or what Hugging Face's cache contains under this name."""
    if path.is_file():
        return _LibraryEngine(path)
    folder = path if path.is_dir() else _cached(name)
    if folder is None:
        raise DataError(
            f'There is no tokenizer "{name}": neither a file or folder {path}, nor a model "{name}" in the local '
            f"Hugging Face cache. Use a tokenizer.json, a folder that contains one, or {BYTES}."
        )
    file = folder / "tokenizer.json"
    return _LibraryEngine(file) if file.is_file() else _TransformersEngine(folder)


def _read_chat_templates(name: str, path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the chat templates by name and the special tokens of a folder, both empty without a template."""
    folder = path.parent if path.is_file() else path if path.is_dir() else _cached(name)
    if folder is None or not _has_chat_template(folder):
        return {}, {}
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DataError(
            "The chat template of this folder needs transformers, which is not installed. Install it: pip install "
            "'trainwright[transformers]'.",
            where=folder,
        ) from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizer classes raise various types
        raise DataError(
            f"transformers cannot read the chat template of this folder: {type(error).__name__}: {error}", where=folder
        ) from error
    found = tokenizer.chat_template
    templates = dict(found) if isinstance(found, Mapping) else {} if found is None else {"default": found}
    return templates, {role: str(token) for role, token in tokenizer.special_tokens_map.items()}


def _has_chat_template(folder: Path) -> bool:
    """Returns True if a file of the folder has a template; otherwise transformers, which is slow to import, is not
    needed."""
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and '"chat_template"' in settings.read_text("utf-8", errors="replace"):
        return True
    return any((folder / name).exists() for name in ("chat_template.jinja", "additional_chat_templates"))


def _cached(name: str) -> Path | None:
    """Returns the folder of a model that was downloaded earlier."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        raise DataError(
            f'There is no file or folder "{name}", and Hugging Face\'s cache needs huggingface_hub, which is not '
            "installed. Install it: pip install 'trainwright[huggingface_hub]'."
        ) from error
    found = (try_to_load_from_cache(name, file) for file in ("tokenizer.json", "tokenizer_config.json"))
    return next((Path(file).parent for file in found if isinstance(file, str)), None)


def _find_roles(folder: Path, vocabulary: Mapping[str, int], special: Mapping[str, int]) -> dict[str, int]:
    """Returns each role's token, from the files next to the tokenizer or otherwise by its usual name."""
    settings: dict[str, Any] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        if file.is_file():
            try:
                settings |= json.loads(file.read_text("utf-8"))
            except (ValueError, TypeError, RecursionError) as error:
                raise DataError(f"Not a JSON object: {error}. Repair or remove the file.", where=file) from error
    roles = {}
    for role in ROLES:
        named = settings.get(f"{role}_token")
        text = named.get("content") if isinstance(named, Mapping) else named
        if text is None and not settings:
            text = next((usual for usual in USUAL_NAMES[role] if usual in special), None)
        if isinstance(text, str) and text in vocabulary:
            roles[role] = vocabulary[text]
    return roles


def _unfit_text(texts: Sequence[Any], error: Exception) -> DataError:
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            return DataError(f"Text {number} (counted from 0) is a {type(text).__name__}, {text!r:.60}, not a text.")
        try:
            text.encode()
        except UnicodeEncodeError as broken:
            return DataError(
                f"Text {number} (counted from 0) is not valid Unicode: {broken}. Read its file as UTF-8 with "
                'errors="replace".'
            )
    return DataError(f"The texts cannot be tokenized: {error}.")
