"""RayJob and RayCluster of a run."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.kuberay import node_provider

from cluster.contracts.errors import ConfigError
from deploy.config.loading import load
from deploy.manifests import ray_cluster, ray_job
from deploy.manifests.site import Site
from tests.unit.deploy.manifests.made import (
    GPU,
    KUBERAY,
    QUICKSTART,
    cluster_of,
    groups_of,
    job,
    resource,
    run,
    templates_of,
)

SHARED = Site(run_claim="treadwheel")


def test_the_entrypoint_trains_the_mounted_run_file_with_the_overrides_and_a_run_dir_on_the_volume():
    made = ray_job.job(run(GPU, "num_steps=3", "run_dir=here", "reward.env=[A, B]"), SHARED)[1]["spec"]
    words = shlex.split(made["entrypoint"])
    assert words[:3] == ["treadwheel", "train", "/etc/treadwheel/run.yaml"]
    assert {"num_steps=3", "reward.env=[A, B]", "run_dir=/treadwheel/here"} <= {*words} and "run_dir=here" not in words
    assert words[-4:] == ["--wait-for-nodes", "30m", "--wait-for-claim", "10m"]
    assert made["metadata"] == {"run_dir": "/treadwheel/here", "viewer": "treadwheel view /treadwheel/here"}


@pytest.mark.parametrize("site", [Site(run_claim="treadwheel", spot={}), Site(run_claim="treadwheel"), Site(spot={})])
def test_learner_and_services_stay_off_the_pods_of_rollout_workers(site):
    made = ray_job.job(run(GPU, "elastic.spot=a=b"), site)[1]
    settings = [word for word in shlex.split(made["spec"]["entrypoint"]) if word.startswith("elastic.spot=")]
    assert settings == ["elastic.spot=treadwheel/pods=rollout"]
    labelled = {name for name, group in groups_of(made).items() if group["labels"].get("treadwheel/pods") == "rollout"}
    assert labelled == {name for name in groups_of(made) if name.startswith("rollout")} != set()


def test_the_config_map_holds_the_values_of_the_run_file_and_none_of_its_comments(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("""
# hub token: hunter2
model: {path: m, dtype: float32}  # the password is hunter2
prompts: {name: file, path: "#p.jsonl"}
reward: {judge: exact_match}
optimizer: {learning_rate: 5e-4}
sampling:
  stop:  # hunter2
  - |  # hunter2
    # 1
  - "5e-4"
""")
    config_map, made = ray_job.job(ray_job.read(str(file), []), Site())
    (text,) = config_map["data"].values()
    assert "hunter2" not in text
    (tmp_path / "run.yaml").write_text(text)
    assert load(tmp_path / "run.yaml") == load(file)
    assert config_map["metadata"]["name"] == "mine-run" and made["metadata"]["name"] == "mine"
    head = cluster_of(made)["headGroupSpec"]["template"]["spec"]
    assert {"name": "config", "configMap": {"name": "mine-run"}} in head["volumes"]


@pytest.mark.parametrize(
    ("run_dir", "place"),
    [("runs/a", "/treadwheel/runs/a"), ("/treadwheel/b", "/treadwheel/b"), ("s3://bucket/c", "s3://bucket/c")],
)
def test_a_run_directory_lies_on_the_volume_or_in_the_object_store(run_dir, place):
    assert ray_job.job(run(GPU, f"run_dir={run_dir}"), SHARED)[1]["spec"]["metadata"]["run_dir"] == place


@pytest.mark.parametrize("site", [Site(), SHARED, Site(spot={}), Site(run_claim="treadwheel", spot={}, queue="mine")])
@pytest.mark.parametrize("run_dir", ["/data/a", "../a", "/treadwheel", "/run/a"])
def test_a_run_directory_on_no_volume_is_refused(site, run_dir):
    with pytest.raises(
        ConfigError, match=r"is on no volume of the pods; use a relative path, or a folder in /treadwheel"
    ):
        ray_job.job(run(GPU, f"run_dir={run_dir}"), site)


def test_without_a_volume_the_head_holds_learner_and_services():
    made = cluster_of(job())
    assert made["headGroupSpec"]["rayStartParams"]["num-cpus"] == "3"
    assert [*groups_of(job())] == ["rollout"]


def test_with_a_volume_the_head_holds_no_actor():
    made = job(SHARED)
    assert cluster_of(made)["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert [*groups_of(made)] == ["learner", "rollout"]


def test_services_without_room_beside_the_ranks_have_pods_without_gpus_that_stay():
    full = ray_job.job(run(GPU, "learner.num_ranks=8", "learner.cpus_per_rank=8"), SHARED)[1]
    groups = groups_of(full)
    assert {name: group["maxReplicas"] for name, group in groups.items()} == {
        "learner": 1,
        "without-gpus": 1,
        "rollout": 16,
    }
    pod = groups["without-gpus"]["template"]["spec"]
    assert "nvidia.com/gpu" not in pod["containers"][0]["resources"]["limits"] and "tolerations" not in pod
    assert groups["without-gpus"]["labels"] == groups["learner"]["labels"]


def test_spot_nodes_come_before_others_and_after_the_learner():
    made = job(Site(run_claim="treadwheel", spot={"node_selector": {"pool": "spot"}}), path=GPU)
    groups = groups_of(made)
    assert {name: group["priority"] for name, group in groups.items()} == {
        "learner": 20,
        "rollout-spot": 10,
        "rollout-on-demand": 0,
    }
    assert {name: group["labels"]["ray.io/market-type"] for name, group in groups.items()} == {
        "learner": "on-demand",
        "rollout-spot": "spot",
        "rollout-on-demand": "on-demand",
    }
    assert groups["rollout-spot"]["template"]["spec"]["nodeSelector"] == {"pool": "spot"}
    assert "nodeSelector" not in groups["learner"]["template"]["spec"]


def test_node_autoscalers_move_only_pods_of_spot_nodes_to_save_nodes():
    """Each move of the learner ended an attempt of the job; the fourth ended the job."""
    for site in (Site(run_claim="treadwheel", spot={}), Site(run_claim="treadwheel")):
        cluster = job(site, path=GPU)["spec"]["rayClusterSpec"]
        groups = {each["groupName"]: each["template"] for each in cluster["workerGroupSpecs"]}
        kept = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
        for name, template in {"head": cluster["headGroupSpec"]["template"], **groups}.items():
            assert template["metadata"].get("annotations", {}) == ({} if name == "rollout-spot" else kept), name


def test_head_and_learner_have_the_time_to_save_where_spot_nodes_leave_25_seconds():
    made = job(Site(run_claim="treadwheel", spot={}, grace_s=25), path=GPU)
    found = [
        (template["spec"]["terminationGracePeriodSeconds"], template["spec"]["containers"][0]["env"][0]["value"])
        for template in templates_of(made)
    ]
    # head, learner, rollout-spot, rollout-on-demand
    assert found == [(120, "110"), (120, "110"), (25, "15"), (120, "110")]


def disks(run, site):
    return [
        template["spec"]["containers"][0]["resources"]["limits"]["ephemeral-storage"]
        for template in templates_of(ray_job.job(run, site)[1])
    ]


def test_a_pod_has_the_sites_disk_and_the_learners_a_checkpoint_on_its_way_to_a_store():
    plain = run(GPU, "run_dir=s3://bucket/a")
    assert disks(plain, Site(spot={}, overflow=False)) == ["20Gi", "20Gi", "20Gi"]
    assert disks(plain, Site(spot={}, overflow=False, scratch_gib=114)) == ["114Gi"] * 3
    # head, learner, rollout-spot
    assert disks(replace(plain, upload_gib=92), Site(spot={}, overflow=False)) == ["20Gi", "112Gi", "20Gi"]


@pytest.fixture
def large(tmp_path):
    """2**29 parameters of tied embeddings, and less than 2**20 others."""
    config = json.loads(Path("deploy/quickstart/model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 2**22, "tie_word_embeddings": True}))
    return f"model.path={tmp_path}"


@pytest.mark.parametrize(
    ("overrides", "gib"),
    [
        # 12 bytes of state and 4 of the model, half a GiB times 16; and a little for the others.
        (["run_dir=s3://bucket/a"], 9),
        (["run_dir=s3://bucket/a", "learner.num_ranks=4"], 9),
        (["run_dir=s3://bucket/a", "model.dtype=bfloat16"], 8),
        (["run_dir=runs/a"], 0),
        (["run_dir=s3://bucket/a", "model.path=org/model"], 0),
    ],
)
def test_a_checkpoint_for_a_store_is_counted_where_the_model_is_at_hand(large, overrides, gib):
    assert ray_job.read(QUICKSTART, [large, *overrides]).upload_gib == gib


def test_no_pod_is_there_before_the_run_asks_for_it():
    for group in groups_of(job(SHARED, path=GPU)).values():
        assert group["replicas"] == group["minReplicas"] == 0 < group["maxReplicas"]


def test_gpus_are_asked_for_and_their_taint_is_tolerated():
    made = groups_of(job(SHARED, path=GPU))["rollout"]["template"]["spec"]
    assert made["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in made["tolerations"]


def test_secrets_come_by_reference_into_every_pod():
    site = Site(secrets={"HF_TOKEN": {"secret": "hub", "key": "token"}}, token_secret="cluster-token")
    made = job(site)
    for template in templates_of(made):
        assert {
            "name": "HF_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
        } in template["spec"]["containers"][0]["env"]
    assert cluster_of(made)["authOptions"] == {"mode": "token", "secretName": "cluster-token"}


def test_a_stopped_job_has_the_time_that_saving_may_take():
    made = ray_job.job(run(GPU, "checkpoint.stop_timeout_s=200"), SHARED)[1]
    env = cluster_of(made)["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "230"} in env


@pytest.mark.parametrize("secret", ["api_key: sk-1", "note: see hf_abcdefghijklmnopqrstuvwxyz01234567"])
def test_a_run_file_with_a_secret_is_refused(tmp_path, secret):
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"model: {{path: m}}\nprompts: {{name: file, path: p.jsonl}}\nreward: {{judge: {{name: 'my:judge', {secret}}}}}\n"
    )
    with pytest.raises(ConfigError, match=r"contains a secret, .* name the variable in `secrets` of the site file"):
        ray_job.read(str(file), [])


@pytest.mark.parametrize(
    "override", ["reward.judge.api_key=hunter2", "reward.judge={name: 'my:judge', api_key: hunter2}"]
)
def test_an_override_with_a_secret_is_refused_by_its_name_alone(override):
    with pytest.raises(ConfigError, match=r"^override reward\.judge[a-z_.]* contains a secret") as refused:
        ray_job.read(QUICKSTART, ["reward.judge=my:judge", override])
    assert "hunter2" not in str(refused.value)


def test_a_job_is_retried_has_an_end_and_leaves_its_head_for_a_while():
    spec = job(Site(retries=2, keep_s=60, deadline_s=100))["spec"]
    assert spec["backoffLimit"] == 2 and spec["activeDeadlineSeconds"] == 100 and spec["preRunningDeadlineSeconds"] > 0
    assert spec["shutdownAfterJobFinishes"] is True and spec["ttlSecondsAfterFinished"] == 60
    assert job()["spec"]["backoffLimit"] == 3


def test_the_head_has_memory_for_the_driver_and_is_on_no_node_that_goes():
    head = cluster_of(job(Site(run_claim="treadwheel", spot={})))["headGroupSpec"]
    assert head["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"] == "8Gi"
    assert head["labels"] == {"ray.io/market-type": "on-demand"}


@pytest.mark.parametrize("name", KUBERAY)
def test_every_pod_is_nobodys_but_a_users_and_its_shared_memory_holds_rays_objects(name):
    for template in templates_of(resource(name)):
        spec = template["spec"]
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        gib = int(spec["containers"][0]["resources"]["limits"]["memory"].removesuffix("Gi"))
        (shared,) = (each["emptyDir"] for each in spec["volumes"] if each["name"] == "shared-mem")
        # Ray takes 30 % of the memory for its objects, and the disk where shared memory has less: of 14 GiB 4.2.
        assert shared == {"medium": "Memory", "sizeLimit": f"{-(-gib * 3 // 10)}Gi"}


@pytest.mark.parametrize("name", KUBERAY)
def test_the_autoscaler_alone_holds_a_key_to_the_api_server(name):
    made = resource(name)
    for template in templates_of(made):
        assert template["spec"]["automountServiceAccountToken"] is False
        (container,) = template["spec"]["containers"]
        assert "api-key" not in {mount["name"] for mount in container["volumeMounts"]}
    mounts = cluster_of(made)["autoscalerOptions"]["volumeMounts"]
    assert [
        f"{mount['mountPath']}/{file}" for mount in mounts if mount["name"] == "api-key" for file in ("token", "ca.crt")
    ] == [node_provider.IN_CLUSTER_TOKEN_PATH, node_provider.IN_CLUSTER_CA_CERT_PATH]
    volume = next(each for each in templates_of(made)[0]["spec"]["volumes"] if each["name"] == "api-key")
    token, authority, _ = volume["projected"]["sources"]
    assert token["serviceAccountToken"]["path"] == "token"
    assert authority["configMap"] == {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}


@pytest.mark.parametrize(("made", "most"), [(ray_job.job, 47), (ray_job.cluster, 53)])
def test_a_name_has_room_for_what_kuberay_appends(made, most):
    assert made(run(), Site(name="a" * most))[-1]["metadata"]["name"] == "a" * most
    with pytest.raises(ConfigError, match=f"has {most + 1} characters; Kubernetes allows at most {most} here"):
        made(run(), Site(name="a" * (most + 1)))


def test_a_run_file_whose_name_is_no_kubernetes_name_asks_for_one():
    with pytest.raises(ConfigError, match=r"name '' .* a letter first and no dash last; set `name` in the site file"):
        ray_job.job(run(name=""), Site())


def test_a_run_file_whose_name_begins_with_a_digit_has_a_name_with_a_letter_first():
    assert ray_job.read("deploy/runs/recipes/7b_lora.yaml", []).name == "run-7b-lora"


def test_a_job_names_its_type_since_a_cluster_cannot_be_asked_for_it():
    with pytest.raises(ConfigError, match=r"model\.dtype='auto' asks the machine, .* write bfloat16 or float32"):
        ray_job.job(run(GPU, "model.dtype=auto"), SHARED)


def test_a_queue_admits_the_job_slice_by_slice():
    metadata = job(Site(queue="mine"))["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "mine"
    assert metadata["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}


def test_a_cluster_for_jobs_has_the_pods_of_the_run_and_no_run_file():
    made = ray_job.cluster(run(GPU, name="gpu"), SHARED)
    assert [each["kind"] for each in made] == ["RayCluster"]
    assert [*groups_of(made[0])] == ["learner", "rollout"]
    head = yaml.safe_dump(made[0]["spec"]["headGroupSpec"])
    assert "name: config" not in head and "/etc/treadwheel" not in head and "gpu-run" not in head
    assert ray_cluster.LARGEST_NAME == 53


def test_learner_and_head_have_the_time_that_the_run_takes_to_save():
    """300 s, 30 for actors to end, and 10 after Ray has drained the pod."""
    made = ray_job.job(run(GPU, "checkpoint.stop_timeout_s=300"), SHARED)[1]
    graces = [each["spec"]["terminationGracePeriodSeconds"] for each in templates_of(made)]
    drains = [variable(each, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S") for each in templates_of(made)]
    assert graces == [340, 340, 120] and drains == ["330", "330", "110"]


def test_a_runs_own_wait_for_nodes_is_kept():
    words = shlex.split(ray_job.job(run(GPU, "elastic.wait_for_nodes_s=7200"), SHARED)[1]["spec"]["entrypoint"])
    assert "elastic.wait_for_nodes_s=7200" in words and "--wait-for-nodes" not in words


def test_a_run_that_samples_nothing_is_no_job():
    with pytest.raises(ConfigError, match="recorded='old': a job trains by sampling"):
        ray_job.job(run(GPU, "recorded=old"), SHARED)


def variable(template, name):
    return next(each["value"] for each in template["spec"]["containers"][0]["env"] if each["name"] == name)
