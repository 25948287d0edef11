"""Configuration of the layers that draft for a model. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.engine.attention.drafted_layout import DraftedLayout
from tandem.engine.config import EngineConfig
from tandem.engine.floors import BYTES_PER_NUMBER, weight_bytes
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.checks import require_count, require_dict
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of

# Sources of drafts that are computed by a model, as in --speculation.
DRAFT, EAGLE, MTP = "draft", "eagle", "mtp"
MODEL_SOURCES = (DRAFT, EAGLE, MTP)
# Class names of EAGLE-3 heads, all of which are a layer of Llama.
_EAGLE_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_NUM_READ = 3


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What an EAGLE-3 head (https://arxiv.org/abs/2503.01840) has beside a layer of Llama.

    Attributes:
        layers_read: layers of the target whose inputs it reads.
        vocab_size: tokens that it drafts, a part of the target's.
        norms_residual: True if the normalized states are what the layer adds to.
    """

    layers_read: tuple[int, ...]
    vocab_size: int
    norms_residual: bool


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """
    Attributes:
        source: one of MODEL_SOURCES.
        model_dir: of its weights; for "mtp", the target's.
        model: of its layers: a model of its own, the target's for "mtp", or a layer of Llama for "eagle".
        num_layers: with KV in the pages.
        state_size: numbers of a token's state; 0: it reads no state.
        eagle: None for other sources.
    """

    source: str
    model_dir: Path
    model: ModelConfig
    num_layers: int
    state_size: int = 0
    eagle: EagleConfig | None = None

    def page_layout(self, target: PageLayout, page_size: int, dtype: str) -> DraftedLayout:
        """Its KV has the compute dtype, also where the target's is quantized."""
        own = page_layout_of(replace(self.model, num_layers=self.num_layers), page_size, dtype, "auto")
        return DraftedLayout(target, own, self.state_size, dtype)

    @property
    def weight_bytes(self) -> int:
        """As engine.floors.weight_bytes, without the embedding and the output matrix that it shares with the target."""
        model, hidden = self.model, self.model.hidden_size
        if self.source == DRAFT:
            return weight_bytes(model)
        if self.eagle is None:
            behind = replace(model, num_layers=model.num_layers + 1)
            return weight_bytes(behind) - weight_bytes(model) + BYTES_PER_NUMBER * 2 * hidden * hidden
        embeddings = 2 * model.vocab_size * hidden
        of_states = hidden * model.head_dim * (model.num_q_heads + 2 * model.num_kv_heads)
        fused_and_head = hidden * (_NUM_READ * hidden + self.eagle.vocab_size)
        return weight_bytes(model) + BYTES_PER_NUMBER * (of_states + fused_and_head - embeddings)

    def without_quantization(self) -> "DrafterConfig":
        return replace(self, model=replace(self.model, quantization=None))


def engine_page_layout(engine: EngineConfig, model: ModelConfig) -> PageLayout:
    """Returns the pages of an engine of one rank. Raises ValueError: the sizes or the drafter do not fit."""
    layout = page_layout_of(model, engine.page_size, engine.dtype, engine.kv_cache_dtype)
    drafter = drafter_of(engine, model)
    return layout if drafter is None else drafter.page_layout(layout, engine.page_size, engine.dtype)


def drafter_of(engine: EngineConfig, model: ModelConfig) -> DrafterConfig | None:
    """As read_drafter. Args: model: of the engine."""
    drafter = read_drafter(engine.drafter, model, Path(engine.model_dir))
    if drafter is None or drafter.source != DRAFT:
        return drafter
    return replace(drafter, model=drafter.model.quantized(engine.quantization))


def read_drafter(drafter: str, target: ModelConfig, target_dir: Path) -> DrafterConfig | None:
    """
    Args:
        drafter: "draft:DIR", "eagle:DIR", "mtp", or "" for none.

    Raises:
        ValueError: it cannot draft for the target; the message says why.
    """
    source, _, directory = drafter.partition(":")
    if not source:
        return None
    if source == MTP:
        return _mtp(target, target_dir)
    model_dir = Path(directory)
    config = _draft(model_dir) if source == DRAFT else _eagle(model_dir, target)
    if config.model.vocab_size != target.vocab_size:
        raise ValueError(
            f"{drafter} has a vocab_size of {config.model.vocab_size}, but the model has {target.vocab_size}: drafts "
            "need the same vocabulary"
        )
    # Tables of positions are made for all that the target has.
    positions = max(config.model.max_position_embeddings, target.max_position_embeddings)
    return replace(config, model=replace(config.model, max_position_embeddings=positions))


def _draft(model_dir: Path) -> DrafterConfig:
    model = ModelConfig.from_dir(model_dir)
    if model.experts is not None:
        raise ValueError(f"{model_dir} is a mixture of experts: a draft model must be dense")
    return DrafterConfig(DRAFT, model_dir, model, model.num_layers)


def _mtp(target: ModelConfig, target_dir: Path) -> DrafterConfig:
    if not target.extra_layers:
        raise ValueError(
            f"`speculation` mtp is for models with a layer that predicts further tokens, and {target_dir} has none: "
            "num_nextn_predict_layers is 0 or unknown to its architecture"
        )
    return DrafterConfig(MTP, target_dir, target, 1, state_size=target.hidden_size)


def _eagle(model_dir: Path, target: ModelConfig) -> DrafterConfig:
    path = model_dir / "config.json"
    try:
        raw = require_dict(path.name, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    try:
        names = raw.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in _EAGLE_NAMES:
            raise ValueError(f"architectures must name one of {', '.join(_EAGLE_NAMES)}, not {names!r}")
        model = ModelConfig.from_raw({**raw, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False})
        if model.num_layers != 1:
            raise ValueError(f"num_hidden_layers is {model.num_layers}, but EAGLE-3 heads of one layer are supported")
        for name, size in (("hidden_size", model.hidden_size), ("target_hidden_size", raw.get("target_hidden_size"))):
            if size is not None and size != target.hidden_size:
                raise ValueError(f"{name} is {size}, but the model's hidden_size is {target.hidden_size}")
        eagle = _eagle_config(raw, model, target)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return DrafterConfig(EAGLE, model_dir, model, 1, state_size=model.hidden_size, eagle=eagle)


def _eagle_config(raw: Mapping[str, Any], model: ModelConfig, target: ModelConfig) -> EagleConfig:
    of_states = raw.get("eagle_config") or {}
    if not of_states.get("use_aux_hidden_state", True):
        raise ValueError("use_aux_hidden_state is false, but only heads that read three layers are supported")
    num_layers = target.num_layers
    layers: Any = [2, num_layers // 2, num_layers - 3]
    if (behind := of_states.get("eagle_aux_hidden_state_layer_ids")) is not None:
        # These name the layers whose outputs are read.
        layers = [layer + 1 for layer in behind]
    layers = raw.get("eagle_aux_hidden_state_layer_ids") or layers
    if len(layers) != _NUM_READ or not all(type(layer) is int and 0 <= layer < num_layers for layer in layers):
        raise ValueError(f"the head reads layers {layers!r}, but must read three of the model's {num_layers}")
    vocab_size = raw.get("draft_vocab_size") or model.vocab_size
    require_count("draft_vocab_size", vocab_size, model.vocab_size)
    return EagleConfig(tuple(layers), vocab_size, bool(raw.get("norm_before_residual", False)))


def check_tokens(drafter: DrafterConfig, target_dir: Path) -> None:
    """Raises ValueError: the tokenizers give different tokens to some id. EAGLE-3 heads seldom have a tokenizer."""
    own, wanted = drafter.model_dir / "tokenizer.json", target_dir / "tokenizer.json"
    if drafter.source == MTP or not wanted.is_file() or (drafter.source == EAGLE and not own.is_file()):
        return
    if not own.is_file():
        raise ValueError(f"{own} is missing: the draft model's vocabulary cannot be compared with the model's")
    mine, other = _tokens(own), _tokens(wanted)
    if mine != other:
        different = min(i for i in mine.keys() | other.keys() if mine.get(i) != other.get(i))
        raise ValueError(
            f"{drafter.model_dir} has another vocabulary than the model: token {different} is "
            f"{mine.get(different)!r}, not {other.get(different)!r}"
        )


def _tokens(path: Path) -> dict[int, str]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = raw["model"]["vocab"]
        # Unigram models list pairs of token and score.
        by_id = (
            {index: token for token, index in vocabulary.items()}
            if isinstance(vocabulary, dict)
            else {index: token for index, (token, _) in enumerate(vocabulary)}
        )
        return by_id | {added["id"]: added["content"] for added in raw.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from error
