"""Base class of routing policies.

The router creates one policy, without arguments, and calls it on its event loop: no token is passed on while it
computes. For each request with at least one attempt, numbered from 0, the router calls

    choose, attempt_started, (attempt_failed, choose, attempt_started)*, request_finished

`request_finished` follows the last `attempt_failed` directly if the request fails between attempts. Calls about other
requests and about workers come in between. `worker_lost` precedes `attempt_failed` for that worker's attempts.

The candidates are all prefill × decode pairs that can serve now, as a lazy sequence (router/workers/candidates.py),
valid during the call; pairs and workers may be kept. There are 250,000 pairs with 500 workers of each role: iterate or
sort only for some dozens of workers. `prefill_workers`, `decode_workers_of` and `least` take time proportional to the
number of workers.

An exception in `choose` fails that request. An exception in a hook is logged (router/policies/guard.py).

A policy may read these attributes of a worker (described in router/workers/worker.py) and changes none: `worker_id`,
`role`, `incarnation`, `num_assigned`, `num_pending_tokens`, `num_decoding`, `num_kv_tokens`, `num_arriving_tokens`,
`num_held_tokens`, `forward_times`, `max_decoding`, `lean`, `load_number`, `rates`, `page_size`, `hello.num_pages`,
`hello.device`, `prefixes.identities`, `node_store`, `load_token_s`, `adapters.wait_s`, `stats`. The counts include an
attempt from `attempt_started` to `attempt_failed` or `request_finished`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tandem.adapters import AdapterRef
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.objectives import DEFAULT_OBJECTIVES, Objectives
from tandem.router.workers.worker import Pair, Worker

AttemptFailure = Literal["prefill_failed", "given_back", "moved", "lease_lost", "deferred", "worker_lost"]
RequestEnd = Literal["finished", "stopped", "failed", "aborted"]


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A snapshot of a request. The policy may keep it.

    Attributes:
        attempt: number of the attempt in question.
        output_ids: token ids of the output so far; empty at the first choice.
        max_new_tokens: output tokens left; at least 1 in `choose`.
        priority: larger is sooner.
        session_id: the client's name of the conversation, or "".
        cache_namespace: requests share KV only within a namespace, made of the client's name for it, a digest of the
            API key and the adapter's content.
        adapter: LoRA adapter of the request; None: the base model.
        prompt_identities: identities of the prompt's prefixes (tandem.prefix), by page size, if the policy
            `wants_prefixes`; for the page sizes of the workers connected at its arrival.
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
    adapter: AdapterRef | None = None

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
            candidates: all pairs that can serve now, at least one; prefill workers in order of joining. After a wait
                for workers, only the workers that take one more. For a moving stream, the one pair of its move.
            request: the request, with the number of the attempt to choose for.

        Returns:
            One of the candidates, or an equal pair with an `Estimate`. The worker's load counts the estimated tokens to
                compute; the rest is reported next to the actual values. An invalid estimate is logged and dropped.
        """

    def attempt_started(self, pair: Pair, request: RoutingRequest) -> None:
        """Called when an attempt has been sent to its workers."""
        return

    def attempt_failed(self, pair: Pair, request: RoutingRequest, kind: AttemptFailure, reason: str) -> None:
        """Called when an attempt ends before its request is finished.

        Args:
            kind: "prefill_failed": a worker, mostly the prefill worker, reports a failure. "lease_lost": the decode
                worker has lost the request's pages. "worker_lost": one of the two workers is gone. Three kinds never
                fail a request: "given_back": the decode worker ran out of pages during decode. "deferred": it had no
                pages at the start. "moved": the stream goes on at another worker.
            reason: a description for the log.
        """
        return

    def request_finished(self, pair: Pair | None, request: RoutingRequest, end: RequestEnd) -> None:
        """Called when a request that had an attempt ends.

        Args:
            pair: the workers of the last attempt; None if that attempt failed.
            request: the request with its output so far.
            end: "finished": the last token is out. If there is a pair, its workers have cached the computed tokens; the
                decode worker has all but the last token, or nothing if the output is one token. "stopped": a stop
                string ended the output. "failed": the client gets an error. "aborted": the client left.
        """
        return

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """Called when a worker and its cache are gone. A restarted worker is another Worker with the same
        `worker_id`."""
        return

    def worker_joined(self, worker: Worker) -> None:
        """Called when a worker has connected. Candidates include it once its links are up."""
        return
