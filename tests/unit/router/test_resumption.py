import pytest

from tandem.router.errors import InvalidRequestError
from tandem.router.resumption import DIGEST_BYTES, ResumeState, Sealer, new_stream_id, prompt_digest

KEY_DIGEST = b"a key's digest.."
STATE = ResumeState(
    2**64 - 1, 1_700_000_000_000_000_000, b"s" * 16, KEY_DIGEST, b"r" * 16, prompt_digest([1, 2, 3]), "cmpl-é", 17
)
OUTPUT = [5, 0, 2**32 - 1, 7]


def test_another_router_of_the_cluster_reads_what_one_has_sealed() -> None:
    token = Sealer("secret").seal(STATE)
    assert Sealer("secret").open(token, KEY_DIGEST) == STATE
    assert len(token) < 128


def test_it_is_of_no_use_to_another_key() -> None:
    with pytest.raises(InvalidRequestError, match="another API key"):
        Sealer("secret").open(Sealer("secret").seal(STATE), b"x" * DIGEST_BYTES)


def test_it_is_of_no_use_in_another_cluster() -> None:
    with pytest.raises(InvalidRequestError, match="from another cluster"):
        Sealer("other secret").open(Sealer("secret").seal(STATE), KEY_DIGEST)


def test_nobody_can_change_one() -> None:
    token = Sealer("secret").seal(STATE)
    for position in range(len(token)):
        changed = bytearray(token)
        changed[position] ^= 1
        with pytest.raises(InvalidRequestError, match="from another cluster"):
            Sealer("secret").open(bytes(changed), KEY_DIGEST)


@pytest.mark.parametrize("token", [b"", b"x", b"not a token!", b"\xff" * 40, b"\xff" * 200, b"A" * 100_000])
def test_what_is_no_token(token: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        Sealer("secret").open(token, KEY_DIGEST)


def test_prompts_have_names_of_their_own() -> None:
    prompts = [(), (0,), (1,), (1, 2), (2, 1), (1, 2, 0), (2**31,)]
    assert len({prompt_digest(prompt) for prompt in prompts}) == len(prompts)


def test_proof_is_that_of_all_tokens_however_they_came() -> None:
    sealer = Sealer("secret")
    token = sealer.seal(STATE)
    for split in range(len(OUTPUT)):
        proof = sealer.proof(token, OUTPUT[:split]).add(OUTPUT[split:])
        Sealer("secret").check_proof(token, OUTPUT, proof)
    running = sealer.proof(token)
    proofs = [running.add([token_id]) for token_id in OUTPUT]
    for length, one in enumerate(proofs, 1):
        sealer.check_proof(token, OUTPUT[:length], one)
        assert len(one) == DIGEST_BYTES


@pytest.mark.parametrize(
    "token_ids", [[], OUTPUT[:-1], [*OUTPUT, 0], OUTPUT[::-1], [5, 0, 2**32 - 1, 8], [OUTPUT[0]] * len(OUTPUT)]
)
def test_proof_is_of_no_other_tokens(token_ids: list[int]) -> None:
    sealer = Sealer("secret")
    token = sealer.seal(STATE)
    with pytest.raises(InvalidRequestError, match="the proof is not of these tokens"):
        sealer.check_proof(token, token_ids, sealer.proof(token).add(OUTPUT))


def test_proof_is_of_no_other_stream_or_cluster() -> None:
    sealer = Sealer("secret")
    streams = [sealer.seal(ResumeState(1, 2, new_stream_id(), KEY_DIGEST, b"r" * DIGEST_BYTES)) for _ in range(2)]
    proof = sealer.proof(streams[0]).add(OUTPUT)
    with pytest.raises(InvalidRequestError, match="the proof is not of these tokens"):
        sealer.check_proof(streams[1], OUTPUT, proof)
    with pytest.raises(InvalidRequestError, match="the proof is not of these tokens"):
        Sealer("other").check_proof(streams[0], OUTPUT, proof)


def test_names_are_known_to_their_key_and_cluster_alone() -> None:
    name = Sealer("secret").new_name(KEY_DIGEST)
    assert len(name) == 22 and name != Sealer("secret").new_name(KEY_DIGEST)
    assert Sealer("secret").knows_name(name, KEY_DIGEST)
    assert not Sealer("secret").knows_name(name, b"x" * DIGEST_BYTES)
    assert not Sealer("other").knows_name(name, KEY_DIGEST)
    changed = ("B" if name[0] == "A" else "A") + name[1:]
    assert not Sealer("secret").knows_name(changed, KEY_DIGEST)
