"""What befalls the cluster, in a fixed order."""

import itertools
import json
import signal
import socket
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.soak.cluster import SoakedCluster, SoakError
from tandem.deploy.config.bounds import Bounds
from tandem.deploy.host.process_tree import send_signal

Fault = tuple[str, Callable[[], None]]
PREFILL, DECODE = 2, 2
# Workers by role.
USUAL = {"prefill": Bounds(PREFILL, PREFILL), "decode": Bounds(DECODE, DECODE)}
# A dead worker loads its model on busy cores.
WHOLE_S = 150.0
# From this duration on every process dies at least once.
LONG_S = 20 * 60.0
# Share of the run: late enough for processes with a history, early enough for long second lives.
_DEATHS_AFTER = 0.15
_NUM_CONNECTIONS = 150
# Closes with a reset, as a host that vanishes behind a firewall seems to do.
_LINGER = struct.pack("ii", 1, 0)
_SETTLE_S = 2.0
# From a command's start until workers start or drain.
_AMID_S = 2.0


class Faults:
    """One fault after the other, each when its time has come and the cluster is whole again.

    `router-0`, `prefill-0` and `decode-0` live long, so that their slopes mean something. In a long run they die once
    each, early.

    Attributes:
        sizes: workers by role that the cluster was told to have.
        counts: faults so far, by kind.
        troubles: commands that failed, times at which the cluster did not become whole, and pages held at rest.
    """

    def __init__(
        self,
        cluster: SoakedCluster,
        num_routers: int,
        rest: Callable[[], str],
        say: Callable[[str], None],
        *,
        is_elastic: bool = False,
    ) -> None:
        """
        Args:
            rest: pauses the clients until nothing is under way; returns what is held nevertheless, or "".
            is_elastic: sizes change most of the time, also amid other faults, and the cluster follows its load.
        """
        self._cluster = cluster
        self._last_router = f"router-{num_routers - 1}"
        self._rest_clients = rest
        self._say = say
        self._is_elastic = is_elastic
        self.sizes: dict[str, Bounds] = dict(USUAL)
        self.counts: Counter[str] = Counter()
        self.troubles: list[str] = []

    def run(self, duration_s: float, interval_s: float) -> None:
        began = time.monotonic()
        order = itertools.cycle(self._elastic_cycle() if self._is_elastic else self._cycle())
        deaths = iter(self._deaths_of_the_old() if duration_s >= LONG_S else ())
        due = began + interval_s
        while (now := time.monotonic()) < began + duration_s:
            if now < due:
                time.sleep(min(due, began + duration_s) - now)
                continue
            due = now + interval_s
            fault = next(deaths, None) if now > began + duration_s * _DEATHS_AFTER else None
            self._do(fault or next(order))
        self._wait_whole()

    def _cycle(self) -> list[Fault]:
        # Back to the usual size soon: slopes are taken from its samples.
        return [
            ("kill -9 of a decode worker", lambda: self._kill("decode-1")),
            ("connections dropped", self._drop_connections),
            ("kill -9 of a router", lambda: self._kill(self._last_router)),
            ("stop for 2 s", lambda: self._stop("prefill-1", 2.0)),
            ("scale", lambda: self._scale(prefill=PREFILL + 1)),
            ("scale", lambda: self._scale(prefill=PREFILL)),
            ("restart", lambda: self._restart("decode-1")),
            ("rest", self._rest),
            ("kill -9 of a prefill worker", lambda: self._kill("prefill-1")),
            ("stop for 7 s", lambda: self._stop("decode-1", 7.0)),
            ("scale", lambda: self._scale(prefill=PREFILL + 1, decode=DECODE + 1)),
            ("scale", lambda: self._scale(prefill=PREFILL, decode=DECODE)),
            ("restart", lambda: self._restart(self._last_router)),
            ("scale", lambda: self._scale(decode=DECODE - 1)),
            ("scale", lambda: self._scale(decode=DECODE)),
            ("restart", lambda: self._restart("prefill-1")),
            ("rest", self._rest),
        ]

    def _elastic_cycle(self) -> list[Fault]:
        return [
            ("scale", lambda: self._scale(prefill=1, decode=3)),
            (
                "kill -9 of a worker amid scale",
                lambda: self._amid(lambda: self._scale(prefill=2, decode=1), lambda: self._kill("decode-0")),
            ),
            ("scale to bounds", lambda: self._scale(prefill=Bounds(1, 3), decode=Bounds(1, 3))),
            ("connections dropped", self._drop_connections),
            ("scale", lambda: self._scale(prefill=3, decode=2)),
            (
                "kill -9 of a router amid scale",
                lambda: self._amid(lambda: self._scale(prefill=1), lambda: self._kill(self._last_router)),
            ),
            ("scale to bounds", lambda: self._scale(decode=Bounds(1, 3))),
            ("rest", self._rest),
            ("scale", lambda: self._scale(prefill=2, decode=3)),
            (
                "stop for 7 s amid scale",
                lambda: self._amid(lambda: self._scale(prefill=3, decode=1), lambda: self._stop("decode-0", 7.0)),
            ),
            ("scale", lambda: self._scale(prefill=PREFILL, decode=DECODE)),
            ("restart", lambda: self._restart("decode-1")),
        ]

    def _deaths_of_the_old(self) -> Iterator[Fault]:
        yield "kill -9 of a decode worker", lambda: self._kill("decode-0")
        yield "kill -9 of a prefill worker", lambda: self._kill("prefill-0")
        yield "kill -9 of a router", lambda: self._kill("router-0")

    def _do(self, fault: Fault) -> None:
        name, act = fault
        self._wait_whole()
        self.counts[name] += 1
        try:
            act()
        except (SoakError, OSError, subprocess.TimeoutExpired) as error:
            self._trouble(f"{name}: {error}")

    def _rest(self) -> None:
        self._say("rest")
        if held := self._rest_clients():
            raise SoakError(held)

    def _wait_whole(self) -> None:
        try:
            self._cluster.wait_whole(self.sizes, WHOLE_S)
        except SoakError as error:
            self._trouble(str(error))

    def _kill(self, name: str) -> None:
        self._say(f"kill -9 {name}")
        send_signal(self._cluster.find(name), signal.SIGKILL)
        time.sleep(_SETTLE_S)

    def _stop(self, name: str, seconds: float) -> None:
        self._say(f"stop {name} for {seconds:.0f} s")
        process = self._cluster.find(name)
        send_signal(process, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            send_signal(process, signal.SIGCONT)

    def _scale(self, **sizes: int | Bounds) -> None:
        self.sizes |= {role: size if isinstance(size, Bounds) else Bounds(size, size) for role, size in sizes.items()}
        flags = itertools.chain.from_iterable((f"--{role}", str(size)) for role, size in sizes.items())
        self._command("scale", self._cluster.name, *flags)

    def _amid(self, command: Callable[[], None], fault: Callable[[], None]) -> None:
        """Have a fault while a command runs. Raises what either raises."""
        with ThreadPoolExecutor(1) as other:
            running = other.submit(command)
            time.sleep(_AMID_S)
            fault()
            running.result()

    def _restart(self, name: str) -> None:
        self._command("restart", self._cluster.name, name)

    def _command(self, *arguments: str) -> None:
        self._say(" ".join(("tandem", *arguments)))
        status, said = self._cluster.command(*arguments)
        if status:
            raise SoakError(f"exit status {status}: {said}")

    def _drop_connections(self) -> None:
        """A host with many connections goes away: some idle, some amid a request, some amid a stream."""
        self._say(f"drop {_NUM_CONNECTIONS} connections")
        host, _, port = self._cluster.http_address.rpartition(":")
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "ignore_eos": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: soak\r\ncontent-length: {len(body)}\r\n"
        request = f"{head}content-type: application/json\r\n\r\n{body}".encode()
        held: list[socket.socket] = []
        try:
            for number in range(_NUM_CONNECTIONS):
                held.append(socket.create_connection((host, int(port)), timeout=10.0))
                held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
                held[-1].sendall((request if number % 10 == 0 else request[: number % 10 * 15]) if number % 3 else b"")
            time.sleep(_SETTLE_S)
        finally:
            for connection in held:
                connection.close()

    def _trouble(self, line: str) -> None:
        self._say(f"TROUBLE: {line}")
        self.troubles.append(line)
