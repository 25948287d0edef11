"""Terminal output of the client commands."""

import argparse
import re
import signal
import sys

from rich.console import Console
from rich.table import Table

from tandem import exit_codes
from tandem.client import ClientTls, TandemClient, TandemError
from tandem.config import require_api_key
from tandem.deploy.cli.serve_options import API_KEY_VARIABLE
from tandem.deploy.cli.starting import name_starting
from tandem.printable import printable
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


def print_failure(
    arguments: argparse.Namespace, error: TandemError, key: str = f"--api-key KEY or ${API_KEY_VARIABLE}"
) -> int:
    """Args: key: how this command takes a key."""
    where = ""
    if error.code == "UNAUTHENTICATED":
        where = f" (here with {key})"
    elif arguments.address_from.startswith("$") and error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        where = f" ({arguments.address} comes from {arguments.address_from})"
    print(printable(f"{arguments.name}: {name_starting(str(error))}{where}"), file=sys.stderr)
    return exit_codes.FAILED


def sampling_params(arguments: argparse.Namespace, max_tokens: int | None) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=max_tokens, temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed
    )


def stream_answer(client: TandemClient, request: pb.GenerateRequest) -> tuple[str, pb.GenerateResponse]:
    """Returns the text and the last response. A pipe or a file gets the text unchanged."""
    text = ""
    last = pb.GenerateResponse()
    shown = printable if sys.stdout.isatty() else str
    for response in client.generate(request):
        sys.stdout.write(shown(response.text))
        sys.stdout.flush()
        text += response.text
        last = response
    print()
    if last.finish_reason == pb.FINISH_REASON_LENGTH and (sys.stdout.isatty() or sys.stderr.isatty()):
        num_tokens = last.usage.completion_tokens
        limit = "max_tokens" if num_tokens == request.sampling.max_tokens else "the server's limit"
        print(f"(answer cut by {limit}, at {num_tokens} tokens)", file=sys.stderr)
    return text, last


def print_answer(
    arguments: argparse.Namespace, client: TandemClient, *, text: str = "", conversation: Conversation | None = None
) -> int:
    request = pb.GenerateRequest(
        model=arguments.model,
        sampling=sampling_params(arguments, arguments.max_tokens),
        priority=arguments.priority,
    )
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
    try:
        client.server_info()
    except TandemError as error:
        return print_failure(arguments, error)
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
        request = pb.GenerateRequest(
            model=arguments.model,
            sampling=sampling_params(arguments, arguments.max_tokens),
            priority=arguments.priority,
        )
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
            table.add_row("[dim]overlapped[/]")
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
    tiers = {"memory": usage.host_tokens, "disk": usage.disk_tokens, "other nodes": usage.peer_tokens}
    from_tiers = ", ".join(f"{count} from {tier}" for tier, count in tiers.items() if count)
    stored = f"; loaded from the page store: {from_tiers}" if from_tiers else ""
    why = f" ({handover.placement_reason})" if handover.placement_reason else ""
    if handover.estimated_ttft_ms:
        why += f", first token expected {handover.estimated_ttft_ms:.1f} ms after the choice"
    accepted = f", {handover.accepted_tokens} of {handover.drafted_tokens} drafts accepted"
    speculated = accepted if handover.drafted_tokens else ""
    attempts = f"[dim]{handover.attempts} attempts: the drafts above and the figures below are the last one's[/]\n"
    console.print(
        f"[dim]{usage.prompt_tokens} prompt tokens ({_pages(num_pages)} of {size}), "
        f"{usage.completion_tokens} output tokens{speculated}{stored}[/]\n"
        f"{attempts if handover.attempts > 1 else ''}"
        f"[dim]{handover.prefill_worker}:[/] {handover.prefill_cached_tokens} tokens found in its radix cache, "
        f"{_pages(handover.pages_computed)} computed\n"
        f"[dim]{handover.decode_worker}:[/] {handover.decode_cached_tokens} tokens found in its radix cache, "
        f"{_pages(handover.pages_shipped)} shipped to it\n"
        f"[dim]placement:[/] {handover.placement}{why}\n"
        f"[dim]clocks of both agree with the router's to {last.clock_uncertainty_ms:.1f} ms[/]",
        highlight=False,
    )


def _pages(number: int) -> str:
    return f"{number} page{'' if number == 1 else 's'}"
