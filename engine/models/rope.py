from dataclasses import dataclass, fields
from typing import Any

from tandem.engine.models.checks import require_count, require_dict, require_positive, required


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's scaling to longer contexts; formula in layers/rotary.py.

    Attributes:
        low_freq_factor, high_freq_factor: bounds of long wavelengths, in wavelengths per original context.

    Raises:
        ValueError: on construction, for invalid values.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            require_positive(name, getattr(self, name))
        require_count("original_max_position_embeddings", self.original_max_position_embeddings)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be greater than low_freq_factor")


# By rope type. Other keys might change the frequencies.
_ROPE_KEYS = {"default": {"rope_theta", "rope_type", "type", "partial_rotary_factor"}}
_ROPE_KEYS["llama3"] = _ROPE_KEYS["default"] | {field.name for field in fields(Llama3RopeScaling)}


def read_rope(raw: dict[str, Any], default_theta: float = 10000.0) -> tuple[float, Llama3RopeScaling | None]:
    """Returns the rotary embedding's base and scaling.

    Raises:
        ValueError: the rope type is not default or llama3, a setting is unsupported, or the two forms contradict.
    """
    _require_full_rotation(raw)
    new, theta, scaling = raw.get("rope_parameters"), raw.get("rope_theta"), raw.get("rope_scaling")
    old = dict(require_dict("rope_scaling", scaling)) if scaling is not None else {}
    if theta is not None:
        old = {"rope_theta": theta, **old}
    if new is None:
        return _parse(old, default_theta)
    parsed = _parse(require_dict("rope_parameters", new), default_theta)
    if old and _parse({"rope_theta": parsed[0], **old}, default_theta) != parsed:
        raise ValueError("rope_parameters contradicts rope_theta or rope_scaling")
    return parsed


def _parse(rope: dict[str, Any], default_theta: float) -> tuple[float, Llama3RopeScaling | None]:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(_ROPE_KEYS)}")
    unknown = sorted(set(rope) - _ROPE_KEYS[rope_type])
    if unknown:
        raise ValueError(f"rope type {rope_type!r} with {', '.join(unknown)} is not supported")
    _require_full_rotation(rope)
    theta = rope.get("rope_theta", default_theta)
    if rope_type == "default":
        return theta, None
    return theta, Llama3RopeScaling(**{f.name: required(rope, f.name) for f in fields(Llama3RopeScaling)})


def _require_full_rotation(raw: dict[str, Any]) -> None:
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {raw['partial_rotary_factor']} is not supported")
