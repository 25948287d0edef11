"""Which workers serve a request.

The router makes one policy when it starts, without arguments, and calls it on its one loop. So a policy needs no lock,
and must return at once: while it computes, no token is passed on to anybody. `choose` is all that it must define. The
other methods are hooks, from which it learns what has become of its choices; they do nothing unless it defines them.
For every request that gets as far as an attempt they are called in this order, its attempts being numbered from 0 on:

    choose, attempt_started, (attempt_failed, choose, attempt_started)*, request_finished

After the last `attempt_failed` there is no further `choose` where nobody comes back to serve or enough attempts have
failed: `request_finished` follows. Between the two lies time where the request waits for a worker
(router/waiting_room.py). A request for which no attempt is ever made is not heard of again.

What `choose` is given is every pair that can serve, and there are prefill times decode workers of them: with 500 of
each, looking at all takes longer than 250 requests may take together. So the pairs are a sequence that is never made
(router/workers/candidates.py). A policy that goes through it, sorts it or takes its minimum is right, and fast
enough for some
dozens of workers. One that is to be fast with many asks for the workers (`prefill_workers`, `decode_workers_of`) or for
the pair whose two costs are least (`least`), which takes time in proportion to the workers and not to the pairs; every
policy here does. The sequence is good for the one call alone: what a policy keeps are pairs and workers.

Between the calls about one request come those about others, and those about workers. That a worker is lost is said
(`worker_lost`) before what it means for the attempts on it (`attempt_failed`), so that a policy has forgotten that
worker when it chooses again.

A policy may be anybody's class. What `choose` raises fails that one request; what a hook raises is logged and the
request goes on, because nothing waits for a hook (router/policies/guard.py).

This is what a policy may read of a worker. It changes nothing there, and sends nothing to it.

| of a Worker | |
|---|---|
| `worker_id`, `role` | its name, which it keeps when it is started again; `prefill`, `decode` or `both` |
| `incarnation` | names this life of it: what was cached in an earlier life is gone |
| `num_assigned` | requests that it serves now: this router's by its own count, others' by theirs, 0.1 s old |
| `num_pending_tokens` | tokens of those that it has yet to prefill, where an `Estimate` said how many are cached |
| `num_decoding`, `num_kv_tokens` | of those, the requests that it decodes or is going to, and tokens of their prompts |
| `num_arriving_tokens` | of these, those that it is yet to hold, where an `Estimate` said how many are cached |
| `num_held_tokens` | tokens of its pool that are in use, by its own word, or arriving |
| `forward_times` | how long its forwards take, by its own word (tandem.messages.ForwardTimes), some moments old |
| `max_decoding` | requests that it decodes side by side at most |
| `lean` | which work it is to be given first (router/workers/leans.py) |
| `load_number` | goes up when one of these but `max_decoding` changes |
| `rates` | how long handovers take and outputs are as the router has seen it (router/workers/rates.py) |
| `page_size`, `hello.num_pages` | tokens of a KV page, pages of its pool |
| `hello.device` | where it computes |
| `prefixes.identities` | of prefixes that it has cached, by its own word, 0.1 s old; empty unless `wants_prefixes` |
| `stats` | its own word in its last heartbeat (tandem.messages.WorkerStats), a fraction of a second old |

The router's counts include an attempt once `attempt_started` is called for it, and no longer when `attempt_failed` or
`request_finished` is.
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
    """What a policy may know of a request: how it stands at one moment. The policy owns it and may keep it.

    Attributes:
        request_id: the router's own name for it; no other request ever has it.
        attempt: number of the attempt that the call is about.
        prompt_ids: token ids of its prompt.
        output_ids: token ids of its output so far; empty when its first attempt is chosen for.
        max_new_tokens: how many more tokens its output may have; there will be at least one when `choose` is called.
        priority: larger is sooner.
        session_id: what the client says of the conversation that it belongs to; "" if it says nothing.
        cache_namespace: KV is shared between requests of the same namespace alone; it is made of the client's own name
            for it and of a digest of the API key.
        prompt_identities: of its prompt's prefixes (tandem.prefix), by page size; if the policy `wants_prefixes`, for
            the page sizes of the workers that were there when the request came.
        objectives: how soon its client is to have its tokens.
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
        """Prompt and output so far: all that an attempt must have in its pages. Put together at each call."""
        return self.prompt_ids + self.output_ids


class RoutingPolicy(ABC):
    """Chooses prefill and decode worker together: what is cached at one decides what must be shipped to the other.

    Attributes:
        wants_prefixes: whether workers are to say what they have cached. It is asked when a worker joins.
    """

    wants_prefixes: bool = False

    @abstractmethod
    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        """Chooses who serves a request's next attempt.

        Args:
            candidates: every pair that can serve now, at least one, prefill workers in the order in which they joined.
                Where requests have waited for workers, they are those that take one more; some may be busy.
            request: with the number of the attempt that is chosen for.

        Returns:
            One of the candidates; it may be made anew, with an `Estimate` of what is expected of it. How many tokens
            are to be computed counts as the worker's load; the rest is told beside what it comes to. A wrong one is
            logged and left out.
        """

    def attempt_started(self, pair: Pair, request: RoutingRequest) -> None:
        """An attempt has been sent to its workers. This is for a policy that keeps accounts of its own: what it adds
        here it takes away when the attempt ends, for each of which one of the next two is called with that pair."""
        return

    def attempt_failed(self, pair: Pair, request: RoutingRequest, kind: AttemptFailure, reason: str) -> None:
        """An attempt has ended before its request was finished. This is for a policy that avoids whoever fails often.

        Args:
            kind: "prefill_failed": a worker says that it cannot, mostly the prefill worker; "lease_lost": the decode
                worker has lost the request's pages; "worker_lost": one of the two is gone, and `worker_lost` has said
                which. Two kinds are nobody's fault, and no number of them fails a request: "given_back": the decode
                worker ran out of pages while it decoded; "deferred": it had none to begin with.
            reason: the same in words, for a log.
        """
        return

    def request_finished(self, pair: Pair | None, request: RoutingRequest, end: RequestEnd) -> None:
        """A request is over, whatever its end. This is called once for each request that had an attempt, so a policy
        can forget here what it keeps of it, and note what its workers have cached.

        Args:
            pair: the workers of its last attempt; None if that had failed.
            request: with its output as far as it came.
            end: "finished": its last token is there. Where there is a pair, that has said so, and its workers have
                cached what they computed; the decode worker's part is prompt and output, but for the last token, unless
                the first token was the last: then it has none; "stopped": a stop string has ended it before;
                "failed": its client is told why, be it that nobody is left to serve it, that too many attempts have
                failed, that it took too long, or that the router shuts down; "aborted": its client has left.
        """
        return

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """A worker is gone, with all that it had cached: no pair will have this `worker` again. If it comes back, it is
        another Worker of the same `worker_id`. This is for a policy that remembers what is where."""
        return

    def worker_joined(self, worker: Worker) -> None:
        """A worker has connected. This is for a policy that keeps something for each worker; `choose` is given pairs
        with it once the links that they need are up."""
        return
