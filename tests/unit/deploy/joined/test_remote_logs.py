"""Finding and reading logs of processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.joined import remote_logs
from tandem.deploy.joined.remote_logs import LogError, LogReader, ProcessLog, find_logs, process_names
from tandem.deploy.on_ray.ray_module import ActorTableData

NODES = {"a": "10.0.0.1", "b": "10.0.0.2"}


def life(name: str, number: int, node: str, pid: int, cluster: str = "chat", began: int = 0) -> bytes:
    actor = ActorTableData(
        name=f"{name}.{number}", ray_namespace=f"tandem-{cluster}", pid=pid, start_time=began or number
    )
    actor.address.node_id, actor.address.ip_address = node.encode(), NODES[node]
    return bytes(actor.SerializeToString())


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    found: list[bytes] = []
    accessor = SimpleNamespace(get_actor_table=lambda *_: found)
    known = SimpleNamespace(state=SimpleNamespace(_connect_and_get_accessor=lambda: accessor))
    monkeypatch.setattr(remote_logs, "state", known)
    return found


def log(node: str, path: str, pid: int) -> ProcessLog:
    return ProcessLog(node.encode().hex(), NODES[node], path, pid)


def test_the_latest_life_comes_last_and_clusters_are_separate(lives: list[bytes]) -> None:
    lives += [life("prefill-0", 10, "b", 3), life("prefill-0", 9, "a", 2), life("prefill-0", 0, "a", 1)]
    lives += [life("prefill-0", 11, "a", 4, cluster="other"), life("router-0", 0, "a", 5)]
    # An actor that never ran has no pid.
    lives += [life("decode-0", 0, "a", 0)]
    assert find_logs("chat", "prefill-0", "") == [log("a", "", 1), log("a", "", 2), log("b", "", 3)]
    assert process_names("chat") == ["prefill-0", "router-0"]
    assert find_logs("chat", "decode-0", "") == []


def test_lives_of_an_earlier_cluster_come_first(lives: list[bytes]) -> None:
    lives += [life("prefill-0", 0, "a", 4, began=9_000), life("prefill-0", 3, "b", 3, began=8_000)]
    assert find_logs("chat", "prefill-0", "") == [log("b", "", 3), log("a", "", 4)]


@pytest.mark.parametrize("process", ["../router-0", "router-0.0", "/etc/passwd", "supervisor", ""])
@pytest.mark.parametrize("cluster", ["chat", "chat.2", "chat/.."])
def test_unknown_names_have_no_logs(lives: list[bytes], cluster: str, process: str) -> None:
    lives += [life("router-0", 0, "a", 1), life("router-0", 0, "b", 2, cluster="chat.3")]
    assert find_logs(cluster, process, "/var/log") == []


def test_lives_of_one_node_share_a_file(lives: list[bytes]) -> None:
    lives += [life("both-0", 0, "a", 1), life("both-0", 1, "b", 2), life("both-0", 2, "a", 3)]
    path = "/var/log/both-0.log"
    assert find_logs("chat", "both-0", "/var/log") == [log("b", path, 0), log("a", path, 0)]


def test_the_end_of_a_file_is_read_and_then_additions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "router-0.log"
    assert remote_logs._read(str(file), 0, -1, 4) == ("", b"", 0)
    file.write_bytes(b"0123456")
    path, data, position = remote_logs._read(str(file), 0, -1, 4)
    assert (path, data, position) == (str(file), b"3456", 7)
    assert remote_logs._read(path, 0, position, 4) == (path, b"", 7)
    with file.open("ab") as more:
        more.write(b"789abc")
    assert remote_logs._read(path, 0, position, 4) == (path, b"789a", 11)
    # The file was truncated meanwhile.
    file.write_bytes(b"01")
    assert remote_logs._read(path, 0, 11, 4) == (path, b"01", 2)

    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr(remote_logs, "ray_worker", SimpleNamespace(_global_node=node))
    (tmp_path / "worker-ab-01-77.err").write_bytes(b"said")
    assert remote_logs._read("", 77, -1, 10)[1] == b"said" and remote_logs._read("", 7, -1, 10)[0] == ""


def test_a_lost_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[dict[str, Any]] = [{"Alive": False, "NodeID": b"a".hex()}]
    monkeypatch.setattr(remote_logs, "ray", SimpleNamespace(nodes=lambda: nodes, remote=bool))
    with pytest.raises(LogError, match=r"10\.0\.0\.1.*is not in the Ray any more"):
        LogReader().read(log("a", "", 1), None)


def test_an_incomplete_character_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    of = ProcessLog("a1" * 28, "10.0.0.1", "f", 0)
    nodes: list[dict[str, Any]] = [{"Alive": True, "NodeID": of.node_id}]
    written, end = "a Jörg".encode(), 4
    made: list[Any] = []

    def remote(function: Any) -> Any:
        made.append(function)
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *asked: asked))

    played = SimpleNamespace(
        nodes=lambda: nodes,
        cloudpickle=SimpleNamespace(register_pickle_by_value=bool, unregister_pickle_by_value=bool),
        remote=remote,
        # First half of a character, then the rest.
        get=lambda asked, timeout: ("f", written[asked[2] : end], end),
    )
    monkeypatch.setattr(remote_logs, "ray", played)
    reader = LogReader()
    text, position = reader.read(of, 0)
    end = len(written)
    assert text + reader.read(of, position)[0] == "a Jörg"
    assert len(made) == 1, "Ray keeps each"
