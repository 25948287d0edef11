"""The cluster's own Ray: on loopback only, and with a token, because callers of an open Ray can run code."""

import contextlib
import fcntl
import ipaddress
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import grpc

from tandem.deploy.host.run_record import ray_token_path
from tandem.deploy.on_ray.bare_node import AliveNodes, bare_node
from tandem.deploy.on_ray.ray_base import RayBase, StartError
from tandem.deploy.on_ray.ray_module import (
    FIRST_VERSION,
    node,
    ray,
    ray_constants,
    ray_worker,
    services,
    settings_reset,
    state,
    utils,
)
from tandem.deploy.on_ray.ray_probe import call_ray
from tandem.deploy.on_ray.ray_signals import own_signals
from tandem.deploy.on_ray.session_folders import mark_session, remove_ended_sessions, remove_old_logs
from tandem.private_directory import check_private
from tandem.processes import ProcessId

logger = logging.getLogger(__name__)

# Only for Ray's bookkeeping: requests and KV pages never enter the store.
OBJECT_STORE_BYTES = 80 * 2**20
# Start of Ray's paragraph on a dead process.
_DEATH = "A worker died or was killed"
# Some of Ray's messages are thousands of characters long.
_MAX_MESSAGE_LEN = 400


class LocalRay(RayBase):
    """A Ray on this host, one at a time per process."""

    def __init__(self, directory: Path) -> None:
        """Args: directory: private to this user; holds the token and, in `ray`, logs and sockets."""
        self._directory = directory
        self._token_path = ray_token_path(directory, ProcessId.of(os.getpid()))
        # Locked: tmpfiles.d(5) must not remove the token, which Ray's later processes read too.
        self._held: int | None = None
        self._token_file: TextIO | None = None
        self._session: Path | None = None
        self._session_mark: TextIO | None = None

    @property
    def log_directory(self) -> str:
        # The latest session may be another cluster's.
        return f"{self._session or Path(self._temp_directory(), 'session_latest')}/logs"

    def start(self, num_processes: int) -> None:
        """Starts Ray and checks that it refuses calls without a token.

        Raises:
            ValueError: the version of Ray, or the environment, leaves it open.
            OSError: the token cannot be written.
            StartError: Ray did not start.
        """
        reset_settings = settings_reset()
        token = secrets.token_hex(32)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(self._directory)
        self._held = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._held, fcntl.LOCK_SH)
        self._token_path.unlink(missing_ok=True)
        self._token_file = open(self._token_path, "x", opener=_private)  # noqa: SIM115
        # The lock tells other starts, also in other containers, that the token is in use.
        fcntl.flock(self._token_file, fcntl.LOCK_SH)
        self._token_file.write(token)
        self._token_file.flush()
        # This variable would take precedence over the file.
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(self._token_path)
        os.environ["RAY_AUTH_MODE"] = "token"
        reset_settings()
        rephrase_errors()
        with own_signals(utils, ray_constants), bare_node(node.Node, services, _watch_nodes):
            try:
                ray.init(
                    address="local",
                    num_cpus=num_processes,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=self._temp_directory(),
                )
            except (ValueError, OSError):
                raise
            except Exception as error:
                # A plain Exception: Ray's node is late.
                raise StartError(
                    f"Ray did not start: {error}; if this host does not have too much else to do, "
                    f"{self.log_directory} says more"
                ) from error
        check_closed(ray.get_runtime_context().gcs_address)
        assert ray_worker._global_node is not None
        self._session = Path(ray_worker._global_node.get_session_dir_path())
        self._session_mark = mark_session(self._session)
        # Hundreds of folders take seconds.
        threading.Thread(target=self._remove_sessions, name="remove-sessions", daemon=True).start()

    def create(self, actor_class: Any, order: Any) -> Any:
        remove_old_logs(Path(self.log_directory))
        return super().create(actor_class, order)

    def stop(self) -> None:
        ray.shutdown()
        # A later Ray of this process would need the file.
        if os.environ.get("RAY_AUTH_TOKEN_PATH") == str(self._token_path):
            del os.environ["RAY_AUTH_TOKEN_PATH"]
        # `start` has already reported an unusable path.
        with contextlib.suppress(OSError):
            self._token_path.unlink()
        if self._token_file is not None:
            self._token_file.close()
            self._token_file = None
        if self._session_mark is not None:
            self._session_mark.close()
            self._session_mark = None
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def free(self) -> dict[str, Mapping[str, float]]:
        return {"": ray.available_resources()}

    def num_nodes(self) -> int:
        return 1

    def actor_options(self) -> dict[str, Any]:
        return {"num_cpus": 0}

    def _remove_sessions(self) -> None:
        remove_ended_sessions(Path(self._temp_directory()), are_all_ours=not os.environ.get("RAY_TMPDIR"))

    def _temp_directory(self) -> str:
        own = os.environ.get("RAY_TMPDIR")
        return f"{own}/ray" if own else f"{self._directory}/ray"


def _watch_nodes(gcs_address: str) -> AliveNodes:
    found = state.GlobalState()
    found._initialize_global_state(services._get_gcs_client_options(gcs_address))
    return lambda: {info["NodeID"] for info in found.node_table() if info["Alive"]}


def rephrase_errors() -> None:
    """Logs Ray's messages as one line each, except deaths of processes, which the supervisor logs."""

    def say(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        for message in data["lines"]:
            if not message.startswith(_DEATH):
                logger.warning("Ray: %s", " ".join(message.split())[:_MAX_MESSAGE_LEN])

    ray_worker.print_to_stdstream = say


def check_closed(address: str) -> None:
    """Raises ValueError: the Ray is not on loopback, or answers calls without a token."""
    host = address.rpartition(":")[0].strip("[]")
    if not ipaddress.ip_address(host).is_loopback:
        raise ValueError(f"Ray {ray.__version__} listens at {address}, which is not loopback")
    try:
        call_ray(address)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return
        raise ValueError(f"Ray at {address} does not say whether it asks for a token: {error.code().name}") from error
    raise ValueError(
        f"Ray {ray.__version__} answers calls without a token, so any user of this host could run code here; "
        f"install ray>={FIRST_VERSION}"
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
