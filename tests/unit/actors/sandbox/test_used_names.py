import time

import pytest

from actors.sandbox.used_names import look_at


@pytest.mark.parametrize(
    "test",
    [
        "def check(candidate):\n    assert abs(candidate(2) - 4) < 1e-6",
        "METADATA = {'author': 'jt', 'n': -1}\n\ndef check(candidate):\n    assert candidate(2) == 4",
        "import math\nN = 3\nCASES = [math.sqrt(abs(n)) for n in range(N)]\ndef test_f():\n    assert f(N) == CASES",
        "async def test_f():\n    assert await f(2) == 4",
        "def square(x): return x * x\nEXPECTED = square(2)\ndef test_f(): assert f(2) == EXPECTED",
        "import unittest\nclass TestF(unittest.TestCase):\n    n = 2\n    def test_f(self): self.assertEqual(f(self.n), 4)",
        "def test_f():\n    assert f(2) == 4\nif __name__ == '__main__':\n    test_f()",
        "if '__main__' == __name__:\n    assert f(2) == 4",
        "def f(x): return x * x\nassert f(2) == 4",
        "from math import sqrt as f\nassert f(4) == 2",
        "double = lambda x: 2 * x\nassert double(2) == 4",
        "from solution import f\nassert f(2) == 4",
        "assert 2 + 2 == 4",
        "pass",
        "",
    ],
)
def test_tests_that_call_nothing_of_the_program_do_not_use_it(test):
    assert not look_at((test,)).use_program


@pytest.mark.parametrize(
    "test",
    [
        "assert f(2) == 4",
        "assert ANSWER == 42",
        "assert Stack.size == 0",
        "assert callable(f)",
        "assert sum(10, 15) == 6",
        "x = f(2)",
        "x = [3, 1]; assert f(x) == sorted(x)",
        "f = f",
        "total = 0\nfor x in x: total += x",
        "assert [f for f in (1, 2)] == [1, 2]\nassert f(2) == 4",
        "def check(candidate):\n    assert candidate(2) == 4\ncheck(f)",
        "def test_f():\n    assert f(2) == 4\ntest_f()",
        "def inner():\n    assert f(2) == 4\ndef outer():\n    inner()\nouter()",
        "def check(x=f(2)):\n    assert x == 4",
        "tests = []\n@tests.append\ndef test_f():\n    assert f(2) == 4\nfor test in tests: test()",
        "class Test:\n    def test_f(self): assert f(2) == 4\nTest().test_f()",
        "class Test:\n    assert f(2) == 4",
        "class Mine(Base):\n    pass",
        "try:\n    f\nexcept NameError:\n    f = None",
        "try:\n    from solution import f\nexcept ImportError:\n    pass\nassert f(2) == 4",
        "def test_f(): assert f(2) == 4\nfor name, test in list(globals().items()):\n    if name[:5] == 'test_': test()",
        "eval('f(2)')",
        "if __name__ == '__main__':\n    pass\nelse:\n    assert f(2) == 4",
        "assert f'{g(2)}' == '4'",
        "check = lambda: f(2)\nassert check() == 4",
        "from helpers import *\nassert f(2) == 4",
    ],
)
def test_tests_that_read_a_name_of_the_program_as_they_run_use_it(test):
    assert look_at((test,)).use_program


def test_one_test_may_define_the_function_that_another_calls():
    check = "def check(candidate):\n    assert candidate(2) == 4"
    assert look_at((check, "check(f)")).use_program and look_at(("x = f(2)", "assert x == 4")).use_program
    assert not look_at((check, "import math", "x = math.pi")).use_program


def test_an_expression_too_deep_to_look_at_may_use_the_program():
    assert look_at(("x = " + " + ".join("1" * 2000),)).use_program


def test_many_tests_are_looked_at_once():
    tests = (f"CASES = {[*range(20_000)]}\ndef test_f(): assert f(2) == 4",)
    assert not look_at(tests).use_program
    began = time.process_time()
    for _ in range(100):
        assert not look_at(tests).use_program
    assert time.process_time() - began < 1.0


RUNNER = """
import unittest
class T(unittest.TestCase):
    def test_f(self): self.assertEqual(f(1), 3)
ran = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))
"""


@pytest.mark.parametrize(
    "test",
    [
        "result = f(1) == 3",
        "print(f(1) == 3)",
        "if f(1) != 3:\n    print('wrong')",
        "def check(candidate):\n    return candidate(1) == 3\ncheck(f)",
        "try:\n    assert f(1) == 3\nexcept AssertionError:\n    print('wrong')",
        "try:\n    f(-1)\n    assert False\nexcept (TypeError, Exception):\n    pass",
        "print(f(1) == 3)\ndef test_f():\n    assert f(1) == 3",
        "print(f(1) == 3)\nif __name__ == '__main__':\n    assert f(1) == 3",
        RUNNER,
    ],
)
def test_tests_that_never_raise_cannot_fail(test):
    assert look_at((test,)).use_program and not look_at((test,)).can_fail


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1) == 3",
        "if f(1) != 3:\n    raise ValueError",
        "def check(candidate):\n    assert candidate(1) == 3\ncheck(f)",
        "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
        "try:\n    assert f(1) == 3\nexcept AssertionError:\n    raise SystemExit",
        "try:\n    is_right = f(1) == 3\nexcept Exception:\n    is_right = False\nassert is_right",
        "import sys\nif f(1) != 3:\n    sys.exit(1)",
        "import pytest\nwith pytest.raises(ValueError):\n    f(-1)",
        "import numpy as np\nnp.testing.assert_allclose(f(1), 3)",
        "import unittest\nunittest.TestCase().assertEqual(f(1), 3)",
        "exec('assert f(1) == 3')",
        f"{RUNNER}\nassert ran.wasSuccessful()",
        "for test in [test for name, test in globals().items() if name[:5] == 'test_']: test()",
    ],
)
def test_tests_with_an_assertion_where_they_run_can_fail(test):
    assert look_at((test,)).can_fail


def test_one_test_may_compute_what_another_asserts():
    assert look_at(("result = f(1)", "assert result == 3")).can_fail


@pytest.mark.parametrize(
    ("test", "modules"),
    [
        ("import numpy as np, math\nfrom scipy.stats import norm", {"numpy", "math", "scipy"}),
        ("def check(f):\n    import numpy.linalg\ncheck(f)", {"numpy"}),
        ("def test_f():\n    import pytest", set()),
        ("if __name__ == '__main__':\n    import pytest", set()),
        ("try:\n    import numpy\nexcept ImportError:\n    import math", {"math"}),
        ("try:\n    import numpy\n    f(1)\nexcept ValueError:\n    pass", {"numpy"}),
        ("from . import f", set()),
    ],
)
def test_the_modules_of_tests_are_those_that_they_import_as_they_run(test, modules):
    assert look_at((test,)).imported == modules


@pytest.mark.parametrize(
    ("test", "need"),
    [
        ("import asyncio\nasync def main(): assert await f(2) == 4\nasyncio.run(main())", "event loop"),
        ("import asyncio\nloop = asyncio.new_event_loop()\nassert loop.run_until_complete(f(2)) == 4", "event loop"),
        ("import asyncio\nassert f(2) == 4", None),
        ("import asyncio\nmachine = f(2)\nassert machine.run() == 4", None),
        ("import io, sys\nsys.stdout = out = io.StringIO()\nf(2)\nassert out.getvalue() == '4'", "output"),
        ("import io, sys\nsys.stdout = io.StringIO()\nassert f(2) == 4", None),
        ("import io, sys\nsys.stdout = out = io.StringIO()\nprint(f(2))\nassert out.getvalue() == '4'", None),
        ("import io\nout = io.StringIO()\nf(out.getvalue())", None),
    ],
)
def test_tests_that_need_an_event_loop_or_the_programs_output_are_found(test, need):
    unmet = look_at((test,)).unmet_need
    assert unmet is None if need is None else need in unmet
