"""What a kernel can reach on paper: bytes, FLOPs and the time they imply. No device is asked.

A call cannot be faster than the slowest of three flows: bytes through device memory, FLOPs through
the tensor units, operand bytes through shared memory (SMEM). The estimate is their maximum, each
stretched by the imbalance of the work over CTAs, plus the launches; perfect overlap is assumed, so
a measured time is judged by how near it comes. Left out: the plan that XLA computes before the
decode kernel, exponentials, and the conversion of 8-bit codes. Tilings are those that the Mosaic
kernels choose; any other can be given.
"""

import dataclasses

import numpy as np

from pallas_kernels.paged_attention.specs import AttentionSpec
from pallas_kernels.pages import KV_DTYPES

_QUERY_BYTES = 2  # q, output and the operands of wgmma are 16-bit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """The rates that bound a kernel.

    Attributes:
        name: device kind.
        sms: streaming multiprocessors.
        copy_bytes_per_s: measured device-memory copy, read and written bytes together.
        tensor_flops_per_s: measured 16-bit matrix product.
        smem_bytes_per_clock: shared-memory bandwidth of one SM.
        clock_hz: SM clock under load.
        latency_s: from asking for device memory to having it, under load.
        launch_s: fixed cost of a kernel: launch, first bytes, drain.
    """

    name: str
    sms: int
    copy_bytes_per_s: float
    tensor_flops_per_s: float
    smem_bytes_per_clock: int
    clock_hz: float
    latency_s: float
    launch_s: float

    @property
    def needed_in_flight(self) -> float:
        """Bytes an SM must have under way to keep memory busy: Little's law."""
        return self.latency_s * self.copy_bytes_per_s / self.sms

    @property
    def smem_bytes_per_s(self) -> float:
        """Shared-memory bandwidth of all SMs."""
        return self.sms * self.smem_bytes_per_clock * self.clock_hz


H200 = Device(
    name="NVIDIA H200",
    sms=132,
    copy_bytes_per_s=4.3e12,  # datasheet 4.8e12
    tensor_flops_per_s=790e12,  # datasheet 990e12
    smem_bytes_per_clock=128,
    clock_hz=1.7e9,
    latency_s=1e-6,
    launch_s=3e-6,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """Tiling of the decode kernel: a persistent grid over tiles of one row and KV head.

    Attributes:
        tokens: tokens of a tile, the row side of the matrix unit.
        columns: query columns, the group padded.
        stages: K and V tiles under way in a CTA.
        ctas_per_sm: CTAs of an SM.
        smem_bytes: shared memory of a CTA.
    """

    tokens: int
    columns: int
    stages: int
    ctas_per_sm: int
    smem_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """Tiling of the prefill kernel: a CTA takes a few query tiles of one row and KV head.

    Attributes:
        query_rows: rows of a query tile, padding included.
        query_tokens: tokens they hold, each of `query_heads` heads.
        query_heads: query heads of a query tile, a divisor of the group.
        warpgroups: query tiles of a CTA; they share the K and V tiles.
        tokens: tokens of a key tile.
        stages: K and V tiles under way in a CTA, as the pool stores them.
        smem_bytes: shared memory of a CTA.
    """

    query_rows: int
    query_tokens: int
    query_heads: int
    warpgroups: int
    tokens: int
    stages: int
    smem_bytes: int


def decode_tiles(spec: AttentionSpec, dtype: str) -> DecodeTiles:
    """The tiling that the Mosaic decode kernel chooses."""
    from pallas_kernels.paged_attention.mosaic import decode_layout, work_plan  # slow to import

    itemsize = KV_DTYPES[dtype].dtype.itemsize
    chosen = decode_layout.decode_tiling(group=spec.group, head_dim=spec.dim, itemsize=itemsize)
    return DecodeTiles(
        tokens=work_plan.TILE,
        columns=chosen.heads,
        stages=chosen.stages,
        ctas_per_sm=chosen.ctas_per_sm,
        smem_bytes=chosen.smem_bytes,
    )


def prefill_tiles(spec: AttentionSpec, dtype: str) -> PrefillTiles:
    """The tiling that the Mosaic prefill kernel chooses."""
    from pallas_kernels.paged_attention.mosaic import prefill_plan  # slow to import

    assert spec.chunk is not None, spec
    itemsize = KV_DTYPES[dtype].dtype.itemsize
    query = prefill_plan.choose_query_tile(spec.group, spec.chunk)
    count = spec.group // query.heads * -(-spec.chunk // query.tokens)
    layout = prefill_plan.choose_layout(spec.dim, itemsize, count)
    return PrefillTiles(
        query_rows=prefill_plan.ROWS,
        query_tokens=query.tokens,
        query_heads=query.heads,
        warpgroups=layout.warpgroups,
        tokens=layout.keys,
        stages=layout.code_stages or layout.stages,
        smem_bytes=layout.smem_bytes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one call moves and computes, and the time that implies.

    Attributes:
        kv_bytes: K and V of the live tokens, each byte once.
        scale_bytes: their float32 scales.
        query_bytes: q and output.
        partial_bytes: partial outputs of a split, written and read again.
        flops: what the attention needs.
        executed_flops: with the padding of tiles.
        ctas: CTAs that have work.
        smem_bytes_per_cta: shared memory of a CTA.
        in_flight_per_sm: bytes asked for ahead, an SM; compare `Device.needed_in_flight`.
        loaded_bytes: K and V bytes that all CTAs load, from the L2 cache or from memory.
        smem_traffic: bytes through shared memory.
        memory_s: time for the bytes; tensor_s: for the FLOPs; smem_s: for the shared memory.
        launch_s: fixed cost of the kernels.
    """

    kv_bytes: int
    scale_bytes: int
    query_bytes: int
    partial_bytes: int
    flops: int
    executed_flops: int
    ctas: int
    smem_bytes_per_cta: int
    in_flight_per_sm: float
    loaded_bytes: int
    smem_traffic: int
    memory_s: float
    tensor_s: float
    smem_s: float
    launch_s: float

    @property
    def bytes(self) -> int:
        """Bytes the call must move: what a rate is computed from. Partials are not among them."""
        return self.kv_bytes + self.scale_bytes + self.query_bytes

    @property
    def bound_by(self) -> str:
        """The slowest flow."""
        flows = {"memory": self.memory_s, "tensor": self.tensor_s, "SMEM": self.smem_s}
        return max(flows, key=flows.__getitem__)

    @property
    def seconds(self) -> float:
        """Time of the slowest flow, and the launches."""
        return max(self.memory_s, self.tensor_s, self.smem_s) + self.launch_s


def estimate(spec: AttentionSpec, dtype: str, device: Device = H200) -> Estimate:
    """Estimate one call of a spec with the tiling that the kernel of its op chooses."""
    if spec.chunk is None:
        return estimate_decode(spec, dtype, decode_tiles(spec, dtype), device)
    return estimate_prefill(spec, dtype, prefill_tiles(spec, dtype), device)


def estimate_decode(
    spec: AttentionSpec, dtype: str, tiles: DecodeTiles, device: Device
) -> Estimate:
    """Estimate one decode call.

    Args:
        spec: the shape; `chunk` is None.
        dtype: storage dtype of the pool, a key of `KV_DTYPES`.
        tiles: the tiling.
        device: the rates.
    """
    storage = KV_DTYPES[dtype]
    itemsize = storage.dtype.itemsize
    lens = spec.context_lens().astype(np.int64)
    num_tiles = int(live_tiles(spec, lens, tiles.tokens).sum()) * spec.kv_heads
    tile_bytes = tiles.tokens * storage.token_bytes(spec.dim)

    ctas = device.sms * tiles.ctas_per_sm
    busiest = -(-num_tiles // ctas)  # tiles of the CTA that has most
    active = -(-num_tiles // busiest)
    stretch = busiest * active / num_tiles
    in_flight = min(tiles.stages, busiest) * tile_bytes * active
    segments = spec.rows * spec.kv_heads + active
    partial_bytes = 2 * segments * tiles.columns * (spec.dim + 1) * 4

    live_tokens = spec.live_tokens() * spec.kv_heads
    kv_bytes = live_tokens * storage.token_bytes(spec.dim, scaled=False)
    scale_bytes = live_tokens * storage.token_bytes(spec.dim) - kv_bytes
    query_bytes = 2 * spec.rows * spec.heads * spec.dim * _QUERY_BYTES
    loaded = num_tiles * tile_bytes
    executed = 4 * num_tiles * tiles.tokens * tiles.columns * spec.dim
    traffic = num_tiles * _decode_tile_traffic(spec.dim, itemsize, tiles)
    rate = min(device.copy_bytes_per_s, in_flight / device.latency_s)
    moved = stretch * (kv_bytes + scale_bytes) + query_bytes + partial_bytes
    return Estimate(
        kv_bytes=kv_bytes,
        scale_bytes=scale_bytes,
        query_bytes=query_bytes,
        partial_bytes=partial_bytes,
        flops=4 * live_tokens * spec.group * spec.dim,
        executed_flops=executed,
        ctas=active,
        smem_bytes_per_cta=tiles.smem_bytes,
        in_flight_per_sm=in_flight / device.sms,
        loaded_bytes=loaded,
        smem_traffic=traffic,
        memory_s=moved / rate,
        tensor_s=stretch * executed / device.tensor_flops_per_s,
        smem_s=stretch * traffic / device.smem_bytes_per_s,
        launch_s=2 * device.launch_s,  # the split kernel and the one that combines
    )


def estimate_prefill(
    spec: AttentionSpec, dtype: str, tiles: PrefillTiles, device: Device
) -> Estimate:
    """Estimate one prefill call; arguments as `estimate_decode`, `chunk` set."""
    assert spec.chunk is not None, spec
    storage = KV_DTYPES[dtype]
    itemsize = storage.dtype.itemsize
    lens, counts = spec.context_lens().astype(np.int64), spec.query_lens().astype(np.int64)
    key_tiles = _prefill_key_tiles(spec, lens, counts, tiles)  # [row, CTA of a KV head]
    total = int(key_tiles.sum()) * spec.kv_heads
    ctas = int((key_tiles > 0).sum()) * spec.kv_heads
    tile_bytes = tiles.tokens * storage.token_bytes(spec.dim)
    # An SM holds one CTA; the busiest has at least its share, and at least the longest CTA.
    stretch = max(total / device.sms, int(key_tiles.max())) * device.sms / total
    cta_rows = tiles.query_rows * tiles.warpgroups
    executed = 4 * total * tiles.tokens * cta_rows * spec.dim
    traffic = total * _prefill_tile_traffic(spec.dim, itemsize, tiles)

    live_tokens = spec.live_tokens() * spec.kv_heads
    kv_bytes = live_tokens * storage.token_bytes(spec.dim, scaled=False)
    scale_bytes = live_tokens * storage.token_bytes(spec.dim) - kv_bytes
    query_bytes = 2 * int(counts.sum()) * spec.heads * spec.dim * _QUERY_BYTES
    in_flight = tiles.stages * tile_bytes * min(ctas, device.sms)
    rate = min(device.copy_bytes_per_s, in_flight / device.latency_s)
    return Estimate(
        kv_bytes=kv_bytes,
        scale_bytes=scale_bytes,
        query_bytes=query_bytes,
        partial_bytes=0,
        flops=4 * _seen_pairs(spec, lens, counts) * spec.heads * spec.dim,
        executed_flops=executed,
        ctas=ctas,
        smem_bytes_per_cta=tiles.smem_bytes,
        in_flight_per_sm=in_flight / device.sms,
        loaded_bytes=total * tile_bytes,
        smem_traffic=traffic,
        memory_s=(kv_bytes + scale_bytes + query_bytes) / rate,
        tensor_s=stretch * executed / device.tensor_flops_per_s,
        smem_s=stretch * traffic / device.smem_bytes_per_s,
        launch_s=device.launch_s,
    )


def live_tiles(spec: AttentionSpec, lens: np.ndarray, tile: int) -> np.ndarray:
    """Tiles that decode reads of rows of some lengths: those of the sinks, those of the window."""
    if spec.window is None:
        return -(-lens // tile)
    align = min(spec.block_size, tile)
    start = np.maximum(lens - spec.window, 0) // align * align
    sinks = -(-spec.num_sink_tokens // tile)
    apart = start > sinks * tile
    if spec.num_sink_tokens:
        start = np.where(apart, start, 0)
    return np.where(apart, sinks, 0) + -(-(lens - start) // tile)


def _prefill_key_tiles(
    spec: AttentionSpec, lens: np.ndarray, counts: np.ndarray, tiles: PrefillTiles
) -> np.ndarray:
    """Key tiles that each CTA of a row and KV head walks, `[row, CTA]`; 0 where all is padding."""
    assert spec.chunk is not None, spec
    subgroups = spec.group // tiles.query_heads  # query tiles of the same tokens; neighbours
    count = subgroups * -(-spec.chunk // tiles.query_tokens)
    number = np.arange(0, count, tiles.warpgroups)
    last = np.minimum(number + tiles.warpgroups, count) - 1
    first = number // subgroups * tiles.query_tokens
    end = (last // subgroups + 1) * tiles.query_tokens
    real = first < counts[:, None]
    position = (lens - counts)[:, None] + first
    last_position = (lens - counts)[:, None] + np.minimum(end, counts[:, None]) - 1
    first_tile = sinks = np.zeros_like(position)
    if spec.window is not None:
        first_tile = np.maximum(position - (spec.window - 1), 0) // tiles.tokens
        sinks = np.minimum(-(-spec.num_sink_tokens // tiles.tokens), first_tile)
    return np.where(real, sinks + last_position // tiles.tokens + 1 - first_tile, 0)


def _seen_pairs(spec: AttentionSpec, lens: np.ndarray, counts: np.ndarray) -> int:
    """(query, key) pairs that the masks leave, of one head."""
    pairs = 0
    for length, count in zip(lens, counts, strict=True):
        position = np.arange(length - count, length)
        seen = position + 1
        if spec.window is not None:
            outside = np.maximum(seen - spec.window, 0)
            seen = seen - outside + np.minimum(outside, spec.num_sink_tokens)
        pairs += int(seen.sum())
    return pairs


def _decode_tile_traffic(dim: int, itemsize: int, tiles: DecodeTiles) -> int:
    """Bytes through shared memory for a tile: 8-bit K is widened in registers, V to a tile."""
    elements = tiles.tokens * dim
    k = elements * itemsize * 2  # arrives, is read
    v = k if itemsize > 1 else elements * (1 + 1 + 2 + 2)  # widened: written and read once more
    queries = tiles.columns * dim * 2
    weights = 2 * tiles.tokens * tiles.columns * 2  # written, then read
    return k + v + queries + weights


def _prefill_tile_traffic(dim: int, itemsize: int, tiles: PrefillTiles) -> int:
    """Bytes through shared memory for a tile: every warpgroup reads K, V and its own queries."""
    elements = 2 * tiles.tokens * dim
    arrive = elements * 2 if itemsize > 1 else elements * (1 + 1 + 2)  # widened to 16 bits
    queries = tiles.query_rows * dim * 2
    return arrive + tiles.warpgroups * (elements * 2 + queries)
