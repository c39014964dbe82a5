"""Benchmark of the kernels: `python -m pallas_kernels.bench --help`."""
