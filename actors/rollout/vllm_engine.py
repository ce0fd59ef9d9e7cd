"""vLLM in this process, as an `Engine`: tokens in, tokens out, one step at a time, new weights between two steps.

The same thread must build and call the engine: OpenMP settings belong to the thread that makes them.
"""

import contextlib
import importlib
import logging
import os
import tempfile
import warnings
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from actors.chat.formatter import ChatFormatter
from actors.rollout.sampling import structure, vllm_arguments, works_on_text
from actors.rollout.stop_seam import StopSeam
from cluster.contracts.config import ModelConfig, RolloutConfig, RunConfig, SamplingConfig
from cluster.contracts.errors import ConfigError, WeightsError, WorkerError, headline
from cluster.contracts.importing import hidden, importing_for_good
from cluster.contracts.protocols import EngineOutput, EngineRequest
from cluster.contracts.types import EngineUse, FinishReason
from cluster.weights.adapter import write_adapter
from cluster.weights.manifest import Adapter
from cluster.weights.process_group import Incoming

_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 512)
_ADAPTER = 1
"""vLLM's number for the serving adapter."""
_REFUSED_LOADS = (RuntimeError, ValueError, KeyError, AssertionError, AttributeError)
"""vLLM's errors when it refuses weights or an adapter."""
_OTHER_TARGETS = "name the others in learner.lora.target_modules, or use learner.lora.publish=merged"
_EXTENSION = "cluster.weights.vllm_receiver.ReceiverRegistration"
_CPU_EXTENSION = "actors.rollout.vllm_cpu_worker.CpuExtension"
_CPU_WORKER = "actors.rollout.vllm_cpu_worker.ExpertRecordingWorker"
_GONE_S = 2.0
"""How long the system may take to report that a process has ended."""
_TOKENS_PER_OUTPUT = 2**30
"""vLLM returns a request's first token, then all others when it ends: an output costs as much time as a fifth of a small model's token."""
_FIRST = -1
"""Priority of the canary. All else has 0."""
_CPU_PREFILL_TOKENS = 8192
"""Most prompt tokens of one engine step, unless the context is longer."""
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


class VllmEngine:
    """An in-process vLLM that serves one model. With several processes, the scheduler runs here and the model in the others.

    Requests wait in its own queue before they enter vLLM's: vLLM gets one slot more than `max_concurrent_sequences`, and that slot stays
    free for the canary, which would otherwise wait for a running request to end. Where the cache is full, the canary is the first to get
    room.
    """

    def __init__(self, config: RunConfig, *, formatter: ChatFormatter, num_threads: int) -> None:
        """Loads the model from disk (seconds). Each of the engine's processes computes with `num_threads`. Raises ConfigError when vLLM
        refuses the settings."""
        rollout, sampling = config.rollout, config.sampling
        # On GPUs even eager vLLM compiles.
        compiles = not rollout.enforce_eager or torch.accelerator.is_available()
        _prepare_process(num_threads=num_threads, compiles=compiles, dtype=config.model.dtype)
        with importing_for_good(), contextlib.nullcontext() if compiles else _no_compiler():
            import vllm
            from vllm.exceptions import VLLMClientError
            from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        self._vllm: Any = vllm
        self._refusals = (ValueError, VLLMClientError)
        """vLLM's errors when it refuses a request."""
        self._structured = StructuredOutputsParams
        self._delta = RequestOutputKind.DELTA
        self._final_only = RequestOutputKind.FINAL_ONLY
        self._repair_tied_head = config.weights.repair_tied_head
        self._stop_token_ids = list(formatter.stop_token_ids)
        self._decode = formatter.searched
        self._max_running = rollout.max_concurrent_sequences
        self._in_one_process = rollout.tensor_parallel_size == 1
        self._waiting: list[EngineRequest] = []
        self._running: dict[str, EngineRequest] = {}
        """By id, those that entered vLLM. It lets some of them wait where its cache is full."""
        self._seams: dict[str, StopSeam] = {}
        """By id of a resumed request with stop texts."""
        self._held: list[EngineOutput] = []
        self._num_loads = 0
        self._adapter_request: Any = None
        self._base_model = config.model.path
        self._probe_numbers = count()
        self._arrivals = count()
        platform = self._vllm.platforms.current_platform
        _refuse_the_other_build(rollout, is_cpu=platform.is_cpu())
        _refuse_gpus_without_fp8(rollout, platform)
        if platform.is_cpu():
            _register_architecture(vllm, config.model)
        arguments = _arguments(vllm, config, max_context=formatter.max_context)
        # vLLM imports as much again while it builds the engine; it collects garbage by itself and freezes its own objects.
        with importing_for_good():
            self._engine: Any = _built(vllm, arguments, model=config.model, replays=rollout.routing_replay)
        if platform.is_cpu():
            self._engine.collective_rpc("speed_up")
        self._vocabulary_size: int = self._engine.model_config.get_vocab_size()
        self._try_out(sampling)

    def add(self, request: EngineRequest) -> None:
        """Queues a request. It starts at the first step with a free slot, ordered by `place`, then first come, first served."""
        insort(self._waiting, request, key=lambda each: each.place)

    def step(self) -> list[EngineOutput]:
        """One forward pass over all running requests, at most one token each. Empty when no request runs.

        After its first token, vLLM keeps a request's tokens back until it ends: see `flush`. A request that vLLM refuses is an output with
        the reason.
        """
        if self._held:
            held, self._held = self._held, []
            return held
        refused = self._admit()
        return refused + ([self._converted(output) for output in self._outputs()] if self._running else [])

    def flush(self) -> list[EngineOutput]:
        """The tokens that `step` has not returned yet, including those sampled during a probe. `step` does not return them again."""
        outputs, self._held = self._held, []
        # vLLM's public interface returns the rest only when a request ends.
        for state in self._engine.output_processor.request_states.values():
            if state.stream_interval == 1:  # its tokens are returned at once, and vLLM does not count them
                continue
            if token_ids := state.detokenizer.output_token_ids[state.sent_tokens_offset :]:
                state.sent_tokens_offset += len(token_ids)
                logprobs = state.logprobs_processor.logprobs[-len(token_ids) :]
                outputs.append(_output(state.external_req_id, token_ids, logprobs, reason=None))
        return outputs

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drops the requests: they have no further outputs. Unknown ids are ignored."""
        gone = set(request_ids)
        self._waiting = [request for request in self._waiting if request.request_id not in gone]
        self._held = [output for output in self._held if output.request_id not in gone]
        running = sorted(gone & self._running.keys())
        for name in running:
            del self._running[name]
        self._seams = {name: seam for name, seam in self._seams.items() if name not in gone}
        if running:
            self._engine.abort_request(running)

    def use(self) -> EngineUse:
        """Read from vLLM's scheduler: vLLM's own metrics would cost a step with many requests milliseconds."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        num_running, num_waiting = scheduler.get_request_counts()
        return EngineUse(num_running=num_running, num_waiting=num_waiting, cache_share=scheduler.get_kv_cache_usage())

    def load(self, tensors: Iterable[tuple[str, Any]] | Incoming) -> None:
        """Loads new weights between two steps: CPU tensors by checkpoint name, or `Incoming`, which each of the engine's processes receives
        from its group. Running requests continue with their present key-value cache.

        Raises WeightsError when vLLM refuses the weights, and BroadcastError when the group breaks; vLLM's weights are then undefined until
        a load succeeds. Raises WorkerError when one of the engine's processes has ended.
        """
        if not self._in_one_process and not isinstance(tensors, Incoming):
            tensors = list(tensors)
        update = {"tensors": tensors, "repair_tied_head": self._repair_tied_head}
        self.wake("weights")
        with self._loading("the new weights", way_out="learner and rollout workers must start from the same model"):
            self._engine.collective_rpc("start_weight_update")
            self._engine.collective_rpc("update_weights", args=(update,))
            self._engine.collective_rpc("finish_weight_update")
            failures = chain.from_iterable(self._engine.collective_rpc("drain_failures"))
        for failure in failures:
            raise failure
        self.wake("kv_cache")
        self._forget_prefixes()

    def load_adapter(self, tensors: Iterator[tuple[str, Any]], adapter: Adapter) -> None:
        """Replaces the serving adapter between two steps; otherwise as `load`."""
        from vllm.lora.request import LoRARequest

        self.wake()
        # vLLM reads adapters from a folder. It must be a new one each time: vLLM caches by the folder's name.
        with tempfile.TemporaryDirectory(prefix="treadwheel-adapter-") as folder:
            write_adapter(Path(folder), tensors, adapter=adapter, base_model=self._base_model)
            # The same id, loaded in place: running requests continue under the new adapter, as they would under new weights.
            request = LoRARequest(lora_name="policy", lora_int_id=_ADAPTER, lora_path=folder, load_inplace=True)
            with self._loading("the adapter", way_out=_OTHER_TARGETS):
                is_loaded = self._engine.add_lora(request)
                unused = sorted(
                    {*chain.from_iterable(self._engine.collective_rpc("unused_of_adapter", args=(_ADAPTER,)))}
                )
        if not is_loaded:
            raise WeightsError(f"vLLM refused the adapter; its log says why; {_OTHER_TARGETS}")
        if unused:
            raise WeightsError(
                f"vLLM has no place for {len(unused)} parts of the adapter, the first of them {unused[0]}; {_OTHER_TARGETS}"
            )
        self._adapter_request = LoRARequest(lora_name="policy", lora_int_id=_ADAPTER, lora_path=folder)
        self._forget_prefixes()

    def sleep(self, *, keeps_weights: bool) -> None:
        """vLLM's sleep levels 1 and 2: memory of weights and cache returns to the driver, addresses stay. On a CPU vLLM only pauses."""
        self._engine.sleep(level=1 if keeps_weights else 2)

    def wake(self, *parts: str) -> None:
        """Wakes these parts of vLLM; without names, weights and cache. vLLM samples again when all parts are awake."""
        if self._engine.is_sleeping():
            self._engine.wake_up(list(parts) or None)

    @contextlib.contextmanager
    def _loading(self, what: str, *, way_out: str) -> Iterator[None]:
        """Raises WeightsError when vLLM refuses, and WorkerError when one of the engine's processes has ended."""
        try:
            yield
        except _REFUSED_LOADS as error:
            self._check_processes(error)
            raise WeightsError(f"vLLM refused {what}: {type(error).__name__}: {error}; {way_out}") from error

    def _outputs(self) -> list[Any]:
        """vLLM's outputs of one step. Raises WorkerError when one of the engine's processes has ended."""
        try:
            return self._engine.step()
        except (RuntimeError, AssertionError) as error:
            self._check_processes(error)
            raise

    def _check_processes(self, error: Exception) -> None:
        """Raises WorkerError when one of the engine's other processes has ended: `error` is then not about the weights."""
        if self._in_one_process:
            return
        processes = [worker.proc for worker in self._engine.engine_core.engine_core.model_executor.workers]
        # Other processes may report a broken connection before the system reports the process's end.
        if ended := wait([process.sentinel for process in processes], timeout=_GONE_S):
            gone = ", ".join(f"{each.pid} ({each.exitcode})" for each in processes if each.sentinel in ended)
            raise WorkerError(
                f"of the engine's {len(processes)} processes these are gone (exit code): {gone}"
            ) from error

    def _forget_prefixes(self) -> None:
        # New requests must not find keys and values of the old weights. A reset cannot free blocks of running requests, so the cache is
        # also salted with the number of loads.
        self._num_loads += 1
        self._begin_unsampled_anew()
        if not self._running:
            self._engine.reset_prefix_cache()

    def _begin_unsampled_anew(self) -> None:
        """For requests without a token of their own, which wait for room in vLLM: all their tokens will be of the new weights."""
        states = self._engine.output_processor.request_states.values()
        unsampled = {state.external_req_id for state in states if not state.detokenizer.output_token_ids}
        again = [request for name, request in self._running.items() if name in unsampled]
        self.abort([request.request_id for request in again])
        # Before those that never entered vLLM, which came later.
        self._waiting = sorted([*again, *self._waiting], key=lambda each: each.place)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural log-prob of each token after the first under the present weights, at temperature 1.

        Running requests advance too; `step` returns their tokens afterwards, unless they are aborted.
        """
        request_id = f"probe-{next(self._probe_numbers)}"
        # Seeded, although its token is discarded: if one running request has no seed, vLLM on CPU ignores the seeds of all.
        params = self._vllm.SamplingParams(
            max_tokens=1, temperature=1.0, seed=0, prompt_logprobs=0, detokenize=False, output_kind=self._final_only
        )
        self._submit(request_id, list(token_ids), params, priority=_FIRST)
        found = None
        while found is None:
            # All outputs of a step are kept: a request whose structure was compiled late comes after the probe.
            for output in self._outputs():
                if output.request_id == request_id:
                    found = output.prompt_logprobs
                else:
                    self._held.append(self._converted(output))
        return [found[place][token_ids[place]].logprob for place in range(1, len(token_ids))]

    def _admit(self) -> list[EngineOutput]:
        """Starts waiting requests in the free slots. Returns outputs for those that vLLM refuses."""
        refused: list[EngineOutput] = []
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting.pop(0)
            try:
                self._start(request)
            except self._refusals as error:
                refused.append(_refused(request.request_id, str(error)))
            else:
                self._running[request.request_id] = request
        return refused

    def _start(self, request: EngineRequest) -> None:
        kept = request.kept.token_ids if request.kept else []
        params = self._params(request)
        # vLLM checks this only if it has a tokenizer. Without the check the embedding would fail, and with it the whole engine.
        if (largest := max(request.prompt_token_ids, default=0)) >= self._vocabulary_size:
            raise ValueError(f"token id {largest} is not in the model's vocabulary of {self._vocabulary_size}")
        self._submit(request.request_id, [*request.prompt_token_ids, *kept], params)
        if kept and (stops := request.sampling.stop):
            self._seams[request.request_id] = StopSeam(
                kept, stops=stops, min_tokens=request.sampling.min_tokens, decode=self._decode
            )

    def _submit(self, request_id: str, token_ids: list[int], params: Any, *, priority: int = 0) -> None:
        """The lowest `priority` starts first; of equal ones the first submitted, whatever the clock says."""
        self._engine.add_request(
            request_id,
            {"type": "token", "prompt_token_ids": token_ids, "cache_salt": str(self._num_loads)},
            params,
            arrival_time=float(next(self._arrivals)),
            lora_request=self._adapter_request,
            priority=priority,
        )

    def _try_out(self, sampling: SamplingConfig) -> None:
        """Raises ConfigError for sampling settings that vLLM refuses: at the start rather than for every prompt."""
        trial = EngineRequest(request_id="trial", prompt_token_ids=[0], sampling=sampling, seed=0)
        try:
            self._start(trial)
        except self._refusals as error:
            raise ConfigError(f"vLLM refuses the settings of `sampling`: {headline(error)}") from error
        self._engine.abort_request([trial.request_id])

    def _params(self, request: EngineRequest) -> Any:
        wanted = structure(request.sampling)
        looks_for_stops = request.kept is not None and request.sampling.stop  # token by token
        return self._vllm.SamplingParams(
            **vllm_arguments(request, stop_token_ids=self._stop_token_ids),
            structured_outputs=None if wanted is None else self._structured(**wanted),
            output_kind=self._delta,
            stream_interval=1 if looks_for_stops else _TOKENS_PER_OUTPUT,
        )

    def _converted(self, output: Any) -> EngineOutput:
        completion = output.outputs[0]
        reason, token_ids = completion.finish_reason, list(completion.token_ids)
        # A stop text takes precedence over the length limit, as in vLLM.
        if reason in (None, "length") and self._stops_at_seam(output.request_id, token_ids):
            self._engine.abort_request([output.request_id])
            reason = "stop"
        if reason is not None:
            self._running.pop(output.request_id, None)
            self._seams.pop(output.request_id, None)
            if reason == "error":
                why = "vLLM ended it: its `structure` does not compile, or does not accept the sampled tokens"
                return _refused(output.request_id, why)
            if reason not in _FINISH_REASONS:
                raise WorkerError(f"request {output.request_id}: vLLM ended it with {reason!r}")
        # vLLM returns them with a request's last output. A request that was ended here has none.
        experts = None if completion.routed_experts is None else completion.routed_experts.tobytes()
        ended = _FINISH_REASONS[reason] if reason else None
        return _output(output.request_id, token_ids, completion.logprobs, reason=ended, routed_experts=experts)

    def _stops_at_seam(self, request_id: str, token_ids: Sequence[int]) -> bool:
        if (seam := self._seams.get(request_id)) is None:
            return False
        ends = seam.ends(token_ids)
        if seam.is_past:
            del self._seams[request_id]
        return ends


def _refused(request_id: str, why: str) -> EngineOutput:
    return EngineOutput(request_id=request_id, token_ids=[], logprobs=[], finish_reason=None, refusal=why)


def _output(
    request_id: str,
    token_ids: list[int],
    found: Any,
    *,
    reason: FinishReason | None,
    routed_experts: bytes | None = None,
) -> EngineOutput:
    """`found`: vLLM's flat log-probs, of these tokens alone."""
    assert found.token_ids == token_ids
    return EngineOutput(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=found.logprobs,
        finish_reason=reason,
        routed_experts=routed_experts,
    )


def _no_compiler() -> contextlib.AbstractContextManager[None]:
    """Hides a module of torch's compiler. vLLM would import it, and 140 modules with it, only to change a list there."""
    return hidden("torch._inductor.lowering")


def _built(vllm: Any, arguments: Any, *, model: ModelConfig, replays: bool) -> Any:
    """The engine. `replays`: it returns the experts that it chose."""
    try:
        if not (replays and vllm.platforms.current_platform.is_cpu()):
            return vllm.LLMEngine.from_engine_args(arguments)
        # vLLM's configuration refuses this on CPUs, since its own worker there does not record experts; ours does.
        config = arguments.create_engine_config()
        config.aux_output_config.enable_return_routed_experts = True
        return vllm.LLMEngine.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"vLLM cannot serve model.path={model.path!r} with these settings: {error}") from error


def _arguments(vllm: Any, config: RunConfig, *, max_context: int) -> Any:
    """vLLM's settings. `max_context` counts prompt and completion tokens."""
    from cluster.weights import vllm_receiver

    model, rollout, adapter = config.model, config.rollout, config.published_adapter
    if rollout.quantization == "int8_per_channel":
        # Imported only here: registering the scheme would cost every other engine's start a quarter of a second.
        from actors.rollout import int8_scheme  # noqa: F401
    is_cpu = vllm.platforms.current_platform.is_cpu()
    return vllm.EngineArgs(
        model=model.path,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        dtype=model.dtype,
        quantization=rollout.quantization,
        hf_overrides={"head_dtype": "float32"} if _has_float32_head(rollout, is_cpu=is_cpu) else {},
        max_model_len=max_context,
        max_num_seqs=rollout.max_concurrent_sequences + 1,
        scheduling_policy="priority",
        # After a chunk of a prompt vLLM drops its token by resetting the seeded generator, which a CPU generator cannot do: the engine
        # would die. So prompts are read whole on CPUs.
        enable_chunked_prefill=not is_cpu,
        max_num_batched_tokens=max(_CPU_PREFILL_TOKENS, max_context) if is_cpu else None,
        enforce_eager=rollout.enforce_eager,
        enable_sleep_mode=rollout.colocated and not is_cpu,
        enable_prefix_caching=rollout.prefix_caching,
        enable_lora=adapter is not None,
        # vLLM accepts only a few ranks: take the next larger one.
        max_lora_rank=next((rank for rank in _ADAPTER_RANKS if adapter and rank >= adapter.rank), _ADAPTER_RANKS[0]),
        max_loras=1,
        tensor_parallel_size=rollout.tensor_parallel_size,
        distributed_executor_backend="uni" if rollout.tensor_parallel_size == 1 else "mp",
        # On a GPU it would silently override gpu_memory_utilization.
        kv_cache_memory_bytes=rollout.cpu_cache_bytes_per_process if is_cpu else None,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        # Log-probs of the distribution that tokens are drawn from: after temperature, truncation, penalties and masks. vLLM's raw ones are
        # before temperature and after a structure's mask; no learner computes those.
        logprobs_mode="processed_logprobs",
        # vLLM needs a tokenizer only for texts: stop strings, which environments may add, bad words, structures.
        skip_tokenizer_init=not (works_on_text(config.sampling) or config.has_episodes),
        # The model folder's sampling settings must not override the run's.
        generation_config="vllm",
        # With it, outputs come one step late: tokens would be marked with a newer version than the one that sampled them.
        async_scheduling=False,
        weight_transfer_config=vllm.config.WeightTransferConfig(backend=vllm_receiver.BACKEND),
        worker_extension_cls=_CPU_EXTENSION if is_cpu else _EXTENSION,
        enable_return_routed_experts=rollout.routing_replay and not is_cpu,
        worker_cls=_CPU_WORKER if rollout.routing_replay and is_cpu else "auto",
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )


def _refuse_the_other_build(rollout: RolloutConfig, *, is_cpu: bool) -> None:
    """Raises ConfigError for a worker with a GPU that its engine cannot use, or whose engine would take a GPU that the worker does not
    have."""
    gpus = rollout.gpus_per_worker
    if is_cpu and gpus > 0:
        raise ConfigError(
            f"rollout.gpus_per_worker={gpus:g}, but this is vLLM's build for CPUs; install the other one (rm -r .venv, then "
            "make install GPU=1), or set rollout.gpus_per_worker=0"
        )
    if not is_cpu and gpus == 0:
        raise ConfigError(
            "rollout.gpus_per_worker=0, but this is vLLM's build for GPUs, which would take a GPU that no actor was given; set "
            "rollout.gpus_per_worker=1, or a part of one with as small a rollout.gpu_memory_utilization"
        )


def _refuse_gpus_without_fp8(rollout: RolloutConfig, platform: Any) -> None:
    """Raises ConfigError for FP8 on an older GPU, where vLLM would round only the weights: it would sample from another policy."""
    scheme = rollout.quantization or ""
    if scheme.startswith("fp8") and not (platform.is_cpu() or platform.has_device_capability(89)):
        raise ConfigError(
            f"rollout.quantization={scheme!r} needs GPUs of compute capability 8.9 or more, and this worker has "
            f"{platform.get_device_name()}; use rollout.quantization=int8_per_channel, or leave it out"
        )


def _has_float32_head(rollout: RolloutConfig, *, is_cpu: bool) -> bool:
    return not is_cpu if rollout.head_dtype == "auto" else rollout.head_dtype == "float32"


def _register_architecture(vllm: Any, model: ModelConfig) -> None:
    """Registers the model's loaded class. It saves ten seconds of a first start: vLLM inspects an unknown class in a separate process, to
    keep CUDA out of this one."""
    config, _ = PretrainedConfig.get_config_dict(model.path, revision=model.revision)
    for name in config.get("architectures") or ():
        known = vllm.ModelRegistry.models.get(name)
        if known is not None:
            vllm.ModelRegistry.register_model(name, known.load_model_cls())


def import_all() -> None:
    """Imports the modules of an eager engine on CPUs, for engines in processes that are forked from this one."""
    _prepare_imports(compiles=False)
    with _no_compiler():
        for module in (
            "vllm.v1.engine.llm_engine",
            "vllm.exceptions",
            "vllm.sampling_params",
            "vllm.v1.worker.cpu_worker",
        ):
            importlib.import_module(module)


def _prepare_imports(*, compiles: bool) -> None:
    """Sets environment variables that vLLM and torch read at import. Values that the user has set are kept."""
    defaults = {
        # The engine's core runs in this process: it starts in seconds, and weights reach it without a copy.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        # Torch requests huge pages: each load of weights allocates their memory anew, page after page.
        "THP_MEM_ALLOC_ENABLE": "1",
        # With several processes on CPUs, vLLM would require a NUMA node for each, and bind those of every engine to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if not compiles:
        # Eager vLLM would compile one function of its sampler with a C++ compiler: 15 s of a first start, for no gain.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    _set_in_environment(defaults)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


def _prepare_process(*, num_threads: int, compiles: bool, dtype: str) -> None:
    """As `_prepare_imports`, for one engine."""
    _prepare_imports(compiles=compiles)
    _set_in_environment({"OMP_NUM_THREADS": str(num_threads)})
    if dtype == "float32":
        # On GPUs, float32 attention runs in Triton, which by default rounds factors to TF32's 10 bits.
        _set_in_environment({"TRITON_F32_DEFAULT": "ieee"})
    if not compiles:
        torch._dynamo.config.disable = True
    # vLLM replaces set_num_threads by a function that only warns, so a second engine in a process keeps the first one's threads.
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def _set_in_environment(defaults: dict[str, str]) -> None:
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
