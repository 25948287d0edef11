from collections.abc import Iterator

import torch

from tandem.engine.attention.base import Attention, HeadAttention
from tandem.engine.layers.norm import Norm, QkNorm, WholeNorm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.layers.rotary import Rotation
from tandem.engine.models.attention.base import SelfAttention
from tandem.engine.models.linears import Linears

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_O = ("self_attn.o_proj",)


class SelfAttentionByHead(SelfAttention):
    """Multi-head, grouped-query or multi-query attention. Queries, keys and values are one projection."""

    def __init__(self, linears: Linears) -> None:
        config, dtype, device = linears.config, linears.dtype, linears.device
        hidden, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self._head_dim = head_dim
        q_rows, kv_rows = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
        kv_heads = linears.ranks.kv_heads(config.num_kv_heads)
        held_q = _in_heads(linears.ranks.share(config.num_q_heads), head_dim)
        held_kv = _in_heads(range(kv_heads.first, kv_heads.first + kv_heads.num), head_dim)
        sizes = [q_rows, kv_rows, kv_rows]
        self._qkv = linears.make(_QKV, sizes, hidden, config.qkv_bias, rows=[held_q, held_kv, held_kv])
        self._qk_norm = QkNorm(torch.empty(2, head_dim, dtype=dtype, device=device), eps) if config.qk_norm else None
        # Of queries and of keys, each across the heads of all ranks.
        self._whole_norms: list[WholeNorm] = []
        if config.whole_qk_norm:
            copies = linears.ranks.kv_head_copies(config.num_kv_heads)
            for name, size, held, num_copies in (("q_norm", q_rows, held_q, 1), ("k_norm", kv_rows, held_kv, copies)):
                shape = linears.cut(f"self_attn.{name}.weight", (size,), (held,))
                weight = torch.empty(shape, dtype=dtype, device=device)
                self._whole_norms.append(WholeNorm(Norm(weight, eps), size, num_copies))
        self._o = linears.make(_O, [hidden], q_rows, config.o_bias, columns=held_q)

    def attend(
        self, x: torch.Tensor, norm: Norm, rotation: Rotation, attention: Attention, layer: int, ops: LayerOps
    ) -> torch.Tensor:
        assert isinstance(attention, HeadAttention)
        qkv = ops.norm_linear(x, norm, self._qkv)
        begin = 0
        for whole_norm in self._whole_norms:
            end = begin + len(whole_norm.norm.weight)
            ops.normalize_across(qkv[:, begin:end], whole_norm)
            begin = end
        return attention.attend(qkv.unflatten(-1, (-1, self._head_dim)), rotation, self._qk_norm, layer)

    def project(self, attended: torch.Tensor, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        return ops.linear_add(attended, self._o, x)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._qkv.named_parameters(*_QKV)
        if self._qk_norm is not None:
            yield "self_attn.q_norm.weight", self._qk_norm.weight[0]
            yield "self_attn.k_norm.weight", self._qk_norm.weight[1]
        for name, whole_norm in zip(("q_norm", "k_norm"), self._whole_norms, strict=False):
            yield f"self_attn.{name}.weight", whole_norm.norm.weight
        yield from self._o.named_parameters(*_O)

    def projections(self) -> Iterator[str]:
        yield from (*_QKV, *_O)

    def loaded(self) -> None:
        self._qkv.loaded()
        self._o.loaded()

    @property
    def kind(self) -> tuple[type, ...]:
        return SelfAttentionByHead, type(self._qkv), type(self._o)


def _in_heads(heads: range, head_dim: int) -> range:
    """Returns the rows of some heads' projections."""
    return range(heads.start * head_dim, heads.stop * head_dim)
