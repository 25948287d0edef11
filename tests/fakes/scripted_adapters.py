"""Adapters whose loads end when a test says so."""

from collections import Counter

from tandem.adapters import AdapterRef
from tandem.engine.adapters.base import AdapterError, AdapterLimits, Adapters, AdapterState


def make_ref(content: str, path: str = "") -> AdapterRef:
    return AdapterRef(content, path or f"/adapters/{content}", 8, ("q_proj",), 1_000_000)


class ScriptedAdapters(Adapters):
    """A load begins with prefetch or acquire, and ends with `finish` or `fail`.

    Attributes:
        known: paths by content hash.
        uses: held uses by content hash.
    """

    def __init__(self, max_loras: int = 2) -> None:
        self.limits = AdapterLimits(max_loras, 16, 2**30)
        self.on_loaded = lambda: None
        self.known: dict[str, str] = {}
        self.uses: Counter[str] = Counter()
        self._states: dict[str, AdapterState] = {}
        self._errors: dict[str, str] = {}
        self._slots: dict[str, int] = {}

    def finish(self, content_hash: str) -> None:
        assert self._states[content_hash] is AdapterState.LOADING
        self._states[content_hash] = AdapterState.IN_HOST
        self.on_loaded()

    def fail(self, content_hash: str, error: str) -> None:
        self._states[content_hash], self._errors[content_hash] = AdapterState.FAILED, error

    def add(self, info: AdapterRef) -> None:
        self.known[info.content_hash] = info.path
        self._errors.pop(info.content_hash, None)
        if self._states.get(info.content_hash) in (None, AdapterState.FAILED):
            self._states[info.content_hash] = AdapterState.ON_DISK

    def remove(self, content_hash: str) -> None:
        assert not self.uses[content_hash]
        del self.known[content_hash], self._states[content_hash]
        self._slots.pop(content_hash, None)

    def prefetch(self, content_hash: str) -> None:
        if self._states[content_hash] is AdapterState.ON_DISK:
            self._states[content_hash] = AdapterState.LOADING

    def acquire(self, content_hash: str) -> int | None:
        if error := self._errors.get(content_hash):
            raise AdapterError(error)
        self.prefetch(content_hash)
        if self._states[content_hash] is AdapterState.LOADING:
            return None
        if content_hash not in self._slots:
            unused = [name for name in self._slots if not self.uses[name]]
            if len(self._slots) == self.limits.max_loras:
                if not unused:
                    return None
                self._states[unused[0]] = AdapterState.IN_HOST
                del self._slots[unused[0]]
            self._slots[content_hash] = min({*range(self.limits.max_loras)} - {*self._slots.values()})
            self._states[content_hash] = AdapterState.ON_DEVICE
        self.uses[content_hash] += 1
        return self._slots[content_hash]

    def release(self, content_hash: str) -> None:
        assert self.uses[content_hash] > 0
        self.uses[content_hash] -= 1

    def states(self) -> dict[str, AdapterState]:
        return dict(self._states)

    def close(self) -> None:
        return
