"""The live page in a real browser, with misbehaving servers and proxies."""

import json
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from tests.cluster.browser import CHROMIUM
from tests.cluster.page_server import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]
SOON_S = 15.0
MARKUP = "<img src=x onerror=\"document.title='taken'\">"


@pytest.mark.parametrize("retry_after", ["Wed, 21 Oct 2015 07:28:00 GMT", "0", "1e-9", "999999999999"])
def test_refusals_do_not_cause_a_retry_storm(retry_after: str) -> None:

    def refuse(request: BaseHTTPRequestHandler) -> None:
        request.send_response(503)
        request.send_header("retry-after", retry_after)
        request.send_header("content-length", "0")
        request.end_headers()

    with serving(refuse) as (server, _):
        deadline = time.monotonic() + SOON_S
        while not server.num_asked:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(2.0)
        assert 1 <= server.num_asked <= 4


def hostile_frame() -> dict[str, Any]:
    """Return a frame whose names and reasons are all markup."""
    worker = {"role": "prefill", "alive": True, "host": MARKUP, "device": MARKUP, "page_size": 16}
    numbers = ("queued", "running", "pages", "free", "cached", "locked", "leased", "restarts")
    rates = ("prompt_tokens_per_s", "output_tokens_per_s", "cached_tokens_per_s")
    worker |= dict.fromkeys((*numbers, *rates), 1)
    worker["loaded_tokens_per_s"] = {MARKUP: 1}
    decode = worker | {"id": f"{MARKUP}d", "role": "decode"}
    request = {"number": 1, "ended_s": 0.0, "id": MARKUP, "client_id": MARKUP, "outcome": MARKUP}
    request |= {"error": MARKUP, "prefill": MARKUP, "decode": MARKUP, "attempts": 2, "ttft_ms": 1.0, "e2e_ms": 1.0}
    request |= dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens"), 1) | {"path": [[MARKUP, 1.0]]}
    entry = {"number": 1, "at_s": 0.0, "kind": "worker", "subject": MARKUP, "text": MARKUP, "fault": True, "count": 2}
    entry |= {"loss": 1}
    size = dict.fromkeys(("low", "high", "target", "ready", "starting", "leaving", "start_s"), 1)
    link = {"from": MARKUP, "to": f"{MARKUP}d", "up": False, "reason": MARKUP, "transport": MARKUP}
    return {
        "whole": True,
        "now_s": 1.0,
        "router": {"id": "router-0", "version": MARKUP, "model": MARKUP, "started_s": 0.0, "oldest_s": 1.0},
        "ready": False,
        "reason": MARKUP,
        "down": [MARKUP],
        "requests_in_hand": 1,
        "queued": 1,
        "waiting": 1,
        "routers": [{"id": "router-0", "alive": True, "requests_in_hand": 1, "queued": 1}],
        "sizes": [size | {"kind": MARKUP, "reason": MARKUP, "no_room": MARKUP}],
        "workers": [worker | {"id": MARKUP}, decode],
        "links": [link | {"bytes": 1, "bytes_per_s": 1}],
        "points": [[1, 1.0, 1, 1, 1, 1, 1, 1, 1, 1]],
        "requests": [request],
        "journal": [entry],
    }


def test_server_text_is_escaped() -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("content-type", "text/event-stream")
        request.end_headers()
        request.wfile.write(f"data: {json.dumps(hostile_frame())}\n\n".encode())
        request.wfile.flush()
        time.sleep(1.0)

    with serving(answer) as (_, browser):
        shown = browser.until(
            "document.getElementById('journal').innerText", SOON_S, lambda text: text and MARKUP in text
        )
        assert shown.count(MARKUP) == 2
        places = ("model", "notice", "sizes", "workers", "links", "requests")
        for place in places:
            assert MARKUP in browser.evaluate(f"document.getElementById('{place}').textContent"), place
        assert browser.evaluate("document.images.length") == 0
        assert browser.evaluate("document.title") == f"Not ready: {MARKUP} on Tandem"
        assert not browser.complaints
