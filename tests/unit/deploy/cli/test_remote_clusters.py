"""Logs of a process on a fake Ray."""

from typing import Any

import pytest

from tandem.deploy.cli import remote_clusters
from tandem.deploy.joined.remote_cluster import GoneError
from tandem.deploy.joined.remote_logs import LogError, ProcessLog

HERE, THERE = ProcessLog("a", "10.0.0.1", "/log", 0), ProcessLog("b", "10.0.0.2", "/log", 0)


class Cluster:
    """The latest life's log and the files' contents at each look; then the cluster ends."""

    def __init__(self, *turns: tuple[ProcessLog, dict[ProcessLog, str]]) -> None:
        self._turns = list(turns)

    def log_directory(self) -> str:
        return "/"

    def look(self) -> None:
        if len(self._turns) == 1:
            raise GoneError
        del self._turns[0]

    def find_logs(self, *_: str) -> list[ProcessLog]:
        return [self._turns[0][0]]

    def read(self, log: ProcessLog, position: int | None) -> tuple[str, int]:
        if log not in self._turns[0][1]:
            raise LogError(f"no {log.address}")
        text = self._turns[0][1][log]
        return text[position or 0 :], len(text)


@pytest.mark.timeout(20)
def test_a_process_is_followed_from_host_to_host_until_its_cluster_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster: Any = Cluster(
        (HERE, {HERE: "1"}),
        # The old log's end is read after the restart on another node, whose log is still empty.
        (THERE, {HERE: "12"}),
        (THERE, {}),
        (THERE, {}),
        (THERE, {THERE: "3"}),
        # The node comes back, and the old file still has the shown part.
        (HERE, {THERE: "34", HERE: "125"}),
        (HERE, {HERE: "125"}),
        (HERE, {HERE: "1256"}),
        (HERE, {}),
    )
    monkeypatch.setattr(remote_clusters, "find_logs", cluster.find_logs)
    monkeypatch.setattr(remote_clusters, "LogReader", lambda: cluster)
    for interval in ("_LOOK_INTERVAL_S", "_LIVES_INTERVAL_S"):
        monkeypatch.setattr(remote_clusters, interval, 0.0)
    assert remote_clusters._show_process_logs("chat", "prefill-0", cluster, follow=True) == 0
    assert capsys.readouterr().out == "12no 10.0.0.2\n3456no 10.0.0.1\n"
