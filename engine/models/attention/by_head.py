from collections.abc import Iterator

import torch

from tandem.engine.attention.base import Attention, HeadAttention
from tandem.engine.layers.norm import Norm, QkNorm
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
        self._qkv = linears.make(_QKV, [q_rows, kv_rows, kv_rows], hidden, config.qkv_bias)
        self._qk_norm = QkNorm(torch.empty(2, head_dim, dtype=dtype, device=device), eps) if config.qk_norm else None
        # Of queries and of keys, each across heads.
        sizes = (q_rows, kv_rows) if config.whole_qk_norm else ()
        self._whole_norms = [Norm(torch.empty(size, dtype=dtype, device=device), eps) for size in sizes]
        self._o = linears.make(_O, [hidden], q_rows, config.o_bias)

    def attend(
        self, x: torch.Tensor, norm: Norm, rotation: Rotation, attention: Attention, layer: int, ops: LayerOps
    ) -> torch.Tensor:
        assert isinstance(attention, HeadAttention)
        qkv = ops.norm_linear(x, norm, self._qkv)
        begin = 0
        for whole_norm in self._whole_norms:
            end = begin + len(whole_norm.weight)
            ops.normalize(qkv[:, begin:end], whole_norm)
            begin = end
        return attention.attend(qkv.unflatten(-1, (-1, self._head_dim)), rotation, self._qk_norm, layer)

    def project(self, attended: torch.Tensor, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        return ops.linear_add(attended, self._o, x)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._qkv.named_parameters(*_QKV)
        if self._qk_norm is not None:
            yield "self_attn.q_norm.weight", self._qk_norm.weight[0]
            yield "self_attn.k_norm.weight", self._qk_norm.weight[1]
        for name, norm in zip(("q_norm", "k_norm"), self._whole_norms, strict=False):
            yield f"self_attn.{name}.weight", norm.weight
        yield from self._o.named_parameters(*_O)

    def projections(self) -> Iterator[str]:
        yield from (*_QKV, *_O)

    def loaded(self) -> None:
        self._qkv.loaded()
        self._o.loaded()

    @property
    def kind(self) -> tuple[type, ...]:
        return SelfAttentionByHead, type(self._qkv), type(self._o)
