"""Token streams over gRPC: whole, cancelled and resumed."""

import json
import random
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import grpc

from benchmarks.soak.case import Case
from benchmarks.soak.kinds.base import Clients, Kind
from tandem.client.progress import RETRY_DELAY_S
from tandem.client.requests import make_request
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

TIMEOUT_S = 180.0
_LOGPROB_TOLERANCE = 2e-3
# A router that is away, or full of resumed streams.
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 32, "temperature": 0.8, "top_p": 0.9, "seed": 21},
    {"max_tokens": 24, "temperature": 1.2, "top_k": 40, "min_p": 0.02, "seed": 12},
    {"max_tokens": 40, "temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.2, "seed": 13},
    {"max_tokens": 16, "temperature": 1.0, "repetition_penalty": 1.2, "seed": 14, "ignore_eos": True},
)
_PATTERN = r"[A-Z][a-z]{2,9} is (red|green|blue)\."
_ANSWERS = ["yes, always", "no, never", "it depends on the weather"]


class Greedy(Kind):
    name = "greedy, gRPC"

    def sampling(self, number: int) -> dict[str, Any]:
        return {"max_tokens": 16 + 12 * (number % 3), "ignore_eos": True}

    def request(self, number: int) -> pb.GenerateRequest:
        return make_request(self.prompts[number % len(self.prompts)], **self.sampling(number))

    def first(self, clients: Clients, number: int) -> Any:
        return collect(clients.grpc.generate(self.request(number), TIMEOUT_S))

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        return [Case(self.prompts[number % len(self.prompts)], self.sampling(number), answer)]


class Sampled(Greedy):
    name = "sampled, gRPC"

    def sampling(self, number: int) -> dict[str, Any]:
        return SAMPLINGS[number % len(SAMPLINGS)]


class Cancelled(Sampled):
    """The client leaves after some tokens."""

    name = "cancelled, gRPC"

    def again(self, clients: Clients, number: int, rng: random.Random) -> Any:
        enough = rng.randint(0, 12)
        token_ids: list[int] = []
        stream = clients.grpc.generate(self.request(number), TIMEOUT_S)
        for response in stream:
            token_ids += response.token_ids
            if len(token_ids) >= enough:
                break
        stream.close()
        return token_ids

    def is_right(self, first: Any, again: Any) -> bool:
        return bool(first[: len(again)] == again)

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        (case,) = super().cases(number, answer, is_first=is_first)
        return [replace(case, is_whole=is_first)]


class Resumed(Sampled):
    """The client breaks the stream after some tokens, and resumes it, perhaps at another router."""

    name = "resumed, gRPC"

    def again(self, clients: Clients, number: int, rng: random.Random) -> Any:
        request = self.request(number)
        enough = rng.randint(1, 12)
        token_ids: list[int] = []
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            with grpc.insecure_channel(clients.grpc.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
                call = inference_pb2_grpc.InferenceStub(own).Generate(request, timeout=TIMEOUT_S)
                try:
                    for response in call:
                        token_ids += response.token_ids
                        _note(request.resume, response)
                        if response.finish_reason:
                            return token_ids
                        if enough and len(token_ids) >= enough:
                            break
                except grpc.RpcError as error:
                    if error.code() not in _PASSING:
                        raise
                    time.sleep(RETRY_DELAY_S)
                finally:
                    call.cancel()
            enough = 0
        raise ValueError(f"the stream did not end in {TIMEOUT_S:.0f} s")


class Logprobs(Greedy):
    """Log probabilities of prompt and output."""

    name = "log probabilities, gRPC"

    def sampling(self, number: int) -> dict[str, Any]:
        return {"max_tokens": 12}

    def first(self, clients: Clients, number: int) -> Any:
        token_ids: list[int] = []
        values: list[float] = []
        request = make_request(
            self.prompts[number % len(self.prompts)], **self.sampling(number), logprobs=2, prompt_logprobs=1
        )
        for response in clients.grpc.generate(request, TIMEOUT_S):
            token_ids += response.token_ids
            values += response.prompt_logprobs.logprobs
            values += [token.logprob for token in response.logprobs]
        return token_ids, values

    def is_right(self, first: Any, again: Any) -> bool:
        (first_ids, first_values), (ids, values) = first, again
        return first_ids == ids and len(first_values) == len(values) and near(first_values, values)

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        # Of another output the values could not be confirmed.
        return super().cases(number, answer[0], is_first=is_first) if is_first else []


class Grammar(Greedy):
    """A regular expression and a list of choices."""

    name = "regex and choices, gRPC"

    def sampling(self, number: int) -> dict[str, Any]:
        return {"max_tokens": 48, "temperature": 0.9, "seed": number}

    def request(self, number: int) -> pb.GenerateRequest:
        constraint = {"regex": _PATTERN} if number % 2 else {"choices": _ANSWERS}
        prompt = self.prompts[number % len(self.prompts)]
        return make_request(prompt, structured_output=constraint, **self.sampling(number))

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        structure = ("regex", _PATTERN) if number % 2 else ("choice", json.dumps(_ANSWERS))
        (case,) = super().cases(number, answer, is_first=is_first)
        return [replace(case, structure=structure)]


class Embedded(Kind):
    name = "embeddings, gRPC"

    def first(self, clients: Clients, number: int) -> Any:
        prompts = [self.prompts[(number + i) % len(self.prompts)] for i in range(2)]
        return [value for answer in clients.grpc.embed(prompts, timeout_s=TIMEOUT_S) for value in answer.values]

    def is_right(self, first: Any, again: Any) -> bool:
        return len(first) == len(again) and near(first, again)


def collect(stream: Generator[pb.GenerateResponse]) -> list[int]:
    """Return a stream's token ids. Raises ValueError: they do not follow each other."""
    token_ids: list[int] = []
    finish_reason: int = 0
    for response in stream:
        if response.index != len(token_ids) or finish_reason:
            raise ValueError(f"a message at {response.index} follows {len(token_ids)} tokens")
        token_ids += response.token_ids
        finish_reason = response.finish_reason
    if not finish_reason:
        raise ValueError("the stream ended without a reason")
    return token_ids


def near(some: Any, others: Any) -> bool:
    return all(abs(a - b) <= _LOGPROB_TOLERANCE for a, b in zip(some, others, strict=True))


def _note(resume: pb.Resume, response: pb.GenerateResponse) -> None:
    resume.token = response.resume_token or resume.token
    resume.proof = response.resume_proof or resume.proof
    resume.token_ids.extend(response.token_ids)
    resume.num_characters += len(response.text)
