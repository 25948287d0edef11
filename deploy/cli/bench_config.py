"""Builds the configuration of `tandem bench` from its flags."""

import argparse
import secrets
from collections.abc import Mapping

from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.clients.base import EndpointConfig
from tandem.bench.clients.table import check_endpoint
from tandem.bench.config import TRACES, BenchConfig, WorkloadConfig
from tandem.bench.goodput import parse_duration
from tandem.bench.workloads.prompts import PromptAs
from tandem.config import require_api_key
from tandem.rpc.tls import check_tls_files


def bench_config(arguments: argparse.Namespace, environment: Mapping[str, str], default_address: str) -> BenchConfig:
    """Raises ValueError for arguments that contradict each other."""
    if arguments.sweep is not None and getattr(arguments, arguments.sweep.variable) is not None:
        raise ValueError(f"the sweep sets the {arguments.sweep.variable}: leave out --{arguments.sweep.variable}")
    if arguments.sweep is not None and arguments.slo is None:
        raise ValueError("a sweep needs the limits of a good request: add --slo")
    if not 0 < arguments.good_share <= 1:
        raise ValueError(f"the share of good requests is above 0 and at most 1, not {arguments.good_share}")
    prompt_as: PromptAs = arguments.prompt_as or ("text" if arguments.api == "chat" else "ids")
    warmup_requests, warmup_s = _parse_warmup(arguments.warmup)
    return BenchConfig(
        endpoint=_endpoint(arguments, environment, default_address),
        workload=WorkloadConfig(
            kind=arguments.workload,
            num_requests=arguments.requests,
            input_lengths=arguments.input_tokens,
            output_lengths=arguments.output_tokens,
            num_system_tokens=arguments.system_tokens,
            num_document_tokens=arguments.document_tokens,
            num_turns=arguments.turns,
            think_s=arguments.think_time,
            num_streams=arguments.streams,
            stream_input_tokens=arguments.stream_input_tokens,
            stream_output_tokens=arguments.stream_output_tokens,
            spread_streams=arguments.spread_streams,
            lead_s=arguments.lead,
            trace=arguments.trace,
            time_scale=arguments.time_scale,
            prompt_as=prompt_as,
            vocab_size=arguments.vocab_size,
            # A second run would otherwise find its prompts in the server's cache.
            seed=secrets.randbelow(2**32) if arguments.seed is None else arguments.seed,
        ),
        arrivals=_arrivals(arguments),
        duration_s=arguments.duration,
        warmup_requests=warmup_requests,
        warmup_s=warmup_s,
        slo=arguments.slo,
        num_processes=arguments.processes,
        label=arguments.label,
    )


def _endpoint(arguments: argparse.Namespace, environment: Mapping[str, str], default_address: str) -> EndpointConfig:
    url = arguments.endpoint or f"grpc://{environment.get('TANDEM_ADDRESS') or default_address}"
    if bool(arguments.tls_cert) != bool(arguments.tls_key):
        raise ValueError("--tls-cert and --tls-key belong together: give both, or neither")
    check_tls_files(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    if arguments.api_key:
        require_api_key(arguments.api_key)
    endpoint = EndpointConfig(
        url=url,
        api=arguments.api,
        model=arguments.model,
        api_key=arguments.api_key,
        headers=tuple(arguments.header),
        tls=arguments.tls,
        tls_ca=arguments.tls_ca,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        ignore_eos=arguments.ignore_eos,
        continuous_usage=arguments.continuous_usage,
        timeout_s=arguments.timeout,
        connect_timeout_s=arguments.connect_timeout,
    )
    check_endpoint(endpoint)
    return endpoint


def _arrivals(arguments: argparse.Namespace) -> ArrivalConfig | None:
    swept = arguments.sweep.variable if arguments.sweep else ""
    rate = arguments.sweep.low if swept == "rate" else arguments.rate
    concurrency = int(arguments.sweep.low) if swept == "concurrency" else arguments.concurrency
    kind = arguments.arrivals
    if kind is None:
        if arguments.workload in TRACES and rate is None and concurrency is None:
            return None
        kind = "closed" if rate is None else "poisson"
    if kind == "closed" and rate is not None:
        raise ValueError("a rate is not for closed arrivals, which wait for an answer (--arrivals)")
    if kind != "closed" and concurrency is not None:
        raise ValueError(f"a concurrency is for closed arrivals, not for {kind!r}")
    return ArrivalConfig(kind, rate or 0.0, arguments.burstiness, arguments.burst_size, concurrency or 1)


def _parse_warmup(text: str) -> tuple[int, float]:
    return (int(text), 0.0) if text.isdecimal() else (0, parse_duration(text))
