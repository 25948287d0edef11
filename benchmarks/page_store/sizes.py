"""Loads of the page store's benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """
    Attributes:
        prefix_tokens: of the prompts whose TTFT is measured, and of documents beside streams.
        num_prefixes: number of these prompts.
        num_documents: documents beside streams, more than the small pool holds.
        question_tokens: behind each prefix, new in each request.
        num_streams, stream_tokens: running streams and their outputs.
        rate, seconds: arrivals of questions beside the streams.
        num_restarted, conversation_tokens: conversations of a restarted worker, and tokens of their first turns.
        flags: of `tandem serve`.
        small_pool_pages: a pool for the streams and a few prefixes.
        large_pool_pages: a pool for everything.
        store_memory, store_disk: as of `tandem serve`, the latter without its folder.
        copied_bytes: pool and region of the copies.
    """

    prefix_tokens: int
    num_prefixes: int
    num_documents: int
    question_tokens: int
    num_streams: int
    stream_tokens: int
    rate: float
    seconds: float
    num_restarted: int
    conversation_tokens: int
    flags: tuple[str, ...]
    small_pool_pages: int
    large_pool_pages: int
    store_memory: str
    store_disk: str
    copied_bytes: int
    start_timeout_s: float


SIZES = {
    "cuda": Sizes(
        prefix_tokens=8192,
        # A GiB each, on disk too.
        num_prefixes=8,
        num_documents=16,
        question_tokens=64,
        num_streams=64,
        stream_tokens=2048,
        rate=8.0,
        seconds=12.0,
        num_restarted=100,
        conversation_tokens=1024,
        flags=("--max-model-len", "16384"),
        # 64 streams of up to 2,112 tokens, and three prefixes.
        small_pool_pages=64 * 132 + 3 * 520,
        large_pool_pages=64 * 132 + 20 * 520,
        store_memory="32GiB",
        store_disk="24GiB",
        copied_bytes=4 * 2**30,
        start_timeout_s=150.0,
    ),
    "cpu": Sizes(
        prefix_tokens=240,
        num_prefixes=6,
        num_documents=6,
        question_tokens=16,
        num_streams=2,
        stream_tokens=192,
        rate=1.0,
        seconds=15.0,
        num_restarted=20,
        conversation_tokens=128,
        flags=("--max-model-len", "512"),
        small_pool_pages=64,
        large_pool_pages=512,
        store_memory="1GiB",
        store_disk="1GiB",
        copied_bytes=2**28,
        start_timeout_s=120.0,
    ),
}
