"""The committed files are what is made again, hold no secret, and fit together; the command line makes and checks them."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from deploy.cli import app
from deploy.manifests import checks, text
from deploy.manifests.files import FOLDER, files
from deploy.manifests.site import looks_secret
from tests.unit.deploy.manifests import api_server
from tests.unit.deploy.manifests.made import GPU, KUBERNETES, QUICKSTART, cluster_of, committed, templates_of

BY_HAND = {
    "kustomization.yaml",
    "kustomizeconfig.yaml",
    "quickstart_site.yaml",
    "gpu_site.yaml",
    "rayservice_site.yaml",
    "storage.yaml",
    "network.yaml",
    "kueue.yaml",
    "viewer.yaml",
}


def test_what_is_committed_is_what_is_made():
    """`python -m deploy.manifests` writes it."""
    made = files()
    assert {file.name for file in FOLDER.iterdir()} == made.keys() | BY_HAND
    for name, content in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == content, name


def test_no_file_holds_a_secret_or_an_image_that_changes():
    for file in FOLDER.iterdir():
        assert ":latest" not in file.read_text(encoding="utf-8")
        for document in text.read(str(file)):
            assert document.get("kind") != "Secret"
            for name, value in strings(document):
                assert name != "value" or not looks_secret("", value), f"{file.name}: {value}"


def strings(node, name=""):
    if isinstance(node, dict):
        return [found for key, value in node.items() for found in strings(value, key)]
    if isinstance(node, list):
        return [found for value in node for found in strings(value, name)]
    return [(name, node)] if isinstance(node, str) else []


def test_policies_deny_first_and_open_the_metrics_to_prometheus_alone():
    policies = {each["metadata"]["name"]: each["spec"] for each in committed("network.yaml")}
    labels = {
        each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/part-of"] for each in committed("network.yaml")
    }
    assert labels == {"treadwheel"}
    assert policies["treadwheel-deny"] == {
        "podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "treadwheel"}},
        "policyTypes": ["Ingress", "Egress"],
    }
    opened = {
        (name, port["port"])
        for name, policy in policies.items()
        for entry in policy.get("ingress", [])
        for port in entry.get("ports", [])
    }
    assert opened == {
        ("treadwheel-operator", 8265),
        ("treadwheel-operator", 8000),
        ("treadwheel-served", 8000),
        *(("treadwheel-metrics", port) for port in (8080, 44217, 44227)),
    }
    # A served model is for pods of the namespace alone, of which no selector selects all.
    assert policies["treadwheel-served"]["ingress"][0]["from"] == [{"podSelector": {}}]


def test_pods_reach_their_like_the_names_and_what_is_behind_tls_and_nothing_else():
    leaving = {
        each["metadata"]["name"]: each["spec"]["egress"]
        for each in committed("network.yaml")
        if "egress" in each["spec"]
    }
    ours = {"podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "treadwheel"}}}
    assert leaving == {
        "treadwheel-among-themselves": [{"to": [ours]}],
        "treadwheel-names": [{"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}],
        "treadwheel-outside": [{"ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]}],
    }


def test_monitors_scrape_ports_that_the_pods_name():
    spec = cluster_of(next(each for each in committed("gpu.yaml") if each["kind"] == "RayJob"))
    ports = {
        "head": spec["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"],
        "worker": spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["ports"],
    }
    monitors = [each for each in committed("monitoring.yaml") if each["kind"] == "PodMonitor"]
    assert len(monitors) == 2
    for monitor in monitors:
        kind = monitor["spec"]["selector"]["matchLabels"]["ray.io/node-type"]
        scraped = {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]}
        assert scraped <= {port["name"] for port in ports[kind]} and "metrics" in scraped


def test_the_gpu_jobs_volume_is_the_one_in_storage_yaml():
    (claim,) = committed("storage.yaml")
    spec = cluster_of(next(each for each in committed("gpu.yaml") if each["kind"] == "RayJob"))
    volumes = spec["headGroupSpec"]["template"]["spec"]["volumes"]
    assert {"claimName": claim["metadata"]["name"]} in [each.get("persistentVolumeClaim") for each in volumes]


def test_queues_cover_what_pods_ask_for():
    queue = next(each for each in committed("kueue.yaml") if each["kind"] == "ClusterQueue")["spec"]
    spec = cluster_of(next(each for each in committed("gpu.yaml") if each["kind"] == "RayJob"))
    asked = spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert {*asked} == {*queue["resourceGroups"][0]["coveredResources"]}


def kustomized(folder):
    kubectl = shutil.which("kubectl")
    version = subprocess.run([kubectl, "version", "--client"], capture_output=True, text=True) if kubectl else None
    if version is None or "Kustomize Version" not in version.stdout:
        pytest.skip("needs a kubectl with kustomize in it, of Kubernetes 1.24 or later")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [*yaml.safe_load_all(done.stdout)]


def test_kustomize_renames_what_a_job_names_and_the_result_keeps_the_rules(tmp_path):
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    overlay = tmp_path / "mine"
    overlay.mkdir()
    # kustomize reads no file above the overlay, only folders.
    shutil.copy(f"{KUBERNETES}/kustomizeconfig.yaml", overlay)
    (overlay / "kustomization.yaml").write_text("""
        resources: [../kubernetes]
        configurations: [kustomizeconfig.yaml]
        namePrefix: mine-
        images: [{name: treadwheel, newName: host/treadwheel, newTag: '2'}]
        patches: [{target: {kind: RayJob}, patch: '[{"op": "replace", "path": "/spec/backoffLimit", "value": 7}]'}]
    """)
    documents = kustomized(overlay)
    job = next(each for each in documents if each["kind"] == "RayJob")
    assert job["metadata"]["name"] == "mine-quickstart" and job["spec"]["backoffLimit"] == 7
    head, worker = cluster_of(job)["headGroupSpec"], cluster_of(job)["workerGroupSpecs"][0]
    for part in (head, worker):
        spec = part["template"]["spec"]
        assert {"name": "config", "configMap": {"name": "mine-quickstart-run"}} in spec["volumes"]
        assert spec["containers"][0]["image"] == "host/treadwheel:2"
    assert api_server.problems(job) == []
    checks.check(documents, source="overlay")


def test_kustomize_renames_the_volume_and_the_secrets_of_every_kind(tmp_path):
    for name in ("storage.yaml", "gpu.yaml", "raycluster.yaml", "rayservice.yaml", "kustomizeconfig.yaml"):
        shutil.copy(f"{KUBERNETES}/{name}", tmp_path)
    (tmp_path / "kustomization.yaml").write_text("""
        resources: [storage.yaml, gpu.yaml, raycluster.yaml, rayservice.yaml]
        configurations: [kustomizeconfig.yaml]
        secretGenerator: [{name: hub, literals: [token=none]}]
        namePrefix: mine-
    """)
    documents = kustomized(tmp_path)
    (secret,) = (each["metadata"]["name"] for each in documents if each["kind"] == "Secret")
    found = {each["kind"]: each for each in documents if each["kind"].startswith("Ray")}
    assert found.keys() == {"RayJob", "RayCluster", "RayService"}
    for kind, each in found.items():
        for template in templates_of(each):
            volumes = [volume.get("persistentVolumeClaim") for volume in template["spec"]["volumes"]]
            assert {"claimName": "mine-treadwheel"} in volumes
            taken = [one["valueFrom"] for one in template["spec"]["containers"][0]["env"] if "valueFrom" in one]
            # The quickstart's service needs no secret.
            expected = [] if kind == "RayService" else [{"secretKeyRef": {"name": secret, "key": "token"}}]
            assert taken == expected
        assert api_server.problems(each) == []
    checks.check(documents, source="overlay")


@pytest.mark.parametrize("field", ["ConfigMap", "Secret", "PersistentVolumeClaim"])
def test_every_name_inside_kuberays_resources_is_listed_for_kustomize(field):
    (config,) = committed("kustomizeconfig.yaml")
    reference = next(each for each in config["nameReference"] if each["kind"] == field)
    roots = {"RayJob": "spec/rayClusterSpec/", "RayCluster": "spec/", "RayService": "spec/rayClusterConfig/"}
    inside = {
        kind: {spec["path"].removeprefix(root) for spec in reference["fieldSpecs"] if spec["kind"] == kind}
        for kind, root in roots.items()
    }
    assert inside["RayJob"] == inside["RayCluster"] == inside["RayService"]
    assert {path.split("/")[0] for path in inside["RayJob"]} >= {"headGroupSpec", "workerGroupSpecs"}


def invoke(*arguments):
    return CliRunner().invoke(app, ["kubernetes", *arguments])


def test_the_command_prints_the_committed_file():
    done = invoke(QUICKSTART, "elastic.max_workers=2", "--site", f"{KUBERNETES}/quickstart_site.yaml")
    assert done.exit_code == 0, done.output
    lines = Path(KUBERNETES, "quickstart.yaml").read_text().splitlines(keepends=True)
    assert done.stdout == "".join(line for line in lines if not line.startswith("#"))


def test_the_command_prints_the_committed_service():
    done = invoke(QUICKSTART, "--serve", "80", "--site", f"{KUBERNETES}/rayservice_site.yaml")
    assert done.exit_code == 0, done.output
    lines = Path(KUBERNETES, "rayservice.yaml").read_text().splitlines(keepends=True)
    assert done.stdout == "".join(line for line in lines if not line.startswith("#"))


def test_a_cluster_says_on_top_which_label_its_runs_set():
    done = invoke(GPU, "--cluster", "--site", f"{KUBERNETES}/gpu_site.yaml")
    assert done.stdout.startswith("# Runs here set elastic.spot=treadwheel/pods=rollout: "), done.output


def test_a_service_of_no_step_is_refused():
    refused = invoke(QUICKSTART, "run_dir=s3://bucket/run", "--serve", "0")
    assert refused.exit_code == 2 and "--serve" in refused.output


def test_a_cluster_and_a_service_at_once_are_refused():
    refused = invoke(QUICKSTART, "--serve", "80", "--cluster")
    assert refused.exit_code == 2 and "--cluster and --serve make two resources" in refused.output


def test_a_service_that_was_edited_is_checked(tmp_path):
    edited = tmp_path / "service.yaml"
    whole = Path(KUBERNETES, "rayservice.yaml").read_text()
    kept = invoke(QUICKSTART, "--check", f"{KUBERNETES}/rayservice.yaml")
    assert kept.exit_code == 0 and "RayService quickstart keeps the rules" in kept.output
    edited.write_text(whole.replace("applications:", "application:"))
    refused = invoke(QUICKSTART, "--check", str(edited))
    assert refused.exit_code == 2 and "no list of applications" in refused.output


def test_the_command_refuses_a_site_and_a_manifest_with_one_clear_error_and_code_2(tmp_path):
    site, edited = tmp_path / "site.yaml", tmp_path / "job.yaml"
    site.write_text("image: ray:latest")
    refused = invoke(QUICKSTART, "--site", str(site))
    assert refused.exit_code == 2 and "may be another image tomorrow" in refused.output
    edited.write_text(Path(KUBERNETES, "quickstart.yaml").read_text().replace("HTTPMode", "http"))
    refused = invoke(QUICKSTART, "--check", str(edited))
    assert refused.exit_code == 2 and "submissionMode='http'" in refused.output


def test_a_manifest_whose_pods_have_no_room_for_the_run_is_refused(tmp_path):
    edited = tmp_path / "job.yaml"
    whole = Path(KUBERNETES, "gpu.yaml").read_text()
    assert invoke("deploy/runs/gpu.yaml", "--check", f"{KUBERNETES}/gpu.yaml").exit_code == 0
    edited.write_text(whole.replace("maxReplicas: 16", "maxReplicas: 0"))
    refused = invoke("deploy/runs/gpu.yaml", "--check", str(edited))
    assert refused.exit_code == 2 and "RayJob gpu with all its pods has no room for the run" in refused.output
    edited.write_text(Path(KUBERNETES, "quickstart.yaml").read_text().replace("num-cpus: '3'", "num-cpus: '1'"))
    refused = invoke(QUICKSTART, "rollout.num_workers=2", "--check", str(edited))
    assert refused.exit_code == 2 and "fewer than the run asks for" in refused.output


@pytest.mark.parametrize("amount", ["two", "NaN", "-2"])
def test_an_amount_that_is_none_is_told(tmp_path, amount):
    edited = tmp_path / "job.yaml"
    edited.write_text(Path(KUBERNETES, "quickstart.yaml").read_text().replace("cpu: '2'", f"cpu: '{amount}'"))
    refused = invoke(QUICKSTART, "--check", str(edited))
    told = f"resources.limits.cpu='{amount}' is not an amount; write one such as 4, 500m or 8Gi"
    assert refused.exit_code == 2 and told in refused.output


def test_gpus_that_are_not_given_to_ray_are_no_room(tmp_path):
    edited = tmp_path / "job.yaml"
    whole = Path(KUBERNETES, "gpu.yaml").read_text()
    edited.write_text(whole.replace("rayStartParams: {}", "rayStartParams: {num-gpus: '0'}"))
    refused = invoke("deploy/runs/gpu.yaml", "--check", str(edited))
    assert refused.exit_code == 2 and "RayJob gpu with all its pods has no room for the run" in refused.output
