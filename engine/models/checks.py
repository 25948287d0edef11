"""Checks of config.json values. All raise ValueError, naming the key."""

import sys
from collections.abc import Mapping
from typing import Any

# Above every size and length of a model.
MAX_COUNT = 2**31 - 1


def required(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ValueError(f"{key} is missing")
    return raw[key]


def require_dict(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, not {value!r}")
    return value


def require_count(name: str, value: object, most: int = MAX_COUNT, least: int = 1) -> None:
    """Requires an int of at least `least` and at most `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, not {value!r}")


def require_positive(name: str, value: object) -> None:
    """Requires a finite int or float above 0."""
    if not _is_number(value) or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number greater than 0, not {value!r}")


def require_number(name: str, value: object, least: float, most: float = MAX_COUNT) -> None:
    """Requires an int or float of at least `least` and at most `most`."""
    if not _is_number(value) or not value >= least:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number of at least {least}, not {value!r}")
    if value > most:  # type: ignore[operator]
        raise ValueError(f"{name} must be at most {most}, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
