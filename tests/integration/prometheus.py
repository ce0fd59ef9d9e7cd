"""Debian's Prometheus and Alertmanager on a Ray head, with the files that are shipped."""

import contextlib
import http.server
import json
import math
import os
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.monitoring.files import FOLDER
from tests.integration.ray_head import RayHead
from tests.integration.waiting import until
from tests.ports import free_ports

SCRAPE_S = 5
"""Twice as often as the shipped file says: the run is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An answer now. Raises for an expression that Prometheus does not take."""
        return self.ask("query", query=expression)["result"]

    def value(self, expression: str) -> float | None:
        """Of the only sample; None without one."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def times(self, name: str, *, run: str) -> list[float]:
        """When it was scraped, of all drivers of the runs that match."""
        return _times(self.query(f'{name}{{run=~"{run}"}}[1h]'))

    def num_missed(self, name: str, *, run: str) -> int:
        """Since it was first there: most scrapes of its target in a row that went well and did not bring it."""
        went_well = self.query("up[1h]")  # before the series: what is scraped in between is no miss
        found = self.query(f'{name}{{run=~"{run}"}}[1h]')
        (instance,) = {series["metric"]["instance"] for series in found}
        times = _times(found)
        targets = [series for series in went_well if series["metric"]["instance"] == instance]
        scraped = [at for series in targets for at, value in series["values"] if value == "1"]
        ends = [*times[1:], math.inf]
        return max(sum(first < at < last for at in scraped) for first, last in zip(times, ends, strict=True))

    def ask(self, what: str, **parameters: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}", timeout=120
        ) as answer:
            return json.load(answer)["data"]


@contextlib.contextmanager
def prometheus(head: RayHead, folder: Path, *, alertmanager: str) -> Iterator[Prometheus]:
    """Scrapes all that Ray tells of with the head's token. Alerts fire without their delays."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    found = config["scrape_configs"][0]["http_sd_configs"][0]
    found |= {"url": found["url"].replace("http://127.0.0.1:8265", head.dashboard), "refresh_interval": f"{SCRAPE_S}s"}
    config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["for"] = "0s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
    (folder / "ray-token").write_text(head.env["RAY_AUTH_TOKEN"])
    address = f"127.0.0.1:{free_ports(1)[0]}"
    options = (f"--web.listen-address={address}", f"--storage.tsdb.path={folder}/data", "--config.file=prometheus.yml")
    with _running("prometheus", *options, folder=folder, ready=f"http://{address}/-/ready"):
        yield Prometheus(url=f"http://{address}")


@contextlib.contextmanager
def alertmanager(folder: Path, *, webhook: str) -> Iterator[str]:
    """Its host:port. It sends each alert to the webhook at once."""
    config = {
        "route": {"receiver": "hook", "group_by": ["alertname", "run"], "group_wait": "0s"},
        "receivers": [{"name": "hook", "webhook_configs": [{"url": webhook}]}],
    }
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    options = (f"--web.listen-address={address}", f"--storage.path={folder}/alerts", "--cluster.listen-address=")
    command = ("prometheus-alertmanager", "--config.file=alertmanager.yml", *options)
    with _running(*command, folder=folder, ready=f"http://{address}/-/ready"):
        yield address


class Webhook:
    """Keeps what Alertmanager sends."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.url = ""

    def alerts(self, name: str) -> list[dict[str, Any]]:
        return [each for sent in self.received for each in sent["alerts"] if each["labels"]["alertname"] == name]


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    hook = Webhook()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hook.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hook.url = f"http://127.0.0.1:{server.server_port}/"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hook
        server.shutdown()


def eventually(condition: Callable[[], bool], *, within_s: float, what: Callable[[], object]) -> None:
    """Asks every half second. `what` says what there is instead."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what()}"
        time.sleep(0.5)


@contextlib.contextmanager
def _running(*command: str, folder: Path, ready: str) -> Iterator[None]:
    with (folder / f"{command[0]}.log").open("w+") as log:
        # An address of a cluster or a proxy that the shell names is not ours.
        env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            until(lambda: _answers(ready) or process.poll() is not None)
            assert process.poll() is None, Path(log.name).read_text()
            yield
        finally:
            process.terminate()
            process.wait(timeout=300)


def _times(found: list[dict[str, Any]]) -> list[float]:
    return sorted(float(at) for series in found for at, _ in series["values"])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
