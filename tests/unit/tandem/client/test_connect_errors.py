"""The line that a client gives for each way in which no connection comes about, against real routers."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

from tandem.client import ClientTls, TandemClient, TandemError
from tandem.client.connect_errors import explain
from tandem.config import TlsConfig
from tandem.router.config import RouterAddresses, RouterConfig
from tandem.router.process import RouterProcess
from tests.conftest import Certificates


class Served(NamedTuple):
    plain: RouterAddresses
    tls: RouterAddresses
    expired: RouterAddresses
    misnamed: RouterAddresses
    mutual: RouterAddresses
    ca: str


@pytest.fixture(scope="module")
def served(router_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("connect-errors")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    ca = str(directory / "ca.pem")
    yesterday = datetime.now(UTC) - timedelta(days=1)
    issued = {
        "good": authority.issue_cert("127.0.0.1"),
        "expired": authority.issue_cert("127.0.0.1", not_before=yesterday - timedelta(days=9), not_after=yesterday),
        "misnamed": authority.issue_cert("elsewhere.example"),
    }
    files: dict[str, tuple[str, str]] = {}
    for name, cert in issued.items():
        cert.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
        cert.private_key_pem.write_to_path(directory / f"{name}-key.pem")
        files[name] = str(directory / f"{name}.pem"), str(directory / f"{name}-key.pem")
    all_tls = [
        None,
        *(TlsConfig(*files[name]) for name in ("good", "expired", "misnamed")),
        TlsConfig(*files["good"], client_ca_file=ca),
    ]
    with ExitStack() as stopped:
        addresses = []
        for tls in all_tls:
            config = RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, tls=tls)
            process = RouterProcess(config)
            stopped.callback(process.stop)
            addresses.append(process.start())
        plain, with_tls, expired, misnamed, mutual = addresses
        yield Served(plain, with_tls, expired, misnamed, mutual, ca)


def error_at(address: str, tls: ClientTls | None) -> str:
    with TandemClient(address, tls=tls) as client, pytest.raises(TandemError) as failed:
        client.server_info(10.0)
    assert failed.value.code == "UNAVAILABLE"
    return str(failed.value)


def test_tls_where_there_is_none(served: Served) -> None:
    assert f"{served.plain.grpc} answers, but not over TLS" in error_at(served.plain.grpc, ClientTls(served.ca))


@pytest.mark.parametrize("port", ["grpc", "http"])
def test_no_tls_where_there_is(served: Served, port: str) -> None:
    address = getattr(served.tls, port)
    assert f"{address} accepts connections and closes them: it asks for TLS" in error_at(address, None)


def test_refused_certificates(served: Served, certificates: Certificates) -> None:
    refused = "the TLS certificate of {} is refused: {}"
    for address, ca, why in (
        (served.tls.grpc, certificates.other_ca, "unable to get local issuer certificate"),
        (served.expired.grpc, served.ca, "certificate has expired"),
        (served.misnamed.grpc, served.ca, "it is for other names than 127.0.0.1"),
    ):
        assert error_at(address, ClientTls(ca)) == refused.format(address, why)


def test_missing_client_certificate(served: Served) -> None:
    assert "or for a client's certificate" in error_at(served.mutual.grpc, ClientTls(served.ca))


def test_http_port(served: Served) -> None:
    for address, tls in ((served.plain.http, None), (served.tls.http, ClientTls(served.ca))):
        assert error_at(address, tls).startswith(f"{address} answers over HTTP/1.1, so it is not the cluster's gRPC")


def test_other_words() -> None:
    assert explain("failed to connect to all addresses; last error: Connection refused", "a:1") == (
        "no cluster answers at a:1; start one with `tandem serve`"
    )
    words = "Tls handshake failed (TSI_PROTOCOL_FAILURE): error:1:SSL routines:OPENSSL_internal:NO_CIPHER: OK"
    assert explain(words, "a:1") == "no TLS connection to a:1: NO_CIPHER"
