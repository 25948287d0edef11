"""Client processes of a run. Each sends its share of the sessions; all start at one moment.

Measures are computed from the merged records, never from means of means.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from tandem.bench.clients.base import EndpointConfig, EndpointError, ServerDescription
from tandem.bench.clients.table import make_client
from tandem.bench.records import RequestRecord
from tandem.bench.runner import Progress, Runner, RunnerConfig
from tandem.bench.workloads.base import Session

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
PROGRESS_S = 0.25
SILENCE_TIMEOUT_S = 60.0
# Delay of the common start, so that every process learns of it in time.
LEAD_S = 0.2
LAG_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class ClientUsage:
    """Attributes: lags_s: lateness of the loop's timers."""

    cpu_s: float
    wall_s: float
    lags_s: Sequence[float]


@dataclass(slots=True)
class RunResult:
    """Attributes: started_at: on the monotonic clock; is_whole: False if stopped early."""

    server: ServerDescription
    started_at: float = 0.0
    records: list[RequestRecord] = field(default_factory=list)
    usages: list[ClientUsage] = field(default_factory=list)
    is_whole: bool = True


def run_processes(
    endpoint: EndpointConfig,
    config: RunnerConfig,
    sessions: Sequence[Session],
    num_processes: int,
    on_progress: Callable[[float, list[Progress]], None] = lambda seconds, progress: None,
) -> RunResult:
    """Run to the end, or until Ctrl-C, which keeps the records so far.

    Args:
        on_progress: called a few times per second with the elapsed seconds and each process's progress.

    Raises EndpointError if the server cannot be measured, RuntimeError if a client process dies or hangs.
    """
    has_concurrency = any(session.due_s is None and session.group == "requests" for session in sessions)
    num_processes = min(num_processes, config.concurrency) if has_concurrency else num_processes
    children: list[_Child] = []
    try:
        for number in range(num_processes):
            share = config.concurrency // num_processes + (number < config.concurrency % num_processes)
            own = RunnerConfig(share, config.duration_s, config.warmup_requests, config.warmup_s, config.ignore_eos)
            children.append(_Child(endpoint, own, _share(sessions, number, num_processes)))
        return _Conductor(children, on_progress).run()
    finally:
        for child in children:
            child.end()


def _share(sessions: Sequence[Session], number: int, num_processes: int) -> list[Session]:
    streams = [session for session in sessions if session.group == "streams"]
    others = [session for session in sessions if session.group != "streams"]
    return streams[number::num_processes] + others[number::num_processes]


class _Child:
    def __init__(self, endpoint: EndpointConfig, config: RunnerConfig, sessions: list[Session]) -> None:
        context = multiprocessing.get_context("spawn")
        # One pipe per direction: the loop makes reading non-blocking, but large writes must block.
        its_ears, self._words = context.Pipe(duplex=False)
        self.pipe, its_words = context.Pipe(duplex=False)
        arguments = (its_ears, its_words, endpoint, config, sessions)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        # Children inherit the blocked signal, so that Ctrl-C cannot end them before they ignore it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        its_ears.close()
        its_words.close()
        self.progress = Progress()
        self.heard_at = time.monotonic()

    def tell(self, *words: Any) -> None:
        with contextlib.suppress(OSError):
            self._words.send(words)

    def cause_of_death(self) -> str:
        self._process.join(STOP_TIMEOUT_S)
        code = self._process.exitcode
        if code is None or code >= 0:
            return ""
        hint = ", as where memory runs out" if -code == signal.SIGKILL else ""
        return f" of {signal.Signals(-code).name}{hint}"

    def end(self) -> None:
        self._words.close()
        self.pipe.close()
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class _Conductor:
    def __init__(self, children: list[_Child], on_progress: Callable[[float, list[Progress]], None]) -> None:
        self._children = children
        self._running = list(children)
        self._on_progress = on_progress
        self._result = RunResult(ServerDescription(""))
        self._num_ready = 0
        self._started_at = 0.0
        self._streams_cut = False

    def run(self) -> RunResult:
        num_interrupts = 0
        while self._running:
            try:
                self._turn()
            except KeyboardInterrupt:
                num_interrupts += 1
                self._result.is_whole = False
                if num_interrupts > 1 or not self._started_at:
                    raise
                for child in self._running:
                    child.tell("stop")
        return self._result

    def _turn(self) -> None:
        pipes = {child.pipe: child for child in self._running}
        for pipe in wait(list(pipes), timeout=PROGRESS_S):
            child = pipes[pipe]  # type: ignore[index]
            child.heard_at = time.monotonic()
            try:
                word, *values = child.pipe.recv()
            except (EOFError, OSError) as error:
                raise RuntimeError(f"a client process has died{child.cause_of_death()}") from error
            self._take(child, word, values)
        limit = SILENCE_TIMEOUT_S if self._started_at else START_TIMEOUT_S
        if any(time.monotonic() - child.heard_at > limit for child in self._running):
            raise RuntimeError(f"a client process has said nothing for {limit:g} s")
        if self._started_at:
            everyone = [child.progress for child in self._children]
            self._on_progress(time.monotonic() - self._started_at, everyone)
            if not self._streams_cut and all(progress.arrivals_over for progress in everyone):
                self._streams_cut = True
                for child in self._running:
                    child.tell("cut_streams")

    def _take(self, child: _Child, word: str, values: list[Any]) -> None:
        match word:
            case "error":
                raise EndpointError(values[0])
            case "ready":
                self._result.server = values[0]
                self._num_ready += 1
                if self._num_ready == len(self._children):
                    self._started_at = time.monotonic() + LEAD_S
                    self._result.started_at = self._started_at
                    for each in self._children:
                        each.tell("go", self._started_at)
            case "progress":
                child.progress = values[0]
            case "result":
                records, usage, child.progress = values
                self._result.records += records
                self._result.usages.append(usage)
                self._running.remove(child)


# --- a client process's own side


def _serve(
    hears: Connection, says: Connection, endpoint: EndpointConfig, config: RunnerConfig, sessions: list[Session]
) -> None:
    # Ctrl-C reaches the whole group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _allow_many_files()
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_Client(hears, says, endpoint, config, sessions).run())


def _allow_many_files() -> None:
    """Raise the limit of open files: each request in flight needs a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        from tandem.rpc.grpc_loop import GrpcLoop
    except ImportError:
        # asyncio's loop is slower but equally correct.
        return asyncio.new_event_loop()
    return GrpcLoop()


class _Client:
    def __init__(
        self,
        hears: Connection,
        says: Connection,
        endpoint: EndpointConfig,
        config: RunnerConfig,
        sessions: list[Session],
    ) -> None:
        self._hears = hears
        self._says = says
        self._client = make_client(endpoint)
        self._config = config
        self._sessions = sessions
        self._go: asyncio.Future[float]
        self._start = float("inf")
        self._runner: Runner | None = None
        self._running: asyncio.Task[None] | None = None
        self._lags_s: list[float] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._go = loop.create_future()
        loop.add_reader(self._hears.fileno(), self._hear)
        try:
            description = await self._client.open()
        except EndpointError as error:
            self._tell("error", str(error))
            return
        try:
            # Encode and collect garbage before the common start.
            runner = Runner(self._sessions, self._client, self._config, lambda: time.monotonic() - self._start)
            self._runner = runner
            # A full collection would stop the loop, and a run makes few cycles.
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 20, 1000)
            self._tell("ready", description)
            self._start = await self._go
            await self._measure(runner)
        finally:
            await self._client.close()

    async def _measure(self, runner: Runner) -> None:
        cpu_s, wall_s = time.process_time(), time.monotonic()
        self._running = asyncio.create_task(runner.run())
        beside = [asyncio.create_task(self._report(runner)), asyncio.create_task(self._note_lags())]
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        for task in beside:
            task.cancel()
        usage = ClientUsage(time.process_time() - cpu_s, time.monotonic() - wall_s, self._lags_s)
        progress = runner.progress()
        progress.arrivals_over = True
        self._tell("result", runner.records, usage, progress)

    def _hear(self) -> None:
        try:
            word, *values = self._hears.recv()
        except (EOFError, OSError):
            # The parent is gone.
            os._exit(1)
        match word:
            case "go":
                self._go.set_result(values[0])
            case "cut_streams":
                if self._runner is not None:
                    self._runner.cut_streams()
            case "stop":
                if self._running is not None:
                    self._running.cancel()

    def _tell(self, *words: Any) -> None:
        self._says.send(words)

    async def _report(self, runner: Runner) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._tell("progress", runner.progress())

    async def _note_lags(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self._lags_s.append(max(0.0, loop.time() - due))
