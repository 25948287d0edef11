"""Kept responses stay within their bounds, and continued conversations stay whole."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.frontends.kept_responses import OVERHEAD_BYTES, KeptResponse, KeptResponses
from tests.fakes.clock import FakeClock

KEY, OTHER = "a", "b"


def keep(
    kept: KeptResponses, name: str, key: str = KEY, previous: KeptResponse | None = None, num_bytes: int = 10
) -> None:
    kept.keep(
        name,
        key,
        answer=b"a" * num_bytes,
        input_items=f"{name}?".encode(),
        output_items=f"{name}!".encode(),
        previous=previous,
    )


def said(response: KeptResponse | None) -> str:
    assert response is not None
    return b"".join(turn.input_items + turn.output_items for turn in response.turns()).decode()


def test_a_conversation_is_whole_though_its_beginning_is_forgotten() -> None:
    kept = KeptResponses(FakeClock())
    keep(kept, "1")
    keep(kept, "2", previous=kept.find("1", KEY))
    keep(kept, "3", previous=kept.find("2", KEY))
    assert kept.forget("1", KEY) and not kept.forget("1", KEY)
    assert kept.find("1", KEY) is None
    assert said(kept.find("3", KEY)) == "1?1!2?2!3?3!"
    kept.forget("3", KEY)
    kept.forget("2", KEY)
    assert (kept.num_responses, kept.num_bytes) == (0, 0)


def test_what_is_no_longer_kept_can_be_gone_on_with_by_who_has_found_it() -> None:
    """An answer may take minutes."""
    kept = KeptResponses(FakeClock())
    keep(kept, "1")
    keep(kept, "2", previous=kept.find("1", KEY))
    found = kept.find("2", KEY)
    kept.forget("1", KEY)
    kept.forget("2", KEY)
    assert kept.num_bytes == 0
    keep(kept, "3", previous=found)
    assert said(kept.find("3", KEY)) == "1?1!2?2!3?3!"
    kept.forget("3", KEY)
    assert kept.num_bytes == 0


def test_keys_know_nothing_of_each_other() -> None:
    kept = KeptResponses(FakeClock())
    keep(kept, "1")
    assert kept.find("1", OTHER) is None
    assert not kept.forget("1", OTHER)
    assert kept.find("1", KEY) is not None


def test_they_age_by_their_last_use() -> None:
    clock = FakeClock()
    kept = KeptResponses(clock, max_age_s=10.0)
    keep(kept, "1")
    keep(kept, "2")
    clock.advance(8.0)
    assert kept.find("1", KEY)
    clock.advance(8.0)
    assert kept.find("1", KEY) and kept.find("2", KEY) is None
    clock.advance(11.0)
    keep(kept, "3", OTHER)
    assert kept.num_responses == 1


def test_the_key_with_most_makes_room() -> None:
    kept = KeptResponses(FakeClock(), max_bytes=20 * (OVERHEAD_BYTES + 1000))
    keep(kept, "other", OTHER, num_bytes=500)
    for number in range(100):
        keep(kept, str(number), num_bytes=900)
    assert kept.find("other", OTHER)
    assert kept.find("0", KEY) is None and kept.find("99", KEY)
    keep(kept, "large", num_bytes=10**6)
    assert kept.find("large", KEY) is None
    assert kept.find("other", OTHER)


KEYS = st.sampled_from([KEY, OTHER])
NAMES = st.integers(0, 12).map(str)
STEPS = st.lists(
    st.tuples(st.sampled_from(["keep", "go on", "forget", "wait"]), KEYS, NAMES, st.integers(0, 3000)), max_size=60
)


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_nothing_is_counted_twice_or_stays_behind(steps: list[tuple[str, str, str, int]]) -> None:
    clock = FakeClock()
    kept = KeptResponses(clock, max_responses=8, max_bytes=12_000, max_age_s=30.0)
    conversations: dict[str, str] = {}
    for number, (action, key, name, amount) in enumerate(steps):
        new = f"n{number}"
        if action == "keep":
            conversations[new] = f"{new}?{new}!"
            keep(kept, new, key, num_bytes=amount)
        elif action == "go on":
            names = [n for n in conversations if kept.find(n, key)]
            if names:
                previous = names[amount % len(names)]
                conversations[new] = f"{conversations[previous]}{new}?{new}!"
                keep(kept, new, key, kept.find(previous, key), num_bytes=amount)
        elif action == "forget":
            kept.forget(f"n{name}", key)
        else:
            clock.advance(amount / 100)
        assert kept.num_responses <= 8 and 0 <= kept.num_bytes <= 12_000
        for known, text in conversations.items():
            if (found := kept.find(known, key)) is not None:
                assert said(found) == text
    for name in conversations:
        for key in (KEY, OTHER):
            kept.forget(name, key)
    assert (kept.num_responses, kept.num_bytes) == (0, 0)
