"""The live workers, as the router knows them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tandem.messages import Heartbeat, Hello, LinkState, Peer, RouterMessage, WorkerStats


@dataclass(eq=False, slots=True)
class Worker:
    """One life of a worker as the router sees it: its control stream, from Hello to the end of it.

    Attributes:
        send: writes to its control stream.
        disconnect: ends its control stream, with a reason for it.
        last_heard: on the router's clock, when a message last came.
        last_progress: on the router's clock, when its scheduler's step number last changed.
        num_steps: that number; -1 before the first heartbeat.
        stats: what it said of itself in its last heartbeat.
        links_up: decode workers this prefill worker has a link to, with the life of them that it is to.
        links_down: what it last said of decode workers that it has no link to.
        num_assigned: requests of this router that it serves now, by the router's own count, which is fresher than a
            heartbeat.
        num_pending_tokens: tokens of those requests that it has yet to prefill.
    """

    hello: Hello
    send: Callable[[Sequence[RouterMessage]], None]
    disconnect: Callable[[str], None]
    last_heard: float
    last_progress: float
    num_steps: int = -1
    stats: WorkerStats = field(default_factory=WorkerStats)
    links_up: dict[str, str] = field(default_factory=dict)
    links_down: dict[str, LinkState] = field(default_factory=dict)
    num_assigned: int = 0
    num_pending_tokens: int = 0

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def role(self) -> str:
        return self.hello.role

    @property
    def incarnation(self) -> str:
        """Names this life of the worker: one that is started again has another, and an empty cache."""
        return self.hello.incarnation

    @property
    def page_size(self) -> int:
        """Tokens of one KV page; the same for all workers of a cluster."""
        return self.hello.page_size


@dataclass(frozen=True, slots=True)
class Pair:
    """The workers of one attempt: `prefill` and `decode` are one and the same in role `both`."""

    prefill: Worker
    decode: Worker


class WorkerRegistry:
    """Workers by id. One is here exactly as long as its control stream lives and its heartbeats say that it moves."""

    def __init__(self, clock: Callable[[], float], heartbeat_timeout_s: float, stall_timeout_s: float) -> None:
        self._clock = clock
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def refusal(self, hello: Hello) -> str:
        """Why this worker cannot join, or "": all workers must mean the same by a page."""
        for worker in self._workers.values():
            if worker.worker_id != hello.worker_id and worker.hello.page_format != hello.page_format:
                return f"pages differ: {hello.page_format} here, {worker.hello.page_format} at {worker.worker_id}"
        return ""

    def register(
        self, hello: Hello, send: Callable[[Sequence[RouterMessage]], None], disconnect: Callable[[str], None]
    ) -> Worker:
        """Takes a worker in; an earlier life of it must have been unregistered before."""
        assert hello.worker_id not in self._workers
        now = self._clock()
        worker = Worker(hello, send, disconnect, last_heard=now, last_progress=now)
        self._workers[hello.worker_id] = worker
        return worker

    def unregister(self, worker: Worker) -> None:
        if self._workers.get(worker.worker_id) is worker:
            del self._workers[worker.worker_id]
            for other in self._workers.values():
                other.links_up.pop(worker.worker_id, None)
                other.links_down.pop(worker.worker_id, None)

    def record_heard(self, worker: Worker) -> None:
        """Notes that a message has come. Any will do: where tokens come faster than the router takes them, a heartbeat
        is late."""
        worker.last_heard = self._clock()

    def excuse_silence(self, seconds: float) -> None:
        """Does not count a time in which nobody could be heard."""
        for worker in self._workers.values():
            worker.last_heard += seconds
            worker.last_progress += seconds

    def record_heartbeat(self, worker: Worker, heartbeat: Heartbeat) -> None:
        worker.stats = heartbeat.stats
        if heartbeat.step != worker.num_steps:
            worker.num_steps = heartbeat.step
            worker.last_progress = self._clock()

    def record_link_state(self, worker: Worker, state: LinkState) -> None:
        if state.up:
            worker.links_up[state.decode_worker_id] = state.decode_incarnation
            worker.links_down.pop(state.decode_worker_id, None)
            return
        worker.links_down[state.decode_worker_id] = state
        if worker.links_up.get(state.decode_worker_id) == state.decode_incarnation:
            del worker.links_up[state.decode_worker_id]

    def find_lost(self) -> list[tuple[Worker, str, str]]:
        """Workers that have fallen silent or stand still, with the kind of loss and the reason."""
        now = self._clock()
        lost = []
        for worker in self._workers.values():
            if now - worker.last_heard > self._heartbeat_timeout_s:
                lost.append((worker, "silent", f"no heartbeat for {self._heartbeat_timeout_s:g} s"))
            elif now - worker.last_progress > self._stall_timeout_s:
                lost.append((worker, "stalled", f"no scheduler step for {self._stall_timeout_s:g} s"))
        return lost

    def pairs(self) -> list[Pair]:
        """Every pair of workers that can serve a request now, prefill workers in the order in which they joined."""
        pairs = []
        for prefill in self._workers.values():
            if prefill.role == "both":
                pairs.append(Pair(prefill, prefill))
            elif prefill.role == "prefill":
                for worker_id, incarnation in prefill.links_up.items():
                    decode = self._workers.get(worker_id)
                    if decode is not None and decode.incarnation == incarnation:
                        pairs.append(Pair(prefill, decode))
        return pairs

    def not_ready_reason(self) -> str:
        """Why no request can be served now, or ""."""
        if self.pairs():
            return ""
        roles = [w.role for w in self._workers.values()]
        missing = [role for role in ("prefill", "decode") if role not in roles]
        if missing:
            return f"no {' and no '.join(missing)} worker is connected"
        failures = "; ".join(self._link_failures())
        return f"no prefill worker has a link to a decode worker{': ' + failures if failures else ' yet'}"

    def _link_failures(self) -> Iterator[str]:
        """Why links between workers that are here now are down, as far as the prefill workers have said."""
        for worker in self._workers.values():
            for worker_id, state in worker.links_down.items():
                decode = self._workers.get(worker_id)
                if decode is not None and decode.incarnation == state.decode_incarnation and state.reason:
                    yield f"{worker.worker_id} to {worker_id}: {state.reason}"

    def peers(self) -> tuple[Peer, ...]:
        """The decode workers that every prefill worker should have a link to."""
        return tuple(
            Peer(w.worker_id, w.incarnation, w.hello.address) for w in self._workers.values() if w.role == "decode"
        )

    def max_request_tokens(self) -> int:
        """Tokens of the largest request that fits every worker's pool alone; 0 without workers."""
        return min((w.hello.num_pages * w.page_size for w in self._workers.values()), default=0)
