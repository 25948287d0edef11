"""Every setup gives the tokens of transformers, and one output per seed."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.v1 import inference_pb2 as pb
from tests.cluster.conftest import MAX_MODEL_LEN, VOCAB_SIZE, Answer, Clusters, Oracle, ServedCluster
from tests.cluster.faults import LiveStream, wait_whole

TIMEOUT_S = 240.0
TEXTS = (
    "The old lighthouse stood at the edge of the",
    "def fibonacci(n):\n    ",
    "Q: What is the capital of France?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Grüße aus München! Straße, Größe, Übermut",
    "日本語の文章を書いてください。",
    "Привет, как дела? 🙂🎉 и ещё",
    "a",
    "\n\n\t  leading blanks",
)
STEM = "In a village by the sea there lived a clockmaker who had never once been late. Every morning he wound "
ENDS = ("the big clock", "his watch", "nothing at all", "the big clock on the tower and")
CHATS = (
    [("user", "Hello!")],
    [("system", "You answer in one word."), ("user", "What colour is the sky?")],
    [("user", "Name a river."), ("assistant", "The Danube."), ("user", "And a mountain, bitte: größer!")],
)


@dataclass
class Case:
    """A prompt and its greedy output."""

    request: pb.GenerateRequest
    prompt_ids: list[int]
    output_ids: list[int]


@dataclass(frozen=True)
class Setup:
    """`pool_tokens` is small, so that decode workers run out of pages."""

    model: str
    num_prefill: int
    num_decode: int
    page_size: int
    chunk_size: int
    transport: str
    pool_tokens: int

    def __str__(self) -> str:
        pair = f"{self.num_prefill}P{self.num_decode}D"
        return f"{self.model}-{pair}-page{self.page_size}-chunk{self.chunk_size}-{self.transport}"

    def config(self, model_dir: Path) -> ClusterConfig:
        return ClusterConfig(
            model=str(model_dir),
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            page_size=self.page_size,
            num_pages=self.pool_tokens // self.page_size,
            max_model_len=self.pool_tokens,
            chunk_size=self.chunk_size,
            transport=self.transport,
            num_threads=1,
            grpc_port=0,
            http_port=0,
        )


def slow(setup: Setup) -> Any:
    return pytest.param(setup, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id=str(setup))


TINY = Setup("tiny", 2, 2, 1, 7, "tcp", MAX_MODEL_LEN)
# Pairwise coverage of all dimensions.
SETUPS = [
    pytest.param(TINY, id=str(TINY)),
    slow(Setup("tiny", 1, 1, 1, 13, "shared_memory", MAX_MODEL_LEN)),
    slow(Setup("tiny", 1, 1, 16, 33, "tcp", MAX_MODEL_LEN)),
    slow(Setup("tiny", 2, 2, 16, 37, "shared_memory", MAX_MODEL_LEN)),
    slow(Setup("smollm2", 1, 1, 1, 129, "shared_memory", 1600)),
    slow(Setup("smollm2", 1, 1, 16, 251, "tcp", 1600)),
    slow(Setup("smollm2", 2, 2, 1, 97, "tcp", 1600)),
    slow(Setup("smollm2", 2, 2, 16, 61, "shared_memory", 1600)),
]


@dataclass
class Model:
    model_dir: Path
    oracle: Oracle
    cases: list[Case] = field(default_factory=list)

    def add(self, request: pb.GenerateRequest, prompt_ids: Sequence[int], max_tokens: int) -> None:
        self.cases.append(Case(request, list(prompt_ids), self.oracle.generate(prompt_ids, max_tokens)))

    def add_text(self, text: str, max_tokens: int) -> None:
        self.add(pb.GenerateRequest(text=text), self.oracle.tokenizer.encode(text).ids, max_tokens)

    def add_ids(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        self.add(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt_ids)), prompt_ids, max_tokens)


@dataclass
class Matrix:
    setup: Setup
    served: ServedCluster
    model: Model
    max_tokens: int = 16

    def ask(self, case: Case) -> Answer:
        request = pb.GenerateRequest()
        request.CopyFrom(case.request)
        request.sampling.max_tokens = self.max_tokens
        answer = Answer()
        for response in self.served.client.generate(request, timeout_s=TIMEOUT_S):
            answer.add(response)
        return answer

    def check(self, case: Case, answer: Answer) -> None:
        assert answer.token_ids == case.output_ids
        assert answer.text == self.model.oracle.decode(case.output_ids)
        assert answer.last.usage.prompt_tokens == len(case.prompt_ids)

    def sampled(self, prompt_ids: Sequence[int], seed: int, max_tokens: int) -> LiveStream:
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.8, "seed": seed, "ignore_eos": True}
        return LiveStream(self.served, prompt_ids, timeout_s=TIMEOUT_S, **sampling)


def random_ids(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(10, VOCAB_SIZE - 50) for _ in range(num_tokens)]


@pytest.fixture(scope="module")
def tiny_model(tiny_model_dir: Path, tiny_oracle: Oracle) -> Model:
    model = Model(tiny_model_dir, tiny_oracle)
    rng = random.Random(11)
    for text in (*TEXTS, *(STEM + end for end in ENDS), STEM * 4):
        model.add_text(text, 16)
    for num_tokens in (1, 2, 15, 16, 17, 33, 64, 129, 300, 480):
        model.add_ids(random_ids(rng, num_tokens), 16)
    return model


@pytest.fixture(scope="module")
def smollm2_model(smollm2_dir: Path) -> Model:
    from transformers import AutoTokenizer

    model = Model(smollm2_dir, Oracle(smollm2_dir))
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    for text in (*TEXTS, *(STEM + end for end in ENDS)):
        model.add_text(text, 16)
    for messages in CHATS:
        prompt: Any = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            add_generation_prompt=True,
            return_dict=True,
        )
        chat = pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])
        model.add(pb.GenerateRequest(chat=chat), prompt["input_ids"], 16)
    long_ids = model.oracle.tokenizer.encode(
        "".join(f"{STEM}{end}, {i} times. " for i, end in enumerate(ENDS * 15))
    ).ids
    for num_tokens in (256, 333, 1500):
        model.add_ids(long_ids[:num_tokens], 16)
    model.add_ids(model.oracle.tokenizer.encode(TEXTS[5] * 20).ids[:160], 16)
    return model


@pytest.fixture(scope="module", params=SETUPS)
def matrix(request: pytest.FixtureRequest, clusters: Clusters) -> Iterator[Matrix]:
    setup: Setup = request.param
    model: Model = request.getfixturevalue(f"{setup.model}_model")
    served = clusters.get(setup.config(model.model_dir))
    wait_whole(served)
    yield Matrix(setup, served, model)
    served.wait_clean(within_s=20.0)


def test_single_requests_cold_and_warm(matrix: Matrix) -> None:
    assert len(matrix.model.cases) >= 20
    num_cached = 0
    for case in matrix.model.cases:
        matrix.check(case, matrix.ask(case))
        again = matrix.ask(case)
        matrix.check(case, again)
        num_cached += again.last.handover.prefill_cached_tokens
    assert num_cached > 0
    matrix.served.wait_clean()


def test_eight_at_once(matrix: Matrix) -> None:
    cases = random.Random(12).sample(matrix.model.cases, len(matrix.model.cases))
    with ThreadPoolExecutor(8) as pool:
        for case, answer in zip(cases, pool.map(matrix.ask, cases), strict=True):
            matrix.check(case, answer)
    matrix.served.wait_clean()


def test_eight_at_once_exceed_the_pools(matrix: Matrix) -> None:
    rng = random.Random(13)
    share = matrix.setup.pool_tokens * matrix.setup.num_decode // 8
    # Prompts are short, so that all eight overlap in decode for long.
    num_prompt, num_output = share // 3, share
    prompts = [random_ids(rng, num_prompt) for _ in range(8)]
    streams = [
        LiveStream(matrix.served, p, timeout_s=TIMEOUT_S, max_tokens=num_output, ignore_eos=True) for p in prompts
    ]
    answers = [stream.finish() for stream in streams]
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == num_output
        assert matrix.model.oracle.confirms(prompt_ids, answer.token_ids)
    # Some request was preempted and restarted.
    assert max(answer.last.handover.attempts for answer in answers) > 1
    matrix.served.wait_clean()


def test_seed_is_reproducible_alone_batched_and_restarted(matrix: Matrix) -> None:
    rng = random.Random(14)
    num_tokens = 60
    prompts = [random_ids(rng, rng.randint(1, 90)) for _ in range(6)]
    alone = [matrix.sampled(prompt, seed, num_tokens).finish().token_ids for seed, prompt in enumerate(prompts)]
    assert matrix.sampled(prompts[0], 99, num_tokens).finish().token_ids != alone[0]
    together = [matrix.sampled(prompt, seed, num_tokens) for seed, prompt in enumerate(prompts)]
    assert [stream.finish().token_ids for stream in together] == alone
    if matrix.setup.num_decode < 2:
        return
    interrupted = [matrix.sampled(prompt, seed, num_tokens) for seed, prompt in enumerate(prompts)]
    interrupted[-1].wait_tokens(5)
    matrix.served.kill("decode-1")
    answers = [stream.finish() for stream in interrupted]
    assert [answer.token_ids for answer in answers] == alone
    assert max(answer.last.handover.attempts for answer in answers) > 1
