"""Implementations of an interface, by the names that a configuration uses.

A table says where each class is and imports none of them: a process without torch reads the names, and a class that
needs CUDA is imported where it is used. A class of somebody else's is taken in the same way, by where it is:
`package.module:Class`.
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
    """Where an implementation is. Attributes: path: "package.module:Class"; devices: those that it works on."""

    path: str
    devices: tuple[str, ...] = DEVICES


class Choices(Generic[T]):
    """One table, in the order of preference where there is one.

    Attributes:
        interface: "package.module:Class" of what every implementation, also one that is not in the table, derives from.
    """

    def __init__(self, interface: str, choices: Mapping[str, Choice | str]) -> None:
        """Args: choices: by name; a bare path is for every device."""
        self.interface = interface
        self._choices = {name: Choice(c) if isinstance(c, str) else c for name, c in choices.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._choices)

    def for_device(self, device: str) -> tuple[str, ...]:
        """The names of those that work there."""
        return tuple(name for name, choice in self._choices.items() if device in choice.devices)

    def check(self, field: str, name: str, *, device: str = "", besides: Sequence[str] = ()) -> None:
        """Finds out whether a name is in the table, or has the form of a path; imports nothing.

        Args:
            field: what the name was given for, for the message.
            device: where it is to work; empty: anywhere.
            besides: other names that are right there.

        Raises:
            ValueError: the message names the field and what it may be.
        """
        if name in besides or is_path(name):
            return
        fitting = [*besides, *(self.for_device(device) if device else self.names)]
        if name in self._choices and name not in fitting:
            raise ValueError(f"{field} {name} does not work with device {device}: use one of {', '.join(fitting)}")
        if name not in fitting:
            nearest = difflib.get_close_matches(str(name), fitting, n=1)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise ValueError(
                f"{field} must be one of {', '.join(fitting)}, or the import path package.module:Class of a class of "
                f"your own, not {name!r}{hint}"
            )

    def load(self, name: str) -> type[T]:
        """The class of that name or at that path.

        Raises:
            ValueError: there is none, or it does not derive from the interface, or leaves some of it undefined; the
                message says what to do.
            ImportError: the name is in the table, and a package that its module needs is not installed.
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
    """Whether it has the form package.module:Class."""
    return isinstance(name, str) and _PATH.fullmatch(name) is not None


def _import_own(path: str) -> Any:
    """Raises ValueError: it cannot be imported; the message says what to do."""
    try:
        return _import(path)
    except ImportError as error:
        # Advice helps only if it is this module that is missing, and not one that it fails to import itself.
        is_missing = f"{path.partition(':')[0]}.".startswith(f"{error.name}.")
        advice = "; install it, or name its directory in PYTHONPATH" if is_missing else ""
        raise ValueError(f"{path} cannot be imported: {error}{advice}") from error
    except Exception as error:
        # A module of somebody's own may fail in any way while it is executed.
        raise ValueError(f"{path} cannot be imported: {error!r}") from error


def _import(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise ImportError(f"module {module_name} has no {attribute}")
    return getattr(module, attribute)
