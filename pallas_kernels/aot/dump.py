"""Have Mosaic GPU write what it compiles into a folder, and read kernel reports out of it."""

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

import jax

from pallas_kernels.aot.devices import REGISTERS_PER_SM, THREADS_PER_SM, Device
from pallas_kernels.mosaic import CTA_SMEM_BYTES

_PARTS = ("ptxas", "ptx", "after_layout_inference.txt")  # files of a kernel that are read


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One Mosaic GPU kernel of a compiled program.

    Attributes:
        name: its entry function.
        threads: threads of a CTA.
        registers: registers of a thread at launch.
        spill_bytes: spill stores plus spill loads.
        stack_bytes: stack frame of a thread.
        smem_bytes: static and dynamic shared memory of a CTA.
        ptx: its assembly.
    """

    name: str
    threads: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    ptx: str = dataclasses.field(repr=False)

    @property
    def uses_wgmma(self) -> bool:
        """Whether it multiplies on Hopper's tensor cores by warpgroups."""
        return "wgmma.mma_async" in self.ptx

    @property
    def uses_tma(self) -> bool:
        """Whether it copies tiles with the tensor memory accelerator."""
        return "cp.async.bulk.tensor" in self.ptx

    @property
    def uses_bulk(self) -> bool:
        """Whether it copies contiguous bytes into shared memory, which may start at any 16."""
        return "cp.async.bulk.shared" in self.ptx

    def ctas_per_sm(self, device: Device) -> int:
        """CTAs that fit on one SM at a time by shared memory, registers and threads."""
        registers_per_thread = -(-self.registers // 8) * 8  # handed out to warps in eights
        return min(
            device.smem_per_sm // (self.smem_bytes + CTA_SMEM_BYTES),
            REGISTERS_PER_SM // (registers_per_thread * self.threads),
            THREADS_PER_SM // self.threads,
        )


@contextlib.contextmanager
def dump_kernels() -> Iterator[pathlib.Path]:
    """Have Mosaic GPU write what it compiles into a folder, without a word on stderr."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as said:
        os.environ["MOSAIC_GPU_DUMP_TO"] = name
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield pathlib.Path(name)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            del os.environ["MOSAIC_GPU_DUMP_TO"]
            said.seek(0)
            sys.stderr.write(_without_disassembler(said.read().decode(errors="replace")))


def _without_disassembler(text: str) -> str:
    """Drop the complaint that nvdisasm, which would add SASS to the dump, is not installed."""
    return re.sub(r"nvdisasm invocation failed.*\n(=== Source.*\n\S*dump\.cc.*\n\n?)?", "", text)


def read_kernels(files: dict[str, str]) -> tuple[KernelReport, ...]:
    """Read kernel reports out of a dump: file names, `KERNEL_NUMBER.PART`, to their text.

    Parts are numbered as they are written, but in jax 0.12 not all by the same count: those of a
    kernel are paired by their order.
    """

    def in_order(kind: str) -> dict[str, list[str]]:
        """Texts of one kind by kernel, in the order of their numbers."""
        found: dict[str, list[tuple[int, str]]] = {}
        for name, text in files.items():
            if name.endswith(f".{kind}"):
                stem, _, number = name.removesuffix(f".{kind}").rpartition("_")
                found.setdefault(stem, []).append((int(number), text))
        return {stem: [text for _, text in sorted(texts)] for stem, texts in found.items()}

    parts = [in_order(kind) for kind in _PARTS]
    return tuple(
        _read_kernel(*texts)
        for stem in sorted(parts[0])
        for texts in zip(*(part.get(stem, []) for part in parts), strict=True)
    )


def _read_kernel(ptxas: str, ptx: str, mlir: str) -> KernelReport:
    stack, stores, loads = _find(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", ptxas
    )
    static = re.search(r"(\d+) bytes smem", ptxas)
    # One static byte stands for the dynamic memory, whose size ptxas does not know.
    static_bytes = max(0, int(static[1]) - 1) if static else 0
    constant = _find(r"dynamic_shared_memory_size %(\w+)", mlir)[0]
    dynamic = _find(rf"%{constant} = arith\.constant (\d+) : i32", mlir)[0]
    return KernelReport(
        name=_find(r"Compiling entry function '(\w+)'", ptxas)[0],
        threads=int(_find(r"\.maxntid (\d+)", ptx)[0]),
        registers=int(_find(r"Used (\d+) registers", ptxas)[0]),
        spill_bytes=int(stores) + int(loads),
        stack_bytes=int(stack),
        smem_bytes=int(dynamic) + static_bytes,
        ptx=ptx,
    )


def _find(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(
            f"Mosaic GPU's dump lacks {pattern!r}: jax {jax.__version__} writes it another way."
        )
    return match.groups()
