"""Drafts by an EAGLE-3 head: one layer over the inputs of three of the target's layers."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from tandem.engine.attention.base import Attention, HeadAttention
from tandem.engine.draft_models.base import DraftModel
from tandem.engine.draft_models.config import DrafterConfig
from tandem.engine.layers.linear import Linear
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.filling import fill
from tandem.engine.models.linears import Linears
from tandem.engine.models.mlp.dense import DenseMlp

_LAYER, _OTHER_NAME = "midlayer.", "layers.0."
_QKV = tuple(f"{_LAYER}self_attn.{part}_proj" for part in "qkv")
# Target ids of drafted ids, as distances. The tokens that have one follow from them.
_IDS, _HAS_ID = "d2t", "t2d"
_EMBEDDING = "embed_tokens.weight"


class EagleModel(DraftModel):
    """The head of EAGLE-3 (https://arxiv.org/abs/2503.01840), with the target's embedding.

    A state is one matrix times the inputs of three layers, side by side. The layer's attention reads normalized
    embeddings and states side by side, and adds to the states. Further drafts take the layer's output for a state.
    """

    def __init__(self, drafter: DrafterConfig, target: DecoderModel, device: torch.device, ops: LayerOps) -> None:
        assert drafter.eagle is not None
        config, dtype, eagle = drafter.model, target.dtype, drafter.eagle
        hidden, head_dim = config.hidden_size, config.head_dim
        self.config = config
        self.num_q_heads = config.num_q_heads
        self.layers_read = eagle.layers_read
        self.state_size = drafter.state_size
        self._eagle = eagle
        self._target = target
        self._ops = ops

        def norm() -> Norm:
            return Norm(torch.empty(hidden, dtype=dtype, device=device), config.rms_norm_eps)

        self._token_norm, self._state_norm, self._mlp_norm, self._output_norm = norm(), norm(), norm(), norm()
        self._fused = Linear([hidden], len(self.layers_read) * hidden, False, dtype, device)
        q_size, kv_size = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
        self._qkv = Linear([q_size, kv_size, kv_size], 2 * hidden, config.qkv_bias, dtype, device)
        self._o = Linear([hidden], q_size, config.o_bias, dtype, device)
        self._mlp = DenseMlp(Linears(config, 0, dtype, device))
        self._lm_head = Linear([eagle.vocab_size], hidden, False, dtype, device)
        # (draft vocab_size,): the target's ids.
        self._target_ids = torch.arange(eagle.vocab_size, device=device)
        self._rotary = RotaryEmbedding(
            head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings, device
        )

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "fc.weight", self._fused.weight
        yield f"{_LAYER}input_layernorm.weight", self._token_norm.weight
        yield f"{_LAYER}hidden_norm.weight", self._state_norm.weight
        yield from self._qkv.named_parameters(*_QKV)
        yield from self._o.named_parameters(f"{_LAYER}self_attn.o_proj")
        yield f"{_LAYER}post_attention_layernorm.weight", self._mlp_norm.weight
        yield from ((f"{_LAYER}{name}", weight) for name, weight in self._mlp.named_parameters())
        yield "norm.weight", self._output_norm.weight
        yield "lm_head.weight", self._lm_head.weight

    def own_name(self, name: str) -> str | None:
        if name in (_HAS_ID, _EMBEDDING):
            return None
        return _LAYER + name.removeprefix(_OTHER_NAME) if name.startswith(_OTHER_NAME) else name

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        fill(self, weights, self._parameter)
        self.loaded()

    def _parameter(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if name != _IDS:
            return tensor
        own_ids = torch.arange(self._eagle.vocab_size)
        if tensor.shape != own_ids.shape or tensor.is_floating_point():
            raise ValueError(f"tensor {name} must have {len(own_ids)} whole numbers")
        ids = own_ids + tensor
        if not bool(((ids >= 0) & (ids < self.config.vocab_size)).all()):
            raise ValueError(f"tensor {name} leads to tokens outside the vocabulary of {self.config.vocab_size}")
        self._target_ids.copy_(ids)
        return None

    def loaded(self) -> None:
        for linear in (self._fused, self._qkv, self._o, self._lm_head):
            linear.loaded()
        self._mlp.loaded()

    @torch.inference_mode()
    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None,
        attention: Attention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert states is not None and isinstance(attention, HeadAttention)
        ops = self._ops
        tokens = ops.normed(self._target.embedded(input_ids), self._token_norm)
        normed = ops.normed(states, self._state_norm)
        qkv = ops.linear(torch.cat((tokens, normed), dim=-1), self._qkv)
        rotation = Rotation(self._rotary, positions, states.dtype)
        attended = attention.attend(qkv.unflatten(-1, (-1, self.config.head_dim)), rotation, None, 0)
        x = normed if self._eagle.norms_residual else states
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        if not len(x):
            return x
        return self._mlp.forward(ops.linear_add(attended, self._o, x), self._mlp_norm, ops)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        drafted = self._ops.norm_linear(hidden, self._output_norm, self._lm_head)
        whole = drafted.new_empty(len(hidden), self.config.vocab_size) if out is None else out
        return whole.fill_(float("-inf")).index_copy_(1, self._target_ids, drafted)

    @torch.inference_mode()
    def states(self, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return self._ops.linear(torch.cat([*inputs], dim=-1), self._fused)
