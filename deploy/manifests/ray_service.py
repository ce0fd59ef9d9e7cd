"""A RayService: serves a checkpoint's model at an OpenAI-compatible endpoint, with Ray Serve's application for vLLM."""

import math
import posixpath

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.record.run_directory import CHECKPOINTS, checkpoint_name
from deploy.manifests import ray_cluster, ray_job, text
from deploy.manifests.pods import Manifest
from deploy.manifests.ray_job import Run
from deploy.manifests.site import Site
from deploy.manifests.sizes import Pods

APPLICATION = "ray.serve.llm:build_openai_app"
_DOWNLOAD = "deploy.stored_checkpoint:StoredCheckpoint"
_ACTOR_CPUS = 1
"""CPUs of a replica without its engine, and of the endpoint that distributes requests."""


def service(run: Run, site: Site, *, step: int) -> list[Manifest]:
    """A service of the checkpoint of `step`. Raises ConfigError for a run directory that its pods cannot reach."""
    name = ray_job.named(site, run.name, most=ray_job.LARGEST_NAME)
    run_dir = ray_job.run_directory(run.config.run_dir)
    if "://" not in run_dir and site.run_claim is None:
        raise ConfigError(
            f"run_dir={run.config.run_dir!r} is on no volume that a service's pods mount; name one in the site file (run_claim), or serve "
            "a run whose run_dir is in an object store"
        )
    checkpoint = posixpath.join(run_dir, CHECKPOINTS, checkpoint_name(step))
    config = serve_config(run.config, name=name, model=f"{checkpoint}/model")
    pods = _pods(run)
    return [
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayService",
            "metadata": ray_cluster.metadata(site, name),
            "spec": {
                "serveConfigV2": text.dump([config]),
                "rayClusterConfig": ray_cluster.for_service(
                    site, pods, image=ray_job.image(site, needs_gpus=pods.gpus > 0)
                ),
            },
        }
    ]


def serve_config(config: RunConfig, *, name: str, model: str) -> Manifest:
    """Configuration of Ray Serve. `name`: the model's name in requests. `model`: its folder or URL."""
    replicas = {
        "min_replicas": 1,
        "max_replicas": config.rollout.num_workers,
        "target_ongoing_requests": config.rollout.max_concurrent_sequences,
    }
    served: Manifest = {
        "model_loading_config": {"model_id": name} | ({} if "://" in model else {"model_source": model}),
        "engine_kwargs": _engine(config),
        "placement_group_config": {"bundle_per_worker": _bundle(config), "strategy": "STRICT_PACK"},
        "deployment_config": {"autoscaling_config": replicas},
    }
    if "://" in model:
        served["callback_config"] = {"callback_class": _DOWNLOAD, "callback_kwargs": {"url": model}}
    return {
        "applications": [
            {
                "name": name,
                "route_prefix": "/",
                "import_path": APPLICATION,
                "args": {
                    "llm_configs": [served],
                    "ingress_deployment_config": {
                        "autoscaling_config": dict(replicas),
                        "ray_actor_options": {"num_cpus": _ACTOR_CPUS},
                    },
                },
            }
        ]
    }


def _engine(config: RunConfig) -> Manifest:
    """vLLM's settings, from those of the run that also apply to serving."""
    model, rollout = config.model, config.rollout
    shared = {
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "max_num_seqs": rollout.max_concurrent_sequences,
    }
    if rollout.gpus_per_worker:
        return shared | {"gpu_memory_utilization": rollout.gpu_memory_utilization}
    # On a CPU, compiling gains little and needs a compiler, and chunked prefill ends an engine whose requests have seeds.
    cache_bytes = rollout.cpu_cache_bytes_per_process
    own = {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": cache_bytes}
    return shared | own


def _bundle(config: RunConfig) -> Manifest:
    """Resources of each of a replica's ranks. A replica does not share its GPUs."""
    rollout = config.rollout
    cpus, gpus = rollout.cpus_per_worker / rollout.tensor_parallel_size, math.ceil(rollout.gpus_per_worker)
    return {"CPU": cpus} | ({"GPU": gpus // rollout.tensor_parallel_size} if gpus else {})


def _pods(run: Run) -> Pods:
    """One replica a pod, and one endpoint."""
    rollout = run.config.rollout
    return Pods(
        cpus=math.ceil(rollout.cpus_per_worker) + 2 * _ACTOR_CPUS,
        gpus=math.ceil(rollout.gpus_per_worker),
        most=rollout.num_workers,
        # The download is a part of the learner's upload.
        upload_gib=run.upload_gib,
    )
