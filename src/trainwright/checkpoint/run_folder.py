"""The run folder: config.yaml, environment.json, model.json, log.txt, metrics.json, checkpoints/, exports/.

Rank 0 chooses it once. resume.py decides whether a run resumes from what the folder contains.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from trainwright.checkpoint.folder_lock import OLD, set_aside
from trainwright.checkpoint.listing import CHECKPOINTS, checkpoints_location, list_checkpoints
from trainwright.checkpoint.manifest import STEP_NAME
from trainwright.config import RunConfig
from trainwright.config.problems import did_you_mean
from trainwright.config.yaml_text import absolute
from trainwright.errors import CheckpointError, ConfigError

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
FROZEN_FILE = "frozen_models.json"
LOG_FILE = "log.txt"
MODEL_FILE = "model.json"
_TRAINER = "trainer"  # in environment.json; absent if the config names the trainer
_RUN_ID = "run_id"
_MAX_MODULES = 200  # of the model, in model.json
_DEVICE = "device"
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def run_folder(config: RunConfig) -> Path:
    """Returns output_dir/name; accesses nothing."""
    return Path(config.output_dir) / config.name


def reject_reserved(config: RunConfig) -> None:
    """Raises for the name of a folder to which --fresh moves an earlier run."""
    for part in config.name.split("/"):
        if part.endswith(OLD):
            raise ConfigError(
                f"name: {config.name!r} ends in {OLD}, which is where --fresh keeps the earlier run. "
                "Choose another name, or rename the folder to train in it.",
                where=config.origin("name"),
            )


def claim_checkpoints(config: RunConfig, *, fresh: bool) -> None:
    """Creates the folder that `checkpoint.folder` sets, if any; with `fresh` renames an existing one first."""
    if config.checkpoint.folder is None:
        return
    location, where = checkpoints_location(run_folder(config), config), config.origin("checkpoint.folder")
    if isinstance(location, Path):
        if fresh:
            set_aside(location)
        prepare(location, setting="checkpoint.folder", where=where)
    elif fresh and list_checkpoints(location):
        raise ConfigError(
            f"checkpoint.folder: {location} holds checkpoints, which --fresh cannot rename at an address. Choose "
            "another name, or delete them.",
            where=where,
        )


def prepare(folder: Path, *, setting: str = "output_dir", where: object | None = None) -> None:
    """Creates the folder; raises if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(folder, error, setting=setting, where=where) from error


def unwritable(
    folder: Path, error: OSError, *, setting: str = "output_dir", where: object | None = None
) -> ConfigError:
    """Returns the error for a run folder that cannot be written."""
    return ConfigError(
        f"{setting}: the run folder {folder} cannot be written ({error.strerror}). "
        f"Choose another with {setting}=… or name=….",
        where=where,
    )


def save_settings(folder: Path, config: RunConfig, device: str, *, trainer: str | None = None) -> None:
    """Writes config.yaml, without credentials, and environment.json, unless they already exist with the same content.

    `trainer` is the trainer's class, if it is not the one that the config names.
    """
    masked, saved = config.masked(), read_config(folder)
    if saved != masked or (saved.untrusted_file and not config.untrusted_file):
        masked.save(folder / CONFIG_FILE)
    # Versions and hardware only: no variables and no paths, which could contain secrets.
    facts = {
        _RUN_ID: run_id(folder),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        _DEVICE: device,
        "byteorder": sys.byteorder,
    }
    if trainer is not None:
        facts[_TRAINER] = trainer
    _write_environment(folder, facts)


def save_model_summary(folder: Path, model: torch.nn.Module, num_parameters: int) -> None:
    """Writes model.json, a summary: the classes and parameters of the model and its modules, two levels deep.

    `num_parameters` is that of the whole model, because a pipeline stage has only its own modules.
    """
    rows: list[tuple[str, str, int, int]] = []
    for name, module in model.named_modules():
        if name and name.count(".") <= 1 and len(rows) < _MAX_MODULES:
            sizes = [(each.numel(), each.requires_grad) for each in module.parameters()]
            trained = sum(size for size, is_trained in sizes if is_trained)
            rows.append((name, type(module).__name__, sum(size for size, _ in sizes), trained))
    facts = {
        "class": type(model).__name__,
        "num_parameters": num_parameters,
        "num_frozen": sum(each.numel() for each in model.parameters() if not each.requires_grad),
        "modules": rows,
    }
    _replace(folder / MODEL_FILE, json.dumps(facts) + "\n")


def write_frozen_models(folder: Path, digests: Mapping[str, str]) -> None:
    """Writes the digests of the weights of a run's frozen models, if there are any, at its first start."""
    path = folder / FROZEN_FILE
    path.unlink(missing_ok=True)
    if digests:
        staging = path.with_name(f".{FROZEN_FILE}.writing")
        staging.write_text(json.dumps(dict(digests), indent=1) + "\n", "utf-8")
        staging.replace(path)


def check_frozen_models(folder: Path, digests: Mapping[str, str]) -> None:
    """Raises if a frozen model that a resumed run has rebuilt has other weights than at the run's first start."""
    path = folder / FROZEN_FILE
    try:
        first = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        first = {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Restore it, or start over with --fresh.") from error
    for name, digest in digests.items():
        if name in first and first[name] != digest:
            raise CheckpointError(
                f"The {name} model has other weights than at the run's first start, so the run would continue with "
                "another loss. Restore the pretrained files and the software that the run used, or start over with "
                "--fresh.",
                where=path,
            )


def run_id(folder: Path) -> str:
    """Returns the id of the run in a folder, which tracking services use; creates it at the first call.

    It stays the same as long as the folder exists: across resumes, numbers of processes and changed settings.
    """
    facts = _read_environment(folder)
    if _RUN_ID not in facts:
        facts = {_RUN_ID: "".join(secrets.choice(_LETTERS) for _ in range(10)), **facts}
        _write_environment(folder, facts)
    return str(facts[_RUN_ID])


def forget_run_id(folder: Path) -> None:
    """Makes the next start create another id, because the run starts over with other settings."""
    facts = _read_environment(folder)
    if facts.pop(_RUN_ID, None) is not None:
        _write_environment(folder, facts)


def _read_environment(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / ENVIRONMENT_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _write_environment(folder: Path, facts: dict[str, str]) -> None:
    _replace(folder / ENVIRONMENT_FILE, json.dumps(facts, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    """Writes a file atomically, unless it already has this text, because a kill must not lose the run's id."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        replacement = path.with_suffix(".json.part")
        replacement.write_text(text, encoding="utf-8")
        replacement.replace(path)


def read_config(folder: Path, *, trust: bool = False) -> RunConfig | None:
    """Returns the config of a run folder, or None if it has none; `trust` permits to import the code that it names."""
    path = folder / CONFIG_FILE
    return RunConfig.load(path, trust=trust) if path.exists() else None


def read_trainer(folder: Path) -> str | None:
    """Returns the class that trained a run; None if it is the one named in its config."""
    return _read_environment(folder).get(_TRAINER)


def read_device(folder: Path) -> str:
    """Returns the device on which a run was last started."""
    return _read_environment(folder).get(_DEVICE, "an unknown device")


def find_run(run_or_checkpoint: Path, *, where: object | None = None) -> tuple[Path, int | None]:
    """Returns the run folder, and the step if the path is one of its checkpoints; also accepts checkpoints/.

    `where` is where the path was set, for the error.
    """
    path = absolute(run_or_checkpoint)
    if (path / CONFIG_FILE).exists():
        return path, None
    if path.name == CHECKPOINTS and (path.parent / CONFIG_FILE).exists():
        return path.parent, None
    step = STEP_NAME.fullmatch(path.name)
    if step and path.is_dir() and (path.parent.parent / CONFIG_FILE).exists():
        return path.parent.parent, int(step[1])
    why, hint = f"it has no {CONFIG_FILE}", ""
    if not path.exists():
        others = [each.parent.name for each in path.parent.glob(f"*/{CONFIG_FILE}")]
        why, hint = "it does not exist", did_you_mean(path.name, others)
    raise CheckpointError(
        f"{run_or_checkpoint} is not a run folder: {why}.{hint} Use a folder such as runs/NAME, "
        "or one of its checkpoints/step-….",
        where=where,
    )
