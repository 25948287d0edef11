"""Rules and dashboards in deploy/monitoring/, with their expressions and selectors."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
MONITORING = ROOT / "deploy/monitoring"
PROMETHEUS = MONITORING / "prometheus"
DASHBOARDS = sorted((MONITORING / "grafana/dashboards").glob("*.json"))
# Grafana substitutes these variables.
SUBSTITUTES = {
    "$__rate_interval": "30s",
    "$__range": "5m",
    "$cluster": ".*",
    "$model": ".*",
    "$process": ".*",
}
_SELECTOR = re.compile(r"\b(?P<name>(?:tandem|process)_\w+|up|\w+:\w+:\w+|tandem:\w+)\b(?:\{(?P<matchers>[^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


class Selector(NamedTuple):
    """A queried metric. Attributes: matchers: label, operator and value."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expression: str) -> list[Selector]:
    """Return the selectors of an expression."""
    # A duration or an operator may touch a name; quoted text holds no names.
    found = []
    for match in _SELECTOR.finditer(expression):
        if expression[: match.start()].count('"') % 2 == 0:
            matchers = tuple(_MATCHER.findall(match["matchers"] or ""))
            found.append(Selector(match["name"], matchers))
    return found


def rules() -> list[dict[str, Any]]:
    """Return all recording and alert rules."""
    files = [yaml.safe_load(path.read_text()) for path in sorted((PROMETHEUS / "rules").glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all panels, including those of folded rows."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def queries(path: Path) -> list[tuple[str, str]]:
    """Return (panel title, query) of a dashboard, as Prometheus would get the queries."""
    found = []
    for panel in panels(json.loads(path.read_text())):
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for variable, value in SUBSTITUTES.items():
                expression = expression.replace(variable, value)
            assert "$" not in expression, f"{path.name}, {panel['title']}: a variable that nobody knows"
            found.append((panel["title"], expression))
    return found
