"""What happens to a model's weights before the first step: where they come from, what replaces or adapts them, which
are trained, and with whose settings.

A shipped model is made on the meta device, without memory, so that rules can be tried on it. A user's or another
library's class is not made: of its rules only the words are told. Nothing is loaded and no hub is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainwright import registry
from trainwright.config import Component, ModelSection, RunConfig
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.models.freeze import freeze
from trainwright.models.locate import home_folders
from trainwright.models.lora import add_lora
from trainwright.models.model import Model, check_type
from trainwright.models.names import as_globs, matched_parameters
from trainwright.models.presets import preset_settings
from trainwright.models.pretrained import CONFIG_FILE, on_meta, read_config_file
from trainwright.models.replace import claimed_modules
from trainwright.optim.param_groups import make_groups, names_of_others, read_rules
from trainwright.tracebacks import shown_path

MOST_SHOWN = 2


@dataclass(frozen=True)
class Rule:
    """A rule of the run file and what it does, or a problem in words."""

    text: str
    remark: str = ""
    is_problem: bool = False


class Weights:
    """Reads the rules of a config in the order in which they act; `model` is None once it cannot be known."""

    def __init__(self, config: RunConfig, target: Any) -> None:
        self.config = config
        self.section = config.model
        self.of_model: list[Rule] = []
        self.of_optimizers: dict[str, list[Rule]] = {}
        self.model: nn.Module | None = None
        if self.section is not None:
            reserved = self.section.reserved
            self._build(self.section, target)
            for key, tell in (("replace", self._replace), ("lora", self._lora), ("freeze", self._freeze)):
                if key in reserved:
                    self._try(f"model.{key}", lambda tell=tell, key=key: tell(reserved[key]))
            self._count()
        self._optimizers()

    def _try(self, label: str, tell: Any) -> None:
        """Runs one of the methods below; what it refuses is a problem, and the model is known no longer."""
        try:
            tell()
        except TrainwrightError as error:
            words = error.problem
            section, _, key = label.rpartition(".")
            if section and words.startswith(key):
                words = f"{section}.{words}"  # freeze.py speaks of `freeze`, wherever that stands
            elif not words.startswith(label):
                words = f"{label}: {words}"
            where = error.where if error.where is not None else self.config.origin(label)
            self.of_model.append(Rule(f"{where}: {words}" if where is not None else words, is_problem=True))
            self.model = None

    def _build(self, section: ModelSection, target: Any) -> None:
        is_shipped = isinstance(target, type) and issubclass(target, Model) and target.is_shipped()
        arguments = dict(section.arguments)
        preset = arguments.pop("preset", None)
        if preset is not None:
            self.of_model.append(Rule(f"preset {preset}", f"but {_words(arguments)}" if arguments else ""))
        given = section.reserved.get("pretrained")
        folder = self._pretrained(given) if given is not None else None

        def make() -> None:
            settings = arguments
            if preset is not None:
                settings = preset_settings(target, preset)
                words = _words(settings) + (f", but {_words(arguments)}" if arguments else "")
                self.of_model[0] = Rule(f"preset {preset}", words)
                settings |= arguments
            elif folder is not None:
                config = read_config_file(folder)
                check_type(target, config)
                settings = target.settings_from_hugging_face(config) | arguments
            registry.check_arguments(target, settings, label="model")
            with on_meta():
                self.model = target(**settings)

        if is_shipped and (given is None or folder is not None):
            self._try("model", make)

    def _pretrained(self, given: Any) -> Path | None:
        """Says where the weights come from, and returns the folder if it is on this machine."""
        settings = given if isinstance(given, Mapping) else {"folder": given}
        name = settings.get("folder")
        options = _words({key: value for key, value in settings.items() if key != "folder"})
        also = f"; {options}" if options else ""
        homes = home_folders() if settings.get("home_path") is None else [Path(str(settings["home_path"])).expanduser()]
        places = [Path(self.config.project_dir), *homes]
        folders = [place / Path(str(name)).expanduser() for place in places]
        folder = next((each for each in folders if (each / CONFIG_FILE).is_file()), None)
        if folder is None:
            found = "is not in these words on this machine; it is looked for when training starts"
            self.of_model.append(Rule(f"pretrained {name}", f"{found}{also}"))
            return None
        files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
        size = sum(file.stat().st_size for file in files)
        held = f"{len(files)} file{'s' if len(files) != 1 else ''} of weights, {_bytes(size)}"
        self.of_model.append(Rule(f"pretrained {name}", f"from {shown_path(folder)}: {held}{also}"))
        return folder

    def _replace(self, given: Any) -> None:
        rules = {glob: _type_of(rule) for glob, rule in _mapping(given).items()}
        places = {} if self.model is None else claimed_modules(self.model, rules)
        for glob, name in rules.items():
            where = self.config.origin("model.replace")
            registry.find("model", name, project_dir=self.config.project_dir, where=where, label="model.replace")
            names = [place for place, owner in places.items() if owner == glob]
            self.of_model.append(Rule(f'replace "{glob}"', f"by {name}{_counted(names, 'module')}"))
        self.model = None  # what the new modules hold is known once they are made

    def _lora(self, given: Any) -> None:
        settings: dict[str, Any] = {
            key: list(value) if isinstance(value, tuple) else value for key, value in _mapping(given).items()
        }
        registry.check_arguments(add_lora, settings, label="model.lora", provided=("model",))
        said = _words({key: value for key, value in settings.items() if key != "match"})
        globs = as_globs("lora.match", settings["match"])
        layers = [] if self.model is None else add_lora(self.model, **settings)
        beside = ", ".join(globs)
        words = f"adapters of {said}" if said else "adapters"
        self.of_model.append(Rule(f'lora "{beside}"', words + _counted(layers, "layer")))

    def _freeze(self, given: Any) -> None:
        for glob in as_globs("freeze", given):
            names = [] if self.model is None else matched_parameters("freeze", glob, self.model)
            own = {} if self.model is None else dict(self.model.named_parameters(remove_duplicate=False))
            self.of_model.append(Rule(f'freeze "{glob}"', _weights(own[name] for name in names) if names else ""))
        if self.model is not None:
            freeze(self.model, given)

    def _count(self) -> None:
        if self.model is None:
            return
        parameters = list(self.model.parameters())
        total = sum(each.numel() for each in parameters)
        trained = sum(each.numel() for each in parameters if each.requires_grad)
        share = "all" if trained == total else f"{trained:,} ({100 * trained / max(total, 1):.3g} %)"
        reserved = self.section.reserved if self.section is not None else {}
        also = "; beside adapters also what the files lack" if {"lora", "pretrained"} <= set(reserved) else ""
        self.of_model.append(Rule(f"{total:,} weights", f"of which {share} are trained{also}"))

    def _optimizers(self) -> None:
        trainer = self.config.trainer
        trainable = {} if self.model is None else dict(self.model.named_parameters())
        trainable = {name: each for name, each in trainable.items() if each.requires_grad}
        if trainer.optimizer is not None:
            self._groups("trainer.optimizer", trainer.optimizer, trainable)
        for name, entry in trainer.optimizers.items():
            own = {key: each for key, each in trainable.items() if any(fnmatchcase(key, glob) for glob in entry.match)}
            label = f"trainer.optimizers.{name}.optimizer"
            words = "" if self.model is None else _weights(own.values())
            self.of_optimizers[label] = [Rule(f"{name}: match {', '.join(entry.match)}", words)]
            self._groups(label, entry.optimizer, own)

    def _groups(self, label: str, component: Component, owned: Mapping[str, Tensor]) -> None:
        out = self.of_optimizers.setdefault(label, [])
        try:
            groups = component.arguments.get("groups", ())
            rules = read_rules(groups, label=f"{label}.groups", origin=self.config.origin)
            if self.model is not None:
                others = names_of_others(self.model, owned)
                make_groups(owned, rules, label=f"{label}.groups", origin=self.config.origin, others=others)
        except TrainwrightError as error:
            out.append(Rule(str(error), is_problem=True))
            return
        left = dict(owned)
        for rule in rules:
            names = [name for name in left if any(fnmatchcase(name, glob) for glob in rule.globs)]
            found = "" if self.model is None else f": {_weights(left.pop(name) for name in names)}"
            out.append(Rule(f'group "{", ".join(rule.globs)}"', f"{_words(rule.settings)}{found}"))
        if rules and left:
            out.append(Rule("the rest", f"the optimizer's own settings: {_weights(left.values())}"))


def _mapping(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"must be a mapping, got {given!r}.")
    return given


def _type_of(rule: Any) -> str:
    return str(rule.get("type") if isinstance(rule, Mapping) else rule)


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in settings.items())


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{_words(value)}}}"
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, list | tuple) else str(value)


def _counted(names: list[str], what: str) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:MOST_SHOWN]) + (", …" if len(names) > MOST_SHOWN else "")
    return f": {len(names)} {what}{'s' if len(names) != 1 else ''} ({shown})"


def _weights(parameters: Iterable[Tensor]) -> str:
    sizes = [each.numel() for each in parameters]
    return f"{len(sizes)} parameter{'s' if len(sizes) != 1 else ''}, {sum(sizes):,} weights"


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB"
