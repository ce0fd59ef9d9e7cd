import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.sandbox.sandbox import Answer, Sandbox, SandboxConfig, Verdict
from cluster.contracts.errors import WorkerError


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(SandboxConfig())
    yield made
    made.close()


def test_a_program_reads_its_input_and_its_output_is_kept(sandbox):
    ran = sandbox.run("print(sum(map(int, input().split())))", stdin="1 2 3\n")
    assert (ran.verdict, ran.stdout, ran.detail) == (Verdict.OK, "6\n", "")


def test_what_a_program_leaves_for_its_end_is_written(sandbox):
    program = """
import atexit, threading, time
atexit.register(print, "at exit")
threading.stack_size(2**26)
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
out = open(1, "w", closefd=False)
out.write("open file")
"""
    assert sandbox.run(program).stdout.split("\n") == ["thread", "at exit", "open file"]


@pytest.mark.parametrize(
    "end", ["sys.stdout.close()", "sys.stdout = None", "sys.stdout = io.StringIO()", "del sys.stdout"]
)
def test_what_a_program_printed_is_kept_whatever_it_does_with_its_stream(end, sandbox):
    ran = sandbox.run(f"import io, sys\nprint(42)\n{end}")
    assert (ran.verdict, ran.stdout) == (Verdict.OK, "42\n")


@pytest.mark.parametrize(
    ("program", "verdict"),
    [("exit()", "ok"), ("exit(0)", "ok"), ("exit(3)", "crashed"), ("exit('no')", "crashed"), ("1 +", "crashed")],
)
def test_how_a_program_ends_is_its_verdict(program, verdict, sandbox):
    assert sandbox.run(program).verdict == verdict


def test_a_program_that_crashes_says_why(sandbox):
    assert sandbox.run("[][1]").detail.endswith("IndexError: list index out of range")


def test_the_same_program_says_the_same_each_time(sandbox):
    """In another host process too."""
    program = "import random\nprint(random.random(), hash('a'), list({'a', 'b', 'c'}))"
    other = Sandbox(SandboxConfig())
    assert len({each.run(program).stdout for each in (sandbox, sandbox, other)}) == 1
    other.close()


def test_packages_are_there_when_they_are_named_and_only_then(sandbox):
    program = "import numpy.fft\nprint(numpy.arange(4).sum())"
    assert "ModuleNotFoundError" in sandbox.run(program).detail
    named = Sandbox(SandboxConfig(imports=("numpy",)))
    assert named.run(program).stdout == "6\n"
    named.close()


def test_a_program_finds_no_variable_of_the_users(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    made = Sandbox(SandboxConfig())
    assert made.run("import os\nprint('HF_TOKEN' in os.environ)").stdout == "False\n"
    made.close()


def test_a_host_process_that_was_killed_is_a_failure_once_and_then_replaced():
    made = Sandbox(SandboxConfig())
    host = made._host._process.pid
    os.kill(host, signal.SIGSTOP)
    made._host._connection = KillsFirst(made._host._connection, host)
    with pytest.raises(WorkerError, match="sandbox_failed"):
        made.run("print(1)")
    assert made.run("print(1)").stdout == "1\n"
    made.close()


def test_a_host_process_that_ended_between_two_programs_costs_none_of_them():
    made = Sandbox(SandboxConfig())
    made._host._process.kill()
    made._host._process.wait()
    assert made.run("print(1)").stdout == "1\n"
    made.close()


def test_a_program_and_its_host_end_with_the_process_that_asked():
    asks = (
        "from actors.sandbox.sandbox import Sandbox, SandboxConfig\n"
        "made = Sandbox(SandboxConfig())\nprint(made._host._process.pid, flush=True)\nmade.run('import time; time.sleep(60)')"
    )
    process = subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True)
    host = int(process.stdout.readline())
    until(lambda: children(host))
    program = int(children(host)[0])
    process.kill()
    process.communicate()
    until(lambda: is_gone(host) and is_gone(program))


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition, within_s=240):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s
        time.sleep(0.01)


def test_without_confinement_a_program_is_a_user_and_the_log_says_so(caplog):
    made = Sandbox(SandboxConfig(level="none"))
    assert "usr" in made.run("import os\nprint(os.listdir('/'))").stdout
    assert "run unconfined" in caplog.text
    made.close()


BLOCKED = """
import ctypes, errno, struct
libc = ctypes.CDLL(None)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x50000 | errno.ENOSYS), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, struct.pack("HxxxxxxP", 4, ctypes.addressof(code)), 0, 0) == 0
from actors.sandbox.sandbox import Sandbox, SandboxConfig
Sandbox(SandboxConfig(level="landlock"))
"""


def test_a_kernel_without_landlock_is_refused_with_its_reason():
    ran = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True)
    assert "ConfigError: sandbox.level='landlock': nothing confines programs here (kernel" in ran.stderr
    assert "landlock: Function not implemented" in ran.stderr and "or set level: none" in ran.stderr


OLD = """
import os
from actors.sandbox.confinement import Bounds, Landlock, confine
current = Landlock.of_readable(["/usr/lib", "/lib", os.path.dirname(os.__file__)])
old = Landlock(version=2, ruleset=current.ruleset)
bounds = Bounds(time_s=9, wall_s=9, memory_bytes=2**30, output_bytes=2**20)
if not os.fork():
    confine([0, 1, 2], bounds, parent=os.getppid(), landlock=old, filtered=True)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDONLY | os.O_TRUNC):
        try:
            print(os.open("/dev/null", flags) > 2, flush=True)
        except PermissionError:
            print("refused", flush=True)
    os._exit(0)
os.wait()
"""


def test_where_landlock_sees_no_truncation_no_file_opens_for_writing():
    ran = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True)
    assert ran.stdout.split() == ["True", "refused", "refused"]


CONFINED = """
import ctypes, os, resource, socket
from actors.sandbox.confinement import Bounds, Landlock, confine
readable = ["/usr/lib", "/lib", os.path.dirname(os.__file__), "/proc"]
landlock = Landlock.of_readable(readable)
bounds = Bounds(time_s=9, wall_s=9, memory_bytes=2**30, output_bytes=2**20)
listening, asking = socket.create_server(("127.0.0.1", 0)), socket.socket()
address = listening.getsockname()
if not os.fork():
    confine([0, 1, 2, asking.fileno()], bounds, parent=os.getppid(), landlock=landlock, filtered=False)
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(*(int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "NoNewPrivs")))
    libc, signal = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(2, ctypes.byref(signal))
    print(libc.prctl(3), signal.value, os.getcwd())
    print(*(resource.getrlimit(kind) for kind in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE)))
    is_reached = socket.socket(fileno=3).connect_ex(address) == 0
    print(is_reached == (landlock.version < 4), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_process_confines_itself_by_more_than_its_filter(tmp_path):
    """No capability and no new one; not dumpable, killed with its parent, in the root; its limits; no network from Landlock 4 on."""
    root = str(Path(__file__).parents[4])
    ran = subprocess.run(
        [sys.executable, "-c", CONFINED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.splitlines() == ["0 0 0 1", "0 9 /", "(10, 11) (64, 64)", "True"], ran.stderr


def test_a_host_process_does_not_inherit_the_limit_of_its_judges_processor_time():
    before = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (10**6, before[1]))
    try:
        made = Sandbox(SandboxConfig())
        assert resource.prlimit(made._host._process.pid, resource.RLIMIT_CPU) == (before[1], before[1])
        made.close()
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


PROGRAM = """
import math
def double(x): return 2 * x
def fails(x): raise ValueError("bad")
def pairs(n): return {(i, i): {i} for i in range(n)}
def numbers(): yield from range(3)
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
"""


def test_questions_are_answered_with_plain_values_objects_and_errors(sandbox):
    questions = [
        "double(4)",
        "assert double(2) == 5",
        "assert pairs(2) == {(0, 0): {0}, (1, 1): {1}}",
        "assert list(numbers()) == [0, 1, 2]",
        "s = Stack()\nassert s.push(1).push([2]).items == [1, [2]]",
        "try:\n    fails(1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "fails(1)",
        "assert math.isclose(double(0.1), 0.2)",
        "double",
    ]
    answers = sandbox.ask(PROGRAM, questions)
    assert answers[0] == Answer(verdict=Verdict.OK, value=8)
    verdicts = ["ok", "wrong", "ok", "ok", "ok", "ok", "crashed", "ok", "crashed"]
    assert [answer.verdict for answer in answers] == verdicts
    assert answers[6].detail == "ValueError: bad"


FORGERIES = {
    "exits before it is asked": "import os\nos._exit(0)",
    "exits when it is asked": "import os\ndef f(x): os._exit(0)",
    "leaves quietly": "import sys\ndef f(x): sys.exit(0)",
    "equals everything": "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "is a number that equals everything": "class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A(0)",
    "catches assertions": "import builtins\nbuiltins.AssertionError = Exception\ndef f(x): return 0",
    "says that it passed": "def f(x):\n    print('ok', 'passed', flush=True)\n    return 0",
    "redefines what tests compare with": "def f(x): return 0\ndef abs(x): return 0\ndef len(x): return 7\ndef bool(x): return True",
    "writes answers of its own": "import os\nos.write(5, b'[\"ok\", true]\\n' * 9)\ndef f(x): return 0",
    **{
        f"names an object of no number, {number}": (
            f'import os\nos.write(5, b\'["ok", ["list", ["f"]]]\\n\' + b\'["ok", ["object", {number}]]\\n\' * 9)\ndef f(x): return 0'
        )
        for number in ('"x"', "0.5", "null")
    },
    "closes its answers": "import os\nos.close(5)\ndef f(x): return 0",
    "answers with rubbish": "import os\nos.write(5, b'[[[\\n')\ndef f(x): return 0",
    "looks for the tests in its frames": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        if 'question' in frame.f_locals: return 7\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "looks for the tests in its memory": (
        "import gc\ndef f(x): return 7 if any(isinstance(o, str) and 'assert f(3)' in o for o in gc.get_objects()) else 0"
    ),
    "writes to the results": "import os\nfor n in range(6, 64):\n    try: os.write(n, b'[\"ok\", null]\\n')\n    except OSError: pass",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_verdict_is_not_forged_by_a_program_that(name, sandbox):
    questions = ["f", "assert f(3) == 7", "assert abs(f(3) - 7) < 1e-6", "assert f(3) in (7, 8)"]
    answers = sandbox.ask(FORGERIES[name], questions)
    assert {answer.verdict for answer in answers} <= {Verdict.WRONG, Verdict.CRASHED}


def test_a_program_does_not_say_what_infinity_is(sandbox):
    (answer,) = sandbox.ask("inf = 5\ndef f(): return 5", ["assert f() == inf"])
    assert answer.verdict == Verdict.WRONG


def test_a_whole_number_of_any_length_is_an_answer(sandbox):
    program = "def f(n): return -(10**n)"
    answers = sandbox.ask(program, ["f(5000)", "assert f(5000) == -(10**5000)", "assert f(2) == -100"])
    assert [answer.verdict for answer in answers] == [Verdict.OK] * 3
    assert answers[0].value == -(10**5000)


def test_complex_numbers_and_bytes_are_plain_values(sandbox):
    program = "import cmath\ndef f(x): return [x, cmath.phase(x)]\ndef g(x): return (x, {x: b'\\xff'})"
    questions = ["assert f(-1 + 0j) == [-1 + 0j, math.pi]", "assert g(b'a') == (b'a', {b'a': b'\\xff'})", "f(1j)[0]"]
    answers = sandbox.ask(program, ["import math", *questions])
    assert [answer.verdict for answer in answers] == [Verdict.OK] * 4, answers
    assert answers[3].value == 1j


NODE = """
class Node:
    def __init__(self, value):
        self.value, self.next = value, None
def total(node):
    return node.value + (total(node.next) if node.next else 0)
"""
NUMBER = """
import functools
@functools.total_ordering
class N:
    def __init__(self, n): self.n = n
    def __lt__(self, other): return self.n < other.n
    def __eq__(self, other): return self.n == other.n
    def __add__(self, other): return N(self.n + other.n)
    def __repr__(self): return f"N({self.n})"
"""
CONTEXT = """
class Context:
    def __enter__(self):
        self.is_open = True
        return self
    def __exit__(self, kind, error, traceback):
        self.is_open, self.saw = False, kind and kind.__name__
"""
ERRORS = """
class Ours(ValueError): pass
class TooMuch(Ours):
    unit = "m"
    def __init__(self, code):
        super().__init__("much")
        self.code = code
def f(x): raise TooMuch(x)
def name(kind): return kind.__name__
"""


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (
            "from collections import deque\ndef f(x): return deque(x)",
            "from collections import deque\nassert f([1, 2]) == deque([1, 2])",
        ),
        (
            "from decimal import Decimal\ndef f(x): return {Decimal(x)}",
            "from decimal import Decimal\nassert f('0.10') == {Decimal('0.1')}",
        ),
        (
            "from fractions import Fraction as F\ndef f(x): return x / 2",
            "from fractions import Fraction\nassert f(Fraction(1)) == Fraction(1, 2)",
        ),
        (
            "from datetime import timedelta\ndef f(x): return x + timedelta(1)",
            "import datetime\nassert f(datetime.date(2024, 2, 28)).day == 29",
        ),
        ("def f(x): x.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
        ("def f(x): x[:] = zip(*x)", "m = [[1, 2], [3, 4]]\nassert f(x=m) is None\nassert m == [(1, 3), (2, 4)]"),
        (
            "def f(x, y): x.update(y); y.clear()",
            "a, b = {1: 2}, {3: 4}\nf(a, y=b)\nassert a == {1: 2, 3: 4} and b == {}",
        ),
        ("def f(x): x.discard(1)", "x = {1, 2}\nf(x)\nassert x == {2}"),
        ("class S(list):\n    pass\ndef f(x): return S(x)", "assert f([1]) == [1]"),
        (
            "class S:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)\n"
            "    def __len__(self): return len(self.a)\n    def __getitem__(self, n): return self.a[n]\n"
            "    def __str__(self): return f'S{self.a}'",
            "s = S()\nassert not s\ns.push(4)\nassert s and len(s) == 1 and s[0] == 4 and str(s) == 'S[4]'",
        ),
        (NODE, "n = Node(1)\nn.next = Node(2)\nassert n.next.value == 2 and total(n) == 3"),
        (NUMBER, "assert N(1) < N(2) <= N(2) and max(N(3), N(1), N(2)).n == 3 and not N(1) > N(2)"),
        (
            NUMBER,
            "assert (N(1) + N(2)).n == 3 and repr(N(4)) == 'N(4)' and [n.n for n in sorted([N(2), N(1)])] == [1, 2]",
        ),
        (NUMBER, "assert isinstance(N(1), N) and not isinstance(1, N) and issubclass(N, N)"),
        ("def f():\n    yield 1\n    yield 2", "g = f()\nassert next(g) == 1 and list(g) == [2]"),
        (CONTEXT, "with Context() as opened:\n    assert opened.is_open\nassert not opened.is_open"),
        (
            CONTEXT,
            "opened = Context()\ntry:\n    with opened: raise KeyError\nexcept KeyError: pass\n"
            "assert not opened.is_open and opened.saw == 'KeyError'",
        ),
        (
            "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return [P(1, 2)]\ndef g(p): return p.y",
            "(p,) = f()\nassert p.x == 1 and p == (1, 2) and g(p) == 2",
        ),
        (
            "class S:\n    def __init__(self): self.d = {}\n    def __getitem__(self, k): return self.d[k]\n"
            "    def __setitem__(self, k, v): self.d[k] = v\n    def __delitem__(self, k): del self.d[k]",
            "s = S()\ns['a'] = 1\nassert s['a'] == 1\ndel s['a']\nassert s.d == {}",
        ),
        (
            ERRORS,
            "try:\n    f(3)\nexcept TooMuch as e:\n    assert e.code == 3 and str(e) == 'much'\nelse:\n    assert False",
        ),
        (ERRORS, "try:\n    f(3)\nexcept ValueError as e:\n    assert isinstance(e, TooMuch)\nelse:\n    assert False"),
        (
            ERRORS,
            "import unittest\ncase = unittest.TestCase()\nwith case.assertRaises(Ours): f(3)\n"
            "assert issubclass(TooMuch, Ours) and TooMuch(5).code == 5 and TooMuch.unit == 'm' and name(TooMuch) == 'TooMuch'",
        ),
    ],
)
def test_usual_tests_of_right_programs_pass(program, test, sandbox):
    (answer,) = sandbox.ask(program, [test])
    assert answer.verdict is Verdict.OK, answer


LIES = """
class A:
    n = 0
    E = BaseException
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __eq__ = __instancecheck__ = __subclasscheck__ = __lt__
    def __sub__(self, other): return 0 if isinstance(other, int) else 9
    __rsub__ = __sub__
    def __mul__(self, other): return 9
    def __add__(self, other): return 6
    def __enter__(self): return self
    def __exit__(self, kind, *_):
        if kind: raise KeyError
        return True
    def __next__(self): raise StopIteration
    def __iter__(self): return self
def f(x): return A()
E = AssertionError
"""


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x):\n    x.clear()\n    return []", "x = [1]\nassert f(x) == [2 * n for n in x]"),
        ("def f(x):\n    x.clear()\n    return 0", "x = {1: 2}\nassert f(x) == sum(x)"),
        (
            "class A:\n    def __contains__(self, x): return True\n    def __iter__(self): return iter([])\ndef f(x): return A()",
            "assert 3 in f(3)",
        ),
        (
            "class A:\n    def __len__(self): return 10**9\n    def __iter__(self): return iter([])\ndef f(x): return A()",
            "assert list(f(3)) == [3]",
        ),
        ("from decimal import Decimal\ndef f(x): return Decimal('sNaN')", "assert f(3) == 3"),
        (LIES, "assert f(3) < 7"),
        (LIES, "assert not f(3) < 7"),
        (LIES, "assert 7 >= f(3)"),
        (LIES, "assert f(3) - 7 < 1"),
        (LIES, "assert not (f(3) - 7).n"),
        (LIES, "assert 7 - f(3) < f(3)"),
        (LIES, "assert f(3) * f(3) == 9"),
        (LIES, "assert f(3) + f(3) == 6"),
        (LIES, "assert isinstance(f(3), int)"),
        (LIES, "assert isinstance(7, A)"),
        (LIES, "with f(3): assert False"),
        (LIES, "try:\n    with f(3): assert False\nexcept KeyError: pass"),
        (LIES, "try:\n    assert f(3) == 7\nexcept E: pass"),
        (LIES, "try:\n    assert f(3) == 7\nexcept A.E: pass"),
        (LIES, "import contextlib\nwith contextlib.suppress(E, f(3)): assert f(3) == 7"),
        (LIES, "assert all(next(f(3)) == x for x in [7])"),
        (LIES, "assert all(map(lambda x: next(f(3)) == x, [7]))"),
        ("def f(x): x.append(4)", "x = (3,)\nf(x)\nassert x == (3, 4)"),
    ],
)
def test_no_program_passes_by_changing_what_it_is_compared_with_or_by_saying_that_it_is_right(program, test, sandbox):
    (answer,) = sandbox.ask(program, [test])
    assert answer.verdict is not Verdict.OK, answer


FORGES_ITS_ANSWER = """
import sys
roles = sys.modules["actors.sandbox.roles"]
def f(x):
    def say(to, message, truly=roles.say):
        roles.say = truly
        truly(to, {said!r})
    roles.say = say
"""


@pytest.mark.parametrize(
    ("said", "test", "verdict"),
    [
        ('["ok", ["list", []], ["list", [["list", []]]]]', "x = [3, 1]\nassert f(x) == sorted(x)", "wrong"),
        ('["ok", ["list", []], ["list", [["list", []]]]]', "x = [3, 1]\nassert f(x=x) == sorted(x)", "wrong"),
        ('["ok", 0, ["list", [["dict", []]]]]', "x = {1: 2}\nassert f(x) == sum(x)", "wrong"),
        ('["ok", null, ["list", [["list", [1, 3]]]]]', "x = [3, 1]\nassert f(x) is None and x == [1, 3]", "ok"),
    ],
)
def test_only_a_call_that_returns_none_changes_its_arguments_whatever_the_program_says(said, test, verdict, sandbox):
    (answer,) = sandbox.ask(FORGES_ITS_ANSWER.format(said=said), [test])
    assert answer.verdict == verdict, answer


FORGES_ITS_NAMES = """
import sys
roles = sys.modules["actors.sandbox.roles"]
def say(to, message, truly=roles.say):
    roles.say = truly
    truly(to, '["ok", ["list", ["__builtins__", "f"]], ["list", []]]')
roles.say = say
def f(x): return 0
__builtins__ = {"abs": lambda x: 0}
"""


def test_a_program_does_not_replace_the_builtins_of_its_tests(sandbox):
    (answer,) = sandbox.ask(FORGES_ITS_NAMES, ["assert abs(f(3) - 7) < 1e-6  # not of __builtins__"])
    assert answer.verdict == Verdict.WRONG


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import json\n    json.loads(x)", "ValueError"),
        ("b'\\xff'.decode()", "ValueError"),
        ("class Mine(KeyError): pass\n    raise Mine(x)", "LookupError"),
    ],
)
def test_an_error_is_caught_as_the_class_of_pythons_own_that_it_comes_from(body, expected, sandbox):
    question = f"try:\n    f('x')\nexcept {expected}:\n    pass\nelse:\n    assert False"
    (answer,) = sandbox.ask(f"def f(x):\n    {body}", [question])
    assert answer.verdict is Verdict.OK, answer


def test_a_function_with_a_name_of_pythons_own_is_the_programs_where_it_alone_is_tested(sandbox):
    program = "n = 5\ndef sum(a, b): return 6\ndef abs(x): return 0"
    tests = ["assert sum(10, 15) == 6", "assert sum(4, 6) == 6"]
    assert [answer.verdict for answer in sandbox.ask(program, tests)] == [Verdict.OK] * 2
    (both,) = sandbox.ask(program, ["assert abs(sum(10, 15) - 7) < 1"])
    assert both.verdict is Verdict.CRASHED, "which of the two is tested cannot be known"


SEEKS_THE_SOCKET = """
import os, stat
for number in range(3, 300):
    try:
        print(stat.S_ISSOCK(os.fstat(number).st_mode))
    except OSError:
        pass
"""


def test_a_program_has_no_socket_of_its_host_where_whoever_asks_has_many_files_open():
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(90)]
    try:
        made = Sandbox(SandboxConfig())
        assert made.run(SEEKS_THE_SOCKET).stdout == ""
        made.close()
    finally:
        for number in opened:
            os.close(number)


def test_an_answer_to_another_request_is_none_and_the_host_process_is_replaced():
    made = Sandbox(SandboxConfig())
    made._host._num_asked += 1
    reply, made._host._connection = made._host._connection, Shifted(made._host._connection)
    with pytest.raises(WorkerError, match="it answered another request"):
        made.run("print(1)")
    assert made._host._connection is not reply and made.run("print(2)").stdout == "2\n"
    made.close()


class Wrapped:
    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


class KillsFirst(Wrapped):
    """Ends the host process when its reply is awaited."""

    def __init__(self, inner, host):
        super().__init__(inner)
        self._host = host

    def recv(self, size):
        os.kill(self._host, signal.SIGKILL)
        return self._inner.recv(size)


class Shifted(Wrapped):
    """Gives the reply to the request before."""

    def recv(self, size):
        number, ends = json.loads(self._inner.recv(size))
        return json.dumps([number - 1, ends]).encode()


def test_an_endless_function_is_out_of_time_and_what_came_before_it_counts(sandbox, monkeypatch):
    monkeypatch.setattr(sandbox, "config", SandboxConfig(time_s=0.5))
    program = "def f(x):\n    while x: pass\n    return 1"
    answers = sandbox.ask(program, ["f(0)", "f(1)", "f(0)"])
    assert [answer.verdict for answer in answers] == [Verdict.OK, Verdict.OUT_OF_TIME, Verdict.OUT_OF_TIME]


def test_a_function_that_starts_threads_without_end_is_ended(sandbox):
    program = (
        "import threading, time\nthreading.stack_size(2**15)\n"
        "def f():\n    while True: threading.Thread(target=time.sleep, args=(60,)).start()"
    )
    assert sandbox.ask(program, ["f()"]) == [Answer(verdict=Verdict.CRASHED, detail="more than 64 threads")]


def test_a_function_that_takes_all_memory_says_so(sandbox):
    answers = sandbox.ask("def f(): return len(bytearray(8 << 30))", ["assert f() == 1"])
    assert answers[0].verdict == Verdict.OUT_OF_MEMORY
