"""The words for KV formats."""

import math

import pytest

from pallas_kernels import KV_DTYPES
from paxkv.cache.groups import Span, group_layers
from paxkv.cache.quantize import STORAGE, KVFormat
from paxkv.errors import ConfigError

SIZES = {"num_kv_heads": 2, "head_dim": 8, "block_size": 4}


@pytest.mark.parametrize(
    ("name", "model_dtype", "storage"),
    [
        ("auto", "float32", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("bf16", "float32", "bfloat16"),
        ("fp8", "float32", "float8_e4m3fn"),
        ("fp8_e5m2", "float32", "float8_e5m2"),
        ("int8", "bfloat16", "int8"),
        ("int4", "float32", "int4"),
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
    assert KVFormat("int8", skip_layers=[3, 1, 3]) == KVFormat("int8", skip_layers=(1, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "block"}, "kv.granularity=block: there is .*head, token_head, channel"),
        ({"name": "auto", "granularity": "channel"}, "kv=auto stores numbers without scales"),
        ({"granularity": "channel", "scale": 1.0}, "kv.granularity=channel has no static scale"),
        ({"granularity": "channel", "skip_layers": [0]}, "stored alike. Try kv.skip_layers=.., or"),
        ({"name": "auto", "granularity": "head"}, "kv=auto stores numbers without scales.*kv=int8"),
        ({"name": "bf16", "granularity": "tensor"}, "kv=bf16 stores numbers without scales"),
        ({"scale": 1.0}, "kv.scale=1.0: kv.granularity=token_head has no static scale.*=null"),
        ({"scale": "calibrate"}, "kv.scale=calibrate: kv.granularity=token_head"),
        ({"granularity": "head", "scale": "measure"}, "a number or calibrate. Try kv.scale="),
        ({"granularity": "head", "scale": True}, "kv.scale=True: must be a number"),
        ({"skip_layers": [-1]}, r"kv.skip_layers=\[-1\]: must be a list of layers"),
        ({"skip_layers": [0.5]}, r"kv.skip_layers=\[0.5\]"),
        ({"skip_layers": "01"}, "kv.skip_layers=01: must be a list"),
        ({"name": "auto", "skip_layers": [0]}, "kv=auto quantises no layer. Try kv=int8"),
    ],
)
def test_nonsense_is_refused_with_what_fixes_it(options, message):
    with pytest.raises(ConfigError, match=message):
        KVFormat(**{"name": "int8", **options})


@pytest.mark.parametrize("scale", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e-60])
def test_static_scales_are_positive_and_finite(scale):
    """onnxruntime/mobius#447: given by program, they pass the check of those from a file."""
    with pytest.raises(ConfigError, match=r"must be positive and finite\. Try kv.scale=calibrate"):
        KVFormat("int8", granularity="tensor", scale=scale)


def test_where_static_scales_come_from():
    assert KVFormat("int8").static_scale is None
    assert KVFormat("int8", granularity="head").static_scale == "calibrate"
    assert KVFormat("fp8", granularity="head", scale="calibrate").static_scale == "calibrate"
    assert KVFormat("int8", granularity="tensor", scale=0.5).static_scale == 0.5


def test_a_given_scale_is_warned_about():
    warning = KVFormat("int8", granularity="tensor", scale=1.0).warning
    assert warning is not None and "kv.scale=calibrate" in warning
    assert "rounded to multiples of 1 and clipped at ±127" in warning
    warning = KVFormat("fp8", granularity="head", scale=0.5).warning
    assert warning is not None and "K and V are clipped at ±224" in warning
    for kv in (KVFormat(), KVFormat("int8"), KVFormat("int8", granularity="head")):
        assert kv.warning is None


def test_layout_of_static_scales_and_skipped_layers():
    groups = group_layers([Span()] * 5)
    plain = KVFormat("int8").layout("float32", groups, **SIZES)
    assert plain.bytes_per_token == 5 * 2 * 2 * (8 + 4)
    static = KVFormat("int8", granularity="head").layout("float32", groups, **SIZES)
    assert static.bytes_per_token == 5 * 2 * 2 * 8
    channel = KVFormat("int8", granularity="channel").layout("bfloat16", groups, **SIZES)
    assert (channel.open_dtype, static.open_dtype) == ("bfloat16", None)
    assert channel.bytes_per_block == 5 * 2 * (2 * 4 * 8 + 4 * (8 + 4))
    some = KVFormat("int4", skip_layers=[4, 0]).layout("bfloat16", groups, **SIZES)
    assert some.plain_places == (0, 4)
    assert some.bytes_per_token == 2 * 2 * (3 * (4 + 4) + 2 * 8 * 2)


def test_layers_of_one_place_are_skipped_together():
    groups = group_layers([Span(8), Span()] * 2)  # layers 0 and 2, 1 and 3
    layout = KVFormat("int8", skip_layers=[0, 1]).layout("float32", groups, **SIZES)
    assert (layout.num_layers, layout.plain_places) == (2, (0,))
    with pytest.raises(ConfigError, match=r"layers \[0, 1\].*Try kv.skip_layers=\[0,1\]"):
        KVFormat("int8", skip_layers=[0]).layout("float32", groups, **SIZES)


@pytest.mark.parametrize(
    ("skip", "message"), [([4], r"layers 0 to 3"), ([0, 1, 2, 3], "no layer is left.*kv=auto")]
)
def test_skipped_layers_must_leave_a_rest_and_exist(skip, message):
    with pytest.raises(ConfigError, match=message):
        KVFormat("int8", skip_layers=skip).layout("float32", group_layers([Span()] * 4), **SIZES)
