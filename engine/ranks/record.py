"""The record of a forward pass: all that a follower's engine needs to launch it."""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tandem.engine.batch import ForwardMode
from tandem.engine.prompt_logprobs import ScoredRows

_MODES: tuple[ForwardMode, ...] = ("prefill", "decode", "mixed")
# number; mode, num_mixed, graph's two sizes, num_fed, scores_prompts; sequences, prompts, fed rows, new ids, tables,
# their page ids, slots of adapters, numbers of drafts, parts of scored rows, these rows.
_HEADER = struct.Struct("<q16i")

Int32s = np.ndarray[Any, np.dtype[np.int32]]


def numbers(values: Sequence[int]) -> Int32s:
    """Returns an array that may not be written. Takes a third of np.array's time."""
    return np.frombuffer(struct.pack(f"{len(values)}i", *values), np.int32)


NO_NUMBERS: Int32s = np.zeros(0, np.int32)


class GraphSize(NamedTuple):
    """Sizes of the CUDA graph that runs a forward pass; NO_GRAPH if none does."""

    num_decoded: int
    num_prompt_tokens: int


NO_GRAPH = GraphSize(0, 0)


class TableUpdates(NamedTuple):
    """Page ids of tables, each from an index on.

    Attributes:
        copy_ids: of the tables at the followers.
        firsts: of each table, the index of its first page id here; 0: the table is new.
        counts: of each table, its page ids here.
        page_ids: of all tables, one after another.
    """

    copy_ids: Int32s
    firsts: Int32s
    counts: Int32s
    page_ids: Int32s


class PromptFlag:
    NEEDS_LOGITS = 1
    NEEDS_EMBEDDING = 2


class ForwardRecord(NamedTuple):
    """A batch without its requests.

    Attributes:
        number: from 1 without gaps.
        graph: chosen by the leader.
        num_fed: rows of the output that feeds the batch; 0 if the host knows all tokens.
        scores_prompts: whether the batch does, even without a row to score.
        copy_ids: the page table of each sequence.
        cached_lens: of each sequence.
        device_lens: of each prompt. A decoded sequence computes one token and its drafts, and needs their logits.
        flags: of each prompt, PromptFlag.
        fed_rows: of each decoded sequence, as in Feed; None without feed.
        new_ids: (num_tokens,) the tokens to compute, drafts included; 0 for a fed token.
        updates: of page tables, before the forward pass.
        scored: rows with logits for log probabilities of prompts.
        adapter_slots: of each sequence; empty: none has an adapter.
        num_drafts: of each decoded sequence; empty: none has drafts.
    """

    number: int
    mode: ForwardMode
    num_mixed: int
    graph: GraphSize
    num_fed: int
    scores_prompts: bool
    copy_ids: Int32s
    cached_lens: Int32s
    device_lens: Int32s
    flags: Int32s
    fed_rows: Int32s | None
    new_ids: Int32s
    updates: TableUpdates
    scored: Sequence[ScoredRows] = ()
    adapter_slots: Int32s = NO_NUMBERS
    num_drafts: Int32s = NO_NUMBERS

    def encode(self) -> bytes:
        parts: list[Any] = [
            b"",
            self.copy_ids,
            self.cached_lens,
            self.device_lens,
            self.flags,
            b"" if self.fed_rows is None else self.fed_rows,
            self.new_ids,
            *self.updates,
            self.adapter_slots,
            self.num_drafts,
        ]
        num_scored_rows = 0
        for rows, step in self.scored:
            parts += [np.array((step, len(rows)), np.int32), rows.astype(np.int32)]
            num_scored_rows += len(rows)
        parts[0] = _HEADER.pack(
            self.number,
            _MODES.index(self.mode),
            self.num_mixed,
            *self.graph,
            self.num_fed,
            self.scores_prompts,
            len(self.copy_ids),
            len(self.device_lens),
            -1 if self.fed_rows is None else len(self.fed_rows),
            len(self.new_ids),
            len(self.updates.copy_ids),
            len(self.updates.page_ids),
            len(self.adapter_slots),
            len(self.num_drafts),
            len(self.scored),
            num_scored_rows,
        )
        return b"".join(parts)

    @classmethod
    def decode(cls, message: bytes) -> "ForwardRecord":
        number, *header = _HEADER.unpack_from(message)
        mode, num_mixed, *graph, num_fed, scores_prompts = header[:6]
        num_sequences, num_prompts, num_fed_rows, num_new_ids, num_updates, num_page_ids, *others = header[6:]
        num_slots, num_drafted, num_scored, _ = others
        numbers = np.frombuffer(message, np.int32, offset=_HEADER.size)
        sizes = (
            num_sequences,
            num_sequences,
            num_prompts,
            num_prompts,
            max(0, num_fed_rows),
            num_new_ids,
            num_updates,
            num_updates,
            num_updates,
            num_page_ids,
            num_slots,
            num_drafted,
        )
        *arrays, adapter_slots, num_drafts, rest = np.split(numbers, np.cumsum(sizes))
        copy_ids, cached_lens, device_lens, flags, fed_rows, new_ids, *updates = arrays
        scored = []
        for _ in range(num_scored):
            step, num_rows = rest[:2].tolist()
            scored.append(ScoredRows(rest[2 : 2 + num_rows].astype(np.int64), step))
            rest = rest[2 + num_rows :]
        return cls(
            number,
            _MODES[mode],
            num_mixed,
            GraphSize(*graph),
            num_fed,
            bool(scores_prompts),
            copy_ids,
            cached_lens,
            device_lens,
            flags,
            None if num_fed_rows < 0 else fed_rows,
            new_ids,
            TableUpdates(*updates),
            scored,
            adapter_slots,
            num_drafts,
        )
