"""Refusals by a receiver, and transports that do not open at its end."""

import asyncio
import logging
import re
import subprocess
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.engine.attention.layout import KvHeadLayout
from tandem.exit_watch import SETTLE_S
from tandem.head_slice import HeadSlice
from tandem.hosts import host_id
from tandem.kvtransfer.events import ReceiverLinkClosed, ReceiverLinkOpened, SenderLinkOpened
from tandem.kvtransfer.transports import opening
from tandem.messages import PROTOCOL_VERSION, LinkHello, LinkRank, LinkRefused, LinkWelcome, PageFormat, Renewed
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.channel import open_channel
from tandem.rpc.codec import RECEIVER_CODEC, SENDER_CODEC
from tandem.v1 import kv_link_pb2_grpc
from tests.fakes.link_ends import ALL_HEADS, ONE_RANK, PAGE_FORMAT, ReceiverEnd, SenderEnd, wait_until
from tests.fakes.ranked_worker import RankedWorker
from tests.fakes.transport import ScriptedOpening


def hello_to(receiver: ReceiverEnd, *transports: str, life: str = "p life") -> LinkHello:
    return LinkHello(PROTOCOL_VERSION, "p", life, receiver.peer.incarnation, PAGE_FORMAT, transports, ONE_RANK)


def on(gpu: str) -> tuple[LinkRank, ...]:
    return (LinkRank(1, gpu, ALL_HEADS),)


async def answer_to(receiver: ReceiverEnd, message: Any) -> Any:
    """Return the receiver's first answer to a link's first message."""
    writer = BatchWriter(SENDER_CODEC)
    writer.send([message])
    async with open_channel(receiver.peer.address) as channel:
        call = kv_link_pb2_grpc.KvLinkStub(channel).Link(writer.batches())
        (answer, *_) = RECEIVER_CODEC.decode(await call.read())
        return answer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol_version": PROTOCOL_VERSION + 1}, f"protocol version {PROTOCOL_VERSION + 1} is not"),
        ({"receiver_incarnation": "an earlier life"}, "has restarted"),
        (
            {"page_format": PageFormat("fake", 64, "another layout")},
            "another layout of 64 bytes at the sender, fake of 64 at the receiver; .*--kv-cache-dtype",
        ),
        (
            {"page_format": PageFormat("other weights", 64, "fake")},
            "models differ: the sender has loaded other weights, the receiver fake; .*replaced",
        ),
        (
            {"ranks": (LinkRank(1, "", HeadSlice(0, 2, 4)), LinkRank(2, "", HeadSlice(0, 2, 4)))},
            "^rank 1 of 2 of the sender holds KV heads 0 to 1 of 4, not KV heads 2 to 3 of 4$",
        ),
        (
            {"ranks": (LinkRank(1, "", HeadSlice(0, 8, 8)),)},
            "^KV heads differ: 8 at the sender, 4 at the receiver$",
        ),
        ({"ranks": ()}, "^the sender has no ranks$"),
    ],
)
def test_mismatched_page_formats_are_refused(change: dict[str, Any], reason: str) -> None:
    async def scenario() -> None:
        async with ReceiverEnd({"only": ScriptedOpening()}) as receiver:
            answer = await answer_to(receiver, replace(hello_to(receiver, "only"), **change))
            assert isinstance(answer, LinkRefused) and not answer.no_transport
            assert re.search(reason, answer.reason)
            assert receiver.events == []

    asyncio.run(scenario())


def test_a_link_begins_with_hello() -> None:
    async def scenario() -> None:
        async with ReceiverEnd({"only": ScriptedOpening()}) as receiver:
            assert await answer_to(receiver, Renewed("lease")) == LinkRefused("a link begins with LinkHello")

    asyncio.run(scenario())


def test_sender_s_preferred_common_transport_is_used() -> None:
    async def scenario() -> None:
        transports = {name: ScriptedOpening() for name in ("first", "second")}
        async with ReceiverEnd(transports) as receiver:
            answer = await answer_to(receiver, hello_to(receiver, "unknown", "second", "first"))
            assert isinstance(answer, LinkWelcome)
            assert (answer.transport, answer.endpoints) == ("second", (b"scripted",))
            refused = await answer_to(receiver, hello_to(receiver, "unknown"))
            assert refused == LinkRefused("no common transport: unknown at the sender, first, second here", True)

    asyncio.run(scenario())


def test_next_transport_is_tried_in_the_same_handshake(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        first, second = ScriptedOpening(), ScriptedOpening()
        first.receiver_error = OSError("no such address")
        theirs = {"first": first, "second": second}
        async with (
            ReceiverEnd(theirs) as receiver,
            SenderEnd({name: ScriptedOpening() for name in theirs}) as sender,
        ):
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: sender.opened == ["second"])
            assert receiver.offers == [("first", "second")]
            lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
            assert lines == [
                "link from p: transport first cannot be opened: no such address; second is tried next",
            ]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_here", [True, False])
def test_transports_of_one_host_are_for_senders_of_this_host(is_here: bool) -> None:
    async def scenario() -> None:
        within, across = ScriptedOpening(), ScriptedOpening()
        within.within_host = True
        async with ReceiverEnd({"within": within, "across": across}) as receiver:
            hello = replace(hello_to(receiver, "within", "across"), sender_host=host_id() if is_here else "another")
            answer = await answer_to(receiver, hello)
            assert isinstance(answer, LinkWelcome)
            assert (answer.transport, answer.passed_over) == (
                ("within", ()) if is_here else ("across", ("within: the two ends are on different hosts",))
            )
            assert len(within.receivers) == is_here
            if not is_here:
                answer = await answer_to(receiver, replace(hello, transports=("within",)))
                assert isinstance(answer, LinkRefused) and answer.no_transport

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("sender_gpu", "gpu"), [("0000:C1:00.0", "0000:C1:00.0"), ("0000:C1:00.0", "0000:C2:00.0"), ("", "")]
)
def test_transports_between_gpus_need_two(sender_gpu: str, gpu: str, caplog: pytest.LogCaptureFixture) -> None:
    is_one = bool(gpu) and sender_gpu == gpu

    async def scenario() -> None:
        between, other = ScriptedOpening(), ScriptedOpening()
        between.between_gpus = True
        transports = {"between": between, "other": other}
        async with ReceiverEnd(transports, gpu=gpu) as receiver, SenderEnd(transports, gpu=sender_gpu) as sender:
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: len(sender.opened) == 1)
            assert sender.opened == ["other" if is_one else "between"] and len(between.receivers) == (not is_one)
            told = "; not between: it needs a GPU for each end, and both are on 0000:C1:00.0"
            assert (told in caplog.text) == is_one

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())


def test_a_sender_on_this_gpu_that_offers_nothing_else_is_told() -> None:
    async def scenario() -> None:
        between = ScriptedOpening()
        between.between_gpus = True
        async with ReceiverEnd({"between": between}, gpu="0000:C1:00.0") as receiver:
            hello = replace(hello_to(receiver, "between"), sender_host=host_id(), ranks=on("0000:C1:00.0"))
            answer = await answer_to(receiver, hello)
            assert isinstance(answer, LinkRefused) and answer.no_transport
            assert "between: it needs a GPU for each end, and both are on 0000:C1:00.0" in answer.reason
            # On another host an equal PCI id is another GPU.
            answer = await answer_to(receiver, replace(hello, sender_host="another"))
            assert isinstance(answer, LinkWelcome)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_here", [True, False])
def test_sender_exit_is_seen_only_on_this_host(is_here: bool) -> None:
    """Process ids of another host mean nothing here."""

    async def scenario(sender: "subprocess.Popen[bytes]") -> None:
        async with ReceiverEnd({"only": ScriptedOpening()}) as receiver:
            host = host_id() if is_here else "another"
            hello = replace(hello_to(receiver, "only"), ranks=(LinkRank(sender.pid, "", ALL_HEADS),), sender_host=host)
            assert isinstance(await answer_to(receiver, hello), LinkWelcome)
            (opened,) = [event for event in receiver.events if isinstance(event, ReceiverLinkOpened)]
            sender.kill()
            if is_here:
                await wait_until(opened.sender_is_gone)
            else:
                assert not opened.sender_is_gone()
                await asyncio.sleep(2 * SETTLE_S)
                assert not opened.sender_is_gone()

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as sender:
        asyncio.run(scenario(sender))


def test_a_sender_is_gone_once_all_its_processes_have_exited() -> None:
    async def scenario(processes: "list[subprocess.Popen[bytes]]") -> None:
        async with ReceiverEnd({"only": ScriptedOpening()}) as receiver:
            ranks = tuple(
                LinkRank(process.pid, "", HeadSlice.of(ALL_HEADS.total, rank, len(processes)))
                for rank, process in enumerate(processes)
            )
            hello = replace(hello_to(receiver, "only"), ranks=ranks, sender_host=host_id())
            assert isinstance(await answer_to(receiver, hello), LinkWelcome)
            (opened,) = [event for event in receiver.events if isinstance(event, ReceiverLinkOpened)]
            for process in processes[1], processes[0]:
                assert not opened.sender_is_gone()
                await asyncio.sleep(SETTLE_S)
                assert not opened.sender_is_gone()
                process.kill()
            await wait_until(opened.sender_is_gone)

    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as one,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as two,
    ):
        asyncio.run(scenario([one, two]))


def test_workers_of_unequal_degrees_link() -> None:
    async def scenario(sender: RankedWorker, receiver: RankedWorker) -> None:
        async with (
            ReceiverEnd({}, ranks=receiver.ranks) as receiver_end,
            SenderEnd({}, ranks=sender.ranks) as sender_end,
        ):
            sender_end.links.set_peers([receiver_end.peer])
            await wait_until(lambda: len(sender_end.opened) == 1)
            (sending,), (receiving,) = sender_end.of(SenderLinkOpened), receiver_end.of(ReceiverLinkOpened)
            assert sending.transport_name == "shared_memory"
            copy = sending.transport.copy_pages(0, [2, 1], [0, 3])
            await wait_until(copy.done)
            for one in (sending.transport, receiving.transport):
                await wait_until(one.abort().done)

    layout = KvHeadLayout(num_layers=2, page_size=4, num_kv_heads=4, head_dim=8, dtype="bfloat16")
    sender, receiver = RankedWorker(layout, 4, 4, "unequal-p"), RankedWorker(layout, 2, 4, "unequal-d")
    pages = np.random.default_rng(0).integers(1, 256, (4, layout.page_bytes), np.uint8)
    sender.fill(pages)
    try:
        asyncio.run(scenario(sender, receiver))
    finally:
        sender.stop()
        receiver.stop()
    assert receiver.holds([0, 3], pages[[2, 1]]) and receiver.is_untouched([1, 2])


def test_one_lane_within_a_gpu_rules_out_transports_between_gpus() -> None:
    async def scenario() -> None:
        between = ScriptedOpening()
        between.between_gpus = True
        # The receiver's only rank takes heads of both of the sender's.
        async with ReceiverEnd({"between": between}, gpu="0000:C1:00.0") as receiver:
            gpus = ("0000:C2:00.0", "0000:C1:00.0")
            ranks = tuple(LinkRank(1, gpu, HeadSlice.of(4, rank, 2)) for rank, gpu in enumerate(gpus))
            hello = replace(hello_to(receiver, "between"), sender_host=host_id(), ranks=ranks)
            answer = await answer_to(receiver, hello)
            assert isinstance(answer, LinkRefused) and answer.no_transport
            assert "both are on 0000:C1:00.0" in answer.reason

    asyncio.run(scenario())


def test_failure_to_open_any_transport_is_explained() -> None:
    async def scenario() -> None:
        first, second = ScriptedOpening(), ScriptedOpening()
        first.receiver_error, second.receiver_error = OSError("no such address"), KeyError("surprise")
        async with ReceiverEnd({"first": first, "second": second}) as receiver:
            answer = await answer_to(receiver, hello_to(receiver, "first", "second"))
            assert answer == LinkRefused(
                "the receiver can open none of the transports: first: no such address; second: KeyError('surprise')",
                True,
            )
            assert receiver.events == []

    asyncio.run(scenario())


def test_end_without_endpoint_is_closed_and_next_transport_used() -> None:
    async def scenario() -> None:
        first, second = ScriptedOpening(), ScriptedOpening()
        first.endpoint_error = RuntimeError("no handle")
        async with ReceiverEnd({"first": first, "second": second}) as receiver:
            answer = await answer_to(receiver, hello_to(receiver, "first"))
            assert answer == LinkRefused(
                "the receiver can open none of the transports: first: RuntimeError('no handle')", True
            )
            await wait_until(lambda: first.receivers[0].aborted)
            assert receiver.events == []
            answer = await answer_to(receiver, hello_to(receiver, "first", "second"))
            assert isinstance(answer, LinkWelcome) and answer.transport == "second"

    asyncio.run(scenario())


def test_handshake_overtaken_by_a_newer_one_opens_nothing() -> None:
    async def scenario() -> None:
        slow, quick = ScriptedOpening(), ScriptedOpening()
        slow.may_open.clear()
        async with ReceiverEnd({"slow": slow, "quick": quick}) as receiver:
            stale = asyncio.create_task(answer_to(receiver, hello_to(receiver, "slow")))
            await wait_until(lambda: slow.num_attempts == 1)
            assert isinstance(await answer_to(receiver, hello_to(receiver, "quick")), LinkWelcome)
            slow.may_open.set()
            assert await stale == LinkRefused("the sender has begun another link since")
            await wait_until(lambda: slow.receivers[0].aborted)
            assert [event.transport for event in receiver.of(ReceiverLinkOpened)] == quick.receivers

    asyncio.run(scenario())


def test_late_handshake_of_a_dead_sender_takes_no_link() -> None:
    """Its hello may come late."""

    async def scenario() -> None:
        slow, quick = ScriptedOpening(), ScriptedOpening()
        slow.may_open.clear()
        async with ReceiverEnd({"slow": slow, "quick": quick}) as receiver:
            living = asyncio.create_task(answer_to(receiver, hello_to(receiver, "slow", life="next life")))
            await wait_until(lambda: slow.num_attempts == 1)
            await answer_to(receiver, hello_to(receiver, "quick", life="dead life"))
            slow.may_open.set()
            assert isinstance(await living, LinkWelcome)

    asyncio.run(scenario())


def test_a_slow_handshake_holds_up_no_other() -> None:
    async def scenario() -> None:
        slow, quick = ScriptedOpening(), ScriptedOpening()
        slow.may_open.clear()
        async with (
            ReceiverEnd({"slow": slow, "quick": quick}) as receiver,
            SenderEnd({"slow": ScriptedOpening()}, worker_id="p0") as one,
            SenderEnd({"quick": ScriptedOpening()}, worker_id="p1") as other,
        ):
            one.links.set_peers([receiver.peer])
            await wait_until(lambda: slow.num_attempts == 1)
            other.links.set_peers([receiver.peer])
            await wait_until(lambda: other.opened == ["quick"])
            assert one.opened == []
            slow.may_open.set()
            await wait_until(lambda: one.opened == ["slow"])

    asyncio.run(scenario())


def test_late_opening_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        hanging = ScriptedOpening()
        hanging.may_open.clear()
        async with ReceiverEnd({"hanging": hanging, "second": ScriptedOpening()}) as receiver:
            answer = await answer_to(receiver, hello_to(receiver, "hanging", "second"))
            assert isinstance(answer, LinkWelcome) and answer.transport == "second"
            hanging.may_open.set()
            await wait_until(lambda: bool(hanging.receivers) and hanging.receivers[0].aborted)

    asyncio.run(scenario())


def test_sender_leaving_during_opening_leaves_nothing_open() -> None:
    async def scenario() -> None:
        hanging = ScriptedOpening()
        hanging.may_open.clear()
        async with ReceiverEnd({"only": hanging}) as receiver, SenderEnd({"only": ScriptedOpening()}) as sender:
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: hanging.num_attempts == 1)
            sender.links.set_peers([])
            await wait_until(lambda: not sender.links._ending)
            # The stream ends before the receiver's end has opened.
            await asyncio.sleep(0.2)
            hanging.may_open.set()
            await wait_until(lambda: bool(hanging.receivers) and hanging.receivers[0].aborted)
            assert receiver.of(ReceiverLinkOpened) == receiver.of(ReceiverLinkClosed) == []

    asyncio.run(scenario())
