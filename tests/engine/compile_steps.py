"""Compile whole steps of the engine for an H200, kernel=mosaic: run by test_aot_steps.py, apart.

Prints one JSON record a step. Nothing is allocated: weights and pool are shapes.
"""

import json
import sys

import jax
import jax.numpy as jnp

from pallas_kernels import init_pages
from pallas_kernels.aot import Program, compile_program, load_compiler
from paxkv.cache.attend import PagedAttention, model_spans
from paxkv.cache.groups import group_layers
from paxkv.engine.forward import Forward, split_weights
from paxkv.models.config import ModelConfig
from paxkv.models.decoder import Decoder, Projection

MODELS = {
    "smollm2_135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
        max_model_len=8192,
    ),
    "llama31_8b": ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        max_model_len=131072,
    ),
}
BLOCK_SIZE, NUM_BLOCKS = 16, 8192


def program(model: str, step: str, kv_dtype: str) -> Program:
    """A step of a model in bfloat16, its pool donated."""
    config = MODELS[model]
    merges = []

    def build():
        def zeros(*shape):
            return jnp.zeros(shape, jnp.bfloat16)

        def projection(*shape):
            return Projection([zeros(*shape)] * config.num_layers)

        c = config
        query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        decoder = Decoder(
            c,
            embedding=zeros(c.vocab_size, c.hidden_size),
            qkv=projection(query + 2 * key, c.hidden_size),
            out=projection(c.hidden_size, query),
            gate_up=projection(2 * c.intermediate_size, c.hidden_size),
            down=projection(c.hidden_size, c.intermediate_size),
            attention_norm=zeros(c.num_layers, c.hidden_size),
            feed_forward_norm=zeros(c.num_layers, c.hidden_size),
            final_norm=zeros(c.hidden_size),
            head=None if c.tie_embeddings else zeros(c.vocab_size, c.hidden_size),
        )
        weights, merge = split_weights(decoder)
        merges.append(merge)
        return weights

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    weights = jax.eval_shape(build)
    pages = jax.eval_shape(
        lambda: init_pages(
            NUM_BLOCKS,
            config.num_layers,
            config.num_kv_heads,
            BLOCK_SIZE,
            config.head_dim,
            kv_dtype,
        )
    )
    groups = group_layers(model_spans(config.windows))
    attention = PagedAttention(groups=groups, block_size=BLOCK_SIZE, implementation="mosaic")
    forward = Forward(merges[0], attention, unroll=True)
    tokens, rows = (64, 64) if step == "decode" else (512, 4)
    batch = (ints(tokens), ints(rows), ints(rows), ints(rows, 1, 512), ints(rows))
    return Program(getattr(forward, step), (weights, pages, *batch), (1,))


def main() -> None:
    load_compiler()
    for name in sys.argv[1:]:
        report = compile_program(program(*name.split("/")))
        record = {
            "step": name,
            "kernels": [
                {"name": k.name, "spill_bytes": k.spill_bytes, "registers": k.registers}
                for k in report.kernels
            ],
            "pool_bytes": report.donated_bytes,
            "copied_bytes": report.copied_bytes,
            "temp_bytes": report.temp_bytes,
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
