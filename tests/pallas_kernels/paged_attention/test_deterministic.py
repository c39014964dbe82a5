"""`deterministic=True`: a row has the same bits whatever stands beside it in the batch."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode
from pallas_kernels.paged_attention.mosaic.decode import DETERMINISTIC_SPLIT_TOKENS


def decode(attention, implementation, dtype):
    """Two rows together, and the first of them alone."""
    lens = [DETERMINISTIC_SPLIT_TOKENS + 76, 200]
    case = attention.build_case(lens, kv_heads=1, dim=64, dtype=dtype)
    q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 64)), dtype)
    options = {"layer": case.layer, "deterministic": True, "implementation": implementation}
    both = paged_decode(q, case.pages, case.tables, case.lens, **options)
    alone = paged_decode(q[:1], case.pages, case.tables[:1], case.lens[:1], **options)
    assert np.abs(np.asarray(both, np.float32)).max() > 0
    return np.asarray(both[0]), np.asarray(alone[0])


def test_mosaic(attention, gpu_interpreter):
    both, alone = decode(attention, "mosaic", "bfloat16")
    np.testing.assert_array_equal(both, alone)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_others(attention, implementation):
    both, alone = decode(attention, implementation, "float32")
    np.testing.assert_array_equal(both, alone)
