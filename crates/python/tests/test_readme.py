"""The package's page does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import nibble
import pytest

pytestmark = pytest.mark.cpu_only
README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_there_is_an_example():
    assert BLOCKS and len(BLOCKS[0].splitlines()) <= 12


def test_the_examples_run_one_after_another(tmp_path):
    code = "\n".join(BLOCKS)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "mxfp4" in done.stdout and "saved in all" in done.stdout


def test_what_the_page_names_is_there():
    import nibble.torch

    for name in re.findall(r"`(\w+)", README.read_text().split("## What there is")[1].split("\n## ")[0]):
        assert hasattr(nibble.torch, name) or name in ("transformers", "nibble", "state_dict"), name


def test_the_package_is_typed():
    folder = Path(nibble.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_nibble.pyi").exists()
