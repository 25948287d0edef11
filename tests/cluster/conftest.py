"""Tiny model, its oracle, and served clusters."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.client import ClientTls, TandemClient
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.launcher import Cluster
from tandem.deploy.on_ray.hosted_ray import HostedRay, namespace_of
from tandem.deploy.on_ray.joined_ray import JoinedRay
from tandem.rpc.auth import cluster_metadata
from tandem.sampling_params import SamplingParams
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.inside import open_inside
from tests.conftest import Certificates

VOCAB_SIZE = 300
# Six, so that many outputs end early.
EOS_TOKEN_IDS = [256, 257, 258, 259, 260, 261]
CHUNK_SIZE = 48
MAX_MODEL_LEN = 512
# Small enough that the tests' prompts evict each other.
NUM_PAGES = 128
RESTART_S = 80.0
API_KEYS = ("first-key", "second-key")


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return value


def random_ids(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


class Oracle:
    """Greedy decoding by transformers, in float32."""

    def __init__(self, model_dir: Path) -> None:
        import tokenizers
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval()
        self._eos_token_ids = self._model.generation_config.eos_token_id
        self.tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def generate(self, prompt_ids: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """Return the output ids, including the end-of-sequence token."""
        import torch

        self._model.generation_config.eos_token_id = None if ignore_eos else self._eos_token_ids
        prompt = torch.tensor([list(prompt_ids)])
        # Several threads would contend with the workers.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        torch.set_num_threads(num_threads)
        return output[0, len(prompt_ids) :].tolist()

    def confirms(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> bool:
        """Return whether a long output is greedy, in one forward pass."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt_ids, *output_ids]])).logits[0]
        return logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist() == list(output_ids)

    def may_draw(self, prompt_ids: Sequence[int], output_ids: Sequence[int], sampling: SamplingParams) -> bool:
        """Return whether each token may be drawn from transformers' logits, in one forward pass.

        Batches and attempts round logits differently. Where a random number lies at two tokens' border, both are right.
        """
        from benchmarks.soak.possible_tokens import possible_tokens
        from tandem.engine.randomness import uniform
        from tandem.engine.sampler import process_logits
        from tandem.engine.token_sequence import TokenSequence

        rows = self.logits([*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1]
        for index, token_id in enumerate(output_ids):
            known = TokenSequence([*prompt_ids, *output_ids[:index]], len(prompt_ids), [], sampling=sampling)
            row = process_logits(rows[index : index + 1], [known])[0]
            if not possible_tokens(row, sampling, uniform(sampling.seed, known.length))[token_id]:
                return False
        return True

    def confirms_sampled(self, prompt_ids: Sequence[int], output_ids: Sequence[int], **params: Any) -> bool:
        """Return whether our sampler draws an output from transformers' logits, in one forward pass.

        Args:
            params: as in SamplingParams.
        """
        from tandem.engine.sampler import sample
        from tandem.engine.token_sequence import TokenSequence

        rows = self.logits([*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1]
        sampling = SamplingParams(len(output_ids), **params)
        sequence = TokenSequence(list(prompt_ids), len(prompt_ids), [], sampling=sampling)
        for row, token_id in zip(rows, output_ids, strict=True):
            if int(sample(row[None], [sequence]).token_ids) != token_id:
                return False
            sequence.token_ids.append(token_id)
        return True

    def logits(self, token_ids: Sequence[int]) -> Any:
        """Return float32 [len(token_ids), vocab_size]."""
        import torch

        with torch.inference_mode():
            return self._model(torch.tensor([list(token_ids)])).logits[0]

    def embedding(self, token_ids: Sequence[int]) -> list[float]:
        """Return the last token's last hidden state, scaled to length 1."""
        import torch

        with torch.inference_mode():
            state = self._model.model(torch.tensor([list(token_ids)])).last_hidden_state[0, -1]
        return (state / state.norm()).tolist()

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)


@dataclass
class Answer:
    """A collected stream; `last` is its final message."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    last: pb.GenerateResponse = field(default_factory=pb.GenerateResponse)

    def add(self, response: pb.GenerateResponse) -> None:
        assert response.index == len(self.token_ids)
        assert not self.last.finish_reason, "nothing may follow the last message"
        self.token_ids += response.token_ids
        self.text += response.text
        self.last = response


class ServedCluster:
    """Supervised cluster in this process's Ray, and a client with the first API key."""

    def __init__(self, config: ClusterConfig, tls: ClientTls | None = None) -> None:
        self._joined, hosted = None, None
        if config.ray_address:
            # This process stands in for the supervisor actor.
            self._joined = JoinedRay(config.ray_address, namespace_of(config.cluster_name))
            self._joined.start(0)
            hosted = HostedRay(config.ray_address, config.cluster_name, spans_nodes=config.spans_nodes)
        self.cluster = Cluster(config, lambda part, doing: None, hosted=hosted)
        self.failure: Exception | None = None
        self._stopping = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise)
        try:
            self.cluster.start()
        except BaseException:
            self.cluster.stop()
            raise
        self._supervisor.start()
        self.client = TandemClient(self.cluster.addresses.grpc, "".join(config.api_keys[:1]), tls)

    def close(self) -> None:
        self.client.close()
        self._stopping.set()
        self._supervisor.join()
        self.cluster.stop()
        if self._joined is not None:
            self._joined.stop()
        assert self.failure is None

    def _supervise(self) -> None:
        try:
            self.cluster.supervise(self._stopping)
        except Exception as error:
            self.failure = error

    def request(self, prompt_ids: Sequence[int], **sampling: Any) -> pb.GenerateRequest:
        sampling.setdefault("max_tokens", 24)
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=list(prompt_ids)), sampling=pb.SamplingParams(**sampling))

    def complete(self, prompt_ids: Sequence[int], **sampling: Any) -> Answer:
        answer = Answer()
        for response in self.client.generate(self.request(prompt_ids, **sampling), timeout_s=30.0):
            answer.add(response)
        assert answer.last.finish_reason
        return answer

    def wait_ready(self) -> None:
        wait_until(lambda: self.client.server_info().ready, RESTART_S, "the cluster is ready")

    def worker(self, worker_id: str) -> pb.WorkerStatus | None:
        return next((w for w in self.client.server_info().workers if w.worker_id == worker_id), None)

    def kill(self, worker_id: str, signum: signal.Signals = signal.SIGKILL) -> int:
        """Signal a worker's process and return its pid."""
        worker = self.worker(worker_id)
        assert worker is not None
        os.kill(worker.pid, signum)
        return worker.pid

    def integrity(self) -> dict[str, worker_pb2.IntegrityReport]:
        """Return integrity reports from the engine threads, not from heartbeats."""
        reports = {}
        for worker in self.client.server_info().workers:
            metadata = cluster_metadata(self.cluster.cluster_token)
            with open_inside(self.cluster, worker.address) as channel:
                admin = worker_pb2_grpc.WorkerAdminStub(channel)
                reports[worker.worker_id] = admin.CheckIntegrity(
                    worker_pb2.CheckIntegrityRequest(), timeout=5.0, metadata=metadata
                )
        return reports

    def wait_clean(self, within_s: float = 5.0) -> None:
        """Wait until all workers are idle without pages. Page accounts must be consistent throughout."""

        def is_clean() -> bool:
            reports = self.integrity()
            assert {r.violation for r in reports.values()} <= {""}
            stats = [r.stats for r in reports.values()]
            busy = sum(s.num_queued + s.num_running + s.num_locked_pages + s.num_leased_pages for s in stats)
            return not busy and not self.client.server_info().num_requests

        wait_until(is_clean, within_s, "all workers are idle and hold no page")
        for report in self.integrity().values():
            assert report.stats.num_free_pages + report.stats.num_cached_pages == report.stats.num_total_pages


class Clusters:
    """Reuses one cluster as long as consecutive tests want the same configuration."""

    def __init__(self) -> None:
        self._config: ClusterConfig | None = None
        self._served: ServedCluster | None = None

    def get(self, config: ClusterConfig, tls: ClientTls | None = None) -> ServedCluster:
        if self._served is None or config != self._config:
            self.close()
            self._config, self._served = config, ServedCluster(config, tls)
        self._served.wait_ready()
        return self._served

    def close(self) -> None:
        served, self._served = self._served, None
        if served is not None:
            served.close()


# Modules that share a cluster, in run order. A process keeps one cluster at a time, so a group stays in one process.
# The longest come first, to balance the processes.
GROUPS = (
    (
        "test_cluster",
        "test_greedy",
        "test_grpc_contract",
        "test_metrics",
        "test_sampling",
        "test_structured",
        "test_openai",
        "test_tracing",
        "test_bad_input",
        "test_fuzz",
        "test_embeddings",
    ),
    ("test_cli",),
    ("test_death",),
    ("test_routers", "test_restart", "test_cached_prefixes"),
    ("test_workers", "test_moves", "test_speculation"),
    ("test_internal_tls", "test_keys_and_tls", "test_bad_input_with_keys"),
)
STEMS = [stem for group in GROUPS for stem in group]


def pytest_configure() -> None:
    # Read when torch is imported: an oracle's threads would contend with the workers.
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: STEMS.index(item.path.stem) if item.path.stem in STEMS else len(STEMS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            stem = Path(nodeid.partition("::")[0]).stem
            return next((group[0] for group in GROUPS if stem in group), stem)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


def save_tiny_model(
    directory: Path, *, intermediate_size: int = 128, num_key_value_heads: int = 2, **settings: Any
) -> None:
    """Save a random two-layer Llama with grouped-query attention and byte tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=MAX_MODEL_LEN,
        # Large enough that outputs vary and the best token wins clearly.
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_IDS,
        **settings,
    )
    LlamaForCausalLM(config).float().save_pretrained(directory)
    save_byte_tokenizer(directory)


def save_byte_tokenizer(directory: Path) -> None:
    """Save a tokenizer of single bytes with the tiny models' end-of-sequence tokens, and a chat template."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<eos{i}>" for i in EOS_TOKEN_IDS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
    )


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_oracle(tiny_model_dir: Path) -> Oracle:
    return Oracle(tiny_model_dir)


@pytest.fixture(scope="session")
def tiny_config(tiny_model_dir: Path) -> ClusterConfig:
    return ClusterConfig(
        model=str(tiny_model_dir), num_pages=NUM_PAGES, chunk_size=CHUNK_SIZE, num_threads=1, grpc_port=0, http_port=0
    )


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.close()


@pytest.fixture
def tiny_pd(clusters: Clusters, tiny_config: ClusterConfig) -> Iterator[ServedCluster]:
    served = clusters.get(tiny_config)
    yield served
    served.wait_clean()


def wait_linked(served: ServedCluster) -> None:
    def are_linked() -> bool:
        workers = served.client.server_info().workers
        return len(workers) == 2 and all(w.alive and set(w.linked_to) - {w.worker_id} for w in workers)

    wait_until(are_linked, RESTART_S, "there are links both ways")


@pytest.fixture
def tiny_workers(clusters: Clusters, tiny_config: ClusterConfig) -> Iterator[ServedCluster]:
    """Two linked workers of both roles, whose steps check drafts wherever there are any."""
    served = clusters.get(replace(tiny_config, num_prefill=0, num_decode=0, num_any=2, speculation="ngram"))
    wait_linked(served)
    yield served
    served.wait_clean()


def keyed(config: ClusterConfig) -> ClusterConfig:
    return replace(config, api_keys=API_KEYS, max_requests_per_key=2, max_body_bytes=4096, worker_wait_timeout_s=2.0)


@pytest.fixture
def tiny_keyed(clusters: Clusters, tiny_config: ClusterConfig) -> Iterator[ServedCluster]:
    served = clusters.get(keyed(tiny_config))
    yield served
    served.wait_clean()


@pytest.fixture
def tiny_tls(clusters: Clusters, tiny_config: ClusterConfig, certificates: Certificates) -> Iterator[ServedCluster]:
    """TLS for clients, who need certificates, and between the processes, which ship pages over TCP."""
    tls: dict[str, Any] = {"tls_cert": certificates.cert, "tls_key": certificates.key, "tls_client_ca": certificates.ca}
    own = ClientTls(certificates.ca, certificates.client_cert, certificates.client_key)
    served = clusters.get(replace(tiny_config, internal_tls="on", transport="tcp", **tls), own)
    yield served
    served.wait_clean()


@pytest.fixture
def tiny_routers(clusters: Clusters, tiny_config: ClusterConfig) -> Iterator[ServedCluster]:
    """Two routers over a prefill and two decode workers. A drain ends before a long stream, which goes on elsewhere."""
    served = clusters.get(replace(tiny_config, num_decode=2, num_routers=2, routing="cache_aware", drain_timeout_s=1.0))
    yield served
    served.wait_clean()


@pytest.fixture
def tiny_both(clusters: Clusters, tiny_config: ClusterConfig) -> Iterator[ServedCluster]:
    served = clusters.get(replace(tiny_config, num_prefill=0, num_decode=0, num_both=1))
    yield served
    served.wait_clean()
