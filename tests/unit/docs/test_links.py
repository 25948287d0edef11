"""Links lead to existing files and sections; named options and metrics exist."""

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
FILE = re.compile(
    r"`((?:tandem|engine|worker|kvtransfer|\w+_worker|router|deploy|tests|benchmarks|examples)/[\w/]+\.(?:py|cu|js|yaml))`"
)
FLAG = re.compile(r"`(--[a-z][a-z-]+)")
METRIC = re.compile(r"`((?:tandem_|process_)\w+|\w+:\w+:\w+)`")


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
def test_links_resolve(document: Path) -> None:
    lost = []
    for target in LINK.findall((ROOT / document).read_text()):
        if target.startswith(("http:", "https:")):
            continue
        file, _, section = target.partition("#")
        path = (ROOT / document).parent / file if file else ROOT / document
        if not path.exists() or (section and path.suffix == ".md" and section not in anchors(path.resolve())):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.parent.name == "docs"], ids=str)
def test_named_files_exist(document: Path) -> None:
    assert [name for name in FILE.findall((ROOT / document).read_text()) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("path", pages(FOR_OPERATORS), ids=lambda path: path.stem)
def test_named_options_exist(path: Path) -> None:
    (commands,) = [action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    known = {flag for parser in commands.choices.values() for flag in parser._option_string_actions}
    assert set(FLAG.findall(path.read_text())) - known == set()


def test_named_metrics_exist() -> None:
    documented = (ROOT / "docs/metrics.md").read_text()
    recorded = {rule.get("record") for rule in rules()}
    named = set(METRIC.findall((ROOT / "docs/operations.md").read_text()))
    assert len(named) > 10
    assert {name for name in named if f"`{name}`" not in documented and name not in recorded} == set()
