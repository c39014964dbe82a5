"""Compare paxkv with transformers on one machine: the same requests, weights and arithmetic.

    python experiments/vs_transformers/run.py                      # makes an environment for torch
    python experiments/vs_transformers/run.py --torch-python PATH  # uses one that exists

Takes turns (A B C A B C ...), one process at a time, so that a slow spell of the machine hits all.
Prints the median of each, the ratios, and how many generated tokens agree.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TORCH = ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0")
TARGETS = {"continuous": 3.0, "padded": 1.2}
SIDES = ("paxkv", "continuous", "padded")
LABELS = {
    "paxkv": "paxkv",
    "continuous": "transformers generate_batch",
    "padded": "transformers generate, padded",
}


def make_environment(folder: Path, interpreter: str, index: str | None) -> Path:
    """Create an environment with torch and transformers once; returns its Python."""
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    if not stamp.exists():
        if shutil.which(interpreter) is None:
            raise SystemExit(
                f"--torch-base={interpreter}: not found; transformers runs in a Python 3.11 of its "
                "own. Install it, or name an environment that has torch with --torch-python."
            )
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *TORCH]
        subprocess.run([*install, *(["--extra-index-url", index] if index else [])], check=True)
        stamp.touch()
    return python


def command(side: str, options: argparse.Namespace, torch_python: str, out: Path) -> list[str]:
    """Return what runs one side once."""
    common = ["--requests", str(options.work / "requests.json"), "--out", str(out)]
    if side == "paxkv":
        script = [sys.executable, str(HERE / "paxkv_side.py"), *common]
        cache = ["--compilation-cache", str(options.work / "xla")]
        return [*script, *cache, "--max-num-batched-tokens", str(options.max_num_batched_tokens)]
    script = [torch_python, str(HERE / "transformers_baseline.py"), *common, "--mode", side]
    return [*script, "--model", str(options.work / "model")]


def run_rounds(options: argparse.Namespace, torch_python: str) -> dict[str, list[dict[str, Any]]]:
    """Run all sides in turn; returns their results, one a round."""
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
    turns = [(turn, side) for turn in range(options.rounds) for side in options.sides]
    for turn, side in turns:
        out = options.work / f"{side}-{turn}.json"
        print(f"round {turn + 1}: ", end="", flush=True)
        subprocess.run(
            [*command(side, options, torch_python, out), "--passes", str(options.passes)],
            check=True,
        )
        results[side].append(json.loads(out.read_text()))
    return results


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> tuple[float, float]:
    """Return the share of equal tokens and the share of requests that are equal throughout."""
    pairs = list(zip(ours, theirs, strict=True))
    tokens = [a == b for x, y in pairs for a, b in zip(x, y, strict=True)]
    return sum(tokens) / len(tokens), sum(x == y for x, y in pairs) / len(pairs)


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return the result as a Markdown table; ratios are of medians over all timed passes."""
    medians = {
        side: statistics.median(s for result in runs for s in result["seconds"])
        for side, runs in results.items()
    }
    head = ["side", "median s", "min – max s", "processor s", "output tokens/s", "factor", "target"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for side, runs in results.items():
        seconds = [s for result in runs for s in result["seconds"]]
        tokens = sum(map(len, runs[-1]["outputs"]))
        speed = f"{tokens / medians[side]:.1f}"
        cells = ["", ""]
        if side != "paxkv" and "paxkv" in results:
            cells = [f"{medians[side] / medians['paxkv']:.2f}", f"≥ {TARGETS[side]}"]
        spread = f"{min(seconds):.2f} – {max(seconds):.2f}"
        processor = f"{statistics.median(s for result in runs for s in result['cpu_s']):.1f}"
        row = [LABELS[side], f"{medians[side]:.2f}", spread, processor, speed, *cells]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("outputs/vs_transformers"), help="folder")
    parser.add_argument("--torch-python", help="Python of an environment with torch, transformers")
    parser.add_argument("--torch-base", default="python3.11", help="Python to make one from")
    parser.add_argument("--torch-index", help="extra package index that has torch's CPU wheels")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--passes", type=int, default=1, help="timed passes a turn")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--num-requests", type=int, default=24)
    parser.add_argument("--output-len", type=int, default=64, help="tokens each request generates")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="of a paxkv step")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    options = parser.parse_args()

    options.work.mkdir(parents=True, exist_ok=True)
    torch_python = options.torch_python or str(
        make_environment(options.work / "torch-env", options.torch_base, options.torch_index)
    )
    if not (options.work / "model" / "config.json").exists():
        export = [sys.executable, str(HERE / "export_weights.py"), str(options.work / "model")]
        subprocess.run(export, check=True)
    draw = [sys.executable, str(HERE / "make_requests.py"), str(options.work / "requests.json")]
    for name in ("num_requests", "output_len", "seed"):
        draw += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    subprocess.run(draw, check=True)
    results = run_rounds(options, torch_python)
    print(f"\n{table(results)}\n")
    first = {side: runs[0] for side, runs in results.items()}
    for side in first if "paxkv" in first else ():
        if side != "paxkv":
            same, whole = agreement(first["paxkv"]["outputs"], first[side]["outputs"])
            print(f"{LABELS[side]}: {same:.1%} of tokens equal, {whole:.0%} of requests throughout")
    versions = {side: result["versions"] for side, result in first.items()}
    print(f"{os.cpu_count()} cores; versions: {json.dumps(versions)}")
    if "paxkv" in first:
        print(f"paxkv, last pass: {json.dumps(results['paxkv'][-1]['passes'][-1])}")
        print(f"paxkv, warm-up: {first['paxkv']['warm_up_s']:.1f} s, compilation included")


if __name__ == "__main__":
    main()
