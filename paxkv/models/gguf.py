"""Reads a GGUF file: metadata as plain Python, tensors dequantised under Hugging Face names.

Source: the `gguf` library reads the container and dequantises; the names and the row order of q
and k are those of llama.cpp's converter.
"""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paxkv.errors import ConfigError
from paxkv.models.config import ModelConfig, from_gguf

_TOP_LEVEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PER_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


class GGUFFile:
    """An open GGUF file of a Llama; tensors are read when asked for.

    Raises:
        ConfigError: No such file, not GGUF, cut short, or an architecture that is not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._reader = _Reader(path)
            self.metadata: dict[str, Any] = {
                name: field.contents() for name, field in self._reader.fields.items()
            }
        except FileNotFoundError:
            raise ConfigError(f"model.path={path}: there is no such file.") from None
        except (ValueError, IndexError, KeyError, OSError, OverflowError, struct.error) as error:
            raise ConfigError(
                f"model.path={path}: not a complete GGUF file ({error}). Download it again, or "
                "reinstall the package it came with."
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if "rope_freqs.weight" in self._tensors:
            raise ConfigError(
                f"model.path={path}: the file scales RoPE with a tensor, rope_freqs.weight, "
                "which is not read. Use the model's Hugging Face folder: model.path=DIR."
            )
        self.config: ModelConfig = from_gguf(
            self.metadata, tie_embeddings="output.weight" not in self._tensors
        )

    @property
    def description(self) -> str:
        """The path, for messages."""
        return str(self.path)

    def has(self, name: str) -> bool:
        """Whether the file has the tensor of that Hugging Face name."""
        return _gguf_name(name) in self._tensors

    def read(self, name: str) -> np.ndarray:
        """Return the tensor of that Hugging Face name, dequantised to float32.

        Raises:
            ConfigError: The quantisation is one that the `gguf` library cannot undo.
        """
        tensor = self._tensors[_gguf_name(name)]
        try:
            values = gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(
                f"model.path={self.path}: tensor {tensor.name} cannot be read ({error}). Use a "
                "file with another quantisation, for example Q8_0 or F16."
            ) from error
        if name.endswith("q_proj.weight"):
            return _half_split_rows(values, self.config.num_heads)
        if name.endswith("k_proj.weight"):
            return _half_split_rows(values, self.config.num_kv_heads)
        return values


def _gguf_name(name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    _, _, layer, suffix = name.split(".", 3)
    return f"blk.{layer}.{_PER_LAYER.get(suffix, suffix)}"


def _half_split_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of q and k rows: pairs side by side there, half a head apart here."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


class _Reader(gguf.GGUFReader):
    """The library's reader with arrays of strings read in one go.

    The library slices a memory map for every string, which takes 5 s for a vocabulary of 49 k and
    its merges; slicing a plain view of the same bytes takes 0.2 s.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = self._get(orig_offs, np.uint32)
        length = self._get(orig_offs + 4, np.uint64)
        kind = gguf.GGUFValueType(int(item_type[0]))
        offset, parts = orig_offs + 12, [item_type, length]
        types = [gguf.GGUFValueType.ARRAY, kind]
        if kind in self.gguf_scalar_to_np:
            values = self._get(offset, self.gguf_scalar_to_np[kind], int(length[0]))
            return 12 + values.nbytes, [*parts, values], [2], types
        if kind != gguf.GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        raw = np.asarray(self.data)
        for _ in range(int(length[0])):
            (size,) = struct.unpack_from("<Q", raw, offset)
            parts.append(raw[offset + 8 : offset + 8 + size])
            offset += 8 + size
        return offset - orig_offs, parts, list(range(2, len(parts))), types
