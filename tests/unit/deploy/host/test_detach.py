"""Commands that leave their terminal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from tandem.deploy.host.detach import run_detached

def main(on_ready):
    print("starting", flush=True)
    {body}
    return 0

sys.exit(run_detached(main, Path(sys.argv[1])))
"""


def start(body: str, log: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body=body), str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + 20.0
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "tandem.log"


def test_it_continues_in_its_own_session_once_ready(log: Path) -> None:
    log.write_text("of an earlier run")
    body = (
        "print('ready', os.getpid(), os.getsid(0), os.isatty(0), flush=True); on_ready(); time.sleep(1); print('over')"
    )
    process = start(body, log)
    output, errors = process.communicate(timeout=20.0)
    assert process.returncode == 0 and errors == ""
    started, ready = output.splitlines()
    _, pid, session, is_terminal = ready.split()
    assert started == "starting" and pid == session and is_terminal == "False"
    wait_for("over", log)
    assert log.read_text().startswith("starting\nready")


@pytest.mark.parametrize(("body", "status"), [("return 2", 2), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_an_early_end_returns_its_status(body: str, status: int, log: Path) -> None:
    process = start(body, log)
    output, _ = process.communicate(timeout=20.0)
    assert process.returncode == status and output == "starting\n"


def test_an_error_is_shown(log: Path) -> None:
    process = start("raise RuntimeError('a bug')", log)
    output, _ = process.communicate(timeout=20.0)
    assert process.returncode == 1 and "RuntimeError: a bug" in output


def test_ctrl_c_stops_a_command_that_is_not_ready(log: Path) -> None:
    stop = "signal.signal(signal.SIGTERM, lambda *_: (print('stopping', flush=True), os._exit(7)))"
    process = start(f"{stop}; print('set', flush=True); time.sleep(30)", log)
    wait_for("set", log)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=20.0)
    assert process.returncode == 7 and output.splitlines() == ["starting", "set", "stopping"]


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_clean_end_by_a_signal_is_a_failure(signum: int, status: int, log: Path) -> None:
    """`tandem serve --detach && tandem generate` must not continue."""
    stop = "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))"
    process = start(f"{stop}; print('set', flush=True); time.sleep(30)", log)
    wait_for("set", log)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=20.0)
    assert (process.returncode, errors) == (status, "Given up before it was ready\n")


def test_a_signal_right_after_the_fork_stops_the_child(log: Path) -> None:
    fork = "lambda fork=os.fork: (pid := fork()) and (os.kill(os.getpid(), signal.SIGINT), pid)[1]"
    script = SCRIPT.format(body="time.sleep(30)").replace("sys.exit(", f"os.fork = {fork}\nsys.exit(")
    process = subprocess.run([sys.executable, "-c", script, str(log)], capture_output=True, text=True, timeout=20.0)
    assert (process.returncode, process.stderr) == (128 + signal.SIGTERM, "")


def test_the_child_survives_a_killed_parent(log: Path) -> None:
    process = start("time.sleep(0.5); on_ready(); print('over', flush=True)", log)
    wait_for("starting", log)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=20.0)
    wait_for("over", log)


def test_a_hang_up_does_not_end_it(log: Path) -> None:
    process = start("os.kill(os.getpid(), signal.SIGHUP); print('still here', flush=True); on_ready()", log)
    output, _ = process.communicate(timeout=20.0)
    assert process.returncode == 0 and "still here" in output
