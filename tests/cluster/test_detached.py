"""Clusters that outlive their terminal, addressed by name."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.deploy.host.process_tree import descendants, end_processes
from tandem.deploy.host.run_record import Run, default_directory, find_runs
from tests.cluster.command import GONE_S, START_S, TANDEM, own_name, tandem
from tests.cluster.conftest import Clusters, Oracle, wait_until
from tests.cluster.request_stream import RequestStream


def find(name: str) -> Run | None:
    return next((run for run in find_runs(default_directory()) if run.about.name == name), None)


@pytest.fixture
def name(clusters: Clusters) -> Iterator[str]:
    clusters.close()
    _, name = own_name()
    yield name
    if (run := find(name)) is not None:
        end_processes([run.owner.guard, run.owner.launcher, *descendants(run.owner.guard.pid)], 5.0)


PORTS = ("--grpc-port", "0", "--http-port", "0")


def serve(name: str, model_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    pool = ("--threads", "1", "--num-pages", "128", "--chunk-size", "48")
    return tandem("serve", "--name", name, "--detach", "--model", str(model_dir), *PORTS, *pool, *more)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lifecycle_without_a_terminal(name: str, tiny_model_dir: Path, tiny_oracle: Oracle) -> None:
    done = serve(name, tiny_model_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ready after" in done.stdout and f"stop {name}" in done.stdout
    run = find(name)
    assert run is not None and run.about.state == "serving"
    guard = run.owner.guard
    # The guard has its own session and process group.
    assert os.getsid(guard.pid) == guard.pid and os.getpgid(guard.pid) != os.getpgrp()
    assert name in tandem("list").stdout
    assert serve(name, tiny_model_dir).stderr.startswith(f"tandem: a cluster named {name} runs here already (pid ")
    assert tandem("generate", "--address", run.about.grpc, "--max-tokens", "2", "hi").returncode == 0

    with RequestStream(run.about.grpc, tiny_oracle) as stream:
        stream.wait_more(3)
        up = tandem("scale", name, "--prefill", "2", "--decode", "3")
        assert up.returncode == 0, up.stderr
        status = tandem("status", name)
        assert status.returncode == 0 and "decode-2" in status.stdout and "prefill-1" in status.stdout
        stream.wait_more(20)
        # Uses the new workers too.
        down = tandem("scale", name, "--prefill", "1", "--decode", "1")
        assert down.returncode == 0, down.stderr
        assert "decode-2: has left" in down.stdout and "prefill-1: has left" in down.stdout
        status = tandem("status", name)
        assert "decode-0" in status.stdout and "decode-1" not in status.stdout
        stream.wait_more(10)
        # Only workers that die are restarted.
        processes = [p for p in descendants(guard.pid) if "WorkerActor" in Path(f"/proc/{p.pid}/cmdline").read_text()]
        assert len(processes) == 2
        os.kill(processes[0].pid, signal.SIGKILL)
        stream.wait_more(10)
    mixed = tandem("scale", name, "--workers", "2")
    assert mixed.returncode == 2 and "say how many with --prefill, --decode and --both" in mixed.stderr
    refused = tandem("scale", name, "--decode", "0")
    assert refused.returncode == 2 and "both kinds are needed" in refused.stderr

    assert "Ready after" in tandem("logs", name).stdout
    assert "engine ready" in tandem("logs", name, "decode-0").stdout
    missing = tandem("logs", name, "decode-7")
    assert missing.returncode == 1 and "there are: decode-0, decode-1" in missing.stderr
    following = subprocess.Popen([TANDEM, "logs", name, "--follow"], stdout=subprocess.PIPE, text=True)

    tree = [guard, *descendants(guard.pid)]
    stopped = tandem("stop", name)
    assert stopped.returncode == 0, stopped.stderr
    assert [p for p in tree if p.is_alive()] == []
    output, _ = following.communicate(timeout=GONE_S)
    assert "Stopping" in output
    assert find(name) is None and tandem("stop", name).returncode == 1


@pytest.mark.slow
def test_cluster_survives_its_terminal_and_stop_drains(name: str, tiny_model_dir: Path, tiny_oracle: Oracle) -> None:
    command = ["serve", "--name", name, "--detach", "--model", str(tiny_model_dir), "--both", "1", "--threads", "1"]
    shell = subprocess.Popen(
        [
            "sh",
            "-c",
            '"$@"; sleep 60',
            "sh",
            TANDEM,
            *command,
            *PORTS,
        ],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    run = wait_until(lambda: (r := find(name)) and r.about.state == "serving" and r, START_S, "it serves")
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
    with RequestStream(run.about.grpc, tiny_oracle, max_tokens=200) as stream:
        stream.wait_more(3)
        assert run.owner.guard.is_alive()
        stream.stop()
        assert tandem("stop", name).returncode == 0
    assert not run.owner.guard.is_alive()


@pytest.mark.slow
def test_failed_or_stopped_start_cleans_up(name: str, tiny_model_dir: Path) -> None:
    failed = serve(name, Path("/nowhere"))
    assert failed.returncode == 2 and "'/nowhere' not found" in failed.stdout
    process = subprocess.Popen(
        [
            TANDEM,
            "serve",
            "--name",
            name,
            "--detach",
            "--model",
            str(tiny_model_dir),
            *PORTS,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(process.stdout or ()))
    reader.start()
    run = wait_until(lambda: find(name), START_S, "it starts")
    wait_until(lambda: "decode-0: starting" in "".join(output), START_S, "Ray is up")
    tree = {run.owner.guard, *descendants(run.owner.guard.pid)}
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(2 * GONE_S) == 128 + signal.SIGINT
    reader.join()
    assert [p for p in tree if p.is_alive()] == [] and find(name) is None


@pytest.mark.slow
def test_sighup_makes_a_detached_cluster_read_its_keys_again(name: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("first\n")
    done = serve(name, tiny_model_dir, "--api-key-file", str(keys))
    assert done.returncode == 0, done.stdout + done.stderr
    run = find(name)
    assert run is not None

    def is_admitted(key: str) -> bool:
        return tandem("status", "--address", run.about.grpc, "--api-key", key).returncode == 0

    assert is_admitted("first")
    keys.write_text("second\n")
    os.kill(run.owner.guard.pid, signal.SIGHUP)
    wait_until(lambda: is_admitted("second"), START_S, "the new key is taken")
    assert not is_admitted("first") and run.owner.guard.is_alive()
    assert tandem("stop", name).returncode == 0
