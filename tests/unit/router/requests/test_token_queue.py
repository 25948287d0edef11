import asyncio

from tandem.router.requests.token_queue import TokenQueue
from tests.fakes.router_harness import run, settle


async def next_tokens(queue: TokenQueue) -> list[int] | None:
    """Returns None after the end."""
    while not (token_ids := queue.take_tokens(100)) and not queue.is_exhausted:
        await queue.news()
    return token_ids or None


@run
async def test_what_comes_while_nobody_reads_goes_out_together() -> None:
    queue = TokenQueue()
    queue.put_tokens([1])
    queue.put_tokens([2, 3])
    assert await next_tokens(queue) == [1, 2, 3]
    assert queue.take_tokens(100) == [] and not queue.is_exhausted


@run
async def test_a_reader_waits_for_tokens_or_the_end() -> None:
    queue = TokenQueue()
    for put, expected in ((lambda: queue.put_tokens([7]), [7]), (queue.put_end, None)):
        reader = asyncio.create_task(next_tokens(queue))
        await settle()
        assert not reader.done()
        put()
        assert await reader == expected
    assert queue.is_exhausted


@run
async def test_what_came_before_the_end_can_still_be_read() -> None:
    queue = TokenQueue()
    queue.put_tokens([1, 2])
    queue.put_end()
    assert not queue.is_exhausted
    assert await next_tokens(queue) == [1, 2]
    assert queue.is_exhausted
    assert await next_tokens(queue) is None


@run
async def test_a_reader_that_has_left_keeps_nothing_from_the_next() -> None:
    queue = TokenQueue()
    left = asyncio.create_task(next_tokens(queue))
    await settle()
    left.cancel()
    queue.put_tokens([1])
    await asyncio.gather(left, return_exceptions=True)
    assert await next_tokens(queue) == [1]


@run
async def test_who_asks_is_called_once_and_not_by_who_puts_tokens_in() -> None:
    queue = TokenQueue()
    calls: list[list[int]] = []
    queue.call_at_news(lambda: calls.append(queue.take_tokens(100)))
    queue.put_tokens([1])
    queue.put_tokens([2])
    assert calls == []
    await settle()
    assert calls == [[1, 2]]
    queue.put_tokens([3])
    await settle()
    assert calls == [[1, 2]]


@run
async def test_a_long_backlog_is_taken_in_parts() -> None:
    queue = TokenQueue()
    queue.put_tokens([1, 2, 3])
    queue.put_end()
    assert queue.take_tokens(2) == [1, 2]
    assert queue.has_tokens and not queue.is_exhausted
    assert queue.take_tokens(2) == [3]
    assert queue.is_exhausted
