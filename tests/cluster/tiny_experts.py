"""Tiny mixtures of experts of every supported family, with byte tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.conftest import EOS_TOKEN_IDS, MAX_MODEL_LEN, VOCAB_SIZE, Oracle, save_byte_tokenizer
from tests.fakes.random_weights import spread_weights

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
_QWEN: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": True}
# By the name of transformers' model type.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_QWEN, "num_experts_per_tok": 3, "head_dim": 32},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "qwen2_moe": {**_QWEN, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 80},
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 40, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    # Prompts are longer than what a query attends to. Two layers have experts.
    "deepseek_v32": {
        **_LATENT,
        "num_hidden_layers": 3,
        "q_lora_rank": 40,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "index_n_heads": 12,
        "index_head_dim": 20,
        "index_topk": 21,
    },
    "glm4_moe_lite": {**_LATENT, "q_lora_rank": 40},
}
# The rounding of float32 moves these models' logits by up to 4e-5.
MIN_MARGIN = 1e-4


def save_tiny_experts(directory: Path, family: str) -> None:
    """Save some layers of random weights in float32, and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=112,
        num_attention_heads=4,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_IDS,
        **{"num_hidden_layers": 2, "num_key_value_heads": 2, **FAMILIES[family]},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    spread_weights(model)
    model.save_pretrained(directory)
    save_byte_tokenizer(directory)


class ClearOracle(Oracle):
    """Greedy decoding that takes rounding into account."""

    def generate(self, prompt_ids: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """Return the output ids. Assert that rounding cannot change them."""
        output_ids = super().generate(prompt_ids, max_tokens, ignore_eos=ignore_eos)
        best = self.logits([*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1].topk(2).values
        margin = float((best[:, 0] - best[:, 1]).min())
        assert margin > MIN_MARGIN, f"two tokens are {margin:.2g} apart: take another seed"
        return output_ids

    def confirms(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> bool:
        """Return whether each token of a long output is the best one up to rounding."""
        logits = self.logits([*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1]
        chosen = logits[range(len(output_ids)), list(output_ids)]
        return bool((chosen > logits.amax(-1) - MIN_MARGIN).all())
