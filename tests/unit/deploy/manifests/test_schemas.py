"""What is made is what the API server and Ray's autoscaler take: KubeRay's definitions, strictly; Kubernetes' own; Ray's parser."""

import copy
import functools
import logging
import shlex

import kubernetes_validate
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest
from ray.core.generated.common_pb2 import LabelSelectorOperator

from cluster.supervision.asked_nodes import plan_asked
from deploy.config.loading import load
from deploy.manifests import checks, ray_job, ray_service
from deploy.manifests.site import Site
from tests.unit.deploy.manifests import api_server
from tests.unit.deploy.manifests.made import (
    GPU,
    KUBERAY,
    QUICKSTART,
    cluster_of,
    committed,
    resource,
    run,
    templates_of,
)

CORE = ("quickstart.yaml", "gpu.yaml", "storage.yaml", "network.yaml", "viewer.yaml")
VERSIONS = ("1.29", "1.37")


def autoscalers_view(made):
    """Node types as Ray's autoscaler reads them from the cluster that KubeRay makes of the resource."""
    cluster = {"metadata": {"name": "c", "namespace": "n"}, "spec": cluster_of(made)}
    return _derive_autoscaling_config_from_ray_cr(cluster)


@pytest.mark.parametrize("name", KUBERAY)
def test_the_api_server_takes_what_is_committed(name):
    assert api_server.problems(resource(name)) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda job: job["spec"].update(entryPoint="x"), "'entryPoint' was unexpected"),
        (lambda job: job["spec"].update(backoffLimit="3"), "'3' is not of type 'integer'"),
        (lambda job: cluster_of(job)["workerGroupSpecs"][0].pop("groupName"), "'groupName' is a required property"),
        (
            lambda job: templates_of(job)[0]["spec"]["containers"][0]["ports"][0].update(containerport=1),
            "'containerport' was unexpected",
        ),
        (lambda job: cluster_of(job)["authOptions"].update(mode="tokens"), "'tokens' is not one of"),
    ],
)
def test_an_unknown_field_a_wrong_type_and_a_missing_one_are_refused(change, told):
    made = resource("quickstart.yaml")
    change(made)
    assert any(told in problem for problem in api_server.problems(made))


def test_nulls_are_dropped_and_defaults_are_applied():
    made = resource("quickstart.yaml")
    made["spec"]["suspend"] = None
    assert api_server.problems(made) == []
    # KubeRay's samples leave the protocol of ports out, which its own definition asks for and gives.
    assert "protocol" not in templates_of(made)[0]["spec"]["containers"][0]["ports"][0]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CORE)
def test_kubernetes_takes_its_own_kinds(name, version):
    core = [each for each in committed(name) if not each["kind"].startswith("Ray")]
    assert core
    for document in core:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", KUBERAY)
def test_every_pod_is_one_for_kubernetes(name, version):
    for template in templates_of(resource(name)):
        pod = {"apiVersion": "v1", "kind": "Pod"} | copy.deepcopy(template)
        pod["metadata"]["name"] = "p"
        kubernetes_validate.validate(pod, version, strict=True)
        pod["spec"]["restartPolicies"] = "Never"
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(pod, version, strict=True)


def test_the_autoscaler_sees_the_quickstart_as_two_pods_of_two_cpus_that_come_and_go():
    view = autoscalers_view(resource("quickstart.yaml"))
    head, rollout = view["available_node_types"].values()
    assert head["resources"] == {"CPU": 3, "memory": 14 * 2**30} and head["max_workers"] == 0
    assert rollout["resources"] == {"CPU": 2, "memory": 4 * 2**30}
    assert (rollout["min_workers"], rollout["max_workers"], rollout["priority"]) == (0, 2, 10)
    assert view["idle_timeout_minutes"] == 5


def test_the_autoscaler_sees_gpus_labels_and_priorities():
    types = autoscalers_view(resource("gpu.yaml"))["available_node_types"]
    assert {name: each["resources"].get("GPU", 0) for name, each in types.items()} == {
        "headgroup": 0,
        "learner": 2,
        "rollout-spot": 1,
        "rollout-on-demand": 1,
    }
    assert {name: each.get("priority") for name, each in types.items()} == {
        "headgroup": None,
        "learner": 20,
        "rollout-spot": 10,
        "rollout-on-demand": 0,
    }
    assert types["rollout-spot"]["labels"] == {"ray.io/market-type": "spot", "treadwheel/pods": "rollout"}
    assert types["learner"]["labels"] == {"ray.io/market-type": "on-demand"}
    assert types["headgroup"]["resources"]["CPU"] == 0


@pytest.mark.parametrize("resource_name", ["nvidia.com/mig-3g.40gb", "nvidia.com/gpu.shared", "amd.com/gpu"])
def test_the_autoscaler_sees_gpus_by_whatever_name_they_have(resource_name):
    """It takes a name that ends with "gpu" for one, and is told of others; else no pod would come for what the run asks."""
    for site in (Site(run_claim="treadwheel", gpu_resource=resource_name), Site(gpu_resource=resource_name)):
        types = autoscalers_view(ray_job.job(run(GPU), site)[1])["available_node_types"]
        found = {name: each["resources"].get("GPU", 0) for name, each in types.items()}
        assert found == (
            {"headgroup": 0, "learner": 2, "rollout": 1} if site.run_claim else {"headgroup": 2, "rollout": 1}
        )


def test_the_autoscaler_brings_the_learners_pod_though_a_rollout_workers_would_be_filled_better():
    """Seen before: the learner was kept off spot nodes alone, and two on-demand pods of rollout workers came, filled to the last CPU."""
    asked = ("algorithm.preset=dapo", "learner.num_ranks=1", "reward.num_services=1")
    made = ray_job.job(run(GPU, *asked, needs=()), Site(run_claim="treadwheel", spot={}))[1]
    entrypoint = shlex.split(made["spec"]["entrypoint"])
    config = load(GPU, [*asked, *(word for word in entrypoint if word.startswith("elastic.spot="))])
    staying = plan_asked(config, needs=()).groups()[0]
    kept_off = [
        (key, LabelSelectorOperator.LABEL_OPERATOR_NOT_IN, [value.removeprefix("!")])
        for key, value in staying.node_labels.items()
    ]
    requests = [ResourceRequestUtil.make(each, label_selectors=[kept_off]) for each in staying.resources]
    reply = ResourceDemandScheduler(AutoscalerEventLogger(logging.getLogger())).schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=AutoscalingConfig(autoscalers_view(made)).get_node_type_configs(),
            max_num_nodes=99,
            gang_resource_requests=[GangResourceRequest(requests=requests)],
        )
    )
    assert [(each.instance_type, each.count) for each in reply.to_launch] == [("learner", 1)]


def test_the_autoscaler_sees_a_server_that_is_always_there():
    head, server = autoscalers_view(resource("rayservice.yaml"))["available_node_types"].values()
    assert head["resources"]["CPU"] == 0
    assert server["resources"] == {"CPU": 4, "memory": 8 * 2**30}
    assert (server["min_workers"], server["max_workers"]) == (1, 1)


SITES = st.builds(
    Site,
    run_claim=st.sampled_from(["volume", "a-b-1"]),
    token_secret=st.sampled_from([None, "mine"]),
    image=st.sampled_from([None, "host:5000/me/ray:1", "ray@sha256:01"]),
    spot=st.sampled_from([None, {}, {"node_selector": {"pool": "s"}, "tolerations": [{"key": "spot"}]}]),
    overflow=st.booleans(),
    env=st.sampled_from([{}, {"HF_ENDPOINT": "https://hub"}]),
    secrets=st.sampled_from([{}, {"HF_TOKEN": {"secret": "hub", "key": "token"}}]),
    namespace=st.sampled_from([None, "rl"]),
    queue=st.sampled_from([None, "queue"]),
    grace_s=st.integers(25, 600),
    idle_timeout_s=st.integers(1, 3600),
    retries=st.integers(0, 9),
    gib_per_cpu=st.sampled_from([1.0, 2.5, 8.0]),
)
OVERRIDES = st.fixed_dictionaries(
    {
        "rollout.num_workers": st.integers(1, 40),
        "elastic.max_workers": st.sampled_from(["null", 1, 64]),
        "learner.num_ranks": st.integers(1, 12),
        "rollout.gpus_per_worker": st.sampled_from([0, 0.5, 1, 4]),
        "learner.gpus_per_rank": st.sampled_from([0, 1]),
        "run_dir": st.sampled_from(["runs/x", "s3://bucket/x"]),
        "reward.num_services": st.integers(1, 9),
    }
)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    path=st.sampled_from([QUICKSTART, GPU]),
    site=SITES,
    overrides=OVERRIDES,
    made=st.sampled_from([ray_job.job, ray_job.cluster, functools.partial(ray_service.service, step=12)]),
)
def test_whatever_is_made_passes_every_check(path, site, overrides, made):
    logging.getLogger("ray").setLevel(logging.ERROR)
    documents = made(run(path, *(f"{name}={value}" for name, value in overrides.items())), site)
    assert api_server.problems(documents[-1]) == []
    checks.check(documents, source="made", installed_ray=site.ray_version)
    types = autoscalers_view(documents[-1])["available_node_types"]
    assert {*types} == {"headgroup", *(group["groupName"] for group in cluster_of(documents[-1])["workerGroupSpecs"])}
