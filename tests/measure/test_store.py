"""The store keeps what it was given, whoever writes beside it and whoever is killed while writing."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from labkit.measure.recorder import MERGED_DTYPE, OP_CODES
from labkit.measure.records import MemoryRecord
from labkit.measure.store import SCHEMA_VERSION, Store, StoreError
from tests.measure.make import request, server_times, step

WRITER = """
import sys
from pathlib import Path
from labkit.measure.store import Store
from tests.measure.make import request
store, run_id, count = Store(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
store.start_run(run_id, layout="tp1")
for batch in range(count):
    store.add_requests(run_id, [request(0, (1, 2), index=batch * 10 + i) for i in range(10)])
    print(batch, flush=True)
"""


FIRST_STEP_COLUMNS = [
    "run_id", "epoch", "step_id", "replica", "layout", "start_ns", "end_ns", "num_prefill_seqs", "num_decode_seqs",
    "prefill_tokens", "context_tokens", "ranks", "rank_start_ns", "rank_end_ns", "compute_ns", "wait_ns",
    "transfer_ns", "collective_bytes", "num_collectives",
]  # fmt: skip
"""What a step had in a store of version 1."""


def _writer(path: Path, run_id: str, count: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(path), run_id, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "store.sqlite") as opened:
        yield opened


def test_records_come_back_as_they_went_in(store: Store):
    record = request(5, (50, 60, 70), (1, 2, 1), index=3, status="failed", error="gone", warmup=True)
    record.server = server_times(record, {"queue": 3})
    record.server.run_id = "run-1"
    steps = [step(0, 9, [5, 6], [1, 0], [2, 2], step_id=i) for i in range(3)]
    for one in steps:
        one.run_id = "run-1"
    store.start_run("run-1", layout="tp2", settings={"router": "least-work"}, rate=4.0)
    store.add_requests("run-1", [record, request(0, (1,), index=1)])
    store.add_steps(steps)
    store.add_memory("run-1", [MemoryRecord(0, 10, 20, 3, 4, {"mlp": 6, "head": 4})])
    store.finish_run("run-1", "finished", summary={"requests": {"scheduled": 2}})
    assert store.request_records("run-1")[1] == record
    assert store.request_records("run-1")[0].server is None
    assert store.step_records("run-1") == steps
    run = store.run("run-1")
    assert run["status"] == "finished" and run["settings"] == {"router": "least-work"} and run["rate"] == 4.0
    assert run["summary"] == {"requests": {"scheduled": 2}}


def test_everything_reads_back_as_frames(store: Store):
    record = request(5, (50, 60), index=0)
    record.server = server_times(record, {"queue": 3})
    store.add_requests("a", [record])
    one = step(0, 9, [5, 6], [1, 0], [2, 2])
    one.run_id = "a"
    store.add_steps([one])
    store.add_memory("a", [MemoryRecord(1, 10, 20, 3, 4, {"mlp": 6})])
    requests, steps, memory = store.requests("a"), store.steps("a"), store.memory("a")
    assert requests.loc[0, "server_queue_ns"] == 3_000_000 and requests.loc[0, "chunk_tokens"] == [1, 1]
    assert steps.loc[0, "compute_ns"] == [5_000_000, 6_000_000]
    assert memory.loc[0, "weights_by_part"] == {"mlp": 6}
    assert len(store.requests("nobody")) == 0 and "request_id" in store.requests("nobody")


def test_a_request_stored_twice_is_there_once(store: Store):
    store.add_requests("a", [request(0, (1,), index=0)])
    store.add_requests("a", [request(0, (1, 2), index=0)])
    assert [record.n for record in store.request_records("a")] == [2]


def test_runs_are_listed_newest_first(store: Store):
    for name, at in (("old", "2026-01-01T00:00:00Z"), ("new", "2026-02-01T00:00:00Z")):
        store.start_run(name, started_at=at)
    assert [run["run_id"] for run in store.runs()] == ["new", "old"]


def test_an_unknown_run_a_bad_id_and_an_unknown_column_get_a_sentence(store: Store):
    with pytest.raises(KeyError, match="labkit runs"):
        store.run("nobody")
    with pytest.raises(ValueError, match="letters, digits"):
        store.start_run("../../etc")
    with pytest.raises(ValueError, match="no column"):
        store.start_run("a", colour="red")
    with pytest.raises(sqlite3.IntegrityError):
        store.start_run("b")
        store.start_run("b")


def test_two_processes_write_at_once(store: Store, tmp_path: Path):
    writers = [_writer(store.path, f"run-{i}", 40) for i in range(2)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    for i in range(2):
        assert len(store.request_records(f"run-{i}")) == 400


def test_two_processes_make_the_store_at_once(tmp_path: Path):
    path = tmp_path / "fresh" / "store.sqlite"
    writers = [_writer(path, f"run-{i}", 1) for i in range(3)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    with Store(path) as opened:
        assert {run["run_id"] for run in opened.runs()} == {"run-0", "run-1", "run-2"}


def test_a_killed_writer_loses_no_finished_batch_and_no_file(store: Store):
    writer = _writer(store.path, "doomed", 10_000)
    assert writer.stdout is not None
    told = 0
    while told < 5:
        told = int(writer.stdout.readline())
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    records = store.request_records("doomed")
    assert len(records) >= (told + 1) * 10 and len(records) % 10 == 0
    assert store.run("doomed")["status"] == "running"
    store.start_run("next")
    assert store._db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_a_store_of_a_newer_version_is_refused(tmp_path: Path):
    path = tmp_path / "store.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    with pytest.raises(StoreError, match="newer labkit"):
        Store(path)


def test_a_store_of_the_first_version_is_brought_up_and_keeps_its_steps(tmp_path: Path):
    path = tmp_path / "store.sqlite"
    with Store(path) as store:
        store.add_steps([step(0, 9, [5, 6], [1, 0], [2, 2])])
    with sqlite3.connect(path) as db:
        names = [row[1] for row in db.execute("PRAGMA table_info(steps)")]
        assert set(FIRST_STEP_COLUMNS) < set(names)
        for name in set(names) - set(FIRST_STEP_COLUMNS):
            db.execute(f"ALTER TABLE steps DROP COLUMN {name}")
        for name in ("handoff_queue_ns", "handoff_ns", "handoff_bytes", "released_ns"):
            db.execute(f"ALTER TABLE requests DROP COLUMN server_{name}")
        db.execute("ALTER TABLE memory DROP COLUMN beside")
        db.execute("DROP TABLE telemetry")
        db.execute("PRAGMA user_version=1")
    with Store(path) as store:
        store.add_steps([step(10, 19, [5, 6], [1, 0], [2, 2], step_id=1)])
        old, new = store.step_records("r")
        assert (old.idle_ns, old.in_flight_bytes) == ([], 0) and old.compute_ns == new.compute_ns
        assert store._version() == SCHEMA_VERSION


def test_a_file_that_is_no_store_is_refused(tmp_path: Path):
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"this is not a database, and it is long enough to tell " * 20)
    with pytest.raises(StoreError, match="not a labkit store"):
        Store(path)


# ---- collectives


def _rows(n: int) -> np.ndarray:
    rows = np.zeros(n, MERGED_DTYPE)
    rows["step_id"], rows["op"], rows["wait_ns"] = np.arange(n), OP_CODES["all_gather"], 5
    return rows


def test_collectives_become_one_parquet_with_names(store: Store):
    log = store.collective_log("a")
    for _ in range(3):
        log.append(_rows(100))
    path = log.close()
    assert path is not None and [file.name for file in path.parent.iterdir()] == ["collectives.parquet"]
    frame = store.collectives("a")
    assert len(frame) == 300 and set(frame["op"]) == {"all_gather"} and set(frame["phase"]) == {"prefill"}
    assert frame["wait_ns"].sum() == 1500


def test_a_log_whose_writer_was_killed_is_read_without_its_torn_row(store: Store):
    log = store.collective_log("a")
    log.append(_rows(50))
    raw = store.run_dir("a") / "collectives.raw"
    raw.write_bytes(raw.read_bytes() + b"torn")
    assert len(store.collectives("a")) == 50


def test_a_run_without_collectives_has_none(store: Store):
    assert store.collective_log("a").close() is None
    assert len(store.collectives("a")) == 0
    assert not store.run_dir("a").exists()


def test_appending_costs_little(store: Store):
    log, rows = store.collective_log("a"), _rows(34)
    begin = time.perf_counter()
    for _ in range(200):
        log.append(rows)
    assert (time.perf_counter() - begin) / 200 < 1e-3
