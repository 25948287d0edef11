"""The tree of tests mirrors the code, and every list of packages has them all."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.logs import PACKAGES as LOGGED
from tests.unit.test_imports import PACKAGES

ROOT = Path(__file__).parents[2]
# What these test is not one file: documents, scripts, and what spans packages.
WITHOUT_SOURCE = ("benchmarks", "docs", "examples", "scenarios")


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py" and path.parent != ROOT / "tandem/v1":
                yield path.relative_to(ROOT)


def files_of_tests(kind: str) -> Iterator[Path]:
    for path in sorted((ROOT / "tests" / kind).rglob("test_*.py")):
        relative = path.relative_to(ROOT / "tests" / kind)
        if len(relative.parts) > 1 and relative.parts[0] not in WITHOUT_SOURCE:
            yield relative


def sources_of(test_file: Path) -> list[Path]:
    """The source files that a test file is for: of its name, or of a name that its own begins with, or all of a folder
    whose name it has."""
    stem, folder = test_file.stem.removeprefix("test_"), test_file.parent
    named = [s for s in sources() if s.parent == folder and (stem == s.stem or stem.startswith(f"{s.stem}_"))]
    return named or [s for s in sources() if s.parent == folder and stem == folder.name]


@pytest.mark.parametrize("kind", ["unit", "gpu"])
def test_every_test_file_is_where_its_source_leads(kind: str) -> None:
    lost = [str(path) for path in files_of_tests(kind) if not sources_of(path)]
    assert lost == []


def test_every_list_of_packages_has_them_all() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(LOGGED) == set(PACKAGES)
    assert set(project["tool"]["setuptools"]["packages"]["find"]["include"]) == {f"{name}*" for name in PACKAGES}
    assert set(project["tool"]["mypy"]["files"]) == {*PACKAGES, "benchmarks"}
    there = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert there == set(PACKAGES)
