"""Names of purges. By its name, a purge that several stores pass on reaches each store once."""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence

NAME_BYTES = 16
# A store that joins within this time after a purge may hold pages of before, in seconds.
RECENT_S = 60.0
MAX_NAMES = 1024


class PurgeNames:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Time of each known purge, in order.
        self._heard_at: OrderedDict[bytes, float] = OrderedDict()
        self._heard: list[bytes] = []

    def hear(self, names: Sequence[bytes]) -> bool:
        """Takes the names of other stores' purges. Returns whether one is new."""
        self._heard = [name for name in names if name not in self._heard_at]
        return bool(self._heard)

    def take_new(self) -> list[bytes]:
        """Returns the names under which to pass on a purge: those just heard, else a new one."""
        names, self._heard = self._heard or [secrets.token_bytes(NAME_BYTES)], []
        for name in names:
            self._heard_at[name] = self._clock()
        while len(self._heard_at) > MAX_NAMES:
            self._heard_at.popitem(last=False)
        return names

    def recent(self) -> list[bytes]:
        """Returns the names for a store that joins."""
        since = self._clock() - RECENT_S
        return [name for name, heard_at in self._heard_at.items() if heard_at >= since]
