"""The corner of Kubernetes' API that Ray's KubeRay autoscaler talks to: one RayCluster, and its pods."""

import contextlib
import copy
import json
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trustme

NAMESPACE, CLUSTER, HEAD_POD = "research", "treadwheel", "treadwheel-head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """What the autoscaler asked the RayCluster to become."""

    time: float
    operations: tuple[dict[str, Any], ...]

    def of(self, field: str) -> dict[int, Any]:
        """Values that it gave to `field` of worker groups, by the group's number."""
        paths = [each["path"].strip("/").split("/") for each in self.operations]
        return {
            int(path[2]): each["value"]
            for path, each in zip(paths, self.operations, strict=True)
            if path[:2] == ["spec", "workerGroupSpecs"] and path[3:] == [field]
        }


@dataclass(slots=True)
class Objects:
    """What the API server holds. Take `lock` to read or change more than one thing."""

    ray_cluster: dict[str, Any]
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, as `kubectl get pod -o json` shows them."""
    patches: list[Patch] = field(default_factory=list)
    is_read: bool = False
    """By the autoscaler, which is up then."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.ray_cluster["spec"]["workerGroupSpecs"]

    def patch(self, operations: list[dict[str, Any]]) -> None:
        """JSON Patch, as far as the autoscaler uses it: a path that is not there is made."""
        with self.lock:
            self.patches.append(Patch(time=time.time(), operations=tuple(operations)))
            for operation in operations:
                assert operation["op"] == "replace", operation
                *path, last = operation["path"].strip("/").split("/")
                place: Any = self.ray_cluster
                for name in path:
                    place = place[int(name) if isinstance(place, list) else name]
                place[last] = operation["value"]


def ray_cluster(spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": CLUSTER, "namespace": NAMESPACE, "resourceVersion": "1"}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": copy.deepcopy(spec)}


@contextlib.contextmanager
def api_server(objects: Objects, folder: Path) -> Iterator[dict[str, str]]:
    """Serves `objects`; the environment in which the autoscaler finds it. Both sides show certificates, which are made in `folder`."""
    authority = trustme.CA()
    files = {name: folder / f"{name}.pem" for name in ("ca", "client")}
    authority.cert_pem.write_to_path(files["ca"])
    authority.issue_cert("autoscaler").private_key_and_cert_chain_pem.write_to_path(files["client"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(context)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    class Handler(_Handler):
        holds = objects

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT_HTTPS": str(server.server_port),
            "RAY_KUBERAY_CA_CERT_PATH": str(files["ca"]),
            "RAY_KUBERAY_CLIENT_CERT_PATH": str(files["client"]),
            "RAY_KUBERAY_CLIENT_KEY_PATH": str(files["client"]),
            "RAY_HEAD_POD_NAME": HEAD_POD,
        }
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


class _Handler(BaseHTTPRequestHandler):
    holds: Objects

    def do_GET(self) -> None:
        path, holds = self.path.partition("?")[0], self.holds
        with holds.lock:
            if path == _CLUSTER_PATH:
                holds.is_read = True
                self._answer(holds.ray_cluster)
            elif path == _PODS_PATH:
                self._answer({"metadata": {"resourceVersion": "1"}, "items": [*holds.pods.values()]})
            elif pod := holds.pods.get(path.removeprefix(f"{_PODS_PATH}/")):
                self._answer(pod)
            else:
                self.send_error(404)

    def do_PATCH(self) -> None:
        if self.path != _CLUSTER_PATH or self.headers["Content-Type"] != "application/json-patch+json":
            self.send_error(404)
            return
        with self.holds.lock:
            self.holds.patch(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer(self.holds.ray_cluster)

    def _answer(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


_CLUSTER_PATH = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters/{CLUSTER}"
_PODS_PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"
