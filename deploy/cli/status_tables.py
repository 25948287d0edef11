"""The tables of `tandem status`."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.printable import printable
from tandem.v1 import inference_pb2 as pb

# More linked workers are counted.
MAX_NAMES = 8
# Below adapters that no worker holds.
NOT_READ_YET = (
    "on devices, in memory: numbers of workers; 0 is normal: a worker reads an adapter when a request needs it"
)


def print_status(info: pb.ServerInfo) -> None:
    console = Console(highlight=False)
    reason = escape(printable(info.not_ready_reason))
    state = "[green]ready[/]" if info.ready else f"[red]not ready[/]: {reason}"
    model = escape(printable(info.model))
    console.print(f"{model} (length {info.max_model_len}), {state}, {info.num_requests} requests in progress")
    if info.routers:
        routers = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        for column in ("router", "pid", "gRPC at", "HTTP at", "requests"):
            routers.add_column(column, justify="right" if column == "requests" else "left")
        for router in info.routers:
            state = str(router.num_requests) if router.alive else "[red]does not answer[/]"
            pid = str(router.pid) if router.pid else ""
            routers.add_row(router.router_id, pid, router.grpc_address, router.http_address, state)
        console.print(routers)
    if info.sizes:
        console.print(_sizes(info.sizes))
        for size in info.sizes:
            if size.no_room:
                console.print(f"[red]no more {_noun(size)}[/]: {escape(printable(size.no_room))}")
    workers, counts = (Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim") for _ in range(2))
    for column in ("worker", "role", "host", "pid", "linked to"):
        workers.add_column(column)
    for column in ("queued", "running"):
        workers.add_column(column, justify="right")
    counts.add_column("pages")
    for column in ("free", "cached", "locked", "leased", "shipped", "prompt tok", "output tok"):
        counts.add_column(column, justify="right")
    ordered = sorted(info.workers, key=_name_and_number)
    for worker in ordered:
        stats = worker.stats
        workers.add_row(
            worker.worker_id + (f" ({ranks} ranks)" if (ranks := 1 + len(worker.follower_pids)) > 1 else ""),
            f"{worker.role}, mostly {worker.lean}" if worker.lean in ("prefill", "decode") else worker.role,
            worker.address.rpartition(":")[0],
            str(worker.pid),
            ", ".join(worker.linked_to) if worker.num_links <= MAX_NAMES else f"{worker.num_links} workers",
            str(stats.num_queued),
            str(stats.num_running),
        )
        counts.add_row(
            worker.worker_id,
            *(
                str(n)
                for n in (
                    stats.num_free_pages,
                    stats.num_cached_pages,
                    stats.num_locked_pages,
                    stats.num_leased_pages,
                    sum(shipped.num_pages for shipped in stats.shipped),
                    stats.prompt_tokens_computed,
                    stats.output_tokens_computed,
                )
            ),
        )
    console.print(workers)
    console.print(counts)
    if (hits := _hits_by_tier(ordered)).row_count:
        console.print(hits)
    if info.stores:
        console.print(_stores(info.stores))
    if info.adapters:
        _print_adapters(console, info.adapters)
    if (times := _forward_times(ordered)).row_count:
        console.print(times)
    if (drafts := _drafts(ordered)).row_count:
        console.print(drafts)
    links = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for column in ("link", "to", "over", "pages", "GB", "GB/s while copying"):
        links.add_column(column, justify="left" if column in ("link", "to", "over") else "right")
    here = {worker.worker_id for worker in ordered}
    for worker in ordered:
        # The counters keep workers that have left.
        for shipped in (s for s in worker.stats.shipped if s.receiver_id in here):
            rate = f"{shipped.num_bytes / shipped.copying_ns:.2f}" if shipped.copying_ns else ""
            gb = f"{shipped.num_bytes / 1e9:.2f}"
            links.add_row(worker.worker_id, shipped.receiver_id, shipped.transport, str(shipped.num_pages), gb, rate)
    if links.row_count:
        console.print(links)
    if info.placements:
        placed = ", ".join(f"{p.placement} ({p.reason}) {p.count}" for p in info.placements)
        console.print(f"[dim]placements by this router:[/] {placed}")


def _sizes(sizes: Iterable[pb.SizeStatus]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for column in ("elastic", "bounds", "wanted", "ready", "starting", "draining", "start", "last change"):
        table.add_column(column, justify="right" if column in ("wanted", "ready", "starting", "draining") else "left")
    for size in sizes:
        numbers = map(str, (size.target, size.ready, size.starting, size.leaving))
        table.add_row(_noun(size), f"{size.low}:{size.high}", *numbers, f"{size.start_s:.0f} s", size.reason)
    return table


def _noun(size: pb.SizeStatus) -> str:
    return "workers" if size.kind == "any" else size.kind


def print_adapters(adapters: Sequence[pb.LoadedAdapter]) -> None:
    _print_adapters(Console(highlight=False), adapters)


def _print_adapters(console: Console, adapters: Sequence[pb.LoadedAdapter]) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for column in ("adapter", "path", "rank", "MB", "on devices", "in memory", "requests"):
        table.add_column(column, justify="left" if column in ("adapter", "path") else "right", overflow="fold")
    for one in adapters:
        numbers = (one.rank, f"{one.num_bytes / 1e6:.1f}", len(one.on_device), len(one.in_host), one.num_requests)
        table.add_row(escape(printable(one.name)), escape(printable(one.path)), *map(str, numbers))
    console.print(table)
    if not all(one.on_device or one.in_host for one in adapters):
        console.print(f"[dim]{NOT_READ_YET}[/]")


def _stores(stores: Iterable[pb.StoreStatus]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for column in ("store", "pid", "at", "pages", "in memory", "on disk", "GB on disk"):
        table.add_column(column, justify="left" if column in ("store", "pid", "at") else "right")
    for store in stores:
        on_disk = "[red]off[/]" if store.is_disk_off else str(store.num_disk_pages)
        size = f"{store.num_disk_bytes / 1e9:.2f}"
        numbers = (str(store.num_slots), str(store.num_host_pages), on_disk, size)
        table.add_row(store.store_id, str(store.pid), store.address, *numbers)
    return table


def _name_and_number(worker: pb.WorkerStatus) -> tuple[str, int, str]:
    """Sort decode-2 before decode-10."""
    name, _, number = worker.worker_id.rpartition("-")
    return name, int(number) if number.isdecimal() else 0, worker.worker_id


def _hits_by_tier(workers: Iterable[pb.WorkerStatus]) -> Table:
    """Returns no row while no worker has loaded a page of the page store."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("cached tokens")
    for column in ("pool", "host", "disk", "peer"):
        table.add_column(column, justify="right")
    rows = [(worker.worker_id, worker.stats) for worker in workers]
    loaded = [(s.prefix_host_tokens, s.prefix_disk_tokens, s.prefix_peer_tokens) for _, s in rows]
    if any(map(any, loaded)):
        for (worker_id, stats), tiers in zip(rows, loaded, strict=True):
            table.add_row(worker_id, *map(str, (stats.prefix_cached_tokens - sum(tiers), *tiers)))
    return table


def _forward_times(workers: Iterable[pb.WorkerStatus]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("passes")
    for column in ("prefill ms", "µs/token", "step ms", "µs/request", "ns/KV token", "ITL beside prefill ms"):
        table.add_column(column, justify="right")
    for worker in workers:
        times = worker.stats.forward_times
        if not times.step_s:
            continue
        prefill = [f"{1e3 * times.prefill_s:.1f}", f"{1e6 * times.prompt_token_s:.1f}"]
        step = [f"{1e3 * times.step_s:.1f}", f"{1e6 * times.request_s:.1f}", f"{1e9 * times.kv_token_s:.1f}"]
        gap = f"{1e3 * times.gap_beside_prompts_s:.1f}" if times.gap_beside_prompts_s else ""
        table.add_row(
            worker.worker_id,
            *(prefill if worker.role != "decode" else ("", "")),
            *(step if worker.role != "prefill" else ("", "", "")),
            gap,
        )
    return table


def _drafts(workers: Iterable[pb.WorkerStatus]) -> Table:
    """Returns no row while no worker has drafted."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for column in ("speculation", "source", "drafts", "accepted", "share", "a proposal"):
        table.add_column(column, justify="left" if column in ("speculation", "source") else "right")
    for worker in workers:
        for drafted in worker.stats.drafted:
            if drafted.num_proposals:
                counts = str(drafted.num_tokens), str(drafted.num_accepted)
                share = f"{drafted.num_accepted / drafted.num_tokens:.0%}"
                length = f"{drafted.num_accepted / drafted.num_proposals:.1f}"
                table.add_row(worker.worker_id, escape(printable(drafted.source)), *counts, share, length)
    return table
