"""The gRPC frontend over a router with scripted workers, without sockets."""

import asyncio
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
import pytest

from tandem.messages import Abort, Admit, Finished, FirstToken, LeaseLost, Prefill, PromptScored, TokenEvent, Tokens
from tandem.prompt_logprobs import PackedLogprobs
from tandem.router.config import RouterConfig
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.grpc import InferenceService, api_key_auth
from tandem.router.router import Router
from tandem.router.text.generation_config import SamplingDefaults
from tandem.sampling_params import SamplingParams, TokenLogprobs, TopLogprob
from tandem.v1 import inference_pb2 as pb
from tests.fakes.routing import RecordingPolicy
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.tokenizer import ByteTokenizer


class Refused(Exception):
    pass


class Details(NamedTuple):
    """A call's, for interceptors."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...]


class Context:
    """A call's context; aborting it raises, as in gRPC.

    Attributes:
        responses: written responses.
        trailers: trailers at the end.
    """

    def __init__(self, responses: list[pb.GenerateResponse] | None = None, **metadata: str) -> None:
        self._metadata = tuple((name.replace("_", "-"), value) for name, value in metadata.items())
        self.responses = [] if responses is None else responses
        self.trailers: dict[str, str] = {}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5000"

    async def write(self, response: pb.GenerateResponse) -> None:
        self.responses.append(response)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None:
        self.trailers = dict(trailing_metadata)

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.trailers = dict(trailing_metadata)
        raise Refused(code.name, details)


class GrpcHarness:
    """A frontend, one prefill and one decode worker, and the responses of one call."""

    def __init__(self, **options: Any) -> None:
        config = RouterConfig("nowhere", "fake", 400, **options)
        self.policy = RecordingPolicy()
        router = Router(config, self.policy)
        self.p = ScriptedWorker(router, "p", "prefill")
        self.d = ScriptedWorker(router, "d", "decode")
        self.p.link_to("d")
        self.frontend = Frontend(router, ByteTokenizer(), config)  # type: ignore[arg-type]
        self.service = InferenceService(self.frontend)
        self.router = router
        self.responses: list[pb.GenerateResponse] = []

    async def call(self, **sampling: Any) -> None:
        await self.send(pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(**sampling)))

    async def send(self, request: pb.GenerateRequest) -> None:
        await self.service.Generate(request, Context(responses=self.responses))

    async def start(self, **sampling: Any) -> tuple["asyncio.Task[None]", Admit]:
        call = asyncio.create_task(self.call(**sampling))
        await self.settle()
        (admit,) = self.d.of(Admit)
        return call, admit

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def text(self) -> str:
        return "".join(r.text for r in self.responses)

    @property
    def token_ids(self) -> list[int]:
        for response, end in zip(self.responses, self._ends(), strict=True):
            assert response.index == end - len(response.token_ids)
        return [i for r in self.responses for i in r.token_ids]

    def _ends(self) -> list[int]:
        return [sum(len(r.token_ids) for r in self.responses[: n + 1]) for n in range(len(self.responses))]


def first(request_id: str, attempt: int, index: int, token_id: int, *logprobs: TokenLogprobs) -> FirstToken:
    return FirstToken(request_id, attempt, index, token_id, "", 0, 1, logprobs=logprobs)


def tokens(request_id: str, attempt: int, index: int, ids: Sequence[int], *logprobs: TokenLogprobs) -> Tokens:
    return Tokens((TokenEvent(request_id, attempt, index, tuple(ids), logprobs),))


def test_what_the_client_asks_for_is_what_the_workers_get() -> None:
    async def scenario() -> None:
        h = GrpcHarness()
        call, admit = await h.start(
            max_tokens=9,
            temperature=0.5,
            top_p=0.25,
            top_k=-1,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-2,
            frequency_penalty=2,
            seed=2**64 - 1,
            logit_bias={200: -100, 7: 0.5},
            stop_token_ids=[5, 0, 5],
            logprobs=0,
        )
        assert admit.sampling == SamplingParams(
            max_tokens=9,
            temperature=0.5,
            top_p=0.25,
            top_k=-1,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            seed=2**64 - 1,
            logit_bias=((7, 0.5), (200, -100.0)),
            stop_token_ids=(5, 0),
            num_logprobs=0,
        )
        call.cancel()

    asyncio.run(scenario())


def test_defaults_are_greedy_and_draw_a_seed() -> None:
    async def scenario() -> set[int]:
        seeds = set()
        for _ in range(3):
            call, admit = await GrpcHarness().start()
            seeds.add(admit.sampling.seed)
            assert admit.sampling == SamplingParams(128, seed=admit.sampling.seed, stop_token_ids=(0,))
            assert admit.sampling.needs_argmax_only
            call.cancel()
        return seeds

    assert len(asyncio.run(scenario())) == 3


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -0.5}, "temperature must be a number of at least 0, not -0.5"),
        ({"temperature": math.nan}, "temperature must be a number of at least 0, not nan"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1, not 1.5"),
        ({"top_k": -2}, "top_k must be between -1 and 2.14748e+09, not -2"),
        ({"min_p": math.inf}, "min_p must be between 0 and 1, not inf"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between 0.01 and 100, not 0"),
        ({"presence_penalty": 3}, "presence_penalty must be between -2 and 2, not 3"),
        ({"frequency_penalty": -3}, "frequency_penalty must be between -2 and 2, not -3"),
        ({"logit_bias": {256: 1.0}}, "logit_bias: token id 256 is outside the vocabulary of 256"),
        ({"logit_bias": {7: 101.0}}, "logit_bias of token 7 must be between -100 and 100, not 101"),
        ({"logit_bias": {256: 1.0, 7: 1.0, 300: 1.0}}, "logit_bias: token ids 256, 300 are outside the vocabulary"),
        ({"allowed_token_ids": [1, 256]}, "allowed_token_ids: token id 256 is outside the vocabulary of 256"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids needs logprobs"),
        ({"logprobs": 0, "logprob_token_ids": [1] * 129}, "logprob_token_ids may name at most 128 tokens, not 129"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, not 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be between -1 and 20, not 21"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens must be at most max_tokens, 3, not 4"),
        ({"stop": [""]}, "stop strings must have 1 to 1024 characters, not 0"),
        ({"stop": ["a"] * 17}, "stop must be at most 16 strings, not 17"),
        ({"max_tokens": 0}, "max_tokens must be between 1 and 398"),
    ],
)
def test_values_out_of_range_are_refused(sampling: dict[str, Any], message: str) -> None:
    h = GrpcHarness()
    with pytest.raises(Refused) as refused:
        asyncio.run(h.call(**sampling))
    code, details = refused.value.args
    assert code == "INVALID_ARGUMENT" and message in details
    assert not h.d.of(Admit)


def test_a_stop_string_ends_the_output_on_both_workers_across_attempts() -> None:
    async def scenario() -> GrpcHarness:
        h = GrpcHarness()
        call, admit = await h.start(stop=["STOP", "x"])
        request_id = admit.request_id
        h.p.say(first(request_id, 0, 0, ord("a")))
        h.d.say(tokens(request_id, 0, 1, b"bST"))
        await h.settle()
        assert h.text == "ab", "what may become a stop string waits"
        h.d.say(LeaseLost(request_id, 0))
        h.p.say(first(request_id, 1, 4, ord("O")))
        h.d.say(tokens(request_id, 1, 5, b"Px and on"))
        await call
        for worker in (h.p, h.d):
            assert worker.of(Abort)[-1] == Abort(request_id, 1)
        assert h.router.num_requests == 0
        return h

    h = asyncio.run(scenario())
    last = h.responses[-1]
    assert (h.text, h.token_ids) == ("ab", list(b"abSTOP"))
    assert (last.finish_reason, last.usage.completion_tokens) == (pb.FINISH_REASON_STOP, 6)
    assert last.handover.attempts == 2


def test_held_back_text_comes_with_the_last_response() -> None:
    async def scenario() -> GrpcHarness:
        h = GrpcHarness()
        call, admit = await h.start(stop=["STOP"], max_tokens=3)
        h.p.say(first(admit.request_id, 0, 0, ord("a")))
        h.d.say(tokens(admit.request_id, 0, 1, b"ST"))
        h.d.say(Finished(admit.request_id, 0, "length", 3, 0, 1))
        await call
        return h

    h = asyncio.run(scenario())
    assert [r.text for r in h.responses] == ["a", "ST"]
    assert h.responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert not h.d.of(Abort)


def test_logprobs_come_with_their_tokens() -> None:
    def of(token_id: int) -> TokenLogprobs:
        return TokenLogprobs(-float(token_id), (TopLogprob(token_id, -float(token_id)), TopLogprob(9, -99.5)))

    async def scenario() -> GrpcHarness:
        h = GrpcHarness()
        call, admit = await h.start(logprobs=2, stop=["d"])
        request_id = admit.request_id
        # The decode worker's tokens overtake the first.
        h.d.say(tokens(request_id, 0, 1, b"b", of(98)))
        h.p.say(first(request_id, 0, 0, 97, of(97)))
        h.d.say(tokens(request_id, 0, 0, b"abcde", *map(of, b"abcde")))
        await call
        return h

    h = asyncio.run(scenario())
    assert h.token_ids == list(b"abcd")
    for response in h.responses:
        assert [p.logprob for p in response.logprobs] == [-float(i) for i in response.token_ids]
        for token_id, logprobs in zip(response.token_ids, response.logprobs, strict=True):
            assert [(t.token_id, t.logprob) for t in logprobs.top] == [(token_id, -token_id), (9, -99.5)]


def test_a_prompt_s_logprobs_come_once_with_the_first_tokens() -> None:
    async def scenario() -> GrpcHarness:
        h = GrpcHarness()
        call, admit = await h.start(prompt_logprobs=1, min_tokens=2)
        (prefill,) = h.p.of(Prefill)
        assert (prefill.sampling.num_prompt_logprobs, prefill.sampling.min_tokens) == (1, 2)
        request_id, num_tokens = admit.request_id, len(admit.prompt_ids) - 1
        # Tokens that overtake the log probabilities wait.
        h.d.say(tokens(request_id, 0, 0, b"ab"))
        await h.settle()
        assert not h.responses
        numbers = array("I", range(num_tokens)).tobytes()
        logprobs = array("f", [-0.5] * num_tokens).tobytes()
        h.p.say(PromptScored(request_id, 0, PackedLogprobs(1, 1, logprobs, numbers, numbers, logprobs)))
        h.p.say(first(request_id, 0, 0, 97))
        await h.settle()
        h.d.say(tokens(request_id, 0, 2, b"c"))
        h.d.say(Finished(request_id, 0, "length", 3, 0, 1))
        await call
        scored = h.responses[0].prompt_logprobs
        assert list(scored.logprobs) == list(scored.top_logprobs) == [-0.5] * num_tokens
        assert list(scored.ranks) == list(scored.top_token_ids) == list(range(num_tokens)) and scored.num_top == 1
        return h

    h = asyncio.run(scenario())
    assert h.text == "abc"
    assert [r.HasField("prompt_logprobs") for r in h.responses] == [True] + [False] * (len(h.responses) - 1)


def test_what_can_never_fit_is_refused_before_it_is_tokenized() -> None:
    async def scenario() -> None:
        h = GrpcHarness()
        for request, message in (
            (pb.GenerateRequest(text="x" * 5000), "5000 characters cannot fit; this model's maximum context length"),
            (pb.GenerateRequest(text="x", cache_namespace="n" * 300), "cache_namespace must have at most 256"),
            (
                pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="critic", content="x")])),
                "the model's chat template does not take messages of role 'critic'",
            ),
            (
                pb.GenerateRequest(text="x", session_id="s" * 257),
                "session_id must have at most 256 characters, not 257",
            ),
        ):
            with pytest.raises(Refused) as refused:
                await h.service.Generate(request, Context())
            assert refused.value.args[0] == "INVALID_ARGUMENT"
            assert message in refused.value.args[1]

    asyncio.run(scenario())


def test_what_a_request_says_of_itself_reaches_the_policy() -> None:
    async def scenario() -> GrpcHarness:
        h = GrpcHarness()
        request = pb.GenerateRequest(
            text="hi",
            priority=-3,
            cache_namespace="tenant",
            session_id="s" * 256,
            sampling=pb.SamplingParams(max_tokens=7),
        )
        call = asyncio.create_task(h.send(request))
        await h.settle()
        call.cancel()
        return h

    chosen_for = next(call[2] for call in asyncio.run(scenario()).policy.calls if call[0] == "choose")
    assert (chosen_for.prompt_ids, chosen_for.max_new_tokens) == (tuple(b"hi"), 7)
    assert (chosen_for.priority, chosen_for.cache_namespace, chosen_for.session_id) == (-3, "tenant", "s" * 256)


@pytest.mark.parametrize(
    ("named", "metadata", "known", "told"),
    [
        ("", {}, None, None),
        ("", {"x_request_id": "proxy's-1"}, "proxy's-1", "proxy's-1"),
        ("mine", {"x_request_id": "proxy's-1"}, "mine", "mine"),
        ("", {"x_request_id": "x" * 129}, None, None),
        # The message may hold a name that metadata cannot.
        ("mein Größtes", {}, "mein Größtes", ""),
    ],
)
def test_a_call_has_the_id_of_its_request(
    named: str, metadata: dict[str, str], known: str | None, told: str | None
) -> None:
    async def scenario() -> None:
        for refused in (False, True):
            h = GrpcHarness()
            context = Context(h.responses, **metadata)
            request = pb.GenerateRequest(
                text="hi", request_id=named, sampling=pb.SamplingParams(max_tokens=1000 if refused else 1)
            )
            call = asyncio.create_task(h.service.Generate(request, context))
            await h.settle()
            if refused:
                with pytest.raises(Refused):
                    await call
                assert context.trailers["tandem-router"] == "router-0"
            else:
                [tracker] = [request.tracker for request in h.router._requests]
                [admit] = h.d.of(Admit)
                h.p.say(first(admit.request_id, 0, 0, ord("a")))
                h.d.say(Finished(admit.request_id, 0, "length", 1, 0, 1))
                await call
                assert {response.request_id for response in h.responses} == {named}
                if known is not None:
                    assert tracker.spec.client_request_id == known
            trailer = context.trailers.get("x-request-id", "")
            assert trailer == told if told is not None else len(trailer) == 32

    asyncio.run(scenario())


def test_the_model_s_own_defaults_are_not_this_contract_s() -> None:
    async def scenario() -> None:
        h = GrpcHarness()
        h.frontend.sampling_defaults = SamplingDefaults({"temperature": 0.6, "top_k": 20}, max_tokens=5)
        call, admit = await h.start()
        assert (admit.sampling.temperature, admit.sampling.top_k, admit.sampling.max_tokens) == (0.0, 0, 128)
        call.cancel()

    asyncio.run(scenario())


def test_a_policy_that_fails_is_the_server_s_mistake() -> None:
    h = GrpcHarness()
    h.policy.fail_in.add("choose")
    with pytest.raises(Refused) as refused:
        asyncio.run(h.call())
    assert refused.value.args[0] == "INTERNAL" and "the routing policy failed" in refused.value.args[1]


def test_where_there_are_no_keys_all_clients_share_one_limit() -> None:
    async def scenario() -> None:
        h = GrpcHarness(max_requests_per_key=1)
        call, admit = await h.start()
        for authorization in ("", "Bearer a", "Bearer b"):
            with pytest.raises(Refused, match="1 requests of this key are in hand") as refused:
                await h.service.Generate(pb.GenerateRequest(text="hi"), Context(authorization=authorization))
            assert refused.value.args[0] == "RESOURCE_EXHAUSTED"
        h.p.say(first(admit.request_id, 0, 0, ord("a")))
        h.d.say(Finished(admit.request_id, 0, "length", 1, 0, 1))
        await call

    asyncio.run(scenario())


def test_the_last_response_times_the_whole_request() -> None:
    async def scenario() -> GrpcHarness:
        h = GrpcHarness()
        call, admit = await h.start(max_tokens=1)
        h.p.say(first(admit.request_id, 0, 0, ord("a")))
        h.d.say(Finished(admit.request_id, 0, "length", 1, 0, 1))
        await call
        return h

    phases = {phase.name: phase for phase in asyncio.run(scenario()).responses[-1].phases}
    assert phases["e2e"].duration_ms >= phases["ttft"].duration_ms > 0


def test_a_request_counts_with_its_bytes_until_it_has_ended() -> None:
    async def scenario() -> None:
        h = GrpcHarness(max_body_bytes=100, max_bytes_in_hand=250)
        request = pb.GenerateRequest(text="x" * 98)
        assert request.ByteSize() == 100
        calls = [asyncio.create_task(h.send(request)) for _ in range(2)]
        await h.settle()
        assert len(h.d.of(Admit)) == 2
        with pytest.raises(Refused) as refused:
            await h.send(request)
        code, message = refused.value.args
        assert code == "RESOURCE_EXHAUSTED" and "fill the memory set aside" in message
        calls[0].cancel()
        await h.settle()
        calls.append(asyncio.create_task(h.send(request)))
        await h.settle()
        assert len(h.d.of(Admit)) == 3
        for call in calls:
            call.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "key", "passes"),
    [
        ("/tandem.v1.AdapterAdmin/LoadAdapter", "admin", True),
        ("/tandem.v1.AdapterAdmin/ListAdapters", "ordinary", True),
        ("/tandem.v1.AdapterAdmin/ListAdapters", "other", False),
        ("/tandem.v1.Inference/GetServerInfo", "ordinary", True),
        ("/tandem.v1.Inference/GetServerInfo", "admin", False),
        ("/tandem.v1.Tracing/Record", "admin", False),
    ],
)
def test_admin_keys_open_methods_for_adapters_alone(method: str, key: str, passes: bool) -> None:
    details = Details(method, (("authorization", f"Bearer {key}"),))
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: None)

    async def found(_: Any) -> grpc.RpcMethodHandler:
        return handler

    async def intercepted() -> grpc.RpcMethodHandler:
        auth = api_key_auth(GrpcHarness(api_keys=("ordinary",), admin_keys=("admin",)).frontend)
        return await auth.intercept_service(found, details)

    assert (asyncio.run(intercepted()) is handler) == passes
