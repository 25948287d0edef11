"""Uses of adapters at a worker's schedulers."""

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.messages import Failed, Unservable
from tandem.prefix import adapted_namespace
from tandem.worker.adapter_uses import (
    LINGER_S,
    LOAD_TIMEOUT_S,
    LOOK_S,
    NO_USE,
    RETRY_S,
    AdapterUse,
    AdapterUses,
    adapter_failure,
)
from tests.fakes.clock import FakeClock
from tests.fakes.scripted_adapters import ScriptedAdapters, make_ref


def begin(uses: AdapterUses, content: str, path: str = "") -> AdapterUse:
    return uses.begin(make_ref(content, path), adapted_namespace("", content))


def test_a_use_is_held_once_its_adapter_is_loaded_until_its_end() -> None:
    adapters, clock = ScriptedAdapters(), FakeClock()
    uses = AdapterUses(adapters, clock)
    use = begin(uses, "a")
    assert use.is_loading and not use.try_hold() and use.slot == NO_ADAPTER
    adapters.finish("a")
    clock.advance(0.01)
    assert not use.is_loading and use.try_hold() and use.slot == 0 and adapters.uses["a"] == 1
    assert use.try_hold() and adapters.uses["a"] == 1
    use.end()
    use.end()
    assert adapters.uses["a"] == 0 and use.slot == NO_ADAPTER


def test_without_an_adapter_there_is_nothing_to_wait_for() -> None:
    uses = AdapterUses(None, FakeClock())
    assert uses.begin(None, "") is NO_USE and NO_USE.try_hold() and uses.poll() is None
    refused = begin(uses, "a")
    assert not refused.try_hold()
    assert isinstance(adapter_failure("r", 0, refused), Unservable)


def test_pages_of_another_adapter_are_never_used() -> None:
    uses = AdapterUses(ScriptedAdapters(), FakeClock())
    for ref, namespace in ((make_ref("a"), ""), (make_ref("a"), adapted_namespace("", "b")), (None, "\0a")):
        use = uses.begin(ref, namespace)
        assert not use.try_hold() and "belong to another adapter" in use.failure


def test_an_adapter_without_a_slot_has_no_turn_until_another_is_unused() -> None:
    adapters, clock = ScriptedAdapters(max_loras=1), FakeClock()
    uses = AdapterUses(adapters, clock)
    first, second = begin(uses, "a"), begin(uses, "b")
    for name in ("a", "b"):
        adapters.finish(name)
    clock.advance(0.01)
    assert first.try_hold()
    assert not second.has_turn and not second.try_hold()
    first.end()
    clock.advance(0.01)
    assert second.has_turn and adapters.uses["b"] == 0 and second.try_hold()


def test_a_failed_load_ends_its_requests_and_is_tried_again_for_later_ones() -> None:
    adapters, clock = ScriptedAdapters(), FakeClock()
    uses = AdapterUses(adapters, clock)
    use, beside = begin(uses, "a"), begin(uses, "a")
    adapters.fail("a", "the files have changed")
    assert not use.try_hold()
    assert adapter_failure("r", 1, use) == Failed("r", 1, "the adapter cannot be used: the files have changed")
    assert not beside.try_hold() and beside.failure
    elsewhere = begin(uses, "a", "/other")
    assert not elsewhere.failure and adapters.known["a"] == "/other", "another name's path"
    adapters.fail("a", "gone too")
    assert not elsewhere.try_hold()
    assert not begin(uses, "a", "/other").try_hold()
    clock.advance(RETRY_S + 0.1)
    assert not begin(uses, "a", "/other").failure and adapters.acquire("a") is None


def test_a_load_that_never_ends_fails_its_request() -> None:
    adapters, clock = ScriptedAdapters(), FakeClock()
    uses = AdapterUses(adapters, clock)
    use = begin(uses, "a")
    uses.poll()
    clock.advance(LOAD_TIMEOUT_S + 1.0)
    assert not use.is_loading and not use.try_hold()
    assert use.may_do_better and "not loaded within 60 s" in use.failure


def test_routers_are_told_changed_places_and_the_rate_of_loads() -> None:
    adapters, clock = ScriptedAdapters(), FakeClock()
    uses = AdapterUses(adapters, clock)
    use = begin(uses, "a")
    assert uses.poll() is None
    clock.advance(1.0)
    adapters.finish("a")
    places = uses.poll()
    assert places is not None and (places.on_device, places.in_host) == ((), ("a",))
    assert places.load_byte_s == 1e-6
    clock.advance(LOOK_S)
    assert uses.poll() is None, "nothing has changed"
    assert use.try_hold()
    clock.advance(LOOK_S)
    places = uses.poll()
    assert places is not None and (places.on_device, places.in_host) == (("a",), ())
    stats = uses.stats()
    assert (stats.num_adapters_on_device, stats.num_adapter_loads, stats.adapter_load_ns) == (1, 1, 10**9)


def test_unloaded_adapters_are_forgotten_after_their_last_request() -> None:
    adapters, clock = ScriptedAdapters(), FakeClock()
    uses = AdapterUses(adapters, clock)
    use = begin(uses, "a")
    begin(uses, "listed").end()
    clock.advance(2 * LINGER_S)
    uses.poll()
    assert set(adapters.known) == {"a", "listed"}, "no router has named any"
    uses.set_listed(frozenset({"listed"}))
    clock.advance(2 * LINGER_S)
    uses.poll()
    assert "a" in adapters.known, "a request waits for it"
    use.end()
    clock.advance(2 * LINGER_S)
    uses.poll()
    assert set(adapters.known) == {"listed"}
