"""What a process does, slice by slice, for as long as somebody records it (`tandem trace`, docs/tracing.md)."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tandem.lifecycle import now_ns

# A process keeps so many slices of a recording, the latest. A busy decode worker makes 2,000 a second.
MAX_SLICES = 2**17
# What took less and says nothing is left out: it would be most of what a loop does that only looks whether there is
# something to do.
MIN_LAP_NS = 2_000

# The tracks of a worker.
ENGINE = "engine thread"
INBOX = "inbox"
DEVICE = "device"
HANDOVERS = "handovers"
# That of a router.
REQUESTS = "requests"


def copies_to(worker_id: str) -> str:
    """The track of what is copied over the link to a worker."""
    return f"copies to {worker_id}"


class Slice(NamedTuple):
    """Something that took from one moment to another, in nanoseconds since the epoch. The recorder keeps plain tuples
    like this one, which are made faster.

    Attributes:
        request_ids: of the requests that it was about.
        request_tokens: where tokens were computed for these, how many for each.
        numbers: by name.
        detail: in words.
    """

    track: str
    name: str
    start_ns: int
    end_ns: int
    request_ids: Sequence[str] = ()
    request_tokens: Sequence[int] = ()
    numbers: Mapping[str, int] = MappingProxyType({})
    detail: str = ""


class Recording:
    """What a recorder has kept, for another thread.

    Attributes:
        num_dropped: slices that there was no room for, the oldest ones.
    """

    def __init__(self, kept: deque[tuple[Any, ...]], num_dropped: int) -> None:
        """Args: kept: slices as plain tuples."""
        self._kept = kept
        self.num_dropped = num_dropped

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, num_slices: int) -> list[Slice]:
        """The next so many. To make all of them at once, or to free them, would hold up whoever shares the interpreter
        with this thread."""
        return [Slice(*self._kept.popleft()) for _ in range(min(num_slices, len(self._kept)))]


# How to see that it has ended, how long it took by its own account, and the beginning of its slice.
_Watched = tuple[Callable[[], bool], Callable[[], float] | None, tuple[Any, ...]]


class Recorder:
    """Belongs to one thread. While it is off, each of its methods returns at once; whoever has to count or to collect
    for an argument looks at `is_on` first.

    Attributes:
        is_on: whether somebody records.
    """

    def __init__(self, max_slices: int = MAX_SLICES, clock: Callable[[], int] = now_ns) -> None:
        """Args: clock: nanoseconds since the epoch, like all moments of requests."""
        self.is_on = False
        self._clock = clock
        self._slices: deque[tuple[Any, ...]] = deque(maxlen=max_slices)
        self._num_added = 0
        self._turn_ns = self._lap_ns = 0
        # What is under way.
        self._watched: list[_Watched] = []

    def start(self) -> None:
        """From now on everything is kept."""
        self._slices.clear()
        self._num_added = 0
        self._turn_ns = self._lap_ns = self._clock()
        self.is_on = True

    def stop(self) -> Recording:
        """Ends the recording and gives what there is; what is still under way is said to be."""
        self.look()
        for _, _, (track, name, start_ns, request_ids, request_tokens, numbers) in self._watched:
            self._keep((track, name, start_ns, self._clock(), request_ids, request_tokens, numbers, "still under way"))
        self.is_on = False
        self._watched.clear()
        slices, num_added = self._slices, self._num_added
        self._slices = deque(maxlen=slices.maxlen)
        return Recording(slices, num_added - len(slices))

    def add(
        self,
        track: str,
        name: str,
        start_ns: int,
        request_ids: Sequence[str] = (),
        *,
        end_ns: int = 0,
        detail: str = "",
        numbers: dict[str, int] | None = None,
    ) -> None:
        """Keeps a slice. Args: end_ns: 0: now."""
        if self.is_on:
            self._keep((track, name, start_ns, end_ns or self._clock(), request_ids, (), numbers or {}, detail))

    # --- the loop of a thread ---

    def begin_turn(self) -> None:
        """A turn of the loop begins, and its first lap."""
        if self.is_on:
            self._turn_ns = self._lap_ns = self._clock()
            self.look()

    def lap(self, name: str, request_ids: Sequence[str] = (), **numbers: int) -> None:
        """From the end of the lap before until now the thread did this."""
        if self.is_on:
            start_ns, self._lap_ns = self._lap_ns, self._clock()
            if numbers or self._lap_ns - start_ns >= MIN_LAP_NS:
                self._keep((ENGINE, name, start_ns, self._lap_ns, request_ids, (), numbers, ""))

    def end_turn(self, number: int, *, worked: bool) -> None:
        """Ends the turn and its last lap, in which the thread told others what there is to tell.

        Args:
            worked: whether there was anything to do; turns in which there was nothing are not kept.
        """
        if self.is_on:
            self.lap("tell")
            if worked:
                self._keep((ENGINE, "step", self._turn_ns, self._lap_ns, (), (), {"number": number}, ""))

    # --- what goes on beside the thread ---

    def launched(
        self,
        name: str,
        done: Callable[[], bool],
        duration_s: Callable[[], float] | None,
        request_ids: Sequence[str],
        request_tokens: Sequence[int] = (),
        **numbers: int,
    ) -> None:
        """A lap has ended in which a forward was launched, which goes on by itself from then on.

        Args:
            done: whether it has completed, without waiting for it.
            duration_s: how long the device took, to be asked once it has completed; None: nobody knows.
        """
        if self.is_on:
            start_ns = self._lap_ns
            self.lap("launch", request_ids, **numbers)
            self._watched.append((done, duration_s, (DEVICE, name, start_ns, request_ids, request_tokens, numbers)))

    def started(
        self, track: str, name: str, start_ns: int, done: Callable[[], bool], request_id: str, **numbers: int
    ) -> None:
        """Something has been started that goes on by itself. Args: done: as for `launched`."""
        if self.is_on:
            watched: _Watched = (done, None, (track, name, start_ns, (request_id,), (), numbers))
            if not self._keep_if_done(watched):
                self._watched.append(watched)

    def look(self) -> None:
        """Looks which of what is under way has ended. To be called where that is noticed anyway."""
        if self._watched:
            self._watched = [watched for watched in self._watched if not self._keep_if_done(watched)]

    def _keep_if_done(self, watched: _Watched) -> bool:
        done, duration_s, (track, name, start_ns, request_ids, request_tokens, numbers) = watched
        if not done():
            return False
        if duration_s is not None:
            numbers = {**numbers, "device_us": round(duration_s() * 1e6)}
        self._keep((track, name, start_ns, self._clock(), request_ids, request_tokens, numbers, ""))
        return True

    def _keep(self, kept: tuple[Any, ...]) -> None:
        self._slices.append(kept)
        self._num_added += 1
