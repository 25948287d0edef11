"""Ray's ports listen on loopback only, and require a secret token."""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import grpc
import psutil
import pytest

from tandem.deploy.host.run_record import default_directory, ray_token_path
from tandem.processes import ProcessId
from tests.cluster.command import GONE_S, Server, start

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
KNOWN_TOKEN = "known-to-others"
TIMEOUT_S = 10.0
# Every Ray server implements one of these methods.
LOOK = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
METHODS = (
    LOOK,
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.ActorInfoGcsService/RegisterActor",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.ObjectManagerService/Push",
)


def listeners(tree: Sequence[ProcessId]) -> dict[tuple[str, int], str]:
    """Return the processes' listening addresses, with process names."""
    found = {}
    for process in (psutil.Process(p.pid) for p in tree if p.is_alive()):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port] = process.name()
    return found


def answers(port: int, token: str | None, methods: Sequence[str] = METHODS) -> set[grpc.StatusCode]:
    """Return the statuses of the methods implemented at this port."""
    metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
    codes = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        for method in methods:
            try:
                channel.unary_unary(method)(b"", timeout=TIMEOUT_S, metadata=metadata)
                codes.add(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.add(error.code())
    return codes - {grpc.StatusCode.UNIMPLEMENTED}


def http_answer(port: int) -> tuple[int, str]:
    """Return status and text; status 0 if the port speaks no HTTP."""
    try:
        with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/", timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, ""
    except (OSError, HTTPException):
        return 0, ""


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a cluster whose environment asks for an open Ray with a known token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_AUTH_TOKEN", KNOWN_TOKEN)
        patch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
        runtime_dir = tmp_path_factory.mktemp("run")
        server = start("--model", str(tiny_model_dir), "--both", "1", "--threads", "1", runtime_dir=runtime_dir)
        yield server
    server.process.terminate()
    assert server.finish() == 0


def test_ray_ports_require_the_token(server: Server) -> None:
    found = listeners(server.tree)
    assert {host for host, _ in found} == {"127.0.0.1"}, found
    closed: dict[str, int] = {}
    for (_, port), name in found.items():
        for token in (None, "", "wrong", KNOWN_TOKEN):
            # HTTP-only servers answer UNAVAILABLE.
            codes = answers(port, token)
            assert codes <= {UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE}, (name, codes)
        closed[name] = closed.get(name, 0) + (UNAUTHENTICATED in codes)
        status, text = http_answer(port)
        # The router's page is open, without data.
        assert status in (0, 401, 404) or "<title>Tandem</title>" in text, (name, text)
    # Cluster state, this host's processes, and every process that runs received code.
    assert closed["gcs_server"] == 1 and closed["raylet"] == 2
    assert sum(closed[name] for name in closed if name.startswith("ray::")) >= 2


def test_ray_token_is_private(server: Server) -> None:
    [launcher] = (ProcessId.of(child.pid) for child in psutil.Process(server.process.pid).children())
    path = ray_token_path(default_directory(), launcher)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_uid == os.getuid()
    token = path.read_text()
    (gcs,) = (port for (_, port), name in listeners(server.tree).items() if name == "gcs_server")
    assert answers(gcs, token, [LOOK]) == {grpc.StatusCode.OK}, "it is the token"
    for process in map(psutil.Process, [p.pid for p in server.tree if p.is_alive()]):
        assert token not in " ".join(process.cmdline())
        assert token not in " ".join(process.environ().values())
    logs = default_directory() / "ray"
    num_files = 0
    for file in logs.glob("session_*/**/*"):
        # Files of other clusters may vanish at any moment.
        with contextlib.suppress(FileNotFoundError):
            if file.is_file() and file.stat().st_mtime > path.stat().st_mtime - 1:
                num_files += 1
                assert token.encode() not in file.read_bytes(), f"{file} holds the token"
    assert num_files > 5
    assert token not in "".join(server.output)
    server.process.terminate()
    server.process.wait(GONE_S)
    assert not path.exists()
