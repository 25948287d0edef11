"""Measures the host time that a worker's leader spends per decode step to tell its followers.

The leader publishes the record of each step; a follower takes it, and makes its batch from it. In each step one
sequence is new, and the others are fed. The device is not involved.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import cast

from benchmarks.rows import Row, argument_parser, report
from tandem.engine.batch import Batch
from tandem.engine.kvcache.page_table import PageTable
from tandem.engine.output import Feed, ForwardOutput
from tandem.engine.ranks.progress import Progress
from tandem.engine.ranks.record import NO_GRAPH, ForwardRecord
from tandem.engine.ranks.recorder import ForwardRecorder
from tandem.engine.ranks.replay import Replay
from tandem.engine.ranks.ring import Ring
from tandem.engine.token_sequence import TokenSequence

PAGE_SIZE = 16
MAX_PUBLISH_US = 40.0


def measure(batch_size: int, num_pages: int, num_steps: int) -> list[Row]:
    ring = Ring(memoryview(bytearray(Ring.num_bytes(1))), 1, timeout_s=1.0)
    recorder = ForwardRecorder(ring, Progress(memoryview(bytearray(Progress.num_bytes(2))), 2), PAGE_SIZE)
    reader, replay = ring.reader(1), Replay()
    sequences = [_sequence(num_pages, number) for number in range(batch_size)]
    feed = None
    published: list[float] = []
    replayed: list[float] = []
    for step in range(num_steps):
        batch = Batch("decode", sequences, feed)
        began = time.perf_counter()
        recorder.publish(batch, batch_size, NO_GRAPH, ())
        published.append((time.perf_counter() - began) * 1e6)
        began = time.perf_counter()
        # The first record, with all tables, takes several parts.
        while (message := reader.take()) is not None:
            replay.batch(ForwardRecord.decode(message))
        replayed.append((time.perf_counter() - began) * 1e6)
        for sequence in sequences:
            sequence.complete_extend()
            sequence.num_pending = 1
            _decode(sequence)
        new = step % batch_size
        # So that in each step an equal number of sequences needs a page.
        sequences[new] = _sequence(num_pages, 2 * step)
        feed = Feed(cast(ForwardOutput, None), [-1 if row == new else row for row in range(batch_size)])
    what = f"batch {batch_size}, tables of {num_pages} pages"
    return [
        Row(f"{what}: publish, p50", statistics.median(published[1:]), "us", high=MAX_PUBLISH_US),
        Row("  least", min(published[1:]), "us"),
        Row("  p99", statistics.quantiles(published[1:], n=100)[-1], "us"),
        Row("  first step, all tables", published[0], "us"),
        Row("  a follower's batch, p50", statistics.median(replayed[1:]), "us"),
    ]


def _sequence(num_pages: int, number: int) -> TokenSequence:
    """Args: number: sequences reach the ends of their pages in different steps."""
    length = (num_pages - 1) * PAGE_SIZE + number % PAGE_SIZE
    sequence = TokenSequence([0] * (length + 1), length, PageTable(range(num_pages)), length)
    _decode(sequence)
    return sequence


def _decode(sequence: TokenSequence) -> None:
    sequence.device_len = sequence.cached_len + 1
    if sequence.device_len > len(sequence.page_ids) * PAGE_SIZE:
        cast(PageTable, sequence.page_ids).append(0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--batch", type=int, default=256, help="sequences (%(default)s)")
    parser.add_argument("--pages", type=int, default=512, help="of each sequence (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="measured (%(default)s)")
    arguments = parser.parse_args(argv)
    rows = measure(arguments.batch, arguments.pages, arguments.steps)
    return report(rows, "Records of forward passes on several ranks", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
