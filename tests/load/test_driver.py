"""The driver: a process of its own that stays warm, hears of a new rate, and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from scripted_server import HEAD, ScriptedServer, answer, piece, token

from labkit.load.driver import DriverError, DriverProcess
from labkit.load.lengths import Lengths
from labkit.load.spec import RunSpec, TraceWindow
from labkit.load.target import Target
from labkit.load.workload import Arrival, Part, Workload

STEADY = Workload(
    name="steady",
    title="8 in, 2 out",
    arrival=Arrival(process="constant", rate=20),
    parts=(Part(Lengths("constant", tokens=8), Lengths("constant", tokens=2)),),
)


class ServerThread:
    """A scripted server in a loop of its own, for tests that block."""

    def __init__(self, script):
        self._script, self._ready, self._loop = script, threading.Event(), asyncio.new_event_loop()

    def __enter__(self):
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(10)
        return self.server

    async def _serve(self):
        self._over = asyncio.Event()
        async with ScriptedServer(self._script) as self.server:
            self._ready.set()
            await self._over.wait()

    def __exit__(self, *exc):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="module")
def driver():
    with DriverProcess() as driver:
        yield driver


def spec(server, **fields):
    target = Target(url=server.url, model="m", labkit=True, timeout_s=10)
    return RunSpec(**{"target": target, "run_id": "d", "workload": STEADY, "rate": 40.0, **fields})


def test_runs_follow_each_other_in_one_process(driver):
    with ServerThread(lambda request: answer(2)) as server:
        first = driver.run(spec(server, num_requests=6), timeout_s=20)
        pid = driver.pid
        second = driver.run(spec(server, num_requests=4, run_id="e", warmup_s=0.06), timeout_s=20)
    assert driver.pid == pid
    assert [record.request_id for record in first.records] == [f"d-{index}" for index in range(6)]
    assert Counter(record.status for record in second.records) == {"completed": 4}
    assert [record.warmup for record in second.records] == [True, True, False, False]
    assert first.scheduling and first.lateness.n == 6


def test_callbacks_come_in_order_with_the_instant_of_the_start(driver):
    heard = []
    with ServerThread(lambda request: answer(2)) as server:
        driving = driver.start(
            spec(server, num_requests=20),
            lambda batch: heard.extend(batch),
            on_start=lambda start_ns: heard.append(start_ns),
            on_progress=lambda counts: heard.append(counts),
            on_end=lambda driving: heard.append("end"),
            keep_records=False,
        )
        report = driving.wait(20)
    assert isinstance(heard[0], int) and heard[0] == report.start_ns and heard[-1] == "end"
    assert sum(getattr(item, "status", "") == "completed" for item in heard) == 20
    assert any(isinstance(item, dict) and item["sent"] > 0 for item in heard)
    assert report.records == [] and report.num_sent == 20


def test_an_endless_run_changes_its_rate_at_once_and_ends_when_told(driver):
    with ServerThread(lambda request: answer(2)) as server:
        driving = driver.start(spec(server, rate=5.0), keep_records=True)
        driving.wait_started(10)
        time.sleep(0.9)
        driver.set_rate(100.0)
        changed_ns = time.monotonic_ns()
        time.sleep(0.9)
        report = driver.stop()
    before = [record for record in report.records if record.sent_ns < changed_ns]
    after = [record for record in report.records if record.sent_ns >= changed_ns]
    assert 2 <= len(before) <= 6
    assert 60 <= len(after) <= 100
    assert [record.index for record in report.records] == list(range(len(report.records)))


def test_a_stop_cancels_what_is_under_way(driver):
    with ServerThread(lambda request: [HEAD, piece(token()), 5.0]) as server:
        driving = driver.start(spec(server, num_requests=30, rate=20.0))
        driving.wait_started(10)
        time.sleep(0.5)
        began = time.monotonic()
        report = driver.stop()
    counts = Counter(record.status for record in report.records)
    assert time.monotonic() - began < 2
    assert set(counts) == {"cancelled", "unsent"} and sum(counts.values()) == 30


def test_mistakes_are_said_and_leave_the_driver_usable(driver):
    with ServerThread(lambda request: answer(2, 0.1)) as server:
        with pytest.raises(FileNotFoundError, match="choose one of chat"):
            driver.start(spec(server, workload="caht"))
        with pytest.raises(ValueError, match="rate must be above 0"):
            driver.start(spec(server, rate=-1.0))
        driver.start(spec(server, num_requests=10))
        with pytest.raises(DriverError, match="already under way"):
            driver.start(spec(server, num_requests=1))
        with pytest.raises(DriverError, match="without an end"):
            driver.set_rate(5)
        driver.stop()
        with pytest.raises(FileNotFoundError, match="no trace at /nowhere.csv"):
            driver.start(spec(server, trace=TraceWindow(path="/nowhere.csv")))
        with pytest.raises(ValueError, match="vocabulary of at least 64"):
            driver.run(spec(server, num_requests=2, vocab_size=3), timeout_s=10)
        assert len(driver.run(spec(server, num_requests=2), timeout_s=10).records) == 2


def test_a_server_that_is_not_there_ends_the_run_with_a_sentence(driver):
    gone = RunSpec(target=Target(url="http://127.0.0.1:9", model="m"), run_id="g", workload=STEADY, num_requests=1)
    with pytest.raises(DriverError, match="could not reach"):
        driver.run(gone, timeout_s=10)


def test_a_callback_that_raises_ends_its_run_only(driver):
    def broken(batch):
        raise KeyError("mine")

    with ServerThread(lambda request: answer(2)) as server:
        with pytest.raises(DriverError, match="KeyError"):
            driver.run(spec(server, num_requests=50), broken, timeout_s=10)
        assert len(driver.run(spec(server, num_requests=2), timeout_s=10).records) == 2


def test_a_driver_that_dies_is_reported_and_replaced():
    with DriverProcess() as own, ServerThread(lambda request: answer(2)) as server:
        driving = own.start(spec(server, rate=5.0))
        driving.wait_started(10)
        os.kill(own.pid, signal.SIGKILL)
        with pytest.raises(DriverError, match="ended before the run did"):
            driving.wait(10)
        assert len(own.run(spec(server, num_requests=2), timeout_s=10).records) == 2


def gone_within(pid, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_closing_ends_the_process():
    driver = DriverProcess()
    driver.warm()
    pid = driver.pid
    driver.close()
    driver.close()
    assert driver.pid is None and gone_within(pid, 1)


PARENT = """
    import os, sys, time
    sys.path.insert(0, {folder!r})
    from test_driver import STEADY
    from labkit.load.driver import DriverProcess
    from labkit.load.spec import RunSpec
    from labkit.load.target import Target
    driver = DriverProcess()
    target = Target(url={url!r}, model="m", labkit=True)
    driving = driver.start(RunSpec(target=target, run_id="p", workload=STEADY))
    driving.wait_started()
    if {fork}:
        heir = os.fork()  # inherits the driver's stdin and keeps it open
        if heir == 0:
            time.sleep(20)
            os._exit(0)
    print(driver.pid, heir if {fork} else 0, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("fork", [False, True])
def test_the_driver_dies_with_a_killed_parent_in_the_middle_of_a_run(fork):
    with ServerThread(lambda request: [HEAD, piece(token()), 30.0]) as server:
        code = textwrap.dedent(PARENT).format(folder=str(Path(__file__).parent), url=server.url, fork=fork)
        parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        pid, heir = (int(word) for word in parent.stdout.readline().split())
        try:
            assert psutil.pid_exists(pid)
            parent.kill()
            parent.wait()
            assert gone_within(pid, 4 if fork else 1)
        finally:
            if heir:
                os.kill(heir, signal.SIGKILL)
            parent.stdout.close()
