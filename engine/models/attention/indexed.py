from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tandem.engine.attention.base import Attention, Index, IndexedAttention
from tandem.engine.layers.linear import Linear
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.layers.rotary import Rotation
from tandem.engine.models.attention.latent import LATENT_EPS, LatentSelfAttention
from tandem.engine.models.linears import Linears

_QUERIES = ("self_attn.indexer.wq_b",)
_KEYS, _WEIGHTS = "self_attn.indexer.wk", "self_attn.indexer.weights_proj"
_NORM = "self_attn.indexer.k_norm"


class IndexedSelfAttention(LatentSelfAttention):
    """Latent attention whose queries attend to the tokens that an indexer chooses (IndexerConfig).

    Weights of index heads are computed in the model's dtype, and are never FP8, as index keys.
    """

    def __init__(self, linears: Linears) -> None:
        super().__init__(linears)
        config, dtype, device = linears.config, linears.dtype, linears.device
        assert config.latent is not None and config.indexer is not None
        self._indexer = config.indexer
        num_heads, head_dim = config.indexer.num_heads, config.indexer.head_dim
        self._index_queries = linears.make(_QUERIES, [num_heads * head_dim], config.latent.q_rank, False)
        self._index_keys = Linear([head_dim, num_heads], config.hidden_size, False, dtype, device)
        self._key_norm = torch.empty(2, head_dim, dtype=dtype, device=device)
        # Of products of index queries and keys, and of the sum over heads.
        self._weight_scale = float(head_dim**-0.5 * num_heads**-0.5)

    def attend(
        self, x: torch.Tensor, norm: Norm, rotation: Rotation, attention: Attention, layer: int, ops: LayerOps
    ) -> torch.Tensor:
        assert isinstance(attention, IndexedAttention)
        q_latent, q, kv = self._projected(x, norm, ops)
        assert q_latent is not None
        indexer = self._indexer
        queries = ops.norm_linear(q_latent, self._q_norm, self._index_queries)
        keys, weights = ops.norm_linear(x, norm, self._index_keys).split((indexer.head_dim, indexer.num_heads), dim=-1)
        weight, bias = self._key_norm
        index = Index(
            queries.unflatten(-1, (indexer.num_heads, indexer.head_dim)),
            F.layer_norm(keys, (indexer.head_dim,), weight, bias, LATENT_EPS),
            weights.float() * self._weight_scale,
            indexer.top_k,
        )
        return attention.attend(q, kv, self._kv_norm, rotation, self._heads, index, layer)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().named_parameters()
        yield from self._index_queries.named_parameters(*_QUERIES)
        yield from self._index_keys.named_parameters(_KEYS, _WEIGHTS)
        yield f"{_NORM}.weight", self._key_norm[0]
        yield f"{_NORM}.bias", self._key_norm[1]

    def projections(self) -> Iterator[str]:
        yield from super().projections()
        yield from _QUERIES

    def loaded(self) -> None:
        super().loaded()
        self._index_queries.loaded()

    @property
    def kind(self) -> tuple[type, ...]:
        return IndexedSelfAttention, *super().kind[1:], type(self._index_queries)
