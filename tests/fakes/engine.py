"""An engine whose tokens can be worked out by hand, and which sees every page mix-up.

Its "KV" of a token is the token's id and position, written into real pages of a real pool. The next token is computed
from what the page table leads to, not from the request: a page that was overwritten, shipped wrongly, freed early or
never written gives another token than `expected_tokens` says.
"""

import itertools
from collections.abc import Sequence

from tandem.engine.base import EngineBase, EngineCounters, ForwardOutput
from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.sampling_params import TokenLogprobs

VOCAB_SIZE = 997
_pool_numbers = itertools.count()


def next_token(token_ids: Sequence[int]) -> int:
    """The fake model: a polynomial of all tokens, so that order and every single token count."""
    value = 7
    for token_id in token_ids:
        value = (value * 31 + token_id + 1) % 1_000_003
    return value % VOCAB_SIZE


def expected_tokens(prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """What the fake model outputs for a prompt."""
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt_ids) :]


class FakeForwardOutput(ForwardOutput):
    def __init__(self, token_ids: list[int], logprobs: list[TokenLogprobs | None]) -> None:
        self._token_ids = token_ids
        self._logprobs = logprobs

    def done(self) -> bool:
        return True

    def token_ids(self) -> list[int]:
        return self._token_ids

    def logprobs(self) -> list[TokenLogprobs | None]:
        return self._logprobs


class FakeEngine(EngineBase):
    """
    Attributes:
        batches: for each forward its phase and the tokens each sequence computed.
        draws: for each token chosen the seed and the position that a draw would depend on. Tokens do not depend on
            them; a log probability that is asked for is minus the position.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.counters = EngineCounters()
        self.page_size = page_size
        layout = PageLayout(num_layers=1, page_size=page_size, num_kv_heads=1, head_dim=1, dtype="float32")
        self.pool = CpuKvPool(layout, num_pages, f"fake-{next(_pool_numbers)}")
        # (num_pages, 2, page_size): token ids, and positions counted from 1 so that an unwritten slot fits none.
        self._slots = self.pool.kv.view(num_pages, 2, page_size).numpy()
        self.batches: list[tuple[str, list[int]]] = []
        self.draws: list[tuple[int, int]] = []

    def forward(self, batch: Batch) -> ForwardOutput:
        self.batches.append((batch.phase, [s.extend_len for s in batch.sequences]))
        outputs = []
        logprobs: list[TokenLogprobs | None] = []
        for sequence in batch.sequences:
            for position in range(sequence.cached_len, sequence.device_len):
                page_id, offset = sequence.page_ids[position // self.page_size], position % self.page_size
                self._slots[page_id, 0, offset] = sequence.token_ids[position]
                self._slots[page_id, 1, offset] = position + 1
            if sequence.needs_logits:
                outputs.append(next_token(self._read(sequence.page_ids, sequence.device_len)))
                position = len(sequence.token_ids)
                self.draws.append((sequence.sampling.seed, position))
                asked = sequence.sampling.num_logprobs is not None
                logprobs.append(TokenLogprobs(-float(position)) if asked else None)
        self.counters.count(batch)
        return FakeForwardOutput(outputs, logprobs)

    def _read(self, page_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens that the pages hold; a slot of another position reads as a token that no vocabulary has."""
        tokens = []
        for position in range(num_tokens):
            page_id, offset = page_ids[position // self.page_size], position % self.page_size
            token_id, written_position = self._slots[page_id, :, offset]
            tokens.append(int(token_id) if written_position == position + 1 else VOCAB_SIZE + position)
        return tokens
