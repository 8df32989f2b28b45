import functools
import importlib
import pickle
import subprocess
import sys

import pydantic
import pytest
from tests.messages import mentions, raises

from trainwright.config import Component, Origin, RunConfig
from trainwright.config.builtin import BUILT_INS, KIND_FOLDERS
from trainwright.errors import ComponentError, ConfigError, DataError
from trainwright.registry import resolve as registry
from trainwright.registry.resolve import check_arguments, find, import_modules, instantiate, register


@pytest.fixture(autouse=True)
def separate_registry(monkeypatch):
    """Leave no registered name and no project module behind."""
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in KIND_FOLDERS})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("trainwright_project"):
            del sys.modules[name]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def rejection_of(call, *arguments, **keywords):
    with pytest.raises(ComponentError) as rejection:
        call(*arguments, **keywords)
    return str(rejection.value)


# --- finding


def test_every_kind_has_a_folder_and_a_table_of_strings():
    assert BUILT_INS.keys() == KIND_FOLDERS.keys()
    assert all(":" in place for table in BUILT_INS.values() for place in table.values())


def test_an_import_path_is_found(tmp_path):
    assert find("model", "pydantic:BaseModel", project_dir=tmp_path) is pydantic.BaseModel


@pytest.mark.parametrize("kind", KIND_FOLDERS)
@pytest.mark.parametrize(
    "type_name",
    [
        *("os:system", "os:popen", "posix:system", "subprocess:Popen", "shutil:rmtree", "runpy:run_path"),
        *("builtins:eval", "builtins:exit", "builtins:str.join", "os:environ.get", "pathlib:Path", "torch:os.system"),
        *("mine.py:system", "mine.py:remove_tree"),
    ],
)
def test_what_is_python_s_own_is_no_component(tmp_path, kind, type_name):
    write(tmp_path / "mine.py", "from os import system\nfrom shutil import rmtree as remove_tree\n")
    with raises(ComponentError, f"{kind}s.type", type_name, at="run.yaml:3", golden=False):
        find(kind, type_name, project_dir=tmp_path, where=Origin("run.yaml", 3), label=f"{kind}s")


FACTORIES = """
import functools, operator
class Net:
    @classmethod
    def create(cls): return cls()
    def __call__(self): return self
def make(): return Net()
cached = functools.lru_cache(make)
partial = functools.partial(dict, a=1)
item = operator.itemgetter("a")
instance = Net()
"""


@pytest.mark.parametrize("name", ["Net", "Net.create", "make", "cached", "partial", "item", "instance"])
def test_factories_of_the_user_are_components(tmp_path, name):
    write(tmp_path / "code.py", FACTORIES)  # a name that Python has too
    assert callable(find("model", f"code.py:{name}", project_dir=tmp_path))


def test_functions_of_installed_packages_are_components(tmp_path):
    for name in ("torch.nn:Linear", "torch.nn.init:normal_", "torch.utils.data:default_collate", "torch.jit:load"):
        assert callable(find("model", name, project_dir=tmp_path))
    auto = "transformers:AutoModelForCausalLM"
    pytest.importorskip("transformers")
    assert isinstance(find("model", auto, project_dir=tmp_path), type)
    assert callable(find("model", f"{auto}.from_pretrained", project_dir=tmp_path))


def test_a_class_must_have_the_base_of_its_section(tmp_path):
    write(tmp_path / "net.py", "class Net: pass\nclass Other:\n    def __new__(cls): return Net()\ndef make(): pass\n")
    where = Origin("run.yaml", 3)
    with raises(ComponentError, "model.type", "net.py:Net", at="run.yaml:3"):
        find("model", "net.py:Net", project_dir=tmp_path, where=where, label="model", base=functools.partial)
    for name in ("Other", "make"):  # they may create anything
        assert find("model", f"net.py:{name}", project_dir=tmp_path, base=functools.partial)


def test_a_nested_class_is_found(tmp_path):
    write(tmp_path / "models" / "net.py", "class Net:\n    class Head: pass\n")
    assert find("model", "models/net.py:Net.Head", project_dir=tmp_path).__name__ == "Head"


@pytest.mark.parametrize("type_name", ["lion.Lion", "optimizers/lion.py:Lion", "optimizers.lion:Lion"])
def test_a_file_of_the_project_is_found_in_each_spelling(tmp_path, type_name):
    write(tmp_path / "optimizers" / "lion.py", "class Lion: pass\n")
    lion = find("optimizer", type_name, project_dir=tmp_path)
    assert lion.__module__ == "trainwright_project.optimizers.lion"
    assert find("optimizer", "lion.Lion", project_dir=tmp_path) is lion
    assert pickle.loads(pickle.dumps(lion)) is lion
    assert str(tmp_path) not in sys.path


def test_absolute_odd_and_outer_paths_are_found(tmp_path):
    odd = write(tmp_path / "project" / "my-parts" / "net.v2.py", "class Net: pass\n")
    outer = write(tmp_path / "shared" / "net.py", "class Net: pass\n")
    project = tmp_path / "project"
    assert find("model", "my-parts/net.v2.py:Net", project_dir=project) is find(
        "model", f"{odd}:Net", project_dir=project
    )
    net = find("model", "../shared/net.py:Net", project_dir=project)
    assert net is find("model", f"{outer}:Net", project_dir=project)
    assert pickle.loads(pickle.dumps(net)) is net


def test_project_files_import_each_other_relatively(tmp_path):
    write(tmp_path / "models" / "layers.py", "WIDTH = 3\n")
    write(tmp_path / "shared.py", "DEPTH = 4\n")
    write(
        tmp_path / "models" / "net.py",
        "from .layers import WIDTH\nfrom ..shared import DEPTH\nclass Net: size = (WIDTH, DEPTH)\n",
    )
    assert find("model", "net.Net", project_dir=tmp_path).size == (3, 4)


def test_a_file_is_executed_once(tmp_path):
    write(tmp_path / "models" / "net.py", "print('run')\nclass Net: pass\n")
    code = (
        "from trainwright.registry.resolve import find\n"
        "for name in ('net.Net', 'models/net.py:Net', 'models/../models/net.py:Net'):\n"
        "    find('model', name, project_dir='.')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "run\n"


def test_the_main_script_is_reused(tmp_path):
    write(
        tmp_path / "script.py",
        "from trainwright.registry.resolve import find\nclass Net: pass\n"
        "print(find('model', 'script.py:Net', project_dir='.') is Net)\n",
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_two_projects_with_equal_names_keep_their_own_files(tmp_path):
    for name in ("one", "two"):
        text = (
            "from trainwright.registry.resolve import register\nfrom .where import HERE\n"
            "@register('model', 'net')\nclass Net: here = HERE\n"
        )
        write(tmp_path / name / "models" / "net.py", text)
        write(tmp_path / name / "models" / "where.py", f"HERE = {name!r}\n")
    first = find("model", "net.Net", project_dir=tmp_path / "one")
    second = find("model", "net.Net", project_dir=tmp_path / "two")
    assert (first.here, second.here) == ("one", "two")
    assert find("model", "net", project_dir=tmp_path / "two") is second
    assert find("model", "net.Net", project_dir=tmp_path / "one") is first
    assert find("model", "net", project_dir=tmp_path / "one") is first


def test_an_unknown_name_is_rejected_with_the_nearest_and_the_known(tmp_path):
    write(tmp_path / "optimizers" / "lion.py", "raise SystemExit('reading must not run me')\nclass Lion: pass\n")
    text = rejection_of(
        find, "optimizer", "adamv", project_dir=tmp_path, where=Origin("run.yaml", 3), label="trainer.optimizer"
    )
    assert text == (
        'run.yaml:3: trainer.optimizer.type: no optimizer "adamv". Did you mean "adamw"? Known: adam, adamw, lion, '
        "muon, sgd; in optimizers/: lion.Lion; or use an import path such as my_pkg.module:Name, a file such as "
        f"optimizers/mine.py:Name, or mine.Name for a file in {tmp_path / 'optimizers'}."
    )
    assert 'Did you mean "lion.Lion"?' in rejection_of(find, "optimizer", "lino.Lion", project_dir=tmp_path)
    assert 'Did you mean "my_pkg.optim:Lion"?' in rejection_of(
        find, "optimizer", "my_pkg.optim.Lion", project_dir=tmp_path
    )


def test_a_file_without_the_name_lists_what_it_defines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "models" / "net.py", "from collections import deque\nclass Net: pass\ndef build(): pass\n")
    text = rejection_of(find, "model", "net.Nett", project_dir=tmp_path)
    assert text == 'models/net.py has no "Nett". Did you mean "Net"? It defines: Net, build.'


def test_a_missing_file_is_rejected_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "models" / "net.py", "")
    text = rejection_of(find, "model", "models/nett.py:Net", project_dir=tmp_path)
    assert text == f'no file models/nett.py. Did you mean "net.py"? Paths are relative to {tmp_path}.'


def test_an_error_in_the_users_file_names_its_line_and_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "models" / "net.py", "import json\n\njson.loads('{')\n")
    with pytest.raises(ComponentError) as rejection:
        find("model", "net.Net", project_dir=tmp_path)
    assert str(rejection.value).startswith("models/net.py cannot be imported: JSONDecodeError: Expecting property name")
    assert str(rejection.value).endswith("(models/net.py:3).")
    assert type(rejection.value.__cause__).__name__ == "JSONDecodeError"


def test_a_syntax_error_names_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "models" / "net.py", "class Net:\n    x = = 1\n")
    assert mentions(rejection_of(find, "model", "net.Net", project_dir=tmp_path), "SyntaxError", "models/net.py:2")


def test_a_file_that_exits_is_rejected(tmp_path):
    write(tmp_path / "models" / "net.py", "import sys\nsys.exit(3)\n")
    assert "SystemExit: 3" in rejection_of(find, "model", "net.Net", project_dir=tmp_path)


def test_an_absolute_import_within_the_project_is_explained(tmp_path):
    write(tmp_path / "models" / "layers_of_mine.py", "")
    write(tmp_path / "models" / "net.py", "import models.layers_of_mine\n")
    assert "import each other relatively" in rejection_of(find, "model", "net.Net", project_dir=tmp_path)


def test_a_failed_file_can_be_fixed_and_loaded(tmp_path):
    file = write(tmp_path / "models" / "net.py", "1 / 0\n")
    rejection_of(find, "model", "net.Net", project_dir=tmp_path)
    write(file, "class Net: pass  # fixed\n")
    assert find("model", "net.Net", project_dir=tmp_path).__name__ == "Net"


def test_what_cannot_be_called_is_rejected(tmp_path):
    write(tmp_path / "models" / "net.py", "Net = 3\n")
    text = rejection_of(find, "model", "net.Net", project_dir=tmp_path, label="model")
    assert text == "model: net.Net is a int, not a class or a function."


def test_a_datasets_package_is_rejected_by_name(tmp_path):
    write(tmp_path / "datasets" / "__init__.py", "")
    write(tmp_path / "datasets" / "mine.py", "class Mine: pass\n")
    text = rejection_of(find, "dataset", "mine.Mine", project_dir=tmp_path)
    assert mentions(text, "datasets/__init__.py")


def test_an_unknown_kind_is_rejected(tmp_path):
    assert rejection_of(find, "optimiser", "x", project_dir=tmp_path).startswith(
        'no kind "optimiser". Did you mean "optimizer"?'
    )


# --- registering


def test_a_registered_class_or_function_is_found_by_name(tmp_path):
    @register("optimizer", "tiger")
    class Lion:
        pass

    @register("hook", "wave")
    def wave():
        return "hello"

    assert find("optimizer", "tiger", project_dir=tmp_path) is Lion
    assert find("hook", "wave", project_dir=tmp_path)() == "hello"
    assert register("optimizer", "tiger")(Lion) is Lion


def test_a_registered_name_is_rejected_with_both_locations():
    @register("optimizer", "tiger")
    class Lion:
        pass

    class Other:
        pass

    text = rejection_of(register("optimizer", "tiger"), Other)
    assert text.startswith('The optimizer "tiger" is already registered by ')
    assert "Lion (" in text
    assert "Other (" in text
    assert "test_resolve.py:" in text
    assert "trainwright.optim.adamw:AdamW" in rejection_of(register("optimizer", "adamw"), Other)


def test_imported_modules_register_from_the_path_or_the_project(tmp_path):
    text = "from trainwright.registry.resolve import register\n@register('optimizer', 'tiger')\nclass Lion: pass\n"
    write(tmp_path / "my_parts_pkg" / "parts.py", text)
    write(tmp_path / "my_parts_pkg" / "__init__.py", "from . import parts\n")
    import_modules(["json", "my_parts_pkg"], project_dir=tmp_path)
    assert find("optimizer", "tiger", project_dir=tmp_path).__module__ == "trainwright_project.my_parts_pkg.parts"
    import_modules(["my_parts_pkg.parts", "my_parts_pkg/parts.py"], project_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("not_there.parts", 'no module "not_there.parts" on Python\'s path or in '),
        ("my-parts", '"my-parts" is not the name of a module'),
        ("broken_parts", "broken_parts.py cannot be imported: ValueError: inside"),
        ("needy_parts", "No module named 'not_installed_anywhere'"),
    ],
)
def test_a_module_that_cannot_be_imported_is_rejected(tmp_path, name, problem):
    write(tmp_path / "broken_parts.py", "raise ValueError('inside')\n")
    write(tmp_path / "needy_parts.py", "import not_installed_anywhere\n")
    text = rejection_of(import_modules, [name], project_dir=tmp_path, where=Origin("run.yaml", 2))
    assert text.startswith("run.yaml:2: imports: ")
    assert problem in text


def test_an_error_inside_an_installed_module_is_not_hidden(tmp_path, monkeypatch):
    write(tmp_path / "path" / "installed_but_broken.py", "raise TypeError('inside')\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    importlib.invalidate_caches()
    text = rejection_of(import_modules, ["installed_but_broken"], project_dir=tmp_path)
    assert "importing installed_but_broken failed: TypeError: inside" in text


# --- arguments and construction


class Adam:
    def __init__(self, params, lr=1e-3, *, betas=(0.9, 0.95), width=None):
        self.given = {"params": params, "lr": lr, "betas": betas, "width": width}


class Inherits(Adam):
    pass


class TakesAny:
    def __init__(self, **rest):
        self.given = rest


def test_a_wrong_argument_is_rejected_with_parameters_and_nearest():
    text = rejection_of(
        check_arguments, Inherits, {"lrr": 1}, label="trainer.optimizer", where="run.yaml:4", provided=["params"]
    )
    assert text == (
        'run.yaml:4: trainer.optimizer: Inherits has no argument "lrr". Did you mean "lr"? '
        "Its parameters: lr=0.001, betas=(0.9, 0.95), width=None."
    )


def test_a_missing_argument_is_named():
    text = rejection_of(check_arguments, Adam, {"lr": 1}, label="trainer.optimizer")
    assert text.startswith('trainer.optimizer: Adam needs the argument "params". Add it next to type.')


def test_any_argument_fits_where_the_signature_says_so_or_is_not_known():
    check_arguments(TakesAny, {"anything": 1}, label="x")
    check_arguments(type, {"anything": 1}, label="x")


def test_instantiate_calls_with_plain_arguments_and_what_is_provided(tmp_path):
    component = Component(Adam, lr=0.1, betas=[0.5, {"a": [1]}])
    built = instantiate("optimizer", component, project_dir=tmp_path, label="x", params=[1], unused=2)
    assert built.given == {"params": [1], "lr": 0.1, "betas": [0.5, {"a": [1]}], "width": None}
    assert type(built.given["betas"][1]) is dict
    assert type(built.given["betas"][1]["a"]) is list


def test_an_argument_in_the_config_wins_over_one_provided(tmp_path):
    built = instantiate("optimizer", Component(Adam, lr=0.1), project_dir=tmp_path, label="x", params=[1], lr=9)
    assert built.given["lr"] == 0.1


def test_a_constructor_that_accepts_any_argument_receives_all_that_is_provided(tmp_path):
    built = instantiate("optimizer", Component(TakesAny, a=1), project_dir=tmp_path, label="x", b=2)
    assert built.given == {"a": 1, "b": 2}


def test_an_error_in_the_constructor_names_component_location_and_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "models" / "net.py", "import json\nclass Net:\n    def __init__(self):\n        json.loads('{')\n")
    component = Component("net.Net").located_at(Origin("run.yaml", 7))
    with pytest.raises(ComponentError) as rejection:
        instantiate("model", component, project_dir=".", label="model")
    assert str(rejection.value).startswith("run.yaml:7: model: net.Net could not be built: JSONDecodeError: Expecting")
    assert str(rejection.value).endswith("(models/net.py:4).")
    assert rejection.value.__cause__ is not None


def reject_to_build():
    raise DataError("there are no samples.")


def test_a_trainwright_error_is_not_wrapped(tmp_path):
    with raises(DataError):
        instantiate("dataset", Component(reject_to_build), project_dir=tmp_path, label="data.train")


def test_a_package_that_lists_its_names_by_dir_alone_is_searched_too(tmp_path, monkeypatch):
    (tmp_path / "lazy_package.py").write_text("def __dir__():\n    return ['LlamaForCausalLM', '_private']\n")
    monkeypatch.syspath_prepend(tmp_path)
    with raises(ComponentError, "LlamaForCasualLM", "LlamaForCausalLM"):
        find("model", "lazy_package:LlamaForCasualLM", project_dir=tmp_path)


# --- groups


@pytest.mark.parametrize("name", ["tiny", "net.Net"])
def test_a_group_with_the_name_of_a_component_of_the_user_is_rejected(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "configs" / "model" / f"{name}.yaml", "type: models/net.py:Net\n")
    config = RunConfig.load(write(tmp_path / "run.yaml", f"seed: 1\nmodel: {name}\n"))
    registry.reject_ambiguous(config.groups, project_dir=tmp_path)
    register("model", "tiny")(pydantic.BaseModel)
    write(tmp_path / "models" / "net.py", "class Net: pass\n")
    with raises(ConfigError, "model", f"configs/model/{name}.yaml", at="run.yaml:2"):
        registry.reject_ambiguous(config.groups, project_dir=tmp_path)


def test_the_groups_of_a_setting_are_suggested(tmp_path):
    write(tmp_path / "configs" / "trainer" / "optimizer" / "gentle.yaml", "type: adamw\n")
    text = rejection_of(find, "optimizer", "gentel", project_dir=tmp_path, label="trainer.optimizer")
    assert 'Did you mean "gentle"?' in text
    assert "in configs/trainer/optimizer/: gentle;" in text
