"""Host time of the block allocator for one engine step, by size of the pool.

    python experiments/host_speed/allocator.py

A step of 256 running requests with blocks of 16 tokens: 16 of them need a new block, 16 blocks come
back, and 16 blocks are shared with a request that hits the prefix cache. Needs no device.
"""

import os
import platform
import time
from collections.abc import Callable

import numpy as np

from paxkv.blocks.pool import allocate, init_pool, mark_cached, release, share

STEPS = 3000
ROWS = 256
PER_STEP = 16


def time_step(num_blocks: int) -> dict[str, np.ndarray]:
    """Return the times of each operation in µs [step], on a pool that is 3/4 full."""
    counts = np.zeros(ROWS, np.int64)
    counts[:: ROWS // PER_STEP] = 1
    pool, live, _ = allocate(init_pool(num_blocks), [3 * num_blocks // 4])
    pool = mark_cached(pool, live)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"allocate": [], "release": [], "share": [], "step": []}

    def timed(name: str, operation: Callable, *arguments: object) -> object:
        start = time.perf_counter()
        result = operation(*arguments)
        times[name].append(1e6 * (time.perf_counter() - start))
        return result

    held = np.zeros(0, np.int32)
    for _ in range(STEPS):
        hits = rng.choice(live, PER_STEP, replace=False)
        pool, ids, _ = timed("allocate", allocate, pool, counts)
        pool = timed("share", share, pool, hits)
        pool = release(pool, hits)  # the hit's other end, so that the pool stays as full
        pool = timed("release", release, pool, held)
        held = ids
        times["step"].append(times["allocate"][-1] + times["release"][-1])
    return {name: np.array(values[1:]) for name, values in times.items()}


def naive_step(num_blocks: int) -> np.ndarray:
    """Return the times in µs [step] of only copying what allocate and release change."""
    pool = init_pool(num_blocks)
    stack, refs = np.array(pool.free_ids), np.array(pool.ref_counts)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        refs = refs.copy()
        refs, stack = refs.copy(), stack.copy()
        times.append(1e6 * (time.perf_counter() - start))
    return np.array(times)


def main() -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores, NumPy {np.__version__}, {STEPS} steps")
    print("µs, median [10th to 90th percentile]; step = allocate + release, target 50")
    names = ("allocate", "release", "share", "step", "plain copies")
    print("".join(f"{name:>22}" for name in ("blocks", *names)))
    for num_blocks in (1_000, 10_000, 100_000):
        times = time_step(num_blocks) | {"plain copies": naive_step(num_blocks)}
        cells = []
        for name in names:
            low, median, high = np.percentile(times[name], [10, 50, 90])
            cells.append(f"{median:.1f} [{low:.1f} to {high:.1f}]")
        print("".join(f"{cell:>22}" for cell in (f"{num_blocks:,}", *cells)))


if __name__ == "__main__":
    main()
