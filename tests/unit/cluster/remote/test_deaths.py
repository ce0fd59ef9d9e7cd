"""Ray's paragraphs about a death, in one sentence. The texts are Ray 2.60's own."""

import pytest

from cluster.remote.deaths import how_it_died, where_it_printed

HEAD = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: Host\n\tactor_id: 80db\n\tpid: 4711\n"
    "\tnamespace: treadwheel\n\tip: 127.0.0.1\n"
)
PROCESS = f"{HEAD}The actor is dead because its worker process has died. Worker exit type: "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"{PROCESS}SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. "
            "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage.",
            "its process ended without a word: it was killed from outside (kill -9, or the system when memory ran out), "
            "or it crashed (a segmentation fault)",
        ),
        (
            f"{PROCESS}NODE_OUT_OF_MEMORY Worker exit detail: Task was killed due to the node running low on memory.\nMemory on the "
            "node (IP: 10.0.0.1, ID: 80db) where the task was running was 15.20GB / 16.00GB (0.95), which exceeds the threshold.",
            "Ray ended it because its machine's memory was nearly full (15.20GB of 16.00GB)",
        ),
        (
            f"{PROCESS}INTENDED_USER_EXIT Worker exit detail: Worker exits by an user request. exit_actor() is called.",
            "its process left by itself, as after sys.exit",
        ),
        (f"{HEAD}The actor is dead because it was killed by `ray.kill`.", "it was ended through Ray"),
        (f"{HEAD}The actor died because its node has died. Node Id: 80db", "its node has died"),
        (f"{PROCESS}NEW_KIND Worker exit detail: It met a dragon. Details follow.", "It met a dragon"),
    ],
)
def test_a_death_is_one_sentence(text, words):
    assert how_it_died(text) == words


def test_a_long_unknown_text_is_cut():
    assert len(how_it_died("word " * 500)) < 220


def test_where_the_dead_process_printed_is_told_by_its_pid():
    assert "worker-*-4711.out and .err" in where_it_printed(HEAD)
    assert where_it_printed("no pid") == ""
