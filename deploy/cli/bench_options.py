"""The flags of `tandem bench`."""

import argparse
from pathlib import Path
from typing import Any

from tandem.bench.arrivals import ARRIVALS
from tandem.bench.clients.base import APIS
from tandem.bench.config import TRACES, WORKLOADS
from tandem.bench.goodput import Slo, parse_duration
from tandem.bench.sweep import SweepConfig
from tandem.bench.workloads.prompts import DEFAULT_VOCAB_SIZE, PROMPT_AS
from tandem.bench.workloads.synthetic import Lengths

EPILOG = """\
Lengths are a number, or LOW..HIGH for random ones; durations have a unit (500ms, 2s, 1m). docs/bench.md explains each
figure.

examples:
  this host's cluster, 8 requests at a time:
    tandem bench --concurrency 8 --input-tokens 512 --output-tokens 128
  any OpenAI-compatible server at 4 requests per second, and its goodput:
    tandem bench --endpoint http://localhost:8000/v1 --rate 4 --requests 200 --slo ttft=500ms,itl_p95=25ms
  the highest rate with 90 % good requests:
    tandem bench --sweep rate=1..20 --slo ttft=500ms,tpot=25ms --requests 100
  ITL of 8 streams while long prompts arrive, and a plot of two such runs:
    tandem bench --workload steady-streams --rate 0.5 --input-tokens 8000 --requests 20 --out one.json
    tandem bench plot one.json two.json --out itl.png
  a trace, replayed at twice its speed:
    tandem bench --workload mooncake --trace trace.jsonl --time-scale 0.5
"""

# Commands for earlier runs: summary, default output, placeholder.
COMPARISONS = {
    "report": ("compare runs in one HTML file", "report.html", "FILE.html"),
    "plot": ("draw the ITL of runs' steady streams over time", "itl.png", "FILE.png"),
}


def add_bench_options(parser: argparse.ArgumentParser, api_key: str) -> None:
    parser.usage = (
        f"{parser.prog} [OPTION]... (--help shows them)\n       {parser.prog} {{report,plot}} RUN.json... --out FILE"
    )
    _add_endpoint(parser.add_argument_group("endpoint"), api_key)
    _add_workload(parser.add_argument_group("workload"))
    _add_arrivals(parser.add_argument_group("arrivals"))
    add = parser.add_argument_group("results").add_argument
    add(
        "--slo",
        type=_value(Slo.parse),
        metavar="NAME=TIME,...",
        help="limits of a good request: any of ttft, tpot, itl_p95 (or another percentile), itl_mean, itl_max, e2e",
    )
    add(
        "--sweep",
        type=_value(SweepConfig.parse),
        metavar="NAME=LOW..HIGH",
        help="find the highest rate, or concurrency, at which the share of good requests is at least --good-share",
    )
    add("--good-share", type=float, default=0.9, metavar="SHARE", help="for --sweep (default: %(default)s)")
    add("--label", default="", metavar="NAME", help="name of the run in tables and plots (default: its endpoint)")
    add("--out", type=Path, metavar="FILE.json", help="write all figures, for `tandem bench report` and `plot`")
    add("--requests-out", type=Path, metavar="FILE.jsonl", help="write each request with the time of every chunk")
    add("--plots", type=Path, metavar="DIR", help="write PNG plots")
    add("--report", type=Path, metavar="FILE.html", help="write an HTML report")


def add_comparison_options(parser: argparse.ArgumentParser, default: str, metavar: str) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json", help="output of `tandem bench --out`")
    parser.add_argument("--out", type=Path, default=Path(default), metavar=metavar, help="(default: %(default)s)")


def _add_endpoint(group: argparse._ArgumentGroup, api_key: str) -> None:
    add = group.add_argument
    add(
        "--endpoint",
        metavar="URL",
        help="grpc://HOST:PORT, or http://HOST[:PORT]/v1 of any OpenAI-compatible server "
        "(default: grpc://$TANDEM_ADDRESS, else this host's cluster)",
    )
    add("--api", choices=APIS, default="completions", help="(default: %(default)s)")
    add("--model", default="", metavar="NAME", help="(default: the server's first)")
    add(
        "--api-key",
        default=api_key,
        metavar="KEY",
        help="API key, if required (default: $TANDEM_API_KEY)",
    )
    add(
        "--header",
        action="append",
        default=[],
        type=_value(_parse_header),
        metavar="NAME:VALUE",
        help="send this header, or metadata, with every call",
    )
    add("--tls", action="store_true", help="gRPC over TLS, trusting the default authorities")
    add("--tls-ca", default="", metavar="FILE", help="trust the authorities of this PEM file instead")
    add("--tls-cert", default="", metavar="FILE", help="PEM file with a client certificate")
    add("--tls-key", default="", metavar="FILE", help="PEM file with the private key of that certificate")
    add(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="do not request outputs of the exact length, for servers that refuse ignore_eos",
    )
    add(
        "--continuous-usage",
        action="store_true",
        help="request token counts with each chunk from an OpenAI-compatible server",
    )
    add("--timeout", type=_value(parse_duration), default=600.0, metavar="TIME", help="per request (default: 10m)")
    add(
        "--connect-timeout",
        type=_value(parse_duration),
        default=10.0,
        metavar="TIME",
        help="per connection (default: 10s)",
    )


def _add_workload(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--workload", choices=WORKLOADS, default="synthetic", help="(default: %(default)s)")
    add(
        "--requests",
        type=_positive,
        metavar="N",
        help="requests, or sessions (default: 100, or as many as arrive within --duration, or the whole trace)",
    )
    add(
        "--input-tokens",
        type=_value(_parse_lengths),
        default=Lengths(512, 512),
        metavar="N|LOW..HIGH",
        help="tokens per prompt, or per turn of a session (default: 512)",
    )
    add(
        "--output-tokens",
        type=_value(_parse_lengths),
        default=Lengths(128, 128),
        metavar="N|LOW..HIGH",
        help="tokens per answer (default: 128)",
    )
    add("--system-tokens", type=_positive, default=0, metavar="N", help="tokens of a common system prompt")
    add(
        "--document-tokens",
        type=_positive,
        default=0,
        metavar="N",
        help="tokens before the first question, of each session its own",
    )
    add("--turns", type=_positive, default=4, metavar="N", help="turns per multi-turn session (default: %(default)s)")
    add(
        "--think-time",
        type=_value(parse_duration),
        default=0.0,
        metavar="TIME",
        help="time between an answer and the next turn (default: 0s)",
    )
    add("--streams", type=_positive, default=8, metavar="N", help="steady streams (default: %(default)s)")
    add(
        "--stream-input-tokens",
        type=_positive,
        default=64,
        metavar="N",
        help="tokens per prompt (default: %(default)s)",
    )
    add(
        "--stream-output-tokens",
        type=_positive,
        default=4096,
        metavar="N",
        help="tokens per output, unless the run ends first (default: %(default)s)",
    )
    add(
        "--spread-streams",
        action="store_true",
        help="start the streams at different ages, as if already running",
    )
    add(
        "--lead",
        type=_value(parse_duration),
        default=3.0,
        metavar="TIME",
        help="time that the streams run before the first arrival (default: 3s)",
    )
    add("--trace", type=Path, metavar="FILE", help=f"file for the workloads {' and '.join(TRACES)}")
    add("--time-scale", type=float, default=1.0, metavar="X", help="factor on a trace's times")
    add("--prompt-as", choices=PROMPT_AS, help="token ids or text (default: ids; for chats, text)")
    add(
        "--vocab-size",
        type=_positive,
        default=DEFAULT_VOCAB_SIZE,
        metavar="N",
        help="bound of random token ids (default: %(default)s)",
    )
    add("--seed", type=int, metavar="N", help="seed of prompts, lengths and arrivals (default: a new one)")


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--arrivals",
        choices=ARRIVALS,
        help="(default: poisson with --rate, as recorded for a trace, else closed: the next one after an answer)",
    )
    add("--rate", type=float, metavar="R", help="requests, or sessions, per second")
    add("--burstiness", type=float, default=1.0, metavar="X", help="of gamma arrivals: 1 is Poisson, less is clustered")
    add("--burst-size", type=_positive, default=1, metavar="N", help="requests per burst, of burst arrivals")
    add("--concurrency", type=_positive, metavar="N", help="requests in flight, of closed arrivals (default: 1)")
    add("--duration", type=_value(parse_duration), metavar="TIME", help="start no requests after this time")
    add("--warmup", default="0", metavar="N|TIME", help="ignore the first requests, or those of the first seconds")
    add("--processes", type=_positive, default=1, metavar="N", help="client processes (default: %(default)s)")


def _value(parse: Any) -> Any:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, not {text!r}")
    return int(text)


def _parse_lengths(text: str) -> Lengths:
    low, dots, high = text.partition("..")
    if not low.isdecimal() or (dots and not high.isdecimal()):
        raise ValueError(f"a length is N or LOW..HIGH, not {text!r}")
    return Lengths(int(low), int(high or low))


def _parse_header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable():
        raise ValueError(f"a header is NAME:VALUE, not {text!r}")
    return name.strip(), value.strip()
