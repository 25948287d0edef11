"""Counts of messages, bytes and CPU time of one router."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tandem.rpc.codec import ROUTER_CODEC, WORKER_CODEC


@dataclass(slots=True)
class Cost:
    """Attributes: num: calls or messages; num_bytes: encoded; cpu_s: CPU time of the thread."""

    num: int = 0
    num_bytes: int = 0
    cpu_s: float = 0.0

    @property
    def ms(self) -> float:
        """Milliseconds of each."""
        return 1e3 * self.cpu_s / self.num if self.num else 0.0


class Costs:
    """Costs by name. Every message passes the real codec, and its CPU time counts."""

    def __init__(self) -> None:
        self.of: defaultdict[str, Cost] = defaultdict(Cost)
        # The router sends one object to many workers; each send would encode it again.
        self._last: tuple[Any, int, float] = None, 0, 0.0
        self._encoding_s = 0.0

    def take(self) -> dict[str, Cost]:
        """Returns the costs so far and begins anew."""
        taken, self.of = dict(self.of), defaultdict(Cost)
        return taken

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        begun, encoding_s = time.thread_time(), self._encoding_s
        try:
            yield
        finally:
            # Messages that this work sends are counted as such.
            self.add(name, 1, 0, time.thread_time() - begun - (self._encoding_s - encoding_s))

    def add(self, name: str, num: int, num_bytes: int, cpu_s: float) -> None:
        cost = self.of[name]
        cost.num += num
        cost.num_bytes += num_bytes
        cost.cpu_s += cpu_s

    def receive(self, messages: Sequence[Any], take: Callable[[Any], object]) -> None:
        """Passes a worker's messages, as one batch, to a router."""
        encoded = WORKER_CODEC.encode(messages)
        num_bytes = encoded.ByteSize()
        begun = time.thread_time()
        decoded = WORKER_CODEC.decode(encoded)
        decode_s = (time.thread_time() - begun) / len(messages)
        for message in decoded:
            name = f"from workers: {type(message).__name__}"
            with self.counted(name):
                take(message)
            self.add(name, 0, num_bytes // len(messages), decode_s)

    def sent(self, messages: Sequence[Any]) -> None:
        """Counts a router's messages to a worker."""
        began = time.thread_time()
        for message in messages:
            known, num_bytes, cpu_s = self._last
            if message is not known:
                begun = time.thread_time()
                encoded = ROUTER_CODEC.encode([message])
                cpu_s = time.thread_time() - begun
                num_bytes = encoded.ByteSize()
                self._last = message, num_bytes, cpu_s
            self.add(f"to workers: {type(message).__name__}", 1, num_bytes, cpu_s)
        self._encoding_s += time.thread_time() - began
