"""Makes an engine as it is configured: the model with its weights, its pool and its attention backend."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from tandem.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.models.base import Model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.registry import build_model
from tandem.engine.weights.loader import checkpoint_weights, dummy_weights


def build_engine(config: EngineConfig, pool_name: str, on_progress: Callable[[str], None]) -> Engine:
    """Loads a model and allocates its pool.

    Args:
        pool_name: unique among all pools ever made on this host.
        on_progress: told, in a few words, what happens next.

    Raises:
        ValueError: the model cannot be served as configured; the message says why.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    model_config = ModelConfig.from_dir(Path(config.model_dir))
    dtype: torch.dtype = getattr(torch, config.dtype)
    device = _device(config.device)
    model = build_model(model_config, dtype, device)
    on_progress("loading weights")
    weights: Iterable[tuple[str, torch.Tensor]]
    if config.load_format == "dummy":
        weights = dummy_weights(model.checkpoint_shapes())
    else:
        weights = checkpoint_weights(Path(config.model_dir))
    model.load_weights(weights)
    on_progress("allocating pages")
    layout = PageLayout(
        num_layers=model_config.num_layers,
        page_size=config.page_size,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=config.dtype,
    )
    if device.type == "cpu":
        return Engine(model, CpuKvPool(layout, config.num_pages, pool_name))
    return _cuda_engine(config, model, layout, device, on_progress)


def _device(name: str) -> torch.device:
    """Raises ValueError if this machine has no such device."""
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device cuda is asked for, but torch sees no GPU here; use --device cpu")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


def _cuda_engine(
    config: EngineConfig, model: Model, layout: PageLayout, device: torch.device, on_progress: Callable[[str], None]
) -> Engine:
    # Imported here: a machine without CUDA has nothing to import.
    from tandem.engine.attention.flashinfer import DTYPES, HEAD_DIMS, FlashInferAttention
    from tandem.engine.graph_runner import DecodeGraphs
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    pool = CudaKvPool(layout, config.num_pages, device)
    has_kernels = layout.dtype in DTYPES and layout.head_dim in HEAD_DIMS
    if config.attention_backend == "reference" or (config.attention_backend == "auto" and not has_kernels):
        return Engine(model, pool)
    attention = FlashInferAttention(pool, model.config.num_q_heads)
    if config.cuda_graph_max_bs == 0:
        return Engine(model, pool, attention)
    # A sequence is no longer than the model allows, nor than the pool.
    max_tokens = min(model.config.max_position_embeddings, config.num_pages * config.page_size)
    graphs = DecodeGraphs(
        model, attention, device, config.cuda_graph_max_bs, layout.num_pages_for(max_tokens), on_progress
    )
    return Engine(model, pool, attention, graphs)
