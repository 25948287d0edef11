"""The live page in a real browser, with a scene of a busy cluster: what it says, and that all of it can be read."""

import asyncio
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from tests.cluster.browser import CHROMIUM, Browser
from tests.cluster.live_page_scene import LOST, Scene
from tests.cluster.page_server import send_frames, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]
SOON_S = 15.0
# Texts that others cover, that leave their panel, or that a box cuts off. Rows that scroll out of sight do not count.
UNREADABLE = """(() => {
  const found = [], seen = [];
  const hidden = ".skip, .visually-hidden, script, noscript, dialog, [aria-hidden=true]:not(.scale, .legend)";
  // On a phone the tables' heads are for screen readers.
  const isShown = (node) => node.checkVisibility() && !node.closest(hidden)
    && !(node.closest(".cards thead") && getComputedStyle(node.closest("thead")).position === "absolute");
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || !isShown(parent)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const scroll = parent.closest(".scroll")?.getBoundingClientRect();
    const panel = parent.closest(".panel, .tile, .bar").getBoundingClientRect();
    for (const box of range.getClientRects()) {
      if (box.width < 1 || (scroll && (box.bottom > scroll.bottom || box.top < scroll.top))) continue;
      const text = node.textContent.trim();
      if (box.left < panel.left - 0.5 || box.right > panel.right + 0.5) found.push(`outside: ${text}`);
      for (const [other, words] of seen) {
        const width = Math.min(box.right, other.right) - Math.max(box.left, other.left);
        const height = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
        if (width > 1 && height > 4) found.push(`overlap: ${words} / ${text}`);
      }
      seen.push([box, text]);
    }
  }
  for (const node of document.querySelectorAll("header *, main *, aside *")) {
    const isCut = getComputedStyle(node).overflowX === "hidden" && node.scrollWidth > node.clientWidth + 1;
    if (isCut && isShown(node) && !node.matches("svg")) found.push(`cut: ${node.outerHTML.slice(0, 80)}`);
  }
  const pen = document.createElement("canvas").getContext("2d");
  for (const input of document.querySelectorAll("aside input")) {
    const style = getComputedStyle(input), box = input.getBoundingClientRect();
    const panel = input.closest(".panel").getBoundingClientRect();
    pen.font = style.font;
    const room = input.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)
      - (style.appearance === "textfield" ? 0 : 16);
    for (const text of [input.value, input.placeholder]) {
      if (pen.measureText(text).width > room) found.push(`cut: ${text} in ${input.id}`);
    }
    if (box.right > panel.right - 4) found.push(`outside: ${input.id}`);
  }
  if (document.documentElement.scrollWidth > window.innerWidth) found.push("the page scrolls sideways");
  return found;
})()"""
JOURNAL = "document.getElementById('journal').innerText"


@pytest.fixture(scope="module")
def frames() -> list[dict[str, Any]]:
    """Return the frame after a worker's loss, and the one after its return."""

    async def play() -> list[dict[str, Any]]:
        scene = Scene()
        lost = scene.whole()
        scene.rejoin()
        return [lost, scene.whole()]

    return asyncio.run(play())


@pytest.fixture(scope="module")
def shown(frames: list[dict[str, Any]]) -> Iterator[tuple[Browser, list[dict[str, Any]]]]:
    """Yield a browser, and the list whose last frame it is sent several times a second."""
    sent = frames[:1]

    def answer(request: BaseHTTPRequestHandler) -> None:
        send_frames(request)
        while True:
            try:
                request.wfile.write(f"data: {json.dumps(sent[-1])}\n\n".encode())
                request.wfile.flush()
            except OSError:
                return
            time.sleep(0.2)

    with serving(answer) as (_, browser):
        yield browser, sent


@pytest.fixture
def browser(shown: tuple[Browser, list[dict[str, Any]]]) -> Browser:
    browser, sent = shown
    del sent[1:]
    browser.resize(1440, 1000)
    browser.until(JOURNAL, SOON_S, lambda text: f"{LOST} lost" in text)
    return browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "is_phone"), [(1440, False), (1200, False), (390, True)])
def test_everything_can_be_read(browser: Browser, width: int, is_phone: bool, scheme: str) -> None:
    browser.prefer(scheme)
    browser.resize(width, 844 if is_phone else 1000, is_phone=is_phone)
    browser.until("innerWidth", SOON_S, lambda now: now == width)
    browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.evaluate(UNREADABLE) == []
    assert browser.complaints == []


def test_header_names_what_is_down(shown: tuple[Browser, list[dict[str, Any]]], browser: Browser) -> None:
    assert browser.text("#ready") == f"Degraded: {LOST} down"
    assert browser.evaluate("document.title").startswith(f"Degraded: {LOST} down: ")
    frame = shown[1][0]
    shown[1].append({**frame, "down": ["a", "b", "c"]})
    browser.until("document.getElementById('ready').innerText", SOON_S, lambda t: t == "Degraded: a, b and 1 more down")
    shown[1].append({**frame, "down": []})
    browser.until("document.getElementById('ready').innerText", SOON_S, lambda text: text == "Ready")
    shown[1].append({**frame, "ready": False, "reason": "no decode worker is connected"})
    browser.until("document.getElementById('ready').innerText", SOON_S, lambda text: text == "Not ready")


@pytest.mark.parametrize(("width", "is_phone"), [(1440, False), (390, True)])
def test_numbers_that_follow_the_load(
    shown: tuple[Browser, list[dict[str, Any]]], browser: Browser, width: int, is_phone: bool
) -> None:
    browser.until("document.getElementById('sizes-table').hidden", SOON_S, bool)
    size = {"kind": "any", "low": 1, "high": 8, "target": 4, "ready": 2, "starting": 1, "leaving": 0, "start_s": 42.0}
    row = {**size, "reason": "queue", "no_room": "other workers have not left yet"}
    shown[1].append({**shown[1][0], "sizes": [row, {**row, "kind": "router", "reason": "", "no_room": ""}]})
    browser.resize(width, 844 if is_phone else 1000, is_phone=is_phone)
    browser.until("document.getElementById('sizes').innerText", SOON_S, lambda text: "No more now" in text)
    cells = "[...document.querySelector('#sizes tr').children].map((cell) => cell.firstChild.textContent)"
    assert browser.evaluate(cells) == ["workers", "1:8", "4", "2", "1", "0", "42.0 s", "queue"]
    assert browser.evaluate(UNREADABLE) == []


def test_a_loss_is_one_entry_with_its_effects(
    shown: tuple[Browser, list[dict[str, Any]]], browser: Browser, frames: list[dict[str, Any]]
) -> None:
    entries = "[...document.querySelectorAll('#journal > li')].map((line) => line.innerText.split('\\n').at(-1))"
    assert browser.evaluate(entries)[0] == "2 links down; 7 requests restarted"
    dot = "document.querySelector('#journal > li > .dot').className"
    assert browser.evaluate(dot) == "dot bad"
    browser.click("#journal summary")
    browser.until("document.querySelectorAll('#journal details[open] li').length", SOON_S, lambda number: number == 3)
    shown[1].append(frames[1])
    summary = "document.querySelector('#journal summary').innerText"
    told = "2 links down and up again; 7 requests restarted; joined again after 30 s, restart 1"
    browser.until(summary, SOON_S, lambda text: text == told)
    assert browser.evaluate(dot) == "dot mended"
    # An opened entry stays open.
    assert browser.evaluate("document.querySelectorAll('#journal details[open] li').length") == 6


def test_pages_in_use_and_cached_are_told_apart(browser: Browser) -> None:
    row = "[...document.querySelectorAll('#workers tr')].find((line) => line.innerText.includes('decode-1'))"
    assert "0 in use, 412 cached, of 1,024" in browser.evaluate(f"{row}.innerText")
    assert "10.120.130.140" in browser.evaluate(f"{row}.innerText")
    cached = browser.evaluate(f"{row}.querySelector('.stack .cached').getBoundingClientRect().width")
    assert cached / browser.evaluate(f"{row}.querySelector('.stack').getBoundingClientRect().width") == pytest.approx(
        412 / 1024, abs=0.02
    )


def test_charts_have_a_scale_and_a_key(browser: Browser) -> None:
    tops = browser.evaluate("[...document.querySelectorAll('.scale.top')].map((node) => node.textContent)")
    assert tops == ["1", "5k", "5k", "500 ms", "50 ms"]
    seen: list[list[str]] = []
    assert browser.evaluate("[...document.querySelectorAll('.tile')].every((t) => t.querySelector('.key.first'))")
    for kind, style in ((".key", "backgroundColor"), (".spark path", "stroke")):
        colors = f"['first', 'second'].map((n) => getComputedStyle(document.querySelector(`{kind}.${{n}}`)).{style})"
        seen.append(browser.evaluate(colors))
    assert seen[0] == seen[1] and seen[0][0] != seen[0][1]
    # No line leaves its chart.
    outside = """[...document.querySelectorAll('.spark path')].filter((path) => {
      const [line, chart] = [path.getBBox(), path.ownerSVGElement.viewBox.baseVal];
      return line.y < 0 || line.y + line.height > chart.height + 0.1;
    }).length"""
    assert browser.evaluate(outside) == 0


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_a_click_copies_the_whole_id(browser: Browser, frames: list[dict[str, Any]], has_clipboard: bool) -> None:
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.ask("Browser.grantPermissions", {"permissions": permissions}, in_page=False)
    newest = frames[0]["requests"][-1]
    whole = newest["client_id"] or newest["id"]
    assert browser.text("#requests button") == whole[-8:]
    if not has_clipboard:
        # As on a page that came over HTTP from another host.
        browser.evaluate("navigator.clipboard.writeText = () => Promise.reject(new Error('not here'))")
    browser.evaluate("navigator.clipboard.write([new ClipboardItem({ 'text/plain': 'earlier' })])")
    browser.click("#requests button")
    browser.until("document.querySelector('#requests button').innerText", SOON_S, lambda text: text == "copied")
    assert browser.evaluate("navigator.clipboard.readText()") == whole
    browser.until("document.querySelector('#requests button').innerText", SOON_S, lambda text: text == whole[-8:])


def test_chat_starts_with_a_low_temperature(browser: Browser) -> None:
    assert browser.evaluate("document.getElementById('chat-temperature').value") == "0.2"
    asked = """new Promise((done) => {
      window.fetch = (url, options) => { done(JSON.parse(options.body)); return Promise.reject(new TypeError("no")); };
      document.getElementById("chat-input").value = "hello";
      document.getElementById("chat-send").click();
    })"""
    assert browser.evaluate(asked)["temperature"] == 0.2


def test_on_a_phone_the_journal_precedes_the_tables(browser: Browser) -> None:
    order = "[...document.querySelectorAll('.tiles, .panel')].map((p) => p.id || p.getAttribute('aria-labelledby'))"
    tops = "['journal', 'links', 'workers'].map((id) => document.getElementById(id).getBoundingClientRect().top)"
    browser.resize(390, 844, is_phone=True)
    browser.until(f"{order}[1]", SOON_S, lambda first: first == "journal-panel")
    assert (found := browser.evaluate(tops)) == sorted(found)
    browser.resize(1440, 1000)
    browser.until(f"{order}.at(-1)", SOON_S, lambda last: last == "journal-panel")
