"""Checks before joining a Ray, and the environment after leaving it."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.deploy.on_ray import joined_ray
from tandem.deploy.on_ray.joined_ray import JoinedRay
from tandem.deploy.on_ray.ray_module import ray

TOKEN = "its-token"
NODE = "0a" * 28


class FakeGcs(grpc.GenericRpcHandler):
    """Answers with its version if the token matches, or if it has none."""

    def __init__(self, token: str, version: str) -> None:
        self._token = token
        self._version = version

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            shown = dict(context.invocation_metadata()).get("authorization")
            if self._token and shown != f"Bearer {self._token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "")
            return b"\x12" + self._version.encode()

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def gcs(token: str = TOKEN, version: str = ray.__version__) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[FakeGcs(token, version)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class FakeRay:
    """A fake of the joined Ray, with three free CPUs on this host and many elsewhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.joined: list[tuple[str, dict[str, str]]] = []
        self.num_leaves = 0
        self.error: Exception | None = None
        self.leaving: dict[str, float] = {}
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(ray, "shutdown", self.shutdown)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: self)
        monkeypatch.setattr(ray, "nodes", self.nodes)
        monkeypatch.setattr(joined_ray, "state", self)
        monkeypatch.setattr(joined_ray, "leaving_nodes", lambda: self.leaving)
        monkeypatch.setattr(joined_ray, "rephrase_errors", lambda: None)
        # The test restores the environment and Ray's cached settings.
        for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setattr(joined_ray, "settings_reset", lambda: lambda: None)

    def init(self, address: str, **named: Any) -> None:
        if self.error is not None:
            raise self.error
        self.joined.append((address, {name: os.environ[name] for name in os.environ if name.startswith("RAY_AUTH")}))

    def shutdown(self) -> None:
        self.num_leaves += 1

    def get_node_id(self) -> str:
        return NODE

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": name != "gone"} for name in (NODE, "elsewhere", "gone")]

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        return {NODE: {"CPU": 3.0, "GPU": 1.0}, "elsewhere": {"CPU": 64.0, "GPU": 8.0}}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    monkeypatch.setenv("HOME", str(tmp_path))
    return FakeRay(monkeypatch)


def test_it_joins_with_the_token_and_restores_the_environment(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with gcs() as address:
        joined = JoinedRay(address)
        joined.start(3)
        assert fake.joined == [(address, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN})]
        # Only this host's CPUs count, and each actor takes one.
        assert joined.num_free("GPU") == 1 and joined.actor_options()["num_cpus"] == 1
        assert joined.num_nodes() == 2
        joined.stop()
    assert fake.num_leaves == 1
    assert os.environ["RAY_AUTH_MODE"] == "token" and os.environ["RAY_AUTH_TOKEN"] == TOKEN


@pytest.mark.parametrize("where", ["path", "home"])
def test_the_token_may_be_in_a_file(where: str, fake: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / (".ray/auth_token" if where == "home" else "token")
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{TOKEN}\n")
    if where == "path":
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    with gcs() as address:
        JoinedRay(address).start(1)
    assert [settings["RAY_AUTH_TOKEN"] for _, settings in fake.joined] == [TOKEN]


def test_one_without_a_token_is_joined_with_a_warning(fake: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    with gcs(token="") as address:
        JoinedRay(address).start(1)
    assert fake.joined == [(address, {"RAY_AUTH_MODE": "disabled"})]
    assert "any client that reaches it can run code as its user" in caplog.text


def test_errors_come_before_ray_init(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(address: str, message: str) -> None:
        joined = JoinedRay(address)
        with pytest.raises(ValueError, match=message):
            joined.start(1)
        joined.stop()

    with gcs() as address:
        refused(address, "asks for a token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
        refused(address, "does not take this token")
    refused(address, r"no Ray answers at 127\.0\.0\.1:\d+ \(UNAVAILABLE\)")
    refused("nonsense", "no Ray answers at nonsense")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with gcs(version="2.0.1") as address:
        refused(address, f"another version than the one here, {ray.__version__}")
    assert fake.joined == []


def test_ray_errors_become_one_line(fake: FakeRay) -> None:
    fake.error = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 1\n    Python: 3.9")
    with gcs(token="") as address, pytest.raises(ValueError, match=r"cannot join .*started with: Ray: 1 Python: 3\.9$"):
        JoinedRay(address).start(1)


def test_a_full_ray_is_refused(fake: FakeRay) -> None:
    with gcs(token="") as address, pytest.raises(ValueError, match=r"has 3 CPUs left on this host.* its 4 processes"):
        JoinedRay(address).start(4)


@pytest.mark.parametrize("token", ["t\u00f6ken", "two\nlines", "a\tb"])
def test_an_impossible_token_is_refused(token: str, fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with gcs() as address, pytest.raises(ValueError, match="characters that no token has"):
        JoinedRay(address).start(1)


def test_a_node_that_is_announced_to_go_has_no_room(fake: FakeRay) -> None:
    joined = JoinedRay("127.0.0.1:1", spans_nodes=True)
    assert joined.num_free("CPU") == 67
    fake.leaving["elsewhere"] = 0.0
    assert joined.num_free("CPU") == 3
