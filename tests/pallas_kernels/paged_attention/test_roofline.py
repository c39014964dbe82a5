"""The paper estimates, against numbers worked out by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.mosaic.work_plan import live_span
from pallas_kernels.paged_attention.roofline import (
    H200,
    DecodeTiles,
    PrefillTiles,
    decode_tiles,
    estimate,
    estimate_decode,
    estimate_prefill,
    live_tiles,
    prefill_tiles,
)
from pallas_kernels.paged_attention.specs import GPU_DTYPES, GPU_SPECS, SPECS, AttentionSpec

LLAMA = GPU_SPECS["llama8b-decode-64x4k"]
TILES = DecodeTiles(tokens=64, columns=16, stages=3, ctas_per_sm=2, smem_bytes=112_640)
PREFILL_TILES = PrefillTiles(
    query_rows=64,
    query_tokens=16,
    query_heads=4,
    warpgroups=2,
    tokens=64,
    stages=2,
    smem_bytes=0,
)


def test_four_bit_codes_are_counted_in_halves():
    four = estimate_decode(LLAMA, "int4", TILES, H200)
    eight = estimate_decode(LLAMA, "int8", TILES, H200)
    assert 2 * four.kv_bytes == eight.kv_bytes
    assert four.scale_bytes == eight.scale_bytes == 64 * 4096 * 8 * 2 * 4


def test_bf16_decode_by_hand():
    e = estimate_decode(LLAMA, "bfloat16", TILES, H200)
    assert e.kv_bytes == 64 * 4096 * 8 * 2 * 128 * 2 == 1_073_741_824
    assert e.scale_bytes == 0
    assert e.query_bytes == 2 * (64 * 32 * 128) * 2
    assert e.flops == 4 * 64 * 4096 * 32 * 128 == 4_294_967_296
    assert e.executed_flops == 4 * e.flops  # 4 heads in 16 columns
    # 32,768 tiles over 264 CTAs: 125 for each, and 263 CTAs take them all.
    assert e.ctas == 263
    assert e.partial_bytes == 2 * (64 * 8 + 263) * 16 * 129 * 4
    assert e.in_flight_per_sm == 3 * 32_768 * 263 / 132
    assert e.in_flight_per_sm > H200.needed_in_flight == pytest.approx(32_576, rel=1e-4)
    stretch = 125 * 263 / 32_768
    moved = stretch * e.kv_bytes + e.query_bytes + e.partial_bytes
    assert e.memory_s == pytest.approx(moved / 4.3e12)
    assert e.tensor_s == pytest.approx(stretch * 4 * 4_294_967_296 / 790e12)
    # K and V arrive and are read, queries are read, weights are written and read.
    assert e.smem_traffic == 32_768 * (2 * 32_768 + 16 * 128 * 2 + 2 * 64 * 16 * 2)
    assert e.bound_by == "memory"
    assert e.seconds == pytest.approx(e.memory_s + 6e-6)
    assert 250e-6 < e.seconds < 265e-6


def test_int8_decode_by_hand():
    e = estimate_decode(LLAMA, "int8", TILES, H200)
    assert e.kv_bytes == 64 * 4096 * 8 * 2 * 128 == 536_870_912
    assert e.scale_bytes == 64 * 4096 * 8 * 2 * 4 == 16_777_216
    assert e.bytes == 536_870_912 + 16_777_216 + 2 * 64 * 32 * 128 * 2
    assert e.in_flight_per_sm == 3 * 2 * 64 * (128 + 4) * 263 / 132
    # K arrives and is read; V is also written as 16 bits and read so.
    assert e.smem_traffic == 32_768 * (64 * 128 * (2 + 6) + 16 * 128 * 2 + 2 * 64 * 16 * 2)
    bf16 = estimate_decode(LLAMA, "bfloat16", TILES, H200)
    assert bf16.seconds / e.seconds > 1.6  # the target, on paper


def test_a_lone_tile_is_bound_by_latency():
    spec = dataclasses.replace(LLAMA, rows=1, tokens=64, kv_heads=1, heads=1)
    e = estimate_decode(spec, "bfloat16", TILES, H200)
    assert e.ctas == 1
    assert e.memory_s == pytest.approx((32_768 + 2 * 128 * 2 + e.partial_bytes) / (32_768 / 1e-6))


def test_prefill_by_hand():
    spec = AttentionSpec(
        name="p", rows=1, heads=4, kv_heads=1, dim=128, layers=1, tokens=96, chunk=64
    )
    e = estimate_prefill(spec, "bfloat16", PREFILL_TILES, H200)
    # Queries at positions 32 to 95, 32 a CTA: keys to 63 and to 95, one tile of 64 and two.
    assert e.ctas == 2
    assert e.executed_flops == 4 * 3 * 64 * 128 * 128
    assert e.loaded_bytes == 3 * 32_768
    assert e.flops == 4 * 4 * 128 * sum(range(33, 97))
    assert e.kv_bytes == 96 * 2 * 128 * 2
    # The longest CTA's two tiles, on one of 132 SMs.
    assert e.tensor_s == pytest.approx(4 * 2 * 64 * 128 * 128 / (790e12 / 132))
    windowed = dataclasses.replace(spec, window=1)
    e = estimate_prefill(windowed, "bfloat16", PREFILL_TILES, H200)
    assert e.executed_flops == 4 * 2 * 64 * 128 * 128
    assert e.flops == 4 * 4 * 128 * 64


@pytest.mark.parametrize("name", GPU_SPECS)
def test_more_work_takes_longer_on_paper(name):
    spec = GPU_SPECS[name]
    e = estimate(spec, "bfloat16")
    longer = estimate(dataclasses.replace(spec, tokens=2 * spec.tokens), "bfloat16")
    assert longer.seconds > e.seconds or spec.window is not None
    assert estimate(dataclasses.replace(spec, rows=2 * spec.rows), "bfloat16").seconds > e.seconds
    assert e.executed_flops >= e.flops > 0
    assert e.loaded_bytes >= e.kv_bytes
    assert e.smem_bytes_per_cta <= 227 * 1024
    for dtype in GPU_DTYPES.get(name, ()):
        assert estimate(spec, dtype).bytes <= e.bytes


def test_targets_are_plausible_on_paper():
    seconds = {name: estimate(spec, "bfloat16").seconds for name, spec in GPU_SPECS.items()}
    assert seconds["llama8b-decode-1x32k"] < 55e-6
    window, short = "llama8b-decode-16x32k-window1k", "llama8b-decode-16x1k"
    assert seconds[window] <= 1.2 * seconds[short]
    zipf = seconds["llama8b-decode-64xzipf4k"] / seconds["llama8b-decode-64x4k"]
    assert 0.97 < zipf < 1.03
    for dtype in ("int8", "float8_e4m3fn", "float8_e5m2"):
        assert seconds[LLAMA.name] / estimate(LLAMA, dtype).seconds > 1.6


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (100, 0), (100, 5), (64, 130), (1, 0)])
@pytest.mark.parametrize("block_size", [16, 128])
def test_tiles_are_those_of_the_kernels_plan(window, sinks, block_size):
    lens = np.array([1, 63, 64, 65, 99, 100, 101, 250, 1000])
    spec = dataclasses.replace(
        LLAMA, window=window, num_sink_tokens=sinks, block_size=block_size, rows=len(lens)
    )
    span = live_span(
        jnp.asarray(lens, jnp.int32), block_size=block_size, window=window, num_sink_tokens=sinks
    )
    np.testing.assert_array_equal(live_tiles(spec, lens, 64), span.tiles)


def test_default_tilings_fit_every_spec():
    for spec in SPECS.values():
        choose = decode_tiles if spec.chunk is None else prefill_tiles
        for dtype in ("bfloat16", "int8"):
            assert choose(spec, dtype).smem_bytes <= 227 * 1024


def test_zipf_lengths_share_the_uniform_total():
    lens = GPU_SPECS["llama8b-decode-64xzipf4k"].context_lens()
    assert lens.dtype == np.int32 and lens.sum() == 64 * 4096 == LLAMA.context_lens().sum()
    ranked = np.sort(lens)[::-1]
    assert ranked[1] == pytest.approx(ranked[0] / 2, rel=0.01) and ranked[-1] > 500
    assert not np.array_equal(lens, ranked)


def test_windows_and_sinks_bound_the_live_tokens():
    assert SPECS["smollm2-decode-4x2k-window"].live_tokens() == 4 * 256
    spec = dataclasses.replace(LLAMA, rows=2, tokens=1000, window=100, num_sink_tokens=4)
    assert spec.live_tokens() == 2 * 104
    # The first query of a chunk sees the furthest back.
    assert dataclasses.replace(spec, chunk=50).live_tokens() == 2 * (100 + 49 + 4)
    lens = SPECS["smollm2-decode-mixed"].context_lens()
    assert lens.dtype == np.int32 and lens.min() >= 40 and lens.max() <= 544
