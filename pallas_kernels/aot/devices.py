"""The GPUs that programs are compiled for."""

import dataclasses

import numpy as np
from jax.experimental import topologies

from pallas_kernels.mosaic import MAX_SMEM_BYTES, SMEM_PER_SM_BYTES

REGISTERS_PER_SM = 65536
THREADS_PER_SM = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What XLA and ptxas must know of a GPU; sizes in bytes, bandwidth in bytes a second."""

    kind: str
    num_sms: int
    bandwidth: int
    l2_bytes: int
    memory_bytes: int
    smem_per_cta: int = MAX_SMEM_BYTES
    smem_per_sm: int = SMEM_PER_SM_BYTES
    compute_capability: tuple[int, int] = (9, 0)


DEVICES: dict[str, Device] = {
    "h200": Device(
        kind="NVIDIA H200",
        num_sms=132,
        bandwidth=4_800_000_000_000,
        l2_bytes=62_914_560,
        memory_bytes=150_000_000_000,
    ),
    "h100": Device(
        kind="NVIDIA H100 80GB HBM3",
        num_sms=132,
        bandwidth=3_350_000_000_000,
        l2_bytes=52_428_800,
        memory_bytes=85_000_000_000,
    ),
}
"""GPUs to compile for, by name. Hopper only: Mosaic GPU assumes sm_90a where it sees no device."""


def compile_only_devices(device: Device) -> np.ndarray:
    """One compile-only device, as XLA describes it."""
    major, minor = device.compute_capability
    config = f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          threads_per_core_limit: {THREADS_PER_SM}
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {device.smem_per_cta}
          shared_memory_per_core: {device.smem_per_sm}
          registers_per_block_limit: {REGISTERS_PER_SM}
          registers_per_core_limit: {REGISTERS_PER_SM}
          core_count: {device.num_sms}
          fpus_per_core: 128
          clock_rate_ghz: 1.98
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          memory_bandwidth: {device.bandwidth}
          l2_cache_size: {device.l2_bytes}
          device_memory_size: {device.memory_bytes}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 1 }}
        device_description_str: "{device.kind}"
    """
    described = topologies.get_topology_desc("", "cuda", target_config=config, topology="1x1x1")
    return np.array(described.devices[:1])
