"""A RayService: the model of a checkpoint behind an OpenAI-compatible endpoint, which Ray Serve's own application for vLLM serves."""

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
"""Of a replica beside its engine, and of the endpoint that deals requests to replicas."""


def service(run: Run, site: Site, *, step: int) -> list[Manifest]:
    """Of the checkpoint of `step`. Raises ConfigError for a run directory that its pods cannot reach."""
    name = ray_job.named(site, run.name, most=ray_job.LARGEST_NAME)
    run_dir = ray_job.run_directory(run.config.run_dir)
    if "://" not in run_dir and site.run_claim is None:
        raise ConfigError(
            f"run_dir={run.config.run_dir!r} is on no volume that the pods of a service mount; name one in the site file (run_claim), or "
            "serve a run whose run_dir is in an object store"
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
    """What Ray Serve runs: `name` is the model's in requests, `model` its folder or URL."""
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
    """vLLM's own settings, where the run's say something that holds for serving too."""
    model, rollout = config.model, config.rollout
    shared = {
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "max_num_seqs": rollout.max_concurrent_sequences,
    }
    if rollout.gpus_per_worker:
        return shared | {"gpu_memory_utilization": rollout.gpu_memory_utilization}
    # On a CPU compiling gains little and takes a compiler, and a prompt that is read in parts ends an engine whose requests have seeds.
    cache_bytes = rollout.cpu_cache_bytes_per_process
    own = {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": cache_bytes}
    return shared | own


def _bundle(config: RunConfig) -> Manifest:
    """Of each of a replica's ranks. A replica has its GPUs alone."""
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
        # What is downloaded is a part of what the learner uploads.
        upload_gib=run.upload_gib,
    )
