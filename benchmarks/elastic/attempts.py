"""An attempt's two parts at simulated workers, and the router's end of its messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.messages import TokenEvent, Tokens, WorkerMessage
from tandem.router.router import Router
from tandem.router.workers.worker import Worker

TOKEN = 0


class Clients(Protocol):
    """What simulated workers know of clients and tell them, beside the routers."""

    def blocks_of(self, request_id: str) -> Sequence[int]: ...

    def look(self, request_id: str) -> None:
        """A token or the end of this request has come to its router."""

    def count_gaps(self, request_id: str, num_gaps: int, num_slow: int) -> None: ...


@dataclass(eq=False, slots=True)
class Port:
    """A worker's stream to one router. Attributes: worker: the router's view of the worker."""

    router: Router
    worker: Worker | None = None
    num_reports: int = 0

    def send(self, message: WorkerMessage) -> None:
        if self.worker is not None:
            self.router.receive(self.worker, message)


@dataclass(eq=False, slots=True)
class Output:
    """An attempt at its decode worker.

    Attributes:
        num_tokens: KV tokens when it joins the batch.
        num_left: tokens to decode from there.
        next_index: place in the whole output of the next token to send.
        first_at: moment of the first token; None: the prompt is not computed yet.
        is_granted: the decode worker has pages for it.
        joined_at: the worker's step count before its first step; None: it does not run.
        counted_at, slow_before: step counts when its gaps were last counted.
    """

    port: Port
    request_id: str
    attempt: int
    blocks: Sequence[int]
    num_tokens: int
    num_left: int
    next_index: int
    first_at: float | None = None
    is_granted: bool = False
    is_over: bool = False
    joined_at: int | None = None
    counted_at: int = 0
    slow_before: int = 0
    on_granted: Callable[[], None] | None = None

    def send_tokens(self, num_tokens: int) -> None:
        if num_tokens > 0:
            event = TokenEvent(self.request_id, self.attempt, self.next_index, (TOKEN,) * num_tokens)
            self.next_index += num_tokens
            self.port.send(Tokens((event,)))


@dataclass(eq=False, slots=True)
class Prompt:
    """An attempt at its prefill worker.

    Attributes:
        num_tokens: of the prompt and the output so far.
        num_done: tokens cached or computed.
        is_started: it has locked its pages.
        is_last: its first token is the request's last.
    """

    output: Output
    decode_worker_id: str
    num_tokens: int
    is_last: bool
    num_done: int = 0
    num_cached: int = 0
    is_started: bool = False
    is_over: bool = False
