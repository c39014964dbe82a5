"""The words for KV formats."""

import numpy as np
import pytest

from pallas_kernels import KV_DTYPES
from paxkv.cache.quantize import STORAGE, KVFormat
from paxkv.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "model_dtype", "storage"),
    [
        ("auto", "float32", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("bf16", "float32", "bfloat16"),
        ("fp8", "float32", "float8_e4m3fn"),
        ("int8", "bfloat16", "int8"),
    ],
)
def test_storage_dtype(name, model_dtype, storage):
    assert KVFormat(name).storage_dtype(model_dtype) == storage


def test_every_format_has_kernels():
    assert set(STORAGE.values()) <= set(KV_DTYPES)


@pytest.mark.parametrize("name", ["fp4", "", "AUTO"])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(ConfigError, match=r"kv.name='.*auto, bf16, .*int8"):
        KVFormat(name)


def test_equal_formats_are_equal():
    assert KVFormat() == KVFormat("auto") != KVFormat("int8")
    assert np.unique([KVFormat(n).name for n in STORAGE]).size == len(STORAGE)
