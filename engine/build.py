"""Builds a configured engine: the model with its weights, its pool and its attention backend."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tandem.engine.adapters.follower import FollowerAdapters
from tandem.engine.adapters.manager import AdapterManager
from tandem.engine.agreement import check_equal, opened
from tandem.engine.config import EngineConfig
from tandem.engine.cuda_build import build_on_gpu
from tandem.engine.draft_models.config import engine_page_layout
from tandem.engine.dry_run import free_bytes, settled_free_bytes
from tandem.engine.engine import Engine
from tandem.engine.kvcache.host_memory import available_memory_bytes
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.kvcache.sizing import GIB
from tandem.engine.loaded_model import load_grammars, load_model
from tandem.engine.memory_needs import check_memory
from tandem.engine.models.config import ModelConfig
from tandem.engine.ranks.checks import check_degree
from tandem.engine.ranks.config import RankConfig
from tandem.engine.ranks.group import SINGLE_GROUP, RankGroup
from tandem.engine.ranks.launches import RankLaunches
from tandem.engine.stage_timer import StageTimer

logger = logging.getLogger(__name__)


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
    whole_layout = engine_page_layout(config, model_config)
    stages = StageTimer()

    def tell(doing: str) -> None:
        stages.begin(doing)
        on_progress(doing)

    if device.type == "cpu":
        # All ranks share the memory; the others wait for the leader before they load.
        if ranks.is_leader:
            check_memory(config, model_config, whole_layout, available_memory_bytes(), num_ranks=ranks.degree)
        with opened(group, device) as collectives:
            loaded = load_model(config, model_config, whole_layout, device, tell, group, collectives)
            tell("allocating pages")
            pool = CpuKvPool(loaded.layout, config.num_pages, _pool_name(pool_name, ranks))
            attention = loaded.backend(pool)
            check_equal(group, loaded.model, pool, attention)
            engine = Engine(
                loaded.model,
                pool,
                attention,
                model_fingerprint=loaded.fingerprint,
                grammars=load_grammars(config, model_config, ranks),
                mixed_steps=config.mixed_steps,
                ranks=launches,
                slots=loaded.slots,
            )
    else:
        free_at_start = free_bytes() if ranks.degree == 1 else settled_free_bytes()
        check_memory(config, model_config, whole_layout, free_at_start)
        try:
            with opened(group, device) as collectives:
                load = partial(load_model, config, model_config, whole_layout, device, tell, group, collectives)
                engine = build_on_gpu(config, load, free_at_start, tell, group, launches)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the GPU's memory ran out while {stages.current}: {free_at_start / GIB:.1f} GiB were free at the "
                "start; use a smaller model, a smaller chunk_size or max_batch_size, or end what else uses the GPU"
            ) from error
        except ImportError as error:
            raise ValueError(
                f"`device` cuda needs packages that are not installed ({error}): pip install '.[cuda13]', or "
                "'.[cuda12]' for a torch made for CUDA 12"
            ) from error
    if engine.slots is not None:
        limits = config.adapter_limits
        if ranks.is_leader:
            engine.adapters = AdapterManager(engine.slots, model_config, limits, ranks=launches)
        else:
            engine.follower_adapters = FollowerAdapters(engine.slots, model_config, limits.host_bytes)
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


def _pool_name(pool_name: str, ranks: RankConfig) -> str:
    return pool_name if ranks.is_leader else f"{pool_name}-{ranks.rank}"
