"""Prometheus and Grafana files query only exported metrics, and the documents list the same ones."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem.adapters import AdapterEntry, AdapterRef
from tandem.deploy.config.bounds import SIZED_KINDS
from tandem.engine.expert_balance import ExpertBalance
from tandem.engine.layers.experts.counts import ExpertCounts
from tandem.messages import Drafted, Heartbeat, Shipped, WorkerStats
from tandem.pagestore.server.disk.disk_stats import DiskStats
from tandem.pagestore.server.metrics import store_registry
from tandem.pagestore.server.page_store import PageStore
from tandem.router.adapters.metrics import adapter_metrics
from tandem.router.adapters.names import AdapterNames
from tandem.router.observe.size_metrics import size_metrics
from tandem.router.workers.sizes import ClusterSize, KindSize
from tandem.worker.metrics import worker_registry
from tests.fakes.http_cluster import HttpRouter
from tests.fakes.tokenizer import ByteTokenizer
from tests.monitoring_files import DASHBOARDS, MONITORING, PROMETHEUS, ROOT, Selector, panels, queries, rules, selectors
from tests.unit.router.observe.test_metrics import new_metrics

# Labels added by a scrape: the job's, those of /sd, and our relabeling.
TARGET_LABELS = {"job", "instance", "process", "model_name", "cluster"}
ALERTS = [rule for rule in rules() if "alert" in rule]
RECORDED = {rule["record"] for rule in rules() if "record" in rule}
# Labels with open values: names of workers, stores, adapters and transports, versions, layers, bucket bounds.
OPEN_LABELS = {"worker", "store", "transport", "version", "layers", "le", "adapter"}
DURATION = re.compile(r"[1-9]\d*[sm]")
LABEL_LISTS = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right) ?\(([^)]*)\)")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="not installed: promtool (Debian's package prometheus)"
)


def router_exposition() -> bytes:
    """Return the exposition of a router without workers."""
    http = HttpRouter(ByteTokenizer())
    # The frontend's metrics exist only once its application is made.
    assert http.app is not None
    return http.router.metrics.exposition()


def exported() -> dict[str, dict[str, set[str]]]:
    """Return the names of all samples, with their labels and values."""
    stats = WorkerStats(shipped=(Shipped("shared_memory", 0, 0),), drafted=(Drafted("ngram", 0, 0, 0),))
    experts = ExpertBalance(ExpertCounts(range(2), 4, 2, torch.device("cpu")))
    # Frontends add their metrics when the application is made.
    size = ClusterSize({kind: KindSize(1, 2, 2, 1, 1, 0, 9.0) for kind in SIZED_KINDS}, {("any", "up", "load"): 1})
    elastic = new_metrics()
    elastic.add_families(lambda: size_metrics(size))
    names = AdapterNames("r", [AdapterEntry("sql", 0, "", AdapterRef("h", "/a", 8, (), 1))])
    names.count_ended("sql", "finished")
    elastic.add_families(lambda: adapter_metrics(names, ()))
    texts = [exposition.decode() for exposition in (router_exposition(), elastic.exposition())]
    for role in ("prefill", "decode", "both"):
        registry = worker_registry(role, f"{role}-0", lambda: Heartbeat(1, stats), experts=experts, is_store_up=bool)
        texts.append(generate_latest(registry).decode())
    store = PageStore(1, lambda: 0.0).stats()
    disk = DiskStats(0, 0, 0, 0, 0, 0.0, 0.0, is_off=False)
    texts.append(generate_latest(store_registry("store-0", lambda: store, lambda: disk, 0)).decode())
    found: dict[str, dict[str, set[str]]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = found.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)
    return found


EXPORTED = exported()


def assert_exists(selector: Selector, where: str) -> None:
    """Fail if the selector can never match."""
    if selector.name == "up" or selector.name in RECORDED:
        return
    assert selector.name in EXPORTED, f"{where}: nobody exports {selector.name}"
    labels = EXPORTED[selector.name]
    for label, operator, pattern in selector.matchers:
        assert label in labels or label in TARGET_LABELS, f"{where}: {selector.name} has no label {label}"
        if label in labels and label not in OPEN_LABELS:
            for value in pattern.split("|") if "~" in operator else [pattern]:
                assert value in labels[label], f"{where}: {label} of {selector.name} is never {value}"


def assert_labels_exist(expression: str, where: str) -> None:
    known = TARGET_LABELS.union(*(labels for labels in EXPORTED.values()))
    for names in LABEL_LISTS.findall(expression):
        for name in names.replace(" ", "").split(","):
            assert name in known or not name, f"{where}: no series has a label {name}"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("record") or rule["alert"])
def test_rules_query_exported_metrics(rule: dict[str, Any]) -> None:
    where = rule.get("record") or rule["alert"]
    for selector in selectors(rule["expr"]):
        assert_exists(selector, where)
    assert_labels_exist(rule["expr"], where)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_query_exported_metrics(path: Path) -> None:
    for title, expression in queries(path):
        where = f"{path.stem}, {title}"
        found = selectors(expression)
        assert found or "ALERTS" in expression, where
        for selector in found:
            # A variable's placeholder is not a value.
            chosen = tuple(m for m in selector.matchers if m[0] not in TARGET_LABELS)
            assert_exists(Selector(selector.name, chosen), where)
        assert_labels_exist(expression, where)


def test_expressions_are_parsed_as_in_prometheus() -> None:
    found = selectors('sum by (le) (rate(tandem_x_bucket{a="b", c=~"tandem_y|d"}[5m])) / on () up > tandem:z')
    assert found == [
        Selector("tandem_x_bucket", (("a", "=", "b"), ("c", "=~", "tandem_y|d"))),
        Selector("up", ()),
        Selector("tandem:z", ()),
    ]
    for wrong in (Selector("tandem_x", ()), Selector("tandem_requests_total", (("outcome", "=", "gone"),))):
        with pytest.raises(AssertionError):
            assert_exists(wrong, "here")


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alerts_explain_the_remedy(alert: dict[str, Any]) -> None:
    assert DURATION.fullmatch(alert["for"])
    assert alert["labels"]["severity"] in ("warning", "critical")
    annotations = alert["annotations"]
    assert annotations["summary"] and annotations["description"]
    document = (ROOT / "docs/operations.md").read_text()
    assert annotations["runbook"].endswith(f" docs/operations.md#{alert['alert'].lower()}")
    severity, lasting = alert["labels"]["severity"], alert["for"]
    assert f"### {alert['alert']}\n\n*{severity}, after {lasting}.* " in document
    tests = yaml.safe_load((PROMETHEUS / "tests/alerts.yml").read_text())["tests"]
    assert alert["alert"] in {test["name"] for test in tests}


def test_documented_alerts_exist() -> None:
    titles = set(re.findall(r"^### (Tandem\w+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE))
    assert titles == {alert["alert"] for alert in ALERTS}


@needs_promtool
@pytest.mark.parametrize(
    ("command", "file"),
    [("check config", "prometheus.yml"), ("test rules", "tests/alerts.yml")],
    ids=["config", "rules"],
)
def test_promtool_accepts_the_files(command: str, file: str) -> None:
    done = subprocess.run(["promtool", *command.split(), PROMETHEUS / file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_commented_settings_for_keys_and_tls_are_valid(tmp_path: Path) -> None:
    text = (PROMETHEUS / "prometheus.yml").read_text()
    settings = "alerting|alertmanagers|- static_configs|- targets|authorization|tls_config|\\w+_file"
    uncommented, num_settings = re.subn(rf"^( *)# ( *(?:{settings}):.*)$", r"\1\2", text, flags=re.MULTILINE)
    assert num_settings == 4 + 2 * 6
    config = yaml.safe_load(uncommented)["scrape_configs"][0]
    for place in (config, config["http_sd_configs"][0]):
        assert set(place) > {"authorization", "tls_config"}
    copy = tmp_path / "prometheus.yml"
    copy.write_text(uncommented.replace("rules/", f"{PROMETHEUS}/rules/"))
    done = subprocess.run(["promtool", "check", "config", "--syntax-only", copy], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_exposition() -> None:
    experts = ExpertBalance(ExpertCounts(range(2), 4, 2, torch.device("cpu")))
    registry = worker_registry("prefill", "prefill-0", lambda: Heartbeat(1, WorkerStats()), experts=experts)
    for text in (router_exposition(), generate_latest(registry)):
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


# --- Grafana ---


def test_dashboard_names_are_unique() -> None:
    dashboards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert {path.stem for path in DASHBOARDS} == {"overview", "router", "prefill", "decode", "kv"}
    for name in ("uid", "title"):
        assert len({dashboard[name] for dashboard in dashboards}) == len(dashboards)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_fit_grafana(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    assert dashboard["schemaVersion"] >= 39
    # Grafana assigns the number, and would look for another dashboard with it.
    assert dashboard["id"] is None
    assert dashboard["uid"] == f"tandem-{path.stem}"
    ids = [panel["id"] for panel in panels(dashboard)]
    assert len(ids) == len(set(ids))
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert {"datasource", "cluster", "model", "process"} == set(variables)
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    for variable in variables.values():
        if variable["type"] == "query":
            assert variable["datasource"]["uid"] == "${datasource}"
            assert variable["query"]["query"].startswith("label_values(tandem_build_info")
    for panel in panels(dashboard):
        assert panel["type"] in ("row", "stat", "timeseries", "heatmap"), panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs)) > 0
        for target in (*panel["targets"], panel):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        # Legends tell the lines of a panel apart.
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert all(legends) and len(legends) == len(set(legends)), panel["title"]
        if panel["type"] != "heatmap":
            assert panel["fieldConfig"]["defaults"]["unit"] in ("none", "s", "bytes", "Bps", "reqps", "percentunit")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Path) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels(json.loads(path.read_text())):
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["w"] > 0 and place["h"] > 0
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} covers {taken[x, y]}"
                taken[x, y] = panel["title"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_durations_have_the_unit_seconds(path: Path) -> None:
    for panel in panels(json.loads(path.read_text())):
        if panel["type"] not in ("timeseries", "stat"):
            continue
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            names = [selector.name for selector in selectors(target["expr"])]
            is_quantile = "histogram_quantile" in target["expr"]
            in_seconds = any(name.endswith("_seconds_bucket" if is_quantile else "_seconds") for name in names)
            # The rate of a seconds counter is a share of time.
            assert (unit == "s") == in_seconds, panel["title"]


def test_provisioned_files_exist() -> None:
    (source,) = yaml.safe_load((MONITORING / "grafana/provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    (provider,) = yaml.safe_load((MONITORING / "grafana/provisioning/dashboards/tandem.yml").read_text())["providers"]
    services = yaml.safe_load((MONITORING / "docker-compose.yml").read_text())["services"]
    for service in services.values():
        # Images are pinned, and nothing listens beyond the host.
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert service["network_mode"] == "host"
        for volume in service["volumes"]:
            where = volume.partition(":")[0]
            assert (MONITORING / where).is_dir() if where.startswith(".") else where.endswith("-data")
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert source["url"] == "http://127.0.0.1:9090"
    environment = services["grafana"]["environment"]
    assert environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in services["grafana"]["volumes"]}
    assert mounted[provider["options"]["path"]] == "./grafana/dashboards"
    home = environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].removeprefix(provider["options"]["path"])
    assert (MONITORING / "grafana/dashboards" / home.lstrip("/")).is_file()


# --- docs/metrics.md ---


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return the type and labels of every metric in the document's tables of exported metrics."""
    text = (ROOT / "docs/metrics.md").read_text()
    found = {}
    for line in text[: text.index("## From vLLM")].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            names, kind, labels, _ = cells
            for name in re.findall(r"`(\w+)`", names):
                assert name not in found, f"{name} is there twice"
                found[name] = (kind, set(labels.replace(" ", "").split(",")) - {""})
    return found


def test_document_lists_exactly_the_exported_metrics() -> None:
    series = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in EXPORTED}
    assert set(documented()) == series
    for name, (kind, labels) in documented().items():
        if name.startswith("process_"):
            continue
        has_buckets = f"{name}_bucket" in EXPORTED
        assert kind == ("histogram" if has_buckets else "counter" if name.endswith("_total") else "gauge"), name
        assert labels == set(EXPORTED[f"{name}_bucket" if has_buckets else name]) - {"le"}, name


def test_metrics_compared_with_other_servers_exist() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    table = text[text.index("## From vLLM") : text.index("## Logs")]
    ours = [cell for line in table.splitlines() if line.startswith("| `") for cell in line.split("|")[1:2]]
    assert len(ours) > 15
    for cell in ours:
        for expression in re.findall(r"`([^`]+)`", cell):
            for name, matchers in selectors(expression):
                histogram = f"{name}_bucket" in EXPORTED
                assert_exists(Selector(f"{name}_bucket" if histogram else name, matchers), cell)
