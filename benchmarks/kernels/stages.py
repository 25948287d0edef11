"""Bytes and operations of the stages of a forward pass, for floors beside measured kernels."""

from collections.abc import Iterator
from typing import NamedTuple

from tandem.engine.floors import (
    BYTES_PER_NUMBER,
    FP8_BYTES_PER_NUMBER,
    FP8_SPEED,
    Limits,
    attention_numbers,
    kv_bytes_per_token,
    latent_decode_flops,
)
from tandem.engine.models.config import ModelConfig


class Measured(NamedTuple):
    """Microseconds of one layer.

    Attributes:
        time: None: part of another row that was not measured by itself.
        floor: the longer of the times for its bytes and its operations; None for a kernel.
        is_part: another row includes it.
    """

    name: str
    time: float | None
    floor: float | None
    is_part: bool = False

    @property
    def ratio(self) -> float | None:
        """Times the floor."""
        return self.time / self.floor if self.time is not None and self.floor else None


class Stage(NamedTuple):
    """Attributes: num_bytes: read weights or KV; flops: operations, where FP8 ones count half."""

    name: str
    num_bytes: float
    flops: float

    def floor(self, limits: Limits) -> float:
        """Microseconds of its bytes or of its operations, whichever are longer."""
        return max(self.num_bytes / limits.copy_bandwidth, self.flops / limits.matmul_rate) * 1e6

    def times(self, count: int) -> "Stage":
        return Stage(self.name, count * self.num_bytes, count * self.flops)


def has_dense_layers(model: ModelConfig) -> bool:
    return not all(model.is_sparse(layer) for layer in range(model.num_layers))


def mixture_stages(model: ModelConfig, num_tokens: int) -> Iterator[Stage]:
    """Yields the products of one sparse layer, with the expected number of distinct experts."""
    experts, hidden = model.experts, model.hidden_size
    assert experts is not None
    num_routed = hidden * experts.num_experts
    yield Stage("router", BYTES_PER_NUMBER * num_routed, 2.0 * num_routed * num_tokens)
    touched, num_pairs = experts.num_touched(num_tokens), num_tokens * experts.routing.num_chosen
    one = hidden * experts.intermediate_size
    for name, num_weights in (("experts' gate and up", 2 * one), ("experts' down", one)):
        yield _projection(model, name, num_weights * touched, num_weights * num_pairs)
    if experts.shared_intermediate_size:
        shared = 3 * hidden * experts.shared_intermediate_size
        yield _projection(model, "shared expert", shared, shared * num_tokens)


def step_stages(model: ModelConfig, batch_size: int, kv_len: int, kv_cache_dtype: str) -> Iterator[Stage]:
    """Yields the stages of a whole decode step, each for all layers. Args: kv_len: tokens of each sequence."""
    hidden, num_dense = model.hidden_size, sum(not model.is_sparse(layer) for layer in range(model.num_layers))
    attention, of_latents = attention_numbers(model)
    yield _projection(model, "QKV and output", attention, attention * batch_size).times(model.num_layers)
    if of_latents:
        stage = Stage("to and from latents", BYTES_PER_NUMBER * of_latents, 2.0 * of_latents * batch_size)
        yield stage.times(model.num_layers)
    num_cached = batch_size * kv_len
    num_bytes = float(num_cached * kv_bytes_per_token(model, kv_cache_dtype))
    yield Stage("KV", num_bytes, float(latent_decode_flops(model, num_cached)))
    if num_dense:
        mlp = 3 * hidden * model.intermediate_size
        yield _projection(model, "dense MLP", mlp, mlp * batch_size).times(num_dense)
    if model.experts is not None:
        for stage in mixture_stages(model, batch_size):
            yield stage.times(model.num_layers - num_dense)
    head = hidden * model.vocab_size
    yield Stage("logits", BYTES_PER_NUMBER * head, 2.0 * head * batch_size)


def _projection(model: ModelConfig, name: str, num_read: float, num_multiplied: float) -> Stage:
    """Args: num_read: numbers of the matrices; num_multiplied: the sum over all rows."""
    if model.quantization:
        return Stage(name, FP8_BYTES_PER_NUMBER * num_read, 2 * num_multiplied / FP8_SPEED)
    return Stage(name, BYTES_PER_NUMBER * num_read, 2 * num_multiplied)
