"""Counters and events of a both worker."""

from dataclasses import fields, replace

import pytest

from tandem.both_worker.handover import LocalHandover
from tandem.both_worker.pages import SharedPages
from tandem.both_worker.scheduler import BothScheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.kvtransfer.events import (
    FromReceiver,
    FromSender,
    ReceiverLinkClosed,
    ReceiverLinkOpened,
    SenderLinkClosed,
    SenderLinkFailed,
    SenderLinkOpened,
)
from tandem.messages import (
    PROTOCOL_VERSION,
    Abort,
    Admit,
    LinkHello,
    PageFormat,
    Prefill,
    Renewed,
    Revoke,
    Shipped,
    WorkerStats,
)
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.sampling_params import SamplingParams
from tandem.worker.adapter_uses import AdapterUses
from tandem.worker.events import FromRouter, RouterLost
from tandem.worker.forward_timer import ForwardTimer
from tandem.worker.kept_pages import KeptPages
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.transport import ScriptedReceiver, ScriptedTransport
from tests.fakes.workers import ListOutbox


def make_schedulers() -> tuple[BothScheduler, PrefillScheduler, DecodeScheduler]:
    clock, outbox, engine, cache = FakeClock(), ListOutbox(), FakeEngine(64, 4), CacheManager(64, 4)
    decode = DecodeScheduler(engine, cache, outbox, DecodeConfig(), clock)
    pages = SharedPages(cache, decode, "both-0", KeptPages(cache, clock))
    prefill = PrefillScheduler(engine, cache, LocalHandover(decode), outbox, PrefillConfig(), clock, pages=pages)
    return (
        BothScheduler(engine, cache, prefill, decode, pages, ForwardTimer("cpu", clock), AdapterUses(None, clock)),
        prefill,
        decode,
    )


def test_a_prompt_is_counted_at_prefill_alone() -> None:
    both, _, _ = make_schedulers()
    prompt, sampling = tuple(range(18)), SamplingParams(max_tokens=4)
    for request_id in ("a", "b"):
        both.receive(FromRouter(Admit(request_id, 0, prompt, (), sampling, 60.0)))
        both.receive(FromRouter(Prefill(request_id, 0, prompt, (), sampling, "both-0")))
        while both.step():
            pass
    stats = both.stats()
    assert (stats.prompt_tokens_computed, stats.prefix_cached_tokens) == (18 + 2, 16)
    assert stats.shipped == ()
    num_pages = (stats.num_free_pages, stats.num_cached_pages, stats.num_locked_pages, stats.num_leased_pages)
    assert sum(num_pages) == stats.num_total_pages


def test_link_event_goes_only_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the receiving end took a sending epoch's end, pages under copy would be reused."""
    both, prefill, decode = make_schedulers()
    told: dict[str, list[type]] = {"prefill": [], "decode": []}
    monkeypatch.setattr(prefill, "receive", lambda event: told["prefill"].append(type(event)))
    monkeypatch.setattr(decode, "receive", lambda event: told["decode"].append(type(event)))
    page_format = PageFormat("fake", 1, "fake")
    hello = LinkHello(PROTOCOL_VERSION, "other", "other-life", "life", page_format, ("scripted",), ())
    of_sender = [
        SenderLinkOpened("other", "other-life", "epoch", "scripted", ScriptedTransport()),
        SenderLinkFailed("other", "other-life", "no transport"),
        FromReceiver("epoch", Revoke("lease")),
        SenderLinkClosed("epoch", "cut", lambda: None),
    ]
    of_receiver = [
        ReceiverLinkOpened("epoch", hello, ScriptedReceiver(), lambda: False),
        FromSender("epoch", Renewed("lease")),
        ReceiverLinkClosed("epoch"),
    ]
    for event in (*of_sender, *of_receiver, FromRouter(Abort("r", 0)), RouterLost("router")):
        both.receive(event)
    of_requests = [FromRouter, RouterLost]
    assert told["prefill"] == [*map(type, of_sender), *of_requests]
    assert told["decode"] == [*map(type, of_receiver), *of_requests]


def test_every_counter_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    both, prefill, decode = make_schedulers()
    others = ("shipped", "forward_times", "load_token_s", "drafted")
    numbers = [f.name for f in fields(WorkerStats) if f.name not in others]
    before = both.stats()
    # Give each counter its own number.
    of_prefill = WorkerStats(**{name: 2**i for i, name in enumerate(numbers)}, shipped=(Shipped("a", 1, 2),))
    of_decode = WorkerStats(**{name: 3**i for i, name in enumerate(numbers)}, shipped=(Shipped("b", 3, 4),))
    monkeypatch.setattr(prefill, "own_stats", lambda: of_prefill)
    monkeypatch.setattr(decode, "own_stats", lambda: of_decode)
    expected = {name: getattr(before, name) + 2**i + 3**i for i, name in enumerate(numbers)}
    assert both.stats() == replace(before, **expected, shipped=(Shipped("a", 1, 2), Shipped("b", 3, 4)))
