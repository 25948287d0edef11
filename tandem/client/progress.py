"""What a client has of one stream, and how it goes on with it when the stream breaks."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from tandem.v1 import inference_pb2 as pb

# A router's own word on how a call ended has this trailer; a connection that breaks has none.
ROUTER_TRAILER = "tandem-router"
# A stream that has broken is given up if nothing has come since for so long: a router that dies is back within a few
# seconds.
GO_ON_WITHIN_S = 30.0
RETRY_DELAY_S = 0.2


class StreamProgress:
    """Belongs to one call of `generate`."""

    def __init__(
        self, request: pb.GenerateRequest, timeout_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args: timeout_s: for the whole request, over all streams; None: as long as it takes."""
        self._request = request
        self._clock = clock
        self._deadline = None if timeout_s is None else clock() + timeout_s
        # When the first stream broke of those from which nothing has come; None: what came last has not broken.
        self._broken_since: float | None = None
        self._token = b""
        self._token_ids: list[int] = []
        self._num_characters = 0

    def next_request(self) -> pb.GenerateRequest:
        """What to send now: the request as it is, or one that goes on where the last stream broke."""
        if not self._token_ids:
            return self._request
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.resume.token = self._token
        request.resume.token_ids.extend(self._token_ids)
        request.resume.num_characters = self._num_characters
        return request

    def time_left(self) -> float | None:
        """Seconds for the next stream; None: as long as it takes."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def add(self, response: pb.GenerateResponse) -> None:
        self._broken_since = None
        self._token = response.resume_token or self._token
        self._token_ids += response.token_ids
        self._num_characters += len(response.text)

    def goes_on_after(self, error: Any) -> bool:
        """Whether a stream that has ended in this error is to be gone on with, perhaps at another router."""
        if self._token_ids and not self._token:
            return False
        # Where the streams of a router that has died all go on at once, there may be no room for each at first.
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
