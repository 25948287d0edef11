"""Mutual TLS between processes, over real sockets."""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.config import SERVER_NAME, ClusterTls, ClusterTlsFiles
from tandem.deploy.host.certificates import make_certificates
from tandem.rpc import channel as channels
from tandem.rpc.auth import cluster_auth
from tandem.rpc.channel import bind, new_server, open_channel
from tandem.rpc.credentials import ClusterCredentials, make_context
from tandem.v1 import worker_pb2, worker_pb2_grpc

TOKEN = "the-token"
TLS = make_certificates()
OTHER = make_certificates()
OURS = ClusterCredentials(TOKEN, TLS)
TIMEOUT_S = 5.0


class Admin(worker_pb2_grpc.WorkerAdminServicer):
    async def CheckIntegrity(self, request: Any, context: grpc.aio.ServicerContext) -> worker_pb2.IntegrityReport:
        return worker_pb2.IntegrityReport(violation="none")


@asynccontextmanager
async def serving(credentials: ClusterCredentials) -> AsyncIterator[str]:
    server = new_server([cluster_auth(TOKEN)])
    worker_pb2_grpc.add_WorkerAdminServicer_to_server(Admin(), server)
    address = bind(server, "127.0.0.1", 0, credentials.for_server())
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=0.0)


async def ask(channel: grpc.aio.Channel) -> str:
    """Raises grpc.aio.AioRpcError."""
    async with channel:
        stub: Any = worker_pb2_grpc.WorkerAdminStub(channel)
        request = worker_pb2.CheckIntegrityRequest()
        return str((await stub.CheckIntegrity(request, metadata=OURS.metadata, timeout=TIMEOUT_S)).violation)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20.0):
            await scenario()

    asyncio.run(bounded())


def test_processes_of_a_cluster_reach_each_other() -> None:
    async def scenario() -> None:
        async with serving(OURS) as address:
            assert await ask(OURS.open_channel(address)) == "none"

    run(scenario)


def test_without_tls_they_are_plain() -> None:
    async def scenario() -> None:
        plain = ClusterCredentials(TOKEN)
        assert not plain.secure and plain.for_server() is None and plain.context(server_side=True) is None
        async with serving(plain) as address:
            assert await ask(plain.open_channel(address)) == await ask(open_channel(address)) == "none"

    run(scenario)


def without_certificate(address: str) -> grpc.aio.Channel:
    return open_channel(address, grpc.ssl_channel_credentials(TLS.ca), SERVER_NAME)


def with_anothers(address: str) -> grpc.aio.Channel:
    return open_channel(address, grpc.ssl_channel_credentials(TLS.ca, OTHER.key, OTHER.cert), SERVER_NAME)


@pytest.mark.parametrize("dial", [open_channel, without_certificate, with_anothers])
def test_caller_needs_a_cluster_certificate(dial: Callable[[str], grpc.aio.Channel]) -> None:
    """Even with the token."""

    async def scenario() -> None:
        async with serving(OURS) as address:
            began = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(dial(address))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - began < TIMEOUT_S / 2
            assert await ask(OURS.open_channel(address)) == "none"

    run(scenario)


def test_client_rejects_servers_outside_the_cluster() -> None:
    async def scenario() -> None:
        async with serving(ClusterCredentials(TOKEN, OTHER)) as address:
            with pytest.raises(grpc.aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
                await ask(OURS.open_channel(address))
        async with serving(ClusterCredentials(TOKEN)) as address:
            with pytest.raises(grpc.aio.AioRpcError, match="WRONG_VERSION_NUMBER"):
                await ask(OURS.open_channel(address))

    run(scenario)


@pytest.mark.parametrize("credentials", [OURS, ClusterCredentials(TOKEN)], ids=["tls", "plain"])
def test_silent_connection_is_closed(credentials: ClusterCredentials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_TIMEOUT_MS", 300)

    async def scenario() -> None:
        async with serving(credentials) as address:
            host, port = address.split(":")
            with socket.create_connection((host, int(port)), TIMEOUT_S) as silent:
                # A plain server would first send its HTTP/2 settings.
                while await asyncio.to_thread(silent.recv, 1024):
                    pass

    run(scenario)


def written(directory: Path, tls: ClusterTls) -> ClusterTlsFiles:
    for name, blob in (("ca", tls.ca), ("cert", tls.cert), ("key", tls.key)):
        (directory / name).write_bytes(blob)
    return ClusterTlsFiles(*(str(directory / name) for name in ("ca", "cert", "key")))


def test_new_certificates_in_the_files_take_the_place_of_old_ones(tmp_path: Path) -> None:
    files = written(tmp_path, TLS)
    both = ClusterCredentials(TOKEN, files)

    async def scenario() -> None:
        async with serving(both) as address:
            assert await ask(both.open_channel(address)) == "none"
            # Of another authority.
            written(tmp_path, OTHER)
            assert await ask(both.open_channel(address)) == "none"
            assert await ask(ClusterCredentials(TOKEN, OTHER).open_channel(address)) == "none"
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(OURS.open_channel(address))
            # Without a key file the last certificates stay in use.
            (tmp_path / "key").unlink()
            assert await ask(both.open_channel(address)) == "none"

    run(scenario)


def test_missing_file_is_reported_at_start(tmp_path: Path) -> None:
    files = written(tmp_path, TLS)
    (tmp_path / "cert").unlink()
    with pytest.raises(ValueError, match=r"cert of the cluster's TLS cannot be read: No such file"):
        ClusterCredentials(TOKEN, files)


def test_private_key_is_not_shown(tmp_path: Path) -> None:
    secret = TLS.key.splitlines()[1].decode()
    assert secret not in f"{TLS} {TLS!r} {OURS!r}"
    open_before = set(Path("/proc/self/fd").iterdir())
    context = make_context(TLS, server_side=True)
    # Earlier tests' may close meanwhile.
    assert set(Path("/proc/self/fd").iterdir()) <= open_before
    assert context.verify_mode is ssl.CERT_REQUIRED
