"""A fake of cupy's NCCL between two ends in one process, on the fake device."""

import ctypes
import secrets
import threading
import time
from collections import deque
from types import ModuleType
from typing import Any

from tests.fakes.cuda_device import stream_of

# Ends a call that would block forever, so that the test process exits.
BLOCKED_LIMIT_S = 20.0


class _Meeting:
    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.sent: deque[bytes] = deque()


class FakeNccl:
    """
    Attributes:
        communicators: all communicators, in order of creation.
        begin_error, abort_error: error raised on creation and on abort; None: none.
        peer_has_ended: when set, an end that waits for its peer learns that the peer is gone.
        abort_hangs: set while an abort never returns.
    """

    def __init__(self) -> None:
        self.communicators: list[Any] = []
        self.begin_error: Exception | None = None
        self.peer_has_ended = threading.Event()
        self.abort_error: Exception | None = None
        self.abort_hangs = threading.Event()
        self._meetings: dict[bytes, _Meeting] = {}

    def modules(self) -> dict[str, ModuleType]:
        cupy, cuda, nccl = (ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"))
        vars(nccl).update(
            NCCL_UINT8=1,
            NcclCommunicator=self._communicator_class(),
            get_unique_id=lambda: secrets.token_bytes(128),
        )
        vars(cuda)["nccl"], vars(cupy)["cuda"] = nccl, cuda
        return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}

    def _communicator_class(self) -> type:
        fake = self

        class NcclCommunicator:
            def __init__(self, num_ranks: int, unique_id: bytes, rank: int) -> None:
                assert num_ranks == 2 and len(unique_id) == 128
                self._meeting = fake._meetings.setdefault(unique_id, _Meeting())
                self._meeting.ranks.add(rank)
                self.aborted = False
                self.num_posted = 0
                fake.communicators.append(self)
                if fake.begin_error is not None:
                    raise fake.begin_error
                deadline = time.monotonic() + BLOCKED_LIMIT_S
                while len(self._meeting.ranks) < 2:
                    if fake.peer_has_ended.is_set() or time.monotonic() > deadline:
                        raise RuntimeError("remote process exited or there was a network error")
                    time.sleep(0.001)

            def check_async_error(self) -> None:
                """No error."""

            def send(self, address: int, num_bytes: int, dtype: int, peer: int, stream: int) -> None:
                def post() -> bool:
                    self._meeting.sent.append(ctypes.string_at(address, num_bytes))
                    return True

                self.num_posted += 1
                stream_of(stream).submit(post)

            def recv(self, address: int, num_bytes: int, dtype: int, peer: int, stream: int) -> None:
                def take() -> bool:
                    if self.aborted:
                        return True
                    if not self._meeting.sent:
                        return False
                    ctypes.memmove(address, self._meeting.sent.popleft(), num_bytes)
                    return True

                self.num_posted += 1
                stream_of(stream).submit(take)

            def abort(self) -> None:
                deadline = time.monotonic() + BLOCKED_LIMIT_S
                while fake.abort_hangs.is_set() and time.monotonic() < deadline:
                    time.sleep(0.001)
                self.aborted = True
                if fake.abort_error is not None:
                    raise fake.abort_error

        return NcclCommunicator
