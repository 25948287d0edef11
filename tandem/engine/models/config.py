"""What a model directory's config.json says about the model, checked before anything runs."""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tandem.engine.models.architectures import MODEL_CLASSES


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """How Llama 3.1 stretches the rotary embedding to longer contexts; see layers/rotary.py for the formula.

    Attributes:
        factor: by how much long wavelengths are stretched.
        low_freq_factor, high_freq_factor: bounds of what is long, in wavelengths per original context.
        original_max_position_embeddings: tokens of context before stretching.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _require_positive(name, getattr(self, name))
        _require_count("original_max_position_embeddings", self.original_max_position_embeddings)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be greater than low_freq_factor")


# Keys of a rope dictionary by rope type. A key not known here might change the frequencies, so it is refused.
_ROPE_KEYS = {"default": {"rope_theta", "rope_type", "type", "partial_rotary_factor"}}
_ROPE_KEYS["llama3"] = _ROPE_KEYS["default"] | {field.name for field in fields(Llama3RopeScaling)}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A causal language model's shape.

    Attributes:
        architecture: the class name by which checkpoints call it, such as LlamaForCausalLM.
        num_q_heads, num_kv_heads: attention heads of queries, and of keys and values.
        rope_theta: base of the rotary embedding's wavelengths.
        max_position_embeddings: tokens a sequence may have at most.
        tie_word_embeddings: whether the output matrix is the embedding matrix.
        attention_bias: whether q, k, v and o projections have biases.
        mlp_bias: whether gate, up and down projections have biases.
        eos_token_ids: tokens that end a text; may be empty.

    Raises:
        ValueError: on construction, for values that make no model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_scaling: Llama3RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_supported(self.architecture)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                _require_count(field.name, value)
            elif field.type is float:
                _require_positive(field.name, value)
            elif field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name} must be true or false, not {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"num_q_heads {self.num_q_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, but the rotary embedding turns pairs")
        for token_id in self.eos_token_ids:
            if not isinstance(token_id, int) or token_id < 0:
                raise ValueError(f"eos_token_id {token_id!r} is not a token id")

    @classmethod
    def from_dir(cls, model_dir: Path) -> "ModelConfig":
        """Reads config.json, and generation_config.json for more end-of-text tokens.

        Both ways to write the rotary embedding are read: rope_theta with rope_scaling, and rope_parameters.

        Raises:
            ValueError: config.json cannot be read, or asks for something that would not be computed as it
                says; the message names the file and the key.
        """
        path = model_dir / "config.json"
        try:
            return cls._from_json(_read_json(path), _generation_eos(model_dir / "generation_config.json"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _from_json(cls, raw: dict[str, Any], more_eos: tuple[int, ...]) -> "ModelConfig":
        architectures = raw.get("architectures")
        if not isinstance(architectures, list) or len(architectures) != 1:
            raise ValueError(f"architectures must name one architecture, not {architectures!r}")
        # Before anything else: no other refusal helps somebody whose model is not supported.
        _require_supported(architectures[0])
        _refuse_unsupported(raw)
        rope_theta, rope_scaling = _rope(raw)
        hidden_size = _required(raw, "hidden_size")
        num_q_heads = _required(raw, "num_attention_heads")
        head_dim = raw.get("head_dim")
        if head_dim is None:
            _require_count("hidden_size", hidden_size)
            _require_count("num_attention_heads", num_q_heads)
            if hidden_size % num_q_heads:
                raise ValueError(f"hidden_size {hidden_size} is not a multiple of {num_q_heads} attention heads")
            head_dim = hidden_size // num_q_heads
        num_kv_heads = raw.get("num_key_value_heads")
        return cls(
            architecture=architectures[0],
            vocab_size=_required(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(raw, "intermediate_size"),
            num_layers=_required(raw, "num_hidden_layers"),
            num_q_heads=num_q_heads,
            num_kv_heads=num_q_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_required(raw, "rms_norm_eps"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_required(raw, "max_position_embeddings"),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=raw.get("attention_bias", False),
            mlp_bias=raw.get("mlp_bias", False),
            eos_token_ids=tuple(dict.fromkeys(_eos(raw) + more_eos)),
        )


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    """Raises ValueError for settings that change what a model computes and that no code here follows."""
    if raw.get("quantization_config") is not None:
        raise ValueError("quantization_config is set, but quantized weights are not supported")
    hidden_act = raw.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise ValueError(f"hidden_act {hidden_act!r} is not supported; supported: silu")
    window = raw.get("sliding_window")
    if window is not None and raw.get("use_sliding_window", True):
        raise ValueError(f"sliding_window {window} is in effect, but only full attention is supported")
    other_types = sorted({str(kind) for kind in raw.get("layer_types") or []} - {"full_attention"})
    if other_types:
        raise ValueError(f"layer_types has {', '.join(other_types)}; supported: full_attention")
    if raw.get("rope_interleaved", False):
        raise ValueError("rope_interleaved is set, but only the half-rotation convention is supported")


def _rope(raw: dict[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """The rotary embedding's base and scaling, from either form; forms that disagree are refused."""
    _require_full_rotation(raw)
    new, theta, scaling = raw.get("rope_parameters"), raw.get("rope_theta"), raw.get("rope_scaling")
    old = dict(_require_dict("rope_scaling", scaling)) if scaling is not None else {}
    if theta is not None:
        old = {"rope_theta": theta, **old}
    if new is None:
        return _parse_rope(old)
    parsed = _parse_rope(_require_dict("rope_parameters", new))
    if old and _parse_rope({"rope_theta": parsed[0], **old}) != parsed:
        raise ValueError("rope_parameters contradicts rope_theta or rope_scaling")
    return parsed


def _parse_rope(rope: dict[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in _ROPE_KEYS:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(_ROPE_KEYS)}")
    unknown = sorted(set(rope) - _ROPE_KEYS[rope_type])
    if unknown:
        raise ValueError(f"rope type {rope_type!r} with {', '.join(unknown)} is not supported")
    _require_full_rotation(rope)
    # Checkpoints older than the key mean this base.
    theta = rope.get("rope_theta", 10000.0)
    if rope_type == "default":
        return theta, None
    return theta, Llama3RopeScaling(**{f.name: _required(rope, f.name) for f in fields(Llama3RopeScaling)})


def _require_full_rotation(raw: dict[str, Any]) -> None:
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {raw['partial_rotary_factor']} is not supported")


def _generation_eos(path: Path) -> tuple[int, ...]:
    return _eos(_read_json(path)) if path.exists() else ()


def _eos(raw: dict[str, Any]) -> tuple[int, ...]:
    eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _require_dict(path.name, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error


def _require_dict(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, not {value!r}")
    return value


def _required(raw: dict[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ValueError(f"{key} is missing")
    return raw[key]


def _require_supported(architecture: str) -> None:
    if architecture not in MODEL_CLASSES:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(MODEL_CLASSES)}")


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def _require_positive(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise ValueError(f"{name} must be a number greater than 0, not {value!r}")
