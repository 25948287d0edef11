"""The live page of a real cluster in a real browser."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.browser import CHROMIUM, Browser
from tests.cluster.conftest import API_KEYS, RESTART_S, Clusters, ServedCluster, random_ids

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]
SOON_S = 15.0
# Must not leave the prompts.
SECRET = "a sentence that nobody else may read"
ROWS = "[...document.querySelectorAll('#workers tr')]"
SHIFTS = """new Promise((resolve) => {
  let sum = 0;
  new PerformanceObserver((list) => { for (const e of list.getEntries()) sum += e.hadRecentInput ? 0 : e.value; })
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => resolve(sum), 500);
})"""
# Filled share of each bar.
FILLED = """[...document.querySelectorAll("#requests .stack")].map((bar) => {
  const widths = [...bar.children].map((part) => part.getBoundingClientRect().width);
  return widths.reduce((sum, width) => sum + width, 0) / bar.getBoundingClientRect().width;
})"""
FOCUSED = """(() => {
  const node = document.activeElement, style = getComputedStyle(node);
  const name = node.getAttribute("aria-label") || node.labels?.[0]?.textContent.trim() || node.textContent.trim();
  return { id: node.id || node.className || node.tagName, name,
           outline: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 };
})()"""


@pytest.fixture(scope="module")
def served(clusters: Clusters, tiny_config: ClusterConfig) -> ServedCluster:
    return clusters.get(replace(tiny_config, num_decode=2, api_keys=API_KEYS))


@pytest.fixture(scope="module")
def origin(served: ServedCluster) -> str:
    return f"http://{served.cluster.addresses.http}"


@pytest.fixture
def browser(origin: str) -> Iterator[Browser]:
    with Browser() as browser:
        browser.resize(1440, 1000)
        open_with_key(browser, origin)
        yield browser
        assert all(url.startswith(f"{origin}/") for url in browser.urls), browser.urls


def open_with_key(browser: Browser, origin: str) -> None:
    browser.open(f"{origin}/")
    browser.until("document.getElementById('key-dialog')?.open", SOON_S)
    give_key(browser, API_KEYS[0])
    until_live(browser)
    # Browsers report the first 401 as an error.
    complaints, browser.complaints = browser.complaints, []
    assert all(" 401 " in complaint for complaint in complaints), complaints


def give_key(browser: Browser, key: str) -> None:
    browser.type(key)
    browser.press("Enter", code=13)


def until_live(browser: Browser, timeout_s: float = SOON_S) -> None:
    browser.until("document.getElementById('connection').innerText", timeout_s, lambda text: text == "Live")


@contextmanager
def load(served: ServedCluster, num_clients: int = 4) -> Iterator[None]:
    stopping = threading.Event()

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        while not stopping.is_set():
            served.complete(random_ids(rng, 60), max_tokens=40, ignore_eos=True)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def test_key_prompt_repeats_until_right_and_tab_keeps_it(origin: str) -> None:
    with Browser() as browser:
        browser.open(f"{origin}/")
        browser.until("document.getElementById('key-dialog')?.open", SOON_S)
        give_key(browser, "wrong")
        browser.until(
            "document.getElementById('key-hint').innerText", SOON_S, lambda text: text.startswith("That key is not")
        )
        assert browser.evaluate("[sessionStorage.length, document.getElementById('workers').children.length]") == [0, 1]
        give_key(browser, API_KEYS[0])
        until_live(browser)
        assert browser.evaluate("Object.values(sessionStorage)") == [API_KEYS[0]]
        assert browser.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert API_KEYS[0] not in " ".join(browser.urls)
        # The key survives a reload, until the user forgets it.
        browser.open(f"{origin}/")
        until_live(browser)
        browser.evaluate("document.getElementById('forget').click()")
        browser.until("document.getElementById('key-dialog')?.open", SOON_S)
        assert browser.evaluate("sessionStorage.length") == 0


def test_page_shows_the_cluster_under_load(served: ServedCluster, browser: Browser) -> None:
    names = browser.until(
        f"{ROWS}.map((row) => row.children[0].innerText.split(/\\s/)[0])", SOON_S, lambda n: len(n) > 1
    )
    assert names == ["prefill-0", "decode-0", "decode-1"]
    assert "router-0" in browser.text("#topology") and "tiny-llama" in browser.text(".bar")
    link = "[...document.querySelectorAll('#links tr')].map((row) => row.innerText.split('\\t').map((t) => t.trim()))"
    before = browser.until(link, SOON_S, lambda links: len(links) == 2)
    assert [row[:2] for row in before] == [["prefill-0 → decode-0", "up"], ["prefill-0 → decode-1", "up"]]
    with load(served):
        assert list(served.client.complete(SECRET, max_tokens=20))
        browser.until("Number(document.getElementById('output-rate').innerText.replace(',', ''))", SOON_S)
        browser.until(link, SOON_S, lambda links: any(row[3] != "0 B/s" for row in links))
        browser.until("document.getElementById('itl').innerText", SOON_S, lambda text: text != "–")
        browser.until("document.getElementById('ttft').innerText", SOON_S, lambda text: text != "–")
        browser.until("document.querySelectorAll('#requests tr').length", SOON_S, lambda rows: rows >= 10)
    path = browser.evaluate("document.querySelector('#requests .stack').getAttribute('aria-label')")
    assert "prefill" in path and "decode" in path
    assert all(0.98 < part < 1.02 for part in browser.evaluate(FILLED))
    assert SECRET not in browser.evaluate("document.documentElement.outerHTML")
    assert browser.evaluate(SHIFTS) < 0.1
    assert browser.complaints == []


def test_page_shows_a_worker_restart(served: ServedCluster, browser: Browser) -> None:
    decode = f"{ROWS}.find((row) => row.innerText.includes('decode-1'))"
    browser.until(f"{decode}?.className", SOON_S, lambda name: name == "")
    served.kill("decode-1")
    browser.until(f"{decode}.innerText.includes('not connected')", SOON_S)
    browser.until("document.getElementById('ready').innerText", SOON_S, lambda text: text == "Degraded: decode-1 down")
    browser.until("document.getElementById('journal').innerText", SOON_S, lambda text: "decode-1 lost" in text)
    assert "not connected" in browser.text("#topology")
    browser.until(f"{decode}.className === '' && {decode}.lastElementChild.innerText", RESTART_S, lambda n: n == "1")
    browser.until("document.getElementById('journal').innerText", SOON_S, lambda t: "joined again after" in t)
    browser.until("document.querySelectorAll('#links .dot.good').length", SOON_S, lambda number: number == 2)
    browser.until("document.getElementById('ready').innerText", SOON_S, lambda text: text == "Ready")
    # The loss, its links and its return are one entry.
    entries = browser.evaluate("[...document.querySelectorAll('#journal > li')].map((line) => line.innerText)")
    (entry,) = [text for text in entries if "lost" in text]
    assert "link down and up again" in entry and "joined again after" in entry
    assert browser.complaints == []


def test_chat_answers_and_stops(served: ServedCluster, browser: Browser) -> None:
    served.wait_ready()
    status = "document.getElementById('chat-status').innerText"
    # An answer may be empty.
    for _ in range(20):
        browser.evaluate("document.getElementById('chat-clear').click()")
        browser.evaluate("document.getElementById('chat-input').focus()")
        browser.type("hello")
        browser.press("Enter", code=13)
        told = browser.until(status, SOON_S, lambda text: text.startswith(("TTFT", "The answer is empty", "Failed")))
        if told.startswith("TTFT"):
            break
    assert told.startswith("TTFT") and "tokens" in told
    assert browser.evaluate("document.querySelectorAll('#chat-log .turn').length") == 2
    # An answer may end before the stop.
    for _ in range(20):
        browser.evaluate("document.getElementById('chat-clear').click()")
        browser.type("go on")
        browser.press("Enter", code=13)
        browser.until(status, SOON_S, lambda text: text.startswith(("First token", "Stopped", "TTFT", "The answer")))
        browser.evaluate("document.getElementById('chat-stop').click()")
        browser.until("document.getElementById('chat-send').disabled", SOON_S, lambda disabled: not disabled)
        if browser.evaluate(status).startswith("Stopped"):
            break
    assert browser.evaluate(status).startswith("Stopped")
    served.wait_clean()
    # A refused request's text returns to the input.
    browser.evaluate("document.getElementById('chat-clear').click()")
    browser.evaluate("document.getElementById('chat-max').value = 30000")
    browser.type("too long")
    browser.press("Enter", code=13)
    told = browser.until(status, SOON_S, lambda text: text.startswith("Failed: "))
    assert "max_tokens must be between" in told
    assert browser.evaluate("document.getElementById('chat-input').value") == "too long"
    assert browser.evaluate("document.querySelectorAll('#chat-log .turn').length") == 0
    complaints, browser.complaints = browser.complaints, []
    assert all(" 400 " in complaint for complaint in complaints), complaints


def test_keyboard_focus_reaches_everything_visibly(served: ServedCluster, browser: Browser) -> None:
    for _ in range(3):
        served.complete(random_ids(random.Random(1), 60))
    browser.until("document.querySelectorAll('#requests button').length", SOON_S, lambda number: number >= 3)
    browser.evaluate("document.activeElement.blur()")
    reached: list[Any] = []
    for _ in range(30):
        browser.press("Tab", code=9)
        focused = browser.evaluate(FOCUSED)
        if focused["id"] in ("BODY", "HTML") or (reached and focused["id"] == reached[0]["id"]):
            break
        reached.append(focused)
    ids = [focused["id"] for focused in reached]
    order = ["skip", "A", "forget", "theme", "links-scroll", "scroll requests", "id", "chat-log", "chat-input"]
    order += ["chat-max", "chat-temperature"]
    assert [name for name in ids if name in order] == order
    assert {"chat-clear", "chat-send", "scroll journal"} <= set(ids)
    assert all(focused["name"] and focused["outline"] for focused in reached), reached
    browser.evaluate("document.querySelector('#requests button').focus()")
    for key, code, number in (("ArrowDown", 40, 1), ("ArrowDown", 40, 2), ("ArrowUp", 38, 1)):
        browser.press(key, code=code)
        assert (
            browser.evaluate("[...document.querySelectorAll('#requests button')].indexOf(document.activeElement)")
            == number
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_in_both_schemes(served: ServedCluster, browser: Browser, scheme: str) -> None:
    browser.prefer(scheme)
    browser.resize(360, 780, scale=2.0, is_phone=True)
    served.complete(random_ids(random.Random(1), 60))
    browser.until("document.querySelectorAll('#requests tr:not(.empty)').length", SOON_S)
    width = "[document.documentElement.scrollWidth, document.body.scrollWidth, window.innerWidth]"
    assert browser.evaluate(width) == [360, 360, 360]
    # Everything shown is within the viewport or a scrolling part.
    outside = """[...document.querySelectorAll('main *, aside *, header *')].filter((node) => {
        const box = node.getBoundingClientRect();
        return box.width > 1 && !node.closest('.scroll, .skip, thead') && (box.left < 0 || box.right > 360.5);
    }).map((node) => node.outerHTML.slice(0, 80))"""
    assert browser.evaluate(outside) == []
    lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    assert (browser.evaluate(lightness) > 128) == (scheme == "light")
    other = "light" if scheme == "dark" else "dark"
    for _ in range(2):
        if other not in browser.text("#theme"):
            browser.evaluate("document.getElementById('theme').click()")
    assert (browser.evaluate(lightness) > 128) == (scheme == "dark")
    assert browser.complaints == []


def test_page_reconnects_to_a_restarted_router(served: ServedCluster, browser: Browser) -> None:
    (router,) = served.client.server_info().routers
    os.kill(router.pid, signal.SIGKILL)
    connection = "document.getElementById('connection').innerText"
    browser.until(connection, SOON_S, lambda text: text == "Connection lost, trying again")
    until_live(browser, RESTART_S)
    browser.until("document.getElementById('journal').innerText", SOON_S, lambda t: "router-0 started, restart 1" in t)
    served.wait_ready()
