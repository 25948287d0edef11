"""Base of policies that use the workers' cached prefixes, reported or under way."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from operator import attrgetter

from tandem.prefix import prefix_identities
from tandem.router.policies.base import AttemptFailure, RequestEnd, RoutingPolicy, RoutingRequest
from tandem.router.policies.loads import LoadOption, load_options
from tandem.router.policies.under_way import NOTHING, PrefixesUnderWay
from tandem.router.workers.worker import Pair, Worker

_page_size_of, _identities_of = attrgetter("page_size"), attrgetter("prefixes.identities")


class PrefixPolicy(RoutingPolicy):
    wants_prefixes = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._under_way = PrefixesUnderWay(clock)
        # A shipped prefix is computed elsewhere first, so no prompt can start from it yet.
        self._arriving = PrefixesUnderWay(clock)
        self._prefixes: dict[str, RequestPrefixes] = {}
        self._latest: tuple[str, RequestPrefixes] | None = None
        # First guess for the next prompt: the last one's cached pages.
        self._usual = 0

    def num_cached(
        self, workers: Collection[Worker], request: RoutingRequest
    ) -> tuple[dict[Worker, int], dict[Worker, int]]:
        """Returns a request's leading tokens by worker. Workers with none are missing; workers outside `workers` may be
        included.

        Returns:
            Tokens that a worker has cached or is computing, from which it would start the prompt; and the same with
                tokens arriving from other workers, which need no second shipping.
        """
        prefixes = self._prefixes.get(request.request_id) or RequestPrefixes(request)
        self._latest = request.request_id, prefixes
        computing, arriving = self._under_way.all_expected(), self._arriving.all_expected()
        token_ids = request.token_ids
        cached: dict[Worker, int] = {}
        expected: dict[Worker, int] = {}
        sizes = set(map(_page_size_of, workers))
        for size in sizes:
            identities = prefixes.identities(token_ids, size)
            if not identities:
                continue
            # A worker without the first page has no other page. This filter runs over every worker at every choice.
            first = identities[0]
            having = [w for w, known in zip(workers, map(_identities_of, workers), strict=True) if first in known]
            if len(sizes) > 1:
                having = [w for w in having if w.page_size == size]
            having += [w for w, pages in computing.items() if first in pages and w.page_size == size]
            search = _Search(identities, self._usual)
            for worker, num_pages in search.all_known(having, computing):
                cached[worker] = size * num_pages
            expected.update(cached)
            self._usual = search.last
            for worker, pages in arriving.items():
                if first in pages and worker.page_size == size:
                    num_arriving = size * search.num_known(worker.prefixes.identities, pages)
                    expected[worker] = max(expected.get(worker, 0), num_arriving)
        return cached, expected

    def load_options(
        self, workers: Collection[Worker], request: RoutingRequest, cached: Mapping[Worker, int]
    ) -> dict[Worker, list[LoadOption]]:
        """Returns what each worker can load behind its cached tokens. Call it after `num_cached`."""
        able = [worker for worker in workers if worker.load_token_s]
        if not able:
            return {}
        assert self._latest is not None and self._latest[0] == request.request_id, "it follows upon num_cached"
        prefixes, token_ids = self._latest[1], request.token_ids
        identities = {size: prefixes.identities(token_ids, size) for size in {worker.page_size for worker in able}}
        return load_options(able, request, cached, identities)

    def attempt_started(self, pair: Pair, request: RoutingRequest) -> None:
        assert self._latest is not None and self._latest[0] == request.request_id, "it follows upon its choice"
        prefixes = self._prefixes[request.request_id] = self._latest[1]
        identities = prefixes.identities(request.token_ids, pair.prefill.page_size)
        self._under_way.expect(pair.prefill, request.request_id, identities)
        if pair.decode is not pair.prefill:
            identities = prefixes.identities(request.token_ids, pair.decode.page_size)
            self._arriving.expect(pair.decode, request.request_id, identities)
            # The decode worker computes nothing before the output.
            self._under_way.expect(pair.decode, request.request_id, ())

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
        self._arriving.give_up(pair.decode, request.request_id)
        if len(request.output_ids) > 1:
            # The decode worker has also cached the output, except the last token.
            identities = prefixes.identities(request.token_ids[:-1], pair.decode.page_size)
            self._under_way.finish(pair.decode, request.request_id, identities)

    def worker_lost(self, worker: Worker, reason: str) -> None:
        self._under_way.forget(worker)
        self._arriving.forget(worker)

    def _give_up(self, pair: Pair, request: RoutingRequest) -> None:
        for worker in (pair.prefill, pair.decode):
            self._under_way.give_up(worker, request.request_id)
            self._arriving.give_up(worker, request.request_id)


class RequestPrefixes:
    def __init__(self, request: RoutingRequest) -> None:
        self._namespace = request.cache_namespace
        self._by_size: dict[int, Sequence[int]] = dict(request.prompt_identities)

    def identities(self, token_ids: Sequence[int], page_size: int) -> Sequence[int]:
        """Returns the identities of all full pages of `token_ids`, a leading part of prompt and output. Each is
        computed once."""
        num_pages = len(token_ids) // page_size
        known = self._by_size.get(page_size, ())
        if len(known) < num_pages:
            known = self._by_size[page_size] = prefix_identities(token_ids, page_size, self._namespace, known)
        return known if len(known) == num_pages else known[:num_pages]


class _Search:
    """Finds the number of leading pages that each worker has.

    A page is only cached with all pages before it, so binary search works. Most workers have the same pages of a
    prompt, so the search tries the last worker's number first.
    """

    def __init__(self, identities: Sequence[int], guess: int) -> None:
        self._identities = identities
        self.last = min(guess, len(identities))

    def all_known(
        self, workers: Iterable[Worker], computing: Mapping[Worker, Set[int]]
    ) -> Iterator[tuple[Worker, int]]:
        identities, last = self._identities, -1
        border: tuple[int, int | None] = 0, None
        for worker in workers:
            if last != self.last:
                last = self.last
                border = identities[last - 1] if last else 0, identities[last] if last < len(identities) else None
            before, after = border
            known, pages = worker.prefixes.identities, computing.get(worker, NOTHING)
            # Most of hundreds of workers have as many pages as the one before.
            if last and (before in known or before in pages) and after not in known and after not in pages:
                yield worker, last
            else:
                yield worker, self.num_known(known, pages)

    def num_known(self, cached: Set[int], expected: Set[int]) -> int:
        identities, last = self._identities, self.last
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
        self.last = low
        return low
