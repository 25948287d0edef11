"""Offsets of the workers' clocks from the router's, measured by probes (docs/requests.md, "Clocks").

A probe bounds the worker's offset from above, its answer from below. The uncertainty is half the interval: at most half
a round trip, and less if the fastest probe and the fastest answer came from different rounds. Bounds widen with age,
because clocks drift. Contradicting bounds mean that a clock has jumped, for example after a host was suspended; then
only the newest count.
"""

from collections.abc import Callable, Sequence

from tandem.lifecycle import ASSIGNED, PREFILL_MOMENTS, now_ns
from tandem.messages import ClockProbe, ClockReply, Moment
from tandem.router.requests.tracker import RequestTracker

PROBE_INTERVAL_S = 1.0
# Probes in a row to a new worker: its first answer waits for other work.
NUM_FIRST_PROBES = 4
# Limit on the relative drift of two clocks: quartz is good to 50 ppm on either side.
MAX_DRIFT = 100e-6


class ClockOffset:
    """One clock's time less the router's."""

    def __init__(self, reply: ClockReply, heard_ns: int) -> None:
        self.num_replies = 1
        self._set(*_bounds(reply, heard_ns), heard_ns)

    def observe(self, reply: ClockReply, heard_ns: int) -> None:
        """Adds a round trip whose reply arrived at `heard_ns` on the router's clock. Raises ValueError for impossible
        times."""
        low, high = _bounds(reply, heard_ns)
        drift = self._drift_ns(heard_ns)
        older_low, older_high = self._low - drift, self._high + drift
        if older_low <= high and low <= older_high:
            low, high = max(low, older_low), min(high, older_high)
        self._set(low, high, heard_ns)
        self.num_replies += 1

    def uncertainty_ns(self, at_ns: int) -> int:
        """Returns the possible error of the offset at a time on the router's clock."""
        return round((self._high - self._low) / 2 + self._drift_ns(at_ns))

    def _set(self, low: float, high: float, at_ns: int) -> None:
        self._low, self._high, self._at_ns = low, high, at_ns
        self.offset_ns = round((low + high) / 2)

    def _drift_ns(self, at_ns: int) -> float:
        return MAX_DRIFT * abs(at_ns - self._at_ns)


def _bounds(reply: ClockReply, heard_ns: int) -> tuple[float, float]:
    """Raises ValueError for impossible times."""
    # The clocks drift between the readings; much, if the worker was stopped meanwhile.
    drift = MAX_DRIFT * (heard_ns - reply.sent_ns)
    low, high = reply.replied_ns - heard_ns - drift, reply.received_ns - reply.sent_ns + drift
    if low > high:
        raise ValueError(f"a round trip of {high - low:.0f} ns between two clocks")
    return low, high


class ClockOffsets:
    """Clock offsets of the connected workers. Belongs to the router's loop."""

    def __init__(self, clock_ns: Callable[[], int] = now_ns) -> None:
        self._clock_ns = clock_ns
        self._offsets: dict[str, ClockOffset] = {}

    def probe(self) -> ClockProbe:
        return ClockProbe(self._clock_ns())

    def receive(self, worker_id: str, reply: ClockReply) -> bool:
        """Returns whether to probe again at once."""
        offset, heard_ns = self._offsets.get(worker_id), self._clock_ns()
        if offset is None:
            offset = self._offsets[worker_id] = ClockOffset(reply, heard_ns)
        else:
            offset.observe(reply, heard_ns)
        return offset.num_replies < NUM_FIRST_PROBES

    def forget(self, worker_id: str) -> None:
        self._offsets.pop(worker_id, None)

    def stamp(self, tracker: RequestTracker, moments: Sequence[Moment]) -> None:
        """Records moments of the current attempt's workers on the router's clock, clamped to between the attempt's
        start and now."""
        now = self._clock_ns()
        stamped = tracker.moments
        since = stamped.get(ASSIGNED, now)
        offsets_ns: dict[bool, int] = {}
        for moment in moments:
            name = moment.name
            is_prefill = name in PREFILL_MOMENTS
            offset_ns = offsets_ns.get(is_prefill)
            if offset_ns is None:
                offset = self._offsets.get(tracker.prefill_worker_id if is_prefill else tracker.decode_worker_id)
                offset_ns = offsets_ns[is_prefill] = 0 if offset is None else offset.offset_ns
                bound_ns = now - since if offset is None else min(offset.uncertainty_ns(now), now - since)
                tracker.clock_uncertainty_ns = max(tracker.clock_uncertainty_ns, bound_ns)
            time_ns = moment.time_ns - offset_ns
            stamped[name] = since if time_ns < since else now if time_ns > now else time_ns

    def offset_ns(self, worker_id: str) -> int:
        """0: unknown."""
        offset = self._offsets.get(worker_id)
        return 0 if offset is None else offset.offset_ns

    def uncertainty_ns(self, worker_id: str) -> int | None:
        offset = self._offsets.get(worker_id)
        return None if offset is None else offset.uncertainty_ns(self._clock_ns())
