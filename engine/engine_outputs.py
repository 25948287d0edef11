"""Outputs of an engine's forward passes, on CPUs and GPUs."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from tandem.engine.batch import Batch
from tandem.engine.collectives.base import Collectives
from tandem.engine.embeddings import PooledPrompts
from tandem.engine.kvcache.base import Completion
from tandem.engine.output import ForwardOutput
from tandem.engine.prompt_logprobs import ScoredPrompts
from tandem.engine.ranks.launches import RankLaunches
from tandem.engine.sampler import SamplerOutput
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import TokenLogprobs


class Launched(NamedTuple):
    """
    Attributes:
        choose: samples from the logits, whose memory is valid until the next launch.
    """

    choose: Callable[[], SamplerOutput]
    scored: ScoredPrompts | None = None
    pooled: PooledPrompts | None = None


class OnFollowers(NamedTuple):
    """A forward pass on the other ranks, which may complete it after the leader has."""

    ranks: RankLaunches
    number: int
    collectives: Collectives

    def done(self) -> bool:
        if self.ranks.num_completed() < self.number:
            return False
        self.check()
        return True

    def check(self) -> None:
        """Call it after the pass has ended here, before its results are used. Raises RuntimeError if an operation
        between the ranks was aborted, which ends the pass without results."""
        self.collectives.check()


class EngineOutput(ForwardOutput):
    def __init__(self, batch: Batch, launched: Launched, on_followers: OnFollowers | None) -> None:
        self._choose: Callable[[], SamplerOutput] | None = launched.choose
        self._scored = launched.scored
        self._pooled = launched.pooled
        self._num_sequences = len(batch.sequences)
        self._num_decoded = len(batch.decoded)
        self._sampled: SamplerOutput | None = None
        self._on_followers = on_followers

    def done(self) -> bool:
        if self._sampled is None or not self._is_computed():
            return False
        return self._on_followers is None or self._on_followers.done()

    def _is_computed(self) -> bool:
        return True

    @property
    def fed_ids(self) -> torch.Tensor:
        """(num_decoded,) int64 on the device; in graph memory valid until the next graph runs."""
        return self._chosen.token_ids[: self._num_decoded]

    @property
    def _chosen(self) -> SamplerOutput:
        assert self._sampled is not None, "its tokens have not been chosen"
        return self._sampled

    @torch.inference_mode()
    def sample(self) -> None:
        # Also drops the logits: later forward passes need the memory.
        choose, self._choose = self._choose, None
        if choose is not None:
            self._take(choose())

    def _take(self, sampled: SamplerOutput) -> None:
        self._sampled = sampled

    def logprobs(self) -> list[TokenLogprobs | None]:
        num_rows = len(self.token_ids())
        logprobs = self._chosen.logprobs
        return logprobs.to_rows(num_rows) if logprobs else [None] * num_rows

    def prompt_logprobs(self) -> list[PackedLogprobs | None]:
        if self._scored is None:
            return [None] * self._num_sequences
        # Sampling is the last operation of the forward pass.
        self.token_ids()
        return self._scored.to_sequences(self._num_sequences)

    def embeddings(self) -> list[bytes | None]:
        if self._pooled is None:
            return [None] * self._num_sequences
        # Sampling is the last operation of the forward pass, even without a token to sample.
        self.token_ids()
        return self._pooled.to_sequences(self._num_sequences)


class CpuForwardOutput(EngineOutput):
    def token_ids(self) -> list[int]:
        return self._chosen.token_ids.tolist()


class CudaForwardOutput(EngineOutput):
    """Tokens are copied to pinned memory, before the last event."""

    def __init__(
        self, batch: Batch, launched: Launched, on_followers: OnFollowers | None, began: torch.cuda.Event
    ) -> None:
        super().__init__(batch, launched, on_followers)
        self._began = began
        self._ended = torch.cuda.Event(enable_timing=True)

    def _take(self, sampled: SamplerOutput) -> None:
        super()._take(sampled)
        self._token_ids = sampled.token_ids.to("cpu", non_blocking=True)
        self._ended.record()

    def _is_computed(self) -> bool:
        return self._ended.query()

    def token_ids(self) -> list[int]:
        self._ended.synchronize()
        if self._on_followers is not None:
            self._on_followers.check()
        return self._token_ids.tolist()

    def duration_s(self) -> float:
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1e3


class Computed(Completion):
    """Of a CPU."""

    def done(self) -> bool:
        return True


class Recorded(Completion):
    """Of a GPU."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        return self._event.query()
