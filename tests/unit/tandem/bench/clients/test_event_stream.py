"""Events are parsed from any split of their bytes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.clients.event_stream import EventParser

STREAM = (
    b'id: 1\ndata: {"a": "\xc3\xa9"}\n\n:\n:comment\n\nevent: x\r\ndata:{"b"}\r\n\r\ndata: one\ndata: two\n\n\n'
    b"data: [DONE]\n\ndata: not whole"
)
EVENTS = [b'{"a": "\xc3\xa9"}', b'{"b"}', b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_events_are_the_same_for_every_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    found = [event for a, b in pairwise(places) for event in parser.feed(STREAM[a:b])]
    assert found == EVENTS
