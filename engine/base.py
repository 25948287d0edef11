"""What a scheduler asks of an engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from tandem.engine.batch import Batch
from tandem.engine.grammars import Constraint, Grammars, no_constraint
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.launch_list import ForwardPart, LaunchList
from tandem.engine.output import ForwardOutput


@dataclass(slots=True)
class EngineCounters:
    """Tokens whose KV an engine has computed since its start."""

    prompt_tokens_computed: int = 0
    output_tokens_computed: int = 0

    def count(self, batch: Batch) -> None:
        num_prompt_tokens = batch.num_prompt_tokens()
        self.prompt_tokens_computed += num_prompt_tokens
        self.output_tokens_computed += batch.num_tokens - num_prompt_tokens


class EngineBase(ABC):
    """One model with its pages. Knows token ids, never text, never a socket.

    Attributes:
        pool: the memory of the pages that sequences' page tables name.
        model_fingerprint: equal exactly where engines compute with equal weights; empty for one whose pages go nowhere.
        counters: what `forward` has computed since the start.
        grammars: what outputs may keep to; None: to none.
        launches: the forwards that have been launched by `launch`, until their results are taken.
    """

    def __init__(self, pool: KvPool, model_fingerprint: str = "", grammars: Grammars | None = None) -> None:
        self.pool = pool
        self.grammars = grammars
        self.model_fingerprint = model_fingerprint
        self.counters = EngineCounters()
        self.launches = LaunchList(pool.layout.page_size)

    def constraint(self, grammar: str) -> Constraint | None:
        """What keeps an output to a grammar; None for "". It has an error where there is no such grammar."""
        if not grammar:
            return None
        if self.grammars is None:
            return no_constraint("this model keeps to no grammar: its tokenizer does not say which bytes tokens are")
        return self.grammars.constraint(grammar)

    @property
    def is_asynchronous(self) -> bool:
        """Whether `forward` returns before the device is done, so that the next one can be launched behind it."""
        return False

    def mixes(self, num_decoded: int, num_prompt_tokens: int, num_prompts: int = 1) -> bool:
        """Whether so many sequences that are decoded, and so many tokens of so many prompts, are better computed by one
        forward than by two. This is the one place where that is decided."""
        return False

    def num_unpadded(self, num_decoded: int, num_prompt_tokens: int) -> int:
        """How many tokens of prompts, of so many at most, to compute in one forward with so many sequences that are
        decoded. It is fewer where some would share a forward with padding, which takes as long to compute."""
        return num_prompt_tokens

    def num_padded(self, num_decoded: int, num_prompt_tokens: int) -> int:
        """How many tokens one forward of so many of prompts, with so many sequences that are decoded, computes of the
        former, padding included."""
        return num_prompt_tokens

    def launch(
        self,
        *,
        decoded: ForwardPart | None = None,
        prompts: ForwardPart | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Launches a forward for those who take what it gives: whoever serves launches all of them like this.

        Args:
            decoded, prompts: one of the two, or both where the engine `mixes`.
            meanwhile: as of `forward`.
        """
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
        # Who counts what stands before or in a step finds the prompts counted.
        for part in reversed(parts):
            part.launched(output, batch)

    @abstractmethod
    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        """Launches one forward: writes the KV of the batch's tokens into their pages and samples what comes next.

        Forwards run one after the other, as launched. The caller marks the sequences with complete_extend; it may do
        so, and change page tables, as soon as this returns.

        Args:
            meanwhile: called now and then by this thread where a launch takes it long, for what cannot wait until
                `forward` returns. It must leave the batch, and what belongs to it, as they are.
        """
