from hypothesis import given
from hypothesis import strategies as st

from tandem.pagestore.server.disk.page_index import PageIndex, Place, Segment
from tandem.pagestore.server.disk.segment_format import Entry
from tests.fakes.disk_pages import stored_page

NUM_KEYS = 6
# Which act, and a key or a segment's rank by age.
ACTS = st.lists(
    st.tuples(st.sampled_from(["segment", "add", "old", "retire", "clean", "forget", "take"]), st.integers(0, 5))
)


@given(ACTS)
def test_the_index_matches_a_model(acts: list[tuple[str, int]]) -> None:
    index = PageIndex()
    alive: dict[int, dict[int, int]] = {}  # segment -> position -> page
    retired: list[Segment] = []
    reported: set[bytes] = set()
    next_number = 0

    def place(page: int) -> Place | None:
        places = [Place(s, p) for s, pages in alive.items() for p, stored in pages.items() if stored == page]
        assert len(places) <= 1
        return places[0] if places else None

    def add(number: int, page: int) -> None:
        segment = index.segments[number]
        position = len(segment.keys)
        former = place(page)
        index.add(segment, position, Entry(stored_page(page), page))
        if former is None or former.segment <= number:
            if former:
                del alive[former.segment][former.position]
            alive[number][position] = page

    for act, n in acts:
        if act == "segment":
            index.add_segment(Segment(next_number, 100))
            alive[next_number] = {}
            next_number += 1
        elif act in ("add", "old") and alive:
            add(max(alive) if act == "add" else min(alive), n)
        elif act == "retire" and alive:
            number = sorted(alive)[n % len(alive)]
            retired.append(index.retire(number))
            del alive[number]
        elif act == "clean" and retired:
            index.clean(retired.pop())
        elif act == "forget":
            where = place(n)
            index.forget(stored_page(n).key, where or Place(0, 0))
            if where:
                del alive[where.segment][where.position]
        elif act == "take":
            take(index, reported)
        for page in range(NUM_KEYS):
            assert index.place(stored_page(page).key) == place(page)
            assert index.find(stored_page(page).key) == (stored_page(page) if place(page) else None)
        assert index.num_pages == sum(map(len, alive.values()))
        assert index.num_bytes == 100 * len(alive)
        assert [*index.segments] == sorted(alive)
    for segment in retired:
        index.clean(segment)
    take(index, reported)
    assert reported == {stored_page(page).identity for page in range(NUM_KEYS) if place(page)}
    retired = index.retire_all()
    assert (index.num_pages, index.num_bytes, index.segments) == (0, 0, {})
    for segment in retired:
        index.clean(segment)
    take(index, reported)
    assert not reported


def take(index: PageIndex, reported: set[bytes]) -> None:
    added, removed = index.changes.take()
    assert not {*added} & reported
    assert {*removed} <= reported
    reported |= {*added}
    reported -= {*removed}
