"""The page is open and without data; its data need the key and are bounded."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tandem.router.config import RouterConfig
from tandem.router.frontends.page import routes
from tandem.router.frontends.page.assets import FILES, LIBRARY_FILES, PAGES, load_asset
from tandem.router.frontends.page.routes import PART_BYTES, AssetResponse
from tandem.router.observe.live import feed
from tandem.router.observe.live.feed import MAX_VIEWERS
from tandem.router.observe.live.snapshot import Frame, SnapshotBuilder
from tandem.router.process import RouterProcess
from tests.fakes.http_cluster import HttpCluster
from tests.fakes.http_requests import http_request
from tests.fakes.router_harness import run

KEY = "a-key"
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
FRAME_BYTES = 250_000


@contextmanager
def router(model_dir: Path, **config: Any) -> Iterator[tuple[str, int]]:
    """Yields the HTTP port of a router without workers."""
    process = RouterProcess(RouterConfig(str(model_dir), "fake", 64, grpc_port=0, http_port=0, **config))
    try:
        host, _, port = process.start().http.rpartition(":")
        yield host, int(port)
    finally:
        process.stop()


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Sets twenty frames a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "INTERVAL_S", 0.05)
        yield


@pytest.fixture(scope="module")
def keyed(router_model_dir: Path, quick: None) -> Iterator[tuple[str, int]]:
    with router(router_model_dir, api_keys=(KEY,)) as address:
        yield address


def ask(address: tuple[str, int], path: str, method: str = "GET", **headers: str) -> HTTPResponse:
    """Asks on a connection of its own."""
    connection = HTTPConnection(*address, timeout=10.0)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def next_frame(answer: HTTPResponse) -> dict[str, Any]:
    while not (line := answer.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return json.loads(line[6:])


def test_the_page_is_open_and_its_parts_are(keyed: tuple[str, int]) -> None:
    answer = ask(keyed, "/", **BROWSER)
    page = answer.read().decode()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["vary"] == "Accept" and "fake" not in page
    kinds = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
    for name in {*FILES, *LIBRARY_FILES} - set(PAGES):
        answer = ask(keyed, f"/page/{name}")
        assert (answer.status, answer.headers["content-type"]) == (200, kinds[Path(name).suffix])
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_page_that_is_known_is_not_sent_again(keyed: tuple[str, int]) -> None:
    for path in ("/", "/page/page.css"):
        first = ask(keyed, path, **BROWSER)
        assert first.headers["cache-control"] == "no-cache"
        again = ask(keyed, path, **BROWSER, if_none_match=f'"other", W/{first.headers["etag"]}')
        assert (again.status, again.read(), again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert ask(keyed, path, **BROWSER, if_none_match='"other"').status == 200


def test_the_api_is_described_on_an_open_page_to_those_with_a_key(keyed: tuple[str, int]) -> None:
    answer = ask(keyed, "/docs", **BROWSER)
    page = answer.read().decode()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "/v1/" not in page and "fake" not in page
    policies = [a.headers["content-security-policy"].split("; ") for a in (answer, ask(keyed, "/", **BROWSER))]
    assert set(policies[0]) ^ set(policies[1]) == {"img-src 'self' data:", "img-src 'self'"}
    assert ask(keyed, "/docs", if_none_match=answer.headers["etag"]).status == 304
    assert ask(keyed, "/openapi.json").status == 401
    description = json.loads(ask(keyed, "/openapi.json", **AUTHORIZED).read())
    # Clients do not call the pages.
    assert not {"/", "/docs", "/live"} & set(description["paths"])


def test_a_large_file_arrives_whole(keyed: tuple[str, int]) -> None:
    for name in LIBRARY_FILES:
        answer = ask(keyed, f"/page/{name}")
        content = load_asset(name).content
        assert answer.headers["content-length"] == str(len(content)) and answer.read() == content


@run
async def test_a_client_that_does_not_read_a_large_file_gets_one_part_and_is_left() -> None:
    taken: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        taken.append(message)
        if len(taken) == 3:
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "ASSET_TIMEOUT_S", 0.05)
        await AssetResponse(load_asset(LIBRARY_FILES[0]).content)({}, receive, send)
    assert [len(message.get("body", b"")) for message in taken] == [0, PART_BYTES, PART_BYTES]
    assert taken[-1]["more_body"]


@run
async def test_a_page_behind_a_proxy_asks_for_its_parts_there() -> None:
    app = HttpCluster([1], root_path="/tandem").routers[0].app
    page = (await http_request(app, "GET", "/")).body
    assert b'<base href="/tandem/">' in page
    assert b'<base href="/tandem/">' in (await http_request(app, "GET", "/docs")).body
    assert (await http_request(app, "GET", "/page/page.js")).status == 200


def test_heads_have_no_body(keyed: tuple[str, int]) -> None:
    for path, headers in (("/", BROWSER), ("/page/page.js", {}), ("/page/swagger-ui.css", {}), ("/live", AUTHORIZED)):
        # The answer ends with its head, so the connection is free.
        with closing(HTTPConnection(*keyed, timeout=10.0)) as connection:
            for _ in range(2):
                connection.request("HEAD", path, headers=headers)
                answer = connection.getresponse()
                assert (answer.status, answer.read()) == (200, b"")


@pytest.mark.parametrize(("headers", "status"), [(AUTHORIZED, 404), ({}, 401)])
def test_programs_are_told_what_they_were_always_told(
    keyed: tuple[str, int], headers: dict[str, str], status: int
) -> None:
    answer = ask(keyed, "/", accept="application/json", **headers)
    assert answer.status == status and json.loads(answer.read())["error"]["message"]
    assert answer.headers["www-authenticate"] == ("Bearer" if status == 401 else None)
    assert ask(keyed, "/", "POST").status == 405
    assert ask(keyed, "/page/no-such-file", **headers).status == status
    for name in PAGES:
        assert ask(keyed, f"/page/{name}", **headers).status == status


def test_data_need_the_key(keyed: tuple[str, int]) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = ask(keyed, "/live", **headers)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert b"router" not in answer.read()
    with closing(ask(keyed, "/live", **AUTHORIZED)) as answer:
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert answer.headers["cache-control"] == "no-cache, no-transform"
        first, second, third = (next_frame(answer) for _ in range(3))
        assert (first["whole"], second["whole"]) == (True, False)
        assert not first["ready"] and first["reason"] == "no prefill and no decode worker is connected"
        assert third["points"][0][0] == second["points"][0][0] + 1


def test_so_many_may_watch_and_who_leaves_makes_room(keyed: tuple[str, int]) -> None:
    viewers = [ask(keyed, "/live", **AUTHORIZED) for _ in range(MAX_VIEWERS)]
    assert {next_frame(viewer)["whole"] for viewer in viewers} == {True}
    refused = ask(keyed, "/live", **AUTHORIZED)
    assert (refused.status, refused.headers["retry-after"]) == (503, "10")
    assert json.loads(refused.read())["error"]["message"] == f"{MAX_VIEWERS} watch already; try again later"
    for viewer in viewers:
        viewer.close()

    def is_let_in() -> bool:
        with closing(ask(keyed, "/live", **AUTHORIZED)) as answer:
            return answer.status == 200

    until(is_let_in, "the places of those that have left are free")


def test_a_viewer_that_does_not_read_holds_nothing_up_and_is_sent_little(
    router_model_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "INTERVAL_S", 0.002)
    made: list[int] = []

    def padded(frames: SnapshotBuilder) -> Frame:
        made.append(len(made))
        return Frame({"whole": False, "number": made[-1], "padding": "x" * FRAME_BYTES}, ())

    monkeypatch.setattr(SnapshotBuilder, "changes", padded)
    with router(router_model_dir) as address:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        slow.settimeout(10.0)
        slow.connect(address)
        slow.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        with closing(ask(address, "/live")) as other, slow:
            next_frame(other)
            numbers: list[int] = []
            while len(numbers) < 120:
                frame = next_frame(other)
                # A busy machine may miss a frame.
                if "number" in frame:
                    numbers.append(frame["number"])
            num_made, received = len(made), b""
            while received.count(b'"whole":true') < 2:
                received += slow.recv(2**20)
        # The kernel buffers a few megabytes per connection.
        assert num_made * FRAME_BYTES > 29 * 10**6
        assert len(received) < 12 * 10**6


def test_viewers_are_told_when_the_router_stops(router_model_dir: Path, quick: None) -> None:
    begun = time.monotonic()
    with router(router_model_dir) as address:
        viewer = ask(address, "/live")
        next_frame(viewer)
    assert viewer.read().endswith(b"data: [DONE]\n\n")
    assert time.monotonic() - begun < 10.0
