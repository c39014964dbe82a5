"""The default model against numbers that another implementation computed."""

import numpy as np


def test_prompts_encode_as_the_reference_did(smollm2, smollm2_golden):
    for entry in smollm2_golden["prompts"]:
        assert smollm2.tokenizer.encode(entry["prompt"]) == entry["input_ids"]


def test_reference_logits_and_greedy_tokens(smollm2, smollm2_golden, paged_runner):
    entries = smollm2_golden["prompts"]
    prompts = [entry["input_ids"] for entry in entries]
    chunk = max(len(prompt) for prompt in prompts)
    runner = paged_runner(smollm2, rows=len(prompts), max_len=96, chunk=chunk)
    for row, entry in enumerate(entries):
        logits = runner.prefill(row, entry["input_ids"])[-1]
        np.testing.assert_allclose(logits[entry["top8_ids"]], entry["top8_logits"], atol=1e-3)
    longest = max(len(entry["greedy_ids"]) for entry in entries)
    tokens = runner.greedy(prompts, longest)
    for entry, got in zip(entries, tokens, strict=True):
        assert got[: len(entry["greedy_ids"])] == entry["greedy_ids"]
        assert smollm2.tokenizer.decode(entry["greedy_ids"]) == entry["greedy_text"]


def test_identity_is_the_files_hash(smollm2, smollm2_golden):
    assert smollm2.identity == f"sha256:{smollm2_golden['gguf_sha256']}"
