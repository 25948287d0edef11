"""Moments and phases of a request, common to metrics, traces, logs, timelines and benchmarks.

The process where a *moment* happens stamps it with `now_ns`; the router converts it to its own clock
(router/requests/clock_offsets.py). A *phase* is the time between two moments. Phases of the *critical path* follow each
other without a gap and add up to `e2e`; all others overlap them.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

# Stamped by the router.
RECEIVED = "received"
TOKENIZED = "tokenized"
WAITING = "waiting"  # The request enters the waiting room: no workers for the attempt.
FIRST_ASSIGNED = "first_assigned"  # Workers chosen for the first of several attempts.
ASSIGNED = "assigned"  # Workers chosen; Admit and Prefill are sent.
FIRST_TOKEN_SENT = "first_token_sent"
ENDED = "ended"  # The request ended for its client.
# Stamped by the prefill worker.
PREFILL_RECEIVED = "prefill_received"
PREFILL_STARTED = "prefill_started"  # Pages locked, lease requested.
SHIP_STARTED = "ship_started"  # First push to the decode worker.
FIRST_TOKEN = "first_token"
# Stamped by the decode worker.
LEASE_GRANTED = "lease_granted"
COMMITTED = "committed"  # Committed arrived: all pages are here.
DECODE_STARTED = "decode_started"  # The step of the second token begins.
SECOND_TOKEN = "second_token"
LAST_TOKEN = "last_token"  # Last token sampled; by the prefill worker if it is also the first.

# Reset by each further attempt.
ROUTER_ATTEMPT_MOMENTS = (WAITING, ASSIGNED)
PREFILL_MOMENTS = frozenset((PREFILL_RECEIVED, PREFILL_STARTED, SHIP_STARTED, FIRST_TOKEN))
DECODE_MOMENTS = (LEASE_GRANTED, COMMITTED, DECODE_STARTED, SECOND_TOKEN, LAST_TOKEN)


class PhaseSpec(NamedTuple):
    name: str
    start: str
    end: str
    meaning: str


CRITICAL_PATH = (
    PhaseSpec("tokenize", RECEIVED, TOKENIZED, "chat template and tokenizer"),
    PhaseSpec("assign", TOKENIZED, ASSIGNED, "checking the request, choosing its workers, and waiting for one"),
    PhaseSpec("earlier_attempts", FIRST_ASSIGNED, ASSIGNED, "attempts that ended early, up to the start of the last"),
    PhaseSpec("prefill_queue", ASSIGNED, PREFILL_STARTED, "to the prefill worker, and waiting there"),
    PhaseSpec("prefill", PREFILL_STARTED, FIRST_TOKEN, "computing the prompt's KV and the first token"),
    PhaseSpec("handover", FIRST_TOKEN, DECODE_STARTED, "from the first token to the step of the second"),
    PhaseSpec("decode", DECODE_STARTED, LAST_TOKEN, "all decode steps"),
    PhaseSpec("finish", LAST_TOKEN, ENDED, "the last token's way to the client, and the client's reading"),
)
OVERLAPPING = (
    PhaseSpec("worker_wait", WAITING, ASSIGNED, "waiting for a worker, in `assign` or `earlier_attempts`"),
    PhaseSpec("dispatch", ASSIGNED, PREFILL_RECEIVED, "from the router to the prefill worker, in `prefill_queue`"),
    PhaseSpec("lease", PREFILL_STARTED, LEASE_GRANTED, "waiting for pages at the decode worker, beside `prefill`"),
    PhaseSpec("ship", SHIP_STARTED, COMMITTED, "copying pages, while prefill runs and after it"),
    PhaseSpec("transfer", FIRST_TOKEN, COMMITTED, "copying what is left once prefill is done, in `handover`"),
    PhaseSpec("decode_queue", COMMITTED, DECODE_STARTED, "waiting for the next decode step, in `handover`"),
    PhaseSpec("first_to_client", FIRST_TOKEN, FIRST_TOKEN_SENT, "the first token's way through the router"),
    PhaseSpec("first_to_second", FIRST_TOKEN, SECOND_TOKEN, "the gap that the client sees after its first token"),
    PhaseSpec("ttft", RECEIVED, FIRST_TOKEN_SENT, "time to first token"),
    PhaseSpec("e2e", RECEIVED, ENDED, "the whole request"),
)
PHASES = CRITICAL_PATH + OVERLAPPING
# Phases that a client can measure itself.
TOTALS = ("ttft", "e2e")


_EPOCH_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Return nanoseconds since the epoch, for observation only, never for a deadline.

    This is the monotonic clock plus its offset from the wall clock at process start: setting the wall clock would yield
    negative phases and break the measured clock offsets. Drift is harmless, because processes compare by measured
    offsets.
    """
    return time.monotonic_ns() + _EPOCH_NS


class PhaseTiming(NamedTuple):
    """A completed phase, in milliseconds; it starts relative to RECEIVED. Never negative."""

    name: str
    start_ms: float
    duration_ms: float
    on_critical_path: bool = False


def critical_path(moments: Mapping[str, int]) -> list[PhaseTiming]:
    """Return the critical path's phases in order, without gaps.

    The first starts at RECEIVED. The last ends at ENDED, or at a running request's latest moment. A missing moment
    extends the phase before it. A moment that, by another clock, precedes its predecessor is moved to it.

    Args:
        moments: nanoseconds by moment name, of the last attempt; must contain RECEIVED.
    """
    at = received = moments[RECEIVED]
    ended = moments.get(ENDED)
    if ended is None:
        ended = max(moments[spec.start] for spec in CRITICAL_PATH if spec.start in moments)
    ended = max(ended, received)
    # A request that ends with its first token has no handover.
    nothing = "handover" if LAST_TOKEN in moments and DECODE_STARTED not in moments else ""
    phases = []
    under_way = ""
    for name, start, _, _ in CRITICAL_PATH:
        moment = moments.get(start)
        if moment is None or name == nothing:
            continue
        moment = at if moment < at else ended if moment > ended else moment
        if under_way:
            phases.append(PhaseTiming(under_way, (at - received) / 1e6, (moment - at) / 1e6, True))
        under_way, at = name, moment
    phases.append(PhaseTiming(under_way, (at - received) / 1e6, (ended - at) / 1e6, True))
    return phases


def phase_timings(moments: Mapping[str, int]) -> list[PhaseTiming]:
    """Return the critical path, then the overlapping phases with both ends known."""
    phases = critical_path(moments)
    received = moments[RECEIVED]
    ended = moments.get(ENDED)
    if ended is None:
        ended = max(moments.values())
    ended = max(ended, received)
    for name, first, last, _ in OVERLAPPING:
        if first not in moments or last not in moments:
            continue
        start, end = moments[first], moments[last]
        if name == "first_to_client" and end < moments.get(ASSIGNED, received):
            # An earlier attempt sent the first token.
            continue
        start = received if start < received else ended if start > ended else start
        end = start if end < start else ended if end > ended else end
        phases.append(PhaseTiming(name, (start - received) / 1e6, (end - start) / 1e6))
    return phases
