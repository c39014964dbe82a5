"""Host memory for swapped blocks."""

import jax
import numpy as np
import pytest

from pallas_kernels import init_pages
from paxkv.cache.host import HostSpace
from paxkv.cache.layout import KVLayout, pool_bytes
from paxkv.errors import ConfigError


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_its_bytes_are_the_planned_ones(kv_dtype):
    plan = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=2, kv_dtype=kv_dtype)
    host = HostSpace(7, init_pages(3, 2, 1, 2, 4, kv_dtype))
    assert host.bytes_per_block == plan.bytes_per_block
    assert host.nbytes == pool_bytes(7, plan)


def test_a_space_of_no_blocks_knows_its_layout():
    pages = init_pages(3, 2, 1, 2, 4, "int8")
    host = HostSpace(0, pages)
    host.check_layout(pages)
    assert (host.nbytes, host.num_blocks) == (0, 0)
    assert host.bytes_per_block == 2 * 2 * 2 * (4 + 4)


def test_what_is_written_and_read_is_copied():
    pages = init_pages(1, 1, 1, 1, 2, "float32")
    host = HostSpace(3, pages)
    content = [np.full((1, *leaf.shape[1:]), 5, np.float32) for leaf in jax.tree.leaves(pages)]
    host.write(np.array([2]), content)
    content[0][:] = 6
    read = host.read(np.array([2]))
    assert (read[0] == 5).all()
    read[0][:] = 7
    assert (host.read(np.array([2]))[0] == 5).all()


def test_too_much_memory_is_refused_with_the_size():
    pages = init_pages(1, 1, 1, 16, 64, "float32")
    with pytest.raises(ConfigError, match=r"preempt.host_blocks=\d+: \d+\.\d\d GiB.*recompute"):
        HostSpace(2**46 // 8192 * 16, pages)


def test_a_negative_size_is_refused():
    with pytest.raises(ConfigError, match=r"preempt\.host_blocks=-1"):
        HostSpace(-1, init_pages(1, 1, 1, 1, 2, "float32"))
