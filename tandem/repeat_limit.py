"""Keeps a fault that lasts, such as an expired certificate, from filling a log."""

import time
from collections.abc import Callable

# A repeated message is logged once in this time, in seconds.
REPEAT_INTERVAL_S = 60.0


class RepeatLimit:
    """Tells which messages of a retried action to log: each text once in REPEAT_INTERVAL_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[str, float] = {}

    def allows(self, text: str) -> bool:
        now = self._clock()
        self._logged = {old: at for old, at in self._logged.items() if now - at < REPEAT_INTERVAL_S}
        if text in self._logged:
            return False
        self._logged[text] = now
        return True

    def forget(self) -> None:
        """Call after a success: the next fault is a new one."""
        self._logged.clear()
