"""Credentials of a cluster's processes."""

import logging
import os
import ssl

import grpc

from tandem.config import SERVER_NAME, ClusterTls, ClusterTlsFiles
from tandem.repeat_limit import RepeatLimit
from tandem.rpc.auth import cluster_metadata
from tandem.rpc.channel import open_channel

logger = logging.getLogger(__name__)


class ClusterCredentials:
    """One process's token and certificates for mutual TLS, usable from any thread.

    Certificate files are read for each new connection, so they can be replaced. If unreadable, the last ones stay in
    use.

    Attributes:
        metadata: of every call to another process.
        secure: the cluster uses TLS internally.
    """

    def __init__(self, token: str = "", tls: ClusterTls | ClusterTlsFiles | None = None) -> None:
        """Raises ValueError if a certificate file cannot be read."""
        self.metadata = cluster_metadata(token)
        self.secure = tls is not None
        self._tls = tls
        self._unreadable = RepeatLimit()
        try:
            self._certificates = tls.read() if tls is not None else None
        except OSError as error:
            raise ValueError(f"{error.filename} of the cluster's TLS cannot be read: {error.strerror}") from error

    def open_channel(self, address: str) -> grpc.aio.Channel:
        tls = self._newest()
        if tls is None:
            return open_channel(address)
        credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
        return open_channel(address, credentials, SERVER_NAME)

    def for_server(self) -> grpc.ServerCredentials | None:
        """Return credentials for an internal port; None for plain text."""
        tls = self._newest()
        if tls is None:
            return None
        told = tls

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal told
            if (newest := self._newest()) is None or newest == told:
                return None
            told = newest
            return _configuration(newest)

        return grpc.dynamic_ssl_server_credentials(_configuration(tls), newer, require_client_authentication=True)

    def context(self, *, server_side: bool) -> ssl.SSLContext | None:
        """Return a context for a non-gRPC connection between processes; None for plain text.

        Raises:
            ssl.SSLError: the current certificate and key do not match.
        """
        tls = self._newest()
        return make_context(tls, server_side=server_side) if tls is not None else None

    def _newest(self) -> ClusterTls | None:
        if self._tls is not None:
            try:
                self._certificates = self._tls.read()
            except OSError as error:
                if self._unreadable.allows(str(error)):
                    logger.warning("the cluster's TLS goes on with the certificates that it has: %s", error)
        return self._certificates


def make_context(tls: ClusterTls, *, server_side: bool) -> ssl.SSLContext:
    """Return a context that presents a certificate and requires one for SERVER_NAME.

    Raises:
        ssl.SSLError: invalid certificates, or the key is not the certificate's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        # A client that never reads leaves tickets unread, and its close becomes a reset.
        context.num_tickets = 0
    context.load_verify_locations(cadata=tls.ca.decode())
    # OpenSSL takes keys only as files: use an anonymous one in memory.
    descriptor = os.memfd_create("tandem-tls", os.MFD_CLOEXEC)
    with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123
        file.write(tls.key + b"\n" + tls.cert)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=_no_passphrase)
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase: write one without, for nobody could type it")


def _configuration(tls: ClusterTls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.cert)], tls.ca)
