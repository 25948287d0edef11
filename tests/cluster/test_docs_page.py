"""The API's page in a real browser, of a router without workers."""

from collections.abc import Iterator

import pytest

from benchmarks.router_model import write_model_dir
from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess
from tests.cluster.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]
KEY = "a-key"
SOON_S = 30.0
PATHS = (
    "[...document.querySelectorAll('.opblock-summary-path')].map((node) => node.innerText.replaceAll('\\u200b', ''))"
)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model_dir = tmp_path_factory.mktemp("model")
    write_model_dir(model_dir)
    process = RouterProcess(RouterConfig(str(model_dir), "fake", 64, grpc_port=0, http_port=0, api_keys=(KEY,)))
    try:
        yield f"http://{process.start().http}"
    finally:
        process.stop()


def test_page_asks_for_the_key_and_calls_the_api_with_it(origin: str) -> None:
    with Browser() as browser:
        browser.resize(1200, 900)
        browser.open(f"{origin}/docs")
        browser.until("document.getElementById('key-dialog')?.open", SOON_S)
        assert "/v1" not in browser.evaluate("document.body.innerText")
        browser.type("wrong")
        browser.press("Enter", code=13)
        browser.until("document.getElementById('key-hint').innerText", SOON_S, lambda text: text.startswith("That key"))
        browser.type(KEY)
        browser.press("Enter", code=13)
        paths = browser.until(PATHS, SOON_S)
        assert {"/v1/models", "/v1/chat/completions", "/v1/messages"} <= set(paths)
        browser.click(".opblock-get .opblock-summary-control")
        for button in (".try-out__btn", ".execute"):
            browser.until(f"document.querySelector('{button}') !== null", SOON_S)
            browser.click(button)
        answer = "document.querySelector('.live-responses-table')?.innerText ?? ''"
        browser.until(answer, SOON_S, lambda text: '"root": "fake"' in text)
        # The command line shown beside the answer may be copied to others.
        assert KEY not in browser.evaluate("document.body.innerText")
        assert all(url.startswith((f"{origin}/", "data:")) for url in browser.urls), browser.urls
        assert KEY not in " ".join(browser.urls)
        # Nothing but the refused requests: the security policy forbids nothing that the page wants.
        assert [complaint for complaint in browser.complaints if " 401 " not in complaint] == []


def test_live_page_links_to_it(origin: str) -> None:
    with Browser() as browser:
        browser.open(f"{origin}/")
        assert browser.evaluate("document.querySelector('.controls a').href") == f"{origin}/docs"


@pytest.mark.parametrize("width", [390, 1200])
def test_page_fits(origin: str, width: int) -> None:
    with Browser() as browser:
        browser.resize(width, 844, is_phone=width < 500)
        browser.open(f"{origin}/docs")
        browser.until("document.getElementById('key-dialog')?.open", SOON_S)
        browser.type(KEY)
        browser.press("Enter", code=13)
        browser.until(PATHS, SOON_S)
        assert browser.evaluate("document.documentElement.scrollWidth") == width
