"""Models of Hugging Face's transformers by config: any class of theirs, from keywords or from a folder.

    {type: transformers:AutoModelForCausalLM, model_type: gpt2, n_layer: 2}
    {type: transformers:LlamaForCausalLM, hidden_size: 64}
    {type: transformers:BertForSequenceClassification, pretrained: folder, num_labels: 3}

Their configs take any keyword in silence; here one that a config does not have is refused. Nothing is downloaded
but by locate.py, where a name is the hub's. Our own models are in the files beside.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.config.problems import nearest
from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.locate import find_folder
from trainwright.models.pretrained import LoadReport, as_dtype, read_config_file

logger = logging.getLogger(__name__)

# Keywords of the model rather than of its config; torch_dtype is the name that most files and pages use.


def is_transformers_class(target: Any) -> bool:
    """Is this a model class of transformers, an Auto class, or a user's subclass of one? Imports nothing."""
    roots = {("transformers.modeling_utils", "PreTrainedModel")}
    roots.add(("transformers.models.auto.auto_factory", "_BaseAutoModelClass"))
    return isinstance(target, type) and any((base.__module__, base.__name__) in roots for base in target.__mro__)


def build_transformers(
    target: type[Any],
    arguments: Mapping[str, Any],
    *,
    pretrained: str | Path | None = None,
    home_path: str | Path | None = None,
    strict: bool = True,
) -> tuple[nn.Module, LoadReport]:
    """Builds a model of a transformers class, with random weights or with those of a folder.

    `arguments` are the keywords of its config (an Auto class needs `model_type` among them, or a folder), changes
    to the folder's config where one is given, and `attn_implementation` and `dtype`. Weights are float32 unless
    `dtype` says otherwise, whatever the files hold: precision is the training's, and 16-bit weights lose small
    updates. With `strict`, keys of the folder that the model has no place for are refused, except where the class
    is not the one that was saved: a head then goes and another comes. The report names what was drawn at random.
    """
    arguments = dict(arguments)
    dtype = _take_dtype(arguments)
    attention = arguments.pop("attn_implementation", None)
    folder = None if pretrained is None else find_folder(pretrained, home_path=home_path)
    config = _keyword_config(target, arguments) if folder is None else _folder_config(target, arguments, folder)
    if "use_cache" not in arguments and hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values of a training batch serve nobody
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    make = target.from_config if _is_auto(target) else target._from_config
    try:
        if folder is None:
            return make(config, dtype=dtype or torch.float32, **options), LoadReport((), ())
        return _load(target, folder, config, {"dtype": dtype or torch.float32, **options}, strict=strict)
    except (ValueError, ImportError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"transformers cannot build {target.__name__}: {first}") from error


def _load(
    target: type[Any], folder: Path, config: Any, options: dict[str, Any], *, strict: bool
) -> tuple[nn.Module, LoadReport]:
    saved = read_config_file(folder).get("architectures") or []
    with _quiet():
        model, info = target.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # so that they can be named below
            **options,
        )
    wrong = [
        f"{key}: {tuple(theirs)} in the files, {tuple(ours)} in the model" for key, theirs, ours in _mismatches(info)
    ]
    if wrong:
        raise CheckpointError(f"The weights of {folder} have other shapes: {'; '.join(sorted(wrong)[:8])}.")
    report = LoadReport(tuple(sorted(info["missing_keys"])), tuple(sorted(info["unexpected_keys"])))
    if strict and type(model).__name__ in saved and (report.missing or report.unexpected):
        raise CheckpointError(
            f"The weights of {folder} are not all of this model's: missing {_listed(report.missing)}; unexpected "
            f"{_listed(report.unexpected)}. Choose another folder, or load with strict: false."
        )
    if report.missing or report.unexpected:
        logger.warning(
            "%s: not in the files, and drawn at random: %s; not in the model, and left out: %s",
            folder,
            _listed(report.missing),
            _listed(report.unexpected),
        )
    # from_pretrained leaves a model in evaluation mode; a run trains it.
    return model.train(), report


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' progress bar and its own report of keys out of the log, which gets ours."""
    from transformers.utils import logging

    their_logging: Any = logging  # its functions are not annotated
    verbosity, had_bar = their_logging.get_verbosity(), their_logging.is_progress_bar_enabled()
    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        their_logging.set_verbosity(verbosity)
        if had_bar:
            their_logging.enable_progress_bar()


def _keyword_config(target: type[Any], arguments: dict[str, Any]) -> Any:
    if not _is_auto(target):
        config_class = target.config_class
    else:
        from transformers import CONFIG_MAPPING

        model_type = arguments.pop("model_type", None)
        if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in target._model_mapping:
            problem = "needs a model_type" if model_type is None else f'has no model_type "{model_type}"'
            guess = nearest(str(model_type), [one.model_type for one in target._model_mapping])
            hint = f'Did you mean "{guess}"?' if guess else "Give one, such as gpt2, llama or bert."
            raise ConfigError(f"{target.__name__} {problem}. {hint} Or give a folder: pretrained.")
        config_class = CONFIG_MAPPING[model_type]
    _refuse_unknown(config_class, arguments)
    return _make_config(config_class, arguments)


def _folder_config(target: type[Any], arguments: dict[str, Any], folder: Path) -> Any:
    from transformers import CONFIG_MAPPING

    told = read_config_file(folder)
    model_type = str(told.get("model_type"))
    config_class: Any = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401  # no get
    wanted = arguments.pop("model_type", model_type)
    if not _is_auto(target):
        wanted = getattr(target.config_class, "model_type", "")
        # A class that is not transformers' own brings its config with it.
        config_class = target.config_class if config_class is None else config_class
    if config_class is None or wanted != model_type:
        raise ConfigError(
            f"{folder} holds a model of the type {model_type!r}, "
            + (f"not {wanted!r}." if wanted != model_type else "which transformers does not have.")
            + " Choose the class, or the folder, accordingly."
        )
    _refuse_unknown(config_class, arguments)
    # `_name_or_path` and the like in the file are no keywords of ours to check.
    return _make_config(config_class, {**told, **arguments, "dtype": None, "torch_dtype": None})


def _make_config(config_class: type[Any], keywords: dict[str, Any]) -> Any:
    try:
        return config_class.from_dict(keywords)
    except Exception as error:  # each config checks its values in its own way
        raise ConfigError(f"{config_class.__name__} refuses its settings: {error}") from error


def _refuse_unknown(config_class: type[Any], arguments: Mapping[str, Any]) -> None:
    default = config_class()
    known = {name for name in vars(default) if not name.startswith("_")} | set(default.attribute_map) | {"num_labels"}
    for name in arguments:
        if name not in known:
            guess = nearest(name, known)
            hint = f'Did you mean "{guess}"?' if guess else f"It has: {', '.join(sorted(known))}."
            raise ConfigError(f'{config_class.__name__} has no setting "{name}". {hint}')


def _take_dtype(arguments: dict[str, Any]) -> torch.dtype | None:
    given = [arguments.pop(name) for name in ("dtype", "torch_dtype") if name in arguments]
    if len(given) == 2:
        raise ConfigError("dtype and torch_dtype are the same setting. Give one of them.")
    return as_dtype(given[0]) if given else None


def _mismatches(info: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return list(info.get("mismatched_keys") or ())


def _is_auto(target: type[Any]) -> bool:
    return not issubclass(target, nn.Module)


def _listed(keys: tuple[str, ...]) -> str:
    return (", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")) or "none"
