"""Options of a command: its flags, keys of its YAML file, rows of its documentation."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, get_args, get_origin

from tandem.deploy.config.bounds import Bounds, parse_count
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
# YAML reads off and on as false and true, the indices here.
_SWITCHED = ("off", "on")


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: flag without leading dashes, and key in the YAML file.
        type: str, int, float, or bool for a flag without a value.
        group: heading in help and documentation.
        default: None if the option is required.
        shown: text in place of the default.
        takes_path: the import path of a class is allowed too (tandem.choices).
        takes_bounds: a range such as 1:8 is allowed too; the value is then a Bounds.
        is_list: the flag is repeatable, and the key takes a list.
        detail: Markdown that the documentation adds to `help`.
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
    takes_bounds: bool = False
    is_list: bool = False
    detail: str = ""

    @property
    def default_text(self) -> str:
        """The default as in a file; "" for a flag that is off."""
        if self.shown or self.default is None or self.is_list:
            return self.shown
        if isinstance(self.default, bool):
            return "true" if self.default else ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def check(self, value: Any) -> Any:
        """Converts a value of a YAML file. Raises ValueError; the message shows no list, which may hold secrets."""
        if self.is_list:
            if not isinstance(value, list) or not all(type(item) is self.type for item in value):
                raise ValueError(f"{self.name} must be a list of quoted texts, such as ['FIRST', 'SECOND']")
            return tuple(value)
        if self.takes_bounds and isinstance(value, str):
            return self._parse_count(value)
        if self.type is float and type(value) is int:
            return float(value)
        # YAML reads these words as booleans.
        if type(value) is bool and _SWITCHED[value] in self.choices:
            return _SWITCHED[value]
        if type(value) is not self.type:
            raise ValueError(f"{self.name} must be {_KINDS[self.type]}, not {kind_of(value)}")
        if self.choices and not self.takes_path and value not in self.choices:
            raise ValueError(f"{self.name} must be one of {', '.join(self.choices)}, not {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{self.name} must be a finite number")
        return value

    def _parse_count(self, text: str) -> int | Bounds:
        try:
            return parse_count(text)
        except ValueError as error:
            raise ValueError(f"{self.name} {error}") from None


def options_of(config: type, groups: Mapping[str, Sequence[str]]) -> tuple[Option, ...]:
    """Raises ValueError: a field is not in exactly one group, or a group names an unknown field."""
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
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def in_flags(message: str, options: Sequence[Option]) -> str:
    """Replaces field names in an error message by flags: one-word fields only in `backquotes`, none in paths."""
    # Longer names first: some contain others.
    for o in sorted(options, key=lambda o: -len(o.field)):
        message = message.replace(f"`{o.field}`", f"--{o.name}")
        if "_" in o.field:
            message = re.sub(rf"(?<![\w./:-]){o.field}(?!\w|[.:/]\w)", f"--{o.name}", message)
    return message
