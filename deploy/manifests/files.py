"""The committed files of deploy/kubernetes/, made from the run files and site files beside them."""

from pathlib import Path

from deploy.manifests import kueue, monitoring, network, ray_cluster, ray_job, ray_service, site, storage, viewer
from deploy.manifests.text import dump

FOLDER = Path(__file__).parents[1] / "kubernetes"
_RUNS = "deploy/runs"
_SITES = "deploy/kubernetes"


def files() -> dict[str, str]:
    """Content by name. The working directory is the checkout's."""
    return {
        "quickstart.yaml": _job(
            "quickstart", ["elastic.max_workers=2"], "The quickstart on any cluster with KubeRay 1.7 or later."
        ),
        "gpu.yaml": _job("gpu", [], "A run on GPUs: the learner on demand, rollout workers on spot nodes."),
        "raycluster.yaml": _cluster("gpu"),
        "rayservice.yaml": _service("quickstart", step=80),
        "storage.yaml": dump(
            [storage.claim("treadwheel", size="200Gi")],
            comment="The volume of gpu.yaml. Name a storageClassName that many nodes mount at once, and that carries flock to them,\n"
            "as NFSv4 does: by it a run has one driver.",
        ),
        "network.yaml": dump(
            network.policies(),
            comment="What may talk to a run's pods, and they to. Some network plug-ins see the API server's own address and port behind\n"
            "its service: if the head's autoscaler cannot reach it, name them in treadwheel-outside.",
        ),
        "monitoring.yaml": dump(
            [*monitoring.monitors(), monitoring.rules()],
            comment="For Prometheus's operator. Give all of them the labels that yours selects by (often release: prometheus).\n"
            "What each alert means and what to do: docs/monitoring.md.",
        ),
        "dashboard.yaml": dump(
            [monitoring.dashboard()],
            comment="deploy/grafana/treadwheel.json for the sidecar of kube-prometheus-stack's Grafana.",
        ),
        "viewer.yaml": dump(
            viewer.viewer(
                image=ray_job.image(site.load(f"{_SITES}/gpu_site.yaml"), needs_gpus=True),
                claim="treadwheel",
                hosts=["localhost", viewer.NAME],
            ),
            comment="The runs on the volume of storage.yaml, in a browser; an ingress needs its name as --trusted-host. First the token:\n"
            f"  kubectl create secret generic {viewer.NAME} --from-literal=token=$(openssl rand -hex 24)\n"
            f"then kubectl port-forward service/{viewer.NAME} 8000:80, and http://localhost:8000/?token=... once: docs/viewer.md.",
        ),
        "kueue.yaml": dump(
            kueue.queues(
                quotas={
                    "on-demand": {"cpu": "128", "memory": "1024Gi", "ephemeral-storage": "1Ti", "nvidia.com/gpu": "8"},
                    "spot": {"cpu": "256", "memory": "2048Gi", "ephemeral-storage": "2Ti", "nvidia.com/gpu": "16"},
                },
                queue="treadwheel",
            ),
            comment="Quotas for jobs whose site file says `queue: treadwheel`. Kueue 0.15.2 or later, with its feature gate\n"
            "ElasticJobsViaWorkloadSlices: a RayJob that scales is admitted slice by slice.",
        ),
    }


def _job(name: str, overrides: list[str], says: str) -> str:
    run, site_file = f"{_RUNS}/{name}.yaml", f"{_SITES}/{name}_site.yaml"
    command = " ".join(["treadwheel kubernetes", run, *overrides, "--site", site_file])
    manifests = ray_job.job(ray_job.read(run, overrides), site.load(site_file))
    return dump(manifests, comment=f"{says} Made by:\n  {command}")


def _cluster(name: str) -> str:
    run, site_file = f"{_RUNS}/{name}.yaml", f"{_SITES}/{name}_site.yaml"
    says = f"A cluster that lasts, for `ray job submit` of runs as large as gpu.yaml's.\n{ray_cluster.LABEL_IN_WORDS}"
    made_by = f"Made by:\n  treadwheel kubernetes {run} --cluster --site {site_file}"
    return dump(ray_job.cluster(ray_job.read(run, []), site.load(site_file)), comment=f"{says}\n{made_by}")


def _service(name: str, *, step: int) -> str:
    run, site_file = f"{_RUNS}/{name}.yaml", f"{_SITES}/rayservice_site.yaml"
    manifests = ray_service.service(ray_job.read(run, []), site.load(site_file), step=step)
    says = "What the quickstart learned, served with OpenAI's interface to pods of the namespace. Made by:"
    return dump(manifests, comment=f"{says}\n  treadwheel kubernetes {run} --serve {step} --site {site_file}")
