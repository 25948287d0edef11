"""Which requests use which LoRA adapters of an engine: loads ahead, slots in turn, and what routers are told of it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.adapters import AdapterRef
from tandem.engine.adapters.base import NO_ADAPTER, AdapterError, AdapterInfo, Adapters, AdapterState
from tandem.messages import AdapterPlaces, Failed, Unservable
from tandem.prefix import split_namespace
from tandem.worker.base import Outbox

# Limit of one load, in seconds. Its request then goes to another worker.
LOAD_TIMEOUT_S = 60.0
# Time for which an adapter waits for a slot while others keep theirs by ever new requests, in seconds.
FAIR_S = 1.0
# Time after its last question for which an adapter counts as waiting for a slot, in seconds.
ASKING_S = 2.0
# Time for which an unloaded adapter stays in memory for requests that were accepted before, in seconds.
LINGER_S = 60.0
# Minimum intervals between looks at the adapters' places, and at those to forget, in seconds.
LOOK_S = 0.05
FORGET_S = 5.0
# Weight of the newest load in the measured rate.
NEWEST_SHARE = 0.5
# Time for which an answer about a slot, or about the adapters' places, is good for further requests, in seconds.
JUDGE_S = 0.001
# Failed loads are tried again for requests that come later than this, in seconds.
RETRY_S = 1.0
LOADING = AdapterState.LOADING
HERE = (AdapterState.IN_HOST, AdapterState.ON_DEVICE)


@dataclass(eq=False, slots=True)
class _Known:
    """An adapter that the engine knows.

    Attributes:
        num_begun: uses that have begun and not ended.
        num_uses: those that hold its slot.
        is_closed: it gives its slot up: no further use begins until the last one has ended.
        waits_since, asked_at: times of the first and the last question for a slot that it did not get; -inf: none.
        loading_since, failed_at: -inf: not loading, and not failed.
        wanted_at: time of the latest request.
        has_turn, judged_at: whether there is a slot for it, and when that was found.
    """

    ref: AdapterRef
    wanted_at: float
    slot: int = NO_ADAPTER
    num_begun: int = 0
    num_uses: int = 0
    is_closed: bool = False
    waits_since: float = -math.inf
    asked_at: float = -math.inf
    loading_since: float = -math.inf
    failed_at: float = -math.inf
    failure: str = ""
    judged_at: float = -math.inf
    has_turn: bool = False

    def is_late(self, now: float) -> bool:
        """Whether its load takes too long."""
        return self.loading_since > -math.inf and now - self.loading_since > LOAD_TIMEOUT_S


class AdapterUse:
    """One request's use of its adapter at one scheduler, or of none.

    Attributes:
        slot: slot while it is held; NO_ADAPTER before and after, and without an adapter.
        failure: reason why it will not be held, in one line; "".
        may_do_better: another worker may serve the request.
    """

    __slots__ = ("_known", "_uses", "failure", "is_held", "may_do_better", "slot")

    def __init__(self, uses: "AdapterUses | None" = None, known: _Known | None = None, failure: str = "") -> None:
        self._uses = uses
        self._known = known
        self.slot = NO_ADAPTER
        self.is_held = False
        self.failure = failure
        self.may_do_better = False

    def try_hold(self) -> bool:
        """Holds the adapter's slot until `end`, or returns False: ask again, unless there is a `failure`."""
        if self._known is None or self._uses is None:
            return not self.failure
        if not self.is_held and not self.failure:
            self._uses.try_hold(self, self._known)
        return self.is_held

    @property
    def is_loaded(self) -> bool:
        """Whether the adapter is in memory or on the device, or never will be."""
        return self._known is None or self._uses is None or self.is_held or self._uses.is_loaded(self._known)

    @property
    def has_turn(self) -> bool:
        """Whether `try_hold` may succeed now. Asking gives the adapter its place among those that wait for a slot."""
        return self._known is None or self._uses is None or self.is_held or self._uses.has_turn(self._known)

    def let_go(self) -> None:
        """Gives the slot back, to be held again later."""
        if self._known is not None and self._uses is not None:
            self._uses.let_go(self, self._known)

    def end(self) -> None:
        """Ends the use. Forward passes that run may still read the slot. Later calls have no effect."""
        known, self._known = self._known, None
        if known is not None and self._uses is not None:
            self._uses.let_go(self, known)
            known.num_begun -= 1


NO_USE = AdapterUse()


class AdapterUses:
    """The uses of one engine's adapters. Belongs to the engine thread.

    Each request brings its adapter along, so a restarted worker needs no list of adapters. A slot belongs to an adapter
    from its first use to its last. If others keep their slots by ever new requests, an adapter that waits gets a turn:
    one of them takes no new uses until its last one has ended.
    """

    def __init__(self, adapters: Adapters | None, clock: Callable[[], float]) -> None:
        self._adapters = adapters
        self._clock = clock
        self._known: dict[str, _Known] = {}
        # None before any router has named the loaded ones.
        self._listed: frozenset[str] | None = None
        self._looked_at = self._forgot_at = -math.inf
        self._states_of = -math.inf
        self._states: Mapping[str, AdapterState] = {}
        self._places = AdapterPlaces((), ())
        self._load_byte_s = 0.0
        self.num_loads = 0
        self.load_s = 0.0

    def set_listed(self, content_hashes: frozenset[str]) -> None:
        """Names the loaded adapters. Others are forgotten some time after their last use."""
        self._listed = content_hashes

    def expect(self, ref: AdapterRef | None) -> None:
        """Begins to load an adapter that a request will use."""
        if ref is not None and self._adapters is not None:
            self._note(ref)

    def has(self, ref: AdapterRef | None) -> bool:
        """Returns whether the adapter is in memory or on the device, or none is needed."""
        if ref is None:
            return True
        return self._adapters is not None and self._adapters.states().get(ref.content_hash) in HERE

    def begin(self, ref: AdapterRef | None, namespace: str = "") -> AdapterUse:
        """Returns a use that is not held yet. The caller must end it.

        Args:
            namespace: cache namespace of the request, which names the adapter's content too.
        """
        if ref is None:
            return NO_USE
        if self._adapters is None:
            return AdapterUse(failure="this worker takes no adapters: start the cluster with --max-loras")
        if split_namespace(namespace)[1] != ref.content_hash:
            return AdapterUse(failure="the request's cached pages belong to another adapter")
        known = self._note(ref)
        known.num_begun += 1
        return AdapterUse(self, known)

    def is_loaded(self, known: _Known) -> bool:
        now = self._clock()
        if known.failure or known.is_late(now):
            return True
        return self._states_at(now).get(known.ref.content_hash) is not LOADING

    def has_turn(self, known: _Known) -> bool:
        now = self._clock()
        if now > known.judged_at + JUDGE_S:
            known.judged_at = now
            known.has_turn = bool(known.failure) or self._has_turn(known, now)
        if not known.has_turn:
            self._wait(known, now)
        return known.has_turn

    def try_hold(self, use: AdapterUse, known: _Known) -> None:
        now = self._clock()
        if not known.failure and not self._has_turn(known, now):
            self._wait(known, now)
            return
        if known.num_uses == 0:
            slot = self._acquire(known, now)
            if slot is None:
                if known.failure:
                    use.failure = known.failure
                    use.may_do_better = True
                return
            known.slot = slot
            known.waits_since, known.failure = -math.inf, ""
        known.num_uses += 1
        use.slot, use.is_held = known.slot, True

    def let_go(self, use: AdapterUse, known: _Known) -> None:
        if not use.is_held:
            return
        use.is_held, use.slot = False, NO_ADAPTER
        known.num_uses -= 1
        known.wanted_at = self._clock()
        if known.num_uses == 0:
            assert self._adapters is not None
            self._adapters.release(known.ref.content_hash)
            known.slot, known.is_closed = NO_ADAPTER, False

    def poll(self, outbox: Outbox) -> None:
        """Tells routers changed places, and forgets adapters that are unloaded. Called once a turn."""
        if self._adapters is None or not self._known:
            return
        now = self._clock()
        if now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        states = self._states_at(now)
        self._measure(states, now)
        self._make_turns(states, now)
        if now >= self._forgot_at + FORGET_S:
            self._forgot_at = now
            self._forget(now)
        places = AdapterPlaces(
            tuple(name for name, state in states.items() if state is AdapterState.ON_DEVICE),
            tuple(name for name, state in states.items() if state is AdapterState.IN_HOST),
            self._load_byte_s,
        )
        if places != self._places:
            self._places = places
            outbox.to_router(places)

    def _states_at(self, now: float) -> Mapping[str, AdapterState]:
        assert self._adapters is not None
        if now > self._states_of + JUDGE_S:
            self._states_of, self._states = now, self._adapters.states()
        return self._states

    def _note(self, ref: AdapterRef) -> _Known:
        assert self._adapters is not None
        now = self._clock()
        known = self._known.get(ref.content_hash)
        if known is None:
            known = self._known[ref.content_hash] = _Known(ref, now)
            self._adapters.add(_info(ref))
        elif known.failure and (known.ref.path != ref.path or now > known.failed_at + RETRY_S):
            known.ref, known.failure = ref, ""
            self._adapters.add(_info(ref))
        known.wanted_at = now
        if known.num_uses == 0 and not known.failure:
            self._adapters.prefetch(ref.content_hash)
        return known

    def _acquire(self, known: _Known, now: float) -> int | None:
        assert self._adapters is not None
        try:
            slot = self._adapters.acquire(known.ref.content_hash)
        except AdapterError as error:
            known.failure, known.failed_at = str(error), now
            return None
        if slot is None:
            if known.is_late(now):
                known.failure, known.failed_at = f"its adapter was not loaded within {LOAD_TIMEOUT_S:g} s", now
            self._wait(known, now)
        return slot

    def _wait(self, known: _Known, now: float) -> None:
        if known.waits_since == -math.inf or now > known.asked_at + ASKING_S:
            known.waits_since = now
        known.asked_at = now

    def _waiting(self, now: float) -> list[_Known]:
        """Returns the adapters that wait for a slot, the longest first."""
        waiting = [k for k in self._known.values() if k.num_uses == 0 and now <= k.asked_at + ASKING_S]
        return sorted((k for k in waiting if k.waits_since > -math.inf and not k.failure), key=lambda k: k.waits_since)

    def _has_turn(self, known: _Known, now: float) -> bool:
        """Returns whether there is a slot for an adapter besides those for the ones that have waited longer."""
        assert self._adapters is not None
        if known.num_uses:
            return not known.is_closed
        num_held = sum(other.num_uses > 0 for other in self._known.values())
        first = [
            other
            for other in self._waiting(now)
            if other is not known
            and other.loading_since == -math.inf
            and (known.waits_since == -math.inf or other.waits_since < known.waits_since)
        ]
        return num_held + len(first) < self._adapters.limits.max_loras

    def _make_turns(self, states: Mapping[str, AdapterState], now: float) -> None:
        """Closes as many adapters to new uses as others have waited for long."""
        assert self._adapters is not None
        held = [known for known in self._known.values() if known.num_uses > 0]
        if len(held) < self._adapters.limits.max_loras:
            return
        overdue = [
            known
            for known in self._waiting(now)
            if now - known.waits_since > FAIR_S and states.get(known.ref.content_hash) in HERE
        ]
        num_closed = sum(known.is_closed for known in held)
        open_ones = sorted((known for known in held if not known.is_closed), key=lambda known: known.num_uses)
        for known in open_ones[: max(0, len(overdue) - num_closed)]:
            known.is_closed = True

    def _measure(self, states: Mapping[str, AdapterState], now: float) -> None:
        for content_hash, known in self._known.items():
            state = states.get(content_hash)
            if state is LOADING:
                if known.loading_since == -math.inf:
                    known.loading_since = now
            elif known.loading_since > -math.inf:
                if state in HERE:
                    self._count_load(now - known.loading_since, known.ref.num_bytes)
                known.loading_since = -math.inf

    def _count_load(self, seconds: float, num_bytes: int) -> None:
        self.num_loads += 1
        self.load_s += seconds
        byte_s = seconds / max(1, num_bytes)
        old = self._load_byte_s
        self._load_byte_s = byte_s if not old else old + NEWEST_SHARE * (byte_s - old)

    def _forget(self, now: float) -> None:
        if self._listed is None:
            return
        assert self._adapters is not None
        for content_hash, known in list(self._known.items()):
            is_idle = known.num_begun == 0 and now > known.wanted_at + LINGER_S
            if is_idle and content_hash not in self._listed:
                del self._known[content_hash]
                self._adapters.remove(content_hash)


def adapter_failure(request_id: str, attempt: int, use: AdapterUse) -> Failed | Unservable | None:
    """Returns the message for a request whose adapter cannot be used here, or None."""
    if not use.failure:
        return None
    reason = f"the adapter cannot be used: {use.failure}"
    return (Failed if use.may_do_better else Unservable)(request_id, attempt, reason)


def _info(ref: AdapterRef) -> AdapterInfo:
    return AdapterInfo(ref.content_hash, Path(ref.path), ref.rank, ref.targets, ref.num_bytes, ref.base_model)


def ref_of(info: AdapterInfo) -> AdapterRef:
    return AdapterRef(
        info.content_hash, str(info.path), info.rank, info.targets, info.num_bytes, info.base_model
    )
