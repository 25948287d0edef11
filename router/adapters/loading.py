"""Loads and unloads adapters while the cluster serves."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection
from weakref import WeakValueDictionary

from tandem.adapters import MAX_LOADED, AdapterRef, check_adapter_name
from tandem.messages import AdapterChecked, CheckAdapter
from tandem.router.adapters.names import AdapterNames
from tandem.router.errors import InvalidRequestError, UnavailableError, UnknownModelError, mistakes_in
from tandem.router.workers.worker import Worker
from tandem.router.workers.worker_registry import WorkerRegistry

# Limit of a worker's check, in seconds: it reads all tensors.
CHECK_TIMEOUT_S = 120.0
MAX_PATH_LEN = 3000


async def _alone() -> None:
    """Shares with no other router."""


class AdapterLoading:
    """A name is served only after a worker of each host has read the adapter, and found the same content.

    Attributes:
        share: tells the other routers the names, and returns when those that can be reached know.
    """

    share: Callable[[], Awaitable[None]]

    def __init__(
        self,
        names: AdapterNames,
        workers: WorkerRegistry,
        model_names: Collection[str],
    ) -> None:
        """Args: model_names: names of the served model."""
        self._names = names
        self._workers = workers
        self._model_names = model_names
        self.share = _alone
        self._numbers = itertools.count()
        self._checks: dict[str, tuple[Worker, asyncio.Future[AdapterChecked]]] = {}
        # Loads of one name come one after another.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load(self, name: str, path: str, *, in_place: bool = False) -> AdapterRef:
        """Makes an adapter known by a name. Loading the same content again has no effect.

        Args:
            in_place: another content of the name may be replaced.

        Raises:
            InvalidRequestError: the adapter cannot be served, or the name is taken.
            UnavailableError: no worker could check it.
        """
        with mistakes_in("lora_name"):
            check_adapter_name(name)
        if name in self._model_names:
            raise InvalidRequestError(f"{name!r} is a name of the served model: choose another one", "lora_name")
        if not path or len(path) > MAX_PATH_LEN or "\0" in path:
            raise InvalidRequestError("lora_path must be the path of a PEFT directory", "lora_path")
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            adapter = await self._check(path)
            known = self._names.find(name)
            if known is not None and known.content_hash != adapter.content_hash and not in_place:
                raise InvalidRequestError(
                    f"adapter {name!r} is loaded with another content, from {known.path}: unload it first, or "
                    "load in place (load_inplace, --in-place)",
                    "lora_name",
                )
            if known is None and len(self._names.loaded()) >= MAX_LOADED:
                raise InvalidRequestError(f"{MAX_LOADED} adapters are loaded already: unload one first", "lora_name")
            if known != adapter:
                self._names.change(name, adapter)
            await self.share()
        return adapter

    async def unload(self, name: str) -> None:
        """Raises UnknownModelError: there is no adapter of this name."""
        if self._names.find(name) is None:
            raise UnknownModelError(f"no adapter {name!r} is loaded", "lora_name")
        self._names.change(name, None)
        await self.share()

    def receive(self, worker: Worker, message: AdapterChecked) -> None:
        asked, answer = self._checks.get(message.check_id, (None, None))
        if asked is worker and answer is not None and not answer.done():
            answer.set_result(message)

    def lose_worker(self, worker: Worker) -> None:
        for asked, answer in self._checks.values():
            if asked is worker and not answer.done():
                answer.set_exception(UnavailableError(f"worker {worker.worker_id} was lost; try again"))

    async def _check(self, path: str) -> AdapterRef:
        # One of each host: they may see different files.
        by_host = {worker.host: worker for worker in self._workers if self._workers.stays(worker)}
        if not by_host:
            raise UnavailableError("no worker is connected that could check the adapter; try again later")
        answers = await asyncio.gather(*(self._ask(worker, path) for worker in by_host.values()))
        found: dict[str, AdapterRef] = {}
        for worker, answer in zip(by_host.values(), answers, strict=True):
            if answer.adapter is None:
                where = f" at {worker.worker_id}" if len(by_host) > 1 else ""
                raise InvalidRequestError(f"the adapter cannot be served{where}: {answer.refusal}", "lora_path")
            found[answer.adapter.content_hash] = answer.adapter
        if len(found) > 1:
            raise InvalidRequestError(f"{path} holds different adapters on different hosts", "lora_path")
        return next(iter(found.values()))

    async def _ask(self, worker: Worker, path: str) -> AdapterChecked:
        check_id = str(next(self._numbers))
        answer: asyncio.Future[AdapterChecked] = asyncio.get_running_loop().create_future()
        self._checks[check_id] = worker, answer
        worker.send([CheckAdapter(check_id, path)])
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise UnavailableError(
                f"worker {worker.worker_id} has not checked the adapter within {CHECK_TIMEOUT_S:g} s; try again"
            ) from None
        finally:
            del self._checks[check_id]
