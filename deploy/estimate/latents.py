"""Costs of latent attention beyond attention by head. docs/estimate.md explains the formulas and figures."""

from tandem.engine.models.config import ModelConfig

# Fitted to decode steps of DeepSeek-V2-Lite on an H200 (docs/gpu.md): share of the copy rate at which attention
# reads latents, and overhead per layer of the kernels that attention by head does not have.
LATENT_READ_SHARE = 0.95
# The same of FP8: products take as long as over bfloat16.
FP8_LATENT_READ_SHARE = 0.55
LATENT_LAYER_S = 25e-6
# Steps of so few rows have fewer kernels.
MAX_FEW_ROWS = 4
FEW_ROWS_LAYER_S = 7e-6


def expansion_flops(model: ModelConfig, num_before: int) -> int:
    """FLOP that make keys and values of a cached prefix's latents; 0 without latents. The products (common_flops)
    have those of a prompt's own tokens."""
    latent = model.latent
    if latent is None:
        return 0
    return 2 * latent.kv_rank * model.num_q_heads * (latent.nope_dim + latent.value_dim) * model.num_layers * num_before
