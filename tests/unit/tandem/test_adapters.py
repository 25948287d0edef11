"""Books of adapters."""

import itertools

import pytest

from tandem.adapters import MAX_UNLOADED, AdapterBook, AdapterEntry, AdapterRef, check_adapter_name


def ref(content: str) -> AdapterRef:
    return AdapterRef(content, f"/adapters/{content}", 8, ("q_proj",), 1000)


ENTRIES = (
    AdapterEntry("a", 1, "r0", ref("one")),
    AdapterEntry("a", 2, "r1"),
    AdapterEntry("a", 2, "r2", ref("two")),
    AdapterEntry("b", 5, "r0", ref("one")),
)


def test_books_agree_whatever_the_order_of_their_news() -> None:
    found = set()
    for order in itertools.permutations(ENTRIES):
        book = AdapterBook()
        for entry in order:
            book.merge([entry])
        found.add(frozenset(book.entries()))
    assert found == {frozenset(ENTRIES[2:])}


def test_only_later_entries_are_news() -> None:
    book = AdapterBook()
    assert book.merge(ENTRIES) == list(ENTRIES)
    assert book.merge(ENTRIES) == []


def test_a_change_is_later_than_all_that_is_known_even_by_a_slow_clock() -> None:
    book = AdapterBook()
    book.merge([AdapterEntry("a", 900, "fast", ref("one"))])
    book.merge([book.change("a", None, "slow", now_ns=5)])
    assert book.find("a") is None and book.content_hashes() == frozenset()


def test_unloaded_names_do_not_come_back_and_do_not_pile_up() -> None:
    book = AdapterBook()
    for number in range(3 * MAX_UNLOADED):
        loaded = book.change(f"n{number}", ref("one"), "r", number)
        book.change(f"n{number}", None, "r", number)
        assert book.merge([loaded]) == []
    assert len(book.entries()) == MAX_UNLOADED and not book.loaded()


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\x00b"])
def test_names_are_printable(name: str) -> None:
    with pytest.raises(ValueError, match="an adapter's name must be 1 to 256 printable characters"):
        check_adapter_name(name)
