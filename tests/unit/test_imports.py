"""Imports go one way. The rules are those of docs/architecture.md."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("tandem", "router", "prefill_worker", "decode_worker", "kvtransfer", "deploy")

# Who may import what, by module prefix; the longest prefix of a module's own name counts. A room may import itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "tandem": (
        "tandem.config",
        "tandem.cluster_config",
        "tandem.messages",
        "tandem.sampling_params",
        "tandem.lifecycle",
        "tandem.v1",
    ),
    "tandem.rpc": ("tandem.config", "tandem.messages", "tandem.sampling_params", "tandem.v1"),
    "tandem.engine": ("tandem.config", "tandem.sampling_params"),
    "tandem.worker": (
        "tandem.config",
        "tandem.messages",
        "tandem.sampling_params",
        "tandem.lifecycle",
        "tandem.rpc",
        "tandem.v1",
        "tandem.engine",
    ),
    "tandem.client": ("tandem.v1",),
    "tandem.terminal": ("tandem.client", "tandem.config", "tandem.rpc.tls", "tandem.v1"),
    "tandem.cli": ("tandem", "deploy"),
    "kvtransfer": (
        "tandem.config",
        "tandem.messages",
        "tandem.sampling_params",
        "tandem.rpc",
        "tandem.v1",
        "tandem.worker.events",
        "tandem.engine.kvcache.base",
        "tandem.engine.kvcache.pool",
        "tandem.engine.kvcache.cuda_pool",
    ),
    "prefill_worker": ("tandem", "kvtransfer"),
    "decode_worker": ("tandem", "kvtransfer"),
    "router": (
        "tandem.config",
        "tandem.messages",
        "tandem.sampling_params",
        "tandem.lifecycle",
        "tandem.prefix",
        "tandem.rpc",
        "tandem.v1",
    ),
    "deploy": ("tandem", "router", "prefill_worker", "decode_worker", "kvtransfer"),
}
# What the command line may take from all that `tandem` contains is not for others to take from it.
NOT_FOR_ROOMS = ("tandem.cli", "tandem.terminal", "tandem.client")


def modules() -> Iterator[tuple[str, Path]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.parent != ROOT / "tandem/v1":
                parts = path.relative_to(ROOT).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, inside functions too."""
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


def room_of(module: str) -> str:
    return max((prefix for prefix in ALLOWED if within(module, prefix)), key=len)


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_go_one_way(module: str, path: Path) -> None:
    room = room_of(module)
    for target in imported(path):
        if target.partition(".")[0] not in ROOMS or target == "tandem":
            continue
        allowed = room_of(target) == room or any(within(target, prefix) for prefix in ALLOWED[room])
        if room not in ("tandem.cli", "tandem.terminal"):
            allowed = allowed and not any(within(target, prefix) and target != module for prefix in NOT_FOR_ROOMS)
        assert allowed, f"{module} must not import {target}"


@pytest.mark.parametrize(
    "room", ["router", "tandem.config", "tandem.messages", "tandem.rpc", "tandem.client", "tandem.engine.models.config"]
)
def test_what_runs_without_torch_does_not_import_it(room: str) -> None:
    for module, path in modules():
        if within(module, room):
            heavy = {t.partition(".")[0] for t in imported(path)} & {"torch", "transformers", "numpy"}
            assert not heavy, f"{module} imports {heavy}"


@pytest.mark.parametrize("room", ROOMS)
def test_only_deploy_knows_ray(room: str) -> None:
    for module, path in modules():
        if within(module, room) and room != "deploy":
            assert "ray" not in {t.partition(".")[0] for t in imported(path)}, f"{module} imports ray"


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
