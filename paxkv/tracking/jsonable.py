"""Any value as plain JSON: a record must not fail to be written for what it holds."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any


def to_jsonable(value: Any) -> Any:
    """Return `value` as JSON types: NaN and infinity as None, what JSON lacks as its str."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    as_list = getattr(value, "tolist", None)  # NumPy scalars and arrays have it
    return to_jsonable(as_list()) if callable(as_list) else str(value)


def dumps(value: Any, indent: int | None = None) -> bytes:
    """Return `value` as JSON text in UTF-8 that ends in a line feed."""
    # What JSON cannot hold, such as half a surrogate pair, is escaped rather than refused.
    text = json.dumps(to_jsonable(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"
