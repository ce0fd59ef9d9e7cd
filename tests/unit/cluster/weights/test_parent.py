"""A child that is deaf and busy still ends with its parent."""

import subprocess
import sys

import psutil
import pytest

CHILD = """
import multiprocessing, os, signal, sys, time
from cluster.weights.parent import end_with_parent

def endless(is_told):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    {told}
    print(multiprocessing.current_process().pid, flush=True)
    while True:
        print(os.getppid(), flush=True)
        time.sleep(0.05)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=endless, args=(True,)).start()
    sys.stdin.read()
"""


@pytest.mark.parametrize("told", ["end_with_parent()", "pass"])
def test_a_child_is_killed_with_its_parent_if_it_says_so(told):
    parent = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(told=told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.wait()
        if told == "pass":
            assert any(int(line) != parent.pid for line in parent.stdout), "it lives with another parent"
        else:
            assert psutil.wait_procs([child], timeout=120)[1] == []
    finally:
        if child.is_running():
            child.kill()
        parent.communicate()


def test_a_process_that_nobody_forked_goes_on():
    code = "from cluster.weights.parent import end_with_parent; end_with_parent(); print('goes on')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "goes on\n"
