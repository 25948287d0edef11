"""Resuming a request at another router after its own router died (docs/requests.md, "Resumed streams").

The client sends its request again with its *resume token*, the tokens of its output, their *proof*, and the number of
characters of its text. The tokens become the fixed beginning of the output, as in a further attempt. The router decodes
them again and skips the client's characters. It counts characters because some tokenizers' text depends on the grouping
of tokens.

The resume token comes once, with the first tokens, and each message with tokens has a proof of all tokens so far. So a
client can resume only from tokens that the cluster has sent it, and only the same request.
"""

import base64
import hashlib
import hmac
import secrets
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.router.errors import InvalidRequestError

PARAM = "resume"
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)
_VERSION = 1
# Version, seed, arrival, creation, and four digests; the answer's id follows.
_STATE = struct.Struct(f"<BQQQ{DIGEST_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}s")
MAX_TOKEN_BYTES = 1024
# A nonce and its signature, half each.
NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The router's state in a resume token. Digests have DIGEST_BYTES.

    Attributes:
        seed: sampling seed, which a router may have drawn.
        arrival_ns: arrival at the first router; the request keeps its age once for each stream.
        stream_id: random name of this stream; a resumed one has another. Over HTTP, the record's id.
        request_digest: of the whole request; over HTTP, of the body without the prompt.
        prompt_digest: of the prompt's tokens, over HTTP.
        answer_id, created: id and time of the answer, for HTTP clients.
    """

    seed: int
    arrival_ns: int
    stream_id: bytes
    key_digest: bytes
    request_digest: bytes
    prompt_digest: bytes = NO_DIGEST
    answer_id: str = ""
    created: int = 0


@dataclass(frozen=True, slots=True)
class Resumption:
    """The client's part of an output, from the client over gRPC, or from the workers' record over HTTP.

    Attributes:
        state: from the opened resume token.
        token_ids: all known tokens of the output; the cluster has made them.
        num_characters: length of the client's text, in Unicode code points.
        num_tokens: length of the client's part of token_ids; None: all. The others are sent like new ones.
    """

    state: ResumeState
    token_ids: Sequence[int]
    num_characters: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KeptStream:
    """The workers' record for an HTTP client; digest, id and time as in ResumeState."""

    record_id: str
    body_digest: bytes
    answer_id: str
    created: int


class OutputProof:
    """Proves the tokens of one stream as it goes, in about a microsecond a message."""

    def __init__(self, key: bytes, token: bytes, token_ids: Sequence[int]) -> None:
        self._hash = hashlib.blake2b(token[:DIGEST_BYTES], digest_size=DIGEST_BYTES, key=key, person=b"tandem-output")
        self._hash.update(array("I", token_ids).tobytes())

    def add(self, token_ids: Sequence[int]) -> bytes:
        """Returns the proof of all tokens, these included."""
        self._hash.update(array("I", token_ids).tobytes())
        return self._hash.copy().digest()


class Sealer:
    """Signs states and outputs with a secret shared by the cluster's routers."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.blake2b(secret.encode(), digest_size=32, person=b"tandem-resume").digest()

    def seal(self, state: ResumeState) -> bytes:
        """Returns the resume token: a signature and the state."""
        data = _STATE.pack(
            _VERSION,
            state.seed,
            state.arrival_ns,
            state.created,
            state.stream_id,
            state.key_digest,
            state.request_digest,
            state.prompt_digest,
        )
        data += state.answer_id.encode()
        return self._sign(data) + data

    def open(self, token: bytes, key_digest: bytes) -> ResumeState:
        """Raises InvalidRequestError if the token is from another cluster, or belongs to another API key."""
        signature, data = token[:DIGEST_BYTES], token[DIGEST_BYTES:]
        if not _STATE.size <= len(data) <= MAX_TOKEN_BYTES:
            raise InvalidRequestError("the resume token is malformed: send it as the router gave it", PARAM)
        if not hmac.compare_digest(signature, self._sign(data)):
            raise InvalidRequestError("the resume token is from another cluster", PARAM)
        version, seed, arrival_ns, created, *digests = _STATE.unpack_from(data)
        if version != _VERSION:
            raise InvalidRequestError("the resume token is of another version: begin again, without it", PARAM)
        stream_id, own_key_digest, request_digest, prompt_digest = digests
        if not hmac.compare_digest(own_key_digest, key_digest):
            raise InvalidRequestError("the resume token belongs to another API key", PARAM)
        answer_id = data[_STATE.size :].decode()
        return ResumeState(
            seed, arrival_ns, stream_id, own_key_digest, request_digest, prompt_digest, answer_id, created
        )

    def proof(self, token: bytes, token_ids: Sequence[int] = ()) -> OutputProof:
        """Args: token_ids: the beginning of a resumed output."""
        return OutputProof(self._key, token, token_ids)

    def check_proof(self, token: bytes, token_ids: Sequence[int], proof: bytes) -> None:
        """Raises InvalidRequestError if the stream of this resume token has not had exactly these tokens."""
        if not hmac.compare_digest(self.proof(token).add(token_ids), proof):
            raise InvalidRequestError(
                "the proof is not of these tokens: send the last resume_token and resume_proof of the stream, and all "
                "tokens so far",
                PARAM,
            )

    def new_name(self, key_digest: bytes) -> str:
        """Returns a secret name for a stream of this API key."""
        nonce = secrets.token_bytes(NAME_BYTES // 2)
        return base64.urlsafe_b64encode(nonce + self._sign_name(nonce, key_digest)).rstrip(b"=").decode()

    def knows_name(self, name: str, key_digest: bytes) -> bool:
        """Returns whether `new_name` gave this name to this key, at any router of the cluster."""
        data = base64.urlsafe_b64decode(name + "==")
        nonce, signature = data[: NAME_BYTES // 2], data[NAME_BYTES // 2 :]
        return hmac.compare_digest(signature, self._sign_name(nonce, key_digest))

    def _sign_name(self, nonce: bytes, key_digest: bytes) -> bytes:
        size = NAME_BYTES // 2
        return hashlib.blake2b(nonce + key_digest, digest_size=size, key=self._key, person=b"tandem-name").digest()

    def _sign(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self._key, person=b"tandem-state").digest()


def new_stream_id() -> bytes:
    return secrets.token_bytes(DIGEST_BYTES)


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """Ties a resume token to its prompt."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()
