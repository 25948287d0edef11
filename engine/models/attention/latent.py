from collections.abc import Iterator

import torch

from tandem.engine.attention.base import Attention, LatentAttention, LatentHeads
from tandem.engine.layers.linear import Linear, LinearBase
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.layers.rotary import Rotation
from tandem.engine.models.attention.base import SelfAttention
from tandem.engine.models.linears import Linears
from tandem.engine.models.rope import score_factor

# Of the norms of latents, whatever rms_norm_eps is, as in Hugging Face's implementation.
LATENT_EPS = 1e-6
_Q = ("self_attn.q_proj",)
_Q_DOWN, _Q_UP = ("self_attn.q_a_proj",), ("self_attn.q_b_proj",)
_KV_DOWN, _KV_UP = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"
_O = ("self_attn.o_proj",)


class LatentSelfAttention(SelfAttention):
    """Projections of LatentConfig.

    The projections to the latent and from it are never FP8: the first has a size that blocks do not divide, and
    attention multiplies queries and outputs by parts of the second.
    """

    def __init__(self, linears: Linears) -> None:
        config, dtype, device = linears.config, linears.dtype, linears.device
        assert config.latent is not None
        latent, num_heads, hidden = config.latent, config.num_q_heads, config.hidden_size
        q_rows = num_heads * latent.qk_dim
        heads = linears.ranks.share(num_heads)
        self._q_names, self._q_in = (_Q_UP, latent.q_rank) if latent.q_rank else (_Q, hidden)
        self._q_down: LinearBase | None = None
        if latent.q_rank:
            self._q_down = linears.make(_Q_DOWN, [latent.q_rank], hidden, False)
            self._q_norm = Norm(torch.empty(latent.q_rank, dtype=dtype, device=device), LATENT_EPS)
        self._q: LinearBase = linears.make(
            self._q_names, [q_rows], self._q_in, False, rows=[_in_heads(heads, latent.qk_dim)]
        )
        self._kv_down = Linear([latent.token_dim], hidden, False, dtype, device)
        self._kv_norm = Norm(torch.empty(latent.kv_rank, dtype=dtype, device=device), LATENT_EPS)
        rows = latent.nope_dim + latent.value_dim
        whole = (num_heads * rows, latent.kv_rank)
        held = linears.cut(f"{_KV_UP}.weight", whole, (_in_heads(heads, rows),), None)
        self._kv_up = torch.empty(held, dtype=dtype, device=device)
        keys, values = self._kv_up.view(len(heads), rows, -1).split((latent.nope_dim, latent.value_dim), dim=1)
        scale = latent.qk_dim**-0.5 * score_factor(config.rope_scaling)
        self._heads = LatentHeads(keys, values, scale)
        self._qk_dim = latent.qk_dim
        columns = _in_heads(heads, latent.value_dim)
        self._o: LinearBase = linears.make(_O, [hidden], num_heads * latent.value_dim, False, columns=columns)

    def attend(
        self, x: torch.Tensor, norm: Norm, rotation: Rotation, attention: Attention, layer: int, ops: LayerOps
    ) -> torch.Tensor:
        assert isinstance(attention, LatentAttention)
        _, q, kv = self._projected(x, norm, ops)
        return attention.attend(q, kv, self._kv_norm, rotation, self._heads, layer)

    def _projected(
        self, x: torch.Tensor, norm: Norm, ops: LayerOps
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Returns the queries' latent, (num_tokens, q_rank), if there is one, then queries and latents by token."""
        q_latent = None
        if self._q_down is None:
            q, kv = ops.norm_linears(x, norm, (self._q, self._kv_down))
        else:
            q_latent, kv = ops.norm_linears(x, norm, (self._q_down, self._kv_down))
            q = ops.norm_linear(q_latent, self._q_norm, self._q)
        return q_latent, q.unflatten(-1, (-1, self._qk_dim)), kv

    def project(self, attended: torch.Tensor, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        return ops.linear_add(attended, self._o, x)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._q_down is not None:
            yield from self._q_down.named_parameters(*_Q_DOWN)
            yield "self_attn.q_a_layernorm.weight", self._q_norm.weight
        yield from self._q.named_parameters(*self._q_names)
        yield from self._kv_down.named_parameters(_KV_DOWN)
        yield "self_attn.kv_a_layernorm.weight", self._kv_norm.weight
        yield f"{_KV_UP}.weight", self._kv_up
        yield from self._o.named_parameters(*_O)

    def projections(self) -> Iterator[str]:
        if self._q_down is not None:
            yield from _Q_DOWN
        yield from (*self._q_names, *_O)

    def loaded(self) -> None:
        for linear in (self._q_down, self._q, self._o):
            if linear is not None:
                linear.loaded()

    @property
    def kind(self) -> tuple[type, ...]:
        return LatentSelfAttention, type(self._q_down), type(self._q), type(self._o)


def _in_heads(heads: range, size: int) -> range:
    """Returns the rows of some heads' projections. Args: size: of a head."""
    return range(heads.start * size, heads.stop * size)
