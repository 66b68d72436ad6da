"""The store's tables, read off the records themselves: a field added to a record is a column here.

Integers, floats and texts are columns as they are; lists of instants are little-endian 64-bit blobs (a
chunk list of a thousand tokens is read back without parsing); other lists and dicts are JSON text, open to
SQLite's json_each.
"""

from __future__ import annotations

import json
import types
import typing
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from labkit.measure.records import MemoryRecord, RequestRecord, ServerTimes, StepRecord, TelemetryRecord

_BLOBS = ("chunk_ns", "chunk_tokens")


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: str
    """int, float, str, bool, blob (list of integers) or json."""

    @property
    def sql(self) -> str:
        types_of = {"int": "INTEGER", "bool": "INTEGER", "float": "REAL", "blob": "BLOB"}
        return f'"{self.name}" {types_of.get(self.kind, "TEXT")}'

    def pack(self, value: Any) -> Any:
        if value is None:
            return None
        if self.kind == "blob":
            return array("q", value).tobytes()
        return json.dumps(value) if self.kind == "json" else value

    def unpack(self, value: Any) -> Any:
        if value is None:
            return None
        if self.kind == "blob":
            return array("q", value).tolist()
        if self.kind == "json":
            return json.loads(value)
        return bool(value) if self.kind == "bool" else value


@dataclass(frozen=True)
class Table:
    name: str
    columns: tuple[Column, ...]
    key: str

    def create_statements(self) -> Iterable[str]:
        yield f"CREATE TABLE {self.name} ({', '.join(column.sql for column in self.columns)})"
        unique = "" if self.name in ("steps", "telemetry") else "UNIQUE "
        yield f"CREATE {unique}INDEX {self.name}_by_run ON {self.name} ({self.key})"

    def known(self, row: Mapping[str, Any]) -> list[str]:
        """The row's names; ValueError when one is not a column."""
        unknown = set(row) - {column.name for column in self.columns}
        if unknown:
            raise ValueError(f"The table {self.name} has no column {', '.join(sorted(unknown))}.")
        return list(row)

    def insert(self, row: Mapping[str, Any] | None = None) -> str:
        """INSERT of that row's columns, or of all; a request or a rank that is there already is replaced."""
        names = self.known(row) if row is not None else [column.name for column in self.columns]
        quoted = ", ".join(f'"{name}"' for name in names)
        verb = "INSERT OR REPLACE" if self.name in ("requests", "memory") else "INSERT"
        return f"{verb} INTO {self.name} ({quoted}) VALUES ({', '.join('?' * len(names))})"

    def values(self, row: Mapping[str, Any]) -> list[Any]:
        kinds = {column.name: column for column in self.columns}
        return [kinds[name].pack(value) for name, value in row.items()]

    def row(self, record: msgspec.Struct, **more: Any) -> list[Any]:
        return [column.pack(self.value(column.name, record, more)) for column in self.columns]

    @staticmethod
    def value(name: str, record: msgspec.Struct, more: Mapping[str, Any]) -> Any:
        """A column's value in a record, before it is packed; `more` names what the record does not say."""
        if name in more:
            return more[name]
        if name.startswith("server_"):
            return getattr(getattr(record, "server", None), name.removeprefix("server_"), None)
        return getattr(record, name)

    def unpack(self, row: Any) -> dict[str, Any]:
        return {column.name: column.unpack(row[column.name]) for column in self.columns}


def _kind(name: str, hint: Any) -> str:
    if name in _BLOBS:
        return "blob"
    if isinstance(hint, types.UnionType | types.GenericAlias) or typing.get_origin(hint):
        return "json"
    return hint.__name__ if hint in (int, float, str, bool) else "json"


def _columns_of(
    struct: type[msgspec.Struct], prefix: str = "", skip: Sequence[str] = ()
) -> tuple[Column, ...]:
    fields = [field for field in msgspec.structs.fields(struct) if field.name not in skip]
    return tuple(Column(prefix + field.name, _kind(field.name, field.type)) for field in fields)


_RUN = Column("run_id", "str")
RUNS = Table(
    "runs",
    (
        _RUN,
        *(
            Column(name, "str")
            for name in ("status", "started_at", "finished_at", "layout", "model", "workload")
        ),
        *(Column(name, "str") for name in ("backend", "fabric", "device", "dtype", "host", "server_url")),
        *(Column(name, "int") for name in ("num_ranks", "num_cores", "threads_per_rank", "seed")),
        *(Column(name, "float") for name in ("rate", "seconds")),
        *(Column(name, "int") for name in ("window_start_ns", "window_end_ns")),
        *(Column(name, "json") for name in ("settings", "environment", "objective", "summary", "quality")),
        *(Column(name, "str") for name in ("comparison", "error")),
    ),
    "run_id",
)
REQUESTS = Table(
    "requests",
    (
        _RUN,
        *_columns_of(RequestRecord, skip=("server",)),
        *_columns_of(ServerTimes, "server_", skip=("request_id", "run_id")),
    ),
    "run_id, request_id",
)
STEPS = Table("steps", _columns_of(StepRecord), "run_id, step_id")
MEMORY = Table("memory", (_RUN, *_columns_of(MemoryRecord)), "run_id, rank")
TELEMETRY = Table("telemetry", (_RUN, *_columns_of(TelemetryRecord)), "run_id, t_ns")


def request_from_row(row: Any) -> RequestRecord:
    """The record as it was stored, the server's share included."""
    values = REQUESTS.unpack(row)
    own = {name: values[name] for name in RequestRecord.__struct_fields__ if name != "server"}
    record = RequestRecord(**own)
    if values["server_received_ns"] is not None:
        names = [name for name in ServerTimes.__struct_fields__ if name not in ("request_id", "run_id")]
        theirs = {name: values[f"server_{name}"] for name in names}
        record.server = ServerTimes(request_id=record.request_id, run_id=values["run_id"], **theirs)
    return record
