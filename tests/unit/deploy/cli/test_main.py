"""The address of client commands, and their errors if no cluster answers."""

import socket
from collections.abc import Iterator

import pytest

from tandem.deploy.cli.main import main


@pytest.fixture
def closed_ports() -> Iterator[tuple[int, int]]:
    """Free ports that no other process can take."""
    with socket.socket() as one, socket.socket() as other:
        for bound in (one, other):
            bound.bind(("127.0.0.1", 0))
        yield one.getsockname()[1], other.getsockname()[1]


@pytest.mark.parametrize("command", [["status"], ["generate", "hi"]])
def test_the_option_goes_before_the_variable(
    command: list[str],
    closed_ports: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variable, option = (f"127.0.0.1:{port}" for port in closed_ports)
    monkeypatch.setenv("TANDEM_ADDRESS", variable)
    nobody = f"tandem {command[0]}: no cluster answers at {{}}; start one with `tandem serve`"
    assert main([*command, "--address", option]) == 1
    error = capsys.readouterr().err
    assert error.startswith(nobody.format(option)) and "TANDEM_ADDRESS" not in error
    assert main(command) == 1
    error = capsys.readouterr().err
    assert error.startswith(nobody.format(variable)) and error.endswith(f"({variable} comes from $TANDEM_ADDRESS)\n")


@pytest.mark.parametrize("address", ["localhost", "http://127.0.0.1:8000", "127.0.0.1:", "a b:1", ""])
def test_what_is_no_address_is_refused_where_it_came_from(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = f"must be HOST:PORT, of the cluster's gRPC port, not {address!r}\n"
    assert main(["status", "--address", address]) == 2
    assert capsys.readouterr().err == f"tandem status: --address {message}"
    if address:
        monkeypatch.setenv("TANDEM_ADDRESS", address)
        assert main(["status"]) == 2
        assert capsys.readouterr().err == f"tandem status: $TANDEM_ADDRESS {message}"


def test_a_host_without_a_name_is_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", "absent.invalid:50051"]) == 1
    assert capsys.readouterr().err.startswith("tandem status: no cluster answers at absent.invalid:50051; start one")


def test_one_that_is_silent_is_said_to_be(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.client.clients.TandemClient.server_info.__defaults__", (0.3,))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main(["status", "--address", address]) == 1
    assert capsys.readouterr().err == f"tandem status: {address} has not answered in time\n"


def test_ctrl_c_while_a_command_imports_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tandem.deploy.cli.main._cache", interrupted)
    assert main(["cache"]) == 130
