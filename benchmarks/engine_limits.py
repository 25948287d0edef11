"""What one GPU can do at best: its rates, measured, and the times that a model's work cannot fall below."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.models.config import ModelConfig

# Weights and KV are in bfloat16.
BYTES_PER_NUMBER = 2
COPIED_BYTES = 2**30
MATMUL_SIZE = 8192
NUM_RUNS = 20


class Limits(NamedTuple):
    """Attributes: copy_bandwidth: bytes read and written per second; matmul_rate: FLOP per second, bfloat16."""

    copy_bandwidth: float
    matmul_rate: float


def measure_limits() -> Limits:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda").random_(0, 256)
    target = torch.empty_like(source)
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").bfloat16() for _ in range(2))
    copy_s = _device_seconds(lambda: target.copy_(source))
    matmul_s = _device_seconds(lambda: torch.mm(a, b))
    return Limits(2 * COPIED_BYTES / copy_s, 2 * MATMUL_SIZE**3 / matmul_s)


def decode_floor(model: ModelConfig, limits: Limits, batch_size: int, kv_len: int) -> float:
    """Seconds of a decode step: bytes of weights and KV once, or the matrix products, whichever is longer.

    Args:
        kv_len: tokens of each sequence.
    """
    num_weights = _num_layer_weights(model) + _num_head_weights(model)
    kv_numbers = batch_size * kv_len * model.num_layers * 2 * model.num_kv_heads * model.head_dim
    num_bytes = BYTES_PER_NUMBER * (num_weights + kv_numbers)
    return max(num_bytes / limits.copy_bandwidth, 2 * num_weights * batch_size / limits.matmul_rate)


def prefill_floor(model: ModelConfig, limits: Limits, num_requests: int, prompt_len: int) -> float:
    """Seconds until as many prompts have their first tokens: bytes of weights once, or the matrix products and causal
    attention at the rate of matrix products, whichever is longer. Only a prompt's last row needs logits."""
    layers, head = _num_layer_weights(model), _num_head_weights(model)
    # A query and a key meet in one product of head_dim numbers, and so do their weight and the value.
    num_pairs = prompt_len * (prompt_len + 1) // 2
    attention = 2 * 2 * model.head_dim * model.num_q_heads * model.num_layers * num_pairs
    flops = num_requests * (2 * layers * prompt_len + 2 * head + attention)
    return max(BYTES_PER_NUMBER * (layers + head) / limits.copy_bandwidth, flops / limits.matmul_rate)


def _num_layer_weights(model: ModelConfig) -> int:
    """Numbers in the matrices of all layers."""
    attention = model.hidden_size * model.head_dim * (2 * model.num_q_heads + 2 * model.num_kv_heads)
    return model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)


def _num_head_weights(model: ModelConfig) -> int:
    """Numbers in the matrix that gives the logits."""
    return model.vocab_size * model.hidden_size


def _device_seconds(run: Callable[[], object]) -> float:
    """Median of several."""
    times = []
    for _ in range(NUM_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[NUM_RUNS // 2]
