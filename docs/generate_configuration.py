"""Writes docs/configuration.md from the schema of run files: `python docs/generate_configuration.py`.

A test compares the page with the output of this script, so they cannot differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainwright.commands.components import SECTIONS
from trainwright.config.builtin import BUILT_INS, KIND_FOLDERS
from trainwright.config.json_schema import run_schema

PAGE = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration reference

<!-- Written by docs/generate_configuration.py from the schema; change the docstrings in src/trainwright/config/. -->

A run is defined by one YAML file. This page lists all settings. Each is optional unless it is marked *required*, and
each except `extends` and `project_dir` can be overridden on the command line: `trainwright train run.yaml
trainer.max_steps=500`. An unknown key or a value of the wrong type raises with its line.

- `trainwright config run.yaml` prints every setting of a run and its origin.
- `trainwright config run.yaml --diff other.yaml` prints the differences between two runs.
- `trainwright config --schema > run.schema.json` writes a JSON schema for editors. With
  `# yaml-language-server: $schema=run.schema.json` as the first line of a run file, they complete and validate it.

## Groups, references and removals

**Groups.** A section can be the name of a file: `trainer=lm-xl` on the command line, or `trainer: lm-xl` in a run file,
is replaced by the contents of `configs/trainer/lm-xl.yaml`. The folder `configs` is next to the run file (or is its
folder), or in the package. Nested settings have nested folders: `trainer.optimizer=adamw-big` refers to
`configs/trainer/optimizer/adamw-big.yaml`, and an item of `hooks` to a file in `configs/hooks/`. A group replaces the
whole section; later overrides change it. `extends: lm` inside a section or a group file starts from another group of
the same folder. Paths such as `models/net.py:Net` are relative to the run file. A name that is both a group and a
component raises: write `{type: adamw}` for the component.

**References.** `${section.key}` is the value of another setting, after all files, groups and overrides are merged:
`name: lm-${trainer.optimizer.lr}` follows an override of the rate. A value that consists of one reference has the
type of the other setting, which may be a mapping or a list; within text it must be a number, a boolean or text.
`${model.pretrained.folder}` also works if `model.pretrained` is a text.
References to settings that are not set return their defaults. `${env:NAME}` is the text of an environment variable, and
`${env:NAME,default}` has a default. Variables that look like secrets raise, because `config.yaml` contains the resolved
values. `$${` is a literal `${`. Put quotes around a reference within `{…}` and `[…]` in YAML, and in a shell.

**Required settings.** In a file that others extend, `path: ${required:the chats, such as chats.jsonl}` marks a setting
that they must set. A run that does not set it raises with the line of `extends`, the description, and the example,
which is the text after `, such as `. The packaged [recipes](recipes.md) consist of defaults and required settings.

**Removals.** `~trainer.schedule` on the command line removes a setting, so its default applies; `~hooks.0` removes an
item of a list. In a file that extends others, the key `~schedule:` without a value does the same. Removing a setting
that does not exist raises. zsh needs quotes: `'~trainer.schedule'`.
"""

MODEL_KEYS = """\
## model

A component (see below) with the model's arguments. The following keys are not arguments of the constructor; all models
accept them, except `preset` and `kernels`, which depend on the model. For details and examples, see [pretrained
weights](models.md#pretrained-weights), [training a part](models.md#train-a-part-of-the-model), [memory](memory.md),
[sharding](distributed.md).

| key | value | meaning |
|---|---|---|
| `preset` | text | The name of a size of a shipped model; other settings override its values. |
| `pretrained` | text or a section | A folder or name, or `folder`, `strict`, `home_path`, `dtype`, `allow_pickle`. |
| `replace` | a section | Components by glob; each replaces the sub-modules that match. |
| `peft` | text or a section | Adapters of the PEFT library: `type` (`lora`, `ia3`, …) and the fields of its config. |
| `lora` | a section | Adapters on linear layers: `match`, `rank`, `alpha`, `dropout`, `train`. |
| `quantize` | `nf4`, `int8` or a section | Frozen weights under adapters in 4 or 8 bits: `type`, `match`. |
| `freeze` | text, mapping or list of them | Globs of frozen parameters; `until_step` or `until_epoch` limits it. |
| `dtype` | `fp32`, `bf16`, `fp16` | The dtype of the weights; by default that of the model, usually fp32. |
| `sharding` | text or a section | How parameters are sharded over ranks: a packaged name, a file, or rules. |
| `activation_checkpointing` | text, list or a section | Recomputed: `layers`, `save`, `budget`, `every`; or by path. |
| `compile_repeated_blocks` | text, list or a section | Equal blocks, compiled once: a path, or `path`, `backend`. |
| `tile` | text, list or a section | Token-wise layers that run in tiles of tokens: `layers`, `tokens`; or by path. |
| `offload` | list of text or a section | Named tensors to store in host memory until backward; or by path. |
| `kernels` | `fast`, `stock` | Attention and loss of transformers models: `fast` (the default), or transformers' own. |
| `args` | a section | Arguments that are passed unchanged, even if their names are in this table. |
"""

COMPONENTS = """\
## Components

A component is a mapping with `type` and the arguments of its constructor: `{type: adamw, lr: 3e-4}`. Without arguments,
the type alone is sufficient: `adamw`. The type is a built-in name, `package.module:Name`,
`file.py:Name` relative to the run file, or `file.Name` for a file in the folder of its kind next to the run file. An
argument may itself be a component, or a list of components: `transform: {type: "torchvision.transforms:ToTensor"}`.
`trainwright components KIND NAME` shows the parameters of a component, including your own.
"""


def generate() -> str:
    """Return the whole page."""
    schema = run_schema({kind: tuple(names) for kind, names in BUILT_INS.items()})
    definitions = schema["$defs"]
    parts = [INTRODUCTION, "## The file\n", _table(schema, definitions), MODEL_KEYS]
    parts += _sections(schema, definitions, "")
    rows = [
        f"| {kind} | `{SECTIONS[kind]}` | `{folder}/` | {', '.join(f'`{name}`' for name in BUILT_INS[kind])} |"
        for kind, folder in KIND_FOLDERS.items()
    ]
    head = "| kind | where | your folder | built-in |\n|---|---|---|---|"
    parts.append(f"{COMPONENTS}\n" + "\n".join([head, *rows]) + "\n")
    return "\n".join(parts)


def _sections(schema: dict[str, Any], definitions: dict[str, Any], prefix: str) -> list[str]:
    """Return the part of each section below `schema`, in the order of the keys."""
    parts = []
    for key, value in schema["properties"].items():
        section, is_mapping = _section_of(value, definitions)
        if section is not None:
            name = f"{prefix}{key}{'.NAME' if is_mapping else ''}"
            description = section.get("description", value["description"])
            parts += [f"## {name}\n\n{description}\n", _table(section, definitions)]
            parts += _sections(section, definitions, f"{name}.")
    return parts


def _section_of(value: dict[str, Any], definitions: dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """Return the section of a key, and whether the key has several sections by name; components are not sections."""
    for choice in value.get("anyOf", [value]):
        for each, is_mapping in ((choice, False), (choice.get("additionalProperties"), True)):
            if isinstance(each, dict):
                found = definitions[each["$ref"].rpartition("/")[2]] if "$ref" in each else each
                if "properties" in found:
                    return found, is_mapping
    return None, False


def _table(section: dict[str, Any], definitions: dict[str, Any]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, value in section["properties"].items():
        default = "*required*" if key in section.get("required", ()) else _default(value, definitions)
        meaning = value.get("description", "").replace("|", "\\|")
        lines.append(f"| `{key}` | {_value(value)} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _default(value: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "default" in value:
        return f"`{json.dumps(value['default'])}`"
    return "see below" if _section_of(value, definitions)[0] else ""


def _value(value: dict[str, Any]) -> str:
    """Describe the valid values in words."""
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_value(choice) for choice in value["anyOf"]))
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#components)" if name in KIND_FOLDERS else "a section"
    if "enum" in value:
        return ", ".join(f"`{each}`" for each in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "object":
        below = value.get("additionalProperties")
        return f"{_value(below)} by name" if isinstance(below, dict) and below else "a section"
    if value.get("type") == "array":
        return f"list of {_value(value['items'])}"
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}
    limit = ""
    if "exclusiveMinimum" in value:
        limit = f" > {value['exclusiveMinimum']}"
    elif "minimum" in value:
        limit = f" ≥ {value['minimum']}"
    return words.get(value.get("type", ""), "`null`") + limit


if __name__ == "__main__":
    PAGE.write_text(generate(), encoding="utf-8")
