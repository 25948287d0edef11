"""Builds an engine on a GPU. Needs CUDA."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.agreement import agreed_num_pages, check_equal
from tandem.engine.attention.base import AttentionBackend, GraphableBackend
from tandem.engine.config import MAX_PREFILL_BATCH_SIZE, EngineConfig
from tandem.engine.draft_costs import DraftCosts
from tandem.engine.draft_graphs import MAX_ROWS, SIZES, DraftGraphs, draft_graph_sizes
from tandem.engine.draft_models.drafted_model import DraftedModel
from tandem.engine.draft_models.graphed_backend import GraphableDraftedBackend
from tandem.engine.draft_models.pass_graphs import PassGraphs, pass_graph_sizes
from tandem.engine.dry_run import Measured, free_bytes, keep_forward_memory, measure_memory
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import DecodeGraphs, graph_sizes
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.kvcache.sizing import GIB, DeviceMemory, choose_num_pages
from tandem.engine.loaded_model import LoadedModel, load_grammars
from tandem.engine.mixed_graphs import MixedGraphs, MixedSizes
from tandem.engine.models.base import Model
from tandem.engine.prefill_graphs import PrefillGraphs
from tandem.engine.ranks.group import RankGroup
from tandem.engine.ranks.launches import RankLaunches

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


def build_on_gpu(
    config: EngineConfig,
    load: Callable[[], LoadedModel],
    free_at_start: int,
    on_progress: Callable[[str], None],
    group: RankGroup,
    launches: RankLaunches | None,
) -> Engine:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    model, fingerprint, layout, backend, slots = load()
    model_config, device = model.config, torch.device("cuda", torch.cuda.current_device())
    on_progress("warming up")
    measured = _measure(config, model, backend, slots, CudaKvPool(layout, 1, device), free_at_start, group)
    memory = measured.memory
    on_progress("allocating pages")
    fraction, longest = config.mem_fraction_static, config.max_model_len
    num_pages = agreed_num_pages(group, lambda: choose_num_pages(memory, layout, config.num_pages, fraction, longest))
    pool = CudaKvPool(layout, num_pages, device)
    attention = backend(pool)
    for_graphs = _for_graphs(attention, model)
    decode_sizes = graph_sizes(config.cuda_graph_max_bs) if for_graphs is not None else []
    max_drafts = config.max_drafts if attention.computes_drafts else 0
    draft_sizes = draft_graph_sizes(config.max_batch_size, max_drafts) if decode_sizes else ()
    all_sizes = decode_sizes, measured.prefill_sizes, measured.mixed_sizes, draft_sizes, measured.large_sizes
    check_equal(group, model, pool, attention, all_sizes)
    if not model.is_capturable and config.dtype != "float32":
        logger.warning("%s", SLOW_EXPERTS)
    if config.max_drafts and not max_drafts:
        logger.info("%s computes no drafts: decode steps have none", type(attention).__name__)
    graphs, prefill_graphs, large_graphs, mixed_graphs = None, None, None, None
    draft_graphs, pass_graphs = None, None
    num_table_pages = layout.num_pages_for(
        min(longest or model_config.max_position_embeddings, num_pages * layout.page_size)
    )
    if for_graphs is not None and decode_sizes:
        graphs = DecodeGraphs(model, for_graphs, device, config.cuda_graph_max_bs, num_table_pages, on_progress, slots)
    if for_graphs is not None and measured.prefill_sizes:
        prefill_graphs = PrefillGraphs(
            model, for_graphs, device, measured.prefill_sizes, num_table_pages, on_progress, slots
        )
    if for_graphs is not None and measured.large_sizes:
        large_graphs = PrefillGraphs(
            model,
            for_graphs,
            device,
            measured.large_sizes,
            num_table_pages,
            on_progress,
            max_prompts=MAX_PREFILL_BATCH_SIZE,
        )
    if for_graphs is not None and measured.mixed_sizes.pairs():
        mixed_graphs = MixedGraphs(model, for_graphs, device, measured.mixed_sizes, num_table_pages, on_progress, slots)
    if for_graphs is not None and draft_sizes:
        draft_graphs = DraftGraphs(model, for_graphs, device, draft_sizes, num_table_pages, on_progress, slots)
        if isinstance(model, DraftedModel):
            sizes = pass_graph_sizes(config.max_batch_size)
            pass_graphs = _pass_graphs(model, for_graphs, device, sizes, num_table_pages, on_progress)
    draft_costs = None
    if graphs is not None and draft_graphs is not None:
        of_passes = {} if pass_graphs is None else pass_graphs.times_s()
        draft_costs = DraftCosts(graphs.times_s((1, *SIZES)), draft_graphs.times_s(), of_passes)
    _log_memory(config, memory, num_pages, layout, free_at_start)
    if config.workers_per_gpu > 1:
        keep_forward_memory(memory, device)
    if model.expert_counts is not None:
        # Of trial forward passes.
        model.expert_counts.reset()
    engine = Engine(
        model,
        pool,
        attention,
        graphs,
        prefill_graphs,
        fingerprint,
        load_grammars(config, model_config, group.ranks),
        mixed_steps=config.mixed_steps,
        mixed_graphs=mixed_graphs,
        draft_graphs=draft_graphs,
        pass_graphs=pass_graphs,
        ranks=launches,
        slots=slots,
        large_graphs=large_graphs,
    )
    engine.max_drafts, engine.max_drafted_rows, engine.draft_costs = max_drafts, MAX_ROWS, draft_costs
    return engine


def _for_graphs(attention: AttentionBackend, model: Model) -> GraphableBackend | None:
    """Returns the backend if it and the model can be captured."""
    return attention if isinstance(attention, GraphableBackend) and model.is_capturable else None


def _pass_graphs(
    model: DraftedModel,
    attention: GraphableBackend,
    device: torch.device,
    sizes: Sequence[int],
    max_pages_per_sequence: int,
    on_progress: Callable[[str], None],
) -> PassGraphs:
    assert isinstance(attention, GraphableDraftedBackend)
    return PassGraphs(model.drafter, attention.drafter, device, sizes, model.dtype, max_pages_per_sequence, on_progress)


def _measure(
    config: EngineConfig,
    model: Model,
    backend: Callable[[KvPool], AttentionBackend],
    slots: AdapterSlots | None,
    pool: "CudaKvPool",
    free_at_start: int,
    group: RankGroup,
) -> Measured:
    attention = backend(pool)
    engine = Engine(model, pool, attention, mixed_steps=config.mixed_steps, slots=slots)
    engine.max_drafts = config.max_drafts if attention.computes_drafts else 0
    for_graphs = _for_graphs(attention, model)
    if for_graphs is None:
        return measure_memory(engine, config, free_at_start, None, None, None, None, group)

    def capture(batch_size: int) -> object:
        return DecodeGraphs(model, for_graphs, engine.device, batch_size, 1, lambda doing: None, slots)

    def capture_prefill(sizes: Sequence[int]) -> object:
        return PrefillGraphs(model, for_graphs, engine.device, sizes, 1, lambda doing: None, slots)

    def capture_large(sizes: Sequence[int]) -> object:
        return PrefillGraphs(
            model, for_graphs, engine.device, sizes, 1, lambda doing: None, max_prompts=MAX_PREFILL_BATCH_SIZE
        )

    def capture_mixed(sizes: MixedSizes) -> object:
        return MixedGraphs(model, for_graphs, engine.device, sizes, 1, lambda doing: None, slots)

    def capture_drafts(sizes: Sequence[int]) -> object:
        return DraftGraphs(model, for_graphs, engine.device, sizes, 1, lambda doing: None, slots)

    def capture_passes(sizes: Sequence[int]) -> object:
        assert isinstance(model, DraftedModel)
        return _pass_graphs(model, for_graphs, engine.device, sizes, 1, lambda doing: None)

    has_drafts = config.max_drafts > 0 and attention.computes_drafts
    has_mixed = config.mixed_steps and attention.computes_mixed
    has_graphs = config.cuda_graph_max_bs > 0 and config.prefill_cuda_graphs
    # Ranks add up large sums faster without a graph.
    has_large = config.prefill_cuda_graphs and for_graphs.graphs_new_prompts and model.collectives is None
    return measure_memory(
        engine,
        config,
        free_at_start,
        capture if config.cuda_graph_max_bs else None,
        capture_prefill if config.prefill_cuda_graphs else None,
        capture_mixed if has_mixed and has_graphs else None,
        capture_drafts if has_drafts and config.cuda_graph_max_bs else None,
        group,
        capture_large if has_large else None,
        capture_passes if has_drafts and config.cuda_graph_max_bs and isinstance(model, DraftedModel) else None,
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
