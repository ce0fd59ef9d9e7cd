import importlib
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from actors.rollout.vllm_engine import (
    _arguments,
    _has_float32_head,
    _no_compiler,
    _prepare_process,
    _refuse_gpus_without_fp8,
    _refuse_the_other_build,
)
from cluster.contracts.config import RolloutConfig, RunConfig
from cluster.contracts.errors import ConfigError

COMPILER = "torch._inductor.lowering"


@pytest.mark.parametrize(
    ("head_dtype", "on_cpu", "on_gpu"), [("auto", False, True), ("model", False, False), ("float32", True, True)]
)
def test_the_head_is_in_float32_on_gpus_alone_unless_the_setting_says_so(head_dtype, on_cpu, on_gpu):
    rollout = RolloutConfig(head_dtype=head_dtype)
    assert _has_float32_head(rollout, is_cpu=True) is on_cpu
    assert _has_float32_head(rollout, is_cpu=False) is on_gpu


def arguments_of(*, is_cpu, **rollout):
    vllm = SimpleNamespace(
        platforms=SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: is_cpu)),
        EngineArgs=lambda **arguments: arguments,
        config=SimpleNamespace(WeightTransferConfig=lambda **_: None),
    )
    config = RunConfig.model_validate({"model": {"path": "m"}, "prompts": "file", "rollout": rollout})
    return _arguments(vllm, config, max_context=128)


@pytest.mark.parametrize(("is_cpu", "cache_bytes"), [(True, 4096), (False, None)])
def test_the_size_of_a_cpu_engines_cache_does_not_overrule_a_gpu_engines_share(is_cpu, cache_bytes):
    arguments = arguments_of(is_cpu=is_cpu, kv_cache_bytes=4096)
    assert arguments["kv_cache_memory_bytes"] == cache_bytes and arguments["gpu_memory_utilization"] == 0.85


def test_each_process_of_a_cpu_engine_has_its_share_of_the_cache():
    arguments = arguments_of(is_cpu=True, kv_cache_bytes=4096, tensor_parallel_size=4)
    assert (arguments["kv_cache_memory_bytes"], arguments["distributed_executor_backend"]) == (1024, "mp")


@pytest.mark.parametrize(
    ("gpus", "is_cpu", "said"),
    [
        (1.0, True, "rollout.gpus_per_worker=1, but this is vLLM's build for CPUs"),
        (0.0, False, "rollout.gpus_per_worker=0, but this is vLLM's build for GPUs"),
    ],
)
def test_a_build_of_vllm_for_other_hardware_than_the_worker_was_given_is_refused(gpus, is_cpu, said):
    with pytest.raises(ConfigError, match=said):
        _refuse_the_other_build(RolloutConfig(gpus_per_worker=gpus), is_cpu=is_cpu)
    _refuse_the_other_build(RolloutConfig(gpus_per_worker=gpus), is_cpu=not is_cpu)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("bfloat16", None)])
def test_attention_of_a_float32_engine_is_float32_on_gpus_too(monkeypatch, dtype, precision):
    monkeypatch.setattr(os, "environ", {"TREADWHEEL_TEST": "1"})
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    _prepare_process(num_threads=1, compiles=True, dtype=dtype)
    assert os.environ.get("TRITON_F32_DEFAULT") == precision


def test_vllm_is_told_the_scheme_by_which_it_quantizes():
    assert arguments_of(is_cpu=True)["quantization"] is None
    assert arguments_of(is_cpu=True, quantization="int8_per_channel")["quantization"] == "int8_per_channel"


@pytest.mark.parametrize(
    ("scheme", "is_cpu", "capability", "is_refused"),
    [
        ("fp8_per_tensor", False, 80, True),
        ("fp8_per_block", False, 89, False),
        ("int8_per_channel", False, 80, False),
        ("fp8_per_channel", True, 0, False),
        (None, False, 80, False),
    ],
)
def test_a_gpu_that_does_not_multiply_fp8_is_refused_for_it(scheme, is_cpu, capability, is_refused):
    platform = SimpleNamespace(
        is_cpu=lambda: is_cpu, has_device_capability=lambda least: capability >= least, get_device_name=lambda: "A100"
    )
    rollout = RolloutConfig(quantization=scheme, gpus_per_worker=0 if is_cpu else 1)
    if not is_refused:
        return _refuse_gpus_without_fp8(rollout, platform)
    with pytest.raises(ConfigError, match=r"'fp8_per_tensor' needs GPUs of compute capability 8\.9 .* has A100;"):
        _refuse_gpus_without_fp8(rollout, platform)


def test_vllm_is_imported_without_torchs_compiler_where_nothing_is_compiled(monkeypatch):
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)
    with _no_compiler(), pytest.raises(ImportError):
        importlib.import_module(COMPILER)
    assert COMPILER not in sys.modules


def test_a_compiler_that_is_there_already_stays(monkeypatch):
    there = ModuleType(COMPILER)
    monkeypatch.setitem(sys.modules, COMPILER, there)
    with _no_compiler():
        assert importlib.import_module(COMPILER) is there
    assert sys.modules[COMPILER] is there
