"""Says why no connection to a cluster's gRPC port came about, from gRPC's own words."""

import re

# Words of gRPC and BoringSSL, with their meaning. The first match counts.
_MEANINGS = (
    (
        r"CERTIFICATE_VERIFY_FAILED: (?P<why>.+?)(: OK)?$",
        "the TLS certificate of {address} is refused: {why}",
    ),
    (
        r"Hostname Verification Check failed",
        "the TLS certificate of {address} is refused: it is for other names than {host}",
    ),
    (
        r"WRONG_VERSION_NUMBER",
        "{address} answers, but not over TLS: connect without it, unless this is another port than the gRPC port",
    ),
    (
        r"http1\.x server|missing selected ALPN",
        "{address} answers over HTTP/1.1, so it is not the cluster's gRPC port, but perhaps its HTTP port",
    ),
    (
        r"Tls handshake failed.*OPENSSL_internal:(?P<why>[A-Z0-9_]+)",
        "no TLS connection to {address}: {why}",
    ),
    (
        r"Socket closed|Connection reset",
        "{address} accepts connections and closes them: it asks for TLS or for a client's certificate, or has as many "
        "connections as it takes",
    ),
)


def explain(details: str, address: str) -> str:
    """Return one line for the details of a call that could not connect."""
    for pattern, meaning in _MEANINGS:
        if found := re.search(pattern, details):
            why = found.groupdict().get("why", "")
            return meaning.format(address=address, host=address.rpartition(":")[0], why=why)
    return f"no cluster answers at {address}; start one with `tandem serve`"
