"""One model on one device: runs batches through weights, pool, attention and sampler."""

from typing import TYPE_CHECKING

import torch

from engine.attention.base import AttentionBackend
from engine.base import EngineBase
from engine.batch import Batch
from engine.kvcache.pool import KvPool
from engine.models.base import Model
from engine.output import ForwardOutput
from engine.sampler import SamplerOutput, sample
from engine.upload import to_device
from tandem.sampling_params import TokenLogprobs

if TYPE_CHECKING:
    from engine.graph_runner import DecodeGraphs


class _EngineOutput(ForwardOutput):
    """
    Attributes:
        device_token_ids: (num_rows,) int64 on the device. Memory of the graphs may be among it: then it holds until the
            next graph runs.
    """

    def __init__(self, sampled: SamplerOutput) -> None:
        self.device_token_ids = sampled.token_ids
        self._logprobs = sampled.logprobs

    def logprobs(self) -> list[TokenLogprobs | None]:
        num_rows = len(self.token_ids())
        return self._logprobs.to_rows(num_rows) if self._logprobs else [None] * num_rows


class _CpuForwardOutput(_EngineOutput):
    """A forward on the CPU has completed when it returns."""

    def done(self) -> bool:
        return True

    def token_ids(self) -> list[int]:
        return self.device_token_ids.tolist()


class _CudaForwardOutput(_EngineOutput):
    """A forward whose tokens are on their way to pinned memory; the last event is after all that the forward does."""

    def __init__(self, sampled: SamplerOutput, began: torch.cuda.Event) -> None:
        """Args: began: recorded before anything that the forward does."""
        super().__init__(sampled)
        self._token_ids = sampled.token_ids.to("cpu", non_blocking=True)
        self._began = began
        self._ended = torch.cuda.Event(enable_timing=True)
        self._ended.record()

    def done(self) -> bool:
        return self._ended.query()

    def token_ids(self) -> list[int]:
        self._ended.synchronize()
        return self._token_ids.tolist()

    def duration_s(self) -> float:
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1e3


class Engine(EngineBase):
    """Runs batches of sequences through a model."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        attention: AttentionBackend,
        graphs: "DecodeGraphs | None" = None,
        model_fingerprint: str = "",
    ) -> None:
        """Args: attention: over the pool; graphs: of decode steps, None: each kernel is launched."""
        super().__init__(pool, model_fingerprint)
        self.model = model
        self.device = pool.device
        self._attention = attention
        self._graphs = graphs

    @property
    def is_asynchronous(self) -> bool:
        return self.device.type == "cuda"

    @torch.inference_mode()
    def forward(self, batch: Batch) -> ForwardOutput:
        fed_ids = None
        if batch.feed is not None:
            assert isinstance(batch.feed.output, _EngineOutput)
            fed_ids = batch.feed.output.device_token_ids
        if self.device.type == "cpu":
            output: ForwardOutput = _CpuForwardOutput(self._run(batch, fed_ids))
        else:
            began = torch.cuda.Event(enable_timing=True)
            began.record()
            output = _CudaForwardOutput(self._run_graph(batch, fed_ids) or self._run(batch, fed_ids), began)
        self.counters.count(batch)
        return output

    def _run(self, batch: Batch, fed_ids: torch.Tensor | None) -> SamplerOutput:
        self._attention.plan(batch)
        rows = to_device(batch.logits_rows(), self.device)
        input_ids = batch.input_ids(self.device, fed_ids)
        logits = self.model.forward(input_ids, batch.positions(self.device), self._attention, rows)
        return sample(logits.float(), batch.sampled_sequences(), None if fed_ids is None else input_ids)

    def _run_graph(self, batch: Batch, fed_ids: torch.Tensor | None) -> SamplerOutput | None:
        """A decode step in one launch, if there is a graph for it."""
        if self._graphs is None or batch.mode != "decode":
            return None
        output = self._graphs.run(batch, fed_ids)
        if output is None:
            return None
        if all(s.sampling.needs_argmax_only for s in batch.sequences):
            return SamplerOutput(output.most_likely)
        return sample(output.logits.float(), batch.sequences, None if fed_ids is None else output.input_ids)
