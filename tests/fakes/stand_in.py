"""Type checks for replacement functions in tests."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def stands_in_for(method: Callable[Concatenate[T, P], R]) -> Callable[[Callable[Concatenate[T, P], R]], Any]:
    """Make mypy check the decorated function against the method it replaces; no effect at runtime.

    `monkeypatch.setattr` accepts any value, and GPU tests run too seldom to reveal an outdated signature.
    """
    return lambda stand_in: stand_in
