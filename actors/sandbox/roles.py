"""The roles of a confined process: run a program as a script, serve a program's functions, or run tests that call them.

A program and its tests run in two processes. The program's process only returns plain values. So the program never sees an expected value,
and no manipulation of its own process can decide the tests' result.
"""

import atexit
import builtins
import importlib
import json
import keyword
import operator
import os
import random
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from actors.sandbox.proxies import Ended, Globals, Program, UnsendableError, decode, encode, say

OUT_OF_MEMORY = 77
"""Exit code after an uncaught MemoryError."""
PROGRAM = "__program__"
"""Prefix by which a question names a global of the program, even if Python has a builtin of that name."""
_SOURCE = 3


def run(role: str) -> NoReturn:
    """Descriptors 0 to 2 are the program's standard streams, 3 is its source. The role uses further ones."""
    random.seed(0)
    stdout = sys.stdout
    try:
        _ROLES[role](_read(_SOURCE))
        code = _finish(None, stdout)
    except MemoryError:
        code = OUT_OF_MEMORY
    except SystemExit as error:
        code = _finish(error.code, stdout)
    except BaseException as error:  # noqa: BLE001 - foreign code
        sys.excepthook(type(error), error, error.__traceback__)
        code = _finish(1, stdout)
    os._exit(code)


def _finish(code: Any, stdout: TextIO) -> int:
    """The visible part of an interpreter's shutdown, and the exit code. A full shutdown would take longer than most programs run."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    # The program may have replaced sys.stdout.
    for stream in (getattr(sys, "stdout", None), sys.__stdout__, stdout):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    sys.modules["__main__"].__dict__.clear()  # closes files that the program left open
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def _script(source: str) -> None:
    _execute(source, "__main__")


def _serve(source: str) -> None:
    """Reads requests from descriptor 4 and writes answers to descriptor 5."""
    questions, answers = os.fdopen(4), os.fdopen(5, "w")
    space = _execute(source, "program")
    objects: list[Any] = []
    for line in questions:
        try:
            what, *values = decode(json.loads(line), objects.__getitem__)
            value = _answer(space, what, values)
            changed = [*values[1], *values[2].values()] if what == "call" and value is None else []
            answer = json.dumps(["ok", encode(value, objects), encode(changed, objects)])
        except BaseException as error:  # noqa: BLE001 - foreign code; the error's name and message are the answer
            objects.append(BaseException.with_traceback(error, None))
            names = [kind.__name__ for kind in type(error).__mro__]
            answer = json.dumps(["raised", names, _message(error), len(objects) - 1])
        say(answers, answer)


def _answer(space: dict[str, Any], what: str, values: list[Any]) -> Any:
    match what:
        case "names":
            return [name for name in space if not name.startswith("__")]
        case "global":
            return space[values[0]]
        case "get":
            return getattr(values[0], values[1])
        case "list":
            return list(values[0])
        case "setattr" | "len" | "bool" | "str" | "repr" | "next" | "isinstance" | "issubclass":
            return getattr(builtins, what)(*values)
        case "enter":
            return values[0].__enter__()
        case "exit":
            kind = getattr(builtins, values[1] or "", None)
            return values[0].__exit__(kind, kind and kind(), None)
        case _ if what != "call":
            return getattr(operator, what)(*values)
        case _:
            return values[0](*values[1], **values[2])


def _test(source: str) -> None:
    """Runs each question of a JSON list, an expression or statements, and writes its result to descriptor 6."""
    questions: list[str] = json.loads(source)
    program, results = Program(os.fdopen(4), os.fdopen(5, "w")), os.fdopen(6, "w")
    space: dict[str, Any] = {"__name__": "tests", "inf": float("inf"), "nan": float("nan"), PROGRAM: Globals(program)}
    try:
        space |= dict(_names(program, questions))
    except Ended:
        return
    for question in questions:
        try:
            is_expression = _compiles(question, "eval")
            value = eval(question, space) if is_expression else exec(question, space)
            result = json.dumps(["ok", encode(value if is_expression else None, None)])
        except UnsendableError as error:
            result = json.dumps(["unsendable", str(error)])
        except BaseException as error:  # noqa: BLE001 - foreign code; a test may fail in any way
            result = json.dumps(["raised", f"{type(error).__name__}: {_message(error)}"])
        if program.has_ended:
            return
        say(results, result)


def words_of_python(questions: Sequence[str]) -> set[str]:
    """The words of the questions that name builtins, without keywords."""
    words = {word for question in questions for word in re.findall(r"\w+", question)}
    return {word for word in words if hasattr(builtins, word) and not keyword.iskeyword(word)}


def _names(program: Program, questions: list[str]) -> Iterator[tuple[str, Any]]:
    """The program's globals that the tests mention. Builtins, and modules whose attributes the tests use, keep Python's meaning. But if the
    tests mention a single builtin and none of the program's other names, they test the program's function of that name."""
    found = [name for name in program.ask("names") if any(name in question for question in questions)]
    words = {word for question in questions for word in re.findall(r"\w+", question)}
    of_python = words_of_python(questions)
    is_tested = len(of_python) == 1 and words.isdisjoint(set(found) - of_python)
    for name in found:
        # The program can make its process name __builtins__, which would replace Python's in the tests.
        if name in ("inf", "nan") or name.startswith("__") or (hasattr(builtins, name) and not is_tested):
            continue
        is_module = name in sys.stdlib_module_names and any(f"{name}." in question for question in questions)
        yield name, importlib.import_module(name) if is_module else program.ask("global", name)


def _execute(source: str, name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, "<program>", "exec"), module.__dict__)
    return module.__dict__


def _compiles(source: str, mode: str) -> bool:
    try:
        compile(source, "<test>", mode)
    except SyntaxError:
        return False
    return True


def _message(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:  # noqa: BLE001 - foreign code: a __str__ of the program's
        return ""


def _read(descriptor: int) -> str:
    with os.fdopen(descriptor, encoding="utf-8") as file:
        return file.read()


_ROLES: dict[str, Callable[[str], None]] = {"script": _script, "serve": _serve, "test": _test}
