"""Pieces are written one at a time, in order, up to the end."""

import asyncio
from collections.abc import Callable

import pytest

from tandem.messages import Abort, Finished
from tandem.router.errors import UnavailableError
from tandem.router.frontends.access import Access
from tandem.router.frontends.generation import Generation, Piece
from tandem.router.frontends.piece_writer import PieceWriter
from tandem.router.router import SHUTTING_DOWN
from tandem.router.text.output_text import OutputText
from tandem.sampling_params import SamplingParams
from tests.fakes.request_spec import request_spec
from tests.fakes.router_harness import RouterHarness, first_token, run, settle, step_tokens
from tests.fakes.tokenizer import ByteTokenizer


class Call:
    """A call. Attributes: written: pieces passed to gRPC; taken: a future for each, set when it has gone out."""

    def __init__(self, harness: RouterHarness, write: Callable[[Piece], None] = lambda piece: None) -> None:
        self.written: list[Piece] = []
        self.taken: list[asyncio.Future[None]] = []
        self._check = write
        output = OutputText(ByteTokenizer(), (), ())  # type: ignore[arg-type]
        self.tracker = harness.router.make_tracker(request_spec((1, 2), SamplingParams(8)))
        self._generation = Generation(harness.router, Access((), 0), self.tracker, output)
        self.task = asyncio.create_task(self._run())

    async def take(self) -> None:
        self.taken[-1].set_result(None)
        await settle()

    @property
    def token_ids(self) -> list[list[int]]:
        return [piece.token_ids for piece in self.written]

    async def _run(self) -> None:
        with self._generation:
            await PieceWriter(self._generation, self._write).run()

    async def _write(self, piece: Piece) -> None:
        self._check(piece)
        self.written.append(piece)
        self.taken.append(asyncio.get_running_loop().create_future())
        await self.taken[-1]


async def begin(harness: RouterHarness, call: Call) -> str:
    """Passes on the first token; returns the request's id."""
    await settle()
    request_id = call.tracker.request_id
    harness.p[0].say(first_token(request_id, 0, 0, 10))
    await settle()
    return request_id


@run
async def test_a_piece_goes_out_when_the_one_before_is_taken_and_has_all_that_came_meanwhile() -> None:
    h = RouterHarness()
    call = Call(h)
    request_id = await begin(h, call)
    h.d[0].say(step_tokens(request_id, 0, 1, 11))
    h.d[0].say(step_tokens(request_id, 0, 2, 12))
    await settle()
    assert call.token_ids == [[10]]
    await call.take()
    assert call.token_ids == [[10], [11, 12]]
    # Nothing new has come when this is taken.
    await call.take()
    h.d[0].say(step_tokens(request_id, 0, 3, 13))
    await settle()
    assert call.token_ids == [[10], [11, 12], [13]]
    h.d[0].say(Finished(request_id, 0, "length", 4, 0, 1))
    await call.take()
    assert call.token_ids == [[10], [11, 12], [13], []] and call.written[-1].finish_reason == "length"
    assert not call.task.done()
    await call.take()
    await call.task


@run
async def test_a_write_that_only_lets_others_have_their_turn_is_gone_on_with() -> None:
    h = RouterHarness()
    call = Call(h)
    take = call._write

    async def write(piece: Piece) -> None:
        await asyncio.sleep(0)
        await take(piece)

    call._write = write  # type: ignore[method-assign]
    await begin(h, call)
    await settle()
    assert call.token_ids == [[10]]
    call.task.cancel()


@run
async def test_what_comes_before_the_failure_is_written_and_the_call_hears_of_it() -> None:
    h = RouterHarness()
    call = Call(h)
    await begin(h, call)
    h.router.shut_down()
    await call.take()
    with pytest.raises(UnavailableError, match=SHUTTING_DOWN):
        await call.task
    assert call.token_ids == [[10]]


@run
async def test_a_call_that_breaks_while_it_writes_aborts_its_request_and_no_other() -> None:
    def refuse(piece: Piece) -> None:
        if piece.index == 1:
            raise ConnectionError("it is gone")

    h = RouterHarness()
    broken, other = Call(h, refuse), Call(h)
    for call in (broken, other):
        request_id = await begin(h, call)
        await call.take()
        h.d[0].say(step_tokens(request_id, 0, 1, 11))
        await settle()
    with pytest.raises(ConnectionError):
        await broken.task
    assert [m.request_id for m in h.d[0].of(Abort)] == [broken.tracker.request_id]
    assert other.token_ids == [[10], [11]]
    other.task.cancel()


@run
async def test_a_client_that_leaves_ends_what_is_being_written() -> None:
    h = RouterHarness()
    call = Call(h)
    request_id = await begin(h, call)
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)
    assert [m.request_id for m in h.d[0].of(Abort)] == [request_id]
    # Later messages of gRPC and workers have no effect.
    call.taken[0].cancel()
    h.d[0].say(step_tokens(request_id, 0, 1, 11))
    await settle()
    assert call.token_ids == [[10]]
