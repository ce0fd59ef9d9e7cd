"""AdamW with schedule and clipping over float32 master weights.

If the model computes in bfloat16 on one rank, each parameter has a float32 master, which sums the gradients of micro-batches in float32 and
takes the step; the result is rounded into the model. If the model is float32, or sharded (shards are float32), the parameters are their own
masters.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cluster.contracts.config import OptimizerConfig, RunConfig
from cluster.contracts.errors import CheckpointError
from learner.averaging import WeightAverage
from learner.distributed import local, whole


def learning_rate_at(step: int, *, config: OptimizerConfig, num_steps: int, peak: float | None = None) -> float:
    """Rate of step 0, 1, ...: linear warm-up to the peak, then constant, or decay to `min_learning_rate_share` of it at the last step.

    0 before step 0.
    """
    peak = config.learning_rate if peak is None else peak
    if step < 0:
        return 0.0
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    num_decaying = max(num_steps - 1 - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / num_decaying, 1.0)
    decayed = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    share = config.min_learning_rate_share
    return peak * (share + (1 - share) * decayed)


class Optimizer:
    """For each update `zero`, backward of every micro-batch, `gradient_norms`, then `step` or nothing.

    Weight decay is decoupled and spares norms and biases.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        config: OptimizerConfig,
        num_steps: int,
        compute_dtype: torch.dtype = torch.float32,
        learning_rates: Mapping[str, float] | None = None,
        first_step: int = 0,
        average_decay: float | None = None,
        has_own_critic: bool = False,
    ) -> None:
        """Takes float32 parameters and, on a single rank, converts them to `compute_dtype`.

        `learning_rates`: peaks of parameters that differ from the configured one, by the prefix of their names.
        `first_step`: first step of the schedule of all other parameters, which must have no gradients before it.
        `average_decay`: decay of the average of the policy's weights; None keeps no average.
        `has_own_critic`: parameters named `critic.` are another model, whose gradient is clipped separately.
        """
        self._config, self._num_steps, self._first_step = config, num_steps, first_step
        self._factor = 1.0
        """Multiplies all learning rates; `observe_kl` changes it."""
        parameters = dict(named_parameters)
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._masters = {name: _master(p, compute_dtype=compute_dtype) for name, p in self._parameters.items()}
        for parameter in parameters.values():
            if not parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(compute_dtype)
        self._models: dict[str, list[nn.Parameter]] = {"policy": []} | ({"critic": []} if has_own_critic else {})
        for name, master in self._masters.items():
            self._models["critic" if has_own_critic and name.startswith("critic.") else "policy"].append(master)
        policy = {name: master for name, master in self._masters.items() if name.startswith("policy.")}
        self._average = None if average_decay is None else WeightAverage(policy, decay=average_decay)
        groups: dict[tuple[float, float, int], list[nn.Parameter]] = {}
        for name, master in self._masters.items():
            peak, begins = next(
                ((rate, 0) for prefix, rate in (learning_rates or {}).items() if name.startswith(prefix)),
                (config.learning_rate, first_step),
            )
            decay = config.weight_decay if _decays(name, master) else 0.0
            groups.setdefault((peak, decay, begins), []).append(master)
        self._adam = torch.optim.AdamW(
            [
                {"params": masters, "weight_decay": decay, "peak": peak, "begins": begins, "lr": peak}
                for (peak, decay, begins), masters in groups.items()
            ],
            betas=config.betas,
            eps=config.epsilon,
            fused=True,
        )

    @classmethod
    def of_run(cls, named_parameters: Iterable[tuple[str, nn.Parameter]], config: RunConfig) -> "Optimizer":
        """For the parameters of the run's networks."""
        algorithm, value = config.algorithm, config.algorithm.value
        return cls(
            named_parameters,
            config=config.optimizer,
            num_steps=config.num_steps,
            compute_dtype=getattr(torch, config.model.dtype),
            learning_rates={} if value is None else {"critic.": value.learning_rate},
            first_step=0 if value is None else value.warmup_steps,
            average_decay=algorithm.proximal_decay if algorithm.clips_around_average else None,
            has_own_critic=value is not None and value.backbone == "own",
        )

    def zero(self) -> None:
        """Drops all gradients."""
        for master in self._masters.values():
            master.grad = None

    def gradient_norms(self) -> dict[str, Tensor]:
        """Global L2 norms over all ranks, float32: of the "policy", including a critic on its backbone, and of a "critic" with its own.
        The two are clipped separately, as in verl and OpenRLHF: otherwise an exploding critic would silence the policy."""
        return {name: _norm(_gradients(masters)) for name, masters in self._models.items()}

    def step(self, index: int, *, gradient_norms: Mapping[str, Tensor]) -> float:
        """Clips each model by its norm, makes an update of step `index` (from 0), rounds masters into the model. Returns the policy's
        learning rate, which all updates of a step share."""
        limit = self._config.max_grad_norm
        for name, norm in gradient_norms.items():
            if limit is not None and float(norm) > limit:
                for gradient in _gradients(self._models[name]):
                    local(gradient).mul_(limit / (float(norm) + 1e-6))
        for group in self._adam.param_groups:
            group["lr"] = self._rate(index, peak=group["peak"], begins=group["begins"])
        self._adam.step()
        self.copy_masters()
        if self._average is not None and index >= self._first_step:
            self._average.update()
        return self._rate(index, peak=self._config.learning_rate, begins=self._first_step)

    def _rate(self, index: int, *, peak: float, begins: int) -> float:
        steps = self._num_steps - begins
        return self._factor * learning_rate_at(index - begins, config=self._config, num_steps=steps, peak=peak)

    def observe_kl(self, kl: float) -> None:
        """Adapts the next step's learning rates to `optimizer.target_kl`. `kl`: nats per token that the policy had moved before the step's
        last update."""
        target = self._config.target_kl
        if target is not None and kl > 2 * target:
            self._factor = max(self._factor / 1.5, 0.01)
        elif target is not None and kl < target / 2:
            self._factor = min(self._factor * 1.5, 100.0)

    def state_dict(self) -> dict[str, float]:
        """The state that is not a tensor."""
        return {"factor": self._factor} | ({} if self._average is None else {"average_total": self._average.total})

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._factor = state["factor"]
        if self._average is not None:
            self._average.total = state["average_total"]

    @torch.no_grad()
    def copy_masters(self) -> None:
        """Rounds masters into the model. Does nothing for parameters that are their own masters."""
        for name, parameter in self._parameters.items():
            if parameter is not self._masters[name]:
                parameter.copy_(self._masters[name])

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives the model the policy's averaged weights. Its own weights are back, to the bit, at the end, also after an exception."""
        self._exchange_averages()
        try:
            yield
        finally:
            self._exchange_averages()

    def _exchange_averages(self) -> None:
        assert self._average is not None, "only a run that clips around an average keeps one"
        self._average.exchange()
        self.copy_masters()

    def masters(self) -> dict[str, nn.Parameter]:
        """Float32 weights by parameter name."""
        return self._masters

    def state(self) -> dict[str, Tensor]:
        """First and second moments, step counts and averages, by parameter name; local shards if sharded. Not copies."""
        averages = {} if self._average is None else self._average.averages
        found = {f"average/{name}": average for name, average in averages.items()}
        for name, master in self._masters.items():
            for key, value in self._adam.state.get(master, {}).items():
                found[f"{key}/{name}"] = value
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores a result of `state`, in which parameters that never had a gradient are absent.

        Raises CheckpointError naming the first parameter that does not fit.
        """
        by_parameter: dict[str, dict[str, Tensor]] = {}
        averages: dict[str, Tensor] = {}
        for key, value in state.items():
            kind, _, name = key.partition("/")
            if name not in self._masters:
                raise CheckpointError(f"optimizer state of {name!r}, which this model does not train")
            if kind != "step" and value.shape != self._masters[name].shape:
                raise CheckpointError(
                    f"optimizer state of {name!r} has shape {list(value.shape)}, not {list(self._masters[name].shape)}"
                )
            if kind == "average":
                averages[name] = value
            else:
                by_parameter.setdefault(name, {})[kind] = value
        if self._average is not None and averages.keys() != self._average.averages.keys():
            raise CheckpointError(
                "the checkpoint has no averaged policy, which algorithm.proximal='ewma' clips around; resume with the proximal of the run "
                "that saved it, or start a run from its model folder"
            )
        if self._average is not None:
            self._average.averages = averages
        self._adam.state.clear()
        for name, values in by_parameter.items():
            self._adam.state[self._masters[name]] = values


def _decays(name: str, parameter: Tensor) -> bool:
    """False for vectors, norms (also with a row per head) and biases (also with a row per expert)."""
    owner, _, own = name.rpartition(".")
    return parameter.ndim > 1 and not own.endswith("bias") and "norm" not in owner.rpartition(".")[2]


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _norm(gradients: list[Tensor]) -> Tensor:
    return whole(torch.nn.utils.get_total_norm(gradients)) if gradients else torch.zeros(())


def _master(parameter: nn.Parameter, *, compute_dtype: torch.dtype) -> nn.Parameter:
    if parameter.dtype == compute_dtype or isinstance(parameter, DTensor):
        return parameter
    master = nn.Parameter(parameter.detach())
    parameter.data = parameter.data.to(compute_dtype)

    def add(computed: Tensor) -> None:
        if computed.grad is not None:
            # Sums of micro-batches in bfloat16 would depend on the split of the batch.
            # GPUs convert while they add; on CPUs that is slow.
            gradient = computed.grad if computed.is_cuda else computed.grad.float()
            master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
            computed.grad = None

    parameter.register_post_accumulate_grad_hook(add)
    return master
