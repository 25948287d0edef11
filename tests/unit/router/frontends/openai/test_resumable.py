"""Resuming a stream over HTTP at any router, with scripted workers that keep records."""

import asyncio
import random
import secrets
from typing import Any

import pytest

from tandem.messages import Admit, Prefill
from tandem.router import recalls
from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.openai import resumable, streaming
from tandem.router.frontends.openai.resumable import EventId
from tandem.router.recalls import MAX_RECALLS
from tandem.router.text.tokenizer import Tokenizer
from tests.fakes.http_cluster import KEYS, PROMPT, Event, HttpCluster, HttpRouter, Stream
from tests.fakes.router_harness import run, settle
from tests.fakes.tokenizer import ByteTokenizer, Encoding

COMPLETION = {"prompt": PROMPT, "stream": True, "max_tokens": 9}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": 9}
USAGE = {"stream_options": {"include_usage": True}}
# Multi-byte characters, a false start of a stop string, and a stop string.
OUTPUT = "aéSTO b日STOP and on".encode()
BODIES = {
    "plain": COMPLETION,
    "echo and usage": {**COMPLETION, **USAGE, "echo": True},
    "stop": {**COMPLETION, **USAGE, "max_tokens": 20, "stop": ["STOP", "STONE"]},
    "chat": CHAT,
    "chat with usage and stop": {**CHAT, **USAGE, "max_tokens": 20, "stop": "STOP"},
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalls, "RECALL_TIMEOUT_S", 0.4)
    monkeypatch.setattr(recalls, "WAIT_TIMEOUT_S", 0.6)


class ChattyTokenizer(ByteTokenizer):
    def render_chat(self, messages: Any) -> str:
        return "".join(message["content"] for message in messages)


class CountingTokenizer(ChattyTokenizer):
    num_tokenized = 0

    def tokenize(self, text: str, add_special_tokens: bool) -> Encoding:
        self.num_tokenized += 1
        return super().tokenize(text, add_special_tokens)


def cluster_of(output: Any = OUTPUT, tokenizer: Any = None, **config: Any) -> HttpCluster:
    return HttpCluster(output, tokenizer=tokenizer or ChattyTokenizer(), **config)


async def begun(cluster: HttpCluster, body: dict[str, Any], num_tokens: int) -> Stream:
    """Serves a request at the first router up to this token, where its connection breaks."""
    call = cluster.routers[0].post(body)
    await cluster.serve(num_tokens)
    return await call.leave()


async def whole(cluster: HttpCluster, body: dict[str, Any]) -> Stream:
    call = cluster.routers[0].post(body)
    await cluster.serve(len(cluster.output))
    stream = await call.finish()
    assert stream.status == 200 and stream.is_done
    return stream


async def resumed(cluster: HttpCluster, body: dict[str, Any], last: Event, number: int = 1) -> Stream:
    """Returns the rest from the second router."""
    num_before = len(cluster.d.of(Admit))
    call = cluster.routers[number].post(body, last.id)
    await settle()
    if len(cluster.d.of(Admit)) > num_before:
        await cluster.serve(len(cluster.output))
    stream = await call.finish()
    assert stream.status == 200 and stream.is_done, stream.body
    return stream


def contents(*parts: list[Event]) -> dict[str, Any]:
    """Joins the events of a stream and of its resumption."""
    events = [event for part in parts for event in part]
    choices = [event.choice for event in events if event.content["choices"]]
    return {
        "text": "".join(event.text for event in events),
        "finishes": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "openings": sum("role" in choice.get("delta", {}) for choice in choices),
        "usages": [event.content["usage"] for event in events if event.content.get("usage")],
        "answers": {(event.content["id"], event.content["created"], event.content["object"]) for event in events},
    }


def without_name(found: dict[str, Any]) -> dict[str, Any]:
    """Two answers to the same request have different ids."""
    return {name: value for name, value in found.items() if name != "answers"}


@run
async def test_the_second_router_carries_on_where_the_text_ends() -> None:
    cluster = cluster_of(b"Hello, you")
    first = await begun(cluster, COMPLETION, 5)
    assert first.text == "Hello" and len({event.id.partition(".")[0] for event in first.events}) == 1
    call = cluster.routers[1].post(COMPLETION, first.events[-1].id)
    await settle()
    before, after = cluster.d.of(Admit)
    # The same seed, limit and age as in every further attempt; known tokens are fixed.
    assert (bytes(after.prompt_ids), bytes(after.output_ids)) == (b"hi", b"Hello")
    assert (after.sampling, after.arrival_ns) == (before.sampling, before.arrival_ns)
    assert cluster.p.of(Prefill)[-1].arrival_ns == before.arrival_ns
    await cluster.serve(9)
    second = await call.finish()
    assert second.text == ", yo" and second.is_done
    assert contents(first.events, second.events)["finishes"] == ["length"]
    assert len(contents(first.events, second.events)["answers"]) == 1


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_stream_that_has_ended_goes_on_after_any_of_its_events(body: dict[str, Any]) -> None:
    @run
    async def scenario() -> None:
        cluster = cluster_of()
        stream = await whole(cluster, body)
        assert all(event.id for event in stream.events)
        for number, last in enumerate(stream.events):
            for router in (0, 1):
                rest = await resumed(cluster, body, last, router)
                assert contents(stream.events[: number + 1], rest.events) == contents(stream.events)
                # These have ids too, though no worker was asked to compute under the new name.
                for end, later in enumerate(rest.events[:2], 1):
                    again = await resumed(cluster, body, later, router)
                    found = contents(stream.events[: number + 1], rest.events[:end], again.events)
                    assert found == contents(stream.events)
        if "stop" not in body:
            assert len(cluster.d.of(Admit)) == 1, "all was known: no worker was asked to compute"

    scenario()


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_stream_that_breaks_anywhere_goes_on_from_there_and_from_before(body: dict[str, Any]) -> None:
    @run
    async def scenario() -> None:
        undisturbed = without_name(contents((await whole(cluster_of(), body)).events))
        cluster = cluster_of()
        for num_tokens in range(1, len(OUTPUT)):
            first = await begun(cluster, body, num_tokens)
            if not first.events:
                # Half a character, or the start of a stop string: this client begins again.
                continue
            # It lost the last event, or none.
            for end in (len(first.events), len(first.events) // 2):
                if end:
                    rest = await resumed(cluster, body, first.events[end - 1])
                    found = contents(first.events[:end], rest.events)
                    assert without_name(found) == undisturbed and len(found["answers"]) == 1
        assert all(router.router.num_requests == 0 for router in cluster.routers)

    scenario()


@run
async def test_a_stream_goes_on_again_and_again() -> None:
    cluster = cluster_of(num_routers=3)
    body = {**BODIES["chat with usage and stop"]}
    undisturbed = without_name(contents((await whole(cluster_of(), body)).events))
    seen = (await begun(cluster, body, 3)).events
    # At first only the possible start of a stop string comes.
    for router, num_tokens, num_events in ((1, 5, 0), (2, 8, 2), (0, 11, 1)):
        call = cluster.routers[router].post(body, seen[-1].id)
        await cluster.serve(num_tokens)
        more = (await call.leave()).events
        assert len(more) == num_events
        seen += more
    assert len({event.id.partition(".")[0] for event in seen}) == 3
    # Every id so far leads to the rest.
    for end in range(1, len(seen) + 1):
        rest = await resumed(cluster, body, seen[end - 1], 1)
        assert without_name(contents(seen[:end], rest.events)) == undisturbed


@run
async def test_two_at_once_from_the_same_event() -> None:
    """A client that retries before the first answer."""
    cluster = cluster_of(b"Hello, you")
    first = await begun(cluster, COMPLETION, 3)
    calls = [cluster.routers[i].post(COMPLETION, first.events[-1].id) for i in (0, 1)]
    await settle()
    assert len(cluster.d.of(Admit)) == 3
    await cluster.serve(9)
    # One was served to its end; the other can take over from it, in its own name.
    texts = [call.stream.text for call in calls]
    assert sorted(texts) == ["", "lo, yo"]
    for call in calls:
        await call.leave()


@run
async def test_tokens_that_the_router_never_heard_of_are_not_computed_again() -> None:
    cluster = cluster_of(b"Hello, you")
    call = cluster.routers[0].post(COMPLETION)
    await cluster.serve(3)
    # The router stands still while the decode worker goes on.
    for worker in (cluster.p, cluster.d):
        worker.leave(cluster.routers[0].router)
    await cluster.serve(6)
    assert call.stream.text == "Hel"
    again = cluster.routers[1].post(COMPLETION, call.stream.events[-1].id)
    await settle()
    assert bytes(cluster.d.of(Admit)[-1].output_ids) == b"Hello,"
    await settle()
    assert again.stream.text == "lo,", "they are sent before any is computed"
    await cluster.serve(9)
    assert (await again.finish()).text == "lo, yo"
    await call.leave()


@run
async def test_the_first_token_alone_is_kept_by_the_prefill_worker() -> None:
    cluster = cluster_of(b"Hello, you")
    cluster.d.records.note = lambda messages: None  # type: ignore[method-assign]
    first = await begun(cluster, COMPLETION, 1)
    assert first.text == "H"
    assert (await resumed(cluster, COMPLETION, first.events[-1])).text == "ello, yo"


def test_with_every_tokenizer(any_tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    few = [rng.randrange(any_tokenizer.vocab_size) for _ in range(8)]
    ids = [rng.choice(few) if rng.random() < 0.6 else rng.randrange(any_tokenizer.vocab_size) for _ in range(24)]
    body = {"prompt": [5, 6], "stream": True, "max_tokens": len(ids), "ignore_eos": True}

    @run
    async def scenario() -> None:
        undisturbed = (await whole(cluster_of(ids, any_tokenizer), body)).text
        assert undisturbed
        cluster = cluster_of(ids, any_tokenizer)
        for num_tokens in range(1, len(ids), 5):
            first = await begun(cluster, body, num_tokens)
            for end in range(1, len(first.events) + 1, 5):
                rest = await resumed(cluster, body, first.events[end - 1])
                assert "".join(event.text for event in first.events[:end]) + rest.text == undisturbed

    scenario()


# --- refusals ---


def refusal(stream: Stream) -> tuple[int, str | None, str | None]:
    error = stream.error
    assert error["type"] in ("invalid_request_error", "server_error", "rate_limit_error") and error["message"]
    return stream.status, error["code"], error["param"]


def forgotten(router: HttpRouter, key: str) -> str:
    """Return an event id of a stream that no worker remembers."""
    return f"{router.frontend.new_stream_name(key)}.1.1"


def count_lookups(cluster: HttpCluster) -> list[str]:
    """Return a list that gets the record id of each lookup at the second router."""
    asked: list[str] = []
    recalls_of_router = cluster.routers[1].router.recalls
    recall = recalls_of_router.recall

    async def counted(record_id: str) -> recalls.RecallResult:
        asked.append(record_id)
        return await recall(record_id)

    recalls_of_router.recall = counted  # type: ignore[method-assign]
    return asked


NOT_FOUND = (404, "stream_not_found", "Last-Event-ID")


@run
async def test_a_stranger_s_stream_is_as_unknown_as_one_that_never_was() -> None:
    cluster = cluster_of()
    first = await begun(cluster, COMPLETION, 3)
    own, made_up = first.events[-1].id, f"{secrets.token_urlsafe(16)}.1.1"
    num_asked = count_lookups(cluster)
    stranger = await cluster.routers[1].post(COMPLETION, own, key=KEYS[1]).finish()
    unknown = await cluster.routers[1].post(COMPLETION, made_up, key=KEYS[1]).finish()
    assert refusal(stranger) == refusal(unknown) == NOT_FOUND
    assert stranger.body == unknown.body
    assert len(cluster.d.of(Admit)) == 1 and not num_asked, "no worker is asked for a made-up name"


@pytest.mark.parametrize(
    "change",
    [{"prompt": "ho"}, {"max_tokens": 8}, {"temperature": 0.5}, {"stop": ["x"]}, {"seed": 1}, {"echo": True}],
    ids=lambda change: next(iter(change)),
)
def test_another_body_is_refused(change: dict[str, Any]) -> None:
    @run
    async def scenario() -> None:
        cluster = cluster_of()
        first = await begun(cluster, COMPLETION, 3)
        answer = await cluster.routers[1].post({**COMPLETION, **change}, first.events[-1].id).finish()
        assert refusal(answer) == (400, None, "Last-Event-ID") and "same body" in answer.error["message"]
        # The order of fields does not matter.
        again = dict(reversed(COMPLETION.items()))
        assert (await resumed(cluster, again, first.events[-1])).status == 200

    scenario()


@pytest.mark.parametrize(
    "change", [{"n": 2}, {"logprobs": 0}, {"stream": False}, {"prompt": ["a", "b"]}], ids=lambda change: str(change)
)
def test_what_cannot_be_resumed_has_no_ids_and_takes_none(change: dict[str, Any]) -> None:
    @run
    async def scenario() -> None:
        cluster = cluster_of()
        body = {**COMPLETION, **change}
        answer = await cluster.routers[0].post(body, f"{'A' * 22}.1.1").finish()
        assert refusal(answer) == (400, None, "Last-Event-ID") and "one output" in answer.error["message"]
        call = cluster.routers[0].post(body)
        await settle()
        assert all(not admit.record_id and not admit.resume_token for admit in cluster.d.of(Admit))
        await call.leave()
        assert b"id: " not in call.stream.body and not len(cluster.d.records)

    scenario()


@pytest.mark.parametrize(
    "text",
    ["", ".1", ".0.0", ".01.1", ".1.-1", ".1.1.3", ".1.1.", ".1.1 ", ".1.٣", f".{'9' * 10}.1", "A.1.1", "A" * 10_000],
)
@pytest.mark.parametrize("name", ["A" * 22, "A" * 21 + "+", ""])
def test_what_is_no_id(name: str, text: str) -> None:
    text = name + text
    with pytest.raises(InvalidRequestError, match="not an event id"):
        EventId.parse(text)


@run
async def test_a_record_that_does_not_reach_what_the_client_has_is_lost() -> None:
    cluster = cluster_of(b"Hello, you")
    first = await begun(cluster, COMPLETION, 5)
    # The decode worker has died; the prefill worker has the first token.
    cluster.d.records = type(cluster.d.records)(2**20)
    answer = await cluster.routers[1].post(COMPLETION, first.events[-1].id).finish()
    assert refusal(answer) == (410, "stream_lost", "Last-Event-ID")
    # A client with no more than that can resume.
    assert (await resumed(cluster, COMPLETION, first.events[0])).text == "ello, yo"
    cluster.p.records = type(cluster.p.records)(2**20)
    answer = await cluster.routers[1].post(COMPLETION, first.events[0].id).finish()
    assert refusal(answer) == NOT_FOUND


@run
async def test_a_worker_that_stands_still_holds_nobody_up_for_long() -> None:
    cluster = cluster_of(b"Hello, you")
    first = await begun(cluster, COMPLETION, 5)
    cluster.p.is_stopped = True
    call = cluster.routers[1].post(COMPLETION, first.events[-1].id)
    await settle()
    assert len(cluster.d.of(Admit)) == 1, "the one that says nothing may know more"
    await asyncio.sleep(recalls.RECALL_TIMEOUT_S + 0.2)
    assert len(cluster.d.of(Admit)) == 2
    await call.leave()
    # The silent worker may know more.
    cluster.p.is_stopped, cluster.d.is_stopped = False, True
    answer = await cluster.routers[1].post(COMPLETION, first.events[-1].id).finish()
    assert refusal(answer) == (503, "unavailable", None)


@run
async def test_many_lookups_are_bounded_and_leave_nothing() -> None:
    cluster = cluster_of()
    first = await begun(cluster, COMPLETION, 5)
    router = cluster.routers[1]
    for worker in (cluster.p, cluster.d):
        worker.is_stopped = True
    guesses = [router.post(COMPLETION, forgotten(router, KEYS[1]), KEYS[1]) for _ in range(4 * MAX_RECALLS)]
    refusals = [refusal(await guess.finish()) for guess in guesses]
    # The number of lookups in time depends on the machine; the first ones had their turn, the last ones not.
    num_asked = refusals.count((503, "unavailable", None))
    assert MAX_RECALLS <= num_asked < 4 * MAX_RECALLS
    assert refusals.count((429, "overloaded", None)) == 4 * MAX_RECALLS - num_asked
    for worker in (cluster.p, cluster.d):
        worker.is_stopped = False
    guesses = [router.post(COMPLETION, forgotten(router, KEYS[1]), KEYS[1]) for _ in range(20)]
    assert {refusal(await guess.finish()) for guess in guesses} == {NOT_FOUND}
    assert (len(cluster.p.records), len(cluster.d.records)) == (1, 1)
    assert (await resumed(cluster, COMPLETION, first.events[-1])).is_done


@run
async def test_it_waits_its_turn_at_a_full_queue() -> None:
    cluster = cluster_of(b"Hello, you", max_queued_requests=1)
    first = await begun(cluster, COMPLETION, 5)
    waiting = cluster.routers[1].post(COMPLETION)
    await settle()
    answer = await cluster.routers[1].post(COMPLETION, first.events[-1].id).finish()
    assert refusal(answer) == (429, "overloaded", None)
    await waiting.leave()
    assert (await resumed(cluster, COMPLETION, first.events[-1])).text == ", yo"


@run
async def test_an_old_event_id_passes_no_queue_and_ages_once() -> None:
    cluster = cluster_of(b"Hello, you", max_queued_requests=2)
    first = await begun(cluster, COMPLETION, 5)
    began = cluster.d.of(Admit)[0].arrival_ns
    last = first.events[-1].id
    for _ in range(2):
        call = cluster.routers[1].post(COMPLETION, last)
        await settle()
        await call.leave()
    calls = [cluster.routers[1].post(COMPLETION, last) for _ in range(100)]
    await settle()
    admits = cluster.d.of(Admit)[1:]
    assert cluster.routers[1].router.num_queued == 2 and len(admits) == 4
    # The first one is as old as the stream; the others are as old as they are.
    assert admits[0].arrival_ns == began < min(admit.arrival_ns for admit in admits[1:])
    for call in calls:
        await call.leave()


@pytest.mark.parametrize("change", [{"max_tokens": 8}, {"temperature": 0.5}, {"priority": 1}, {"cache_salt": "other"}])
def test_another_body_costs_no_tokenizing(change: dict[str, Any]) -> None:
    @run
    async def scenario() -> None:
        tokenizer = CountingTokenizer()
        cluster = cluster_of(b"Hello, you", tokenizer)
        first = await begun(cluster, COMPLETION, 5)
        num_before = tokenizer.num_tokenized
        answer = await cluster.routers[1].post({**COMPLETION, **change}, first.events[-1].id).finish()
        assert refusal(answer) == (400, None, "Last-Event-ID") and "same body" in answer.error["message"]
        assert tokenizer.num_tokenized == num_before > 0 and len(cluster.d.of(Admit)) == 1

    scenario()


@run
async def test_tokens_under_another_stream_s_record_are_not_its_own() -> None:
    cluster = cluster_of(b"Hello, you")
    one, two = [await begun(cluster, COMPLETION, 5) for _ in range(2)]
    records = cluster.d.records._records
    ids = [resumable.record_id(stream.events[-1].id.partition(".")[0], KEYS[0]) for stream in (one, two)]
    for worker in (cluster.p, cluster.d):
        records = worker.records._records
        records[ids[0]].resume_token = records[ids[1]].resume_token
    answer = await cluster.routers[1].post(COMPLETION, one.events[-1].id).finish()
    assert answer.status == 404 and "the record of this stream is another's" in answer.error["message"]
    assert (await resumed(cluster, COMPLETION, two.events[-1])).text == ", yo"


@run
async def test_a_key_has_no_more_in_hand_with_it() -> None:
    cluster = cluster_of(b"Hello, you", max_requests_per_key=1)
    first = await begun(cluster, COMPLETION, 5)
    other = cluster.routers[1].post(COMPLETION)
    await settle()
    answer = await cluster.routers[1].post(COMPLETION, first.events[-1].id).finish()
    assert refusal(answer) == (429, "overloaded", None)
    await other.leave()


@run
async def test_what_is_recalled_counts_as_in_hand() -> None:
    """The body is small, and its record as long as the model's length."""
    config = {"max_body_bytes": 4096, "max_bytes_in_hand": 16384}
    cluster = cluster_of(bytes(range(1, 256)), **config)
    body = {**COMPLETION, "max_tokens": 255}
    first = await begun(cluster, body, 200)
    going_on = cluster.routers[1].post(body, first.events[0].id)
    await settle()
    # This key may have half of that in hand, and has 200 tokens.
    answer = await cluster.routers[1].post(body, first.events[0].id).finish()
    assert refusal(answer) == (429, "overloaded", None)
    await going_on.leave()
    assert (await resumed(cluster, body, first.events[0])).is_done


# --- silence ---


def test_a_stream_without_events_has_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.02)

    @run
    async def scenario() -> None:
        cluster = cluster_of()
        call = cluster.routers[0].post(COMPLETION)
        await cluster.serve(1)
        await asyncio.sleep(0.3)
        assert 3 <= call.stream.body.count(b"\n:") <= 15
        await cluster.serve(2)
        call.stream.events.clear()
        await cluster.serve(9)
        stream = await call.finish()
        assert stream.is_done and stream.body.endswith(b"[DONE]\n\n")
        # Some clients take an empty line after a comment for an event.
        assert b":\n\n" not in stream.body

    scenario()
