"""The page's files."""

import re
from urllib.parse import urljoin

import pytest

from tandem.lifecycle import CRITICAL_PATH
from tandem.router.frontends.page.assets import (
    FILES,
    LIBRARY_FILES,
    PAGE,
    PAGE_PATHS,
    PAGES,
    PREFIX,
    load_asset,
)


def test_the_page_asks_for_nothing_that_is_not_here() -> None:
    for name in FILES:
        text = load_asset(name).content.decode()
        wanted = [urljoin("/", target) for target in re.findall(r'(?:src|href)="([^"#]+)"', text)]
        wanted += [urljoin(PREFIX, target) for target in re.findall(r'(?:from|import) "(\./[^"]+)"', text)]
        for path in wanted:
            assert path in PAGE_PATHS, f"{name} asks for {path}"
        # The security policy would block an address of another machine.
        assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z]", text), name


def test_every_file_is_asked_for() -> None:
    everything = b"".join(load_asset(name).content for name in FILES).decode()
    for name in FILES:
        assert name in PAGES or f"/{name}" in everything, name
    for name in LIBRARY_FILES:
        assert f'="page/{name}"'.encode() in load_asset("docs.html").content


@pytest.mark.parametrize("name", FILES)
def test_nothing_in_the_files_needs_a_weaker_policy(name: str) -> None:
    text = load_asset(name).content.decode()
    forbidden = (" style=", " onclick=", "javascript:", "innerHTML", "insertAdjacentHTML", "eval(", "EventSource(")
    assert not [word for word in forbidden if word in text]
    assert name not in PAGES or re.findall(r"<script(?![^>]* src=)", text) == []


def test_a_path_in_front_of_the_page() -> None:
    assert b"<base" not in load_asset(PAGE).content
    proxied = load_asset(PAGE, "/tandem")
    assert b'<base href="/tandem/">' in proxied.content
    assert proxied.etag != load_asset(PAGE).etag
    # A base element applies to the addresses behind it.
    assert proxied.content.index(b"<base") < proxied.content.index(b"<link")


def test_swagger_ui_is_new_enough_for_the_description() -> None:
    """Version 4 does not take OpenAPI 3.1."""
    script = load_asset("swagger-ui-bundle.js").content
    (version,) = set(re.findall(rb'PACKAGE_VERSION:"(\d+)\.', script))
    assert int(version) >= 5 and len(script) < 2e6


def test_every_phase_of_a_request_has_a_name_and_a_colour() -> None:
    script, style = (load_asset(name).content.decode() for name in ("tables.js", "page.css"))
    for phase in CRITICAL_PATH:
        assert f'["{phase.name}", ' in script
        assert f".{phase.name} {{ background: var(--{phase.name}); }}" in style
        assert f"--{phase.name}: light-dark(" in style
