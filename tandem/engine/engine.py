"""One model on one device: runs batches through weights, pool, attention and sampler."""

from typing import TYPE_CHECKING

import torch

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.base import EngineBase, EngineCounters, ForwardOutput
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.models.base import Model
from tandem.engine.sampler import SamplerOutput, sample
from tandem.sampling_params import TokenLogprobs

if TYPE_CHECKING:
    from tandem.engine.graph_runner import DecodeGraphs


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
