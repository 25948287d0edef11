"""A router with scripted workers, an injected clock, and clients that read everything available."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tandem.messages import FirstToken, TokenEvent, Tokens
from tandem.router.config import RouterConfig
from tandem.router.frontends.access import Access
from tandem.router.frontends.generation import Generation
from tandem.router.policies.base import RoutingPolicy
from tandem.router.process import make_policy
from tandem.router.requests.tracker import RequestTracker
from tandem.router.router import Router
from tandem.router.text.output_text import OutputText
from tandem.sampling_params import SamplingParams
from tests.fakes.clock import FakeClock
from tests.fakes.request_spec import request_spec
from tests.fakes.routing import FirstLeastLoaded
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.tokenizer import ByteTokenizer


class RouterHarness:
    """
    Attributes:
        p, d: prefill and decode workers, all linked.
    """

    def __init__(
        self, num_prefill: int = 1, num_decode: int = 1, policy: RoutingPolicy | None = None, **config: Any
    ) -> None:
        """Args: policy: None: the policy named in `config`, or a deterministic least-loaded one."""
        self.clock = FakeClock()
        config = {"heartbeat_timeout_s": 1.0, "stall_timeout_s": 5.0, "max_attempts": 3, **config}
        self.config = RouterConfig("nowhere", "fake", 400, **config)
        self.router = Router(
            self.config,
            policy or (make_policy(self.config.routing) if "routing" in config else FirstLeastLoaded()),
            self.clock,
        )
        self.p = [ScriptedWorker(self.router, f"p{i}", "prefill") for i in range(num_prefill)]
        self.d = [ScriptedWorker(self.router, f"d{i}", "decode") for i in range(num_decode)]
        for worker in self.p:
            worker.link_to(*(f"d{i}" for i in range(num_decode)))

    def request(
        self,
        max_tokens: int = 5,
        prompt_ids: tuple[int, ...] = (1, 2, 3),
        stop_strings: tuple[str, ...] = (),
        **fields: Any,
    ) -> "Client":
        """Args: fields: further arguments of `request_spec`."""
        spec = request_spec(prompt_ids, SamplingParams(max_tokens), **fields)
        return Client(self.router, self.router.make_tracker(spec), stop_strings)


class Client:
    def __init__(self, router: Router, tracker: RequestTracker, stop_strings: tuple[str, ...] = ()) -> None:
        self.tracker = tracker
        self.tokens: list[int] = []
        self.task = asyncio.create_task(self._read(router, stop_strings))

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _read(self, router: Router, stop_strings: tuple[str, ...]) -> None:
        output = OutputText(ByteTokenizer(), (), stop_strings)  # type: ignore[arg-type]
        with Generation(router, Access((), 0), self.tracker, output) as generation:
            while (piece := await generation.next_piece()) is not None:
                self.tokens += piece.token_ids


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test with a deadline."""

    def wrapper() -> None:
        async def with_deadline() -> None:
            async with asyncio.timeout(10):
                await test()

        asyncio.run(with_deadline())

    wrapper.__name__ = test.__name__
    wrapper.__doc__ = test.__doc__
    return wrapper


def first_token(request_id: str, attempt: int, index: int, token_id: int, reason: str = "") -> FirstToken:
    return FirstToken(request_id, attempt, index, token_id, reason, 0, 1)


def step_tokens(request_id: str, attempt: int, index: int, *token_ids: int) -> Tokens:
    return Tokens((TokenEvent(request_id, attempt, index, token_ids),))
