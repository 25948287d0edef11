"""docs/clients.md's table is what a run of the clients wrote."""

from tests.clients.page import PAGE, Row, rows_of, with_rows
from tests.clients.table import CLIENTS, LITELLM_PROXY, NAMES, PROGRAMS

EMPTY = "# Clients\n\n<!-- clients -->\n\n\n<!-- end -->\n\nMore.\n"


def test_every_tested_client_has_a_row_with_its_version_and_settings() -> None:
    page = PAGE.read_text()
    rows = rows_of(page)
    assert list(rows) == list(NAMES)
    for client in (*CLIENTS, LITELLM_PROXY):
        _, _, version, settings, passed, _ = rows[client.name].split("|")
        assert client.requirements[0].endswith(("==", "@")[client.is_for_node] + version.strip())
        assert settings.strip() == client.settings
        assert passed.strip()
    for name, settings in PROGRAMS.items():
        assert rows[name].split("|")[3].strip() == settings
        assert rows[name].split("|")[4].strip()


def test_a_run_replaces_the_rows_of_its_clients_only() -> None:
    old = [Row("openai", "1", "a", ("b", "c")), Row("anthropic", "2", "d", ("e",)), Row("gone", "3", "f", ("g",))]
    page = with_rows(EMPTY, reversed(old[:2]))
    assert list(rows_of(page)) == ["openai", "anthropic"]
    assert rows_of(page)["openai"] == "| openai | 1 | a | b; c |"
    page = with_rows(with_rows(page, old), [Row("openai", "4", "a", ("b",))])
    assert rows_of(page) == {"openai": "| openai | 4 | a | b |", "anthropic": "| anthropic | 2 | d | e |"}
    assert page.startswith("# Clients\n") and page.endswith("\n<!-- end -->\n\nMore.\n")
