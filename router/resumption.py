"""Going on with a request whose router is gone: a new request of its client's, at any router, that begins where the old
one ended.

With the first tokens a client is given a *resume token*, which says what a router must know to go on as if nothing had
happened, and is signed, so that nobody can make one up or change it. The client sends its request again with that token
and with what it has of the output: the tokens, which are the fixed beginning of the new request's output as they would
be in a further attempt of the old one; and how many characters of text, because some tokenizers emit text depending on
how tokens came in groups. The text is made anew from the tokens, and the characters that the client has are left out.

A client over HTTP has text alone, and a name for its stream. For these the workers keep the tokens and the resume token
(worker/records.py), and a router asks for them (router/recalls.py). Nothing is kept for others; what a router had in
hand when it ended is not looked for.
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
    """What a router must know of a request to go on with it.

    Attributes:
        seed: of its sampling, which a router may have drawn.
        arrival_ns: when its client first asked: the request keeps its age.
        prompt_digest: of its prompt's token ids.
        key_digest: of the API key that it belongs to.
        body_digest: of all that it asked for beside its prompt, where that is checked (over HTTP).
        answer_id, created: what the answer is called and when it began, for a client that has its text alone.
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
    """What a client sends to go on, or workers have kept for one that has only text.

    Attributes:
        token: the resume token that it was given.
        token_ids: of the output, all that there are.
        num_characters: of the output's text that it has, in Unicode code points.
        num_tokens: of token_ids, that the client has been told of; None: all. The others go out like new ones.
    """

    token: bytes
    token_ids: Sequence[int]
    num_characters: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KeptStream:
    """What is to be kept at the workers of a request whose client could go on with its text alone.

    Attributes:
        record_id: under which name.
        body_digest, answer_id, created: as in ResumeState.
    """

    record_id: str
    body_digest: str
    answer_id: str
    created: int


class Sealer:
    """Signs states and checks signatures. All routers of one cluster have the same secret, and no other cluster has."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.blake2b(secret.encode(), digest_size=32, person=b"tandem-resume").digest()

    def seal(self, state: ResumeState) -> bytes:
        """The resume token of a request. Printable, so that it can stand in a header."""
        data = json.dumps(asdict(state), separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(self._sign(data) + data)

    def open(self, token: bytes, key_digest: str) -> ResumeState:
        """What a resume token says.

        Args:
            key_digest: of the API key that it is shown with.

        Raises:
            InvalidRequestError: it is none of this cluster, or belongs to another key.
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
    """Names a prompt, so that a token goes with the request it was given for."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()
