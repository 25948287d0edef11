"""Kernels compiled while weights load."""

import json
import threading
from pathlib import Path

import pytest
import torch

from tandem.engine import rehearsal
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.dry_run import free_bytes
from tandem.engine.engine import Engine
from tandem.engine.layers.kernel_compilers import KernelCompilers
from tandem.engine.token_sequence import TokenSequence

# Two layers with the matrices of Llama-3.1-8B, whose products have kernels of all kinds.
SETTINGS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 4096,
}
# Workspaces of the library for each thread.
MAX_MORE_BYTES = 2**28


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has other kernels")
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    return EngineConfig(
        str(tmp_path),
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        num_pages=64,
        cuda_graph_max_bs=32,
        max_chunk_tokens=1024,
        mixed_steps=True,
    )


def greedy_tokens(engine: Engine) -> list[int]:
    sequences = []
    for number, length in enumerate((5, 70, 300)):
        token_ids = list(range(100 * number, 100 * number + length))
        pages = list(range(20 * number, 20 * number + engine.pool.layout.num_pages_for(length)))
        sequences.append(TokenSequence(token_ids, length, pages))
        sequences[-1].extend(length)
    return engine.forward(Batch("prefill", sequences)).token_ids()


def test_a_rehearsal_compiles_the_kernels_and_changes_nothing_else(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.engine.layers import cuda_kernel

    compile_kernel, by_thread = cuda_kernel._compile, list[tuple[str, str]]()

    def recorded(package: str, name: str, options: tuple[str, ...]) -> bytes:
        by_thread.append((threading.current_thread().name, name))
        return compile_kernel(package, name, options)

    told: list[str] = []
    with monkeypatch.context() as without:
        without.setattr(rehearsal, "_has_room", lambda model, device: False)
        # Libraries keep what they load at first use.
        build_engine(config, "first", told.append)
        before = free_bytes()
        engine = build_engine(config, "not-rehearsed", told.append)
        taken = before - free_bytes()
        tokens = greedy_tokens(engine)
    assert "compiling kernels" not in told

    del engine
    monkeypatch.setattr(cuda_kernel, "_compilers", KernelCompilers(recorded))
    before = free_bytes()
    engine = build_engine(config, "rehearsed", told.append)
    assert before - free_bytes() - taken <= MAX_MORE_BYTES
    assert greedy_tokens(engine) == tokens
    assert "compiling kernels" in told
    main = threading.current_thread().name
    assert {name for thread, name in by_thread if thread != main} >= {"balanced_products", "few_rows", "paged_decode"}
    # Graphs alone have this one.
    assert {name for thread, name in by_thread if thread == main} <= {"most_likely"}
    assert not [thread for thread in threading.enumerate() if thread.name in ("rehearsal", "compiler")]
