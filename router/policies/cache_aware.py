"""The pair that has least left to do for this very request."""

import random
import time
from collections.abc import Callable, Sequence, Set

from router.candidates import Candidates
from router.policies.base import AttemptFailure, RequestEnd, RoutingPolicy, RoutingRequest
from router.policies.under_way import PrefixesUnderWay
from router.worker import Pair, Worker
from tandem.prefix import prefix_identities

# Both costs are in units of one prompt token computed. Shipping a token's KV takes a fraction of computing it; every
# further request at a decode worker makes each step of all others longer.
SHIP_COST = 0.05
RUNNING_REQUEST_COST = 16.0
# Less than the smallest difference that means something.
TIE_COST = SHIP_COST / 4


class CacheAware(RoutingPolicy):
    """Adds up for each pair the prompt tokens queued at the prefill worker, those of this prompt that it has not
    cached, those to ship that the decode worker has not cached, and how full the decode worker is; takes the least.

    What is cached is what workers say, and what they are computing for this router's own requests.
    """

    wants_prefixes = True

    def __init__(self, seed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._under_way = PrefixesUnderWay(clock)
        # Of requests that are not finished.
        self._prefixes: dict[str, _RequestPrefixes] = {}
        self._latest: tuple[str, _RequestPrefixes] | None = None
        # Among equals chance decides, as in LeastLoaded.
        self._random = random.Random(seed)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        prefixes = self._prefixes.get(request.request_id) or _RequestPrefixes(request)
        self._latest = request.request_id, prefixes
        token_ids = request.token_ids
        num_tokens = len(token_ids)
        searches: dict[int, _Search] = {}
        expected_of = self._under_way.expected

        def num_uncached(worker: Worker) -> int:
            cached, expected = worker.prefixes.identities, expected_of(worker)
            if not cached and not expected:
                return num_tokens
            size = worker.page_size
            if (search := searches.get(size)) is None:
                search = searches[size] = _Search(prefixes.identities(token_ids, size))
            return num_tokens - size * search.num_known(cached, expected)

        def prefill_cost(worker: Worker) -> float:
            return worker.num_pending_tokens + num_uncached(worker) + TIE_COST * self._random.random()

        def decode_cost(worker: Worker) -> float:
            running_cost = RUNNING_REQUEST_COST * worker.num_assigned
            return SHIP_COST * num_uncached(worker) + running_cost + TIE_COST * self._random.random()

        def both_cost(worker: Worker) -> float:
            # It has nothing to ship.
            return prefill_cost(worker) + RUNNING_REQUEST_COST * worker.num_assigned

        return candidates.least(prefill_cost, decode_cost, both_cost)

    def attempt_started(self, pair: Pair, request: RoutingRequest) -> None:
        assert self._latest is not None and self._latest[0] == request.request_id, "it follows upon its choice"
        prefixes = self._prefixes[request.request_id] = self._latest[1]
        for worker in (pair.prefill, pair.decode):
            identities = prefixes.identities(request.token_ids, worker.page_size)
            self._under_way.expect(worker, request.request_id, identities)

    def attempt_failed(self, pair: Pair, request: RoutingRequest, kind: AttemptFailure, reason: str) -> None:
        self._give_up(pair, request)

    def request_finished(self, pair: Pair | None, request: RoutingRequest, end: RequestEnd) -> None:
        prefixes = self._prefixes.pop(request.request_id, None)
        if pair is None or prefixes is None:
            return
        if end != "finished":
            self._give_up(pair, request)
            return
        prompt_identities = prefixes.identities(request.prompt_ids, pair.prefill.page_size)
        self._under_way.finish(pair.prefill, request.request_id, prompt_identities)
        if len(request.output_ids) > 1:
            # It has cached the output too, but for the last token.
            identities = prefixes.identities(request.token_ids[:-1], pair.decode.page_size)
            self._under_way.finish(pair.decode, request.request_id, identities)
        elif pair.decode is not pair.prefill:
            self._under_way.give_up(pair.decode, request.request_id)

    def worker_lost(self, worker: Worker, reason: str) -> None:
        self._under_way.forget(worker)

    def _give_up(self, pair: Pair, request: RoutingRequest) -> None:
        for worker in (pair.prefill, pair.decode):
            self._under_way.give_up(worker, request.request_id)


class _RequestPrefixes:
    """A request's prefixes: each page of it is looked at once, over all its attempts."""

    def __init__(self, request: RoutingRequest) -> None:
        self._namespace = request.cache_namespace
        self._by_size: dict[int, Sequence[int]] = dict(request.prompt_identities)

    def identities(self, token_ids: Sequence[int], page_size: int) -> Sequence[int]:
        """Those of all full pages of that size.

        Args:
            token_ids: so many of its prompt and output.
        """
        num_pages = len(token_ids) // page_size
        known = self._by_size.get(page_size, ())
        if len(known) < num_pages:
            known = self._by_size[page_size] = prefix_identities(token_ids, page_size, self._namespace, known)
        return known if len(known) == num_pages else known[:num_pages]


class _Search:
    """Looks for how much of a prompt each worker has.

    No page is anywhere without those before it, so the border between known and unknown can be searched for. Of many
    workers most know the same of a prompt, a beginning that all prompts share or nothing: so where the border was for
    the last worker is looked at first.
    """

    def __init__(self, identities: Sequence[int]) -> None:
        self._identities = identities
        self._last = 0

    def num_known(self, cached: Set[int], expected: Set[int]) -> int:
        """Leading pages that are in either set."""
        identities, last = self._identities, self._last
        if last and identities[last - 1] not in cached and identities[last - 1] not in expected:
            low, high = 0, last - 1
        elif last < len(identities) and (identities[last] in cached or identities[last] in expected):
            low, high = last + 1, len(identities)
        else:
            return last
        while low < high:
            middle = (low + high) // 2
            if identities[middle] in cached or identities[middle] in expected:
                low = middle + 1
            else:
                high = middle
        self._last = low
        return low
