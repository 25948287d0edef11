"""A router's certificates and API keys change with their files, without a restart, at both client ports."""

import http.client
import logging
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

from tandem import watched_files
from tandem.client import ClientTls, TandemClient, TandemError
from tandem.config import TlsConfig
from tandem.key_file import KeyFile
from tandem.router.config import RouterAddresses, RouterConfig
from tandem.router.process import RouterProcess

TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "WATCH_INTERVAL_S", 0.05)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


class Files(NamedTuple):
    """Paths of a server's certificate and key, and of the authorities of clients."""

    cert: Path
    key: Path
    client_ca: Path

    def write(self, issued: trustme.LeafCert) -> None:
        """Replace both, as certbot does: each at once, one after the other."""
        for blob, path in ((issued.cert_chain_pems[0], self.cert), (issued.private_key_pem, self.key)):
            blob.write_to_path(path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(*(tmp_path / name for name in ("cert.pem", "key.pem", "clients.pem")))


@contextmanager
def run(config: RouterConfig) -> Iterator[RouterAddresses]:
    with run_process(config) as (_, addresses):
        yield addresses


@contextmanager
def run_process(config: RouterConfig) -> Iterator[tuple[RouterProcess, RouterAddresses]]:
    process = RouterProcess(config)
    try:
        yield process, process.start()
    finally:
        process.stop()


class Authority(NamedTuple):
    authority: trustme.CA
    file: str

    @staticmethod
    def make(path: Path) -> "Authority":
        authority = trustme.CA()
        authority.cert_pem.write_to_path(path)
        return Authority(authority, str(path))

    def server(self) -> trustme.LeafCert:
        return self.authority.issue_cert("127.0.0.1", "localhost")


def answers(addresses: RouterAddresses, ca: str, own: tuple[str, str] = ("", "")) -> dict[str, bool]:
    """Return whether each port answers a client that trusts only `ca`."""
    return {
        "grpc": grpc_answers(addresses.grpc, ClientTls(ca, *own)),
        "http": https_answers(addresses.http, ca, own, "127.0.0.1"),
        "http with a name": https_answers(addresses.http.replace("127.0.0.1", "localhost"), ca, own, "localhost"),
    }


def grpc_answers(address: str, tls: ClientTls | None, key: str = "") -> bool:
    try:
        with TandemClient(address, key, tls) as client:
            return client.server_info(TIMEOUT_S).model == "fake"
    except TandemError as error:
        assert error.code in ("UNAVAILABLE", "UNAUTHENTICATED"), error
        return False


def https_answers(address: str, ca: str, own: tuple[str, str], host: str) -> bool:
    context = ssl.create_default_context(cafile=ca)
    if own[0]:
        context.load_cert_chain(*own)
    connection = http.client.HTTPSConnection(address, context=context, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_new_certificate_is_used_and_a_bad_one_is_not(
    router_model_dir: Path, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (Authority.make(tmp_path / f"{name}.pem") for name in ("first", "second"))
    files.write(first.server())
    config = RouterConfig(
        *(str(router_model_dir), "fake", 64), grpc_port=0, http_port=0, tls=TlsConfig(str(files.cert), str(files.key))
    )
    with run(config) as addresses:
        assert all(answers(addresses, first.file).values())
        assert not any(answers(addresses, second.file).values())
        with TandemClient(addresses.grpc, tls=ClientTls(first.file)) as connected:
            assert connected.server_info().model == "fake"
            files.write(second.server())
            wait_until(lambda: all(answers(addresses, second.file).values()))
            assert not any(answers(addresses, first.file).values())
            assert connected.server_info().model == "fake", "open connections stay"
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            files.cert.write_text("not a certificate\n")
            wait_until(lambda: "stay as they were" in caplog.text)
            # Some looks later there is still one line.
            time.sleep(0.3)
            assert [r.getMessage() for r in caplog.records if r.name == watched_files.logger.name] == [
                "the certificates of the client ports stay as they were: "
                f"the TLS certificate {files.cert} holds no certificate in PEM format"
            ]
        assert all(answers(addresses, second.file).values())


def test_new_authorities_of_clients_are_used(router_model_dir: Path, files: Files, tmp_path: Path) -> None:
    ours, first, second = (Authority.make(tmp_path / f"{name}.pem") for name in ("ours", "first", "second"))
    files.write(ours.server())
    files.client_ca.write_bytes(Path(first.file).read_bytes())
    clients: list[tuple[str, str]] = []
    for authority, name in ((first, "a"), (second, "b")):
        issued = authority.authority.issue_cert("client")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}-key.pem")
        clients.append((str(tmp_path / f"{name}.pem"), str(tmp_path / f"{name}-key.pem")))
    config = RouterConfig(
        *(str(router_model_dir), "fake", 64), grpc_port=0, http_port=0, tls=TlsConfig(*map(str, files))
    )
    with run(config) as addresses:
        assert all(answers(addresses, ours.file, clients[0]).values())
        assert not any(answers(addresses, ours.file, clients[1]).values())
        files.client_ca.write_bytes(Path(second.file).read_bytes())
        wait_until(lambda: all(answers(addresses, ours.file, clients[1]).values()))
        assert not any(answers(addresses, ours.file, clients[0]).values())


def test_keys_of_the_file_come_and_go(router_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    # Replaced since the cluster started.
    path.write_text("second\n")
    config = RouterConfig(
        *(str(router_model_dir), "fake", 64),
        grpc_port=0,
        http_port=0,
        api_keys=("flag", "first"),
        key_file=KeyFile(str(path), ("flag",)),
    )

    def admitted(addresses: RouterAddresses) -> dict[str, set[str]]:
        keys = ("flag", "first", "second", "third")
        return {
            "grpc": {key for key in keys if grpc_answers(addresses.grpc, None, key)},
            "http": {key for key in keys if http_status(addresses.http, key) == 200},
        }

    with run(config) as addresses:
        assert admitted(addresses) == {"grpc": {"flag", "second"}, "http": {"flag", "second"}}
        path.write_text("second\nthird 5\n")
        wait_until(lambda: http_status(addresses.http, "third") == 200)
        assert admitted(addresses) == {port: {"flag", "second", "third"} for port in ("grpc", "http")}
        path.unlink()
        time.sleep(0.3)
        assert admitted(addresses) == {port: {"flag", "second", "third"} for port in ("grpc", "http")}
        path.write_text("third\n")
        wait_until(lambda: http_status(addresses.http, "second") == 401)
        assert admitted(addresses) == {port: {"flag", "third"} for port in ("grpc", "http")}


def test_an_order_to_look_does_not_wait_for_the_next_look(
    router_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_files, "WATCH_INTERVAL_S", 1000.0)
    path = tmp_path / "keys.txt"
    path.write_text("first\n")
    config = RouterConfig(
        *(str(router_model_dir), "fake", 64), grpc_port=0, http_port=0, api_keys=("first",), key_file=KeyFile(str(path))
    )
    with run_process(config) as (process, addresses):
        for key, other in (("second", "first"), ("third", "second")):
            path.write_text(f"{key}\n")
            assert http_status(addresses.http, key) == 401
            process.look_at_files()
            wait_until(lambda key=key: http_status(addresses.http, key) == 200)
            assert http_status(addresses.http, other) == 401


def http_status(address: str, key: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status
    finally:
        connection.close()
