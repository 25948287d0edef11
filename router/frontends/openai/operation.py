"""HTTP routes for operators and benchmarks, in vLLM's and SGLang's forms."""

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tandem import __version__
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.errors import json_response

# Public configuration: no keys, tokens, files or addresses.
SHOWN = (
    "router_id",
    "max_requests_per_key",
    "share_cache_between_keys",
    "allow_cache_reset",
    "max_priority",
    "max_body_bytes",
    "max_bytes_in_hand",
    "max_connections",
    "routing",
    "max_queued_requests",
    "request_timeout_s",
    "worker_wait_timeout_s",
    "max_attempts",
)


class Version(BaseModel):
    version: str


class Load(BaseModel):
    server_load: int


class Reset(BaseModel):
    num_workers: int


def add_operation(app: FastAPI, frontend: Frontend) -> None:
    router = frontend.router

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def ping() -> Response:
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Version:
        """Version of this server."""
        return Version(version=__version__)

    @app.get("/load")
    async def load() -> Load:
        """Requests in hand at all routers."""
        return Load(server_load=router.num_requests + router.elsewhere.num_requests)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Configuration of the cluster and state of its workers."""
        return _server_info(frontend)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Reset:
        """Has all workers drop their cached prefixes, and page stores all pages; pages in use stay."""
        if not frontend.config.allow_cache_reset:
            raise HTTPException(404, "caches are reset only where the server was started with --allow-cache-reset")
        num_workers = router.reset_caches()
        await router.finish_reset()
        return Reset(num_workers=num_workers)


def _server_info(frontend: Frontend) -> dict[str, Any]:
    config, router = frontend.config, frontend.router
    reason = router.not_ready_reason()
    tells_links = router.workers.tells_links
    return {
        "version": __version__,
        "model": config.model_name,
        "served_model_names": list(config.model_names),
        "max_model_len": config.max_model_len,
        "ready": not reason,
        "not_ready_reason": reason,
        "num_requests": router.num_requests + router.elsewhere.num_requests,
        "config": {name: getattr(config, name) for name in SHOWN},
        "routers": router.router_names or [config.router_id],
        "sizes": router.sizes,
        "workers": [
            {
                "worker_id": worker.worker_id,
                "role": worker.role,
                "device": worker.hello.device,
                "num_ranks": worker.hello.num_ranks,
                "num_pages": worker.hello.num_pages,
                "page_size": worker.page_size,
                "stats": asdict(worker.whole_stats(by_link=tells_links)),
            }
            for worker in router.workers
        ],
        # SGLang's benchmark looks here for speculative decoding.
        "internal_states": [{}],
    }
