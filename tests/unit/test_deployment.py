"""deploy/manifests/: schemas, `tandem serve` arguments, and consistent timeouts."""

import configparser
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tandem.deploy.cli.main import _parser
from tandem.deploy.serve import STOP_GRACE_S
from tandem.exit_codes import USAGE
from tandem.router.frontends.openai.middleware import OPEN_PATHS
from tests.manifests import (
    DEPLOYMENT,
    ROOT,
    check_manifest,
    needs_kubectl,
    of_kind,
    rendered,
    schema,
    seconds,
    served,
)

KUBERNETES = DEPLOYMENT / "kubernetes"
MANIFESTS = sorted(
    path
    for folder in ("base", "components/monitoring", "components/keda")
    for path in (KUBERNETES / folder).glob("*.yaml")
    if path.name not in ("kustomization.yaml", "serve.yaml", "sidecar.yaml", "replicas.yaml")
)
OVERLAYS = ("cpu", "gpu")
DOCKERFILES = sorted(DEPLOYMENT.glob("Dockerfile.*"))
INSTRUCTIONS = {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "ENV", "USER", "EXPOSE", "CMD"}


# --- Kubernetes ---


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_their_schemas(path: Path) -> None:
    check_manifest(yaml.safe_load(path.read_text()))


def test_unknown_field_is_found() -> None:
    for name, section in (("base/deployment", "spec"), ("components/monitoring/service-monitor", "spec")):
        manifest = yaml.safe_load((KUBERNETES / f"{name}.yaml").read_text())
        manifest[section]["replica"] = 1
        with pytest.raises(jsonschema.ValidationError):
            check_manifest(manifest)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_make_complete_manifests(overlay: str, tmp_path: Path) -> None:
    tree = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, tree)
    with (tree / "overlays" / overlay / "kustomization.yaml").open("a") as file:
        file.write("components:\n  - ../../components/monitoring\n")
    manifests = rendered(tree / "overlays" / overlay)
    for manifest in manifests:
        check_manifest(manifest)
    pod = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]
    # Patches add containers instead of replacing them.
    assert [container["name"] for container in pod["containers"]] == ["tandem", "prometheus"]
    container, prometheus = pod["containers"]
    assert container["image"] == {"cpu": "tandem:cpu", "gpu": "tandem:cuda13"}[overlay]
    mounted = {mount["name"] for mount in (*container["volumeMounts"], *prometheus["volumeMounts"])}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/etc/tandem", "/dev/shm", "/var/log/tandem"}
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


@needs_kubectl
def test_keda_changes_the_number_of_pods(tmp_path: Path) -> None:
    tree = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, tree)
    with (tree / "overlays/cpu/kustomization.yaml").open("a") as file:
        file.write("components:\n  - ../../components/monitoring\n  - ../../components/keda\n")
    manifests = rendered(tree / "overlays/cpu")
    for manifest in manifests:
        check_manifest(manifest)
    deployment, scaled = of_kind(manifests, "Deployment"), of_kind(manifests, "ScaledObject")
    assert "replicas" not in deployment["spec"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    known = (ROOT / "docs/metrics.md").read_text()
    for trigger in scaled["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        metrics = re.findall(r"\btandem_\w+", query)
        assert metrics and all(f"`{metric.removesuffix('_bucket')}`" in known for metric in metrics)
        if shutil.which("promtool"):
            rule = {"groups": [{"name": "keda", "rules": [{"record": "keda:one", "expr": query}]}]}
            (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule))
            subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yml"], check=True, timeout=60)


@pytest.mark.parametrize("folder", ["base", "overlays/cpu", "overlays/gpu"])
def test_pod_arguments_make_a_valid_cluster(folder: str) -> None:
    config = served("--config", str(KUBERNETES / folder / "serve.yaml"))
    pod = yaml.safe_load((KUBERNETES / "base/deployment.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert config.host == "0.0.0.0"
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        "http": config.http_port,
        "grpc": config.grpc_port,
    }
    (_, waiting) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] >= int(waiting) + config.drain_timeout_s + STOP_GRACE_S
    assert config.log_dir in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_each_worker_has_a_gpu() -> None:
    config = served("--config", str(KUBERNETES / "overlays/gpu/serve.yaml"))
    patch = yaml.safe_load((KUBERNETES / "overlays/gpu/deployment.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    num_workers = config.num_prefill + config.num_decode + config.num_both
    assert config.device == "cuda"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(num_workers)
    assert config.model in {mount["mountPath"] for mount in container["volumeMounts"]}
    (device,) = compose("gpu")["services"]["tandem"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == num_workers


def test_probes_use_paths_open_without_a_key() -> None:
    pod = yaml.safe_load((KUBERNETES / "base/deployment.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert paths == {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert set(paths.values()) <= set(OPEN_PATHS)


def test_pod_and_host_prometheus_have_the_same_scrape_job() -> None:
    text = (KUBERNETES / "components/monitoring/prometheus.yml").read_text()
    (job,) = yaml.safe_load(text)["scrape_configs"]
    (known,) = yaml.safe_load((ROOT / "deploy/monitoring/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert job["relabel_configs"] == known["relabel_configs"]
    assert job["http_sd_configs"][0]["url"] == known["http_sd_configs"][0]["url"]
    # For targets discovered over HTTP, Prometheus 2.42 omits the authorization type unless it is set.
    assert job["authorization"] == job["http_sd_configs"][0]["authorization"]
    assert job["authorization"]["type"] == "Bearer"
    monitor = yaml.safe_load((KUBERNETES / "components/monitoring/service-monitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["params"]["match[]"] == [f'{{job="{job["job_name"]}"}}']


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_pod_s_configuration(tmp_path: Path) -> None:
    text = (KUBERNETES / "components/monitoring/prometheus.yml").read_text()
    (tmp_path / "api-key").write_text("key")
    file = tmp_path / "prometheus.yml"
    file.write_text(text.replace("/etc/tandem-api-key", str(tmp_path)))
    subprocess.run(["promtool", "check", "config", str(file)], check=True, capture_output=True, timeout=60)


# --- containers ---


def compose(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOYMENT / f"compose/{name}.yaml").read_text())


@pytest.mark.parametrize("name", OVERLAYS)
def test_compose_files(name: str) -> None:
    content = compose(name)
    jsonschema.validate(content, schema("compose-spec"))
    service = content["services"]["tandem"]
    folder = DEPLOYMENT / "compose"
    assert (folder / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    words = service["command"]
    assert words[:2] == ["tandem", "serve"]
    sources = dict(volume.split(":")[:2][::-1] for volume in service["volumes"] if volume.startswith("."))
    for target, source in sources.items():
        assert (folder / source).is_file()
        words = [word.replace(target, str((folder / source).resolve())) for word in words]
    config = served(*words[2:])
    assert config.host == "0.0.0.0"
    assert seconds(service["stop_grace_period"]) >= config.drain_timeout_s + STOP_GRACE_S
    assert {port.split(":")[-1] for port in service["ports"]} == {str(config.http_port), str(config.grpc_port)}
    if "TANDEM_API_KEY" not in service.get("environment", {}):
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert _parser().parse_args(service["healthcheck"]["test"][2:])


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions, with continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles(path: Path) -> None:
    steps = instructions(path)
    assert {word for word, _ in steps} <= INSTRUCTIONS
    assert steps[0][0] == "FROM"
    for word, rest in steps:
        if word == "FROM":
            # A version tag, never `latest`.
            assert re.match(r"[\w./-]+:[\w.-]*\d[\w.-]*( AS \w+)?$", rest)
        if word == "COPY":
            assert rest in (". /src", "--from=build /opt/venv /opt/venv")
        if word == "RUN":
            done = subprocess.run(["sh", "-n", "-c", rest], capture_output=True, text=True, timeout=10, check=False)
            assert done.returncode == 0, done.stderr
    last = dict(steps)
    assert last["USER"] == "10001"
    assert json.loads(last["CMD"]) == ["tandem", "--help"]
    config = served("--model", "m")
    assert last["EXPOSE"].split() == [str(config.http_port), str(config.grpc_port)]
    runs = " ".join(rest for word, rest in steps if word == "RUN")
    for name in re.findall(r"--constraint (\S+)", runs):
        assert (ROOT / name).is_file()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = re.findall(r"EXTRAS=(\S+)", path.read_text().split("FROM", 1)[1])
    assert set(asked.split(",")) <= set(extras) and '".[$EXTRAS]"' in runs
    # The image's writable directories are the mounts of the Pod and the compose files.
    assert "/var/cache/tandem" in runs and "/var/log/tandem" in runs


# --- one host ---


def test_unit_waits_for_a_drain_and_does_not_restart_on_usage_errors() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOYMENT / "systemd/tandem.service")
    service = unit["Service"]
    config = served("--model", "m")
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) >= config.drain_timeout_s + STOP_GRACE_S
    assert int(service["RestartPreventExitStatus"]) == USAGE
    command, serve, *words = service["ExecStart"].split()
    assert (command, serve) == ("/opt/tandem/bin/tandem", "serve")
    words[words.index("/etc/tandem/serve.yaml")] = str(ROOT / "examples/serve.yaml")
    assert served(*words).log_dir == f"/var/log/{service['LogsDirectory']}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "tandem.service"
    text = (DEPLOYMENT / "systemd/tandem.service").read_text()
    unit.write_text(text.replace("/opt/tandem/bin/tandem", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_wheelhouse_has_only_known_kinds(tmp_path: Path) -> None:
    script = DEPLOYMENT / "wheelhouse.sh"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    kinds = re.findall(r"^    (\w+)\) index=", script.read_text(), re.MULTILINE)
    assert kinds and set(kinds) <= set(extras)
    for name in re.findall(r"constraints/\w+\.txt", script.read_text()):
        assert (ROOT / name).is_file()
    done = subprocess.run(
        ["sh", str(script), str(tmp_path), "cuda11"], capture_output=True, text=True, timeout=10, check=False
    )
    assert (done.returncode, done.stderr) == (2, "cuda11 must be serve, cuda12 or cuda13\n")


# --- docs/deploy.md ---


def test_document_names_existing_files() -> None:
    text = (ROOT / "docs/deploy.md").read_text()
    table = text[text.index("| path in") : text.index("\n\n## What was tried")]
    named = {name for line in table.splitlines()[2:] for name in re.findall(r"`([\w./-]+)`", line.split("|")[1])}
    assert {name for name in named if not (DEPLOYMENT / name).exists()} == set()
    covered = {path for name in named for path in (DEPLOYMENT / name, *(DEPLOYMENT / name).rglob("*"))}
    assert {path for path in DEPLOYMENT.rglob("*") if path.is_file()} - covered == set()
