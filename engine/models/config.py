import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tandem.engine.models.checks import MAX_COUNT, require_count, require_dict, require_positive, required
from tandem.engine.models.experts import ExpertsConfig
from tandem.engine.models.families.base import Architecture
from tandem.engine.models.families.table import ARCHITECTURES
from tandem.engine.models.latent import IndexerConfig, LatentConfig
from tandem.engine.models.quantization import AT_LOAD, FP8, Quantization, read_quantization
from tandem.engine.models.rope import RopeScaling, read_rope

# The largest supported models have 126.
MAX_LAYERS = 1024
MAX_ERROR_LENGTH = 400
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """
    Attributes:
        architecture: class name in checkpoints, like LlamaForCausalLM.
        num_kv_heads: num_q_heads with latent attention.
        head_dim: of queries and keys; need not be hidden_size / num_q_heads.
        max_position_embeddings: maximum tokens of a sequence, after rope_scaling.
        intermediate_size: of dense layers.
        qk_norm: True if each head's queries and keys are normalized before rotation.
        whole_qk_norm: True if all queries of a token are normalized together, and all its keys.
        experts: None: all layers are dense.
        latent: sizes of latent attention; None: each token has keys and values by head.
        indexer: choice of the tokens that a query attends to, with latent attention; None: all.
        extra_layers: layers in the checkpoint behind the model's, which predict further tokens and are not loaded.

    Raises:
        ValueError: on construction, for invalid values.
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
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    indexer: IndexerConfig | None = None
    extra_layers: tuple[int, ...] = ()
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        _supported(self.architecture)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                # Layers are Python objects, made before their tensors are looked at.
                require_count(field.name, value, MAX_LAYERS if field.name == "num_layers" else MAX_COUNT)
            elif field.type is float:
                require_positive(field.name, value)
            elif field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name} must be true or false, not {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"num_q_heads {self.num_q_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.indexer is not None and self.indexer.head_dim < self.rope_dim:
            raise ValueError(f"index_head_dim {self.indexer.head_dim} is less than qk_rope_head_dim {self.rope_dim}")
        if self.rope_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, but the rotary embedding rotates pairs")

    @property
    def rope_dim(self) -> int:
        """Rotated dimensions of a head."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @classmethod
    def from_dir(cls, model_dir: Path) -> "ModelConfig":
        """Reads config.json. Accepts rope_theta with rope_scaling, or rope_parameters.

        Raises:
            ValueError: config.json is unreadable or has an unsupported setting; the message names the file and the key.
        """
        path = model_dir / "config.json"
        try:
            return cls.from_raw(_read_json(path))
        except ValueError as error:
            # It quotes the file's values, which may be long.
            text = " ".join(str(error).split())
            text = text if len(text) <= MAX_ERROR_LENGTH else f"{text[: MAX_ERROR_LENGTH - 1]}…"
            raise ValueError(f"{path}: {text}") from error

    def quantized(self, how: str) -> "ModelConfig":
        return replace(self, quantization=AT_LOAD) if how == FP8 and self.quantization is None else self

    @classmethod
    def from_raw(cls, raw: dict[str, Any]) -> "ModelConfig":
        """Args: raw: content of config.json. Raises ValueError: as from_dir, without the file's name."""
        names = raw.get("architectures")
        if not isinstance(names, list) or len(names) != 1:
            raise ValueError(f"architectures must name one architecture, not {names!r}")
        # An unsupported model makes other errors irrelevant.
        architecture = _supported(names[0])
        raw = {**architecture.defaults, **raw}
        num_layers = required(raw, "num_hidden_layers")
        require_count("num_hidden_layers", num_layers, MAX_LAYERS)
        _refuse_unsupported(raw, architecture)
        _refuse_sliding_window(raw, architecture)
        rope_theta, rope_scaling = read_rope(raw, architecture.rope_theta)
        latent = architecture.latent(raw) if architecture.latent is not None else None
        return cls(
            architecture=names[0],
            vocab_size=required(raw, "vocab_size"),
            hidden_size=required(raw, "hidden_size"),
            intermediate_size=required(raw, "intermediate_size"),
            num_layers=num_layers,
            num_q_heads=required(raw, "num_attention_heads"),
            num_kv_heads=_num_kv_heads(raw),
            head_dim=_head_dim(raw) if latent is None else latent.qk_dim,
            rms_norm_eps=required(raw, "rms_norm_eps"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=required(raw, "max_position_embeddings"),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            qkv_bias=_bias(raw, architecture.qkv_bias),
            o_bias=_bias(raw, architecture.o_bias),
            mlp_bias=_bias(raw, architecture.mlp_bias),
            qk_norm=architecture.qk_norm,
            whole_qk_norm=architecture.whole_qk_norm,
            experts=architecture.experts(raw, num_layers) if architecture.experts is not None else None,
            latent=latent,
            indexer=architecture.indexer(raw) if architecture.indexer is not None else None,
            extra_layers=_extra_layers(raw, architecture, num_layers),
            quantization=read_quantization(raw),
        )


def _supported(name: object) -> Architecture:
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def _refuse_unsupported(raw: dict[str, Any], architecture: Architecture) -> None:
    for key in _EXPERT_KEYS:
        if raw.get(key) and architecture.experts is None:
            raise ValueError(f"{key} is {raw[key]!r}, but this architecture has no experts")
    for key, neutral in architecture.neutral.items():
        if raw.get(key) is not None and raw[key] != neutral:
            raise ValueError(f"{key} is {raw[key]!r}, which is not supported")
    hidden_act = raw.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise ValueError(f"hidden_act {hidden_act!r} is not supported; supported: silu")
    if raw.get("rope_interleaved", False):
        raise ValueError("rope_interleaved is set, but only the half-rotation convention is supported")


def _refuse_sliding_window(raw: dict[str, Any], architecture: Architecture) -> None:
    """Raises ValueError if a layer would not attend to all previous tokens."""
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise ValueError(f"layer_types must be a list, not {layer_types!r}")
        other_types = sorted({str(kind) for kind in layer_types} - {architecture.layer_type})
        if other_types:
            raise ValueError(f"layer_types has {', '.join(other_types)}; supported: {architecture.layer_type}")
    window = raw.get("sliding_window")
    if window is None or (architecture.window_switch and not raw.get("use_sliding_window", True)):
        return
    if architecture.window_from_layer:
        first = raw.get(architecture.window_from_layer)
        if isinstance(first, int) and first >= raw["num_hidden_layers"]:
            return
    require_count("sliding_window", window)
    max_positions = required(raw, "max_position_embeddings")
    require_count("max_position_embeddings", max_positions)
    # A window includes the query's token, so the maximum length excludes nothing.
    if window < max_positions:
        raise ValueError(
            f"sliding_window {window} is in effect, as it is below max_position_embeddings {max_positions}, "
            "but only full attention is supported"
        )


def _num_kv_heads(raw: dict[str, Any]) -> Any:
    num_kv_heads = raw.get("num_key_value_heads")
    return raw["num_attention_heads"] if num_kv_heads is None else num_kv_heads


def _extra_layers(raw: dict[str, Any], architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    if not architecture.extra_layers:
        return ()
    num_extra = raw[architecture.extra_layers]
    require_count(architecture.extra_layers, num_extra, MAX_LAYERS, least=0)
    return tuple(range(num_layers, num_layers + num_extra))


def _head_dim(raw: dict[str, Any]) -> Any:
    if raw.get("head_dim") is not None:
        return raw["head_dim"]
    hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
    require_count("hidden_size", hidden_size)
    require_count("num_attention_heads", num_heads)
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size {hidden_size} is not a multiple of {num_heads} attention heads")
    return hidden_size // num_heads


def _bias(raw: dict[str, Any], bias: bool | str) -> Any:
    return raw.get(bias, False) if isinstance(bias, str) else bias


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return require_dict(path.name, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
