"""Draw the requests both sides serve: real text, lognormal prompt lengths, one fixed output length.

    python experiments/vs_transformers/make_requests.py FILE [--num-requests 24] [--seed 0]

Each prompt is a run of tokens that starts anywhere in the documentation text that ships with
Python. No two prompts share a prefix, so that a prefix cache has nothing to find.
"""

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from export_weights import packaged_file

from paxkv.models.gguf import GGUFFile
from paxkv.models.tokenizer import from_gguf
from paxkv.workload.lengths import LogNormal


def make_requests(
    token_ids: list[int], *, num_requests: int, lengths: LogNormal, output_len: int, seed: int
) -> dict[str, object]:
    """Return the workload as JSON values."""
    length_rng, place_rng = np.random.default_rng(seed).spawn(2)
    prompts = []
    for length in lengths.sample(num_requests, length_rng):
        start = int(place_rng.integers(len(token_ids) - int(length)))
        prompts.append(token_ids[start : start + int(length)])
    return {"output_len": output_len, "seed": seed, "prompts": prompts}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON file to write")
    parser.add_argument("--num-requests", type=int, default=24)
    parser.add_argument("--output-len", type=int, default=64, help="tokens each request generates")
    parser.add_argument("--median", type=float, default=96.0, help="of the prompt lengths, tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the lengths")
    parser.add_argument("--low", type=int, default=8, help="shortest prompt, tokens")
    parser.add_argument("--high", type=int, default=512, help="longest prompt, tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gguf", type=Path, help="whose tokenizer; default: the packaged model")
    options = parser.parse_args()
    source = GGUFFile(options.gguf or packaged_file())
    tokenizer = from_gguf(source.metadata, source.config.eos_token_ids)
    workload = make_requests(
        tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))),
        num_requests=options.num_requests,
        lengths=LogNormal(options.median, options.sigma, options.low, options.high),
        output_len=options.output_len,
        seed=options.seed,
    )
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text(json.dumps(workload))


if __name__ == "__main__":
    main()
