"""Resuming a request at another router after its own router died.

With the first tokens the client gets a signed *resume token*, which holds the router's state of the request. To resume,
the client sends its request again with that token and its part of the output: the tokens, and the number of characters
of text. The tokens become the fixed beginning of the new request's output, as in a further attempt. The router makes
their text anew and leaves out the client's characters. Characters are counted because some tokenizers' text depends on
the grouping of tokens.

An HTTP client has only text and the name of its stream. For these streams the workers keep tokens and resume token
(worker/records.py), and a router asks for them (router/recalls.py).
"""

import base64
import hashlib
import hmac
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tandem.router.errors import InvalidRequestError

_SIGNATURE_BYTES = 32
PARAM = "resume"


@dataclass(frozen=True, slots=True)
class ResumeState:
    """State that a router needs to resume a request.

    Attributes:
        seed: sampling seed, which a router may have drawn.
        arrival_ns: time at which the client first asked; the request keeps its age.
        prompt_digest: digest of the prompt's token ids.
        key_digest: digest of the API key.
        body_digest: digest of the body without the prompt; checked over HTTP.
        answer_id, created: id and time of the answer, for a client that has its text alone.
    """

    seed: int
    arrival_ns: int
    prompt_digest: str
    key_digest: str
    body_digest: str = ""
    answer_id: str = ""
    created: int = 0


@dataclass(frozen=True, slots=True)
class Resumption:
    """The client's part of an output: sent over gRPC, kept by workers for HTTP.

    Attributes:
        token: the resume token.
        token_ids: all known tokens of the output.
        num_characters: length of the client's text, in Unicode code points.
        num_tokens: number of token_ids that the client knows; None: all. The others are sent like new ones.
    """

    token: bytes
    token_ids: Sequence[int]
    num_characters: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KeptStream:
    """The record that workers keep for a client that resumes with text alone.

    Attributes:
        record_id: name of the record.
        body_digest, answer_id, created: as in ResumeState.
    """

    record_id: str
    body_digest: str
    answer_id: str
    created: int


class Sealer:
    """Signs states and checks signatures, with a secret that the routers of one cluster share."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.blake2b(secret.encode(), digest_size=32, person=b"tandem-resume").digest()

    def seal(self, state: ResumeState) -> bytes:
        """Returns the resume token. It is printable, so a header can hold it."""
        data = json.dumps(asdict(state), separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(self._sign(data) + data)

    def open(self, token: bytes, key_digest: str) -> ResumeState:
        """Returns the state in a resume token.

        Args:
            key_digest: digest of the API key that came with it.

        Raises:
            InvalidRequestError: the token is from another cluster, or belongs to another key.
        """
        try:
            sealed = base64.b64decode(token, altchars=b"-_", validate=True)
        except ValueError as error:
            raise InvalidRequestError("this is no resume token", PARAM) from error
        signature, data = sealed[:_SIGNATURE_BYTES], sealed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(data)):
            raise InvalidRequestError("the resume token is none of this cluster's", PARAM)
        state = ResumeState(**json.loads(data))
        if not hmac.compare_digest(state.key_digest, key_digest):
            raise InvalidRequestError("the resume token belongs to another API key", PARAM)
        return state

    def _sign(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Identifies a prompt, so that a resume token is used with its own request only."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()
