"""What an engine can be told. Nothing here imports torch: the command line reads this too."""

from dataclasses import dataclass

from tandem.config import DEVICES, require, require_one_of, require_positive
from tandem.engine.attention.table import ATTENTION_BACKENDS, AUTO
from tandem.engine.kvcache.eviction.table import EVICTION_POLICIES
from tandem.engine.models.quantization import FP8

DTYPES = ("float32", "bfloat16")
# What keys and values are kept as in pages, by torch's names; "": as they are computed.
KV_CACHE_DTYPES = {"auto": "", "fp8_e4m3": "float8_e4m3fn"}
LOAD_FORMATS = ("auto", "dummy")
# Weights as the checkpoint has them, or FP8 in any case.
QUANTIZATIONS = ("auto", FP8)
# One prefill forward computes chunks of at most so many prompts, which bounds what sampling their first tokens takes.
MAX_PREFILL_BATCH_SIZE = 128


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model on one device.

    Attributes:
        model_dir: a local Hugging Face directory.
        load_format: "auto" reads the checkpoint; "dummy" makes random weights for the config.
        quantization: "auto": weights are as the checkpoint has them; "fp8": plain ones become FP8 when they are loaded.
        kv_cache_dtype: what keys and values are kept as in pages: auto: as they are computed; fp8_e4m3: in 8 bits, each
            divided by a scale of the checkpoint for its layer, or by 1.
        num_pages: size of the pool, in pages; 0, on a GPU alone: as many as mem_fraction_static leaves room for.
        num_devices: devices that the model is spread over; one so far.
        num_threads: CPU threads of one forward; 0 leaves torch's choice.
        attention_backend: a name in ATTENTION_BACKENDS, or the import path of a backend; auto: the first of the table
            that computes the model on the device.
        eviction: which cached page goes first when room is needed: a name in EVICTION_POLICIES, or the import path of a
            policy.
        cuda_graph_max_bs: decode batches up to this size run as CUDA graphs; 0: none do.
        prefill_cuda_graphs: whether prefills that take longer to launch than to compute run as CUDA graphs, and so do
            forwards of both kinds where decode batches do.
        mem_fraction_static: the share of the GPU's memory, between 0 and 1, that weights, graphs and pool together may
            take; the rest is for what forwards need while they run. Read if num_pages is 0.
        max_chunk_tokens: tokens of the largest prefill forward; 0: there is none. A GPU keeps memory for it.
        max_batch_size: sequences of the largest decode step; 0: there is none. Likewise.
        mixed_steps: whether one forward may both decode and compute prompts, where the attention backend can.
        max_model_len: tokens of the longest sequence, which the pool must hold; 0: the model's own limit, or what the
            pool holds if that is less.
    """

    model_dir: str
    load_format: str = "auto"
    device: str = "cpu"
    dtype: str = "float32"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    page_size: int = 16
    num_pages: int = 1024
    num_devices: int = 1
    num_threads: int = 0
    attention_backend: str = "auto"
    eviction: str = "lru"
    cuda_graph_max_bs: int = 256
    prefill_cuda_graphs: bool = True
    mem_fraction_static: float = 0.88
    max_chunk_tokens: int = 512
    max_batch_size: int = 64
    mixed_steps: bool = False
    max_model_len: int = 0

    def __post_init__(self) -> None:
        require_one_of(self, "device", DEVICES)
        ATTENTION_BACKENDS.check("attention_backend", self.attention_backend, device=self.device, besides=(AUTO,))
        EVICTION_POLICIES.check("eviction", self.eviction)
        for name in ("cuda_graph_max_bs", "max_chunk_tokens", "max_batch_size", "max_model_len"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, but is {getattr(self, name)}")
        require(
            0 < self.mem_fraction_static < 1,
            f"mem_fraction_static must be between 0 and 1, not {self.mem_fraction_static}",
        )
        require_one_of(self, "load_format", LOAD_FORMATS)
        require_one_of(self, "dtype", DTYPES)
        require_one_of(self, "quantization", QUANTIZATIONS)
        require_one_of(self, "kv_cache_dtype", tuple(KV_CACHE_DTYPES))
        require(self.num_devices == 1, f"a model runs on 1 device so far, not on {self.num_devices}")
        require_positive(self, "page_size")
        if self.num_pages != 0 or self.device != "cuda":
            require_positive(self, "num_pages")
        require(self.num_threads >= 0, f"num_threads must not be negative, but is {self.num_threads}")
