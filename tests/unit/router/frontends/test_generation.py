"""The end of an output, and clients that do not read."""

import asyncio

import pytest

from tandem.messages import Finished
from tandem.router.frontends.access import Access
from tandem.router.frontends.generation import Generation, Piece
from tandem.router.frontends.openai.streaming import pieces_of
from tandem.router.router import DELIVERY_TIMEOUT_S
from tandem.router.text.output_text import OutputText
from tests.fakes.request_spec import request_spec
from tests.fakes.router_harness import RouterHarness, first_token, run, settle
from tests.fakes.tokenizer import ByteTokenizer

UNREAD = "its client does not read"


def patient() -> RouterHarness:
    """Returns a router whose workers may be silent."""
    return RouterHarness(heartbeat_timeout_s=1e6, stall_timeout_s=1e6)


def generation(h: RouterHarness, access: Access) -> Generation:
    tracker = h.router.make_tracker(request_spec())
    return Generation(h.router, access, tracker, OutputText(ByteTokenizer(), (), ()))  # type: ignore[arg-type]


def finish(h: RouterHarness, request_id: str) -> None:
    h.d[0].say(Finished(request_id, 0, "length", 1, 0, 1))


def pass_delivery_timeout(h: RouterHarness) -> None:
    h.router.check_deadlines()
    h.clock.advance(DELIVERY_TIMEOUT_S + 1)
    h.router.check_deadlines()


def test_an_output_that_ends_before_its_siblings_is_over_and_not_unread(caplog: pytest.LogCaptureFixture) -> None:
    pieces: list[tuple[int, Piece]] = []

    @run
    async def scenario() -> None:
        h, access = patient(), Access((), 2)
        generations = [generation(h, access) for _ in range(2)]

        async def read() -> None:
            async for piece in pieces_of(generations):
                pieces.append(piece)

        client = asyncio.create_task(read())
        await settle()
        early, late = (g.tracker.request_id for g in generations)
        for request_id in (early, late):
            h.p[0].say(first_token(request_id, 0, 0, ord("a")))
        finish(h, early)
        await settle()
        assert pieces[-1] == (0, Piece(1, [], "", [], "length"))
        # The last piece may have to be written yet: a draining router waits for it.
        assert h.router.num_requests == 2
        assert b'tandem_requests_total{outcome="length"} 1.0' in h.router.metrics.exposition()
        with access.hold(""):
            pass  # Another request of this key is admitted.
        pass_delivery_timeout(h)
        assert h.router.num_requests == 1
        finish(h, late)
        await client

    scenario()
    assert [(index, piece.finish_reason) for index, piece in pieces if piece.finish_reason] == [
        (0, "length"),
        (1, "length"),
    ]
    assert UNREAD not in caplog.text


def test_a_client_that_does_not_read_keeps_nothing_and_can_still_read_what_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @run
    async def scenario() -> None:
        h, access = patient(), Access((), 1)
        with generation(h, access) as unread:
            h.p[0].say(first_token(unread.tracker.request_id, 0, 0, ord("a")))
            finish(h, unread.tracker.request_id)
            pass_delivery_timeout(h)
            assert UNREAD in caplog.text
            assert h.router.num_requests == 0
            with access.hold(""):
                pass  # Another request of this key is admitted.
            assert [await unread.next_piece() for _ in range(3)] == [
                Piece(0, [ord("a")], "a", []),
                Piece(1, [], "", [], "length"),
                None,
            ]
        assert b'tandem_requests_total{outcome="abort"} 1.0' in h.router.metrics.exposition()

    scenario()
