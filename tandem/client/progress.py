"""Progress of one call, and its continuation after a break."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from tandem.client.requests import TandemError
from tandem.v1 import inference_pb2 as pb

# A router's own status carries this trailer; a broken connection has none.
ROUTER_TRAILER = "tandem-router"
# A broken stream fails after this time without a message; a dead router is back within a few seconds.
GO_ON_WITHIN_S = 30.0
RETRY_DELAY_S = 0.2


class CallProgress:
    def __init__(self, timeout_s: float | None, clock: Callable[[], float]) -> None:
        """Args: timeout_s: for the whole request; None: no limit."""
        self._clock = clock
        self._deadline = None if timeout_s is None else clock() + timeout_s
        # Time of the first break since the last message.
        self._broken_since: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a part of the answer is here."""
        raise NotImplementedError

    def time_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def goes_on_after(self, error: Any) -> bool:
        """Return whether to continue, perhaps at another router."""
        # Other routers may be full while all streams of a dead one resume at once.
        is_full = self.has_begun and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        is_broken = error.code() is grpc.StatusCode.UNAVAILABLE and not _is_a_routers(error.trailing_metadata())
        if not (is_full or is_broken):
            return False
        now = self._clock()
        if self._broken_since is None:
            self._broken_since = now
        return now - self._broken_since < GO_ON_WITHIN_S and (self._deadline is None or now < self._deadline)


class StreamProgress(CallProgress):
    def __init__(
        self, request: pb.GenerateRequest, timeout_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(timeout_s, clock)
        self._request = request
        self._token = self._proof = b""
        self._token_ids: list[int] = []
        self._num_characters = 0

    @property
    def has_begun(self) -> bool:
        return bool(self._token_ids)

    def next_request(self) -> pb.GenerateRequest:
        """Return the original request, or one that resumes where the last stream broke."""
        if not self._token_ids:
            return self._request
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.resume.token = self._token
        request.resume.token_ids.extend(self._token_ids)
        request.resume.num_characters = self._num_characters
        request.resume.proof = self._proof
        return request

    def add(self, response: pb.GenerateResponse) -> None:
        self._broken_since = None
        self._token = response.resume_token or self._token
        self._proof = response.resume_proof or self._proof
        self._token_ids += response.token_ids
        self._num_characters += len(response.text)

    def goes_on_after(self, error: Any) -> bool:
        """Return whether to resume the stream, perhaps at another router."""
        return (not self._token_ids or bool(self._token)) and super().goes_on_after(error)


class EmbedProgress(CallProgress):
    """A broken call goes on with the inputs that have no embedding yet."""

    def __init__(
        self, request: pb.EmbedRequest, timeout_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(timeout_s, clock)
        self._request = request
        self._responses: dict[int, pb.EmbedResponse] = {}
        self._asked: Sequence[int] = range(len(request.inputs))

    @property
    def has_begun(self) -> bool:
        return bool(self._responses)

    @property
    def responses(self) -> list[pb.EmbedResponse]:
        """In the order of the inputs. Raises TandemError: the call ended without some of them."""
        if len(self._responses) != len(self._request.inputs):
            raise TandemError("INTERNAL", f"{len(self._responses)} embeddings for {len(self._request.inputs)} inputs")
        return [self._responses[index] for index in range(len(self._responses))]

    def next_request(self) -> pb.EmbedRequest:
        if not self._responses:
            return self._request
        request = pb.EmbedRequest()
        request.CopyFrom(self._request)
        del request.inputs[:]
        self._asked = [index for index in range(len(self._request.inputs)) if index not in self._responses]
        request.inputs.extend(self._request.inputs[index] for index in self._asked)
        return request

    def add(self, response: pb.EmbedResponse) -> None:
        self._broken_since = None
        index = self._asked[response.index]
        response.index = index
        self._responses[index] = response


def _is_a_routers(trailers: Iterable[tuple[str, Any]] | None) -> bool:
    return any(name == ROUTER_TRAILER for name, _ in trailers or ())
