"""Places of adapters: disk, host cache, device slots."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.adapters import AdapterRef
from tandem.engine.adapters.base import AdapterError, AdapterLimits, Adapters, AdapterState
from tandem.engine.adapters.host import HostAdapter
from tandem.engine.adapters.loader import AdapterLoader, Load
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.models.config import ModelConfig
from tandem.engine.ranks.launches import RankLaunches

# A loaded adapter keeps its slot for this long, so that the request that waits for it finds it there, in seconds.
FIRST_USE_S = 1.0
# An adapter that has waited this long for a slot takes one whose uses end first: it admits no new ones.
PATIENCE_S = 5.0


@dataclass(eq=False, slots=True)
class _Adapter:
    """
    Attributes:
        slot: that holds it, or that it is loaded into.
        loading: number of the load that runs; 0: none.
        error: of the last load.
        used_at: counts acquisitions of all adapters.
        kept_until: the slot is not taken before, unless the adapter has been used.
        waits_since: for a slot; None: it does not wait.
        asked_at: the last time that it was asked for while it waited.
        makes_room_for: takes no new uses until it has lost its slot to this adapter, or that one waits no more.
    """

    info: AdapterRef
    slot: int | None = None
    host: HostAdapter | None = None
    loading: int = 0
    num_uses: int = 0
    error: str = ""
    is_removed: bool = False
    used_at: int = 0
    kept_until: float = 0.0
    waits_since: float | None = None
    asked_at: float = 0.0
    makes_room_for: "_Adapter | None" = None

    @property
    def is_ready(self) -> bool:
        return self.slot is not None and not self.loading


class AdapterManager(Adapters):
    """Loads adapters in a thread of its own; the engine thread only looks what it has done."""

    def __init__(
        self,
        slots: AdapterSlots,
        model: ModelConfig,
        limits: AdapterLimits,
        now: Callable[[], float] = time.monotonic,
        ranks: RankLaunches | None = None,
    ) -> None:
        """Args: ranks: publishes loads to the followers; None: there are none."""
        self.limits = limits
        self.on_loaded = lambda: None
        self._slots = slots
        self._now = now
        self._num_ticks = 0
        self._free = list(range(limits.max_loras))
        # By hash, also those that are removed while they are used or loaded.
        self._held: dict[str, _Adapter] = {}
        # In the slots, or being loaded into one.
        self._placed: dict[int, _Adapter] = {}
        self._num_loads = 0
        self._ranks = ranks
        if ranks is None:
            self._loader = AdapterLoader(slots, model, lambda: self.on_loaded())
        else:
            self._loader = AdapterLoader(slots, model, lambda: self.on_loaded(), ranks.has_load_failed)

    def add(self, info: AdapterRef) -> None:
        adapter = self._held.setdefault(info.content_hash, _Adapter(info))
        adapter.info, adapter.error, adapter.is_removed = info, "", False

    def remove(self, content_hash: str) -> None:
        adapter = self._known(content_hash)
        if adapter is not None:
            adapter.is_removed = True
            self._drop_if_unused(adapter)

    def prefetch(self, content_hash: str) -> None:
        self._take_loaded()
        adapter = self._known(content_hash)
        if adapter is None or adapter.error or adapter.loading or adapter.host is not None or adapter.is_ready:
            return
        self._load(adapter)

    def acquire(self, content_hash: str) -> int | None:
        self._take_loaded()
        adapter = self._known(content_hash)
        if adapter is None:
            raise AdapterError(f"adapter {content_hash} is not loaded on this worker")
        if adapter.error:
            raise AdapterError(adapter.error)
        if adapter.loading or self._waiter(adapter) is not None:
            return None
        if adapter.slot is None:
            adapter.slot = self._free_slot(adapter)
            if adapter.slot is not None:
                self._placed[adapter.slot] = adapter
                self._load(adapter)
            return None
        adapter.num_uses += 1
        adapter.used_at, adapter.kept_until = self._tick(), 0.0
        return adapter.slot

    def release(self, content_hash: str) -> None:
        adapter = self._held[content_hash]
        assert adapter.num_uses > 0
        adapter.num_uses -= 1
        self._drop_if_unused(adapter)

    def states(self) -> dict[str, AdapterState]:
        self._take_loaded()
        known = (adapter for adapter in self._held.values() if not adapter.is_removed)
        return {adapter.info.content_hash: _state(adapter) for adapter in known}

    def close(self) -> None:
        self._loader.close()

    @property
    def num_host_bytes(self) -> int:
        return sum(adapter.host.num_bytes for adapter in self._held.values() if adapter.host is not None)

    def _known(self, content_hash: str) -> _Adapter | None:
        adapter = self._held.get(content_hash)
        return None if adapter is None or adapter.is_removed else adapter

    def _tick(self) -> int:
        self._num_ticks += 1
        return self._num_ticks

    def _load(self, adapter: _Adapter) -> None:
        self._num_loads += 1
        adapter.loading, adapter.waits_since = self._num_loads, None
        adapter.used_at = self._tick()
        after, order = None, 0
        if adapter.slot is not None:
            after = self._slots.fence()
            if self._ranks is not None:
                order = self._ranks.publish_load(adapter.slot, adapter.info)
        self._loader.submit(Load(adapter.loading, adapter.info, adapter.slot, adapter.host, after, order))

    def _free_slot(self, wanted: _Adapter) -> int | None:
        """Returns an empty slot, or that of the least recently used adapter that may lose it."""
        if self._free:
            return self._free.pop()
        now = self._now()
        if wanted.waits_since is None or now - wanted.asked_at > PATIENCE_S:
            wanted.waits_since = now
        wanted.asked_at = now
        unused = [
            one
            for one in self._placed.values()
            if not (one.loading or one.num_uses or one.kept_until > now) and self._waiter(one) in (None, wanted)
        ]
        if not unused:
            self._ask_for_room(wanted, now)
            return None
        evicted = min(unused, key=lambda one: (one.makes_room_for is None, one.used_at))
        slot, evicted.slot, evicted.makes_room_for = evicted.slot, None, None
        return slot

    def _waiter(self, adapter: _Adapter) -> _Adapter | None:
        """Returns the adapter that this one makes room for, if that still waits."""
        waiter = adapter.makes_room_for
        if waiter is None or (waiter.waits_since is not None and self._now() - waiter.asked_at <= PATIENCE_S):
            return waiter
        # It has another slot, or its requests have gone.
        adapter.makes_room_for = None
        return None

    def _ask_for_room(self, wanted: _Adapter, now: float) -> None:
        assert wanted.waits_since is not None
        waiters = [self._waiter(one) for one in self._placed.values()]
        if now - wanted.waits_since < PATIENCE_S or wanted in waiters:
            return
        used = [one for one in self._placed.values() if one.num_uses and one.makes_room_for is None]
        if used:
            min(used, key=lambda one: one.used_at).makes_room_for = wanted

    def _take_loaded(self) -> None:
        for loaded in self._loader.take():
            adapter = self._held[loaded.load.info.content_hash]
            adapter.loading, adapter.host, adapter.error = 0, loaded.host, loaded.error
            adapter.kept_until = self._now() + FIRST_USE_S
            if loaded.error:
                self._empty_slot(adapter)
            self._drop_if_unused(adapter)
            self._shrink_host()

    def _drop_if_unused(self, adapter: _Adapter) -> None:
        if not adapter.is_removed or adapter.num_uses or adapter.loading:
            return
        self._empty_slot(adapter)
        # Adapters that make room for it look whether it waits.
        adapter.waits_since = None
        del self._held[adapter.info.content_hash]

    def _empty_slot(self, adapter: _Adapter) -> None:
        if adapter.slot is not None:
            del self._placed[adapter.slot]
            self._free.append(adapter.slot)
            adapter.slot = None

    def _shrink_host(self) -> None:
        cached = sorted(
            (one for one in self._held.values() if one.host is not None and not one.loading),
            key=lambda one: one.used_at,
        )
        for adapter in cached:
            if self.num_host_bytes <= self.limits.host_bytes:
                return
            adapter.host = None


def _state(adapter: _Adapter) -> AdapterState:
    if adapter.error:
        return AdapterState.FAILED
    if adapter.loading:
        return AdapterState.LOADING
    if adapter.slot is not None:
        return AdapterState.ON_DEVICE
    return AdapterState.ON_DISK if adapter.host is None else AdapterState.IN_HOST
