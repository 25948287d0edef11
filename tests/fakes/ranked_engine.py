"""A fake engine of several ranks, which complete forward passes in an order that the test chooses.

Each rank holds a part of every page. As with real collectives, a rank computes a forward pass only with the others, so
a follower is at most one behind the leader; and the leader has logits only once all ranks have computed it. A chunk
that ends before its prompt needs no logits: the followers may write its pages after the leader is done.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from tandem.engine.output import Feed
from tests.fakes.engine import FakeEngine, FakeForwardOutput, Row


class RankedOutput(FakeForwardOutput):
    def __init__(self, engine: "RankedEngine", number: int, rows: list[Row], feed: Feed | None) -> None:
        super().__init__(engine, rows, feed)
        self._ranked = engine
        self.number = number

    def run(self) -> None:
        needs_logits = any(row.needs_logits or row.needs_embedding for row in self.rows)
        self._ranked.catch_up(self.number if needs_logits else self.number - 1)
        super().run()

    def done(self) -> bool:
        return super().done() and self.number <= self._ranked.num_completed()


class RankedEngine(FakeEngine):
    """With one rank, a FakeEngine."""

    def __init__(self, num_pages: int, page_size: int, *, num_ranks: int = 1, **options: Any) -> None:
        super().__init__(num_pages, page_size, **options)
        ends = [self.pool.layout.page_bytes * rank // num_ranks for rank in range(num_ranks + 1)]
        self._parts = [slice(*part) for part in pairwise(ends)]
        self._bytes = self.pool.memory.numpy()
        self._num_outputs = 0
        # Forward passes that a follower has not computed, and the last one that it has posted, by follower.
        self._behind: list[deque[RankedOutput]] = [deque() for _ in range(num_ranks - 1)]
        self._posted = [0] * (num_ranks - 1)

    def num_completed(self) -> int:
        return min(self._posted, default=self._num_outputs)

    @property
    def pages_in_use(self) -> set[int]:
        behind = {page_id for outputs in self._behind for o in outputs for row in o.rows for page_id in row.page_ids}
        return super().pages_in_use | behind

    @property
    def pages_to_write(self) -> set[int]:
        rows = [row for outputs in self._behind for output in outputs for row in output.rows]
        behind = {page_id for row in rows for page_id in row.page_ids[row.cached_len // self.page_size :]}
        return super().pages_to_write | behind

    def follower_actions(self) -> list[Callable[[], object]]:
        """Return what the followers can do next by themselves."""
        actions: list[Callable[[], object]] = []
        for follower, behind in enumerate(self._behind):
            if behind and behind[0].sampled is not None:
                actions.append(lambda f=follower: self._compute(f))
            if self._posted[follower] < self._num_computed(follower):
                actions.append(lambda f=follower: self._post(f))
        return actions

    def catch_up(self, number: int) -> None:
        """Let all followers compute the forward passes up to this one."""
        for follower, behind in enumerate(self._behind):
            while behind and behind[0].number <= number:
                self._compute(follower)

    def write(self, page_ids: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        self._write_part(0, page_ids, start, token_ids)

    def _output_of(self, rows: list[Row], feed: Feed | None) -> FakeForwardOutput:
        self._num_outputs += 1
        output = RankedOutput(self, self._num_outputs, rows, feed)
        for behind in self._behind:
            behind.append(output)
        return output

    def _num_computed(self, follower: int) -> int:
        behind = self._behind[follower]
        return behind[0].number - 1 if behind else self._num_outputs

    def _compute(self, follower: int) -> None:
        if self._behind[follower]:
            output = self._behind[follower].popleft()
            for number, row in enumerate(output.rows):
                self._write_part(1 + follower, row.page_ids, row.cached_len, output.new_ids(number))

    def _post(self, follower: int) -> None:
        self._posted[follower] = self._num_computed(follower)

    def _write_part(self, rank: int, page_ids: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        part = self._parts[rank]
        others = [other for other in self._parts if other is not part]
        for position, token_id in enumerate(token_ids, start):
            page = self._bytes[page_ids[position // self.page_size]]
            kept = [page[other].copy() for other in others]
            super().write(page_ids, position, [token_id])
            for other, values in zip(others, kept, strict=True):
                page[other] = values
