"""Who may still map the memory of a process that has died: a mapping keeps it from a replacement."""

from collections.abc import Collection

# A replacement is started after so long whoever maps what: a mapper that stands still must not keep it away for ever.
MAPPED_LIMIT_S = 10.0


class Mappers:
    """For each process that has died, those that have not said since that they map nothing of it."""

    def __init__(self) -> None:
        self._mappers: dict[str, set[str]] = {}
        self._deadlines: dict[str, float] = {}

    def has_died(self, name: str, running: Collection[str], now: float) -> None:
        """Args: running: who may map its memory."""
        for mappers in self._mappers.values():
            mappers.discard(name)
        self._mappers[name] = set(running)
        self._deadlines[name] = now + MAPPED_LIMIT_S

    def to_ask(self) -> set[str]:
        """Whose answers are waited for."""
        return set().union(*self._mappers.values())

    def have_answered(self, mapper: str, mapped: Collection[str]) -> None:
        """Args: mapped: the processes, dead ones too, whose memory it maps."""
        for name, mappers in self._mappers.items():
            if name not in mapped:
                mappers.discard(mapper)

    def forget(self, name: str) -> None:
        """The process maps nothing, and nobody waits for what it left."""
        for mappers in self._mappers.values():
            mappers.discard(name)
        self._mappers.pop(name, None)
        self._deadlines.pop(name, None)

    def take_released(self, name: str, now: float) -> bool:
        """Whether the process may be started again: nobody maps what it left, or the time is over. If so, nothing more
        is remembered of it."""
        if self._mappers.get(name) and now < self._deadlines[name]:
            return False
        self._mappers.pop(name, None)
        self._deadlines.pop(name, None)
        return True
