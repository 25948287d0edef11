"""What workers can load from page stores instead of computing it."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tandem.router.policies.base import RoutingRequest
from tandem.router.workers.store_prefixes import PEER, PeerRuns, Run, find_runs
from tandem.router.workers.store_registry import NodeStore
from tandem.router.workers.worker import Worker


class LoadOption(NamedTuple):
    """A choice for the start of a prompt.

    Attributes:
        num_ready: leading tokens that need no computing: cached ones and those loaded.
        seconds: time to load.
    """

    num_ready: int
    seconds: float


def load_options(
    workers: Collection[Worker],
    request: RoutingRequest,
    cached: Mapping[Worker, int],
    identities: Mapping[int, Sequence[int]],
) -> dict[Worker, list[LoadOption]]:
    """Returns each worker's options besides loading nothing; workers without any are missing.

    A tier's load time per token is constant and computing a later token takes longer. So the best option ends where a
    run ends, or loads nothing.

    Args:
        cached: leading tokens that a worker has or will have without loading.
        identities: of the prompt's pages, by page size.
    """
    num_tokens = request.num_prompt_tokens + len(request.output_ids)
    known: dict[tuple[NodeStore, int, int, bool], list[Run]] = {}
    peers: dict[int, PeerRuns] = {}
    options: dict[Worker, list[LoadOption]] = {}
    for worker in workers:
        rates, size, node = worker.load_token_s, worker.page_size, worker.node_store
        if not rates or not identities.get(size):
            continue
        start, has_peers = cached.get(worker, 0) // size, len(rates) > PEER and rates[PEER] > 0.0
        key = (node, size, start, has_peers)
        if (runs := known.get(key)) is None:
            # At least one token is computed.
            stop = (num_tokens - 1) // size
            if has_peers and size not in peers:
                peers[size] = PeerRuns(node.everywhere, identities[size], stop)
            from_peers = peers[size] if has_peers else None
            runs = known[key] = find_runs(node.prefixes, from_peers, identities[size], start, stop)
        if runs and (own := _options(runs, start, size, rates)):
            options[worker] = own
    return options


def _options(runs: Sequence[Run], start: int, page_size: int, load_token_s: Sequence[float]) -> list[LoadOption]:
    options: list[LoadOption] = []
    seconds = 0.0
    for tier, end in runs:
        token_s = load_token_s[tier] if tier < len(load_token_s) else 0.0
        if not token_s > 0.0:
            # The worker cannot load from this tier, nor what is behind it.
            break
        seconds += (end - start) * page_size * token_s
        start = end
        options.append(LoadOption(end * page_size, seconds))
    return options
