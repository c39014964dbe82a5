"""Reads a Hugging Face folder: `config.json` and its safetensors files, without torch."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from paxkv.errors import ConfigError
from paxkv.models.config import ModelConfig, token_ids
from paxkv.models.hf_config import from_hf

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The NumPy route returns bfloat16 as the type that ml_dtypes registers.
_FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


class HFFolder:
    """A folder with a checkpoint; weights are opened when first asked for.

    Raises:
        ConfigError: No folder, no or broken `config.json`, or a model that is not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise ConfigError(f"model.path={path}: there is no such folder.")
        generation = path / "generation_config.json"
        end = read_json(generation).get("eos_token_id") if generation.exists() else None
        self.config: ModelConfig = from_hf(
            read_json(path / "config.json"),
            eos_token_ids=None if end is None else token_ids(end),
        )
        self._files: dict[str, Path] | None = None

    @property
    def description(self) -> str:
        """The path, for messages."""
        return str(self.path)

    def weight_files(self) -> list[Path]:
        """Return the safetensors files, which must all exist."""
        return sorted(set(self._locations().values()))

    def has(self, name: str) -> bool:
        """Whether one of the files has the tensor."""
        return name in self._locations()

    def read(self, name: str) -> np.ndarray:
        """Return the tensor in the dtype it is stored in.

        Raises:
            ConfigError: The file is broken, or the dtype is no floating-point one.
        """
        file = self._locations()[name]
        try:
            with safe_open(file, framework="numpy") as tensors:
                tensor = tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _broken(file, error) from error
        if tensor.dtype not in _FLOATS:
            raise ConfigError(
                f"model.path={self.path}: tensor {name!r} is stored as {tensor.dtype}; only "
                "float32, float16 and bfloat16 checkpoints are read."
            )
        return tensor

    def _locations(self) -> dict[str, Path]:
        """Map each tensor to its file."""
        if self._files is None:
            self._files = self._find_tensors()
        return self._files

    def _find_tensors(self) -> dict[str, Path]:
        index, single = self.path / INDEX, self.path / SINGLE
        if index.exists():
            shards = read_json(index).get("weight_map", {})
            missing = sorted({name for name in shards.values() if not (self.path / name).exists()})
            if missing:
                raise ConfigError(
                    f"model.path={self.path}: {INDEX} names {', '.join(missing)}, which "
                    "the folder lacks. Download the folder again."
                )
            return {name: self.path / file for name, file in shards.items()}
        if not single.exists():
            raise ConfigError(
                f"model.path={self.path}: the folder has neither {SINGLE} nor {INDEX}. Download "
                "the safetensors files of the checkpoint."
            )
        try:
            with safe_open(single, framework="numpy") as tensors:
                return dict.fromkeys(tensors.keys(), single)
        except (SafetensorError, OSError) as error:
            raise _broken(single, error) from error


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON file of a model folder as a dict.

    Raises:
        ConfigError: No such file, or no JSON object in it.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(file, error) from error
    if not isinstance(content, dict):
        raise _broken(file, TypeError("it holds no JSON object"))
    return content


def _broken(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.path={file.parent}: {file.name} cannot be read ({error}). Download it again."
    )
