"""Restarts of dead processes, with fake actors."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayError

from tandem.deploy.host import mappers
from tandem.deploy.host.memory_kills import MemoryKills
from tandem.deploy.supervise import supervisor
from tandem.deploy.supervise.supervisor import ProcessKind, Supervisor


class Ref:
    """A call of an actor; the test sets its end."""

    def __init__(self, *value: Any) -> None:
        self.value = value

    @property
    def is_done(self) -> bool:
        return bool(self.value)


class Actor:
    """
    Attributes:
        wait_stopped: with `remote()`, as on Ray's actors.
        maps: names of processes whose memory it maps; None: no answer.
    """

    def __init__(self) -> None:
        self.end = Ref()
        self.maps: list[str] | None = []
        self.wait_stopped = self

    def remote(self) -> Ref:
        return self.end

    def mapped(self) -> Ref:
        return Ref() if self.maps is None else Ref(list(self.maps))


class Ray:
    def wait(self, refs: list[Ref], *, timeout: float, **_: Any) -> tuple[list[Ref], list[Ref]]:
        time.sleep(0.001)
        return [ref for ref in refs if ref.is_done][:1], []

    def get(self, ref: Ref) -> Any:
        (value,) = ref.value
        if isinstance(value, Exception):
            raise value
        return value

    def kill(self, actor: Actor) -> None:
        actor.end.value = (RayError(),)


class Cluster:
    """A supervisor of these actors, on a thread.

    Attributes:
        started: names of restarted processes.
        can_start: Ray can start processes.
        without_place: names of processes without a node.
        failure: the error that ended the supervision.
    """

    def __init__(self, *names: str, start_limit_s: float = 60.0, loads: bool = True) -> None:
        self._loads = loads
        self.actors = {name: Actor() for name in names}
        self.started: list[str] = []
        self.can_start = True
        self.without_place = set[str]()
        self.failure: Exception | None = None
        self.load_error: Exception | None = None
        self._turns: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        kind = self.kind = ProcessKind(
            self._start, lambda _: Ref(None), lambda _: Ref(None), 60.0, 60.0, start_limit_s, Actor.mapped
        )
        self._stop = threading.Event()
        self.supervised = Supervisor(self.actors, dict.fromkeys(names, kind), self._may_start)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Cluster":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)
        assert not self._thread.is_alive()

    def on_turn(self, do: Callable[[], Any]) -> None:
        """Runs `do` on the supervising thread."""
        self._turns.put(do)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5.0
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def _take_turn(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._turns.get_nowait()()

    def kill(self, name: str) -> None:
        self.actors[name].end.value = (RayError(),)

    def has_started(self, name: str, within_s: float = 5.0) -> bool:
        deadline = time.monotonic() + within_s
        while name not in self.started and time.monotonic() < deadline:
            time.sleep(0.005)
        return name in self.started

    def wait_ended(self) -> None:
        self._thread.join(5.0)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.supervised.run(self._stop, self._take_turn)
        except RuntimeError as error:
            self.failure = error

    def _may_start(self, name: str) -> bool:
        if not self.can_start:
            raise RuntimeError("no Ray")
        return name not in self.without_place

    def _start(self, name: str) -> Ref:
        self.started.append(name)
        self.actors[name] = Actor()
        return Ref(self.load_error) if self._loads else Ref()


@pytest.fixture(autouse=True)
def scripted_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ray", Ray())
    monkeypatch.setattr(supervisor, "RESTART_DELAY_S", 0.01)


def test_a_replacement_is_started_when_nobody_maps_the_dead_one_s_memory() -> None:
    with Cluster("p0", "p1", "d0") as cluster:
        cluster.actors["p0"].maps = cluster.actors["p1"].maps = ["d0"]
        cluster.kill("d0")
        assert not cluster.has_started("d0", within_s=0.2)
        cluster.actors["p0"].maps = []
        assert not cluster.has_started("d0", within_s=0.2)
        # A dead process maps nothing.
        cluster.kill("p1")
        assert cluster.has_started("d0") and cluster.has_started("p1")


def test_supervision_ends_when_nothing_can_be_started_any_more() -> None:
    with Cluster("p0", "d0") as cluster:
        cluster.can_start = False
        cluster.kill("d0")
        cluster.wait_ended()
        assert str(cluster.failure) == "no Ray" and cluster.started == []


def test_who_does_not_say_what_it_maps_delays_a_replacement_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappers, "MAPPED_LIMIT_S", 0.3)
    with Cluster("p0", "d0") as cluster:
        cluster.actors["p0"].maps = None
        cluster.kill("d0")
        assert not cluster.has_started("d0", within_s=0.15)
        assert cluster.has_started("d0")


def test_who_does_not_come_to_an_end_of_loading_is_started_once_more() -> None:
    with Cluster("d0", start_limit_s=0.2, loads=False) as cluster:
        cluster.kill("d0")
        assert cluster.has_started("d0")
        deadline = time.monotonic() + 5.0
        while len(cluster.started) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_who_stood_still_himself_calls_nobody_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Actor] = []
    monkeypatch.setattr(Ray, "kill", lambda self, actor: killed.append(actor))
    silent = ProcessKind(lambda _: Ref(), lambda _: Ref(), lambda _: Ref(), 0.01, 3.0, 60.0)
    supervised = Supervisor({"router-0": Actor()}, {"router-0": silent}, lambda name: True)
    now = time.monotonic()
    supervised._probe(now)
    supervised._probe(now + 100.0)
    assert not killed
    for tenths in range(1, 36):
        supervised._probe(now + 100.0 + tenths / 10)
    assert len(killed) == 1


def test_one_more_is_started_and_one_that_is_to_end_is_not_started_again() -> None:
    with Cluster("p0", "d0") as cluster:
        supervised = cluster.supervised
        cluster.on_turn(lambda: supervised.add("d1", cluster.kind))
        assert cluster.has_started("d1")
        cluster.wait(lambda: supervised.has_joined("d1"))
        cluster.on_turn(lambda: supervised.retire("d0"))
        cluster.kill("d0")
        cluster.wait(lambda: not supervised.has_joined("d0"))
        assert not cluster.has_started("d0", within_s=0.2)
        # A process that waits for its restart has not joined either.
        cluster.on_turn(lambda: (supervised.retire("d1"), cluster.kill("d1")))
        cluster.wait(lambda: not supervised.has_joined("d1"))
        # The name is free again.
        cluster.started.clear()
        cluster.on_turn(lambda: supervised.add("d0", cluster.kind))
        assert cluster.has_started("d0") and cluster.started == ["d0"]


def test_why_one_more_cannot_be_started_is_known() -> None:
    with Cluster("p0") as cluster:
        cluster.load_error = ValueError("no room")
        cluster.on_turn(lambda: cluster.supervised.add("d1", cluster.kind))
        cluster.wait(lambda: cluster.supervised.failure("d1") == "no room")
        cluster.on_turn(lambda: cluster.supervised.forget("d1"))
        cluster.wait(lambda: not cluster.supervised.failure("d1"))
        cluster.started.clear()
        assert not cluster.has_started("d1", within_s=0.2)


def test_starts_that_fail_after_they_were_given_up_are_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would log their tracebacks."""
    read: list[Ref] = []
    monkeypatch.setattr(Ray, "get", lambda self, ref: read.append(ref))
    loading: list[Ref] = []

    def start(name: str) -> Ref:
        loading.append(Ref())
        return loading[-1]

    kind = ProcessKind(start, lambda _: Ref(), lambda _: Ref(), 60.0, 60.0, start_limit_s=0.02)
    with Cluster() as cluster:
        cluster.actors["d1"] = Actor()
        cluster.on_turn(lambda: cluster.supervised.add("d1", kind))
        # The first has taken too long, and the next is forgotten.
        cluster.wait(lambda: len(loading) > 1)
        cluster.on_turn(lambda: cluster.supervised.forget("d1"))
        cluster.wait(lambda: not cluster.supervised.failure("d1"))
        assert not read
        for ref in loading:
            ref.value = (ValueError("corrupt weights"),)
        cluster.wait(lambda: read == loading)
        assert not cluster.supervised.has_joined("d1")


def test_what_has_no_place_is_started_once_there_is_one() -> None:
    with Cluster("a", "b") as cluster:
        cluster.without_place.add("a")
        cluster.kill("a")
        # No other process blocks it.
        cluster.kill("b")
        assert cluster.has_started("b") and not cluster.has_started("a", within_s=0.5)
        cluster.without_place.clear()
        assert cluster.has_started("a")


def test_one_that_cannot_be_reached_for_a_while_is_not_started_again() -> None:
    with Cluster("a") as cluster:
        before = cluster.actors["a"].end
        before.value = (ActorUnavailableError("the connection broke", b"\0" * 16),)
        assert not cluster.has_started("a", within_s=0.5)


def test_what_was_asked_before_the_end_is_still_heard() -> None:
    heard: list[str] = []
    stop = threading.Event()

    def probe(_: Any) -> Ref:
        stop.set()
        return Ref(["a line"])

    kind = ProcessKind(lambda _: Ref(None), lambda _: Ref(None), probe, 60.0, 60.0, 60.0, answered=heard.extend)
    Supervisor({"router-0": Actor()}, {"router-0": kind}, lambda _: True).run(stop)
    assert heard == ["a line"]


def test_a_death_for_memory_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(MemoryKills, "explanation", lambda _: "the kernel has just killed a process")
    with Cluster("decode-0") as cluster:
        cluster.kill("decode-0")
        assert cluster.has_started("decode-0")
    assert "decode-0 died: the kernel has just killed a process; starting it again" in caplog.text


def test_one_turn_takes_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that take one answer of 1,000 workers cost the square of the workers."""

    class CountedRay(Ray):
        def wait(self, refs: list[Ref], *, timeout: float, num_returns: int = 1, **_: Any) -> tuple[Any, Any]:
            done = [ref for ref in refs if ref.is_done][:num_returns]
            return done, [ref for ref in refs if ref not in done]

    monkeypatch.setattr(supervisor, "ray", CountedRay())
    actors = {f"w{number}": Actor() for number in range(50)}
    num_answers, num_turns, stop = 0, 0, threading.Event()

    def answered(_: object) -> None:
        nonlocal num_answers
        num_answers += 1

    def count_turn() -> None:
        nonlocal num_turns
        num_turns += 1
        if num_answers == len(actors) or num_turns > 10:
            stop.set()

    kind = ProcessKind(
        lambda _: Ref(), lambda _: Ref(None), lambda _: Ref(None), 60.0, 60.0, 60.0, Actor.mapped, answered
    )
    Supervisor(actors, dict.fromkeys(actors, kind), lambda _: True).run(stop, count_turn)
    assert num_answers == len(actors)
