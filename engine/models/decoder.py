"""The decoder of all supported families; the configuration has their differences."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F

from tandem.engine.adapters.modules import adapted_modules
from tandem.engine.adapters.ops import AdapterBatch, with_adapters
from tandem.engine.attention.base import Attention
from tandem.engine.collectives.base import Collectives
from tandem.engine.layers.experts.counts import ExpertCounts, LayerCounts
from tandem.engine.layers.linear import Linear
from tandem.engine.layers.norm import Norm, rms_norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation
from tandem.engine.models.attention.base import SelfAttention
from tandem.engine.models.attention.by_head import SelfAttentionByHead
from tandem.engine.models.attention.indexed import IndexedSelfAttention
from tandem.engine.models.attention.latent import LatentSelfAttention
from tandem.engine.models.base import Model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.filling import fill, held_part
from tandem.engine.models.linears import HeldProjections, Linears
from tandem.engine.models.mlp.base import Mlp
from tandem.engine.models.mlp.dense import DenseMlp
from tandem.engine.models.mlp.sparse import SparseMlp
from tandem.engine.models.part import Part
from tandem.engine.ranks.config import SINGLE_RANK

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class DecoderModel(Model):
    """Projections of the same input are one matrix.

    TorchOps rounds in Hugging Face's order, so bfloat16 results are as close to its implementation as its own kernels
    are to each other. Fused kernels round once, when they write.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps,
        collectives: Collectives | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.collectives = collectives
        self._ops = ops
        ranks = SINGLE_RANK if collectives is None else collectives.ranks
        # The tokens whose embeddings and logits are this rank's.
        self._vocabulary = ranks.vocabulary(config.vocab_size)
        self._embedding = torch.empty(len(self._vocabulary), config.hidden_size, dtype=dtype, device=device)
        if config.experts is not None:
            sparse = [index for index in range(config.num_layers) if config.is_sparse(index)]
            self.expert_counts = ExpertCounts(sparse, config.experts.num_experts, config.num_layers, device)
        self._layers = [
            DecoderLayer(Linears(config, index, dtype, device, ranks), self._counts_of(index))
            for index in range(config.num_layers)
        ]
        self._norm = Norm(torch.empty(config.hidden_size, dtype=dtype, device=device), config.rms_norm_eps)
        # Own memory even if tied: lookups and products need different orders.
        self._lm_head = Linear([len(self._vocabulary)], config.hidden_size, False, dtype, device)
        self.rotary = RotaryEmbedding(
            config.rope_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings, device
        )

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parts of merged matrices are views, possibly not contiguous."""
        return self._parameters(DecoderLayer.named_parameters)

    def stacked_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._parameters(DecoderLayer.stacked_parameters)

    def _parameters(
        self, of_layer: Callable[["DecoderLayer"], Iterator[tuple[str, torch.Tensor]]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.embed_tokens.weight", self._embedding
        yield "model.norm.weight", self._norm.weight
        for index, layer in enumerate(self._layers):
            for name, weight in of_layer(layer):
                yield f"model.layers.{index}.{name}", weight
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self._lm_head.weight

    def parts(self) -> dict[str, Part]:
        config = self.config
        parts = {
            f"model.layers.{index}.{name}": part
            for index, layer in enumerate(self._layers)
            for name, part in layer.parts.items()
        }
        if len(self._vocabulary) < config.vocab_size:
            part = Part((config.vocab_size, config.hidden_size), ((self._vocabulary,), None))
            parts["model.embed_tokens.weight"] = parts["lm_head.weight"] = part
        return parts

    def projections(self) -> Iterator[str]:
        for index, layer in enumerate(self._layers):
            for name in (*layer.attention.projections(), *layer.mlp.projections()):
                yield f"model.layers.{index}.{name}"

    def adaptable(self) -> Iterator[HeldProjections]:
        modules = adapted_modules(self.config)
        for layer in self._layers:
            for held in layer.made:
                # Shared experts are made here too.
                if all(module in modules for module in held.modules):
                    yield held

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tied_heads: list[torch.Tensor] = []
        fill(self, self._without_tied(weights, tied_heads), self._held_part)
        if tied_heads and not torch.equal(tied_heads[0].to(self._embedding), self._embedding):
            raise ValueError("tensor lm_head.weight differs from the embedding, though the configuration ties them")
        self.loaded()

    def _without_tied(
        self, weights: Iterable[tuple[str, torch.Tensor]], tied_heads: list[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                tied_heads.append(held_part(name, tensor, self._embedding, self.parts().get(name)))
            else:
                yield name, tensor

    @torch.inference_mode()
    def loaded(self) -> None:
        if self.config.tie_word_embeddings:
            self._lm_head.weight.copy_(self._embedding)
        for layer in self._layers:
            layer.loaded()

    def _held_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        match = _LAYER.fullmatch(name)
        if match is None or int(match[1]) >= len(self._layers):
            return tensor
        return self._layers[int(match[1])].mlp.held_part(match[2], tensor)

    def _counts_of(self, layer: int) -> LayerCounts | None:
        return None if self.expert_counts is None else self.expert_counts.of_layer(layer)

    def begin_compiling(self) -> None:
        """Begins to compile kernels for all matrices but those of latents and experts, which need no weights yet."""
        self._ops.begin_compiling([*(held.linear for layer in self._layers for held in layer.made), self._lm_head])

    def shallow(self, ops: LayerOps | None = None) -> "DecoderModel":
        model = copy.copy(self)
        model._ops = self._ops if ops is None else ops
        # One layer per kind (checkpoints may exclude layers from FP8), and the last, which computes fewer rows.
        *layers, last = self._layers
        model._layers = [*list({layer.kind: layer for layer in reversed(layers)}.values())[::-1], last]
        return model

    @property
    def is_capturable(self) -> bool:
        return all(layer.mlp.is_capturable(self._ops) for layer in self._layers)

    @torch.inference_mode()
    def hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        rows: torch.Tensor | None = None,
        meanwhile: Callable[[], None] | None = None,
        adapters: AdapterBatch | None = None,
        observe: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """As Model.hidden_states. Args: observe: gets each layer's index and input, which the layer may overwrite."""
        x = self.embedded(input_ids)
        rotation = Rotation(self.rotary, positions, x.dtype)
        ops = self._ops
        if adapters is not None:
            adapters.products.begin()
            ops = with_adapters(ops, adapters.products, adapters.tokens)
        *layers, last = self._layers
        for index, layer in enumerate(layers):
            if meanwhile is not None:
                meanwhile()
            if observe is not None:
                observe(index, x)
            x = layer.forward(x, layer.attend(x, rotation, attention, index, ops), ops)
        if meanwhile is not None:
            meanwhile()
        if observe is not None:
            observe(len(layers), x)
        attended = last.attend(x, rotation, attention, len(layers), ops)
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
            if adapters is not None:
                ops = with_adapters(self._ops, adapters.products, adapters.selected)
        # No rows if every chunk ends before its prompt; kernels reject empty inputs.
        return last.forward(x, attended, ops) if len(x) else x

    def embedded(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns (num_tokens, hidden_size)."""
        if self.collectives is None:
            return F.embedding(input_ids, self._embedding)
        if not self._vocabulary:
            return self.collectives.all_reduce(self._embedding.new_zeros(len(input_ids), self.config.hidden_size))
        rows = input_ids - self._vocabulary.start
        is_other = (rows < 0) | (rows >= len(self._vocabulary))
        embedded = F.embedding(rows.masked_fill(is_other, 0), self._embedding)
        return self.collectives.all_reduce(embedded.masked_fill_(is_other[:, None], 0))

    @torch.inference_mode()
    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, *self._norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.logits_behind(hidden, self._norm, out)

    @torch.inference_mode()
    def logits_behind(self, hidden: torch.Tensor, norm: Norm, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `logits`, behind another norm than the last layer's."""
        if not len(hidden):
            return hidden.new_empty(0, self.config.vocab_size)
        if self.collectives is None:
            return self._ops.norm_linear(hidden, norm, self._lm_head, out)
        if self._vocabulary:
            part = self._ops.norm_linear(hidden, norm, self._lm_head)
        else:
            part = hidden.new_empty(len(hidden), 0)
        whole = self.collectives.gather_columns(part, self.config.vocab_size, out)
        return part if whole is None else whole


class DecoderLayer:
    def __init__(self, linears: Linears, counts: LayerCounts | None) -> None:
        config, dtype, device = linears.config, linears.dtype, linears.device
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.parts = linears.parts
        self.made = linears.made
        self._input_norm = Norm(torch.empty(hidden, dtype=dtype, device=device), eps)
        self.attention = _self_attention(linears)
        self._mlp_norm = Norm(torch.empty(hidden, dtype=dtype, device=device), eps)
        self.mlp: Mlp = SparseMlp(linears, counts=counts) if config.is_sparse(linears.layer) else DenseMlp(linears)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._around_mlp()
        yield from self.mlp.named_parameters()

    def stacked_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._around_mlp()
        yield from self.mlp.stacked_parameters()

    def _around_mlp(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "input_layernorm.weight", self._input_norm.weight
        yield from self.attention.named_parameters()
        yield "post_attention_layernorm.weight", self._mlp_norm.weight

    @property
    def kind(self) -> tuple[type, ...]:
        return *self.attention.kind, *self.mlp.kind

    def loaded(self) -> None:
        self.attention.loaded()
        self.mlp.loaded()

    def attend(
        self, x: torch.Tensor, rotation: Rotation, attention: Attention, index: int, ops: LayerOps
    ) -> torch.Tensor:
        """Returns inputs of `forward` for all tokens; writes their pages."""
        return self.attention.attend(x, self._input_norm, rotation, attention, index, ops)

    def forward(self, x: torch.Tensor, attended: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """Computes the rest of the layer for any rows. Args: x: the layer's input, may be overwritten."""
        x = self.attention.project(attended, x, ops)
        return self.mlp.forward(x, self._mlp_norm, ops)


def _self_attention(linears: Linears) -> SelfAttention:
    if linears.config.latent is None:
        return SelfAttentionByHead(linears)
    return LatentSelfAttention(linears) if linears.config.indexer is None else IndexedSelfAttention(linears)
