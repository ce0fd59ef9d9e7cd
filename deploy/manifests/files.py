"""The generated files of deploy/kubernetes/: made from run files, site files, alerts and the dashboard."""

from pathlib import Path

from deploy.manifests import monitoring, ray_cluster, ray_job, ray_service, site
from deploy.manifests.text import dump

FOLDER = Path(__file__).parents[1] / "kubernetes"
_RUNS = "deploy/runs"
_SITES = "deploy/kubernetes"


def files() -> dict[str, str]:
    """Content by name. The working directory must be the checkout."""
    return {
        "quickstart.yaml": _job(
            "quickstart", ["elastic.max_workers=2"], "The quickstart on any cluster with KubeRay 1.7 or later."
        ),
        "gpu.yaml": _job("gpu", [], "A run on GPUs: the learner on demand, rollout workers on spot nodes."),
        "raycluster.yaml": _cluster(),
        "rayservice.yaml": _service(),
        "monitoring.yaml": dump(
            [*monitoring.monitors(), monitoring.rules()],
            comment="For Prometheus's operator. Give all of them the labels that yours selects by (often release: prometheus).\n"
            "What each alert means and what to do: docs/monitoring.md.",
        ),
        "dashboard.yaml": dump(
            [monitoring.dashboard()],
            comment="deploy/grafana/treadwheel.json for the sidecar of kube-prometheus-stack's Grafana.",
        ),
    }


def _job(name: str, overrides: list[str], says: str) -> str:
    run, site_file = f"{_RUNS}/{name}.yaml", f"{_SITES}/{name}_site.yaml"
    command = " ".join(["treadwheel kubernetes", run, *overrides, "--site", site_file])
    manifests = ray_job.job(ray_job.read(run, overrides), site.load(site_file))
    return dump(manifests, comment=f"{says} Made by:\n  {command}")


def _cluster() -> str:
    run, site_file = f"{_RUNS}/gpu.yaml", f"{_SITES}/gpu_site.yaml"
    says = f"A cluster that lasts, for `ray job submit` of runs as large as gpu.yaml's.\n{ray_cluster.LABEL_IN_WORDS}"
    made_by = f"Made by:\n  treadwheel kubernetes {run} --cluster --site {site_file}"
    return dump(ray_job.cluster(ray_job.read(run, []), site.load(site_file)), comment=f"{says}\n{made_by}")


def _service() -> str:
    run, site_file, step = f"{_RUNS}/quickstart.yaml", f"{_SITES}/rayservice_site.yaml", 80
    manifests = ray_service.service(ray_job.read(run, []), site.load(site_file), step=step)
    says = "What the quickstart learned, served with OpenAI's interface to pods of the namespace. Made by:"
    return dump(manifests, comment=f"{says}\n  treadwheel kubernetes {run} --serve {step} --site {site_file}")
