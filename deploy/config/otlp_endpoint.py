"""Where spans of requests go: what `--otlp-endpoint` says, or OpenTelemetry's own variables."""

import sys
from collections.abc import Mapping

from tandem.router.config import has_otlp, is_endpoint

TRACES_PATH = "v1/traces"
PROTOCOL = "http/protobuf"


def otlp_endpoint(configured: str, environment: Mapping[str, str]) -> str:
    """The URL that spans are posted to; "": there are none.

    The variables are often set for all programs of a host: what they ask for and is not to be had is told, and keeps
    nothing from starting.

    Args:
        configured: by the option. Without a path it says which host alone, as OTEL_EXPORTER_OTLP_ENDPOINT does.
    """
    if _said(environment, "OTEL_SDK_DISABLED") == "true":
        return ""
    if configured:
        rest = configured.partition("://")[2]
        # Without a scheme it is no URL, and is refused as it was given.
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
        # It is not shown: it may have a key in it.
        return _without("says no URL like http://localhost:4318")
    if not has_otlp():
        return _without("is set, and spans need packages that are not installed: pip install 'tandem-llm[otlp]'")
    return endpoint


def _said(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name, "").strip().lower()


def _without(why: str) -> str:
    print(f"tandem: no spans of requests are sent: OTEL_EXPORTER_OTLP_* {why}", file=sys.stderr)
    return ""
