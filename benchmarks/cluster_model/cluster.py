"""A cluster in virtual time: modelled workers, and the code of a router that chooses among them.

Registry, candidates, policies, what is counted as a worker's load and how fast workers are taken to be are those of the
router itself; what stands between them in router/router.py and router/attempts.py is done here, without messages.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.cluster_model.device import H200_8B, DeviceFactors
from benchmarks.cluster_model.events import EventQueue
from benchmarks.cluster_model.jobs import Job
from benchmarks.cluster_model.prefix_cache import PrefixCache
from benchmarks.cluster_model.worker import MAX_BATCH, MIXED_SIZES, PAGE_SIZE, ModelWorker
from benchmarks.cluster_model.workloads import Conversation, Turn
from tandem.bench.records import RequestRecord
from tandem.both_worker.step_budget import StepBudget
from tandem.deploy.supervise.role_planner import RolePlanner
from tandem.deploy.supervise.role_plans import PLAN_INTERVAL_S
from tandem.lifecycle import COMMITTED, FIRST_TOKEN, LEASE_GRANTED
from tandem.messages import PROTOCOL_VERSION, Heartbeat, Hello, LinkState, PageFormat, WorkerStats
from tandem.prefill_worker.budget import PromptBudget, WholeChunks
from tandem.router.policies.base import RoutingPolicy, RoutingRequest
from tandem.router.policies.least_cost import LeastCost
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.requests.active_request import ActiveRequest
from tandem.router.requests.request_spec import RequestSpec, TokenizedPrompt
from tandem.router.requests.tracker import RequestTracker
from tandem.router.workers.objectives import Objectives
from tandem.router.workers.placement import AUTO
from tandem.router.workers.prompt_count import PromptCount
from tandem.router.workers.worker import Pair, Worker
from tandem.router.workers.worker_registry import WorkerRegistry
from tandem.sampling_params import SamplingParams
from tandem.worker.forward_timer import ForwardTimer

CHUNK_SIZE = 8192
# Workers tell routers of what they have cached so much later.
PREFIXES_TOLD_S = 0.1
HEARTBEAT_S = 0.25
_FORMAT = PageFormat("model", 1, "model")


@dataclass(frozen=True, slots=True)
class Layout:
    """
    Attributes:
        roles: of each worker.
        has_links: whether workers of role `both` hand over to each other.
        plans_roles: whether workers lean as the launcher's planner has it.
        chunk_size: of workers of role `both` beside decode steps; 0: as the objective for gaps has it.
    """

    name: str
    roles: tuple[str, ...]
    routing: str = "least_loaded"
    placement: str = AUTO
    has_links: bool = False
    plans_roles: bool = False
    chunk_size: int = 0

    @property
    def knows_objectives(self) -> bool:
        """Whether it makes a difference to it what the objectives are."""
        return self.routing == "least_cost" or ("both" in self.roles and not self.chunk_size)


def fixed(num_prefill: int, num_decode: int, routing: str = "least_loaded") -> Layout:
    return Layout(f"{num_prefill}P{num_decode}D", ("prefill",) * num_prefill + ("decode",) * num_decode, routing)


FIXED = (fixed(3, 1), fixed(2, 2), fixed(1, 3), Layout("both x4", ("both",) * 4))
UNPLANNED = Layout("no plan", ("both",) * 4, "least_cost", has_links=True)
WORKERS = Layout("auto", ("both",) * 4, "least_cost", has_links=True, plans_roles=True)


@dataclass(eq=False, slots=True)
class _Request:
    """One that is under way."""

    job: Job
    active: ActiveRequest
    pair: Pair
    view: RoutingRequest
    due_s: float
    conversation: Conversation


class ModelCluster:
    """
    Attributes:
        queue: its time.
        registry: its workers, as the router knows them.
        records: of the requests that have ended, as `tandem bench` keeps them.
        jobs: what became of them, in the same order.
        num_submitted: requests that have come.
        role_changes: moments at which some worker's lean has changed.
    """

    def __init__(
        self, layout: Layout, objectives: Objectives, *, seed: int = 0, device: DeviceFactors = H200_8B
    ) -> None:
        self.queue = EventQueue()
        self.records: list[RequestRecord] = []
        self.jobs: list[Job] = []
        self.num_submitted = 0
        self.role_changes: list[float] = []
        self._num_to_come = 0
        self._layout = layout
        self._device = device
        self._objectives = objectives
        self.registry = WorkerRegistry(self.queue.clock, 1e9, 1e9, placement=layout.placement)
        self._policy = _policy(layout.routing, seed, self.queue)
        self.planner = RolePlanner(objectives, self.queue.clock)
        self._prompts = PromptCount()
        self._models: dict[Worker, ModelWorker] = {}
        self._workers: dict[ModelWorker, Worker] = {}
        self._requests: dict[int, _Request] = {}
        for number, role in enumerate(layout.roles):
            self._add_worker(f"{role}-{number}", role)
        for worker in self._models:
            for other in self._models:
                if worker is not other and worker.sends and other.receives:
                    self.registry.record_link_state(worker, LinkState(other.worker_id, other.incarnation, up=True))

    def run(self, conversations: Sequence[Conversation]) -> list[RequestRecord]:
        """Returns when all of them have ended."""
        self._num_to_come = sum(len(conversation.turns) for conversation in conversations)
        if self._layout.plans_roles and self._layout.placement == AUTO:
            self._plan()
        for conversation in conversations:
            self.queue.after(conversation.begins_at - self.queue.now, partial(self._submit, conversation))
        self.queue.run()
        return self.records

    def first_token(self, worker: ModelWorker, job: Job) -> None:
        request = self._requests[job.number]
        self._hear(worker)
        request.active.prefill_is_computed()
        if not job.continues_here:
            decode = self._models[request.pair.decode]
            num_pages = (job.num_prompt + PAGE_SIZE - 1) // PAGE_SIZE - decode.num_cached_pages(job)
            request.active.tracker.num_pages_shipped = job.num_pages_shipped = num_pages
            self.queue.after(self._device.handover_s(num_pages), partial(decode.adopt, job))

    def step_ended(self, worker: ModelWorker, started: list[Job], finished: list[Job]) -> None:
        self._hear(worker)
        for job in started:
            self._requests[job.number].active.prefill_is_over()
        for job in finished:
            self._end(job)

    def _plan(self) -> None:
        """To be called once, before anything is submitted; it ends with the last request."""
        num_changes = self.registry.num_lean_changes
        self.registry.set_leans(self.planner.plan({"router": self.registry.demand(self._prompts)}))
        if self.registry.num_lean_changes > num_changes:
            self.role_changes.append(self.queue.now)
        if self._num_to_come or self._requests:
            self.queue.after(PLAN_INTERVAL_S, self._plan)

    def _hear(self, model: ModelWorker) -> None:
        """A worker says how full its pool is and how long its forwards take, if it has not done so for a while."""
        worker = self._workers[model]
        if self.queue.now - worker.last_heartbeat >= HEARTBEAT_S:
            stats = WorkerStats(num_locked_pages=model.num_locked_pages, forward_times=model.timer.times())
            self.registry.record_heartbeat(worker, Heartbeat(0, stats))

    def _add_worker(self, worker_id: str, role: str) -> None:
        device, layout = self._device, self._layout
        hello = Hello(
            PROTOCOL_VERSION, worker_id, f"{worker_id}-life", role, "cuda:0", "nowhere:1", 1, _FORMAT,
            device.pool_tokens // PAGE_SIZE, PAGE_SIZE, has_links=layout.has_links, max_batch_size=MAX_BATCH,
        )  # fmt: skip
        worker = self.registry.register(hello, lambda _: None, lambda _: None)
        timer = ForwardTimer("cuda", self.queue.clock)
        budget: PromptBudget = WholeChunks(layout.chunk_size or CHUNK_SIZE)
        if role == "both" and not layout.chunk_size:
            padding = None if device.mixed is None else MIXED_SIZES
            budget = StepBudget(self._objectives.itl_s, CHUNK_SIZE, timer, padding)
        cache = PrefixCache(device.pool_tokens // PAGE_SIZE, partial(self._tell_later, worker))
        model = ModelWorker(self.queue, device, budget, timer, cache, self)
        self._models[worker], self._workers[model] = model, worker

    def _tell_later(self, worker: Worker, stored: Sequence[int], removed: Sequence[int]) -> None:
        if self._policy.wants_prefixes:
            self.queue.after(PREFIXES_TOLD_S, partial(_tell, worker, stored, removed))

    def _submit(self, conversation: Conversation) -> None:
        turn = conversation.turns.pop(0)
        self._num_to_come -= 1
        number, self.num_submitted = self.num_submitted, self.num_submitted + 1
        spec = RequestSpec(TokenizedPrompt((0,) * turn.prompt, {}), SamplingParams(turn.output))
        tracker = RequestTracker(f"r-{number}", spec)
        view = self._view(tracker, turn)
        pair = self._policy.choose(self.registry.candidates, view)
        self._prompts.add(turn.prompt, pair.estimate)
        active = ActiveRequest(tracker, 0.0)
        active.assign_pair(pair)
        self._policy.attempt_started(pair, view)
        # What nobody asks for again need not be cached.
        identities = turn.identities if turn.is_shared else ()
        job = Job(number, turn.prompt, turn.output, identities, pair.prefill is pair.decode)
        self._requests[number] = _Request(job, active, pair, view, self.queue.now, conversation)
        self._models[pair.prefill].submit(job)

    def _end(self, job: Job) -> None:
        request = self._requests.pop(job.number)
        tracker, pair = request.active.tracker, request.pair
        tracker.output_ids = [0] * job.num_output
        first, adopted = _ns(job.first_token_at), _ns(job.adopted_at)
        tracker.moments = {FIRST_TOKEN: first, LEASE_GRANTED: first, COMMITTED: adopted}
        pair.decode.rates.request_finished(tracker, pair.distance)
        request.active.release_pair(tell_workers=False)
        ended = RoutingRequest(
            request.view.request_id, 0, tracker.prompt_ids, tuple(tracker.output_ids), 0, 0, "", "",
            request.view.prompt_identities, self._objectives,
        )  # fmt: skip
        self._policy.request_finished(pair, ended, "finished")
        self.jobs.append(job)
        times = array("d", job.token_times())
        self.records.append(
            RequestRecord(
                job.number, "requests", request.due_s, request.due_s, job.num_prompt, job.num_output,
                ended_s=times[-1], times=times, num_output_tokens=job.num_output, cached_tokens=job.found_cached,
            )
        )  # fmt: skip
        if request.conversation.turns:
            self.queue.after(request.conversation.think_s, partial(self._submit, request.conversation))

    def _view(self, tracker: RequestTracker, turn: Turn) -> RoutingRequest:
        return RoutingRequest(
            tracker.request_id, 0, tracker.prompt_ids, (), turn.output, 0, "", "", {PAGE_SIZE: turn.identities},
            self._objectives,
        )  # fmt: skip


def _policy(routing: str, seed: int, queue: EventQueue) -> RoutingPolicy:
    return LeastCost(seed, queue.clock) if routing == "least_cost" else LeastLoaded(seed)


def _tell(worker: Worker, stored: Sequence[int], removed: Sequence[int]) -> None:
    worker.prefixes.num_messages += 1
    worker.prefixes.identities.difference_update(removed)
    worker.prefixes.identities.update(stored)


def _ns(seconds: float) -> int:
    # No moment is 0, which means that there is none.
    return int(1e9 * (1.0 + seconds))
