"""deploy/manifests/kuberay: resources fit their schemas, and both overlays start the same cluster."""

import copy
import inspect
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tandem.deploy.joined.ray_service import ServedCluster, application
from tandem.deploy.serve import STOP_GRACE_S
from tandem.router.frontends.openai.middleware import OPEN_PATHS
from tests.manifests import DEPLOYMENT, ROOT, check_manifest, check_part, needs_kubectl, of_kind, rendered, served

KUBERAY = DEPLOYMENT / "kuberay"
OVERLAYS = ("ray-cluster", "ray-service")
TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
HEAD_ADDRESS = ("--ray-address", "10.0.0.1:6379", "--host", "10.0.0.1")


def ray_resource(overlay: str) -> dict[str, Any]:
    return yaml.safe_load((KUBERAY / f"overlays/{overlay}/{overlay}.yaml").read_text())


def cluster_spec(resource: dict[str, Any]) -> dict[str, Any]:
    spec = resource["spec"]
    return spec if resource["kind"] == "RayCluster" else spec["rayClusterConfig"]


def templates(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def container(template: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in template["spec"]["containers"] if each["name"] == name]
    return found


def check(resource: dict[str, Any]) -> None:
    check_manifest(resource)
    for template in templates(cluster_spec(resource)):
        check_part(TEMPLATE, template)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_resources_fit_their_schemas(overlay: str) -> None:
    resource = ray_resource(overlay)
    check(resource)
    for path in (("rayVersions",), ("headGroupSpec", "replicas"), ("workerGroupSpecs", 0, "template", "spec", "image")):
        wrong = copy.deepcopy(resource)
        node: Any = cluster_spec(wrong)
        for name in path[:-1]:
            node = node[name]
        node[path[-1]] = "unknown"
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


@pytest.mark.parametrize("path", sorted(KUBERAY.rglob("*service*.yaml")), ids=lambda path: path.name)
def test_other_manifests_fit_theirs(path: Path) -> None:
    check_manifest(yaml.safe_load(path.read_text()))


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_make_complete_manifests(overlay: str) -> None:
    manifests = rendered(KUBERAY / "overlays" / overlay)
    named = {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "ConfigMap"}
    spec = cluster_spec(of_kind(manifests, "RayCluster" if overlay == "ray-cluster" else "RayService"))
    head, workers = templates(spec)
    mounted = {volume["configMap"]["name"] for volume in head["spec"]["volumes"] if "configMap" in volume}
    assert mounted == named
    for template in (head, workers):
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        containers = template["spec"]["containers"]
        assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == volumes
        assert {each["image"] for each in containers} <= {"tandem:cuda13-kuberay", "prom/prometheus:v3.5.0"}
        # KubeRay starts Ray in the Pod's first container.
        assert containers[0]["name"] in ("ray-head", "ray-worker")


@needs_kubectl
def test_autoscaling_adds_pods_and_starts_with_room() -> None:
    manifests = rendered(KUBERAY / "overlays/ray-cluster-autoscaling")
    resource = of_kind(manifests, "RayCluster")
    check(resource)
    spec, fixed = resource["spec"], cluster_spec(ray_resource("ray-cluster"))
    assert spec["enableInTreeAutoscaling"]
    # Its container needs Kubernetes' API.
    assert spec["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"]
    (group,), (fixed_group,) = spec["workerGroupSpecs"], fixed["workerGroupSpecs"]
    assert fixed_group["replicas"] == group["replicas"] == group["minReplicas"] < group["maxReplicas"]
    config = served("--config", str(KUBERAY / "base/serve.yaml"), *HEAD_ADDRESS)
    assert config.spans_nodes and config.ray_autoscaler == "auto"


def test_both_overlays_have_the_same_pods() -> None:
    one, other = (cluster_spec(ray_resource(overlay)) for overlay in OVERLAYS)
    (workers,), (other_workers,) = one["workerGroupSpecs"], other["workerGroupSpecs"]
    # Only Ray Serve's part has a probe of its own.
    container(other_workers["template"], "ray-worker").pop("readinessProbe")
    assert workers == other_workers
    heads = [templates(spec)[0]["spec"] for spec in (one, other)]
    assert heads[0]["volumes"] == heads[1]["volumes"] and heads[0]["securityContext"] == heads[1]["securityContext"]
    first, second = (container({"spec": head}, "prometheus") for head in heads)
    assert first == second


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_provide_the_cluster_s_resources(overlay: str) -> None:
    config = served("--config", str(KUBERAY / "base/serve.yaml"), *HEAD_ADDRESS)
    resource = ray_resource(overlay)
    spec = cluster_spec(resource)
    head, worker = templates(spec)
    (group,) = spec["workerGroupSpecs"]
    limits = container(worker, "ray-worker")["resources"]["limits"]
    num_workers = config.num_prefill + config.num_decode + config.num_both
    assert config.device == "cuda" and config.placement_strategy == "spread"
    assert group["replicas"] * int(limits["nvidia.com/gpu"]) == num_workers
    assert int(limits["cpu"]) >= int(limits["nvidia.com/gpu"])
    for template in (head, worker):
        for each in template["spec"]["containers"]:
            if each["name"] != "prometheus":
                assert {config.model, config.log_dir} <= {mount["mountPath"] for mount in each["volumeMounts"]}
    # All processes use one Ray version.
    assert f"ray=={spec['rayVersion']}" in (ROOT / "constraints/base.txt").read_text().split()
    listening = container(head, "tandem" if overlay == "ray-cluster" else "ray-head")
    ports = {port["name"]: port["containerPort"] for port in listening["ports"]}
    assert (ports["http"], ports["grpc"]) == (config.http_port, config.grpc_port)
    for template in (head, worker):
        assert template["spec"]["terminationGracePeriodSeconds"] >= 5 + config.drain_timeout_s + STOP_GRACE_S
    ending = container(worker, "ray-worker")["lifecycle"]["preStop"]["exec"]["command"][2]
    announced, waiting = (int(re.findall(rf"{word}(\d+)", ending)[0]) for word in ("remaining-seconds=", "sleep "))
    assert 5 + config.drain_timeout_s < announced <= waiting < worker["spec"]["terminationGracePeriodSeconds"]


def test_head_commands_exist() -> None:
    head, worker = templates(cluster_spec(ray_resource("ray-cluster")))
    beside = container(head, "tandem")
    scripts = [beside["command"][2], container(head, "ray-head")["lifecycle"]["preStop"]["exec"]["command"][2]]
    ending = container(worker, "ray-worker")["lifecycle"]["preStop"]["exec"]["command"][2]
    assert subprocess.run(["sh", "-n", "-c", ending], timeout=10, check=False).returncode == 0
    head, _ = templates(cluster_spec(ray_resource("ray-service")))
    scripts.append(container(head, "ray-head")["lifecycle"]["preStop"]["exec"]["command"][2])
    for script in scripts:
        assert subprocess.run(["sh", "-n", "-c", script], timeout=10, check=False).returncode == 0
        assert {env["name"] for env in beside["env"]} >= {"POD_IP"} and "$POD_IP" in script
    paths = {name: beside[name]["httpGet"]["path"] for name in beside if name.endswith("Probe")}
    assert set(paths.values()) <= set(OPEN_PATHS) and len(paths) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ray_serve_application_exists() -> None:
    resource = ray_resource("ray-service")
    config = served("--config", str(KUBERAY / "base/serve.yaml"), *HEAD_ADDRESS)
    serve = yaml.safe_load(resource["spec"]["serveConfigV2"])
    (app,) = serve["applications"]
    assert app["import_path"] == f"{application.__module__}:{application.__name__}"
    application(app["args"])
    # KubeRay probes Serve's proxy, which is unhealthy without any route.
    assert app["route_prefix"].startswith("/")
    assert set(app["args"]) == set(inspect.signature(ServedCluster).parameters)
    (deployment,) = app["deployments"]
    assert deployment["name"] == ServedCluster.__name__
    assert deployment["graceful_shutdown_timeout_s"] >= config.drain_timeout_s + STOP_GRACE_S
    head = resource["spec"]["rayClusterConfig"]["headGroupSpec"]
    (resource_name,) = deployment["ray_actor_options"]["resources"]
    assert resource_name in json.loads(json.loads(head["rayStartParams"]["resources"]))
    ports = {port["name"]: port["containerPort"] for port in container(head["template"], "ray-head")["ports"]}
    assert serve["http_options"]["port"] == ports["serve"] not in (config.http_port, config.grpc_port)
    # Old streams get at least the drain timeout.
    assert resource["spec"]["rayClusterDeletionDelaySeconds"] >= config.drain_timeout_s


@pytest.mark.parametrize("arguments", [{}, {"config": ""}, {"config": "a.yaml", "model": "b"}])
def test_application_needs_a_file_and_a_name(arguments: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="config"):
        application(arguments)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pod_prometheus_scrapes_the_client_port(overlay: str, tmp_path: Path) -> None:
    (job,) = yaml.safe_load((KUBERAY / "base/prometheus.yml").read_text())["scrape_configs"]
    (known,) = yaml.safe_load((ROOT / "deploy/monitoring/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert job["relabel_configs"] == known["relabel_configs"]
    head, _ = templates(cluster_spec(ray_resource(overlay)))
    beside = container(head, "prometheus")
    script = beside["command"][2].replace("/etc/prometheus/", f"{KUBERAY}/base/")
    script = script.replace(" /prometheus/", f" {tmp_path}/").replace("=/prometheus/", f"={tmp_path}/")
    program = tmp_path / "prometheus"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    assert [env["name"] for env in beside["env"]] == ["POD_IP"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "POD_IP": "10.0.0.7"}
    said = subprocess.run(
        [*beside["command"][:2], script], env=environment, capture_output=True, text=True, timeout=10, check=True
    ).stdout
    assert f"--config.file={tmp_path}/prometheus.yml --storage.tsdb.path={tmp_path}/data" in said
    config = served("--config", str(KUBERAY / "base/serve.yaml"), *HEAD_ADDRESS)
    (started,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    assert started["http_sd_configs"][0]["url"] == f"http://10.0.0.7:{config.http_port}/sd"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_object_store_fits_shared_memory(overlay: str) -> None:
    """Without room there, Ray uses a file in the container, and more than 10 GB are an error."""
    spec = cluster_spec(ray_resource(overlay))
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (shared,) = [v["emptyDir"] for v in group["template"]["spec"]["volumes"] if v["name"] == "shared-memory"]
        shared_gib = int(shared["sizeLimit"].removesuffix("Gi"))
        # Ray's default is a third of the memory.
        assert int(group["rayStartParams"]["object-store-memory"]) <= shared_gib << 29
