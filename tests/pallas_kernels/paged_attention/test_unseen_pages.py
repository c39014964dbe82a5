"""Blocks that neither sinks nor window reach may be freed and hold anything, NaN included."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode, paged_prefill

LENGTH, BLOCK_SIZE = 200, 16
CASES = [(50, 4), (50, 20), (100, 0), (40, 70), (130, 4)]


def run(attention, implementation, window, sinks, dtype):
    """Output of one decode row and of a chunk, with and without what nobody sees."""
    case = attention.build_case([LENGTH], kv_heads=1, dim=64, dtype=dtype)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((1, 8, 2, 64)), dtype)
    first = (LENGTH - 8 - window + 1) // BLOCK_SIZE  # block of the first token any query sees
    unseen = list(range(-(-sinks // BLOCK_SIZE), first))
    assert unseen or sinks > window
    tables = np.array(case.tables)
    freed = tables[0, unseen]
    poisoned = dataclasses.replace(
        case.pages, **{name: getattr(case.pages, name).at[freed].set(jnp.nan) for name in "kv"}
    )
    tables[0, unseen] = 10**6
    options = {
        "layer": case.layer,
        "window": window,
        "num_sink_tokens": sinks,
        "implementation": implementation,
    }
    outputs = []
    for pages, table in ((case.pages, case.tables), (poisoned, jnp.asarray(tables))):
        decoded = paged_decode(q[:, -1], pages, table, case.lens, **options)
        chunk = jnp.asarray([8], jnp.int32)
        prefilled = paged_prefill(q, pages, table, case.lens, chunk, **options)
        outputs.append((np.asarray(decoded, np.float32), np.asarray(prefilled, np.float32)))
    return outputs


@pytest.mark.parametrize(("window", "sinks"), CASES)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_they_do_not_matter(attention, implementation, window, sinks):
    whole, freed = run(attention, implementation, window, sinks, "float32")
    for expected, found in zip(whole, freed, strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(found, expected)


def test_they_do_not_matter_to_mosaic(attention, gpu_interpreter):
    for window, sinks in CASES[:1]:
        whole, freed = run(attention, "mosaic", window, sinks, "bfloat16")
        for expected, found in zip(whole, freed, strict=True):
            assert np.isfinite(expected).all()
            np.testing.assert_array_equal(found, expected)
