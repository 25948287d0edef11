"""Records the work of a process as time slices, for `tandem trace` (docs/tracing.md)."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tandem.lifecycle import now_ns

# Slices kept per process, the latest. A busy decode worker adds 2,000 a second.
MAX_SLICES = 2**17
# Drops the laps of polling.
MIN_LAP_NS = 2_000

# Tracks of a worker.
ENGINE = "engine thread"
INBOX = "inbox"
DEVICE = "device"
HANDOVERS = "handovers"
# Track of a router.
REQUESTS = "requests"


def copies_to(worker_id: str) -> str:
    return f"copies to {worker_id}"


class Slice(NamedTuple):
    """A span of time, in nanoseconds since the epoch. Attributes: request_tokens: tokens computed per request."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    request_ids: Sequence[str] = ()
    request_tokens: Sequence[int] = ()
    numbers: Mapping[str, int] = MappingProxyType({})
    detail: str = ""


class Recording:
    """A finished recording. Attributes: num_dropped: oldest slices dropped for lack of room."""

    def __init__(self, kept: deque[tuple[Any, ...]], num_dropped: int) -> None:
        self._kept = kept
        self.num_dropped = num_dropped

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, num_slices: int) -> list[Slice]:
        """Remove and return up to `num_slices` slices. Small batches do not block other threads."""
        return [Slice(*self._kept.popleft()) for _ in range(min(num_slices, len(self._kept)))]


_Watched = tuple[Callable[[], bool], Callable[[], float] | None, tuple[Any, ...]]


class Recorder:
    """Records slices of one thread. Check `is_on` before computing expensive arguments."""

    def __init__(self, max_slices: int = MAX_SLICES, clock: Callable[[], int] = now_ns) -> None:
        self.is_on = False
        self._clock = clock
        self._slices: deque[tuple[Any, ...]] = deque(maxlen=max_slices)
        self._num_added = 0
        self._turn_ns = self._lap_ns = 0
        self._watched: list[_Watched] = []

    def start(self) -> None:
        self._slices.clear()
        self._num_added = 0
        self._turn_ns = self._lap_ns = self._clock()
        self.is_on = True

    def stop(self) -> Recording:
        """End the recording. Unfinished work gets slices marked "still under way"."""
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
        """Keep a slice. Args: end_ns: 0 means now."""
        if self.is_on:
            self._keep((track, name, start_ns, end_ns or self._clock(), request_ids, (), numbers or {}, detail))

    # --- the loop of a thread ---

    def begin_turn(self) -> None:
        """Begin a turn of the thread's loop and its first lap."""
        if self.is_on:
            self._turn_ns = self._lap_ns = self._clock()
            self.look()

    def lap(self, name: str, request_ids: Sequence[str] = (), **numbers: int) -> None:
        """Keep the time since the previous lap under `name`."""
        if self.is_on:
            start_ns, self._lap_ns = self._lap_ns, self._clock()
            if numbers or self._lap_ns - start_ns >= MIN_LAP_NS:
                self._keep((ENGINE, name, start_ns, self._lap_ns, request_ids, (), numbers, ""))

    def end_turn(self, number: int, *, worked: bool) -> None:
        """End the turn and its last lap. Args: worked: False drops an idle turn."""
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
        """End a lap that launched a forward pass, which continues on the device.

        Args:
            done: non-blocking test for completion.
            duration_s: device time, queried after completion; None if unknown.
        """
        if self.is_on:
            start_ns = self._lap_ns
            self.lap("launch", request_ids, **numbers)
            self._watched.append((done, duration_s, (DEVICE, name, start_ns, request_ids, request_tokens, numbers)))

    def started(
        self, track: str, name: str, start_ns: int, done: Callable[[], bool], request_id: str, **numbers: int
    ) -> None:
        if self.is_on:
            watched: _Watched = (done, None, (track, name, start_ns, (request_id,), (), numbers))
            if not self._keep_if_done(watched):
                self._watched.append(watched)

    def look(self) -> None:
        """Keep the slices of completed asynchronous work."""
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
