"""Schemas of manifests, and the configuration that `tandem serve` makes of them."""

import gzip
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tandem.deploy.cli.main import _parser
from tandem.deploy.cli.serve_config import cluster_config
from tandem.deploy.config.cluster_config import ClusterConfig

ROOT = Path(__file__).parents[1]
DEPLOYMENT = ROOT / "deploy/manifests"
SCHEMAS = ROOT / "tests/data/schemas"
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
# Schema names of custom resources.
CUSTOM = {
    "ServiceMonitor": "service-monitor",
    "RayCluster": "ray-cluster",
    "RayService": "ray-service",
    "ScaledObject": "scaled-object",
}


@cache
def schema(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((SCHEMAS / f"{name}.json.gz").read_bytes()))


def closed(node: Any) -> Any:
    """Return a custom resource's schema with unknown fields refused; Kubernetes would drop them."""
    if isinstance(node, dict):
        node = {key: closed(value) for key, value in node.items()}
        if node.get("type") == "object" and "properties" in node:
            node.setdefault("additionalProperties", False)
    return node


def check_manifest(manifest: dict[str, Any]) -> None:
    if (name := CUSTOM.get(manifest["kind"])) is not None:
        form = closed(schema(name))
        form["properties"]["metadata"] = {"type": "object"}
        jsonschema.Draft202012Validator(form).validate(manifest)
        return
    (name,) = [
        name
        for name, definition in schema("kubernetes")["$defs"].items()
        for made in definition.get("x-kubernetes-group-version-kind", ())
        if "/".join(filter(None, (made["group"], made["version"]))) == manifest["apiVersion"]
        and made["kind"] == manifest["kind"]
    ]
    check_part(name, manifest)


def check_part(name: str, part: dict[str, Any]) -> None:
    """Args: name: a Kubernetes type, for example io.k8s.api.core.v1.PodTemplateSpec."""
    jsonschema.Draft202012Validator({**schema("kubernetes"), "$ref": f"#/$defs/{name}"}).validate(part)


def rendered(overlay: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, timeout=60, check=True
    )
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def of_kind(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def served(*words: str) -> ClusterConfig:
    """Return the configuration that `tandem serve` makes of its arguments."""
    return cluster_config(_parser().parse_args(["serve", *words]), {"TANDEM_API_KEY": "key"})


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60}[unit]
