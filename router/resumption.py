"""Resuming a request at another router after its own router died (docs/requests.md, "Resumed streams").

The client sends its request again with its *resume token*, the tokens of its output and the number of characters of its
text. The tokens become the fixed beginning of the output, as in a further attempt. The router decodes them again and
skips the client's characters. It counts characters because some tokenizers' text depends on the grouping of tokens.
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
    """The router's state in a resume token.

    Attributes:
        seed: sampling seed, which a router may have drawn.
        arrival_ns: arrival at the first router; the request keeps its age.
        body_digest: digest of the body without the prompt; checked over HTTP.
        answer_id, created: id and time of the answer, for HTTP clients.
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
        token_ids: all known tokens of the output.
        num_characters: length of the client's text, in Unicode code points.
        num_tokens: length of the client's part of token_ids; None: all. The others are sent like new ones.
    """

    token: bytes
    token_ids: Sequence[int]
    num_characters: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KeptStream:
    """The workers' record for an HTTP client; digest, id and time as in ResumeState."""

    record_id: str
    body_digest: str
    answer_id: str
    created: int


class Sealer:
    """Signs states with a secret shared by the cluster's routers."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.blake2b(secret.encode(), digest_size=32, person=b"tandem-resume").digest()

    def seal(self, state: ResumeState) -> bytes:
        """Returns the resume token, printable for use in headers."""
        data = json.dumps(asdict(state), separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(self._sign(data) + data)

    def open(self, token: bytes, key_digest: str) -> ResumeState:
        """Raises InvalidRequestError if the token is from another cluster, or belongs to another API key."""
        try:
            sealed = base64.b64decode(token, altchars=b"-_", validate=True)
        except ValueError as error:
            raise InvalidRequestError("the resume token is malformed: send it as the router gave it", PARAM) from error
        signature, data = sealed[:_SIGNATURE_BYTES], sealed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(data)):
            raise InvalidRequestError("the resume token is from another cluster", PARAM)
        state = ResumeState(**json.loads(data))
        if not hmac.compare_digest(state.key_digest, key_digest):
            raise InvalidRequestError("the resume token belongs to another API key", PARAM)
        return state

    def _sign(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Ties a resume token to its prompt."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()
