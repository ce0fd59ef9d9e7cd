"""Runs and manifests for tests."""

import copy
import functools

from deploy.config.loading import load
from deploy.manifests import ray_job, text
from deploy.manifests.ray_job import Run
from deploy.manifests.site import Site

KUBERNETES = "deploy/kubernetes"
KUBERAY = ("quickstart.yaml", "gpu.yaml", "raycluster.yaml", "rayservice.yaml")
"""Committed files with a resource of KubeRay."""
QUICKSTART, GPU = "deploy/runs/quickstart.yaml", "deploy/runs/gpu.yaml"


def run(path=QUICKSTART, *overrides, needs=("reference_logprobs",), name="quickstart"):
    """Without the objective, which imports torch."""
    config = load(path, overrides)
    return Run(name=name, text="run", overrides=overrides, config=config, needs=frozenset(needs))


def job(site=None, **settings):
    return ray_job.job(run(**settings), site or Site())[1]


def cluster_of(resource):
    spec = resource["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec


def groups_of(resource):
    return {group["groupName"]: group for group in cluster_of(resource)["workerGroupSpecs"]}


def templates_of(resource):
    spec = cluster_of(resource)
    return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]


@functools.cache
def _committed(name):
    return text.read(f"{KUBERNETES}/{name}")


def committed(name):
    """The documents of a committed file, to change at will."""
    return copy.deepcopy(_committed(name))


def resource(name):
    """KubeRay's in a committed file."""
    return next(each for each in committed(name) if each["kind"].startswith("Ray"))
