"""Imports go one way, by the rules of docs/architecture.md."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "tandem",
    "engine",
    "worker",
    "kvtransfer",
    "pagestore",
    "prefill_worker",
    "decode_worker",
    "both_worker",
    "router",
    "deploy",
)
VOCABULARY = (
    "tandem.adapters",
    "tandem.choices",
    "tandem.config",
    "tandem.embedding",
    "tandem.exit_codes",
    "tandem.exit_watch",
    "tandem.forward_times",
    "tandem.grammar_limits",
    "tandem.head_slice",
    "tandem.hosts",
    "tandem.key_file",
    "tandem.messages",
    "tandem.open_files",
    "tandem.options",
    "tandem.page_changes",
    "tandem.peer_union",
    "tandem.prctl",
    "tandem.prefix",
    "tandem.printable",
    "tandem.private_directory",
    "tandem.processes",
    "tandem.prompt_logprobs",
    "tandem.recording",
    "tandem.repeat_limit",
    "tandem.request_ids",
    "tandem.sampling_params",
    "tandem.watched_files",
)

COMMON = (
    *VOCABULARY,
    "tandem.garbage",
    "tandem.lifecycle",
    "tandem.linear_fit",
    "tandem.logs",
    "tandem.priority",
    "tandem.process_metrics",
    "tandem.rpc",
    "tandem.timer_slack",
    "tandem.v1",
)

# Allowed imports by module prefix; the longest matching prefix counts. A package may import itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "tandem": (*VOCABULARY, "tandem.lifecycle", "tandem.v1"),
    "tandem.rpc": (*VOCABULARY, "tandem.v1"),
    "tandem.client": ("tandem.v1",),
    "tandem.engine": VOCABULARY,
    "tandem.worker": (
        *VOCABULARY,
        "tandem.garbage",
        "tandem.lifecycle",
        "tandem.linear_fit",
        "tandem.logs",
        "tandem.process_metrics",
        "tandem.rpc",
        "tandem.timer_slack",
        "tandem.v1",
        "tandem.engine",
        "tandem.pagestore.messages",
    ),
    "tandem.kvtransfer": (
        *VOCABULARY,
        "tandem.lifecycle",
        "tandem.rpc",
        "tandem.timer_slack",
        "tandem.v1",
        "tandem.worker.events",
        "tandem.engine.kvcache",
    ),
    "tandem.pagestore": (*COMMON,),
    "tandem.pagestore.client": (
        *COMMON,
        "tandem.pagestore",
        "tandem.engine.base",
        "tandem.engine.kvcache",
        "tandem.engine.launch_list",
        "tandem.engine.ranks.config",
        "tandem.worker",
    ),
    "tandem.prefill_worker": (*COMMON, "tandem.engine", "tandem.worker", "tandem.kvtransfer"),
    "tandem.decode_worker": (*COMMON, "tandem.engine", "tandem.worker", "tandem.kvtransfer"),
    "tandem.both_worker": (
        *COMMON,
        "tandem.engine",
        "tandem.worker",
        "tandem.kvtransfer",
        "tandem.prefill_worker",
        "tandem.decode_worker",
    ),
    "tandem.router": (
        *VOCABULARY,
        "tandem.lifecycle",
        "tandem.linear_fit",
        "tandem.process_metrics",
        "tandem.rpc",
        "tandem.v1",
    ),
    "tandem.deploy": (
        *COMMON,
        "tandem.engine",
        "tandem.router",
        "tandem.worker",
        "tandem.kvtransfer",
        "tandem.pagestore",
        "tandem.prefill_worker",
        "tandem.decode_worker",
        "tandem.both_worker",
    ),
    "tandem.bench": (*COMMON, "tandem.client"),
    "tandem.deploy.cli": (
        *COMMON,
        "tandem.client",
        "tandem.deploy",
        "tandem.bench",
        "tandem.engine.adapters.base",
        "tandem.engine.config",
        "tandem.engine.floors",
        "tandem.engine.ranks.config",
        "tandem.engine.weights.conversions",
    ),
}
# Only the command line and the benchmarks use the client.
FOR_CLIENTS_ALONE = ("tandem.client",)


@cache
def modules() -> tuple[tuple[str, Path], ...]:
    return tuple(
        (module_name(path.relative_to(ROOT), package), path)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.parent != ROOT / "tandem/v1"
    )


def module_name(path: Path, package: str) -> str:
    parts = path.with_suffix("").parts
    parts = parts if package == "tandem" else ("tandem", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Return every module that a file imports anywhere, including inside functions."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                candidate = f"{node.module}.{alias.name}"
                is_module = (ROOT / Path(*candidate.split("."))).is_dir() or (
                    ROOT / Path(*candidate.split(".")).with_suffix(".py")
                ).is_file()
                yield candidate if is_module else str(node.module)


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def package_of(module: str) -> str:
    return max((prefix for prefix in ALLOWED if within(module, prefix)), key=len)


def test_imports_go_one_way() -> None:
    wrong = []
    for module, path in modules():
        package = package_of(module)
        for target in imported(path):
            if not within(target, "tandem") or target == "tandem":
                continue
            allowed = package_of(target) == package or any(within(target, prefix) for prefix in ALLOWED[package])
            if package not in ("tandem.deploy.cli", "tandem.bench"):
                allowed = allowed and not any(within(target, p) and not within(module, p) for p in FOR_CLIENTS_ALONE)
            if not allowed:
                wrong.append(f"{module} must not import {target}")
    assert wrong == []


# Modules that a person waits for, or that must start within a second.
LIGHT = (
    "tandem.deploy.cli.main",
    "tandem.deploy.cli.reference",
    "tandem.deploy.config.cluster_config",
    # The launcher imports these before it starts any process.
    "tandem.deploy.actors.router_actor",
    "tandem.deploy.actors.store_actor",
    "tandem.deploy.actors.worker_actor",
    "tandem.router.process",
    "tandem.pagestore.region_holder",
    "tandem.pagestore.server.process",
    "tandem.client",
    "tandem.engine.models.config",
)


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_do_not_import_torch(module: str) -> None:
    script = f"import sys, {module}; print(*({{'torch', 'transformers', 'ray', 'flashinfer'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "module",
    [
        "tandem.client",
        "tandem.deploy.cli.main",
        "tandem.deploy.cli.terminal",
        "tandem.deploy.cli.cache",
        "tandem.deploy.cli.bench_command",
        "tandem.deploy.cli.estimate_command",
    ],
)
def test_client_imports_little(module: str) -> None:
    heavy = {
        "torch",
        "transformers",
        "ray",
        "fastapi",
        "uvicorn",
        "numpy",
        "tokenizers",
        "yaml",
        "jinja2",
        "matplotlib",
    }
    script = f"import sys, {module}; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("package", ALLOWED)
def test_only_deploy_imports_ray(package: str) -> None:
    for module, path in modules():
        if package_of(module) == package and not within(package, "tandem.deploy"):
            assert "ray" not in {t.partition(".")[0] for t in imported(path)}, f"{module} imports ray"


def test_ray_is_imported_only_beside_its_settings() -> None:
    importers = {m for m, path in modules() if "ray" in {t.partition(".")[0] for t in imported(path)}}
    # Ray Serve's application runs after Ray Serve has imported both.
    assert importers == {"tandem.deploy.on_ray.ray_module", "tandem.deploy.joined.ray_service"}


def test_subpackages_have_no_import_cycles() -> None:
    rooms: dict[str, set[str]] = {}
    for module, path in modules():
        for target in imported(path):
            a, b = (".".join(name.split(".")[:3]) for name in (module, target))
            if a != b and all(
                len(n.split(".")) > 3 and n.startswith(("tandem.router.", "tandem.deploy.")) for n in (module, target)
            ):
                rooms.setdefault(a, set()).add(b)
    list(TopologicalSorter(rooms).static_order())


def test_no_import_cycles() -> None:
    graph = {module: {t for t in imported(path) if t != module} for module, path in modules()}
    visiting: list[str] = []
    done: set[str] = set()

    def visit(module: str) -> None:
        assert module not in visiting, f"a cycle: {' -> '.join([*visiting, module])}"
        if module in done or module not in graph:
            return
        visiting.append(module)
        for target in sorted(graph[module]):
            visit(target)
        visiting.pop()
        done.add(module)

    for module in graph:
        visit(module)
