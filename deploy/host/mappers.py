"""Tracks the processes that still map a dead process's memory: its replacement needs that memory."""

from collections.abc import Collection

# A replacement then starts in any case: a hung mapper must not block it forever.
MAPPED_LIMIT_S = 10.0


class Mappers:
    """The processes that still map a dead process's memory, by dead process."""

    def __init__(self) -> None:
        self._mappers: dict[str, set[str]] = {}
        self._deadlines: dict[str, float] = {}

    def has_died(self, name: str, running: Collection[str], now: float) -> None:
        for mappers in self._mappers.values():
            mappers.discard(name)
        self._mappers[name] = set(running)
        self._deadlines[name] = now + MAPPED_LIMIT_S

    def to_ask(self) -> set[str]:
        return set().union(*self._mappers.values())

    def have_answered(self, mapper: str, mapped: Collection[str]) -> None:
        """Args: mapped: processes, also dead ones, whose memory `mapper` maps."""
        for name, mappers in self._mappers.items():
            if name not in mapped:
                mappers.discard(mapper)

    def forget(self, name: str) -> None:
        for mappers in self._mappers.values():
            mappers.discard(name)
        self._mappers.pop(name, None)
        self._deadlines.pop(name, None)

    def take_released(self, name: str, now: float) -> bool:
        """Returns whether a dead process may restart, unmapped or after the limit, and then drops it."""
        if self._mappers.get(name) and now < self._deadlines[name]:
            return False
        self._mappers.pop(name, None)
        self._deadlines.pop(name, None)
        return True
