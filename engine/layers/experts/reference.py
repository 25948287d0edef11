"""A mixture of experts in plain torch, expert by expert: for CPUs, and as the reference of kernels."""

import torch
import torch.nn.functional as F

from tandem.engine.layers.experts.base import Experts, SharedExpert
from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.experts.routing import choose_experts, router_logits, sigmoid
from tandem.engine.layers.fp8 import as_quantized

MAX_BLOCK = 64
# torch computes fewer numbers on one thread.
MIN_PARALLEL = 2**15


def mixture(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Returns the weighted sum of each token's experts, (num_tokens, hidden_size) of x's dtype.

    Rounds where Hugging Face's implementation does, but weighs and sums in float32, in the order of choice.

    Args:
        x: normalized inputs, (num_tokens, hidden_size).
    """
    total = mixture_of(x, *choose(x, experts), experts)
    return total if experts.shared is None else total + shared_output(x, experts.shared)


def choose(x: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts, as choose_experts returns them, and counts them."""
    weight, bias, routing = experts.router
    weights, chosen = choose_experts(router_logits(x, weight, routing), bias, routing)
    if experts.counts is not None:
        experts.counts.add(chosen)
    return weights, chosen


def mixture_of(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Returns the weighted sum of the chosen experts. Args: weights, chosen: (num_tokens, num_chosen)."""
    outputs = _pair_outputs(x, chosen, experts)  # (num_tokens, num_chosen, hidden_size)
    return (outputs.float() * weights[..., None]).sum(1).to(x.dtype)


def shared_output(x: torch.Tensor, shared: SharedExpert) -> torch.Tensor:
    output = shared.down(_gated(shared.gate_up(x)))
    return output if shared.gate is None else _shared_weight(x, shared.gate) * output


def _shared_weight(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Returns (num_tokens, 1) of x's dtype. Args: gate: (1, hidden_size)."""
    if x.device.type != "cpu":
        return F.linear(x, gate).sigmoid()
    # A product with a matrix of one row would round by the place of a token.
    return sigmoid((x.float() * gate.float()).sum(-1, keepdim=True).to(x.dtype))


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
            gated = _gated(F.linear(_rounded(rows, experts.gate_up), gate_up))
            outputs[block] = F.linear(_rounded(gated, experts.down), down)[: len(block)]
    return outputs.unflatten(0, (num_tokens, num_chosen))


def _gated(projected: torch.Tensor) -> torch.Tensor:
    """Returns silu(first half) * second half of each row, with rounding that is independent of a row's place."""
    size = projected.shape[-1] // 2
    if projected.device.type != "cpu":
        return F.silu(projected[:, :size]) * projected[:, size:]
    # Between threads, torch divides rows anywhere, and rounds otherwise where a thread's numbers end.
    parts = projected.split(max(1, (MIN_PARALLEL - 1) // size))
    return torch.cat([F.silu(part[:, :size]) * part[:, size:] for part in parts])


def _rounded(x: torch.Tensor, linear: ExpertLinear) -> torch.Tensor:
    return x if linear.inputs is None else as_quantized(x, linear.inputs, linear.input_scale)
