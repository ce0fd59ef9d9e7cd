"""Plain values that pass between the processes of a program and of its tests, and the proxies by which tests use the program's objects.

A program must not decide whether a value of the tests is right, so a proxy equals only itself, and is computed only with other proxies.
"""

import builtins
import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any, TextIO

_SCALARS = (bool, int, float, str, type(None))
_MOST = 2**1024
"""Whole numbers with a larger absolute value are sent in hexadecimal: Python refuses to convert more than 4,300 decimal digits."""
_NOT_RAISED = (
    # These would end a loop of the test, which would then seem to pass (see PEP 479).
    StopIteration,
    StopAsyncIteration,
    # These cannot be built from a message alone.
    UnicodeDecodeError,
    UnicodeEncodeError,
    UnicodeTranslateError,
    ExceptionGroup,
)
_KINDS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_WRITTEN: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "Decimal": (Decimal, str, lambda text: _quiet(Decimal(text))),
    "Fraction": (Fraction, str, Fraction),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),  # before its base class
    "date": (date, date.isoformat, date.fromisoformat),
}
"""Types sent as text, each with its writer and reader."""
_CHANGEABLE = (list, dict, set, deque)
_ASKING = ("setattr", "next", "getitem", "setitem", "delitem", "len", "bool", "str", "repr", "enter")
"""Methods that the program's object answers alone."""
_COMPARING = ("lt", "le", "gt", "ge")
_COMPUTING = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "and_", "or_", "xor")


class UnsendableError(TypeError):
    """The tests passed the program a value that is not plain, such as a lambda."""


class Ended(BaseException):
    """The program's process has ended."""


class Program:
    """The tests' connection to the program's process."""

    def __init__(self, answers: TextIO, questions: TextIO) -> None:
        self._answers = answers
        self._questions = questions
        self._errors: dict[str, _ErrorClass] = {}
        self.has_ended = False

    def ask(self, *what: Any) -> Any:
        """The program's answer. Raises as `call`."""
        return self._ask(*what)[0]

    def call(self, function: "_Object", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result. If that is None, its in-place changes to arguments are copied back. Otherwise arguments stay unchanged, so
        that a program cannot empty the value that it is compared with.

        Raises the program's exception as its nearest class that is builtin and takes a message, or that the tests name, else as
        RuntimeError."""
        value, changed = self._ask("call", function, args, kwargs)
        # The program can make its process send changes with any value.
        if value is not None:
            return value
        for kept, left in zip((*args, *kwargs.values()), changed, strict=False):
            if isinstance(kept, _CHANGEABLE) and isinstance(left, _CHANGEABLE):
                kept.clear()
                (kept.extend if isinstance(kept, list | deque) else kept.update)(left)
        return None

    def _ask(self, *what: Any) -> tuple[Any, Any]:
        """The answer, and for a call that returned None its arguments."""
        question = json.dumps(encode(list(what), None))
        try:
            say(self._questions, question)
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            self.has_ended = True
            raise Ended
        status, *answer = json.loads(line)
        if status == "ok":
            value, changed = (decode(each, self._found) for each in answer)
            return value, changed
        names, message, number = answer
        kind = self._nearest(names)
        raise kind.made(message, _Object(self, number)) if isinstance(kind, _ErrorClass) else kind(message)

    def _found(self, found: Any) -> Any:
        """The object of a number. A class of exceptions comes with the names of its bases."""
        if not isinstance(found, list):
            return _Object(self, found)
        number, names = found
        # Never a class of Python's own, which would catch the errors of the test.
        members = {"_object": _Object(self, number), "__getattr__": lambda error, name: getattr(error._error, name)}
        return self._errors.setdefault(names[0], _ErrorClass(names[0], (self._nearest(names[1:]),), members))

    def _nearest(self, names: list[str]) -> type[Exception]:
        for name in names:
            kind = getattr(builtins, name, self._errors.get(name))
            if isinstance(kind, type) and issubclass(kind, Exception) and kind not in _NOT_RAISED:
                return kind
        return RuntimeError


class Globals:
    """The program's globals, without Python's builtins."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("global", name)


class _Object:
    """A proxy of an object of the program that is not a plain value: a function, a class, an instance.

    It equals only itself, and `in` compares here with the items that it lists: the program must not decide whether a value of the tests is
    right. So it is ordered and computed with other objects of the program alone, and what it computes is no plain value.
    """

    __slots__ = ("_number", "_program")

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask("get", self, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._program.ask("list", self))

    def __contains__(self, value: Any) -> bool:
        return value in self._program.ask("list", self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The program neither suppresses an error of the test nor replaces it."""
        with contextlib.suppress(*([Exception] if kind else [])):
            self._program.ask("exit", self, kind and kind.__name__)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, _Object) and self._program.ask("isinstance", value, self) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, _Object) and self._program.ask("issubclass", kind, self) is True


def _asking(name: str) -> Callable[..., Any]:
    return lambda one, *given: one._program.ask(name, one, *given)


def _with_another(name: str) -> Callable[[_Object, Any], Any]:
    def method(one: _Object, other: Any) -> Any:
        if not isinstance(other, _Object):
            return NotImplemented
        said = one._program.ask(name, one, other)
        return said if isinstance(said, bool if name in _COMPARING else _Object) else NotImplemented

    return method


for _name in _ASKING:
    setattr(_Object, f"__{_name}__", _asking(_name))
for _name in (*_COMPARING, *_COMPUTING):
    setattr(_Object, f"__{_name.rstrip('_')}__", _with_another(_name))


class _ErrorClass(type):
    """A class of exceptions that stands for one of the program, so that tests can catch it. Calls and attributes are the program's."""

    _object: _Object

    def made(cls, message: str, error: _Object) -> Exception:
        made = type.__call__(cls, message)
        made._error = error
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._object(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._object, name)

    def __instancecheck__(cls, value: Any) -> bool:
        return type.__instancecheck__(cls, value) or cls._object.__instancecheck__(value)


class _Named(tuple[Any, ...]):
    """A named tuple."""

    _fields: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name in self._fields:
            return self[self._fields.index(name)]
        raise AttributeError(name)


def encode(value: Any, objects: list[Any] | None) -> Any:
    """The value as JSON. An object that is not plain is stored in `objects` and sent as its number. Raises UnsendableError for it if
    `objects` is None."""
    if isinstance(value, int) and abs(value) > _MOST:
        return ["int", hex(value)]
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if (remote := _remote(value)) is not None:
        return ["object", remote._number]
    if isinstance(value, dict):
        return ["dict", [[encode(key, objects), encode(item, objects)] for key, item in value.items()]]
    if (fields := _fields_of(value)) is not None:
        return ["named", [fields, [encode(item, objects) for item in value]]]
    for name, (kind, write, _) in _WRITTEN.items():
        if isinstance(value, kind):
            return [name, write(value)]
    for name, kind in _KINDS.items():
        if isinstance(value, kind):
            return [name, [encode(item, objects) for item in value]]
    if isinstance(value, slice):
        return ["slice", [encode(each, objects) for each in (value.start, value.stop, value.step)]]
    if hasattr(value, "tolist") and not isinstance(value, type):
        return encode(value.tolist(), objects)
    if objects is None:
        raise UnsendableError(
            f"a {type(value).__name__} is not a plain value, and only plain values pass between the tests and the program; "
            "change the tests, or drop this prompt"
        )
    objects.append(value)
    number = len(objects) - 1
    if isinstance(value, type) and issubclass(value, Exception):
        return ["object", [number, [kind.__name__ for kind in value.__mro__]]]
    return ["object", number]


def _fields_of(value: Any) -> list[str] | None:
    """Of a named tuple."""
    fields = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    return [*map(str, fields)] if isinstance(fields, Sequence) else None


def _remote(value: Any) -> _Object | None:
    """The object of the program that the value stands for."""
    if isinstance(type(value), _ErrorClass):
        return value._error
    return value if isinstance(value, _Object) else value._object if isinstance(value, _ErrorClass) else None


def decode(value: Any, find: Callable[[int], Any]) -> Any:
    """The inverse of `encode`. `find` returns the object of a number."""
    if not isinstance(value, list):
        return value
    kind, items = value
    if kind == "object":
        return find(items)
    if kind == "named":
        named = _Named(decode(item, find) for item in items[1])
        named._fields = items[0]
        return named
    if kind == "int":
        return int(items, 16)
    if kind == "complex":
        return complex(*items)
    if kind == "bytes":
        return bytes.fromhex(items)
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in items}
    if kind == "slice":
        return slice(*(decode(item, find) for item in items))
    if kind in _WRITTEN:
        return _WRITTEN[kind][2](items)
    return _KINDS[kind](decode(item, find) for item in items)


def _quiet(number: Decimal) -> Decimal:
    """Raises ValueError for a signaling NaN, which raises in every comparison."""
    if number.is_snan():
        raise ValueError("a signaling NaN is not a plain value")
    return number


def say(to: TextIO, message: str) -> None:
    to.write(message + "\n")
    to.flush()
