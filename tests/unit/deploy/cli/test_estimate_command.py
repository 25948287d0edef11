"""`tandem estimate`, from the command line to its output."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.cli.main import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "vocab_size": 128_256,
}

EXPERTS = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151_936,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def estimate(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["estimate", "--workload", "4096/256", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_a_person_reads(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "h200", "--workload", "4,096/256", "--slo", "ttft=500ms,itl=25ms", "--gpus", "4"]
    assert main(["estimate", "--model", model_dir, *flags]) == 0
    told = capsys.readouterr().out
    for line in (
        "KV: 131,072 bytes a token",
        "537 MB of KV, 1.41 ms in all",
        "prefill of 4,096 tokens",
        "at most 143 at once",
    ):
        assert line in told
    # The last rows are the splits, the best first.
    assert [row.split()[0] for row in told.splitlines()[-4:]] == ["4", "3:1", "2:2", "1:3"]
    assert main(["estimate", "--model", model_dir, *flags, "--mixed-steps", "off"]) == 0
    assert capsys.readouterr().out.splitlines()[-4].startswith("3:1")


def test_what_a_program_reads(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = estimate(capsys, "--model", model_dir, "--gpu", "h200")
    assert found["kv_bytes_per_token"] == 131_072
    assert found["prefill"]["floor_s"] < found["prefill"]["estimate_s"]
    assert [step["batch_size"] for step in found["decode"]] == [1, 8, 32, 128, 199]
    assert found["splits"] is None
    quantized = estimate(capsys, "--model", model_dir, "--gpu", "h200", "--kv-cache-dtype", "fp8_e4m3")
    assert quantized["kv_bytes_per_token"] == 65_536
    assert quantized["decode"][0]["bytes"] < found["decode"][0]["bytes"]
    assert quantized["decode"][0]["floor_s"] < found["decode"][0]["floor_s"]
    assert len(estimate(capsys, "--model", model_dir, "--gpu", "h200", "--gpus", "3")["splits"]) == 3


def test_hit_rates(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", model_dir, "--gpu", "h200", "--hit-rate", "0.25", "--store-hit-rate", "0.5"]
    prefill = estimate(capsys, *given)["prefill"]
    assert (prefill["cached_tokens"], prefill["loaded_tokens"], prefill["computed_tokens"]) == (1024, 2048, 1024)
    slower = estimate(capsys, *given, "--host-link", "32")["prefill"]
    assert slower["loading_s"] == pytest.approx(2 * prefill["loading_s"])
    assert main(["estimate", *given, "--workload", "4096/256"]) == 0
    told = capsys.readouterr().out
    assert "prefill of 1,024 tokens behind 3,072" in told and "page store: 2,048 tokens in 4.93 ms at 54 GB/s" in told
    assert main(["estimate", *given, "--workload", "4096/256", "--host-link", "0.1"]) == 0
    assert "page store: no loads, because computing is faster" in capsys.readouterr().out


def test_a_model_with_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    found = estimate(capsys, "--model", str(tmp_path), "--gpu", "h200", "--gpus", "2")
    assert found["weight_bytes"] == pytest.approx(61.1e9, rel=0.001)
    # A prompt touches all experts, a step of one token 8 of 128 in each layer.
    assert found["prefill"]["weight_bytes"] == pytest.approx(60.4e9, rel=0.001)
    step = found["decode"][0]
    assert step["bytes"] - 4224 * found["kv_bytes_per_token"] == pytest.approx(6.08e9, rel=0.001)
    assert step["flops"] == pytest.approx(6.08e9, rel=0.001)
    assert all(split["rate"] > 0 for split in found["splits"])
    assert main(["estimate", "--model", str(tmp_path), "--gpu", "h200", "--workload", "4096/256"]) == 0
    assert "weights: 61.06 GB, of which a step of one token reads 6.08; KV: 98,304 bytes" in capsys.readouterr().out


def test_an_objective_above_the_limit_makes_fewer_but_longer_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    flags = ["--model", str(tmp_path), "--gpu", "h200", "--slo", "ttft=500ms,itl=15ms", "--gpus", "1"]
    (of_limit,) = estimate(capsys, *flags)["splits"]
    (above,) = estimate(capsys, *flags, "--itl-objective", "25")["splits"]
    assert above["chunk_size"] > of_limit["chunk_size"] and above["rate"] > 2 * of_limit["rate"] > 0
    assert main(["estimate", "--workload", "4096/256", *flags, "--itl-objective", "25"]) == 0
    assert f"{above['rate']:.2f}" in capsys.readouterr().out, "a low rate needs two digits"


def test_figures_of_another_gpu(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--gpu-memory", "141", "--bandwidth", "4800", "--flops", "989", "--link", "450"]
    other = estimate(capsys, "--model", model_dir, *given)
    known = estimate(capsys, "--model", model_dir, "--gpu", "h200")
    assert other["prefill"] == known["prefill"]
    assert other["gpu"]["memory"] == 141_000_000_000
    assert "as they were given" in other["gpu"]["source"]
    assert estimate(capsys, "--model", model_dir, "--gpu", "h200", "--flops", "2000")["decode"] != known["decode"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu-memory", "80"], "give --gpu, or all of --gpu-memory, --bandwidth, --flops and --link"),
        (["--gpu", "h200", "--workload", "131072/1"], "131073 tokens is longer than the model allows, 131072"),
        (["--gpu", "h200", "--gpu-memory", "17"], "a worker of role prefill has room for 0 tokens of KV"),
        (["--gpu", "h200", "--gpu-memory", "17"], "use --tp 2, or a larger GPU or a smaller model"),
        (["--gpu", "h200", "--gpu-memory", "20.3"], "use --tp 2, or a larger --mem-fraction-static"),
        (["--gpu", "h200", "--gpus", "3", "--tp", "2"], "workers of 2 GPUs leave 1 of 3 idle: ask for 2 or 4"),
        (["--gpu", "h200", "--model", "/absent"], "model '/absent' not found"),
        (["--gpu", "h200", "--model", "m" * 5000], "File name too long"),
        (["--gpu", "h200", "--gpus", "100000"], "--gpus must be at most 64"),
        (["--gpu", "h200", "--hit-rate", "0.6", "--store-hit-rate", "0.6"], "together at most 1, not 0.6 and 0.6"),
        (
            [
                *("--gpu-memory", "141", "--bandwidth", "4800", "--flops", "989", "--link", "450"),
                "--store-hit-rate",
                "1",
            ],
            "give --host-link",
        ),
    ],
)
def test_what_cannot_be_estimated_is_said_in_one_line(
    model_dir: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "--model", model_dir, "--workload", "4096/256", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tandem estimate: ") and message in error and error.count("\n") == 1


def test_a_client_s_install_is_told_what_a_hub_name_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["estimate", "--model", "org/name", "--gpu", "h200", "--workload", "4096/256"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "tandem estimate: org/name cannot be read without huggingface_hub: pip install huggingface_hub, "
    )


def test_a_rate_that_no_host_gives_is_a_failure(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    for limits, rate, message in (
        ("ttft=500ms", "1e6", "64 GPUs do not give 1e+06 requests a second"),
        ("ttft=1ms", "1", "no number of GPUs keeps to the limit on ttft: a prompt alone takes "),
        ("itl=0.1ms", "1", "no number of GPUs keeps to the limit on itl: a decode step of one request takes "),
    ):
        flags = ["--gpu", "l40s", "--workload", "4096/256", "--slo", limits, "--rate", rate]
        assert main(["estimate", "--model", model_dir, *flags]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limits", "workers", "limited_by"),
    [
        ("ttft=50ms,itl=25ms", "serves 0.0 requests a second (a prompt alone takes 99.3 ms, beyond ttft)", "ttft"),
        ("ttft=500ms,itl=3ms", "worker 0.0 (a decode step of one request takes 4.15 ms, beyond itl)\n", "itl"),
        ("ttft=50ms,itl=3ms", "beyond ttft), a decode worker 0.0 (", "ttft and itl"),
    ],
)
def test_a_rate_of_zero_has_its_reason(
    limits: str, workers: str, limited_by: str, model_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", model_dir, "--gpu", "h200", "--slo", limits, "--gpus", "2"]
    assert main(["estimate", "--workload", "4096/256", *given]) == 0
    assert workers in capsys.readouterr().out
    assert [(split["rate"], split["bottleneck"]) for split in estimate(capsys, *given)["splits"]] == [
        (0, limited_by),
        (0, limited_by),
    ]


def test_chunks_of_role_both_may_take_too_long(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", model_dir, "--gpu", "h200", "--slo", "ttft=120ms,itl=6ms", "--gpus", "2"]
    apart, both = estimate(capsys, *given)["splits"]
    assert apart["rate"] > 0 and apart["bottleneck"] == "prefill" and apart["ttft_alone_s"] < 0.12
    assert both["rate"] == 0 and both["bottleneck"] == "ttft" and both["ttft_alone_s"] > 0.12
    assert main(["estimate", "--workload", "4096/256", *given]) == 0
    reason = f"2 both: in chunks, a prompt alone takes {both['ttft_alone_s'] * 1e3:.1f} ms, beyond ttft\n"
    assert capsys.readouterr().out.endswith(reason)


def test_low_rates_are_not_rounded_to_zero(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", model_dir, "--gpu", "l40s", "--workload", "100000/20000"]
    assert main(["estimate", *given]) == 0
    rates = re.search(r"serves (\S+) requests a second, a decode worker ([\d.]+),", capsys.readouterr().out)
    assert rates is not None and all(0 < float(rate) < 0.1 for rate in rates.groups())


def test_outputs_of_one_token_need_no_steps(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", model_dir, "--gpu", "h200", "--workload", "4096/1", "--slo", "itl=1ms", "--gpus", "2"]
    assert main(["estimate", *flags]) == 0
    assert "requests a second, a decode worker any number\n" in capsys.readouterr().out


def test_workers_may_share_gpus(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["estimate", "--model", model_dir, "--gpu", "h200", "--workload", "1000/100", "--gpus", "1"]
    assert main([*flags, "--workers-per-gpu", "2"]) == 0
    told = capsys.readouterr().out
    assert "by each of 2 workers that are always busy" in told and "1 GPU, prefill:decode workers" in told
    assert [row.split()[0] for row in told.splitlines()[-2:]] in (["2", "1:1"], ["1:1", "2"])
    with pytest.raises(SystemExit):
        main([*flags, "--workers-per-gpu", "33"])
    assert "must be at most 32" in capsys.readouterr().err


def test_roles_of_unequal_degrees(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", model_dir, "--gpu", "h200"]
    same, single = (estimate(capsys, *given, *more) for more in (("--tp", "2"), ()))
    found = estimate(capsys, *given, "--prefill-tp", "2", "--gpus", "5")
    assert found["ranks"] == {"prefill": 2, "decode": 1} and set(found["pool_tokens"]) == {"prefill", "decode"}
    assert found["prefill"] == same["prefill"] and found["decode"] == single["decode"]
    assert found["pool_tokens"]["decode"] == single["pool_tokens"]["decode"]
    # The narrower side bounds the handover.
    assert found["transfer"] == single["transfer"]
    splits = {(split["num_prefill"], split["num_decode"], split["num_both"]) for split in found["splits"]}
    assert splits == {(1, 3, 0), (2, 1, 0)}
    assert estimate(capsys, *given, "--prefill-tp", "2", "--decode-tp", "2", "--gpus", "4") == estimate(
        capsys, *given, "--tp", "2", "--gpus", "4"
    )
    assert main(["estimate", *given, "--workload", "4096/256", "--prefill-tp", "2", "--gpus", "5"]) == 0
    told = capsys.readouterr().out
    assert "role both" not in told and "\n5 GPUs, prefill:decode workers" in told
    assert main(["estimate", *given, "--workload", "4096/256", "--prefill-tp", "2", "--gpus", "2"]) == 2
    assert "2 GPUs are too few for a worker of 2 and one of 1 ranks" in capsys.readouterr().err


def test_adapters_take_memory_of_the_gpu_and_of_the_host(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", model_dir, "--gpu", "h200"]
    plain, found = (estimate(capsys, *given, *more) for more in ((), ("--max-loras", "64", "--max-lora-rank", "32")))
    assert plain["slot_bytes"] == plain["host_cache_bytes"] == 0
    assert found["slot_bytes"] > 1e9 and found["host_cache_bytes"] == 4 * 2**30
    assert found["pool_tokens"]["both"] < plain["pool_tokens"]["both"]
    flags = ["estimate", *given, "--workload", "4096/256", "--max-loras", "64"]
    assert main(flags) == 0
    assert "for 64 of rank 16, and up to 4.3 GB of host memory" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*flags, "--max-lora-rank", "129"])
    assert "must be at most 128" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*flags, "--max-loras", "1025"])
    assert "--max-loras: must be 0 to 1024, not 1025" in capsys.readouterr().err
    assert main([*flags, "--max-loras", "1024", "--max-lora-rank", "128"]) == 2
    assert "a smaller --max-loras or --max-lora-rank" in capsys.readouterr().err


def test_a_model_that_drafts_is_counted(model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 4}))
    given = ["--model", model_dir, "--gpu", "h200"]
    plain = estimate(capsys, *given)
    found = estimate(capsys, *given, "--speculation", f"draft:{small}", "--drafted", "3", "--accepted", "2")
    # Layers, embedding and output matrix.
    num_weights = 4 * 218e6 + 2 * 4096 * 128_256
    assert found["weight_bytes"] - plain["weight_bytes"] == pytest.approx(2 * num_weights, rel=0.01)
    assert found["kv_bytes_per_token"] == pytest.approx((1 + 4 / 32) * plain["kv_bytes_per_token"], rel=0.01)
    assert found["transfer"]["bytes"] == pytest.approx((1 + 4 / 32) * plain["transfer"]["bytes"], rel=0.01)
    for before, after in zip(plain["decode"], found["decode"], strict=False):
        assert before["drafts"] == 0 and after["drafts"] == min(3, (256 - after["batch_size"]) / after["batch_size"])
        assert all(after[name] > before[name] for name in ("flops", "bytes", "floor_s", "estimate_s"))
        assert after["floor_s"] < after["estimate_s"]
    assert found["prefill"]["flops"] > 1.05 * plain["prefill"]["flops"]
    shown = ["estimate", *given, "--workload", "4096/256"]
    assert main([*shown, "--drafted", "3"]) == 0
    assert re.search(r"decode step of 128 with 4,224 tokens +128 ", capsys.readouterr().out)
    for flags, message in (
        (["--speculation", f"draft:{small}"], f"--speculation draft:{small} needs --drafted K and --accepted K, "),
        (["--speculation", ""], "--speculation must be one of off, auto, draft:MODEL"),
        (["--speculation", "ngram"], "--speculation ngram drafts without a model: --drafted and --accepted suffice"),
        (["--speculation", "draft:/no/such"], "--speculation draft:/no/such names no drafter: model '/no/such' not"),
        (
            ["--speculation", f"draft:{small}", "--tp", "2"],
            "a model that drafts is for workers of one rank, not 2: leave --tp out",
        ),
        (
            ["--speculation", f"draft:{small}", "--decode-tp", "2"],
            "a model that drafts is for workers of one rank, not 2",
        ),
    ):
        assert main([*shown, *flags]) == 2
        assert message in capsys.readouterr().err
