"""Pool size and forward times of one worker. docs/estimate.md explains the formulas and figures."""

import contextlib
from dataclasses import dataclass, replace
from math import hypot, inf
from typing import NamedTuple

from tandem.config import Role, default_of
from tandem.deploy.config.cluster_options import GPU as GPU_DEFAULTS
from tandem.deploy.estimate.drafts import drafter_kv_bytes, drafter_prompt_flops, drafter_weight_bytes
from tandem.deploy.estimate.experts import (
    BFLOAT16_EXPERTS,
    FP8_EXPERTS,
    ExpertFactors,
    experts_s,
    mlp_numbers,
    num_sparse_layers,
)
from tandem.deploy.estimate.gpus import GIB, Gpu
from tandem.deploy.estimate.latents import (
    FEW_ROWS_LAYER_S,
    FP8_LATENT_READ_SHARE,
    LATENT_LAYER_S,
    LATENT_READ_SHARE,
    MAX_FEW_ROWS,
    expansion_flops,
)
from tandem.engine.adapters.modules import adapted_modules, slot_numbers
from tandem.engine.config import MAX_DRAFTED_ROWS, MAX_PREFILL_BATCH_SIZE, EngineConfig
from tandem.engine.draft_models.config import DrafterConfig
from tandem.engine.floors import (
    BYTES_PER_NUMBER,
    attention_flops,
    common_flops,
    common_weight_bytes,
    kv_bytes_per_token,
    weight_bytes,
)
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.sizing import DeviceMemory, choose_num_pages
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tandem.engine.ranks.checks import check_degree
from tandem.engine.ranks.config import MAX_DEGREE, RankConfig

# Bytes with an 8B model: CUDA's context (docs/reports/h200), and of role both on an H100 libraries' workspaces and CUDA
# graphs up to 256 sequences, with those of steps with drafts.
CONTEXT = int(0.52 * GIB)
WORKSPACES = int(1.47 * GIB)
GRAPHS = int(0.79 * GIB)
# Float32 copies of a sampled logits row, and copies of a prompt token's MLP activations.
LOGITS_COPIES = 8
MLP_COPIES = 2


class Factors(NamedTuple):
    """Costs of forwards per weight format, fitted to H200s with models of 0.6B and 8B (docs/benchmarks.md).

    Attributes:
        decode_share, prefill_share: reached share of the matrix product rate.
        own_layer_s, layer_s: per-layer overhead of a decode step, with Tandem's and with library kernels.
        graph_layer_s: the same of a dense layer in a CUDA graph with prompts. Sparse layers take `layer_s`: wide
            products do not fill the GPU, and most of them are in a dense MLP.
        experts: of sparse layers.
    """

    decode_share: float
    prefill_share: float
    own_layer_s: float
    layer_s: float
    graph_layer_s: float
    experts: ExpertFactors


BFLOAT16 = Factors(1.0, 0.82, 12.5e-6, 28e-6, 55e-6, BFLOAT16_EXPERTS)
FP8 = Factors(0.52, 0.76, 18e-6, 33e-6, 95e-6, FP8_EXPERTS)
# Share of the copy rate at which decode attention reads pages.
KV_READ_SHARE = 0.98
FP8_KV_READ_SHARE = 0.92
# Seconds: the host's launch of one prefill layer, and the rest of such a forward.
LAUNCH_LAYER_S = 190e-6
FORWARD_S = 3e-3
# A sparse layer of a mixed step runs a second attention kernel. A dense one takes what it does in other graphs with
# prompts. The share is from 512 tokens behind 2,048 and behind none: they took 0.8 to 1.35 ms more, with 8 and with
# 4 KV heads.
SECOND_ATTENTION_S = 21e-6
MIXED_ATTENTION_SHARE = 0.75
# Products of up to this many tokens reach `decode_share`.
MAX_SMALL_PRODUCT = 256
MAX_OWN_BATCH_SIZE = 16
# Seconds of a small sum over 2 or 4 ranks, measured on H200s (benchmarks/all_reduce.py), and sums in a layer.
SUM_S = 5e-6
SUMS_PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class Worker:
    """A model on one GPU, or cut into ranks on several. Raises ValueError: it cannot be cut so, or the GPU has no FP8
    for quantized weights or pages.

    Attributes:
        gpu: as this worker sees it (Gpu.shared_by, Gpu.joined).
        itl_objective: that sizes chunks of role both, in seconds; 0: the limit on ITL.
        degree: number of ranks.
        max_loras, max_lora_rank: slots of adapters and their rank.
        num_drafts: drafts of a request in a step with room for them (`num_drafts_of`).
        drafter: model that drafts; None: drafts take no time.
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
    itl_objective: float = 0.0
    degree: int = 1
    max_loras: int = 0
    max_lora_rank: int = default_of(EngineConfig, "max_lora_rank")
    num_drafts: float = 0.0
    drafter: DrafterConfig | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots of adapters, on each rank."""
        if not self.max_loras:
            return 0
        return BYTES_PER_NUMBER * self.max_loras * slot_numbers(self.model, self.max_lora_rank, self.degree)

    @property
    def weight_bytes(self) -> int:
        """Of all ranks together, with the drafter's."""
        return weight_bytes(self.model) + (0 if self.drafter is None else self.drafter.weight_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the model alone, which its attention reads."""
        return kv_bytes_per_token(self.model, self.kv_cache_dtype)

    @property
    def page_bytes_per_token(self) -> float:
        """Of all ranks together, with the drafter's part."""
        return self._whole_layout.page_bytes / self.page_size

    def page_layout(self) -> PageLayout:
        """Returns the pages of a rank."""
        return self._whole_layout.shard(0, self.degree)

    @property
    def _whole_layout(self) -> PageLayout:
        layout = page_layout_of(self.model, self.page_size, "bfloat16", self.kv_cache_dtype)
        if self.drafter is not None:
            layout = self.drafter.page_layout(layout, self.page_size, "bfloat16")
        return layout

    def __post_init__(self) -> None:
        check_degree(self.model, self.degree)
        if self.max_loras:
            adapted_modules(self.model)
        if self.model.quantization and not self.gpu.has_fp8:
            raise ValueError(f"{self.gpu.name} does not multiply FP8 weights; GPUs since Ada and Hopper do")
        if self._has_quantized_pages and not self.gpu.has_fp8:
            raise ValueError(
                f"{self.gpu.name} has no kernels for KV pages of {self.kv_cache_dtype}: plain torch computes with them "
                "there, for which there is no estimate; GPUs since Ada and Hopper have kernels"
            )

        if self.model.indexer is not None:
            raise ValueError(
                f"{self.model.architecture} has sparse attention, for which there is no estimate: it is not measured"
            )
        if self.model.latent is not None and not self.gpu.has_latent_kernels:
            raise ValueError(
                f"{self.gpu.name} has no kernels for latent attention: plain torch computes it there, for which there "
                "is no estimate; Hopper has kernels"
            )
        if self.drafter is not None and self.degree > 1:
            raise ValueError(f"a model that drafts is for workers of one rank, not {self.degree}: leave `tp` out")

    def memory(self, role: Role) -> DeviceMemory:
        """Returns the GPU's memory after loading the weights, before allocating the pool."""
        logits = 4 * LOGITS_COPIES * self.max_batch_size * self.model.vocab_size
        mlp = 2 * self.chunk_size * mlp_numbers(self.model, MLP_COPIES) // self.degree
        forward = max(0 if role == "prefill" else logits, 0 if role == "decode" else mlp)
        if role == "both" and self.mixed_steps:
            # Such a step also samples the first tokens of its prompts.
            forward = mlp + logits + 4 * LOGITS_COPIES * MAX_PREFILL_BATCH_SIZE * self.model.vocab_size
        taken = self.weight_bytes // self.degree + self.slot_bytes + WORKSPACES
        free = max(0, self.gpu.memory - CONTEXT - taken)
        graphs = 0 if role == "prefill" else GRAPHS
        return DeviceMemory(self.gpu.memory, free, taken, graphs, forward, self.workers_per_gpu)

    def pool_tokens(self, role: Role, longest: int) -> int:
        """Returns the pool's size in tokens. Raises ValueError: the pool holds fewer than `longest` tokens."""
        if (num_tokens := self._pool_tokens(role)) >= longest:
            return num_tokens
        advice = ["a larger --mem-fraction-static, a smaller --chunk-size or --max-batch-size"] if num_tokens else []
        if (degree := self._fitting_degree(role, longest)) is not None:
            advice.insert(0, f"--tp {degree}")
        if self.max_loras:
            advice.append("a smaller --max-loras or --max-lora-rank")
        if self.workers_per_gpu > 1:
            advice.append("a smaller --workers-per-gpu")
        advice.append("a larger GPU or a smaller model")
        raise ValueError(
            f"a worker of role {role} has room for {num_tokens} tokens of KV, but a request has {longest}: "
            f"{self.memory(role)}; use {', or '.join(advice)}"
        )

    def _pool_tokens(self, role: Role) -> int:
        try:
            num_pages = choose_num_pages(self.memory(role), self.page_layout(), 0, self.mem_fraction_static, 0)
        except ValueError:
            return 0
        return self.page_size * num_pages

    def _fitting_degree(self, role: Role, longest: int) -> int | None:
        """Returns the smallest larger number of ranks at which a request fits; None: there is none."""
        for degree in range(self.degree + 1, MAX_DEGREE + 1):
            with contextlib.suppress(ValueError):
                if replace(self, degree=degree)._pool_tokens(role) >= longest:
                    return degree
        return None

    def num_drafts_of(self, batch_size: int) -> float:
        """Returns the mean drafts of a request in a step of batch_size; with drafts it has at most MAX_DRAFTED_ROWS."""
        return min(self.num_drafts, max(0, MAX_DRAFTED_ROWS - batch_size) / batch_size)

    def num_rows(self, batch_size: int) -> int:
        """Returns the tokens and drafts of a decode step."""
        return round(batch_size * (1 + self.num_drafts_of(batch_size)))

    def num_passes(self, batch_size: int) -> float:
        """Returns the drafter's passes of a decode step: one for each draft, and one for all rows. 0: no drafter."""
        if self.drafter is None:
            return 0
        # With room for a part of the drafts, some requests have all of theirs.
        return 1 + (self.num_drafts if self.num_drafts_of(batch_size) else 0)

    def decode_step(self, batch_size: int, kv_len: int) -> float:
        """Args: kv_len: tokens of each sequence."""
        factors, num_rows = self._factors, self.num_rows(batch_size)
        computing = self._common_s(num_rows, num_rows, factors.decode_share)
        is_own = self.gpu.has_own_kernels and num_rows <= MAX_OWN_BATCH_SIZE
        layers = self._layers_s(factors.own_layer_s if is_own else factors.layer_s, num_rows)
        products = hypot(self._common_weights_s, computing) + self._experts_s(num_rows)
        step = products + self._kv_s(batch_size * kv_len) + layers + self._sums_s(num_rows)
        return step + self.num_passes(batch_size) * self._drafter_s(batch_size, batch_size * kv_len)

    def prefill(self, num_requests: int, prompt_len: int, chunk_size: int = 0, num_before: int = 0) -> float:
        """Returns the seconds to compute prompts together.

        Args:
            chunk_size: 0: the worker's.
            num_before: cached tokens before each prompt's prompt_len.
        """
        num_tokens = num_requests * prompt_len
        num_forwards = -(-num_tokens // (chunk_size or self.chunk_size))
        share = self._factors.prefill_share
        attending = num_requests * self._attention_flops(prompt_len, num_before)
        attention = attending / (self.gpu.limits.matmul_rate * share)
        computing = (self._common_s(num_tokens, num_requests, share) + attention) / num_forwards
        of_each = -(-num_tokens // num_forwards)
        prompts = num_forwards * (self._prompts_s(computing, self._experts_s(of_each)) + self._sums_s(of_each))
        return prompts + self._drafter_prompts_s(num_requests, prompt_len, num_before, share)

    def chunk(self, num_tokens: int, num_before: int) -> float:
        """Args: num_before: tokens of its prompt already computed."""
        share = self._factors.prefill_share
        attention = self._attention_flops(num_tokens, num_before) / (self.gpu.limits.matmul_rate * share)
        computing = self._common_s(num_tokens, 1, share) + attention
        prompt = self._prompts_s(computing, self._experts_s(num_tokens)) + self._sums_s(num_tokens)
        return prompt + self._drafter_prompts_s(1, num_tokens, num_before, share)

    def mixed_step(self, batch_size: int, kv_len: int, num_tokens: int, num_before: int) -> float:
        factors, num_rows = self._factors, batch_size + num_tokens
        share = factors.prefill_share
        if num_rows <= MAX_SMALL_PRODUCT:
            share = max(share, factors.decode_share)
        # With logits for one row of the chunk.
        computing = self._common_s(num_rows, batch_size + 1, share)
        products = hypot(self._common_weights_s, computing) + self._experts_s(num_rows)
        attention_rate = self.gpu.limits.matmul_rate * MIXED_ATTENTION_SHARE
        attending = self._attention_flops(num_tokens, num_before) / attention_rate
        layers = self._graph_layers_s() + num_sparse_layers(self.model) * SECOND_ATTENTION_S
        step = products + attending + self._kv_s(batch_size * kv_len) + layers + self._sums_s(num_rows)
        reading = self._drafter_s(num_rows, batch_size * kv_len)
        return step + max(reading, self._drafter_prompts_s(1, num_tokens, num_before, share))

    def _drafter_s(self, num_rows: int, num_tokens: int) -> float:
        """Seconds of a pass of few rows, which reads the drafter's weights and its KV of num_tokens."""
        if self.drafter is None:
            return 0.0
        num_bytes = drafter_weight_bytes(self.drafter, num_rows) + num_tokens * drafter_kv_bytes(self.drafter)
        return num_bytes / self.gpu.limits.copy_bandwidth + self.drafter.num_layers * self._factors.layer_s

    def _drafter_prompts_s(self, num_requests: int, prompt_len: int, num_before: int, share: float) -> float:
        """Seconds of the drafter's layers of prompts, at a share of the rate."""
        if self.drafter is None:
            return 0.0
        flops = drafter_prompt_flops(self.drafter, num_requests, prompt_len, num_before)
        return flops / (self.gpu.limits.matmul_rate * share)

    @property
    def _factors(self) -> Factors:
        return FP8 if self.model.quantization else BFLOAT16

    def _prompts_s(self, computing: float, experts: float) -> float:
        """Args: experts: seconds of the experts' products."""
        of_sparse = num_sparse_layers(self.model) * self._factors.experts.launch_s
        launching = self.model.num_layers * LAUNCH_LAYER_S + of_sparse
        launched = max(computing + experts, self._common_weights_s, launching) + FORWARD_S
        if computing + experts > launching + FORWARD_S:
            return launched
        # The engine uses a graph if launching would dominate.
        return min(launched, hypot(self._common_weights_s, computing) + experts + self._graph_layers_s())

    def _common_s(self, num_tokens: int, num_logits: int, share: float) -> float:
        """Seconds of all products but the experts', at a share of the rate."""
        return common_flops(self.model, num_tokens, num_logits) / (self.gpu.limits.matmul_rate * share)

    def _experts_s(self, num_tokens: int) -> float:
        return experts_s(self.model, self.gpu.limits, self._factors.experts, num_tokens)

    def _attention_flops(self, num_tokens: int, num_before: int) -> int:
        return attention_flops(self.model, num_tokens, num_before) + expansion_flops(self.model, num_before)

    def _layers_s(self, layer_s: float, num_rows: int) -> float:
        layer_s += self._latent_layer_s(num_rows)
        return self.model.num_layers * layer_s + num_sparse_layers(self.model) * self._factors.experts.layer_s

    def _graph_layers_s(self) -> float:
        factors, num_sparse = self._factors, num_sparse_layers(self.model)
        of_sparse = num_sparse * (factors.layer_s + factors.experts.layer_s)
        of_dense = (self.model.num_layers - num_sparse) * factors.graph_layer_s
        return of_dense + of_sparse + self.model.num_layers * self._latent_layer_s()

    def _latent_layer_s(self, num_rows: float = inf) -> float:
        if self.model.latent is None:
            return 0.0
        return FEW_ROWS_LAYER_S if num_rows <= MAX_FEW_ROWS else LATENT_LAYER_S

    @property
    def _has_quantized_pages(self) -> bool:
        return self.kv_cache_dtype != default_of(EngineConfig, "kv_cache_dtype")

    @property
    def _common_weights_s(self) -> float:
        return common_weight_bytes(self.model) / self.gpu.limits.copy_bandwidth

    def _kv_s(self, num_tokens: int) -> float:
        latent = self.model.latent is not None
        if latent:
            share = FP8_LATENT_READ_SHARE if self._has_quantized_pages else LATENT_READ_SHARE
        else:
            share = FP8_KV_READ_SHARE if self._has_quantized_pages else KV_READ_SHARE
        num_copies = self.degree if latent else RankConfig(0, self.degree).kv_head_copies(self.model.num_kv_heads)
        return num_tokens * num_copies * self.kv_bytes_per_token / (self.gpu.limits.copy_bandwidth * share)

    def _sums_s(self, num_tokens: int) -> float:
        """Seconds of a forward pass's sums over ranks."""
        if self.degree == 1:
            return 0.0
        # Each rank sends and receives its part of all tokens twice.
        num_bytes = 2 * (self.degree - 1) / self.degree * num_tokens * self.model.hidden_size * BYTES_PER_NUMBER
        each = SUM_S + num_bytes / (self.gpu.reached_link / self.degree)
        return self.model.num_layers * SUMS_PER_LAYER * each

    def transfer(self, num_tokens: int) -> float:
        return num_tokens * self.page_bytes_per_token / self.gpu.reached_link

    def load(self, num_tokens: int) -> float:
        """Returns the seconds to load pages from the host. Raises ValueError: the GPU's link to it is unknown."""
        if not self.gpu.host_link:
            raise ValueError("hits in the page store need the bandwidth between GPU and host: give --host-link")
        return num_tokens * self.page_bytes_per_token / self.gpu.reached_host_link
