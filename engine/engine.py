"""One model on one device: runs batches through weights, pool, attention and sampler."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from engine.attention.base import AttentionBackend
from engine.base import EngineBase
from engine.batch import Batch
from engine.grammars import Grammars
from engine.kvcache.pool import KvPool
from engine.models.base import Model
from engine.output import ForwardOutput
from engine.sampler import SamplerOutput, sample
from engine.token_sequence import TokenSequence
from engine.upload import to_device
from tandem.sampling_params import TokenLogprobs

if TYPE_CHECKING:
    from engine.graph_runner import DecodeGraphs


class _EngineOutput(ForwardOutput):
    """A forward that has been launched, and the choice of tokens behind it, which may wait."""

    def __init__(self, choose: Callable[[], SamplerOutput]) -> None:
        """Args: choose: samples from the forward's logits, whose memory holds until the next forward is launched."""
        self._choose: Callable[[], SamplerOutput] | None = choose
        self._sampled: SamplerOutput | None = None

    @property
    def device_token_ids(self) -> torch.Tensor:
        """(num_rows,) int64 on the device. Memory of the graphs may be among it: then it holds until the next graph
        runs."""
        return self._chosen.token_ids

    @property
    def _chosen(self) -> SamplerOutput:
        assert self._sampled is not None, "its tokens have not been chosen"
        return self._sampled

    @torch.inference_mode()
    def sample(self) -> None:
        # With it the logits go, whose memory the forwards behind this one need.
        choose, self._choose = self._choose, None
        if choose is not None:
            self._take(choose())

    def _take(self, sampled: SamplerOutput) -> None:
        self._sampled = sampled

    def logprobs(self) -> list[TokenLogprobs | None]:
        num_rows = len(self.token_ids())
        logprobs = self._chosen.logprobs
        return logprobs.to_rows(num_rows) if logprobs else [None] * num_rows


class _CpuForwardOutput(_EngineOutput):
    """A forward on the CPU has completed when it returns."""

    def done(self) -> bool:
        return self._sampled is not None

    def token_ids(self) -> list[int]:
        return self.device_token_ids.tolist()


class _CudaForwardOutput(_EngineOutput):
    """A forward whose tokens are on their way to pinned memory; the last event is after all that the forward does."""

    def __init__(self, choose: Callable[[], SamplerOutput], began: torch.cuda.Event) -> None:
        """Args: began: recorded before anything that the forward does."""
        super().__init__(choose)
        self._began = began
        self._ended = torch.cuda.Event(enable_timing=True)

    def _take(self, sampled: SamplerOutput) -> None:
        super()._take(sampled)
        self._token_ids = sampled.token_ids.to("cpu", non_blocking=True)
        self._ended.record()

    def done(self) -> bool:
        return self._sampled is not None and self._ended.query()

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
        grammars: Grammars | None = None,
    ) -> None:
        """Args: attention: over the pool; graphs: of decode steps, None: each kernel is launched."""
        super().__init__(pool, model_fingerprint, grammars)
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
        output: _EngineOutput
        if self.device.type == "cpu":
            output = _CpuForwardOutput(self._run(batch, fed_ids))
        else:
            began = torch.cuda.Event(enable_timing=True)
            began.record()
            output = _CudaForwardOutput(self._run_graph(batch, fed_ids) or self._run(batch, fed_ids), began)
        if not batch.waits_for_tokens:
            output.sample()
        self.counters.count(batch)
        return output

    def _run(self, batch: Batch, fed_ids: torch.Tensor | None) -> Callable[[], SamplerOutput]:
        """Launches the forward; what it returns chooses the tokens."""
        self._attention.plan(batch)
        rows = to_device(batch.logits_rows(), self.device)
        input_ids = batch.input_ids(self.device, fed_ids)
        logits = self.model.forward(input_ids, batch.positions(self.device), self._attention, rows)
        return self._choice(logits, batch.sampled_sequences(), None if fed_ids is None else input_ids)

    def _run_graph(self, batch: Batch, fed_ids: torch.Tensor | None) -> Callable[[], SamplerOutput] | None:
        """A decode step in one launch, if there is a graph for it; what it returns chooses the tokens."""
        if self._graphs is None or batch.mode != "decode":
            return None
        output = self._graphs.run(batch, fed_ids)
        if output is None:
            return None
        if all(s.sampling.needs_argmax_only for s in batch.sequences):
            return lambda: SamplerOutput(output.most_likely)
        return self._choice(output.logits, batch.sequences, None if fed_ids is None else output.input_ids)

    def _choice(
        self, logits: torch.Tensor, sequences: Sequence[TokenSequence], input_ids: torch.Tensor | None
    ) -> Callable[[], SamplerOutput]:
        """Args: as of `sample`."""
        return lambda: sample(logits.float(), sequences, input_ids, self.grammars)
