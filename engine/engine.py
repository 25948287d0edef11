"""One model on one device: runs batches through weights, pool, attention and sampler."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch
from tandem.engine.embeddings import PooledPrompts, pool_prompts
from tandem.engine.grammars import Grammars
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.models.base import Model
from tandem.engine.output import ForwardOutput
from tandem.engine.prompt_logprobs import ScoredPrompts, score_prompts
from tandem.engine.rows import select_rows
from tandem.engine.sampler import SamplerOutput, sample
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import to_device
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import TokenLogprobs

if TYPE_CHECKING:
    from tandem.engine.graph_runner import DecodeGraphs, GraphOutput
    from tandem.engine.mixed_graphs import MixedGraphs
    from tandem.engine.prefill_graphs import PrefillGraphs


class _Launched(NamedTuple):
    """
    Attributes:
        choose: samples from the logits, whose memory is valid until the next launch.
    """

    choose: Callable[[], SamplerOutput]
    scored: ScoredPrompts | None = None
    pooled: PooledPrompts | None = None


class _EngineOutput(ForwardOutput):
    def __init__(self, batch: Batch, launched: _Launched) -> None:
        self._choose: Callable[[], SamplerOutput] | None = launched.choose
        self._scored = launched.scored
        self._pooled = launched.pooled
        self._num_sequences = len(batch.sequences)
        self._num_decoded = len(batch.decoded)
        self._sampled: SamplerOutput | None = None

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


class _CpuForwardOutput(_EngineOutput):
    def done(self) -> bool:
        return self._sampled is not None

    def token_ids(self) -> list[int]:
        return self._chosen.token_ids.tolist()


class _CudaForwardOutput(_EngineOutput):
    """Tokens are copied to pinned memory, before the last event."""

    def __init__(self, batch: Batch, launched: _Launched, began: torch.cuda.Event) -> None:
        super().__init__(batch, launched)
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


def _nothing() -> None:
    """The default of `meanwhile`."""


class Engine(EngineBase):
    def __init__(
        self,
        model: Model,
        pool: KvPool,
        attention: AttentionBackend,
        graphs: "DecodeGraphs | None" = None,
        prefill_graphs: "PrefillGraphs | None" = None,
        model_fingerprint: str = "",
        grammars: Grammars | None = None,
        *,
        mixed_steps: bool = False,
        mixed_graphs: "MixedGraphs | None" = None,
    ) -> None:
        super().__init__(pool, model_fingerprint, grammars)
        self.model = model
        self.experts = model.config.experts
        self.expert_counts = model.expert_counts
        self.device = pool.device
        self._attention = attention
        self._graphs = graphs
        self._prefill_graphs = prefill_graphs
        self._mixed_graphs = mixed_graphs
        self._mixed_steps = mixed_steps and attention.computes_mixed
        self._mixed_sizes = mixed_graphs.sizes if mixed_graphs is not None and self._mixed_steps else None

    def shallow(self) -> "Engine":
        """Returns an engine with one layer, on the same pool, without graphs."""
        return Engine(self.model.shallow(), self.pool, self._attention)

    @property
    def is_asynchronous(self) -> bool:
        return self.device.type == "cuda"

    def mixes(self, num_decoded: int, num_prompt_tokens: int, num_prompts: int = 1) -> bool:
        if not self._mixed_steps:
            return False
        sizes = self._mixed_sizes
        if sizes is not None and sizes.smallest(num_decoded, num_prompt_tokens, num_prompts) is not None:
            return True
        # A prefill graph and a decode graph end before the kernels of one forward pass are launched.
        return self._prefill_graphs is None or not self._prefill_graphs.fit(num_prompt_tokens)

    def num_unpadded(self, num_decoded: int, num_prompt_tokens: int) -> int:
        sizes = self._mixed_sizes
        return num_prompt_tokens if sizes is None else sizes.num_unpadded(num_decoded, num_prompt_tokens)

    def num_padded(self, num_decoded: int, num_prompt_tokens: int) -> int:
        sizes = self._mixed_sizes
        return num_prompt_tokens if sizes is None else sizes.num_padded(num_decoded, num_prompt_tokens)

    @torch.inference_mode()
    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        fed_ids = None
        if batch.feed is not None:
            assert isinstance(batch.feed.output, _EngineOutput)
            fed_ids = batch.feed.output.fed_ids
        output: _EngineOutput
        if self.device.type == "cpu":
            output = _CpuForwardOutput(batch, self._run(batch, fed_ids, _nothing))
        else:
            began = torch.cuda.Event(enable_timing=True)
            began.record()
            launched = self._run_graph(batch, fed_ids) or self._run(batch, fed_ids, meanwhile or _nothing)
            output = _CudaForwardOutput(batch, launched, began)
        if not batch.waits_for_tokens:
            output.sample()
        self.counters.count(batch)
        return output

    def _run(self, batch: Batch, fed_ids: torch.Tensor | None, meanwhile: Callable[[], None]) -> _Launched:
        self._attention.plan(batch)
        meanwhile()
        rows = to_device(batch.logits_rows(), self.device)
        input_ids, positions = batch.input_ids(self.device, fed_ids), batch.positions(self.device)
        scored: ScoredPrompts | None = None
        pooled: PooledPrompts | None = None
        if batch.scores_prompts:
            hidden = self.model.hidden_states(input_ids, positions, self._attention, meanwhile=meanwhile)
            scored = score_prompts(self.model, hidden, batch)
            logits = self.model.logits(hidden[rows])
            if pooled_rows := batch.pooled_rows():
                pooled = pool_prompts(self.model, hidden[to_device(pooled_rows, self.device)], batch)
        elif pooled_rows := batch.pooled_rows():
            both = torch.cat((rows, to_device(pooled_rows, self.device)))
            hidden = self.model.hidden_states(input_ids, positions, self._attention, both, meanwhile)
            logits = self.model.logits(hidden[: len(rows)])
            pooled = pool_prompts(self.model, hidden[len(rows) :], batch)
        else:
            wanted = None if len(rows) == len(input_ids) else rows
            logits = self.model.forward(input_ids, positions, self._attention, wanted, meanwhile=meanwhile)
        newest_ids = None if fed_ids is None else select_rows(input_ids, rows)
        choose = self._choice(logits, batch.sampled_sequences(), newest_ids)
        return _Launched(choose, scored, pooled)

    def _run_graph(self, batch: Batch, fed_ids: torch.Tensor | None) -> _Launched | None:
        output: GraphOutput | None = None
        sequences = batch.sequences
        if batch.mode == "decode" and self._graphs is not None:
            output = self._graphs.run(batch, fed_ids)
        elif batch.mode == "prefill" and self._prefill_graphs is not None:
            output = self._prefill_graphs.run(batch)
            sequences = batch.sampled_sequences()
        elif batch.mode == "mixed" and self._mixed_graphs is not None:
            output = self._mixed_graphs.run(batch, fed_ids)
            sequences = batch.sampled_sequences()
        if output is None:
            return None
        if all(s.needs_argmax_only for s in sequences):
            return _Launched(functools.partial(SamplerOutput, output.most_likely))
        return _Launched(self._choice(output.logits, sequences, None if fed_ids is None else output.newest_ids))

    def _choice(
        self, logits: torch.Tensor, sequences: Sequence[TokenSequence], input_ids: torch.Tensor | None
    ) -> Callable[[], SamplerOutput]:
        return lambda: sample(logits.float(), sequences, input_ids, self.grammars)
