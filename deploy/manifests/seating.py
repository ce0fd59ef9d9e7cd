"""Checks a manifest edited by hand: it keeps the rules, and all its pods together have room for the run."""

from importlib.metadata import version

from cluster.contracts.config import ElasticConfig
from cluster.contracts.errors import ConfigError
from cluster.supervision.placement import ClusterResources, Node, plan
from deploy.manifests import checks, text
from deploy.manifests.ray_cluster import COMES_AND_GOES
from deploy.manifests.ray_job import Run
from deploy.manifests.reading import Cluster, Container, Head, Service, amount


def check(path: str, run: Run) -> str:
    """A sentence with the result. Raises ConfigError for a manifest that breaks a rule or has no room."""
    found = checks.check(text.read(path), source=path, installed_ray=version("ray"))
    results: list[str] = []
    for resource in found:
        if isinstance(resource.spec, Service):
            results.append(f"RayService {resource.name} keeps the rules")
            continue
        # Learner and services must have room without the pods of rollout workers.
        elastic = run.config.elastic.model_copy(update={"spot": COMES_AND_GOES})
        config = run.config.model_copy(update={"elastic": elastic})
        available = ClusterResources(nodes=_nodes(resource.cluster, elastic, source=path))
        try:
            placed = plan(config, available, needs=run.needs)
        except ConfigError as error:
            raise ConfigError(
                f"{path}: {resource.kind} {resource.name} with all its pods has no room for the run: {error}"
            ) from error
        if placed.is_time_shared:
            raise ConfigError(
                f"{path}: {resource.kind} {resource.name} with all its pods has {available.cpus:g} CPUs, fewer than "
                "the run asks for; raise maxReplicas or the containers' CPUs, or lower the run's"
            )
        results.append(
            f"{resource.kind} {resource.name} keeps the rules and has room for the run's {len(placed.bundles)} actors"
        )
    return "; ".join(results)


def _nodes(cluster: Cluster, elastic: ElasticConfig, *, source: str) -> tuple[Node, ...]:
    """The largest number of nodes, with their resources as Ray counts them."""
    head = _node(cluster.head_group_spec, elastic, source=source)
    workers = [
        node
        for group in cluster.worker_group_specs
        for node in [_node(group, elastic, source=source)] * (group.max_replicas or 0)
    ]
    return tuple(node for node in (head, *workers) if node.cpus or node.gpus)


def _node(part: Head, elastic: ElasticConfig, *, source: str) -> Node:
    container, params = part.template.spec.containers[0], part.ray_start_params
    gpu = next((name for name in container.resources.limits if name.endswith("gpu")), "gpu")
    cpus = float(params["num-cpus"]) if "num-cpus" in params else _amount(container, "cpu", source=source)
    gpus = float(params["num-gpus"]) if "num-gpus" in params else _amount(container, gpu, source=source)
    return Node(cpus=cpus, gpus=gpus, is_spot=elastic.is_spot(part.labels))


def _amount(container: Container, name: str, *, source: str) -> float:
    written = container.resources.limits.get(name, 0)
    try:
        return amount(written)
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"{source}: resources.limits.{name}={written!r} is not an amount; write one such as 4, 500m or 8Gi"
        ) from error
