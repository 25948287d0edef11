"""Certificates between a cluster's processes."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509

from tandem.config import SERVER_NAME
from tandem.deploy.host.certificates import given_certificates, make_certificates


def write(directory: Path, **blobs: bytes) -> None:
    for name, blob in blobs.items():
        (directory / name).write_bytes(blob)


def given(directory: Path) -> None:
    given_certificates(*(str(directory / name) for name in ("ca", "cert", "key")))


def issue(directory: Path, name: str, authority: trustme.CA, **validity: Any) -> None:
    leaf = authority.issue_cert(name, **validity)
    write(directory, cert=leaf.cert_chain_pems[0].bytes(), key=leaf.private_key_pem.bytes())


def test_made_certificates_are_for_one_cluster_and_last_years(tmp_path: Path) -> None:
    one, other = make_certificates(), make_certificates()
    write(tmp_path, ca=one.ca, cert=one.cert, key=one.key)
    given(tmp_path)
    write(tmp_path, ca=other.ca)
    with pytest.raises(ValueError, match="unable to get local issuer certificate"):
        given(tmp_path)
    for pem in (one.ca, one.cert):
        certificate = x509.load_pem_x509_certificate(pem)
        assert certificate.not_valid_before_utc < datetime.now(UTC) - timedelta(hours=12)
        assert certificate.not_valid_after_utc > datetime.now(UTC) + timedelta(days=5 * 365)
        assert certificate.signature_hash_algorithm is not None and "ec" in type(certificate.public_key()).__module__


def test_files_of_any_authority_are_accepted(tmp_path: Path) -> None:
    authority = trustme.CA()
    intermediate = authority.create_child_ca()
    leaf = intermediate.issue_cert(SERVER_NAME)
    chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
    write(tmp_path, ca=authority.cert_pem.bytes(), cert=chain, key=leaf.private_key_pem.bytes())
    given(tmp_path)


def another_authority(directory: Path) -> None:
    issue(directory, SERVER_NAME, trustme.CA())


def another_name(directory: Path) -> None:
    authority = trustme.CA()
    write(directory, ca=authority.cert_pem.bytes())
    issue(directory, "host.example.org", authority)


def no_longer_valid(directory: Path) -> None:
    authority = trustme.CA()
    write(directory, ca=authority.cert_pem.bytes())
    issue(directory, SERVER_NAME, authority, not_after=datetime.now(UTC) - timedelta(days=1))


def another_key(directory: Path) -> None:
    write(directory, key=make_certificates().key)


def no_key(directory: Path) -> None:
    write(directory, key=b"nothing of the kind")


def no_file(directory: Path) -> None:
    (directory / "ca").unlink()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (another_authority, "unable to get local issuer certificate"),
        (another_name, "certificate is not valid for 'cluster.tandem.internal'"),
        (no_longer_valid, "certificate has expired"),
        (another_key, "does not belong to the certificate"),
        (no_key, "is not a private key"),
        (no_file, "cannot be read: No such file"),
    ],
)
def test_files_that_fail_a_handshake_are_refused(tmp_path: Path, spoil: Callable[[Path], None], reason: str) -> None:
    tls = make_certificates()
    write(tmp_path, ca=tls.ca, cert=tls.cert, key=tls.key)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=reason):
        given(tmp_path)
