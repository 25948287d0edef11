import asyncio
from collections.abc import AsyncGenerator

import pytest

from tandem.router.observe.live import feed as feed_module
from tandem.router.observe.live.feed import MAX_VIEWERS, LiveFeed, TooManyViewersError
from tests.fakes.router_harness import run, settle


class ScriptedFrame(str):
    def seen_by(self, key: str) -> str:
        return f"{self} for {key}" if key else str(self)


class ScriptedFrames:
    def __init__(self) -> None:
        self.made: list[str] = []
        self.num_samples = 0
        self.told_at: list[int] = []

    def sample(self) -> None:
        self.num_samples += 1

    def changes(self) -> ScriptedFrame:
        return self._make("changes")

    def everything(self) -> ScriptedFrame:
        return self._make("everything")

    def mark_told(self) -> None:
        self.told_at.append(self.num_samples)

    def _make(self, kind: str) -> ScriptedFrame:
        self.made.append(f"{kind} {self.num_samples}")
        return ScriptedFrame(self.made[-1])


async def soon(viewer: AsyncGenerator[str]) -> str:
    async with asyncio.timeout(1.0):
        return await anext(viewer)


@run
async def test_no_frames_without_viewers() -> None:
    frames = ScriptedFrames()
    feed = LiveFeed(frames)
    for _ in range(3):
        feed.tick()
    assert (frames.made, frames.num_samples) == ([], 3)


@run
async def test_frame_is_shared_by_viewers() -> None:
    frames = ScriptedFrames()
    feed = LiveFeed(frames)
    viewers = [feed.watch() for _ in range(MAX_VIEWERS)]
    assert {await soon(viewer) for viewer in viewers} == {"everything 0"}
    feed.tick()
    assert {await soon(viewer) for viewer in viewers} == {"changes 1"}
    for _ in range(3):
        await viewers.pop().aclose()
        viewers.append(feed.watch())
        assert await soon(viewers[-1]) == "everything 1"
    assert frames.made == ["everything 0", "changes 1", "everything 1"]
    for viewer in viewers:
        await viewer.aclose()


@run
async def test_events_between_frames_are_not_lost() -> None:
    """A full state made after `mark_told` overlaps with the next frame."""
    frames = ScriptedFrames()
    feed = LiveFeed(frames)
    feed.tick()
    await soon(first := feed.watch())
    await first.aclose()
    await soon(second := feed.watch())
    feed.tick()
    assert await soon(second) == "changes 2"
    assert frames.told_at == [1, 2]
    await second.aclose()


@run
async def test_slow_viewer_gets_full_state() -> None:
    frames = ScriptedFrames()
    feed = LiveFeed(frames)
    slow, quick = feed.watch(), feed.watch()
    await soon(slow)
    await soon(quick)
    for second in range(1, 6):
        feed.tick()
        assert await soon(quick) == f"changes {second}"
    assert await soon(slow) == "everything 5"
    feed.tick()
    assert await soon(slow) == await soon(quick) == "changes 6"
    await slow.aclose()
    await quick.aclose()


@run
async def test_places_are_limited_and_freed() -> None:
    feed = LiveFeed(ScriptedFrames())
    viewers = [feed.watch() for _ in range(MAX_VIEWERS)]
    for viewer in viewers:
        await soon(viewer)
    with pytest.raises(TooManyViewersError):
        await soon(feed.watch())
    assert feed.num_viewers == MAX_VIEWERS
    await viewers.pop().aclose()
    viewers.append(feed.watch())
    await soon(viewers[-1])
    for viewer in viewers:
        await viewer.aclose()
    assert feed.num_viewers == 0


@run
async def test_one_key_cannot_take_all_places() -> None:
    feed = LiveFeed(ScriptedFrames(), num_keys=2)
    viewers = [feed.watch("one") for _ in range(MAX_VIEWERS // 2)]
    for viewer in viewers:
        await soon(viewer)
    with pytest.raises(TooManyViewersError, match="with this key"):
        await soon(feed.watch("one"))
    viewers.append(feed.watch("other"))
    assert await soon(viewers[-1]) == "everything 0 for other"
    feed.tick()
    assert await soon(viewers[-1]) == "changes 1 for other"
    await viewers.pop(0).aclose()
    viewers.append(feed.watch("one"))
    assert await soon(viewers[-1]) == "everything 1 for one"
    for viewer in viewers:
        await viewer.aclose()


@run
async def test_streams_end_at_close() -> None:
    feed = LiveFeed(ScriptedFrames())
    viewer = feed.watch()
    await soon(viewer)
    ending = asyncio.create_task(anext(viewer, "the end"))
    await settle()
    assert not ending.done()
    feed.close()
    await settle()
    assert ending.done() and ending.result() == "the end"
    assert feed.num_viewers == 0


def test_feed_survives_failed_frame(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedFrames):
        def sample(self) -> None:
            super().sample()
            if self.num_samples <= 3:
                raise ValueError("no such role")

    @run
    async def scenario() -> None:
        frames = Broken()
        running = asyncio.create_task(LiveFeed(frames).run())
        async with asyncio.timeout(5.0):
            while not frames.told_at:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()

    monkeypatch.setattr(feed_module, "INTERVAL_S", 0.01)
    scenario()
    assert [record.message for record in caplog.records] == ["the live page could not be fed"]
