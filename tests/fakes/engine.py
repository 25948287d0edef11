"""A fake engine with predictable tokens that detects every page mix-up.

The "KV" of a token is its id and position, written into pages of a real pool. The next token is computed from the pages
that the page table names, not from the request. A page that was overwritten, shipped wrongly, freed early or never
written changes the token from `expected_tokens`.
"""

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.output import Feed, ForwardOutput
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import SamplingParams, TokenLogprobs
from tests.fakes.page_layout import OpaqueLayout

VOCAB_SIZE = 997
_pool_numbers = itertools.count()


def next_token(token_ids: Sequence[int]) -> int:
    """Return the fake model's next token: a polynomial of all tokens, sensitive to their order."""
    value = 7
    for token_id in token_ids:
        value = (value * 31 + token_id + 1) % 1_000_003
    return value % VOCAB_SIZE


def expected_tokens(prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt_ids) :]


def expected_embedding(token_ids: Sequence[int]) -> bytes:
    """Return the fake model's embedding: two numbers that depend on all tokens."""
    return array("f", [next_token(token_ids), len(token_ids)]).tobytes()


@dataclass(frozen=True)
class Row:
    """Launch arguments of one sequence; like a device, it never reads the host again.

    Attributes:
        token_ids: the tokens to compute, drafts included; None: the token that a row of the previous step sampled.
        num_drafts: of token_ids, at the end.
    """

    page_ids: list[int]
    cached_len: int
    device_len: int
    token_ids: list[int] | None
    needs_logits: bool
    prompt_len: int
    sampling: SamplingParams
    needs_embedding: bool
    num_drafts: int


def _scored(row: Row) -> PackedLogprobs | None:
    """Return prompt logprobs: logprob -position, rank position, and the token itself as the most likely."""
    num_tokens = min(row.device_len, row.prompt_len - 1) - row.cached_len
    if row.sampling.num_prompt_logprobs is None or num_tokens <= 0:
        return None
    start = row.cached_len + 1
    positions = range(start, start + num_tokens)
    num_top = min(row.sampling.num_prompt_logprobs, 1)
    logprobs, numbers = array("f", [-p for p in positions]).tobytes(), array("I", positions).tobytes()
    return PackedLogprobs(start, num_top, logprobs, numbers, numbers if num_top else b"", logprobs if num_top else b"")


class FakeForwardOutput(ForwardOutput):
    def __init__(self, engine: "FakeEngine", rows: list[Row], feed: Feed | None) -> None:
        self._engine = engine
        self.rows = rows
        self._feed = feed
        self.sampled: list[int] | None = None
        self._logprobs: list[TokenLogprobs | None] = []
        self._embeddings: list[bytes | None] = []

    def run(self) -> None:
        sampled = []
        for number, row in enumerate(self.rows):
            self._engine.write(row.page_ids, row.cached_len, self.new_ids(number))
            first = row.device_len - row.num_drafts
            for position in range(first, row.device_len + 1) if row.needs_logits else ():
                sampled.append(self._engine.sample(self._engine.read(row.page_ids, position), row.sampling))
                self._engine.draws.append((row.sampling.seed, position))
                asked = row.sampling.num_logprobs is not None
                self._logprobs.append(TokenLogprobs(-float(position)) if asked else None)
            tokens = self._engine.read(row.page_ids, row.device_len) if row.needs_embedding else None
            self._embeddings.append(None if tokens is None else expected_embedding(tokens))
        self.sampled = sampled

    def new_ids(self, number: int) -> list[int]:
        """Return the tokens that a row computes, once the step that feeds it has run."""
        token_ids = self.rows[number].token_ids
        if token_ids is None:
            assert self._feed is not None and isinstance(self._feed.output, FakeForwardOutput)
            assert self._feed.output.sampled is not None, "fed by a step that has not run"
            token_ids = [self._feed.output.sampled[self._feed.rows[number]]]
        return token_ids

    def done(self) -> bool:
        return self.sampled is not None

    def token_ids(self) -> list[int]:
        self._engine.run_until(self)
        assert self.sampled is not None
        return list(self.sampled)

    def logprobs(self) -> list[TokenLogprobs | None]:
        self._engine.run_until(self)
        return self._logprobs

    def prompt_logprobs(self) -> list[PackedLogprobs | None]:
        self._engine.run_until(self)
        return [_scored(row) for row in self.rows]

    def embeddings(self) -> list[bytes | None]:
        self._engine.run_until(self)
        return self._embeddings

    def duration_s(self) -> float:
        assert self._engine.is_asynchronous
        self._engine.run_until(self)
        return self._engine.duration_of(self)


class FakeEngine(EngineBase):
    """
    Attributes:
        batches: (mode, computed tokens per sequence) of each forward pass.
        draws: (seed, position) of each sampled token. Tokens do not depend on them. A requested logprob is minus the
            position, for prompt tokens too.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        asynchronous: bool = False,
        step_s: float = 0.0,
        sample: Callable[[Sequence[int], SamplingParams], int] = lambda token_ids, _: next_token(token_ids),
        min_mixed: int = 2**31,
    ) -> None:
        """
        Args:
            min_mixed: minimum prompt tokens computed together with a decode step.
            asynchronous: forward passes wait for `run_next` or for a read of their tokens.
            step_s: reported device time of each forward pass.
            sample: returns the token after the tokens that the pages hold.
        """
        # A page holds two 32-bit numbers per token.
        self.pool: CpuKvPool
        super().__init__(CpuKvPool(OpaqueLayout(page_size, 8 * page_size), num_pages, f"fake-{next(_pool_numbers)}"))
        self.page_size = page_size
        self.step_s = step_s
        self.sample = sample
        self._asynchronous = asynchronous
        self._min_mixed = min_mixed
        self._queue: deque[FakeForwardOutput] = deque()
        # (num_pages, 2, page_size): token ids, and positions counted from 1 so that an unwritten slot matches none.
        self._slots = self.pool.memory.numpy().view(np.int32).reshape(num_pages, 2, page_size)
        self.batches: list[tuple[str, list[int]]] = []
        self.draws: list[tuple[int, int]] = []

    @property
    def is_asynchronous(self) -> bool:
        return self._asynchronous

    def mixes(self, num_decoded: int, num_prompt_tokens: int, num_prompts: int = 1) -> bool:
        return num_prompt_tokens >= self._min_mixed

    @property
    def num_launched(self) -> int:
        return len(self._queue)

    @property
    def pages_in_use(self) -> set[int]:
        """Return the pages that pending forward passes will read or write."""
        return {page_id for output in self._queue for row in output.rows for page_id in row.page_ids}

    @property
    def pages_to_write(self) -> set[int]:
        rows = [row for output in self._queue for row in output.rows]
        return {page_id for row in rows for page_id in row.page_ids[row.cached_len // self.page_size :]}

    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        self.batches.append((batch.mode, [s.extend_len for s in batch.sequences]))
        if meanwhile is not None:
            meanwhile()
        rows = [
            Row(
                list(s.page_ids[: -(-s.device_len // self.page_size)]),
                s.cached_len,
                s.device_len,
                None if s.num_pending else [*s.token_ids[s.cached_len : s.device_len], *s.draft_ids],
                s.needs_logits,
                s.prompt_len,
                s.sampling,
                s.needs_embedding,
                len(s.draft_ids),
            )
            for s in batch.sequences
        ]
        output = self._output_of(rows, batch.feed)
        self._queue.append(output)
        if not self._asynchronous:
            self.run_next()
        self.counters.count(batch)
        return output

    def _output_of(self, rows: list[Row], feed: Feed | None) -> FakeForwardOutput:
        return FakeForwardOutput(self, rows, feed)

    def duration_of(self, output: FakeForwardOutput) -> float:
        return self.step_s

    def run_next(self) -> None:
        self._queue.popleft().run()

    def run_until(self, output: FakeForwardOutput) -> None:
        while output.sampled is None:
            self.run_next()

    def write(self, page_ids: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        for position, token_id in enumerate(token_ids, start):
            page_id, offset = page_ids[position // self.page_size], position % self.page_size
            self._slots[page_id, 0, offset] = token_id
            self._slots[page_id, 1, offset] = position + 1

    def read(self, page_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens in the pages; a slot of another position reads as a token outside every vocabulary."""
        tokens = []
        for position in range(num_tokens):
            page_id, offset = page_ids[position // self.page_size], position % self.page_size
            token_id, written_position = self._slots[page_id, :, offset]
            tokens.append(int(token_id) if written_position == position + 1 else VOCAB_SIZE + position)
        return tokens
