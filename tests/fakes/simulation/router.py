"""A real router with its real frontend in a simulated cluster, without sockets."""

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tandem.lifecycle import RECEIVED
from tandem.messages import Heartbeat
from tandem.router.config import RouterConfig
from tandem.router.frontends.base import Frontend, PromptInput, TokenizedPrompt
from tandem.router.frontends.grpc import InferenceService
from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.router import Router
from tandem.router.text.prompt_cut import PromptCut
from tests.fakes.routing import CheckedPolicy
from tests.fakes.simulation.calls import SimCall
from tests.fakes.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from tests.fakes.simulation.cluster import Simulation


class SimRouter:
    """One life of a router process.

    Attributes:
        address: its port for workers, the same in all lives.
        stopped_at: simulated time at which it was stopped; None while it runs.
        stood_still_s: stopped time since its last check of deadlines.
        departed: disconnected clients' calls that it has not noticed.
    """

    def __init__(self, simulation: "Simulation", address: str, routing: str, placement: str) -> None:
        self._simulation = simulation
        self.address = address
        self.alive = True
        self.stopped_at: float | None = None
        self.was_stopped = False
        self.stood_still_s = 0.0
        self.departed: deque[SimCall] = deque()
        config = RouterConfig(
            "nowhere",
            "fake",
            1000,
            router_id=address,
            cluster_token="secret",
            heartbeat_timeout_s=1.0,
            stall_timeout_s=1e9,
            max_attempts=10_000,
            placement=placement,
        )
        made: Any = ROUTING_POLICIES.load(routing)
        arguments: dict[str, Any] = {} if routing == "round_robin" else {"seed": 0}
        if routing in ("cache_aware", "least_cost"):
            arguments["clock"] = simulation.clock
        self.policy = CheckedPolicy(made(**arguments))
        self.router = Router(config, self.policy, simulation.clock)
        self.router.incarnation = f"{address}life{next(simulation.numbers)}"
        self.frontend = _SimFrontend(self.router, simulation, config)
        self._service = InferenceService(self.frontend)

    def plan_workers(self) -> None:
        staying = {w.worker_id: w.role for w in self._simulation.workers.values()}
        staying.update((w.worker_id, w.role) for w in self._simulation.dead)
        for worker_id in self._simulation.leaving:
            staying.pop(worker_id, None)
        self.router.set_workers(staying)

    @property
    def runs(self) -> bool:
        return self.alive and self.stopped_at is None

    def call(self, request: Any) -> SimCall:
        return SimCall(self._service, request)

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped_at = self._simulation.clock.now
        self.was_stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        if self.stopped_at is not None:
            self.stood_still_s += self._simulation.clock.now - self.stopped_at
            self.stopped_at = None

    def notice_departed(self) -> None:
        if self.departed:
            self.departed.popleft().cancel()

    def hear_heartbeats(self) -> None:
        """Hear from running workers, and from workers with unread messages."""
        for stream in self._simulation.streams:
            is_heard = (stream.is_open_at_worker and stream.worker.runs) or stream.to_router
            if stream.router is self and is_heard and stream.registered is not None:
                self.router.workers.record_heard(stream.registered)
                heartbeat = Heartbeat(stream.worker.num_steps, stream.worker.scheduler.stats())
                self.router.workers.record_heartbeat(stream.registered, heartbeat)

    def check_deadlines(self) -> None:
        stood_still_s, self.stood_still_s = self.stood_still_s, 0.0
        self.router.check_deadlines(stood_still_s)

    def tell_counts(self) -> None:
        for other in self._simulation.routers.values():
            if other is not self and other.runs:
                other.router.elsewhere.record(self.address, self.frontend.counts())
                other.router.update_loads()

    def die(self) -> None:
        self.alive = False
        self.departed.clear()
        for other in self._simulation.routers.values():
            if other is not self:
                other.router.elsewhere.forget(self.address)
                other.router.update_loads()


class _SimFrontend(Frontend):
    def __init__(self, router: Router, simulation: "Simulation", config: RouterConfig) -> None:
        super().__init__(router, ByteTokenizer(), config)  # type: ignore[arg-type]
        self._simulation = simulation

    async def tokenize(
        self, prompt: PromptInput, namespace: str | None = None, cut: PromptCut | None = None
    ) -> TokenizedPrompt:
        tokenized = await super().tokenize(prompt, namespace, cut)
        return replace(tokenized, moments={RECEIVED: self._simulation.now_ns()})
