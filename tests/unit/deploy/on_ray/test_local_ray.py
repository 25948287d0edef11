"""An open Ray is refused; the token is private and is removed with its run."""

import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.errors import ClusterError
from tandem.deploy.host.run_record import RunOwner, end_leftovers, ray_token_path, remove_record, write_record
from tandem.deploy.launcher import Cluster
from tandem.deploy.on_ray import local_ray
from tandem.deploy.on_ray.local_ray import LocalRay, check_closed
from tandem.deploy.on_ray.ray_module import ray
from tandem.processes import ProcessId


class FakeGcs(grpc.GenericRpcHandler):
    """Answers every call with the same code."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._code != grpc.StatusCode.OK:
                context.abort(self._code, "")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def gcs(code: grpc.StatusCode) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[FakeGcs(code)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_a_ray_that_asks_for_its_token_is_accepted() -> None:
    with gcs(grpc.StatusCode.UNAUTHENTICATED) as address:
        check_closed(address)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.OK, "answers calls without a token"),
        (grpc.StatusCode.UNIMPLEMENTED, "does not say whether it asks for a token: UNIMPLEMENTED"),
    ],
)
def test_a_ray_that_may_be_open_is_refused(code: grpc.StatusCode, message: str) -> None:
    with gcs(code) as address, pytest.raises(ValueError, match=message):
        check_closed(address)


def test_a_ray_beyond_loopback_or_unreachable_is_refused() -> None:
    for address in ("192.0.2.2:6379", "[2001:db8::1]:6379"):
        with pytest.raises(ValueError, match="which is not loopback"):
            check_closed(address)
    with gcs(grpc.StatusCode.UNAUTHENTICATED) as address:
        pass
    with pytest.raises(ValueError, match="does not say whether it asks for a token: UNAVAILABLE"):
        check_closed(address)


class FakeRay:
    """A fake of Ray; records the settings at its start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[str] = []
        self.arguments: dict[str, Any] = {}
        self.num_stops = 0
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(ray, "shutdown", self.shutdown)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: self)
        monkeypatch.setattr(local_ray, "check_closed", lambda address: None)
        monkeypatch.setattr(local_ray.ray_worker, "_global_node", self)
        self._session = TemporaryDirectory()
        # The test restores the environment.
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "somebody-else-s")

    gcs_address = "127.0.0.1:1"

    def init(self, **arguments: Any) -> None:
        assert "RAY_AUTH_TOKEN" not in os.environ
        path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        self.tokens.append(path.read_text())
        self.arguments = arguments

    def get_session_dir_path(self) -> str:
        return self._session.name

    def shutdown(self) -> None:
        self.num_stops += 1


def test_each_start_has_its_own_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, directory = FakeRay(monkeypatch), tmp_path / "runs"
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for _ in range(2):
        local = LocalRay(directory)
        assert local.log_directory == f"{directory}/ray/session_latest/logs"
        local.start(3)
        assert fake.arguments["address"] == "local" and fake.arguments["num_cpus"] == 3
        # Logs and sockets are private too.
        assert fake.arguments["_temp_dir"] == f"{directory}/ray"
        # Another cluster's session may be the latest by now.
        assert local.log_directory == f"{fake.get_session_dir_path()}/logs"
        local.stop()
        assert list(directory.iterdir()) == [] and "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert fake.num_stops == 2 and len(set(fake.tokens)) == 2 and min(map(len, fake.tokens)) == 64
    monkeypatch.setenv("RAY_TMPDIR", "/own")
    assert LocalRay(directory).log_directory == "/own/ray/session_latest/logs"


def test_taken_resources_are_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 4.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": 1.0})
    assert LocalRay(tmp_path).num_free("GPU") == 1


def test_a_failed_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch)

    def too_slow(**arguments: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", too_slow)
    monkeypatch.setenv("RAY_TMPDIR", "/own")
    cluster = Cluster(ClusterConfig("m"), lambda part, doing: None)
    cluster._ray = LocalRay(tmp_path / "runs")
    with pytest.raises(
        ClusterError, match=r"^Ray did not start: .* timed out .* /own/ray/session_latest/logs says more$"
    ):
        cluster._init_ray()
    cluster._ray.stop()
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_ray_without_tokens_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    monkeypatch.delattr("ray._raylet.AuthenticationTokenLoader")
    with pytest.raises(ValueError, match=r"^Ray \S+ knows no token authentication.*install ray>=2\.52$"):
        LocalRay(tmp_path).start(1)
    assert fake.tokens == []


def test_a_directory_that_others_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="no other user can write to"):
        LocalRay(tmp_path).start(1)
    assert fake.tokens == [] and list(tmp_path.iterdir()) == []


def test_a_killed_run_s_token_goes_with_its_record(tmp_path: Path) -> None:
    gone = RunOwner(guard=ProcessId(2**22 - 1, 1), launcher=ProcessId(2**22 - 1, 2))
    alive = RunOwner(guard=ProcessId.of(os.getppid()), launcher=ProcessId.of(os.getpid()))
    for owner in (gone, alive):
        write_record(tmp_path, owner, [])
        ray_token_path(tmp_path, owner.launcher).write_text("secret")
    end_leftovers(tmp_path)
    assert not ray_token_path(tmp_path, gone.launcher).exists()
    assert ray_token_path(tmp_path, alive.launcher).exists()
    remove_record(tmp_path, alive)
    assert list(tmp_path.iterdir()) == []


def test_a_token_without_a_record_is_removed_once_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch)
    local = LocalRay(tmp_path)
    local.start(1)
    [own] = tmp_path.iterdir()
    # For a process of another container, only its lock is visible.
    elsewhere = own.rename(tmp_path / f"{2**22 - 1}-1.token")
    stale, unwritten, running, other = (
        tmp_path / name
        for name in (
            f"{2**22 - 1}-2.token",
            f"{2**22 - 1}-3.token",
            f"{os.getppid()}-{ProcessId.of(os.getppid()).start_time}.token",
            "notes.token",
        )
    )
    for path in (stale, running, other):
        path.write_text("secret")
    unwritten.touch()
    assert end_leftovers(tmp_path) == []
    assert set(tmp_path.iterdir()) == {elsewhere, unwritten, running, other}
    local.stop()
    end_leftovers(tmp_path)
    assert not elsewhere.exists()


def test_ray_messages_are_one_line_and_deaths_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray._private import worker

    class Words:
        """A fake of Ray's connection to its processes."""

        def __init__(self) -> None:
            self.left = [
                "A worker died or was killed while executing a task by\nan error.",
                "Raylet is terminated. Its log: " + 1000 * "[state-dump]\n",
                "1 Workers killed,\nby OOM",
            ]

        current_job_id = worker.JobID.nil()

        @property
        def gcs_error_subscriber(self) -> "Words":
            return self

        def subscribe(self) -> None:
            pass

        def poll(self) -> tuple[None, dict[str, Any]]:
            if len(self.left) == 1:
                stop.set()
            return None, {"job_id": None, "error_message": self.left.pop(0)}

    stop = threading.Event()
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    local_ray.rephrase_errors()
    # Ray's printing thread.
    words: Any = Words()
    worker.listen_error_messages(words, stop)
    (long, short) = [record.getMessage() for record in caplog.records]
    assert short == "Ray: 1 Workers killed, by OOM"
    assert long.startswith("Ray: Raylet is terminated. Its log: [state-dump]") and len(long) < 500
    assert capsys.readouterr() == ("", "")


def test_the_environment_is_overwritten() -> None:
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
