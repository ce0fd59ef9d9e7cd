"""A frozen language model behind vLLM's own server with OpenAI's API. The server ends with this process, even if that is killed."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import aiohttp

from cluster.contracts.errors import FailureKind, WorkerError
from cluster.contracts.reward_config import JudgeServerConfig
from cluster.contracts.types import Progress

_POLL_S = 0.2
_TAIL_BYTES = 2000
"""How much of the server's log the error shows when the server ends."""


class JudgeServer:
    """One server. It accepts requests when `warm_up` returns."""

    def __init__(
        self, config: JudgeServerConfig, *, model: str, name: str, address: str, token: str, num_threads: int
    ) -> None:
        """Starts the server at `address`, host:port. Judges request it by the name `model`."""
        self._name = name
        self._address = address
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the server writes
        self._since = time.time()
        self._is_up = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "actors.judge_server_main"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=_environment(num_threads=num_threads, has_gpu=config.gpus > 0),
            start_new_session=True,
        )
        brief = {"token": token, "arguments": _arguments(config, model=model, address=address)}
        assert self._process.stdin is not None
        # The pipe stays open as long as this process lives. When it closes, the server ends.
        self._process.stdin.write(json.dumps(brief).encode() + b"\n")
        self._process.stdin.flush()

    async def warm_up(self) -> None:
        """Waits for the server without a deadline of its own. Raises WorkerError when it ends before it is up."""
        async with aiohttp.ClientSession() as session:
            while not self._is_up:
                self._refuse_ended()
                try:
                    async with session.get(f"http://{self._address}/health") as response:
                        self._is_up = response.status == 200
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(_POLL_S)

    def progress(self) -> Progress:
        """Raises WorkerError when the server has ended: this actor counts as dead."""
        self._refuse_ended()
        return Progress(
            actor=self._name,
            phase="serving" if self._is_up else "starting",
            policy_version=0,
            since=self._since,
            last_progress=time.time(),
            pid=os.getpid(),
            detail=self._address,
        )

    def _refuse_ended(self) -> None:
        if self._process.poll() is None:
            return
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = self._log.read().decode(errors="replace").strip()
        raise WorkerError(f"the server of {self._name} ended; its last lines: {tail}", kind=FailureKind.DEATH)


def _environment(*, num_threads: int, has_gpu: bool) -> dict[str, str]:
    """This process's environment without Ray's variables, plus vLLM's settings. Values that the user has set are kept."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": str(num_threads),
        # FlashInfer's sampler is compiled when the server starts. Without nvcc on the machine, the server ends (vllm#49497).
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # As for rollout workers: eager vLLM would compile one function of its sampler, for no gain.
        **({} if has_gpu else {"TORCHDYNAMO_DISABLE": "1"}),
    }
    return defaults | kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _arguments(config: JudgeServerConfig, *, model: str, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    tensor_parallel = max(1, int(config.gpus))
    values: dict[str, Any] = {
        "model": config.path,
        "revision": config.revision,
        "served-model-name": model,
        "host": host,
        "port": port,
        "dtype": config.dtype,
        "max-model-len": config.max_model_len,
        "max-num-seqs": config.max_concurrent_sequences,
        "tensor-parallel-size": tensor_parallel,
        "distributed-executor-backend": "uni" if tensor_parallel == 1 else "mp",
        # The sampling settings in the model's folder must not change a judge's request.
        "generation-config": "vllm",
        # A small model could write white space between fields until its answer is truncated.
        "structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
        "uvicorn-log-level": "warning",
        "middleware": "actors.judge_server_main.KeyedPathsOnly",
        **(
            {"gpu-memory-utilization": config.gpu_memory_utilization}
            if config.gpus
            else {"kv-cache-memory-bytes": config.kv_cache_bytes}
        ),
    }
    flags = ["--disable-log-stats", "--disable-uvicorn-access-log"]
    # On a CPU a seeded request whose prompt is read in chunks ends the engine (actors/rollout/vllm_engine.py).
    flags += [] if config.gpus else ["--enforce-eager", "--no-enable-chunked-prefill"]
    return [*(f"--{name}={value}" for name, value in values.items() if value is not None), *flags]
