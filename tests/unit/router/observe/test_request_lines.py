import pickle
import secrets
import socket
from collections.abc import Iterator

import pytest

from tandem.lifecycle import PhaseTiming
from tandem.messages import TierHits
from tandem.router.observe import request_lines
from tandem.router.observe.request_lines import MAX_KEPT_LINES, MAX_LINE_BYTES, KeptLines, RequestLines, SocketLines
from tandem.router.requests.tracker import RequestReport, RequestTracker
from tandem.sampling_params import SamplingParams
from tests.fakes.request_spec import request_spec


class Taker:
    def __init__(self) -> None:
        self.name = f"tandem-test-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()
        self._connection: socket.socket | None = None

    def take(self) -> str:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.settimeout(5.0)
        return self._connection.recv(2 * MAX_LINE_BYTES).decode().partition(" ")[2]

    def close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()


@pytest.fixture
def taker() -> Iterator[Taker]:
    taker = Taker()
    yield taker
    taker.close()


def test_a_request_s_beginning_end_and_refusal(taker: Taker) -> None:
    lines = RequestLines("router-0", SocketLines(taker.name))
    tracker = RequestTracker(
        "ab-1",
        request_spec(sampling=SamplingParams(7, temperature=0.5), client_request_id="mine"),
        failure="no worker",
        prompt_cached_len=2,
    )
    lines.begun(tracker)
    assert taker.take() == "router-0 > mine ab-1 prompt_tokens=3 max_tokens=7 temperature=0.5"
    timings = [PhaseTiming("ttft", 0.0, 31.4), PhaseTiming("decode", 31.4, 10.0), PhaseTiming("e2e", 0.0, 41.4)]
    lines.ended(RequestReport(tracker, "unavailable", 5, 5, timings))
    assert taker.take() == (
        "router-0 < mine ab-1 unavailable prompt_tokens=3 cached_tokens=2 output_tokens=5 ttft_ms=31 e2e_ms=41: "
        "no worker"
    )
    tracker.prompt_loaded = TierHits(disk=2)
    lines.ended(RequestReport(tracker, "stop", 5, 5, ()))
    assert " cached_tokens=2 host_tokens=0 disk_tokens=2 peer_tokens=0 output_tokens=5: no worker" in taker.take()
    lines.refused("", "overloaded", "the queue is full")
    assert taker.take() == "router-0 ! - overloaded: the queue is full"
    lines.refused("r", "invalid", "x" * 10_000)
    assert len(taker.take()) < MAX_LINE_BYTES
    lines.close()


def test_nobody_waits_for_a_terminal_that_does_not_read(taker: Taker) -> None:
    lines = RequestLines("router-0", SocketLines(taker.name))
    for number in range(5_000):
        lines.refused("r", "invalid", f"{number} " + "x" * 500)
    num_taken = 0
    # The next delivered line tells the number of lost lines.
    while "lost" not in (line := taker.take()):
        num_taken += 1
        lines.refused("r", "invalid", "one more")
    assert 0 < num_taken < 5_000
    num_lost = int(line.partition("(")[2].partition(" ")[0])
    assert 1_000 < num_lost <= 5_000
    lines.close()


def test_a_line_is_lost_where_nobody_takes_it() -> None:
    lines = RequestLines("router-0", SocketLines("tandem-test-nobody"))
    lines.refused("r", "invalid", "why")
    lines.close()


def test_lines_are_kept_until_somebody_asks_and_the_rest_is_counted() -> None:
    kept = KeptLines()
    lines = RequestLines("router-0", kept)
    lines.refused("r", "invalid", "\x1b[2J")
    assert [line.partition(" ")[2] for line in kept.take()] == ["router-0 ! r invalid: ?[2J"]
    for number in range(MAX_KEPT_LINES + 3):
        lines.refused(str(number), "invalid", "e")
    assert len(kept.take()) == MAX_KEPT_LINES and kept.take() == []
    lines.refused("r", "invalid", "e")
    assert "(3 lines lost)" in kept.take()[0]


def test_of_many_lines_the_first_are_taken_and_no_others_are_lost() -> None:
    kept = KeptLines()
    for number in range(MAX_KEPT_LINES):
        # Invalid bytes become longer text.
        assert kept.send(f"{number} ".encode() + b"\xff" * (MAX_LINE_BYTES - 4))
    taken: list[str] = []
    while lines := kept.take(64 << 10):
        assert len(pickle.dumps(lines)) < 100 << 10
        taken += lines
    assert [int(line.split()[0]) for line in taken] == list(range(MAX_KEPT_LINES))


def test_two_threads_may_take_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptLines()
    for number in range(3):
        kept.send(b"%d" % number)
    others: list[str] = []

    def shown(line: bytes) -> str:
        if line == b"1":
            # The other thread takes lines here.
            others.extend(kept.take())
        return line.decode()

    monkeypatch.setattr(request_lines, "shown", shown)
    assert (kept.take(), others) == (["0", "1"], ["2"])
