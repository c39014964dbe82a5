"""The Mosaic decode kernel in the GPU interpreter, races included, against the float64 oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KV_DTYPES, paged_decode
from pallas_kernels.limits import BLOCK_SIZES, HEAD_DIMS, MAX_GROUP
from pallas_kernels.mosaic import MAX_SMEM_BYTES, SMEM_PER_SM_BYTES
from pallas_kernels.paged_attention.mosaic.decode_layout import decode_tiling

# Relative to the largest |v| of a row: the weights are rounded to 16 bits before the product with
# V (2^-9 of each in bfloat16, 2^-12 in float16) and the output once more; the rest is float32.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11}


def check(attention, lens, *, group=2, q_dtype="bfloat16", scale=0.1, **layout):
    options = {
        key: layout.pop(key, default)
        for key, default in (("window", None), ("num_sink_tokens", 0), ("soft_cap", None))
    }
    case = attention.build_case(lens, **layout)
    kv_heads, dim = case.pages.num_kv_heads, case.pages.head_dim
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((len(lens), kv_heads * group, dim)), q_dtype)
    out = paged_decode(
        q,
        case.pages,
        case.tables,
        case.lens,
        layer=case.layer,
        scale=scale,
        implementation="mosaic",
        **options,
    )
    assert out.dtype == q.dtype
    want = np.stack(
        [
            attention.oracle_row(
                np.asarray(q[row : row + 1], np.float32),
                case.keys[row],
                case.values[row],
                positions=[length - 1],
                scale=scale,
                window=options["window"],
                sinks=options["num_sink_tokens"],
                soft_cap=options["soft_cap"],
            )[0]
            if length
            else np.zeros((kv_heads * group, dim))
            for row, length in enumerate(lens)
        ]
    )
    largest = np.array([np.abs(v).max(initial=0) for v in case.values])
    bound = TOLERANCE["float16" if "float8" in str(layout.get("dtype")) else q_dtype]
    # An output in bfloat16 is rounded to it, whatever the products were in.
    bound = max(bound, 2**-9 if q_dtype == "bfloat16" else 0)
    errors = attention.row_errors(out, want)
    assert (errors <= bound * largest).all(), errors / np.maximum(largest, 1e-30)


@pytest.mark.parametrize(
    ("lens", "layout"),
    [
        # Empty, one token, page ± 1, tile ± 1; more tiles than CTAs.
        ([0, 1, 15, 17, 63, 64, 65], {"dtype": "bfloat16", "dim": 64}),
        ([130, 0, 47], {"dtype": "int8", "dim": 64, "group": 4, "kv_heads": 1}),
        ([65], {"dtype": "float8_e4m3fn", "dim": 80, "group": 3, "kv_heads": 1}),
        ([70], {"dtype": "float8_e5m2", "dim": 96, "block_size": 64, "q_dtype": "float16"}),
        ([129], {"dtype": "float16", "q_dtype": "float16", "dim": 128, "block_size": 128}),
        ([40], {"dtype": "int8", "dim": 256, "block_size": 32, "group": 16, "kv_heads": 1}),
        # Logits of some -6e4 and less: what is masked is told by position, not by magnitude.
        ([1], {"dtype": "bfloat16", "dim": 64, "group": 8, "kv_heads": 1, "scale": 5e3}),
    ],
    ids=["bf16", "int8", "e4m3", "e5m2", "f16", "d256", "far"],
)
def test_agrees_with_the_oracle(attention, gpu_interpreter, lens, layout):
    check(attention, lens, **layout)


@pytest.mark.parametrize(
    ("lens", "options"),
    [
        ([150, 30], {"dtype": "int8", "window": 40, "num_sink_tokens": 3, "soft_cap": 5.0}),
        ([300], {"dtype": "bfloat16", "window": 70, "num_sink_tokens": 70, "block_size": 128}),
    ],
    ids=["int8", "bf16"],
)
def test_window_sinks_and_soft_cap(attention, gpu_interpreter, lens, options):
    check(attention, lens, dim=64, kv_heads=1, **options)


def test_tilings_fit_the_shared_memory_and_two_ctas_share_an_sm_up_to_dim_128():
    for dim in HEAD_DIMS:
        for group in range(1, MAX_GROUP + 1):
            for itemsize in {storage.dtype.itemsize for storage in KV_DTYPES.values()} - {4}:
                tiling = decode_tiling(group=group, head_dim=dim, itemsize=itemsize)
                assert tiling.heads >= group
                assert tiling.stages >= 2
                assert tiling.smem_bytes <= MAX_SMEM_BYTES
                assert tiling.ctas_per_sm * (tiling.smem_bytes + 1024) <= SMEM_PER_SM_BYTES
                assert tiling.ctas_per_sm == (2 if dim <= 128 else 1)
    assert BLOCK_SIZES == (16, 32, 64, 128)
