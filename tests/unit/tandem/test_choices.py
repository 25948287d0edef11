"""Names of implementations, and user-defined classes."""

import sys
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from tandem.choices import Choice, Choices, is_path


class Shape:
    """The table's interface."""


class Square(Shape):
    pass


class Circle(Shape):
    pass


class Unfinished(Shape, ABC):
    @abstractmethod
    def area(self) -> float: ...


class Stranger:
    pass


HERE = "tests.unit.tandem.test_choices"
SHAPES: Choices[Shape] = Choices(
    f"{HERE}:Shape",
    {"square": f"{HERE}:Square", "circle": Choice(f"{HERE}:Circle", ("cuda",)), "absent": "nowhere.at.all:Triangle"},
)


def test_names_are_known_without_an_import() -> None:
    assert SHAPES.names == ("square", "circle", "absent")
    assert SHAPES.for_device("cpu") == ("square", "absent")
    assert SHAPES.for_device("cuda") == SHAPES.names
    assert "nowhere" not in sys.modules


@pytest.mark.parametrize("name", ["square", f"{HERE}:Circle"])
def test_a_class_is_found_by_name_or_by_path(name: str) -> None:
    SHAPES.check("shape", name)
    assert issubclass(SHAPES.load(name), Shape)


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        (
            "sqare",
            "",
            r"`shape` must be one of none, square, .* not 'sqare' \(did you mean 'square'\?\)$",
        ),
        ("", "", "not ''$"),
        ("circle", "cpu", "`shape` circle does not work with `device` cpu: use one of none, square, absent$"),
        ("a module:Class", "", "`shape` must be one of"),
        ("module:", "", "`shape` must be one of"),
    ],
)
def test_unknown_name_is_refused_with_the_choices(name: str, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SHAPES.check("shape", name, device=device, besides=("none",))


def test_right_name_in_another_table() -> None:
    SHAPES.check("shape", "none", besides=("none",))
    SHAPES.check("shape", "circle", device="cuda")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{HERE}:Stranger", f"{HERE}:Stranger must be a class that derives from {HERE}.Shape"),
        (f"{HERE}:Unfinished", f"{HERE}:Unfinished cannot be made: it does not define area$"),
        (f"{HERE}:HERE", "must be a class that derives from"),
        (f"{HERE}:Missing", f"module {HERE} has no Missing"),
        ("no_such_package.shapes:Mine", "install it, or name its directory in PYTHONPATH"),
        (f"{HERE}.deeper:Mine", "cannot be imported"),
    ],
)
def test_unusable_class_is_refused(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SHAPES.load(path)


def test_failed_import_inside_a_module_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy_shapes.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"'a_package_that_is_not_there'$"):
        SHAPES.load("needy_shapes:Mine")


def test_error_inside_a_custom_module_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_shapes.py").write_text("class Mine(:\n")
    (tmp_path / "failing_shapes.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"broken_shapes:Mine cannot be imported: SyntaxError"):
        SHAPES.load("broken_shapes:Mine")
    with pytest.raises(ValueError, match=r"failing_shapes:Mine cannot be imported: ZeroDivisionError"):
        SHAPES.load("failing_shapes:Mine")


def test_missing_package_is_named() -> None:
    with pytest.raises(ImportError, match="nowhere"):
        SHAPES.load("absent")


def test_form_of_class_paths() -> None:
    assert is_path("package.module:Class") and is_path("module:Class")
    assert not any(map(is_path, ("lru", "dfs-weight", "module.Class", "a:b:c", ":Class", "module:", "")))
