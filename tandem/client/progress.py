"""Progress of one stream, and its resumption after a break."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from tandem.v1 import inference_pb2 as pb

# A router's own status carries this trailer; a broken connection has none.
ROUTER_TRAILER = "tandem-router"
# A broken stream fails after this time without a message; a dead router is back within a few seconds.
GO_ON_WITHIN_S = 30.0
RETRY_DELAY_S = 0.2


class StreamProgress:
    def __init__(
        self, request: pb.GenerateRequest, timeout_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args: timeout_s: for the whole request; None: no limit."""
        self._request = request
        self._clock = clock
        self._deadline = None if timeout_s is None else clock() + timeout_s
        # Time of the first break since the last message.
        self._broken_since: float | None = None
        self._token = self._proof = b""
        self._token_ids: list[int] = []
        self._num_characters = 0

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

    def time_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def add(self, response: pb.GenerateResponse) -> None:
        self._broken_since = None
        self._token = response.resume_token or self._token
        self._proof = response.resume_proof or self._proof
        self._token_ids += response.token_ids
        self._num_characters += len(response.text)

    def goes_on_after(self, error: Any) -> bool:
        """Return whether to resume the stream, perhaps at another router."""
        if self._token_ids and not self._token:
            return False
        # Other routers may be full while all streams of a dead one resume at once.
        is_full = bool(self._token_ids) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        is_broken = error.code() is grpc.StatusCode.UNAVAILABLE and not _is_a_routers(error.trailing_metadata())
        if not (is_full or is_broken):
            return False
        now = self._clock()
        if self._broken_since is None:
            self._broken_since = now
        return now - self._broken_since < GO_ON_WITHIN_S and (self._deadline is None or now < self._deadline)


def _is_a_routers(trailers: Iterable[tuple[str, Any]] | None) -> bool:
    return any(name == ROUTER_TRAILER for name, _ in trailers or ())
