"""What runs leave: one SQLite file that two processes may write at once, and one parquet of collectives a
run.

The client of a run writes its row, its requests and its summary; the server writes steps and memory. Rows
go in by short transactions under write-ahead logging, so a process killed in the middle loses at most its
last batch and never the file. Collectives come by the thousand per second: they are appended raw, as they
are, and become parquet when the run is over; a log whose writer was killed is still readable.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.measure.collective_log import CollectiveLog, read_collectives
from labkit.measure.records import MemoryRecord, RequestRecord, StepRecord, TelemetryRecord
from labkit.measure.tables import MEMORY, REQUESTS, RUNS, STEPS, TELEMETRY, Table, request_from_row

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 5
_LIST, _COUNT = "TEXT DEFAULT '[]'", "INTEGER DEFAULT 0"
_STEPS_2 = {
    "expert_tokens": _LIST, "expert_rows": _LIST, "expert_sent_bytes": _LIST, "expert_ns": _LIST,
    "expert_wait_ns": _LIST, "num_dropped": _COUNT, "idle_ns": _LIST, "query_keys": _LIST, "in_flight_bytes": _COUNT,
}  # fmt: skip
_STEPS_5 = ("prefill_pairs", "prefill_context", "num_sampled")
_TIMES_3 = ("handoff_queue_ns", "handoff_ns", "handoff_bytes", "released_ns")
_MIGRATIONS: dict[int, Sequence[str]] = {
    1: [f"ALTER TABLE steps ADD COLUMN {name} {kind}" for name, kind in _STEPS_2.items()],
    2: [f"ALTER TABLE requests ADD COLUMN server_{name} {_COUNT}" for name in _TIMES_3],
    3: ["ALTER TABLE memory ADD COLUMN beside TEXT DEFAULT '{}'", *TELEMETRY.create_statements()],
    4: [f"ALTER TABLE steps ADD COLUMN {name} {_COUNT}" for name in _STEPS_5],
}
"""From which version: the statements that lead to the next."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class StoreError(RuntimeError):
    """The store cannot be used as it is; the message says what to do."""


class Store:
    """Open (and make) the store at `path`. Safe for several threads and for several processes."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._migrate()
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise StoreError(
                f"{self.path} is not a labkit store ({error}). Move it away, or set LABKIT_HOME."
            ) from None
        except StoreError:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- schema

    def _migrate(self) -> None:
        if self._version() == SCHEMA_VERSION:
            return
        with self._transaction():
            version = self._version()
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"{self.path} was written by a newer labkit (schema {version}; this one knows "
                    f"{SCHEMA_VERSION}). Update labkit, or set LABKIT_HOME to another folder."
                )
            if version == 0:
                self._create()
            for step in range(version or SCHEMA_VERSION, SCHEMA_VERSION):
                for statement in _MIGRATIONS[step]:
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _create(self) -> None:
        for table in (RUNS, REQUESTS, STEPS, MEMORY, TELEMETRY):
            for statement in table.create_statements():
                self._db.execute(statement)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # ---- writing

    def start_run(self, run_id: str, **columns: Any) -> None:
        """A run begins, status `running`.

        Columns: those of `tables.RUNS`; dicts and lists are kept as JSON.
        """
        check_run_id(run_id)
        row = {"run_id": run_id, "status": "running", **columns}
        with self._transaction():
            self._db.execute(RUNS.insert(row), RUNS.values(row))

    def finish_run(self, run_id: str, status: str, **columns: Any) -> None:
        """status: finished, stopped (by its user) or failed. A run killed with its client stays `running` here;
        its row says whose it was.
        """
        row = {"status": status, **columns}
        assignments = ", ".join(f"{name}=?" for name in RUNS.known(row))
        with self._transaction():
            self._db.execute(f"UPDATE runs SET {assignments} WHERE run_id=?", [*RUNS.values(row), run_id])

    def add_requests(self, run_id: str, records: Iterable[RequestRecord]) -> None:
        self._add(REQUESTS, (REQUESTS.row(record, run_id=run_id) for record in records))

    def add_steps(self, steps: Iterable[StepRecord]) -> None:
        """Each step says its own run_id."""
        self._add(STEPS, (STEPS.row(step) for step in steps))

    def add_memory(self, run_id: str, ranks: Iterable[MemoryRecord]) -> None:
        self._add(MEMORY, (MEMORY.row(rank, run_id=run_id) for rank in ranks))

    def add_telemetry(self, run_id: str, samples: Iterable[TelemetryRecord]) -> None:
        self._add(TELEMETRY, (TELEMETRY.row(sample, run_id=run_id) for sample in samples))

    def _add(self, table: Table, rows: Iterable[Sequence[Any]]) -> None:
        batch = list(rows)
        if batch:
            with self._transaction():
                self._db.executemany(table.insert(), batch)

    def collective_log(self, run_id: str) -> CollectiveLog:
        """Where a run's merged rows go.

        `close` turns them to parquet (a second of work: not on an event loop).
        """
        return CollectiveLog(self.run_dir(run_id))

    def add_profile(self, run_id: str, rank: int, trace: bytes) -> None:
        """One rank's profile (gzipped Chrome trace events), as a file in the run's folder."""
        folder = self.run_dir(run_id)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"profile-rank{rank}.json.gz").write_bytes(trace)

    def profiles(self, run_id: str) -> dict[int, Path]:
        """By rank, the profiles that a run left."""
        found = {_rank_of(path): path for path in self.run_dir(run_id).glob("profile-rank*.json.gz")}
        return dict(sorted(found.items()))

    def run_dir(self, run_id: str) -> Path:
        check_run_id(run_id)
        return self.path.parent / "runs" / run_id

    # ---- reading

    def run(self, run_id: str) -> dict[str, Any]:
        """A run's row. KeyError with a sentence when there is none."""
        row = self._db.execute("SELECT * FROM runs WHERE run_id=?", [run_id]).fetchone()
        if row is None:
            raise KeyError(
                f"There is no run {run_id!r} in {self.path}; `labkit runs` lists those that are there."
            )
        return RUNS.unpack(row)

    def runs(self, limit: int = 50) -> list[dict[str, Any]]:
        """The newest first."""
        query = "SELECT * FROM runs ORDER BY started_at DESC, rowid DESC LIMIT ?"
        return [RUNS.unpack(row) for row in self._db.execute(query, [limit])]

    def request_records(self, run_id: str) -> list[RequestRecord]:
        query = 'SELECT * FROM requests WHERE run_id=? ORDER BY "index"'
        return [request_from_row(row) for row in self._db.execute(query, [run_id])]

    def requests(self, run_id: str) -> pd.DataFrame:
        """One row a request: what the client saw, and `server_…` beside it."""
        return self._frame(REQUESTS, run_id, '"index"')

    def steps(self, run_id: str) -> pd.DataFrame:
        """One row a step; per-rank columns hold lists in the order of `ranks`."""
        return self._frame(STEPS, run_id, "start_ns")

    def step_records(self, run_id: str) -> list[StepRecord]:
        rows = self._db.execute("SELECT * FROM steps WHERE run_id=? ORDER BY start_ns", [run_id])
        return [StepRecord(**STEPS.unpack(row)) for row in rows]

    def memory(self, run_id: str) -> pd.DataFrame:
        return self._frame(MEMORY, run_id, "rank")

    def telemetry(self, run_id: str) -> pd.DataFrame:
        """One row a sample of a GPU, a rank's process or the host; `values` is a dict."""
        return self._frame(TELEMETRY, run_id, "t_ns")

    def collectives(self, run_id: str) -> pd.DataFrame:
        """One row per collective and rank; empty when nothing was recorded."""
        return read_collectives(self.run_dir(run_id))

    def _frame(self, table: Table, run_id: str, order: str) -> pd.DataFrame:
        import pandas as pd

        query = f"SELECT * FROM {table.name} WHERE run_id=? ORDER BY {order}"
        rows = [table.unpack(row) for row in self._db.execute(query, [run_id])]
        return pd.DataFrame(rows, columns=[column.name for column in table.columns])


def _rank_of(path: Path) -> int:
    return int(path.name.removeprefix("profile-rank").removesuffix(".json.gz"))


def check_run_id(run_id: str) -> None:
    """A run's id names a folder: ValueError unless it is letters, digits, dot, dash and underscore."""
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(
            f"{run_id!r} cannot be a run's id: it must be 1 to 100 letters, digits, '.', '_' or '-', "
            "beginning with a letter or a digit."
        )
