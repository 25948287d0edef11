"""TLS from PEM files, checked before use."""

import ssl
from datetime import UTC, datetime
from pathlib import Path

import grpc

from tandem.config import TlsConfig
from tandem.watched_files import WatchedFiles

# OpenSSL's words for a key of another algorithm than the certificate's.
_OTHER_KIND = ("KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")


class ClientPortTls:
    """TLS of the client ports, gRPC and HTTP. New connections get the files' latest good content.

    Attributes:
        files: to be polled; a bad or expired new file keeps the old ones.
    """

    def __init__(self, tls: TlsConfig) -> None:
        """Raises ValueError as `check_tls_files`."""
        self._tls = tls
        # Replaced whole, so that threads of gRPC see one pair.
        self._grpc: grpc.ServerCertificateConfiguration
        self._context: ssl.SSLContext
        self.files = WatchedFiles(
            (tls.cert_file, tls.key_file, tls.client_ca_file), self._load, "the certificates of the client ports"
        )
        self._is_loaded = False
        self.files.load()
        self._is_loaded = True

    def server_credentials(self) -> grpc.ServerCredentials:
        told = self._grpc

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal told
            if (newest := self._grpc) is told:
                return None
            told = newest
            return newest

        return grpc.dynamic_ssl_server_credentials(
            told, newer, require_client_authentication=bool(self._tls.client_ca_file)
        )

    def server_context(self) -> ssl.SSLContext:
        """Return a context for a server; each handshake moves to the latest one."""
        context = self._make_context()

        def move(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._context

        # Called with every ClientHello, with or without a name.
        context.sni_callback = move
        return context

    def _load(self) -> None:
        tls = self._tls
        try:
            check_tls_files(tls.cert_file, tls.key_file, tls.client_ca_file)
            if self._is_loaded:
                # At a start an expired one is better than none: the launcher has refused it, or it was good then.
                check_validity(tls.cert_file)
            pair = (Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes())
            authorities = Path(tls.client_ca_file).read_bytes() if tls.client_ca_file else None
            self._context, self._grpc = (
                self._make_context(),
                grpc.ssl_server_certificate_configuration([pair], authorities),
            )
        except OSError as error:
            raise ValueError(f"they were replaced meanwhile: {error}") from error

    def _make_context(self) -> ssl.SSLContext:
        tls = self._tls
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.cert_file, tls.key_file)
        if tls.client_ca_file:
            context.load_verify_locations(tls.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


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
            belongs = f"the TLS key {key_file} does not belong to the certificate {cert_file}"
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ValueError(belongs) from error
            if error.reason in _OTHER_KIND:
                raise ValueError(f"{belongs}: one is of RSA, the other of elliptic curves") from error
            raise ValueError(f"the TLS key {key_file} is not a private key in PEM format ({error.reason})") from error
    if ca_file:
        _check_certificates(ca_file, "the file of TLS authorities")


def check_validity(cert_file: str, now: datetime | None = None) -> None:
    """Check the time of a checked file's first certificate. Raises ValueError if it has expired or is not valid yet."""
    # Slow to import, and only servers have it.
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(Path(cert_file).read_bytes())
    now = now or datetime.now(UTC)
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > until:
        raise ValueError(f"the TLS certificate {cert_file} expired at {until:%Y-%m-%d %H:%M} UTC: renew it")
    if now < since:
        raise ValueError(
            f"the TLS certificate {cert_file} is valid only from {since:%Y-%m-%d %H:%M} UTC on: check this host's clock"
        )


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
