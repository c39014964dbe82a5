"""Serve the requests with transformers: padded `generate`, or `generate_batch`.

    python transformers_baseline.py --mode padded --model FOLDER --requests FILE --out FILE
    python transformers_baseline.py --mode continuous --model FOLDER --requests FILE --out FILE

Runs in an environment of its own (Python 3.11, torch, transformers); imports nothing of paxkv. All
arithmetic is float32 and runs on all cores. Writes one JSON object: wall-clock and processor
seconds of each timed pass, and the generated ids.
"""

import argparse
import inspect
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

PAD = 0
Outputs = list[list[int]]


def greedy(output_len: int) -> GenerationConfig:
    """Return a greedy generation of exactly `output_len` tokens: there is no end token."""
    return GenerationConfig(
        max_new_tokens=output_len,
        min_new_tokens=output_len,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=PAD,
        use_cache=True,
    )


def padded(model: LlamaForCausalLM, prompts: Outputs, output_len: int) -> Outputs:
    """Generate for all prompts in one static batch, padded on the left to the longest."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=greedy(output_len))
    return out[:, longest:].tolist()


def continuous(options: argparse.Namespace) -> Callable[..., Outputs]:
    """Return a function that serves all prompts through `generate_batch`."""

    def generate(model: LlamaForCausalLM, prompts: Outputs, output_len: int) -> Outputs:
        tokens = sum(map(len, prompts)) + len(prompts) * output_len
        wanted: dict[str, Any] = {
            options.page_key: options.page_size,
            # Pages for all requests at once, each with a partly filled last one: nothing waits.
            "num_blocks": tokens // options.page_size + 2 * len(prompts),
            "max_batch_tokens": options.max_batch_tokens,
            "max_requests_per_batch": len(prompts),
            "allow_block_sharing": options.prefix_sharing,
            "default_compile_level": options.compile_level,
        }
        known = inspect.signature(ContinuousBatchingConfig).parameters
        config = ContinuousBatchingConfig(**{k: v for k, v in wanted.items() if k in known})
        results = model.generate_batch(
            inputs=prompts,
            generation_config=greedy(output_len),
            continuous_batching_config=config,
            warmup=False,
            progress_bar=False,
        )
        return [list(result.generated_tokens) for result in results.values()]

    return generate


def measure(
    generate: Callable[..., Outputs], model: LlamaForCausalLM, workload: dict[str, Any], passes: int
) -> dict[str, Any]:
    """Warm up on every prompt with a few output tokens, then time whole passes."""
    prompts, output_len = workload["prompts"], workload["output_len"]
    begin = time.perf_counter()
    generate(model, prompts, min(4, output_len))
    warm_up_s = time.perf_counter() - begin
    seconds, cpu_s, outputs = [], [], []
    for _ in range(passes):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        outputs = generate(model, prompts, output_len)
        seconds.append(time.perf_counter() - begin)
        cpu_s.append(time.process_time() - cpu_begin)
    wrong = [place for place, ids in enumerate(outputs) if len(ids) != output_len]
    if wrong or len(outputs) != len(prompts):
        raise SystemExit(
            f"{len(outputs)} of {len(prompts)} requests came back, and these not with {output_len} "
            f"tokens: {wrong}."
        )
    return {"seconds": seconds, "cpu_s": cpu_s, "warm_up_s": warm_up_s, "outputs": outputs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", choices=("padded", "continuous"), required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of export_weights.py")
    parser.add_argument("--requests", type=Path, required=True, help="file of make_requests.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--passes", type=int, default=1, help="timed passes")
    parser.add_argument("--attention", default="sdpa", help="attention implementation")
    parser.add_argument("--page-size", type=int, default=32, help="tokens in a page (continuous)")
    parser.add_argument("--max-batch-tokens", type=int, default=512, help="of a step (continuous)")
    parser.add_argument("--prefix-sharing", action="store_true", help="share blocks (continuous)")
    parser.add_argument("--compile-level", type=int, default=0, help="torch.compile (continuous)")
    options = parser.parse_args()
    # Older releases call it block_size.
    known = inspect.signature(ContinuousBatchingConfig).parameters
    options.page_key = "page_size" if "page_size" in known else "block_size"

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # It warns on each call that there is no end token: as intended.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    torch.set_grad_enabled(False)
    model = LlamaForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation=options.attention
    ).eval()
    workload = json.loads(options.requests.read_text())
    generate = padded if options.mode == "padded" else continuous(options)
    result = measure(generate, model, workload, options.passes)
    result["settings"] = {key: str(value) for key, value in sorted(vars(options).items())}
    result["versions"] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    options.out.write_text(json.dumps(result))
    tokens = len(workload["prompts"]) * workload["output_len"]
    best = sorted(result["seconds"])[len(result["seconds"]) // 2]
    print(f"{options.mode}: {best:.2f} s, {tokens / best:.1f} output tokens/s")


if __name__ == "__main__":
    main()
