"""Compile the variants of `pallas_kernels.variants` and print their table."""

import argparse
import faulthandler
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.aot import (
    DEVICES,
    CompilerMissingError,
    Program,
    compile_program,
    load_compiler,
)
from pallas_kernels.variants import VARIANTS


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments, compile, print; 1 when a variant failed."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description=__doc__)
    parser.add_argument(
        "--variant", nargs="+", metavar="NAME", help="one or more of --list; all when left out"
    )
    parser.add_argument("--list", action="store_true", help="print the names of all variants")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="append one record a line as they come"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=120.0,
        help="stop with a traceback when one variant takes longer: layout inference can search "
        "for minutes (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(VARIANTS))
        return 0
    names = args.variant or list(VARIANTS)
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        parser.error(f"no variant {', '.join(unknown)}: --list prints those there are")
    try:
        load_compiler()
    except CompilerMissingError as error:
        print(error, file=sys.stderr)
        return 1
    failed = False
    print(f"{args.device}, jax {jax.__version__}")
    print(_HEADER)
    # The watchdog writes to the real stderr, wherever the present one leads while compiling.
    with os.fdopen(os.dup(2), "w") as stderr:
        for name in names:
            faulthandler.dump_traceback_later(args.timeout_s, exit=True, file=stderr)
            record = _try_variant(name, VARIANTS[name].build, args.device)
            faulthandler.cancel_dump_traceback_later()
            failed |= "error" in record
            print(_format(record), flush=True)
            if args.json is not None:
                with args.json.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    return int(failed)


def _try_variant(name: str, build: Callable[[], Program], device: str) -> dict[str, Any]:
    """Compile one variant: its record, with an error in place of figures when it fails."""
    started = time.perf_counter()
    try:
        report = compile_program(build(), device)
    except Exception as error:  # whatever it is belongs into the variant's row
        return {"variant": name, "error": f"{type(error).__name__}: {error}"}
    kernels = [
        {
            "name": kernel.name,
            "threads": kernel.threads,
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "stack_bytes": kernel.stack_bytes,
            "smem_bytes": kernel.smem_bytes,
            "ctas_per_sm": kernel.ctas_per_sm(DEVICES[device]),
            "wgmma": kernel.uses_wgmma,
            "tma": kernel.uses_tma,
            "bulk": kernel.uses_bulk,
        }
        for kernel in report.kernels
    ]
    return {
        "variant": name,
        "device": device,
        "compile_s": time.perf_counter() - started,
        "donated_bytes": report.donated_bytes,
        "copied_bytes": report.copied_bytes,
        "unaliased_bytes": report.unaliased_bytes,
        "temp_bytes": report.temp_bytes,
        "kernels": kernels,
    }


_HEADER = (
    f"{'variant':44} {'kernel':22} {'threads':>7} {'regs':>4} {'spills':>6} {'SMEM B':>7} "
    f"{'CTA/SM':>6} {'wgmma':>5} {'TMA':>3} {'copied B':>8} {'temp MB':>7} {'s':>5}"
)


def _format(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"{record['variant']:44} failed: {record['error']}"
    lines = []
    for kernel in record["kernels"]:
        lines.append(
            f"{record['variant']:44} {kernel['name'].removesuffix('_mosaic_gpu_kernel'):22} "
            f"{kernel['threads']:7} {kernel['registers']:4} {kernel['spill_bytes']:6} "
            f"{kernel['smem_bytes']:7} {kernel['ctas_per_sm']:6} "
            f"{'yes' if kernel['wgmma'] else '-':>5} {'yes' if kernel['tma'] else '-':>3} "
            f"{record['copied_bytes']:8} {record['temp_bytes'] / 1e6:7.1f} "
            f"{record['compile_s']:5.1f}"
        )
    return "\n".join(lines) or f"{record['variant']:44} no Mosaic GPU kernel"


if __name__ == "__main__":
    sys.exit(main())
