"""Sends inputs at their bounds, and just beyond, to a router with scripted workers, over sockets."""

import asyncio
import contextlib
import http.client
import json
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tandem.deploy.supervise import control
from tandem.engine.weights import headers as safetensors
from tandem.engine.weights.gguf import header as gguf_header
from tandem.kvtransfer.transports import listener as page_listener
from tandem.kvtransfer.transports.peer_socket import TAKEN
from tandem.router import resumption
from tandem.router.errors import OverloadedError
from tandem.router.frontends import background, intake, kept_responses, watch_places
from tandem.router.frontends.openai import closing_transport, http_connection, listener, middleware
from tandem.router.process import RouterProcess
from tandem.rpc import metrics_server
from tandem.rpc.metrics_server import MetricsServer
from tandem.v1 import inference_pb2 as pb
from tests.fakes.attacked_router import GENERATE, KEY
from tests.fakes.raw_http import error_of, read_all

TIMEOUT_S = 30.0
# Stands for the bounds on time.
SHORT_S = 0.3
SHORT_SMALL_MESSAGE_S, SHORT_MESSAGE_S = 1.0, 3.0
# Longer than some refusals take.
REFUSED_S = 3.0
MAX_CONNECTIONS = 24
EVENT_ID_CHARACTERS = 44
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBEDDINGS, MESSAGES = "/v1/embeddings", "/v1/messages"
WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


@dataclass(frozen=True)
class Place:
    """A running router. Attributes: patch: shortens its times."""

    process: RouterProcess
    grpc: str
    http: str
    max_body_bytes: int
    patch: pytest.MonkeyPatch

    def shorten(self, module: ModuleType, *names: str) -> None:
        for name in names:
            self.patch.setattr(module, name, SHORT_S)

    def connect(self) -> socket.socket:
        return _connect(self.http)

    def ask(self, request: bytes) -> bytes:
        """Sends bytes; returns all that comes until the connection closes."""
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(request)
            return read_all(connection)

    def status(self, request: bytes) -> int:
        return int(self.ask(request).split()[1])

    def post(self, path: str, body: dict[str, Any] | bytes, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Returns the status and the error's message."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.http, timeout=TIMEOUT_S)
        own = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        with contextlib.closing(connection):
            connection.request("POST", path, content, own | (headers or {}))
            answer = connection.getresponse()
            said = json.loads(answer.read())
        return answer.status, said["error"]["message"] if answer.status >= 400 else ""

    @contextlib.contextmanager
    def channel(self) -> Iterator[Any]:
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(
            self.grpc, [*options, ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        ) as channel:
            yield channel

    def refusal(self, method: str, message: bytes) -> tuple[str, str]:
        """Returns the code and the message of a unary call, or of a stream's first response."""
        with self.channel() as channel:
            call = channel.unary_stream(method)(
                message, timeout=TIMEOUT_S, metadata=(("authorization", f"Bearer {KEY}"),)
            )
            try:
                next(call)
            except grpc.RpcError as error:
                return error.code().name, error.details()
            return "OK", ""


Trial = Callable[[Place], None]


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def is_closed(connection: socket.socket, within_s: float = TIMEOUT_S) -> bool:
    connection.settimeout(within_s)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


# --- bodies and messages -----------------------------------------------------------------------------------------


def numbered(
    limit: int, body: Callable[[int], dict[str, Any] | bytes], *, path: str = COMPLETIONS, says: str, at: str = ""
) -> Trial:
    """Tries `limit` and one more.

    Args:
        body: of a size.
        says: part of the refusal, with {} for the limit.
        at: the next check's refusal of the body at its bound; "": it is served.
    """

    def trial(place: Place) -> None:
        assert place.post(path, body(limit)) == (400 if at else 200, at)
        status, message = place.post(path, body(limit + 1))
        assert status == 400 and says.format(limit) in message, message

    return trial


def whole_body(place: Place) -> None:
    limit = place.max_body_bytes
    assert place.post(COMPLETIONS, BODY.ljust(limit)) == (200, "")
    assert place.post(COMPLETIONS, BODY.ljust(limit + 1)) == (413, f"the body has more than {limit} bytes")


def message(place: Place) -> None:
    sampling = pb.SamplingParams(max_tokens=1)
    asked = pb.GenerateRequest(text="a", sampling=sampling).SerializeToString()

    def padded(num_bytes: int) -> bytes:
        # Unknown field 1000, of four bytes' length.
        num_padding = num_bytes - len(asked) - 6
        length = bytes((num_padding >> shift & 0x7F) | 0x80 for shift in (0, 7, 14)) + bytes((num_padding >> 21,))
        return asked + b"\xc2\x3e" + length + bytes(num_padding)

    limit = place.max_body_bytes
    assert place.refusal(GENERATE, padded(limit)) == ("OK", "")
    code, said = place.refusal(GENERATE, padded(limit + 1))
    assert (code, str(limit) in said) == ("RESOURCE_EXHAUSTED", True), said


# --- the HTTP port -----------------------------------------------------------------------------------------------


def _padded_head(num_bytes: int) -> bytes:
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    return head + b"x: ".ljust(num_bytes - len(head) - 4, b"y") + b"\r\n\r\n"


def head(place: Place) -> None:
    assert place.status(_padded_head(http_connection.MAX_HEAD_BYTES)) == 200
    assert place.status(_padded_head(http_connection.MAX_HEAD_BYTES + 1)) == 431


def headers(place: Place) -> None:
    def with_headers(number: int) -> bytes:
        return b"GET /health HTTP/1.1\r\nconnection: close\r\n" + b"x: y\r\n" * (number - 1) + b"\r\n"

    assert place.status(with_headers(http_connection.MAX_HEADERS)) == 200
    assert place.status(with_headers(http_connection.MAX_HEADERS + 1)) == 431


def url(place: Place) -> None:
    def with_url(num_bytes: int) -> bytes:
        return b"GET " + b"/health?".ljust(num_bytes, b"x") + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"

    assert place.status(with_url(http_connection.MAX_URL_BYTES)) == 200
    assert place.status(with_url(http_connection.MAX_URL_BYTES + 1)) == 414


_CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"authorization: Bearer %s\r\ntransfer-encoding: chunked\r\n\r\n" % KEY.encode()
)
_END = b"0\r\n\r\n"


def trailers(place: Place) -> None:
    chunk = b"%x\r\n%s\r\n" % (len(BODY), BODY)
    assert place.status(_CHUNKED + chunk + _END) == 200
    assert error_of(place.ask(_CHUNKED + chunk + b"0\r\na: b\r\n\r\n"))[0] == 400


def framing(place: Place) -> None:
    num_body_bytes = 800
    limit = http_connection.MAX_HEAD_BYTES + num_body_bytes // http_connection.BODY_BYTES_PER_FRAMING_BYTE

    def with_framing(num_bytes: int) -> bytes:
        body = BODY.ljust(num_body_bytes)
        beside = len(_CHUNKED) + len(b"320;=\r\n\r\n") + len(_END)
        assert num_body_bytes == 0x320
        return _CHUNKED + b"320;" + b"a" * (num_bytes - beside) + b"=\r\n" + body + b"\r\n" + _END

    assert place.status(with_framing(limit)) == 200
    assert error_of(place.ask(with_framing(limit + 1)))[0] == 400


def pieces(place: Place) -> None:
    # Of one byte each: 1,040 are 1,024 and one for each 64 of their bytes.
    limit = http_connection.MAX_PIECES * 65 // 64
    assert limit == http_connection.MAX_PIECES + limit // http_connection.MIN_BYTES_PER_PIECE

    def in_pieces(number: int) -> bytes:
        return _CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY.ljust(number)) + _END

    assert place.status(in_pieces(limit)) == 200
    assert error_of(place.ask(in_pieces(limit + 1)))[0] == 400


def time_of_a_head(place: Place) -> None:
    place.shorten(http_connection, "HEAD_TIMEOUT_S")
    for said in (b"", GET[:10]):
        with place.connect() as silent:
            silent.sendall(said)
            assert is_closed(silent)
    with place.connect() as prompt:
        prompt.sendall(GET)
        assert prompt.recv(65536).startswith(b"HTTP/1.1 200 ")


def gap_in_a_body(place: Place) -> None:
    place.shorten(middleware, "BODY_TIMEOUT_S")
    with place.connect() as slow:
        slow.sendall(_CHUNKED + b"1\r\n{\r\n")
        assert error_of(read_all(slow)) == (408, f"no part of the body came for {SHORT_S:g} s")


def time_of_a_body(place: Place) -> None:
    place.shorten(middleware, "WHOLE_BODY_TIMEOUT_S")
    with place.connect() as slow:
        slow.sendall(_CHUNKED)
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                # Each part is in time.
                slow.sendall(b"1\r\n \r\n")
                if select.select([slow], [], [], SHORT_S / 20)[0]:
                    break
        assert error_of(read_all(slow)) == (408, f"the body took longer than {SHORT_S:g} s")


def rest_of_a_refused_body(place: Place) -> None:
    with place.connect() as before:
        before.sendall(_CHUNKED.replace(KEY.encode(), b"wrong") + b"1\r\n{\r\n")
        assert error_of(read_all(before))[0] == 401
        # It is heard for LINGER_S.
        before.sendall(b"1\r\n \r\n")
    place.shorten(closing_transport, "LINGER_S")
    with place.connect() as sending:
        sending.sendall(_CHUNKED.replace(KEY.encode(), b"wrong"))
        assert error_of(read_all(sending))[0] == 401

        def is_reset() -> bool:
            try:
                sending.sendall(b"1\r\n \r\n")
            except ConnectionError:
                return True
            return False

        until(is_reset)


def discarded_bytes(place: Place) -> None:
    now = 0.0
    limit = closing_transport.MAX_DISCARDED_BYTES_PER_S
    budget = closing_transport.DiscardBudget(limit, lambda: now)
    assert budget.take(limit) == 0.0
    assert budget.take(limit // 2) == 0.5, "seconds until more is read"


def second_request(place: Place) -> None:
    answers = place.ask(GET.replace(b"host", b"connection: close\r\nhost"))
    assert answers.count(b"HTTP/1.1 ") == 1
    with place.connect() as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n\r\n" % KEY.encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(GET)
        with contextlib.suppress(ConnectionError):
            assert b"HTTP/1.1 " not in read_all(connection)


@contextlib.contextmanager
def _full_port(place: Place) -> Iterator[list[socket.socket]]:
    """Holds all connections of the HTTP port; none may give way."""
    place.patch.setattr(listener, "MIN_IDLE_S", 1000.0)
    place.shorten(listener, "LINGER_S")
    with contextlib.ExitStack() as held:
        open_ones: list[socket.socket] = []

        def is_full() -> bool:
            connection = place.connect()
            if is_closed(connection, within_s=0.02) or len(open_ones) == MAX_CONNECTIONS:
                connection.close()
                return True
            held.enter_context(connection)
            open_ones.append(connection)
            return len(open_ones) == MAX_CONNECTIONS

        # Connections of earlier trials may keep their places a moment longer.
        time.sleep(0.1)
        until(is_full)
        assert len(open_ones) == MAX_CONNECTIONS
        yield open_ones


def connections(place: Place) -> None:
    with _full_port(place), place.connect() as late:
        late.sendall(GET)
        assert error_of(read_all(late)) == (503, f"{MAX_CONNECTIONS} connections are open already; try again later")


def refused_connections(place: Place) -> None:
    place.patch.setattr(listener, "MAX_REFUSED", 4)
    with _full_port(place), contextlib.ExitStack() as held:
        # Refused connections of earlier trials are gone.
        time.sleep(2 * SHORT_S)
        place.patch.setattr(listener, "LINGER_S", REFUSED_S)

        def answer() -> bytes:
            connection = held.enter_context(place.connect())
            with contextlib.suppress(ConnectionError):
                return connection.recv(65536)
            return b""

        answers = [answer() for _ in range(6)]
    assert [a.startswith(b"HTTP/1.1 503 ") for a in answers] == [True] * 4 + [False] * 2


def idle_connection_of_a_full_port(place: Place) -> None:
    with _full_port(place) as held:
        place.patch.setattr(listener, "MIN_IDLE_S", 0.0)
        with place.connect() as late:
            late.sendall(GET)
            assert late.recv(65536).startswith(b"HTTP/1.1 200 ")
            assert is_closed(held[0])
            assert not is_closed(held[-1], within_s=0.05)


# --- the gRPC port -----------------------------------------------------------------------------------------------


def _health(num_bytes: int) -> bytes:
    return health_pb2.HealthCheckRequest(service="x" * (num_bytes - 3)).SerializeToString()


def health_message(place: Place) -> None:
    limit = intake.MAX_SMALL_BYTES
    assert place.refusal(CHECK, _health(limit))[0] == "NOT_FOUND"
    assert place.refusal(CHECK, _health(limit + 1)) == (
        "RESOURCE_EXHAUSTED",
        f"the message has {limit + 1} bytes, more than {limit}",
    )


def unfinished_message(method: str, limit_s: float) -> Trial:
    """A call whose message never comes. Args: limit_s: as `place` has it."""

    def trial(place: Place) -> None:
        ended = threading.Event()

        def nothing() -> Iterator[bytes]:
            ended.wait(TIMEOUT_S)
            yield from ()

        with place.channel() as channel:
            call = channel.stream_unary(method)
            with pytest.raises(grpc.RpcError) as refused:
                call(nothing(), timeout=TIMEOUT_S, metadata=(("authorization", f"Bearer {KEY}"),))
            ended.set()
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert refused.value.details() == f"the request did not come within {limit_s:g} s"

    return trial


def watches(place: Place) -> None:
    per_connection = watch_places.MAX_WATCHES_PER_CONNECTION
    with place.channel() as channel:
        calls = [channel.unary_stream(WATCH)(b"", timeout=TIMEOUT_S) for _ in range(per_connection)]
        for call in calls:
            next(call)
        with pytest.raises(grpc.RpcError) as refused:
            next(channel.unary_stream(WATCH)(b"", timeout=TIMEOUT_S))
        for call in calls:
            call.cancel()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.details().startswith(f"{per_connection} calls of Watch are open on this connection")


def places_of_watches(place: Place) -> None:
    """Many connections' worth, at the table that all ports share."""
    places = watch_places.WatchPlaces(lambda authorization: authorization == KEY)

    def refusal(number: int, host: str, key: str | None = None) -> str:
        """Takes eight places of each connection."""
        return places.take(f"ipv4:{host}:{number // watch_places.MAX_WATCHES_PER_CONNECTION}", key)

    of_strangers = watch_places.MAX_WATCHES - watch_places.NUM_RESERVED
    per_address = watch_places.MAX_WATCHES_PER_ADDRESS
    for number in range(of_strangers):
        assert not refusal(number % per_address, f"10.0.0.{number // per_address}")
    assert "calls of Watch are open from this address" in refusal(per_address, "10.0.0.0")
    assert f"{of_strangers} calls of Watch are open" in refusal(0, "10.1.0.0")
    for number in range(watch_places.NUM_RESERVED):
        assert not refusal(number, "10.2.0.0", KEY)
    assert f"{watch_places.MAX_WATCHES} calls of Watch are open" in refusal(0, "10.3.0.0", KEY)


# --- a worker's metrics port -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _metrics() -> Iterator[MetricsServer]:
    from prometheus_client import CollectorRegistry

    server = MetricsServer(CollectorRegistry(), "127.0.0.1")
    try:
        yield server
    finally:
        server.close()


def metrics_head(place: Place) -> None:
    head = b"GET /metrics HTTP/1.1\r\nhost: x\r\nx: "
    limit = metrics_server.MAX_HEAD_BYTES
    with _metrics() as server:
        for num_bytes, status in ((limit, b"200"), (limit + 1, b"431")):
            with _connect(server.address) as reader:
                end = b"\r\n\r\n"
                reader.sendall(head.ljust(num_bytes - len(end), b"y") + end)
                assert reader.recv(65536).split()[1] == status, num_bytes


def metrics_connections(place: Place) -> None:
    limit = metrics_server.MAX_CONNECTIONS
    with _metrics() as server, contextlib.ExitStack() as held:
        crowd = [held.enter_context(_connect(server.address)) for _ in range(limit)]
        assert not is_closed(crowd[0], within_s=0.1)
        held.enter_context(_connect(server.address))
        assert is_closed(crowd[0])
        assert not is_closed(crowd[1], within_s=0.1)


def metrics_time(place: Place) -> None:
    place.shorten(metrics_server, "REQUEST_TIMEOUT_S")
    with _metrics() as server, _connect(server.address) as silent:
        silent.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert is_closed(silent)


def all_of(*trials: Trial) -> Trial:
    def trial(place: Place) -> None:
        for one in trials:
            one(place)

    return trial


# --- resumed and kept --------------------------------------------------------------------------------------------


def resume_token(place: Place) -> None:
    limit = resumption.DIGEST_BYTES + resumption.MAX_TOKEN_BYTES

    def refusal(num_bytes: int) -> str:
        asked = pb.GenerateRequest(text="a", resume=pb.Resume(token=bytes(num_bytes), token_ids=[1]))
        code, message = place.refusal(GENERATE, asked.SerializeToString())
        assert code == "INVALID_ARGUMENT"
        return message

    assert refusal(limit) == "the resume token is from another cluster"
    assert refusal(limit + 1).startswith("the resume token is malformed")


def event_id(place: Place) -> None:
    def status(text: str) -> int:
        body = {"prompt": "a", "max_tokens": 1, "stream": True}
        return place.post(COMPLETIONS, body, {"last-event-id": text})[0]

    longest = f"{'A' * 22}.{'9' * 9}.{'9' * 9}.2"
    assert len(longest) == EVENT_ID_CHARACTERS and status(longest) == 404
    assert status(longest.replace("99.2", "999.2")) == 400


def background_runs(place: Place) -> None:
    async def trial() -> None:
        responses = background.BackgroundResponses()
        for number in range(background.MAX_RUNS):
            responses.check_room()
            responses.start(str(number), "", lambda: None, asyncio.sleep(TIMEOUT_S))  # type: ignore[arg-type, return-value]
        with pytest.raises(OverloadedError):
            responses.check_room()
        await responses.close()

    asyncio.run(trial())


def kept(place: Place) -> None:
    now = 0.0
    responses = kept_responses.KeptResponses(lambda: now)

    def keep(name: object, num_bytes: int = 0) -> None:
        content = bytes(num_bytes)
        responses.keep(str(name), "", answer=content, input_items=b"", output_items=b"", previous=None)

    for number in range(kept_responses.MAX_RESPONSES):
        keep(number)
    assert responses.num_responses == kept_responses.MAX_RESPONSES and responses.find("1", "")
    keep("one more")
    assert responses.num_responses == kept_responses.MAX_RESPONSES and not responses.find("0", "")
    now += kept_responses.MAX_AGE_S
    assert responses.find("one more", "")
    now += kept_responses.MAX_AGE_S + 1
    assert not responses.find("one more", "") and responses.num_bytes == 0
    keep("large", kept_responses.MAX_BYTES - 2 * kept_responses.OVERHEAD_BYTES)
    keep("small")
    assert responses.num_bytes == kept_responses.MAX_BYTES and responses.num_responses == 2
    keep("small again")
    assert not responses.find("large", "") and responses.num_responses == 2


# --- between processes -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _page_port() -> Iterator[page_listener.Listener]:
    listening = page_listener.Listener("127.0.0.1")

    def accept() -> None:
        with contextlib.suppress(OSError):
            listening.accept()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listening
    finally:
        listening.wake()
        thread.join(TIMEOUT_S)
        listening.close()
        assert not thread.is_alive()


def strangers_at_a_page_port(place: Place) -> None:
    place.patch.setattr(page_listener, "KNOCK_TIMEOUT_S", 1000.0)
    with _page_port() as listening, contextlib.ExitStack() as held:
        address = f"127.0.0.1:{listening.endpoint.port}"
        crowd = [held.enter_context(_connect(address)) for _ in range(page_listener.MAX_STRANGERS)]
        assert not is_closed(crowd[0], within_s=0.1)
        held.enter_context(_connect(address))
        assert is_closed(crowd[0])
        assert not is_closed(crowd[1], within_s=0.1)
    place.shorten(page_listener, "KNOCK_TIMEOUT_S")
    with _page_port() as listening, _connect(f"127.0.0.1:{listening.endpoint.port}") as silent:
        assert is_closed(silent)


def knocks_at_a_page_port(place: Place) -> None:
    def knock(listening: page_listener.Listener) -> socket.socket:
        connection = _connect(f"127.0.0.1:{listening.endpoint.port}")
        connection.sendall(listening.endpoint.knock)
        return connection

    def taken(connection: socket.socket) -> bool:
        with contextlib.suppress(ConnectionError):
            return connection.recv(len(TAKEN)) == TAKEN
        return False

    place.patch.setattr(page_listener, "TOKEN_TIMEOUT_S", 1000.0)
    with _page_port() as listening, contextlib.ExitStack() as held:
        first = [held.enter_context(knock(listening)) for _ in range(page_listener.MAX_KNOCKED)]
        assert all(map(taken, first))
        late = held.enter_context(knock(listening))
        taken(late)
        assert is_closed(late) and not any(is_closed(one, within_s=0.05) for one in first)
    place.shorten(page_listener, "TOKEN_TIMEOUT_S")
    with _page_port() as listening, knock(listening) as silent:
        assert taken(silent) and is_closed(silent)


def control_question(place: Place) -> None:
    limit = control._MAX_LINE_BYTES
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "control"

        def answer(line: bytes) -> bytes:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(TIMEOUT_S)
                connection.connect(str(path))
                connection.sendall(line)
                with contextlib.suppress(ConnectionError):
                    return read_all(connection)
                return b""

        place.shorten(control, "_ASK_TIMEOUT_S")
        server = control.ControlServer(path, lambda asked: iter([{"fine": True}]))
        try:
            whole = b"{}".ljust(limit - 1) + b"\n"
            assert b"fine" in answer(whole)
            assert b"fine" not in answer(b"{" + b" " * (limit - 1) + b"}\n"), "read to its end it would be one"
            assert answer(b"{") == b"", "closed in time"
        finally:
            server.close()


# --- files -------------------------------------------------------------------------------------------------------


def gguf_counts(place: Place) -> None:
    def refusal(num_tensors: int, num_fields: int, num_name_bytes: int) -> str:
        content = b"GGUF" + struct.pack("<IQQQ", 3, num_tensors, num_fields, num_name_bytes)
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(content + b"x" * num_name_bytes)
            file.flush()
            with pytest.raises(ValueError) as refused:
                gguf_header.check_header(Path(file.name))
        return str(refused.value)

    at = (gguf_header.MAX_TENSORS, gguf_header.MAX_FIELDS, gguf_header.MAX_NAME_BYTES)
    assert "more than" not in refusal(*at)
    for place_of_one, limit in enumerate(at):
        beyond = [number + (place_of_one == other) for other, number in enumerate(at)]
        assert f"more than {limit}" in refusal(*beyond)


def safetensors_header(place: Place) -> None:
    def refusal(num_bytes: int) -> str:
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            file.write(struct.pack("<Q", num_bytes) + b"[]".ljust(num_bytes))
            file.flush()
            with pytest.raises(ValueError) as refused:
                safetensors.tensor_names(Path(file.name))
        return str(refused.value)

    assert str(safetensors.MAX_HEADER_BYTES + 1) in refusal(safetensors.MAX_HEADER_BYTES + 1)
    assert str(safetensors.MAX_HEADER_BYTES) not in refusal(safetensors.MAX_HEADER_BYTES)
