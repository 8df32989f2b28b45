"""Models of Hugging Face's transformers: built from keywords or a folder, and checked at their first packed batch.

During training a call uses no cache, and packed documents do not attend to each other. `count_targets` returns the
weight that makes an update exact for every split of a batch.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainwright.backends.private_torch import constant_in_compiled_code
from trainwright.config.problems import nearest
from trainwright.errors import CheckpointError, ConfigError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.layers.attention import MASK_NAMES, full_rows, is_full
from trainwright.models.model import Model
from trainwright.models.pretrained import (
    CONFIG_FILE,
    INDEX_FILE,
    PICKLED_FILE,
    PICKLED_INDEX_FILE,
    WEIGHTS_FILE,
    LoadReport,
    as_dtype,
    integer_keys,
    listed,
    on_meta,
    read_config_file,
    reject_integers,
)
from trainwright.models.transformers_kernels import Kernels, fuse_head, has_plain_head, use_fast_attention

logger = logging.getLogger(__name__)

POSITIONS, DOCUMENTS = (0, 1, 0, 1), (0, 0, 1, 1)
"""The row of the test for crossing attention: two documents of two tokens."""


Counted = Literal["all", "next", "classes"]
"""The labels of a mean: all of them, all except the first of each row, or all if they are classes."""

_LOSS_FUNCTIONS: Mapping[str, Counted] = {
    "ForCausalLMLoss": "next",
    "ForMaskedLMLoss": "all",
    "ForTokenClassification": "all",
    "ForSequenceClassificationLoss": "classes",
}
"""The functions in transformers' loss_utils.py that are means over labels other than -100."""


class _ForwardHook:
    """The forward pre-hook of one model; a copy of the model has a copy of it."""

    def __init__(self, *, disables_cache: bool, marks_full_rows: bool = False) -> None:
        self._disables_cache = disables_cache
        self.marks_full_rows = marks_full_rows
        self._is_tested = False
        self.crossings: dict[str, bool | str] | None = None
        """The results of `find_crossings`, by the form of the document boundaries; None for a model that is not
        sharded."""

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        has_borders = kwargs.get("document_ids") is not None or _is_square(kwargs.get("attention_mask"))
        if has_borders and not self._is_tested:
            self._is_tested = True  # first, because the test calls the model as well
            _reject_crossing(model, kwargs, self.crossings)
        # The cache of a training batch is not used, and with a cache transformers ignores document boundaries in the
        # positions. Set by keyword, because the config is written unchanged.
        given = any(kwargs.get(name) is not None for name in ("labels", "position_ids", "document_ids"))
        if self._disables_cache and (model.training or given):
            kwargs.setdefault("use_cache", False)
        if self.marks_full_rows and not args:
            _mark_full_rows(kwargs)
        return args, kwargs


_NOT_PLAIN = ("attention_mask", "position_ids", "document_ids", "past_key_values")
"""The arguments of a batch with padding, documents or a cache."""


def _mark_full_rows(kwargs: dict[str, Any]) -> None:
    """Adds the mask of `full_rows` to rows without padding, or converts an existing mask to bool.

    Without a mask, transformers looks for documents in the positions, which synchronizes or, compiled, creates a mask
    [B, 1, S, S] even if there are none. A mask of another dtype would be converted, which loses its strides.
    """
    for name in MASK_NAMES:
        mask = kwargs.get(name)
        if isinstance(mask, Tensor) and is_full(mask):
            kwargs[name] = full_rows(*mask.shape, device=mask.device)
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    is_plain = all(kwargs.get(name) is None for name in _NOT_PLAIN)
    if is_plain and isinstance(tokens, Tensor) and tokens.dim() > 1:
        kwargs["attention_mask"] = full_rows(*tokens.shape[:2], device=tokens.device)


def recognizes_full_rows(model: nn.Module) -> bool:
    """Returns True if a model recognizes the masks of `mark_full_rows`: a shipped model, or one of this file."""
    hooks = model._forward_pre_hooks.values()
    return isinstance(model, Model) or any(isinstance(each, _ForwardHook) and each.marks_full_rows for each in hooks)


def _is_square(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 4


def find_crossings(model: nn.Module, *, is_on_meta: bool, broadcast: Callable[[Any], Any]) -> None:
    """Tests whether packed documents attend to each other before a model is sharded; does nothing for other models.

    The hook cannot test a sharded model, because its forward is collective and must not be nested. `broadcast` returns
    the first rank's value on all ranks, because some may have no weights yet.
    """
    hook = next((each for each in model._forward_pre_hooks.values() if isinstance(each, _ForwardHook)), None)
    if hook is None:
        return
    found: dict[str, bool | str] = {}
    if not is_on_meta:
        padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        tokens = torch.tensor([[1 if padding == 0 else 0]])
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        for form, given in (("documents", {"document_ids": tokens}), ("mask", {"attention_mask": mask})):
            hook._is_tested = True  # the test calls the model as well
            found[form] = _test_crossing(model, {"input_ids": tokens, "position_ids": tokens, **given})
        hook._is_tested = False
    hook.crossings = broadcast(found)


def _test_crossing(model: nn.Module, kwargs: Mapping[str, Any]) -> bool | str:
    """Returns whether the second document of a row attends to the first, or the reason why this could not be tested."""
    try:
        return _crosses_borders(model, _test_row(kwargs["input_ids"], kwargs))
    except Exception as error:  # of any type, because the model may be the user's
        return f"{type(error).__name__}: {error}"


def _reject_crossing(model: nn.Module, kwargs: Mapping[str, Any], known: Mapping[str, bool | str] | None) -> None:
    """Rejects a model in which a packed document attends to another one; `known` is the result of `find_crossings`."""
    if not isinstance(kwargs.get("input_ids"), Tensor):
        return
    form = "mask" if _is_square(kwargs.get("attention_mask")) else "documents"
    crosses = _test_crossing(model, kwargs) if known is None else known[form]
    if not crosses:
        return
    if isinstance(crosses, str):
        kind = type(model).__name__
        logger.warning("%s: the test for attention between packed documents failed: %s", kind, crosses)
        return
    # torch's FSDP replaces the class with a subclass.
    name = type(model).__name__.removeprefix("FSDP")
    if form == "mask":
        raise ConfigError(
            f"Packed documents see each other in {name}, which ignores the mask of the data (borders: mask). Set "
            "attn_implementation: sdpa in the model section, or use borders: documents, rows of one document each, or "
            "another model; borders: none accepts it."
        )
    raise ConfigError(
        f"Packed documents see each other in {name}, which does not read their borders from position_ids. Set borders: "
        "mask in the section of the data that packs them, or use rows of one document each, or another model; "
        "borders: none accepts it."
    )


def _test_row(tokens: Tensor, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a row of two documents, with the same keywords as this batch."""
    # Plain tensors, also in an evaluation without autograd; the token of the batch is a valid one.
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
            given["attention_mask"] = apart.to(mask.dtype)
            if mask.dtype.is_floating_point:  # it is added to the scores: zeros where a token is visible
                zeros = torch.zeros(apart.shape, dtype=mask.dtype, device=mask.device)
                given["attention_mask"] = zeros.masked_fill(~apart, torch.finfo(mask.dtype).min)
        return given


def _crosses_borders(model: nn.Module, row: dict[str, Tensor]) -> bool:
    """Returns True if the outputs of the second document depend on the first.

    Tested with a gradient, which is exactly zero without a dependency; two outputs would differ by rounding, in 16 bits
    by more than the attention of an untrained model.
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
            return False  # one output for the whole row: it has no documents
        second = torch.tensor(DOCUMENTS, device=states.device) == 1
        # Squares, because a plain sum of normalized states is a constant.
        [gradient] = torch.autograd.grad(states[0, second].float().square().sum(), embedded[0])
    return bool(gradient[0, :2].any())


@contextmanager
def _set_aside(model: nn.Module) -> Iterator[None]:
    """Runs the model without dropout, and restores its modes and the generators."""
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
"""Keywords of the model and not of its config; the second is the older name."""


def is_transformers_class(target: Any) -> bool:
    """Returns True for a model class of transformers, an Auto class, or a subclass of one. Imports nothing."""
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
    kernels: Kernels = "fast",
) -> tuple[nn.Module, LoadReport]:
    """Builds a model of a transformers class, with random weights or with those of a folder.

    `arguments` are the keywords of its config (an Auto class needs `model_type` or a folder), changes to the folder's
    config if there is one, and `attn_implementation`, `dtype` and `fused_loss`. `kernels: fast` uses the attention of
    transformers_kernels.py unless `attn_implementation` is set, and head and loss in one unless `fused_loss` is false;
    with None only on a GPU. Weights are float32 unless `dtype` is set, in whatever dtype they are stored: 16-bit
    weights lose small updates. Unless `strict` is false, other shapes, missing and unexpected
    keys are rejected. With None, keys may differ if the class is not the saved one, because the head differs.
    Other shapes in the body are always rejected. The report has the weights that were initialized at random. `told` is
    the content of a config.json whose folder may be gone.
    """
    arguments = dict(arguments)
    dtype = _take_dtype(arguments) or torch.float32
    attention = arguments.pop("attn_implementation", None)
    fused_loss = arguments.pop("fused_loss", None)
    if fused_loss is not None and not isinstance(fused_loss, bool):
        raise ConfigError(f"fused_loss must be true or false, got {fused_loss!r}.")
    if fused_loss is not None and kernels == "stock":
        raise ConfigError("fused_loss has no effect with kernels: stock. Remove one of them.")
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
            # A user's constructor may compute with its weights, and transformers would call it on the meta device.
            model = make(copy.deepcopy(config), **options)
            loaded, report = _load(_class_of_copy(model), pretrained, config, options, strict=strict)
            _move_weights(loaded, model, leave=report.missing)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, ImportError, OSError, TypeError, RuntimeError, KeyError) as error:
        if isinstance(error, (TypeError, RuntimeError, KeyError)) and not _is_theirs(target):
            raise  # perhaps a mistake in a user's constructor, where the traceback is more useful
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, KeyError):
            first = _unknown_value(error, config.to_dict())
        by = "" if told is None else f" by {source}"
        raise ConfigError(f"transformers cannot build {target.__name__}{by}: {first}") from error
    if getattr(model, "loss_type", "") is None:
        # The default of transformers, which would warn: it has no loss for the name of GPT-2's class.
        model.loss_type = "ForCausalLM"
    accepted = inspect.signature(model.forward).parameters
    is_fast = kernels == "fast" and attention is None and use_fast_attention(model)
    if kernels == "fast" and has_plain_head(model):
        if fused_loss is not False:
            fuse_head(model, wanted=fused_loss)
    elif fused_loss is not None:
        raise ConfigError(
            f"fused_loss has no effect on {type(model).__name__}, whose forward is not a body, a linear head and the "
            "mean loss over the next tokens. Remove it."
        )
    hook = _ForwardHook(
        disables_cache="use_cache" in accepted and "use_cache" not in arguments,
        marks_full_rows=is_fast and "attention_mask" in accepted,
    )
    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model, report


def count_targets(model: nn.Module, labels: Tensor) -> Tensor | None:
    """Returns the number of labels that the loss of a model of transformers is the mean of.

    It is determined from the source code of the class; None unless the loss is certainly a mean over the labels other
    than -100.
    """
    counted = _counted_labels(model)
    if counted == "next":
        labels = labels[..., 1:]
    return None if counted is None else (labels != IGNORED_LABEL).sum()


@constant_in_compiled_code
def _counted_labels(model: Any) -> Counted | None:
    counted = _LOSS_FUNCTIONS.get(getattr(model.loss_function, "__name__", ""))
    inline = _loss_in_source(type(model).forward)
    if inline != "loss_function":
        counted = inline
    if counted == "classes":
        # A single output means regression, and float labels mean several classes; both have other losses.
        settings = model.config
        is_class = settings.num_labels > 1 and settings.problem_type in (None, "single_label_classification")
        return "all" if is_class else None
    return counted


@cache
def _loss_in_source(forward: Callable[..., Any]) -> Literal["loss_function", "all", "classes"] | None:
    """Returns how a transformers forward computes its loss from `labels`; None if that is uncertain."""
    source = inspect.getsource(inspect.unwrap(forward))
    # The labels are those of the batch, except for their device.
    if re.search(r"^\s*labels = (?!labels\.to\()", source, re.MULTILINE):
        return None
    calls = re.findall(r"self\.loss_function\(\s*([^)]*)\)", source)
    if len(calls) == 1 and "loss_fct" not in source:
        arguments = re.split(r",\s*", calls[0])
        passes_labels = "labels" in arguments[:2] or "labels=labels" in arguments
        return "loss_function" if passes_labels and "shift_labels" not in calls[0] else None
    if calls:
        return None
    kinds = set(re.findall(r"loss_fct = (?:nn\.)?(\w+Loss\(.*\))", source))
    scores = re.findall(r"loss_fct\(\w+\.view\(-1, (?:[\w.]+|\w+\.size\(-1\))\), labels\.view\(-1\)\)", source)
    if len(scores) != 1 or not kinds & {"CrossEntropyLoss()", "CrossEntropyLoss(ignore_index=-100)"}:
        return None
    if len(kinds) == 1 and source.count("loss_fct(") == 1:
        return "all"
    return "classes" if kinds == {"CrossEntropyLoss()", "MSELoss()", "BCEWithLogitsLoss()"} else None


def _unknown_value(error: KeyError, config: Mapping[str, Any], path: str = "") -> str:
    """Returns the setting of a config whose value transformers did not find in a table."""
    for name, value in config.items():
        if isinstance(value, Mapping) and (found := _unknown_value(error, value, f"{path}{name}.")).startswith(
            path + name
        ):
            return found
        if value == error.args[0]:
            return f"{path}{name} is {value!r}, which is unknown."
    return f"{error} is unknown."


def _load(
    target: type[Any], folder: Path, config: Any, options: dict[str, Any], *, strict: bool | None
) -> tuple[nn.Module, LoadReport]:
    saved = read_config_file(folder).get("architectures") or []
    integers: dict[str, Path] = {}
    if any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        integers = integer_keys(folder)  # also reports a damaged file by name, unlike transformers
    for path in (folder / PICKLED_FILE, folder / PICKLED_INDEX_FILE):
        if path.is_file() and not any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
            raise CheckpointError(
                f"{path} is a pickle, which is not read for classes of transformers. Convert it once: load the folder "
                "with transformers' from_pretrained, and save_pretrained it to another."
            )
    with _quiet():
        model, info = target.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are rejected below by name, or initialized
            **options,
        )
    for name, parameter in model.named_parameters():
        if name in integers and parameter.is_floating_point():
            reject_integers(integers[name], name)
    model.config._name_or_path = ""  # a local path, which every export would contain
    others = {key: (tuple(theirs), tuple(ours)) for key, theirs, ours in info.get("mismatched_keys") or ()}
    # The body has the pretrained weights; with a new body, the model would only look pretrained.
    has_other_body = any(model.base_model is model or key.startswith(f"{model.base_model_prefix}.") for key in others)
    if others and (strict is not False or has_other_body):
        wrong = [f"{key}: {theirs} in the files, {ours} in the model" for key, (theirs, ours) in sorted(others.items())]
        wrong[4:] = [f"and {len(wrong) - 4} more"] if len(wrong) > 4 else []
        advice = "or use another folder." if has_other_body else "or initialize these weights with strict: false."
        raise CheckpointError(
            f"The weights of {folder} have other shapes: {'; '.join(wrong)}. Remove the settings that change the "
            f"model's sizes, {advice}"
        )
    missing = {*info["missing_keys"], *others}
    report = LoadReport(tuple(sorted(missing)), tuple(sorted(info["unexpected_keys"])))
    must_fit = type(model).__name__ in saved if strict is None else strict
    if must_fit and (report.missing or report.unexpected):
        raise CheckpointError(
            f"The weights of {folder} do not fit the model: missing {listed(report.missing)}; unexpected "
            f"{listed(report.unexpected)}. Use another folder, or load with strict: false."
        )
    if report.missing or report.unexpected:
        missing_names, unexpected = listed(report.missing), listed(report.unexpected)
        logger.warning("%s: initialized at random: %s; ignored: %s", folder, missing_names, unexpected)
    # from_pretrained leaves a model in evaluation mode; a run trains it.
    return model.train(), report


def _keep_frozen(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Freezes the parameters that the class's constructor freezes (fixed positions of Whisper, Marian), unlike
    from_pretrained."""
    try:
        with on_meta():
            twin = make()
    except (RuntimeError, NotImplementedError):  # a constructor that computes with its weights
        with torch.random.fork_rng(devices=[]):
            twin = make()
    trains = {name: one.requires_grad for name, one in twin.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trains.get(name, parameter.requires_grad))


def _class_of_copy(model: nn.Module) -> type[Any]:
    """Returns a class whose from_pretrained loads into a copy of a model instead of calling the constructor."""
    on_meta_device: dict[int, Any] = {}
    for weight in (*model.parameters(), *model.buffers()):
        empty = weight.detach().to("meta")
        is_parameter = isinstance(weight, nn.Parameter)
        on_meta_device[id(weight)] = nn.Parameter(empty, weight.requires_grad) if is_parameter else empty
    copied, kind = copy.deepcopy(model, on_meta_device), type(model)
    return type(kind.__name__, (kind,), {"__new__": lambda cls, *args, **kwargs: copied, "__module__": kind.__module__})


@torch.no_grad()
def _move_weights(source: Any, target: Any, *, leave: Collection[str]) -> None:
    """Moves weights into a model of the same class, in place, except those in `leave`."""
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Disables transformers' progress bar and its report of keys; ours is logged."""
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
            hint = f'Did you mean "{guess}"?' if guess else "Set one, such as gpt2, llama or bert."
            raise ConfigError(f"{target.__name__} {problem}. {hint} Or set a folder: pretrained.")
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
        # A class that is not from transformers has its own config class.
        config_class = target.config_class if config_class is None else config_class
    if config_class is None or wanted != model_type:
        problem = f"not {wanted!r}" if wanted != model_type else "which transformers does not have"
        raise ConfigError(f"{source} has a model of the type {model_type!r}, {problem}. Use another class or folder.")
    _reject_unknown(target, config_class, arguments)
    if arguments.get("num_labels", len(told.get("id2label") or ())) != len(told.get("id2label") or ()):
        # The names of another number of labels: transformers would warn.
        told = {key: value for key, value in told.items() if key not in ("id2label", "label2id")}
    # `_name_or_path` and the like in the file are not checked.
    return _make_config(config_class, {**told, **arguments, "dtype": None, "torch_dtype": None}, source)


def _without_foreign_tokens(default: Any, arguments: Mapping[str, Any]) -> dict[str, None]:
    """Returns None for the default special tokens of a config that a smaller vocabulary does not have."""
    vocab_size = arguments.get("vocab_size", getattr(default, "vocab_size", None))
    if not isinstance(vocab_size, int):
        return {}
    tokens = {name: value for name, value in vars(default).items() if name.endswith("_token_id")}
    return {name: None for name, value in tokens.items() if isinstance(value, int) and value >= vocab_size}


def _make_config(config_class: type[Any], keywords: dict[str, Any], source: object | None = None) -> Any:
    try:
        return config_class.from_dict(keywords)
    except Exception as error:  # each config class checks its values differently
        place = "" if source is None else f"{source}: "
        raise ConfigError(f"{place}{config_class.__name__} rejects its settings: {error}") from error


def _reject_unknown(target: type[Any], config_class: type[Any], arguments: Mapping[str, Any]) -> None:
    default = config_class()
    known = {name for name in vars(default) if not name.startswith("_")} | set(default.attribute_map) | {"num_labels"}
    fields = {name for base in config_class.__mro__ for name in vars(base).get("__dataclass_fields__", ())}
    known |= {name for name in fields if not name.startswith("_")}
    for name in arguments:
        if name not in known and not _is_read(target, config_class, name):
            guess = nearest(name, known)
            hint = f'Did you mean "{guess}"?' if guess else f"It has: {', '.join(sorted(known))}."
            raise ConfigError(f'{config_class.__name__} has no setting "{name}". {hint}')


def _is_read(target: type[Any], config_class: type[Any], name: str) -> bool:
    """Returns True if the model's source file reads this name from its config, although the config does not list it.

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
        raise ConfigError("dtype and torch_dtype are the same setting. Keep one of them.")
    return as_dtype(given[0]) if given else None


def _class_of(target: type[Any], config: Any) -> type[Any]:
    """Returns the class that is built; an Auto class may select one that a user has registered."""
    if not _is_auto(target) or type(config) not in target._model_mapping:
        return target
    found = target._model_mapping[type(config)]
    chosen: type[Any] = found[0] if isinstance(found, tuple) else found
    return chosen


def _is_theirs(target: type[Any]) -> bool:
    return target.__module__.partition(".")[0] == "transformers"


def _is_auto(target: type[Any]) -> bool:
    return not issubclass(target, nn.Module)
