"""Requests wait for their adapters at both workers, without holding up others."""

import pytest

from tandem.messages import Failed, Finished, FirstToken, Unservable
from tandem.prefix import adapted_namespace
from tests.fakes.engine import expected_tokens
from tests.fakes.scripted_adapters import ScriptedAdapters, make_ref
from tests.fakes.workers import WorkerPair

PROMPT = list(range(10))


class Pair(WorkerPair):
    """Attributes: at_prefill, at_decode: the workers' adapters."""

    def __init__(self, max_loras: int = 2) -> None:
        self.at_prefill, self.at_decode = ScriptedAdapters(max_loras), ScriptedAdapters(max_loras)
        super().__init__(prefill={"adapters": self.at_prefill}, adapters=self.at_decode)

    def ask(self, name: str, content: str = "", prompt: list[int] = PROMPT, max_tokens: int = 5) -> None:
        ref = make_ref(content) if content else None
        namespace = adapted_namespace("", content)
        self.submit(name, prompt, max_tokens=max_tokens, adapter=ref, cache_namespace=namespace)

    def finish(self, content: str) -> None:
        for adapters in (self.at_prefill, self.at_decode):
            adapters.finish(content)

    def go_on(self) -> None:
        for _ in range(3):
            self.clock.advance(0.01)
            self.run()

    def finished(self) -> list[str]:
        return [message.request_id for message in self.d.outbox.of(Finished)]

    def check_unused(self) -> None:
        self.check_idle()
        assert not any(self.at_prefill.uses.values()) and not any(self.at_decode.uses.values())


def test_others_overtake_a_request_that_waits_at_prefill() -> None:
    pair = Pair()
    pair.ask("waits", "a")
    pair.ask("plain")
    pair.go_on()
    assert pair.finished() == ["plain"]
    pair.finish("a")
    pair.go_on()
    assert pair.finished() == ["plain", "waits"]
    assert pair.output("waits") == expected_tokens(PROMPT, 5)
    pair.check_unused()


def test_others_are_decoded_while_a_request_waits_at_the_decode_worker() -> None:
    pair = Pair()
    pair.ask("waits", "a")
    pair.at_prefill.finish("a")
    pair.ask("plain")
    pair.go_on()
    assert {message.request_id for message in pair.p.outbox.of(FirstToken)} == {"waits", "plain"}
    assert pair.finished() == ["plain"] and not pair.at_prefill.uses["a"], "a computed prompt needs no slot"
    pair.at_decode.finish("a")
    pair.go_on()
    assert pair.output("waits") == expected_tokens(PROMPT, 5)
    pair.check_unused()


def test_more_adapters_than_slots_take_turns() -> None:
    pair = Pair(max_loras=1)
    for number, content in enumerate("abcabc"):
        pair.ask(f"r{number}", content, prompt=[number, 7, 8, 9])
    for content in "abc":
        pair.finish(content)
    for _ in range(10):
        pair.go_on()
    assert sorted(pair.finished()) == [f"r{number}" for number in range(6)]
    pair.check_unused()


@pytest.mark.parametrize("at_decode", [False, True])
def test_a_failed_load_ends_the_attempt_and_frees_its_pages(at_decode: bool) -> None:
    pair = Pair()
    pair.ask("fails", "a")
    if at_decode:
        pair.at_prefill.finish("a")
        pair.at_decode.fail("a", "the files have changed")
    else:
        pair.at_prefill.fail("a", "the files have changed")
    pair.go_on()
    side = pair.d if at_decode else pair.p
    [failed] = side.outbox.of(Failed)
    assert failed.reason == "the adapter cannot be used: the files have changed"
    pair.abort("fails")
    pair.go_on()
    pair.check_unused()


def test_an_aborted_request_keeps_no_adapter() -> None:
    pair = Pair()
    pair.ask("gone", "a")
    pair.abort("gone")
    pair.ask("decoding", "b", max_tokens=50)
    pair.finish("b")
    pair.clock.advance(0.01)
    for _ in range(12):
        pair.turn()
    assert pair.at_decode.uses["b"] == 1
    pair.abort("decoding")
    pair.go_on()
    pair.check_unused()


def test_one_prompt_under_two_contents_shares_no_page() -> None:
    pair = Pair()
    for name, content in (("base", ""), ("one", "a"), ("other", "b"), ("again", "a")):
        pair.ask(name, content)
        for adapters in (pair.at_prefill, pair.at_decode):
            if content and content not in adapters.uses:
                adapters.finish(content)
        pair.go_on()
    cached = {message.request_id: message.cached_len for message in pair.p.outbox.of(FirstToken)}
    assert cached == {"base": 0, "one": 0, "other": 0, "again": 8}
    pair.check_unused()


def test_a_worker_without_adapters_cannot_serve_them() -> None:
    pair = WorkerPair()
    pair.submit("r", PROMPT, adapter=make_ref("a"), cache_namespace=adapted_namespace("", "a"))
    pair.run()
    [refused] = pair.p.outbox.of(Unservable)
    assert "this worker takes no adapters" in refused.reason
