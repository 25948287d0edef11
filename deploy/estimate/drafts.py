"""Work of a model that drafts. docs/estimate.md explains the formulas."""

from dataclasses import replace

from tandem.engine.draft_models.config import DRAFT, DrafterConfig
from tandem.engine.floors import (
    BYTES_PER_NUMBER,
    DTYPE,
    attention_flops,
    common_flops,
    expert_flops,
    read_weight_bytes,
)
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of


def drafter_weight_bytes(drafter: DrafterConfig, num_rows: int) -> int:
    """Returns the bytes of weights that a pass of num_rows reads, with the output matrix that it shares."""
    model, hidden = drafter.model, drafter.model.hidden_size
    if drafter.source == DRAFT:
        return read_weight_bytes(model, num_rows)
    if drafter.eagle is not None:
        return drafter.weight_bytes
    numbers = 2 * hidden * hidden + model.vocab_size * hidden
    layer = read_weight_bytes(_with_next_layer(model), num_rows) - read_weight_bytes(model, num_rows)
    return layer + BYTES_PER_NUMBER * numbers


def drafter_flops(drafter: DrafterConfig, num_rows: int, num_logits: int) -> float:
    """Returns the FLOP of a pass's products. An FP8 product counts half. Args: num_logits: rows that draft."""
    model, hidden = drafter.model, drafter.model.hidden_size
    if drafter.source == DRAFT:
        return common_flops(model, num_rows, num_logits)
    if drafter.eagle is not None:
        head = drafter.eagle.vocab_size * hidden
        return 2 * ((drafter.weight_bytes // BYTES_PER_NUMBER - head) * num_rows + head * num_logits)
    behind = _with_next_layer(model)
    layer = common_flops(behind, num_rows, 0) - common_flops(model, num_rows, 0)
    layer += expert_flops(behind, num_rows) - expert_flops(model, num_rows)
    return layer + 2 * hidden * (2 * hidden * num_rows + model.vocab_size * num_logits)


def drafter_prompt_flops(drafter: DrafterConfig, num_requests: int, prompt_len: int, num_before: int) -> float:
    """Returns the FLOP of a pass over prompts, which draft nothing. Args: num_before: cached tokens before each."""
    attention = attention_flops(_own_layers(drafter), prompt_len, num_before)
    return drafter_flops(drafter, num_requests * prompt_len, 0) + num_requests * attention


def drafter_kv_bytes(drafter: DrafterConfig) -> int:
    """Returns the bytes of a token's KV, which has the compute dtype."""
    return page_layout_of(_own_layers(drafter), 1, DTYPE, "auto").page_bytes


def _own_layers(drafter: DrafterConfig) -> ModelConfig:
    return replace(drafter.model, num_layers=drafter.num_layers)


def _with_next_layer(model: ModelConfig) -> ModelConfig:
    return replace(model, num_layers=model.num_layers + 1)
