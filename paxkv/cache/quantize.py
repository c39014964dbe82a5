"""The ways to store K and V, by the words users know."""

from dataclasses import dataclass

from paxkv.errors import ConfigError

STORAGE = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}
"""Storage dtype of each format but `auto`, which is the model's own."""


@dataclass(frozen=True)
class KVFormat:
    """How K and V are stored.

    The 8-bit formats keep one float32 scale for each token, head and layer, found when the token is
    written, and are dequantised where they are read.

    Attributes:
        name: auto (the model's dtype) or a key of `STORAGE`.
    """

    name: str = "auto"

    def __post_init__(self) -> None:
        if self.name != "auto" and self.name not in STORAGE:
            known = ", ".join(["auto", *STORAGE])
            raise ConfigError(f"kv.name={self.name!r}: K and V are stored as one of {known}.")

    def storage_dtype(self, model_dtype: str) -> str:
        """Return the name of the dtype in memory for a model of this dtype."""
        return model_dtype if self.name == "auto" else STORAGE[self.name]
