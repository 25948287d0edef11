"""The connected workers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tandem.config import ROLES, Role
from tandem.hosts import host_id
from tandem.messages import ForwardTimes, Heartbeat, Hello, LinkState, PageFormat, Peer, RouterMessage
from tandem.router.workers.candidates import Candidates, PrefillCandidates
from tandem.router.workers.leans import NO_LEAN, Lean, RouterDemand
from tandem.router.workers.link_plan import LinkPlan
from tandem.router.workers.placement import AUTO
from tandem.router.workers.prompt_count import PromptCount
from tandem.router.workers.rates import ClusterRates
from tandem.router.workers.store_registry import StoreRegistry
from tandem.router.workers.worker import NOT_SAID, Worker

# Share of the heartbeat timeout. A host reports a process's death at once, so a longer silence before a loss means that
# the other host was unreachable.
OUT_OF_REACH_AFTER = 0.3
MAX_LINKS_TOLD = 1024
# Seconds from a worker's first measured forward times until its first forward passes no longer matter in them.
WARM_S = 30.0
# Work by which workers' forward times are compared: tokens of a prompt or sequence, and sequences of a step.
REFERENCE_TOKENS, REFERENCE_BATCH = 1024, 8


class WorkerRegistry:
    """Keeps usable pairs, readiness and the largest request up to date, because requests are frequent and changes of
    workers rare.

    Attributes:
        planned: planned role of each worker by id. Other workers are leaving: they finish their requests and get no
            new ones.
        max_request_tokens: tokens of the largest request that fits every worker's pool alone; 0 without workers.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        heartbeat_timeout_s: float,
        stall_timeout_s: float,
        planned: Mapping[str, str] | None = None,
        placement: str = AUTO,
        stores: StoreRegistry | None = None,
    ) -> None:
        """
        Args:
            planned: None: unknown until `set_planned`, and no worker is leaving.
            placement: restricts `candidates`, if such pairs exist.
            stores: the connected page stores; None: there are none.
        """
        self._clock = clock
        self._stores = stores or StoreRegistry(clock, heartbeat_timeout_s)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._workers: dict[str, Worker] = {}
        # Format of the first worker, binding for all later ones.
        self._page_format: PageFormat | None = None
        self._num_pairs = 0
        self._candidates: Candidates | None = None
        self._hosts: Counter[str] = Counter()
        self._rates: ClusterRates | None = None
        self._placement = placement
        self.planned = dict(planned or {})
        self._is_planned = planned is not None
        self.max_request_tokens = 0
        self.num_lean_changes = 0
        self._leans: dict[str, Lean] = {}
        self._link_plan: LinkPlan | None = LinkPlan(self.planned) if self.planned else None
        self._by_host: defaultdict[str, dict[str, Worker]] = defaultdict(dict)
        # Senders whose peers have changed since they were told, in this order.
        self._untold: dict[Worker, None] = {}
        # Receivers whose links are no longer planned, but still needed by requests, by sender.
        self._closing: dict[Worker, set[str]] = {}

    @property
    def is_ready(self) -> bool:
        return self._num_pairs > 0

    @property
    def candidates(self) -> Candidates:
        if self._candidates is None:
            spans_hosts = len(self._hosts) > 1
            self._candidates = Candidates(self._workers, placement=self._placement, spans_hosts=spans_hosts)
        return self._candidates

    def serves(self, *, embeds: bool) -> bool:
        """Returns whether there are workers for a request. Args: embeds: its prompt is only embedded."""
        return bool(self.candidates_for(embeds=True)) if embeds else self.is_ready

    def candidates_for(self, *, embeds: bool) -> Candidates:
        if not embeds:
            return self.candidates
        return PrefillCandidates({w.worker_id: w for w in self._workers.values() if self.stays(w)})

    @property
    def num_pairs(self) -> int:
        return self._num_pairs

    @property
    def num_wanted_pairs(self) -> int:
        """Pairs of `num_pairs` if every planned link were up."""
        staying = [worker for worker in self._workers.values() if self.stays(worker)]
        receivers = {worker.worker_id for worker in staying if worker.receives}
        num_pairs = sum(worker.role == "both" for worker in staying)
        for sender in staying:
            if sender.sends:
                planned = self._link_plan.receivers_of(sender.worker_id) if self._link_plan is not None else None
                wanted = receivers if planned is None else receivers & (planned | self._by_host[sender.host].keys())
                num_pairs += len(wanted) - (sender.worker_id in wanted)
        return num_pairs

    @property
    def tells_links(self) -> bool:
        """Whether answers about the workers name each link: those of hundreds of workers are megabytes."""
        return sum(len(worker.links_up) for worker in self._workers.values()) <= MAX_LINKS_TOLD

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def stays(self, worker: Worker) -> bool:
        return not self._is_planned or worker.worker_id in self.planned

    def set_planned(self, planned: Mapping[str, str]) -> bool:
        """Returns whether the plan has changed."""
        if self._is_planned and planned == self.planned:
            return False
        before = {worker for worker in self._workers.values() if self.stays(worker)}
        self._is_planned = True
        self.planned.clear()
        self.planned.update(planned)
        for worker in self._workers.values():
            if worker in before and not self.stays(worker):
                self._unlink_all(worker)
        self._plan_links()
        for worker in self._workers.values():
            if worker not in before and self.stays(worker):
                self._link_all(worker)
        return True

    def _plan_links(self) -> None:
        """Plans the links anew. Workers that leave keep theirs: their requests still hand over."""
        before = self._link_plan
        roles = {**{worker.worker_id: worker.role for worker in self._workers.values()}, **self.planned}
        self._link_plan = plan = LinkPlan(roles) if self.planned else None
        for sender in self._workers.values():
            name = sender.worker_id
            was, now = (one.receivers_of(name) if one is not None else None for one in (before, plan))
            if sender.sends and was != now:
                self._untold[sender] = None
                for decode in list(sender.decode_workers.values()):
                    if not self._has_link(sender, decode):
                        self._unlink(sender, decode)
                self._link_up(sender)
                needed = (receiver for receiver, count in sender.handing_over.items() if count)
                self._closing[sender] = {receiver for receiver in needed if now is not None and receiver not in now}

    def close_links(self) -> None:
        """Closes the links that are no longer planned and that no request needs any more."""
        for sender, receivers in list(self._closing.items()):
            needed = {name for name in receivers if sender.handing_over[name]}
            if needed != receivers:
                self._closing[sender] = needed
                self._untold[sender] = None
            if not needed:
                del self._closing[sender]

    def set_leans(self, leans: Mapping[str, Lean]) -> None:
        """Also for future workers; NO_LEAN for missing ids."""
        self._leans = dict(leans)
        for worker in self._workers.values():
            self.num_lean_changes += worker.set_lean(self._leans.get(worker.worker_id, NO_LEAN))

    def demand(self, prompts: PromptCount) -> RouterDemand:
        """Returns what this registry knows of the router's demand."""
        staying = [worker for worker in self._workers.values() if self.stays(worker)]
        decoding = [worker for worker in staying if worker.role != "prefill"]
        prefilling = [worker for worker in staying if worker.role != "decode"]
        rates = self._rates
        times, is_measured = ForwardTimes(), False
        if prefilling and decoding:
            of_prompts, of_steps = self._typical(prefilling, _prompt_s), self._typical(decoding, _steps_s)
            times = replace(
                of_steps.forward_times,
                prefill_s=of_prompts.forward_times.prefill_s,
                prompt_token_s=of_prompts.forward_times.prompt_token_s,
                attended_token_s=of_prompts.forward_times.attended_token_s,
            )
            is_measured = self._is_warm(of_prompts) and self._is_warm(of_steps)
        return RouterDemand(
            prompts.prompts,
            prompts.tokens,
            prompts.attended,
            prompts.elsewhere,
            prompts.elsewhere_attended,
            {worker.worker_id: worker.assigned_here.num_decoding for worker in decoding},
            sum(worker.assigned_here.num_kv_tokens for worker in decoding),
            times,
            rates.mean_output_tokens if rates is not None else 0.0,
            min((worker.num_pool_tokens for worker in decoding), default=0),
            min((worker.max_decoding for worker in decoding), default=0),
            whole_tokens=prompts.whole,
            waiting_tokens=sum(worker.assigned_here.num_pending_tokens for worker in self._workers.values()),
            finished=rates.num_finished if rates is not None else 0,
            finished_tokens=rates.num_finished_tokens if rates is not None else 0,
            finished_steps=rates.num_finished_steps if rates is not None else 0,
            is_measured=is_measured,
        )

    def _typical(self, workers: Sequence[Worker], seconds: Callable[[ForwardTimes], float]) -> Worker:
        """Returns the worker of median speed, among the warm ones if there are any."""
        warm = [worker for worker in workers if self._is_warm(worker)] or workers
        by_speed = sorted(warm, key=lambda worker: seconds(worker.forward_times))
        return by_speed[len(by_speed) // 2]

    def _is_warm(self, worker: Worker) -> bool:
        return worker.measured_at is not None and self._clock() - worker.measured_at >= WARM_S

    def refusal(self, hello: Hello) -> str:
        """Returns why a worker cannot join, or "". All workers share page format and model for the router's life."""
        current = self._workers.get(hello.worker_id)
        if current is not None and hello.num_restarts < current.hello.num_restarts:
            # The worker's node was given up as unreachable.
            return "a replacement of this worker is already connected"
        if self._page_format is None:
            return ""
        return hello.page_format.mismatch(self._page_format, "this worker", "the cluster's first")

    def register(
        self, hello: Hello, send: Callable[[Sequence[RouterMessage]], None], disconnect: Callable[[str], None]
    ) -> Worker:
        assert hello.worker_id not in self._workers
        now = self._clock()
        worker = Worker(hello, send, disconnect, last_heard=now, last_progress=now)
        worker.node_store = self._stores.node(hello.host)
        self._rates = worker.rates = self._rates or ClusterRates(hello.device, self._clock)
        worker.lean = self._leans.get(worker.worker_id, NO_LEAN)
        self._page_format = hello.page_format
        self._workers[hello.worker_id] = worker
        self._candidates = None
        self._hosts[worker.host] += 1
        self._by_host[worker.host][worker.worker_id] = worker
        if self._link_plan is not None and worker.worker_id not in self._link_plan:
            self._plan_links()
        self._link_all(worker)
        self._note_untold(worker)
        self._update_limit()
        return worker

    def unregister(self, worker: Worker) -> None:
        if self._workers.get(worker.worker_id) is worker:
            self._unlink_all(worker)
            del self._workers[worker.worker_id]
            self._candidates = None
            self._hosts -= Counter((worker.host,))
            del self._by_host[worker.host][worker.worker_id]
            self._note_untold(worker)
            self._untold.pop(worker, None)
            self._closing.pop(worker, None)
            if not self.stays(worker):
                self._plan_links()
            self._update_limit()

    def is_out_of_reach(self, worker: Worker) -> bool:
        """Returns whether a lost worker was silent before, and so may be alive but unreachable."""
        is_elsewhere = worker.hello.host not in ("", host_id())
        return is_elsewhere and self._clock() - worker.last_heard > self._heartbeat_timeout_s * OUT_OF_REACH_AFTER

    def record_heard(self, worker: Worker) -> None:
        """A heartbeat can be late behind many tokens, so any message counts."""
        worker.last_heard = self._clock()

    def excuse_silence(self, seconds: float) -> None:
        """Excludes `seconds` in which the router could not listen."""
        for worker in self._workers.values():
            worker.last_heard += seconds
            worker.last_progress += seconds

    def record_heartbeat(self, worker: Worker, heartbeat: Heartbeat) -> None:
        worker.take_stats(heartbeat.stats)
        worker.last_heartbeat = self._clock()
        if worker.measured_at is None and heartbeat.stats.forward_times != NOT_SAID:
            worker.measured_at = worker.last_heartbeat
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
        """Returns lost workers, each with the kind of loss and the reason."""
        now = self._clock()
        lost = []
        for worker in self._workers.values():
            if now - worker.last_heard > self._heartbeat_timeout_s:
                lost.append((worker, "silent", f"no heartbeat for {self._heartbeat_timeout_s:g} s"))
            elif now - worker.last_progress > self._stall_timeout_s:
                lost.append((worker, "stalled", f"no scheduler step for {self._stall_timeout_s:g} s"))
        return lost

    def not_ready_reason(self, *, embeds: bool = False) -> str:
        """Returns why no request can be served now, or "". Args: embeds: about prompts that are only embedded."""
        if self.serves(embeds=embeds):
            return ""
        if embeds:
            return "no prefill worker is connected"
        if missing := self.missing_roles():
            return f"no {' and no '.join(missing)} worker is connected"
        failures = "; ".join(self._link_failures())
        return f"no prefill worker has a link to a decode worker{': ' + failures if failures else ' yet'}"

    def missing_roles(self) -> list[Role]:
        roles = {w.role for w in self._workers.values()}
        return [role for role in ROLES if role != "both" and role not in roles]

    def size_refusal(self, num_prompt_tokens: int, max_tokens: int) -> str:
        """Returns why a request does not fit the pools even alone, or ""."""
        if not self._workers or num_prompt_tokens + max_tokens <= self.max_request_tokens:
            return ""
        refusal = (
            f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens do not fit the workers' KV memory: this "
            f"model's maximum context length is {self.max_request_tokens} tokens"
        )
        if self.max_request_tokens < min(w.hello.num_pages * w.page_size for w in self._workers.values()):
            refusal += "; half of the memory is for prompts that other workers decode: raise num_pages to make room"
        return refusal

    def _link_failures(self) -> Iterator[str]:
        for worker in self._workers.values():
            for worker_id, state in worker.links_down.items():
                decode = self._workers.get(worker_id)
                if decode is not None and decode.incarnation == state.decode_incarnation and state.reason:
                    yield f"{worker.worker_id} to {worker_id}: {state.reason}"

    def peers_of(self, sender: Worker) -> tuple[Peer, ...]:
        """Returns the receivers to which a sender keeps links, itself included in role `both`."""
        return tuple(Peer(w.worker_id, w.incarnation, w.hello.address) for w in self.receivers_of(sender))

    def receivers_of(self, sender: Worker) -> list[Worker]:
        """Returns the workers of `peers_of`."""
        receivers: Iterable[Worker] = self._workers.values()
        planned = self._link_plan.receivers_of(sender.worker_id) if self._link_plan is not None else None
        if planned is not None:
            names = {*planned, *self._by_host[sender.host], *self._closing.get(sender, ())}
            receivers = [self._workers[name] for name in sorted(names) if name in self._workers]
        return [worker for worker in receivers if worker.receives]

    def take_untold(self) -> Worker | None:
        """Returns a sender whose peers have changed since they were told; None: there is none."""
        if not self._untold:
            return None
        worker = next(iter(self._untold))
        del self._untold[worker]
        return worker

    def _note_untold(self, worker: Worker) -> None:
        """Notes the senders that keep a link to a worker that joins or leaves, and itself."""
        if worker.sends:
            self._untold[worker] = None
        if not worker.receives:
            return
        planned = self._link_plan.senders_of(worker.worker_id) if self._link_plan is not None else None
        senders: Iterable[Worker] = self._workers.values()
        if planned is not None:
            near = self._by_host[worker.host]
            senders = [self._workers[name] for name in {*planned, *near} if name in self._workers]
        for sender in senders:
            if sender.sends:
                self._untold[sender] = None

    def _has_link(self, sender: Worker, receiver: Worker) -> bool:
        if self._link_plan is None or sender is receiver or sender.host == receiver.host:
            return True
        receivers = self._link_plan.receivers_of(sender.worker_id)
        return receivers is None or receiver.worker_id in receivers

    def _link_all(self, worker: Worker) -> None:
        if worker.role == "both":
            self._link(worker, worker)
        self._link_up(worker)
        if worker.receives:
            # The report of a link may arrive before the worker itself.
            for prefill in self._workers.values():
                if prefill.links_up.get(worker.worker_id) == worker.incarnation:
                    self._link(prefill, worker)

    def _link_up(self, sender: Worker) -> None:
        for decode_id, incarnation in sender.links_up.items():
            decode = self._workers.get(decode_id)
            if decode is not None and decode.incarnation == incarnation:
                self._link(sender, decode)

    def _unlink_all(self, worker: Worker) -> None:
        for decode in list(worker.decode_workers.values()):
            self._unlink(worker, decode)
        for other in self._workers.values():
            # Keeps `links_up`: a link to a worker that only this router has lost stays up, and is not reported again.
            self._unlink(other, worker)

    def _link(self, prefill: Worker, decode: Worker) -> None:
        """Does nothing if one of the two is leaving, or if the link is to close."""
        if not (self.stays(prefill) and self.stays(decode) and self._has_link(prefill, decode)):
            return
        if self._workers.get(prefill.worker_id) is prefill and decode.worker_id not in prefill.decode_workers:
            prefill.decode_workers[decode.worker_id] = decode
            self._candidates = None
            self._num_pairs += 1

    def _unlink(self, prefill: Worker, decode: Worker) -> None:
        if prefill.decode_workers.get(decode.worker_id) is decode:
            del prefill.decode_workers[decode.worker_id]
            self._candidates = None
            self._num_pairs -= 1

    def _update_limit(self) -> None:
        self.max_request_tokens = min((w.max_request_tokens for w in self._workers.values()), default=0)


def _prompt_s(times: ForwardTimes) -> float:
    attended = REFERENCE_TOKENS * REFERENCE_TOKENS / 2
    return times.prefill_s + REFERENCE_TOKENS * times.prompt_token_s + attended * times.attended_token_s


def _steps_s(times: ForwardTimes) -> float:
    return times.step_s + REFERENCE_BATCH * (times.request_s + REFERENCE_TOKENS * times.kv_token_s)
