"""Terminal output of the client commands."""

import argparse
import re
import signal
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tandem import exit_codes
from tandem.client import ClientTls, TandemClient, TandemError
from tandem.config import require_api_key
from tandem.deploy.cli.serve_options import API_KEY_VARIABLE
from tandem.rpc.tls import check_tls_files
from tandem.v1 import inference_pb2 as pb

BAR_WIDTH = 40
_HOST_AND_PORT = re.compile(r"[^\s/]+:\d{1,5}")


class Conversation:
    def __init__(self, system: str = "") -> None:
        self.messages: list[pb.ChatMessage] = []
        if system:
            self.messages.append(pb.ChatMessage(role="system", content=system))

    def ask(self, content: str) -> "Conversation":
        self.messages.append(pb.ChatMessage(role="user", content=content))
        return self

    def answered(self, content: str) -> None:
        self.messages.append(pb.ChatMessage(role="assistant", content=content))


def open_client(arguments: argparse.Namespace) -> TandemClient:
    """Raises ValueError for invalid arguments."""
    files = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    if bool(arguments.tls_cert) != bool(arguments.tls_key):
        raise ValueError("--tls-cert and --tls-key belong together: give both, or neither")
    if not _HOST_AND_PORT.fullmatch(arguments.address):
        raise ValueError(
            f"{arguments.address_from} must be HOST:PORT, of the cluster's gRPC port, not {arguments.address!r}"
        )
    check_tls_files(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    if arguments.api_key:
        require_api_key(arguments.api_key)
    return TandemClient(
        arguments.address, arguments.api_key, ClientTls(*files) if arguments.tls or any(files) else None
    )


def print_failure(arguments: argparse.Namespace, error: TandemError) -> int:
    where = ""
    if error.code == "UNAUTHENTICATED":
        where = f" (here with --api-key KEY or ${API_KEY_VARIABLE})"
    elif arguments.address_from.startswith("$") and error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        where = f" ({arguments.address} comes from {arguments.address_from})"
    print(f"{arguments.name}: {error}{where}", file=sys.stderr)
    return exit_codes.FAILED


def sampling_params(arguments: argparse.Namespace, max_tokens: int | None) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=max_tokens, temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed
    )


def stream_answer(client: TandemClient, request: pb.GenerateRequest) -> tuple[str, pb.GenerateResponse]:
    """Returns the text and the last response."""
    text = ""
    last = pb.GenerateResponse()
    for response in client.generate(request):
        sys.stdout.write(response.text)
        sys.stdout.flush()
        text += response.text
        last = response
    print()
    if last.finish_reason == pb.FINISH_REASON_LENGTH and sys.stdout.isatty():
        # Otherwise the answer seems to break off.
        print(f"(ended by its length, {last.usage.completion_tokens} tokens: --max-tokens)", file=sys.stderr)
    return text, last


def print_answer(
    arguments: argparse.Namespace, client: TandemClient, *, text: str = "", conversation: Conversation | None = None
) -> int:
    request = pb.GenerateRequest(sampling=sampling_params(arguments, arguments.max_tokens))
    if conversation is not None:
        request.chat.messages.extend(conversation.messages)
    else:
        request.text = text
    try:
        _, last = stream_answer(client, request)
    except TandemError as error:
        return print_failure(arguments, error)
    except KeyboardInterrupt:
        print()
        return exit_codes.SIGNALLED + signal.SIGINT
    if arguments.timings:
        print_timeline(Console(), last)
    return 0


def chat(arguments: argparse.Namespace, client: TandemClient) -> int:
    """Returns the exit status of the last answer."""
    conversation = Conversation(arguments.system)
    status = 0
    print("Type a message; an empty line or Ctrl-D ends the chat, Ctrl-C an answer.")
    while True:
        try:
            content = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return status
        if not content:
            return status
        request = pb.GenerateRequest(sampling=sampling_params(arguments, arguments.max_tokens))
        request.chat.messages.extend(conversation.ask(content).messages)
        try:
            text, last = stream_answer(client, request)
        except TandemError as error:
            status = print_failure(arguments, error)
            conversation.messages.pop()
            continue
        except KeyboardInterrupt:
            conversation.messages.pop()
            print()
            continue
        conversation.answered(text)
        status = 0
        if arguments.timings:
            print_timeline(Console(), last)


def print_timeline(console: Console, last: pb.GenerateResponse) -> None:
    total_ms = max((p.start_ms + p.duration_ms for p in last.phases), default=1.0)
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("phase")
    table.add_column("start ms", justify="right")
    table.add_column("took ms", justify="right")
    table.add_column("")
    for on_critical_path, color in ((True, "cyan"), (False, "blue")):
        if not on_critical_path:
            table.add_row("[dim]beside these[/]")
        for phase in last.phases:
            if phase.on_critical_path == on_critical_path:
                start = round(phase.start_ms / total_ms * BAR_WIDTH)
                length = max(1, round(phase.duration_ms / total_ms * BAR_WIDTH))
                bar = " " * min(start, BAR_WIDTH - 1) + "█" * length
                table.add_row(phase.name, f"{phase.start_ms:.1f}", f"{phase.duration_ms:.1f}", f"[{color}]{bar}[/]")
    console.print(table)
    usage, handover = last.usage, last.handover
    size = handover.page_size or 1
    num_pages = -(-usage.prompt_tokens // size)
    why = f" ({handover.placement_reason})" if handover.placement_reason else ""
    if handover.estimated_ttft_ms:
        why += f", first token expected {handover.estimated_ttft_ms:.1f} ms after the choice"
    console.print(
        f"[dim]{usage.prompt_tokens} prompt tokens ({num_pages} pages of {size}), "
        f"{usage.completion_tokens} output tokens[/]\n"
        f"[dim]{handover.prefill_worker}:[/] {handover.prefill_cached_tokens} tokens found in its radix cache, "
        f"{handover.pages_computed} pages computed\n"
        f"[dim]{handover.decode_worker}:[/] {handover.decode_cached_tokens} tokens found in its radix cache, "
        f"{handover.pages_shipped} pages shipped to it\n"
        f"[dim]placement:[/] {handover.placement}{why}\n"
        f"[dim]clocks of both agree with the router's to {last.clock_uncertainty_ms:.1f} ms[/]",
        highlight=False,
    )


def print_status(info: pb.ServerInfo) -> None:
    console = Console(highlight=False)
    state = "[green]ready[/]" if info.ready else f"[red]not ready[/]: {info.not_ready_reason}"
    console.print(f"{info.model} (length {info.max_model_len}), {state}, {info.num_requests} requests in hand")
    if info.routers:
        routers = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        for column in ("router", "pid", "gRPC at", "HTTP at", "requests"):
            routers.add_column(column, justify="right" if column == "requests" else "left")
        for router in info.routers:
            state = str(router.num_requests) if router.alive else "[red]does not answer[/]"
            pid = str(router.pid) if router.pid else ""
            routers.add_row(router.router_id, pid, router.grpc_address, router.http_address, state)
        console.print(routers)
    workers, counts = (Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim") for _ in range(2))
    for column in ("worker", "role", "pid", "linked to"):
        workers.add_column(column)
    for column in ("queued", "running"):
        workers.add_column(column, justify="right")
    counts.add_column("pages")
    for column in ("free", "cached", "locked", "leased", "shipped", "prompt tok", "output tok"):
        counts.add_column(column, justify="right")
    for worker in info.workers:
        stats = worker.stats
        workers.add_row(
            worker.worker_id,
            f"{worker.role}, mostly {worker.lean}" if worker.lean in ("prefill", "decode") else worker.role,
            str(worker.pid),
            ", ".join(worker.linked_to),
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
    if (times := _forward_times(info.workers)).row_count:
        console.print(times)
    links = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for column in ("link", "to", "over", "pages", "GB", "GB/s while copying"):
        links.add_column(column, justify="left" if column in ("link", "to", "over") else "right")
    here = {worker.worker_id for worker in info.workers}
    for worker in info.workers:
        # The counters keep workers that have left.
        for shipped in (s for s in worker.stats.shipped if s.receiver_id in here):
            rate = f"{shipped.num_bytes / shipped.copying_ns:.2f}" if shipped.copying_ns else ""
            size = f"{shipped.num_bytes / 1e9:.2f}"
            links.add_row(worker.worker_id, shipped.receiver_id, shipped.transport, str(shipped.num_pages), size, rate)
    if links.row_count:
        console.print(links)
    if info.placements:
        placed = ", ".join(f"{p.placement} ({p.reason}) {p.count}" for p in info.placements)
        console.print(f"[dim]placements by this router:[/] {placed}")


def _forward_times(workers: Iterable[pb.WorkerStatus]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("forwards")
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
