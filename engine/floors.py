"""Lower bounds of run times, from bytes read and operations. Imports no torch.

Formulas and measurements: docs/estimate.md.
"""

from typing import NamedTuple

from tandem.engine.attention.layout import QUANTIZED_BYTES
from tandem.engine.config import KV_CACHE_DTYPES
from tandem.engine.models.config import ModelConfig

# Weights other than FP8, and unquantized KV, are bfloat16.
BYTES_PER_NUMBER = 2
FP8_BYTES_PER_NUMBER = 1
# Relative to bfloat16, by the data sheets of all GPUs that multiply FP8.
FP8_SPEED = 2


class Limits(NamedTuple):
    """Attributes: copy_bandwidth: bytes per second; matmul_rate: bfloat16 FLOP per second."""

    copy_bandwidth: float
    matmul_rate: float


def decode_floor(
    model: ModelConfig, limits: Limits, batch_size: int, kv_len: int, kv_cache_dtype: str = "auto"
) -> float:
    """Returns the seconds of a decode step over kv_len tokens each: reading weights and KV, or the matrix products,
    whichever is longer."""
    num_bytes = read_weight_bytes(model) + batch_size * kv_len * kv_bytes_per_token(model, kv_cache_dtype)
    return max(num_bytes / limits.copy_bandwidth, decode_products(model, batch_size, limits.matmul_rate))


def prefill_floor(model: ModelConfig, limits: Limits, num_requests: int, prompt_len: int) -> float:
    """Returns the seconds until all prompts have first tokens: reading the weights, or matrix products and causal
    attention, whichever is longer."""
    products = prefill_products(model, num_requests, prompt_len, limits.matmul_rate)
    return max(read_weight_bytes(model) / limits.copy_bandwidth, products)


def decode_products(model: ModelConfig, batch_size: int, matmul_rate: float) -> float:
    """Seconds of decode_flops."""
    return (decode_flops(model, batch_size) - _saved_flops(model, batch_size)) / matmul_rate


def prefill_products(model: ModelConfig, num_requests: int, prompt_len: int, matmul_rate: float) -> float:
    """Seconds of prefill_flops."""
    flops = prefill_flops(model, num_requests, prompt_len)
    return (flops - _saved_flops(model, num_requests * prompt_len)) / matmul_rate


def mixed_products(model: ModelConfig, batch_size: int, num_tokens: int, matmul_rate: float) -> float:
    """With logits for one row of the chunk."""
    of_layers = 2 * _num_layer_weights(model) * num_tokens - _saved_flops(model, num_tokens)
    return decode_products(model, batch_size, matmul_rate) + (of_layers + 2 * _num_head_weights(model)) / matmul_rate


def decode_flops(model: ModelConfig, batch_size: int) -> int:
    """Without attention: reading its KV takes longer."""
    return 2 * (_num_layer_weights(model) + _num_head_weights(model)) * batch_size


def prefill_flops(model: ModelConfig, num_requests: int, prompt_len: int) -> int:
    """Only a prompt's last row needs logits."""
    products = 2 * _num_layer_weights(model) * prompt_len + 2 * _num_head_weights(model)
    return num_requests * (products + attention_flops(model, prompt_len))


def attention_flops(model: ModelConfig, num_tokens: int, num_before: int = 0) -> int:
    """Causal attention behind `num_before` tokens."""
    # Each pair of query and key takes two products over head_dim: query by key, and weight by value.
    num_pairs = num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
    return 2 * 2 * model.head_dim * model.num_q_heads * model.num_layers * num_pairs


def kv_bytes_per_token(model: ModelConfig, kv_cache_dtype: str = "auto") -> int:
    num_bytes = QUANTIZED_BYTES.get(KV_CACHE_DTYPES[kv_cache_dtype], BYTES_PER_NUMBER)
    return num_bytes * model.num_layers * 2 * model.num_kv_heads * model.head_dim


def read_weight_bytes(model: ModelConfig) -> int:
    """All matrices except the embedding, read by rows."""
    of_layers = FP8_BYTES_PER_NUMBER if model.quantization else BYTES_PER_NUMBER
    return of_layers * _num_layer_weights(model) + BYTES_PER_NUMBER * _num_head_weights(model)


def weight_bytes(model: ModelConfig) -> int:
    """Without norms, biases and scales (less than a thousandth)."""
    embedding = 0 if model.tie_word_embeddings else BYTES_PER_NUMBER * _num_head_weights(model)
    return read_weight_bytes(model) + embedding


def _saved_flops(model: ModelConfig, num_tokens: int) -> float:
    return 2 * _num_layer_weights(model) * num_tokens * (1 - 1 / FP8_SPEED) if model.quantization else 0


def _num_layer_weights(model: ModelConfig) -> int:
    attention = model.hidden_size * model.head_dim * (2 * model.num_q_heads + 2 * model.num_kv_heads)
    return model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)


def _num_head_weights(model: ModelConfig) -> int:
    return model.vocab_size * model.hidden_size
