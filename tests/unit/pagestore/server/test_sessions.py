import pytest

from tandem.pagestore.server.sessions import Sessions
from tests.fakes.store_client import hello


def test_a_closed_session_settles_with_its_process_or_its_next_session() -> None:
    sessions, gone = Sessions(), set[str]()
    for name in ("a", "b", "c"):
        sessions.open(name, hello(incarnation=name), lambda name=name: name in gone)
        assert sessions.close(name) is not None
    assert (sessions.num_open, sessions.num_closed) == (0, 3)
    assert sessions.take_settled() == []
    gone.add("a")
    assert [session.name for session in sessions.take_settled()] == ["a"]
    assert [session.name for session in sessions.take_settled("c")] == ["c"]
    assert [session.name for session in sessions] == ["b"]


def test_a_name_has_one_session() -> None:
    sessions = Sessions()
    sessions.open("a", hello("life"), lambda: False)
    with pytest.raises(ValueError, match="open already"):
        sessions.open("a", hello("life"), lambda: False)
    assert sessions.names_of("life") == ["a"] and sessions.names_of("other") == []
    with pytest.raises(ValueError, match="no session b"):
        sessions.get("b")
    assert sessions.close("b") is None
