"""Each client's script works against a server started with only its model."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.environments import INSTALL_TIMEOUT_S, command, version
from tests.clients.page import Row
from tests.clients.table import CLIENTS, SCRIPTS, Client

pytestmark = pytest.mark.clients

SCRIPT_TIMEOUT_S = 600
# The order of additions changes the last bits of float32 sums.
TOLERANCE = 1e-3


def run(client: Client, served: Served) -> str:
    given = ["--url", served.url, "--model", MODEL, "--model-dir", str(served.model_dir)]
    # Otherwise LiteLLM contacts its makers' server first.
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    # Keep this environment out of the client's.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI", "HF_"))}
    done = subprocess.run(
        [*command(client), *given],
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
        check=False,
        env={**inherited, **own},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "failed ", "scores "))]
    print("\n".join(lines))
    failed = [line for line in lines if line.startswith("failed ")]
    assert not failed and done.returncode == 0, "\n".join(failed) or done.stderr[-2000:]
    assert any(line.startswith("ok ") for line in lines)
    return done.stdout


@pytest.mark.timeout(INSTALL_TIMEOUT_S + SCRIPT_TIMEOUT_S)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client(client: Client, served: Served, passed: dict[str, Row]) -> None:
    if client.is_for_node and shutil.which("npm") is None:
        pytest.skip("NOT TESTED: Node.js is missing; apt-get install --no-install-recommends nodejs npm")
    printed = run(client, served)
    if client.name == "lm-eval":
        found = [json.loads(line.split(None, 1)[1]) for line in printed.splitlines() if line.startswith("scores ")]
        expected = log_likelihoods(served.model_dir)
        assert len(found) == 2
        for likelihoods in found:
            assert [len(choices) for choices in likelihoods] == [len(choices) for choices in expected]
            for computed, wanted in zip(likelihoods, expected, strict=True):
                assert computed == pytest.approx(wanted, abs=TOLERANCE)
    checks = [line.split(None, 1)[1] for line in printed.splitlines() if line.startswith("ok ")]
    passed[client.name] = Row(client.name, version(client), client.settings, tuple(checks))


def log_likelihoods(model_dir: Path) -> list[list[float]]:
    """Return each choice's log likelihood by question, from transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    likelihoods = []
    for line in (SCRIPTS / "lm_eval_task" / "capitals.jsonl").read_text().splitlines():
        asked = json.loads(line)
        of_choices = []
        for choice in asked["choices"]:
            context = tokenizer(asked["question"])["input_ids"]
            whole = tokenizer(f"{asked['question']} {choice}")["input_ids"]
            with torch.no_grad():
                scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            # The previous token's row holds the score.
            rows = scores[len(context) - 1 : -1]
            of_choices.append(float(rows.gather(1, torch.tensor(whole[len(context) :])[:, None]).sum()))
        likelihoods.append(of_choices)
    return likelihoods
