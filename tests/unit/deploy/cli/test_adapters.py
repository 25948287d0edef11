"""The arguments of `tandem adapters`."""

from typing import Any

import pytest

from tandem import exit_codes
from tandem.client import TandemClient, TandemError
from tandem.deploy.cli.main import main
from tandem.deploy.cli.status_tables import print_adapters, print_status
from tandem.v1 import inference_pb2 as pb

CALLS: dict[str, Any] = {
    "load_adapter": pb.LoadedAdapter(name="sql", path="/adapters/sql", content_hash="abc", rank=8),
    "unload_adapter": None,
    "list_adapters": [pb.LoadedAdapter(name="sql", path="/adapters/sql", rank=8, num_bytes=2_500_000)],
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the calls of clients, with their keys."""
    made: list[Any] = []

    def note(name: str, answer: Any) -> Any:
        def call(client: TandemClient, *arguments: Any, **named: Any) -> Any:
            made.append((name, *arguments, named, client._metadata))
            return answer

        return call

    for name, answer in CALLS.items():
        monkeypatch.setattr(TandemClient, name, note(name, answer))
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    return made


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["load", "sql"], "load takes NAME=PATH"),
        (["load", "=path"], "load takes NAME=PATH"),
        (["load"], "load takes NAME=PATH"),
        (["unload", "sql=path"], "unload takes NAME"),
        (["list", "sql"], "list takes no adapter"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapters", *arguments]) == exit_codes.USAGE
    assert wanted in capsys.readouterr().err


def test_loads_and_unloads_are_sent_with_the_admin_key(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--api-key", "ordinary", "--admin-key", "admin"]
    assert main(["adapters", "load", "sql=sql-v2", "--in-place", *keys]) == 0
    assert main(["adapters", "unload", "sql", *keys]) == 0
    admin, ordinary = ((("authorization", f"Bearer {key}"),) for key in ("admin", "ordinary"))
    assert calls == [
        ("load_adapter", "sql", "sql-v2", {"in_place": True}, admin),
        ("unload_adapter", "sql", {}, admin),
    ]
    assert "Loaded sql from /adapters/sql: rank 8" in capsys.readouterr().out
    assert main(["adapters", *keys]) == 0
    assert calls[-1] == ("list_adapters", {}, ordinary)
    _, row, hint, *_ = capsys.readouterr().out.splitlines()
    assert row.split() == ["sql", "/adapters/sql", "8", "2.5", "0", "0", "0"]
    assert "0 is normal" in hint


def test_a_list_needs_one_of_the_keys(calls: list[Any]) -> None:
    assert main(["adapters", "--admin-key", "admin"]) == 0
    assert calls[-1][-1] == (("authorization", "Bearer admin"),)


def test_a_refusal_names_the_option_for_the_key(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise TandemError("UNAUTHENTICATED", "an admin key is needed")

    monkeypatch.setattr(TandemClient, "unload_adapter", refuse)
    assert main(["adapters", "unload", "sql"]) == exit_codes.FAILED
    assert "an admin key is needed (here with --admin-key KEY or $TANDEM_ADMIN_KEY)" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["on_device", "in_host"])
def test_adapters_that_workers_hold_need_no_explanation(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    held = pb.LoadedAdapter(name="sql", path="/adapters/sql", **{place: ["both-0"]})  # type: ignore[arg-type]
    print_adapters([held])
    assert "0 is normal" not in capsys.readouterr().out
    unused = pb.LoadedAdapter(name="support", path="/adapters/support")
    print_status(pb.ServerInfo(model="m", ready=True, adapters=[held, unused]))
    assert "0 is normal" in capsys.readouterr().out
