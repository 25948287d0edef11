"""The method Embed over a worker that answers with each prompt's ends, without sockets."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.embedding import MAX_INPUTS, EmbeddingParams
from tandem.messages import Abort, Prefill
from tandem.router.config import RouterConfig
from tandem.router.frontends import grpc_embedding
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.embedding import MAX_AT_ONCE
from tandem.router.frontends.grpc import InferenceService
from tandem.router.frontends.malformed import Malformed
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.router import Router
from tandem.router.text.embedding_dimensions import EmbeddingDimensions
from tandem.router.text.tokenizer import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tests.fakes.embedding_worker import EmbeddingWorker, values_of
from tests.fakes.router_harness import settle
from tests.fakes.tokenizer_files import byte_level, save
from tests.unit.router.frontends.test_grpc import Context, Refused


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), byte_level(bos=True), {"vocab_size": 300})


class Harness:
    def __init__(self, model_dir: Path, *, answers: bool = True, **config: Any) -> None:
        settings = RouterConfig(str(model_dir), "fake", 400, **config)
        self.router = Router(settings, LeastLoaded())
        self.tokenizer = Tokenizer(model_dir)
        self.worker = EmbeddingWorker(self.router, answers=answers)
        sizes = EmbeddingDimensions(3, may_be_cut=True, allowed=(2,))
        self.frontend = Frontend(self.router, self.tokenizer, settings, None, sizes)
        self.context = Context()

    async def embed(self, *inputs: str | list[int], **fields: Any) -> list[pb.EmbedResponse]:
        given = [
            pb.EmbedInput(text=one) if isinstance(one, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=one))
            for one in inputs
        ]
        await self.send(pb.EmbedRequest(inputs=given, **fields))
        responses: list[Any] = self.context.responses
        return responses

    async def send(self, request: Any) -> None:
        await InferenceService(self.frontend).Embed(request, self.context)

    def check_idle(self) -> None:
        assert (self.router.num_requests, self.router.num_queued) == (0, 0)


def test_texts_and_token_ids(model_dir: Path) -> None:
    async def run() -> None:
        h = Harness(model_dir)
        responses = await h.embed("one", [7, 8, 9], request_id="mine", priority=3, cache_namespace="tenant")
        found = {r.index: list(r.values) for r in responses}
        assert found == {0: values_of(h.tokenizer.encode("one")), 1: values_of([7, 8, 9])}
        assert {r.request_id for r in responses} == {"mine"}
        assert {(r.usage.prompt_tokens, r.usage.cached_tokens, r.usage.completion_tokens) for r in responses} == {
            (4, 1, 0),
            (3, 1, 0),
        }
        assert [(p.priority, p.cache_namespace) for p in h.worker.of(Prefill)] == [(3, "tenant")] * 2
        assert h.context.trailers == {"x-request-id": "mine"}
        h.check_idle()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({}, EmbeddingParams()),
        ({"normalize": False}, EmbeddingParams(is_normalized=False)),
        ({"dimensions": 2, "normalize": True}, EmbeddingParams(2)),
        ({"dimensions": 3}, EmbeddingParams(3)),
    ],
)
def test_params_reach_the_worker(model_dir: Path, fields: dict[str, Any], params: EmbeddingParams) -> None:
    async def run() -> None:
        h = Harness(model_dir)
        await h.embed("x", **fields)
        assert [prefill.embedding for prefill in h.worker.of(Prefill)] == [params]

    asyncio.run(run())


def test_truncation(model_dir: Path) -> None:
    async def run() -> None:
        h = Harness(model_dir)
        token_ids = [position % 250 for position in range(1000)]
        await h.embed(token_ids, truncate_prompt_tokens=5)
        await h.embed(token_ids, truncate_prompt_tokens=5, keep_last_tokens=True)
        await h.embed(token_ids, truncate_prompt_tokens=-1)
        assert h.worker.prompts == [tuple(token_ids[:5]), tuple(token_ids[-5:]), tuple(token_ids[:400])]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.EmbedRequest(), "no input to embed"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput()]), "text or token_ids"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds())]), "an input is empty"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[300]))]), "outside the vocabulary"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="x" * 400)]), "maximum context length is 400 tokens"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")] * (MAX_INPUTS + 1)), "one request may have 2048"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")], dimensions=0), "at least 1"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")], dimensions=1), "one of 2, not 1"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")], truncate_prompt_tokens=0), "at least 1"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")], truncate_prompt_tokens=-2), "at least 1"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")], truncate_prompt_tokens=401), "at most 400"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")], model="other"), "is not served here"),
        (Malformed("broken"), "broken"),
    ],
)
def test_bad_input(model_dir: Path, request_: Any, message: str) -> None:
    async def run() -> None:
        h = Harness(model_dir)
        with pytest.raises(Refused, match=message) as refused:
            await h.send(request_)
        assert refused.value.args[0] == "INVALID_ARGUMENT" and not h.worker.prompts
        assert 'tandem_requests_total{outcome="invalid"} 1.0' in h.router.metrics.exposition().decode()
        h.check_idle()

    asyncio.run(run())


def test_a_call_that_ends_aborts_the_rest(model_dir: Path) -> None:
    async def run() -> None:
        h = Harness(model_dir, answers=False)
        call = asyncio.create_task(h.embed(*[[number % 250] for number in range(200)]))
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if len(h.worker.prompts) == MAX_AT_ONCE:
                break
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert len(h.worker.of(Abort)) == MAX_AT_ONCE
        h.check_idle()

    asyncio.run(run())


def test_a_client_that_takes_nothing_loses_its_call(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_embedding, "WRITE_TIMEOUT_S", 0.05)

    async def run() -> None:
        h = Harness(model_dir)

        async def write(response: object) -> None:
            await asyncio.Future()

        h.context.write = write  # type: ignore[method-assign]
        with pytest.raises(Refused, match="took no embedding") as refused:
            await h.embed(*[[number % 250] for number in range(200)])
        assert refused.value.args[0] == "DEADLINE_EXCEEDED"
        await settle()
        # Meanwhile no further inputs were begun.
        assert len(h.worker.prompts) <= 2 * MAX_AT_ONCE
        h.check_idle()

    asyncio.run(run())


def test_a_full_queue_is_said(model_dir: Path) -> None:
    async def run() -> None:
        h = Harness(model_dir, answers=False, max_queued_requests=1)
        call = asyncio.create_task(h.embed("x"))
        await settle()
        with pytest.raises(Refused) as refused:
            await h.embed("y")
        assert refused.value.args[0] == "RESOURCE_EXHAUSTED"
        h.worker.answer_all()
        await call
        h.check_idle()

    asyncio.run(run())
