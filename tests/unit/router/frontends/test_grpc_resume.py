"""Resuming at another router over gRPC, with scripted workers."""

import asyncio
from typing import Any, NamedTuple

import pytest

from tandem.messages import Admit, Finished, Prefill
from tandem.router.config import RouterConfig
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.grpc import InferenceService
from tandem.router.router import Router
from tandem.sampling_params import TokenLogprobs
from tandem.v1 import inference_pb2 as pb
from tests.fakes.routing import RecordingPolicy
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.tokenizer import ByteTokenizer, Encoding
from tests.unit.router.frontends.test_grpc import Context, Refused, first, tokens

KEYS = ("first-key", "second-key")


class CountingTokenizer(ByteTokenizer):
    num_tokenized = 0

    def tokenize(self, text: str, add_special_tokens: bool) -> Encoding:
        self.num_tokenized += 1
        return super().tokenize(text, add_special_tokens)


class Replica:
    """One router of a cluster, with workers of its own to tell its messages from others'."""

    def __init__(self, cluster_token: str = "secret", **config: Any) -> None:
        config = {"cluster_token": cluster_token, "api_keys": KEYS, **config}
        self.policy = RecordingPolicy()
        self.router = Router(RouterConfig("nowhere", "fake", 400, **config), self.policy)
        self.p = ScriptedWorker(self.router, "p", "prefill")
        self.d = ScriptedWorker(self.router, "d", "decode")
        self.p.link_to("d")
        self.tokenizer = CountingTokenizer()
        frontend = Frontend(self.router, self.tokenizer, RouterConfig("nowhere", "fake", 400, **config))  # type: ignore[arg-type]
        self.service = InferenceService(frontend)
        self.responses: list[pb.GenerateResponse] = []

    async def start(self, request: pb.GenerateRequest, key: str = KEYS[0]) -> "asyncio.Task[None]":
        call = asyncio.create_task(self._call(request, Context(self.responses, authorization=f"Bearer {key}")))
        for _ in range(5):
            await asyncio.sleep(0)
        return call

    @property
    def admit(self) -> Admit:
        return self.d.of(Admit)[-1]

    def client_s(self) -> tuple[list[int], str]:
        return [i for r in self.responses for i in r.token_ids], "".join(r.text for r in self.responses)

    async def _call(self, request: pb.GenerateRequest, context: Context) -> None:
        await self.service.Generate(request, context)


def request(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", request_id="mine", sampling=pb.SamplingParams(**sampling))


class Held(NamedTuple):
    """A client's token, and its proofs by the number of tokens."""

    token: bytes
    proofs: dict[int, bytes]


def held(replica: Replica) -> Held:
    token, proofs, num_tokens = b"", {}, 0
    for response in replica.responses:
        token = response.resume_token or token
        num_tokens = max(num_tokens, response.index + len(response.token_ids))
        if response.token_ids:
            proofs[num_tokens] = response.resume_proof
    return Held(token, proofs)


def resumed(request: pb.GenerateRequest, held: Held, token_ids: Any, num_characters: int) -> pb.GenerateRequest:
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    token_ids = list(token_ids)
    proof = held.proofs.get(len(token_ids), b"")
    again.resume.CopyFrom(pb.Resume(token=held.token, token_ids=token_ids, num_characters=num_characters, proof=proof))
    return again


async def begun(replica: Replica, asked: pb.GenerateRequest, output: bytes) -> Held:
    """Has a router send this much of an output, the first token alone."""
    call = await replica.start(asked)
    admit = replica.admit
    replica.p.say(first(admit.request_id, 0, 0, output[0]))
    replica.d.say(tokens(admit.request_id, 0, 0, output))
    for _ in range(5):
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    given = [r.resume_token for r in replica.responses if r.resume_token]
    assert given == [replica.responses[0].resume_token], "once, with the first tokens"
    return held(replica)


def test_the_second_router_carries_on_from_what_the_client_has() -> None:
    async def scenario() -> None:
        one, two = Replica(), Replica()
        asked = request(max_tokens=9, temperature=0.7)
        token = await begun(one, asked, b"Hello")
        assert one.client_s() == (list(b"Hello"), "Hello")
        call = await two.start(resumed(asked, token, b"Hello", 5))
        admit = two.admit
        assert (bytes(admit.prompt_ids), bytes(admit.output_ids)) == (b"hi", b"Hello")
        # The same seed, limit and age as in every attempt of the first.
        assert admit.sampling == one.admit.sampling
        assert admit.arrival_ns == one.admit.arrival_ns == two.p.of(Prefill)[-1].arrival_ns
        two.p.say(first(admit.request_id, 0, 5, ord(",")))
        for _ in range(5):
            await asyncio.sleep(0)
        two.d.say(tokens(admit.request_id, 0, 5, b", yo"))
        two.d.say(Finished(admit.request_id, 0, "length", 9, 0, 1))
        await call
        assert two.client_s() == (list(b", yo"), ", yo")
        assert two.responses[0].index == 5 and two.responses[0].request_id == "mine"
        last = two.responses[-1]
        assert (last.finish_reason, last.usage.completion_tokens) == (pb.FINISH_REASON_LENGTH, 9)
        # It can be resumed again, with the last token and proof.
        three = Replica()
        call = await three.start(resumed(asked, held(two), b"Hello, yo", 9))
        await call
        assert three.responses[-1].usage.completion_tokens == 9
        four = Replica()
        again = held(two)
        before = b"Hello, yo"[: min(again.proofs)]
        call = await four.start(resumed(asked, again, before, len(before)))
        assert four.admit.sampling == one.admit.sampling and four.admit.arrival_ns == one.admit.arrival_ns
        assert bytes(four.admit.output_ids) == before
        call.cancel()

    asyncio.run(scenario())


def test_text_that_waited_at_the_first_router_comes_from_the_second() -> None:
    async def scenario() -> None:
        one, two = Replica(), Replica()
        asked = request(max_tokens=20, stop=["STOP"])
        output = "aé ST".encode()
        token = await begun(one, asked, output)
        assert one.client_s() == (list(output), "aé ")
        call = await two.start(resumed(asked, token, output, 3))
        id_ = two.admit.request_id
        two.p.say(first(id_, 0, len(output), ord("E")))
        two.d.say(tokens(id_, 0, len(output), b"EP STOP more"))
        await call
        assert two.client_s()[1] == "STEP "
        assert two.responses[-1].finish_reason == pb.FINISH_REASON_STOP

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("sampling", "output", "text", "reason"),
    [
        ({"max_tokens": 3}, b"abc", "", pb.FINISH_REASON_LENGTH),
        ({"max_tokens": 9}, b"abc\0", "", pb.FINISH_REASON_STOP),
        ({"max_tokens": 9, "stop": ["bc"]}, b"abc", "", pb.FINISH_REASON_STOP),
        ({"max_tokens": 3, "stop": ["cd"]}, b"abc", "c", pb.FINISH_REASON_LENGTH),
    ],
)
def test_one_whose_last_word_alone_was_lost_gets_that(
    sampling: dict[str, Any], output: bytes, text: str, reason: int
) -> None:
    async def scenario() -> None:
        one, two = Replica(), Replica()
        asked = request(**sampling)
        token = await begun(one, asked, output)
        sent = "".join(r.text for r in one.responses if not r.finish_reason)
        call = await two.start(resumed(asked, token, output, len(sent)))
        await asyncio.wait_for(call, 1.0)
        assert two.client_s() == ([], text)
        assert two.responses[-1].finish_reason == reason
        assert two.responses[-1].usage.completion_tokens == len(output)
        assert two.router.num_requests == 0

    asyncio.run(scenario())


def test_log_probabilities_stay_with_their_tokens() -> None:
    async def scenario() -> None:
        one, two = Replica(), Replica()
        asked = request(max_tokens=9, logprobs=0)
        call = await one.start(asked)
        one.p.say(first(one.admit.request_id, 0, 0, ord("a"), TokenLogprobs(-1.0)))
        for _ in range(5):
            await asyncio.sleep(0)
        call.cancel()
        call = await two.start(resumed(asked, held(one), b"a", 1))
        two.p.say(first(two.admit.request_id, 0, 1, ord("b"), TokenLogprobs(-2.0)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert [entry.logprob for entry in two.responses[0].logprobs] == [-2.0]
        call.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": KEYS[1]}, "another API key"),
        ({"fields": {"text": "ho"}}, "another request"),
        ({"fields": {"priority": 1}}, "another request"),
        ({"fields": {"cache_namespace": "other"}}, "another request"),
        ({"fields": {"session_id": "other"}}, "another request"),
        ({"fields": {"sampling": pb.SamplingParams(max_tokens=10)}}, "another request"),
        ({"fields": {"structured_output": pb.StructuredOutput(regex="a*")}}, "another request"),
        ({"token": b"made up"}, "the resume token is malformed"),
        ({"token": b""}, "the resume token is malformed"),
        ({"token": b"x" * 2000}, "the resume token is malformed"),
        ({"token_ids": []}, "the proof is not of these tokens"),
        ({"token_ids": [65] * 10}, "the proof is not of these tokens"),
        ({"token_ids": b"Hi"}, "the proof is not of these tokens"),
        ({"token_ids": b"H"}, "the proof is not of these tokens"),
        ({"token_ids": b"eH"}, "the proof is not of these tokens"),
        ({"token_ids": [256]}, "the proof is not of these tokens"),
        ({"proof": b""}, "the proof is not of these tokens"),
        ({"proof": bytes(16)}, "the proof is not of these tokens"),
        ({"cluster_token": "another cluster's"}, "from another cluster"),
    ],
)
def test_nobody_goes_on_with_what_is_not_theirs(change: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        asked = request(max_tokens=9)
        had = await begun(Replica(), asked, b"He")
        assert 2 in had.proofs
        two = Replica(change.get("cluster_token", "secret"))
        again = resumed(asked, had, b"He", 2)
        again.MergeFrom(pb.GenerateRequest(**change.get("fields", {})))
        for name in change.keys() & {"token", "proof"}:
            setattr(again.resume, name, change[name])
        if "token_ids" in change:
            again.resume.token_ids[:] = list(change["token_ids"])
        call = await two.start(again, change.get("key", KEYS[0]))
        with pytest.raises(Refused) as refused:
            await call
        assert not two.tokenizer.num_tokenized, "an invalid token costs no tokenizing"
        assert refused.value.args[0] == "INVALID_ARGUMENT" and message in refused.value.args[1]
        assert two.router.num_requests == 0 and two.d.of(Admit) == []

    asyncio.run(scenario())


def test_no_output_is_of_use_to_another_request_of_the_same_prompt() -> None:
    async def scenario() -> None:
        asked = request(max_tokens=9, temperature=1.0)
        one, two = [await begun(Replica(), asked, output) for output in (b"He", b"Ho")]
        other = resumed(asked, Held(one.token, two.proofs), b"Ho", 2)
        with pytest.raises(Refused, match="the proof is not of these tokens"):
            await (await Replica().start(other))

    asyncio.run(scenario())


def test_a_resumed_request_counts_as_queued_until_its_next_token() -> None:
    async def scenario() -> None:
        asked = request(max_tokens=9)
        had = await begun(Replica(), asked, b"He")
        two = Replica(max_queued_requests=1)
        call = await two.start(resumed(asked, had, b"He", 2))
        assert two.router.num_queued == 1
        with pytest.raises(Refused, match="1 requests wait for their first token already"):
            await (await two.start(resumed(asked, had, b"He", 2)))
        two.p.say(first(two.admit.request_id, 0, 2, ord("y")))
        for _ in range(5):
            await asyncio.sleep(0)
        assert two.router.num_queued == 0
        call.cancel()

    asyncio.run(scenario())


def test_a_replayed_token_passes_no_queue_and_ages_once() -> None:
    async def scenario() -> None:
        asked = request(max_tokens=9)
        one = Replica()
        had = await begun(one, asked, b"He")
        two = Replica(max_queued_requests=2)
        calls = [await two.start(resumed(asked, had, b"He", 2))]
        told = two.router.counts()
        calls += [await two.start(resumed(asked, had, b"He", 2)) for _ in range(499)]
        admits = two.d.of(Admit)
        assert len(admits) == 2, "one old token was admitted with the queue full"
        assert admits[0].arrival_ns == one.admit.arrival_ns
        assert admits[1].arrival_ns > admits[0].arrival_ns
        refused = [call for call in calls if call.done()]
        assert len(refused) == 498
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        # The first attempt keeps its age in further attempts, and other routers learn of it.
        three = Replica()
        three.router.elsewhere.record("r2", told)
        call = await three.start(resumed(asked, had, b"He", 2))
        assert three.admit.arrival_ns > admits[1].arrival_ns
        call.cancel()

    asyncio.run(scenario())


def test_a_refused_resumption_keeps_its_head_start() -> None:
    async def scenario() -> None:
        asked = request(max_tokens=9)
        one = Replica()
        had = await begun(one, asked, b"He")
        two = Replica(max_queued_requests=1)
        waiting = await two.start(asked)
        with pytest.raises(Refused):
            await (await two.start(resumed(asked, had, b"He", 2)))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        call = await two.start(resumed(asked, had, b"He", 2))
        assert two.admit.arrival_ns == one.admit.arrival_ns
        call.cancel()

    asyncio.run(scenario())
