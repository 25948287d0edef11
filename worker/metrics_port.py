"""A worker's port for Prometheus."""

import asyncio

from prometheus_client import CollectorRegistry

from tandem.key_file import watched_keys
from tandem.rpc.metrics_server import MetricsServer
from tandem.watched_files import watch
from tandem.worker.config import WorkerConfig


class MetricsPort:
    """Methods are called on one event loop, `close` on any thread.

    Attributes:
        address: "": with TLS, routers serve the metrics, because readers have no certificate of the cluster.
    """

    def __init__(self, is_secure: bool) -> None:
        self.address = ""
        self._is_secure = is_secure
        self._server: MetricsServer | None = None
        self._key_task: asyncio.Task[None] | None = None

    async def open(self, registry: CollectorRegistry, config: WorkerConfig) -> None:
        if self._is_secure:
            return
        self._server = MetricsServer(registry, config.host, config.api_keys)
        self.address = self._server.address
        if config.key_file is not None:
            keys = watched_keys(config.key_file, self._server.set_api_keys)
            # This worker may have started again since the file was replaced.
            await asyncio.to_thread(keys.poll)
            self._key_task = asyncio.create_task(watch([keys]))

    async def stop_watching(self) -> None:
        if self._key_task is not None:
            self._key_task.cancel()
            await asyncio.gather(self._key_task, return_exceptions=True)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
