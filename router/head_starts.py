"""Head starts of resumed requests: each broken stream gives one (docs/requests.md, "Resumed streams")."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

# A resumed request is at most this much older than its arrival.
MAX_AGE_NS = 10 * 10**9
# The oldest are forgotten; each was an admitted request.
MAX_NUM_REMEMBERED = 2**16
# Claims are repeated to the other routers for this time, in seconds.
SHARED_S = 2.0
MAX_NUM_SHARED = 1024


class HeadStarts:
    """Belongs to the router's loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._claimed: OrderedDict[bytes, None] = OrderedDict()
        self._recent: deque[tuple[float, bytes]] = deque(maxlen=MAX_NUM_SHARED)

    def claim(self, stream_id: bytes) -> bool:
        """Returns whether the request that resumes this stream keeps the stream's age."""
        if stream_id in self._claimed:
            return False
        self.learn((stream_id,))
        self._recent.append((self._clock(), stream_id))
        return True

    def learn(self, stream_ids: Iterable[bytes]) -> None:
        """Takes over claims at other routers."""
        for stream_id in stream_ids:
            self._claimed[stream_id] = None
            if len(self._claimed) > MAX_NUM_REMEMBERED:
                self._claimed.popitem(last=False)

    def recent(self) -> list[bytes]:
        """Returns the latest claims here."""
        oldest = self._clock() - SHARED_S
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
        return [stream_id for _, stream_id in self._recent]
