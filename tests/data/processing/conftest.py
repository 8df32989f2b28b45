"""What the tests of the processed-data cache share."""

import importlib.util
import itertools
import sys

import pytest

COUNTER = itertools.count()


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a module from its text, each time anew, under the same name."""

    def load(text, name="clean"):
        path = tmp_path / f"{name}_{next(COUNTER)}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load
