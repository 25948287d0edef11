"""Grants, steps and their order on a decode worker, over a fake engine."""

from typing import Any

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.job import DecodeJob
from tandem.engine.token_sequence import TokenSequence
from tandem.messages import Finished, FirstToken, GaveBack, Tokens
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tests.fakes.engine import expected_tokens
from tests.fakes.workers import WorkerPair


def make_pair(num_pages: int, **decode: Any) -> WorkerPair:
    """Pair a decode worker with few pages and a prefill worker with many."""
    config = PrefillConfig(min_shared_tokens=4)
    return WorkerPair(prefill={"config": config, "num_pages": 512}, num_pages=num_pages, **decode)


def started(pair: WorkerPair) -> list[str]:
    """Return requests in the order of their first decoded tokens."""
    seen: dict[str, None] = {}
    for message in pair.d.outbox.of(Tokens):
        for event in message.events:
            seen.setdefault(event.request_id)
    return list(seen)


def test_requests_join_and_leave_at_every_step() -> None:
    pair = make_pair(64)
    lengths = (12, 20, 3, 9)
    for i, max_tokens in enumerate(lengths):
        pair.submit(f"r{i}", list(range(i * 10, i * 10 + 6)), max_tokens=max_tokens)
        pair.turn()
        pair.turn()
    pair.run()
    sizes = [len(lens) for _, lens in pair.d.engine.batches]
    assert max(sizes) > 1 and len(set(sizes)) > 2
    assert [m.request_id for m in pair.d.outbox.of(Finished)] != [f"r{i}" for i in range(4)]
    for i, max_tokens in enumerate(lengths):
        assert pair.output(f"r{i}") == expected_tokens(list(range(i * 10, i * 10 + 6)), max_tokens)


class UnsearchedIds(tuple[int, ...]):
    def __contains__(self, token_id: object) -> bool:
        raise AssertionError("a step searches all stop tokens")


def test_a_step_does_not_search_the_stop_tokens() -> None:
    sampling = SamplingParams(3, stop_token_ids=(5, 7))
    object.__setattr__(sampling, "stop_token_ids", UnsearchedIds((5, 7)))
    reasons = []
    for output_ids in ([1], [1, 7], [1, 2, 3]):
        sequence = TokenSequence([9, *output_ids], 1, [], sampling=sampling)
        handle: Any = None
        job = DecodeJob("r", 0, 0, 0, sequence, handle, 0, [], [], 0, 0, prefill_cached_len=0)
        reasons.append(job.finish_reason())
    assert reasons == ["", "stop", "length"]


def test_one_message_a_step_for_all_requests() -> None:
    pair = make_pair(64)
    for i in range(5):
        pair.submit(f"r{i}", [i * 10, 1, 2, 3], max_tokens=4)
    pair.run()
    assert len(pair.d.outbox.of(Tokens)) == len(pair.d.engine.batches) == 3
    # The first event repeats each first token.
    assert all((e.index, len(e.token_ids)) == (0, 2) for e in pair.d.outbox.of(Tokens)[0].events)


def test_a_batch_has_its_limit_and_the_oldest_go_first() -> None:
    pair = make_pair(64, config=DecodeConfig(max_batch_size=2))
    for i in (3, 1, 2, 0):
        pair.submit(f"r{i}", [i * 10, 1, 2, 3], max_tokens=3, arrival_ns=100 + i)
    pair.run()
    assert max(len(lens) for _, lens in pair.d.engine.batches) == 2
    assert started(pair) == ["r0", "r1", "r2", "r3"]


def test_growth_goes_before_new_leases() -> None:
    pair = make_pair(8)
    pair.submit("old", list(range(11)), max_tokens=14)  # grows to 6 pages
    for _ in range(4):
        pair.turn()
    for i in range(3):
        pair.submit(f"new{i}", list(range(100 * i, 100 * i + 7)), max_tokens=2)
    pair.run()
    assert pair.d.outbox.of(GaveBack) == []
    assert pair.output("old") == expected_tokens(list(range(11)), 14)
    pair.check_idle()


def test_page_shortage_gives_back_the_cheapest_never_the_oldest() -> None:
    pair = WorkerPair(num_pages=8)
    pair.submit("old", list(range(8)), max_tokens=20)
    pair.submit("young", list(range(50, 58)), max_tokens=20)
    pair.run()
    (gave_back,) = pair.d.outbox.of(GaveBack)
    assert gave_back.request_id == "young"
    assert pair.output("old") == expected_tokens(list(range(8)), 20)
    # The router restarts the young request with its tokens; together the output is complete.
    first = pair.output("young")
    pair.submit("young", list(range(50, 58)), max_tokens=20, output_ids=tuple(first), attempt=1)
    pair.run()
    again = next(m for m in pair.p.outbox.of(FirstToken) if m.attempt == 1)
    assert again.index == len(first)
    rest = pair.output("young", attempt=1)
    assert first + rest == expected_tokens(list(range(50, 58)), 20)
    pair.check_idle()


def test_the_oldest_request_over_all_attempts_is_never_given_back() -> None:
    pair = make_pair(8)
    # The older request comes second, as after a restart.
    pair.submit("younger", list(range(8)), max_tokens=20, arrival_ns=200)
    for _ in range(3):
        pair.turn()
    pair.submit("older", list(range(50, 58)), max_tokens=20, arrival_ns=100, attempt=3)
    pair.run()
    assert [(m.request_id, m.attempt) for m in pair.d.outbox.of(GaveBack)] == [("younger", 0)]
    assert pair.output("older", attempt=3) == expected_tokens(list(range(50, 58)), 20)


def test_the_cheapest_to_redo_is_given_back() -> None:
    pair = make_pair(16)
    pair.submit("oldest", list(range(8)), max_tokens=30, arrival_ns=1)
    pair.submit("long", list(range(100, 124)), max_tokens=30, arrival_ns=2)
    pair.submit("short", list(range(200, 204)), max_tokens=30, arrival_ns=3)
    while not pair.d.outbox.of(GaveBack):
        assert pair.turn()
    assert pair.d.outbox.of(GaveBack)[0].request_id == "short"


def test_the_lowest_priority_is_given_back_first() -> None:
    pair = make_pair(16)
    pair.submit("oldest", list(range(8)), max_tokens=30, arrival_ns=1)
    pair.submit("long", list(range(100, 124)), max_tokens=30, arrival_ns=2)
    pair.submit("short", list(range(200, 204)), max_tokens=30, arrival_ns=3, priority=1)
    # Its priority puts it first, so it is never given back.
    while not pair.d.outbox.of(GaveBack):
        assert pair.turn()
    assert pair.d.outbox.of(GaveBack)[0].request_id == "oldest"


def test_a_small_lease_overtakes_a_large_one_only_so_often() -> None:
    pair = make_pair(10)
    # One request holds pages for long, a large one waits, and small ones keep coming.
    pair.submit("holder", list(range(8)), max_tokens=30, arrival_ns=1)
    for _ in range(4):
        pair.turn()
    pair.submit("large", list(range(100, 130)), max_tokens=2, arrival_ns=2)
    for _ in range(3):
        pair.turn()
    for i in range(DecodeConfig().max_overtaken + 6):
        pair.submit(f"small{i}", [200 + i, 1, 2], max_tokens=2, arrival_ns=10 + i)
        pair.turn()
    pair.run()
    order = started(pair)
    assert order[0] == "holder" and "large" in order
    assert order.index("large") - 1 <= DecodeConfig().max_overtaken
    assert order.index("large") > 1, "those that fit need not wait from the start"
    pair.check_idle()


def test_next_turn_reuses_the_decoded_pages() -> None:
    pair = make_pair(64)
    prompt = list(range(10))
    pair.submit("a", prompt, max_tokens=7)
    pair.run()
    # 16 tokens have KV: all but the last, which was never computed.
    assert len(pair.d.cache.peek([*prompt, *pair.output("a")])) == 4


def test_the_same_requests_run_in_the_same_order_every_time() -> None:
    runs = []
    for _ in range(2):
        pair = make_pair(12)
        for i in range(8):
            pair.submit(f"r{i}", [i % 3, 1, 2, 3, i], max_tokens=3 + i % 4, arrival_ns=i)
        pair.run()
        runs.append((pair.d.engine.batches, started(pair), [m.request_id for m in pair.d.outbox.of(Finished)]))
    assert runs[0] == runs[1]


def test_lease_fitting_through_a_newly_cached_prefix_is_granted() -> None:
    """Nothing else changes for many steps: no page becomes free, and no lease comes or ends."""
    pair = make_pair(12)
    prompt = list(range(32))
    pair.submit("runs", prompt, max_tokens=12, arrival_ns=1)
    pair.submit("waits", prompt, max_tokens=2, arrival_ns=2)
    pair.run()
    order = [m.request_id for m in pair.d.outbox.of(Finished)]
    assert order == ["waits", "runs"]
    assert pair.d.outbox.of(GaveBack) == []
    pair.check_idle()
