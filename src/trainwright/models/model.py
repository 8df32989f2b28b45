"""The contract of the shipped models: an `nn.Module` that can also be read from and written to Hugging Face's files.

A model file adds its architecture; here is what all of them share. Reading files is in pretrained.py, writing them in
saving.py, finding a name on this machine in locate.py, choosing a class by a folder's files in auto.py.
Sizes are data: see presets.py.
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
from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.key_map import KeyMap, KeyRule
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
from trainwright.registry.builtin import BUILT_INS

__all__ = ["KeyRule", "Model", "check_type", "preset_settings", "readers_of", "shipped_models"]


class Model(nn.Module):
    """A shipped model: an `nn.Module` that also knows Hugging Face's files.

    A subclass sets `settings` first thing in its constructor, whose parameters are keywords only, and draws its
    weights in `reset_parameters`. `forward(..., labels=None)` returns `{"loss": ... or None, "logits": ...}`; the loss
    comes from the attribute `criterion`. Computed buffers stay out of the state_dict (`persistent=False`).
    """

    hugging_face_types: ClassVar[tuple[str, ...]] = ()
    """The values of `model_type` in a config.json that this class reads; the first is what it writes by itself."""
    hugging_face_architectures: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """For each model_type the class name in transformers, which is written as `architectures`."""
    key_rules: ClassVar[tuple[KeyRule, ...]] = ()
    """Our names of weights and theirs, where they differ."""
    ignored_keys: ClassVar[tuple[str, ...]] = ()
    """Patterns (as in KeyRule) of keys in their files that are copies or computed, and are left unread."""
    hugging_face_prefix: ClassVar[str] = ""
    """The part of the key before the body's weights (`model`, `bert`), which files of models without a head lack."""

    config_keys: ClassVar[Mapping[str, tuple[str, Any]]] = MappingProxyType({})
    """Our settings, each with its key in config.json and transformers' default."""
    fixed_config: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Keys of config.json of which the class supports one value, which it also writes."""
    transformers_class: ClassVar[str] = "AutoModelForCausalLM"
    """The class of transformers that supports other values."""

    blocks: ClassVar[str | None] = None
    """The path of the ModuleList whose members follow each other (`model.layers`); None: there is no such stack."""
    parts_before_blocks: ClassVar[tuple[str, ...]] = ()
    """The paths of the modules and parameters that `begin` uses; `finish` uses all others that are no blocks."""

    settings: dict[str, Any]
    """All keywords of the constructor with their defaults worked out: `type(model)(**model.settings)` is its twin."""

    hugging_face_config: Mapping[str, Any] = MappingProxyType({})
    """The config.json that this model was read from; empty for a model that was not."""

    @property
    def hugging_face_type(self) -> str:
        """The `model_type` that save_pretrained writes: the one that was read, else the first that the class names."""
        return str(self.hugging_face_config.get("model_type") or self.hugging_face_types[0])

    @classmethod
    def settings_from_hugging_face(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the constructor's keywords for a config.json; unsupported values are rejected by name."""
        if not cls.config_keys:
            raise NotImplementedError(f"{cls.__name__} cannot read Hugging Face folders: it has no config_keys.")
        reject_other_values(config, cls.fixed_config, model=cls)
        return {name: config.get(key, default) for name, (key, default) in cls.config_keys.items()}

    def to_hugging_face(self) -> dict[str, Any]:
        """Returns the content of config.json, without model_type, architectures and dtype."""
        if not self.config_keys:
            raise NotImplementedError(
                f"{type(self).__name__} cannot write Hugging Face folders: it has no config_keys."
            )
        return {**self.fixed_config, **{key: self.settings[name] for name, (key, _) in self.config_keys.items()}}

    def reset_parameters(self) -> None:
        """Initializes all weights and ties what is tied; also called for a model created on the meta device."""
        raise NotImplementedError(f"{type(self).__name__} must define reset_parameters.")

    def begin(self, *args: Any, **batch: Any) -> Tensor:
        """Returns the hidden states that the first block gets, of what `forward` takes.

        A model with `blocks` has its forward also in three parts, of which the stages of a pipeline each do theirs
        (parallel/pipeline.py); together they compute what forward does. Every block keeps shape and dtype.

            hidden = model.begin(**batch)
            for block in blocks:
                hidden = block(hidden, *model.beside(**batch))
            outputs = model.finish(hidden, **batch)
        """
        raise NotImplementedError(f"{type(self).__name__} has no stack of blocks that could be run in parts.")

    def hidden_shape(self, *args: Any, **batch: Any) -> tuple[int, ...]:
        """Returns the shape of what `begin` returns for a batch, without a look at any parameter."""
        raise NotImplementedError(f"{type(self).__name__} has no stack of blocks that could be run in parts.")

    def beside(self, *args: Any, **batch: Any) -> tuple[Any, ...]:
        """Returns what each block gets beside the hidden states; it uses no parameters."""
        raise NotImplementedError(f"{type(self).__name__} has no stack of blocks that could be run in parts.")

    def finish(self, hidden: Tensor, **batch: Any) -> dict[str, Tensor | None]:
        """Returns what `forward` returns, of the last block's hidden states."""
        raise NotImplementedError(f"{type(self).__name__} has no stack of blocks that could be run in parts.")

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # whatever torch takes
        """Returns the weights as torch does, a tied one under all of its names.

        Only transformers' Trainer gets a tied one once: it hands what it gets to safetensors, which rejects memory
        that two names share, and asks a model that is not of transformers nothing else before.
        """
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") == "transformers.trainer":
            for name in self._keys_to_ignore_on_save:
                del state[name]
        return state

    @property
    def _keys_to_ignore_on_save(self) -> list[str]:
        """The second names of tied weights, which transformers' Trainer then does not miss in what it saved."""
        return [name for name, names in shared_names(self).items() if name != names[0]]

    def tie_weights(self) -> None:
        """Does nothing, when transformers' Trainer has loaded weights: they are filled in place, and ties stay."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        """Keeps tied what is tied also where tensors are assigned: torch would make a parameter for each name."""
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
        """Returns a model with fresh weights that is built as a config.json says."""
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
        *,
        strict: bool = True,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        allow_pickle: bool = False,
        **overrides: Any,
    ) -> Self:
        """Returns the model of a folder in Hugging Face's layout, with its weights, in training mode.

        A name that is no folder is looked for in `home_path` (default: the user's caches) and then on the hub. The
        weights keep the files' dtype unless `dtype` is given. With `strict=False` weights that the files lack are
        drawn anew and those that do not belong are left out; both are logged (load_pretrained returns them).
        `overrides` change settings of the constructor. Files with pickles are rejected unless `allow_pickle`.
        `from_pretrained(args, name, url=None, home_path=None)`, with a Namespace first, is the same for `name`.
        """
        model, _ = cls.load_pretrained(
            named_after_args(name_or_folder, name, url),
            home_path=home_path,
            strict=strict,
            dtype=dtype,
            device=device,
            allow_pickle=allow_pickle,
            **overrides,
        )
        return model

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
        """Does what from_pretrained does, and also returns which weights were missing and which keys unexpected."""
        device = checked_device(device)
        folder = find_folder(name_or_folder, home_path=home_path)
        config = read_config_file(folder)
        with _blamed_on(folder / CONFIG_FILE, cls, overrides):
            check_type(cls, config)
            settings = cls.settings_from_hugging_face(config) | overrides
            # A shipped constructor makes weights and nothing else. A user's may do anything with them (draw beside
            # them, keep or mark them, compute from them), so that it gets weights with memory, and keeps its own.
            with on_meta() if cls.is_shipped() else torch.device(device):
                model = cls(**settings)
        model.hugging_face_config = config
        report = load_weights(
            model,
            folder,
            key_map=cls.key_map(),
            strict=strict,
            dtype=as_dtype(dtype),
            device=device,
            allow_pickle=allow_pickle,
        )
        return model, report

    @classmethod
    def is_shipped(cls) -> bool:
        """Is this one of our own classes, not a user's subclass?"""
        return cls.__module__.startswith("trainwright.models.")

    def save_pretrained(self, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000) -> Path:
        """Writes config.json and the weights as transformers reads them, and returns the folder.

        The folder is whole or no model's. Of a model's folder that exists these files are replaced and all others (a
        tokenizer, a README) are left as they are; any other folder with files is rejected. The `model_type` is the one
        that was read. A model that computes something else than its type says is rejected: see as_shipped.py.
        """
        kept = {key: value for key, value in self.hugging_face_config.items() if key not in _NOT_KEPT}
        config = kept | self.to_hugging_face()
        changed = changes_of(self)
        if changed:
            has_adapters = any(isinstance(module, LoRALinear) for module in self.modules())
            merge = "Merge adapters first (trainwright.models.lora.merge_lora), or write" if has_adapters else "Write"
            raise CheckpointError(
                f"Hugging Face's layout cannot hold this {type(self).__name__}, which transformers would compute "
                f"differently: {'; '.join(changed[:4])}. {merge} plain weights (trainwright export --format "
                "safetensors). A subclass with the same outputs says so by a hugging_face_architectures of its own."
            )
        config |= {
            "architectures": [self.hugging_face_architectures[self.hugging_face_type]],
            "model_type": self.hugging_face_type,
        }
        return write_folder(
            self,
            Path(folder),
            config,
            key_map=self.key_map(),
            max_shard_bytes=max_shard_bytes,
            leave_out=self.unwritten(),
        )

    def unwritten(self) -> tuple[str, ...]:
        """Names the sub-modules whose weights are not written: the criterion's, which is part of the training."""
        return ("criterion",)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Returns a model with fresh weights of a size that presets.yaml names; `overrides` change single settings."""
        return cls(**preset_settings(cls, name, **overrides))


def named_after_args(first: str | Path | Namespace, name: str | Path | None, url: str | None) -> str | Path:
    """Returns the name or folder of a call by either form: (name_or_folder), or (args, name, url)."""
    if url not in (None, "local"):
        raise ConfigError(
            f"url: nothing is fetched from {url}. Put the files into a folder and name it, or name a model on the hub."
        )
    if isinstance(first, Namespace):
        if name is None:
            raise ConfigError("from_pretrained(args) does not say which model. Give its name or folder after args.")
        return name
    if name is not None:
        raise ConfigError(f"from_pretrained got two models, {first} and {name}. Give one.")
    return first


_NOT_KEPT = ("transformers_version", "torch_dtype", "dtype", "_name_or_path")
"""Keys of a config.json that say how it was written, not what the model is."""


@contextmanager
def _blamed_on(file: str | Path, model_class: type[Model], overrides: Mapping[str, Any]) -> Iterator[None]:
    """Says of values that no model can be made of in which file they stand, and what was given beside it."""
    place = str(file) + "".join(f", with {name}={value!r}" for name, value in overrides.items())
    try:
        yield
    except ConfigError as error:
        if error.problem.startswith(f"{CONFIG_FILE} "):  # of the file alone, whatever stands beside it
            raise type(error)(str(file) + error.problem.removeprefix(CONFIG_FILE)) from error
        raise type(error)(f"{place}: {error.problem}") from error
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        if not model_class.is_shipped():
            raise  # perhaps a mistake in a user's own constructor, of which the traceback is worth more
        raise ConfigError(f"{place}: its values make no model: {type(error).__name__}: {error}") from error


OTHER_TYPES = (
    "No shipped model reads it; any other trains by transformers' own class: type: transformers:AutoModelForCausalLM, "
    "or the like."
)


def shipped_models() -> dict[str, type[Model]]:
    """Returns the shipped models that know Hugging Face's files by their names in a run file, in the table's order."""
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
    """Rejects a config.json whose model_type is not one that the class reads."""
    model_type = config.get("model_type")
    if model_type not in model_class.hugging_face_types:
        names = " or ".join(readers_of(model_type))
        raise ConfigError(
            f"{CONFIG_FILE} says model_type {model_type!r}, but {model_class.__name__} reads "
            f"{', '.join(model_class.hugging_face_types) or 'none'}. "
            + (f"In a run file use type: {names}; in Python, AutoModel chooses the class." if names else OTHER_TYPES)
        )
    if config.get("quantization_config"):
        raise ConfigError(f"{CONFIG_FILE} has a quantization_config: quantized weights are not read. Use plain ones.")
