"""RayService of a run's checkpoint."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.contracts.errors import ConfigError
from cluster.record.storage import Storage
from cluster.record.stored_models import CACHE_ENV
from deploy.manifests import ray_service
from deploy.manifests.site import Site
from tests.models import make_tiny_model
from tests.object_store import s3
from tests.unit.deploy.manifests.made import GPU, QUICKSTART, cluster_of, groups_of, run, templates_of

SHARED = Site(run_claim="treadwheel")


def made(path=GPU, *overrides, site=SHARED, step=500):
    (service,) = ray_service.service(run(path, *overrides, name="mine"), site, step=step)
    return service


def served(service):
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    (model,) = application["args"]["llm_configs"]
    return model


def test_the_model_of_the_checkpoint_is_served_from_the_volume_under_the_runs_name():
    assert served(made(step=42))["model_loading_config"] == {
        "model_id": "mine",
        "model_source": "/treadwheel/runs/gpu/checkpoints/step-000042/model",
    }
    volumes = [template["spec"]["volumes"][0] for template in templates_of(made())]
    assert volumes == [{"name": "run", "persistentVolumeClaim": {"claimName": "treadwheel"}}] * 2


def test_the_model_of_a_checkpoint_in_an_object_store_is_downloaded_where_its_replica_is():
    model = served(made(GPU, "run_dir=s3://bucket/x", site=Site(), step=7))
    assert model["model_loading_config"] == {"model_id": "mine"}
    assert model["callback_config"] == {
        "callback_class": "deploy.stored_checkpoint:StoredCheckpoint",
        "callback_kwargs": {"url": "s3://bucket/x/checkpoints/step-000007/model"},
    }


def test_a_run_directory_that_ends_with_its_pod_cannot_be_served():
    with pytest.raises(ConfigError, match=r"is on no volume that a service's pods mount; name one .*run_claim"):
        made(site=Site())


def test_a_pod_has_room_for_a_replica_with_its_gpus_alone_and_for_an_endpoint():
    service = made(GPU, "rollout.gpus_per_worker=2", "rollout.tensor_parallel_size=2", "rollout.cpus_per_worker=6")
    assert served(service)["placement_group_config"] == {
        "bundle_per_worker": {"CPU": 3, "GPU": 1},
        "strategy": "STRICT_PACK",
    }
    limits = groups_of(service)["server"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    # Two ranks of 3 CPUs, one for the replica and one for the endpoint.
    assert (limits["cpu"], limits["nvidia.com/gpu"]) == ("8", "2")
    shared = made(GPU, "rollout.gpus_per_worker=0.5")
    assert served(shared)["placement_group_config"]["bundle_per_worker"]["GPU"] == 1


def test_one_server_is_always_there_and_more_come_for_more_requests():
    service = made(GPU, "rollout.num_workers=3", "rollout.max_concurrent_sequences=64")
    group = groups_of(service)["server"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 3)
    assert served(service)["deployment_config"]["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 64,
    }


def test_no_actor_is_on_the_head_and_the_servers_are_on_demand():
    service = made(site=Site(run_claim="treadwheel", spot={}))
    assert cluster_of(service)["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert [*groups_of(service)] == ["server"]
    assert groups_of(service)["server"]["labels"] == {"ray.io/market-type": "on-demand"}


def test_the_services_that_kuberay_makes_find_their_pods():
    """Seen before: pods had a name of ours, and the head service of a RayService selected none of them."""
    selected_by = {"ray.io/cluster", "ray.io/node-type", "ray.io/identifier", "ray.io/serve"}
    selected_by |= {"app.kubernetes.io/name", "app.kubernetes.io/created-by"}
    for template in templates_of(made()):
        assert not template["metadata"]["labels"].keys() & selected_by


@pytest.mark.parametrize("env", [{}, {"VLLM_USE_FLASHINFER_SAMPLER": "1"}])
def test_engines_compile_no_sampler_for_which_the_image_has_no_compiler(env):
    """Unless the site says that its own image has one; Kubernetes refuses a name that stands there twice."""
    for template in templates_of(made(site=Site(run_claim="treadwheel", env=env))):
        found = [(each["name"], each.get("value")) for each in template["spec"]["containers"][0]["env"]]
        expected = {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | env
        assert [each for each in found if "FLASHINFER" in each[0]] == [*expected.items()]


TAKEN = {
    "quickstart": (QUICKSTART, []),
    "quickstart with vLLM's own cache": (QUICKSTART, ["rollout.kv_cache_bytes=null"]),
    "gpu": (GPU, []),
    "two ranks": (GPU, ["rollout.gpus_per_worker=2", "rollout.tensor_parallel_size=2"]),
    "object store": (GPU, ["run_dir=s3://served/run"]),
}
RAY_SERVE = """
import asyncio, json, sys
from ray.llm._internal.common.utils.import_utils import load_class
from ray.serve.llm import LLMConfig

said = {}
for name, settings in json.load(sys.stdin).items():
    config = LLMConfig.model_validate(settings)
    engine = config.get_engine_config()  # refuses what vLLM does not know
    if "callback_config" in settings:
        called = config.callback_config
        asyncio.run(load_class(called.callback_class)(config, **called.callback_kwargs).on_before_node_init())
    said[name] = [config.accelerator_config.kind, engine.placement_bundles, engine.actual_hf_model_id]
print(json.dumps(said), file=open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What Ray Serve makes of the settings, in a process of its own: it imports vLLM, and sets logging up its own way."""
    folder = tmp_path_factory.mktemp("served")
    model = make_tiny_model(folder / "model")
    asked = {name: served(made(path, *overrides, step=7)) for name, (path, overrides) in TAKEN.items()}
    with s3("served"):
        checkpoint = Storage("s3://served/run/checkpoints/step-000007")
        contents = {f"model/{file.name}": file.read_bytes() for file in model.iterdir()}
        for name, content in contents.items():
            checkpoint.write_file(name, content)
        entries = {name: {"sha256": hashlib.sha256(content).hexdigest()} for name, content in contents.items()}
        checkpoint.write_file("manifest.json", json.dumps({"files": entries}).encode())
        done = subprocess.run(
            [sys.executable, "-c", RAY_SERVE, str(folder / "said")],
            input=json.dumps(asked),
            env={**os.environ, CACHE_ENV: str(folder / "cache")},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "said").read_text())


@pytest.mark.slow
def test_ray_serve_takes_every_setting(said):
    _, found = said
    assert {name: (kind, bundles) for name, (kind, bundles, _) in found.items()} == {
        "quickstart": ("cpu", [{"CPU": 2}]),
        "quickstart with vLLM's own cache": ("cpu", [{"CPU": 2}]),
        "gpu": ("gpu", [{"CPU": 6, "GPU": 1}]),
        "two ranks": ("gpu", [{"CPU": 3, "GPU": 1}] * 2),
        "object store": ("gpu", [{"CPU": 6, "GPU": 1}]),
    }
    assert found["gpu"][2] == "/treadwheel/runs/gpu/checkpoints/step-000007/model"


@pytest.mark.slow
def test_a_replica_gets_the_folder_that_was_downloaded(said):
    folder, found = said
    downloaded = Path(found["object store"][2])
    assert downloaded.is_relative_to(folder / "cache")
    assert {file.name: file.read_bytes() for file in downloaded.iterdir()} == {
        file.name: file.read_bytes() for file in (folder / "model").iterdir()
    }
