"""Base class of routing policies.

The router creates one policy at its start, without arguments, and calls it on its event loop. A policy needs no lock,
and must return at once: no token is passed on while it computes. Only `choose` is abstract; the hooks report the
outcome of choices. For each request with at least one attempt, the router calls, with attempts numbered from 0,

    choose, attempt_started, (attempt_failed, choose, attempt_started)*, request_finished

If no worker comes back or enough attempts have failed, `request_finished` follows the last `attempt_failed`. A request
may wait for a worker between the two (router/waiting_room.py).

The candidates are all prefill × decode pairs that can serve now, as a lazy sequence (router/workers/candidates.py):
250,000 pairs with 500 workers of each role. Iterating, sorting or taking the minimum is fast enough for some dozens of
workers. `prefill_workers`, `decode_workers_of` and `least` take time proportional to the number of workers. The
sequence is valid during the call only; pairs and workers may be kept.

Calls about other requests and about workers come in between. `worker_lost` precedes `attempt_failed` for that worker's
attempts.

An exception in `choose` fails that request. An exception in a hook is logged and the request continues
(router/policies/guard.py).

A policy may read these attributes of a worker (router/workers/worker.py describes them). It changes nothing and sends
nothing there: `worker_id`, `role`, `incarnation`, `num_assigned`, `num_pending_tokens`, `num_decoding`,
`num_kv_tokens`, `num_arriving_tokens`, `num_held_tokens`, `forward_times`, `max_decoding`, `lean`, `load_number`,
`rates`, `page_size`, `hello.num_pages`, `hello.device`, `prefixes.identities`, `stats`. The counts include an attempt
from the call of `attempt_started` to the call of `attempt_failed` or `request_finished`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tandem.router.workers.candidates import Candidates
from tandem.router.workers.objectives import DEFAULT_OBJECTIVES, Objectives
from tandem.router.workers.worker import Pair, Worker

AttemptFailure = Literal["prefill_failed", "given_back", "lease_lost", "deferred", "worker_lost"]
RequestEnd = Literal["finished", "stopped", "failed", "aborted"]


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A snapshot of a request. The policy may keep it.

    Attributes:
        request_id: the router's unique name for the request.
        attempt: number of the attempt in question.
        prompt_ids: token ids of the prompt.
        output_ids: token ids of the output so far; empty at the first choice.
        max_new_tokens: output tokens left; at least 1 in `choose`.
        priority: larger is sooner.
        session_id: the client's name of the conversation, or "".
        cache_namespace: requests share KV only within a namespace, made of the client's name for it and a digest of the
            API key.
        prompt_identities: identities of the prompt's prefixes (tandem.prefix), by page size. Given if the policy
            `wants_prefixes`, for the page sizes of the workers connected when the request arrived.
        objectives: the request's latency objectives.
    """

    request_id: str
    attempt: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    max_new_tokens: int
    priority: int
    session_id: str
    cache_namespace: str
    prompt_identities: Mapping[int, Sequence[int]] = field(default_factory=dict)
    objectives: Objectives = DEFAULT_OBJECTIVES

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output so far, which an attempt needs in its pages. A new tuple at each call."""
        return self.prompt_ids + self.output_ids


class RoutingPolicy(ABC):
    """Chooses prefill and decode worker together, because the prefix cached at one decides the pages to ship to the
    other.

    Attributes:
        wants_prefixes: True if workers report their cached prefixes. Read when a worker joins.
    """

    wants_prefixes: bool = False

    @abstractmethod
    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        """Chooses the workers of a request's next attempt.

        Args:
            candidates: all pairs that can serve now, at least one; prefill workers in order of joining. If requests
                have waited for workers, only the workers that take one more; some may be busy.
            request: the request, with the number of the attempt to choose for.

        Returns:
            One of the candidates, or an equal pair with an `Estimate`. The worker's load counts the estimated tokens to
            compute; the rest is reported next to the actual values. An invalid estimate is logged and dropped.
        """

    def attempt_started(self, pair: Pair, request: RoutingRequest) -> None:
        """Called when an attempt has been sent to its workers. One of the next two hooks ends it, with the same
        pair."""
        return

    def attempt_failed(self, pair: Pair, request: RoutingRequest, kind: AttemptFailure, reason: str) -> None:
        """Called when an attempt ends before its request is finished.

        Args:
            kind: "prefill_failed": a worker, mostly the prefill worker, reports a failure. "lease_lost": the decode
                worker has lost the request's pages. "worker_lost": one of the two workers is gone; `worker_lost` named
                it. Two kinds never fail a request: "given_back": the decode worker ran out of pages during decode.
                "deferred": it had no pages at the start.
            reason: a description for the log.
        """
        return

    def request_finished(self, pair: Pair | None, request: RoutingRequest, end: RequestEnd) -> None:
        """Called once for each request that had an attempt, when it ends.

        Args:
            pair: the workers of the last attempt; None if that attempt failed.
            request: the request with its output so far.
            end: "finished": the last token is out. If there is a pair, its workers have cached the tokens that they
                computed. The decode worker has prompt and output except the last token, or nothing if the output is one
                token. "stopped": a stop string ended the output. "failed": the client gets an error: no worker, too
                many failed attempts, a timeout or a shutdown. "aborted": the client left.
        """
        return

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """Called when a worker and its cache are gone. A restarted worker is another Worker with the same
        `worker_id`."""
        return

    def worker_joined(self, worker: Worker) -> None:
        """Called when a worker has connected. It appears in candidates once its links are up."""
        return
