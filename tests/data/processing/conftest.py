"""What the tests of the processed-data cache share."""

import importlib.util
import itertools
import sys

import pytest

COUNTER = itertools.count()


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a module from its text, each time anew."""

    def load(text, name="clean"):
        number = next(COUNTER)
        path = tmp_path / f"{name}_{number}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"{name}_{number}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load
