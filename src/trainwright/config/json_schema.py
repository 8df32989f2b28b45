"""The JSON Schema of a run file, with which editors complete, explain and validate the YAML.

It is derived from the sections (schema.py, sections.py) and accepts every file that `RunConfig.load` accepts. Rules
across settings and the arguments of components are checked by `load` and `check` only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from trainwright.config.groups import KINDS
from trainwright.config.schema import RunConfig
from trainwright.config.sections import BUILT_IN_TRAINERS, LoaderArguments, ProcessOptions, Section
from trainwright.config.trainer_options import TRAINER_OPTIONS

Json: TypeAlias = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"

# pydantic's names of limits on fields that have a BeforeValidator.
_LIMITS: Mapping[str, str] = {"gt": "exclusiveMinimum", "ge": "minimum"}


def run_schema(type_names: Mapping[str, Sequence[str]]) -> Json:
    """Return the schema of a run file; `type_names` has the built-in components of each kind, for completion."""
    whole = RunConfig.model_json_schema()
    sections = {**whole.pop("$defs"), "RunConfig": whole}
    sections = {name: _clean(section) for name, section in sections.items()}
    for section in sections.values():
        properties = section["properties"]
        for key in properties:
            properties[key] = _insert_components(properties[key], KINDS.get(key, key))
    _widen(sections, type_names)
    run = sections.pop("RunConfig")
    run["properties"] = {**_file_keys(), **run["properties"]}
    components = {kind: _component(kind, names) for kind, names in type_names.items() if kind != "trainer"}
    components["process"] = _process()
    return {"$schema": DIALECT, "title": "trainwright run file", **run, "$defs": {**sections, **components}}


def with_references(schema: Json) -> Json:
    """Return the schema of `run_schema` that also accepts `${…}` for any value, names of groups, and `~key`."""
    kept = {name: each for name, each in schema["$defs"].items() if "properties" not in each or name == "process"}
    sections = {name: _accept_references(each) for name, each in schema["$defs"].items() if name not in kept}
    extends = {**_file_keys()["extends"], "description": "Group files that this section extends."}
    for section in sections.values():
        section["properties"]["extends"] = extends
    trainer = sections["TrainerSection"]
    names = trainer["then"]["propertyNames"]["enum"]
    trainer["then"] = {"propertyNames": {"anyOf": [{"enum": [*names, "extends"]}, {"pattern": _REMOVAL}]}}
    run = _accept_references({key: value for key, value in schema.items() if key != "$defs"})
    for key in run["properties"].keys() - _file_keys().keys():
        if key not in ("name", "output_dir", "seed", "imports"):
            run["properties"][key]["anyOf"].append({"$ref": "#/$defs/group"})
    definitions = {
        "reference": {"description": "A reference to another setting.", "type": "string", "pattern": r"\$\{"},
        "group": {"description": "The name of a file in configs/.", "type": "string", "pattern": r"^\w[\w.+-]*$"},
    }
    return {**run, "$defs": {**kept, **sections, **definitions}}


_REMOVAL = "^~[A-Za-z_]"


def _accept_references(section: Json) -> Json:
    properties = {key: _any_of(each, {"$ref": "#/$defs/reference"}) for key, each in section["properties"].items()}
    return {**section, "properties": properties, "patternProperties": {_REMOVAL: {"type": "null"}}}


def _clean(schema: Any) -> Any:
    """Return pydantic's schema without titles, with standard keywords, and with null instead of None."""
    if isinstance(schema, list):
        return [_clean(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned: Json = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "description" and isinstance(value, str):
            value = re.sub(r"\bNone\b", "null", " ".join(value.split()))
        is_length_of_list = key == "minLength" and schema.get("type") == "array"
        word = "minItems" if is_length_of_list else _LIMITS.get(key, key)
        cleaned[word] = value if key == "default" else _clean(value)
    return cleaned


def _insert_components(schema: Any, kind: str) -> Any:
    """Replace Component's marker with a reference to the component's kind."""
    if isinstance(schema, list):
        return [_insert_components(item, kind) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "component" in schema:
        kept = {key: value for key, value in schema.items() if key != "component"}
        return {"$ref": f"#/$defs/{kind}", **kept}
    return {key: _insert_components(value, kind) for key, value in schema.items()}


def _component(kind: str, type_names: Sequence[str]) -> Json:
    type_ = {
        "description": f"A built-in {kind}, package.module:Name, file.py:Name, or file.Name in the folder of its kind.",
        "anyOf": [{"enum": list(type_names)}, {"type": "string", "minLength": 1}],
    }
    properties: Json = {"type": type_}
    if kind == "model":
        limit = {"type": "integer", "minimum": 1}
        globs = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
        rule = {"match": globs, "until_step": limit, "until_epoch": limit}
        entries: list[Json] = [
            {"type": "string"},
            {"type": "object", "properties": rule, "required": ["match"], "additionalProperties": False},
        ]
        properties["freeze"] = {
            "description": "Globs over parameter names that are not trained, or not until a step or an epoch.",
            "anyOf": [*entries, {"type": "array", "items": {"anyOf": entries}}],
        }
    whole = {"type": "object", "properties": properties, "required": ["type"], "additionalProperties": True}
    return {
        "description": f"A {kind}: its type and the constructor's arguments; or the type alone.",
        "anyOf": [whole, type_],
    }


def _process() -> Json:
    """Return the schema of `data.process`: a function's name, its arguments and the settings of ProcessOptions."""
    options = _clean(ProcessOptions.model_json_schema())
    type_ = {
        "description": "The function: file.name for one in datasets/, file.py:name, or package.module:name.",
        "type": "string",
        "minLength": 1,
    }
    properties = {"type": type_, **options["properties"]}
    about = "A function with its arguments and the following settings, or its name."
    return {
        "description": about,
        "type": "object",
        "properties": properties,
        "required": ["type"],
        "additionalProperties": True,
    }


def _widen(sections: Json, type_names: Mapping[str, Sequence[str]]) -> None:
    """Add values that validators accept in addition to the types of the fields, and values that they reject."""
    properties = {name: section["properties"] for name, section in sections.items()}
    run, data, trainer = properties["RunConfig"], properties["DataSection"], properties["TrainerSection"]
    for key, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            # pydantic omits a key's description if its section has the same.
            run[key] = {"description": field.description, **_or_null(run[key])}
    runtime = properties["RuntimeSection"]
    runtime["mesh"] = _or_null(runtime["mesh"])
    run["writers"]["default"] = [each.type for each in RunConfig().writers]
    del run["name"]["default"]  # the file's name is used
    data["collator"]["default"] = RunConfig().data.collator.type
    sets = {**data["eval"], "propertyNames": {"pattern": "^[a-z][a-z0-9_-]*$", "not": {"enum": ["train", "type"]}}}
    data["eval"] = _any_of(sets, {"$ref": "#/$defs/dataset"}, {"type": "null"})
    ratios = {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 2, "maxItems": 3}
    data["split"] = {**data["split"], "anyOf": [ratios, {"$ref": "#/$defs/SplitSizes"}, {"type": "null"}]}
    data["process"]["anyOf"].insert(1, {"type": "string", "minLength": 1})
    loader = _clean(LoaderArguments.model_json_schema())
    data["loader"] = _or_null({**loader, "description": data["loader"]["description"]})
    trainer["optimizers"] = _or_null(trainer["optimizers"])
    evaluation = properties["EvaluationSection"]
    evaluation["metrics"] = _or_null(evaluation["metrics"])
    for mapping in (data["eval"], data["loader"], trainer["optimizers"], evaluation["metrics"]):
        mapping["default"] = {}
    match = properties["OptimizerSection"]
    match["match"] = _any_of(match["match"], {"type": "string"})
    axes = properties["MeshSection"]
    for name, axis in axes.items():
        one = [{"const": -1}, {"type": "integer", "minimum": 1}, {"type": "null"}]
        axes[name] = {**axis, "anyOf": one}
    # Which of the built-in trainers has an option is checked by `load`.
    known = [*trainer, *dict.fromkeys(name for each in TRAINER_OPTIONS.values() for name in each.model_fields)]
    trainer["type"]["anyOf"] = [{"enum": [*type_names["trainer"]]}, {"type": trainer["type"].pop("type")}]
    # A custom trainer may have further keys, its options.
    sections["TrainerSection"] |= {
        "additionalProperties": True,
        "if": {"properties": {"type": {"enum": [*BUILT_IN_TRAINERS]}}},
        "then": {"propertyNames": {"enum": known}},
    }


def _or_null(schema: Json) -> Json:
    return _any_of(schema, {"type": "null"})


def _any_of(first: Json, *others: Json) -> Json:
    """Return the schema that accepts any of these; description and default are kept at the top."""
    about = {key: value for key, value in first.items() if key in ("description", "default")}
    rest = {key: value for key, value in first.items() if key not in about}
    return {**about, "anyOf": [rest, *others]}


def _file_keys() -> Json:
    """Return the keys that are resolved when the file is read and are not in RunConfig."""
    names = {"type": "array", "items": {"type": "string"}}
    extends = "Packaged names or files, relative to this one, that this file extends; later ones win."
    project = "The folder that component files are relative to. Default: the folder of this file."
    return {
        "extends": {"description": extends, "anyOf": [{"type": "string"}, names, {"type": "null"}]},
        "project_dir": {"description": project, "type": "string"},
    }
