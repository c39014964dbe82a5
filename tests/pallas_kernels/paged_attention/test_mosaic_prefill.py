"""The Mosaic prefill kernel in the GPU interpreter, races included, against the float64 oracle."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_prefill
from pallas_kernels.limits import BLOCK_SIZES, HEAD_DIMS, MAX_GROUP
from pallas_kernels.mosaic import MAX_SMEM_BYTES
from pallas_kernels.paged_attention.mosaic import prefill_plan

# Keys that nobody sees are NaN here, and they are multiplied before they are masked.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

# Relative to the largest |v| of a row: the weights are rounded to 16 bits before the product with
# V (2^-9 of each in bfloat16, 2^-12 in float16) and the output once more; the rest is float32.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11}


def check(attention, lens, query_lens, *, chunk=None, group=2, q_dtype="bfloat16", **layout):
    options = {
        key: layout.pop(key, default)
        for key, default in (("window", None), ("num_sink_tokens", 0), ("soft_cap", None))
    }
    case = attention.build_case(lens, **layout)
    pages = with_nan_codes(case.pages)
    kv_heads, dim = pages.num_kv_heads, pages.head_dim
    shape = (len(lens), chunk or max(query_lens), kv_heads * group, dim)
    q = jnp.asarray(np.random.default_rng(0).standard_normal(shape), q_dtype)
    scale = 0.7 * dim**-0.5
    tables = np.array(case.tables)
    if options["window"] is not None:  # what nobody sees must not be read: block 0 is poisoned
        for row, (length, queries) in enumerate(zip(lens, query_lens, strict=True)):
            block = np.arange(tables.shape[1]) * case.pages.block_size
            unseen = block + case.pages.block_size <= length - queries - options["window"] + 1
            tables[row, unseen & (block >= options["num_sink_tokens"])] = 0
    out = paged_prefill(
        q,
        pages,
        jnp.asarray(tables),
        case.lens,
        jnp.asarray(query_lens, jnp.int32),
        layer=case.layer,
        scale=scale,
        implementation="mosaic",
        **options,
    )
    assert out.dtype == q.dtype
    want = np.zeros(shape)
    for row, (length, queries) in enumerate(zip(lens, query_lens, strict=True)):
        want[row, :queries] = attention.oracle_row(
            np.asarray(q[row, :queries], np.float32),
            case.keys[row],
            case.values[row],
            positions=range(length - queries, length),
            scale=scale,
            window=options["window"],
            sinks=options["num_sink_tokens"],
            soft_cap=options["soft_cap"],
        )
    largest = np.array([np.abs(v).max(initial=0) for v in case.values])
    bound = TOLERANCE["float16" if "float8" in str(layout.get("dtype")) else q_dtype]
    # An output in bfloat16 is rounded to it, whatever the products were in.
    bound = max(bound, 2**-9 if q_dtype == "bfloat16" else 0)
    errors = attention.row_errors(out, want)
    assert (errors <= bound * largest).all(), errors / np.maximum(largest, 1e-30)


def with_nan_codes(pages):
    """Where a pool of 8-bit floats is poisoned by NaN scales, make its codes NaN too."""
    if pages.coded_as is None:
        return pages
    nan = jnp.uint8(0x7F)
    return dataclasses.replace(
        pages,
        k=jnp.where(jnp.isnan(pages.k_scale)[..., None], nan, pages.k),
        v=jnp.where(jnp.isnan(pages.v_scale)[..., None], nan, pages.v),
    )


@pytest.mark.parametrize(
    ("lens", "query_lens", "layout"),
    [
        # Empty, one token, page ± 1, tile ± 1, padding of a chunk.
        ([0, 1, 15, 17, 127, 129], [0, 1, 15, 4, 2, 40], {"dtype": "bfloat16", "dim": 64}),
        ([130, 63, 65], [7, 63, 1], {"dtype": "int8", "dim": 64, "group": 4}),
        ([65], [9], {"dtype": "float8_e4m3fn", "dim": 80, "group": 3}),
        ([70], [70], {"dtype": "float8_e5m2", "dim": 96, "block_size": 64, "q_dtype": "float16"}),
        ([129], [17], {"dtype": "float16", "q_dtype": "float16", "dim": 128, "block_size": 128}),
        ([40], [5], {"dtype": "int8", "dim": 256, "block_size": 32, "group": 16}),
        ([70], [66], {"dtype": "bfloat16", "dim": 256, "group": 1}),  # both warpgroups
    ],
    ids=["bf16", "int8", "e4m3", "e5m2", "f16", "int8-d256", "bf16-d256"],
)
def test_agrees_with_the_oracle(attention, gpu_interpreter, lens, query_lens, layout):
    check(attention, lens, query_lens, kv_heads=layout.pop("kv_heads", 1), **layout)


@pytest.mark.parametrize(
    ("lens", "query_lens", "options"),
    [
        ([300], [33], {"dtype": "int8", "window": 40, "num_sink_tokens": 3, "soft_cap": 5.0}),
        ([300, 200], [33, 1], {"window": 70, "num_sink_tokens": 37, "group": 4}),
        ([400], [3], {"window": 100, "num_sink_tokens": 130, "block_size": 128}),
    ],
    ids=["int8", "bf16", "sinks"],
)
def test_window_sinks_and_soft_cap(attention, gpu_interpreter, lens, query_lens, options):
    check(attention, lens, query_lens, **{"dtype": "bfloat16", "dim": 64, "kv_heads": 1} | options)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_warpgroup_without_queries_keeps_pace_with_the_other(attention, gpu_interpreter, dtype):
    # Two query tiles of which one is padding, and more key tiles than two rounds of the stages.
    check(attention, [1200], [2], chunk=70, group=1, kv_heads=1, dim=64, dtype=dtype)


def test_query_tiles_fill_the_matrix_unit():
    choose = prefill_plan.choose_query_tile
    assert choose(1, 512) == (1, 64)
    assert choose(4, 512) == (4, 16)
    assert choose(4, 16) == (4, 16)
    assert choose(3, 16) == (3, 16)  # 48 rows of 64, one tile where (1, 64) needs three
    assert choose(3, 512) == (1, 64)
    assert choose(16, 512) == (8, 8)
    for group in range(1, MAX_GROUP + 1):
        for chunk in (1, 7, 16, 100, 512):
            heads, tokens = choose(group, chunk)
            assert group % heads == 0
            assert heads * tokens <= prefill_plan.ROWS
            assert tokens % 8 == 0


def test_layouts_fit_the_shared_memory():
    for dim in HEAD_DIMS:
        for itemsize in (1, 2):
            for tiles in (1, 2):
                for staged in (False, True):
                    layout = prefill_plan.choose_layout(dim, itemsize, tiles, stage_in_smem=staged)
                    assert layout.smem_bytes <= MAX_SMEM_BYTES
                    assert layout.stages >= 2
                    assert layout.warpgroups <= tiles
                    # Two query tiles share their keys, but for the widest heads of 8-bit pools.
                    assert layout.warpgroups == tiles or (dim == 256 and itemsize == 1)


def test_a_span_covers_what_is_seen_and_reads_nothing_else():
    rng = np.random.default_rng(0)
    for trial in range(30):
        block_size = int(rng.choice(BLOCK_SIZES))
        window = None if trial % 5 == 0 else int(rng.integers(1, 300))
        sinks = int(rng.choice([0, 1, block_size, 200]))
        length = int(rng.integers(1, 700))
        queries = int(rng.integers(1, length + 1))
        first = int(rng.integers(0, queries))
        end = first + int(rng.choice([8, 64, 128]))
        static = make_static(block_size, window, sinks)
        span = prefill_plan.find_span(static, *map(jnp.int32, (length, queries, first, end)))

        key = np.arange(length)
        seen = np.zeros(length, bool)
        for position in range(length - queries + first, length - queries + min(end, queries)):
            inside = key > position - (window or length)
            seen |= (key <= position) & (inside | (key < sinks))
        wanted = {int(k) // block_size for k in key[seen]}

        width, got, tiles = -(-length // block_size), set(), []
        for step in range(int(span.num_tiles)):
            tiles.append(int(span.tile(jnp.int32(step))))
            columns = prefill_plan.page_columns(static, span, jnp.int32(step), width)
            start = tiles[-1] * static.layout.keys
            for nth, column in enumerate(map(int, columns)):
                place = (start + nth * static.copy_tokens) // block_size
                got.add(column)
                # Stand-ins count as dropped where they may hold anything.
                slots = start + nth * static.copy_tokens + np.arange(static.copy_tokens)
                kept = np.asarray(prefill_plan.is_kept(static, span, jnp.asarray(slots)))
                if column == place:
                    np.testing.assert_array_equal(kept, slots < length)
                elif column == (length - 1) // block_size and length % block_size:
                    assert not kept.any()
        assert tiles == sorted(set(tiles))
        assert wanted <= got
        last_seen = max(wanted)
        # Pages of the last tile after the last query may be read too: they hold the row's tokens.
        assert all(page in wanted or page > last_seen for page in got), (wanted, got)


def make_static(block_size, window, sinks):
    return prefill_plan.PrefillStatic(
        query=prefill_plan.QueryTile(1, 64),
        layout=prefill_plan.choose_layout(64, 2, 2),
        query_tiles=2,
        group=1,
        head_dim=64,
        block_size=block_size,
        pool_dtype="bfloat16",
        dtype=np.dtype(jnp.bfloat16),
        out_dtype=np.dtype(jnp.bfloat16),
        scale=1.0,
        window=window,
        num_sink_tokens=sinks,
        soft_cap=None,
        stage_in_smem=False,
    )
