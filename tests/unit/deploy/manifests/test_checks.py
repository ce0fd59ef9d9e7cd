"""Every rule, broken by one change to a committed manifest, is told with its place and its way out."""

import re
from importlib.metadata import version

import pytest
import yaml

from cluster.contracts.errors import ConfigError
from deploy.manifests import checks
from tests.unit.deploy.manifests.made import KUBERAY, cluster_of, committed, resource, templates_of


def told(made, **options):
    run_file = {"kind": "ConfigMap", "metadata": {"name": "quickstart-run"}}
    try:
        checks.check([run_file, made], source="f.yaml", **options)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", KUBERAY)
def test_what_is_committed_keeps_every_rule(name):
    assert checks.check(committed(name), source="f.yaml", installed_ray=version("ray"))


def head(made):
    return templates_of(made)[0]["spec"]


def worker(made):
    return templates_of(made)[1]["spec"]


def container(made):
    return worker(made)["containers"][0]


def group(made):
    return cluster_of(made)["workerGroupSpecs"][0]


def volume(pod, name):
    return next(each for each in pod["volumes"] if each["name"] == name)


def without(variables, name):
    variables[:] = [each for each in variables if each["name"] != name]


BROKEN = {
    # name and version
    "name too long": (
        lambda job: job["metadata"].update(name="a" * 48),
        "metadata.name has 48 characters, and at most 47",
    ),
    "name is no label": (
        lambda job: job["metadata"].update(name="1_run"),
        "metadata.name='1_run' is not valid; use lower-case letters",
    ),
    "no ray version": (lambda job: cluster_of(job).pop("rayVersion"), "rayVersion='' is not supported by treadwheel"),
    "old ray": (
        lambda job: cluster_of(job).update(rayVersion="2.52.1"),
        "rayVersion='2.52.1' is not supported by treadwheel; write the image's version, 2.53.0 or later",
    ),
    "ray of no number": (
        lambda job: cluster_of(job).update(rayVersion="nightly"),
        "rayVersion='nightly' is not supported",
    ),
    # the token
    "no token": (lambda job: cluster_of(job).pop("authOptions"), "authOptions.mode is not token"),
    "token off": (lambda job: cluster_of(job)["authOptions"].update(mode="disabled"), "authOptions.mode is not token"),
    # the autoscaler
    "no autoscaling": (
        lambda job: cluster_of(job).pop("enableInTreeAutoscaling"),
        "enableInTreeAutoscaling is not true",
    ),
    "autoscaler v1": (
        lambda job: cluster_of(job)["autoscalerOptions"].update(version="v1"),
        "autoscalerOptions.version='v1': only v2 drains",
    ),
    "autoscaler's privileges": (
        lambda job: cluster_of(job)["autoscalerOptions"].pop("securityContext"),
        "autoscalerOptions: securityContext.allowPrivilegeEscalation must be False",
    ),
    "autoscaler of no size": (
        lambda job: cluster_of(job)["autoscalerOptions"]["resources"]["requests"].pop("memory"),
        "autoscalerOptions: resources.requests has no memory",
    ),
    # groups
    "no replicas": (lambda job: group(job).pop("replicas"), "workerGroupSpecs rollout-spot: replicas left out"),
    "no most replicas": (lambda job: group(job).pop("maxReplicas"), "maxReplicas left out"),
    "more than the most": (
        lambda job: group(job).update(replicas=3),
        "'replicas': 3, 'maxReplicas': 2}: each must be at least the one before",
    ),
    "more of the least": (
        lambda job: group(job).update(minReplicas=1),
        "'minReplicas': 1, 'replicas': 0, 'maxReplicas': 2}: each must be at least the one before",
    ),
    "less than none": (lambda job: group(job).update(minReplicas=-1), "and minReplicas at least 0"),
    "group of capitals": (
        lambda job: group(job).update(groupName="Spot"),
        "workerGroupSpecs Spot: groupName is not valid; use",
    ),
    "group twice": (
        lambda job: cluster_of(job)["workerGroupSpecs"].append(group(job)),
        "2 groups are named 'rollout-spot'",
    ),
    "CPUs in words": (
        lambda job: cluster_of(job)["headGroupSpec"]["rayStartParams"].update({"num-cpus": "three"}),
        "headGroupSpec: rayStartParams.num-cpus='three' is not a whole number; write one",
    ),
    # pods that end
    "restart policy": (
        lambda job: worker(job).update(restartPolicy="Always"),
        "restartPolicy='Always': autoscaler v2 needs Never",
    ),
    "restart policy of the head": (
        lambda job: head(job).update(restartPolicy="OnFailure"),
        "headGroupSpec: restartPolicy",
    ),
    "no drain": (
        lambda job: without(container(job)["env"], "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"),
        "env RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=None",
    ),
    "more grace than drain": (
        lambda job: worker(job).update(terminationGracePeriodSeconds=60),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=110 does not fit terminationGracePeriodSeconds=60: the pod is killed",
    ),
    "no time to drain": (
        lambda job: (
            worker(job).update(terminationGracePeriodSeconds=10)
            or container(job)["env"].insert(0, {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "0"})
        ),
        "or long after; write 15, and at least 25 s of grace",
    ),
    "default grace": (lambda job: worker(job).pop("terminationGracePeriodSeconds"), "terminationGracePeriodSeconds=30"),
    "pre-stop": (
        lambda job: container(job).update(lifecycle={"preStop": {"sleep": {"seconds": 5}}}),
        "lifecycle.preStop delays the notice",
    ),
    # the restricted pod standard
    "root": (lambda job: worker(job)["securityContext"].update(runAsUser=0), "a runAsUser that is not 0"),
    "perhaps root": (lambda job: worker(job)["securityContext"].pop("runAsNonRoot"), "must have runAsNonRoot: true"),
    "no group for volumes": (
        lambda job: worker(job)["securityContext"].pop("fsGroup"),
        "securityContext has no fsGroup",
    ),
    "no seccomp": (lambda job: worker(job)["securityContext"].pop("seccompProfile"), "must have seccompProfile"),
    "escalation": (
        lambda job: container(job)["securityContext"].update(allowPrivilegeEscalation=True),
        "securityContext.allowPrivilegeEscalation must be False",
    ),
    "capabilities": (
        lambda job: container(job)["securityContext"].pop("capabilities"),
        "securityContext.capabilities must be",
    ),
    "writable root": (
        lambda job: container(job)["securityContext"].pop("readOnlyRootFilesystem"),
        "securityContext.readOnlyRootFilesystem must be True",
    ),
    "privileged": (
        lambda job: container(job)["securityContext"].update(privileged=True),
        "container ray-worker: securityContext.privileged must not be True",
    ),
    "root in a container": (
        lambda job: container(job)["securityContext"].update(runAsUser=0),
        "container ray-worker: securityContext.runAsUser=0 is root",
    ),
    "perhaps root in a container": (
        lambda job: container(job)["securityContext"].update(runAsNonRoot=False),
        "container ray-worker: securityContext.runAsNonRoot must not be False",
    ),
    "no seccomp in a container": (
        lambda job: container(job)["securityContext"].update(seccompProfile={"type": "Unconfined"}),
        "container ray-worker: securityContext.seccompProfile must not be {'type': 'Unconfined'}",
    ),
    "no apparmor": (
        lambda job: worker(job)["securityContext"].update(appArmorProfile={"type": "Unconfined"}),
        "pod: securityContext.appArmorProfile must not be {'type': 'Unconfined'}",
    ),
    "no apparmor by annotation": (
        lambda job: templates_of(job)[1]["metadata"].update(
            annotations={"container.apparmor.security.beta.kubernetes.io/ray-worker": "unconfined"}
        ),
        "annotation container.apparmor.security.beta.kubernetes.io/ray-worker=unconfined replaces the runtime's default profile",
    ),
    "whole proc": (
        lambda job: container(job)["securityContext"].update(procMount="Unmasked"),
        "securityContext.procMount must not be 'Unmasked'",
    ),
    "selinux": (
        lambda job: worker(job)["securityContext"].update(seLinuxOptions={"type": "spc_t"}),
        "pod: securityContext.seLinuxOptions may have only a level",
    ),
    "kernel settings": (
        lambda job: worker(job)["securityContext"].update(sysctls=[{"name": "kernel.msgmax", "value": "1"}]),
        "pod: securityContext.sysctls must not be",
    ),
    "windows host process": (
        lambda job: worker(job)["securityContext"].update(windowsOptions={"hostProcess": True}),
        "pod: securityContext.windowsOptions must not be",
    ),
    "node's network": (
        lambda job: worker(job).update(hostNetwork=True),
        "rollout-spot: hostNetwork: the pod would share",
    ),
    "node's processes": (lambda job: head(job).update(hostPID=True), "headGroupSpec: hostPID: the pod would share"),
    "node's memory": (lambda job: worker(job).update(hostIPC=True), "rollout-spot: hostIPC: the pod would share"),
    "node's files": (
        lambda job: worker(job)["volumes"].append({"name": "all", "hostPath": {"path": "/"}}),
        "volume all: hostPath is not allowed",
    ),
    "node's port": (
        lambda job: container(job)["ports"][0].update(hostPort=8080),
        "container ray-worker: hostPort opens a port of the node",
    ),
    "probe of another host": (
        lambda job: container(job).update(livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 80}}),
        "container ray-worker: a probe or hook names a host",
    ),
    "startup probe of another host": (
        lambda job: container(job).update(startupProbe={"httpGet": {"host": "10.0.0.1", "port": 80}}),
        "container ray-worker: a probe or hook names a host",
    ),
    "readiness probe of another host": (
        lambda job: container(job).update(readinessProbe={"tcpSocket": {"host": "10.0.0.1", "port": 80}}),
        "container ray-worker: a probe or hook names a host",
    ),
    "hook to another host": (
        lambda job: container(job).update(lifecycle={"postStart": {"tcpSocket": {"host": "10.0.0.1", "port": 80}}}),
        "container ray-worker: a probe or hook names a host",
    ),
    "privileged before it starts": (
        lambda job: worker(job).update(initContainers=[{"name": "init", "image": "a:1"}]),
        "container init: securityContext.allowPrivilegeEscalation",
    ),
    "key to the API server": (
        lambda job: worker(job).pop("automountServiceAccountToken"),
        "rollout-spot: containers that run generated programs would have a key",
    ),
    "key of the head": (
        lambda job: head(job).pop("automountServiceAccountToken"),
        "headGroupSpec: containers that run generated programs would have a key",
    ),
    "autoscaler of no key": (
        lambda job: without(cluster_of(job)["autoscalerOptions"]["volumeMounts"], "api-key"),
        "autoscalerOptions: no volume is mounted at /var/run/secrets/kubernetes.io/serviceaccount",
    ),
    # secrets and images
    "secret in plain sight": (
        lambda job: container(job)["env"].append({"name": "HF_TOKEN", "value": "abc"}),
        "env HF_TOKEN looks like a secret in plain sight",
    ),
    "secret before it starts": (
        lambda job: worker(job).update(
            initContainers=[{"name": "init", "image": "a:1", "env": [{"name": "HF_TOKEN", "value": "abc"}]}]
        ),
        "container init: env HF_TOKEN looks like a secret in plain sight",
    ),
    "latest image before it starts": (
        lambda job: worker(job).update(initContainers=[{"name": "init", "image": "a:latest"}]),
        "container init: image 'a:latest' may be another image tomorrow",
    ),
    "password in an address": (
        lambda job: container(job)["env"].append({"name": "PROXY", "value": "http://me:word@host"}),
        "env PROXY looks like a secret",
    ),
    "secret of the autoscaler": (
        lambda job: cluster_of(job)["autoscalerOptions"]["env"].append({"name": "HF_TOKEN", "value": "abc"}),
        "autoscalerOptions: env HF_TOKEN looks like a secret in plain sight",
    ),
    "secret among the overrides": (
        lambda job: job["spec"].update(entrypoint=job["spec"]["entrypoint"] + " reward.judge.api_key=abc"),
        "entrypoint has a secret in plain sight",
    ),
    "secret within an override": (
        lambda job: job["spec"].update(
            entrypoint=job["spec"]["entrypoint"] + " 'reward.judge={name: a, api_key: abc}'"
        ),
        "entrypoint has a secret in plain sight",
    ),
    "secret of the job": (
        lambda job: job["spec"].update(runtimeEnvYAML="env_vars: {HF_TOKEN: abc}"),
        "runtimeEnvYAML has a secret in plain sight",
    ),
    "image of no tag": (lambda job: container(job).update(image="ray"), "image 'ray' may be another image tomorrow"),
    "latest image": (lambda job: container(job).update(image="ray:latest"), "image 'ray:latest' may be another image"),
    "two images": (
        lambda job: container(job).update(image="other:1"),
        "pods have different images, other:1, treadwheel:0.2.0-cpu",
    ),
    # room
    "no disk": (
        lambda job: container(job)["resources"]["requests"].pop("ephemeral-storage"),
        "resources.requests has no ephemeral-storage",
    ),
    "more limit than request": (
        lambda job: container(job)["resources"]["limits"].update(memory="9Gi"),
        "resources.limits.memory differs from its request",
    ),
    "shared memory on disk": (
        lambda job: without(worker(job)["volumes"], "shared-mem"),
        "/dev/shm is not an emptyDir in Memory",
    ),
    "no place for files": (lambda job: without(container(job)["volumeMounts"], "tmp"), "/tmp is not writable"),
    "volume over the key to the API server": (
        lambda job: container(job)["volumeMounts"][0].update(mountPath="/run/"),
        "a volume at /run/ would contain the key to the API server",
    ),
    "volume over all of /var": (
        lambda job: container(job)["volumeMounts"][0].update(mountPath="/var"),
        "a volume at /var would contain the key to the API server",
    ),
    "volume over everything": (
        lambda job: container(job)["volumeMounts"][0].update(mountPath="/"),
        "a volume at / would contain the key to the API server",
    ),
    "no place for caches": (
        lambda job: without(container(job)["volumeMounts"], "home"),
        "/home/treadwheel is not writable; mount an emptyDir there",
    ),
    "place for files that cannot be written": (
        lambda job: container(job)["volumeMounts"][1].update(readOnly=True),
        "/tmp is not writable",
    ),
    "dashboard for the head alone": (
        lambda job: cluster_of(job)["headGroupSpec"]["rayStartParams"].pop("dashboard-host"),
        "rayStartParams.dashboard-host is not 0.0.0.0",
    ),
    "port of no name": (
        lambda job: without(head(job)["containers"][0]["ports"], "as-metrics"),
        "headGroupSpec: no ports are named as-metrics",
    ),
    # the job
    "submitter pod": (lambda job: job["spec"].update(submissionMode="K8sJobMode"), "submissionMode='K8sJobMode'"),
    "submitter left out": (lambda job: job["spec"].pop("submissionMode"), "submissionMode='K8sJobMode'"),
    "nothing to run": (
        lambda job: job["spec"].update(entrypoint=" "),
        "entrypoint is not treadwheel but ''; write treadwheel",
    ),
    "another program": (
        lambda job: job["spec"].update(entrypoint="python train"),
        "entrypoint is not treadwheel but 'python'; write treadwheel train RUN.yaml",
    ),
    "open quote": (
        lambda job: job["spec"].update(entrypoint="treadwheel 'x"),
        "entrypoint is not a valid shell command: No",
    ),
    "run file of another name": (
        lambda job: volume(head(job), "config")["configMap"].update(name="other-run"),
        "ConfigMap other-run with the run file is not in this file, which has quickstart-run; name that one",
    ),
    "run file nowhere": (
        lambda job: head(job)["containers"][0]["volumeMounts"][-1].update(mountPath="/etc/other"),
        "headGroupSpec: no ConfigMap is mounted at /etc/treadwheel",
    ),
    "killed before it saves": (
        lambda job: without(head(job)["containers"][0]["env"], "RAY_JOB_STOP_WAIT_TIME_S"),
        "env RAY_JOB_STOP_WAIT_TIME_S is left out",
    ),
    "killed soon": (
        lambda job: (
            head(job)["containers"][0]["env"].append({"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "1"})
            or head(job)["containers"][0]["env"].reverse()
        ),
        "env RAY_JOB_STOP_WAIT_TIME_S is 1: Ray kills a stopped job",
    ),
    "stays for ever": (lambda job: job["spec"].pop("shutdownAfterJobFinishes"), "the cluster would stay forever"),
    # what is no resource of KubeRay any more
    "groups of text": (
        lambda job: cluster_of(job).update(workerGroupSpecs="two"),
        "spec.rayClusterSpec.workerGroupSpecs: input should be a valid list",
    ),
    "replicas of text": (
        lambda job: group(job).update(replicas="2"),
        "spec.rayClusterSpec.workerGroupSpecs[0].replicas: input should be a valid integer",
    ),
    "no head": (lambda job: cluster_of(job).pop("headGroupSpec"), "spec.rayClusterSpec.headGroupSpec: field required"),
    "no container": (lambda job: worker(job).update(containers=[]), "containers: list should have at least 1 item"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_told(name):
    change, words = BROKEN[name]
    made = resource("quickstart.yaml")
    change(made)
    assert re.match(r"f\.yaml: (\d+ problem\(s\)|RayJob cannot be read)", message := told(made)), message
    assert words in message


def applications(*names, **more):
    def change(service):
        one = [{"name": name, "import_path": "a:b", **more} for name in names]
        service["spec"]["serveConfigV2"] = yaml.safe_dump({"applications": one})

    return change


BROKEN_SERVICES = {
    "name too long": (
        lambda service: service["metadata"].update(name="a" * 48),
        "metadata.name has 48 characters, and at most 47",
    ),
    "no applications": (applications(), "serveConfigV2 has no applications"),
    "nothing said": (lambda service: service["spec"].pop("serveConfigV2"), "serveConfigV2 has no list of applications"),
    "no YAML": (lambda service: service["spec"].update(serveConfigV2="a: [b"), "ParserError: while parsing"),
    "a key twice": (lambda service: service["spec"].update(serveConfigV2="a: 1\na: 2"), "'a' is given twice"),
    "a date that is none": (
        lambda service: service["spec"].update(serveConfigV2="since: 2026-13-45"),
        "serveConfigV2 has no list of applications",
    ),
    "another port": (
        lambda service: service["spec"].update(
            serveConfigV2=service["spec"]["serveConfigV2"] + "http_options: {port: 80}\n"
        ),
        "workerGroupSpecs server: no port is named serve with the number 80",
    ),
    "no token": (lambda service: cluster_of(service).pop("authOptions"), "authOptions.mode is not token"),
    "a secret": (
        applications("a", runtime_env={"env_vars": {"HF_TOKEN": "abc"}}),
        "serveConfigV2 has a secret in plain sight",
    ),
}


@pytest.mark.parametrize("name", BROKEN_SERVICES)
def test_a_broken_rule_of_services_is_told(name):
    change, words = BROKEN_SERVICES[name]
    made = resource("rayservice.yaml")
    change(made)
    message = told(made)
    assert message.startswith("f.yaml: ") and words in message, message


@pytest.mark.parametrize(
    "change",
    [
        lambda service: service["spec"].update(upgradeStrategy={"type": "None"}, rayClusterDeletionDelaySeconds=0),
        applications("a", route_prefix="/a"),
    ],
)
def test_services_that_kuberay_takes_are_no_problem(change):
    made = resource("rayservice.yaml")
    change(made)
    assert told(made) == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job["spec"].update(shutdownAfterJobFinishes=False, deletionStrategy={"deletionRules": []}),
        lambda job: worker(job).update(restartPolicy="Never"),
        lambda job: container(job)["env"].append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {}}}),
        lambda job: job["metadata"].update(name="a" * 47),
        lambda job: container(job)["resources"]["requests"].update(cpu=2),
        lambda job: container(job)["resources"].update(
            requests={"cpu": 0.5, "memory": "1Gi", "ephemeral-storage": "1Gi"},
            limits={"cpu": "500m", "memory": "1024Mi"},
        ),
    ],
)
def test_what_kuberay_takes_is_no_problem(change):
    made = resource("quickstart.yaml")
    change(made)
    assert told(made) == ""


@pytest.mark.parametrize(
    ("key", "written"),
    [("run.yaml", "reward: {judge: {name: a, api_key: abc}}"), ("note", "{see hf_abcdefghijklmnopqrstuvwxyz0123")],
)
def test_a_secret_in_a_config_map_is_told(key, written):
    run_file, job = committed("quickstart.yaml")
    run_file["data"][key] = written
    with pytest.raises(ConfigError, match=rf"ConfigMap quickstart-run: data\.{key} has a secret in plain sight"):
        checks.check([run_file, job], source="f.yaml")


def test_several_problems_are_told_at_once():
    made = resource("quickstart.yaml")
    made["spec"].update(submissionMode="SidecarMode", entrypoint="")
    assert told(made).startswith("f.yaml: 2 problem(s)\n  RayJob quickstart: submissionMode")


def test_a_number_of_cpus_beyond_all_pods_is_told():
    made = resource("quickstart.yaml")
    cluster_of(made)["headGroupSpec"]["rayStartParams"]["num-cpus"] = "9" * 400
    assert "rayStartParams.num-cpus='999" in told(made)


def test_a_ray_that_is_not_the_one_here_is_told():
    assert "rayVersion='2.60.0' is not the installed Ray 2.61.1" in told(
        resource("quickstart.yaml"), installed_ray="2.61.1"
    )


def test_a_file_without_a_resource_of_kuberays_is_told():
    with pytest.raises(ConfigError, match=r"f\.yaml has no RayJob, RayCluster or RayService"):
        checks.check([{"kind": "ConfigMap"}, {"kind": ["RayJob"]}, None, "text"], source="f.yaml")
