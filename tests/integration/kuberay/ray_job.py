"""A RayJob's submission, as KubeRay's operator makes it in HTTPMode: requests to the head's dashboard, with the token in its header."""

from typing import Any

from tests.integration.kuberay.dashboard import ask
from tests.integration.ray_head import RayHead

_OVER = ("STOPPED", "SUCCEEDED", "FAILED")


class RayJob:
    def __init__(self, head: RayHead, *, name: str, entrypoint: str, metadata: dict[str, str]) -> None:
        self._head = head
        self._path = f"/api/jobs/{name}"
        self._ask("POST", "/api/jobs/", {"submission_id": name, "entrypoint": entrypoint, "metadata": metadata})

    def info(self) -> dict[str, Any]:
        return self._ask("GET", self._path)

    def status(self) -> str:
        return self.info()["status"]

    def is_over(self) -> bool:
        return self.status() in _OVER

    @property
    def output(self) -> str:
        return self._ask("GET", f"{self._path}/logs")["logs"]

    @property
    def last_words(self) -> str:
        return self.output

    def stop(self) -> None:
        self._ask("POST", f"{self._path}/stop")

    def assert_runs(self) -> None:
        assert not self.is_over(), f"{self.info()}\n{self.output}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return ask(self._head, method, path, body)
