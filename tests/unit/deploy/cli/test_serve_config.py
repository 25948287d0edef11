"""Configuration of `tandem serve` from flags, YAML file and environment."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tandem.config import parse_api_key
from tandem.deploy.cli.main import main
from tandem.deploy.cli.serve_config import cluster_config
from tandem.deploy.cli.serve_options import API_KEY_FILE, SERVE_OPTIONS, add_serve_options
from tandem.deploy.config.bounds import Bounds
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.config.cluster_options import OPTIONS, ClusterOptions
from tandem.deploy.config.options import Option

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "examples/serve.yaml"
# Other values of fields for which neither a larger number nor another choice is valid.
OTHER_VALUES = {
    "cluster_name": "chat",
    "served_model_name": ("one", "org/two"),
    "model": "other",
    "num_prefill": 2,
    "num_decode": 2,
    "host": "0.0.0.0",
    "tls_cert": "cert.pem",
    "tls_key": "key.pem",
    "tls_client_ca": "ca.pem",
    "internal_tls": "on",
    "internal_tls_ca": "ca.pem",
    "internal_tls_cert": "cert.pem",
    "internal_tls_key": "key.pem",
    "api_keys": ("first", "second"),
    "speculation": "ngram",
    "allowed_origins": ("https://one.example", "http://localhost:3000"),
    "root_path": "/tandem",
    "ray_address": "127.0.0.1:6379",
    "interface": "10.0.0.0/16",
    "otlp_endpoint": "http://collector:4318/v1/traces",
    "chat_template": "own.jinja",
    "lora": ("sql=adapters/sql", "support=/adapters/support"),
    "lora_root": "/adapters",
    "lora_host_memory": 0.5,
    "admin_keys": ("third", "fourth"),
    "log_dir": "logs",
    "request_timeout_s": 1.5,
    "ttft_objective_ms": 250.0,
    "itl_objective_ms": 12.5,
    "worker_wait_timeout_s": 3.5,
    "drain_timeout_s": 2.5,
    "node_timeout_s": 60.5,
    "mem_fraction_static": 0.5,
    "store_memory": "1GiB",
    "store_disk": "/data/pages:1TiB",
    "store_namespace_share": 0.25,
}


def read(*flags: str, environment: dict[str, str] | None = None) -> ClusterConfig:
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    return cluster_config(parser.parse_args(flags), environment or {})


def error_of(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Returns the line with which `tandem serve` refuses these flags."""
    assert main(["serve", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tandem serve: ") and error.count("\n") == 1
    return error


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return str(path)


def other_value(name: str) -> object:
    default = {f.name: f.default for f in fields(ClusterConfig)}[name]
    option = next(o for o in OPTIONS if o.field == name)
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if option.choices:
        return option.choices[-1]
    if option.type is bool:
        return not default
    assert isinstance(default, int)
    return default + 1


def as_flags(option: Option, value: object) -> list[str]:
    if option.type is bool:
        return [f"--{option.name}"] if value else []
    values: Sequence[object] = value if isinstance(value, tuple) else (value,)
    return [text for v in values for text in (f"--{option.name}", str(v))]


@pytest.mark.parametrize("field", [f.name for f in fields(ClusterOptions)])
def test_every_field_has_a_flag_and_a_key(field: str, tmp_path: Path) -> None:
    value = other_value(field)
    # Some fields require others.
    files = ("tls_cert", "tls_key", "tls_client_ca", "internal_tls_ca", "internal_tls_cert", "internal_tls_key")
    needed: tuple[str, ...] = files if "tls" in field else ()
    if field in ("placement_strategy", "interface", "ship_code"):
        needed = ("ray_address", "placement_strategy")
    if field in ("store_disk", "store_write_after", "store_namespace_share"):
        needed = ("store_memory",)
    if field in ("lora_root", "admin_keys"):
        needed = ("lora_root", "admin_keys")
    if field == "speculation_shared":
        needed = ("api_keys", "speculation")
    if field == "workers_per_gpu":
        needed = ("device",)
    together = {f: other_value(f) for f in needed}
    wanted = {"model": "m", **together, field: value}
    options = {o.field: o for o in SERVE_OPTIONS}
    flags = [text for f, v in wanted.items() for text in as_flags(options[f], v)]
    assert getattr(read(*flags), field) == value

    content = {options[f].name: list(v) if isinstance(v, tuple) else v for f, v in wanted.items()}
    from_file = read("--config", yaml_file(tmp_path, yaml.safe_dump(content)))
    assert getattr(from_file, field) == value
    assert from_file == read(*flags)


def test_there_are_no_other_options() -> None:
    assert {o.field for o in SERVE_OPTIONS} - {API_KEY_FILE.field} == {f.name for f in fields(ClusterOptions)}
    assert len({o.name for o in SERVE_OPTIONS}) == len(SERVE_OPTIONS)


def test_defaults_are_those_of_cluster_config() -> None:
    assert read("--model", "m") == ClusterConfig("m")
    both = read("--model", "m", "--both", "2")
    assert (both.num_prefill, both.num_decode, both.num_both) == (0, 0, 2)
    mixed = read("--model", "m", "--both", "1", "--prefill", "1", "--decode", "3")
    assert (mixed.num_prefill, mixed.num_decode, mixed.num_both) == (1, 3, 1)


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    file = yaml_file(
        tmp_path, "model: from-file\npage-size: 8\nnum-pages: 64\napi-key: [of-file]\nrequest-timeout: 5\n"
    )
    config = read("--config", file, "--num-pages", "32", "--api-key", "a", "--api-key", "b")
    assert (config.model, config.page_size, config.num_pages) == ("from-file", 8, 32)
    assert (config.schedule, config.request_timeout_s) == ("fcfs", 5.0)
    assert config.api_keys == ("a", "b")
    assert read("--config", file, "--model", "flag").model == "flag"
    # An explicit flag with the default value counts too.
    assert read("--config", file, "--page-size", "16").page_size == 16


def test_workers_of_the_file_and_of_flags_make_up_one_cluster(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "model: m\nboth: 1\n")
    assert read("--config", file).num_workers == 1
    assert read("--config", file, "--both", "0").num_workers == 2


def test_a_file_with_comments_alone_says_nothing(tmp_path: Path) -> None:
    assert read("--config", yaml_file(tmp_path, "# nothing\n"), "--model", "m") == ClusterConfig("m")


@pytest.mark.parametrize("word", ["on", "off", '"on"', "auto"])
def test_on_and_off_need_no_quotes_in_a_file(word: str, tmp_path: Path) -> None:
    """YAML reads them as true and false."""
    config = read("--config", yaml_file(tmp_path, f"model: m\ninternal-tls: {word}\n"))
    assert config.internal_tls == word.strip('"')


def test_keys_come_from_all_sources(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("# who\n\nfrom-file\n  indented  \n#off\nflag\n")
    keys = ("--model", "m", "--api-key-file", str(tmp_path / "keys.txt"))
    assert read(*keys).api_keys == ("from-file", "indented", "flag")
    environment = {"TANDEM_API_KEY": "from-environment"}
    assert read(*keys, "--api-key", "flag", environment=environment).api_keys == (
        "flag",
        "from-environment",
        "from-file",
        "indented",
    )
    assert read("--model", "m", environment={"TANDEM_API_KEY": ""}).api_keys == ()


def test_a_key_s_largest_priority_stands_behind_it(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("urgent 5\nplain\n")
    config = read("--model", "m", "--api-key-file", str(tmp_path / "keys.txt"), "--max-priority", "-1")
    router = config.router("m", "m", 10)
    assert [parse_api_key(text) for text in router.api_keys] == [("urgent", 5), ("plain", None)]
    assert router.max_priority == -1
    (tmp_path / "keys.txt").write_text("urgent five\n")
    with pytest.raises(ValueError, match="the highest priority that it may ask for"):
        read("--model", "m", "--api-key-file", str(tmp_path / "keys.txt"))


def test_paths_of_the_file_are_relative_to_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "keys.txt").write_text("key\n")
    file = yaml_file(tmp_path / "elsewhere", "model: m\napi-key-file: keys.txt\n")
    monkeypatch.chdir(tmp_path)
    assert read("--config", file).api_keys == ("key",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\npage_size: 8\n", "unknown key 'page_size', did you mean 'page-size'?"),
        ("model: m\nnum-page: 8\n", "unknown key 'num-page', did you mean 'num-pages'?"),
        ("model: m\n--prefill: 8\n", "unknown key '--prefill', did you mean 'prefill'?"),
        ("model: m\nfavourite: 8\n", "unknown key 'favourite'\n"),
        ("model: m\nconfig: other.yaml\n", "unknown key 'config'"),
        ("model: m\n7: 8\n", "unknown key '7'"),
        ("model: m\nprefill: two\n", "prefill must be a whole number, or a range such as 1:8, not 'two'"),
        ("model: m\nprefill: 1.5\n", "prefill must be a whole number, not a number"),
        ("model: m\nprefill: true\n", "prefill must be a whole number, not true or false"),
        ("model: m\ndisable-overlap-schedule: 1\n", "must be true or false, not a whole number"),
        ("model: m\nprefill:\n", "prefill must be a whole number, not nothing"),
        ("model: m\nrequest-timeout: soon\n", "request-timeout must be a number, not text"),
        ("model: m\nrequest-timeout: .inf\n", "request-timeout must be a finite number"),
        ("model: 8\n", "model must be text, not a whole number"),
        ("model: [m]\n", "model must be text, not a list"),
        ("model: m\ndtype: int3\n", "dtype must be one of auto, float32, bfloat16, not 'int3'"),
        ("model: m\napi-key: secret-1\n", "api-key must be a list of quoted texts"),
        ("model: m\napi-key: [8467]\n", "api-key must be a list of quoted texts"),
        ("model: m\nprefill: 1\nprefill: 2\n", "prefill is there twice"),
        ("model: m\n  prefill: 1\n", "is not valid YAML: mapping values are not allowed here (line 2, column 10)"),
        ("model: m\nhost: 2024-13-45\n", "is not valid YAML: "),
        ("? [model]\n: m\n", "is not valid YAML: found unhashable key"),
        ("- model\n", "must be a mapping of lines such as `prefill: 2`, not a list"),
        ("model\n", "must be a mapping of lines such as `prefill: 2`, not text"),
        ("model: \x01\n", "is not valid YAML: "),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_key(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = yaml_file(tmp_path, text)
    error = error_of(capsys, "--config", file)
    assert error.startswith(f"tandem serve: {file}")
    assert message in error
    assert "secret-1" not in error and "8467" not in error


def test_an_unreadable_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = str(tmp_path / "absent.yaml")
    assert f"{absent} cannot be read: No such file or directory" in error_of(capsys, "--config", absent)
    assert "cannot be read: Is a directory" in error_of(capsys, "--config", str(tmp_path))
    (tmp_path / "binary").write_bytes(b"model: \xff\n")
    assert "is not UTF-8 text" in error_of(capsys, "--config", str(tmp_path / "binary"))


def test_the_model_may_be_missing_in_one_place_but_not_in_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "give --model" in error_of(capsys)
    assert "give --model" in error_of(capsys, "--config", yaml_file(tmp_path, "prefill: 1\n"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--page-size", "0"], "--page-size must be above 0, not 0"),
        (["--prefill", "-1"], "--prefill must not be negative, but is -1"),
        (["--num-pages", "-1"], "--num-pages must not be negative, but is -1"),
        (["--mem-fraction-static", "1"], "--mem-fraction-static must be between 0 and 1, not 1.0"),
        (["--max-batch-size", "-1"], "--max-batch-size must not be negative, but is -1"),
        (["--drain-timeout", "-1"], "--drain-timeout must not be negative"),
        (
            ["--transport", "nvlink"],
            "--transport nvlink does not work with --device cpu: use one of auto, shared_memory, tcp",
        ),
        (
            ["--device", "cuda", "--transport", "tcp"],
            "--transport tcp does not work with --device cuda: use one of auto, nvlink",
        ),
        (["--request-timeout", "0"], "--request-timeout must be above 0"),
        (["--prefill", "1", "--decode", "0"], "both kinds are needed, or neither"),
        (["--grpc-port", "70000"], "--grpc-port must be between 0 and 65535, not 70000"),
        (["--http-port", "50051"], "--grpc-port and --http-port are both 50051"),
        (["--tls-cert", "cert.pem"], "TLS needs both --tls-cert and --tls-key"),
        (["--tls-client-ca", "ca.pem"], "it needs --tls-cert and --tls-key"),
        (["--api-key", "with space"], "an API key must be printable ASCII without spaces"),
        (["--eviction", ""], "--eviction must be one of lru, lfu, fifo, mru, priority, not ''"),
        (["--speculation", ""], "--speculation must be one of off, auto, ngram, draft:MODEL, eagle:DIR, mtp"),
        (
            ["--speculation-shared"],
            "--speculation-shared drafts from the outputs of one API key only: give --api-key or --api-key-file",
        ),
        (
            ["--speculation-shared", "--speculation", "off", "--api-key", "k"],
            "--speculation-shared is for --speculation auto and ngram, not off: leave it out, or use one of these",
        ),
        (
            ["--both", "1", "--prefill-tp", "2"],
            "--prefill-tp is for prefill workers, and this cluster has none: use --",
        ),
        (["--workers-per-gpu", "2"], "--workers-per-gpu 2 is for workers on GPUs: use --device cuda"),
        (["--max-loras", "-1"], "--max-loras must be 0 to 1024, not -1"),
        (["--api-key-file", "absent.txt"], "--api-key-file absent.txt cannot be read: No such file or directory"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_flag_to_change(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, "--model", "m", *flags)
    assert message in error
    assert "with space" not in error


@pytest.mark.parametrize("flags", [["--request-timeout", "inf"], ["--drain-timeout", "nan"], ["--dtype", "int3"]])
def test_a_value_that_is_none_of_its_kind_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--model", "m", *flags])
    assert stop.value.code == 2
    assert f"argument {flags[0]}: " in capsys.readouterr().err


def test_help_names_every_flag_its_group_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for option in SERVE_OPTIONS:
        assert f"--{option.name} " in text
        assert option.group + ":" in text
    for shown in (
        "(default: 1024)",
        "(default: 1, or 0 with --both or --workers)",
        "(default: 3600)",
        "(default: 127.0.0.1)",
    ):
        assert shown in text
    assert text.count("tandem serve --") == 4


def test_the_example_loads_and_shows_every_default(tmp_path: Path) -> None:
    assert read("--config", str(EXAMPLE)) == ClusterConfig("smollm2-135m-instruct")
    names = "|".join(re.escape(o.name) for o in SERVE_OPTIONS)
    whole = re.sub(rf"^# ({names}):", r"\1:", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert read("--config", yaml_file(tmp_path, whole)) == ClusterConfig("smollm2-135m-instruct")
    assert set(yaml.safe_load(whole)) == {o.name for o in SERVE_OPTIONS}


def test_a_number_of_processes_may_be_a_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = read("--model", "m", "--workers", "0:8", "--routers", "1:3")
    assert (config.num_any, config.num_routers, config.num_prefill) == (0, 1, 0)
    assert config.bounds == {"any": Bounds(0, 8), "router": Bounds(1, 3)}
    # YAML 1.1 reads 1:8 as 68.
    from_file = read("--config", yaml_file(tmp_path, "model: m\nprefill: 1:8\ndecode: 2\nrouters: '1:2'\n"))
    assert from_file.bounds == {"prefill": Bounds(1, 8), "router": Bounds(1, 2)} and from_file.num_decode == 2
    assert read("--model", "m", "--both", "2:2").bounds == {}
    for flags, message in (
        (["--workers", "1:2", "--both", "0:1"], "goes without --prefill, --decode and --both"),
        (["--prefill", "0:2", "--decode", "0"], "2 prefill and 0 decode workers"),
        (["--routers", "0:2"], "clients need at least one router"),
    ):
        assert message in error_of(capsys, "--model", "m", *flags)
