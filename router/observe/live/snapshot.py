"""Snapshots of a cluster as JSON."""

import heapq
import json
import time
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from tandem import __version__
from tandem.config import ROLES
from tandem.messages import WorkerStats
from tandem.router.config import RouterConfig, host_of
from tandem.router.observe.live.ended_requests import EndedRequest
from tandem.router.observe.live.history import History, Point
from tandem.router.observe.live.journal import Entry
from tandem.router.observe.live.rates import Rates, WorkerRates
from tandem.router.router import Router
from tandem.router.workers.worker import Worker

# Limit per second: readers follow no more, and each costs as much as two links.
MAX_NEW_REQUESTS = 20
# Links of a frame: all links of hundreds of workers would be megabytes a second.
MAX_LINKS = 256
# Only the page reads the names, so they may change with any version.
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Frame:
    def __init__(self, shared: dict[str, Any], requests: Sequence[EndedRequest], *, own_only: bool = False) -> None:
        """Args: own_only: True if each key sees only its own requests."""
        self._shared = _to_json({**shared, "own_only": own_only})
        self._requests = requests
        self._own_only = own_only
        self._texts: dict[str, str] = {}

    def seen_by(self, key: str) -> str:
        """Args: key: the viewer's key, or "" without keys."""
        whose = key if self._own_only else ""
        if whose not in self._texts:
            seen = [_request(request) for request in self._requests if not self._own_only or request.key == key]
            self._texts[whose] = f'{self._shared[:-1]},"requests":{_to_json(seen)}}}'
        return self._texts[whose]


class SnapshotBuilder:
    """A page's first frame has everything; later ones have the current state and new points, requests and entries.

    Attributes:
        num_keys: number of API keys; with several, each sees its own requests.
    """

    def __init__(self, router: Router, config: RouterConfig, now: Callable[[], float] = time.time) -> None:
        self._router = router
        self._config = config
        self._now = now
        self._started_s = now()
        self.num_keys = len(config.api_keys)
        self._rates = WorkerRates()
        self._history = History(router.live.ttft, router.metrics.itl)
        # End of the data in earlier frames.
        self._num_points = self._num_ended = self._journal_version = 0
        self._alive: dict[str, bool] = {}

    def sample(self) -> None:
        """Call once a second."""
        router = self._router
        self._rates.sample(router.workers)
        self._history.add(
            self._now(),
            prompt_tokens_per_s=self._rates.total(lambda rates: rates.prompt_tokens),
            output_tokens_per_s=self._rates.total(lambda rates: rates.output_tokens),
            num_requests=router.num_requests + router.elsewhere.num_requests,
            num_queued=router.num_queued + router.elsewhere.num_queued,
        )
        for router_id in router.router_names:
            if router_id != self._config.router_id:
                alive = router.elsewhere.counts_of(router_id) is not None
                if self._alive.get(router_id, alive) != alive:
                    router.live.journal.router_seen(router_id, alive=alive)
                self._alive[router_id] = alive

    def changes(self) -> Frame:
        """For viewers with all frames up to the last `mark_told`."""
        return self._frame(self._num_points, self._num_ended, self._journal_version, is_whole=False)

    def everything(self) -> Frame:
        """For new viewers, and after a missed frame."""
        return self._frame(0, 0, 0, is_whole=True)

    def mark_told(self) -> None:
        """Excludes the current data from the next `changes`."""
        live = self._router.live
        self._num_points, self._num_ended = self._history.num_points, live.ended.num_requests
        self._journal_version = live.journal.version

    def _frame(self, num_points: int, num_ended: int, journal_version: int, *, is_whole: bool) -> Frame:
        live = self._router.live
        requests = list(live.ended.since(num_ended))
        if not is_whole:
            requests = requests[-MAX_NEW_REQUESTS:]
        links, more_links = self._links()
        return Frame(
            {
                "whole": is_whole,
                "now_s": self._now(),
                **self._state(),
                "workers": self._workers(),
                "links": links,
                "more_links": more_links,
                "points": [_point(point) for point in self._history.since(num_points)],
                "journal": [_entry(entry) for entry in live.journal.since(journal_version)],
            },
            requests,
            # Lengths and times of requests reveal a key's use.
            own_only=self.num_keys > 1 and not self._config.allow_tracing,
        )

    def _state(self) -> dict[str, Any]:
        config, router = self._config, self._router
        elsewhere = router.elsewhere
        reason = router.not_ready_reason()
        return {
            "router": {
                "id": config.router_id,
                "version": __version__,
                "model": config.model_name,
                "max_model_len": config.max_model_len,
                "started_s": self._started_s,
                "restarts": config.num_restarts,
                "oldest_s": round(router.oldest_age_s, 1),
            },
            "ready": not reason,
            "reason": reason,
            "down": self._down(),
            "requests_in_hand": router.num_requests + elsewhere.num_requests,
            "queued": router.num_queued + elsewhere.num_queued,
            "waiting": router.num_waiting,
            "sizes": router.sizes,
            "routers": [self._router_state(name) for name in router.router_names or (config.router_id,)],
        }

    def _down(self) -> list[str]:
        """Returns the planned workers that are not connected, and the other routers that do not answer."""
        here = {worker.worker_id for worker in self._router.workers}
        routers = [name for name in self._router.router_names if name != self._config.router_id]
        return [
            *sorted(name for name in self._router.workers.planned if name not in here),
            *(name for name in routers if self._router.elsewhere.counts_of(name) is None),
        ]

    def _router_state(self, router_id: str) -> dict[str, Any]:
        if router_id == self._config.router_id:
            num_requests, num_queued, alive = self._router.num_requests, self._router.num_queued, True
        else:
            counts = self._router.elsewhere.counts_of(router_id)
            alive = counts is not None
            num_requests, num_queued = (counts.num_requests, counts.num_queued) if counts else (0, 0)
        return {"id": router_id, "alive": alive, "requests_in_hand": num_requests, "queued": num_queued}

    def _workers(self) -> list[dict[str, Any]]:
        here = {worker.worker_id: worker for worker in self._router.workers}
        away: Iterable[tuple[str, str]] = ((name, role) for name, role in self._router.workers.planned.items())
        found = [self._worker(worker) for worker in here.values()]
        found += [{"id": name, "role": role, "alive": False} for name, role in away if name not in here]
        return sorted(found, key=lambda worker: (ROLES.index(worker["role"]), worker["id"]))

    def _worker(self, worker: Worker) -> dict[str, Any]:
        hello, stats, rates = worker.hello, worker.stats, self._rates.of(worker.worker_id)
        return {
            "id": worker.worker_id,
            "role": worker.role,
            "lean": worker.lean,
            "alive": True,
            "host": host_of(hello.address),
            "device": hello.device,
            "ranks": hello.num_ranks,
            "pid": hello.pid,
            "restarts": hello.num_restarts,
            "assigned": worker.num_assigned,
            "pending_tokens": worker.num_pending_tokens,
            "queued": stats.num_queued,
            "running": stats.num_running,
            "page_size": hello.page_size,
            "pages": hello.num_pages,
            "free": stats.num_free_pages,
            "cached": stats.num_cached_pages,
            "locked": stats.num_locked_pages,
            "leased": stats.num_leased_pages,
            "given_back": stats.num_given_back,
            "leases_expired": stats.num_leases_expired,
            "prompt_tokens_per_s": round(rates.prompt_tokens, 1),
            "output_tokens_per_s": round(rates.output_tokens, 1),
            "cached_tokens_per_s": round(rates.cached_tokens, 1),
            "loaded_tokens_per_s": _loaded_rates(stats, rates),
        }

    def _links(self) -> tuple[list[dict[str, Any]], int]:
        """Returns the links by name, at most MAX_LINKS: those that are down, then the busiest; and the number of the
        others."""
        registry = self._router.workers
        pairs = [
            (sender, receiver)
            for sender in registry
            if sender.sends
            for receiver in registry.receivers_of(sender)
            if receiver is not sender
        ]
        num_links = len(pairs)
        sent = {worker: self._rates.sent_to(worker.worker_id) for worker in registry if worker.sends}
        if num_links > MAX_LINKS:
            urgent = [
                (sender, receiver)
                for sender, receiver in pairs
                if receiver.worker_id not in sender.decode_workers or receiver.worker_id in sent[sender]
            ]
            pairs = heapq.nsmallest(
                MAX_LINKS,
                urgent,
                lambda pair: (
                    pair[1].worker_id in pair[0].decode_workers,
                    -sent[pair[0]].get(pair[1].worker_id, 0.0),
                ),
            )
        links = [_link(sender, receiver, sent[sender].get(receiver.worker_id, 0.0)) for sender, receiver in pairs]
        return sorted(links, key=itemgetter("from", "to")), num_links - len(links)


def _link(sender: Worker, receiver: Worker, bytes_per_s: float) -> dict[str, Any]:
    receiver_id = receiver.worker_id
    is_up = receiver_id in sender.decode_workers
    down = sender.links_down.get(receiver_id)
    shipped = [one for one in sender.shipped.values() if one.receiver_id == receiver_id]
    return {
        "from": sender.worker_id,
        "to": receiver_id,
        "up": is_up,
        "reason": down.reason if down is not None and not is_up else "",
        # After a change of transport, the link uses the transport opened last.
        "transport": shipped[-1].transport if shipped else "",
        "bytes": sum(one.num_bytes for one in shipped),
        "bytes_per_s": round(bytes_per_s),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _loaded_rates(stats: WorkerStats, rates: Rates) -> dict[str, float]:
    """Returns rates by tier; none for a worker that never loaded a page."""
    if not stats.prefix_loaded.total:
        return {}
    by_tier = {"host": rates.host_tokens, "disk": rates.disk_tokens, "peer": rates.peer_tokens}
    return {tier: round(rate, 1) for tier, rate in by_tier.items()}


def _point(point: Point) -> list[Any]:
    return [point.number, round(point.at_s, 1), *map(_rounded, point[2:8]), point.num_requests, point.num_queued]


def _request(request: EndedRequest) -> dict[str, Any]:
    ttft = next((timing.duration_ms for timing in request.timings if timing.name == "ttft"), None)
    e2e = next((timing.duration_ms for timing in request.timings if timing.name == "e2e"), None)
    return {
        "number": request.number,
        "ended_s": round(request.ended_s, 3),
        "id": request.request_id,
        "client_id": request.client_request_id,
        "outcome": request.outcome,
        "error": request.error,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "loaded_tokens": request.loaded_tokens,
        "output_tokens": request.num_output_tokens,
        "attempts": request.num_attempts,
        "prefill": request.prefill_worker_id,
        "decode": request.decode_worker_id,
        "ttft_ms": _rounded(ttft),
        "e2e_ms": _rounded(e2e),
        "path": [(t.name, round(t.duration_ms, 2)) for t in request.timings if t.on_critical_path],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "number": entry.number,
        "at_s": round(entry.at_s, 1),
        "kind": entry.kind,
        "subject": entry.subject,
        "text": entry.text,
        "fault": entry.is_fault,
        "count": entry.count,
        "loss": entry.loss,
    }
