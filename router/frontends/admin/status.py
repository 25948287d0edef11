"""Adapters as answers describe them."""

from collections import Counter

from tandem.adapters import AdapterRef
from tandem.router.frontends.base import Frontend
from tandem.v1 import inference_pb2 as pb


def loaded_adapters(frontend: Frontend) -> list[pb.LoadedAdapter]:
    """Returns all adapters that requests can name, by name."""
    loaded, in_hand = frontend.router.adapters.loaded(), frontend.router.requests_by_adapter()
    return [_loaded(frontend, one.name, one.adapter, in_hand) for one in loaded if one.adapter is not None]


def loaded_adapter(frontend: Frontend, name: str, adapter: AdapterRef) -> pb.LoadedAdapter:
    return _loaded(frontend, name, adapter, frontend.router.requests_by_adapter())


def _loaded(frontend: Frontend, name: str, adapter: AdapterRef, in_hand: Counter[str]) -> pb.LoadedAdapter:
    router, content_hash = frontend.router, adapter.content_hash
    return pb.LoadedAdapter(
        name=name,
        path=adapter.path,
        content_hash=content_hash,
        rank=adapter.rank,
        targets=adapter.targets,
        num_bytes=adapter.num_bytes,
        on_device=[worker.worker_id for worker in router.workers if content_hash in worker.adapters.on_device],
        in_host=[worker.worker_id for worker in router.workers if content_hash in worker.adapters.in_host],
        num_requests=in_hand[content_hash],
    )
