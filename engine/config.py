"""Engine options. Imports no torch: the command line reads this module too."""

from dataclasses import dataclass

from tandem.config import DEVICES, require, require_one_of, require_positive
from tandem.engine.adapters.base import MAX_LORA_RANK, AdapterLimits
from tandem.engine.attention.table import ATTENTION_BACKENDS, AUTO
from tandem.engine.kvcache.eviction.table import EVICTION_POLICIES
from tandem.engine.kvcache.sizing import GIB
from tandem.engine.models.quantization import FP8
from tandem.engine.ranks.config import MAX_DEGREE
from tandem.options import option

DTYPES = ("float32", "bfloat16")
# By torch's dtype names; "" keeps the compute dtype.
KV_CACHE_DTYPES = {"auto": "", "fp8_e4m3": "float8_e4m3fn"}
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("auto", FP8)
# CUDA's contexts alone take 0.5 GiB for each.
MAX_WORKERS_PER_GPU = 32
# Kernels skip the empty tiles of a step, of which each slot may have one.
MAX_LORAS = 1024
# Sequences and drafts of a decode step with drafts, on a GPU. Beyond it, rows take as long as further steps.
MAX_DRAFTED_ROWS = 256
# Bounds the memory for sampling the prompts' first tokens.
MAX_PREFILL_BATCH_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    load_format: str = option(
        "auto",
        "auto: load the model's weights; dummy: random weights, for which config and tokenizer suffice",
        choices=LOAD_FORMATS,
    )
    quantization: str = option(
        "auto",
        "auto: weights as in the checkpoint; fp8: convert unquantized weights to FP8 when loading",
        choices=QUANTIZATIONS,
        detail=" ([quantization.md](quantization.md#weights))",
    )
    kv_cache_dtype: str = option(
        "auto",
        "dtype of KV pages; auto: that of --dtype; fp8_e4m3: 8 bits, with the checkpoint's scales if it has any",
        choices=tuple(KV_CACHE_DTYPES),
        detail=" ([quantization.md](quantization.md#kv-pages))",
    )
    max_model_len: int = option(
        0,
        "maximum prompt and output tokens of a request together; 0: as many as the model and --num-pages allow",
        metavar="N",
    )
    device: str = option(
        "cpu",
        "device of the workers; cuda: NVIDIA GPUs",
        choices=DEVICES,
        detail=" ([gpu.md](gpu.md))",
    )
    workers_per_gpu: int = option(
        1,
        "workers, or ranks of workers, that share each GPU, in equal shares of its memory",
        metavar="N",
        detail=" ([gpu.md](gpu.md#several-workers-on-a-gpu))",
    )
    num_threads: int = option(
        0,
        "CPU threads per rank of a worker, at most the host's CPUs; 0: cores / ranks",
        name="threads",
        metavar="N",
    )
    attention_backend: str = option(
        AUTO,
        "attention kernels; auto: the first backend that supports the device, the dtype and the model's heads",
        choices=(AUTO, *ATTENTION_BACKENDS.names),
        takes_path=True,
        detail=". FlashInfer supports bfloat16 and head sizes 64, 128 and 256. On Hopper and later, `flashinfer` runs "
        "Tandem's own kernel in decode steps of up to 512 sequences "
        "([engine.md](engine.md))",
    )
    cuda_graph_max_bs: int = option(
        256,
        "largest decode batch that runs as a CUDA graph; 0: no CUDA graphs",
        metavar="N",
    )
    page_size: int = option(16, "tokens per page", metavar="N")
    mem_fraction_static: float = option(
        0.88,
        "share of a worker's GPU memory for weights, CUDA graphs and, without --num-pages, the pool",
        metavar="SHARE",
    )
    max_loras: int = option(
        0,
        "adapters in a worker's device memory at the same time; 0: 8 with --lora or --lora-root, else none",
        metavar="N",
        detail=" ([adapters.md](adapters.md))",
    )
    max_lora_rank: int = option(16, "largest rank of an adapter; memory for it is reserved", metavar="N")
    lora_host_memory: float = option(
        4.0,
        "host memory of each worker for loaded adapters, in GiB",
        metavar="GIB",
    )
    eviction: str = option(
        "lru",
        "which cached page is evicted first",
        choices=EVICTION_POLICIES.names,
        takes_path=True,
    )


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineOptions):
    """One model on one device.

    Attributes:
        model_dir: a local Hugging Face directory.
        kv_cache_dtype: "fp8_e4m3": 8 bits, divided by the checkpoint's scale for the layer, or by 1.
        num_pages: size of the pool; 0, on a GPU only: as many as mem_fraction_static allows.
        num_threads: CPU threads of one forward pass; 0: torch's choice.
        prefill_cuda_graphs: for mixed steps, and for prefills that take longer to launch than to compute.
        max_chunk_tokens: tokens of the largest prefill; 0: no prefills.
        max_batch_size: sequences of the largest decode step; 0: no decoding.
        max_drafts: drafts of a sequence in a decode step at most, on a GPU; 0: no drafts.
        max_model_len: 0: the model's limit, or the pool's if less.
        degree: ranks of the worker, processes that share the model.
        drafter: layers that draft for the model, with KV in the same pages: "draft:DIR" (a model's directory),
            "eagle:DIR", "mtp" (the model's own), or "" for none.
    """

    model_dir: str
    dtype: str = "float32"
    num_pages: int = 1024
    prefill_cuda_graphs: bool = True
    max_chunk_tokens: int = 512
    max_batch_size: int = 64
    max_drafts: int = 0
    mixed_steps: bool = False
    degree: int = 1
    drafter: str = ""

    def __post_init__(self) -> None:
        require_one_of(self, "device", DEVICES)
        ATTENTION_BACKENDS.check("attention_backend", self.attention_backend, device=self.device, besides=(AUTO,))
        EVICTION_POLICIES.check("eviction", self.eviction)
        for name in ("cuda_graph_max_bs", "max_chunk_tokens", "max_batch_size", "max_drafts", "max_model_len"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, but is {getattr(self, name)}")
        require(
            0 < self.mem_fraction_static < 1,
            f"mem_fraction_static must be between 0 and 1, not {self.mem_fraction_static}",
        )
        require(
            0 < self.workers_per_gpu <= MAX_WORKERS_PER_GPU,
            f"workers_per_gpu must be 1 to {MAX_WORKERS_PER_GPU}, not {self.workers_per_gpu}",
        )
        require(
            self.workers_per_gpu == 1 or self.device == "cuda",
            f"workers_per_gpu {self.workers_per_gpu} is for workers on GPUs: use `device` cuda",
        )
        require(1 <= self.degree <= MAX_DEGREE, f"a worker has 1 to {MAX_DEGREE} ranks, not {self.degree}")
        require(not self.drafter or self.degree == 1, "a drafter is for workers of one rank")
        require_one_of(self, "load_format", LOAD_FORMATS)
        require_one_of(self, "dtype", DTYPES)
        require_one_of(self, "quantization", QUANTIZATIONS)
        require_one_of(self, "kv_cache_dtype", tuple(KV_CACHE_DTYPES))
        require_positive(self, "page_size")
        if self.num_pages != 0 or self.device != "cuda":
            require_positive(self, "num_pages")
        require(0 <= self.max_loras <= MAX_LORAS, f"max_loras must be 0 to {MAX_LORAS}, not {self.max_loras}")
        require(
            0 < self.max_lora_rank <= MAX_LORA_RANK,
            f"max_lora_rank must be 1 to {MAX_LORA_RANK}, not {self.max_lora_rank}",
        )
        require(self.lora_host_memory >= 0, f"lora_host_memory must not be negative, but is {self.lora_host_memory}")
        require(self.num_threads >= 0, f"num_threads must not be negative, but is {self.num_threads}")

    @property
    def adapter_limits(self) -> AdapterLimits:
        return AdapterLimits(self.max_loras, self.max_lora_rank, int(self.lora_host_memory * GIB))
