"""Tests with packages that are not in the environment, because they would change how transformers is imported.

`make` installs torchvision, timm, torchao and bitsandbytes in a folder of their own, which is on the path of the
processes that are started here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = Path(sys.prefix) / "integrations"
FILES = [
    "tests/build/test_vision_components.py",
    "tests/models/layers/test_published_nf4.py",
    "tests/test_ports.py::test_timm_imagefolder",
]


@pytest.mark.skipif(not PACKAGES.is_dir(), reason="the packages of integration tests are not installed")
def test_the_tests_of_these_packages_pass_and_none_is_skipped():
    paths = [str(PACKAGES), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d+ passed", done.stdout) or "[100%]" in done.stdout
    assert "SKIPPED" not in done.stdout, done.stdout[-4000:]
