"""Commands on this host's clusters, by name."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.deploy.cli import clusters, starting
from tandem.deploy.cli.main import main
from tandem.deploy.host.run_record import RunAbout, RunOwner, control_path, write_record
from tandem.deploy.supervise.control import ControlServer
from tandem.processes import ProcessId


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    monkeypatch.setattr(clusters, "default_directory", lambda: directory)
    return directory


@pytest.fixture
def owner() -> Iterator[RunOwner]:
    """Stands for guard and launcher."""
    process = subprocess.Popen(["sleep", "60"])
    yield RunOwner(ProcessId.of(process.pid), ProcessId.of(process.pid))
    process.kill()
    process.wait()


def about(directory: Path, state: str = "serving") -> RunAbout:
    return RunAbout("chat", state, "0.0.0.0:1", "0.0.0.0:2", str(directory / "tandem.log"), str(directory), 5.0)


@pytest.mark.parametrize("command", ["stop", "logs", "scale --decode 2", "restart router-0", "status nobody"])
def test_a_cluster_that_is_not_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 1
    name = "nobody" if "nobody" in command else "tandem"
    assert capsys.readouterr().err == f"tandem: no cluster named {name} runs on this host\n"
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "no cluster runs on this host\n"


def test_where_the_logs_of_one_that_has_ended_are(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = directory / "clusters" / "chat"
    logs.mkdir(parents=True)
    assert main(["logs", "chat"]) == 1
    assert f"no cluster named chat runs on this host; the last one's logs are in {logs}" in capsys.readouterr().err


def test_the_ones_that_are_there_are_named(
    directory: Path, owner: RunOwner, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(directory, owner, [], about(directory, "starting"))
    # A cluster without a name is not found.
    me = ProcessId.of(os.getpid())
    write_record(directory, RunOwner(me, me), [])
    assert main(["stop"]) == 1
    assert "there are: chat" in capsys.readouterr().err
    assert main(["list"]) == 0
    _, listed = capsys.readouterr().out.splitlines()
    assert listed.split() == [
        "chat",
        "starting",
        str(owner.guard.pid),
        "0.0.0.0:1",
        "0.0.0.0:2",
    ]
    assert main(["scale", "chat", "--decode", "2"]) == 1
    assert capsys.readouterr().err == "tandem: the cluster chat is starting\n"


def test_scale_shows_what_is_done_and_why_it_cannot_be(
    directory: Path, owner: RunOwner, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(directory, owner, [], about(directory))
    error = {"error": "", "is_usage": False}
    asked = []

    def answer(question: object) -> Iterator[dict[str, object]]:
        asked.append(question)
        yield {"line": "decode-1: starting"}
        yield {"line": ""}
        yield error

    server = ControlServer(control_path(directory, owner), answer)
    assert main(["scale", "chat", "--decode", "2:4", "--both", "0"]) == 0
    assert asked == [{"do": "scale", "counts": {"decode": "2:4", "both": "0"}}]
    assert capsys.readouterr().out == "decode-1: starting\n"
    assert main(["restart", "chat", "decode-1"]) == 0
    assert asked.pop() == {"do": "restart", "process": "decode-1"}
    assert capsys.readouterr().out == "decode-1: starting\n"
    error |= {"error": "no room", "is_usage": True}
    assert main(["scale", "chat", "--decode", "2"]) == 2
    assert capsys.readouterr().err == "tandem: no room\n"
    server.close()
    assert main(["scale", "chat", "--decode", "2"]) == 1
    assert "does not answer: No such file" in capsys.readouterr().err
    assert main(["scale", "chat"]) == 2


def test_logs_of_the_cluster_and_of_its_processes(
    directory: Path, owner: RunOwner, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(directory, owner, [], about(directory))
    (directory / "tandem.log").write_text("Ready\n")
    (directory / "decode-0.log").write_text("engine ready\n")
    assert main(["logs", "chat"]) == 0
    assert capsys.readouterr().out == "Ready\n"
    assert main(["logs", "chat", "decode-0"]) == 0
    assert capsys.readouterr().out == "engine ready\n"
    assert main(["logs", "chat", "decode-1"]) == 1
    assert capsys.readouterr().err == "tandem: the cluster chat has no log of decode-1; there are: decode-0\n"
    assert main(["logs", "chat", "../../secret"]) == 2


def test_where_the_logs_of_a_cluster_in_a_terminal_are(
    directory: Path, owner: RunOwner, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(directory, owner, [], replace(about(directory), log="", log_dir=""))
    assert main(["logs", "chat"]) == 1
    error = capsys.readouterr().err
    assert "the terminal that it was started in" in error and "start it with --detach" in error
    assert main(["logs", "chat", "decode-0"]) == 1
    assert f"under {directory / 'ray'} " in capsys.readouterr().err
    write_record(directory, owner, [], replace(about(directory), log=""))
    assert main(["logs", "chat"]) == 1
    assert "(tandem logs chat PROCESS)" in capsys.readouterr().err


def test_logs_are_followed_until_the_cluster_ends(directory: Path, owner: RunOwner) -> None:
    write_record(directory, owner, [], about(directory))
    log = directory / "tandem.log"
    log.write_text("Ready\n")
    script = f"""
import sys
from pathlib import Path
from tandem.deploy.cli import clusters, starting
clusters.default_directory = lambda: Path({str(directory)!r})
sys.exit(clusters.show_logs("chat", "", follow=True))
"""
    follower = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None and follower.stdout.readline() == "Ready\n"
    with log.open("a") as file:
        file.write("Stopping\n")
    assert follower.stdout.readline() == "Stopping\n"
    with log.open("a") as file:
        log.rename(directory / "tandem.log.1")
        file.write("The last line of the old file\n")
    log.write_text("The first line of the new file\n")
    assert follower.stdout.readline() == "The last line of the old file\n"
    assert follower.stdout.readline() == "The first line of the new file\n"
    subprocess.run(["kill", str(owner.guard.pid)], check=True)
    assert follower.wait(10.0) == 0


def test_stop_asks_the_guard_and_waits_for_its_end(
    directory: Path, owner: RunOwner, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(directory, owner, [], about(directory))
    assert main(["stop", "chat"]) == 0
    assert capsys.readouterr().out == "The cluster chat has ended\n" and not owner.guard.is_alive()


def test_a_name_or_an_address(capsys: pytest.CaptureFixture[str], directory: Path, owner: RunOwner) -> None:
    assert main(["status", "chat", "--address", "127.0.0.1:1"]) == 2
    assert "not both" in capsys.readouterr().err
    # No process listens at the recorded port.
    write_record(directory, owner, [], about(directory))
    assert main(["status", "chat"]) == 1
    assert "no cluster answers at 127.0.0.1:1;" in capsys.readouterr().err


@pytest.mark.parametrize("grpc", ["", "0.0.0.0:1"])
@pytest.mark.parametrize("command", [["status"], ["generate", "hi"], ["bench"]])
def test_a_cluster_that_is_starting_is_named(
    command: list[str],
    grpc: str,
    directory: Path,
    owner: RunOwner,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starting, "default_directory", lambda: directory)
    monkeypatch.setenv("TANDEM_ADDRESS", "127.0.0.1:1")
    write_record(directory, owner, [], replace(about(directory, "starting"), grpc=grpc))
    assert main(command) == 1
    assert (
        f"tandem {command[0]}: no cluster answers at 127.0.0.1:1 yet: the cluster chat is starting"
        in capsys.readouterr().err
    )
    write_record(directory, owner, [], replace(about(directory, "starting"), grpc="0.0.0.0:77"))
    assert main(command) == 1
    assert "no cluster answers at 127.0.0.1:1; start one" in capsys.readouterr().err
