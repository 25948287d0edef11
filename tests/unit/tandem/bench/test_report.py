"""The report is one self-contained file."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the extra `bench` has it")

from tandem.bench.report import render, write_report
from tandem.bench.results import make_result
from tests.unit.tandem.bench.records import record
from tests.unit.tandem.bench.test_results import a_run


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.sources += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_runs_are_compared_and_nothing_is_fetched(tmp_path: Path) -> None:
    stream = record([0.1, 0.2, 0.4], group="streams", error="cut")
    results = [make_result(*a_run(label="one")), make_result(*a_run(label="two", records=[record([0.3, 0.5]), stream]))]
    write_report(results, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    tags = Tags(text)
    assert not tags.open and tags.sources
    assert all(source.startswith("data:image/png;base64,") for source in tags.sources)
    assert "http://" not in text.replace("http://www.w3.org", "") and "<script" not in text
    assert re.search(r"<th>one</th><th>two</th>", text) and "Steady streams" in text


def test_external_text_is_escaped() -> None:
    result = make_result(*a_run(label="<b>&", records=[record([], error="failed", detail="<script>alert(1)</script>")]))
    text = render([result])
    assert "<b>&" not in text and "<script" not in text and "&lt;script&gt;" in text


def test_a_sweep_has_its_picture() -> None:
    result = make_result(*a_run())
    trials = [{"value": value, "good_share": 1.0, "result": result} for value in (1.0, 2.0)]
    swept = {"variable": "rate", "low": 1.0, "good_share": 0.9, "highest": 2.0, "trials": trials}
    assert 'alt="sweep"' in render([{**result, "sweep": swept}])
