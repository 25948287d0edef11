"""Names and shapes of a checkpoint's tensors, and the GGUF tensors that hold them."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import gguf
import numpy as np

from tandem.engine.weights.gguf.config import ModelDescription
from tandem.engine.weights.gguf.families import GLOBAL_TENSORS, OUTPUT, TensorSpec

ROPE_FACTORS = "rope_freqs.weight"
_INTERLEAVED = ("attn_q.weight", "attn_k.weight")
_ONE_EXPERT = re.compile(r"blk\.\d+\.(ffn_(?:gate|up|down))\.\d+\.weight")

Tensors = Mapping[str, gguf.ReaderTensor]


class Source(NamedTuple):
    """
    Attributes:
        name: of the checkpoint's tensor.
        shape: rows first.
        tensor: the GGUF tensor that holds it.
        expert: its index in a stack of experts; None: it is the whole tensor.
        num_heads: heads whose halves alternate in its rows; 0: they do not.
    """

    name: str
    shape: tuple[int, ...]
    tensor: gguf.ReaderTensor
    expert: int | None
    num_heads: int

    def read(self) -> np.ndarray:
        """Returns the tensor in float32."""
        data = self.tensor.data
        if self.expert is not None:
            # The last dimension is numbers, or bytes of quantized blocks.
            data = data.reshape(-1, self.shape[0], data.shape[-1])[self.expert]
        weight = gguf.dequantize(data, self.tensor.tensor_type)
        if self.num_heads:
            # Rows (heads, head_dim / 2, 2) become (heads, 2, head_dim / 2).
            rows, columns = self.shape
            weight = weight.reshape(self.num_heads, rows // self.num_heads // 2, 2, columns).swapaxes(1, 2)
        return np.ascontiguousarray(weight, dtype=np.float32).reshape(self.shape)


def sources(model: ModelDescription, tensors: Tensors) -> Iterator[Source]:
    """Yields a checkpoint's tensors in the order of its layers. `check_tensors` must have passed."""
    for name, layer, spec in _expected(model):
        columns_first = [model.sizes[size] for size in spec.shape]
        shape = tuple(reversed(columns_first[:2] if spec.is_stacked else columns_first))
        prefix = "" if layer is None else f"model.layers.{layer}."
        is_interleaved = model.family.is_interleaved and name.endswith(_INTERLEAVED)
        num_heads = shape[0] // model.sizes["head"] if is_interleaved else 0
        for expert in range(model.sizes["experts"]) if spec.is_stacked else (None,):
            yield Source(prefix + spec.name.format(expert), shape, tensors[name], expert, num_heads)


def check_tensors(model: ModelDescription, tensors: Tensors) -> None:
    """
    Raises:
        ValueError: a tensor is missing, unknown, of another shape than the metadata says, or of a quantization that
            cannot be read. The message names one.
    """
    # Before the names are made: the metadata may say any number.
    num_layers = model.config["num_hidden_layers"]
    found = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if num_layers > len(found):
        raise ValueError(f"{model.block_count} is {num_layers}, but the file has tensors of {len(found)} layers")
    expected = {name: spec for name, _, spec in _expected(model)}
    if missing := expected.keys() - tensors.keys():
        _refuse_single_experts(tensors)
        raise ValueError(f"{len(missing)} tensors are missing, for example {min(missing)}")
    optional = {ROPE_FACTORS} if model.family.has_rope_factors else set()
    # Unknown biases, experts or norms mean another computation.
    if unknown := tensors.keys() - expected.keys() - optional:
        raise ValueError(
            f"{len(unknown)} tensors have no place in {model.family.architecture}, for example {min(unknown)}"
        )
    for name, spec in expected.items():
        shape, said = tensors[name].shape.tolist(), [model.sizes[size] for size in spec.shape]
        if _without_ones(shape) != _without_ones(said):
            raise ValueError(f"tensor {name} has shape {shape}, but the metadata says {said}")
    _check_types(tensors)


def dequantized(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Returns a whole tensor in float32. Raises ValueError: its quantization cannot be read."""
    _check_types({tensor.name: tensor})
    return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type))


def _expected(model: ModelDescription) -> Iterator[tuple[str, int | None, TensorSpec]]:
    """Yields each GGUF tensor's name, its layer if it has one, and its specification."""
    for name, spec in GLOBAL_TENSORS.items():
        if name != OUTPUT or not model.config["tie_word_embeddings"]:
            yield name, None, spec
    for layer in range(model.config["num_hidden_layers"]):
        for name, spec in model.family.tensors.items():
            yield f"blk.{layer}.{name}", layer, spec


def _refuse_single_experts(tensors: Tensors) -> None:
    for name in sorted(tensors):
        if match := _ONE_EXPERT.fullmatch(name):
            raise ValueError(
                f"tensor {name} holds one expert, as in files before April 2024; supported: all experts of a layer in "
                f"one {match[1]}_exps.weight. Convert the model again"
            )


def _without_ones(shape: list[int]) -> list[int]:
    """Writers drop trailing dimensions of 1."""
    return shape[: max((place + 1 for place, size in enumerate(shape) if size != 1), default=0)]


def _check_types(tensors: Tensors) -> None:
    for kind, name in {tensor.tensor_type: name for name, tensor in tensors.items()}.items():
        _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, num_bytes), dtype=np.uint8), kind)
        except NotImplementedError as error:
            raise ValueError(f"tensor {name} is quantised as {kind.name}, which is unknown") from error
