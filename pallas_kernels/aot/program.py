"""Compile a whole program, and report its kernels and its memory."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot.devices import DEVICES, compile_only_devices
from pallas_kernels.aot.dump import KernelReport, dump_kernels, read_kernels
from pallas_kernels.device import HOPPER, traced_for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A compiled program.

    Attributes:
        kernels: its Mosaic GPU kernels, in the order they were compiled.
        donated_bytes: size of the donated arguments.
        alias_bytes: output bytes that live in donated arguments.
        unaliased_bytes: output bytes that do not.
        temp_bytes: scratch memory of the whole program; a copy of a pool would be in it.
    """

    kernels: tuple[KernelReport, ...]
    donated_bytes: int
    alias_bytes: int
    unaliased_bytes: int
    temp_bytes: int

    @property
    def copied_bytes(self) -> int:
        """Donated bytes whose memory the outputs do not reuse."""
        return max(0, self.donated_bytes - self.alias_bytes)


class Program(NamedTuple):
    """A function to compile and what it is compiled for."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]  # pytrees of arrays or jax.ShapeDtypeStruct
    donate_argnums: tuple[int, ...] = ()


def compile_program(program: Program, device: str = "h200") -> Report:
    """Compile a program for a device of `DEVICES`; `load_compiler` must have run.

    Raises:
        whatever tracing, Mosaic GPU or ptxas refuses.
    """
    sharding = NamedSharding(Mesh(compile_only_devices(DEVICES[device]), ("x",)), PartitionSpec())
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), program.args
    )
    jitted = jax.jit(program.fn, donate_argnums=program.donate_argnums)
    with dump_kernels() as folder, traced_for(HOPPER):
        compiled = jitted.lower(*args).compile()
        files = {path.name: path.read_text(errors="replace") for path in folder.iterdir()}
    memory = compiled.memory_analysis()
    assert memory is not None, device
    donated = jax.tree.leaves([args[i] for i in program.donate_argnums])
    return Report(
        kernels=read_kernels(files),
        donated_bytes=sum(x.size * x.dtype.itemsize for x in donated),
        alias_bytes=memory.alias_size_in_bytes,
        unaliased_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )
