"""The gRPC contract: the proto file suffices, and 0 differs from an absent field."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.client import TandemError
from tandem.v1 import inference_pb2 as pb
from tests.cluster.conftest import Oracle, ServedCluster

PROTO_DIR = Path(__file__).parents[2] / "tandem/v1"
PROMPT = "The old lighthouse"
OUTSIDER = """
import json
import sys

directory, address, prompt = sys.argv[1:]
sys.path.insert(0, directory)
# Whatever is installed here: this is somebody else's program.
sys.modules["tandem"] = None
import grpc
import inference_pb2 as pb
import inference_pb2_grpc

channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
stub = inference_pb2_grpc.InferenceStub(channel)
info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
sampling = pb.SamplingParams(max_tokens=12, ignore_eos=True)
request = pb.GenerateRequest(request_id="mine", model=info.model, text=prompt, sampling=sampling)
responses = list(stub.Generate(request, timeout=30))
print(json.dumps({
    "ready": info.ready,
    "request_ids": sorted({r.request_id for r in responses}),
    "indexes": [r.index for r in responses],
    "token_ids": [i for r in responses for i in r.token_ids],
    "text": "".join(r.text for r in responses),
    "finish_reasons": [pb.FinishReason.Name(r.finish_reason) for r in responses[-2:]],
    "usage": [responses[-1].usage.prompt_tokens, responses[-1].usage.completion_tokens],
    "phases": [phase.name for phase in responses[-1].phases],
}))
"""


def test_proto_file_suffices_for_a_client(tiny_pd: ServedCluster, tiny_oracle: Oracle, tmp_path: Path) -> None:
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "grpc_python_out")]
    compiler = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO_DIR}", *outputs, "inference.proto"]
    subprocess.run(compiler, check=True, timeout=60)
    outsider = [sys.executable, "-I", "-c", OUTSIDER, str(tmp_path), tiny_pd.cluster.addresses.grpc, PROMPT]
    done = subprocess.run(outsider, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    prompt_ids = tiny_oracle.tokenizer.encode(PROMPT).ids
    expected = tiny_oracle.generate(prompt_ids, 12, ignore_eos=True)
    assert (seen["token_ids"], seen["text"]) == (expected, tiny_oracle.decode(expected))
    assert seen["ready"] and seen["request_ids"] == ["mine"]
    assert seen["indexes"] == sorted(seen["indexes"]) and seen["indexes"][0] == 0 and seen["indexes"][-1] == 12
    assert seen["finish_reasons"] == ["FINISH_REASON_UNSPECIFIED", "FINISH_REASON_LENGTH"]
    assert seen["usage"] == [len(PROMPT), 12]
    assert {"ttft", "prefill", "handover", "e2e"} <= set(seen["phases"])


def outputs(served: ServedCluster, num_times: int = 3, **sampling: Any) -> set[tuple[int, ...]]:
    """Return the distinct outputs of one repeated request."""
    sampling = {"max_tokens": 8, "ignore_eos": True, **sampling}
    return {tuple(served.complete(list(range(10)), **sampling).token_ids) for _ in range(num_times)}


def test_seed_0_is_a_seed(tiny_pd: ServedCluster) -> None:
    assert len(outputs(tiny_pd, temperature=1.0, seed=0)) == 1
    assert len(outputs(tiny_pd, temperature=1.0)) == 3


def test_zero_differs_from_absent(tiny_pd: ServedCluster) -> None:
    greedy = outputs(tiny_pd)
    assert len(greedy) == 1
    # temperature defaults to 0. top_p defaults to 1; 0 leaves one token.
    assert outputs(tiny_pd, temperature=0.0) == outputs(tiny_pd, temperature=1.0, top_p=0.0) == greedy
    # top_k and min_p default to 0: all tokens.
    assert len(outputs(tiny_pd, temperature=1.0, top_k=0, min_p=0.0)) == 3
    assert outputs(tiny_pd, temperature=1.0, min_p=1.0) == outputs(tiny_pd, temperature=1.0, top_k=1) == greedy


@pytest.mark.parametrize("field", ["max_tokens", "repetition_penalty"])
def test_zero_is_refused_where_absent_is_not(tiny_pd: ServedCluster, field: str) -> None:
    with pytest.raises(TandemError, match=f"{field} must be between") as refused:
        outputs(tiny_pd, **{field: 0})
    assert refused.value.code == "INVALID_ARGUMENT"


def test_documented_default_limit(tiny_pd: ServedCluster) -> None:
    request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(ignore_eos=True))
    *_, last = tiny_pd.client.generate(request, timeout_s=30.0)
    assert last.usage.completion_tokens == 128
    request = pb.GenerateRequest(text="x" * 500, sampling=pb.SamplingParams(ignore_eos=True))
    *_, last = tiny_pd.client.generate(request, timeout_s=30.0)
    assert last.usage.completion_tokens == 12


def test_zero_logprobs_differs_from_absent(tiny_pd: ServedCluster) -> None:
    def logprobs(**sampling: Any) -> list[pb.TokenLogprobs]:
        request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(max_tokens=4, ignore_eos=True, **sampling))
        return [entry for r in tiny_pd.client.generate(request, timeout_s=30.0) for entry in r.logprobs]

    assert logprobs() == []
    none, two = logprobs(logprobs=0), logprobs(logprobs=2)
    assert [len(entry.top) for entry in none] == [0] * 4
    assert [len(entry.top) for entry in two] == [2] * 4
    assert [entry.logprob for entry in none] == pytest.approx([entry.logprob for entry in two])
