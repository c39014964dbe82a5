import io
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paxkv.metrics import RequestRecord, StepRecord
from paxkv.tracking.tables import RecordTable, arrow_schema


@dataclass(frozen=True)
class Odd:
    thing: dict


def test_every_field_is_a_column_in_order():
    for record in (RequestRecord, StepRecord):
        assert arrow_schema(record).names == list(record.__dataclass_fields__)


def test_only_optional_fields_may_be_null():
    schema = arrow_schema(RequestRecord)
    nullable = {field.name for field in schema if field.nullable}
    assert nullable == {"first_scheduled_s", "first_token_s", "finish_s", "finish_reason"}


def test_an_unknown_type_is_named():
    with pytest.raises(TypeError, match=r"Odd\.thing"):
        arrow_schema(Odd)


def test_rows_stay_in_order_over_many_writes(step_record):
    table = RecordTable(StepRecord)
    assert pq.read_table(io.BytesIO(table.to_parquet())).num_rows == 0
    for step in range(7):
        table.append(step_record(step=step))
        if step % 3 == 0:
            table.to_parquet()
    assert len(table) == 7
    read = pq.read_table(io.BytesIO(table.to_parquet()))
    assert read["step"].to_pylist() == list(range(7))
    assert read.schema.field("step").type == pa.int64()
