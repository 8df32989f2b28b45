"""The base class of the shipped models: an `nn.Module` that also reads and writes Hugging Face's files.

Each model file adds its architecture. Finding and reading files is in pretrained.py, writing them in saving.py; sizes
are data, see presets.py. AutoModel selects a class by a folder's config.json.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from trainwright.backends import checked_device
from trainwright.config.builtin import BUILT_INS
from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.key_map import KeyMap, KeyRule
from trainwright.models.layers.losses import count_labels, label_names, num_labels_of
from trainwright.models.layers.settings import reject_other_values
from trainwright.models.lora import LoRALinear
from trainwright.models.presets import preset_settings
from trainwright.models.pretrained import (
    CONFIG_FILE,
    LoadReport,
    as_dtype,
    find_folder,
    load_weights,
    on_meta,
    read_config_file,
    shared_names,
)
from trainwright.models.saving import changes_of, write_folder

__all__ = ["AutoModel", "KeyRule", "Model", "check_type", "preset_settings", "readers_of", "shipped_models"]


class Model(nn.Module):
    """A shipped model: an `nn.Module` that also reads and writes Hugging Face's files.

    A subclass sets `settings` first in its constructor, which has keyword-only parameters, and initializes its weights
    in `reset_parameters`. `forward(..., labels=None)` returns `{"loss": ... or None, "logits": ...}`; the attribute
    `criterion` computes the loss, a mean over the labels other than -100, and `count_targets` returns their number: the
    trainer weights micro-batches by it. Computed buffers are not in the state_dict (`persistent=False`).
    """

    hugging_face_types: ClassVar[tuple[str, ...]] = ()
    """The values of `model_type` in a config.json that this class reads; it writes the first by default."""
    hugging_face_architectures: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """For each model_type, the class name in transformers, which is written as `architectures`."""
    key_rules: ClassVar[tuple[KeyRule, ...]] = ()
    """Names of weights that differ between the module and files."""
    ignored_keys: ClassVar[tuple[str, ...]] = ()
    """Patterns (as in KeyRule) of keys in files that are copies or computed, and are not read."""
    hugging_face_prefix: ClassVar[str] = ""
    """The prefix of the body's weights (`model`, `bert`), which is missing in files of models without a head."""

    config_keys: ClassVar[Mapping[str, tuple[str, Any]]] = MappingProxyType({})
    """The settings, each with its key in config.json and transformers' default."""
    fixed_config: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Keys of config.json for which the class supports a single value, which it also writes."""
    has_labels: ClassVar[bool] = False
    """True for a classifier with the setting `num_labels`; config.json has the names of the labels instead."""
    transformers_class: ClassVar[str] = "AutoModelForCausalLM"
    """The class of transformers that supports other values."""

    blocks: ClassVar[str | None] = None
    """The path of the ModuleList of consecutive blocks (`model.layers`); None without one."""
    parts_before_blocks: ClassVar[tuple[str, ...]] = ()
    """The paths of the modules and parameters that `begin` uses; `finish` uses all others except the blocks."""

    draws_plainly: ClassVar[bool] = False
    """True if `reset_parameters` only fills weights with random numbers or a constant (see DrawNarrow)."""

    settings: dict[str, Any]
    """All keywords of the constructor with their final values: `type(model)(**model.settings)` is a copy."""

    hugging_face_config: Mapping[str, Any] = MappingProxyType({})
    """The config.json that this model was read from, if any."""

    @property
    def hugging_face_type(self) -> str:
        """The `model_type` that save_pretrained writes: the one that was read, or the class's first."""
        return str(self.hugging_face_config.get("model_type") or self.hugging_face_types[0])

    @classmethod
    def settings_from_hugging_face(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the constructor's keywords for a config.json; unsupported values are rejected by name."""
        if not cls.config_keys:
            raise NotImplementedError(f"{cls.__name__} cannot read Hugging Face folders: it has no config_keys.")
        reject_other_values(config, cls.fixed_config, model=cls)
        settings = {name: config.get(key, default) for name, (key, default) in cls.config_keys.items()}
        return settings | ({"num_labels": num_labels_of(config)} if cls.has_labels else {})

    def to_hugging_face(self) -> dict[str, Any]:
        """Returns the content of config.json, without model_type, architectures and dtype."""
        if not self.config_keys:
            raise NotImplementedError(
                f"{type(self).__name__} cannot write Hugging Face folders: it has no config_keys."
            )
        names = label_names(self.settings["num_labels"], self.hugging_face_config) if self.has_labels else {}
        return {
            **self.fixed_config,
            **names,
            **{key: self.settings[name] for name, (key, _) in self.config_keys.items()},
        }

    def reset_parameters(self) -> None:
        """Initializes all weights and ties tied weights; also called for a model created on the meta device."""
        raise NotImplementedError(f"{type(self).__name__} must define reset_parameters.")

    def count_targets(self, labels: Tensor) -> Tensor | None:
        """Returns the number of labels that the loss of `forward` is the mean of, on the device.

        None if that is not known: with a criterion other than a plain mean, or a forward that is not a shipped one.
        """
        is_own = type(self).forward.__module__.startswith("trainwright.models.")
        return count_labels(self.criterion, labels) if is_own else None

    def begin(self, *args: Any, **batch: Any) -> Tensor:
        """Returns the hidden states for the first block; the arguments are those of `forward`.

        A model with `blocks` also defines its forward in three steps for the stages of a pipeline
        (parallel/pipeline.py). Every block keeps shape and dtype.

            hidden = model.begin(**batch)
            for block in blocks:
                hidden = block(hidden, *model.beside(**batch))
            outputs = model.finish(hidden, **batch)
        """
        raise NotImplementedError(f"{type(self).__name__} has no stack of blocks, so it cannot be a pipeline.")

    def hidden_shape(self, *args: Any, **batch: Any) -> tuple[int, ...]:
        """Returns the shape of the result of `begin` for a batch, without using any parameter."""
        raise NotImplementedError

    def beside(self, *args: Any, **batch: Any) -> tuple[Any, ...]:
        """Returns the arguments of each block in addition to the hidden states; uses no parameters."""
        raise NotImplementedError

    def finish(self, hidden: Tensor, **batch: Any) -> dict[str, Tensor | None]:
        """Returns the result of `forward` from the last block's hidden states."""
        raise NotImplementedError

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # whatever torch takes
        """Returns the weights as in torch, tied ones under all of their names.

        Only for transformers' Trainer, a tied weight has one name: it passes the result to safetensors, which rejects
        tensors that share memory, and it does not know the ties of other models.
        """
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") == "transformers.trainer":
            for name in self._keys_to_ignore_on_save:
                del state[name]
        return state

    @property
    def _keys_to_ignore_on_save(self) -> list[str]:
        """The second names of tied weights, which transformers' Trainer does not expect in files."""
        return [name for name, names in shared_names(self).items() if name != names[0]]

    def tie_weights(self) -> None:
        """Does nothing; called by transformers' Trainer after loading. Weights are filled in place, so ties are
        kept."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        """Keeps ties if tensors are assigned; torch would create a parameter for each name."""
        if local_metadata.get("assign_to_params_buffers"):
            own = dict(self.named_parameters(remove_duplicate=False))
            for names in set(shared_names(self).values()):
                given = [state_dict[prefix + one] for one in names if prefix + one in state_dict]
                is_one = len({(one.data_ptr(), one.shape, one.stride()) for one in given}) == 1
                if names[0] in own and is_one and not isinstance(given[0], nn.Parameter):
                    weight = nn.Parameter(given[0], requires_grad=own[names[0]].requires_grad)
                    state_dict |= {prefix + one: weight for one in names}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    @classmethod
    def key_map(cls) -> KeyMap:
        """Returns the translation between our names of weights and Hugging Face's."""
        return KeyMap(cls.key_rules, ignored=cls.ignored_keys, prefix=cls.hugging_face_prefix)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **overrides: Any) -> Self:
        """Returns a newly initialized model with the settings of a config.json."""
        with _blamed_on(CONFIG_FILE, cls, overrides):
            check_type(cls, config)
            model = cls(**(cls.settings_from_hugging_face(config) | overrides))
        model.hugging_face_config = dict(config)
        return model

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | Path | Namespace,
        name: str | Path | None = None,
        url: str | None = None,
        home_path: str | Path | None = None,
        **options: Any,
    ) -> Self:
        """Returns the model of a folder in Hugging Face's layout, with its weights, in training mode.

        A name that is not a folder is searched in `home_path` (default: the user's caches) and then on the hub.
        `options` are those of `load_pretrained`: strict, dtype, device, allow_pickle, and settings to change.
        `from_pretrained(args, name, url=None, home_path=None)`, with a Namespace first, is the same for `name`.
        """
        return cls.load_pretrained(_find_name(name_or_folder, name, url), home_path=home_path, **options)[0]

    @classmethod
    def load_pretrained(
        cls,
        name_or_folder: str | Path,
        *,
        home_path: str | Path | None = None,
        strict: bool = True,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        allow_pickle: bool = False,
        **overrides: Any,
    ) -> tuple[Self, LoadReport]:
        """Like from_pretrained, but also returns the missing weights and unexpected keys.

        The weights keep the files' dtype unless `dtype` is given. With `strict=False` missing weights are initialized
        and unexpected keys are ignored; both are logged. `overrides` change settings of the constructor. Pickles are
        rejected unless `allow_pickle`.
        """
        device = checked_device(device)
        folder = find_folder(name_or_folder, home_path=home_path)
        config = read_config_file(folder)
        with _blamed_on(folder / CONFIG_FILE, cls, overrides):
            check_type(cls, config)
            settings = cls.settings_from_hugging_face(config) | overrides
            # A shipped constructor only creates weights. A custom constructor may do anything with them (draw other
            # numbers, keep or mark them, compute from them), so it receives weights with memory.
            with on_meta() if cls.is_shipped() else torch.device(device):
                model = cls(**settings)
        model.hugging_face_config = config
        options: dict[str, Any] = {"strict": strict, "dtype": as_dtype(dtype), "allow_pickle": allow_pickle}
        return model, load_weights(model, folder, key_map=cls.key_map(), device=device, **options)

    @classmethod
    def is_shipped(cls) -> bool:
        """Returns True for the package's own classes, and False for a custom subclass."""
        return cls.__module__.startswith("trainwright.models.")

    def save_pretrained(self, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000) -> Path:
        """Writes config.json and the weights in transformers' format, and returns the folder.

        An interrupted write leaves no model folder. In an existing model folder these files are replaced and all others
        (a tokenizer, a README) are kept; any other folder with files is rejected. The `model_type` is the one that was
        read. A model whose outputs differ from those of its type is rejected (`changes_of` in saving.py).
        """
        kept = {key: value for key, value in self.hugging_face_config.items() if key not in _NOT_KEPT}
        config = kept | self.to_hugging_face()
        changed = changes_of(self)
        if changed:
            has_adapters = any(isinstance(module, LoRALinear) for module in self.modules())
            merge = "Merge adapters first (trainwright.models.lora.merge_lora), or export" if has_adapters else "Export"
            raise CheckpointError(
                f"This {type(self).__name__} cannot be written in Hugging Face's layout, because transformers would "
                f"compute it differently: {'; '.join(changed[:4])}. {merge} plain weights (trainwright export --format "
                "safetensors). A subclass with the same outputs can define hugging_face_architectures itself."
            )
        config |= {
            "architectures": [self.hugging_face_architectures[self.hugging_face_type]],
            "model_type": self.hugging_face_type,
        }
        options: dict[str, Any] = {"max_shard_bytes": max_shard_bytes, "leave_out": self.unwritten()}
        return write_folder(self, Path(folder), config, key_map=self.key_map(), **options)

    def unwritten(self) -> tuple[str, ...]:
        """Returns the sub-modules whose weights are not written: the criterion, which belongs to the training."""
        return ("criterion",)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Returns a newly initialized model of a size in presets.yaml; `overrides` change single settings."""
        return cls(**preset_settings(cls, name, **overrides))


def _find_name(first: str | Path | Namespace, name: str | Path | None, url: str | None) -> str | Path:
    """Returns the name or folder of either call: (name_or_folder), or (args, name, url)."""
    if url not in (None, "local"):
        raise ConfigError(
            f"url: downloads from {url} are not supported. Use a folder, or the name of a model on the hub."
        )
    if isinstance(first, Namespace):
        if name is None:
            raise ConfigError("from_pretrained(args) has no model. Pass its name or folder after args.")
        return name
    if name is not None:
        raise ConfigError(f"from_pretrained got two models, {first} and {name}. Pass one.")
    return first


_NOT_KEPT = ("transformers_version", "torch_dtype", "dtype", "_name_or_path")
"""Keys of a config.json about how it was written, not about the model."""


@contextmanager
def _blamed_on(file: str | Path, model_class: type[Model], overrides: Mapping[str, Any]) -> Iterator[None]:
    """Adds the file and the overrides to errors about invalid settings."""
    place = str(file) + "".join(f", with {name}={value!r}" for name, value in overrides.items())
    try:
        yield
    except ConfigError as error:
        if error.problem.startswith(f"{CONFIG_FILE} "):  # concerns only the file, not the overrides
            raise type(error)(str(file) + error.problem.removeprefix(CONFIG_FILE)) from error
        raise type(error)(f"{place}: {error.problem}") from error
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        if not model_class.is_shipped():
            raise  # perhaps a mistake in a user's constructor, where the traceback is more useful
        raise ConfigError(f"{place}: its values are not valid: {type(error).__name__}: {error}") from error


OTHER_TYPES = "No shipped model reads it. Use transformers' class, for example type: transformers:AutoModelForCausalLM."


def shipped_models() -> dict[str, type[Model]]:
    """Returns the shipped models that read Hugging Face's files, by their names in a run file."""
    found = {}
    for name, path in BUILT_INS["model"].items():
        module, _, attribute = path.partition(":")
        each = getattr(import_module(module), attribute)
        if isinstance(each, type) and issubclass(each, Model) and each.hugging_face_types:
            found[name] = each
    return found


def readers_of(model_type: Any) -> dict[str, type[Model]]:
    """Returns the shipped models that read the folders of a `model_type`, by their names in a run file."""
    return {name: each for name, each in shipped_models().items() if model_type in each.hugging_face_types}


def check_type(model_class: type[Model], config: Mapping[str, Any]) -> None:
    """Rejects a config.json with a model_type that the class does not read."""
    model_type = config.get("model_type")
    if model_type not in model_class.hugging_face_types:
        names = " or ".join(readers_of(model_type))
        raise ConfigError(
            f"{CONFIG_FILE} has model_type {model_type!r}, but {model_class.__name__} reads "
            f"{', '.join(model_class.hugging_face_types) or 'none'}. "
            + (f"In a run file use type: {names}; in Python, use AutoModel." if names else OTHER_TYPES)
        )
    if config.get("quantization_config"):
        raise ConfigError(
            f"{CONFIG_FILE} has a quantization_config: quantized weights are not supported. Use plain ones."
        )


class AutoModel:
    """Selects a shipped class by a model's config.json, and returns an object of that class.

    >>> from trainwright.models.bert import Bert
    >>> folder = Bert.from_preset("tiny").save_pretrained("tiny_bert")
    >>> type(AutoModel.from_pretrained(folder)).__name__
    'Bert'
    """

    def __init__(self) -> None:
        raise ConfigError(
            "AutoModel only selects a class: use AutoModel.from_pretrained(folder) or .from_config(config)."
        )

    @staticmethod
    def from_pretrained(
        name_or_folder: str | Path | Namespace,
        name: str | Path | None = None,
        url: str | None = None,
        home_path: str | Path | None = None,
        **options: Any,
    ) -> Model:
        """Returns the model of a folder in Hugging Face's layout; arguments as in `Model.from_pretrained`."""
        folder = find_folder(_find_name(name_or_folder, name, url), home_path=home_path)
        chosen = AutoModel.choose(read_config_file(folder), file=folder / CONFIG_FILE)
        return chosen.from_pretrained(folder, **options)

    @staticmethod
    def from_config(config: Mapping[str, Any], **overrides: Any) -> Model:
        """Returns a newly initialized model with the settings of a config.json."""
        return AutoModel.choose(config).from_config(config, **overrides)

    @staticmethod
    def choose(config: Mapping[str, Any], *, file: str | Path = CONFIG_FILE) -> type[Model]:
        """Returns the class for a config.json: by its model_type, and among several by `architectures`."""
        model_type = config.get("model_type")
        fitting = list(readers_of(model_type).values())
        if not fitting:
            known = sorted({one for each in shipped_models().values() for one in each.hugging_face_types})
            raise ConfigError(f"{file} has model_type {model_type!r}. {OTHER_TYPES} Known: {', '.join(known)}.")
        wanted = config.get("architectures") or ()
        if not isinstance(wanted, (list, tuple)):
            raise ConfigError(f"{file} has architectures {wanted!r}, which is not a list. Copy the model again.")
        by_name = [each for each in fitting if each.hugging_face_architectures.get(str(model_type)) in wanted]
        return (by_name or fitting)[0]
