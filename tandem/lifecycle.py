"""The life of a request, named once: metrics, traces, logs, timelines and benchmarks all derive from this page.

A *moment* is stamped by the process where it happens, with `now_ns`, and travels with that process's messages; the
router moves it onto its own clock (router/requests/clock_offsets.py). A *phase* is the time between two moments.

The phases of the *critical path* follow each other without a gap, from the request's coming to its end: each moment of
its life belongs to exactly one, and their durations add up to `e2e`, whatever has become of the request. All other
phases overlap them: the lease is asked for while prefill runs.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

# These happen in the router.
RECEIVED = "received"  # The request has come.
TOKENIZED = "tokenized"  # The prompt has become token ids.
WAITING = "waiting"  # The attempt has no workers yet: the request enters the waiting room.
FIRST_ASSIGNED = "first_assigned"  # The first attempt got its workers; only where it was not the last one.
ASSIGNED = "assigned"  # Workers are chosen; Admit and Prefill go out to them.
FIRST_TOKEN_SENT = "first_token_sent"  # The first token is passed on to the client.
ENDED = "ended"  # The request is over for its client.
# These happen in the prefill worker.
PREFILL_RECEIVED = "prefill_received"  # The router's Prefill has come.
PREFILL_STARTED = "prefill_started"  # Pages are locked, and a lease is asked for.
SHIP_STARTED = "ship_started"  # The first pages are pushed to the decode worker.
FIRST_TOKEN = "first_token"  # The first token is sampled.
# These happen in the decode worker.
LEASE_GRANTED = "lease_granted"  # Pages are promised to the prefill worker.
COMMITTED = "committed"  # Committed has come, and all pages are there.
DECODE_STARTED = "decode_started"  # The step that computes the second token begins.
SECOND_TOKEN = "second_token"  # The second token is sampled.
LAST_TOKEN = "last_token"  # The last token is sampled: by the prefill worker, if the first one is the last.

# Later attempts have these anew.
ROUTER_ATTEMPT_MOMENTS = (WAITING, ASSIGNED)
PREFILL_MOMENTS = frozenset((PREFILL_RECEIVED, PREFILL_STARTED, SHIP_STARTED, FIRST_TOKEN))
DECODE_MOMENTS = (LEASE_GRANTED, COMMITTED, DECODE_STARTED, SECOND_TOKEN, LAST_TOKEN)


class PhaseSpec(NamedTuple):
    """A phase and the moments that it normally begins and ends with."""

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
# What a client sees of all the others together.
TOTALS = ("ttft", "e2e")


# Read once, so that all times of one process are on one scale.
_EPOCH_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Nanoseconds since the epoch, for observation only and never for a deadline.

    It is the monotonic clock, moved to where the wall clock was when the process started. A wall clock that is set
    while requests run, by NTP or by hand, would make phases of hours or negative ones, and what was learned of its
    offset wrong; this one goes on. That it no longer says what the wall clock says then does no harm: times of
    different processes are compared by their measured offsets (router/requests/clock_offsets.py), and never with the
    wall clock.
    """
    return time.monotonic_ns() + _EPOCH_NS


class PhaseTiming(NamedTuple):
    """A phase that happened: its start after RECEIVED and its duration, in milliseconds, neither ever negative.

    Attributes:
        on_critical_path: whether it is one of those that add up to the whole request.
    """

    name: str
    start_ms: float
    duration_ms: float
    on_critical_path: bool = False


def critical_path(moments: Mapping[str, int]) -> list[PhaseTiming]:
    """Returns the phases that the request's life consists of, in order. Each begins where the one before ends, the
    first with RECEIVED and the last ends with ENDED, or with the last moment that is known of a request in hand.

    A moment that is not known ends no phase: the time up to the next one belongs to the phase that was under way. What
    seems to happen before something that it follows happens with it, because clocks agree only so well.

    Args:
        moments: time in nanoseconds by moment name, of the last attempt; RECEIVED must be there.
    """
    at = received = moments[RECEIVED]
    ended = moments.get(ENDED)
    if ended is None:
        ended = max(moments[spec.start] for spec in CRITICAL_PATH if spec.start in moments)
    ended = max(ended, received)
    # If the first token was the last, nothing is handed over.
    nothing = "handover" if LAST_TOKEN in moments and DECODE_STARTED not in moments else ""
    phases = []
    under_way = ""
    # This is done for every request, on the loop that passes tokens on.
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
    """Returns the critical path, and behind it those of the overlapping phases of which both ends are known. Args as
    `critical_path`."""
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
            # The client had its first token from an earlier attempt.
            continue
        start = received if start < received else ended if start > ended else start
        end = start if end < start else ended if end > ended else end
        phases.append(PhaseTiming(name, (start - received) / 1e6, (end - start) / 1e6))
    return phases
