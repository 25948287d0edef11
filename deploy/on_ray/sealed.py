"""Sealed messages: Ray carries them between hosts, and only the recipient's private key opens them.

HPKE (RFC 9180) with X25519, HKDF-SHA256 and ChaCha20-Poly1305. It hides a message and detects changes, but does not
authenticate the sender: anyone with the public key can seal.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.hpke import Suite

_INFO = b"tandem sealed 2"


class KeyPair:
    """Opens messages sealed to its public key. Both keys have 32 bytes."""

    def __init__(self, private_key: bytes = b"") -> None:
        """Args: private_key: b"": a new pair."""
        # Slow to import, and rarely needed.
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._key = X25519PrivateKey.from_private_bytes(private_key) if private_key else X25519PrivateKey.generate()
        self.private_key = self._key.private_bytes_raw()
        self.public_key = self._key.public_key().public_bytes_raw()

    def open(self, sealed: bytes) -> bytes:
        """Raises ValueError: the message was sealed to another key, or changed."""
        from cryptography.exceptions import InvalidTag

        try:
            return _suite().decrypt(sealed, self._key, _INFO)
        except InvalidTag as error:
            raise ValueError("a sealed message cannot be opened: it is for another key, or was changed") from error


def seal(message: bytes, public_key: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    return _suite().encrypt(message, X25519PublicKey.from_public_bytes(public_key), _INFO)


def _suite() -> "Suite":
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

    return Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
