"""Roles, errors and page accounts of a 1P1D cluster."""

import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import pytest
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tandem.client import TandemError
from tandem.v1 import inference_pb2 as pb
from tests.cluster.conftest import MAX_MODEL_LEN, Answer, Oracle, ServedCluster, random_ids, wait_until

SERVICE = "tandem.v1.Inference"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(served: ServedCluster, service: str = SERVICE) -> int:
    with grpc.insecure_channel(served.client.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0).status


def test_only_the_prefill_worker_computes_prompts(tiny_pd: ServedCluster) -> None:
    prefill, decode = (tiny_pd.integrity()[worker_id].stats for worker_id in ("prefill-0", "decode-0"))
    tiny_pd.complete(random_ids(random.Random(0), 100), max_tokens=10, ignore_eos=True)
    after = tiny_pd.integrity()
    assert after["prefill-0"].stats.prompt_tokens_computed == prefill.prompt_tokens_computed + 100
    (shipped_before,), (shipped,) = prefill.shipped, after["prefill-0"].stats.shipped
    assert shipped.num_pages == shipped_before.num_pages + 7
    assert after["decode-0"].stats.prompt_tokens_computed == 0
    # The prefill worker computed the first of the ten.
    assert after["decode-0"].stats.output_tokens_computed == decode.output_tokens_computed + 9

    def reported() -> bool:
        info = {w.worker_id: w.stats for w in tiny_pd.client.server_info().workers}
        return info == {worker_id: report.stats for worker_id, report in tiny_pd.integrity().items()}

    wait_until(reported, 5.0, "the router reports what the workers count")


def test_server_info(tiny_pd: ServedCluster) -> None:
    info = tiny_pd.client.server_info()
    assert (info.model, info.max_model_len) == ("tiny-llama", MAX_MODEL_LEN)
    assert [(w.worker_id, w.role, list(w.linked_to)) for w in sorted(info.workers, key=lambda w: w.role)] == [
        ("decode-0", "decode", []),
        ("prefill-0", "prefill", ["decode-0"]),
    ]


def test_router_starts_fast_without_torch(tiny_pd: ServedCluster) -> None:
    router = tiny_pd.cluster.actor("router-0")
    loaded, cpu_s = ray.get(router.__ray_call__.remote(lambda actor: (sorted(sys.modules), time.process_time())))
    assert "tandem.router.router" in loaded
    assert {"torch", "transformers", "tandem.engine.engine"}.isdisjoint(loaded)
    print("router ready after", tiny_pd.cluster.router_ready_s, "s; of processor time it has had", cpu_s, "s")
    # Importing torch alone takes more. Wall time depends on the machine's load.
    assert 0 < cpu_s < 5.0


def test_health_and_reflection_answer(tiny_pd: ServedCluster) -> None:
    wait_until(lambda: health(tiny_pd) == health(tiny_pd, "") == SERVING, 2.0, "the health service says so")
    with grpc.insecure_channel(tiny_pd.client.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {SERVICE, "grpc.health.v1.Health"} <= set(services)


def test_health_tells_roles_apart(tiny_pd: ServedCluster) -> None:
    def by_role() -> list[int]:
        return [health(tiny_pd, f"tandem.{role}") for role in ("prefill", "decode", "both")]

    wait_until(lambda: by_role() == [SERVING, SERVING, NOT_SERVING], 2.0, "the health service tells roles apart")


def test_ray_requires_its_token(tiny_pd: ServedCluster) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")(b"", timeout=5.0)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def sampled(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(**sampling))


def tokens(*ids: int, max_tokens: int = 4) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.GenerateRequest(), "a prompt is needed: text, token_ids or chat"),
        (pb.GenerateRequest(text=""), "the prompt is empty"),
        (tokens(), "the prompt is empty"),
        (tokens(1, 2, 300), "token id 300 is outside the vocabulary of 300"),
        (tokens(*[7] * 512), "512 tokens > 511 maximum; this model's maximum context length is 512 tokens"),
        (tokens(*[7] * 500, max_tokens=13), "max_tokens must be between 1 and 12 for a prompt of 500 tokens, not 13"),
        (sampled(max_tokens=0), "max_tokens must be between 1 and 510 for a prompt of 2 tokens, not 0"),
        (sampled(temperature=-1), "temperature must be a number of at least 0, not -1"),
        (sampled(top_p=1.5), "top_p must be between 0 and 1, not 1.5"),
        (sampled(logprobs=21), "logprobs must be between 0 and 20, not 21"),
        (pb.GenerateRequest(model="gpt", text="hi"), "model 'gpt' is not served here; 'tiny-llama' is"),
        (pb.GenerateRequest(chat=pb.Chat()), "the chat has no messages"),
    ],
    ids=lambda value: "" if isinstance(value, pb.GenerateRequest) else None,
)
def test_bad_request_is_refused_with_its_reason(
    tiny_pd: ServedCluster, request_: pb.GenerateRequest, message: str
) -> None:
    with pytest.raises(TandemError) as refused:
        list(tiny_pd.client.generate(request_, timeout_s=5.0))
    assert refused.value.code == "INVALID_ARGUMENT"
    assert message in str(refused.value)


def test_cancelled_stream_leaves_nothing_behind(tiny_pd: ServedCluster) -> None:
    responses = tiny_pd.client.generate(tiny_pd.request([1, 2, 3], max_tokens=500, ignore_eos=True))
    for _ in range(3):
        next(responses)
    assert tiny_pd.client.server_info().num_requests == 1
    responses.close()
    tiny_pd.wait_clean(within_s=2.0)


def test_many_random_cancellations_leave_nothing_behind(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    """Cancels while waiting, in prefill, in transfer, without pages, and in decode."""
    rng = random.Random(7)
    stems = [random_ids(rng, 300) for _ in range(4)]

    def serve_some(number: int) -> str:
        rng = random.Random(number)
        prompt_ids = rng.choice(stems)[: rng.randint(1, 300)] + random_ids(rng, rng.randint(0, 100))
        request = tiny_pd.request(prompt_ids, max_tokens=rng.randint(1, 100), ignore_eos=True)
        if number % 2:
            with suppress(TandemError):
                list(tiny_pd.client.generate(request, timeout_s=rng.uniform(0.002, 0.25)))
                return "finished"
            return "timed out"
        responses = tiny_pd.client.generate(request, timeout_s=30.0)
        for _ in range(rng.randint(1, 20)):
            if next(responses).finish_reason:
                return "finished"
        responses.close()
        return "cancelled"

    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(serve_some, range(90)))
    print({end: ends.count(end) for end in set(ends)})
    assert len(ends) - ends.count("finished") >= 60
    tiny_pd.wait_clean()
    # Pages cached by cancelled requests must be right.
    for stem in stems:
        assert tiny_pd.complete(stem).token_ids == tiny_oracle.generate(stem, 24)


def test_requests_beyond_the_pools_are_served(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    """Eight requests grow to 29 pages each, of 128: some restart, unseen by clients."""
    rng = random.Random(8)
    prompts = [random_ids(rng, 60) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: tiny_pd.complete(p, max_tokens=400, ignore_eos=True), prompts))
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == answer.last.usage.completion_tokens == 400
        assert tiny_oracle.confirms(prompt_ids, answer.token_ids)
    print("attempts", [answer.last.handover.attempts for answer in answers])
    assert max(answer.last.handover.attempts for answer in answers) > 1


def assert_served_again(served: ServedCluster, oracle: Oracle, worker_id: str, old_pid: int) -> None:
    served.wait_ready()
    worker = served.worker(worker_id)
    assert worker is not None and worker.pid != old_pid
    wait_until(lambda: health(served) == SERVING, 2.0, "the health service says so")
    prompt_ids = random_ids(random.Random(old_pid), 100)
    assert served.complete(prompt_ids).token_ids == oracle.generate(prompt_ids, 24)


def test_streams_wait_for_a_killed_decode_worker(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    answer = Answer()
    responses = tiny_pd.client.generate(tiny_pd.request([1, 2, 3], max_tokens=500, ignore_eos=True), timeout_s=60.0)
    while len(answer.token_ids) < 3:
        answer.add(next(responses))
    pid = tiny_pd.kill("decode-0")
    wait_until(lambda: health(tiny_pd) == NOT_SERVING, 2.0, "the health service says so")
    assert "no decode worker is connected" in tiny_pd.client.server_info().not_ready_reason
    for response in responses:
        answer.add(response)
    assert len(answer.token_ids) == 500 and tiny_oracle.confirms([1, 2, 3], answer.token_ids)
    assert_served_again(tiny_pd, tiny_oracle, "decode-0", pid)


def test_requests_wait_for_a_killed_prefill_worker(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    """And a stream behind its handover goes on."""
    handed_over = Answer()
    decoding = tiny_pd.client.generate(tiny_pd.request([1, 2, 3], max_tokens=500, ignore_eos=True), timeout_s=60.0)
    for _ in range(3):
        handed_over.add(next(decoding))
    # The stopped process takes no requests: this one waits until the kill.
    pid = tiny_pd.kill("prefill-0", signal.SIGSTOP)
    prompt_ids = random_ids(random.Random(9), 100)
    with ThreadPoolExecutor(1) as pool:
        queued = pool.submit(tiny_pd.complete, prompt_ids)
        wait_until(lambda: tiny_pd.client.server_info().num_requests == 2, 2.0, "the second request is there")
        tiny_pd.kill("prefill-0")
        assert queued.result(timeout=60.0).token_ids == tiny_oracle.generate(prompt_ids, 24)
    for response in decoding:
        handed_over.add(response)
    assert len(handed_over.token_ids) == 500 and tiny_oracle.confirms([1, 2, 3], handed_over.token_ids)
    assert_served_again(tiny_pd, tiny_oracle, "prefill-0", pid)


def test_ray_keeps_no_record_of_calls(tiny_pd: ServedCluster) -> None:
    """It would keep 4 KiB for each of 100,000 calls, such as those that ask processes for signs of life."""
    assert ray.timeline() == []
