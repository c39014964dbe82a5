"""`python -m pallas_kernels.bench`."""

import sys

from pallas_kernels.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
