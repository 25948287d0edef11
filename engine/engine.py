"""One model on one device: runs batches through weights, pool, attention and sampler."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tandem.engine.adapters.follower import FollowerAdapters
from tandem.engine.adapters.ops import AdapterBatch
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.attention.base import AttentionBackend
from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch
from tandem.engine.draft_models.backend import DraftedBackend
from tandem.engine.draft_models.draft_maker import DraftMaker
from tandem.engine.draft_models.drafted_model import DraftedModel
from tandem.engine.drafted_row import SampledRow
from tandem.engine.embeddings import PooledPrompts, pool_prompts
from tandem.engine.engine_outputs import (
    Computed,
    CpuForwardOutput,
    CudaForwardOutput,
    EngineOutput,
    Launched,
    OnFollowers,
    Recorded,
)
from tandem.engine.grammars import Grammars
from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.models.base import Model
from tandem.engine.output import ForwardOutput
from tandem.engine.prompt_logprobs import ScoredPrompts, logits_of_scored, score_prompts, scored_rows
from tandem.engine.ranks.launches import RankLaunches
from tandem.engine.ranks.record import NO_GRAPH, GraphSize
from tandem.engine.ranks.replay import ReplayedBatch
from tandem.engine.rows import select_rows
from tandem.engine.sampler import SamplerOutput, sample
from tandem.engine.upload import to_device

if TYPE_CHECKING:
    from tandem.engine.draft_graphs import DraftGraphs
    from tandem.engine.draft_models.pass_graphs import PassGraphs
    from tandem.engine.graph_runner import DecodeGraphs, GraphOutput
    from tandem.engine.mixed_graphs import MixedGraphs
    from tandem.engine.prefill_graphs import PrefillGraphs


def _nothing() -> None:
    """The default of `meanwhile`."""


class Engine(EngineBase):
    """
    Args:
        ranks: publishes forward passes to the followers; None on a follower, on the only rank, and during trial passes,
            which all ranks launch by themselves.
        slots: of adapters; None: sequences have none.
        large_graphs: of prefills with more prompts or tokens than prefill_graphs.

    Attributes:
        follower_adapters: set on a follower with slots.
    """

    follower_adapters: FollowerAdapters | None = None

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
        draft_graphs: "DraftGraphs | None" = None,
        pass_graphs: "PassGraphs | None" = None,
        ranks: RankLaunches | None = None,
        slots: AdapterSlots | None = None,
        large_graphs: "PrefillGraphs | None" = None,
    ) -> None:
        super().__init__(pool, model_fingerprint, grammars)
        self.model = model
        self.experts = model.config.experts
        self.expert_counts = model.expert_counts
        self.device = pool.device
        self._attention = attention
        self._graphs = graphs
        self._prefill_graphs = prefill_graphs
        self._large_graphs = large_graphs
        self._mixed_graphs = mixed_graphs
        # None if sequences have no drafts, or there are no graphs at all.
        self._draft_graphs = draft_graphs
        self._mixed_steps = mixed_steps and attention.computes_mixed
        self._mixed_sizes = mixed_graphs.sizes if mixed_graphs is not None and self._mixed_steps else None
        self._ranks = ranks
        self.slots = slots
        self._collectives = model.collectives
        if isinstance(model, DraftedModel):
            assert isinstance(attention, DraftedBackend)
            self.draft_maker = DraftMaker(model, attention, self.device, pass_graphs)

    def close(self) -> None:
        if self.follower_adapters is not None:
            self.follower_adapters.close()
        if self._collectives is not None:
            self._collectives.close()
        super().close()

    def shallow(self) -> "Engine":
        """Returns an engine with one layer, on the same pool, without graphs."""
        return Engine(self.model.shallow(), self.pool, self._attention, slots=self.slots)

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
            assert isinstance(batch.feed.output, EngineOutput)
            fed_ids = batch.feed.output.fed_ids
        on_followers = None if self._ranks is None else self._publish(self._ranks, batch, fed_ids)
        output: EngineOutput
        if self.device.type == "cpu":
            output = CpuForwardOutput(batch, self._run(batch, fed_ids, _nothing), on_followers)
        else:
            began = torch.cuda.Event(enable_timing=True)
            began.record()
            launched = self._run_graph(batch, fed_ids) or self._run(batch, fed_ids, meanwhile or _nothing)
            output = CudaForwardOutput(batch, launched, on_followers, began)
        if not batch.waits_for_tokens:
            output.sample()
        self.counters.count(batch)
        return output

    @torch.inference_mode()
    def follow(self, batch: ReplayedBatch, meanwhile: Callable[[], None]) -> Completion:
        """Launches a forward pass of the leader on this rank.

        Raises:
            RuntimeError: this rank would compute it in another way, so results would differ.
        """
        assert self._collectives is not None and not self._collectives.ranks.is_leader
        record = batch.record
        graph = self.graph_of(batch, record.num_fed)
        if graph != record.graph:
            raise RuntimeError(f"ranks disagree about a CUDA graph: {record.graph} on rank 0, {graph} here")
        fed_ids = None
        if record.num_fed:
            fed_ids = torch.empty(record.num_fed, dtype=torch.int64, device=self.device)
            self._collectives.broadcast(fed_ids)
        if self.device.type == "cpu":
            self._run(batch, fed_ids, meanwhile)
            return Computed()
        if self._run_graph(batch, fed_ids) is None:
            self._run(batch, fed_ids, meanwhile)
        return Recorded()

    def graph_of(self, batch: Batch, num_fed: int) -> GraphSize:
        """Returns the size of the graph that runs the batch. Args: num_fed: rows of the output that feeds it."""
        if self._draft_graphs is not None and batch.num_drafts:
            return self._draft_graphs.size_of(batch)
        graphs = {"decode": self._graphs, "prefill": self._prefill_graphs, "mixed": self._mixed_graphs}[batch.mode]
        size = NO_GRAPH if graphs is None else graphs.size_of(batch, num_fed)
        if size == NO_GRAPH and batch.mode == "prefill" and self._large_graphs is not None:
            return self._large_graphs.size_of(batch)
        return size

    def _publish(self, ranks: RankLaunches, batch: Batch, fed_ids: torch.Tensor | None) -> OnFollowers:
        num_fed = 0 if fed_ids is None else len(fed_ids)
        scored = scored_rows(batch, self.model.config.vocab_size) if batch.scores_prompts else ()
        assert self._collectives is not None
        self._collectives.check()
        number = ranks.publish(batch, num_fed, self.graph_of(batch, num_fed), scored)
        if fed_ids is not None:
            # Before the graph overwrites them.
            self._collectives.broadcast(fed_ids)
        return OnFollowers(ranks, number, self._collectives)

    def _run(self, batch: Batch, fed_ids: torch.Tensor | None, meanwhile: Callable[[], None]) -> Launched:
        self._attention.plan(batch)
        meanwhile()
        rows = to_device(batch.logits_rows(), self.device)
        input_ids, positions = batch.input_ids(self.device, fed_ids), batch.positions(self.device)
        scored: ScoredPrompts | None = None
        pooled: PooledPrompts | None = None
        if batch.scores_prompts:
            adapters = self._adapters_of(batch, None)
            hidden = self.model.hidden_states(
                input_ids, positions, self._attention, meanwhile=meanwhile, adapters=adapters
            )
            scored = self._score(hidden, batch)
            logits = self.model.logits(hidden[rows])
            if pooled_rows := batch.pooled_rows():
                pooled = pool_prompts(self.model, hidden[to_device(pooled_rows, self.device)], batch)
        elif pooled_rows := batch.pooled_rows():
            both = torch.cat((rows, to_device(pooled_rows, self.device)))
            adapters = self._adapters_of(batch, [*batch.logits_rows(), *pooled_rows])
            hidden = self.model.hidden_states(input_ids, positions, self._attention, both, meanwhile, adapters)
            logits = self.model.logits(hidden[: len(rows)])
            pooled = pool_prompts(self.model, hidden[len(rows) :], batch)
        else:
            wanted = None if len(rows) == len(input_ids) else rows
            adapters = self._adapters_of(batch, None if wanted is None else batch.logits_rows())
            logits = self.model.forward(
                input_ids, positions, self._attention, wanted, meanwhile=meanwhile, adapters=adapters
            )
        newest_ids = None if fed_ids is None else select_rows(input_ids, rows)
        choose = self._choice(logits, batch.sampled_rows(), newest_ids)
        return Launched(choose, scored, pooled)

    def _adapters_of(self, batch: Batch, rows: Sequence[int] | None) -> AdapterBatch | None:
        """Args: rows: as of AdapterSlots.batch."""
        if self.slots is None or not batch.has_adapters:
            return None
        return self.slots.batch(batch.adapter_slots(), rows)

    def _run_graph(self, batch: Batch, fed_ids: torch.Tensor | None) -> Launched | None:
        output: GraphOutput | None = None
        sequences: Sequence[SampledRow] = batch.sequences
        if self._draft_graphs is not None and batch.num_drafts:
            output = self._draft_graphs.run(batch)
            # No row behind a draft needs more than its sequence's first.
            if not all(s.needs_argmax_only for s in batch.sequences):
                sequences = batch.sampled_rows()
        elif batch.mode == "decode" and self._graphs is not None:
            output = self._graphs.run(batch, fed_ids)
        elif batch.mode == "prefill":
            for graphs in (self._prefill_graphs, self._large_graphs):
                if output is None and graphs is not None:
                    output = graphs.run(batch)
            sequences = batch.sampled_rows()
        elif batch.mode == "mixed" and self._mixed_graphs is not None:
            output = self._mixed_graphs.run(batch, fed_ids)
            sequences = batch.sampled_rows()
        if output is None:
            return None
        if all(s.needs_argmax_only for s in sequences):
            return Launched(functools.partial(SamplerOutput, output.most_likely))
        return Launched(self._choice(output.logits, sequences, None if fed_ids is None else output.newest_ids))

    def _score(self, hidden: torch.Tensor, batch: Batch) -> ScoredPrompts | None:
        if self.model.samples:
            return score_prompts(self.model, hidden, batch)
        if isinstance(batch, ReplayedBatch):
            logits_of_scored(self.model, hidden, batch.record.scored)
        else:
            logits_of_scored(self.model, hidden, scored_rows(batch, self.model.config.vocab_size))
        return None

    def _choice(
        self, logits: torch.Tensor, sequences: Sequence[SampledRow], input_ids: torch.Tensor | None
    ) -> Callable[[], SamplerOutput]:
        if not self.model.samples:
            # Only part of the vocabulary is here.
            return lambda: SamplerOutput(torch.zeros(len(logits), dtype=torch.int64, device=self.device))
        return lambda: sample(logits.float(), sequences, input_ids, self.grammars)
