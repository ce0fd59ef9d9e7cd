"""The thread that owns an engine. Requests, weight updates and aborts are commands, which it carries out between two engine steps.

Every token that it returns was sampled under attested weights and carries their version. When the thread ends, `EngineThread.ended` is done
and holds the reason.
"""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from cluster.contracts.errors import BroadcastError, DataError, WeightsError, WorkerError
from cluster.contracts.phases import Timeline
from cluster.contracts.protocols import Engine, EngineOutput, EngineRequest
from cluster.contracts.types import Completion, EngineUse, FinishReason, Proof

T = TypeVar("T")
Outcome = Completion | DataError | WeightsError
"""DataError: the engine refuses this request. WeightsError: the engine serves no request."""

Sink = Callable[[str, Outcome], None]
"""Gets a request's id and its outcome. It runs in the engine's thread, so it must pass the outcome on and return at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """New weights, and the proof that the engine computes with them."""

    policy_version: int
    tensors: Callable[[], Any]
    """Returns the tensors to load."""
    adapter: Any = None
    """Description of the adapter, if the tensors are one; None if they are the whole model."""
    probe_token_ids: Sequence[int]
    prove: Callable[[list[float]], Proof]
    """Gets the engine's log-probs of the probe. Raises WeightsError when they are not the version's."""


@dataclass(frozen=True, slots=True)
class _Abort:
    """The only command that does not wait behind an update, since the update may wait for the aborted request."""

    request_ids: Sequence[str]
    kept: Future[dict[str, Completion]] | None = None
    """Gets the tokens sampled so far, by request."""


@dataclass(slots=True, kw_only=True)
class _Active:
    """An unfinished request and its tokens so far."""

    request: EngineRequest
    sink: Sink
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: EngineRequest, sink: Sink) -> "_Active":
        """Begins with the request's kept tokens, if another worker sampled some."""
        active = cls(request=request, sink=sink)
        if kept := request.kept:
            active.token_ids += kept.token_ids
            active.logprobs += kept.rollout_logprobs
            active.policy_versions += kept.policy_versions
        return active

    def completion(self, reason: FinishReason, *, routed_experts: bytes | None = None) -> Completion:
        return Completion(
            token_ids=list(self.token_ids),
            rollout_logprobs=list(self.logprobs),
            policy_versions=list(self.policy_versions),
            finish_reason=reason,
            routed_experts=routed_experts,
        )


class EngineThread:
    """Steps an engine while it has requests, and waits when it has none."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        on_update: Literal["continue", "finish", "abort_and_resume"],
        may_resume: bool = True,
    ) -> None:
        """Returns when the engine is up. Errors of `make_engine` pass through. Without `may_resume`, a request that sleep interrupts begins
        anew: its sampling counts its own tokens (a penalty, for example), and after resuming, the earlier ones would count as prompt."""
        self._make_engine = make_engine
        self._on_update = on_update
        self._may_resume = may_resume
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | _Abort | None] = queue.SimpleQueue()
        self._held: list[Callable[[Engine], object]] = []
        """An update that waits until running requests are finished, and the commands after it."""
        self._active: dict[str, _Active] = {}
        self._policy_version: int | None = None
        self._refusal = "no weights were loaded yet"
        self._is_torn = False
        """A load was interrupted, or sleep discarded the weights: nothing is sampled, and requests wait, until a load succeeds."""
        self._is_asleep = False
        """Nothing is sampled, and requests wait, until the engine wakes."""
        self.timeline = Timeline("starting")
        self._last_step = time.time()
        self._use = self._use_before = EngineUse()
        """Peak use under the serving weights, and under the ones before."""
        self.ended: Future[None] = Future()
        """Done when the thread has ended. Holds the exception that ended it."""
        self.ended.set_running_or_notify_cancel()
        up: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(up,), name="engine", daemon=True)
        self._thread.start()
        up.result()

    @property
    def policy_version(self) -> int | None:
        """The attested version that serves now; None if no request may be served."""
        return self._policy_version

    @property
    def phase(self) -> tuple[str, float]:
        """The thread's activity, and its start in Unix seconds."""
        return self.timeline.phase

    @property
    def last_progress(self) -> float:
        """Unix seconds of the last step; the present time while the thread is idle."""
        return time.time() if self.phase[0] == "idle" else self._last_step

    @property
    def most_used(self) -> EngineUse:
        """Peak use under the serving weights and the ones before."""
        return self._use.most(self._use_before)

    def submit(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        """Puts all requests into the engine before its next step, in this order. Calls `sink` once for each, unless it is aborted."""
        self._commands.put(lambda engine: self._start(engine, requests, sink))

    def probe(self, token_ids: Sequence[int]) -> Future[list[float]]:
        """The log-prob of each token after the first under the engine's present weights, attested or not. Wakes the engine."""
        return self._asked(lambda engine, done: self._probe(engine, token_ids, done))

    def update(self, update: Update) -> Future[tuple[Proof, float]]:
        """Loads and attests between two steps. Returns the proof, and the seconds for which sampling paused.

        A WeightsError also ends every unfinished request, and the engine serves none until an update succeeds. After a BroadcastError
        requests wait for the next update.
        """
        return self._asked(lambda engine, done: self._update(engine, update, done))

    def sleep(self, *, keeps_weights: bool) -> Future[None]:
        """The engine frees its GPU's memory. Requests wait: with `keeps_weights` until `wake`, else until an update."""
        return self._asked(lambda engine, done: self._sleep(engine, done, keeps_weights=keeps_weights))

    def wake(self) -> Future[None]:
        """Requests continue. An engine without its weights sleeps on until an update."""
        return self._asked(lambda engine, done: done.set_result(self._wake(engine)))

    def refuse(self, error: WeightsError) -> None:
        """Ends every unfinished request with `error` and serves none until an update succeeds."""
        self._commands.put(lambda engine: self._refuse(engine, error))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drops the requests soon; until then their sinks may be called. Requests that have ended are ignored."""
        if request_ids:
            self._commands.put(_Abort(request_ids))

    def hand_over(self, request_ids: Sequence[str]) -> Future[dict[str, Completion]]:
        """As `abort`. Returns the tokens so far of each request that has some; its finish reason is `aborted`."""
        kept: Future[dict[str, Completion]] = Future()
        kept.set_running_or_notify_cancel()
        self._commands.put(_Abort(request_ids, kept))
        return kept

    def stop(self) -> None:
        """Ends the thread after the present step. Unfinished requests are dropped."""
        self._commands.put(None)
        self._thread.join()

    def _asked(self, obey: Callable[[Engine, Future[T]], None]) -> Future[T]:
        """Sends a command and returns the future of its result."""
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()
        self._commands.put(lambda engine: obey(engine, done))
        return done

    def _main(self, up: Future[None]) -> None:
        try:
            engine = self._make_engine()
            up.set_result(None)
            self._loop(engine)
        except BaseException as error:  # noqa: BLE001  the waiting calls raise it
            (self.ended if up.done() else up).set_exception(error)

    def _loop(self, engine: Engine) -> None:
        while True:
            samples = bool(self._active) and not self._is_torn and not self._is_asleep
            self._enter("sampling" if samples else "idle")
            if self._held and not self._active:
                self._obey_held(engine)
            elif samples and self._commands.empty():
                self._step(engine)
            else:
                self._obey(engine)

    # A separate method: a local variable of the loop would keep an update's buckets alive while the engine samples.
    def _obey(self, engine: Engine) -> None:
        command = self._commands.get()
        if command is None:
            raise WorkerError("the engine was stopped")
        if not isinstance(command, _Abort):
            self._obey_in_turn(engine, command)
            return
        if command.kept is not None:
            self._flush(engine)
        aborted = self._abort(engine, command.request_ids)
        if command.kept is not None:
            command.kept.set_result(
                {each.request.request_id: each.completion(FinishReason.ABORTED) for each in aborted if each.token_ids}
            )
        if self._held:  # a held command may submit the request
            self._held.append(lambda engine: self._abort(engine, command.request_ids))

    def _obey_held(self, engine: Engine) -> None:
        held, self._held = self._held, []
        for command in held:
            self._obey_in_turn(engine, command)

    def _obey_in_turn(self, engine: Engine, command: Callable[[Engine], object]) -> None:
        if self._held:
            self._held.append(command)
        else:
            command(engine)

    def _enter(self, phase: str) -> None:
        if self.phase[0] != phase:
            self._last_step = time.time()
        self.timeline.enter(phase, step=self._policy_version if self._active else None)

    def _start(self, engine: Engine, requests: Sequence[EngineRequest], sink: Sink) -> None:
        if self._policy_version is None and not self._is_torn:
            for request in requests:
                sink(request.request_id, WeightsError(f"nothing is served: {self._refusal}"))
            return
        for request in requests:
            if not self._is_asleep:
                engine.add(request)
            self._active[request.request_id] = _Active.of(request, sink)

    def _step(self, engine: Engine) -> None:
        for output in engine.step():
            self._take(output)
        self._use = self._use.most(engine.use())
        self._last_step = time.time()

    def _flush(self, engine: Engine) -> None:
        """Called before weights change or requests end early: every token is kept, with the version that sampled it."""
        for output in engine.flush():
            self._take(output)

    def _take(self, output: EngineOutput) -> None:
        active = self._active[output.request_id]
        if output.refusal is not None:
            del self._active[output.request_id]
            active.sink(output.request_id, DataError(output.refusal))
            return
        assert self._policy_version is not None, "an engine may only step under attested weights"
        active.token_ids.extend(output.token_ids)
        active.logprobs.extend(output.logprobs)
        active.policy_versions.extend([self._policy_version] * len(output.token_ids))
        if output.finish_reason is not None:
            del self._active[output.request_id]
            done = active.completion(output.finish_reason, routed_experts=output.routed_experts)
            active.sink(output.request_id, done)

    def _update(self, engine: Engine, update: Update, done: Future[tuple[Proof, float]]) -> None:
        if self._on_update == "finish" and self._active and not self._is_torn and not self._is_asleep:
            self._held.append(lambda engine: self._update(engine, update, done))
            return
        self._enter("loading weights")
        started = time.monotonic()
        self._flush(engine)
        resumes = self._on_update == "abort_and_resume" or self._is_asleep
        if resumes:
            engine.abort(list(self._active))
        try:
            if update.adapter is None:
                engine.load(update.tensors())
            else:
                engine.load_adapter(update.tensors(), update.adapter)
            # Running requests may advance during the probe: the engine holds their tokens back until the next step.
            proof = update.prove(engine.prompt_logprobs(update.probe_token_ids))
        except BroadcastError as error:
            self._policy_version, self._is_torn = None, True
            done.set_exception(error)
            return
        except WeightsError as error:
            self._refuse(engine, error)
            done.set_exception(error)
            return
        self._policy_version, self._is_torn, self._is_asleep = update.policy_version, False, False
        self._use_before, self._use = self._use, EngineUse()
        if resumes:
            self._resume(engine)
        done.set_result((proof, time.monotonic() - started))

    def _sleep(self, engine: Engine, done: Future[None], *, keeps_weights: bool) -> None:
        if not self._is_asleep:
            self._flush(engine)
            engine.abort(list(self._active))
            if not self._may_resume:
                self._active = {name: _Active.of(each.request, each.sink) for name, each in self._active.items()}
        engine.sleep(keeps_weights=keeps_weights)
        self._is_asleep = True
        if not keeps_weights:
            self._policy_version, self._is_torn = None, True
        done.set_result(None)

    def _wake(self, engine: Engine) -> None:
        if self._is_asleep and not self._is_torn:
            engine.wake()
            self._is_asleep = False
            self._resume(engine)

    def _probe(self, engine: Engine, token_ids: Sequence[int], done: Future[list[float]]) -> None:
        self._wake(engine)
        done.set_result(engine.prompt_logprobs(token_ids))

    def _resume(self, engine: Engine) -> None:
        for active in self._active.values():
            kept = active.completion(FinishReason.ABORTED) if active.token_ids else None
            engine.add(dataclasses.replace(active.request, kept=kept))

    def _refuse(self, engine: Engine, error: WeightsError) -> None:
        self._policy_version, self._is_torn = None, False
        self._refusal = f"the last load failed: {error}"
        ended, self._active = self._active, {}
        engine.abort(list(ended))
        for request_id, active in ended.items():
            active.sink(request_id, error)

    def _abort(self, engine: Engine, request_ids: Sequence[str]) -> list[_Active]:
        known = [active for request_id in request_ids if (active := self._active.pop(request_id, None))]
        if known:
            engine.abort([active.request.request_id for active in known])
        return known
