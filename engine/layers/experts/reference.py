"""A mixture of experts in plain torch, expert by expert: for CPUs, and as the reference of kernels."""

import torch
import torch.nn.functional as F

from tandem.engine.layers.experts.base import Experts, SharedExpert
from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.experts.routing import choose_experts, router_logits
from tandem.engine.layers.fp8 import as_quantized

MAX_BLOCK = 64


def mixture(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Returns the weighted sum of each token's experts, (num_tokens, hidden_size) of x's dtype.

    Rounds where Hugging Face's implementation does, but weighs and sums in float32, in the order of choice.

    Args:
        x: normalized inputs, (num_tokens, hidden_size).
    """
    router = experts.router
    weights, chosen = choose_experts(router_logits(x, router.weight, router.routing), router.bias, router.routing)
    outputs = _pair_outputs(x, chosen, experts)  # (num_tokens, num_chosen, hidden_size)
    total = (outputs.float() * weights[..., None]).sum(1).to(x.dtype)
    return total if experts.shared is None else total + shared_output(x, experts.shared)


def shared_output(x: torch.Tensor, shared: SharedExpert) -> torch.Tensor:
    gate, up = shared.gate_up(x).chunk(2, dim=-1)
    output = shared.down(F.silu(gate) * up)
    return output if shared.gate is None else F.linear(x, shared.gate).sigmoid() * output


def _pair_outputs(x: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Computes each pair of token and expert in blocks of a size that follows from the number of tokens alone.

    A product's rounding depends on its number of rows. With the number of an expert's tokens it would depend on other
    requests.
    """
    num_tokens, num_chosen = chosen.shape
    outputs = x.new_zeros(num_tokens * num_chosen, x.shape[1])
    size = min(MAX_BLOCK, 1 << (num_tokens - 1).bit_length())
    for expert in (chosen.unique() - experts.first).tolist():
        if not 0 <= expert < experts.gate_up.num_experts:
            continue
        pairs = (chosen.flatten() == experts.first + expert).nonzero().flatten()
        gate_up, down = experts.gate_up.of_expert(expert).to(x.dtype), experts.down.of_expert(expert).to(x.dtype)
        for block in pairs.split(size):
            rows = x.new_zeros(size, x.shape[1])
            rows[: len(block)] = x[block // num_chosen]
            gate, up = F.linear(_rounded(rows, experts.gate_up), gate_up).chunk(2, dim=-1)
            outputs[block] = F.linear(_rounded(F.silu(gate) * up, experts.down), down)[: len(block)]
    return outputs.unflatten(0, (num_tokens, num_chosen))


def _rounded(x: torch.Tensor, linear: ExpertLinear) -> torch.Tensor:
    return x if linear.inputs is None else as_quantized(x, linear.inputs, linear.input_scale)
