"""Prompts that are only embedded: chunks, cached prefixes, ends, and other requests beside them, over a fake engine."""

import pytest

from tandem.messages import Embedded, Failed, FirstToken, Prefill
from tandem.prefill_worker.config import PrefillConfig
from tandem.request_ids import make_request_id
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter, RouterLost
from tests.fakes.both_workers import PAGE_SIZE, BothWorkers
from tests.fakes.engine import expected_embedding, expected_tokens
from tests.fakes.workers import WorkerPair


def make_pair(chunk_size: int = 512, num_pages: int = 64, *, asynchronous: bool = False) -> WorkerPair:
    config = PrefillConfig(chunk_size=chunk_size, min_shared_tokens=4)
    return WorkerPair(prefill={"config": config, "num_pages": num_pages, "asynchronous": asynchronous}, num_pages=64)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_in_chunks_is_embedded_without_a_decode_worker(asynchronous: bool) -> None:
    pair = make_pair(8, asynchronous=asynchronous)
    pair.cut_link()
    prompt = list(range(27))
    pair.embed("r", prompt)
    pair.run()
    assert [lens for _, lens in pair.p.engine.batches] == [[8], [8], [8], [3]]
    [message] = pair.p.outbox.of(Embedded)
    assert message.values == expected_embedding(prompt)
    assert (message.cached_len, message.num_pages_computed) == (0, 7)
    assert [moment.name for moment in message.moments] == ["prefill_started", "first_token"]
    assert not pair.p.outbox.of(FirstToken) and not pair.p.outbox.of(Failed)
    assert not pair.p.outbox.link, "nobody is asked for a lease"
    pair.check_idle()


@pytest.mark.parametrize("length", [39, 40, 41])
def test_the_last_token_is_computed_however_much_is_cached(length: int) -> None:
    pair = make_pair()
    prompt = list(range(length))
    for number in range(3):
        pair.embed(f"r{number}", prompt)
        pair.run()
        pair.check_idle()
    assert set(pair.embeddings().values()) == {expected_embedding(prompt)}
    cached_len = (length - 1) // 4 * 4
    assert [message.cached_len for message in pair.p.outbox.of(Embedded)] == [0, cached_len, cached_len]
    assert [lens for _, lens in pair.p.engine.batches] == [[length], [length - cached_len], [length - cached_len]]


def test_prefixes_are_shared_with_prompts_that_go_on() -> None:
    pair = make_pair()
    prefix = list(range(40))
    pair.submit("a", [*prefix, 500])
    pair.run()
    pair.embed("b", [*prefix, 501])
    pair.run()
    pair.submit("c", [*prefix, 501, 502])
    pair.run()
    assert pair.embeddings() == {"b": expected_embedding([*prefix, 501])}
    assert pair.output("c") == expected_tokens([*prefix, 501, 502], 5)
    assert pair.p.engine.counters.prompt_tokens_computed == 41 + 1 + 2
    pair.check_idle()


def test_namespaces_do_not_share() -> None:
    pair = make_pair()
    for name in ("one", "two"):
        pair.embed(name, list(range(40)), cache_namespace=name)
        pair.run()
    assert [message.cached_len for message in pair.p.outbox.of(Embedded)] == [0, 0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_embeddings_beside_requests_that_go_on(asynchronous: bool) -> None:
    pair = make_pair(16, asynchronous=asynchronous)
    prompts = {f"r{i}": [1000 * i + j for j in range(5 + 3 * i)] for i in range(8)}
    for number, (name, prompt) in enumerate(prompts.items()):
        if number % 2:
            pair.embed(name, prompt)
        else:
            pair.submit(name, prompt)
    pair.run()
    embedded = [name for number, name in enumerate(prompts) if number % 2]
    assert pair.embeddings() == {name: expected_embedding(prompts[name]) for name in embedded}
    for name in prompts.keys() - set(embedded):
        assert pair.output(name) == expected_tokens(prompts[name], 5)
    pair.check_idle()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_turns", range(6))
def test_an_abort_at_any_time_frees_the_pages(asynchronous: bool, num_turns: int) -> None:
    pair = make_pair(8, asynchronous=asynchronous)
    pair.embed("r", list(range(27)))
    for _ in range(num_turns):
        pair.turn()
    pair.abort("r")
    pair.check()
    pair.run()
    pair.check_idle()
    prompt = list(range(100, 127))
    pair.embed("next", prompt)
    pair.run()
    assert pair.embeddings()["next"] == expected_embedding(prompt)


def test_the_loss_of_its_router_ends_it() -> None:
    pair = make_pair(8)
    request_id = make_request_id("router", 1)
    pair.embed(request_id, list(range(27)))
    pair.turn()
    pair.p.scheduler.receive(RouterLost("router"))
    pair.run()
    assert not pair.embeddings()
    pair.check_idle()


def test_a_pool_too_small_for_all_embeds_them_one_after_another() -> None:
    pair = make_pair(num_pages=8)
    prompts = {f"r{i}": [100 * i + j for j in range(30)] for i in range(4)}
    for name, prompt in prompts.items():
        pair.embed(name, prompt)
    pair.run()
    assert pair.embeddings() == {name: expected_embedding(prompt) for name, prompt in prompts.items()}
    pair.check_idle()


def test_a_worker_of_role_both_embeds_beside_decoding_and_other_workers_prompts() -> None:
    """Prompts bound elsewhere reach their ceiling; one to embed waits for no lease and needs no room below it."""
    workers = BothWorkers(num_pages=10)
    # Prompts for b get no lease.
    workers.workers["b"].scheduler.step = lambda: False  # type: ignore[method-assign]
    for number in range(3):
        workers.submit(f"there{number}", [number] * (2 * PAGE_SIZE), prefill_at="a", decode_at="b")
    prompt = list(range(3 * PAGE_SIZE))
    workers.submit("here", list(range(50, 55)), prefill_at="a", decode_at="a")
    workers.embed("embedded", prompt, at="a")
    workers.run()
    assert [m.values for m in workers.of("a", Embedded)] == [expected_embedding(prompt)]
    assert workers.output("a", "here") == expected_tokens(list(range(50, 55)), 3)
    # Those of the prompts that wait for b.
    assert workers.workers["a"].scheduler.stats().num_locked_pages == 4


def test_it_is_mixed_with_a_decode_step() -> None:
    workers = BothWorkers(num_pages=40, names=("a",))
    engine = workers.workers["a"].engine
    engine._min_mixed = 1
    workers.submit("here", list(range(50, 55)), prefill_at="a", decode_at="a", max_tokens=10)
    for _ in range(3):
        workers.turn()
    prompt = list(range(9))
    workers.embed("embedded", prompt, at="a")
    workers.run()
    assert ("mixed", [1, 9]) in engine.batches
    assert [m.values for m in workers.of("a", Embedded)] == [expected_embedding(prompt)]
    assert workers.output("a", "here") == expected_tokens(list(range(50, 55)), 10)
    assert workers.workers["a"].scheduler.stats().num_locked_pages == 0


def test_a_message_without_an_embedding_still_needs_a_link() -> None:
    """Show that the first test can fail."""
    pair = make_pair()
    pair.cut_link()
    pair.p.scheduler.receive(FromRouter(Prefill("r", 0, (1, 2), (), SamplingParams(1), "")))
    pair.run()
    assert [m.reason for m in pair.p.outbox.of(Failed)] == ["no link to decode worker "]
