"""HTTP frontends of several routers over shared scripted workers, without sockets and with a known output."""

import asyncio
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.messages import NO_HITS, Admit, Finished, FirstToken, TokenEvent, Tokens
from tandem.router.config import RouterConfig
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.app import make_app
from tandem.router.recalls import SETTLE_S
from tandem.router.router import Router
from tandem.sampling_params import SamplingParams, TokenLogprobs, TopLogprob
from tests.fakes.clock import FakeClock
from tests.fakes.keeping_worker import KeepingWorker
from tests.fakes.router_harness import settle
from tests.fakes.routing import FirstLeastLoaded
from tests.fakes.tokenizer import ByteTokenizer

KEYS = ("first-key", "second-key")
PROMPT = "hi"


class HttpRouter:
    def __init__(self, tokenizer: Any, max_model_len: int = 400, **config: Any) -> None:
        settings = RouterConfig("nowhere", "fake", max_model_len, cluster_token="secret", api_keys=KEYS, **config)
        self.clock = FakeClock()
        self.router = Router(settings, FirstLeastLoaded(), self.clock)
        self.frontend = Frontend(self.router, tokenizer, settings)
        self.clock.advance(SETTLE_S)

    @functools.cached_property
    def app(self) -> Any:
        """Return the application, made on first use: it takes 0.1 s and most tests use one router."""
        return make_app(self.frontend)

    def post(self, body: dict[str, Any], last_event_id: str = "", key: str = KEYS[0], path: str = "") -> "HttpCall":
        """Args: path: "": by the body."""
        path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
        return HttpCall(self.app, path, body, last_event_id, key)


class HttpCluster:
    """
    Attributes:
        routers: routers that do not know of each other.
        output: the model's tokens for any prompt.
        cached_len, loaded: cached tokens reported for each prompt, and those among them from the page store.
    """

    cached_len = 0
    loaded = NO_HITS

    def __init__(
        self,
        output: Sequence[int],
        num_routers: int = 2,
        tokenizer: Any = None,
        max_model_len: int = 400,
        **config: Any,
    ) -> None:
        self.output = output
        # The scripted workers' pages hold 4 tokens.
        num_pages = -(-max_model_len // 4)
        self.p = KeepingWorker("p", "prefill", num_pages=num_pages)
        self.d = KeepingWorker("d", "decode", num_pages=num_pages)
        self.routers = [HttpRouter(tokenizer or ByteTokenizer(), max_model_len, **config) for _ in range(num_routers)]
        for router in self.routers:
            for worker in (self.p, self.d):
                worker.join(router.router)
        self.p.link_to("d")

    async def serve(self, num_tokens: int, step: int = 1) -> None:
        """Serve the latest request until its output has `num_tokens` tokens or ends.

        Args:
            step: tokens per message of the decode worker.
        """
        await settle()
        admit: Admit = self.d.of(Admit)[-1]
        key, start = (admit.request_id, admit.attempt), len(admit.output_ids)
        for index in range(start, num_tokens):
            reason = admit.sampling.finish_reason(self.output[index], index + 1)
            if index == start:
                logprobs = self._logprobs(admit.sampling, index, index + 1)
                token_id, found = self.output[index], (self.cached_len, 1)
                self.p.say(FirstToken(*key, index, token_id, reason, *found, logprobs=logprobs, loaded=self.loaded))
                if not reason:
                    self.d.say(Tokens((TokenEvent(*key, index, (self.output[index],), logprobs),)))
            elif (index - start) % step == 0 or reason or index == num_tokens - 1:
                first = index - (index - start - 1) % step
                logprobs = self._logprobs(admit.sampling, first, index + 1)
                self.d.say(Tokens((TokenEvent(*key, first, tuple(self.output[first : index + 1]), logprobs),)))
                if reason:
                    self.d.say(Finished(*key, reason, index + 1, 0, 1))
            # Let the client read, so that it gets one event at a time.
            await settle()
            if reason:
                return

    def _logprobs(self, sampling: SamplingParams, start: int, end: int) -> tuple[TokenLogprobs, ...]:
        """Returns -index for each token, and the token itself as each alternative."""
        if sampling.num_logprobs is None:
            return ()
        return tuple(
            TokenLogprobs(-float(index), (TopLogprob(self.output[index], -float(index)),) * sampling.num_logprobs)
            for index in range(start, end)
        )


@dataclass(slots=True)
class Event:
    id: str
    content: dict[str, Any]

    @property
    def choice(self) -> dict[str, Any]:
        return self.content["choices"][0]

    @property
    def text(self) -> str:
        if not self.content["choices"]:
            return ""
        return self.choice["text"] if "text" in self.choice else self.choice["delta"].get("content", "")


@dataclass
class Stream:
    status: int = 0
    body: bytes = b""
    events: list[Event] = field(default_factory=list)
    is_done: bool = False

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


class HttpCall:
    """A client request that reads everything available."""

    def __init__(self, app: Any, path: str, body: dict[str, Any], last_event_id: str, key: str) -> None:
        self.stream = Stream()
        self._app = app
        self._path = path
        self._gone = asyncio.Event()
        self.task = asyncio.create_task(self._run(body, last_event_id, key))

    async def finish(self) -> Stream:
        await asyncio.wait_for(self.task, 5.0)
        return self.stream

    async def leave(self) -> Stream:
        self._gone.set()
        return await self.finish()

    async def _run(self, body: dict[str, Any], last_event_id: str, key: str) -> None:
        content = json.dumps(body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            (b"authorization", f"Bearer {key}".encode()),
        ]
        if last_event_id:
            headers.append((b"last-event-id", last_event_id.encode()))
        scope = {
            "type": "http",
            "method": "POST",
            "path": self._path,
            "query_string": b"",
            "headers": headers,
            "state": {},
        }
        messages = [{"type": "http.request", "body": content}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            stream = self.stream
            stream.status = message.get("status", stream.status)
            chunk = message.get("body", b"")
            stream.body += chunk
            event_id = ""
            for line in chunk.decode().splitlines():
                name, _, value = line.partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data" and value == "[DONE]":
                    stream.is_done = True
                elif name == "data":
                    stream.events.append(Event(event_id, json.loads(value)))

        await self._app(scope, receive, send)
