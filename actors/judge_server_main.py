"""Runs vLLM's server for as long as both it and this process's parent live: then all of this session's processes end.

The parent holds the other end of standard input. It closes when the parent is gone, even one that was killed. In, one line: the token
that requests must bear, and the server's arguments. vLLM takes the token from its environment, which only its own user can read.
"""

import json
import os
import signal
import subprocess
import sys


def main() -> None:
    brief = json.loads(sys.stdin.readline())
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *brief["arguments"]],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"VLLM_API_KEY": brief["token"]},
    )
    # Not a thread: Ray ends an actor's own children with it, and would end this process before it saw its parent's end.
    if os.fork() == 0:
        sys.stdin.read()
    else:
        server.wait()
    # Its engine may outlive it.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
