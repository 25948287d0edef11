"""Only one key opens a sealed message, and any change is detected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.on_ray.sealed import KeyPair, seal

SECRET = b"-----BEGIN PRIVATE KEY-----"


@given(st.binary(max_size=1000))
def test_a_sealed_message_is_hidden_and_opens_unchanged(words: bytes) -> None:
    keys = KeyPair()
    sealed = seal(words, keys.public_key)
    assert keys.open(sealed) == words and KeyPair(keys.private_key).open(sealed) == words
    assert len(words) < 8 or words not in sealed


def test_sealing_twice_differs() -> None:
    keys = KeyPair()
    assert seal(SECRET, keys.public_key) != seal(SECRET, keys.public_key)


def test_another_key_cannot_open() -> None:
    with pytest.raises(ValueError, match="for another key, or was changed"):
        KeyPair().open(seal(SECRET, KeyPair().public_key))


def test_every_bit_counts() -> None:
    keys = KeyPair()
    sealed = seal(SECRET, keys.public_key)
    for position in range(len(sealed)):
        for bit in (0, 7):
            changed = bytearray(sealed)
            changed[position] ^= 1 << bit
            with pytest.raises(ValueError, match="was changed"):
                keys.open(bytes(changed))
    for length in range(len(sealed)):
        with pytest.raises(ValueError, match="was changed"):
            keys.open(sealed[:length])
    with pytest.raises(ValueError, match="was changed"):
        keys.open(sealed + b"\0")


@pytest.mark.parametrize("key", [b"", b"short", bytes(32), bytes(33)], ids=["none", "short", "of no use", "long"])
def test_other_bytes_than_a_public_key_are_refused(key: bytes) -> None:
    with pytest.raises(ValueError):
        seal(SECRET, key)
