"""Models of Hugging Face's transformers: built from keywords or a folder, and adapted at each call.

During training a call uses no cache, and packed documents stay apart.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.config.problems import nearest
from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.pretrained import (
    CONFIG_FILE,
    INDEX_FILE,
    PICKLED_FILE,
    PICKLED_INDEX_FILE,
    WEIGHTS_FILE,
    LoadReport,
    as_dtype,
    integer_keys,
    keys_of,
    listed,
    on_meta,
    read_config_file,
    reject_integers,
    weight_files,
)

logger = logging.getLogger(__name__)

POSITIONS, DOCUMENTS = (0, 1, 0, 1), (0, 0, 1, 1)
"""The row of the question: two documents of two tokens."""


def watch_calls(model: nn.Module, *, leaves_cache: bool) -> None:
    """Has every call of a model looked at before it is made; `leaves_cache` leaves `use_cache` to the config."""
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    model.register_forward_pre_hook(_Watch(sets_cache=takes_cache and not leaves_cache), with_kwargs=True)


class _Watch:
    """The hook of one model; a copy of the model has a copy of it."""

    def __init__(self, *, sets_cache: bool) -> None:
        self._sets_cache = sets_cache
        self._asked = False

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not self._asked and _has_borders(kwargs):
            self._asked = True  # first, for the question is a call as well
            _reject_crossing(model, kwargs)
        # Keys and values of a training batch serve nobody, and with a cache transformers reads no borders from the
        # positions. By keyword: the config is written as it was read.
        given = any(kwargs.get(name) is not None for name in ("labels", "position_ids", "document_ids"))
        if self._sets_cache and (model.training or given):
            kwargs.setdefault("use_cache", False)
        return args, kwargs


def _has_borders(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("document_ids") is not None or _is_square(kwargs.get("attention_mask"))


def _is_square(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 4


def _reject_crossing(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Rejects a model in which a packed document sees another one, where the batch asks it not to."""
    tokens = kwargs.get("input_ids")
    if not isinstance(tokens, Tensor):
        return
    try:
        crosses = _crosses_borders(model, _question(tokens, kwargs))
    except Exception as error:  # of any kind: the model is anybody's
        logger.warning(
            "%s could not be asked whether packed documents stay apart in it: %s: %s",
            type(model).__name__, type(error).__name__, error,
        )  # fmt: skip
        return
    if not crosses:
        return
    name = type(model).__name__
    if _is_square(kwargs.get("attention_mask")):
        raise ConfigError(
            f"Packed documents see each other in {name}, which does not heed a mask of two dims as the data gives it "
            "(borders: mask). Set attn_implementation: sdpa in the model section, or use borders: documents, rows of "
            "one document each, or another model; borders: none accepts it."
        )
    raise ConfigError(
        f"Packed documents see each other in {name}, which does not read their borders from position_ids. Set borders: "
        "mask in the section of the data that packs them, or use rows of one document each, or another model; "
        "borders: none accepts it."
    )


def _question(tokens: Tensor, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a row of two documents, in the form in which this batch gives its own."""
    # Plain tensors also where an evaluation runs without autograd; a token of the batch is one that the model has.
    with torch.inference_mode(False):
        row = torch.full((1, len(POSITIONS)), int(tokens.flatten()[0]), dtype=tokens.dtype, device=tokens.device)
        documents = torch.tensor([DOCUMENTS], device=tokens.device)
        given = {"input_ids": row}
        if kwargs.get("position_ids") is not None:
            given["position_ids"] = torch.tensor([POSITIONS], device=tokens.device)
        if kwargs.get("document_ids") is not None:
            given["document_ids"] = documents
        mask = kwargs.get("attention_mask")
        if _is_square(mask):
            assert mask is not None
            apart = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
            # A mask that is added has zeros where a token is seen.
            hidden = torch.zeros(apart.shape, dtype=mask.dtype, device=mask.device)
            is_added = mask.dtype.is_floating_point
            given["attention_mask"] = (
                hidden.masked_fill(~apart, torch.finfo(mask.dtype).min) if is_added else apart.to(mask.dtype)
            )
        return given


def _crosses_borders(model: nn.Module, row: dict[str, Tensor]) -> bool:
    """Does what the model says of the second document depend on the first?

    Asked by a gradient, which is exactly zero where there is no way from one to the other; two outputs that are
    compared would differ by rounding, in 16 bits by more than an untrained model's attention does.
    """
    embedded: list[Tensor] = []

    def take(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]  # every model of transformers has it
    with _set_aside(model), torch.inference_mode(False), torch.enable_grad():
        handle = embedding.register_forward_hook(take)
        try:
            output = model(**row)
        finally:
            handle.remove()
        states = output[0]
        if states.shape[:2] != row["input_ids"].shape or not embedded:
            return False  # one answer for the whole row: it has no documents
        second = torch.tensor(DOCUMENTS, device=states.device) == 1
        # Squares, for a plain sum of normalised states is a constant.
        [gradient] = torch.autograd.grad(states[0, second].float().square().sum(), embedded[0])
    return bool(gradient[0, :2].any())


@contextmanager
def _set_aside(model: nn.Module) -> Iterator[None]:
    """Has the model answer without dropout, and leaves its modes and the generators as they were."""
    modes = {module: module.training for module in model.modules()}
    used = {parameter.device for parameter in model.parameters()}
    devices = [device for device in used if device.index is not None]
    kind = devices[0].type if devices else "cuda"
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


DTYPE_NAMES = ("dtype", "torch_dtype")
"""Keywords of the model rather than of its config; the second is the name that most files and pages use."""


def is_transformers_class(target: Any) -> bool:
    """Is this a model class of transformers, an Auto class, or a user's subclass of one? Imports nothing."""
    roots = {("transformers.modeling_utils", "PreTrainedModel")}
    roots.add(("transformers.models.auto.auto_factory", "_BaseAutoModelClass"))
    return isinstance(target, type) and any((base.__module__, base.__name__) in roots for base in target.__mro__)


def build_transformers(
    target: type[Any],
    arguments: Mapping[str, Any],
    *,
    pretrained: Path | None = None,
    strict: bool | None = None,
    told: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, LoadReport]:
    """Builds a model of a transformers class, with random weights or with those of a folder.

    `arguments` are the keywords of its config (an Auto class needs `model_type` among them, or a folder), changes
    to the folder's config where one is given, and `attn_implementation` and `dtype`. Weights are float32 unless
    `dtype` says otherwise, whatever the files hold: precision is the training's, and 16-bit weights lose small
    updates. Unless `strict` is false, weights of other shapes are rejected, and missing and unexpected keys. Where
    nobody says (None) keys may differ if the class is not the one that was saved: a head then goes and another comes.
    Other shapes in the body are rejected always. The report names what was drawn at random. `told` is the content of a
    config.json whose folder may be gone: it gives the sizes.
    """
    arguments = dict(arguments)
    dtype = _take_dtype(arguments) or torch.float32
    attention = arguments.pop("attn_implementation", None)
    source = "the run's pretrained.json" if pretrained is None else pretrained / CONFIG_FILE
    told = read_config_file(pretrained) if pretrained is not None else told
    config = _keyword_config(target, arguments) if told is None else _given_config(target, arguments, told, source)
    options: dict[str, Any] = {"dtype": dtype} | ({} if attention is None else {"attn_implementation": attention})
    make = target.from_config if _is_auto(target) else target._from_config
    report = LoadReport((), ())
    try:
        if pretrained is None:
            model = make(config, **options)
        elif _is_theirs(_class_of(target, config)):
            fresh = partial(make, copy.deepcopy(config), **options)
            model, report = _load(target, pretrained, config, options, strict=strict)
            _keep_frozen(model, fresh)
        else:
            # A user's constructor may do anything with its weights, and transformers would call it without any.
            model = make(copy.deepcopy(config), **options)
            loaded, report = _load(_giving(_emptied(model)), pretrained, config, options, strict=strict)
            _move_weights(loaded, model, leave=report.missing)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, ImportError, OSError, TypeError, RuntimeError, KeyError) as error:
        if isinstance(error, (TypeError, RuntimeError, KeyError)) and not _is_theirs(target):
            raise  # perhaps a mistake in a user's own constructor, of which the traceback is worth more
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, KeyError):
            first = _unknown_value(error, config.to_dict())
        by = "" if told is None else f" by {source}"
        raise ConfigError(f"transformers cannot build {target.__name__}{by}: {first}") from error
    if getattr(model, "loss_type", "") is None:
        # What it takes then anyway, but with a warning: the name of GPT-2's class tells no loss.
        model.loss_type = "ForCausalLM"
    watch_calls(model, leaves_cache="use_cache" in arguments)
    return model, report


def _unknown_value(error: KeyError, config: Mapping[str, Any], path: str = "") -> str:
    """Says which setting of a config has the value that transformers has looked up in a table and not found."""
    for name, value in config.items():
        if isinstance(value, Mapping) and (found := _unknown_value(error, value, f"{path}{name}.")).startswith(
            path + name
        ):
            return found
        if value == error.args[0]:
            return f"{path}{name} is {value!r}, which it does not know."
    return f"it does not know {error}."


def _load(
    target: type[Any], folder: Path, config: Any, options: dict[str, Any], *, strict: bool | None
) -> tuple[nn.Module, LoadReport]:
    saved = read_config_file(folder).get("architectures") or []
    if any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        for path in weight_files(folder):
            keys_of(path)  # a damaged file is named, which transformers does not do
        integers = integer_keys(folder)
    else:
        _reject_pickles(folder)
        integers = {}
    with _quiet():
        model, info = target.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # so that they can be named below, or drawn anew
            **options,
        )
    for name, parameter in model.named_parameters():
        if name in integers and parameter.is_floating_point():
            reject_integers(integers[name], name)
    model.config._name_or_path = ""  # a place on this machine, which would go into every export
    others = {key: (tuple(theirs), tuple(ours)) for key, theirs, ours in info.get("mismatched_keys") or ()}
    # The body is what was learned: one that is drawn anew would only look like a pretrained model.
    has_other_body = any(model.base_model is model or key.startswith(f"{model.base_model_prefix}.") for key in others)
    if others and (strict is not False or has_other_body):
        wrong = [f"{key}: {theirs} in the files, {ours} in the model" for key, (theirs, ours) in sorted(others.items())]
        wrong[4:] = [f"and {len(wrong) - 4} more"] if len(wrong) > 4 else []
        advice = "or choose another folder." if has_other_body else "or draw these weights anew with strict: false."
        raise CheckpointError(
            f"The weights of {folder} have other shapes: {'; '.join(wrong)}. Leave out the settings that change the "
            f"model's sizes, {advice}"
        )
    missing = {*info["missing_keys"], *others}
    report = LoadReport(tuple(sorted(missing)), tuple(sorted(info["unexpected_keys"])))
    must_fit = type(model).__name__ in saved if strict is None else strict
    if must_fit and (report.missing or report.unexpected):
        raise CheckpointError(
            f"The weights of {folder} are not all of this model's: missing {listed(report.missing)}; unexpected "
            f"{listed(report.unexpected)}. Choose another folder, or load with strict: false."
        )
    if report.missing or report.unexpected:
        logger.warning(
            "%s: not in the files, and drawn at random: %s; not in the model, and left out: %s",
            folder,
            listed(report.missing),
            listed(report.unexpected),
        )
    # from_pretrained leaves a model in evaluation mode; a run trains it.
    return model.train(), report


def _keep_frozen(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Freezes what the class's constructor freezes (fixed positions of Whisper, Marian): from_pretrained forgets it."""
    try:
        with on_meta():
            twin = make()
    except (RuntimeError, NotImplementedError):  # a constructor that computes with its weights
        with torch.random.fork_rng(devices=[]):
            twin = make()
    trains = {name: one.requires_grad for name, one in twin.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trains.get(name, parameter.requires_grad))


def _emptied(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose weights are on the meta device; its constructor is not called."""
    weights = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(one): _as_empty(one) for one in weights})


def _as_empty(weight: torch.Tensor) -> torch.Tensor:
    empty = weight.detach().to("meta")
    return nn.Parameter(empty, requires_grad=weight.requires_grad) if isinstance(weight, nn.Parameter) else empty


def _giving(model: nn.Module) -> type[Any]:
    """Returns a class like a model's own whose from_pretrained loads into that model instead of making one."""
    kind = type(model)
    return type(kind.__name__, (kind,), {"__new__": lambda cls, *args, **kwargs: model, "__module__": kind.__module__})


@torch.no_grad()
def _move_weights(source: Any, target: Any, *, leave: Collection[str]) -> None:
    """Copies weights into a model of the same class, in place, but for those that were drawn; the source loses them."""
    target.config._name_or_path = ""
    if hasattr(source, "generation_config"):
        target.generation_config = source.generation_config
    given = source.state_dict(keep_vars=True)
    filled: set[int] = set()  # a tied weight has several names
    for name, weight in target.state_dict(keep_vars=True).items():
        if name in leave or id(weight) in filled or not isinstance(weight, torch.Tensor):
            continue
        if weight.dtype == given[name].dtype:
            weight.copy_(given[name])
        else:
            weight.data = given[name].data
        given[name].data = torch.empty(0)
        filled.add(id(weight))


def _reject_pickles(folder: Path) -> None:
    for path in (folder / PICKLED_FILE, folder / PICKLED_INDEX_FILE):
        if path.is_file():
            raise CheckpointError(
                f"{path} is a pickle, from which no class of transformers is loaded here. Convert it once with "
                "transformers: load the folder with from_pretrained, and save_pretrained it to another."
            )


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
    _reject_unknown(target, config_class, arguments)
    return _make_config(config_class, {**_without_foreign_tokens(config_class(), arguments), **arguments})


def _given_config(target: type[Any], arguments: dict[str, Any], told: Mapping[str, Any], source: object) -> Any:
    from transformers import CONFIG_MAPPING

    model_type = str(told.get("model_type"))
    config_class: Any = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401  # no get
    wanted = arguments.pop("model_type", model_type)
    if not _is_auto(target):
        wanted = getattr(target.config_class, "model_type", "")
        # A class that is not transformers' own brings its config with it.
        config_class = target.config_class if config_class is None else config_class
    if config_class is None or wanted != model_type:
        raise ConfigError(
            f"{source} holds a model of the type {model_type!r}, "
            + (f"not {wanted!r}." if wanted != model_type else "which transformers does not have.")
            + " Choose the class, or the folder, accordingly."
        )
    _reject_unknown(target, config_class, arguments)
    if arguments.get("num_labels", len(told.get("id2label") or ())) != len(told.get("id2label") or ()):
        # Names of other labels, of which transformers would warn.
        told = {key: value for key, value in told.items() if key not in ("id2label", "label2id")}
    # `_name_or_path` and the like in the file are no keywords of ours to check.
    return _make_config(config_class, {**told, **arguments, "dtype": None, "torch_dtype": None}, source)


def _without_foreign_tokens(default: Any, arguments: Mapping[str, Any]) -> dict[str, None]:
    """Returns the special tokens of a config's defaults that a smaller vocabulary does not have, as none."""
    vocab_size = arguments.get("vocab_size", getattr(default, "vocab_size", None))
    if not isinstance(vocab_size, int):
        return {}
    tokens = {name: value for name, value in vars(default).items() if name.endswith("_token_id")}
    return {name: None for name, value in tokens.items() if isinstance(value, int) and value >= vocab_size}


def _make_config(config_class: type[Any], keywords: dict[str, Any], source: object | None = None) -> Any:
    try:
        return config_class.from_dict(keywords)
    except Exception as error:  # each config checks its values in its own way
        place = "" if source is None else f"{source}: "
        raise ConfigError(f"{place}{config_class.__name__} rejects its settings: {error}") from error


def _reject_unknown(target: type[Any], config_class: type[Any], arguments: Mapping[str, Any]) -> None:
    default = config_class()
    known = {name for name in vars(default) if not name.startswith("_")} | set(default.attribute_map) | {"num_labels"}
    known |= {name for base in config_class.__mro__ for name in vars(base).get("__dataclass_fields__", ())}
    for name in arguments:
        if name not in known and not _is_read(target, config_class, name):
            guess = nearest(name, known)
            hint = f'Did you mean "{guess}"?' if guess else f"It has: {', '.join(sorted(known))}."
            raise ConfigError(f'{config_class.__name__} has no setting "{name}". {hint}')


def _is_read(target: type[Any], config_class: type[Any], name: str) -> bool:
    """Does the model's own file ask its config for this name, though the config does not list it?

    Qwen 3's mixture of experts does so with head_dim: `getattr(config, "head_dim", …)`.
    """
    model_class = target._model_mapping[config_class] if _is_auto(target) else target
    for each in model_class if isinstance(model_class, tuple) else (model_class,):
        source = inspect.getsource(sys.modules[each.__module__])
        if re.search(rf"""config\.{re.escape(name)}\b|config, ["']{re.escape(name)}["']""", source):
            return True
    return False


def _take_dtype(arguments: dict[str, Any]) -> torch.dtype | None:
    given = [arguments.pop(name) for name in DTYPE_NAMES if name in arguments]
    if len(given) == 2:
        raise ConfigError("dtype and torch_dtype are the same setting. Give one of them.")
    return as_dtype(given[0]) if given else None


def _class_of(target: type[Any], config: Any) -> type[Any]:
    """Returns the class that is built; an Auto class may choose one that a user has registered."""
    if not _is_auto(target) or type(config) not in target._model_mapping:
        return target
    found = target._model_mapping[type(config)]
    chosen: type[Any] = found[0] if isinstance(found, tuple) else found
    return chosen


def _is_theirs(target: type[Any]) -> bool:
    return target.__module__.partition(".")[0] == "transformers"


def _is_auto(target: type[Any]) -> bool:
    return not issubclass(target, nn.Module)
