"""What distinguishes the supported architectures. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.models.experts import ExpertsConfig
from tandem.engine.models.latent import IndexerConfig, LatentConfig


@dataclass(frozen=True, slots=True)
class Architecture:
    """Differences from Llama without biases.

    Attributes:
        model, page_layout: import paths of classes.
        qkv_bias, o_bias, mlp_bias: whether projections have biases, or the key of config.json that says so.
        qk_norm: True if each head's queries and keys are normalized before rotation.
        whole_qk_norm: True if all queries of a token are normalized together, and all its keys.
        window_switch: True if use_sliding_window can turn sliding_window off.
        window_from_layer: key of the first layer that sliding_window applies to; "": the first of all.
        rope_theta: base of the rotary embedding if config.json has none.
        defaults: values of keys missing in config.json, if unlike ModelConfig.from_dir's.
        experts: reads the mixture of experts from config.json, with the number of layers; raises ValueError.
            None: the architecture has none.
        latent: reads the sizes of latent attention from config.json; raises ValueError. None: attention is by head.
        indexer: reads the choice of attended tokens from config.json; raises ValueError. None: queries attend to all.
        layer_type: the only entry that layer_types may have.
        extra_layers: key of the number of layers that a checkpoint has behind the model's, not to be loaded; "": none.
        neutral: keys that must be absent, null, or have this value, because another would change the arithmetic.
    """

    model: str = "tandem.engine.models.decoder:DecoderModel"
    page_layout: str = "tandem.engine.attention.layout:KvHeadLayout"
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    window_switch: bool = True
    window_from_layer: str = ""
    rope_theta: float = 10000.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    experts: Callable[[Mapping[str, Any], int], ExpertsConfig | None] | None = None
    latent: Callable[[Mapping[str, Any]], LatentConfig] | None = None
    indexer: Callable[[Mapping[str, Any]], IndexerConfig] | None = None
    layer_type: str = "full_attention"
    extra_layers: str = ""
    neutral: Mapping[str, Any] = field(default_factory=dict)
