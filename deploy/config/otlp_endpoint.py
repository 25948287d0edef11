"""The destination of request spans: `--otlp-endpoint` or OpenTelemetry's environment variables."""

import sys
from collections.abc import Mapping

from tandem.router.config import has_otlp, is_endpoint

TRACES_PATH = "v1/traces"
PROTOCOL = "http/protobuf"


def otlp_endpoint(configured: str, environment: Mapping[str, str]) -> str:
    """Returns the URL to post spans to, or "" for no spans.

    The variables are often set for a whole host. So unusable values cause a warning, not an error.

    Args:
        configured: the option; without a path it is a base URL, like OTEL_EXPORTER_OTLP_ENDPOINT.
    """
    if _said(environment, "OTEL_SDK_DISABLED") == "true":
        return ""
    if configured:
        rest = configured.partition("://")[2]
        # A value without a scheme is no URL; RouterConfig refuses it unchanged.
        return configured if not rest or "/" in rest.rstrip("/") else f"{configured.rstrip('/')}/{TRACES_PATH}"
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    endpoint = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "") or (
        f"{base.rstrip('/')}/{TRACES_PATH}" if base else ""
    )
    if not endpoint or _said(environment, "OTEL_TRACES_EXPORTER") == "none":
        return ""
    protocol = _said(environment, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or _said(
        environment, "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if protocol not in ("", PROTOCOL):
        return _without(f"asks for {protocol}, and spans are sent by {PROTOCOL} alone")
    if not is_endpoint(endpoint):
        # The URL may contain a key: do not print it.
        return _without("says no URL like http://localhost:4318")
    if not has_otlp():
        return _without("is set, and spans need packages that are not installed: pip install 'tandem-llm[otlp]'")
    return endpoint


def _said(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name, "").strip().lower()


def _without(why: str) -> str:
    print(f"tandem: no spans of requests are sent: OTEL_EXPORTER_OTLP_* {why}", file=sys.stderr)
    return ""
