"""Memory that weights and pools take, checked before anything is loaded. Imports no torch."""

from dataclasses import replace

from tandem.adapters import MAX_LOADED
from tandem.engine.adapters.modules import slot_numbers
from tandem.engine.config import EngineConfig
from tandem.engine.draft_models.config import DrafterConfig, drafter_of
from tandem.engine.floors import BYTES_PER_NUMBER, weight_bytes
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.config import ModelConfig

MIB, GIB = 2**20, 2**30
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def num_weight_bytes(engine: EngineConfig, model: ModelConfig) -> int:
    """Without norms, biases and scales (less than a hundredth); with slots of adapters and a drafter.

    Raises:
        ValueError: the model takes no adapters, but the engine does, or the drafter does not fit the model.
    """
    slots = 0
    if engine.max_loras:
        slots = engine.max_loras * slot_numbers(model, engine.max_lora_rank) * _DTYPE_BYTES[engine.dtype]
    drafter = drafter_of(engine, model)
    return slots + _base_bytes(engine, model) + (0 if drafter is None else _drafter_bytes(engine, drafter))


def _drafter_bytes(engine: EngineConfig, drafter: DrafterConfig) -> int:
    if engine.device != "cpu" and engine.dtype == "bfloat16":
        return drafter.weight_bytes
    return drafter.without_quantization().weight_bytes // BYTES_PER_NUMBER * _DTYPE_BYTES[engine.dtype]


def _base_bytes(engine: EngineConfig, model: ModelConfig) -> int:
    if engine.device != "cpu" and engine.dtype == "bfloat16":
        return weight_bytes(model)
    # FP8 weights become plain ones.
    return weight_bytes(replace(model, quantization=None)) // BYTES_PER_NUMBER * _DTYPE_BYTES[engine.dtype]


def num_pool_bytes(engine: EngineConfig, layout: PageLayout) -> int:
    """Without num_pages, a pool has at least the pages of one sequence."""
    num_pages = engine.num_pages or layout.num_pages_for(engine.max_model_len or 1)
    return num_pages * layout.page_bytes


def num_host_cache_bytes(engine: EngineConfig, model: ModelConfig, num_ranks: int) -> int:
    """Returns the most host memory of one worker for loaded adapters, on `num_ranks` of its ranks."""
    if not engine.max_loras:
        return 0
    of_rank = slot_numbers(model, engine.max_lora_rank, engine.degree) * _DTYPE_BYTES[engine.dtype]
    return num_ranks * min(engine.adapter_limits.host_bytes, MAX_LOADED * of_rank)


def check_memory(
    engine: EngineConfig,
    model: ModelConfig,
    layout: PageLayout,
    available_bytes: int,
    *,
    num_workers: int = 1,
    num_ranks: int = 1,
    where: str = "",
) -> None:
    """Checks that weights and pools of all workers fit, and on CPUs the adapters that they keep in host memory.

    Args:
        layout: page of a worker of one rank.
        num_ranks: those of the engine's ranks that share the available memory.
        where: begins the message, if given.

    Raises:
        ValueError: they do not; the message says what to change.
    """
    weights = num_workers * num_weight_bytes(engine, model) * num_ranks // engine.degree
    layout, num_pools = layout.shard(0, engine.degree), num_workers * num_ranks
    pools = num_pools * num_pool_bytes(engine, layout)
    kept = 0 if engine.device != "cpu" else num_workers * num_host_cache_bytes(engine, model, num_ranks)
    if weights + pools + kept <= available_bytes:
        return
    memory = "GPU memory" if engine.device != "cpu" else "memory"
    workers, own = ("one worker", "a pool") if num_workers == 1 else (f"{num_workers} workers", f"{num_workers} pools")
    free = f"but only {available_bytes / MIB:.0f} MiB of {memory} are free"
    if weights >= available_bytes:
        changes = ["a smaller model"]
        if engine.device != "cpu" and model.quantization is None:
            changes.append("FP8 weights (`quantization` fp8)")
        if num_workers > 1:
            changes.append("fewer workers")
        raise ValueError(
            f"{where}the weights of {workers} need {weights / MIB:.0f} MiB, {free}; use {', '.join(changes)}, or end "
            "what else uses the memory"
        )
    if weights + pools <= available_bytes:
        left = (available_bytes - weights - pools) / (num_workers * num_ranks)
        raise ValueError(
            f"{where}adapters in host memory of {workers} may take {kept / MIB:.0f} MiB beside "
            f"{(weights + pools) / MIB:.0f} MiB of weights and pools, {free}; use a lora_host_memory of at most "
            f"{int(100 * left / GIB) / 100}"
        )
    most = (available_bytes - weights) // (num_pools * layout.page_bytes)
    if not most:
        change = "a smaller model"
    elif engine.num_pages:
        change = f"a num_pages of at most {most}"
    else:
        change = f"a max_model_len of at most {most * layout.page_size}"
    raise ValueError(
        f"{where}{own} of {pools // num_pools // layout.page_bytes} pages of {layout.page_bytes} bytes need "
        f"{pools / MIB:.0f} MiB beside {weights / MIB:.0f} MiB of weights, {free}; use {change}"
    )
