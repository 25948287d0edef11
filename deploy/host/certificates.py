"""TLS certificates between a cluster's processes: made for one run, or read from files."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tandem.config import SERVER_NAME, ClusterTls, ClusterTlsFiles
from tandem.rpc.credentials import make_context
from tandem.rpc.tls import check_tls_files

VALIDITY = timedelta(days=10 * 365)
CLOCK_SKEW = timedelta(days=1)


def make_certificates(validity: timedelta = VALIDITY) -> ClusterTls:
    """Makes one certificate (ECDSA over P-256) for all processes, and its authority, whose key is thrown away."""
    # Slow to import, and rarely needed.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.now(UTC)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def certificate(name: str, own: ec.EllipticCurvePublicKey, *, is_authority: bool) -> x509.CertificateBuilder:
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
        )
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority of {SERVER_NAME}")]))
            .public_key(own)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + min(validity, timedelta()) - CLOCK_SKEW)
            .not_valid_after(now + validity)
            .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    **usage,
                    decipher_only=False,
                    digital_signature=not is_authority,
                    key_cert_sign=is_authority,
                    crl_sign=is_authority,
                ),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(own), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )

    authority = certificate(f"authority of {SERVER_NAME}", authority_key.public_key(), is_authority=True)
    own = (
        certificate(SERVER_NAME, key.public_key(), is_authority=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
    )
    pem = serialization.Encoding.PEM
    return ClusterTls(
        authority.sign(authority_key, hashes.SHA256()).public_bytes(pem),
        own.sign(authority_key, hashes.SHA256()).public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def given_certificates(ca_file: str, cert_file: str, key_file: str) -> ClusterTlsFiles:
    """Checks the files that every process reads on its own host.

    Raises:
        ValueError: a file is unusable, or two processes with these files cannot authenticate each other.
    """
    check_tls_files(cert_file, key_file, ca_file)
    # Processes may have other working directories.
    files = ClusterTlsFiles(*(str(Path(file).absolute()) for file in (ca_file, cert_file, key_file)))
    _check_handshake(files)
    return files


def _check_handshake(files: ClusterTlsFiles) -> None:
    tls = files.read()
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = make_context(tls, server_side=False).wrap_bio(to_client, to_server, server_hostname=SERVER_NAME)
    server = make_context(tls, server_side=True).wrap_bio(to_server, to_client, server_side=True)
    try:
        # The client has two flights, the server one.
        for end in (client, server, client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError as error:
        raise ValueError(
            f"the cluster's processes would not know each other by the certificate {files.cert_file}, which must be "
            f"signed by an authority of {files.ca_file}, be for the name {SERVER_NAME} (subjectAltName), and be valid "
            f"for servers and for clients: {error.verify_message}"
        ) from error
