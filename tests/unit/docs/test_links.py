"""Documents lead where they say: to files, sections, options and metrics that are there, and to figures' sources."""

import argparse
import re
from functools import cache
from pathlib import Path

import pytest

from tandem.deploy.cli.main import _parser
from tests.monitoring_files import rules

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted(path.relative_to(ROOT) for path in (ROOT, ROOT / "docs") for path in path.glob("*.md"))
# Whoever runs a cluster reads these; what they name must be there, however the options change.
FOR_OPERATORS = ("operations", "tuning", "faq", "deploy", "estimate")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ANCHOR = re.compile(r'<a id="([^"]+)">')
FLAG = re.compile(r"`(--[a-z][a-z-]+)")
METRIC = re.compile(r"`((?:tandem_|process_)\w+|\w+:\w+:\w+)`")
# Small whole numbers are batches, workers and the like; what was measured has more digits or a point.
FIGURE = re.compile(r"(?<![\w.,-])((?:\d{1,3}(?:,\d{3})+|\d+\.\d+|\d{3,})(?: ms)?)(?![\w]|[,.]\d)")


@cache
def anchors(path: Path) -> set[str]:
    """Of a document's sections, as GitHub makes them of headings, and of those that are set by hand."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(text)]
    made = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return made | set(ANCHOR.findall(text))


def pages(names: tuple[str, ...]) -> list[Path]:
    return [path for name in names if (path := ROOT / f"docs/{name}.md").is_file()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    lost = []
    for target in LINK.findall((ROOT / document).read_text()):
        if target.startswith(("http:", "https:")):
            continue
        file, _, section = target.partition("#")
        path = (ROOT / document).parent / file if file else ROOT / document
        if not path.exists() or (section and path.suffix == ".md" and section not in anchors(path.resolve())):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("path", pages(FOR_OPERATORS), ids=lambda path: path.stem)
def test_options_that_are_named_are_there(path: Path) -> None:
    (commands,) = [action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    known = {flag for parser in commands.choices.values() for flag in parser._option_string_actions}
    assert set(FLAG.findall(path.read_text())) - known == set()


def test_metrics_that_are_named_are_there() -> None:
    documented = (ROOT / "docs/metrics.md").read_text()
    recorded = {rule.get("record") for rule in rules()}
    named = set(METRIC.findall((ROOT / "docs/operations.md").read_text()))
    assert len(named) > 10
    assert {name for name in named if f"`{name}`" not in documented and name not in recorded} == set()


@pytest.mark.parametrize("name", ["tuning", "faq"])
def test_figures_are_those_of_the_pages_that_are_linked(name: str) -> None:
    """A paragraph, or an item of a list, links the page that has its figures."""
    text = (ROOT / f"docs/{name}.md").read_text()
    num_checked = 0
    for part in re.split(r"\n\n|\n(?=- )", text):
        linked = [(ROOT / "docs" / target.partition("#")[0]) for target in LINK.findall(part)]
        sources = [FIGURE.findall(path.read_text()) for path in linked if path.suffix == ".md"]
        known = {figure for source in sources for figure in source}
        figures = FIGURE.findall(" ".join(re.sub(r"`[^`]*`|\]\([^)]*\)", "", part).split()))
        assert [figure for figure in figures if figure not in known] == [], part
        num_checked += len(figures)
    assert num_checked > (25 if name == "tuning" else 4)
