"""Exports the model of a run to a folder, in Hugging Face's format or as plain safetensors, and uploads it."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.build.data import DatasetBuilder
from trainwright.checkpoint.listing import CHECKPOINTS, checkpoints_location
from trainwright.checkpoint.remote_store import open_store
from trainwright.checkpoint.resume import pick_step
from trainwright.checkpoint.run_folder import read_config
from trainwright.config import ModelSection, RunConfig
from trainwright.config.files import save_document
from trainwright.config.yaml_text import absolute
from trainwright.data.chat import CHATML, read_template, turn_end
from trainwright.data.tokenizer import TextTokenizer, load_tokenizer, tokenizer_of
from trainwright.errors import CheckpointError, ConfigError, TrainwrightError
from trainwright.export.load import (
    FORMATS,
    earlier_files,
    export_folder,
    find_source,
    is_path,
    load_checkpoint,
    without_paths,
)
from trainwright.export.model_card import CARD_FILE, Library, card_metrics, hub_name, model_card
from trainwright.models.from_config import pretrained_folder, pretrained_source
from trainwright.models.key_map import KeyMap
from trainwright.models.lora import merge_lora
from trainwright.models.model import Model
from trainwright.models.peft_adapters import peft_config_of, save_peft
from trainwright.models.pretrained import CONFIG_FILE, SECTION_FILE, as_dtype, listed, read_json
from trainwright.models.pretrained_facts import GENERATION_FILE, read_facts
from trainwright.models.quantize import dequantize_model
from trainwright.models.saving import changes_of_theirs, write_json, write_weights
from trainwright.models.transformers_models import is_transformers_class
from trainwright.registry import resolve as registry
from trainwright.registry.trust import DATA_SECTIONS, reject_untrusted
from trainwright.writers.json_lines import read_history

logger = logging.getLogger(__name__)

TOKENIZER_FILE, TEMPLATE_FILE = "tokenizer.json", "chat_template.jinja"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Files of a tokenizer of transformers."""
FURTHER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    TEMPLATE_FILE,
    "chat_template.json",
)
"""Files next to a tokenizer.json: the names of its tokens, its other form, and the chat template."""


def find_tokenizer(config: RunConfig) -> Any:
    """Returns the tokenizer of a run's training data, its collator, `data.process` or `model.pretrained`; None if there
    is none."""
    reject_untrusted(config, sections=DATA_SECTIONS)
    project_dir = config.project_dir
    registry.import_modules(config.imports, project_dir=project_dir, where=config.origin("imports"))
    failure: TrainwrightError | None = None
    try:
        if config.data.train is not None:
            builder = DatasetBuilder(project_dir=project_dir, seed=config.seed)
            found = tokenizer_of(builder.build("data.train", config.data.train))
            if found is not None:
                return found
        collator = registry.instantiate(
            "collator", config.data.collator, label="data.collator", project_dir=project_dir, num_inputs=1
        )
        found = tokenizer_of(collator)
        if found is not None:
            return found
    except TrainwrightError as error:  # the data may be missing, but not the tokenizer that another section names
        failure = error
    named = None if config.data.process is None else config.data.process.arguments.get("tokenizer")
    if isinstance(named, str):
        return load_tokenizer(named, project_dir=project_dir)
    folder = None if config.model is None else pretrained_folder(config.model, project_dir=Path(project_dir))
    if folder is not None and any((folder / name).is_file() for name in TOKENIZER_FILES):
        return load_tokenizer(folder)
    if failure is not None:
        raise failure
    return None


def chat_template_of(config: RunConfig) -> str | None:
    """Returns the template that the data or the collator of a run sets (`chat_template`); None if neither does."""
    sections = (config.data.train, config.data.collator)
    given = next((found for one in sections if (found := _find_setting(one, "chat_template")) is not None), None)
    return None if given is None else read_template(given, Path(config.project_dir))


def _find_setting(value: Any, name: str) -> str | None:
    """Returns a setting of a component or of a component within it."""
    if not isinstance(value, Mapping):
        return None
    if isinstance(value.get(name), str):
        return str(value[name])
    return next((found for item in value.values() if (found := _find_setting(item, name)) is not None), None)


def save_tokenizer(tokenizer: Any, folder: Path) -> list[Path]:
    """Writes a tokenizer's files into a folder and returns their paths; the list is empty for one without files."""
    if isinstance(tokenizer, TextTokenizer):
        source = tokenizer.path
        if source.exists():
            _ = tokenizer.vocab_size  # raises if it is not a tokenizer: a config can name any file of this machine
        files = {TOKENIZER_FILE: source, **{name: source.parent / name for name in FURTHER_FILES}}
        if not source.is_file():
            files = {name: source / name for name in (*TOKENIZER_FILES, *FURTHER_FILES)}
        files = {name: path for name, path in files.items() if path.is_file()}
        return [Path(shutil.copyfile(path, folder / name)) for name, path in files.items()]
    if hasattr(tokenizer, "save_pretrained"):  # of transformers
        return [Path(path) for path in tokenizer.save_pretrained(folder) if Path(path).is_file()]
    if hasattr(tokenizer, "save"):  # of the tokenizers library
        tokenizer.save(str(folder / TOKENIZER_FILE))
        return [folder / TOKENIZER_FILE]
    return []


MAX_SHARD_BYTES = 5_000_000_000


def export_run(
    run: str | Path,
    folder: str | Path,
    *,
    step: int | str = "latest",
    weights: str | None = None,
    file_format: str = "huggingface",
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    trust: bool = False,
) -> Path:
    """Writes the model of a run at a step into a folder, with the run's tokenizer; returns the folder.

    `weights` is "ema", "raw", or None for those that the run's evaluations use, as in `load_checkpoint`. transformers
    and AutoModel read "huggingface"; "safetensors" is any model's weights under their own names, with the
    model's settings. Adapters of `model.lora` are merged into the weights; for `model.peft`, only the adapter is
    written, in peft's format. `dtype` (bf16, fp16, fp32) converts them.

    README.md is the model card (model_card.py), unless the folder has another README.md. An earlier export is replaced;
    other files are kept. Any other folder that is not empty raises unless `overwrite` is set, which replaces files of
    the same names and keeps the others. `trust` is that of `load_checkpoint`.
    """
    if file_format not in FORMATS:
        raise ConfigError(f"Unknown format {file_format!r}. Use one of: {', '.join(FORMATS)}.", where="format")
    wanted = as_dtype(dtype)
    folder, run_folder = Path(folder), find_source(Path(run))[0]
    _check_outside(folder, run_folder)
    config = read_config(run_folder, trust=trust)
    assert config is not None  # find_source has checked it
    with export_folder(folder, run=config.name, file_format=file_format, overwrite=overwrite) as staging:
        model = load_checkpoint(run, step, weights=weights, trust=trust)
        dequantize_model(model)
        merge_lora(model)
        if wanted is not None:
            _reject_overflow(model, wanted)
            model = model.to(wanted)
        if peft_config_of(model) is not None:
            _write_adapter(model, config, staging, file_format=file_format)
        elif file_format == "huggingface":
            write_hugging_face(model, staging, max_shard_bytes=max_shard_bytes)
            _add_generation(model, run_folder, staging)
        else:
            write_weights(model, staging, key_map=KeyMap(), max_shard_bytes=max_shard_bytes)
            if config.model is not None:
                save_document(staging / SECTION_FILE, _model_settings(model, config.model))
        _add_tokenizer(config, staging)
        if (folder / CARD_FILE).exists() and CARD_FILE not in (earlier_files(folder) or ()):
            (staging / CARD_FILE).unlink(missing_ok=True)  # peft writes one
            logger.info("%s is kept: the export has no model card.", folder / CARD_FILE)
        else:
            _add_card(model, config, staging, run=Path(run), step=step, file_format=file_format)
    return folder


def _write_adapter(model: nn.Module, config: RunConfig, folder: Path, *, file_format: str) -> None:
    """Writes the adapter of peft, which refers to the base model by name."""
    if file_format != "huggingface":
        raise CheckpointError(
            "The model has an adapter of peft, which is exported in peft's layout. Remove --format; "
            "PeftModel.from_pretrained(base, folder).merge_and_unload() merges it."
        )
    section = config.model
    has_base = section is not None and "pretrained" in section.reserved
    source = pretrained_source(section, project_dir=Path(config.project_dir)) if section and has_base else None
    save_peft(model, folder, base=None if source is None or is_path(source) else source)


def write_hugging_face(model: nn.Module, folder: Path, *, max_shard_bytes: int) -> None:
    """Writes a Model, or a model of transformers, in Hugging Face's layout into an empty folder."""
    if isinstance(model, Model):
        model.save_pretrained(folder, max_shard_bytes=max_shard_bytes)
        return
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        raise CheckpointError(
            f"{type(model).__name__} has no save_pretrained, which Hugging Face's layout needs. Export the weights "
            "under their own names: --format safetensors."
        )
    changed = changes_of_theirs(model) if is_transformers_class(type(model)) else []
    if changed:
        raise CheckpointError(
            f"Hugging Face's layout cannot represent this {type(model).__name__}, which transformers would compute "
            f"differently: {'; '.join(changed[:4])}. Export the weights under their own names: --format safetensors."
        )
    with contextlib.redirect_stdout(sys.stderr), _without_generation_config(model, folder):  # it prints progress bars
        save(folder, max_shard_size=max_shard_bytes)


@contextlib.contextmanager
def _without_generation_config(model: nn.Module, folder: Path) -> Iterator[None]:
    """Writes generation_config.json unchanged.

    transformers reads settings that it refuses to write (sampling settings without sampling, in many published
    folders), and then does not write the model either.
    """
    settings: Any = getattr(model, "generation_config", None)
    if settings is None:
        yield
        return
    model.generation_config = type(settings)()
    try:
        yield
    finally:
        model.generation_config = settings
    if (folder / GENERATION_FILE).is_file():  # a class without generation has none
        settings.to_json_file(folder / GENERATION_FILE)


def _reject_overflow(model: nn.Module, dtype: torch.dtype) -> None:
    """Raises if weights would be infinite in a dtype."""
    lost = [
        f"{name} (up to {float(weight.abs().nan_to_num(posinf=0.0).max()):.3g})"
        for name, weight in model.state_dict().items()
        if weight.is_floating_point() and bool((weight.to(dtype).isinf() & weight.isfinite()).any())
    ]
    if lost:
        raise CheckpointError(
            f"These weights would be infinite as {str(dtype).removeprefix('torch.')}, whose maximum is "
            f"{torch.finfo(dtype).max:.3g}: {listed(lost, at_most=8)}. Use bf16 or fp32, or remove the dtype."
        )


def _model_settings(model: nn.Module, section: ModelSection) -> dict[str, Any]:
    """Returns the `model` section that builds this model, without absolute paths of this machine.

    Settings that are part of the weights (pretrained ones, merged adapters) or only affect training are omitted.
    """
    arguments: Mapping[str, Any] = section.arguments
    settings = {"type": section.type, **(model.settings if isinstance(model, Model) else arguments)}
    if "replace" in section.reserved:
        settings["replace"] = section.reserved["replace"]
    return {"model": without_paths(settings)}


def _add_tokenizer(config: RunConfig, folder: Path) -> None:
    """Saves the tokenizer of the run's data with the chat template of the run; a failure is only a warning."""
    try:
        tokenizer = find_tokenizer(config)
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)
            _add_chat_template(config, tokenizer, folder)
    except (TrainwrightError, OSError) as error:
        logger.warning("The export has no tokenizer: %s", error)


def _add_chat_template(config: RunConfig, tokenizer: Any, folder: Path) -> None:
    """Writes the chat template of the run, unless it is the tokenizer's own, and the end token of a turn.

    Without both, other programs would render different prompts, or none, and would not stop at the end of an answer.
    """
    template = chat_template_of(config)
    if template is None:
        has_own = not isinstance(tokenizer, TextTokenizer) or tokenizer.find_chat_template()[0] is not None
        if has_own or not _contains_type(config.data.train, "chat"):
            return
        template = CHATML
    (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    if not isinstance(tokenizer, TextTokenizer) or not (folder / CONFIG_FILE).is_file():
        return
    stop_ids, _ = turn_end(tokenizer, template)
    file = folder / GENERATION_FILE
    generation = read_json(file) if file.is_file() else {}
    known = generation.get("eos_token_id", tokenizer.eos_id)
    ids = {*stop_ids, *(known if isinstance(known, list) else [] if known is None else [known])}
    if ids:
        # Set by transformers if the settings are unchanged; it would replace them with those of config.json.
        generation.pop("_from_model_config", None)
        write_json(file, {**generation, "eos_token_id": sorted(ids)})


def _contains_type(value: Any, name: str) -> bool:
    """Returns True if a component, or a component within it, has this type."""
    if not isinstance(value, Mapping):
        return False
    return value.get("type") == name or any(_contains_type(one, name) for one in value.values())


def _add_card(
    model: nn.Module, config: RunConfig, folder: Path, *, run: Path, step: int | str, file_format: str
) -> None:
    """Writes the model card, with the metrics up to the step."""
    run_folder, named_step = find_source(run)
    store = open_store(checkpoints_location(run_folder, config))
    chosen = pick_step(store, step if named_step is None else named_step, best=config.checkpoint.keep_best)
    settings = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    library: Library = "safetensors"
    if peft_config_of(model) is not None:
        library = "peft"
    elif file_format == "huggingface":
        library = "trainwright" if str(settings.get("model_type")).startswith("trainwright_") else "transformers"
    section = config.model
    source = None
    if section is not None and "pretrained" in section.reserved:
        source = pretrained_source(section, project_dir=Path(config.project_dir))
    history = read_history(run_folder)
    card = model_card(
        config,
        step=chosen,
        metrics=card_metrics(history, chosen, has_best=config.checkpoint.keep_best is not None),
        class_name=type(model).__name__,
        num_parameters=sum(one.numel() for one in model.parameters()),
        library=library,
        base_model=hub_name(source),
        architecture=next(iter(settings.get("architectures") or []), None),
    )
    (folder / CARD_FILE).write_text(card, encoding="utf-8")


def _add_generation(model: nn.Module, run_folder: Path, folder: Path) -> None:
    """Writes the generation settings of a run's pretrained folder, which a Model does not keep."""
    facts = read_facts(run_folder) if isinstance(model, Model) else None
    if facts is not None and facts.generation is not None:
        write_json(folder / GENERATION_FILE, facts.generation)


def _check_outside(folder: Path, run: Path) -> None:
    """Rejects the run folder, its parents and its checkpoints; other folders in the run are allowed.

    Both the path of a link and its target are checked.
    """
    for path, home in ((absolute(folder), run), (folder.resolve(), run.resolve())):
        if home.is_relative_to(path) or path.is_relative_to(home / CHECKPOINTS):
            what = "contains the run" if home.is_relative_to(path) else "contains the checkpoints of the run"
            raise CheckpointError(f"{folder} {what}. Choose another folder, such as {run / 'exports' / 'hf'}.")


_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def check_hub(repository: str) -> None:
    """Rejects a name that is not owner/name, and a missing package or token, before anything is exported."""
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(f'--push: "{repository}" is not the name of a repository. Use owner/name.')
    try:
        from huggingface_hub import get_token
    except ImportError as error:
        raise ConfigError(
            "--push needs huggingface_hub, which is not installed. Install it: pip install "
            "'trainwright[huggingface_hub]'."
        ) from error
    if not get_token():
        raise ConfigError(
            "--push: there is no token of the Hugging Face hub. Log in once with `hf auth login`, or set the variable "
            "HF_TOKEN to a token that may write (huggingface.co/settings/tokens)."
        )


def push_export(folder: Path, repository: str, *, is_public: bool = False) -> str:
    """Uploads the files of an export to a model repository, and returns its URL.

    A missing repository is created, private unless `is_public`; an existing one keeps its visibility. Files of the
    folder that are not part of the export are not uploaded.
    """
    check_hub(repository)
    from huggingface_hub import HfApi

    files = earlier_files(folder)
    if not files:
        raise CheckpointError(f"{folder} is not an export. Export the run first.")
    api: Any = HfApi()
    try:
        address = api.create_repo(repository, repo_type="model", private=not is_public, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            repo_type="model",
            folder_path=folder,
            allow_patterns=sorted(re.sub(r"([*?\[])", r"[\1]", name) for name in files),
            commit_message="Upload the export of a run",
        )
    except Exception as error:  # of the network, of the hub, and of the rights of the token
        raise CheckpointError(
            f"The export is complete in {folder}, but was not pushed to {repository}: {type(error).__name__}: {error}"
        ) from error
    return str(address)
