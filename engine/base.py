import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.adapters.base import Adapters
from tandem.engine.batch import Batch
from tandem.engine.draft_costs import DraftCosts
from tandem.engine.grammar_drafts import DraftMatcher
from tandem.engine.grammars import Constraint, Grammars, no_constraint
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.launch_list import ForwardPart, LaunchList
from tandem.engine.layers.experts.counts import ExpertCounts
from tandem.engine.models.experts import ExpertsConfig
from tandem.engine.output import ForwardOutput

if TYPE_CHECKING:
    from tandem.engine.draft_models.draft_maker import DraftMaker


@dataclass(slots=True)
class EngineCounters:
    prompt_tokens_computed: int = 0
    output_tokens_computed: int = 0

    def count(self, batch: Batch) -> None:
        num_prompt_tokens = batch.num_prompt_tokens()
        self.prompt_tokens_computed += num_prompt_tokens
        self.output_tokens_computed += batch.num_tokens - num_prompt_tokens


class EngineBase(ABC):
    """One model and its pages. Works on token ids; knows neither text nor sockets.

    Attributes:
        model_fingerprint: equal exactly for engines with equal weights; empty if pages are never shipped.
        launches: forward passes whose results have not been taken.
        experts, expert_counts: None without mixtures of experts.
        adapters: None if it takes none.
        max_drafts: drafts of a sequence in a decode step at most; 0: none.
        max_drafted_rows: sequences and drafts of a step with drafts together, at most.
        draft_costs: None if not measured.
        draft_maker: None without a model that drafts.
    """

    experts: ExpertsConfig | None = None
    expert_counts: ExpertCounts | None = None
    adapters: Adapters | None = None
    max_drafts: int = 7
    max_drafted_rows: int = sys.maxsize
    draft_costs: DraftCosts | None = None
    draft_maker: "DraftMaker | None" = None

    def __init__(self, pool: KvPool, model_fingerprint: str = "", grammars: Grammars | None = None) -> None:
        self.pool = pool
        self.grammars = grammars
        self.model_fingerprint = model_fingerprint
        self.counters = EngineCounters()
        self.launches = LaunchList(pool.layout.page_size)

    def close(self) -> None:
        """Frees shared memory and connections. No forward pass runs."""
        if self.adapters is not None:
            self.adapters.close()
        self.pool.close()

    def constraint(self, grammar: str, output_ids: Sequence[int] = (), client: str = "") -> Constraint | None:
        """Returns None for "". An unusable grammar gives a constraint with an error.

        Args:
            output_ids: output of earlier attempts.
            client: takes turns with other clients at the compilers.
        """
        if not grammar:
            return None
        if self.grammars is None:
            return no_constraint("this model keeps to no grammar: its tokenizer does not say which bytes tokens are")
        return self.grammars.constraint(grammar, output_ids, client)

    def draft_matcher(self, grammar: str, client: str = "") -> DraftMatcher | None:
        """Returns None if the model keeps to no grammar. Args: as for `constraint`."""
        return None if self.grammars is None else self.grammars.draft_matcher(grammar, client)

    @property
    def is_asynchronous(self) -> bool:
        """True if `forward` returns before the device is done."""
        return False

    def mixes(self, num_decoded: int, num_prompt_tokens: int, num_prompts: int = 1) -> bool:
        """Return whether a mixed step of this size is better than two forward passes."""
        return False

    def num_unpadded(self, num_decoded: int, num_prompt_tokens: int) -> int:
        """Returns the prompt tokens to compute in one mixed step, at most `num_prompt_tokens`. More would share a
        forward pass with padding, which takes as long."""
        return num_prompt_tokens

    def num_padded(self, num_decoded: int, num_prompt_tokens: int) -> int:
        return num_prompt_tokens

    def launch(
        self,
        *,
        decoded: ForwardPart | None = None,
        prompts: ForwardPart | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Launches a forward pass and enters it in `launches`."""
        parts = [part for part in (decoded, prompts) if part is not None]
        for part in parts:
            part.begin()
        batch = Batch.of(
            decoded.sequences if decoded is not None else (),
            prompts.sequences if prompts is not None else (),
            decoded.feed if decoded is not None else None,
        )
        output = self.forward(batch, meanwhile)
        self.launches.add(output, decoded, prompts)
        # Prompts first: code that runs before or in a decode step must find them counted.
        for part in reversed(parts):
            part.launched(output, batch)

    @abstractmethod
    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        """Launches one forward pass: writes the KV of the batch's tokens into their pages and samples the next tokens.

        Forward passes run in launch order. Once this returns, the caller may mark the sequences with complete_extend
        and change page tables.

        Args:
            meanwhile: called by this thread now and then during a long launch. It must not change the batch.
        """
