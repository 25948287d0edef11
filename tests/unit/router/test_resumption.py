import base64

import pytest

from tandem.router.errors import InvalidRequestError
from tandem.router.resumption import ResumeState, Sealer, prompt_digest

STATE = ResumeState(2**64 - 1, 1_700_000_000_000_000_000, prompt_digest([1, 2, 3]), "a key's digest")


def test_another_router_of_the_cluster_reads_what_one_has_sealed() -> None:
    token = Sealer("secret").seal(STATE)
    assert Sealer("secret").open(token, STATE.key_digest) == STATE
    assert token.isascii() and len(token) < 512


def test_it_is_of_no_use_to_another_key() -> None:
    with pytest.raises(InvalidRequestError, match="another API key"):
        Sealer("secret").open(Sealer("secret").seal(STATE), "another key's digest")


def test_it_is_of_no_use_in_another_cluster() -> None:
    with pytest.raises(InvalidRequestError, match="from another cluster"):
        Sealer("other secret").open(Sealer("secret").seal(STATE), STATE.key_digest)


def test_nobody_can_change_one() -> None:
    sealed = bytearray(base64.urlsafe_b64decode(Sealer("secret").seal(STATE)))
    for position in range(len(sealed)):
        changed = sealed.copy()
        changed[position] ^= 1
        with pytest.raises(InvalidRequestError, match="from another cluster"):
            Sealer("secret").open(base64.urlsafe_b64encode(changed), STATE.key_digest)


@pytest.mark.parametrize("token", [b"", b"x", b"not base64!", b"\xff" * 40, b"A" * 100_000])
def test_what_is_no_token(token: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        Sealer("secret").open(token, "")


def test_prompts_have_names_of_their_own() -> None:
    prompts = [(), (0,), (1,), (1, 2), (2, 1), (1, 2, 0), (2**31,)]
    assert len({prompt_digest(prompt) for prompt in prompts}) == len(prompts)
