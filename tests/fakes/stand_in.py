"""Functions that tests set in the place of ours."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def stands_in_for(method: Callable[Concatenate[T, P], R]) -> Callable[[Callable[Concatenate[T, P], R]], Any]:
    """Has mypy hold the decorated function against the method whose place it takes; at runtime it does nothing.

    `monkeypatch.setattr` takes whatever it is given, and a test that needs a GPU seldom runs to say that it gives the
    signature of yesterday.
    """
    return lambda stand_in: stand_in
