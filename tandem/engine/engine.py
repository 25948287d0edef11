"""One model on one device: weights, pool, attention and sampler put together."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandem.config import EngineConfig
from tandem.engine.attention.base import AttentionBackend
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.base import EngineBase, EngineCounters, ForwardOutput
from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import CpuKvPool, KvPool
from tandem.engine.models.base import Model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.registry import build_model
from tandem.engine.sampler import SamplerOutput, sample
from tandem.engine.weights.loader import checkpoint_weights, dummy_weights
from tandem.sampling_params import TokenLogprobs

if TYPE_CHECKING:
    from tandem.engine.graph_runner import DecodeGraphs

logger = logging.getLogger(__name__)


class _CpuForwardOutput(ForwardOutput):
    """A forward on the CPU has completed when it returns."""

    def __init__(self, sampled: SamplerOutput) -> None:
        self._token_ids: list[int] = sampled.token_ids.tolist()
        self._logprobs = sampled.logprobs

    def done(self) -> bool:
        return True

    def token_ids(self) -> list[int]:
        return self._token_ids

    def logprobs(self) -> list[TokenLogprobs | None]:
        num_rows = len(self._token_ids)
        return self._logprobs.to_rows(num_rows) if self._logprobs else [None] * num_rows


class _CudaForwardOutput(ForwardOutput):
    """A forward whose tokens are on their way to pinned memory; the event is after all that the forward does."""

    def __init__(self, sampled: SamplerOutput) -> None:
        self._token_ids = sampled.token_ids.to("cpu", non_blocking=True)
        self._logprobs = sampled.logprobs
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        return self._event.query()

    def token_ids(self) -> list[int]:
        self._event.synchronize()
        return self._token_ids.tolist()

    def logprobs(self) -> list[TokenLogprobs | None]:
        num_rows = len(self._token_ids)
        return self._logprobs.to_rows(num_rows) if self._logprobs else [None] * num_rows


class Engine(EngineBase):
    """Runs batches of sequences through a model."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        attention: AttentionBackend | None = None,
        graphs: "DecodeGraphs | None" = None,
    ) -> None:
        """Args: attention: None: the reference backend; graphs: of decode steps, None: each kernel is launched."""
        self.counters = EngineCounters()
        self.model = model
        self.pool = pool
        self.device = pool.kv.device
        self._attention = attention or ReferenceAttention(pool, model.config.num_q_heads)
        self._graphs = graphs

    @torch.inference_mode()
    def forward(self, batch: Batch) -> ForwardOutput:
        sampled = self._run_graph(batch) or self._run(batch)
        self.counters.count(batch)
        return _CudaForwardOutput(sampled) if self.device.type == "cuda" else _CpuForwardOutput(sampled)

    def _run(self, batch: Batch) -> SamplerOutput:
        self._attention.plan(batch)
        rows = torch.tensor(batch.logits_rows(), dtype=torch.int64, device=self.device)
        logits = self.model.forward(batch.input_ids(self.device), batch.positions(self.device), self._attention, rows)
        return sample(logits, batch.sampled_sequences())

    def _run_graph(self, batch: Batch) -> SamplerOutput | None:
        """A decode step in one launch, if there is a graph for it."""
        if self._graphs is None or batch.phase != "decode":
            return None
        output = self._graphs.run(batch)
        if output is None:
            return None
        logits, most_likely = output
        if all(s.sampling.needs_argmax_only for s in batch.sequences):
            return SamplerOutput(most_likely)
        return sample(logits, batch.sequences)


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
