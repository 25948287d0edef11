"""Random schedules of a simulated cluster, with checks at the end.

A schedule is a tape of bytes; each byte chooses the next event. When the tape ends, faults end too, and all requests
must finish.
"""

from collections.abc import Callable

from tandem.prefill_worker.policies.table import PREFILL_POLICIES
from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.workers.placement import AUTO, PLACEMENTS
from tests.fakes.simulation.cluster import Simulation
from tests.fakes.simulation.router import SimRouter
from tests.fakes.simulation.worker import PAGE_SIZE, SimWorker

MAX_TOTAL_TOKENS = 14
ANY_PAIR = "tests.fakes.routing:AnyPair"
# With workers of role both, half of the choices by policy use least_cost, which is made for them.
ROUTING = {False: ROUTING_POLICIES.names, True: (*ROUTING_POLICIES.names, *["least_cost"] * 3)}
LARGEST_REQUEST_PAGES = MAX_TOTAL_TOKENS // PAGE_SIZE
# Pools hold two of these: small pools fill up early with prompts for other workers.
LARGEST_TWO_WAY_PAGES = 4
LARGEST_MOVING_PAGES = 40


class Tape:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def ended(self) -> bool:
        return self._position >= len(self._data)

    def draw(self, limit: int) -> int:
        """Return a number below `limit`; 0 after the end of the tape."""
        if self.ended:
            return 0
        value = self._data[self._position]
        self._position += 1
        return value % limit


def run_schedule(
    data: bytes,
    asynchronous: bool = False,
    two_way: bool = False,
    num_ranks: int = 1,
    moves: bool = False,
    *,
    speculates: bool = False,
) -> Simulation:
    """Run a schedule to its end.

    Args:
        asynchronous: forward passes overlap.
        two_way: workers prefill and decode, with links both ways.
        num_ranks: of each worker, which then are slower or faster than each other.
        moves: workers leave and return, and their streams move. Needs `two_way`.
        speculates: decode steps check drafts.

    Raises:
        AssertionError: a guarantee is broken.
    """
    tape = Tape(data)
    # If only routers fail, the other routers' requests must not notice.
    only_routers_fail = not tape.draw(4)
    # Fast schedules also run many events at once, so that many requests are under way at a fault.
    is_fast = not tape.draw(3)
    # Policies prefer to decode a request on its prefill worker.
    is_routed = not two_way or not tape.draw(4)
    num_routers = 2 + tape.draw(2) if only_routers_fail else (1, 2, 1, 3)[tape.draw(4)]
    if two_way:
        # Workers of role both, with each request placed at random on one or two of them. Some clusters add workers of
        # one role.
        num_prefill, num_decode, num_both = ((0, 0, 2), (0, 0, 3), (1, 0, 2), (0, 1, 2), (0, 0, 2))[tape.draw(5)]
        # Room for two requests of the largest size.
        largest = LARGEST_TWO_WAY_PAGES
        num_pages = 2 * largest + tape.draw(3)
        if moves:
            # Outputs and pools are large enough for streams to move.
            largest = LARGEST_MOVING_PAGES
            num_pages = 3 * largest + tape.draw(8)
    else:
        num_prefill, num_decode, num_both = (2, 1, 2, 3)[tape.draw(4)], (2, 1, 2, 3)[tape.draw(4)], 0
        # Room for the largest request and the page of its first decode step.
        largest = LARGEST_REQUEST_PAGES
        num_pages = largest + 1 + tape.draw(3)
    prefill_policy = PREFILL_POLICIES.names[tape.draw(len(PREFILL_POLICIES.names))]
    routing, placement = ANY_PAIR, AUTO
    if is_routed:
        number, kind = divmod(tape.draw(len(PLACEMENTS) * len(ROUTING[two_way])), len(PLACEMENTS))
        routing, placement = ROUTING[two_way][number], PLACEMENTS[kind]
    simulation = Simulation(
        num_routers=num_routers,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_both=num_both,
        largest_request_pages=largest,
        num_pages=num_pages,
        prefill_policy=prefill_policy,
        routing=routing,
        placement=placement,
        two_sided=bool(tape.draw(2)),
        asynchronous=asynchronous,
        # Steps are composed at once, or mostly after the previous one has run.
        step_s=(0.0, 1.0)[tape.draw(2)],
        # Requests with a shared prefix wait for it, or compute the same pages in parallel.
        min_shared_tokens=(PAGE_SIZE, MAX_TOTAL_TOKENS)[tape.draw(2)],
        # A decode worker's queue may be full.
        max_waiting=(1024, 2, 1)[tape.draw(3)],
        workers_have_time=only_routers_fail,
        # Workers of several ranks.
        num_lanes=(1, 2, 3)[tape.draw(3)],
        num_ranks=num_ranks,
        speculates=speculates,
    )
    while not tape.ended:
        if moves and not tape.draw(8):
            _plan(simulation, tape)
        _happen(simulation, tape, only_routers_fail, is_fast)
        simulation.read_clients()
    simulation.drain()
    simulation.check_end()
    if only_routers_fail:
        simulation.check_undisturbed()
    return simulation


def _plan(simulation: Simulation, tape: Tape) -> None:
    """The busiest worker is to leave, or none; another one stays."""
    for _ in range(tape.draw(5)):
        simulation.submit([tape.draw(4)] * 3, simulation.largest_request_pages, router=tape.draw(2))
    for _ in range(tape.draw(16)):
        simulation.go_on()
    workers = sorted((w for w in simulation.workers.values() if w.role == "both"), key=lambda w: -len(w.running()))
    is_leaving = tape.draw(4) and len(workers) > 1
    simulation.plan_workers({workers[0].worker_id} if is_leaving else set())
    # A move takes about ten events in turn.
    for _ in range(tape.draw(16)):
        simulation.go_on()


def _happen(simulation: Simulation, tape: Tape, only_routers_fail: bool, is_fast: bool) -> None:
    kind = tape.draw(32)
    workers = list(simulation.workers.values())
    routers = list(simulation.routers.values())
    is_two_way = bool(simulation.num_both)
    if kind < (18 if is_fast else 21):
        actions = simulation.progress_actions()
        if actions:
            actions[tape.draw(len(actions))]()
    elif kind < 21:
        for _ in range(1 + tape.draw(8)):
            chosen = tape.draw(256)
            simulation.go_on(lambda number, chosen=chosen: bool(chosen >> number % 8 & 1))
    elif kind < 25:
        # Several requests at once make prompts wait for each other's pages.
        for _ in range((1, 5)[tape.draw(2)] if is_two_way else 1):
            _submit(simulation, tape, num_beginnings=4 if is_two_way else 2)
    elif kind == 25 and tape.draw(2):
        if waiting := [c for c in simulation.clients if not c.ended]:
            waiting[tape.draw(len(waiting))].leave()
    elif kind < 27:
        # The client may lose some of its received tokens when the stream breaks.
        if reading := [c for c in simulation.clients if c.tokens and not c.ended]:
            client = reading[tape.draw(len(reading))]
            client.break_off(tape.draw(len(client.tokens) + 1))
    elif kind == 27:
        simulation.advance((0.4, 1.5, 6.0 if only_routers_fail else 25.0)[tape.draw(3)])
    elif kind == 28 or (kind == 30 and is_two_way):
        # A worker of role both serves alone; links exist only while others live.
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


def _submit(simulation: Simulation, tape: Tape, num_beginnings: int) -> None:
    # Few distinct tokens and lengths, so that prefixes are often shared.
    total = simulation.largest_request_pages * PAGE_SIZE
    length = 1 + tape.draw(min(total - 2, 9))
    prompt_ids = [tape.draw(num_beginnings)] * (length // 2) + [1] * (length - length // 2)
    max_tokens = 1 + tape.draw(total - length)
    simulation.submit(
        prompt_ids,
        max_tokens,
        priority=tape.draw(2),
        num_stop_ids=(0, 16, 48)[tape.draw(3)],
        router=tape.draw(len(simulation.routers)),
    )


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
    copying = {(t.source, t.destination) for t in simulation.transports if t.pending}
    links = list(simulation.links.values())
    links = [link for link in links if (link.sender, link.receiver) in copying] or links
    faults: list[Callable[[], object]] = [
        lambda: simulation.kill(worker),
        lambda: setattr(worker, "paused", not worker.paused),
        lambda: _cut_control(worker, tape),
        lambda: [link.cut() for link in simulation.links.values() if worker in (link.sender, link.receiver)],
        lambda: [simulation.kill(w) for w in decodes],
        lambda: _break_lane(simulation, tape),
        # Preferably a link with copies under way.
        *[lambda: links[tape.draw(len(links))].cut() if links else None] * 5,
    ]
    faults[tape.draw(len(faults) if worker.role == "both" else 6)]()


def _break_lane(simulation: Simulation, tape: Tape) -> None:
    """Breaks one lane of a two-sided link; both ends then end its epoch."""
    if lanes := [lane for channels in simulation.channels.values() for lane in channels if not lane.failure]:
        lanes[tape.draw(len(lanes))].fail()


def _cut_control(worker: SimWorker, tape: Tape) -> None:
    streams = list(worker.streams.values())
    if streams:
        streams[tape.draw(len(streams))].cut()
