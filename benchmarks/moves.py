"""Measures the gaps of running streams while their worker restarts, with moves and without.

Two clusters start one after the other on the same devices: two linked workers (`--workers 2`), whose streams move, and
two workers without links (`--both 2`), whose streams end where they are or, after --drain-timeout, begin again at the
other worker. Each gets the same streams, greedy and sampled, without a pause. Meanwhile `tandem restart` restarts its
workers in turn. Afterwards every stream that began again or moved runs once more undisturbed, with the same seed.

  python -m benchmarks.moves --model smollm2-135m-instruct --restarts 4
"""

import argparse
import itertools
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.served import Served, StartError
from tandem.client import TandemClient, TandemError
from tandem.v1 import inference_pb2 as pb

LAYOUTS = {"moves": ("--workers", "2"), "without": ("--both", "2")}
WORKERS = {"moves": "worker", "without": "both"}
STREAM_TIMEOUT_S = 600.0
RESTART_TIMEOUT_S = 600.0


@dataclass
class Stream:
    """
    Attributes:
        times: arrival of each message with tokens, in seconds.
    """

    request: pb.GenerateRequest
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    num_attempts: int = 0
    failure: str = ""

    def run(self, client: TandemClient) -> None:
        try:
            for response in client.generate(self.request, timeout_s=STREAM_TIMEOUT_S):
                if response.token_ids:
                    self.token_ids += response.token_ids
                    self.times.append(time.monotonic())
                self.num_attempts = response.handover.attempts or self.num_attempts
        except TandemError as error:
            self.failure = str(error)

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Return the gaps that lie in part between two moments, in seconds."""
        return [b - a for a, b in itertools.pairwise(self.times) if a < end and b > begin]


class Load:
    """Keeps a number of streams running, until the end of the context."""

    def __init__(self, client: TandemClient, num_streams: int, num_tokens: int, seed: int) -> None:
        self._client = client
        self._num_tokens = num_tokens
        self._random = random.Random(seed)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._go_on, args=(i,)) for i in range(num_streams)]
        self.streams: list[Stream] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _go_on(self, number: int) -> None:
        while not self._is_over.is_set():
            stream = Stream(self.make_request(is_sampled=bool(number % 2)))
            self.streams.append(stream)
            stream.run(self._client)
            if stream.failure:
                return

    def make_request(self, *, is_sampled: bool) -> pb.GenerateRequest:
        prompt = [self._random.randrange(1000, 2000) for _ in range(self._random.randrange(16, 128))]
        num_tokens = self._random.randrange(self._num_tokens // 2, self._num_tokens + 1)
        sampling = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=self._random.getrandbits(32))
        if is_sampled:
            sampling.temperature, sampling.top_p = 0.8, 0.95
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def describe(name: str, gaps: Sequence[float]) -> str:
    if not gaps:
        return f"  {name}: none"
    p50, p99, longest = (1e3 * value for value in (percentile(gaps, 0.5), percentile(gaps, 0.99), max(gaps)))
    return f"  {name}: {len(gaps)}, p50 {p50:.0f} ms, p99 {p99:.0f} ms, longest {longest:.0f} ms"


def restart(name: str, worker: str) -> tuple[float, float, float]:
    """Restart a worker; return the times of the order, of its drained end, and of its return."""
    command = [sys.executable, "-m", "tandem.deploy.cli.main", "restart", name, worker]
    began = time.monotonic()
    drained = began
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "starting again" in line:
                drained = time.monotonic()
        if process.wait(RESTART_TIMEOUT_S):
            raise RuntimeError(f"tandem restart {worker} failed: {''.join(lines)}")
    return began, drained, time.monotonic()


def num_different(client: TandemClient, streams: Sequence[Stream]) -> int:
    """Run streams again, undisturbed; return the number of those with other tokens."""
    count = 0
    for stream in streams:
        again = Stream(stream.request)
        again.run(client)
        count += again.token_ids != stream.token_ids
    return count


def run_layout(layout: str, args: argparse.Namespace, log_dir: Path) -> None:
    flags = [
        *("--model", args.model, "--device", args.device, "--drain-timeout", str(args.drain_timeout)),
        *LAYOUTS[layout],
        *args.flags,
    ]
    with Served(flags, log_dir / layout, args.start_timeout) as served, TandemClient(served.address) as client:
        drains, back = [], []
        with Load(client, args.streams, args.tokens, args.seed) as load:
            time.sleep(args.lead)
            for number in range(args.restarts):
                began, drained, ended = restart(served.name, f"{WORKERS[layout]}-{number % 2}")
                drains.append((began, drained))
                back.append(ended - drained)
                time.sleep(args.lead)
        again = [stream for stream in load.streams if stream.num_attempts > 1]
        print(f"{layout} ({' '.join(LAYOUTS[layout])}), {args.streams} streams, {args.restarts} restarts", flush=True)
        print(f"  drains: {', '.join(f'{end - begin:.1f}' for begin, end in drains)} s; back after {max(back):.1f} s")
        print(describe("longest gap of each stream with several attempts", [max(s.gaps(), default=0.0) for s in again]))
        others = [gap for s in load.streams if s.num_attempts == 1 for span in drains for gap in s.gaps(*span)]
        print(describe("gaps of other streams during the drains", others))
        different = num_different(client, again[: args.check])
        print(
            f"  other tokens than undisturbed: {different} of {len(again[: args.check])} streams with several attempts"
        )
        failed = [stream.failure for stream in load.streams if stream.failure]
        print(f"  failed: {len(failed)} of {len(load.streams)} streams {failed[:1] or ''}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400, help="longest output")
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument("--lead", type=float, default=5.0, help="seconds before each restart")
    parser.add_argument("--drain-timeout", type=float, default=5.0)
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--check", type=int, default=16, help="streams to run again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of `tandem serve`; comes last")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as log_dir:
        for layout in args.layouts:
            try:
                run_layout(layout, args, Path(log_dir))
            except (StartError, RuntimeError, TandemError) as error:
                print(f"{layout}: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
