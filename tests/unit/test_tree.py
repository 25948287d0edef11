"""The tree of tests mirrors the code, and every list of packages is complete."""

import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.test_imports import PACKAGES

ROOT = Path(__file__).parents[2]
# Test folders without a matching source: documents, scripts, cross-package tests.
WITHOUT_SOURCE = ("benchmarks", "docs", "examples", "scenarios")
# A longer source file without tests of its own must be listed below or be an interface.
MAX_LINES_WITHOUT_TESTS = 60
TESTED_ELSEWHERE = {
    "tandem/bench/config.py": "unit/tandem/bench/test_results.py",
    "tandem/bench/records.py": "unit/tandem/bench/test_results.py",
    "tandem/bench/clients/http_connection.py": "unit/tandem/bench/clients/test_openai.py",
    "deploy/cli/bench_options.py": "unit/deploy/cli/test_bench_config.py",
    "deploy/cli/client_options.py": "unit/deploy/cli/test_main.py",
    "deploy/cli/cluster_commands.py": "unit/deploy/cli/test_clusters.py",
    "deploy/cli/serve_options.py": "unit/deploy/cli/test_serve_config.py",
    "both_worker/local_worker.py": "unit/scenarios/test_engine_under_pressure.py",
    "both_worker/worker.py": "unit/both_worker/test_scheduler.py",
    "decode_worker/worker.py": "cluster/test_ranks.py",
    "decode_worker/job.py": "unit/decode_worker/test_scheduler.py",
    "decode_worker/lease.py": "unit/decode_worker/test_leases.py",
    "deploy/actors/router_actor.py": "cluster/test_cluster.py",
    "deploy/config/cluster_options.py": "unit/deploy/cli/test_reference.py",
    "deploy/host/guard.py": "cluster/test_guard.py",
    "deploy/supervise/capacities.py": "unit/deploy/supervise/test_role_planner.py",
    "deploy/supervise/measured_load.py": "unit/deploy/supervise/test_size_planner.py",
    "deploy/on_ray/ray_module.py": "unit/deploy/on_ray/test_local_ray.py",
    "deploy/on_ray/ray_base.py": "unit/deploy/supervise/test_room.py",
    "deploy/host/run_record.py": "unit/deploy/host/test_process_tree.py",
    "engine/graph_capture.py": "gpu/engine/test_graph_runner.py",
    "engine/collectives/ipc_memory.py": "gpu/engine/collectives/test_cuda_ipc.py",
    "engine/models/attention/by_head.py": "unit/engine/models/test_decoder.py",
    "engine/models/attention/indexed.py": "unit/engine/models/test_decoder.py",
    "engine/models/attention/latent.py": "unit/engine/models/test_decoder.py",
    "engine/models/latent.py": "unit/engine/models/families/test_families.py",
    "engine/adapters/host.py": "unit/engine/adapters/test_ops.py",
    "engine/adapters/loader.py": "unit/engine/adapters/test_manager.py",
    "engine/adapters/peft_config.py": "unit/engine/adapters/test_peft.py",
    "engine/adapters/products.py": "unit/engine/adapters/test_ops.py",
    "engine/adapters/gated_products.py": "gpu/engine/adapters/test_ops.py",
    "engine/adapters/row_products.py": "gpu/engine/adapters/test_triton_products.py",
    "engine/config.py": "unit/deploy/config/test_cluster_config.py",
    "engine/kvcache/page_part.py": "unit/kvtransfer/lanes/test_plan.py",
    "engine/kvcache/cuda_pool.py": "gpu/kvtransfer/transports/test_table.py",
    "engine/draft_models/backend.py": "unit/scenarios/test_model_drafts.py",
    "engine/draft_models/pass_draws.py": "gpu/engine/draft_models/test_draw_kernel.py",
    "engine/draft_models/draft_maker.py": "unit/scenarios/test_model_drafts.py",
    "engine/draft_models/passes.py": "unit/engine/draft_models/test_pass_graphs.py",
    "engine/draft_models/drafted_model.py": "unit/scenarios/test_model_drafts.py",
    "engine/draft_models/load.py": "unit/scenarios/test_model_drafts.py",
    "engine/drafted_row.py": "unit/engine/test_batch.py",
    "engine/draws.py": "unit/engine/test_sampler.py",
    "engine/layers/cuda_kernel.py": "gpu/engine/layers/test_cuda_ops.py",
    "engine/layers/experts/grouped_kernels.py": "gpu/engine/layers/experts/test_grouped.py",
    "engine/layers/gated_products.py": "gpu/engine/layers/test_cuda_ops.py",
    "engine/layers/linear.py": "unit/engine/models/test_decoder.py",
    "engine/layers/ops.py": "unit/engine/models/test_decoder.py",
    "engine/models/linears.py": "unit/engine/models/test_decoder_ranks.py",
    "engine/cuda_build.py": "gpu/engine/test_build.py",
    "engine/loaded_model.py": "unit/engine/test_build.py",
    "engine/engine_outputs.py": "unit/engine/ranks/test_follower.py",
    "engine/ranks/recorder.py": "unit/engine/ranks/test_record.py",
    "engine/ranks/replay.py": "unit/engine/ranks/test_record.py",
    "engine/token_sequence.py": "unit/engine/test_batch.py",
    "kvtransfer/lanes/remote.py": "unit/kvtransfer/lanes/test_ranks.py",
    "kvtransfer/transport_choice.py": "unit/kvtransfer/test_link_dialer_fallback.py",
    "kvtransfer/events.py": "unit/kvtransfer/test_link_dialer.py",
    "kvtransfer/transports/mover.py": "unit/kvtransfer/transports/test_tcp.py",
    "kvtransfer/transports/nccl_communicator.py": "unit/kvtransfer/transports/test_nccl.py",
    "kvtransfer/transports/nccl_mover.py": "unit/kvtransfer/transports/test_nccl.py",
    "pagestore/client/prefetch.py": "unit/pagestore/client/test_loading.py",
    "pagestore/messages.py": "unit/pagestore/test_keys.py",
    "pagestore/region_client.py": "unit/pagestore/test_region_holder.py",
    "pagestore/server/disk/run_io.py": "unit/pagestore/server/disk/test_disk_tier.py",
    "pagestore/server/metrics.py": "unit/pagestore/server/test_server.py",
    "prefill_worker/job.py": "unit/prefill_worker/test_scheduler.py",
    "worker/ranks/channel.py": "unit/worker/ranks/test_processes.py",
    "worker/ranks/follower.py": "unit/worker/ranks/test_processes.py",
    "worker/ranks/group.py": "unit/worker/ranks/test_processes.py",
    "worker/ranks/serving.py": "cluster/test_ranks.py",
    "engine/ranks/progress.py": "unit/worker/ranks/test_processes.py",
    "worker/page_tier.py": "unit/pagestore/test_keys.py",
    "router/frontends/admin/grpc.py": "cluster/test_adapters.py",
    "router/frontends/anthropic/context_schema.py": "unit/router/frontends/anthropic/test_context_edits.py",
    "router/frontends/anthropic/schema.py": "unit/router/frontends/anthropic/test_routes.py",
    "router/frontends/anthropic/translation.py": "unit/router/frontends/anthropic/test_routes.py",
    "router/frontends/embedding.py": "unit/router/frontends/openai/test_embeddings.py",
    "router/frontends/grpc_responses.py": "unit/router/frontends/test_grpc.py",
    "router/frontends/malformed.py": "cluster/test_grpc_contract.py",
    "router/frontends/openai/answer_schema.py": "unit/router/frontends/openai/test_schema.py",
    "router/frontends/openai/chat_plan.py": "unit/router/frontends/openai/test_chat.py",
    "router/frontends/openai/completions.py": "cluster/test_openai.py",
    "router/frontends/openai/embeddings_schema.py": "unit/router/frontends/openai/test_embeddings.py",
    "router/frontends/openai/one_output.py": "unit/router/frontends/responses/test_routes.py",
    "router/frontends/openai/tools_schema.py": "unit/router/frontends/openai/test_chat.py",
    "router/frontends/openai/server.py": "unit/router/frontends/openai/test_middleware.py",
    "router/frontends/responses/kept_items.py": "unit/router/frontends/responses/test_routes.py",
    "router/frontends/responses/schema.py": "unit/router/frontends/responses/test_routes.py",
    "router/requests/request_spec.py": "unit/router/frontends/test_base.py",
    "tandem/client/progress.py": "unit/tandem/client/test_clients.py",
    "tandem/client/requests.py": "cluster/test_cluster.py",
    "tandem/config.py": "unit/deploy/config/test_cluster_config.py",
    "tandem/watched_files.py": "unit/tandem/test_key_file.py",
    "tandem/rpc/batch_writer.py": "unit/tandem/rpc/test_codec.py",
    "tandem/rpc/metrics_server.py": "unit/worker/test_metrics.py",
    "worker/config.py": "unit/deploy/config/test_cluster_config.py",
    "worker/control_client.py": "unit/worker/test_router_streams.py",
}


@cache
def sources() -> tuple[Path, ...]:
    return tuple(
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "__init__.py" and path.parent != ROOT / "tandem/v1"
    )


def files_of_tests(kind: str) -> Iterator[Path]:
    for path in sorted((ROOT / "tests" / kind).rglob("test_*.py")):
        relative = path.relative_to(ROOT / "tests" / kind)
        if len(relative.parts) > 1 and relative.parts[0] not in WITHOUT_SOURCE:
            yield relative


def sources_of(test_file: Path) -> list[Path]:
    """Return a test file's sources: equal name, a prefix of its name, or all of the folder of its name."""
    stem, folder = test_file.stem.removeprefix("test_"), test_file.parent
    named = [s for s in sources() if s.parent == folder and (stem == s.stem or stem.startswith(f"{s.stem}_"))]
    return named or [s for s in sources() if s.parent == folder and stem == folder.name]


@pytest.mark.parametrize("kind", ["unit", "gpu"])
def test_every_test_file_is_beside_its_source(kind: str) -> None:
    lost = [str(path) for path in files_of_tests(kind) if not sources_of(path)]
    assert lost == []


def test_every_source_file_has_tests() -> None:
    tested = {source for kind in ("unit", "gpu") for path in files_of_tests(kind) for source in sources_of(path)}
    long = {s for s in sources() if len((ROOT / s).read_text().splitlines()) > MAX_LINES_WITHOUT_TESTS}
    elsewhere = {str(s) for s in long - tested if s.name != "base.py"}
    assert elsewhere == set(TESTED_ELSEWHERE), "a file is listed that has its tests, or has none and is not listed"
    assert [path for path in TESTED_ELSEWHERE.values() if not (ROOT / "tests" / path).is_file()] == []


def test_package_lists_are_complete() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["tandem*"]
    assert set(project["tool"]["mypy"]["files"]) == {"tandem", "benchmarks", "tests"}
    links = {path.name: path.readlink() for path in (ROOT / "tandem").iterdir() if path.is_symlink()}
    assert links == {name: Path("..", name) for name in PACKAGES if name != "tandem"}
    there = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert there == set(PACKAGES)
