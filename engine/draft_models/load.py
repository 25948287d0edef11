"""Loads the layers that draft for a loaded model."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tandem.engine.attention.base import AttentionBackend, GraphableBackend
from tandem.engine.attention.choice import choose_backend
from tandem.engine.attention.drafted_layout import DraftedLayout
from tandem.engine.attention.table import AUTO
from tandem.engine.config import EngineConfig
from tandem.engine.draft_models.backend import DraftedBackend, PageStates
from tandem.engine.draft_models.base import DraftModel
from tandem.engine.draft_models.config import DRAFT, DrafterConfig, check_tokens
from tandem.engine.draft_models.drafted_model import DraftedModel
from tandem.engine.draft_models.eagle import EagleModel
from tandem.engine.draft_models.graphed_backend import GraphableDraftedBackend
from tandem.engine.draft_models.mtp import MtpModel
from tandem.engine.draft_models.whole_model import WholeDraftModel
from tandem.engine.kvcache.pool import KvPool, PoolRegion
from tandem.engine.models.build import build_model, layer_ops
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.weights.fingerprint import model_fingerprint
from tandem.engine.weights.loader import load_weights


def load_drafter(
    engine: EngineConfig,
    drafter: DrafterConfig,
    target: DecoderModel,
    device: torch.device,
    on_progress: Callable[[str], None],
) -> DraftedModel:
    """
    Args:
        engine: of the target.
        target: loaded.

    Raises:
        ValueError: the drafter has other tokens than the target, or its checkpoint is incomplete or corrupt.
    """
    check_tokens(drafter, Path(engine.model_dir))
    model: DraftModel
    if drafter.source == DRAFT:
        model = WholeDraftModel(build_model(drafter.model, target.dtype, device))
    elif drafter.eagle is not None:
        model = EagleModel(drafter, target, device, layer_ops(target.dtype, device))
    else:
        model = MtpModel(target, device, layer_ops(target.dtype, device))
    on_progress("loading the drafter's weights")
    load_weights(model, drafter.model_dir, engine.load_format, drafter.model.quantization, device, on_progress)
    return DraftedModel(target, model)


def drafted_fingerprint(target_fingerprint: str, drafter: DraftModel) -> str:
    """Returns a digest of both, as pages hold numbers of both."""
    both = f"{target_fingerprint} {model_fingerprint(drafter)}"
    return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()


def drafted_backend(
    engine: EngineConfig,
    layout: DraftedLayout,
    drafter: DraftModel,
    target_backend: Callable[[KvPool], AttentionBackend],
    device: torch.device,
) -> Callable[[KvPool], DraftedBackend]:
    """Raises ValueError: no backend computes the drafter's layers."""
    # The configured backend may read the target's pages alone.
    backend = choose_backend(replace(engine, attention_backend=AUTO), layout.drafter, drafter.num_q_heads, device)

    def make(pool: KvPool) -> DraftedBackend:
        target = target_backend(PoolRegion(pool, layout.target, 0))
        of_drafter = PoolRegion(pool, layout.drafter, layout.drafter_offset)
        own = backend(of_drafter, drafter.num_q_heads)
        states = PageStates(pool, layout) if layout.state_size else None
        if isinstance(target, GraphableBackend) and isinstance(own, GraphableBackend):
            return GraphableDraftedBackend(target, own, states, pool.num_pages)
        return DraftedBackend(target, own, states)

    return make
