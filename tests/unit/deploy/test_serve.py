"""Configuration errors end `tandem serve` with status 2 and one line, before any process starts."""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tandem.deploy import serve as serve_module
from tandem.deploy.cli.main import main
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.errors import ClusterError, ConfigurationError
from tandem.deploy.host.run_record import find_runs
from tandem.deploy.launcher import Cluster
from tandem.deploy.on_ray.ray_module import RayTaskError, ray
from tandem.deploy.serve import run_cluster, serve
from tandem.pagestore.server.disk.folder import Folder
from tests.conftest import Certificates
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA

BAD_INPUT = Path(__file__).parents[3] / "docs/bad-input.md"
PORTS = ("--grpc-port", "0", "--http-port", "0")


@pytest.fixture(autouse=True)
def unguarded(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the launcher in this process, and lets it start no process."""

    def run(main: Callable[[], int], *, stop_grace_s: float) -> int:
        return main()

    def no_ray(self: Cluster) -> None:
        raise AssertionError("nothing is to be started")

    monkeypatch.setattr(serve_module, "run_guarded", run)
    monkeypatch.setattr(serve_module, "default_directory", lambda: tmp_path_factory.mktemp("runs"))
    monkeypatch.setattr(Cluster, "_init_ray", no_ray)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Returns a model directory with all files that are checked before loading."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["serve", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tandem: ") and error.count("\n") == 1
    return error


def test_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model 'no-such-model' not found: give a directory" in refusal(capsys, "--model", "no-such-model", *PORTS)


def test_too_few_gpus_are_said_before_a_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Cluster, "_init_ray", lambda self: None)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 3.0, "GPU": 1.0})
    error = refusal(capsys, "--model", "no-such-model", "--device", "cuda", *PORTS)
    assert "takes 2 GPUs for 2 workers, with --workers-per-gpu 1, but 1 GPUs here; " in error
    assert "use fewer workers (--both 1 needs 1), let them share GPUs (--workers-per-gpu 2) or set --device to" in error
    error = refusal(capsys, "--model", "no-such-model", "--device", "cuda", "--workers-per-gpu", "2", *PORTS)
    assert "model 'no-such-model' not found" in error
    flags = ("--device", "cuda", "--decode", "2", "--workers-per-gpu", "2")
    assert "takes 2 GPUs for 3 workers" in refusal(capsys, "--model", "no-such-model", *flags, *PORTS)
    error = refusal(capsys, "--model", "no-such-model", "--device", "cuda", "--both", "1", *PORTS)
    assert "model 'no-such-model' not found" in error
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 3.0})
    error = refusal(capsys, "--model", "no-such-model", "--device", "cuda", "--both", "1", *PORTS)
    assert "none is visible here" in error


def test_more_threads_than_cpus_are_refused_before_a_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    error = refusal(capsys, "--model", "no-such-model", "--threads", "1000", *PORTS)
    assert "--threads is 1000, but this host has 3 CPUs for the cluster: use a --threads of at most 3, or none" in error
    assert "model 'no-such-model' not found" in refusal(capsys, "--model", "no-such-model", "--threads", "3", *PORTS)


def test_a_model_without_config_weights_or_tokenizer(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = str(tmp_path_factory.mktemp("empty"))
    assert f"{empty} is not a model directory: it has no config.json" in refusal(capsys, "--model", empty, *PORTS)
    assert f"{model_dir} has no safetensors weights" in refusal(capsys, "--model", str(model_dir), *PORTS)
    (model_dir / "tokenizer.json").unlink()
    error = refusal(capsys, "--model", str(model_dir), "--load-format", "dummy", *PORTS)
    assert f"{model_dir} has no tokenizer.json" in error


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_drafter_that_cannot_draft(
    device: str,
    model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where nothing but the start of Ray would find it."""
    monkeypatch.setattr(ClusterConfig, "_check_speculation", lambda self: None)
    model = ("--model", str(model_dir), "--load-format", "dummy", "--device", device, *PORTS)
    error = refusal(capsys, *model, "--speculation", "draft:/no/such")
    assert "--speculation draft:/no/such names no drafter: model '/no/such' not found: give a directory" in error
    error = refusal(capsys, *model, "--speculation", "eagle:/no/such")
    assert "--speculation eagle:/no/such names no drafter: /no/such is not a directory" in error
    other = tmp_path_factory.mktemp("other")
    (other / "config.json").write_text(json.dumps(TINY_LLAMA))
    for directory, token in ((model_dir, "a"), (other, "b")):
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {token: 0}}}))
    error = refusal(capsys, *model, "--speculation", f"draft:{other}")
    assert f"{other} has another vocabulary than the model: token 0 is 'b', not 'a'" in error


def test_a_chat_template_that_cannot_be_used(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", str(model_dir), "--load-format", "dummy", *PORTS)
    error = refusal(capsys, *model, "--chat-template", str(tmp_path / "none.jinja"))
    assert f"cannot read the chat template {tmp_path}/none.jinja: No such file or directory" in error
    (tmp_path / "bad.jinja").write_text("{% if %}")
    error = refusal(capsys, *model, "--chat-template", str(tmp_path / "bad.jinja"))
    assert f"the chat template {tmp_path}/bad.jinja cannot be used" in error


# By the input of docs/bad-input.md: family, changes of config.json, experts in the weights.
BAD_EXPERTS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "mixture of experts that chooses more experts than it has": ("Qwen3Moe", {"num_experts_per_tok": 5}, []),
    "groups that do not divide the experts": ("Dots1", {"n_group": 3}, []),
    "dense layer beyond the last": ("Qwen2Moe", {"mlp_only_layers": [9]}, []),
    "queries and keys that are clipped": ("Olmoe", {"clip_qkv": 8.0}, []),
    "weights with fewer or more experts than config.json says": ("Qwen3Moe", {}, [f"{i}.up_proj" for i in range(6)]),
    "weights without experts of these names, or with one tensor for all experts of a layer": (
        "Qwen3Moe",
        {},
        ["gate_up_proj"],
    ),
    "weights that lack an expert's matrix": (
        "Qwen3Moe",
        {"mlp_only_layers": [0]},
        [f"{i}.{part}_proj" for i in range(4) for part in ("gate", "up", "down") if (i, part) != (3, "up")],
    ),
}


@pytest.mark.parametrize("name", BAD_EXPERTS)
def test_mixtures_of_experts_that_cannot_be_served(
    name: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, changes, stored = BAD_EXPERTS[name]
    config = {**TINY_LLAMA, **TINY_EXPERTS, "architectures": [f"{family}ForCausalLM"], **changes}
    (model_dir / "config.json").write_text(json.dumps(config))
    tensors = {f"model.layers.1.mlp.experts.{part}.weight": np.zeros((16, 16), np.float32) for part in stored}
    save_file(tensors, model_dir / "model.safetensors")
    assert documented(name, model_dir) in refusal(capsys, "--model", str(model_dir), *PORTS)


BAD_ROPES: dict[str, dict[str, Any]] = {
    "rotary embedding of an unsupported type": {"rope_type": "longrope", "factor": 4.0},
    "YaRN without a factor": {"rope_type": "yarn"},
    "YaRN that shortens the context": {"rope_type": "yarn", "factor": 0.5},
    "YaRN whose bounds are swapped": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32},
    "YaRN with an unknown key": {"rope_type": "yarn", "factor": 4.0, "finetuned": True},
}


@pytest.mark.parametrize("name", BAD_ROPES)
def test_rotary_embeddings_that_cannot_be_served(
    name: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model_dir / "config.json").write_text(json.dumps({**TINY_LLAMA, "rope_scaling": BAD_ROPES[name]}))
    save_file({}, model_dir / "model.safetensors")
    assert documented(name, model_dir) in refusal(capsys, "--model", str(model_dir), *PORTS)


def documented(name: str, model_dir: Path) -> str:
    """Return the message of a row of docs/bad-input.md."""
    (message,) = re.findall(rf"\| {name} \| 2 \| `(DIRECTORY[^`]*)` \|", BAD_INPUT.read_text())
    return message.replace("DIRECTORY", str(model_dir))


@pytest.mark.parametrize(("flag", "other"), [("--grpc-port", "--http-port"), ("--http-port", "--grpc-port")])
def test_a_port_in_use(flag: str, other: str, taken_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "--model", "never-looked-for", flag, str(taken_port), other, "0")
    assert f"cannot listen on 127.0.0.1:{taken_port}: Address already in use; choose another {flag}" in error


def test_an_address_that_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    # Reserved for documentation: on no host.
    assert main(["serve", "--model", "m", "--host", "192.0.2.77", *PORTS]) == 2
    assert "choose another --host" in capsys.readouterr().err


def test_a_pool_that_does_not_fit(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dummy = ("--model", str(model_dir), "--load-format", "dummy", *PORTS)
    error = refusal(capsys, *dummy, "--num-pages", "9999999999")
    assert error.startswith("tandem: 2 pools of 9999999999 pages of ")
    assert "MiB of memory are free; use a --num-pages of at most" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--routing", "no_such_package.policies:Mine"),
            "no_such_package.policies:Mine cannot be imported: No module named 'no_such_package'; install it",
        ),
        (
            ("--eviction", "json:JSONDecoder"),
            "json:JSONDecoder must be a class that derives from tandem.engine.kvcache.eviction.base.EvictionPolicy",
        ),
    ],
)
def test_classes_of_ones_own_that_cannot_be_used(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "--model", "never-looked-for", *PORTS, *flags).startswith(f"tandem: {message}")


def test_a_length_that_is_too_large(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dummy = ("--model", str(model_dir), "--load-format", "dummy", *PORTS)
    error = refusal(capsys, *dummy, "--max-model-len", "65")
    assert "--max-model-len 65 is above the model's own limit of 64; use a smaller --max-model-len" in error
    error = refusal(capsys, *dummy, "--max-model-len", "64", "--num-pages", "2")
    assert "2 pages of 16 tokens hold 32 tokens, fewer than --max-model-len 64; use a larger --num-pages" in error


def test_tls_files(certificates: Certificates, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", "never-looked-for", *PORTS, "--tls-cert", certificates.cert, "--tls-key")
    assert "the TLS key absent.pem cannot be read" in refusal(capsys, *flags, "absent.pem")
    assert "does not belong to the certificate" in refusal(capsys, *flags, certificates.client_key)


def test_certificates_of_the_inside_are_tried_before_anything_starts(
    certificates: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--internal-tls-ca", certificates.ca, "--internal-tls-cert", certificates.cert)
    error = refusal(capsys, "--model", "never-looked-for", *PORTS, *files, "--internal-tls-key", certificates.key)
    assert "be for the name cluster.tandem.internal" in error and "certificate is not valid for" in error


@pytest.mark.parametrize(
    ("wanted", "num_nodes", "is_on"),
    [("auto", 1, False), ("auto", 2, True), ("on", 1, True), ("off", 2, False)],
)
def test_the_inside_is_encrypted_by_itself_where_ray_has_several_nodes(
    wanted: str, num_nodes: int, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(ClusterConfig("m", internal_tls=wanted), lambda part, doing: None)
    monkeypatch.setattr(cluster._ray, "num_nodes", lambda: num_nodes)
    assert cluster._is_tls_wanted() is is_on


class FakeRay:
    """Answers every call with one error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def get(self, ref: Any, timeout: float) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RayTaskError("start", "", ValueError("the weights are corrupt")), ConfigurationError),
        (RayTaskError("start", "", RuntimeError("a bug")), ClusterError),
        (ray.exceptions.GetTimeoutError("too slow"), ClusterError),
        (ray.exceptions.ActorDiedError(), ClusterError),
    ],
)
def test_a_worker_that_refuses_is_told_from_one_that_fails(
    error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.deploy.supervise.processes.ray.get", FakeRay(error).get)
    cluster = Cluster(ClusterConfig("m"), lambda part, doing: None)
    with pytest.raises(ClusterError, match="prefill-0: ") as caught:
        cluster._processes.get(object(), 1.0, "prefill-0")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("ray_address", "message"),
    [
        ("", "^no process for both-1 within 0 s$"),
        ("127.0.0.1:6379", "both-1 within 0 s: other jobs may use the resources of the Ray at 127.0.0.1:6379$"),
    ],
)
def test_a_process_that_ray_never_starts_is_not_waited_for(
    ray_address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clusters may join a Ray at once, with room for one."""
    cluster = Cluster(ClusterConfig("m", ray_address=ray_address), lambda part, doing: None)

    class Actor:
        def __init__(self, name: str) -> None:
            self.progress, self.name = self, name

        def remote(self) -> str:
            return self.name

    def wait(refs: list[str], **_: Any) -> tuple[list[str], list[str]]:
        time.sleep(0.01)
        return [ref for ref in refs if ref == "both-0"], []

    monkeypatch.setattr("tandem.deploy.supervise.processes.PROCESS_START_TIMEOUT_S", 0.2)
    monkeypatch.setattr("tandem.deploy.supervise.processes.ray.wait", wait)
    monkeypatch.setattr("tandem.deploy.supervise.processes.ray.get", lambda ref, timeout: "loading")
    names = ("both-0", "both-1")
    processes = cluster._processes
    processes.worker_plans = dict.fromkeys(names)  # type: ignore[assignment]
    processes.actors = {name: Actor(name) for name in names}
    with pytest.raises(ClusterError, match=message):
        processes.wait_for({f"loaded {name}": name for name in names})


@pytest.mark.parametrize(
    ("log_dir", "log"), [("", "/ray/session_latest/logs"), ("/var/log/cluster", " /var/log/cluster/prefill-0.log")]
)
def test_where_the_log_of_a_process_that_died_is(log_dir: str, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.deploy.supervise.processes.ray.get", FakeRay(ray.exceptions.ActorDiedError()).get)
    cluster = Cluster(ClusterConfig("m", log_dir=log_dir), lambda part, doing: None)
    with pytest.raises(ClusterError, match=f"^prefill-0: its process died;.*{log} says why$"):
        cluster._processes.get(object(), 1.0, "prefill-0")


@pytest.mark.parametrize(("error", "status"), [(ConfigurationError("x"), 2), (ClusterError("x"), 1)])
def test_exit_status(error: Exception, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Cluster) -> None:
        raise error

    monkeypatch.setattr(Cluster, "start", start)
    assert run_cluster(ClusterConfig("m"), lambda cluster, stop: 0) == status


@pytest.fixture
def own_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("made_of_it", ["passed on", "another status", "nothing, and goes on", "nothing, and is over"])
def test_a_stop_that_comes_during_the_start_is_no_failure(
    made_of_it: str, own_sigterm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may handle the stop in any of these ways."""

    def start(self: Cluster) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)
        except SystemExit:
            if made_of_it == "passed on":
                raise
            if made_of_it == "another status":
                raise SystemExit(1) from None
        if made_of_it == "nothing, and goes on":
            self._on_progress("both-0", "importing")
            raise AssertionError("the start goes on")

    def use(cluster: Cluster, stop: object) -> int:
        raise AssertionError("a cluster that was stopped is used")

    monkeypatch.setattr(Cluster, "start", start)
    assert run_cluster(ClusterConfig("m"), use) == 0


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "gpu-7.example.org"}, True),
        ({"host": "::"}, True),
        ({"host": "0.0.0.0", "api_keys": ("key",)}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "127.3.0.1"}, False),
        ({"host": "localhost"}, False),
        # Only clients with certificates are accepted.
        ({"host": "0.0.0.0", "tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}, False),
    ],
)
def test_an_open_address_without_keys_is_warned_of(
    options: dict[str, Any], warns: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_module, "run_guarded", lambda main, *, stop_grace_s: 0)
    assert serve(ClusterConfig("m", **options)) == 0
    assert ("WARNING" in capsys.readouterr().err) == warns


def test_the_guard_waits_for_longer_than_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    graces: list[float] = []
    monkeypatch.setattr(serve_module, "run_guarded", lambda main, *, stop_grace_s: graces.append(stop_grace_s) or 0)
    serve(ClusterConfig("m", drain_timeout_s=100.0))
    assert graces == [120.0]


def test_commands_elsewhere_are_told_the_whole_path_of_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    monkeypatch.setattr(serve_module, "default_directory", lambda: runs)
    monkeypatch.setattr(Cluster, "start", lambda self: None)
    monkeypatch.chdir(tmp_path)

    def use(cluster: Cluster, stop: threading.Event) -> int:
        (run,) = find_runs(runs)
        assert run.about.log_dir == str(tmp_path / "logs")
        return 0

    assert run_cluster(ClusterConfig("m", log_dir="logs"), use, is_named=True) == 0


def test_folders_that_no_page_store_can_use(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = tmp_path / "pages"
    folder = Folder(pages)
    store = ("--model", str(model_dir), *PORTS, "--store-memory", "1MiB", "--store-disk")
    assert f"{pages} is in use by another page store" in refusal(capsys, *store, f"{pages}:1GiB")
    folder.close()
    pages.chmod(0o755)
    assert "give it owner" in refusal(capsys, *store, f"{pages}:1GiB")
    assert "/proc/pages cannot be used as a folder of pages (" in refusal(capsys, *store, "/proc/pages:1GiB")
    too_large = refusal(capsys, *store, f"{tmp_path / 'own'}:1000000TiB")
    assert "--store-disk may take 1024000000.00 GiB in " in too_large and " GiB are free there" in too_large
