"""What one worker can do: how many tokens its pool holds, and how long its forwards take. docs/estimate.md says where
the formulas and their figures are from."""

from dataclasses import dataclass
from math import hypot

from deploy.cluster_options import GPU as GPU_DEFAULTS
from deploy.estimate.gpus import GIB, Gpu
from engine.config import EngineConfig
from engine.floors import decode_products, kv_bytes_per_token, prefill_products, read_weight_bytes, weight_bytes
from engine.kvcache.sizing import DeviceMemory, choose_num_pages
from engine.models.config import ModelConfig
from engine.page_layout import page_layout_of
from tandem.config import Role, default_of

# In bytes, of an H200 with an 8B model (docs/reports/h200): CUDA's own context, FlashInfer's workspaces and what
# libraries keep, and what is kept for decode graphs of up to 256 sequences.
CONTEXT = int(0.52 * GIB)
WORKSPACES = int(1.3 * GIB)
GRAPHS = int(0.74 * GIB)
# A sampled row of logits takes so many float32 copies while a step runs, and a prompt's token as many numbers for each
# of the MLP's.
LOGITS_COPIES = 8
MLP_COPIES = 2

# What follows was fitted to H200s with models of 0.6B and 8B (docs/benchmarks.md). Shares are of what a GPU reaches in
# plain copies and large matrix products.
DECODE_MATMUL_SHARE = 0.8
KV_READ_SHARE = 0.89
PREFILL_SHARE = 0.82
# In seconds: what a layer's kernels take to begin and end in a decode step, with our own kernels and with libraries';
# what the host takes to launch a layer of a prefill; and what a prefill forward takes beside its layers.
OWN_LAYER_S = 13.5e-6
LAYER_S = 30e-6
LAUNCH_LAYER_S = 190e-6
FORWARD_S = 3e-3
# Our own kernels are for so many sequences.
MAX_OWN_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class Worker:
    """A model on one GPU, with the options of `tandem serve` that matter here.

    Raises:
        ValueError: on construction, for FP8 weights on a GPU that does not multiply them, or for quantized pages on one
            that has no kernels for them.
    """

    model: ModelConfig
    gpu: Gpu
    mem_fraction_static: float = default_of(EngineConfig, "mem_fraction_static")
    chunk_size: int = GPU_DEFAULTS.chunk_size
    max_batch_size: int = GPU_DEFAULTS.max_batch_size
    page_size: int = default_of(EngineConfig, "page_size")
    kv_cache_dtype: str = default_of(EngineConfig, "kv_cache_dtype")

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.model, self.kv_cache_dtype)

    def __post_init__(self) -> None:
        if self.model.quantization and not self.gpu.has_fp8:
            raise ValueError(f"{self.gpu.name} does not multiply FP8 weights; GPUs since Ada and Hopper do")
        if self.kv_cache_dtype != default_of(EngineConfig, "kv_cache_dtype") and not self.gpu.has_fp8:
            raise ValueError(
                f"{self.gpu.name} has no kernels for KV pages of {self.kv_cache_dtype}: plain torch computes with them "
                "there, for which there is no estimate; GPUs since Ada and Hopper have kernels"
            )

    def memory(self, role: Role) -> DeviceMemory:
        """The GPU's memory with the weights in it and the pool still to come."""
        logits = 4 * LOGITS_COPIES * self.max_batch_size * self.model.vocab_size
        mlp = 2 * MLP_COPIES * self.chunk_size * self.model.intermediate_size
        forward = max(0 if role == "prefill" else logits, 0 if role == "decode" else mlp)
        taken = weight_bytes(self.model) + WORKSPACES
        free = max(0, self.gpu.memory - CONTEXT - taken)
        return DeviceMemory(self.gpu.memory, free, taken, 0 if role == "prefill" else GRAPHS, forward)

    def pool_tokens(self, role: Role, longest: int) -> int:
        """Tokens of KV that the worker's pool holds.

        Args:
            longest: tokens of a sequence that it must hold.

        Raises:
            ValueError: it does not; the message has the figures and says what to change.
        """
        layout = page_layout_of(self.model, self.page_size, "bfloat16", self.kv_cache_dtype)
        return self.page_size * choose_num_pages(self.memory(role), layout, 0, self.mem_fraction_static, longest)

    def decode_step(self, batch_size: int, kv_len: int) -> float:
        """Seconds of a decode step. Args: kv_len: tokens of each sequence."""
        limits = self.gpu.limits
        reading = read_weight_bytes(self.model) / limits.copy_bandwidth
        computing = decode_products(self.model, batch_size, limits.matmul_rate * DECODE_MATMUL_SHARE)
        attention = batch_size * kv_len * self.kv_bytes_per_token / (limits.copy_bandwidth * KV_READ_SHARE)
        is_own = self.gpu.has_own_kernels and batch_size <= MAX_OWN_BATCH_SIZE
        return hypot(reading, computing) + attention + self.model.num_layers * (OWN_LAYER_S if is_own else LAYER_S)

    def prefill(self, num_requests: int, prompt_len: int, chunk_size: int = 0) -> float:
        """Seconds until as many prompts have their first tokens, which begin together.

        Args:
            chunk_size: tokens of a forward; 0: the worker's own.
        """
        num_tokens = num_requests * prompt_len
        num_forwards = -(-num_tokens // (chunk_size or self.chunk_size))
        limits = self.gpu.limits
        computing = prefill_products(self.model, num_requests, prompt_len, limits.matmul_rate * PREFILL_SHARE)
        reading = num_forwards * read_weight_bytes(self.model) / limits.copy_bandwidth
        launching = num_forwards * self.model.num_layers * LAUNCH_LAYER_S
        return max(computing, reading, launching) + num_forwards * FORWARD_S

    def transfer(self, num_tokens: int) -> float:
        """Seconds in which as many tokens' pages arrive at another GPU of the host."""
        return num_tokens * self.kv_bytes_per_token / self.gpu.reached_link
