"""A client of a simulated cluster that resumes broken streams as the real client does."""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from tandem.client.progress import GO_ON_WITHIN_S, StreamProgress
from tandem.client.requests import make_request
from tandem.v1 import inference_pb2 as pb
from tests.fakes.simulation.calls import CallError, SimCall
from tests.fakes.simulation.router import SimRouter
from tests.fakes.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from tests.fakes.simulation.cluster import Simulation

# Time after which the client leaves a silent router, in seconds.
PATIENCE_S = 5.0


class SimClient:
    """
    Attributes:
        router, call: the current router and call; None while the client looks for a router.
        num_resumed: number of resumptions with earlier output.
        failure: a router's reason for an incomplete output, or "".
    """

    def __init__(
        self, simulation: "Simulation", prompt_ids: Sequence[int], max_tokens: int, priority: int, num_stop_ids: int
    ) -> None:
        self._simulation = simulation
        self._prompt_ids = tuple(prompt_ids)
        self._max_tokens = max_tokens
        self._stop_ids = range(num_stop_ids)
        # Some clients ask for prompt logprobs.
        self._asks = sum(prompt_ids) % 3 == 0
        request = make_request(
            list(prompt_ids),
            prompt_logprobs=1 if self._asks else None,
            priority=priority,
            max_tokens=max_tokens,
            stop_token_ids=self._stop_ids,
            ignore_eos=True,
        )
        self._progress = StreamProgress(request, None, simulation.clock)
        self._broken_since: float | None = None
        self.tokens: list[int] = []
        self._text = ""
        # Number of tokens after each message with tokens, with token and proof.
        self._ends: list[tuple[int, bytes, bytes]] = []
        self.router: SimRouter | None = None
        self.call: SimCall | None = None
        self.num_resumed = 0
        self.ended = self.cancelled = False
        self.failure = ""
        self.last: pb.GenerateResponse | None = None

    @property
    def is_lost(self) -> bool:
        return not self.ended and self.call is None

    @property
    def has_waited_enough(self) -> bool:
        stopped_at = self.router.stopped_at if self.router is not None else None
        return self.call is not None and stopped_at is not None and self._simulation.clock.now - stopped_at > PATIENCE_S

    @property
    def seeds(self) -> set[int]:
        """Return the seeds of the requests that may have given its output."""
        return self._simulation.samples.seeds_of(self._prompt_ids, self.tokens)

    def send(self, router: SimRouter) -> None:
        if not self.is_lost or not router.alive:
            return
        self.num_resumed += bool(self.tokens)
        self.router = router
        self.call = router.call(self._progress.next_request())

    def read(self) -> None:
        if self.call is None or self.router is None:
            return
        if not self.router.alive:
            self.break_off()
            return
        if not self.router.runs:
            return
        try:
            response = self.call.poll()
        except CallError as error:
            self.call = None
            if not self._progress.goes_on_after(error):
                self.ended, self.failure = True, str(error)
            return
        if response is not None:
            self._take(response)

    def leave(self) -> None:
        self._hang_up()
        self.ended = self.cancelled = True

    def break_off(self, num_tokens: int | None = None) -> None:
        """Break the stream, whatever the router is doing.

        Args:
            num_tokens: received tokens to keep, down to the end of a message; None: all.
        """
        if self.ended or self.call is None:
            return
        self._hang_up()
        if num_tokens is not None and num_tokens < len(self.tokens):
            while self._ends and self._ends[-1][0] > num_tokens:
                self._ends.pop()
            num_tokens, self._progress._token, self._progress._proof = self._ends[-1] if self._ends else (0, b"", b"")
            self.tokens = self.tokens[:num_tokens]
            self._text = self._text_of(self.tokens)
            self._progress._token_ids = list(self.tokens)
            self._progress._num_characters = len(self._text)
        now = self._simulation.clock.now
        if self._broken_since is None:
            self._broken_since = now
        if not self._progress.goes_on_after(CallError(grpc.StatusCode.UNAVAILABLE, "the stream broke")):
            assert now - self._broken_since >= GO_ON_WITHIN_S, "a client gives up that could go on"
            self.ended, self.failure = True, "nothing came for too long"

    def _hang_up(self) -> None:
        if self.call is not None and self.router is not None and self.router.alive:
            self.router.departed.append(self.call)
        self.call = None

    def _take(self, response: pb.GenerateResponse) -> None:
        assert response.index == len(self.tokens), "a token is lost or repeated"
        self._broken_since = None
        is_first = bool(response.token_ids) and not self.tokens
        expected = range(1, len(self._prompt_ids)) if self._asks and is_first else ()
        assert list(response.prompt_logprobs.logprobs) == [-p for p in expected], "they come once, whole, with a token"
        self.tokens += response.token_ids
        self._text += response.text
        self._progress.add(response)
        if response.token_ids:
            self._ends.append((len(self.tokens), self._progress._token, self._progress._proof))
            assert self.seeds, "a token is not what was sampled after those before it"
            assert self._text == self._text_of(self.tokens), "the text is not that of the tokens"
        if response.finish_reason:
            self._finish(response)

    def _finish(self, response: pb.GenerateResponse) -> None:
        self.ended, self.last = True, response
        assert response.usage.completion_tokens == len(self.tokens)
        has_stopped = self.tokens[-1] in self._stop_ids
        assert has_stopped or len(self.tokens) == self._max_tokens, "the output ends early"
        assert not any(token in self._stop_ids for token in self.tokens[:-1]), "the output goes on after its end"
        assert response.finish_reason == (pb.FINISH_REASON_STOP if has_stopped else pb.FINISH_REASON_LENGTH)
        assert self._text == self._text_of(self.tokens, is_whole=True), "the text is not that of the tokens"
        assert self.call is not None
        try:
            self.call.poll()
        except StopAsyncIteration:
            self.call = None
        else:
            raise AssertionError("a response after the last")

    def _text_of(self, token_ids: Sequence[int], is_whole: bool = False) -> str:
        """Decode the tokens; an incomplete character waits unless the output is whole."""
        tokenizer = ByteTokenizer()
        data = b"".join(tokenizer.token_bytes(token) for token in token_ids if token not in self._stop_ids)
        return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data, is_whole)
