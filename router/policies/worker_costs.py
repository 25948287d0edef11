"""The formulas of cost_model.py over arrays: the costs of one request at each of many workers."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem.messages import ForwardTimes
from tandem.router.policies.cost_model import (
    LATE,
    LEAN_OF_DECODING,
    LEAN_OF_PROMPT,
    MIN_OUTPUT_STEPS,
    TAIL_SHARE,
)
from tandem.router.workers.objectives import DEFAULT_OBJECTIVES, Objectives
from tandem.router.workers.worker import Worker

Floats: TypeAlias = NDArray[np.float64]

# Upper bound of a worker's random tie cost, drawn again when its load changes. Routers see each other's choices late
# and must not all take the same worker.
TIE_COST = 1e-3
# Rows of the loads and of the speeds, and where each is read.
_loads_of = attrgetter(
    *("num_pending_tokens", "num_decoding", "num_kv_tokens", "num_arriving_tokens"),
    *("stats.num_leased_pages", "stats.num_locked_pages", "rates.mean_output_steps", "rates.mean_drafts"),
)
_speeds_of = attrgetter(
    *("hello.num_pages", "page_size", "max_decoding", "forward_times.prefill_s", "forward_times.prompt_token_s"),
    *("forward_times.attended_token_s", "forward_times.step_s", "forward_times.request_s"),
    *("forward_times.kv_token_s", "forward_times.gap_beside_prompts_s"),
)
NUM_LOADS, NUM_SPEEDS = 8, 10
_load_number_of = attrgetter("load_number")
# Rows of the costs of a prompt by its seconds, of decoding by tokens (as CostLine), and of what else a choice needs.
PREFILL_DUE, PREFILL_EXTRA, PREFILL_EXTRA_SLOPE, PROMPT_TOKEN_S, ATTENDED_TOKEN_S, QUEUE_S = range(6)
DECODE_DUE, DECODE_DUE_SLOPE, DECODE_EXTRA, DECODE_EXTRA_SLOPE, ROOM, HELD, OUTPUT_STEPS_S = range(6, 13)
NUM_LINES = 13


class WorkerCosts:
    """Costs at the workers of the last `update`, in their order; only changed loads are read again.

    Attributes:
        places: index of each worker.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance: Callable[[], float] = chance.random
        self._objectives = DEFAULT_OBJECTIVES
        self._set_workers([])

    def _set_workers(self, workers: list[Worker]) -> None:
        count = len(workers)
        self._workers = workers
        self.places = {worker: place for place, worker in enumerate(workers)}
        self._load_numbers: list[int] = [-1] * count
        self._times: list[ForwardTimes | None] = [None] * count
        self._speeds, self._lines = np.empty((NUM_SPEEDS, count)), np.empty((NUM_LINES, count))

    def update(self, workers: list[Worker], objectives: Objectives) -> None:
        if workers != self._workers or objectives != self._objectives:
            self._objectives = objectives
            self._set_workers(workers)
        known = self._load_numbers
        self._load_numbers = list(map(_load_number_of, workers))
        if changed := [i for i, (was, now) in enumerate(zip(known, self._load_numbers, strict=True)) if was != now]:
            self._compute(changed, [workers[i] for i in changed])

    def _compute(self, changed: list[int], workers: list[Worker]) -> None:
        times = self._times
        others = [
            (i, worker) for i, worker in zip(changed, workers, strict=True) if worker.forward_times is not times[i]
        ]
        if others:
            for i, worker in others:
                times[i] = worker.forward_times
            speeds = _rows([worker for _, worker in others], _speeds_of, NUM_SPEEDS)
            self._speeds[:, [i for i, _ in others]] = speeds
        leans = [worker.lean for worker in workers]
        lines = _lines_of(
            _rows(workers, _loads_of, NUM_LOADS),
            self._speeds[:, changed],
            np.array([LEAN_OF_PROMPT[lean] for lean in leans]),
            np.array([LEAN_OF_DECODING[lean] for lean in leans]),
            self._objectives,
        )
        for row in (PREFILL_EXTRA, DECODE_EXTRA):
            lines[row] += [TIE_COST * self._chance() for _ in changed]
        self._lines[:, changed] = lines

    def of(self, tokens: Mapping[Worker, int]) -> Floats:
        """Returns each worker's tokens; 0 for missing workers."""
        known = np.zeros(len(self._workers))
        places = self.places
        found = [(places[worker], count) for worker, count in tokens.items() if worker in places]
        if found:
            indices, counts = zip(*found, strict=True)
            known[list(indices)] = counts
        return known

    def prefill(self, ready: Floats, num_tokens: int) -> Floats:
        """Returns the cost of a prompt. Args: ready: leading tokens that need no computing."""
        return self._prefill_at(self._lines, num_tokens - ready, num_tokens, 0.0)

    def loaded(self, options: Sequence[tuple[Worker, int, float]], num_tokens: int) -> Floats:
        """Returns the cost of each option: worker, leading tokens that need no computing, seconds to load."""
        lines = self._lines[:, [self.places[worker] for worker, _, _ in options]]
        to_compute = np.array([num_tokens - ready for _, ready, _ in options], np.float64)
        load_s = np.array([seconds for _, _, seconds in options])
        more_s = np.maximum(0.0, load_s - lines[QUEUE_S])
        return self._prefill_at(lines, to_compute, num_tokens, more_s / self._objectives.ttft_s)

    def decode(self, expected: Floats, num_tokens: int) -> Floats:
        """Returns the cost of a request without a handover. Args: expected: tokens cached or arriving."""
        due, due_slope, extra, extra_slope, room, held, output_steps_s = self._lines[DECODE_DUE:]
        costs = late(due + due_slope * num_tokens) + extra + extra_slope * num_tokens
        if room.min(initial=num_tokens) < num_tokens:
            lacking = num_tokens - expected - room
            wait_s = np.minimum(1.0, lacking / np.maximum(1.0, held)) * output_steps_s
            costs += np.where((lacking > 0) & (held > 0), late(wait_s / self._objectives.ttft_s), 0.0)
        return costs

    def _prefill_at(self, lines: Floats, to_compute: Floats, num_tokens: int, more_due: Floats | float) -> Floats:
        due, extra, extra_slope, token_s, attended_s = lines[:QUEUE_S]
        seconds = to_compute * (token_s + attended_s * (num_tokens - 0.5 * to_compute))
        return late(due + more_due + seconds / self._objectives.ttft_s) + extra + extra_slope * seconds


def _rows(workers: Sequence[Worker], values_of: Callable[[Worker], Iterable[float]], count: int) -> Floats:
    values = chain.from_iterable(map(values_of, workers))
    return np.fromiter(values, np.float64, count * len(workers)).reshape(-1, count).T


def late(share: Floats) -> Floats:
    """Returns cost_model.late of each share."""
    return np.maximum(share, LATE * share - (LATE - 1.0))


def _lines_of(
    loads: Floats, speeds: Floats, prompt_lean: Floats, decode_lean: Floats, objectives: Objectives
) -> Floats:
    """Returns cost_model's prefill_line and decode_line, and the other rows. Args: *_lean: costs of work against it."""
    pending, decoding, kv_tokens, arriving, leased, locked, output, drafts = loads
    num_pages, page_size, most, *times = speeds
    prefill_s, prompt_token_s, attended_token_s, fixed_s, request_s, kv_token_s, gap_s = times
    ttft_s, itl_s = objectives.ttft_s, objectives.itl_s
    # Each draft is a row of its step.
    request_s = request_s * (1.0 + drafts)
    queue_s = prompt_token_s * pending
    # Cost of a second of prefill to one request decoded beside it.
    slow = 1.0 + (1.0 - itl_s / np.maximum(itl_s, gap_s)) / TAIL_SHARE
    delay = slow / (np.maximum(MIN_OUTPUT_STEPS, output) * itl_s)
    empty_s = fixed_s + request_s * decoding + kv_token_s * kv_tokens
    step_s = empty_s + request_s
    others = np.where(step_s > itl_s, LATE, 1.0) * decoding / itl_s
    lacking = np.maximum(0.0, decoding + 1 - most)
    place = late(lacking / most * output * step_s / ttft_s)
    held = locked * page_size + np.maximum(leased * page_size, arriving)
    lines = np.empty((NUM_LINES, len(pending)))
    lines[PREFILL_DUE] = (queue_s + prefill_s) / ttft_s
    lines[PREFILL_EXTRA] = 0.0
    lines[PREFILL_EXTRA_SLOPE] = (1.0 + prompt_lean) / ttft_s + decoding * delay
    lines[PROMPT_TOKEN_S], lines[ATTENDED_TOKEN_S], lines[QUEUE_S] = prompt_token_s, attended_token_s, queue_s
    lines[DECODE_DUE], lines[DECODE_DUE_SLOPE] = step_s / itl_s, kv_token_s / itl_s
    lines[DECODE_EXTRA] = queue_s * delay + others * request_s + place + decode_lean
    lines[DECODE_EXTRA_SLOPE] = others * kv_token_s
    lines[ROOM], lines[HELD], lines[OUTPUT_STEPS_S] = num_pages * page_size - held, held, output * empty_s
    return lines
