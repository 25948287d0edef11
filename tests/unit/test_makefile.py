"""`make` on an incomplete machine explains the problem, and works once it is fixed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "constraints", tmp_path / "constraints")
    return tmp_path


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def set_up(checkout: Path, python: Path) -> subprocess.CompletedProcess[str]:
    """Make the environment with a pip that installs nothing."""
    command = ["make", f"PYTHON={python}", "PIP=true", ".venv/.runtime"]
    # Do not pass flags of an outer `make test`.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)


def test_old_python_is_named_and_leaves_no_environment(checkout: Path) -> None:
    old = script(checkout / "bin/python3", "exit 1")
    result = set_up(checkout, old)
    assert result.returncode == 2
    assert "Python 3.11 or later is needed" in result.stderr and str(old) in result.stderr
    assert not (checkout / ".venv").exists()


def test_environment_without_pip_is_remade(checkout: Path) -> None:
    """On Debian, python3 without python3-venv fails and leaves such an environment."""
    script(checkout / ".venv/bin/python", "exit 1")
    python = script(checkout / "bin/python3", f'echo "$*" >>{checkout}/calls')
    result = set_up(checkout, python)
    assert result.returncode == 0, result.stderr
    assert (checkout / "calls").read_text().splitlines()[-1] == "-m venv .venv"


def test_working_environment_is_kept(checkout: Path) -> None:
    script(checkout / ".venv/bin/python", "exit 0")
    result = set_up(checkout, script(checkout / "bin/python3", "exit 1"))
    assert result.returncode == 0, result.stderr
