"""Collectives over gloo, for ranks that compute on CPUs."""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, ProcessGroupGloo, Work

from tandem.engine.collectives.base import Collectives
from tandem.engine.ranks.config import RankConfig


class GlooCollectives(Collectives):
    """Connects the ranks of one host over loopback.

    Makes no default process group, so several ranks may be threads of one process.

    Args:
        store: path of a file that all ranks open, which does not exist before.
        timeout_s: longest wait for the other ranks, in seconds, also for their start.

    Raises:
        RuntimeError: a rank did not come in time. Operations raise it if a rank is lost or late.
    """

    def __init__(self, ranks: RankConfig, store: Path, timeout_s: float) -> None:
        self.ranks = ranks
        self._failure: str | None = None
        self._ended = threading.Event()
        gloo: Any = ProcessGroupGloo  # PyTorch's stubs lack most of its methods.
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        # PyTorch opens the store by its path again and again, for the last time when it is destroyed. By then the given
        # path can be gone, or name another file. So the descriptor stays open until the process ends.
        descriptor = os.open(store, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        files = FileStore(f"/proc/self/fd/{descriptor}", ranks.degree)
        files.set_timeout(timedelta(seconds=timeout_s))
        self._gloo = gloo(files, ranks.rank, ranks.degree, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        # Gloo's own sum depends on its algorithm. This one has the same bits on all ranks and in every release.
        parts = [torch.empty_like(x) for _ in range(self.ranks.degree)]
        self._run(lambda: self._gloo.allgather([parts], [x]))
        total = parts[0].float() if x.dtype in (torch.bfloat16, torch.float16) else parts[0]
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def gather_columns(
        self, part: torch.Tensor, num_columns: int, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        shares = [RankConfig(rank, self.ranks.degree).vocabulary(num_columns) for rank in range(self.ranks.degree)]
        num_rows, num_held = part.shape
        assert num_held == len(shares[self.ranks.rank])
        # Gloo sends equal sizes only, and the last ranks may hold fewer columns.
        sent = part.new_zeros(num_rows, len(shares[0]))
        sent[:, :num_held] = part
        received = [torch.empty_like(sent) for _ in shares] if self.ranks.is_leader else []
        self._run(lambda: self._gloo.gather(received, sent, 0))
        if not self.ranks.is_leader:
            return None
        whole = part.new_empty(num_rows, num_columns) if out is None else out
        for columns, piece in zip(shares, received, strict=True):
            whole[:, columns.start : columns.stop] = piece[:, : len(columns)]
        return whole

    def broadcast(self, x: torch.Tensor) -> None:
        self._run(lambda: self._gloo.broadcast(x, 0))

    def check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def abort(self) -> None:
        self._failure = self._failure or "the ranks' operations were aborted"
        self._ended.set()

    def close(self) -> None:
        self._gloo.shutdown()

    def _run(self, start: Callable[[], Work]) -> None:
        ended = threading.Event()
        self._ended = ended
        self.check()
        try:
            work = start()
            # Gloo's abort does not release a thread that is in Work.wait().
            work.get_future().add_done_callback(lambda _: ended.set())
            ended.wait()
            self.check()
            work.wait()
        except RuntimeError as error:
            self._failure = self._failure or f"rank {self.ranks.rank} lost another rank: {error}"
            raise RuntimeError(self._failure) from error
