"""A slow disk delays nobody, and what it is given arrives in order."""

import threading
from concurrent.futures import Future

import pytest

from cluster.contracts.errors import StorageError
from cluster.record.writer import Writer


class SlowDisk:
    """Writes nothing until it is let go."""

    def __init__(self) -> None:
        self.written: list[object] = []
        self._is_free = threading.Event()

    def write(self, line: object) -> None:
        assert self._is_free.wait(timeout=60)
        self.written.append(line)

    def let_go(self) -> None:
        self._is_free.set()


def failed_with(error: Exception) -> "Future[None]":
    failed = Future[None]()
    failed.set_exception(error)
    return failed


def test_nobody_waits_for_a_slow_disk_and_the_order_is_kept():
    writer, disk = Writer(), SlowDisk()
    for number in range(100):
        writer.put(lambda number=number: disk.write(number))
    assert disk.written == []
    disk.let_go()
    writer.flush()
    assert disk.written == list(range(100))


def test_of_a_file_that_is_written_anew_only_the_latest_waits():
    writer, disk = Writer(), SlowDisk()
    writer.put(lambda: disk.write("line"))
    for number in range(100):
        writer.put_latest("status.json", lambda number=number: disk.write(number))
    disk.let_go()
    writer.flush()
    writer.put_latest("status.json", lambda: disk.write("again"))
    writer.flush()
    assert disk.written == ["line", 99, "again"]


def test_an_error_comes_up_once_and_later_calls_are_made():
    def fail() -> None:
        raise StorageError("disk full")

    writer, disk = Writer(), SlowDisk()
    disk.let_go()
    writer.put(fail)
    with pytest.raises(StorageError, match="disk full"):
        writer.flush()
    writer.put(lambda: disk.write("after"))
    writer.flush()
    assert disk.written == ["after"]


def test_the_next_put_raises_an_error_too_and_its_call_is_made():
    writer, disk, is_begun = Writer(), SlowDisk(), threading.Event()
    writer.put(lambda: is_begun.set() or disk.write("line"))
    writer.put_latest("status.json", lambda: disk.write("replaced"))
    assert is_begun.wait(60)
    for put in (lambda call: writer.put_latest("status.json", call), writer.put):
        writer._note_error(failed_with(StorageError("disk full")))
        with pytest.raises(StorageError, match="disk full"):
            put(lambda: disk.write("made"))
    disk.let_go()
    writer.flush()
    assert disk.written == ["line", "made", "made"]


def test_a_call_that_succeeds_does_not_take_the_error_of_another_away():
    """Callbacks of two calls run at once where a call was made before `put` had hung its callback on."""
    writer, failed = Writer(), failed_with(StorageError("disk full"))

    class Done(Future[None]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            writer._note_error(failed)
            return None

    writer._note_error(Done())
    with pytest.raises(StorageError, match="disk full"):
        writer.flush()


def test_of_several_errors_the_first_is_raised_once():
    writer = Writer()

    def fail(error: Exception) -> None:
        raise error

    is_free = threading.Event()
    writer.put(lambda: is_free.wait(60))
    for message in ("first", "second"):
        writer.put(lambda message=message: fail(StorageError(message)))
    is_free.set()
    with pytest.raises(StorageError, match="first"):
        writer.flush()
    writer.flush()


def test_a_call_that_takes_long_is_told_once():
    now, is_begun = [0.0], threading.Event()
    writer, disk = Writer(clock=lambda: now[0]), SlowDisk()

    def told_at(seconds: float) -> float | None:
        now[0] = seconds
        return writer.drain_silence(longer_than_s=30)

    writer.put(lambda: None)
    writer.flush()
    assert told_at(40.0) is None, "no call is being made"
    writer.put(lambda: is_begun.set() or disk.write("line"))
    assert is_begun.wait(60)
    assert [told_at(70.0), told_at(71.0), told_at(130.0)] == [None, 31.0, None]
    disk.let_go()
    writer.flush()
    assert told_at(200.0) is None
    stuck = SlowDisk()
    is_begun.clear()
    writer.put(lambda: is_begun.set() or stuck.write("another"))
    assert is_begun.wait(60)
    assert told_at(240.0) == 40.0
    stuck.let_go()
    writer.flush()


def test_errors_that_are_kept_come_up_at_the_finish_alone_and_once():
    """Seen in review: an event that the disk had not taken ended a stopped run before its checkpoint was saved."""

    def fail(message: str) -> None:
        raise StorageError(message)

    writer, disk = Writer(), SlowDisk()
    disk.let_go()
    writer.put(lambda: fail("disk full"))
    writer._thread.submit(lambda: None).result()
    writer.keep_errors()
    writer.put(lambda: fail("still full"))
    writer.put_latest("status.json", lambda: disk.write("status"))
    writer.flush()
    assert disk.written == ["status"]
    with pytest.raises(StorageError, match="disk full"):
        writer.finish()
    writer.put(lambda: disk.write("after"))
    writer.finish()
    assert disk.written == ["status", "after"]
