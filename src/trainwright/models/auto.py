"""AutoModel: picks the shipped class that reads a folder, by what its config.json says."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.errors import ConfigError
from trainwright.models.model import OTHER_TYPES, Model, named_after_args, readers_of, shipped_models
from trainwright.models.pretrained import CONFIG_FILE, find_folder, read_config_file


class AutoModel:
    """Chooses one of the shipped classes by a model's config.json, and returns an object of that class."""

    def __init__(self) -> None:
        raise ConfigError(
            "AutoModel only chooses a class: use AutoModel.from_pretrained(folder) or .from_config(config)."
        )

    @staticmethod
    def from_pretrained(
        name_or_folder: str | Path | Namespace,
        name: str | Path | None = None,
        url: str | None = None,
        home_path: str | Path | None = None,
        **options: Any,
    ) -> Model:
        """Returns the model of a folder in Hugging Face's layout, with its weights; (args, name) is accepted too.

        `options` are those of `Model.from_pretrained`: strict, dtype, device, allow_pickle, and settings to change.
        """
        folder = find_folder(named_after_args(name_or_folder, name, url), home_path=home_path)
        chosen = AutoModel.choose(read_config_file(folder), file=folder / CONFIG_FILE)
        return chosen.from_pretrained(folder, **options)

    @staticmethod
    def from_config(config: Mapping[str, Any], **overrides: Any) -> Model:
        """Returns a model with fresh weights that is built as a config.json says."""
        return AutoModel.choose(config).from_config(config, **overrides)

    @staticmethod
    def choose(config: Mapping[str, Any], *, file: str | Path = CONFIG_FILE) -> type[Model]:
        """Returns the class for a config.json: by its model_type, and among several by `architectures`.

        `file` is where it stands, for an error to say.
        """
        model_type = config.get("model_type")
        fitting = list(readers_of(model_type).values())
        if not fitting:
            known = sorted({one for each in shipped_models().values() for one in each.hugging_face_types})
            raise ConfigError(f"{file} says model_type {model_type!r}. {OTHER_TYPES} Known: {', '.join(known)}.")
        wanted = config.get("architectures") or ()
        if not isinstance(wanted, (list, tuple)):
            raise ConfigError(f"{file} says architectures {wanted!r}, which is no list of names. Copy the model again.")
        by_name = [each for each in fitting if each.hugging_face_architectures.get(str(model_type)) in wanted]
        return (by_name or fitting)[0]
