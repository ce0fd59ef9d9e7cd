"""`treadwheel train` and `treadwheel check` from a script or a notebook."""

from __future__ import annotations  # so that `help(train)` shows type aliases by name

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import is_async
from cluster.contracts.prompts_config import PromptsConfig
from cluster.record.resume_rules import rows_named
from cluster.record.run_directory import RunDirectory
from treadwheel.functions import Variant, named, plain, refuse_import_time
from treadwheel.runs import Run

if TYPE_CHECKING:
    from deploy.cluster_up.stopping import Stop
    from deploy.preflight import Report

Config = str | os.PathLike[str] | Mapping[str, Any] | RunConfig
Callback = Callable[[int, Mapping[str, float]], bool | None]
"""Called as `callback(step, metrics)` once for each step, with its held-out evaluation if it has one, and for step 0 if the starting model
is evaluated. It runs in a thread of its own, while the run goes on. `True` stops the run.

For a step that a stop saves, or that a resumed run learns again, it is called again, without `time/step_s`, `buffer/*` (except
`buffer/num_judged`), `rollout/*` and `eval/*`. An evaluation that a stop interrupted comes alone when the run resumes. So read metrics with
`metrics.get(...)`."""
T = TypeVar("T")


def train(
    config: Config,
    overrides: Sequence[str] = (),
    *,
    judge: Variant | None = None,
    environment: Variant | None = None,
    prompts: Variant | Iterable[Mapping[str, Any]] | None = None,
    callbacks: Sequence[Callback] = (),
    address: str | None = None,
) -> Run:
    """Trains like `treadwheel train`, resuming the run directory's run; returns when the run is finished or a callback has stopped it.

    `config` is a run file, a mapping like one, or a RunConfig; `overrides` are texts such as `"optimizer.learning_rate=3e-4"`. `judge`,
    `environment` and `prompts` replace `reward.judge`, `environment` and the source in `prompts`: a name as in a run file, or a function or
    class of a module or of this script. `prompts` may be rows, which are kept in the run directory. `address` is a Ray cluster's; without
    one the run starts its own.

    Actors that need a function of the calling script import the script: put the call below `if __name__ == "__main__":`.

    Raises ConfigError with all errors of the configuration, before any actor starts; another TreadwheelError if the run fails;
    KeyboardInterrupt for Ctrl-C, which saves first; and an error of a callback, which also stops the run. The same call resumes.
    """
    refuse_import_time("train")
    run_config, rows = _configured(config, overrides, judge, environment, prompts)
    stop = _new_stop()
    sinks = _callback_sinks(callbacks, stop)

    def work() -> None:
        from deploy import preflight
        from deploy.cluster_up.ahead import RayAhead
        from deploy.preflight.at_once import check_settings

        check_settings(run_config, address=address)
        with RayAhead(address) as ahead:
            ahead.import_for(run_config)
            with _stored(rows) as written:
                preflight.check(run_config, address=address, looks_good=ahead.start, ask=ahead.ask)
                written.pop_all()
            from deploy import launch

            launch.train(run_config, address=address, ahead=ahead, sinks=sinks, stop=stop)

    try:
        beside_a_loop(work, stop)
    except KeyboardInterrupt:
        if not any(sink.has_stopped for sink in sinks):
            raise
    for sink in sinks:
        if sink.error is not None:
            raise sink.error
    return Run(run_config.run_dir)


def check(
    config: Config,
    overrides: Sequence[str] = (),
    *,
    judge: Variant | None = None,
    environment: Variant | None = None,
    prompts: Variant | Iterable[Mapping[str, Any]] | None = None,
    address: str | None = None,
) -> Report:
    """The rows that `treadwheel check` prints; arguments as for `train`. Raises ConfigError with all errors of the configuration."""
    refuse_import_time("check")
    run_config, rows = _configured(config, overrides, judge, environment, prompts)

    def work() -> Report:
        from deploy import preflight

        with _stored(rows):
            return preflight.check(run_config, address=address, plays=True)

    return beside_a_loop(work, None)


def beside_a_loop(work: Callable[[], T], stop: Stop | None) -> T:
    """Runs `work` and returns its result. In a notebook, whose thread already has an event loop, it runs in another thread, and "interrupt
    the kernel" presses `stop`. None: it raises KeyboardInterrupt at once, and leaves the work to end by itself."""
    if not _has_a_loop():
        return work()
    threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="treadwheel")
    done = threads.submit(work)
    try:
        with _hearing_ctrl_c():
            return _result(done, stop)
    finally:
        threads.shutdown(wait=done.done())


def _result(done: Future[T], stop: Stop | None) -> T:
    while True:
        try:
            return done.result()
        except KeyboardInterrupt:
            if stop is None or done.done():
                raise
            stop.press()


@contextlib.contextmanager
def _hearing_ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in the block. The handler of `asyncio.run` would only cancel the task, which waits in the block."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):  # ignored, as below nohup
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _has_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _callback_sinks(callbacks: object, stop: Stop) -> list[_CallbackSink]:
    """Raises ConfigError unless `callbacks` is a list of functions: otherwise the run would fail after its first step."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise ConfigError(f"callbacks={callbacks!r} is no list; give one of functions, such as [my_callback]")
    for index, callback in enumerate(cast("Sequence[object]", callbacks)):
        if not callable(callback):
            raise ConfigError(
                f"callbacks[{index}]={callback!r} is no function; it is called as callback(step, metrics)"
            )
        if is_async(callback):
            raise ConfigError(
                f"callbacks[{index}]={callback!r} is asynchronous; a callback is called in a thread of its own, so write it with def"
            )
    return [_CallbackSink(callback, stop) for callback in cast("Sequence[Callback]", callbacks)]


def _new_stop() -> Stop:
    from deploy.cluster_up.stopping import Stop

    return Stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Prompts that were given as rows: a file in the run directory, named by its content, so that a resumed run refuses other rows."""

    directory: RunDirectory
    content: bytes

    @property
    def name(self) -> str:
        return rows_named(self.content)

    @property
    def path(self) -> str:
        return self.directory.path(self.name)


@contextlib.contextmanager
def _stored(rows: _Rows | None) -> Iterator[contextlib.ExitStack]:
    """Writes the rows and removes them at the end, unless the caller drops the stack's callbacks."""
    with contextlib.ExitStack() as written:
        if rows is not None and not rows.directory.exists(rows.name):
            rows.directory.refuse_if_busy()
            _write(rows, written)
        yield written


def _write(rows: _Rows, written: contextlib.ExitStack) -> None:
    directory = rows.directory
    is_new = directory.is_local and not os.path.exists(directory.path())
    directory.make()
    if is_new:
        written.callback(_remove_if_empty, directory.path())
    directory.write_file(rows.name, rows.content)
    written.callback(_remove_unless_used, rows)


def _remove_unless_used(rows: _Rows) -> None:
    if rows.directory.owner() is None:  # else a run that began meanwhile reads them
        rows.directory.remove(rows.name)


def _remove_if_empty(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _configured(
    config: Config,
    overrides: Sequence[str],
    judge: Variant | None,
    environment: Variant | None,
    prompts: Variant | Iterable[Mapping[str, Any]] | None,
) -> tuple[RunConfig, _Rows | None]:
    """The configuration and, if `prompts` are rows, the rows whose file it names. Writes nothing."""
    from deploy.config import loading

    overrides = _texts(overrides)
    _search_here()
    values, source = _read(config)
    if judge is not None:
        reward = values.get("reward")
        rest = reward if isinstance(reward, Mapping) else {}
        values["reward"] = {**rest, "judge": named(judge, argument="judge")}
    if environment is not None:
        values["environment"] = named(environment, argument="environment")
    if prompts is None:
        return loading.validated(values, overrides, source=source), None
    own = _own_settings(values.get("prompts"))
    if isinstance(prompts, str | Mapping) or callable(prompts):
        name = named(cast(Variant, prompts), argument="prompts")
        values["prompts"] = {**own, **({"name": name} if isinstance(name, str) else name)}
        return loading.validated(values, overrides, source=source), None
    lines = _lines(prompts)
    # Validated first with a source that needs no file, to check the other settings and find the run directory.
    placed = loading.validated(
        {**values, "prompts": {**own, "name": "repeat", "message": ""}}, overrides, source=source
    )
    rows = _Rows(directory=RunDirectory(placed.run_dir), content="".join(lines).encode())
    values["prompts"] = {**own, "name": "file", "path": rows.path}
    return loading.validated(values, overrides, source=source), rows


def _texts(overrides: object) -> list[str]:
    """Raises ConfigError unless the overrides are texts."""
    if isinstance(overrides, str | Mapping) or not isinstance(overrides, Iterable):
        raise ConfigError(f"overrides is a {type(overrides).__name__}; give a list, such as ['num_steps=50']")
    texts: list[str] = []
    for index, each in enumerate(cast(Iterable[object], overrides)):
        if not isinstance(each, str):
            raise ConfigError(f"overrides[{index}]={each!r} is no text; write it as 'num_steps=50'")
        texts.append(each)
    return texts


def _lines(prompts: object) -> list[str]:
    """The rows as lines of a JSON-lines file. Raises ConfigError for anything but a row, and for a value that JSON cannot represent."""
    example = "{'prompt': '2 + 2 =', 'answer': '4'}"
    if not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts={prompts!r} is no source; give its name, a function, or rows such as {example}")
    lines = [_line(row, number, example) for number, row in enumerate(cast(Iterable[object], prompts))]
    if not lines:
        raise ConfigError(f"prompts is empty; give at least one row, such as {example}")
    return lines


def _line(row: object, number: int, example: str) -> str:
    if not isinstance(row, Mapping):
        raise ConfigError(f"prompts: row {number} is {row!r}; each is a mapping of columns, such as {example}")
    columns: list[str] = []
    for name, value in cast(Mapping[Any, Any], row).items():
        try:
            columns.append(json.dumps({name: value}, default=plain)[1:-1])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"prompts: row {number}, column {name!r}: {error}") from error
    return f"{{{', '.join(columns)}}}\n"


def _search_here() -> None:
    """Makes modules of the working directory importable, as the command does. Last, so that a json.py there does not replace Python's."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def _read(config: Config) -> tuple[dict[str, Any], str]:
    from deploy.config import loading

    if isinstance(config, RunConfig):
        return config.model_dump(mode="json"), "the configuration"
    if isinstance(config, Mapping):
        try:
            return json.loads(json.dumps(dict(config), default=plain)), "the configuration"
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the configuration: {error}") from error
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config={config!r} is no run; give a run file, a mapping like one, or a RunConfig")
    path = os.fspath(config)
    values = loading.read(path) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping of sections such as 'model:'")
    return values, path


def _own_settings(prompts: Any) -> dict[str, Any]:
    """The settings of the section `prompts` that do not belong to its source, such as the limit of length."""
    if not isinstance(prompts, Mapping):
        return {}
    own = PromptsConfig.model_fields.keys() - {"name", "params", "sources"}
    return {name: value for name, value in prompts.items() if name in own}


class _CallbackSink:
    """Passes each step's metrics to a callback."""

    def __init__(self, callback: Callback, stop: Stop) -> None:
        self._callback = callback
        self._stop = stop
        self.has_stopped = False
        self.error: Exception | SystemExit | None = None

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        if self.has_stopped:
            return
        try:
            self.has_stopped = self._asks_to_stop(self._callback(version, metrics))
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code; `train` raises it again
            self.error, self.has_stopped = error, True
        if self.has_stopped:
            self._stop.ask()

    def _asks_to_stop(self, answer: object) -> bool:
        """Raises ConfigError for anything but a truth value or None: the value of a logger's call would stop the run."""
        if answer is not None and not isinstance(answer, bool | np.bool_):
            raise ConfigError(
                f"callbacks: {self._callback!r} returned {answer!r:.80}; return True to stop the run, else False or None"
            )
        return bool(answer)

    def event(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...
