"""Epochs between workers of several ranks, over real transports, with followers in threads."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest

from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.kvcache.base import Completion, PageLayout
from tandem.kvtransfer.lanes.joined import JoinedReceiver, JoinedSender
from tandem.kvtransfer.transports import opening
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport
from tandem.kvtransfer.transports.opening import OpeningError
from tests.fakes.ranked_worker import TRANSPORTS, RankedWorker

NUM_PAGES = 8
BY_HEAD = KvHeadLayout(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
LATENT = LatentLayout(num_layers=2, page_size=4, kv_rank=8, rope_dim=4, dtype="bfloat16")


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


@contextmanager
def workers(
    degrees: tuple[int, int], layout: PageLayout = BY_HEAD
) -> Iterator[tuple[RankedWorker, RankedWorker, np.ndarray]]:
    """A sender with random pages, a receiver with zeros, and the sender's pages with all heads."""
    sender, receiver = (
        RankedWorker(layout, degree, NUM_PAGES, name) for degree, name in zip(degrees, ("p", "d"), strict=True)
    )
    pages = np.random.default_rng(0).integers(1, 256, (NUM_PAGES, layout.page_bytes), np.uint8)
    sender.fill(pages)
    try:
        yield sender, receiver, pages
    finally:
        sender.stop()
        receiver.stop()


def open_epoch(
    sender: RankedWorker, receiver: RankedWorker, transport: str
) -> tuple[SenderTransport, ReceiverTransport]:
    async def open_both() -> tuple[SenderTransport, ReceiverTransport]:
        receiving, endpoints = await receiver.ranks.open_receiver(transport, sender.ranks.heads)
        return await sender.ranks.open_sender(transport, receiver.ranks.heads, endpoints), receiving

    return asyncio.run(open_both())


def end(*ends: SenderTransport | ReceiverTransport) -> None:
    for over in [one.abort() for one in ends]:
        wait_for(over.done)


def push(
    sending: SenderTransport, receiving: ReceiverTransport, number: int, src: list[int], dst: list[int]
) -> list[Completion]:
    copies = [sending.copy_pages(number, src, dst)]
    if receiving.two_sided:
        copies.append(receiving.receive_pages(number, dst, len(dst)))
    return copies


@pytest.mark.parametrize("layout", [BY_HEAD, LATENT], ids=["by_head", "latent"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pages_arrive_at_every_rank_whatever_the_degrees(transport: str, layout: PageLayout) -> None:
    for degrees in product((1, 2, 4), (1, 2, 4)):
        with workers(degrees, layout) as (sender, receiver, pages):
            sending, receiving = open_epoch(sender, receiver, transport)
            copies = push(sending, receiving, 0, [3, 0, 5], [1, 7, 2])
            copies += push(sending, receiving, 1, [6], [4])
            wait_for(lambda copies=copies: all(copy.done() for copy in copies))
            assert receiver.holds([1, 7, 2, 4], pages[[3, 0, 5, 6]]) and receiver.is_untouched([0, 3, 5, 6]), degrees
            assert sending.failure == receiving.failure == ""
            end(sending, receiving)


def test_a_push_is_complete_when_the_slowest_rank_has_copied() -> None:
    """Otherwise Committed would precede its pages, and the pages that it reads would be freed."""
    with workers((2, 1)) as (sender, receiver, pages):
        sending, receiving = open_epoch(sender, receiver, "shared_memory")
        sender.followers[0].may_run.clear()
        (copy,) = push(sending, receiving, 0, [3], [1])
        time.sleep(0.05)
        assert not copy.done() and not receiver.holds([1], pages[[3]])
        sender.followers[0].may_run.set()
        wait_for(copy.done)
        assert receiver.holds([1], pages[[3]])
        end(sending, receiving)


def test_an_epoch_is_over_when_its_slowest_rank_has_aborted() -> None:
    """Only then may the next one open: a rank may still be copying."""
    with workers((2, 1)) as (sender, receiver, pages):
        sending, receiving = open_epoch(sender, receiver, "shared_memory")
        sender.followers[0].may_run.clear()
        push(sending, receiving, 0, [3], [1])
        over = sending.abort()
        time.sleep(0.05)
        assert not over.done()
        sender.followers[0].may_run.set()
        wait_for(over.done)
        assert receiver.holds([1], pages[[3]]), "the copy precedes the abort"
        # The next epoch finds all ranks as they were.
        sending, receiving = open_epoch(sender, receiver, "shared_memory")
        (copy,) = push(sending, receiving, 0, [4], [2])
        wait_for(copy.done)
        assert receiver.holds([2], pages[[4]])
        end(sending, receiving)


@pytest.mark.parametrize("broken", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("num_pushed", [0, 1])
def test_one_lane_s_failure_is_the_epoch_s(broken: int, num_pushed: int) -> None:
    with workers((2, 2)) as (sender, receiver, pages):
        sending, receiving = open_epoch(sender, receiver, "tcp")
        for number in range(num_pushed):
            copies = push(sending, receiving, number, [3], [1])
            wait_for(lambda copies=copies: all(copy.done() for copy in copies))
        assert isinstance(receiving, JoinedReceiver)
        follower_lanes = list(receiver.followers[0].follower._lanes.values())
        lane = receiving._lanes[0] if broken == 0 else follower_lanes[0].end
        assert lane is not None
        wait_for(lane.abort().done)
        copies = []

        def has_failed() -> bool:
            # A closed connection shows at a later push.
            copies.append(sending.copy_pages(num_pushed + len(copies), [0], [0]))
            copies[-1].done()
            return bool(sending.failure)

        wait_for(has_failed)
        end(sending, receiving)
        assert all(copy.done() for copy in copies), "copies end, without arrival"
        assert receiver.holds([1], pages[[3]]) == bool(num_pushed) and receiver.is_untouched([0])


@pytest.mark.parametrize("broken", [0, 1], ids=["leader", "follower"])
def test_a_push_of_which_a_lane_s_sender_dies_never_arrives(broken: int) -> None:
    """Its pages never count as arrived."""
    with workers((2, 2)) as (sender, receiver, _):
        sending, receiving = open_epoch(sender, receiver, "tcp")
        copy = receiving.receive_pages(0, [1], 1)
        time.sleep(0.02)
        assert not copy.done() and receiving.failure == ""
        assert isinstance(sending, JoinedSender)
        lane = [sending._lanes[0], *(lane.end for lane in sender.followers[0].follower._lanes.values())][broken]
        assert lane is not None
        wait_for(lane.abort().done)
        wait_for(lambda: copy.done() or bool(receiving.failure))
        end(sending, receiving)
        assert receiving.failure and not copy.done()


@pytest.mark.parametrize("end_of", ["sender", "receiver"])
def test_no_lane_stays_open_if_one_does_not_open(end_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with workers((2, 2)) as (sender, receiver, _):
        worker = sender if end_of == "sender" else receiver

        def fail(*_: object) -> None:
            raise OSError("no memory")

        opened: list[SenderTransport | ReceiverTransport] = []
        leader = worker.ranks.transports["shared_memory"]
        opens = getattr(leader, f"open_{end_of}")

        def remember(*arguments: object) -> object:
            opened.append(opens(*arguments))
            return opened[-1]

        monkeypatch.setattr(leader, f"open_{end_of}", remember)
        theirs = worker.followers[0].follower._transports["shared_memory"]
        monkeypatch.setattr(theirs, f"open_{end_of}", fail)
        aborted = threading.Event()
        let_go = opening.let_go

        def let_go_now(one: SenderTransport | ReceiverTransport) -> None:
            let_go(one)
            aborted.set()

        monkeypatch.setattr(opening, "let_go", let_go_now)
        with pytest.raises(OpeningError, match="no memory"):
            open_epoch(sender, receiver, "shared_memory")
        assert len(opened) == 1
        assert aborted.wait(5.0)
        monkeypatch.undo()
        end(*open_epoch(sender, receiver, "shared_memory"))


def test_a_rank_that_does_not_answer_is_given_up_and_closes_its_end_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_TIMEOUT_S", 0.2)
    monkeypatch.setattr("tandem.kvtransfer.lanes.remote.OPEN_TIMEOUT_S", 0.2)
    with workers((1, 2)) as (sender, receiver, _):
        receiver.followers[0].may_run.clear()
        with pytest.raises(OpeningError, match=r"did not open within 0\.2 s"):
            open_epoch(sender, receiver, "tcp")
        time.sleep(0.1)
        receiver.followers[0].may_run.set()
        follower = receiver.followers[0].follower
        wait_for(lambda: not follower._lanes)


def test_endpoints_that_fit_no_lane_are_refused() -> None:
    with workers((1, 2)) as (sender, receiver, _):

        async def open_wrongly() -> None:
            await sender.ranks.open_sender("shared_memory", receiver.ranks.heads, (b"",))

        with pytest.raises(ValueError, match="the receiver sent 1 endpoints for 2 lanes"):
            asyncio.run(open_wrongly())
