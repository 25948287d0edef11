"""What a device takes for a forward."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFactors:
    """All in seconds but the last.

    Attributes:
        prompt: of a forward of prompts, of each token, and of each token that one of these attends to.
        step: of a decode step, of each request in it, and of each token of their KV.
        handover: from a first token until another worker may begin with the second, and of each page shipped. What that
            worker's running step takes meanwhile comes on top of it.
        pool_tokens: tokens that the pool holds.
    """

    prompt: tuple[float, float, float]
    step: tuple[float, float, float]
    handover: tuple[float, float]
    pool_tokens: int = 800_000

    def prompt_s(self, num_tokens: int, num_attended: int) -> float:
        fixed, token, attended = self.prompt
        return fixed + token * num_tokens + attended * num_attended

    def step_s(self, num_requests: int, num_kv_tokens: int) -> float:
        fixed, request, token = self.step
        return fixed + request * num_requests + token * num_kv_tokens

    def handover_s(self, num_pages: int) -> float:
        fixed, page = self.handover
        return fixed + page * num_pages


# An H200 with Llama-3.1-8B in bfloat16, fitted to docs/benchmarks.md: 13.9 ms for a prompt of 512 tokens, 99 for 4,096
# and 203 for 8,192; steps of 4.1 ms at batch 1, 10.9 at 128 and 17.4 at 256, with contexts of 1,152 tokens.
H200_8B = DeviceFactors(prompt=(2.4e-3, 22.2e-6, 6.8e-10), step=(4.05e-3, 16e-6, 3.2e-8), handover=(2e-3, 6e-6))
