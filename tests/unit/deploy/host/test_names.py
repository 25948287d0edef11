"""A cluster keeps its name until it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.deploy.host.names import ClusterName, NameTakenError


def test_a_name_belongs_to_one_cluster_until_closed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    first = ClusterName(directory, "chat")
    with pytest.raises(NameTakenError, match="chat"):
        ClusterName(directory, "chat")
    other = ClusterName(directory, "chat-2")
    first.close()
    again = ClusterName(directory, "chat")
    again.close()
    other.close()
    assert list(directory.iterdir()) == []


def test_a_name_is_free_once_its_process_was_killed(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from tandem.deploy.host.names import ClusterName
name = ClusterName(Path({str(tmp_path)!r}), "chat")
print("taken", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"taken\n"
    with pytest.raises(NameTakenError):
        ClusterName(tmp_path, "chat")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    ClusterName(tmp_path, "chat").close()


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError):
        ClusterName(tmp_path, "chat")
