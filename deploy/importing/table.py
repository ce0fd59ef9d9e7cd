"""The table of a peer: each row says which of its settings make which of ours. What no row makes is refused or dropped by name."""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin
from deploy.importing.script import Unresolved
from learner.algorithms.objective.inert import waits_for_ratios

Made = dict[str, Any]
"""Our settings by their full names."""

NUMBER, NO_NUMBER = (int, float), (int, float, type(None))
"""Types of a setting that must be a number, and of one that may be null too."""

_SAID = {
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
    """A peer's configuration, as the rows read it: what the file says, else the peer's default."""

    values: Mapping[str, Any]
    """By full name, as the file has them."""
    defaults: Mapping[str, Any]
    """Of all settings that a row may read. A value must be of its default's type; a default of None takes any."""
    types: Mapping[str, tuple[type, ...]] = field(default_factory=dict[str, tuple[type, ...]])
    """Of settings whose default does not say it."""
    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    """What the run file says of the import as a whole."""
    read: list[str] = field(default_factory=list[str])
    """Names since the last `drain_read`, in order."""

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
            self.refuse(name, f"must be {' or '.join(dict.fromkeys(_SAID[each] for each in allowed))}")
            return default
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(name, "must be a finite number")
            return default
        return value

    def counts(self, *names: str) -> list[int]:
        """Settings that must be whole numbers above 0; one that is not is refused, and counts as 1."""
        found: list[int] = []
        for name in names:
            value = self[name]
            if type(value) is not int or value < 1:
                self.refuse(name, "must be a whole number above 0")
                value = 1
            found.append(value)
        return found

    def refuse(self, name: str, way_out: str) -> None:
        shown = self.values.get(name, self.defaults.get(name))
        self.problems.append(f"{name}={shown!r} {way_out}")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def drain_read(self) -> str:
        """What was read since the last call, for a comment: `beta=0.04`, of defaults alone `epsilon=0.2 (default)`."""
        said = [f"{name}={self.values[name]}" for name in self.read if name in self.values]
        left = [f"{name}={self.defaults[name]} (default)" for name in self.read if self.defaults[name] is not None]
        self.read.clear()
        return ", ".join(said or left)


def _types_like(default: Any) -> tuple[type, ...]:
    if default is None:
        return ()
    return NUMBER if type(default) in NUMBER else (type(default),)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Settings of the peer that make settings of ours."""

    of: str
    """The peer's settings, all that `make` reads, with spaces between them."""
    ours: str
    """What `make` may set, written so too; empty for a row that only checks."""
    make: Callable[[Given], Made]
    """Our settings. It refuses what it cannot say faithfully, and then what it returns does not matter."""
    note: str = ""
    """What else a reader should know, in the documentation."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    title: str
    version: str
    """The release whose settings the table has."""
    read: Callable[[str, Sequence[str]], dict[str, Any]]
    """Settings of a file by its path, and of more words `key=value`."""
    defaults: Mapping[str, Any]
    types: Mapping[str, tuple[type, ...]]
    """See `Given`."""
    rows: tuple[Row, ...]
    dropped: Mapping[str, str]
    """Reason to settings that change no mathematics here, with spaces between them; `*` stands for any characters."""

    def reason_to_drop(self, name: str) -> str | None:
        for reason, patterns in self.dropped.items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split()):
                return reason
        return None


@dataclass(frozen=True, kw_only=True)
class Imported:
    settings: Made
    comments: Mapping[str, str]
    """What each of our settings was made of."""
    notes: tuple[str, ...]
    dropped: Mapping[str, tuple[str, ...]]
    """Reason to settings of the file."""


def imported(values: Mapping[str, Any], peer: Peer, *, source: str) -> Imported:
    """Our settings for a peer's. Raises one ConfigError for all that cannot be said here: setting, value, way out."""
    values = _with_whole_mappings(values, peer)
    given = Given(values=values, defaults=peer.defaults, types=peer.types)
    dropped: dict[str, tuple[str, ...]] = {}
    for name in values:
        reason = None if name in peer.defaults else peer.reason_to_drop(name)
        if name.startswith("$"):
            given.refuse(name, "is not resolved; write its words in its place, or leave it out")
        elif reason is not None:
            dropped[reason] = (*dropped.get(reason, ()), name)
        elif name not in peer.defaults:
            given.refuse(
                name,
                f"is no setting of {peer.title} {peer.version} that is known here; write that release's, or leave it out",
            )
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
    dropped["so it is here already"] = tuple(name for name in silent if name in checked)
    dropped["without effect beside the other settings"] = tuple(name for name in silent if name not in checked)
    if not given.problems:
        _leave_out_what_cannot_act(settings, given)
    if given.problems:
        found = list(dict.fromkeys(given.problems))
        raise ConfigError(f"{source}: {len(found)} to settle\n  " + "\n  ".join(found))
    return Imported(
        settings=settings,
        comments=comments,
        notes=tuple(given.notes),
        dropped={reason: names for reason, names in dropped.items() if names},
    )


def _with_whole_mappings(values: Mapping[str, Any], peer: Peer) -> dict[str, Any]:
    """A mapping that is one setting of the table, which a file of hydra's has key by key."""
    whole: dict[str, Any] = {}
    for name, value in values.items():
        is_known = name in peer.defaults or peer.reason_to_drop(name) is not None
        setting = None if is_known else next((each for each in peer.defaults if name.startswith(f"{each}.")), None)
        if setting is None:
            whole[name] = value
        else:
            whole[setting] = {**(whole.get(setting) or {}), name.removeprefix(f"{setting}."): value}
    return whole


def _leave_out_what_cannot_act(settings: Made, given: Given) -> None:
    """Bounds on ratios, where a step makes one update. A peer takes them silently; here a run that sets one is refused."""
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
                f"A step makes one update, at whose ratio of 1 no bound acts. With several updates, give {plugin.name} back: {shown}."
            )


def last_share(kind: str, length: int, *, steps: int | None = None, lowest: float = 0.0) -> float:
    """Share of the peak rate at the last of `steps`, by default all, of a peer's decay, which reaches `lowest` after `length` steps.

    Our decay ends at the last step: with `lowest` there, a run of two steps would learn in one.
    """
    made = (length if steps is None else steps) - 1
    decayed = (length - made) / length if kind == "linear" else 0.5 * (1 + math.cos(math.pi * made / length))
    return lowest + (1 - lowest) * decayed


def same(name: str, ours: str, note: str = "") -> Row:
    """The peer's value is ours; None leaves ours out."""

    def make(given: Given) -> Made:
        value = given[name]
        return {} if value is None else {ours: value}

    return Row(of=name, ours=ours, make=make, note=note)


def only(way_out: str, allowed: Mapping[str, Any]) -> Row:
    """Settings of which we have some values: a tuple of them, or one."""
    choices = {name: value if isinstance(value, tuple) else (value,) for name, value in allowed.items()}

    def make(given: Given) -> Made:
        for name, values in choices.items():
            if given[name] not in values:
                given.refuse(name, f"is not here: {way_out}")
        return {}

    return Row(of=" ".join(choices), ours="", make=make, note=f"{way_out[0].upper()}{way_out[1:]}.")
