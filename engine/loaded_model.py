"""Loads a model, or a rank's part of it, before its engine is built."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.attention.base import AttentionBackend
from tandem.engine.attention.choice import choose_backend
from tandem.engine.attention.drafted_layout import DraftedLayout
from tandem.engine.collectives.base import Collectives
from tandem.engine.config import EngineConfig
from tandem.engine.draft_models.config import drafter_of
from tandem.engine.draft_models.load import drafted_backend, drafted_fingerprint, load_drafter
from tandem.engine.grammars import Grammars
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.kvcache.sizing import GIB
from tandem.engine.models.base import Model
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.ranks.config import RankConfig
from tandem.engine.ranks.group import RankGroup
from tandem.engine.rehearsal import rehearsing
from tandem.engine.weights.fingerprint import model_fingerprint
from tandem.engine.weights.loader import load_weights

logger = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """
    Attributes:
        layout: of the pages that this rank holds.
        backend: makes attention over a pool.
        slots: None: the engine takes no adapters.
    """

    model: Model
    fingerprint: str
    layout: PageLayout
    backend: Callable[[KvPool], AttentionBackend]
    slots: AdapterSlots | None


def load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    whole_layout: PageLayout,
    device: torch.device,
    on_progress: Callable[[str], None],
    group: RankGroup,
    collectives: Collectives | None,
) -> LoadedModel:
    on_progress("loading weights")
    ranks = group.ranks
    layout, num_q_heads = whole_layout.shard(ranks.rank, ranks.degree), model_config.num_q_heads // ranks.degree
    model = build_model(model_config, getattr(torch, config.dtype), device, collectives)
    # Fail before loading weights, which takes minutes.
    of_target = layout.target if isinstance(layout, DraftedLayout) else layout
    backend_type = choose_backend(config, of_target, num_q_heads, device)
    slots = AdapterSlots(model, config.max_loras, config.max_lora_rank, device) if config.max_loras else None

    def unscaled(pool: KvPool) -> AttentionBackend:
        return backend_type(pool, num_q_heads)

    with rehearsing(config, model, of_target, unscaled, device, on_progress):
        kv_scales = load_weights(
            model, Path(config.model_dir), config.load_format, model_config.quantization, device, on_progress
        )
        on_progress("fingerprinting weights")
        fingerprint = model_fingerprint(model, kv_scales, group)
    has_scales = config.kv_cache_dtype != "auto"

    def backend(pool: KvPool) -> AttentionBackend:
        return backend_type(pool, num_q_heads, kv_scales=kv_scales) if has_scales else unscaled(pool)

    if has_scales:
        scales = "all scales are 1" if kv_scales.are_ones else "scales are the checkpoint's"
        logger.info("keys and values are kept as %s; %s", config.kv_cache_dtype, scales)
    if slots is not None:
        gib = slots.num_bytes / GIB
        logger.info("%d slots for adapters of up to rank %d take %.2f GiB", slots.num_slots, slots.max_rank, gib)
    if not isinstance(layout, DraftedLayout):
        return LoadedModel(model, fingerprint, layout, backend, slots)
    drafter = drafter_of(config, model_config)
    assert drafter is not None and isinstance(model, DecoderModel)
    drafted = load_drafter(config, drafter, model, device, on_progress)
    on_progress("fingerprinting the drafter's weights")
    fingerprint = drafted_fingerprint(fingerprint, drafted.drafter)
    joined = drafted_backend(config, layout, drafted.drafter, backend, device)
    return LoadedModel(drafted, fingerprint, layout, joined, slots)


def load_grammars(config: EngineConfig, model_config: ModelConfig, ranks: RankConfig) -> Grammars | None:
    """Returns None for a follower, which samples nothing."""
    return None if not ranks.is_leader else Grammars.of_model(Path(config.model_dir), model_config.vocab_size)
