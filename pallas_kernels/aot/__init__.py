"""Compile kernels for an NVIDIA GPU on a machine that has none: `python -m pallas_kernels.aot`.

XLA, and the Mosaic GPU kernels inside, are compiled to machine code; nothing runs. It shows whether
a kernel compiles, its registers, spills and shared memory, which instructions its PTX uses, and
whether a donated pool is aliased or copied. It cannot show numbers, deadlocks or speed.
"""

from pallas_kernels.aot.compiler import (
    COMPILER_VARIABLE,
    CompilerMissingError,
    find_compiler,
    load_compiler,
)
from pallas_kernels.aot.devices import DEVICES, Device
from pallas_kernels.aot.dump import KernelReport
from pallas_kernels.aot.program import Program, Report, compile_program

__all__ = [
    "COMPILER_VARIABLE",
    "DEVICES",
    "CompilerMissingError",
    "Device",
    "KernelReport",
    "Program",
    "Report",
    "compile_program",
    "find_compiler",
    "load_compiler",
]
