"""Requests to a head's dashboard as KubeRay's operator makes them: JSON, with the token in a header."""

import json
import urllib.request
from typing import Any

from tests.integration.ray_head import RayHead


def ask(head: RayHead, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer; None for an empty one."""
    request = urllib.request.Request(
        head.dashboard + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Content-Type": "application/json",
            "X-Ray-Authorization": f"Bearer {head.env['RAY_AUTH_TOKEN']}",
        },
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read() or "null")
