"""Which requests use which LoRA adapters of an engine, and what routers are told of it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.adapters import AdapterRef
from tandem.engine.adapters.base import NO_ADAPTER, AdapterError, Adapters, AdapterState
from tandem.messages import AdapterPlaces, Failed, Unservable, WorkerStats
from tandem.prefix import split_namespace

# Limit of one load, in seconds. Its request then goes to another worker.
LOAD_TIMEOUT_S = 60.0
# Time for which an unloaded adapter stays in memory for requests that were accepted before, in seconds.
LINGER_S = 60.0
# Minimum intervals between looks at the adapters' places, and at those to forget, in seconds.
LOOK_S = 0.05
FORGET_S = 5.0
# Time for which an answer about one adapter is good for further requests, in seconds.
JUDGE_S = 0.001
# Failed loads are tried again for requests that come later than this, in seconds.
RETRY_S = 1.0
# Weight of the newest load in the measured rate.
NEWEST_SHARE = 0.5
HERE = (AdapterState.IN_HOST, AdapterState.ON_DEVICE)


@dataclass(eq=False, slots=True)
class _Known:
    """An adapter that the engine knows.

    Attributes:
        wanted_at: time of the latest request, or of the end of the latest use.
        num_begun: uses that have begun and not ended, held or not.
        loading_since: -inf: it does not load.
        failure, failed_at: of the last load; "".
        has_turn, judged_at: whether a use may hold it, and when that was found.
    """

    ref: AdapterRef
    wanted_at: float
    num_begun: int = 0
    loading_since: float = -math.inf
    failure: str = ""
    failed_at: float = -math.inf
    has_turn: bool = False
    judged_at: float = -math.inf

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
    def is_loading(self) -> bool:
        return self._known is not None and self._uses is not None and self._uses.is_loading(self._known)

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
_NO_STATS = WorkerStats()


class AdapterUses:
    """The uses of one engine's adapters. Belongs to the engine thread.

    Each request brings its adapter along, so a restarted worker needs no list of adapters.
    """

    def __init__(self, adapters: Adapters | None, clock: Callable[[], float]) -> None:
        self._adapters = adapters
        self._clock = clock
        self._known: dict[str, _Known] = {}
        # None before any router has named the loaded ones.
        self._listed: frozenset[str] | None = None
        self._looked_at = self._forgot_at = self._states_at = -math.inf
        self._states: Mapping[str, AdapterState] = {}
        self._places = AdapterPlaces((), ())
        self._load_byte_s = 0.0
        self._num_loads = 0
        self._load_s = 0.0

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

    def begin(self, ref: AdapterRef | None, namespace: str) -> AdapterUse:
        """Returns a use that is not held yet. The caller must end it.

        Args:
            namespace: cache namespace of the request, which names the adapter's content too.
        """
        if split_namespace(namespace)[1] != (ref.content_hash if ref is not None else ""):
            return AdapterUse(failure="the request's cached pages belong to another adapter")
        if ref is None:
            return NO_USE
        if self._adapters is None:
            return AdapterUse(failure="this worker takes no adapters")
        known = self._note(ref)
        known.num_begun += 1
        return AdapterUse(self, known)

    def is_loading(self, known: _Known) -> bool:
        now = self._clock()
        if known.failure or known.is_late(now):
            return False
        return self._states_now(now).get(known.ref.content_hash) is AdapterState.LOADING

    def has_turn(self, known: _Known) -> bool:
        assert self._adapters is not None
        now = self._clock()
        if now > known.judged_at + JUDGE_S:
            known.judged_at = now
            state = self._states_now(now).get(known.ref.content_hash)
            known.has_turn = bool(known.failure) or state is AdapterState.ON_DEVICE
            if not known.has_turn and self._acquire(known, now) is not None:
                known.has_turn = True
                self._adapters.release(known.ref.content_hash)
        return known.has_turn

    def try_hold(self, use: AdapterUse, known: _Known) -> None:
        now = self._clock()
        slot = self._acquire(known, now)
        if slot is not None:
            known.failure = ""
            use.slot, use.is_held = slot, True
        elif known.failure:
            use.failure, use.may_do_better = known.failure, True
        else:
            # It makes room for another adapter, or is not there: others need not ask in this turn.
            known.has_turn, known.judged_at = False, now

    def let_go(self, use: AdapterUse, known: _Known) -> None:
        if use.is_held:
            assert self._adapters is not None
            use.slot, use.is_held = NO_ADAPTER, False
            known.wanted_at = self._clock()
            self._adapters.release(known.ref.content_hash)

    def poll(self) -> AdapterPlaces | None:
        """Forgets adapters that are unloaded. Called once a turn. Returns the places for the routers, if they have
        changed."""
        if self._adapters is None or not (self._known or self._places.on_device or self._places.in_host):
            return None
        now = self._clock()
        if now < self._looked_at + LOOK_S:
            return None
        self._looked_at = now
        if now >= self._forgot_at + FORGET_S:
            self._forgot_at = now
            self._forget(now)
        states = self._states = self._adapters.states()
        self._states_at = now
        self._measure(states, now)
        places = AdapterPlaces(
            tuple(name for name, state in states.items() if state is AdapterState.ON_DEVICE),
            tuple(name for name, state in states.items() if state is AdapterState.IN_HOST),
            self._load_byte_s,
        )
        if places == self._places:
            return None
        self._places = places
        return places

    def stats(self) -> WorkerStats:
        if self._adapters is None:
            return _NO_STATS
        return WorkerStats(
            num_adapters_on_device=len(self._places.on_device),
            num_adapters_in_host=len(self._places.in_host),
            num_adapter_loads=self._num_loads,
            adapter_load_ns=int(self._load_s * 1e9),
        )

    def _states_now(self, now: float) -> Mapping[str, AdapterState]:
        assert self._adapters is not None
        if now > self._states_at + JUDGE_S:
            self._states_at, self._states = now, self._adapters.states()
        return self._states

    def _note(self, ref: AdapterRef) -> _Known:
        assert self._adapters is not None
        now = self._clock()
        known = self._known.get(ref.content_hash)
        if known is None:
            known = self._known[ref.content_hash] = _Known(ref, now)
            self._adapters.add(ref)
        elif known.failure and (known.ref.path != ref.path or now > known.failed_at + RETRY_S):
            # The files may be there now, or under the path of another name.
            known.ref, known.failure = ref, ""
            self._adapters.add(ref)
        known.wanted_at = now
        if not known.failure:
            self._adapters.prefetch(ref.content_hash)
        return known

    def _acquire(self, known: _Known, now: float) -> int | None:
        assert self._adapters is not None
        try:
            slot = self._adapters.acquire(known.ref.content_hash)
        except AdapterError as error:
            known.failure, known.failed_at = str(error), now
            return None
        if slot is None and known.is_late(now):
            known.failure, known.failed_at = f"it was not loaded within {LOAD_TIMEOUT_S:g} s", now
        return slot

    def _measure(self, states: Mapping[str, AdapterState], now: float) -> None:
        for content_hash, known in self._known.items():
            state = states.get(content_hash)
            if state is AdapterState.LOADING:
                if known.loading_since == -math.inf:
                    known.loading_since = now
            elif known.loading_since > -math.inf:
                if state in HERE:
                    self._count_load(now - known.loading_since, known.ref.num_bytes)
                known.loading_since = -math.inf

    def _count_load(self, seconds: float, num_bytes: int) -> None:
        self._num_loads += 1
        self._load_s += seconds
        byte_s, old = seconds / max(1, num_bytes), self._load_byte_s
        self._load_byte_s = old + NEWEST_SHARE * (byte_s - old) if old else byte_s

    def _forget(self, now: float) -> None:
        if self._listed is None:
            return
        assert self._adapters is not None
        for content_hash, known in list(self._known.items()):
            if content_hash not in self._listed and not known.num_begun and now > known.wanted_at + LINGER_S:
                del self._known[content_hash]
                self._adapters.remove(content_hash)


def adapter_failure(request_id: str, attempt: int, use: AdapterUse) -> Failed | Unservable | None:
    """Returns the message for a request whose adapter cannot be used here, or None."""
    if not use.failure:
        return None
    reason = f"the adapter cannot be used: {use.failure}"
    return (Failed if use.may_do_better else Unservable)(request_id, attempt, reason)
