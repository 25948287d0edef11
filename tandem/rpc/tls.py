"""TLS from PEM files, checked before use."""

import ssl
from pathlib import Path

import grpc

from tandem.config import TlsConfig


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Return credentials for the clients' gRPC port. Raises ValueError as `check_tls_files`."""
    check_tls_files(tls.cert_file, tls.key_file, tls.client_ca_file)
    pair = (Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes())
    authorities = Path(tls.client_ca_file).read_bytes() if tls.client_ca_file else None
    return grpc.ssl_server_credentials([pair], authorities, require_client_auth=authorities is not None)


def check_tls_files(cert_file: str, key_file: str, ca_file: str) -> None:
    """Check files whose faults gRPC would report as a busy port or an absent server.

    Raises:
        ValueError: a file cannot be read or is not PEM of its kind, or the key is not the certificate's.
    """
    if cert_file or key_file:
        _check_certificates(cert_file, "the TLS certificate")
        _read(key_file, "the TLS key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(cert_file, key_file, password=_Passphrase(key_file))
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ValueError(f"the TLS key {key_file} does not belong to the certificate {cert_file}") from error
            raise ValueError(f"the TLS key {key_file} is not a private key in PEM format ({error.reason})") from error
    if ca_file:
        _check_certificates(ca_file, "the file of TLS authorities")


class _Passphrase:
    """Called only for an encrypted key."""

    def __init__(self, key_file: str) -> None:
        self._key_file = key_file

    def __call__(self) -> str:
        raise ValueError(f"the TLS key {self._key_file} has a passphrase: write one without, for nobody could type it")


def _check_certificates(file: str, what: str) -> None:
    _read(file, what)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError as error:
        raise ValueError(f"{what} {file} holds no certificate in PEM format") from error


def _read(file: str, what: str) -> None:
    try:
        Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"{what} {file} cannot be read: {error.strerror}") from error
