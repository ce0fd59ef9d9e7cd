"""The committed RayService's application on a real Ray: its endpoint answers with what the model of a checkpoint says."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.contracts.config import RunConfig
from learner.checkpoint.model_folder import ModelFolder
from tests.integration.commands import ROOT
from tests.integration.kuberay.dashboard import ask
from tests.integration.ray_head import RayHead, ray_head
from tests.integration.waiting import until
from tests.models import make_tiny_model
from tests.ports import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]
SERVICE = yaml.safe_load((ROOT / "deploy/kubernetes/rayservice.yaml").read_text())["spec"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ENV = {
    # Ray's workers are as important as others here, and its nodes need no time to hand over what they have.
    "RAY_worker_niceness": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
}


def test_a_served_checkpoint_says_what_its_model_says(tmp_path: Path):
    model = _checkpoint(tmp_path / "run")
    (port,) = free_ports(1)
    # The manifest's application, with this machine's paths in the place of the pods'.
    config = yaml.safe_load(SERVICE["serveConfigV2"].replace("/treadwheel/runs/quickstart", str(tmp_path / "run")))
    (group,) = SERVICE["rayClusterConfig"]["workerGroupSpecs"]
    cpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    with ray_head(num_cpus=cpus, more_env=ENV) as head:
        config["http_options"] = {"host": "127.0.0.1", "port": port}
        ask(head, "PUT", "/api/serve/applications/", config)
        _wait_for(head, "quickstart")
        asked = {"model": "quickstart", "max_tokens": 12, "temperature": 0}
        url = f"http://127.0.0.1:{port}/v1"
        completion = _post(f"{url}/completions", {**asked, "prompt": "12+34="})
        chat = _post(f"{url}/chat/completions", {**asked, "messages": [{"role": "user", "content": "12+34="}]})
    greedy = _greedy(model, "12+34=", max_tokens=12)
    assert greedy
    assert completion["choices"][0]["text"] == greedy
    assert chat["choices"][0]["message"]["content"] == greedy


def _checkpoint(run: Path) -> Path:
    """The model's folder, as a learner writes it."""
    base = make_tiny_model(run / "base", chat_template=CHAT_TEMPLATE)
    config = RunConfig.model_validate({"model": {"path": str(base), "dtype": "float32"}, "prompts": "none"})
    folder = ModelFolder(AutoModelForCausalLM.from_pretrained(base), config)
    model = run / "checkpoints/step-000080/model"
    model.mkdir(parents=True)
    folder.write(model, folder.weights(), policy_version=80, extra={})
    return model


def _wait_for(head: RayHead, application: str) -> None:
    def known() -> dict[str, Any]:
        return ask(head, "GET", "/api/serve/applications/")["applications"].get(application, {})

    until(lambda: known().get("status") in ("RUNNING", "DEPLOY_FAILED"))
    assert known()["status"] == "RUNNING", known()


def _post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=500) as answer:
        return json.load(answer)


def _greedy(model: Path, prompt: str, *, max_tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    causal_lm = AutoModelForCausalLM.from_pretrained(model)
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        said = causal_lm.generate(tokens, do_sample=False, max_new_tokens=max_tokens)
    return tokenizer.decode(said[0, tokens.shape[1] :], skip_special_tokens=True)
