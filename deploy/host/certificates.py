"""Certificates for what a cluster's processes say to each other: made for one life of it, or given in files."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tandem.config import SERVER_NAME, ClusterTls, ClusterTlsFiles
from tandem.rpc.credentials import make_context
from tandem.rpc.tls import check_tls_files

# No cluster runs for as long; one that is started again has others.
VALIDITY = timedelta(days=10 * 365)
# Hosts' clocks may be apart.
CLOCK_SKEW = timedelta(days=1)


def make_certificates() -> ClusterTls:
    """An authority, of which nobody has the key any more, and the one certificate that it has signed, for all of the
    cluster's processes: ECDSA over P-256, nothing in files."""
    # It takes a while to import, and few clusters need it.
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
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + VALIDITY)
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
    """Files for every process to read, on whichever host it is.

    Raises:
        ValueError: a file cannot be used, or a process could not know another by these; the message says why.
    """
    check_tls_files(cert_file, key_file, ca_file)
    # A process's working directory may be another.
    files = ClusterTlsFiles(*(str(Path(file).absolute()) for file in (ca_file, cert_file, key_file)))
    _check_meeting(files)
    return files


def _check_meeting(files: ClusterTlsFiles) -> None:
    """Has two ends with these certificates meet. Raises ValueError: they do not know each other."""
    tls = files.read()
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = make_context(tls, server_side=False).wrap_bio(to_client, to_server, server_hostname=SERVER_NAME)
    server = make_context(tls, server_side=True).wrap_bio(to_server, to_client, server_side=True)
    try:
        # Each has its turn until it waits for the other: two flights of the client's, one of the server's.
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
