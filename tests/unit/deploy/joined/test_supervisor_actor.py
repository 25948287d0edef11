"""The supervisor's answers to commands, with a fake cluster."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from tandem.deploy import launcher
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.errors import ClusterError, ConfigurationError
from tandem.deploy.host.ports import ClientAddresses
from tandem.deploy.joined import supervisor_actor
from tandem.deploy.joined.supervisor_actor import ENDED, SERVING, STARTING, SupervisorActor, SupervisorOrder
from tandem.deploy.on_ray import hosted_ray, ray_module
from tandem.deploy.on_ray.sealed_actor import sealed_order
from tandem.router.config import RouterAddresses


def text_of(lines: list[str]) -> list[str]:
    """Each line begins with its date and time."""
    for line in lines:
        time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")
    return [line[20:] for line in lines]


class FakeCluster:
    """
    Attributes:
        start_error, stop_error: raised by `start` and `stop`.
        num_left: running requests at each look during a drain.
        is_draining: True if an earlier life got a stop request.
        drain_s: limit of the drain.
    """

    start_error: Exception | None = None
    stop_error: Exception | None = None
    num_left = 0
    is_draining = False
    drain_s = 60.0
    is_held = False

    def __init__(self, config: ClusterConfig, on_progress: Callable[[str, str], None], *_: Any) -> None:
        self.addresses = ClientAddresses("127.0.0.1:1", "127.0.0.1:2")
        self.routers: dict[str, RouterAddresses] = {}
        self.model_name = "m"
        self.calls: list[str] = []
        self._on_progress = on_progress

    def start(self) -> None:
        self.calls.append("start")
        while self.is_held:
            self._on_progress("both-0", "loading")
            time.sleep(0.01)
        if self.start_error is not None:
            raise self.start_error
        self._on_progress("both-0", "ready")

    def recover(self, saved: Any) -> None:
        self.calls.append(f"recover {saved}")

    def supervise(self, stop: threading.Event) -> None:
        self.calls.append("supervise")
        logging.getLogger("tandem.deploy.launcher").warning("both-0 died")
        stop.wait()

    def begin_drain(self) -> float:
        return self.drain_s

    def drain(self, timeout_s: float) -> int:
        time.sleep(min(timeout_s, 0.02))
        return self.num_left

    def stop(self) -> None:
        self.calls.append("stop")
        if self.stop_error is not None:
            raise self.stop_error


class FakeHosted:
    """Attributes: notes: saved notes; ended: removed leftovers."""

    notes: ClassVar[dict[str, Any]] = {}
    ended: ClassVar[list[str]] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def saved(self, name: str, kind: type) -> Any:
        return self.notes.get(name)

    def save(self, name: str, note: Any) -> None:
        self.notes[name] = note

    def end_all(self) -> None:
        self.ended.append("processes")

    def forget(self) -> None:
        self.ended.append("state")


class FakeRay:
    """Records the kill of its own actor."""

    current_actor = "itself"

    def __init__(self) -> None:
        self.killed: list[str] = []

    def get_runtime_context(self) -> "FakeRay":
        return self

    def kill(self, actor: str) -> None:
        self.killed.append(actor)


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    ray = FakeRay()
    monkeypatch.setattr(launcher, "Cluster", FakeCluster)
    monkeypatch.setattr(hosted_ray, "HostedRay", FakeHosted)
    monkeypatch.setattr(FakeHosted, "ended", [])
    monkeypatch.setattr(FakeHosted, "notes", {})
    monkeypatch.setattr(ray_module, "ray", ray)
    monkeypatch.setattr(supervisor_actor, "_FAREWELL_S", 0.0)
    monkeypatch.setattr(supervisor_actor.logs, "configure", lambda name, log: None)
    before = list(logging.getLogger("tandem.deploy").handlers)
    yield ray
    logging.getLogger("tandem.deploy").handlers = before


def wait_for(actor: SupervisorActor, phase: str) -> None:
    deadline = time.monotonic() + 5.0
    while actor.state().phase != phase:
        assert time.monotonic() < deadline, actor.state()
        time.sleep(0.005)


def actor(**config: Any) -> SupervisorActor:
    made = SupervisorActor("127.0.0.1:1", "m", False)
    made.tell(sealed_order(order(**config), made.public_key()))
    return made


def order(**config: Any) -> SupervisorOrder:
    return SupervisorOrder(ClusterConfig("m", ray_address="127.0.0.1:1", **config), {})


def test_it_serves_until_it_is_stopped_and_ends_itself(ray: FakeRay) -> None:
    made = actor()
    wait_for(made, SERVING)
    state = made.state()
    assert state.parts == {"both-0": "ready"} and (state.grpc, state.model_name) == ("127.0.0.1:1", "m")
    made.stop("me")
    wait_for(made, ENDED)
    made._thread.join(5.0)
    assert ray.killed == ["itself"] and made.state().error == ""
    assert made._cluster.calls == ["start", "supervise", "stop"]  # type: ignore[union-attr]
    assert FakeHosted.ended == ["processes", "state"], "what an earlier one of the name had left is none of its own"


def test_a_stop_that_fails_leaves_no_supervisor_with_the_name(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCluster, "stop_error", RuntimeError("a bug"))
    made = actor()
    wait_for(made, SERVING)
    made.stop("me")
    made._thread.join(5.0)
    assert ray.killed == ["itself"] and made.state().error == "RuntimeError: a bug"


def test_an_unwritable_log_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, log: Any) -> None:
        raise ValueError("cannot write the log")

    monkeypatch.setattr(supervisor_actor.logs, "configure", refuse)
    made = actor()
    wait_for(made, ENDED)
    assert made.state().error == "cannot write the log" and made.state().is_usage


def test_another_life_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes have the order."""
    monkeypatch.setattr(FakeHosted, "notes", {"order": order(), "state": "what was saved"})
    made = SupervisorActor("127.0.0.1:1", "m", False)
    wait_for(made, SERVING)
    assert made._cluster.calls == ["recover what was saved", "supervise"]  # type: ignore[union-attr]
    assert FakeHosted.ended == []
    assert "takes over the running cluster" in made.state().lines[0]
    made.stop("me")
    wait_for(made, ENDED)


def test_another_life_continues_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeHosted, "notes", {"order": order(), "state": "what was saved"})
    monkeypatch.setattr(FakeCluster, "is_draining", True)
    monkeypatch.setattr(FakeCluster, "num_left", 3)
    monkeypatch.setattr(FakeCluster, "drain_s", 0.1)
    made = SupervisorActor("127.0.0.1:1", "m", False)
    # This life gets no stop request.
    wait_for(made, ENDED)
    assert made._cluster.calls == ["recover what was saved", "stop"]  # type: ignore[union-attr]
    assert text_of(made.state().lines)[-1] == "Requests cut short: 3"


def test_a_supervisor_without_an_order_fails_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_actor, "ORDER_TIMEOUT_S", 0.1)
    made = SupervisorActor("127.0.0.1:1", "m", False)
    wait_for(made, ENDED)
    assert "knows nothing of its cluster" in made.state().error
    assert FakeHosted.ended == ["processes", "state"]


def test_a_supervisor_without_an_order_can_be_stopped() -> None:
    made = SupervisorActor("127.0.0.1:1", "m", False)
    made.stop("me")
    wait_for(made, ENDED)
    assert made.state().error == ""


def test_lines_are_returned_from_a_number_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = actor()
    wait_for(made, SERVING)
    deadline = time.monotonic() + 5.0
    while not made.state().lines:
        assert time.monotonic() < deadline
    assert text_of(made.state().lines) == ["WARNING: both-0 died"]
    before = made.state().next_line
    for number in range(3):
        made._say(f"line {number}")
    state = made.state(before)
    assert text_of(state.lines) == ["line 0", "line 1", "line 2"] and made.state(state.next_line).lines == []
    # Old lines are dropped; a late reader gets the rest.
    for number in range(3000):
        made._say(f"more {number}")
    assert text_of(made.state(before).lines)[-1] == "more 2999" and len(made.state(before).lines) == 2000
    assert text_of(made.state(made.state().next_line - 1).lines) == ["more 2999"]
    made.stop("me")
    wait_for(made, ENDED)


@pytest.mark.parametrize(
    ("error", "said", "is_usage"),
    [
        (ConfigurationError("no room"), "no room", True),
        (ClusterError("both-0: died"), "both-0: died", False),
        (RuntimeError("a bug"), "RuntimeError: a bug", False),
    ],
)
def test_a_failed_start_has_its_reason(
    error: Exception, said: str, is_usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeCluster, "start_error", error)
    made = actor()
    wait_for(made, ENDED)
    assert (made.state().error, made.state().is_usage) == (said, is_usage)
    assert made._cluster.calls == ["start", "stop"]  # type: ignore[union-attr]


def test_a_stop_during_the_start_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCluster, "is_held", True)
    made = actor()
    wait_for(made, STARTING)
    with pytest.raises(ValueError, match="the cluster is starting"):
        made.scale({"both": "2"})
    made.stop("me")
    wait_for(made, ENDED)
    assert made.state().error == ""


@pytest.mark.parametrize(("num_stoppers", "ends"), [(1, False), (2, True)])
def test_a_second_requester_ends_the_drain(num_stoppers: int, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCluster, "num_left", 3)
    # The drain begins once all have asked.
    may_drain = threading.Event()
    monkeypatch.setattr(FakeCluster, "begin_drain", lambda self: 60.0 if may_drain.wait(5.0) else 0.0)
    made = actor(drain_timeout_s=60.0)
    wait_for(made, SERVING)
    for number in range(num_stoppers):
        # Each requester repeats its request.
        for _ in range(3):
            made.stop(str(number))
    may_drain.set()
    made._thread.join(5.0 if ends else 0.5)
    assert (made.state().phase == ENDED) == ends
    assert any("Requests left: 3" in line for line in made.state().lines) != ends
    assert ("Requests cut short: 3" in text_of(made.state().lines)) == ends
    made.stop("another")
    wait_for(made, ENDED)
