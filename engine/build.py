"""Builds a configured engine: the model with its weights, its pool and its attention backend."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from tandem.engine.agreement import agreed_num_pages, check_equal, opened
from tandem.engine.attention.base import AttentionBackend, GraphableBackend
from tandem.engine.attention.choice import choose_backend
from tandem.engine.collectives.base import Collectives
from tandem.engine.config import EngineConfig
from tandem.engine.dry_run import Measured, free_bytes, keep_forward_memory, measure_memory, settled_free_bytes
from tandem.engine.engine import Engine
from tandem.engine.grammars import Grammars
from tandem.engine.graph_runner import DecodeGraphs
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.host_memory import available_memory_bytes
from tandem.engine.kvcache.pool import CpuKvPool, KvPool
from tandem.engine.kvcache.sizing import GIB, DeviceMemory, choose_num_pages
from tandem.engine.memory_needs import check_memory
from tandem.engine.mixed_graphs import MixedGraphs, MixedSizes
from tandem.engine.models.base import Model
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tandem.engine.prefill_graphs import PrefillGraphs
from tandem.engine.ranks.checks import check_degree
from tandem.engine.ranks.config import RankConfig
from tandem.engine.ranks.group import SINGLE_GROUP, RankGroup
from tandem.engine.ranks.launches import RankLaunches
from tandem.engine.stage_timer import StageTimer
from tandem.engine.weights.fingerprint import model_fingerprint
from tandem.engine.weights.loader import load_weights

if TYPE_CHECKING:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

logger = logging.getLogger(__name__)

# Tolerated without a warning.
SHARE_TOLERANCE = 0.01
SLOW_EXPERTS = (
    "plain torch computes this model's experts one after another, without CUDA graphs, which is slow; kernels need a "
    "GPU of compute capability 9.0 or later, at most 512 experts, at most 32 chosen ones, a hidden size that is a "
    "multiple of 32, an expert size that is a multiple of 16, and groups of experts only by sigmoid"
)


def build_engine(
    config: EngineConfig,
    pool_name: str,
    on_progress: Callable[[str], None],
    group: RankGroup = SINGLE_GROUP,
    launches: RankLaunches | None = None,
) -> Engine:
    """Loads a model, or a rank's part of it, and allocates its pool.

    On a GPU the pool's size follows from trial forward passes and a few trial graphs on a pool of one page. The real
    graphs are captured last, so their memory is an estimate; the log has the actual figure.

    Args:
        pool_name: unique among all pools of workers ever made on this host.
        on_progress: called with each stage; progress within it follows in parentheses: "(3 of 35)", "(1.2 of 16.1 GB)".
        group: the worker's ranks, which all build their engines at the same time.
        launches: of a leader with followers.

    Raises:
        ValueError: the model cannot be served as configured.
        ConnectionError, RuntimeError: another rank has ended.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    model_config = ModelConfig.from_dir(Path(config.model_dir)).quantized(config.quantization)
    device = _device(config.device)
    ranks = group.ranks
    assert config.degree == ranks.degree
    check_degree(model_config, ranks.degree)
    whole_layout = page_layout_of(model_config, config.page_size, config.dtype, config.kv_cache_dtype)
    stages = StageTimer()

    def tell(doing: str) -> None:
        stages.begin(doing)
        on_progress(doing)

    if device.type == "cpu":
        # All ranks share the memory; the others wait for the leader before they load.
        if ranks.is_leader:
            check_memory(config, model_config, whole_layout, available_memory_bytes(), num_ranks=ranks.degree)
        with opened(group, device) as collectives:
            loaded = _load_model(config, model_config, whole_layout, device, tell, group, collectives)
            tell("allocating pages")
            pool = CpuKvPool(loaded.layout, config.num_pages, _pool_name(pool_name, ranks))
            attention = loaded.backend(pool)
            check_equal(group, loaded.model, pool, attention)
            engine = Engine(
                loaded.model,
                pool,
                attention,
                model_fingerprint=loaded.fingerprint,
                grammars=_grammars(config, model_config, ranks),
                mixed_steps=config.mixed_steps,
                ranks=launches,
            )
    else:
        free_at_start = free_bytes() if ranks.degree == 1 else settled_free_bytes()
        check_memory(config, model_config, whole_layout, free_at_start)
        try:
            with opened(group, device) as collectives:
                load = partial(_load_model, config, model_config, whole_layout, device, tell, group, collectives)
                engine = _cuda_engine(config, load, free_at_start, tell, group, launches)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the GPU's memory ran out while {stages.current}: {free_at_start / GIB:.1f} GiB were free at the "
                "start; use a smaller model, a smaller chunk_size or max_batch_size, or end what else uses the GPU"
            ) from error
        except ImportError as error:
            raise ValueError(
                f"device cuda needs packages that are not installed ({error}): pip install '.[cuda13]', or '.[cuda12]' "
                "for a torch made for CUDA 12"
            ) from error
    stages.end()
    logger.info("engine ready: %s", stages)
    return engine


def why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is made without CUDA (docs/gpu.md says what to install)"
    return "torch sees no GPU here"


def _device(name: str) -> torch.device:
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device cuda is asked for, but {why_no_gpu()}; set `device` to cpu")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


class _Loaded(NamedTuple):
    """
    Attributes:
        layout: of the pages that this rank holds.
        backend: makes attention over a pool.
    """

    model: Model
    fingerprint: str
    layout: PageLayout
    backend: Callable[[KvPool], AttentionBackend]


def _load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    whole_layout: PageLayout,
    device: torch.device,
    on_progress: Callable[[str], None],
    group: RankGroup,
    collectives: Collectives | None,
) -> _Loaded:
    on_progress("loading weights")
    ranks = group.ranks
    layout, num_q_heads = whole_layout.shard(ranks.rank, ranks.degree), model_config.num_q_heads // ranks.degree
    model = build_model(model_config, getattr(torch, config.dtype), device, collectives)
    # Fail before loading weights, which takes minutes.
    backend_type = choose_backend(config, layout, num_q_heads, device)
    kv_scales = load_weights(
        model, Path(config.model_dir), config.load_format, model_config.quantization, device, on_progress
    )
    on_progress("fingerprinting weights")
    fingerprint = model_fingerprint(model, kv_scales, group)
    has_scales = config.kv_cache_dtype != "auto"

    def backend(pool: KvPool) -> AttentionBackend:
        return backend_type(pool, num_q_heads, kv_scales=kv_scales) if has_scales else backend_type(pool, num_q_heads)

    if has_scales:
        scales = "all scales are 1" if kv_scales.are_ones else "scales are the checkpoint's"
        logger.info("keys and values are kept as %s; %s", config.kv_cache_dtype, scales)
    return _Loaded(model, fingerprint, layout, backend)


def _pool_name(pool_name: str, ranks: RankConfig) -> str:
    return pool_name if ranks.is_leader else f"{pool_name}-{ranks.rank}"


def _cuda_engine(
    config: EngineConfig,
    load: Callable[[], _Loaded],
    free_at_start: int,
    on_progress: Callable[[str], None],
    group: RankGroup,
    launches: RankLaunches | None,
) -> Engine:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    model, fingerprint, layout, backend = load()
    model_config, device = model.config, torch.device("cuda", torch.cuda.current_device())
    on_progress("warming up")
    measured = _measure(config, model, backend, CudaKvPool(layout, 1, device), free_at_start, group)
    memory = measured.memory
    on_progress("allocating pages")
    fraction, longest = config.mem_fraction_static, config.max_model_len
    num_pages = agreed_num_pages(group, lambda: choose_num_pages(memory, layout, config.num_pages, fraction, longest))
    pool = CudaKvPool(layout, num_pages, device)
    attention = backend(pool)
    check_equal(group, model, pool, attention)
    group.check_equal("the sizes of CUDA graphs", (measured.prefill_sizes, measured.mixed_sizes))
    for_graphs = _for_graphs(attention, model)
    if not model.is_capturable and config.dtype != "float32":
        logger.warning("%s", SLOW_EXPERTS)
    graphs, prefill_graphs, mixed_graphs = None, None, None
    num_table_pages = layout.num_pages_for(
        min(longest or model_config.max_position_embeddings, num_pages * layout.page_size)
    )
    if for_graphs is not None and config.cuda_graph_max_bs:
        graphs = DecodeGraphs(model, for_graphs, device, config.cuda_graph_max_bs, num_table_pages, on_progress)
    if for_graphs is not None and measured.prefill_sizes:
        prefill_graphs = PrefillGraphs(model, for_graphs, device, measured.prefill_sizes, num_table_pages, on_progress)
    if for_graphs is not None and measured.mixed_sizes.pairs():
        mixed_graphs = MixedGraphs(model, for_graphs, device, measured.mixed_sizes, num_table_pages, on_progress)
    _log_memory(config, memory, num_pages, layout, free_at_start)
    if config.workers_per_gpu > 1:
        keep_forward_memory(memory, device)
    if model.expert_counts is not None:
        # Of trial forward passes.
        model.expert_counts.reset()
    return Engine(
        model,
        pool,
        attention,
        graphs,
        prefill_graphs,
        fingerprint,
        _grammars(config, model_config, group.ranks),
        mixed_steps=config.mixed_steps,
        mixed_graphs=mixed_graphs,
        ranks=launches,
    )


def _for_graphs(attention: AttentionBackend, model: Model) -> GraphableBackend | None:
    """Returns the backend if it and the model can be captured."""
    return attention if isinstance(attention, GraphableBackend) and model.is_capturable else None


def _grammars(config: EngineConfig, model_config: ModelConfig, ranks: RankConfig) -> Grammars | None:
    # Followers sample nothing.
    return None if not ranks.is_leader else Grammars.of_model(Path(config.model_dir), model_config.vocab_size)


def _measure(
    config: EngineConfig,
    model: Model,
    backend: Callable[[KvPool], AttentionBackend],
    pool: "CudaKvPool",
    free_at_start: int,
    group: RankGroup,
) -> Measured:
    attention = backend(pool)
    engine = Engine(model, pool, attention, mixed_steps=config.mixed_steps)
    for_graphs = _for_graphs(attention, model)
    if for_graphs is None:
        return measure_memory(engine, config, free_at_start, None, None, None, group)

    def capture(batch_size: int) -> object:
        return DecodeGraphs(model, for_graphs, engine.device, batch_size, 1, lambda doing: None)

    def capture_prefill(sizes: Sequence[int]) -> object:
        return PrefillGraphs(model, for_graphs, engine.device, sizes, 1, lambda doing: None)

    def capture_mixed(sizes: MixedSizes) -> object:
        return MixedGraphs(model, for_graphs, engine.device, sizes, 1, lambda doing: None)

    has_mixed = config.mixed_steps and attention.computes_mixed
    has_graphs = config.cuda_graph_max_bs > 0 and config.prefill_cuda_graphs
    return measure_memory(
        engine,
        config,
        free_at_start,
        capture if config.cuda_graph_max_bs else None,
        capture_prefill if config.prefill_cuda_graphs else None,
        capture_mixed if has_mixed and has_graphs else None,
        group,
    )


def _log_memory(
    config: EngineConfig, memory: DeviceMemory, num_pages: int, layout: PageLayout, free_at_start: int
) -> None:
    free = free_bytes()
    taken = free_at_start - free
    pool = (num_pages + 1) * layout.page_bytes
    logger.info(
        "GPU memory in GiB: %.1f for this worker, weights and workspaces %.2f, %d pages %.2f, CUDA graphs %.2f "
        "(%.2f kept), largest forward %.2f, free %.2f",
        memory.share / GIB,
        memory.weights / GIB,
        num_pages,
        pool / GIB,
        (taken - memory.weights - pool) / GIB,
        memory.graphs / GIB,
        memory.forward / GIB,
        free / GIB,
    )
    if config.num_pages == 0 and taken > memory.share * (config.mem_fraction_static + SHARE_TOLERANCE):
        logger.warning(
            "weights, CUDA graphs and pool take %.3f of the worker's GPU memory, more than mem_fraction_static %g: the "
            "graphs took more than their trial said",
            taken / memory.share,
            config.mem_fraction_static,
        )
