"""paged_prefill of every implementation against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KV_DTYPES, available_implementations, paged_decode, paged_prefill

IMPLEMENTATIONS = available_implementations()
LENS = (0, 1, 16, 17, 70, 90)
QUERY_LENS = (0, 1, 16, 5, 20, 9)


@pytest.fixture
def prefill(attention):
    """Run the op on a case."""

    def run(case, q, query_lens, implementation, **options):
        lens = jnp.asarray(query_lens, jnp.int32)
        return attention.run_jit(
            paged_prefill,
            *(q, case.pages, case.tables, case.lens, lens, case.layer),
            implementation=implementation,
            **options,
        )

    return run


@pytest.fixture
def check(attention, prefill):
    """Run one implementation on a case and compare every row with the oracle."""

    def run(
        case,
        query_lens,
        implementation,
        *,
        chunk=None,
        group=3,
        window=None,
        sinks=0,
        soft_cap=None,
        q_dtype="float32",
    ):
        kv_heads, dim = case.pages.num_kv_heads, case.pages.head_dim
        chunk = chunk or max(query_lens)
        q = jax.random.normal(
            jax.random.key(7), (len(query_lens), chunk, kv_heads * group, dim), q_dtype
        )
        out = prefill(
            case,
            q,
            query_lens,
            implementation,
            window=window,
            num_sink_tokens=sinks,
            soft_cap=soft_cap,
        )
        assert out.dtype == q.dtype
        want = np.zeros(q.shape)
        for row, (length, count) in enumerate(zip(np.asarray(case.lens), query_lens, strict=True)):
            want[row, :count] = attention.oracle_row(
                np.asarray(q[row, :count], np.float64),
                case.keys[row],
                case.values[row],
                positions=range(length - count, length),
                scale=dim**-0.5,
                window=window,
                sinks=sinks,
                soft_cap=soft_cap,
            )
        size = max(1.0, np.abs(want).max())
        errors = attention.row_errors(out, want)
        assert errors.max() <= attention.tolerance[q_dtype] * size, errors

    return run


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_matches_oracle_for_each_storage_dtype(attention, check, implementation, dtype):
    case = attention.build_case(LENS, dtype=dtype, dim=16)
    check(case, QUERY_LENS, implementation, chunk=23)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("window", "sinks", "dtype"),
    [(1, 0, "float32"), (8, 3, "int8"), (9, 0, "int4"), (33, 20, "float32")],
)
def test_window_and_sinks(attention, check, implementation, dtype, window, sinks):
    case = attention.build_case(LENS, dim=16, dtype=dtype)
    check(case, QUERY_LENS, implementation, window=window, sinks=sinks)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_soft_cap_group_and_output_dtype(attention, check, implementation):
    case = attention.build_case((30, 64), dtype="bfloat16", kv_heads=1, dim=80, block_size=8)
    check(case, (7, 8), implementation, group=4, soft_cap=4.0, q_dtype="bfloat16")


@pytest.mark.parametrize("window", [None, 100])
def test_several_query_tiles_and_key_steps(attention, check, window):
    """A chunk beyond one tile of queries and a context beyond one step of keys."""
    case = attention.build_case((600, 150), kv_heads=1, dim=8)
    check(case, (140, 150), "xla", group=1, window=window, sinks=2 if window else 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 20])
def test_chunks_equal_the_whole(attention, prefill, implementation, window):
    n = 75
    whole = attention.build_case((n,), dim=16)
    q = jax.random.normal(jax.random.key(3), (1, n, 4, 16))
    options = {"window": window, "num_sink_tokens": 3}
    want = prefill(whole, q, (n,), implementation, **options)[0]
    for size in (16, 50):
        done = 0
        while done < n:
            count = min(size, n - done)
            part = jnp.pad(q[:, done : done + count], ((0, 0), (0, size - count), (0, 0), (0, 0)))
            case = type(whole)(**{**vars(whole), "lens": jnp.asarray([done + count], jnp.int32)})
            out = prefill(case, part, (count,), implementation, **options)[0, :count]
            np.testing.assert_allclose(out, want[done : done + count], rtol=1e-5, atol=2e-6)
            done += count


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunk_of_one_is_decode(attention, prefill, implementation):
    case = attention.build_case((0, 1, 40, 16))
    q = jax.random.normal(jax.random.key(3), (4, 1, 6, 32))
    out = prefill(case, q, (0, 1, 1, 1), implementation)
    want = attention.run_jit(
        paged_decode,
        *(q[:, 0], case.pages, case.tables, case.lens, case.layer),
        implementation=implementation,
    )
    np.testing.assert_allclose(out[:, 0], want, rtol=1e-5, atol=1e-6)
