"""Adapters as answers describe them."""

from tandem.adapters import AdapterRef
from tandem.router.frontends.base import Frontend
from tandem.v1 import inference_pb2 as pb


def loaded_adapters(frontend: Frontend) -> list[pb.LoadedAdapter]:
    """Returns all adapters that requests can name, by name."""
    loaded = frontend.router.adapters.loaded()
    return [loaded_adapter(frontend, one.name, one.adapter) for one in loaded if one.adapter is not None]


def loaded_adapter(frontend: Frontend, name: str, adapter: AdapterRef) -> pb.LoadedAdapter:
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
        num_requests=router.num_requests_of(content_hash),
    )
