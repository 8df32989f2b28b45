"""The contract of the shipped models: an `nn.Module` that can also be read from and written to Hugging Face's files.

A model file adds its architecture; here is what all of them share. Reading files is in pretrained.py, writing them in
saving.py, finding a name on this machine in locate.py, choosing a class by a folder's files in auto.py.
Sizes are data, in presets.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
import yaml
from torch import nn

from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.key_map import KeyMap, KeyRule
from trainwright.models.locate import find_folder
from trainwright.models.pretrained import CONFIG_FILE, LoadReport, as_dtype, load_weights, on_meta, read_config_file
from trainwright.models.saving import write_folder

__all__ = ["KeyRule", "Model", "check_type", "preset_settings"]


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
        """Returns the constructor's keywords for a config.json; what the class cannot do is refused by name."""
        raise NotImplementedError(f"{cls.__name__} reads no Hugging Face folders: it lacks settings_from_hugging_face.")

    def to_hugging_face(self) -> dict[str, Any]:
        """Returns the content of config.json, without model_type, architectures and dtype."""
        raise NotImplementedError(f"{type(self).__name__} writes no Hugging Face folders: it lacks to_hugging_face.")

    def reset_parameters(self) -> None:
        """Draws all weights anew and ties what is tied, for a model that was made on the meta device."""
        raise NotImplementedError(f"{type(self).__name__} lacks reset_parameters.")

    @classmethod
    def key_map(cls) -> KeyMap:
        """Returns the translation between our names of weights and Hugging Face's."""
        return KeyMap(cls.key_rules, ignored=cls.ignored_keys, prefix=cls.hugging_face_prefix)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **overrides: Any) -> Self:
        """Returns a model with fresh weights that is built as a config.json says."""
        check_type(cls, config)
        model = cls(**(cls.settings_from_hugging_face(config) | overrides))
        model.hugging_face_config = dict(config)
        return model

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | Path,
        *,
        home_path: str | Path | None = None,
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
        `overrides` change settings of the constructor. Files with pickles are refused unless `allow_pickle`.
        """
        model, _ = cls.load_pretrained(
            name_or_folder,
            home_path=home_path,
            strict=strict,
            dtype=dtype,
            device=device,
            may_unpickle=allow_pickle,
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
        may_unpickle: bool = False,
        **overrides: Any,
    ) -> tuple[Self, LoadReport]:
        """Does what from_pretrained does, and also returns which weights were missing and which keys unexpected."""
        folder = find_folder(name_or_folder, home_path=home_path)
        config = read_config_file(folder)
        check_type(cls, config)
        settings = cls.settings_from_hugging_face(config) | overrides
        with on_meta():
            model = cls(**settings)
        has_computed_buffers = bool(set(dict(model.named_buffers())) - set(model.state_dict()))
        if has_computed_buffers or not cls.__module__.startswith("trainwright."):
            # What is computed is lost on the meta device, and only its constructor knows how a user's subclass draws
            # the weights that the files lack.
            with torch.device(device):
                model = cls(**settings)
        model.hugging_face_config = config
        report = load_weights(
            model,
            folder,
            key_map=cls.key_map(),
            strict=strict,
            dtype=as_dtype(dtype),
            device=device,
            may_unpickle=may_unpickle,
        )
        return model, report

    def save_pretrained(self, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000) -> Path:
        """Writes config.json and the weights as transformers reads them, and returns the folder.

        The folder appears whole or not at all. One that exists is replaced if it is a model's (its other files, such
        as a tokenizer, are kept) and refused otherwise. The `model_type` is the one that was read.
        """
        self._refuse_other_keys()
        kept = {key: value for key, value in self.hugging_face_config.items() if key not in _NOT_KEPT}
        config = kept | self.to_hugging_face()
        config |= {
            "architectures": [self.hugging_face_architectures[self.hugging_face_type]],
            "model_type": self.hugging_face_type,
        }
        return write_folder(self, Path(folder), config, key_map=self.key_map(), max_shard_bytes=max_shard_bytes)

    def _refuse_other_keys(self) -> None:
        """Refuses a model that was changed after it was built: its folder would claim to be what it is not."""
        with on_meta():
            as_built = set(type(self)(**self.settings).state_dict())
        other = sorted(as_built ^ set(self.state_dict()))
        if other:
            shown = ", ".join(other[:4]) + (", …" if other[4:] else "")
            raise CheckpointError(
                f"{type(self).__name__} has adapters or replaced parts ({shown}), which "
                "Hugging Face's layout cannot hold. Merge adapters first (trainwright.models.lora.merge_lora), or "
                "write plain safetensors (trainwright export --format safetensors)."
            )

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Returns a model with fresh weights of a size that presets.yaml names; `overrides` change single settings."""
        return cls(**preset_settings(cls, name, **overrides))


_NOT_KEPT = ("transformers_version", "torch_dtype", "dtype", "_name_or_path")
"""Keys of a config.json that say how it was written, not what the model is."""


def check_type(model_class: type[Model], config: Mapping[str, Any]) -> None:
    """Refuses a config.json whose model_type is not one that the class reads."""
    model_type = config.get("model_type")
    if model_type not in model_class.hugging_face_types:
        raise ConfigError(
            f"{CONFIG_FILE} says model_type {model_type!r}, but {model_class.__name__} reads "
            f"{', '.join(model_class.hugging_face_types) or 'none'}. AutoModel.from_pretrained chooses the class."
        )
    if config.get("quantization_config"):
        raise ConfigError(f"{CONFIG_FILE} has a quantization_config: quantized weights are not read. Use plain ones.")


def preset_settings(model_class: type[nn.Module], name: str, **overrides: Any) -> dict[str, Any]:
    """Returns the constructor's keywords of a preset, which belongs to the file in which a class is written.

    A subclass elsewhere has its parent's presets.
    """
    table = _presets()
    family = next((part for one in model_class.__mro__ if (part := one.__module__.rpartition(".")[2]) in table), None)
    if family is None:
        raise ConfigError(f"{model_class.__name__} has no presets; {', '.join(sorted(table))} have.", where="model")
    if name not in table[family]:
        raise ConfigError(f"{family} has no preset {name!r}. Known: {', '.join(table[family])}.", where="model.preset")
    return {**table[family][name], **overrides}


@cache
def _presets() -> dict[str, dict[str, dict[str, Any]]]:
    table: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load((Path(__file__).parent / "presets.yaml").read_text())
    return table
