import pytest

from tandem.pagestore.server.sessions import MAX_ASKED, Sessions


def test_a_closed_session_settles_with_its_process_or_its_next_session() -> None:
    sessions, gone = Sessions(), set[str]()
    for name in ("a", "b", "c"):
        session = sessions.open(name, name, lambda name=name: name in gone)
        session.writing[0] = 1
        assert sessions.close(name) is session
    assert (sessions.num_open, sessions.num_closed) == (0, 3)
    assert sessions.take_settled() == []
    gone.add("a")
    assert [session.name for session in sessions.take_settled()] == ["a"]
    assert [session.name for session in sessions.take_closed("c")] == ["c"]
    assert [session.name for session in sessions] == ["b"]


def test_a_closed_session_without_slots_is_not_kept() -> None:
    sessions = Sessions()
    sessions.open("a", "life", lambda: False)
    sessions.close("a")
    assert [session.name for session in sessions.take_settled()] == ["a"] and sessions.num_closed == 0


def test_a_bounded_number_of_processes_is_asked_for_at_a_time() -> None:
    sessions, asked = Sessions(), list[int]()

    def is_gone(number: int) -> bool:
        asked.append(number)
        return False

    for number in range(3 * MAX_ASKED):
        session = sessions.open(str(number), str(number), lambda number=number: is_gone(number))
        session.writing[number] = 1
        sessions.close(str(number))
    for part in range(3):
        sessions.take_settled()
        assert len(asked) == (part + 1) * MAX_ASKED
    assert asked == list(range(3 * MAX_ASKED))


def test_a_name_has_one_session() -> None:
    sessions = Sessions()
    sessions.open("a", "life", lambda: False)
    with pytest.raises(ValueError, match="open already"):
        sessions.open("a", "life", lambda: False)
    assert sessions.names_of("life") == ["a"] and sessions.names_of("other") == []
    with pytest.raises(ValueError, match="no session b"):
        sessions.get("b")
    assert sessions.close("b") is None
