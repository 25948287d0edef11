"""What a device takes for a forward."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DeviceFactors:
    """All in seconds but the last.

    Attributes:
        prompt: of a forward of prompts, of each token, and of each token that one of these attends to.
        step: of a decode step, of each request in it, and of each token of their KV.
        mixed: of a forward that does both, and of each prompt token in it; requests, tokens of their KV and tokens that
            are attended to take what they take elsewhere. None: there are none, and a step runs behind the prompts.
        handover: from a first token until another worker may begin with the second, and of each page shipped. What that
            worker's running step takes meanwhile comes on top of it.
        pool_tokens: tokens that the pool holds.
    """

    prompt: tuple[float, float, float]
    step: tuple[float, float, float]
    handover: tuple[float, float]
    mixed: tuple[float, float] | None = None
    pool_tokens: int = 800_000

    def prompt_s(self, num_tokens: int, num_attended: int) -> float:
        fixed, token, attended = self.prompt
        return fixed + token * num_tokens + attended * num_attended

    def step_s(self, num_requests: int, num_kv_tokens: int) -> float:
        fixed, request, token = self.step
        return fixed + request * num_requests + token * num_kv_tokens

    def mixed_s(self, num_tokens: int, num_attended: int, num_requests: int, num_kv_tokens: int) -> float:
        """Of a device that has such forwards."""
        assert self.mixed is not None
        fixed, token = self.mixed
        attended, (_, request, kv_token) = self.prompt[2], self.step
        return fixed + token * num_tokens + attended * num_attended + request * num_requests + kv_token * num_kv_tokens

    def handover_s(self, num_pages: int) -> float:
        fixed, page = self.handover
        return fixed + page * num_pages


# An H200 with Llama-3.1-8B in bfloat16. Prompts are fitted to docs/benchmarks.md: 13.9 ms for one of 512 tokens, 99 for
# 4,096 and 203 for 8,192. Steps are fitted to what their kernels take with contexts of 1,152 tokens (those of all
# layers, logits, and what lies between two graphs): 5.1 ms at batch 16, 5.8 at 32, 7.1 at 64, 9.7 at 128 and 16.1 at
# 256, within 3.1 %. Mixed forwards are fitted to 28 that were measured: 8 to 128 requests with contexts of 1,024 or
# 4,096 tokens, and 128 to 2,048 tokens of a prompt, at its beginning or behind 2,048. They are within 7 %, but for 384
# tokens beside 64 requests, which take 13 and 23 % longer than this says.
H200_8B = DeviceFactors(
    prompt=(2.4e-3, 22.2e-6, 6.8e-10), step=(4.32e-3, 7.7e-6, 3.2e-8), handover=(2e-3, 6e-6), mixed=(3.67e-3, 23.4e-6)
)
# What was measured on four of them was with steps of 4.1 ms at batch 1, 10.9 at 128 and 17.4 at 256, and none of both.
H200_8B_UNMIXED = replace(H200_8B, step=(4.05e-3, 16e-6, 3.2e-8), mixed=None)
