"""What clients ask for: requests of one length, or conversations whose turns grow."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.cluster_model.worker import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Workload:
    """
    Attributes:
        num_input, num_output: tokens that a turn adds to the prompt, and those of its answer.
        num_system: tokens that all conversations begin with.
        num_turns: of a conversation.
        think_s: from an answer's end to the next turn.
    """

    name: str
    num_input: int
    num_output: int
    num_system: int = 0
    num_turns: int = 1
    think_s: float = 0.0


WORKLOADS = (
    Workload("4096/256", 4096, 256),
    Workload("1024/512", 1024, 512),
    Workload("512/1024", 512, 1024),
    Workload("multi-turn", 512, 256, num_system=2048, num_turns=4, think_s=1.0),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """
    Attributes:
        prompt, output: numbers of tokens.
        identities: of the pages of both.
        is_shared: whether other turns begin with some of them.
    """

    prompt: int
    output: int
    identities: Sequence[int]
    is_shared: bool


@dataclass(slots=True)
class Conversation:
    """
    Attributes:
        begins_at: in seconds.
        turns: those to come, the next one first.
        think_s: before each but the first.
    """

    begins_at: float
    turns: list[Turn]
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Conversations of one workload that begin at random from one moment to another, as many as the rate says.

    It is a Poisson process of which the number of arrivals is known: otherwise a run of 900 requests would have 3 %
    more or less than its rate says, and goodput would be wrong by as much. Of conversations it is their number that is
    known: when their turns come depends on how they are served."""

    workload: Workload
    begins_at: float
    ends_at: float
    requests_per_s: float


@dataclass(slots=True)
class Identities:
    """Names of pages that no other page has, but for those of the system prompt, which all of a workload share."""

    _system: dict[Workload, list[int]] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def of(self, workload: Workload, num_tokens: int) -> list[int]:
        if workload not in self._system:
            self._system[workload] = self._new(workload.num_system // PAGE_SIZE)
        system = self._system[workload]
        return system + self._new(num_tokens // PAGE_SIZE - len(system))

    def _new(self, count: int) -> list[int]:
        return list(itertools.islice(self._numbers, count))


def conversations(stretches: Sequence[Stretch], seed: int) -> Iterator[Conversation]:
    """In the order in which they begin within a stretch. At another rate the same numbers are drawn, so that what rates
    and layouts make different is not hidden by chance."""
    identities = Identities()
    for index, stretch in enumerate(stretches):
        workload, rng = stretch.workload, random.Random(f"{seed}/{index}")
        length_s = stretch.ends_at - stretch.begins_at
        count = round(stretch.requests_per_s / workload.num_turns * length_s)
        # Given their number, the times of a Poisson process are sums of exponential gaps, one gap more than there are
        # arrivals, divided by the sum of all.
        *sums, whole = itertools.accumulate(rng.expovariate(1.0) for _ in range(count + 1))
        for part in sums:
            moment = stretch.begins_at + length_s * part / whole
            added = workload.num_input + workload.num_output
            pages = identities.of(workload, workload.num_system + workload.num_turns * added)
            turns = []
            for turn in range(workload.num_turns):
                prompt = workload.num_system + turn * added + workload.num_input
                num_pages = (prompt + workload.num_output) // PAGE_SIZE
                is_shared = workload.num_turns > 1 or workload.num_system > 0
                turns.append(Turn(prompt, workload.num_output, pages[:num_pages], is_shared))
            yield Conversation(moment, turns, workload.think_s)
