"""Sealed words: what Ray carries to another host, where one process alone can open them.

Who opens has made a key pair (X25519). Who seals makes another one each time; what both halves have in common becomes,
by HKDF-SHA256, the key of one ChaCha20-Poly1305 message. That hides what is sealed and shows any change of it. It does
not tell who has sealed it: everybody may who has the public key.
"""

from typing import Any

# The sender's half comes first, then the encrypted words.
_PUBLIC_KEY_BYTES = 32
_LABEL = b"tandem sealed 1"
# A key that is used once needs no nonce besides.
_NONCE = bytes(12)


class KeyPair:
    """Opens what is sealed to it.

    Attributes:
        public_key: 32 bytes, for whoever seals.
        private_key: 32 bytes, for those alone that are to open it too.
    """

    def __init__(self, private_key: bytes = b"") -> None:
        """Args: private_key: of a pair that was made before; b"": a new one."""
        # It takes a while to import, and a cluster with a Ray of its own seals nothing.
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._key = X25519PrivateKey.from_private_bytes(private_key) if private_key else X25519PrivateKey.generate()
        self.private_key = self._key.private_bytes_raw()
        self.public_key = self._key.public_key().public_bytes_raw()

    def open(self, sealed: bytes) -> bytes:
        """Raises ValueError: it was sealed to another key, or changed on its way."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        theirs, encrypted = sealed[:_PUBLIC_KEY_BYTES], sealed[_PUBLIC_KEY_BYTES:]
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(theirs))
            return _cipher(shared, theirs, self.public_key).decrypt(_NONCE, encrypted, None)
        except (InvalidTag, ValueError) as error:
            raise ValueError("what was sealed cannot be opened: it is for another key, or was changed") from error


def seal(words: bytes, public_key: bytes) -> bytes:
    """For who has the other half of this key. Raises ValueError: it is no public key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    own = X25519PrivateKey.generate()
    own_public = own.public_key().public_bytes_raw()
    shared = own.exchange(X25519PublicKey.from_public_bytes(public_key))
    return own_public + _cipher(shared, own_public, public_key).encrypt(_NONCE, words, None)


def _cipher(shared: bytes, sender: bytes, recipient: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return ChaCha20Poly1305(HKDF(SHA256(), 32, None, _LABEL + sender + recipient).derive(shared))
