"""How the fields of a configuration are options: flags of a command, keys of a YAML file, rows of the documentation."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, get_args, get_origin

from tandem.options import OPTION

_KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping",
    bool: "true or false",
    type(None): "nothing",
}
# YAML reads off and on as false and true; by which index they are here.
_SWITCHED = ("off", "on")


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: the flag without its dashes in front, and the key in the YAML file.
        field: of the configuration.
        type: of its value: str, int, float, or bool for a flag without a value.
        group: under which help and documentation show it.
        help: what it means, in a line of text.
        default: of the field; None if it must be given.
        metavar: what stands for its value in the help.
        shown: what help and documentation say in place of the default.
        choices: the names that it may have.
        takes_path: whether it may also be the import path of a class (tandem.choices), which the field's owner checks.
        is_list: may be given several times; a list in the file.
        detail: what the documentation says besides `help`, in Markdown.
    """

    name: str
    field: str
    type: type
    group: str
    help: str
    default: Any = None
    metavar: str = ""
    shown: str = ""
    choices: tuple[str, ...] = ()
    takes_path: bool = False
    is_list: bool = False
    detail: str = ""

    @property
    def default_text(self) -> str:
        """The default as it is written in a file; "" for what needs no word: the option is off."""
        if self.shown or self.default is None or self.is_list:
            return self.shown
        if isinstance(self.default, bool):
            return "true" if self.default else ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def check(self, value: Any) -> Any:
        """A value of a YAML file as the option's type.

        Raises:
            ValueError: it is of another type or no choice. The message never repeats a list, which may hold secrets.
        """
        if self.is_list:
            if not isinstance(value, list) or not all(type(item) is self.type for item in value):
                raise ValueError(f"{self.name} must be a list of quoted texts, such as ['FIRST', 'SECOND']")
            return tuple(value)
        if self.type is float and type(value) is int:
            return float(value)
        if type(value) is bool and set(_SWITCHED) <= set(self.choices):
            return _SWITCHED[value]
        if type(value) is not self.type:
            raise ValueError(f"{self.name} must be {_KINDS[self.type]}, not {kind_of(value)}")
        if self.choices and not self.takes_path and value not in self.choices:
            raise ValueError(f"{self.name} must be one of {', '.join(self.choices)}, not {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{self.name} must be a finite number")
        return value


def options_of(config: type, groups: Mapping[str, Sequence[str]]) -> tuple[Option, ...]:
    """Returns the options of a dataclass.

    Args:
        groups: the fields of each group, in the order of help and documentation.

    Raises:
        ValueError: a field is in no group or in two, or a group names an unknown field.
    """
    declared = {f.name: f for f in fields(config)}
    placed = Counter(name for names in groups.values() for name in names)
    if wrong := sorted(n for n in declared.keys() | placed.keys() if n not in declared or placed[n] != 1):
        raise ValueError(f"each field of {config.__name__} must be in exactly one group: see {', '.join(wrong)}")
    return tuple(_option_of(declared[name], group) for group, names in groups.items() for name in names)


def _option_of(f: Field[Any], group: str) -> Option:
    is_list = get_origin(f.type) is tuple
    declared = {
        "name": f.name.replace("_", "-"),
        "field": f.name,
        "type": get_args(f.type)[0] if is_list else f.type,
        "group": group,
        "default": None if f.default is MISSING else f.default,
        "is_list": is_list,
    }
    return Option(**declared | f.metadata[OPTION])


def kind_of(value: Any) -> str:
    """What a value of a YAML file is, in a person's words."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def in_flags(message: str, options: Sequence[Option]) -> str:
    """A message of a configuration, or of what it configures, with the fields' names replaced by the flags that set
    them: for a person who gave flags and knows no fields. A field that is an everyday word counts in `backquotes`
    alone, and what is part of an import path or of a file's is none."""
    # The longer names come first, because some are parts of others.
    for o in sorted(options, key=lambda o: -len(o.field)):
        message = message.replace(f"`{o.field}`", f"--{o.name}")
        if "_" in o.field:
            message = re.sub(rf"(?<![\w./:-]){o.field}(?!\w|[.:/]\w)", f"--{o.name}", message)
    return message
