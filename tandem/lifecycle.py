"""The life of a request, named once: metrics, traces, logs, timelines and benchmarks all derive from this page.

A *moment* is stamped by the process where it happens, with `now_ns`, and travels with that process's messages. A
*phase* is the time between two moments. Phases may overlap: the lease is asked for while prefill runs.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

# These happen in the router.
RECEIVED = "received"  # The request has come.
TOKENIZED = "tokenized"  # The prompt has become token ids.
ASSIGNED = "assigned"  # Workers are chosen; Admit and Prefill go out to them.
FIRST_TOKEN_SENT = "first_token_sent"  # The first token is passed on to the client.
ENDED = "ended"  # The request is over for its client.
# These happen in the prefill worker.
PREFILL_STARTED = "prefill_started"  # Pages are locked, and a lease is asked for.
FIRST_TOKEN = "first_token"  # The first token is sampled.
# These happen in the decode worker.
LEASE_GRANTED = "lease_granted"  # Pages are promised to the prefill worker.
COMMITTED = "committed"  # Committed has come, and all pages are there.
DECODE_STARTED = "decode_started"  # The step that computes the second token begins.
SECOND_TOKEN = "second_token"  # The second token is sampled.
DECODE_FINISHED = "decode_finished"  # The last token is sampled.


class PhaseSpec(NamedTuple):
    name: str
    start: str
    end: str
    meaning: str


PHASES = (
    PhaseSpec("tokenize", RECEIVED, TOKENIZED, "chat template and tokenizer"),
    PhaseSpec("prefill_queue", ASSIGNED, PREFILL_STARTED, "waiting for the prefill worker"),
    PhaseSpec("prefill", PREFILL_STARTED, FIRST_TOKEN, "computing the prompt's KV and the first token"),
    PhaseSpec("lease", PREFILL_STARTED, LEASE_GRANTED, "waiting for pages at the decode worker, beside prefill"),
    PhaseSpec("transfer", FIRST_TOKEN, COMMITTED, "copying what is left once prefill is done, and committing it"),
    PhaseSpec("handover", FIRST_TOKEN, DECODE_STARTED, "from the first token to the step of the second"),
    PhaseSpec("first_to_second", FIRST_TOKEN, SECOND_TOKEN, "the gap that the client sees after its first token"),
    PhaseSpec("decode", DECODE_STARTED, DECODE_FINISHED, "all decode steps"),
    PhaseSpec("ttft", RECEIVED, FIRST_TOKEN_SENT, "time to first token"),
    PhaseSpec("e2e", RECEIVED, ENDED, "the whole request"),
)


def now_ns() -> int:
    """Nanoseconds since the epoch: comparable between processes, for observation only and never for a deadline."""
    return time.time_ns()


class PhaseTiming(NamedTuple):
    """A phase that happened: its start after RECEIVED and its duration, in milliseconds."""

    name: str
    start_ms: float
    duration_ms: float


def phase_timings(moments: Mapping[str, int]) -> list[PhaseTiming]:
    """Returns the phases of which both ends are known, by start.

    Args:
        moments: time in nanoseconds by moment name; RECEIVED must be there.
    """
    received = moments[RECEIVED]
    timings = [
        PhaseTiming(p.name, (moments[p.start] - received) / 1e6, (moments[p.end] - moments[p.start]) / 1e6)
        for p in PHASES
        if p.start in moments and p.end in moments
    ]
    return sorted(timings, key=lambda t: t.start_ms)
