"""Structured outputs are valid and those of transformers' masked logits, even if workers die."""

import itertools
import json
import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from tandem.client import TandemClient, make_request
from tandem.client.progress import StreamProgress
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.router.text.grammar_check import WHITESPACE
from tandem.v1 import inference_pb2 as pb
from tests.cluster.conftest import (
    EOS_TOKEN_IDS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Answer,
    Clusters,
    Oracle,
    ServedCluster,
    random_ids,
    wait_until,
)
from tests.cluster.random_schemas import random_schema

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
MAX_TOKENS = 200
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
# A schema, a regular expression, a choice, and a context-free grammar.
WANTED: list[dict[str, Any]] = [
    {"json_schema": PERSON},
    {"regex": "[a-f]{3,20}(-[0-9]{2}){1,3}"},
    {"choices": ["north", "north-east", "south"]},
    {"grammar": 'start: "(" start ")" | WORD\nWORD: /[a-z]{1,4}/'},
]


class MaskedModel:
    """transformers' greedy decoding over the grammar's tokens."""

    def __init__(self, model_dir: Path, oracle: Oracle) -> None:
        self._oracle = oracle
        text = (model_dir / "tokenizer.json").read_text()
        self._tokenizer = LLTokenizer(text, n_vocab=VOCAB_SIZE, eos_token=EOS_TOKEN_IDS)

    def confirms(self, prompt_ids: list[int], wanted: Mapping[str, Any], output_ids: list[int]) -> bool:
        """Return whether an output has the best allowed tokens up to its end, in one forward pass."""
        matcher = LLMatcher(self._tokenizer, grammar_of(wanted))
        rows = self._oracle.logits([*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1].numpy()
        for row, token_id in zip(rows[:-1], output_ids[:-1], strict=True):
            if token_id in EOS_TOKEN_IDS or self._best(matcher, row) != token_id:
                return False
            assert matcher.consume_token(token_id)
        is_over = output_ids[-1] in EOS_TOKEN_IDS or len(output_ids) == MAX_TOKENS
        return is_over and self._best(matcher, rows[-1]) == output_ids[-1]

    def _best(self, matcher: LLMatcher, row: np.ndarray) -> int:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB_SIZE]
        bits[EOS_TOKEN_IDS] = matcher.is_accepting()
        return int(np.where(bits, row, -np.inf).argmax())


def grammar_of(wanted: Mapping[str, Any]) -> str:
    [(kind, value)] = wanted.items()
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(value, overrides={"whitespace_pattern": WHITESPACE})
    formats: dict[str, Any] = {"regex": "regex", "choices": "choice", "grammar": "lark"}
    return grammar_from(formats[kind], json.dumps(value) if kind == "choices" else value)


@pytest.fixture(scope="module")
def masked(tiny_model_dir: Path, tiny_oracle: Oracle) -> MaskedModel:
    return MaskedModel(tiny_model_dir, tiny_oracle)


def complete(
    client: TandemClient, prompt_ids: list[int], wanted: Mapping[str, Any], timeout_s: float = 60.0, **sampling: Any
) -> Answer:
    answer = Answer()
    request = make_request(prompt_ids, structured_output=wanted, **{"max_tokens": MAX_TOKENS, **sampling})
    for response in client.generate(request, timeout_s=timeout_s):
        answer.add(response)
    return answer


def test_greedy_matches_the_masked_model(tiny_pd: ServedCluster, masked: MaskedModel, tiny_oracle: Oracle) -> None:
    rng = random.Random(3)
    # Over a decode step apart, so that constrained and free outputs share steps.
    cases = [(random_ids(rng, rng.randint(1, 60)), WANTED[i % len(WANTED)]) for i in range(12)]
    free = [random_ids(rng, 20) for _ in range(4)]
    with ThreadPoolExecutor(16) as pool:
        others = [pool.submit(tiny_pd.complete, prompt, max_tokens=40) for prompt in free]
        answers = list(pool.map(lambda case: complete(tiny_pd.client, *case), cases))
    for (prompt, wanted), answer in zip(cases, answers, strict=True):
        assert masked.confirms(prompt, wanted, answer.token_ids)
        ended = answer.token_ids[-1] in EOS_TOKEN_IDS
        assert answer.last.finish_reason == (pb.FINISH_REASON_STOP if ended else pb.FINISH_REASON_LENGTH)
        if ended and "json_schema" in wanted:
            assert set(json.loads(answer.text)) == set(PERSON["required"])
    for prompt, other in zip(free, others, strict=True):
        assert other.result().token_ids == tiny_oracle.generate(prompt, 40)


def check_sampled(
    served: ServedCluster,
    num_requests: int,
    num_at_once: int = 16,
    timeout_s: float = 60.0,
    max_model_len: int = MAX_MODEL_LEN,
) -> None:
    """Send random schemas and validate the outputs."""
    rng = random.Random(4)
    schemas = [PERSON if i % 4 == 0 else random_schema(rng) for i in range(num_requests)]
    prompts = [random_ids(rng, rng.randint(1, 40)) for _ in schemas]

    def ask(seed: int) -> Answer:
        sampling = {"temperature": 1.0, "seed": seed, "max_tokens": max_model_len - len(prompts[seed])}
        return complete(served.client, prompts[seed], {"json_schema": schemas[seed]}, timeout_s, **sampling)

    with ThreadPoolExecutor(num_at_once) as pool:
        for schema, answer in zip(schemas, pool.map(ask, range(num_requests)), strict=True):
            assert answer.last.finish_reason == pb.FINISH_REASON_STOP, (schema, answer.text)
            validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
            assert not list(validator.iter_errors(json.loads(answer.text))), (schema, answer.text)


def test_sampled_outputs_are_valid(tiny_pd: ServedCluster) -> None:
    check_sampled(tiny_pd, 40)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_sampled_outputs_are_valid(tiny_pd: ServedCluster) -> None:
    check_sampled(tiny_pd, 1000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_sampled_outputs_of_a_real_model_are_valid(clusters: Clusters, smollm2_dir: Path) -> None:
    served = clusters.get(ClusterConfig(str(smollm2_dir), num_pages=4096, grpc_port=0, http_port=0))
    # Nested lists may be long, and this model emits much white space.
    check_sampled(served, 1000, num_at_once=64, timeout_s=1500.0, max_model_len=4096)
    served.wait_clean()


def check_kills(served: ServedCluster, masked: MaskedModel, worker_id: str, num_kills: int) -> None:
    rng = random.Random(worker_id)
    for _ in range(num_kills):
        served.wait_ready()
        prompts = [random_ids(rng, rng.randint(20, 60)) for _ in range(6)]
        has_begun = threading.Event()

        def stream(prompt: list[int], has_begun: threading.Event = has_begun) -> list[int]:
            token_ids: list[int] = []
            for response in served.client.generate(
                make_request(prompt, structured_output={"json_schema": PERSON}, max_tokens=MAX_TOKENS), timeout_s=90.0
            ):
                token_ids += response.token_ids
                if len(token_ids) > 5:
                    has_begun.set()
            return token_ids

        with ThreadPoolExecutor(6) as pool:
            outputs = [pool.submit(stream, prompt) for prompt in prompts]
            assert has_begun.wait(30.0)
            served.kill(worker_id)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert masked.confirms(prompt, {"json_schema": PERSON}, output.result())
    served.wait_ready()


def test_worker_death_does_not_change_outputs(tiny_pd: ServedCluster, masked: MaskedModel) -> None:
    check_kills(tiny_pd, masked, "decode-0", 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("worker_id", ["prefill-0", "decode-0"])
def test_twenty_deaths_do_not_change_outputs(tiny_pd: ServedCluster, masked: MaskedModel, worker_id: str) -> None:
    check_kills(tiny_pd, masked, worker_id, 20)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_long_output_under_a_costly_grammar_resumes_beside_other_streams(tiny_pd: ServedCluster) -> None:
    """All its tokens are followed again at both workers, thousandths of a second each."""
    rules = "".join(f'rule_{i}: rule_{i} "a" | "a"\n' for i in range(600))
    grammar = "start: " + " | ".join(f"rule_{i}" for i in range(600)) + "\n" + rules
    length = 200
    request = make_request(
        [104, 105], max_tokens=length + 4, min_tokens=length + 4, structured_output={"grammar": grammar}
    )
    whole, progress = Answer(), StreamProgress(request, None)
    for response in tiny_pd.client.generate(request, timeout_s=120.0):
        whole.add(response)
        if len(whole.token_ids) <= length and not response.finish_reason:
            progress.add(response)
    resumed = progress.next_request()
    assert length - 20 < len(resumed.resume.token_ids) < len(whole.token_ids)
    times: list[float] = []
    stopping = threading.Event()

    def stream() -> None:
        with TandemClient(tiny_pd.cluster.addresses.grpc) as client:
            while not stopping.is_set():
                other = tiny_pd.request([1, 2, 3], max_tokens=400, ignore_eos=True)
                for _ in client.generate(other, timeout_s=60.0):
                    times.append(time.monotonic())

    thread = threading.Thread(target=stream)
    thread.start()
    wait_until(lambda: len(times) > 50, 30.0, "the other stream runs")
    began = time.monotonic()
    rest: list[int] = []
    ended: list[float] = []
    try:
        for response in tiny_pd.client.generate(resumed, timeout_s=120.0):
            ended.append(time.monotonic())
            rest += response.token_ids
    finally:
        stopping.set()
        thread.join(60.0)
    assert [*resumed.resume.token_ids, *rest] == whole.token_ids
    took_s = ended[-1] - began
    meanwhile = [moment for moment in times if began <= moment <= ended[-1]]
    gap_s = max(b - a for a, b in itertools.pairwise([began, *meanwhile, ended[-1]]))
    print(f"the resumed stream took {took_s:.2f} s, longest gap of the other {gap_s:.3f} s")
    assert gap_s < took_s / 4


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        {"extra_body": {"guided_json": PERSON}},
        {"extra_body": {"guided_json": json.dumps(PERSON)}},
        {"extra_body": {"structured_outputs": {"json": PERSON}}},
    ],
)
def test_openai_response_formats(tiny_pd: ServedCluster, options: dict[str, Any]) -> None:
    address = tiny_pd.cluster.addresses.http
    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
    [model] = client.models.list().data
    answer = client.chat.completions.create(
        model=model.id, messages=[{"role": "user", "content": "who?"}], max_tokens=MAX_TOKENS, **options
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == set(PERSON["required"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "needs a json_schema"),
        ({"extra_body": {"guided_regex": "(a"}}, "unclosed group"),
        ({"extra_body": {"guided_json": {"type": "strin"}}}, "Invalid type"),
        ({"extra_body": {"guided_choice": []}}, "at least one choice"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "keeps to one thing"),
        ({"extra_body": {"guided_regex": "a", "ignore_eos": True}}, "ignore_eos"),
    ],
)
def test_unsupported_grammar_is_a_client_error(tiny_pd: ServedCluster, options: dict[str, Any], message: str) -> None:
    client = openai.OpenAI(base_url=f"http://{tiny_pd.cluster.addresses.http}/v1", api_key="none", max_retries=0)
    [model] = client.models.list().data
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "who?"}], **options)


def test_required_function_gets_valid_arguments(tiny_pd: ServedCluster) -> None:
    """The weights are random, and the template knows no tools."""
    client = openai.OpenAI(base_url=f"http://{tiny_pd.cluster.addresses.http}/v1", api_key="none", max_retries=0)
    schema = {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    choice: Any = {"type": "function", "function": {"name": "f"}}
    for seed in range(4):
        asked: Any = {"model": client.models.list().data[0].id, "messages": [{"role": "user", "content": "x"}]}
        asked |= {"tools": [tool], "tool_choice": choice, "seed": seed}
        [answered] = client.chat.completions.create(**asked).choices
        [call] = answered.message.tool_calls or []
        assert (answered.message.content, answered.finish_reason, call.function.name) == (None, "stop", "f")
        assert json.loads(call.function.arguments)["a"] in (1, 2)
        with client.chat.completions.stream(**asked) as stream:
            [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
        assert streamed.function.arguments == call.function.arguments
