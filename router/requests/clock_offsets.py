"""How far workers' clocks are from the router's, from probes on the streams that there are anyway.

The router sends a probe with its own time, the worker answers with the times at which it received the probe and sent
the answer, and the router notes when that came. Nothing arrives before it was sent: the probe's way says that the
worker's clock is ahead by so much at most, the answer's that it is ahead by so much at least. These bounds are true
however different the two ways are, so what is known is an interval, and half its width is the uncertainty: half a round
trip at most, and less where the fastest probe and the fastest answer were not of the same round. Bounds grow wider as
they age, because clocks drift; a new probe narrows them again. Bounds that contradict each other mean that a clock has
jumped, as that of a host does that was suspended: then the newest alone count.

Offsets are for looking at timelines. No deadline uses them.
"""

from collections.abc import Callable, Sequence

from tandem.lifecycle import ASSIGNED, PREFILL_MOMENTS, now_ns
from tandem.messages import ClockProbe, ClockReply, Moment
from tandem.router.requests.tracker import RequestTracker

PROBE_INTERVAL_S = 1.0
# A worker that has just come is probed so often in a row: the first answer waits for much else.
NUM_FIRST_PROBES = 4
# Clocks of two hosts move against each other by so much at most: quartz is good to 50 millionths on either side.
MAX_DRIFT = 100e-6


class ClockOffset:
    """What is known of one clock: its time less the router's.

    Attributes:
        num_replies: round trips that it was learned from.
        offset_ns: the time, as far as it is known.
    """

    def __init__(self, reply: ClockReply, heard_ns: int) -> None:
        """Args and errors as `observe`."""
        self.num_replies = 1
        self._set(*_bounds(reply, heard_ns), heard_ns)

    def observe(self, reply: ClockReply, heard_ns: int) -> None:
        """One round trip is over.

        Args:
            heard_ns: on the router's clock, when the reply came.

        Raises:
            ValueError: these times cannot be those of a round trip.
        """
        low, high = _bounds(reply, heard_ns)
        drift = self._drift_ns(heard_ns)
        older_low, older_high = self._low - drift, self._high + drift
        if older_low <= high and low <= older_high:
            low, high = max(low, older_low), min(high, older_high)
        self._set(low, high, heard_ns)
        self.num_replies += 1

    def uncertainty_ns(self, at_ns: int) -> int:
        """How far the offset may be off at a time on the router's clock."""
        return round((self._high - self._low) / 2 + self._drift_ns(at_ns))

    def _set(self, low: float, high: float, at_ns: int) -> None:
        """Args: at_ns: on the router's clock, when these were the bounds."""
        self._low, self._high, self._at_ns = low, high, at_ns
        self.offset_ns = round((low + high) / 2)

    def _drift_ns(self, at_ns: int) -> float:
        """How far the clocks may have moved against each other between the last round trip and then."""
        return MAX_DRIFT * abs(at_ns - self._at_ns)


def _bounds(reply: ClockReply, heard_ns: int) -> tuple[float, float]:
    """The least and the most that the worker's clock is ahead now. Raises ValueError if these cannot be the times of a
    round trip."""
    # The clocks have drifted since either was read; while a worker is stopped between the two, by more than the ways
    # take.
    drift = MAX_DRIFT * (heard_ns - reply.sent_ns)
    low, high = reply.replied_ns - heard_ns - drift, reply.received_ns - reply.sent_ns + drift
    if low > high:
        raise ValueError(f"a round trip of {high - low:.0f} ns between two clocks")
    return low, high


class ClockOffsets:
    """The clocks of the workers that are connected to one router, by their ids. Belongs to its loop."""

    def __init__(self, clock_ns: Callable[[], int] = now_ns) -> None:
        """Args: clock_ns: the router's."""
        self._clock_ns = clock_ns
        self._offsets: dict[str, ClockOffset] = {}

    def probe(self) -> ClockProbe:
        """To be sent at once."""
        return ClockProbe(self._clock_ns())

    def receive(self, worker_id: str, reply: ClockReply) -> bool:
        """Returns whether to probe again at once. Raises ValueError if the reply cannot be true."""
        offset, heard_ns = self._offsets.get(worker_id), self._clock_ns()
        if offset is None:
            offset = self._offsets[worker_id] = ClockOffset(reply, heard_ns)
        else:
            offset.observe(reply, heard_ns)
        return offset.num_replies < NUM_FIRST_PROBES

    def forget(self, worker_id: str) -> None:
        """This life of the worker is over: the clock of the next one is another."""
        self._offsets.pop(worker_id, None)

    def stamp(self, tracker: RequestTracker, moments: Sequence[Moment]) -> None:
        """Notes moments of the current attempt's workers on the router's clock. Whatever a worker's clock says, none of
        them was before the attempt began, and none is yet to come."""
        now = self._clock_ns()
        stamped = tracker.moments
        since = stamped.get(ASSIGNED, now)
        # Of the prefill worker, and of the decode worker.
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
        """What a time of this worker is ahead of the router's, in nanoseconds; 0 while nothing is known."""
        offset = self._offsets.get(worker_id)
        return 0 if offset is None else offset.offset_ns

    def uncertainty_ns(self, worker_id: str) -> int | None:
        """How far the offset may be off now, in nanoseconds; None: nothing is known of this worker's clock."""
        offset = self._offsets.get(worker_id)
        return None if offset is None else offset.uncertainty_ns(self._clock_ns())
