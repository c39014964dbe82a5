"""Choice of implementation, and the messages of refused calls."""

import logging

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import (
    AttentionSizes,
    DeviceKind,
    KVPages,
    UnsupportedError,
    available_implementations,
    choose_implementation,
    dispatch,
    init_pages,
    paged_decode,
    paged_prefill,
    write_kv,
)
from pallas_kernels.device import HOPPER, traced_for
from pallas_kernels.dispatch import Implementation, run_op


def test_none_picks_by_device_and_says_so_once(caplog):
    dispatch._log_once.cache_clear()
    ops = {name: Implementation(lambda name=name: name) for name in available_implementations()}
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert run_op("op", ops, None) == run_op("op", ops, None) == "xla"
    assert [record.getMessage() for record in caplog.records] == ["op: kernel xla: cpu device"]


SIZES = AttentionSizes(
    kv_dtype="int8", q_dtype="bfloat16", head_dim=128, block_size=16, group=4, kv_heads=8
)


def test_hopper_gets_mosaic_and_other_devices_xla():
    assert choose_implementation(HOPPER, SIZES) == ("mosaic", "Hopper GPU")
    assert choose_implementation(DeviceKind("gpu", "8.0")).name == "xla"
    assert choose_implementation(DeviceKind("tpu")) == ("xla", "tpu device")
    assert available_implementations(HOPPER) == ("reference", "xla", "mosaic")
    assert available_implementations(DeviceKind("gpu", "12.0")) == ("reference", "xla")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_dtype": "float32"}, "the pool is float32"),
        ({"q_dtype": "float32"}, "q is float32"),
        ({"kv_dtype": "float16"}, "q is bfloat16 and the pool float16"),
        ({"head_dim": 72}, "head_dim is 72; it takes 64, 80, 96, 128, 256"),
        ({"block_size": 8}, "block_size is 8; it takes 16, 32, 64, 128"),
        ({"group": 17}, "17 query heads; it takes up to 16"),
        ({"kv_heads": 65}, "65 KV heads; it takes up to 64"),
    ],
)
def test_what_mosaic_cannot_serve_goes_to_xla_unless_it_was_named(change, reason, caplog):
    choice = choose_implementation(HOPPER, SIZES._replace(**change))
    assert choice.name == "xla"
    assert reason in choice.reason


def test_none_falls_back_where_mosaic_cannot_serve_the_arrays_and_logs_it(caplog):
    dispatch._log_once.cache_clear()
    with traced_for(HOPPER), caplog.at_level(logging.INFO, logger="pallas_kernels"):
        paged_decode(**GOOD)
    assert "kernel xla: mosaic cannot do this: the pool is float32" in caplog.text
    with traced_for(HOPPER), pytest.raises(UnsupportedError, match=r"float32.*can: reference, xla"):
        paged_decode(**GOOD, implementation="mosaic")


def test_mosaic_without_a_hopper_gpu_says_so():
    x = jnp.zeros((1, 2, 8))
    slots = jnp.zeros((1,), jnp.int32)
    with pytest.raises(UnsupportedError, match=r"Hopper GPU .* this is a cpu device"):
        write_kv(x, x, GOOD["pages"], slots, layer=0, implementation="mosaic")


def test_unknown_name_lists_the_known_ones():
    pages = init_pages(1, 1, 1, 16, 8, "float32")
    q, ints = jnp.zeros((1, 1, 8)), jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match=r"'xal': paged_decode has reference, xla.*mean 'xla'"):
        paged_decode(q, pages, ints[:, None], ints, layer=0, implementation="xal")


def test_a_named_implementation_never_falls_back():
    ops = {
        "fast": Implementation(lambda x: "fast", lambda x: f"x={x} is odd" if x % 2 else None),
        "any": Implementation(lambda x: "any"),
    }
    assert run_op("op", ops, "fast", 2) == "fast"
    with pytest.raises(UnsupportedError, match=r"'fast': op cannot do this: x=3 is odd.*can: any"):
        run_op("op", ops, "fast", 3)


GOOD = {
    "q": jnp.zeros((2, 4, 8)),
    "pages": init_pages(3, 2, 2, 16, 8, "float32"),
    "block_tables": jnp.zeros((2, 5), jnp.int32),
    "context_lens": jnp.zeros((2,), jnp.int32),
    "layer": 0,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": jnp.zeros((2, 4, 9))}, ValueError, r"\[2, 4, 9\]: expected \[row, head, dim\] = "),
        ({"q": jnp.zeros((2, 5, 8))}, ValueError, "5 heads: expected a multiple of the pool's 2"),
        ({"q": jnp.zeros((2, 4, 8), jnp.int32)}, TypeError, "q is int32: expected float32"),
        ({"block_tables": jnp.zeros((3, 5), jnp.int32)}, ValueError, "block_tables has shape"),
        ({"block_tables": jnp.zeros((2, 0), jnp.int32)}, ValueError, "max_blocks 0"),
        ({"context_lens": jnp.zeros((2,))}, TypeError, "context_lens is float32: expected int32"),
        ({"layer": 2}, ValueError, "layer=2: the pool has layers 0 to 1"),
        ({"window": 0}, ValueError, "window=0"),
        ({"num_sink_tokens": -1}, ValueError, "num_sink_tokens=-1"),
        ({"soft_cap": float("nan")}, ValueError, "soft_cap=nan"),
        ({"scale": 0.0}, ValueError, "scale=0.0"),
    ],
)
def test_attention_says_what_came_and_what_was_expected(change, error, message):
    with pytest.raises(error, match=message):
        paged_decode(**{**GOOD, **change})
    prefill = {**GOOD, "query_lens": GOOD["context_lens"], **change}
    prefill["q"] = prefill["q"][:, None]
    with pytest.raises(
        error, match=message.replace("2, 4, 9", "2, 1, 4, 9").replace("row,", "row, chunk,")
    ):
        paged_prefill(**prefill)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_no_rows_give_no_rows(implementation):
    none = {**GOOD, "q": GOOD["q"][:0], "block_tables": GOOD["block_tables"][:0]}
    none["context_lens"] = GOOD["context_lens"][:0]
    assert paged_decode(**none, implementation=implementation).shape == (0, 4, 8)
    none["q"] = none["q"][:, None]
    none["query_lens"] = none["context_lens"]
    assert paged_prefill(**none, implementation=implementation).shape == (0, 1, 4, 8)


@pytest.mark.parametrize(
    ("leaves", "error", "message"),
    [
        ({"v": jnp.zeros((3, 2, 2, 16, 4))}, ValueError, "pages.v is float32"),
        ({"k_scale": jnp.ones((3, 2, 2, 16))}, ValueError, "a float32 pool has no scales"),
        ({"k": jnp.zeros((2, 2, 16, 8, 1, 1))}, ValueError, r"expected \[num_blocks"),
        (
            {name: jnp.zeros((3, 2, 2, 16, 8), jnp.float8_e5m2) for name in ("k", "v")},
            TypeError,
            "pages.k is float8_e5m2: a float8_e5m2 pool holds uint8",
        ),
        ({"k": jnp.zeros((3, 2, 2, 16, 8), jnp.int16)}, TypeError, "pages.k is int16"),
        (
            {"k": jnp.zeros((3, 2, 2, 16, 8), jnp.int8)}
            | {"v": jnp.zeros((3, 2, 2, 16, 8), jnp.int8)},
            ValueError,
            "k_scale is missing: a int8 pool without scales of its own",
        ),
    ],
)
def test_a_pool_whose_leaves_do_not_fit_is_refused(leaves, error, message):
    pages = KVPages(**{"k": GOOD["pages"].k, "v": GOOD["pages"].v, **leaves})
    with pytest.raises(error, match=message):
        paged_decode(**{**GOOD, "pages": pages})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.zeros((2, 1, 8))}, r"k has shape \[2, 1, 8\]: expected \[token, kv_head, dim\]"),
        ({"v": jnp.zeros((3, 2, 8))}, "v has shape"),
        ({"slot_mapping": jnp.zeros((3,), jnp.int32)}, "slot_mapping has shape"),
    ],
)
def test_write_says_what_came_and_what_was_expected(change, message):
    x = jnp.zeros((2, 2, 8))
    good = {"k": x, "v": x, "pages": GOOD["pages"], "slot_mapping": jnp.zeros((2,), jnp.int32)}
    with pytest.raises(ValueError, match=message):
        write_kv(**{**good, **change}, layer=0)


def test_a_pool_too_large_for_32_bits_is_refused_by_the_ops():
    leaf = jax.ShapeDtypeStruct((2**26, 2, 2, 16, 8), jnp.float32)
    huge = KVPages(k=leaf, v=leaf)
    with pytest.raises(ValueError, match=r"below 2\^31"):
        jax.eval_shape(lambda p: paged_decode(**{**GOOD, "pages": p}), huge)
