from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tandem.messages import PageFormat
from tandem.pagestore.keys import KEY_BYTES, page_key, page_keys, root_key

FORMAT = PageFormat("f" * 32, 4096, "page_size=16 float32")


def test_keys_chain_page_by_page() -> None:
    root = root_key(FORMAT, "a")
    keys = page_keys(root, range(11), 4)
    assert keys == [page_key(root, [0, 1, 2, 3]), page_key(keys[0], [4, 5, 6, 7])]
    assert all(len(key) == KEY_BYTES for key in keys)


def test_every_field_of_a_root_counts() -> None:
    roots = [
        root_key(FORMAT, ""),
        root_key(FORMAT, "a"),
        root_key(FORMAT, "", adapter="a"),
        root_key(replace(FORMAT, model_fingerprint="e" * 32), ""),
        root_key(replace(FORMAT, layout="page_size=16 float16"), ""),
        root_key(replace(FORMAT, page_bytes=8192), ""),
    ]
    assert len({*roots}) == len(roots)


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_fields_do_not_run_into_each_other(one: tuple[str, str], other: tuple[str, str]) -> None:
    equal = root_key(FORMAT, one[0], adapter=one[1]) == root_key(FORMAT, other[0], adapter=other[1])
    assert equal == (one == other)
