"""Checks of the configuration."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from tandem.config import Role
from tandem.decode_worker.config import DecodeConfig, DecodeOptions
from tandem.decode_worker.draft_policy import MAX_DRAFTS
from tandem.deploy.cli.main import main
from tandem.deploy.config import cluster_config
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.config import EngineConfig, EngineOptions
from tandem.kvtransfer.config import LinkConfig
from tandem.prefill_worker.config import PrefillConfig, PrefillOptions
from tandem.router.config import RouterConfig, RouterOptions
from tandem.worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EngineConfig("m", kv_cache_dtype="fp8"),
            "kv_cache_dtype must be one of auto, fp8_e4m3, not 'fp8'",
        ),
        (lambda: EngineConfig("m", dtype="int8"), "dtype must be one of float32, bfloat16, not 'int8'"),
        (lambda: EngineConfig("m", device="tpu"), "device must be one of"),
        (
            lambda: EngineConfig("m", attention_backend="triton"),
            "`attention_backend` triton does not work with `device` cpu: use one of auto, reference",
        ),
        (lambda: EngineConfig("m", page_size=0), "page_size must be above 0, not 0"),
        (lambda: EngineConfig("m", num_threads=-1), "num_threads must not be negative"),
        (lambda: EngineConfig("m", num_pages=0), "num_pages must be above 0, not 0"),
        (lambda: EngineConfig("m", device="cuda", num_pages=-1), "num_pages must be above 0, not -1"),
        (lambda: EngineConfig("m", mem_fraction_static=0.0), "mem_fraction_static must be between 0 and 1, not 0.0"),
        (lambda: EngineConfig("m", max_chunk_tokens=-1), "max_chunk_tokens must not be negative"),
        (lambda: PrefillConfig(chunk_size=0), "chunk_size must be above 0"),
        (lambda: DecodeConfig(max_batch_size=-2), "max_batch_size must be above 0"),
        (lambda: RouterConfig("m", "m", 10, grpc_port=70000), "grpc_port must be between 0 and 65535"),
        (lambda: WorkerConfig("w", "router", EngineConfig("m"), 10), "role must be one of"),  # type: ignore[arg-type]
        (lambda: ClusterConfig("m", num_prefill=2, num_decode=0), "both kinds are needed"),
        (lambda: ClusterConfig("m", num_prefill=0, num_decode=0), "at least one worker is needed"),
        (lambda: ClusterConfig("m", num_both=-1), "num_both must not be negative"),
        (lambda: ClusterConfig("m", dtype="int4"), "dtype must be one of"),
        (lambda: ClusterConfig("m", internal_tls="yes"), "internal_tls must be one of auto, on, off"),
        (lambda: ClusterConfig("m", internal_tls_cert="a", internal_tls_key="b"), "are given by internal_tls_ca,"),
        (
            lambda: ClusterConfig(
                "m", internal_tls="off", internal_tls_ca="a", internal_tls_cert="b", internal_tls_key="c"
            ),
            "internal_tls off has no use for internal_tls_cert",
        ),
        (lambda: ClusterConfig("m", grpc_port=99999), "grpc_port must be between"),
        (lambda: ClusterConfig("m", device="cuda", workers_per_gpu=0), "workers_per_gpu must be 1 to 32, not 0"),
        (lambda: ClusterConfig("m", device="cuda", workers_per_gpu=33), "workers_per_gpu must be 1 to 32, not 33"),
        (lambda: ClusterConfig("m", workers_per_gpu=2), "workers_per_gpu 2 is for workers on GPUs: use `device` cuda$"),
        (
            lambda: ClusterConfig("m", device="cuda", workers_per_gpu=2, transport="nccl"),
            "`transport` nccl needs a GPU for each end of a link, but workers_per_gpu is 2: use `transport` ",
        ),
        (
            lambda: ClusterConfig("m", store_memory="64"),
            "^store_memory must be a size such as 64GiB, a whole number of KiB, MiB, GiB, TiB, not '64'$",
        ),
        (lambda: EngineConfig("m", degree=9), "^a worker has 1 to 8 ranks, not 9$"),
        (lambda: ClusterConfig("m", tp=0), "^`tp` must be at least 1, not 0$"),
        (lambda: ClusterConfig("m", decode_tp=9), "^`decode_tp` must be at most 8, not 9$"),
        (lambda: ClusterConfig("m", prefill_tp=-1), "^prefill_tp must not be negative"),
        (
            lambda: ClusterConfig("m", num_prefill=0, num_decode=0, num_any=2, prefill_tp=2),
            "^`prefill_tp` is for prefill workers, and this cluster has none: use `tp`$",
        ),
        (
            lambda: ClusterConfig("m", tp=2, speculation="mtp"),
            "^`speculation` mtp is for workers of one rank: use `speculation` off, auto or ngram, or leave `tp` out$",
        ),
        (
            lambda: ClusterConfig("m", speculation="ngram", speculation_shared=True),
            "^speculation_shared drafts from the outputs of one API key only: give api_keys or api_key_file$",
        ),
        (
            lambda: ClusterConfig("m", api_keys=("one",), share_cache_between_keys=True, speculation_shared=True),
            "^speculation_shared drafts from the outputs of one API key only: leave share_cache_between_keys out$",
        ),
        (
            lambda: ClusterConfig("m", tp=2, decode_tp=4, speculation="draft:small"),
            "^`speculation` draft:small is for workers of one rank: use `speculation` off, auto or ngram, or leave "
            "`tp` and `decode_tp` out$",
        ),
        (
            lambda: ClusterConfig("m", api_keys=("one",), speculation="off", speculation_shared=True),
            "^speculation_shared is for `speculation` auto and ngram, not off: leave it out, or use one of these$",
        ),
        (
            lambda: ClusterConfig("m", device="cuda", workers_per_gpu=2, decode_tp=3, num_pages=9),
            "^`decode_tp` 3 with workers_per_gpu 2 fills neither whole GPUs nor equal shares of one: use a multiple of "
            "it, or a divisor$",
        ),
        (
            lambda: ClusterConfig("m", decode_tp=2, max_batch_size=8193),
            "^max_batch_size must be at most 8192 with several ranks, not 8193$",
        ),
        (
            # The third worker would wait for a third of two GPUs.
            lambda: ClusterConfig("m", device="cuda", workers_per_gpu=3, tp=2, num_pages=9),
            "^`tp` 2 with workers_per_gpu 3 fills neither",
        ),
        (
            lambda: ClusterConfig("m", device="cuda", workers_per_gpu=2, tp=2),
            r"^ranks that share a GPU \(workers_per_gpu 2\) cannot measure its memory together: set num_pages$",
        ),
        (lambda: ClusterConfig("m", store_disk="/d:1GiB"), "^store_disk is for a page store: it needs store_memory$"),
        (lambda: ClusterConfig("m", store_write_after=2), "^store_write_after is for a page store: it needs store_mem"),
        (lambda: ClusterConfig("m", store_memory="1GiB", store_write_after=-1), "store_write_after must not be negat"),
        (lambda: ClusterConfig("m", store_namespace_share=0.5), "^store_namespace_share is for a page store: it needs"),
        *(
            (
                lambda share=share: ClusterConfig("m", store_memory="1GiB", store_namespace_share=share),
                f"^store_namespace_share must be above 0 and at most 1, but is {share}$",
            )
            for share in (0.0, -0.5, 1.5, math.nan)
        ),
        (
            lambda: ClusterConfig("m", store_memory="1GiB", store_disk="/d"),
            "^store_disk must be a directory and a size, such as /data/pages:500GiB, not '/d'$",
        ),
        (
            lambda: ClusterConfig("m", store_memory="1GiB", store_disk="/d:all"),
            "^the size of store_disk must be a size such as 64GiB, .* not 'all'$",
        ),
    ],
)
def test_nonsense_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_what_depends_on_the_device_is_decided_for_the_engine() -> None:
    on_cpu, on_gpu = (ClusterConfig("m", device=device).engine("m") for device in ("cpu", "cuda"))
    assert (on_cpu.dtype, on_cpu.num_pages) == ("float32", 1024)
    assert (on_gpu.dtype, on_gpu.num_pages) == ("bfloat16", 0)
    chosen = ClusterConfig("m", device="cuda", dtype="float32", num_pages=7, mem_fraction_static=0.5).engine("m")
    assert (on_gpu.kv_cache_dtype, chosen.kv_cache_dtype) == ("auto", "auto")
    quantized = ClusterConfig("m", kv_cache_dtype="fp8_e4m3")
    plan = quantized.worker("w", "decode", quantized.engine("m"), 100)
    assert plan.worker.engine.kv_cache_dtype == "fp8_e4m3"
    assert (chosen.dtype, chosen.num_pages, chosen.mem_fraction_static) == ("float32", 7, 0.5)
    for device, expected in (("cpu", (512, 64)), ("cuda", (8192, 256))):
        config = ClusterConfig("m", device=device)
        worker = config.worker("w", "both", config.engine("m"), 500)
        assert (worker.prefill.chunk_size, worker.decode.max_batch_size) == expected


@pytest.mark.parametrize(
    ("role", "chunk", "batch", "graph"), [("prefill", 99, 0, 0), ("decode", 0, 7, 7), ("both", 99, 7, 7)]
)
def test_an_engine_knows_its_largest_forwards(role: Role, chunk: int, batch: int, graph: int) -> None:
    config = ClusterConfig("m", chunk_size=99, max_batch_size=7)
    engine = config.worker("w", role, config.engine("m"), 500).worker.engine
    assert (engine.max_chunk_tokens, engine.max_batch_size, engine.cuda_graph_max_bs) == (chunk, batch, graph)
    assert engine.max_model_len == 500 and engine.max_drafts == MAX_DRAFTS
    assert replace(config, speculation="off").engine("m").max_drafts == 0
    assert replace(config, speculation="auto", device="cuda").engine("m").max_drafts == MAX_DRAFTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "m", "--page-size", "0"], "--page-size must be above 0"),
        (["--model", "m", "--prefill", "1", "--decode", "0"], "both kinds are needed"),
        (["--model", "m", "--chunk-size", "-5"], "--chunk-size must not be negative"),
        (["--model", "m", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["--model", "m", "--name", "../chat"], "--name must be 1 to 40 letters, digits, - and _"),
        ([], "which model? give --model"),
    ],
)
def test_a_wrong_call_exits_with_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["serve", *arguments])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


def test_every_option_of_the_cluster_is_used() -> None:
    """Processes get their package's options; the launcher interprets all others."""
    used_by_the_launcher = {
        *("cluster_name", "drain_timeout_s", "interface", "log_requests", "placement_strategy", "ray_address"),
        *("num_any", "num_both", "num_decode", "num_prefill", "num_routers", "ship_code"),
        *("node_timeout_s", "ray_autoscaler"),
        *("internal_tls", "internal_tls_ca", "internal_tls_cert", "internal_tls_key"),
    }
    used_by_cluster_config = {
        *("model", "served_model_name", "dtype", "num_pages", "chunk_size", "max_batch_size", "mixed_steps"),
        *("disable_overlap_schedule", "tp", "prefill_tp", "decode_tp", "routing", "transport", "log_level", "log_dir"),
        *("tls_cert", "tls_key", "tls_client_ca"),
        *("lora", "lora_root"),
        *("store_memory", "store_disk", "store_write_after", "store_namespace_share"),
    }
    own = {f.name for options in (DecodeOptions, EngineOptions, PrefillOptions, RouterOptions) for f in fields(options)}
    assert {f.name for f in fields(ClusterConfig)} - own - {
        "key_file",
        "bounds",
    } == used_by_the_launcher | used_by_cluster_config


@pytest.mark.parametrize("name", ["stall_timeout_s", "host"])
def test_a_field_that_nobody_sets_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("SET_PER_PROCESS", "FIXED"):
        left = {kind: names - {name} for kind, names in getattr(cluster_config, table).items()}
        monkeypatch.setattr(cluster_config, table, left)
    with pytest.raises(TypeError, match=rf"set {name} of \w+Config in one of"):
        ClusterConfig("m")


def test_a_field_that_two_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_config, "FIXED", {**cluster_config.FIXED, LinkConfig: {"transports"}})
    with pytest.raises(TypeError, match="set transports of LinkConfig in one of"):
        ClusterConfig("m")


def test_an_option_reaches_the_process_that_has_a_field_of_its_name() -> None:
    config = ClusterConfig("m", host="0.0.0.0", schedule="lpm", eviction="lfu", api_keys=("key",), max_batch_size=7)
    plan = config.worker("w", "both", config.engine("m"), 10)
    assert (plan.prefill.schedule, plan.worker.engine.eviction, plan.worker.api_keys) == ("lpm", "lfu", ("key",))
    assert (plan.decode.max_batch_size, plan.worker.host) == (7, "127.0.0.1")
    assert config.router("m", "m", 10).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement_strategy": "pack"}, "placement_strategy pack .* needs ray_address"),
        (
            {"ray_address": "10.0.0.1:6379", "interface": "eth0"},
            "`interface` .* needs placement_strategy pack or spread",
        ),
        ({"ray_address": "10.0.0.1:6379", "ship_code": True}, "`ship_code` .* needs placement_strategy pack or spread"),
        (
            {"ray_address": "10.0.0.1:6379", "placement_strategy": "spread", "interface": "10.0.0.1/64"},
            "interface 10.0.0.1/64 is no IPv4 network",
        ),
    ],
)
def test_what_is_for_several_nodes_needs_a_ray_that_has_them(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterConfig("m", **changes)


def test_workers_over_several_nodes_find_their_own_address() -> None:
    config = ClusterConfig("m", ray_address="10.0.0.1:6379", placement_strategy="spread", interface="10.0.0.0/16")
    plan = config.worker("w", "decode", config.engine("m"), 10)
    assert (plan.spans_nodes, plan.interface) == (True, "10.0.0.0/16")
    assert not ClusterConfig("m").worker("w", "decode", config.engine("m"), 10).spans_nodes


@pytest.mark.parametrize(
    ("role", "mixed_steps", "mixes"),
    [("both", "on", True), ("both", "off", False), ("prefill", "on", False), ("decode", "on", False)],
)
def test_only_who_has_both_roles_mixes(role: Role, mixed_steps: str, mixes: bool) -> None:
    """Other workers would capture graphs for nothing."""
    config = ClusterConfig("m", mixed_steps=mixed_steps)
    assert config.worker("w", role, config.engine("m"), 100).worker.engine.mixed_steps == mixes


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 7, 32])
@pytest.mark.parametrize("workers_per_gpu", range(1, 33))
def test_workers_take_equal_parts_of_gpus(workers_per_gpu: int, num_workers: int) -> None:
    config = ClusterConfig(
        "m", device="cuda", num_prefill=0, num_decode=0, num_any=num_workers, workers_per_gpu=workers_per_gpu
    )
    assert config.num_gpus == -(-num_workers // workers_per_gpu)
    # Ray counts in ten-thousandths: so many fit a GPU, and no more.
    parts = config.gpus_of("both") * 10_000
    assert parts == pytest.approx(round(parts)) and 10_000 // round(parts) == workers_per_gpu
    assert config.worker("w", "both", config.engine("m"), 9).worker.engine.workers_per_gpu == workers_per_gpu


def test_roles_have_degrees_of_their_own() -> None:
    config = ClusterConfig("m", num_prefill=2, num_decode=3, num_both=1, tp=2, prefill_tp=4, device="cuda")
    assert [config.degree_of(role) for role in ("prefill", "decode", "both")] == [4, 2, 2]
    assert (config.num_ranks, config.max_degree, config.num_gpus) == (16, 4, 16)
    engine = config.engine("m")
    assert [config.worker("w", role, engine, 9).worker.engine.degree for role in ("prefill", "decode")] == [4, 2]
    assert [config.gpus_of(role) for role in ("prefill", "decode")] == [4.0, 2.0]


@pytest.mark.parametrize(
    ("workers_per_gpu", "num_ranks", "num_gpus", "each"),
    [(2, 1, 1, 0.5), (2, 2, 2, 1.0), (2, 4, 4, 2.0), (4, 2, 1, 0.5)],
)
def test_ranks_share_gpus(workers_per_gpu: int, num_ranks: int, num_gpus: int, each: float) -> None:
    config = ClusterConfig("m", device="cuda", workers_per_gpu=workers_per_gpu, tp=num_ranks, num_pages=64)
    assert (config.num_gpus, config.gpus_of("decode")) == (num_gpus, each)


def test_speculation_is_automatic_with_one_rank_a_worker() -> None:
    def of_decode(**options: Any) -> tuple[str, bool]:
        config = ClusterConfig("m", **options)
        plan = config.worker("w", "decode", config.engine("m"), 100)
        return plan.decode.speculation, plan.worker.engine.max_drafts > 0

    assert of_decode() == of_decode(device="cuda") == of_decode(tp=2, speculation="auto") == ("auto", True)
    assert of_decode(speculation="ngram") == ("ngram", True)
    assert of_decode(tp=2) == of_decode(speculation="off") == ("off", False)
