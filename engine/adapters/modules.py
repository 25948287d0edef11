"""Modules of a model that an adapter may change. Imports no torch."""

from dataclasses import replace

from tandem.engine.models.config import ModelConfig
from tandem.engine.ranks.config import RankConfig

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def adapted_modules(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns the shape of each module's matrix, (out_size, in_size), by name: "model.layers.0.self_attn.q_proj".

    Projections of attention by head and of dense MLPs; none of experts.

    Raises:
        ValueError: the model has latent attention.
    """
    if model.latent is not None:
        raise ValueError(f"adapters are not supported for {model.architecture}, because its attention is over latents")
    hidden, intermediate = model.hidden_size, model.intermediate_size
    q_size, kv_size = model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = zip(ATTENTION, ((q_size, hidden), (kv_size, hidden), (kv_size, hidden), (hidden, q_size)), strict=True)
    mlp = zip(MLP, ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate)), strict=True)
    of_attention, of_dense = dict(attention), dict(mlp)
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(model.num_layers)
        for name, shape in (of_attention if model.is_sparse(layer) else {**of_attention, **of_dense}).items()
    }


def slot_numbers(model: ModelConfig, max_rank: int, degree: int = 1) -> int:
    """Returns the numbers of one slot's matrices on one of `degree` ranks.

    Raises:
        ValueError: the model has latent attention.
    """
    adapted_modules(replace(model, num_layers=1, experts=None))
    q_size = model.num_q_heads // degree * model.head_dim
    kv_size = RankConfig(0, degree).kv_heads(model.num_kv_heads).num * model.head_dim
    hidden, intermediate = model.hidden_size, model.intermediate_size // degree
    attention = (3 * hidden + q_size + 2 * kv_size) + (q_size + hidden)
    mlp = (2 * hidden + 2 * intermediate) + (intermediate + hidden)
    num_dense = sum(not model.is_sparse(layer) for layer in range(model.num_layers))
    return max_rank * (model.num_layers * attention + num_dense * mlp)
