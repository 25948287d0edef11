"""A client for OpenAI-compatible completions and chat completions."""

import asyncio
import errno
import json
import ssl
from array import array
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tandem.bench.clients.base import (
    Answer,
    BenchClient,
    Clock,
    EndpointConfig,
    EndpointError,
    RequestError,
    ServerDescription,
    count_chunks,
    messages,
)
from tandem.bench.clients.event_stream import EventParser
from tandem.bench.clients.http_connection import ConnectionLostError, HttpConnection
from tandem.bench.records import RequestRecord
from tandem.bench.workloads.base import PromptPart
from tandem.messages import TierHits

MAX_ERROR_CHARACTERS = 300
_PATHS = {"completions": "/completions", "chat": "/chat/completions"}
# Fields of a chat chunk with output.
_DELTA_TEXTS = ("reasoning_content", "reasoning", "content", "refusal")
_DELTA_CALLS = ("tool_calls", "function_call")
MAX_TOKENS = 2**31


class OpenAIBenchClient(BenchClient):
    """Uses one connection per request in flight, preferring the latest idle one."""

    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self._url = urlsplit(config.url.rstrip("/"))
        self._tls = _tls_context(config) if self._url.scheme == "https" else None
        self._model = config.model
        self._idle: list[HttpConnection] = []

    async def open(self) -> ServerDescription:
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                status, body = await self._get_models()
        except TimeoutError as error:
            raise EndpointError(f"{self._config.url} has not answered in time") from error
        except (OSError, ConnectionLostError) as error:
            raise EndpointError(f"no server answers at {self._config.url}: {_why(error)}") from error
        if status != 200 and not (self._model and status == 404):
            raise EndpointError(
                f"{self._config.url}/models has answered {status}: {_message(body)}{self._hint(status)}"
            )
        if not self._model:
            try:
                self._model = json.loads(body)["data"][0]["id"]
            except (ValueError, LookupError, TypeError) as error:
                raise EndpointError(f"{self._config.url}/models names no model: name one with --model") from error
        return ServerDescription(self._model)

    def prepare(self, parts: Sequence[PromptPart], num_output_tokens: int) -> bytes:
        stream_options = {"include_usage": True}
        if self._config.continuous_usage:
            stream_options["continuous_usage_stats"] = True
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": num_output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": stream_options,
        }
        if self._config.ignore_eos:
            body["ignore_eos"] = True
        if self._config.api == "chat":
            body["messages"] = [{"role": role, "content": text} for role, text in messages(parts)]
        elif parts[0].token_ids is not None:
            body["prompt"] = [token for part in parts for token in part.token_ids or ()]
        else:
            body["prompt"] = " ".join(part.text for part in parts)
        encoded = json.dumps(body, separators=(",", ":")).encode()
        return self._head("POST", _PATHS[self._config.api], len(encoded)) + encoded

    async def send(self, prepared: bytes, record: RequestRecord, clock: Clock) -> Answer:
        reading = _Reading(record, clock)
        record.sent_s = clock()
        connection: HttpConnection | None = None
        try:
            async with asyncio.timeout(self._config.timeout_s):
                while True:
                    connection = self._take_idle() or await self._connect()
                    try:
                        status = await connection.request(prepared, reading.feed)
                        break
                    except ConnectionLostError as error:
                        # The server may close an idle connection just as it is reused.
                        if connection.num_requests == 1 or not error.is_untouched:
                            raise
        except TimeoutError as error:
            raise RequestError("timeout", f"no end within {self._config.timeout_s:g} s") from error
        except OSError as error:
            raise RequestError("unreachable", _why(error)) from error
        except ConnectionLostError as error:
            raise RequestError("failed", str(error)) from error
        finally:
            reading.settle()
        self._free(connection)
        if status != 200:
            where = f" (to {connection.headers['location']})" if "location" in connection.headers else ""
            detail = f"{status}{where}: {_message(bytes(connection.error_body))}{self._hint(status)}"
            raise RequestError("refused" if status < 500 else "failed", detail)
        if reading.error:
            raise RequestError("failed", reading.error)
        if not reading.is_over:
            raise RequestError("failed", f"the stream ended without its end ([DONE]){_form(connection)}")
        if record.num_output_tokens and not record.times:
            detail = f"none of its chunks had anything of the {record.num_output_tokens} tokens (--continuous-usage)"
            raise RequestError("failed", detail)
        return Answer(None, "".join(reading.texts))

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()

    def _free(self, connection: HttpConnection) -> None:
        if connection.is_open:
            self._idle.append(connection)

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                return await HttpConnection.connect(self._url, self._tls)
        except TimeoutError as error:
            detail = f"no connection within {self._config.connect_timeout_s:g} s"
            raise RequestError("unreachable", detail) from error

    async def _get_models(self) -> tuple[int, bytes]:
        connection = await HttpConnection.connect(self._url, self._tls)
        body = bytearray()
        status = await connection.request(self._head("GET", "/models", 0), body.extend)
        self._free(connection)
        return status, bytes(body) or bytes(connection.error_body)

    def _hint(self, status: int) -> str:
        if status in (401, 403) and not self._config.api_key:
            return " (a key is given with --api-key)"
        if status in (404, 405) and not self._url.path:
            return " (the URL of an OpenAI-compatible server ends in /v1)"
        return ""

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self._url.path}{path} HTTP/1.1",
            f"host: {self._url.netloc.rpartition('@')[2]}",
            "accept: text/event-stream, application/json",
            "content-type: application/json",
            f"content-length: {length}",
        ]
        if self._config.api_key:
            lines.append(f"authorization: Bearer {self._config.api_key}")
        lines += [f"{name}: {value}" for name, value in self._config.headers]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class _Reading:
    def __init__(self, record: RequestRecord, clock: Clock) -> None:
        self._record = record
        self._clock = clock
        self._events = EventParser()
        self._usage_tokens: int | None = None
        # Every chunk so far had the server's running count.
        self._is_counted = True
        self._lengths: list[int] = []
        self._finish_reason = ""
        self._is_done = False
        self.texts: list[str] = []
        self.error = ""

    @property
    def is_over(self) -> bool:
        """True if the server marked the end: some send no [DONE], but a finish reason."""
        return self._is_done or bool(self._finish_reason)

    def feed(self, piece: bytes) -> None:
        # All events of a piece arrived together.
        moment = self._clock()
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self._is_done = True
                continue
            try:
                self._take(json.loads(data), moment)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                self.error = self.error or f"an event is not what OpenAI's API has ({error!r}): {data[:200]!r}"

    def _take(self, event: dict[str, Any], moment: float) -> None:
        if event.get("error"):
            self.error = self.error or str(event["error"])[:MAX_ERROR_CHARACTERS]
            return
        usage = event.get("usage")
        choices = event.get("choices") if usage else event["choices"]
        num_tokens = _count(usage["completion_tokens"]) if usage else None
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens")
            self._record.prompt_tokens = _count(usage["prompt_tokens"])
            self._record.cached_tokens = None if cached is None else _count(cached)
            tiers = (details.get(f"{tier}_tokens") or 0 for tier in ("host", "disk", "peer"))
            self._record.loaded_tokens = TierHits(*map(_count, tiers)).counts()
        if choices:
            self._finish_reason = self._finish_reason or choices[0].get("finish_reason") or ""
            self._take_choice(choices[0], num_tokens, moment)
        if num_tokens is not None:
            self._usage_tokens = num_tokens

    def _take_choice(self, choice: dict[str, Any], num_tokens: int | None, moment: float) -> None:
        text, num_characters = _output_of(choice)
        num_new = 0 if num_tokens is None else num_tokens - (self._usage_tokens or 0)
        if num_new < 0:
            raise ValueError("it counts fewer tokens than the one before")
        # A chunk without text has tokens if the server's running count grew. A single count in the last chunk says
        # nothing of that chunk.
        if not num_characters and not (num_new and self._is_counted):
            return
        self._record.times.append(moment)
        self._lengths.append(num_characters)
        self.texts.append(text)
        if num_tokens is None:
            self._is_counted = False
        elif self._is_counted:
            self._record.counts.append(num_new)

    def settle(self) -> None:
        record, lengths = self._record, self._lengths
        if self._is_counted and self._usage_tokens is not None and sum(record.counts) == self._usage_tokens:
            record.counted_by, record.num_output_tokens = "continuous_usage", self._usage_tokens
            return
        record.counts = array("I")
        if (
            self._usage_tokens is None
            and self._finish_reason == "length"
            and len(lengths) < record.wanted_output_tokens
        ):
            count_chunks(record, record.wanted_output_tokens, lengths)
            record.counted_by = "length"
        else:
            count_chunks(record, self._usage_tokens, lengths)


def _output_of(choice: dict[str, Any]) -> tuple[str, int]:
    """Return a chunk's text and the characters of all its output. Raises TypeError."""
    if not (delta := choice.get("delta")):
        text = choice.get("text") or ""
        return text + "", len(text)
    texts = [delta[name] for name in _DELTA_TEXTS if delta.get(name)]
    # Some servers send contents as lists of parts.
    text = "".join(text if isinstance(text, str) else json.dumps(text) for text in texts)
    calls = [delta[name] for name in _DELTA_CALLS if delta.get(name)]
    return text, len(text) + sum(len(json.dumps(call)) for call in calls)


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < MAX_TOKENS:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


def _form(connection: HttpConnection) -> str:
    if encoding := connection.headers.get("content-encoding"):
        return f": it is compressed ({encoding}), which was not asked for"
    kind = connection.headers.get("content-type", "")
    return "" if not kind or kind.startswith("text/event-stream") else f": it is {kind}, not a stream of events"


def _tls_context(config: EndpointConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=config.tls_ca or None)
    if config.tls_cert:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    return context


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:MAX_ERROR_CHARACTERS]
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:MAX_ERROR_CHARACTERS]


def _why(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number == errno.EMFILE:
        return "this process may have no more files and connections open: raise `ulimit -n`, or use more --processes"
    if number == errno.EADDRNOTAVAIL:
        return "this machine has no free port left for another connection to the server"
    return getattr(error, "strerror", None) or str(error)


def parse_url(url: str) -> SplitResult:
    """Raises ValueError if the URL is not an OpenAI-compatible base URL."""
    parsed = urlsplit(url)
    if parsed.scheme not in ("http", "https") or not parsed.hostname or parsed.query or parsed.fragment:
        raise ValueError(f"an HTTP endpoint is http://HOST[:PORT]/v1, not {url!r}")
    if parsed.port == 0:
        raise ValueError(f"a port is from 1 to 65535, not as in {url!r}")
    return parsed
