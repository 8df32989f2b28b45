"""Tests with packages that are not in the environment, because they would change how transformers is imported.

`make` installs torchvision, timm, torchao and bitsandbytes in a folder of their own, and TRL in another one, because it
does not import next to that torchvision. A folder is on the path of a process that is started here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    "integrations": [
        "tests/build/test_vision_components.py",
        "tests/models/layers/test_published_nf4.py",
        "tests/test_ports.py::test_timm_imagefolder",
    ],
    "trl": ["tests/api/test_pages.py::test_the_page_for_trl_works_from_the_first_line_to_the_last"],
}


@pytest.mark.parametrize("folder", FILES)
def test_the_tests_of_these_packages_pass_and_none_is_skipped(folder):
    packages = Path(sys.prefix) / folder
    if not packages.is_dir():
        pytest.skip("the packages of integration tests are not installed")
    paths = [str(packages), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", *FILES[folder]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d+ passed", done.stdout) or "[100%]" in done.stdout
    assert "SKIPPED" not in done.stdout, done.stdout[-4000:]
