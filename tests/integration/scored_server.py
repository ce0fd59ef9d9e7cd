"""A server that rewards groups, to be started and to end in mid-run: a process of its own, which counts what it answered."""

import http.server
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

from tests.integration.commands import ROOT
from tests.integration.waiting import until


class ScoredServer:
    """On one port, whoever serves there. It writes each group that it answers into `log`."""

    def __init__(self, log: Path, *, port: int) -> None:
        self._log = log
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._process: subprocess.Popen[bytes]

    def up(self, *, num_answers: int | None = None) -> None:
        """Returns when it serves. It is killed with the request after `num_answers`."""
        command = [sys.executable, "-m", __name__, self._port, self._log, num_answers or 2**31]
        self._process = subprocess.Popen([*map(str, command)], cwd=ROOT)
        until(lambda: self._answers() or self._process.poll() is not None)
        assert self._process.poll() is None, "the server did not come up"

    def _answers(self) -> bool:
        try:
            urlopen(self.url, timeout=120).close()
        except OSError:
            return False
        return True

    def down(self) -> None:
        self._process.kill()
        self._process.wait()

    def answered(self) -> list[str]:
        return sorted(self._log.read_text().splitlines())


def serve(port: str, log: str, num_answers: str) -> None:
    left = int(num_answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(b"up")

        def do_POST(self) -> None:
            nonlocal left
            said = self.rfile.read(int(self.headers["Content-Length"])).decode()
            completions: list[str] = json.loads(said)
            if any(completions):  # `check` asks about an empty completion, before a run starts
                if left == 0:
                    os._exit(1)
                left -= 1
                with open(log, "a") as file:
                    file.write(f"{said}\n")
            rewards = [sum(map(str.isdigit, each)) / max(len(each), 1) for each in completions]
            self._say(json.dumps(rewards).encode())

        def _say(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    serve(*sys.argv[1:])
