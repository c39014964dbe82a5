"""Records as Parquet tables: one column a field, in the order of the dataclass."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

if typing.TYPE_CHECKING:
    import pyarrow as pa


def arrow_schema(record_type: type) -> "pa.Schema":
    """Return the table schema of a record dataclass.

    Tuples of int become list<int32> (token ids), tuples of float list<double>, mappings maps;
    literals are text.

    Raises:
        TypeError: A field has an annotation that no column type is known for.
    """
    import pyarrow as pa

    columns = {
        str: pa.string(),
        int: pa.int64(),
        float: pa.float64(),
        bool: pa.bool_(),
        tuple[int, ...]: pa.list_(pa.int32()),
        tuple[float, ...]: pa.list_(pa.float64()),
        Mapping[str, int]: pa.map_(pa.string(), pa.int64()),
    }
    hints = typing.get_type_hints(record_type)
    found = []
    for field in dataclasses.fields(record_type):
        kind, optional = _without_none(hints[field.name])
        if typing.get_origin(kind) is typing.Literal:
            kind = str
        if kind not in columns:
            raise TypeError(f"{record_type.__name__}.{field.name}: no column type for {kind}")
        found.append(pa.field(field.name, columns[kind], nullable=optional))
    return pa.schema(found)


class RecordTable:
    """Collects records of one type; each is turned into columns once, however often written."""

    def __init__(self, record_type: type):
        self._schema = arrow_schema(record_type)
        # Converted batches and the records not yet in one: a single tuple, replaced in one
        # assignment, so that an interrupt in between can neither lose nor repeat records.
        self._state: tuple[list[pa.RecordBatch], list[Any]] = ([], [])

    def __len__(self) -> int:
        batches, pending = self._state
        return sum(batch.num_rows for batch in batches) + len(pending)

    def append(self, record: Any) -> None:
        """Take a record."""
        self._state[1].append(record)

    def to_parquet(self) -> bytes:
        """Return all records so far as the content of a Parquet file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        batches, pending = self._state
        if pending:
            columns = {
                name: [getattr(record, name) for record in pending] for name in self._schema.names
            }
            batches = [*batches, pa.RecordBatch.from_pydict(columns, schema=self._schema)]
            self._state = (batches, [])
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_batches(batches, self._schema), sink)
        return sink.getvalue().to_pybytes()


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return the hint without `None`, and whether it had it."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        others = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(others) == 1:
            return others[0], True
    return hint, False
