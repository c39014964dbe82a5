"""paged_decode of every implementation against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KV_DTYPES, KVPages, available_implementations, init_pages, paged_decode
from pallas_kernels.paged_attention import xla

IMPLEMENTATIONS = available_implementations()
LENS = (0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 200)  # page ± 1, tile ± 1


@pytest.fixture
def check(attention):
    """Run one implementation on a case and compare every row with the oracle."""

    def run(
        case,
        implementation,
        *,
        group=3,
        q_dtype="float32",
        scale=None,
        window=None,
        sinks=0,
        soft_cap=None,
        optimise=False,
    ):
        kv_heads, dim = case.pages.num_kv_heads, case.pages.head_dim
        q = jax.random.normal(jax.random.key(7), (len(case.keys), kv_heads * group, dim), q_dtype)
        out = attention.run_jit(
            paged_decode,
            *(q, case.pages, case.tables, case.lens, case.layer),
            scale=scale,
            window=window,
            num_sink_tokens=sinks,
            soft_cap=soft_cap,
            implementation=implementation,
            optimise=optimise,
        )
        assert out.dtype == q.dtype
        want = np.zeros(q.shape)
        for row, length in enumerate(np.asarray(case.lens)):
            if length:
                want[row] = attention.oracle_row(
                    np.asarray(q[row : row + 1], np.float64),
                    case.keys[row],
                    case.values[row],
                    positions=[length - 1],
                    scale=dim**-0.5 if scale is None else scale,
                    window=window,
                    sinks=sinks,
                    soft_cap=soft_cap,
                )[0]
        size = max(1.0, np.abs(want).max())
        errors = attention.row_errors(out, want)
        assert errors.max() <= attention.tolerance[q_dtype] * size, errors
        return out

    return run


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_matches_oracle_for_each_storage_dtype(attention, check, implementation, dtype):
    check(attention.build_case(LENS, dtype=dtype), implementation, optimise=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_output_has_the_dtype_of_q(attention, check, implementation):
    check(attention.build_case(LENS, dtype="bfloat16"), implementation, q_dtype="bfloat16")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "block_size"),
    [(1, 1, 64, 8), (1, 16, 80, 16), (3, 3, 64, 32), (2, 4, 96, 128), (2, 8, 128, 24)],
)
def test_shapes_of_real_models(attention, check, implementation, kv_heads, group, dim, block_size):
    lens = (5, block_size, block_size + 1, 3 * block_size - 1, 130)
    case = attention.build_case(lens, kv_heads=kv_heads, dim=dim, block_size=block_size)
    check(case, implementation, group=group)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("window", "sinks", "dtype"),
    [
        (1, 0, "float32"),
        (16, 3, "float32"),
        (17, 40, "int8"),
        (24, 3, "int4"),
        (64, 100, "float32"),
        (1000, 4, "float32"),
    ],
)
def test_window_and_sinks(attention, check, implementation, dtype, window, sinks):
    check(attention.build_case(LENS, dtype=dtype), implementation, window=window, sinks=sinks)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_soft_cap_and_scale(attention, check, implementation):
    case = attention.build_case(LENS, dtype="float8_e4m3fn")
    check(case, implementation, scale=0.7, soft_cap=5.0, window=20, sinks=2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("extra_width", [0, 2, 13])
def test_any_table_width(attention, check, implementation, extra_width):
    """vllm#14597: the width is no multiple of the pages taken at once."""
    check(attention.build_case((64, 3, 0, 49), extra_width=extra_width), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_table_padding_is_never_read(attention, implementation):
    case = attention.build_case((20, 0, 64, 1), extra_width=4)
    q = jax.random.normal(jax.random.key(1), (4, 4, 32))
    used = -(-case.lens // 16)
    decode = jax.jit(functools.partial(paged_decode, layer=1, implementation=implementation))
    filler = jnp.arange(case.tables.shape[1]) >= used[:, None]
    outs = [
        decode(q, case.pages, jnp.where(filler, padding, case.tables), case.lens)
        for padding in (0, -1, 2**31 - 1)
    ]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    assert not np.isnan(outs[0]).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_row_is_zeros_and_changes_no_other(attention, implementation):
    """flashinfer#363."""
    case = attention.build_case((0, 5))
    q = jax.random.normal(jax.random.key(1), (2, 4, 32))
    decode = functools.partial(attention.run_jit, paged_decode, implementation=implementation)
    out = decode(q, case.pages, case.tables, case.lens, 1)
    alone = decode(q[1:], case.pages, case.tables[1:], case.lens[1:], 1)
    np.testing.assert_array_equal(out[0], 0.0)
    np.testing.assert_allclose(out[1], alone[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_over_valid_tokens_sum_to_one(implementation, attention):
    """flashinfer#3716: with V all ones and a zero query the output is one for every length."""
    lens = tuple(range(1, 3 * 64 + 1))
    case = attention.build_case(lens, kv_heads=1, dim=8)
    ones = jnp.where(jnp.isnan(case.pages.v), jnp.nan, 1.0)
    pages = KVPages(k=case.pages.k, v=ones)
    out = attention.run_jit(
        paged_decode,
        *(jnp.zeros((len(lens), 1, 8)), pages, case.tables, case.lens, case.layer),
        implementation=implementation,
    )
    np.testing.assert_allclose(out, 1.0, rtol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("logit", [-6e4, 6e4, -3e30])
def test_logits_far_from_zero(attention, implementation, logit):
    """flashinfer#4450: masked is what the predicate says, however low the real logits lie."""
    dim, lens = 8, (1, 10, 100)
    case = attention.build_case(lens, kv_heads=1, dim=dim)
    # Every key is e_0 * sqrt(|logit|) and the query its negative, so all logits are equal.
    size = abs(logit) ** 0.5
    k = jnp.where(jnp.isnan(case.pages.k), jnp.nan, 0.0).at[..., 0].add(size)
    pages = KVPages(k=k, v=case.pages.v)
    q = jnp.zeros((3, 1, dim)).at[..., 0].set(np.sign(logit) * size)
    out = attention.run_jit(
        paged_decode,
        *(q, pages, case.tables, case.lens, case.layer),
        scale=1.0,
        implementation=implementation,
    )
    want = np.stack([v.mean(axis=0) for v in case.values])
    assert attention.row_errors(out, want).max() < 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("leaf", "fault"), [("k", jnp.nan), ("v", jnp.nan), ("v", jnp.inf)])
def test_a_faulty_row_stays_alone(attention, implementation, leaf, fault):
    case = attention.build_case((40, 70, 20))
    bad = case.tables[1, 0]
    leaves = {"k": case.pages.k, "v": case.pages.v}
    pages = KVPages(**{**leaves, leaf: leaves[leaf].at[bad].set(fault)})
    q = jnp.ones((3, 4, 32))
    out = attention.run_jit(
        paged_decode,
        *(q, pages, case.tables, case.lens, case.layer),
        implementation=implementation,
    )
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(out[0]).all() and np.isfinite(out[2]).all()


def test_many_rows_take_many_steps(attention, check):
    """More tiles than one iteration takes, and fewer rows than tiles as well as more."""
    rng = np.random.default_rng(3)
    lens = tuple(int(n) for n in rng.integers(0, 90, 50))
    check(attention.build_case(lens, kv_heads=1, dim=16), "xla", group=2)
    check(attention.build_case((900, 3), kv_heads=4, dim=128), "xla", group=1)


def test_cost_follows_live_tokens():
    """The trip count of the loop is not the padded table's."""
    pages = init_pages(8, 1, 1, 16, 8, "float32")
    tables = jnp.zeros((4, 1000), jnp.int32)
    steps = {}
    for length, window in ((1, None), (640, None), (16000, None), (16000, 64)):
        plan = xla._plan_decode(
            tables, jnp.full((4,), length, jnp.int32), pages, window, 0, tile_pages=4, step_tiles=8
        )
        steps[length, window] = int(plan.num_steps)
    assert steps == {(1, None): 1, (640, None): 5, (16000, None): 125, (16000, 64): 1}
