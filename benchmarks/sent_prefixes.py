"""A policy to compare CacheAware with: it takes for cached what its own router has sent where."""

from collections import OrderedDict
from collections.abc import Sequence

from tandem.prefix import prefix_identities
from tandem.router.policies.base import RequestEnd, RoutingPolicy, RoutingRequest
from tandem.router.policies.cache_aware import CacheAware
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker

# Pages remembered, over all workers.
MAX_ENTRIES = 200_000


class SentPrefixes(RoutingPolicy):
    """Counts costs as CacheAware does. What a worker has cached is guessed: it is told nothing of what others send and
    of what is evicted, and forgets the least recently used. Its workers must be its own."""

    def __init__(self, seed: int | None = None) -> None:
        self._policy = CacheAware(seed)
        # The keys are a worker and an identity, in the order of use.
        self._by_use: OrderedDict[tuple[Worker, int], None] = OrderedDict()

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        pair = self._policy.choose(candidates, request)
        for worker in (pair.prefill, pair.decode):
            self._record_sent(worker, request.prompt_ids)
        return pair

    def request_finished(self, pair: Pair | None, request: RoutingRequest, end: RequestEnd) -> None:
        if pair is not None:
            self._record_sent(pair.decode, request.token_ids)

    def _record_sent(self, worker: Worker, token_ids: Sequence[int]) -> None:
        """Has the worker say what it is taken to have."""
        identities = prefix_identities(token_ids, worker.page_size, "")
        # The last page is first: so the leading ones end up as the most recently used.
        for identity in reversed(identities):
            self._by_use[worker, identity] = None
            self._by_use.move_to_end((worker, identity))
        worker.prefixes.identities.update(identities)
        while len(self._by_use) > MAX_ENTRIES:
            (oldest, identity), _ = self._by_use.popitem(last=False)
            oldest.prefixes.identities.discard(identity)
