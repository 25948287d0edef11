"""Lower bounds of run times, from bytes read and operations. Imports no torch.

They assume that tokens choose experts evenly; uneven choices read fewer bytes. Formulas and measurements:
docs/estimate.md.
"""

from dataclasses import replace
from typing import NamedTuple

from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of

# Weights other than FP8, and unquantized KV, are bfloat16.
BYTES_PER_NUMBER = 2
DTYPE = "bfloat16"
FP8_BYTES_PER_NUMBER = 1
# Relative to bfloat16, by the data sheets of all GPUs that multiply FP8.
FP8_SPEED = 2


class Limits(NamedTuple):
    """Attributes: copy_bandwidth: bytes per second; matmul_rate: bfloat16 FLOP per second."""

    copy_bandwidth: float
    matmul_rate: float


def decode_floor(
    model: ModelConfig,
    limits: Limits,
    batch_size: int,
    kv_len: int,
    kv_cache_dtype: str = "auto",
    num_rows: int | None = None,
) -> float:
    """Returns the seconds of a decode step over kv_len tokens each: reading weights and KV, or the matrix products and
    attention over latents, whichever is longer. Args: num_rows: tokens and drafts; None: a token of each sequence."""
    num_rows = batch_size if num_rows is None else num_rows
    num_bytes = read_weight_bytes(model, num_rows) + batch_size * read_kv_bytes(model, kv_len, kv_cache_dtype)
    products = common_flops(model, num_rows, num_rows) + expert_flops(model, num_rows)
    products += num_rows * (latent_decode_flops(model, _attended(model, kv_len)) + index_flops(model, kv_len))
    return max(num_bytes / limits.copy_bandwidth, products / limits.matmul_rate)


def prefill_floor(model: ModelConfig, limits: Limits, num_requests: int, prompt_len: int, num_before: int = 0) -> float:
    """Returns the seconds until all prompts have first tokens: reading the weights, or matrix products and causal
    attention, whichever is longer. Args: num_before: cached tokens before each prompt's prompt_len."""
    num_tokens = num_requests * prompt_len
    attention = num_requests * attention_flops(model, prompt_len, num_before)
    flops = common_flops(model, num_tokens, num_requests) + expert_flops(model, num_tokens) + attention
    return max(read_weight_bytes(model, num_tokens) / limits.copy_bandwidth, flops / limits.matmul_rate)


def mixed_floor(
    model: ModelConfig, limits: Limits, batch_size: int, kv_len: int, num_tokens: int, num_before: int = 0
) -> float:
    """Returns the seconds of a decode step over kv_len tokens each with a prompt's next tokens: reading the weights, or
    the matrix products, whichever is longer; then attention. Args: num_before: as of `prefill_floor`."""
    num_rows = batch_size + num_tokens
    flops = common_flops(model, num_rows, batch_size + 1) + expert_flops(model, num_rows)
    products = max(read_weight_bytes(model, num_rows) / limits.copy_bandwidth, flops / limits.matmul_rate)
    attention = batch_size * read_kv_bytes(model, kv_len) / limits.copy_bandwidth
    return products + attention + attention_flops(model, num_tokens, num_before) / limits.matmul_rate


def decode_flops(model: ModelConfig, batch_size: int) -> int:
    """Without attention: reading keys and values by head takes longer."""
    plain = replace(model, quantization=None)
    return round(common_flops(plain, batch_size, batch_size) + expert_flops(plain, batch_size))


def prefill_flops(model: ModelConfig, num_requests: int, prompt_len: int, num_before: int = 0) -> int:
    """Only a prompt's last row needs logits. Args: num_before: as of `prefill_floor`."""
    plain, num_tokens = replace(model, quantization=None), num_requests * prompt_len
    products = common_flops(plain, num_tokens, num_requests) + expert_flops(plain, num_tokens)
    return round(products) + num_requests * attention_flops(model, prompt_len, num_before)


def common_flops(model: ModelConfig, num_tokens: int, num_logits: int) -> float:
    """FLOP of all matrices but experts, without attention. An FP8 product counts half, as it takes half the time.

    Args:
        num_logits: rows multiplied by the output matrix.
    """
    numbers = _Numbers.of(model)
    return 2 * ((numbers.projections / _speed(model) + numbers.plain) * num_tokens + numbers.head * num_logits)


def expert_flops(model: ModelConfig, num_tokens: int) -> float:
    """FLOP of each token's chosen experts. An FP8 product counts half."""
    num_chosen = model.experts.routing.num_chosen if model.experts is not None else 0
    return 2 * _Numbers.of(model).expert / _speed(model) * num_chosen * num_tokens


def attention_flops(model: ModelConfig, num_tokens: int, num_before: int = 0) -> int:
    """Causal attention behind `num_before` tokens."""
    # Each pair of query and key takes two products: query by key, and weight by value.
    num_pairs = attended = num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
    if model.indexer is not None:
        # Queries before attend to all tokens, those from `full` on to top_k.
        full = min(num_tokens, max(0, model.indexer.top_k - num_before))
        attended = full * num_before + full * (full + 1) // 2 + (num_tokens - full) * model.indexer.top_k
    of_heads = 2 * (model.head_dim + model.value_dim) * model.num_q_heads * model.num_layers * attended
    return of_heads + index_flops(model, num_pairs)


def latent_decode_flops(model: ModelConfig, num_tokens: int) -> int:
    """Attention of a decode step over num_tokens in all; 0 without latents.

    Every head multiplies a token's latent twice, so with many heads reading it takes less time.
    """
    if model.latent is None:
        return 0
    per_head = 2 * (model.latent.token_dim + model.latent.kv_rank)
    return per_head * model.num_q_heads * model.num_layers * num_tokens


def index_flops(model: ModelConfig, num_pairs: int) -> int:
    """FLOP of the scores by which queries choose tokens; 0 without an indexer. Args: num_pairs: of query and token."""
    if model.indexer is None:
        return 0
    return 2 * model.indexer.num_heads * model.indexer.head_dim * model.num_layers * num_pairs


def read_kv_bytes(model: ModelConfig, kv_len: int, kv_cache_dtype: str = "auto") -> int:
    """Returns the bytes that a decoded sequence of kv_len tokens reads: all its pages, or index keys of all tokens and
    latents of those chosen. Raises ValueError: the model's pages cannot have this dtype."""
    of_token = kv_bytes_per_token(model, kv_cache_dtype)
    if model.indexer is None:
        return kv_len * of_token
    index_key = BYTES_PER_NUMBER * model.num_layers * model.indexer.head_dim
    return kv_len * index_key + _attended(model, kv_len) * (of_token - index_key)


def kv_bytes_per_token(model: ModelConfig, kv_cache_dtype: str = "auto") -> int:
    """Raises ValueError: the model's pages cannot have this dtype."""
    return page_layout_of(model, 1, DTYPE, kv_cache_dtype).page_bytes


def read_weight_bytes(model: ModelConfig, num_tokens: int) -> int:
    """Bytes that a forward pass of num_tokens reads: all matrices except the embedding, read by rows, and experts that
    no token chose."""
    return common_weight_bytes(model) + expert_weight_bytes(model, num_tokens)


def common_weight_bytes(model: ModelConfig) -> int:
    """Bytes that every forward pass reads."""
    numbers = _Numbers.of(model)
    return _projection_bytes(model) * numbers.projections + BYTES_PER_NUMBER * (numbers.plain + numbers.head)


def expert_weight_bytes(model: ModelConfig, num_tokens: int) -> int:
    """Expected bytes of the distinct experts that num_tokens choose, if all are equally likely."""
    touched = model.experts.num_touched(num_tokens) if model.experts is not None else 0
    return round(_projection_bytes(model) * _Numbers.of(model).expert * touched)


def weight_bytes(model: ModelConfig) -> int:
    """Bytes of memory, without norms, biases and scales (less than a hundredth).

    A tied embedding has memory of its own too (models/decoder.py).
    """
    numbers = _Numbers.of(model)
    num_experts = model.experts.num_experts if model.experts is not None else 0
    experts = _projection_bytes(model) * numbers.expert * num_experts
    return common_weight_bytes(model) + experts + BYTES_PER_NUMBER * numbers.head


def attention_numbers(model: ModelConfig) -> tuple[int, int]:
    """Returns the numbers of a layer's projections that may be FP8, and of those that never are."""
    hidden, num_heads, latent = model.hidden_size, model.num_q_heads, model.latent
    if latent is None:
        return hidden * model.head_dim * (2 * num_heads + 2 * model.num_kv_heads), 0
    queries = (latent.q_rank or hidden) * num_heads * latent.qk_dim + hidden * latent.q_rank
    output = num_heads * latent.value_dim * hidden
    from_latent = latent.kv_rank * num_heads * (latent.nope_dim + latent.value_dim)
    plain, indexer = hidden * latent.token_dim + from_latent, model.indexer
    if indexer is not None:
        queries += latent.q_rank * indexer.num_heads * indexer.head_dim
        plain += hidden * (indexer.head_dim + indexer.num_heads)
    return queries + output, plain


def _attended(model: ModelConfig, kv_len: int) -> int:
    """Returns the tokens that a query behind kv_len attends to."""
    return kv_len if model.indexer is None else min(kv_len, model.indexer.top_k)


def _projection_bytes(model: ModelConfig) -> int:
    return FP8_BYTES_PER_NUMBER if model.quantization else BYTES_PER_NUMBER


def _speed(model: ModelConfig) -> int:
    return FP8_SPEED if model.quantization else 1


class _Numbers(NamedTuple):
    """Numbers in the matrices of all layers.

    Attributes:
        projections: of attention, dense MLPs and shared experts; may be FP8.
        plain: routers, gates of shared experts, projections to latents of keys and from them; never FP8.
        expert: of one expert in each sparse layer; may be FP8.
        head: output matrix, as large as the embedding; never FP8.
    """

    projections: int
    plain: int
    expert: int
    head: int

    @classmethod
    def of(cls, model: ModelConfig) -> "_Numbers":
        hidden, experts = model.hidden_size, model.experts
        attention, plain = (model.num_layers * numbers for numbers in attention_numbers(model))
        # Gate, up and down.
        mlp = 3 * hidden
        head = model.vocab_size * hidden
        if experts is None:
            return cls(attention + model.num_layers * mlp * model.intermediate_size, plain, 0, head)
        num_sparse, num_dense = experts.num_sparse_layers(model.num_layers), len(experts.dense_layers)
        mlps = num_dense * mlp * model.intermediate_size + num_sparse * mlp * experts.shared_intermediate_size
        plain += num_sparse * hidden * (experts.num_experts + experts.shared_gate)
        return cls(attention + mlps, plain, num_sparse * mlp * experts.intermediate_size, head)
