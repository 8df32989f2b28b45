"""The rules that keep the house a house, read from the sources with `ast`."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from trainwright.config import builtin as built_ins
from trainwright.config.sections import BUILT_IN_TRAINERS
from trainwright.registry import resolve as registry

PACKAGE = Path(__file__).parents[1] / "src" / "trainwright"
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8"))
    for path in PACKAGE.rglob("*.py")
    if "templates" not in path.relative_to(PACKAGE).parts  # what users get, written as users write
}

ROWS = (
    ("safe_text", "cpu"),
    ("errors", "log", "tracebacks"),
    ("progress",),
    ("config", "user_code", "http_access"),
    ("registry",),
    ("backends", "events"),
    ("models", "data", "parallel"),
    ("writers", "memory", "optim", "checkpoint", "benchmarks"),
    ("compile", "anomaly", "watch"),
    ("loop",),
    ("trainers", "hooks", "autotune"),
    ("build",),
    ("export", "launch", "analysis"),
    ("api",),
    ("commands",),
    ("cli", "__main__"),
)
"""The import order: a package may import those of earlier rows and its own modules, not others of its row."""
ROW_OF = {name: number for number, names in enumerate(ROWS) for name in names}


def package_of(path_or_module: str) -> str:
    """Returns the folder or file directly below trainwright."""
    return path_or_module.replace("/", ".").removesuffix(".py").split(".")[0]


def imported_packages(tree: ast.AST, file: str) -> list[tuple[str, int]]:
    """Returns what a file imports of trainwright, TYPE_CHECKING and function bodies included."""
    modules: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            if node.module == "trainwright":
                modules += [(f"trainwright.{alias.name}", node.lineno) for alias in node.names]
            else:
                modules.append((node.module or "", node.lineno))
    inside = [(name.removeprefix("trainwright."), line) for name, line in modules if name.startswith("trainwright.")]
    return [(package_of(name), line) for name, line in inside]


def test_a_file_imports_only_rows_before_its_own():
    wrong = []
    for file, tree in SOURCES.items():
        if file == "__init__.py":
            continue  # the public names come from everywhere, lazily
        own = package_of(file)
        for package, line in imported_packages(tree, file):
            is_entry = own == "__main__" and package == "cli"
            if package != own and ROW_OF[package] >= ROW_OF[own] and not is_entry:
                wrong.append(f"{file}:{line} imports {package}")
    assert wrong == []


def test_the_rows_name_every_package():
    assert {package_of(file) for file in SOURCES} - {"__init__"} <= ROW_OF.keys()


def test_modules_import_each_other_without_a_cycle():
    files = {file.removesuffix(".py").replace("/", "."): tree for file, tree in SOURCES.items()}
    graph: dict[str, set[str]] = {}
    for module, tree in files.items():
        names = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainwright":
                whole = (node.module or "").removeprefix("trainwright").removeprefix(".")
                inner = {f"{whole}.{alias.name}".removeprefix(".") for alias in node.names}
                # `from trainwright.config import yaml_text` needs the module that it names, not all of the folder.
                names |= {name for name in inner if name in files} or {whole}
        graph[module] = {name if name in files else f"{name}.__init__" for name in names} & files.keys()
    finished: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a cycle: {' → '.join([*way, module])}"
        if module not in finished:
            for each in graph[module] - {module}:
                visit(each, (*way, module))
            finished.add(module)

    for module in graph:
        visit(module, ())
    assert finished == graph.keys()


def test_there_is_one_backward_in_the_package():
    of_tensors = [
        f"{file}:{node.lineno}"
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        # `update.backward(self.run_forward(piece))` adds a micro-batch; a tensor's backward takes nothing here.
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "update")
    ]
    assert len(of_tensors) == 1, of_tensors
    assert of_tensors[0].startswith("loop/update.py:")


def test_no_folder_is_called_utils_or_the_like():
    names = set(chain.from_iterable(Path(file).with_suffix("").parts for file in SOURCES))
    assert names & {"utils", "util", "common", "core", "base", "misc", "helpers"} == set()


def test_nothing_is_read_with_pickle():
    wrong = []
    for file, tree in SOURCES.items():
        if file == "models/pretrained.py":
            continue  # other people's weights, when the user allows it, and only tensors of them
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wrong += [f"{file}:{node.lineno}" for alias in node.names if alias.name in ("pickle", "dill", "shelve")]
            elif (
                isinstance(node, ast.ImportFrom) and node.module in ("pickle", "dill", "shelve", "torch.serialization")
            ) or (
                isinstance(node, ast.Attribute)
                and node.attr in ("load", "save")
                and isinstance(node.value, ast.Name)
                and node.value.id in ("torch", "pickle")
            ):
                wrong.append(f"{file}:{node.lineno}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("load", "save"):
                # Elsewhere it is the name of the option by which users allow pickled weights.
                allows = [each.value for each in node.keywords if each.arg == "allow_pickle"]
                wrong += [f"{file}:{node.lineno}" for value in allows if ast.unparse(value) != "False"]
    assert wrong == []


def test_only_backends_ask_what_kind_of_device_there_is():
    wrong = []
    for file, tree in SOURCES.items():
        if file.startswith("backends/"):
            continue
        for node in ast.walk(tree):
            asks = isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "is_cpu", "is_available")
            if isinstance(node, ast.Compare):
                words = " ".join(ast.unparse(side) for side in (node.left, *node.comparators))
                kinds = ("'cuda'", "'cpu'", "'tpu'", "'xla'", "'mps'")
                asks = "device.type" in words or ("device" in words and any(kind in words for kind in kinds))
            if asks and "dist.is_available" not in ast.unparse(node):
                wrong.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def test_help_and_config_need_no_torch():
    program = (
        "import sys, trainwright\n"
        "import trainwright.cli, trainwright.registry.resolve, trainwright.user_code.locations\n"
        "import trainwright.config, trainwright.launch.local\n"
        "import trainwright.commands.train, trainwright.commands.evaluate\n"
        "import trainwright.commands.components, trainwright.commands.config, trainwright.commands.runs\n"
        "import trainwright.commands.new, trainwright.commands.explain, trainwright.commands.watch\n"
        "heavy = {'torch', 'numpy', 'safetensors', 'tokenizers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_live_page_needs_no_torch():
    program = "import sys, trainwright.watch.server, trainwright.watch.report\nassert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["config", "user_code", "registry", "launch", "cli", "commands", "watch"])
def test_packages_without_torch_do_not_import_it_at_module_level(package):
    found = [
        f"{file}:{node.lineno}"
        for file, tree in SOURCES.items()
        if package_of(file) == package
        for node in tree.body
        if (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "torch" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch")
    ]
    assert found == []


def test_the_config_knows_the_registry_s_trainers():
    assert set(BUILT_IN_TRAINERS) == set(built_ins.BUILT_INS["trainer"])


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in built_ins.BUILT_INS.items() for name in names]
)
def test_each_built_in_is_there(kind, name):
    module, _, attribute = built_ins.BUILT_INS[kind][name].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))
    assert registry.find(kind, name, project_dir=Path.cwd()) is not None


def test_the_kinds_of_built_ins_are_the_kinds_of_folders():
    assert built_ins.BUILT_INS.keys() == built_ins.KIND_FOLDERS.keys()


def test_each_module_says_what_it_is():
    assert [file for file, tree in SOURCES.items() if not ast.get_docstring(tree)] == []


def test_every_function_is_annotated():
    bare = []
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            # To Triton an annotation is part of the kernel.
            if isinstance(node, ast.FunctionDef) and "triton.jit" not in map(ast.unparse, node.decorator_list):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                missing = [one.arg for one in arguments if one.annotation is None and one.arg not in ("self", "cls")]
                if missing or node.returns is None:
                    bare.append(f"{file}:{node.lineno} {node.name}")
    assert bare == []


def test_module_globals_are_constants_the_logger_the_two_stacks_and_the_terminal():
    allowed = {"_status", "logger", "app", "_stack", "_registered", "_other_projects", "_update_parameters"}
    mutable = []
    for file, tree in SOURCES.items():
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if not isinstance(target, ast.Name) or target.id in allowed:
                continue
            # A constant is in capitals; a type alias or a TypeVar is a name in capital letters' style.
            if not (target.id.lstrip("_")[:1].isupper() or target.id.startswith("__")):
                mutable.append(f"{file}:{node.lineno} {target.id}")
    assert mutable == []
