"""Sources of drafts, replayed over known outputs: drafts change no output, so acceptance needs no forward pass."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tandem.decode_worker.draft_policy import MAX_DRAFTS
from tandem.decode_worker.drafters.base import Drafter
from tandem.decode_worker.drafters.ngram import MAX_MATCH, MIN_MATCH, NgramDrafter
from tandem.decode_worker.drafters.shared import SHARED_SOURCE, SharedLookup, SharedOutputs

OWNER = "key"
NAMESPACE = f"{OWNER}/"


class Votes(Drafter):
    """Proposes the most frequent continuation of the longest repetition, token by token, from an index of suffixes."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._counts: defaultdict[tuple[int, ...], defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        for token_id in token_ids[len(self._known) :]:
            for length in range(MIN_MATCH, min(MAX_MATCH, len(self._known)) + 1):
                self._counts[tuple(self._known[-length:])][token_id] += 1
            self._known.append(token_id)
        ending = self._known[-MAX_MATCH:]
        drafts: list[int] = []
        while len(drafts) < max_tokens:
            suffixes = (tuple(ending[-length:]) for length in range(min(MAX_MATCH, len(ending)), MIN_MATCH - 1, -1))
            counts = next((self._counts[suffix] for suffix in suffixes if suffix in self._counts), None)
            if counts is None:
                break
            drafts.append(max(counts, key=lambda token_id: counts[token_id]))
            ending.append(drafts[-1])
        return drafts


@dataclass
class Replay:
    """
    Attributes:
        num_drafted, num_accepted: by source.
        search_s: of all searches, in seconds of a processor.
    """

    num_steps: int = 0
    num_tokens: int = 0
    search_s: float = 0.0

    def __post_init__(self) -> None:
        self.num_drafted: defaultdict[str, int] = defaultdict(int)
        self.num_accepted: defaultdict[str, int] = defaultdict(int)

    def take(self, drafter: Drafter, prompt: Sequence[int], output: Sequence[int]) -> None:
        whole = [*prompt, *output]
        known = len(prompt) + 1
        while known < len(whole):
            most = min(MAX_DRAFTS, len(whole) - known - 1)
            began = time.thread_time()
            drafts = drafter.propose(whole[:known], most) if most else []
            self.search_s += time.thread_time() - began
            num_accepted = 0
            while num_accepted < len(drafts) and drafts[num_accepted] == whole[known + num_accepted]:
                num_accepted += 1
            self.num_drafted[drafter.source] += len(drafts)
            self.num_accepted[drafter.source] += num_accepted
            self.num_steps += 1
            self.num_tokens += num_accepted + 1
            known += num_accepted + 1

    def row(self) -> str:
        shares = [
            f"{self.num_accepted[source] / max(1, self.num_drafted[source]):.0%} of {self.num_drafted[source]}"
            for source in ("", SHARED_SOURCE)
        ]
        rates = f"{self.num_tokens / self.num_steps:.2f} | {1e6 * self.search_s / self.num_steps:.0f}"
        return f"{' | '.join(shares)} | {rates}"


def replays(requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[str, Replay]]:
    """Yields the replay of each source. Args: requests: prompts and outputs, in order, of one API key."""
    alone: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "votes": Votes}
    for name, new_drafter in alone.items():
        replay = Replay()
        for prompt, output in requests:
            replay.take(new_drafter(), prompt, output)
        yield name, replay
    outputs = SharedOutputs()
    outputs.set_owners((OWNER,))
    replay = Replay()
    for prompt, output in requests:
        replay.take(SharedLookup(outputs, NAMESPACE), prompt, output)
        outputs.add(NAMESPACE, output)
    yield "ngram and shared", replay
