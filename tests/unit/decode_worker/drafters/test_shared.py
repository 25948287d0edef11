from tandem.decode_worker.drafters.shared import MAX_NAMESPACES, SHARED_SOURCE, SharedLookup, SharedOutputs

OUTPUT = [1, 2, 3, 4, 5, 6]


def drafts(outputs: SharedOutputs, namespace: str) -> list[int]:
    return [*SharedLookup(outputs, namespace).propose([9, 1, 2, 3], 2)]


def test_only_requests_of_the_same_namespace_draft_from_an_output() -> None:
    outputs = SharedOutputs()
    outputs.set_owners(("key", "other"))
    outputs.add("key/", OUTPUT)
    assert drafts(outputs, "key/") == [4, 5]
    for namespace in ("other/", "key/user", "key/\0adapter", "key", "", "/"):
        assert drafts(outputs, namespace) == []


def test_nothing_is_kept_without_a_key() -> None:
    outputs = SharedOutputs()
    # Before a router has named keys, too.
    for namespace in ("", "/", "name", "key/"):
        outputs.add(namespace, OUTPUT)
        assert drafts(outputs, namespace) == []


def test_outputs_are_forgotten_with_their_key() -> None:
    outputs = SharedOutputs()
    outputs.set_owners(("key", "other"))
    outputs.add("key/", OUTPUT)
    outputs.add("key/user", OUTPUT)
    outputs.add("other/", OUTPUT)
    outputs.set_owners(("other",))
    # A request that was running ends.
    outputs.add("key/", OUTPUT)
    assert drafts(outputs, "key/") == drafts(outputs, "key/user") == []
    assert drafts(outputs, "other/") == [4, 5]
    outputs.set_owners(("key", "other"))
    assert drafts(outputs, "key/") == []


def test_the_least_recently_used_namespace_makes_room() -> None:
    outputs = SharedOutputs()
    outputs.set_owners(("key",))
    for number in range(MAX_NAMESPACES + 1):
        outputs.add(f"key/{number}", OUTPUT)
        outputs.add("key/0", OUTPUT)
    assert drafts(outputs, "key/1") == []
    assert drafts(outputs, "key/0") == drafts(outputs, "key/2") == [4, 5]


def test_the_longer_repetition_is_continued_and_names_its_source() -> None:
    outputs = SharedOutputs()
    outputs.set_owners(("key",))
    outputs.add("key/", OUTPUT)
    lookup = SharedLookup(outputs, "key/")
    assert (lookup.propose([1, 2, 3, 7, 0, 1, 2, 3], 2), lookup.source) == ([7, 0], "")
    assert (lookup.propose([1, 2, 3, 7, 0, 1, 2, 3, 4], 2), lookup.source) == ([5, 6], SHARED_SOURCE)
    assert (lookup.propose([1, 2, 3, 7, 0, 1, 2, 3, 4, 8], 2), lookup.source) == ([], "")
