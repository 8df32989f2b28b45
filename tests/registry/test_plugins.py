"""Components of installed packages: found by their metadata, imported when they are used, and never by accident."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from tests.faults.runs import config_of
from tests.messages import raises
from typer.testing import CliRunner

from trainwright import RunConfig, build_trainer, register
from trainwright.cli import app
from trainwright.config import Component
from trainwright.errors import ComponentError, TrustError
from trainwright.optim.lion import Lion
from trainwright.registry import resolve
from trainwright.registry.catalogue import read_catalogue
from trainwright.registry.plugins import installed

OPTIMIZER = '''
import torch


class Slowly(torch.optim.SGD):
    """SGD with a tenth of the rate.

    More about it.
    """

    def __init__(self, params, lr: float, share: float = 0.1):
        super().__init__(params, lr=lr * share)
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that installs a distribution as pip does: a module and its metadata on sys.path."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    made = []

    def install(name, entry_points, *, version="1.2", source=OPTIMIZER, as_package=False):
        module = name.replace("-", "_")
        if as_package:
            (site / module).mkdir()
            (site / module / "__init__.py").write_text("")
            (site / module / "optim.py").write_text(source)
        else:
            (site / f"{module}.py").write_text(source)
        facts = site / f"{module}-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (facts / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        made.append(module)
        resolve.forget_installed()
        return site

    yield install
    for module in made:
        for each in [each for each in sys.modules if each == module or each.startswith(f"{module}.")]:
            del sys.modules[each]
    resolve.forget_installed()


SLOWLY = """
    [trainwright.optimizer]
    slowly = slow_optim:Slowly
"""


def find(kind, name, folder):
    return resolve.find(kind, name, project_dir=folder)


def test_an_installed_component_is_named_like_a_built_in(install, tmp_path):
    install("slow-optim", SLOWLY)
    overrides = ("trainer.optimizer={type: slowly, lr: 0.5}", "trainer.max_steps=2", "trainer.schedule=null")
    trainer = build_trainer(config_of(tmp_path / "run", *overrides))
    assert type(trainer.optimizers["main"]).__name__ == "Slowly"
    assert trainer.optimizers["main"].param_groups[0]["lr"] == pytest.approx(0.05)
    trainer.train()
    assert "type: slowly" in (tmp_path / "run/config.yaml").read_text()


def test_its_arguments_are_checked_like_those_of_a_built_in(install, tmp_path):
    install("slow-optim", SLOWLY)
    with raises(ComponentError, "trainer.optimizer", "Slowly", "shar", at="trainer.optimizer={type: slowly, shar: 1}"):
        build_trainer(config_of(tmp_path / "run", "trainer.optimizer={type: slowly, shar: 1}"))


def test_listing_reads_metadata_and_files_and_imports_nothing(install, tmp_path):
    install("slow-optim", SLOWLY)
    install("quick-optim", "[trainwright.optimizer]\nquick = quick_optim.optim:Slowly", as_package=True)
    found = {entry.type: entry for entry in read_catalogue(tmp_path, ["optimizer"]).entries if entry.distribution}
    assert {name: entry.distribution for name, entry in found.items()} == {
        "slowly": "slow-optim 1.2",
        "quick": "quick-optim 1.2",
    }
    for entry in found.values():
        assert entry.summary == "SGD with a tenth of the rate."
        assert [str(each) for each in entry.signature.parameters] == ["lr", "share=0.1"]
    assert found["quick"].location.endswith("quick_optim/optim.py:5")
    assert not {"slow_optim", "quick_optim"} & set(sys.modules)


def test_components_shows_the_distribution(install, tmp_path):
    install("slow-optim", SLOWLY)
    listed = CliRunner().invoke(app, ["components", "optimizer", "--project", str(tmp_path)])
    assert "SGD with a tenth of the rate. (from slow-optim 1.2)" in listed.output
    shown = CliRunner().invoke(app, ["components", "optimizer", "slowly", "--project", str(tmp_path)])
    assert "Installed with slow-optim 1.2." in shown.output
    assert "More about it." in shown.output
    assert "type: slowly" in shown.output


def test_a_name_of_a_built_in_raises_when_it_is_used_and_import_paths_still_work(install, tmp_path):
    install("my-adamw", "[trainwright.optimizer]\nadamw = my_adamw:Slowly")
    with raises(ComponentError, "adamw", "trainwright.optim.adamw:AdamW", "my-adamw 1.2", "my_adamw:Slowly"):
        find("optimizer", "adamw", tmp_path)
    assert "my_adamw" not in sys.modules
    assert find("optimizer", "sgd", tmp_path) is torch.optim.SGD
    assert find("optimizer", "trainwright.optim.adamw:AdamW", tmp_path).__name__ == "AdamW"
    assert find("optimizer", "my_adamw:Slowly", tmp_path).__name__ == "Slowly"


def test_a_name_of_two_packages_raises_when_it_is_used(install, tmp_path):
    install("slow-optim", SLOWLY)
    install("other-optim", "[trainwright.optimizer]\nslowly = other_optim:Slowly", version="3.0")
    with raises(ComponentError, "slowly", "slow-optim 1.2", "other-optim 3.0"):
        find("optimizer", "slowly", tmp_path)
    assert len(installed("optimizer")["slowly"]) == 2


def test_a_name_that_the_project_registers_too_raises_unless_it_is_the_same_class(install, tmp_path, monkeypatch):
    install("slow-optim", SLOWLY)
    monkeypatch.setattr(resolve, "_registered", {kind: {} for kind in resolve._registered})
    plugin = find("optimizer", "slowly", tmp_path)
    register("optimizer", "slowly")(plugin)
    assert find("optimizer", "slowly", tmp_path) is plugin
    resolve._registered["optimizer"]["slowly"] = Lion
    with raises(ComponentError, "slowly", "trainwright.optim.lion:Lion", "slow-optim 1.2"):
        find("optimizer", "slowly", tmp_path)


@pytest.mark.parametrize(
    ("source", "mention"),
    [
        ("raise ZeroDivisionError('no')", "ZeroDivisionError"),
        ("import nothing_like_it", "nothing_like_it"),
        ("", "Slowly"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(install, tmp_path, source, mention):
    install("slow-optim", SLOWLY, source=source)
    with raises(ComponentError, "slowly", "slow-optim 1.2", mention):
        find("optimizer", "slowly", tmp_path)


def test_an_unknown_name_suggests_installed_ones(install, tmp_path):
    install("slow-optim", SLOWLY)
    with raises(ComponentError, 'Did you mean "slowly"', golden=False):
        find("optimizer", "slowli", tmp_path)


def test_a_package_that_is_installed_after_an_error_is_found(install, tmp_path, monkeypatch):
    site = install("unrelated", "[console_scripts]\nx = unrelated:main")
    with pytest.raises(ComponentError):
        find("optimizer", "slowly", tmp_path)
    monkeypatch.setattr(resolve, "forget_installed", lambda: None)
    facts = site / "slow_optim-1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-optim\nVersion: 1.2\n")
    (facts / "entry_points.txt").write_text(textwrap.dedent(SLOWLY))
    (site / "slow_optim.py").write_text(OPTIMIZER)
    assert find("optimizer", "slowly", tmp_path).__name__ == "Slowly"
    del sys.modules["slow_optim"]


def test_the_run_folder_of_somebody_else_does_not_run_an_installed_component(install, tmp_path):
    install("slow-optim", SLOWLY)
    overrides = ("trainer.optimizer={type: slowly, lr: 0.5}", "trainer.max_steps=2", "trainer.schedule=null")
    build_trainer(config_of(tmp_path / "run", *overrides)).train()
    path = tmp_path / "run/config.yaml"
    path.write_text(path.read_text().replace("max_steps: 2", "max_steps: 3"))  # no longer signed
    with raises(TrustError, "trainer.optimizer.type: slowly"):
        build_trainer(RunConfig.load(path))
    assert build_trainer(RunConfig.load(path, trust=True)).step == 2


def test_every_kind_has_its_group(install, tmp_path):
    kinds = list(resolve.KIND_FOLDERS)
    install("slow-optim", "\n".join(f"[trainwright.{kind}]\nown_{kind} = slow_optim:Slowly" for kind in kinds))
    for kind in kinds:
        assert find(kind, f"own_{kind}", tmp_path).__name__ == "Slowly"


def test_a_plugin_is_built_as_a_component_of_python_code(install, tmp_path):
    install("slow-optim", SLOWLY)
    parameter = torch.nn.Parameter(torch.ones(1))
    made = resolve.instantiate(
        "optimizer", Component("slowly", lr=1.0, share=0.5), project_dir=tmp_path, label="x", params=[parameter]
    )
    assert made.param_groups[0]["lr"] == 0.5


def test_importing_trainwright_reads_no_metadata(install):
    site = install("slow-optim", SLOWLY)
    program = "import sys, trainwright; print('importlib.metadata' in sys.modules, 'slow_optim' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
