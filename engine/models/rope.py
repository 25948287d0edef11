import math
from dataclasses import MISSING, dataclass, fields
from typing import Any

from tandem.engine.models.checks import require_count, require_dict, require_number, require_positive, required

# Models have 0.1 to 64. Within these limits the formula neither overflows nor takes the logarithm of 0.
_MIN_BETA, _MAX_BETA = 0.001, 1_000_000


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


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """YaRN's scaling to longer contexts; formula in layers/rotary.py.

    Attributes:
        factor: longest context per original context.
        attention_factor: factor of cosines and sines; None: it follows from `factor` and the mscales.
        beta_fast, beta_slow: bounds of long wavelengths, in wavelengths per original context.
        mscale, mscale_all_dim: weights of ln(factor) in `table_factor` and its divisor, unless one is 0. Alone,
            mscale_all_dim counts in `score_factor`.
        truncate: whether the bounds are rounded outwards to whole pairs.

    Raises:
        ValueError: on construction, for invalid values.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        require_number("factor", self.factor, least=1)
        require_count("original_max_position_embeddings", self.original_max_position_embeddings)
        if self.attention_factor is not None:
            require_positive("attention_factor", self.attention_factor)
            require_number("attention_factor", self.attention_factor, least=0)
        for name in ("beta_fast", "beta_slow"):
            require_number(name, getattr(self, name), _MIN_BETA, _MAX_BETA)
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast {self.beta_fast} is less than beta_slow {self.beta_slow}")
        for name in ("mscale", "mscale_all_dim"):
            require_number(name, getattr(self, name), least=0)
        if not isinstance(self.truncate, bool):
            raise ValueError(f"truncate must be true or false, not {self.truncate!r}")

    @property
    def table_factor(self) -> float:
        """Factor of cosines and sines, so its square scales attention scores.

        Source: section 3.4 of Peng et al. 2023, https://arxiv.org/abs/2309.00071, where it is sqrt(1 / t).
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)


RopeScaling = Llama3RopeScaling | YarnRopeScaling


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Returns 0.1 * weight * ln(factor) + 1. Source: as `YarnRopeScaling.table_factor`; `weight` is DeepSeek-V2's."""
    return 0.1 * weight * math.log(factor) + 1.0


def score_factor(scaling: RopeScaling | None) -> float:
    """Returns the factor of all attention scores of latent attention, besides 1 / sqrt(head_dim).

    The scaled tables cover only rotated dimensions; this covers all, hence mscale_all_dim. Families without latent
    attention do not have it. Source: `DeepseekV2Attention` in https://huggingface.co/deepseek-ai/DeepSeek-V2.
    """
    if not isinstance(scaling, YarnRopeScaling) or not scaling.mscale_all_dim:
        return 1.0
    return yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2


_SCALINGS: dict[str, type[RopeScaling]] = {"llama3": Llama3RopeScaling, "yarn": YarnRopeScaling}
_COMMON_KEYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
# By rope type. Other keys might change the frequencies.
_ROPE_KEYS = {
    "default": _COMMON_KEYS,
    **{name: _COMMON_KEYS | {field.name for field in fields(scaling)} for name, scaling in _SCALINGS.items()},
}

_IGNORED_IF_NULL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read_rope(raw: dict[str, Any], default_theta: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """Returns the rotary embedding's base and scaling.

    Raises:
        ValueError: the rope type is not default, llama3 or yarn, a setting is unsupported, or the two forms contradict.
    """
    _require_full_rotation(raw)
    new, theta, scaling = raw.get("rope_parameters"), raw.get("rope_theta"), raw.get("rope_scaling")
    old = dict(require_dict("rope_scaling", scaling)) if scaling is not None else {}
    if theta is not None:
        old = {"rope_theta": theta, **old}
    if new is None:
        return _parse(old, raw, default_theta)
    parsed = _parse(require_dict("rope_parameters", new), raw, default_theta)
    if old and _parse({"rope_theta": parsed[0], **old}, raw, default_theta) != parsed:
        raise ValueError("rope_parameters contradicts rope_theta or rope_scaling")
    return parsed


def _parse(rope: dict[str, Any], raw: dict[str, Any], default_theta: float) -> tuple[float, RopeScaling | None]:
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
    if rope_type == "yarn":
        rope = _with_yarn_defaults(rope, raw)
        require_positive("rope_theta", theta)
        if theta <= 1:
            raise ValueError(f"rope_theta must be greater than 1 with rope type 'yarn', not {theta!r}")
    scaling = _SCALINGS[rope_type]
    names = [field.name for field in fields(scaling) if field.default is MISSING or field.name in rope]
    return theta, scaling(**{name: required(rope, name) for name in names})


def _with_yarn_defaults(rope: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """Adds what transformers derives from the top level of config.json, and removes what it ignores.

    An original_max_position_embeddings there precedes that in `rope`; without either, it is max_position_embeddings.
    A factor of null, but not a missing one, is max_position_embeddings / original_max_position_embeddings.
    """
    key = "original_max_position_embeddings"
    original = raw.get(key) if raw.get(key) is not None else rope.get(key)
    if original is None:
        original = _max_positions(raw)
    if rope.get("factor", 1) is None:
        require_count(key, original)
        rope = {**rope, "factor": _max_positions(raw) / original}
    rope = {name: value for name, value in rope.items() if value is not None or name not in _IGNORED_IF_NULL}
    return {**rope, key: original}


def _max_positions(raw: dict[str, Any]) -> int:
    value = required(raw, "max_position_embeddings")
    require_count("max_position_embeddings", value)
    return int(value)


def _require_full_rotation(raw: dict[str, Any]) -> None:
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {raw['partial_rotary_factor']} is not supported")
