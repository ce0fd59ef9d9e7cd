"""The table of a peer: each row makes some of our settings from some of the peer's. A setting without a row is dropped or refused."""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.contracts.errors import ConfigError
from cluster.contracts.hiding import hidden
from cluster.contracts.plugins import Plugin
from deploy.importing.script import Default, Unresolved
from learner.algorithms.objective.inert import waits_for_ratios

T = TypeVar("T")

Made = dict[str, Any]
"""Our settings by full name."""

NUMBER, NO_NUMBER = (int, float), (int, float, type(None))
"""Types of a setting that must be a number, and of a setting that may also be null."""

_TYPE_NAMES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}


@dataclass(kw_only=True)
class Given:
    """A peer's configuration for the rows: the file's values, else the peer's defaults."""

    values: Mapping[str, Any]
    """The file's values, by full name."""
    defaults: Mapping[str, Any]
    """Defaults of all settings that a row may read. A value must have its default's type; with the default None any type."""
    types: Mapping[str, tuple[type, ...]] = field(default_factory=dict[str, tuple[type, ...]])
    """Types of settings whose default does not determine them."""
    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    """Comments at the head of the run file."""
    read: list[str] = field(default_factory=list[str])
    """Names read since the last `drain_read`, in order."""

    def __getitem__(self, name: str) -> Any:
        default = self.defaults[name]
        if name not in self.read:
            self.read.append(name)
        value = self.values.get(name, default)
        if isinstance(value, Unresolved):
            self.refuse(name, "is not resolved; write the value itself")
            return default
        allowed = self.types.get(name) or _types_like(default)
        if allowed and type(value) not in allowed:
            self.refuse(name, f"must be {' or '.join(dict.fromkeys(_TYPE_NAMES[each] for each in allowed))}")
            return default
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(name, "must be a finite number")
            return default
        return value

    def counts(self, *names: str) -> list[int]:
        """Settings that must be whole numbers above 0. Another value is refused, and counts as 1."""
        found: list[int] = []
        for name in names:
            value = self[name]
            if type(value) is not int or value < 1:
                self.refuse(name, "must be a whole number above 0")
                value = 1
            found.append(value)
        return found

    def chosen(self, name: str, known: Mapping[str, T], *, why: str = "is unknown") -> T | None:
        """The entry of `known` for the setting's value. Any other value is refused, and has None."""
        value = self[name]
        if value not in known:
            self.refuse(name, f"{why}; use one of {', '.join(known)}")
        return known.get(value)

    def refuse(self, name: str, way_out: str) -> None:
        shown = self.values.get(name, self.defaults.get(name))
        self.problems.append(f"{name}={shown!r} {way_out}")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def drain_read(self) -> str:
        """The settings read since the last call, for a comment: `beta=0.04`, or `epsilon=0.2 (default)` if all are defaults."""
        written = [f"{name}={self.values[name]}" for name in self.read if name in self.values]
        defaults = [f"{name}={self.defaults[name]} (default)" for name in self.read if self.defaults[name] is not None]
        self.read.clear()
        return ", ".join(written or defaults)


def _types_like(default: Any) -> tuple[type, ...]:
    if default is None:
        return ()
    return NUMBER if type(default) in NUMBER else (type(default),)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Makes some of our settings from some of the peer's."""

    of: str
    """All settings of the peer that `make` reads, with spaces between them."""
    ours: str
    """All of our settings that `make` may set, with spaces between them; empty for a row that only checks."""
    make: Callable[[Given], Made]
    """Returns our settings. Refuses values without an exact equivalent; its result is unused then."""
    note: str = ""
    """Remark in the documentation."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    title: str
    version: str
    """The release from which the table was made."""
    read: Callable[[str, Sequence[str]], dict[str, Any]]
    """Reads the settings of a file, and those of words `key=value`, which replace them."""
    defaults: Mapping[str, Any]
    types: Mapping[str, tuple[type, ...]]
    """See `Given`."""
    rows: tuple[Row, ...]
    dropped: Mapping[str, str]
    """Settings that do not change the mathematics here, by the reason, with spaces between them. `*` matches any characters."""
    moved: Mapping[str, str]
    """Ways out for settings of other releases and scripts that change learning. `*` matches any characters."""

    def in_place_of(self, name: str) -> str:
        """The way out for a setting that the table does not have."""
        found = (way_out for pattern, way_out in self.moved.items() if fnmatch.fnmatchcase(name, pattern))
        return next(found, "write that release's setting; remove it only if it does not change learning")

    def reason_to_drop(self, name: str) -> str | None:
        for reason, patterns in self.dropped.items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split()):
                return reason
        return None


@dataclass(frozen=True, kw_only=True)
class Imported:
    settings: Made
    comments: Mapping[str, str]
    """The peer's settings from which each of our settings was made."""
    notes: tuple[str, ...]
    dropped: Mapping[str, tuple[str, ...]]
    """Dropped settings of the file, by the reason."""


def imported(values: Mapping[str, Any], peer: Peer, *, source: str) -> Imported:
    """Makes our settings from a peer's. Raises one ConfigError for all settings without an equivalent: setting, value, way out."""
    values = _with_whole_mappings(values, peer)
    given = Given(values=values, defaults=peer.defaults, types=peer.types)
    dropped: dict[str, tuple[str, ...]] = {}
    taken: list[str] = []
    for name, value in values.items():
        reason = None if name in peer.defaults else peer.reason_to_drop(name)
        if isinstance(value, Default):
            taken.append(f"{name}={hidden(value, name)}")
        elif name.startswith("$"):
            given.refuse(name, "is not resolved; write its words in its place, or leave it out")
        elif reason is not None:
            dropped[reason] = (*dropped.get(reason, ()), name)
        elif name not in peer.defaults:
            given.refuse(name, f"is not a known setting of {peer.title} {peer.version}; {peer.in_place_of(name)}")
    if taken:
        given.note(f"The environment may set variables of the script. Their defaults were taken: {', '.join(taken)}.")
    settings: Made = {}
    comments: dict[str, str] = {}
    origins: set[str] = set()
    checked: set[str] = set()
    for row in peer.rows:
        made = row.make(given)
        (origins if made else checked).update(given.read)
        settings |= made
        comments |= dict.fromkeys(made, given.drain_read())
    silent = [name for name in values if name in peer.defaults and name not in origins]
    dropped["treadwheel does the same anyway"] = tuple(name for name in silent if name in checked)
    dropped["without effect with the other settings"] = tuple(name for name in silent if name not in checked)
    if given.problems:
        found = list(dict.fromkeys(given.problems))
        raise ConfigError(f"{source}: {len(found)} problem(s)\n  " + "\n  ".join(found))
    _remove_idle_bounds(settings, given)
    return Imported(
        settings=settings,
        comments=comments,
        notes=tuple(given.notes),
        dropped={reason: names for reason, names in dropped.items() if names},
    )


def _with_whole_mappings(values: Mapping[str, Any], peer: Peer) -> dict[str, Any]:
    """Joins the keys of a mapping that is one setting in the table: `hydra` reads them one by one."""
    whole: dict[str, Any] = {}
    for name, value in values.items():
        is_known = name in peer.defaults or peer.reason_to_drop(name) is not None
        setting = None if is_known else next((each for each in peer.defaults if name.startswith(f"{each}.")), None)
        if setting is None:
            whole[name] = value
        else:
            whole[setting] = {**(whole.get(setting) or {}), name.removeprefix(f"{setting}."): value}
    return whole


def _remove_idle_bounds(settings: Made, given: Given) -> None:
    """Removes bounds on ratios if a step makes one update. A peer ignores them silently; here they are an error."""
    if settings["learner.epochs"] * settings["learner.mini_batches"] > 1:
        return
    losses = [settings["algorithm.policy_loss"]] if settings.get("algorithm.proximal") == "recompute" else []
    losses += [settings["algorithm.value"]["loss"]] if "algorithm.value" in settings else []
    for loss in losses:
        plugin = Plugin.model_validate(loss)
        inert = {name: loss.pop(name) for name in plugin.params if waits_for_ratios(plugin, name)}
        if inert:
            shown = ", ".join(f"{name}: {value}" for name, value in inert.items())
            given.note(
                f"A step makes one update, whose ratios are 1, so no bound acts. With several updates, give {plugin.name} back: {shown}."
            )


def last_share(kind: str, length: int, *, steps: int | None = None, lowest: float = 0.0) -> float:
    """Share of the peak rate at the last of `steps` (None: of all) in a peer's decay that reaches `lowest` after `length` steps.

    Our decay ends at the last step: if that had the rate `lowest`, 0 by default, it would learn nothing.
    """
    made = (length if steps is None else steps) - 1
    decayed = (length - made) / length if kind == "linear" else 0.5 * (1 + math.cos(math.pi * made / length))
    return lowest + (1 - lowest) * decayed


def same(name: str, ours: str, note: str = "", *, needs: str = "") -> Row:
    """A row that takes over the peer's value. None leaves our setting out. `needs`: a switch without which the peer ignores its setting."""

    def make(given: Given) -> Made:
        value = given[name] if not needs or given[needs] else None
        return {} if value is None else {ours: value}

    return Row(of=f"{name} {needs}".strip(), ours=ours, make=make, note=note)


def only(way_out: str, names: str, also: Mapping[str, Any] | None = None) -> Row:
    """A row that refuses all values of settings but the peer's defaults. `also`: a second value that is allowed, by setting."""
    more = also or {}

    def make(given: Given) -> Made:
        for name in names.split():
            default = given.defaults[name]
            if given[name] not in (default, more.get(name, default)):
                given.refuse(name, f"is not supported: {way_out}")
        return {}

    return Row(of=names, ours="", make=make, note=f"{way_out[0].upper()}{way_out[1:]}.")
