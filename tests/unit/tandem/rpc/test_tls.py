"""Checks of TLS files, and a router with TLS."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from tandem.client import ClientTls, TandemClient, TandemError
from tandem.config import TlsConfig
from tandem.deploy.cli.main import main
from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess
from tandem.rpc import tls as checks
from tandem.rpc.tls import ClientPortTls, check_tls_files, check_validity
from tests.conftest import Certificates


@contextmanager
def router(config: RouterConfig) -> Iterator[str]:
    """Run a router without workers; yield its address."""
    process = RouterProcess(config)
    try:
        yield process.start().grpc
    finally:
        process.stop()


def config(router_model_dir: Path, tls: TlsConfig | None) -> RouterConfig:
    return RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, tls=tls)


def test_good_files_pass(certificates: Certificates) -> None:
    check_tls_files("", "", "")
    check_tls_files(certificates.cert, certificates.key, certificates.ca)
    check_validity(certificates.cert)
    assert ClientPortTls(TlsConfig(certificates.cert, certificates.key, certificates.ca)).server_credentials()


def test_a_bad_file_is_named(certificates: Certificates, tmp_path: Path) -> None:
    cert, key = certificates.cert, certificates.key
    text = tmp_path / "text.pem"
    text.write_text("not a certificate\n")
    locked = tmp_path / "locked.pem"
    lock_key(key, locked)
    absent = str(tmp_path / "absent.pem")
    for files, message in (
        ((absent, key, ""), f"the TLS certificate {absent} cannot be read: No such file or directory"),
        ((cert, absent, ""), f"the TLS key {absent} cannot be read: No such file or directory"),
        ((cert, key, absent), f"the file of TLS authorities {absent} cannot be read: No such file or directory"),
        ((cert, key, str(tmp_path)), "cannot be read: Is a directory"),
        ((str(text), key, ""), f"the TLS certificate {text} holds no certificate in PEM format"),
        ((key, key, ""), f"the TLS certificate {key} holds no certificate in PEM format"),
        ((cert, str(text), ""), f"the TLS key {text} is not a private key in PEM format"),
        ((cert, cert, ""), f"the TLS key {cert} is not a private key in PEM format"),
        ((cert, key, str(text)), f"the file of TLS authorities {text} holds no certificate in PEM format"),
        ((cert, certificates.client_key, ""), f"{certificates.client_key} does not belong to the certificate {cert}"),
        ((cert, str(locked), ""), f"the TLS key {locked} has a passphrase"),
    ):
        with pytest.raises(ValueError) as error:
            check_tls_files(*files)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_key_of_another_kind_is_named(certificates: Certificates, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    other = tmp_path / "rsa-key.pem"
    key = rsa.generate_private_key(65537, 2048)
    other.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    with pytest.raises(ValueError, match=r"does not belong to .*: one is of RSA, the other of elliptic curves"):
        check_tls_files(certificates.cert, str(other), "")


def test_certificate_outside_its_time_is_named(certificates: Certificates) -> None:
    for year, message in ((1980, "is valid only from .* on"), (3100, "expired at .* UTC: renew it")):
        with pytest.raises(ValueError, match=message):
            check_validity(certificates.cert, datetime(year, 1, 1, tzinfo=UTC))


def lock_key(key: str, locked: Path) -> None:
    """Encrypt the key with a passphrase."""
    from cryptography.hazmat.primitives import serialization

    loaded = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    locked.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase"),
        )
    )


def test_a_router_with_a_certificate_speaks_tls_alone(router_model_dir: Path, certificates: Certificates) -> None:
    with router(config(router_model_dir, TlsConfig(certificates.cert, certificates.key))) as address:
        with TandemClient(address, tls=ClientTls(certificates.ca)) as client:
            assert client.server_info().model == "fake"
        for tls in (None, ClientTls(certificates.other_ca)):
            with TandemClient(address, tls=tls) as client, pytest.raises(TandemError):
                client.server_info(timeout_s=2.0)


def test_a_router_with_client_authorities_wants_a_certificate(
    router_model_dir: Path, certificates: Certificates
) -> None:
    tls = TlsConfig(certificates.cert, certificates.key, certificates.ca)
    with router(config(router_model_dir, tls)) as address:
        own = ClientTls(certificates.ca, certificates.client_cert, certificates.client_key)
        with TandemClient(address, tls=own) as client:
            assert client.server_info().model == "fake"
        with TandemClient(address, tls=ClientTls(certificates.ca)) as client, pytest.raises(TandemError):
            client.server_info(timeout_s=2.0)


def test_the_client_commands_take_tls_files_and_keys(
    router_model_dir: Path,
    certificates: Certificates,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tls = TlsConfig(certificates.cert, certificates.key, certificates.ca)
    flags = ["--tls-ca", certificates.ca, "--tls-cert", certificates.client_cert, "--tls-key", certificates.client_key]
    served = RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, tls=tls, api_keys=("secret",))
    with router(served) as address:
        status = ["status", "--address", address, *flags]
        # Not ready without workers.
        assert main([*status, "--api-key", "secret"]) == 1
        assert "not ready" in capsys.readouterr().out
        monkeypatch.setenv("TANDEM_API_KEY", "secret")
        assert main(status) == 1
        assert "not ready" in capsys.readouterr().out
        assert main([*status, "--api-key", "wrong"]) == 1
        assert "the API key is wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key belong together"),
        (["--tls-ca", "absent.pem"], "the file of TLS authorities absent.pem cannot be read: No such file"),
        (["--api-key", "with space"], "an API key must be printable ASCII without spaces"),
    ],
)
@pytest.mark.parametrize("command", [["status"], ["chat"], ["generate", "hi"]])
def test_wrong_connection_flags_are_a_wrong_call(
    command: list[str], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tandem {command[0]}: {message}") and error.count("\n") == 1


def test_a_file_that_goes_while_it_is_read_keeps_the_old_ones(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert = tmp_path / "cert.pem"
    shutil.copy(certificates.cert, cert)
    own = ClientPortTls(TlsConfig(str(cert), certificates.key))
    shutil.copy(certificates.cert, cert)
    os.utime(cert, (1.0, 1.0))
    read = checks._read

    def read_then_gone(file: str, what: str) -> None:
        read(file, what)
        cert.unlink(missing_ok=True)

    monkeypatch.setattr(checks, "_read", read_then_gone)
    # Anything raised here would end the router.
    own.files.poll()


def test_an_expired_new_certificate_keeps_the_old_one_and_a_valid_one_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, cert, key = trustme.CA(), tmp_path / "cert.pem", tmp_path / "key.pem"

    def write(not_before: datetime, not_after: datetime) -> None:
        issued = authority.issue_cert("localhost", not_before=not_before, not_after=not_after)
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)

    now = datetime.now(UTC)
    write(now - timedelta(days=1), now + timedelta(days=1))
    own = ClientPortTls(TlsConfig(str(cert), str(key)))
    own.files.poll()
    before = own._context
    write(now - timedelta(days=2), now - timedelta(days=1))
    for _ in range(3):
        own.files.poll()
    assert own._context is before
    assert caplog.text.count("expired at") == 1 and "stay as they were" in caplog.text
    write(now - timedelta(days=1), now + timedelta(days=2))
    own.files.poll()
    assert own._context is not before


def test_a_new_certificate_whose_time_comes_is_used_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, cert, key = trustme.CA(), tmp_path / "cert.pem", tmp_path / "key.pem"
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    own = ClientPortTls(TlsConfig(str(cert), str(key)))
    before = own._context
    os.utime(cert, (1.0, 1.0))

    def not_yet(file: str) -> None:
        raise ValueError(f"the TLS certificate {file} is valid only from later on")

    with monkeypatch.context() as patch:
        patch.setattr(checks, "check_validity", not_yet)
        own.files.poll()
    assert own._context is before
    # The files are the same.
    own.files.poll()
    assert own._context is not before
