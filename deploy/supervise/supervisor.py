"""Keeps a cluster's processes alive."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandem.config import RESTART_DELAY_S
from tandem.deploy.host.mappers import Mappers
from tandem.deploy.host.memory_kills import MemoryKills
from tandem.deploy.on_ray.ray_module import ActorUnavailableError, RayError, RayTaskError, ray

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
# After a longer gap between polls, this process was stopped or the machine slept.
STANDSTILL_S = 1.0
# Limit for answers still due when supervision ends.
LAST_ANSWER_S = 1.0
STAGES = ("end", "load", "join", "answer", "mapped")


@dataclass(frozen=True, slots=True)
class ProcessKind:
    """Supervision of one kind of process. Calls return references.

    Attributes:
        start: replaces the actor of a name and loads the new one.
        silence_limit_s: restarts a process that answers no probe for this time: it may be stopped (SIGSTOP).
        start_limit_s: limit for loading and joining.
        mapped: asks an actor for the names of workers whose memory it maps; None: it maps none.
    """

    start: Callable[[str], Any]
    join: Callable[[Any], Any]
    probe: Callable[[Any], Any]
    probe_interval_s: float
    silence_limit_s: float
    start_limit_s: float
    mapped: Callable[[Any], Any] | None = None
    answered: Callable[[Any], None] | None = None


class _Awaited(NamedTuple):
    """Attributes: stage: "end" of a process, "load" or "join" of a new one, "answer" to a probe, "mapped" memory, or
    "unused": its result no longer matters, but Ray logs the traceback of a failed call that nobody reads."""

    stage: str
    name: str


class Supervisor:
    """Restarts processes that die or do not answer. Nothing blocks longer than a poll."""

    def __init__(
        self, actors: Mapping[str, Any], kinds: Mapping[str, ProcessKind], may_start: Callable[[str], bool]
    ) -> None:
        """Args: actors: a kind's `start` replaces entries; may_start: its errors end the supervision."""
        self._actors = actors
        self._kinds = dict(kinds)
        self._may_start = may_start
        self._awaited: dict[Any, _Awaited] = {}
        self._restart_at: dict[str, float] = {}
        self._mappers = Mappers()
        self._memory_kills = MemoryKills()
        self._answered_at: dict[str, float] = {}
        self._probe_at: dict[str, float] = {}
        self._looked_at = time.monotonic()
        self._join_by: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        self._added: set[str] = set()
        self._retired: set[str] = set()
        # Ends that were asked for.
        self._expected: set[str] = set()
        for name in actors:
            self._watch(name)

    def add(self, name: str, kind: ProcessKind) -> None:
        assert name not in self._kinds
        self._kinds[name] = kind
        self._added.add(name)
        self._restart_at[name] = time.monotonic()

    def has_joined(self, name: str) -> bool:
        return name in self._answered_at

    def failure(self, name: str) -> str:
        return self._failures.get(name, "")

    def restart(self, name: str) -> None:
        """Ends a process and starts it again, unless it has died meanwhile and is started anyway."""
        if self._answered_at.pop(name, None) is not None:
            self._expected.add(name)
            ray.kill(self._actors[name])

    def retire(self, name: str) -> None:
        self._retired.add(name)
        if name in self._restart_at:
            self.forget(name)

    def is_retired(self, name: str) -> bool:
        return name in self._retired

    def keep(self, name: str) -> None:
        """Undoes `retire` for a process that runs."""
        self._retired.discard(name)

    def forget(self, name: str) -> None:
        self._ignore(name, STAGES)
        for known in (self._kinds, self._restart_at, self._join_by, self._answered_at, self._probe_at, self._failures):
            known.pop(name, None)
        self._added.discard(name)
        self._retired.discard(name)
        self._expected.discard(name)
        self._mappers.forget(name)

    def run(self, stop: threading.Event, on_turn: Callable[[], None] = lambda: None) -> None:
        """Returns when `stop` is set. Args: on_turn: called several times per second."""
        while not stop.is_set():
            on_turn()
            self._memory_kills.look()
            ended, rest = ray.wait(list(self._awaited), num_returns=1, timeout=POLL_INTERVAL_S, fetch_local=False)
            if ended and rest:
                # A turn looks at every process, so it must not end with one answer.
                ended += ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)[0]
            for ref in ended:
                self._handle(self._awaited.pop(ref), ref)
            now = time.monotonic()
            for name in [name for name, due in self._restart_at.items() if now >= due]:
                if not self._mappers.take_released(name, now) or not self._may_start(name):
                    continue
                del self._restart_at[name]
                self._join_by[name] = now + self._kinds[name].start_limit_s
                self._awaited[self._kinds[name].start(name)] = _Awaited("load", name)
            for name in [name for name, due in self._join_by.items() if now >= due]:
                self._give_up_start(name, f"it has not joined within {self._kinds[name].start_limit_s:g} s")
            self._ask_mappers()
            self._probe(now)
        self._hear_last_answers()

    def _handle(self, awaited: _Awaited, ref: Any) -> None:
        name = awaited.name
        match awaited.stage:
            case "end" if name in self._retired:
                self.forget(name)
            case "end":
                if _is_out_of_reach(ref):
                    # The call broke, not the process.
                    self._awaited[self._actors[name].wait_stopped.remote()] = awaited
                    return
                if name in self._expected:
                    self._restart_at[name] = time.monotonic()
                else:
                    why = self._memory_kills.explanation()
                    logger.warning("%s died%s; starting it again", name, f": {why}" if why else "")
                    self._start_later(name)
                self._expected.discard(name)
                running = [other for other in self._answered_at if self._kinds[other].mapped is not None]
                self._mappers.has_died(name, running, time.monotonic())
            case "answer":
                with contextlib.suppress(RayError, TimeoutError):
                    answer = ray.get(ref)
                    if name in self._answered_at:
                        self._answered_at[name] = time.monotonic()
                    if name in self._kinds and (answered := self._kinds[name].answered) is not None:
                        answered(answer)
            case "mapped":
                with contextlib.suppress(RayError, TimeoutError):
                    self._mappers.have_answered(name, ray.get(ref))
            case "unused":
                with contextlib.suppress(RayError, ValueError, TimeoutError):
                    ray.get(ref)
            case stage:
                try:
                    ray.get(ref)
                except (RayError, ValueError, TimeoutError) as error:
                    self._give_up_start(name, error.cause if isinstance(error, RayTaskError) else error)
                    return
                if name in self._retired:
                    return
                if stage == "load":
                    self._awaited[self._kinds[name].join(self._actors[name])] = _Awaited("join", name)
                else:
                    logger.warning("%s has joined" if name in self._added else "%s is back", name)
                    self._added.discard(name)
                    self._failures.pop(name, None)
                    self._watch(name)

    def _hear_last_answers(self) -> None:
        asked = [
            ref
            for ref, awaited in self._awaited.items()
            if awaited.stage == "answer" and self._kinds[awaited.name].answered is not None
        ]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=LAST_ANSWER_S) if asked else ([], [])
        for ref in answered:
            self._handle(self._awaited.pop(ref), ref)

    def _watch(self, name: str) -> None:
        self._awaited[self._actors[name].wait_stopped.remote()] = _Awaited("end", name)
        self._join_by.pop(name, None)
        self._answered_at[name] = time.monotonic()
        self._probe_at[name] = 0.0

    def _give_up_start(self, name: str, reason: object) -> None:
        logger.error("%s could not be started again: %s", name, " ".join(str(reason).split()))
        self._failures[name] = str(reason) or type(reason).__name__
        self._ignore(name, ("load", "join"))
        ray.kill(self._actors[name])
        self._start_later(name)

    def _ignore(self, name: str, stages: Collection[str]) -> None:
        for ref, awaited in self._awaited.items():
            if awaited.name == name and awaited.stage in stages:
                self._awaited[ref] = awaited._replace(stage="unused")

    def _start_later(self, name: str) -> None:
        if name in self._retired:
            self.forget(name)
            return
        self._answered_at.pop(name, None)
        self._join_by.pop(name, None)
        self._restart_at[name] = time.monotonic() + RESTART_DELAY_S

    def _ask_mappers(self) -> None:
        """Asks processes whose mappings block a restart; they close them when copies end."""
        asked = {awaited.name for awaited in self._awaited.values() if awaited.stage == "mapped"}
        for name in self._mappers.to_ask() - asked:
            mapped = self._kinds[name].mapped
            assert mapped is not None
            self._awaited[mapped(self._actors[name])] = _Awaited("mapped", name)

    def _probe(self, now: float) -> None:
        stood_still_s, self._looked_at = now - self._looked_at, now
        if stood_still_s > STANDSTILL_S:
            # This process could not listen: the others were not silent.
            for name in self._answered_at:
                self._answered_at[name] += stood_still_s
        due = {awaited.name for awaited in self._awaited.values() if awaited.stage == "answer"}
        for name, answered_at in list(self._answered_at.items()):
            kind = self._kinds[name]
            if now - answered_at > kind.silence_limit_s:
                logger.warning("%s has not answered for %g s", name, kind.silence_limit_s)
                # Its "end" follows.
                self._answered_at[name] = now
                ray.kill(self._actors[name])
            elif name not in due and now >= self._probe_at[name]:
                self._probe_at[name] = now + kind.probe_interval_s
                self._awaited[kind.probe(self._actors[name])] = _Awaited("answer", name)


def _is_out_of_reach(ref: Any) -> bool:
    try:
        ray.get(ref)
    except ActorUnavailableError:
        return True
    except RayError:
        pass
    return False
