"""Lists the components that a run file can name, with their parameters. Files are parsed, not executed."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import trainwright
from trainwright.config import TrainerSection
from trainwright.config.builtin import BUILT_INS, KIND_FOLDERS
from trainwright.config.trainer_options import REWARD_ARGUMENTS, TRAINER_OPTIONS
from trainwright.registry.plugins import installed
from trainwright.registry.resolve import PROJECT_PACKAGE
from trainwright.tracebacks import shown_path

PROVIDED: Mapping[str, tuple[str, ...]] = {
    "trainer": ("config", "task", "model", "optimizer", "train_dataset", "validation_dataset", "context"),
    "optimizer": ("params",),
    "writer": ("folder",),
    "dataset": ("run_seed",),
    "sampler": ("dataset", "data_source"),
}
"""The arguments that build/ passes to a kind of component, in addition to `project_dir`; a run file cannot set them."""

# These bases have no arguments of a run file; their files are among the largest of torch.
_EMPTY_BASES = {"torch.nn.Module", "torch.utils.data.Dataset", "torch.utils.data.IterableDataset"}
# Bases of classes that are not components.
_NOT_COMPONENTS = ("Error", "Exception", "Enum", "Protocol", "TypedDict")


class Parameter(NamedTuple):
    """An argument of a constructor. `default` is Python source, or None for a required argument."""

    name: str
    default: str | None
    annotation: str

    def __str__(self) -> str:
        return self.name if self.default is None else f"{self.name}={self.default}"


class Signature(NamedTuple):
    """The arguments that a run file can set; `open_to` names the receiver of further arguments, or is ""."""

    parameters: tuple[Parameter, ...]
    open_to: str = ""


@dataclass(frozen=True)
class Entry:
    """One component; `type` is its name in a run file."""

    kind: str
    type: str
    location: str
    """The file and line of its definition, as `file:line`."""
    doc: str
    """The whole docstring, or ""."""
    signature: Signature
    registered: tuple[str, ...] = ()
    """Short names that its file registers; a run file can use them if `imports` names that file."""
    distribution: str = ""
    """The installed package that declares it, with its version; "" for a built-in or a project's component."""

    @property
    def summary(self) -> str:
        """The first sentence of the docstring, or its first paragraph; torch wraps sentences over several lines."""
        paragraph = " ".join(self.doc.partition("\n\n")[0].split())
        first_line = self.doc.partition("\n")[0]
        return first_line if first_line.endswith(".") else paragraph.partition(". ")[0]


class Unreadable(NamedTuple):
    """A file that cannot be parsed."""

    location: str
    problem: str


class Catalogue(NamedTuple):
    """All components, kind by kind, and the project files that cannot be parsed."""

    entries: tuple[Entry, ...]
    unreadable: tuple[Unreadable, ...]


def read_catalogue(project_dir: Path, kinds: Iterable[str] = tuple(KIND_FOLDERS)) -> Catalogue:
    """Return the components of these kinds: built-in ones, those of installed packages and of `project_dir`."""
    library = _Library(project_dir)
    entries: list[Entry] = []
    unreadable: list[Unreadable] = []
    for kind in kinds:
        entries += [_built_in(library, kind, name, reference) for name, reference in BUILT_INS[kind].items()]
        for plugins in installed(kind).values():
            entries += [_built_in(library, kind, *plugin) for plugin in plugins]
        for path in sorted((project_dir / KIND_FOLDERS[kind]).glob("*.py")):
            if path.name.startswith("_"):
                continue
            module = library.open(path)
            if isinstance(module, Unreadable):
                unreadable.append(module)
            else:
                entries += [_project_entry(library, kind, module, each) for each in module.components(kind)]
    return Catalogue(tuple(entries), tuple(unreadable))


def _built_in(library: _Library, kind: str, type_name: str, reference: str, distribution: str = "") -> Entry:
    module_name, _, name = reference.partition(":")
    found = library.find(f"{module_name}.{name}")
    if found is None:  # not installed, or not defined by a class statement
        dotted = f"{module_name}.{name}"
        return Entry(kind, type_name, dotted, f"See {dotted}.", Signature((), dotted), distribution=distribution)
    module, definition = found
    doc = module.doc_of(definition)
    if not distribution and not module.name.startswith("trainwright."):
        # Docstrings of other libraries contain markup and formulas.
        doc = f"{doc.partition(chr(10) * 2)[0]}\n\nSee {module_name}.{name}."
    signature = library.signature(kind, module, definition)
    return Entry(kind, type_name, module.location(definition), doc, signature, distribution=distribution)


def _project_entry(library: _Library, kind: str, module: _Module, definition: _Definition) -> Entry:
    return Entry(
        kind,
        f"{module.path.stem}.{definition.name}",
        module.location(definition),
        module.doc_of(definition),
        library.signature(kind, module, definition),
        tuple(name for registered_kind, name in _registrations(definition) if registered_kind == kind),
    )


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class _Module:
    """A parsed file: its definitions, imports and constants."""

    name: str
    path: Path
    tree: ast.Module
    definitions: dict[str, _Definition] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    """A name in this file and the dotted name that it is imported from."""
    constants: dict[str, ast.expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in _statements(self.tree.body):
            if isinstance(node, _Definition):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.constants[node.targets[0].id] = node.value
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    shown = alias.asname or alias.name.partition(".")[0]
                    self.imported[shown] = alias.name if alias.asname else shown
            elif isinstance(node, ast.ImportFrom):
                origin = self._absolute(node)
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{origin}.{alias.name}"

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.path.name == "__init__.py" else self.name.split(".")[:-1]
        above = package[: len(package) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])

    def components(self, kind: str) -> Iterator[_Definition]:
        """Yield the definitions that a run file can name: public classes, registered functions and rewards."""
        names = _literal(self.constants.get("__all__", ast.Constant(None)))
        public = names if isinstance(names, list | tuple) else [*self.definitions]
        for name, definition in self.definitions.items():
            if name.startswith("_") or name not in public:
                continue
            if isinstance(definition, ast.ClassDef):
                bases = [ast.unparse(base) for base in definition.bases]
                if not any(base.endswith(_NOT_COMPONENTS) for base in bases):
                    yield definition
            elif any(_registrations(definition)) or (kind == "reward" and _is_reward(self, definition)):
                yield definition

    def dotted(self, expression: ast.expr) -> str:
        """Return the full dotted name of an expression such as `nn.Module` or `Dataset[int]`."""
        if isinstance(expression, ast.Subscript):
            return self.dotted(expression.value)
        first, dot, rest = ast.unparse(expression).partition(".")
        if first in self.definitions:
            return f"{self.name}.{first}{dot}{rest}"
        return f"{self.imported.get(first, first)}{dot}{rest}"

    def default(self, expression: ast.expr) -> str:
        """Return a default as Python source, with a constant of this file replaced by its value."""
        if isinstance(expression, ast.Name) and expression.id in self.constants:
            constant = self.constants[expression.id]
            return expression.id if _literal(constant, default=self) is self else ast.unparse(constant)
        return ast.unparse(expression)

    def location(self, definition: _Definition) -> str:
        return f"{shown_path(self.path)}:{definition.lineno}"

    def doc_of(self, definition: _Definition) -> str:
        """Return the docstring, also one that is assigned to `__doc__` after the class, as in torch."""
        assigned = [node for node in self.tree.body if isinstance(node, ast.Assign)]
        assigned = [node for node in assigned if ast.unparse(node.targets[0]) == f"{definition.name}.__doc__"]
        return ast.get_docstring(definition) or (_first_text(assigned[0].value) if assigned else "")


class _Library:
    """Finds and parses files by module name, each once, and reads constructors including those of bases."""

    def __init__(self, project_dir: Path) -> None:
        self._project_dir = project_dir
        self._modules: dict[Path, _Module] = {}
        self._roots: dict[str, Path | None] = {
            PROJECT_PACKAGE: project_dir,
            "trainwright": Path(trainwright.__file__).parent,
        }

    def open(self, path: Path, name: str | None = None) -> _Module | Unreadable:
        """Return the parsed file."""
        if path not in self._modules:
            if name is None:
                name = ".".join((PROJECT_PACKAGE, *path.relative_to(self._project_dir).with_suffix("").parts))
            try:
                tree = ast.parse(path.read_bytes(), filename=str(path))
            except SyntaxError as error:
                return Unreadable(f"{shown_path(path)}:{error.lineno or 1}", f"not valid Python: {error.msg}")
            except (OSError, ValueError, RecursionError) as error:
                return Unreadable(f"{shown_path(path)}:1", f"cannot be read: {error}")
            self._modules[path] = _Module(name, path, tree)
        return self._modules[path]

    def find(self, dotted: str, seen: frozenset[str] = frozenset()) -> tuple[_Module, _Definition] | None:
        """Return the definition of `module.name`, following re-exports; None if no file has it."""
        module_name, _, name = dotted.rpartition(".")
        if dotted in seen or not module_name:
            return None
        if module_name == "trainwright" and name in trainwright.__all__:
            module_name = trainwright._PUBLIC[name]  # imported lazily, without an import statement
        path = self._path(module_name)
        module = None if path is None else self.open(path, module_name)
        if not isinstance(module, _Module):
            return None
        if name in module.definitions:
            return module, module.definitions[name]
        return self.find(module.imported[name], seen | {dotted}) if name in module.imported else None

    def _path(self, module_name: str) -> Path | None:
        first, *rest = module_name.split(".")
        for root in (self._root(first), self._project_dir / first):
            if root is None:
                continue
            path = root.joinpath(*rest)
            for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
                if file.is_file():
                    return file
        return None

    def _root(self, package: str) -> Path | None:
        """Return the folder of a top-level package, which is not imported."""
        if package not in self._roots:
            try:
                spec = importlib.util.find_spec(package)
            except (ImportError, ValueError):
                spec = None
            folders = spec.submodule_search_locations if spec is not None else None
            file = spec.origin if spec is not None and spec.has_location else None
            # A module that is a single file is found as a folder without its suffix.
            self._roots[package] = Path(folders[0]) if folders else Path(file).with_suffix("") if file else None
        return self._roots[package]

    def signature(self, kind: str, module: _Module, definition: _Definition) -> Signature:
        """Return the arguments that a run file can set."""
        hidden = {"self", "cls", "project_dir", *PROVIDED.get(kind, ())}
        if kind == "trainer":
            # build/ calls the constructor; a run file can add the options that the code reads from the section.
            return Signature(tuple(self._trainer_options(module, definition)))
        if isinstance(definition, _Function):
            found = _arguments(module, definition)
            if kind == "reward" and _is_reward(module, definition):  # the rows have the required ones
                return Signature(tuple(one for one in found.parameters if one.default is not None))
        else:
            found = self._constructor(module, definition, seen=set()) or Signature(())
            # Set by Muon: build/ passes the kind of each parameter.
            hidden |= {"kinds"} if "needs_parameter_kinds" in _assigned(definition) else set()
        return Signature(tuple(one for one in found.parameters if one.name not in hidden), found.open_to)

    def _trainer_options(self, module: _Module, definition: _Definition) -> Iterator[Parameter]:
        """Yield the options that a trainer declares or a custom trainer reads, those of its bases first."""
        if not isinstance(definition, ast.ClassDef):
            return
        if module.name.startswith("trainwright."):
            yield from _options_declared(definition)
            return
        own = _options_read(definition)
        for base in definition.bases:
            found = self.find(module.dotted(base))
            if found is not None and found[1] is not definition:
                yield from (one for one in self._trainer_options(*found) if one.name not in own)
        yield from own.values()

    def _constructor(self, module: _Module, definition: ast.ClassDef, seen: set[str]) -> Signature | None:
        """Return the constructor's arguments; None if neither the class nor a known base has a constructor."""
        seen.add(f"{module.name}.{definition.name}")
        for node in definition.body:
            if isinstance(node, _Function) and node.name == "__init__":
                own = _arguments(module, node)
                return self._passed_on(module, definition, node, own, seen) if own.open_to else own
        fields = tuple(_fields(module, definition)) if _is_record(module, definition) else ()
        for base in definition.bases:
            inherited = self._inherited(module.dotted(base), seen)
            if inherited is not None:
                known = {one.name for one in fields}
                kept = tuple(one for one in inherited.parameters if one.name not in known)
                return Signature((*kept, *fields), inherited.open_to)
        return Signature(fields) if fields else None

    def _passed_on(
        self, module: _Module, definition: ast.ClassDef, init: _Function, own: Signature, seen: set[str]
    ) -> Signature:
        """Return the arguments of a constructor with **rest, including those of the base that receives **rest."""
        rest = init.args.kwarg.arg if init.args.kwarg else ""
        calls = [one for one in ast.walk(init) if isinstance(one, ast.Call)]
        calls = [one for one in calls if ast.unparse(one.func) == "super().__init__"]
        call = next((one for one in calls if rest in _unpacked(one)), None)
        if call is None:
            return own
        given = {word.arg for word in call.keywords if word.arg} | {one.name for one in own.parameters}
        for base in definition.bases:
            inherited = self._inherited(module.dotted(base), seen)
            if inherited is not None:
                # Positional arguments of the call set the first parameters of the base.
                left = inherited.parameters[len(call.args) :]
                added = tuple(one for one in left if one.name not in given)
                return Signature((*own.parameters, *added), inherited.open_to)
        return Signature(own.parameters)

    def _inherited(self, dotted: str, seen: set[str]) -> Signature | None:
        if dotted in _EMPTY_BASES or dotted in seen or dotted.partition(".")[0] in sys.stdlib_module_names:
            return None
        found = self.find(dotted)
        if found is None:
            return Signature((), dotted) if "." in dotted else None
        module, definition = found
        if f"{module.name}.{definition.name}" in seen or not isinstance(definition, ast.ClassDef):
            return None
        return self._constructor(module, definition, seen)


def _unpacked(call: ast.Call) -> list[str]:
    """Return the names that a call unpacks as keywords: `**rest`."""
    return [ast.unparse(word.value) for word in call.keywords if word.arg is None]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a file, including those in `if` and `try`."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements([*node.body, *(each for one in node.handlers for each in one.body), *node.orelse])
        else:
            yield node


def _arguments(module: _Module, function: _Function) -> Signature:
    """Return the parameters of a function."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    parameters = tuple(
        Parameter(
            one.arg,
            None if default is None else module.default(default),
            "" if one.annotation is None else ast.unparse(one.annotation).strip("'\""),
        )
        for one, default in pairs
        if one.arg not in ("self", "cls")
    )
    return Signature(parameters, f"**{arguments.kwarg.arg}" if arguments.kwarg else "")


def _is_reward(module: _Module, function: _Function) -> bool:
    """Return True for a function that is called with completions."""
    return any(one.name in REWARD_ARGUMENTS for one in _arguments(module, function).parameters)


def _is_record(module: _Module, definition: ast.ClassDef) -> bool:
    """Return True for a dataclass or a NamedTuple, whose fields are its arguments."""
    words = [one.func if isinstance(one, ast.Call) else one for one in definition.decorator_list]
    is_dataclass = any(module.dotted(word) == "dataclasses.dataclass" for word in words)
    return is_dataclass or any(module.dotted(base) == "typing.NamedTuple" for base in definition.bases)


def _fields(module: _Module, definition: ast.ClassDef) -> Iterator[Parameter]:
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        annotation, value = ast.unparse(node.annotation), node.value
        if "ClassVar" in annotation:
            continue
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
            words = {word.arg: word.value for word in value.keywords}
            if "init" in words and ast.unparse(words["init"]) == "False":
                continue
            value = words.get("default", words.get("default_factory"))
        yield Parameter(node.target.id, None if value is None else module.default(value), annotation)


def _options_declared(definition: ast.ClassDef) -> Iterator[Parameter]:
    """Yield the options of a built-in trainer: the fields of its `options_section`."""
    assigned = [ast.unparse(node) for node in definition.body if isinstance(node, ast.Assign)]
    for section in TRAINER_OPTIONS.values():
        if f"options_section = {section.__name__}" not in assigned:
            continue
        for option, declared in section.model_fields.items():
            kind = declared.annotation
            shown = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            yield Parameter(option, repr(declared.default), shown)


def _options_read(definition: ast.ClassDef) -> dict[str, Parameter]:
    """Return the options that a trainer's code reads: `self.config.trainer.NAME`."""
    known = {*TrainerSection.model_fields, "options"}
    options: dict[str, str | None] = {}
    nodes = [node for node in ast.walk(definition) if isinstance(node, ast.Attribute | ast.Call)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config.trainer"):
            options.setdefault(node.attr, None)
        elif isinstance(node, ast.Call) and len(node.args) == 3 and ast.unparse(node.func) == "getattr":
            owner, word, default = node.args
            if ast.unparse(owner).endswith("config.trainer") and isinstance(word, ast.Constant):
                options[str(word.value)] = ast.unparse(default)
    return {name: Parameter(name, default, "") for name, default in options.items() if name not in known}


def _assigned(definition: ast.ClassDef) -> set[str]:
    """Return the names of a class's attributes, without those of bases."""
    assignments = [node for node in definition.body if isinstance(node, ast.Assign)]
    return {target.id for node in assignments for target in node.targets if isinstance(target, ast.Name)}


def _registrations(definition: _Definition) -> Iterator[tuple[str, str]]:
    """Yield the kind and name of each `@register(kind, name)`."""
    for one in definition.decorator_list:
        if isinstance(one, ast.Call) and ast.unparse(one.func).split(".")[-1] == "register" and len(one.args) == 2:
            kind, name = (_literal(argument) for argument in one.args)
            if isinstance(kind, str) and isinstance(name, str):
                yield kind, name


def _first_text(expression: ast.expr) -> str:
    """Return the first constant of a concatenated string: `"…" + f"…"`."""
    while isinstance(expression, (ast.BinOp, ast.JoinedStr)):
        expression = expression.left if isinstance(expression, ast.BinOp) else expression.values[0]
    return str(expression.value).strip() if isinstance(expression, ast.Constant) else ""


def _literal(expression: ast.expr, default: object = None) -> object:
    """Return the value of a literal, or `default` for any other expression."""
    try:
        return ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return default
