"""Clients in a process of their own: they send requests of all kinds, and check each answer."""

import copy
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import openai

from benchmarks.children import questions
from benchmarks.soak.case import Case
from benchmarks.soak.event_stream import PassingError
from benchmarks.soak.kinds.base import Clients, Kind
from benchmarks.soak.kinds.table import KINDS, NUM_REQUESTS
from tandem.client import TandemClient

# Longest wait for a request, over all times that it is sent. Covers a worker's hang, kill and restart.
_REQUEST_S = 240.0
_SEND_AGAIN_S = 0.5
_CLIENT_TIMEOUT_S = 180.0
_MAX_NOTES = 40
# More would take long to confirm, and are no rounding.
_MAX_DIFFERENCES = 200
_FIRST_THREADS = 4


@dataclass
class KindTally:
    """
    Attributes:
        num_right, num_wrong: checked answers.
        num_ties: answers unlike the first one that the model has confirmed.
        num_failed: requests without an answer.
    """

    num_right: int = 0
    num_ties: int = 0
    num_wrong: int = 0
    num_failed: int = 0


@dataclass(frozen=True)
class Difference:
    """An answer unlike the first one, for the model to judge. Attributes: cases: never empty."""

    kind: str
    number: int
    cases: Sequence[Case]
    line: str


@dataclass
class Tally:
    """What the clients saw.

    Attributes:
        sent_again: requests by the reason for which the client had to send them again.
        failures: requests without an answer, by reason.
        notes: the first mismatches and failures in full.
        num_running: requests under way.
    """

    kinds: dict[str, KindTally] = field(default_factory=lambda: {kind.name: KindTally() for kind in KINDS})
    sent_again: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_running: int = 0

    @property
    def num_checked(self) -> int:
        return sum(kind.num_right + kind.num_ties + kind.num_wrong for kind in self.kinds.values())

    @property
    def is_clean(self) -> bool:
        return not self.failures and not any(kind.num_wrong or kind.num_failed for kind in self.kinds.values())


class Traffic:
    """Threads that send requests of random kinds until `pause` or `close`."""

    def __init__(self, clients: Clients, kinds: dict[Kind, int], num_threads: int, seed: int) -> None:
        self._clients = clients
        self._kinds = kinds
        self._lock = threading.Lock()
        self._firsts: dict[tuple[str, int], Any] = {}
        self._tally = Tally()
        self._differences: list[Difference] = []
        self._goes_on = threading.Event()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._send, args=(random.Random(f"{seed} {number}"),), daemon=True)
            for number in range(num_threads)
        ]

    def ask_firsts(self) -> None:
        """Get each request's undisturbed answer. Raises RuntimeError: one failed."""
        requests = [(kind, number) for kind in self._kinds for number in range(NUM_REQUESTS)]
        with ThreadPoolExecutor(_FIRST_THREADS) as pool:
            for (kind, number), answer in zip(requests, pool.map(self._ask_first, requests), strict=True):
                self._firsts[kind.name, number] = answer

    def _ask_first(self, request: tuple[Kind, int]) -> Any:
        kind, number = request
        try:
            return kind.first(self._clients, number)
        except Exception as error:
            raise RuntimeError(f"{kind.name} {number}: {type(error).__name__}: {error}") from error

    def first_cases(self) -> list[tuple[str, Case]]:
        """Return what the model must confirm of the first answers, each with its request."""
        return [
            (f"{kind.name} {number}", case)
            for kind in self._kinds
            for number in range(NUM_REQUESTS)
            for case in kind.cases(number, self._firsts[kind.name, number], is_first=True)
        ]

    def differences(self) -> list[Difference]:
        with self._lock:
            return list(self._differences)

    def resume(self) -> None:
        self._goes_on.set()
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def pause(self) -> None:
        """Return at once; running requests come to their end."""
        self._goes_on.clear()

    def close(self) -> None:
        self._is_closed = True
        self._goes_on.set()

    def tally(self) -> Tally:
        with self._lock:
            return copy.deepcopy(self._tally)

    def _send(self, rng: random.Random) -> None:
        kinds, weights = list(self._kinds), list(self._kinds.values())
        while True:
            self._goes_on.wait()
            if self._is_closed:
                return
            (kind,) = rng.choices(kinds, weights)
            number = rng.randrange(NUM_REQUESTS)
            with self._lock:
                self._tally.num_running += 1
            try:
                self._send_one(kind, number, rng)
            finally:
                with self._lock:
                    self._tally.num_running -= 1

    def _send_one(self, kind: Kind, number: int, rng: random.Random) -> None:
        first = self._firsts[kind.name, number]
        deadline = time.monotonic() + _REQUEST_S
        while True:
            try:
                again = kind.again(self._clients, number, rng)
            except PassingError as error:
                if time.monotonic() > deadline:
                    self._note_failure(kind, number, error)
                    return
                with self._lock:
                    _count(self._tally.sent_again, f"{kind.name}: {error}")
                time.sleep(_SEND_AGAIN_S)
                continue
            except Exception as error:
                self._note_failure(kind, number, error)
                return
            break
        with self._lock:
            counts = self._tally.kinds[kind.name]
            if kind.is_right(first, again):
                counts.num_right += 1
                return
            line = f"{kind.name} {number}: {again!r} in place of {first!r}"
            cases = kind.cases(number, again, is_first=False)
            if cases and len(self._differences) < _MAX_DIFFERENCES:
                self._differences.append(Difference(kind.name, number, cases, _stamped(line)))
            else:
                counts.num_wrong += 1
                self._note(line)

    def _note_failure(self, kind: Kind, number: int, error: Exception) -> None:
        reason = f"{kind.name}: {type(error).__name__} {getattr(error, 'code', '')}".rstrip()
        with self._lock:
            self._tally.kinds[kind.name].num_failed += 1
            _count(self._tally.failures, reason)
            self._note(f"{kind.name} {number}: {type(error).__name__}: {error}")

    def _note(self, line: str) -> None:
        if len(self._tally.notes) < _MAX_NOTES:
            self._tally.notes.append(_stamped(line))


def run(
    pipe: Connection,
    grpc_address: str,
    http_address: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[str],
    num_threads: int,
    seed: int,
) -> None:
    """Answer the parent: ("firsts",), ("cases",), ("resume",), ("pause",), ("tally",), ("differences",)."""
    with (
        TandemClient(grpc_address) as grpc_client,
        openai.OpenAI(
            base_url=f"http://{http_address}/v1", api_key="none", max_retries=0, timeout=_CLIENT_TIMEOUT_S
        ) as openai_client,
    ):
        clients = Clients(grpc_client, openai_client, http_address, model)
        kinds = {kind(prompts, texts): weight for kind, weight in KINDS.items()}
        traffic = Traffic(clients, kinds, num_threads, seed)
        try:
            for question in questions(pipe):
                match question:
                    case ("firsts",):
                        pipe.send(_tried(traffic))
                    case ("cases",):
                        pipe.send(traffic.first_cases())
                    case ("resume",):
                        traffic.resume()
                        pipe.send(None)
                    case ("pause",):
                        traffic.pause()
                        pipe.send(None)
                    case ("tally",):
                        pipe.send(traffic.tally())
                    case ("differences",):
                        pipe.send(traffic.differences())
        finally:
            traffic.close()


def _stamped(line: str) -> str:
    return f"{time.strftime('%H:%M:%S')} {line}"


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _tried(traffic: Traffic) -> str:
    """Return "" or the failure."""
    try:
        traffic.ask_firsts()
    except RuntimeError as error:
        return str(error)
    return ""
