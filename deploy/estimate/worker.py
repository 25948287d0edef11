"""Pool size and forward times of one worker. docs/estimate.md explains the formulas and figures."""

from dataclasses import dataclass
from math import hypot
from typing import NamedTuple

from tandem.config import Role, default_of
from tandem.deploy.config.cluster_options import GPU as GPU_DEFAULTS
from tandem.deploy.estimate.gpus import GIB, Gpu
from tandem.engine.config import EngineConfig
from tandem.engine.floors import (
    attention_flops,
    decode_products,
    kv_bytes_per_token,
    mixed_products,
    prefill_products,
    read_weight_bytes,
    weight_bytes,
)
from tandem.engine.kvcache.sizing import DeviceMemory, choose_num_pages
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of

# Bytes on an H200 with an 8B model (docs/reports/h200): CUDA's context, libraries' workspaces, decode graphs up to 256.
CONTEXT = int(0.52 * GIB)
WORKSPACES = int(1.3 * GIB)
GRAPHS = int(0.74 * GIB)
# Float32 copies of a sampled logits row, and copies of a prompt token's MLP activations.
LOGITS_COPIES = 8
MLP_COPIES = 2


class Factors(NamedTuple):
    """Costs of forwards per weight format, fitted to H200s with models of 0.6B and 8B (docs/benchmarks.md).

    Attributes:
        decode_share, prefill_share: reached share of the matrix product rate.
        own_layer_s, layer_s: per-layer overhead of a decode step, with Tandem's and with library kernels.
        graph_layer_s: the same in a CUDA graph with prompts.
    """

    decode_share: float
    prefill_share: float
    own_layer_s: float
    layer_s: float
    graph_layer_s: float


BFLOAT16 = Factors(1.0, 0.82, 12.5e-6, 28e-6, 55e-6)
FP8 = Factors(0.52, 0.76, 18e-6, 33e-6, 95e-6)
# Share of the copy rate at which decode attention reads pages.
KV_READ_SHARE = 0.98
FP8_KV_READ_SHARE = 0.92
# Seconds: the host's launch of one prefill layer, and the rest of such a forward.
LAUNCH_LAYER_S = 190e-6
FORWARD_S = 3e-3
# A mixed step runs two attention kernels per layer, and attention of few queries does not fill a GPU.
SECOND_ATTENTION_S = 21e-6
MIXED_ATTENTION_SHARE = 0.36
# Products of up to this many tokens reach `decode_share`.
MAX_SMALL_PRODUCT = 256
MAX_OWN_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class Worker:
    """A model on one GPU. Raises ValueError: the GPU has no FP8 for quantized weights or pages.

    Attributes:
        gpu: as this worker sees it (Gpu.shared_by).
    """

    model: ModelConfig
    gpu: Gpu
    mem_fraction_static: float = default_of(EngineConfig, "mem_fraction_static")
    chunk_size: int = GPU_DEFAULTS.chunk_size
    max_batch_size: int = GPU_DEFAULTS.max_batch_size
    page_size: int = default_of(EngineConfig, "page_size")
    kv_cache_dtype: str = default_of(EngineConfig, "kv_cache_dtype")
    mixed_steps: bool = True
    workers_per_gpu: int = default_of(EngineConfig, "workers_per_gpu")

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.model, self.kv_cache_dtype)

    def __post_init__(self) -> None:
        if self.model.quantization and not self.gpu.has_fp8:
            raise ValueError(f"{self.gpu.name} does not multiply FP8 weights; GPUs since Ada and Hopper do")
        if self._has_quantized_pages and not self.gpu.has_fp8:
            raise ValueError(
                f"{self.gpu.name} has no kernels for KV pages of {self.kv_cache_dtype}: plain torch computes with them "
                "there, for which there is no estimate; GPUs since Ada and Hopper have kernels"
            )

    def memory(self, role: Role) -> DeviceMemory:
        """Returns the GPU's memory after loading the weights, before allocating the pool."""
        logits = 4 * LOGITS_COPIES * self.max_batch_size * self.model.vocab_size
        mlp = 2 * MLP_COPIES * self.chunk_size * self.model.intermediate_size
        forward = max(0 if role == "prefill" else logits, 0 if role == "decode" else mlp)
        taken = weight_bytes(self.model) + WORKSPACES
        free = max(0, self.gpu.memory - CONTEXT - taken)
        graphs = 0 if role == "prefill" else GRAPHS
        return DeviceMemory(self.gpu.memory, free, taken, graphs, forward, self.workers_per_gpu)

    def pool_tokens(self, role: Role, longest: int) -> int:
        """Returns the pool's size in tokens. Raises ValueError: the pool holds fewer than `longest` tokens."""
        layout = page_layout_of(self.model, self.page_size, "bfloat16", self.kv_cache_dtype)
        return self.page_size * choose_num_pages(self.memory(role), layout, 0, self.mem_fraction_static, longest)

    def decode_step(self, batch_size: int, kv_len: int) -> float:
        """Args: kv_len: tokens of each sequence."""
        limits, factors = self.gpu.limits, self._factors
        computing = decode_products(self.model, batch_size, limits.matmul_rate * factors.decode_share)
        is_own = self.gpu.has_own_kernels and batch_size <= MAX_OWN_BATCH_SIZE
        layers = self.model.num_layers * (factors.own_layer_s if is_own else factors.layer_s)
        return hypot(self._weights_s, computing) + self._kv_s(batch_size * kv_len) + layers

    def prefill(self, num_requests: int, prompt_len: int, chunk_size: int = 0) -> float:
        """Returns the seconds to compute prompts together. Args: chunk_size: 0: the worker's."""
        num_tokens = num_requests * prompt_len
        num_forwards = -(-num_tokens // (chunk_size or self.chunk_size))
        rate = self.gpu.limits.matmul_rate * self._factors.prefill_share
        computing = prefill_products(self.model, num_requests, prompt_len, rate) / num_forwards
        return num_forwards * self._prompts_s(computing)

    def chunk(self, num_tokens: int, num_before: int) -> float:
        """Args: num_before: tokens of its prompt already computed."""
        rate = self.gpu.limits.matmul_rate * self._factors.prefill_share
        products = mixed_products(self.model, 0, num_tokens, rate)
        return self._prompts_s(products + attention_flops(self.model, num_tokens, num_before) / rate)

    def mixed_step(self, batch_size: int, kv_len: int, num_tokens: int, num_before: int) -> float:
        rate, factors = self.gpu.limits.matmul_rate, self._factors
        share = factors.prefill_share
        if batch_size + num_tokens <= MAX_SMALL_PRODUCT:
            share = max(share, factors.decode_share)
        computing = mixed_products(self.model, batch_size, num_tokens, rate * share)
        attending = attention_flops(self.model, num_tokens, num_before) / (rate * MIXED_ATTENTION_SHARE)
        layers = self.model.num_layers * (factors.graph_layer_s + SECOND_ATTENTION_S)
        return hypot(self._weights_s, computing) + attending + self._kv_s(batch_size * kv_len) + layers

    @property
    def _factors(self) -> Factors:
        return FP8 if self.model.quantization else BFLOAT16

    def _prompts_s(self, computing: float) -> float:
        launching = self.model.num_layers * LAUNCH_LAYER_S
        launched = max(computing, self._weights_s, launching) + FORWARD_S
        if computing > launching + FORWARD_S:
            return launched
        # The engine uses a graph if launching would dominate.
        return min(launched, hypot(self._weights_s, computing) + self.model.num_layers * self._factors.graph_layer_s)

    @property
    def _has_quantized_pages(self) -> bool:
        return self.kv_cache_dtype != default_of(EngineConfig, "kv_cache_dtype")

    @property
    def _weights_s(self) -> float:
        return read_weight_bytes(self.model) / self.gpu.limits.copy_bandwidth

    def _kv_s(self, num_tokens: int) -> float:
        share = FP8_KV_READ_SHARE if self._has_quantized_pages else KV_READ_SHARE
        return num_tokens * self.kv_bytes_per_token / (self.gpu.limits.copy_bandwidth * share)

    def transfer(self, num_tokens: int) -> float:
        return num_tokens * self.kv_bytes_per_token / self.gpu.reached_link
