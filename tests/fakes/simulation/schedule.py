"""What happens in a simulated cluster, one thing after the other, and what must hold in the end.

A schedule is a tape of bytes: each decides what happens next among all that can. When the tape ends, faults end, and
what is left must finish.
"""

from collections.abc import Callable

from prefill_worker.policies.table import PREFILL_POLICIES
from router.policies.table import ROUTING_POLICIES
from tests.fakes.simulation.cluster import Simulation
from tests.fakes.simulation.router import SimRouter
from tests.fakes.simulation.worker import PAGE_SIZE, SimWorker

MAX_TOTAL_TOKENS = 14


class Tape:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def ended(self) -> bool:
        return self._position >= len(self._data)

    def draw(self, limit: int) -> int:
        """A number from 0 to limit - 1; 0 once the tape has ended."""
        if self.ended:
            return 0
        value = self._data[self._position]
        self._position += 1
        return value % limit


def run_schedule(data: bytes, asynchronous: bool = False) -> Simulation:
    """Runs a schedule to its end.

    Args:
        asynchronous: forwards overlap.

    Raises:
        AssertionError: a promise is broken.
    """
    tape = Tape(data)
    # Nothing but routers fails then, and no other router's requests may notice.
    only_routers_fail = not tape.draw(4)
    # One thing happens after the other; or much at once too, so that many requests are under way when something fails.
    is_fast = not tape.draw(3)
    simulation = Simulation(
        num_routers=2 + tape.draw(2) if only_routers_fail else (1, 2, 1, 3)[tape.draw(4)],
        num_prefill=(2, 1, 2, 3)[tape.draw(4)],
        num_decode=(2, 1, 2, 3)[tape.draw(4)],
        # The largest request just fits, with the page of the first decode step.
        num_pages=8 + tape.draw(3),
        prefill_policy=PREFILL_POLICIES.names[tape.draw(len(PREFILL_POLICIES.names))],
        routing=ROUTING_POLICIES.names[tape.draw(len(ROUTING_POLICIES.names))],
        two_sided=bool(tape.draw(2)),
        asynchronous=asynchronous,
        # Composed at once, while the step before has not run; or mostly when it has, and sometimes before.
        step_s=(0.0, 1.0)[tape.draw(2)],
        # Who shares a prefix waits for it; or computes the same pages side by side.
        min_shared_tokens=(PAGE_SIZE, MAX_TOTAL_TOKENS)[tape.draw(2)],
        # A decode worker may have no place in its line either.
        max_waiting=(1024, 2, 1)[tape.draw(3)],
        workers_have_time=only_routers_fail,
    )
    while not tape.ended:
        _happen(simulation, tape, only_routers_fail, is_fast)
        simulation.read_clients()
    simulation.drain()
    simulation.check_end()
    if only_routers_fail:
        simulation.check_undisturbed()
    return simulation


def _happen(simulation: Simulation, tape: Tape, only_routers_fail: bool, is_fast: bool) -> None:
    """One event. Most are progress; a few are new requests; fewer still are faults."""
    kind = tape.draw(32)
    workers = list(simulation.workers.values())
    routers = list(simulation.routers.values())
    if kind < (18 if is_fast else 21):
        actions = simulation.progress_actions()
        if actions:
            actions[tape.draw(len(actions))]()
    elif kind < 21:
        for _ in range(1 + tape.draw(8)):
            chosen = tape.draw(256)
            simulation.go_on(lambda number, chosen=chosen: bool(chosen >> number % 8 & 1))
    elif kind < 25:
        # Few distinct tokens and lengths, so that prefixes are shared often.
        length = 1 + tape.draw(9)
        prompt_ids = [tape.draw(2)] * (length // 2) + [1] * (length - length // 2)
        max_tokens = 1 + tape.draw(MAX_TOTAL_TOKENS - length)
        simulation.submit(
            prompt_ids,
            max_tokens,
            priority=tape.draw(2),
            num_stop_ids=(0, 16, 48)[tape.draw(3)],
            router=tape.draw(len(routers)),
        )
    elif kind == 25 and tape.draw(2):
        if waiting := [c for c in simulation.clients if not c.ended]:
            waiting[tape.draw(len(waiting))].leave()
    elif kind < 27:
        # A stream breaks, and what its client had may not all have been kept.
        if reading := [c for c in simulation.clients if c.tokens and not c.ended]:
            client = reading[tape.draw(len(reading))]
            client.break_off(tape.draw(len(client.tokens) + 1))
    elif kind == 27:
        simulation.advance((0.4, 1.5, 6.0 if only_routers_fail else 25.0)[tape.draw(3)])
    elif kind == 28:
        for worker in list(simulation.dead):
            simulation.revive(worker)
        for worker in workers:
            worker.paused = False
        for router in routers:
            simulation.revive_router(router)
    elif kind == 29 or only_routers_fail:
        _fail_router(simulation, routers[tape.draw(len(routers))], tape)
    elif workers:
        _fault(simulation, workers[tape.draw(len(workers))], tape)


def _fail_router(simulation: Simulation, router: SimRouter, tape: Tape) -> None:
    if router.runs:
        if tape.draw(2):
            router.stop()
        else:
            simulation.kill_router(router)
    elif router.alive and tape.draw(2):
        simulation.kill_router(router)
    else:
        simulation.revive_router(router)


def _fault(simulation: Simulation, worker: SimWorker, tape: Tape) -> None:
    decodes = [w for w in simulation.workers.values() if w.role == "decode"]
    faults: list[Callable[[], object]] = [
        lambda: simulation.kill(worker),
        lambda: setattr(worker, "paused", not worker.paused),
        lambda: _cut_control(worker, tape),
        lambda: [link.cut() for link in simulation.links.values() if worker in (link.sender, link.receiver)],
        lambda: [simulation.kill(w) for w in decodes],
    ]
    faults[tape.draw(len(faults))]()


def _cut_control(worker: SimWorker, tape: Tape) -> None:
    streams = list(worker.streams.values())
    if streams:
        streams[tape.draw(len(streams))].cut()
