"""The live workers, as the router knows them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from tandem.hosts import host_id
from tandem.messages import Heartbeat, Hello, LinkState, PageFormat, Peer, RouterMessage
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.leans import NO_LEAN, Lean, RouterDemand
from tandem.router.workers.placement import AUTO
from tandem.router.workers.prompt_count import PromptCount
from tandem.router.workers.rates import ClusterRates
from tandem.router.workers.worker import Worker

# A host tells at once that a process of it has died. A worker on another host that has said nothing for this share of
# the time after which silence counts as loss has not just died.
OUT_OF_REACH_AFTER = 0.3


class WorkerRegistry:
    """Workers by id. One is here exactly as long as its control stream lives and its heartbeats say that it moves.

    Workers and links change rarely and requests come often, so what a request asks for is kept up to date here: who can
    serve with whom, whether anybody can, and what fits every pool.

    Attributes:
        planned: the workers that the cluster is to have, their roles by their names. One that is not among them is
            about to leave: it finishes what it has and takes nothing new. Empty: nobody has said who they are.
        max_request_tokens: tokens of the largest request that fits every worker's pool alone; 0 without workers.
        num_lean_changes: how often a worker that was here has been told to lean differently.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        heartbeat_timeout_s: float,
        stall_timeout_s: float,
        planned: Mapping[str, str] | None = None,
        placement: str = AUTO,
    ) -> None:
        """Args: placement: of which pairs `candidates` has any, as far as there are such
        (router/workers/placement.py)."""
        self._clock = clock
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._workers: dict[str, Worker] = {}
        # That of the first worker: all that follow are of the same cluster, also when no other is left.
        self._page_format: PageFormat | None = None
        self._num_pairs = 0
        # How many workers are on each.
        self._hosts: Counter[str] = Counter()
        # They outlive every worker.
        self._rates: ClusterRates | None = None
        self._placement = placement
        self.planned = dict(planned or {})
        self.max_request_tokens = 0
        self.num_lean_changes = 0
        self._leans: dict[str, Lean] = {}

    @property
    def is_ready(self) -> bool:
        """Whether there is a pair of workers that can serve a request now."""
        return self._num_pairs > 0

    @property
    def candidates(self) -> Candidates:
        """Every pair of workers that can serve a request now, for one choice."""
        return Candidates(self._workers, placement=self._placement, spans_hosts=len(self._hosts) > 1)

    @property
    def num_pairs(self) -> int:
        """Pairs of workers that can serve a request now."""
        return self._num_pairs

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def stays(self, worker: Worker) -> bool:
        """Whether a worker is to be part of the cluster further on."""
        return not self.planned or worker.worker_id in self.planned

    def set_planned(self, planned: Mapping[str, str]) -> None:
        """From now on these are to be the cluster's workers. What is served by others is left to them."""
        self.planned.clear()
        self.planned.update(planned)
        for worker in self._workers.values():
            if not self.stays(worker):
                self._unlink_all(worker)
        for worker in self._workers.values():
            self._link_all(worker)

    def set_leans(self, leans: Mapping[str, Lean]) -> None:
        """From now on workers lean like this, those that join later too; others do not."""
        self._leans = dict(leans)
        for worker in self._workers.values():
            self.num_lean_changes += worker.set_lean(self._leans.get(worker.worker_id, NO_LEAN))

    def demand(self, prompts: PromptCount) -> RouterDemand:
        """What this router has those workers do that may lean. Args: prompts: that it has assigned."""
        workers = [w for w in self._workers.values() if w.role == "both" and w.hello.has_links and self.stays(w)]
        if not workers:
            return RouterDemand()
        return RouterDemand(
            prompts.prompts,
            prompts.tokens,
            prompts.attended,
            prompts.elsewhere,
            prompts.elsewhere_attended,
            {worker.worker_id: worker.assigned_here.num_decoding for worker in workers},
            sum(worker.assigned_here.num_kv_tokens for worker in workers),
            workers[0].forward_times,
            workers[0].rates.mean_output_tokens,
            min(worker.num_pool_tokens for worker in workers),
            min(worker.max_decoding for worker in workers),
        )

    def refusal(self, hello: Hello) -> str:
        """Why this worker cannot join, or "": all workers must mean the same by a page, for as long as the router
        lives, and compute with the model that the router tokenizes for."""
        current = self._workers.get(hello.worker_id)
        if current is not None and hello.num_restarts < current.hello.num_restarts:
            # Its node was given up while it could not be reached.
            return "another worker has been started in its place"
        if self._page_format is None:
            return ""
        return hello.page_format.mismatch(self._page_format, "this worker", "the cluster's first")

    def register(
        self, hello: Hello, send: Callable[[Sequence[RouterMessage]], None], disconnect: Callable[[str], None]
    ) -> Worker:
        """Takes a worker in; an earlier life of it must have been unregistered before."""
        assert hello.worker_id not in self._workers
        now = self._clock()
        worker = Worker(hello, send, disconnect, last_heard=now, last_progress=now)
        self._rates = worker.rates = self._rates or ClusterRates(hello.device, self._clock)
        worker.lean = self._leans.get(worker.worker_id, NO_LEAN)
        self._page_format = hello.page_format
        self._workers[hello.worker_id] = worker
        self._hosts[worker.host] += 1
        self._link_all(worker)
        self._update_limit()
        return worker

    def unregister(self, worker: Worker) -> None:
        if self._workers.get(worker.worker_id) is worker:
            self._unlink_all(worker)
            del self._workers[worker.worker_id]
            self._hosts -= Counter((worker.host,))
            self._update_limit()

    def is_out_of_reach(self, worker: Worker) -> bool:
        """Whether a worker that is lost was silent before, as one is that cannot be reached. It may be alive."""
        is_elsewhere = worker.hello.host not in ("", host_id())
        return is_elsewhere and self._clock() - worker.last_heard > self._heartbeat_timeout_s * OUT_OF_REACH_AFTER

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
        worker.take_stats(heartbeat.stats)
        worker.last_heartbeat = self._clock()
        if heartbeat.step != worker.num_steps:
            worker.num_steps = heartbeat.step
            worker.last_progress = self._clock()

    def record_link_state(self, worker: Worker, state: LinkState) -> None:
        decode = self._workers.get(state.decode_worker_id)
        is_here = decode is not None and decode.incarnation == state.decode_incarnation
        if state.up:
            worker.links_up[state.decode_worker_id] = state.decode_incarnation
            worker.links_down.pop(state.decode_worker_id, None)
            if decode is not None:
                (self._link if is_here else self._unlink)(worker, decode)
            return
        worker.links_down[state.decode_worker_id] = state
        if worker.links_up.get(state.decode_worker_id) == state.decode_incarnation:
            del worker.links_up[state.decode_worker_id]
            if decode is not None and is_here:
                self._unlink(worker, decode)

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

    def not_ready_reason(self) -> str:
        """Why no request can be served now, or ""."""
        if self.is_ready:
            return ""
        roles = {w.role for w in self._workers.values()}
        missing = [role for role in ("prefill", "decode") if role not in roles]
        if missing:
            return f"no {' and no '.join(missing)} worker is connected"
        failures = "; ".join(self._link_failures())
        return f"no prefill worker has a link to a decode worker{': ' + failures if failures else ' yet'}"

    def size_refusal(self, num_prompt_tokens: int, max_tokens: int) -> str:
        """Why a request does not fit the workers' pools even alone, or ""."""
        if not self._workers or num_prompt_tokens + max_tokens <= self.max_request_tokens:
            return ""
        refusal = (
            f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens do not fit the workers' "
            f"{self.max_request_tokens} tokens of KV memory"
        )
        if self.max_request_tokens < min(w.hello.num_pages * w.page_size for w in self._workers.values()):
            refusal += ", of which prompts for other workers may take half; a larger num_pages makes room"
        return refusal

    def _link_failures(self) -> Iterator[str]:
        """Why links between workers that are here now are down, as far as the prefill workers have said."""
        for worker in self._workers.values():
            for worker_id, state in worker.links_down.items():
                decode = self._workers.get(worker_id)
                if decode is not None and decode.incarnation == state.decode_incarnation and state.reason:
                    yield f"{worker.worker_id} to {worker_id}: {state.reason}"

    def peers(self) -> tuple[Peer, ...]:
        """The workers that all that hand over should have a link to, each to all but itself."""
        return tuple(Peer(w.worker_id, w.incarnation, w.hello.address) for w in self._workers.values() if w.receives)

    def _link_all(self, worker: Worker) -> None:
        """It can serve with those that can go on with what it computes, and that have a link to it."""
        if worker.role == "both":
            self._link(worker, worker)
        if worker.receives:
            # Word of a link to it may have come before it did.
            for prefill in self._workers.values():
                if prefill.links_up.get(worker.worker_id) == worker.incarnation:
                    self._link(prefill, worker)

    def _unlink_all(self, worker: Worker) -> None:
        """It serves with nobody from now on."""
        for decode in list(worker.decode_workers.values()):
            self._unlink(worker, decode)
        for other in self._workers.values():
            # What another has said of its links stays true: it keeps one to a worker that only this router has lost,
            # and says no more of it when that worker is back.
            self._unlink(other, worker)

    def _link(self, prefill: Worker, decode: Worker) -> None:
        """These two can serve a request together from now on, unless one of them is about to leave."""
        if not (self.stays(prefill) and self.stays(decode)):
            return
        if self._workers.get(prefill.worker_id) is prefill and decode.worker_id not in prefill.decode_workers:
            prefill.decode_workers[decode.worker_id] = decode
            self._num_pairs += 1

    def _unlink(self, prefill: Worker, decode: Worker) -> None:
        if prefill.decode_workers.get(decode.worker_id) is decode:
            del prefill.decode_workers[decode.worker_id]
            self._num_pairs -= 1

    def _update_limit(self) -> None:
        self.max_request_tokens = min((w.max_request_tokens for w in self._workers.values()), default=0)
