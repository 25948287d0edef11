"""Implementations of an interface, by the names used in configurations.

A table holds import paths and imports nothing, so processes without torch or CUDA can read the names. A user's class is
named by its own path, `package.module:Class`.
"""

import difflib
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from tandem.config import DEVICES

T = TypeVar("T")

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Choice(NamedTuple):
    path: str
    devices: tuple[str, ...] = DEVICES


class Choices(Generic[T]):
    """A table of implementations of `interface` (package.module:Class), in order of preference."""

    def __init__(self, interface: str, choices: Mapping[str, Choice | str]) -> None:
        self.interface = interface
        self._choices = {name: Choice(c) if isinstance(c, str) else c for name, c in choices.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._choices)

    def for_device(self, device: str) -> tuple[str, ...]:
        return tuple(name for name, choice in self._choices.items() if device in choice.devices)

    def check(self, field: str, name: str, *, device: str = "", besides: Sequence[str] = ()) -> None:
        """Check that a name is in the table or in `besides`, or has the form of a path. Imports nothing.

        Args:
            field: option that was given, for the message.
            device: required device, or "" for any.

        Raises:
            ValueError: the message names the field and its valid values.
        """
        if name in besides or is_path(name):
            return
        fitting = [*besides, *(self.for_device(device) if device else self.names)]
        if name in self._choices and name not in fitting:
            raise ValueError(f"`{field}` {name} does not work with `device` {device}: use one of {', '.join(fitting)}")
        if name not in fitting:
            nearest = difflib.get_close_matches(str(name), fitting, n=1)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise ValueError(
                f"`{field}` must be one of {', '.join(fitting)}, or the import path package.module:Class of a class of "
                f"your own, not {name!r}{hint}"
            )

    def load(self, name: str) -> type[T]:
        """Import the class with this name or path.

        Raises:
            ValueError: it does not exist, does not derive from the interface, or is abstract.
            ImportError: a package needed by a class of the table is not installed.
        """
        is_known = name in self._choices
        path = self._choices[name].path if is_known else name
        found = _import(path) if is_known else _import_own(path)
        interface = _import(self.interface)
        if not (isinstance(found, type) and issubclass(found, interface)):
            raise ValueError(f"{path} must be a class that derives from {self.interface.replace(':', '.')}")
        if inspect.isabstract(found):
            missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            raise ValueError(f"{path} cannot be made: it does not define {missing}")
        return found


def is_path(name: str) -> bool:
    return isinstance(name, str) and _PATH.fullmatch(name) is not None


def _import_own(path: str) -> Any:
    try:
        return _import(path)
    except ImportError as error:
        # Not for the module's own missing imports.
        is_missing = f"{path.partition(':')[0]}.".startswith(f"{error.name}.")
        advice = "; install it, or name its directory in PYTHONPATH" if is_missing else ""
        raise ValueError(f"{path} cannot be imported: {error}{advice}") from error
    except Exception as error:
        raise ValueError(f"{path} cannot be imported: {error!r}") from error


def _import(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise ImportError(f"module {module_name} has no {attribute}")
    return getattr(module, attribute)
