"""The ways to store K and V, by the words users know."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pallas_kernels import KV_DTYPES
from pallas_kernels.checks import why_not_scale
from paxkv.cache.groups import LayerGroup, layers_per_block
from paxkv.cache.layout import KVLayout
from paxkv.errors import ConfigError

STORAGE = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
    "int4": "int4",
}
"""Storage dtype of each format but `auto`, which is the model's own."""

STATIC_GRANULARITIES = ("tensor", "head")
GRANULARITIES = (*STATIC_GRANULARITIES, "token_head", "channel")
"""What shares a scale: all K (or all V) of a layer, of a layer's head, of a token's head; or, for K
alone, of a head's dimension in a block (`paxkv.cache.channel`), V as by token_head."""

CALIBRATE = "calibrate"


@dataclass(frozen=True)
class KVFormat:
    """How K and V are stored.

    The quantised formats, of 8 and 4 bits, are dequantised where they are read. By default they
    keep one float32 scale for each token, head and layer, found when the token is written. Static
    scales take no memory a token, and clip whatever the text that they come from did not show. A
    scale of a channel is found when its block is full.

    Source: 4-bit and 8-bit symmetric codes as in vLLM's and TensorRT-LLM's caches; channels as in
    KIVI (arXiv 2402.02750).

    Attributes:
        name: auto (the model's dtype) or a key of `STORAGE`.
        granularity: What shares a scale, one of `GRANULARITIES`.
        scale: Of granularity tensor and head: a number, for every layer; or calibrate: measured on
            a text when the model is loaded, which None means there as well.
        skip_layers: Layers that stay in the model's dtype.
    """

    name: str = "auto"
    granularity: str = "token_head"
    scale: float | str | None = None
    skip_layers: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.name != "auto" and self.name not in STORAGE:
            known = ", ".join(["auto", *STORAGE])
            raise ConfigError(f"kv.name={self.name!r}: K and V are stored as one of {known}.")
        problems = [*self._granularity_problems(), *self._scale_problems(), *self._skip_problems()]
        if problems:
            raise ConfigError(problems)
        object.__setattr__(self, "skip_layers", tuple(sorted(set(self.skip_layers))))

    @property
    def quantised(self) -> bool:
        """Whether K and V become codes with scales."""
        return self.name != "auto" and KV_DTYPES[STORAGE[self.name]].quantised

    @property
    def static_scale(self) -> float | Literal["calibrate"] | None:
        """Where static scales come from: a number, or `CALIBRATE`; None where there are none."""
        if self.granularity not in STATIC_GRANULARITIES:
            return None
        return CALIBRATE if self.scale is None or isinstance(self.scale, str) else self.scale

    @property
    def warning(self) -> str | None:
        """What to tell whoever runs this format, or None."""
        scale = self.static_scale
        if not isinstance(scale, (int, float)):
            return None
        storage = KV_DTYPES[STORAGE[self.name]]
        assert storage.max_code is not None  # only a quantised format has scales
        rounded = f"rounded to multiples of {scale:g} and " if self.name.startswith("int") else ""
        return (
            f"kv.scale={scale:g} was not measured on this model: K and V are {rounded}clipped at "
            f"±{storage.max_code * scale:g}, which may cost all quality. Measured: "
            "kv.scale=calibrate; dynamic: kv.granularity=token_head"
        )

    def storage_dtype(self, model_dtype: str) -> str:
        """Return the name of the dtype in memory for a model of this dtype."""
        return model_dtype if self.name == "auto" else STORAGE[self.name]

    def layout(
        self,
        model_dtype: str,
        groups: Sequence[LayerGroup],
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> KVLayout:
        """Return what a block holds for a model whose layers stand in these groups.

        Raises:
            ConfigError: Skipped layers that the model does not have, or that share a place with
                one that is not skipped.
        """
        places = self._plain_places(groups)
        return KVLayout(
            num_layers=layers_per_block(groups),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            kv_dtype=self.storage_dtype(model_dtype),
            scaled=self.granularity not in STATIC_GRANULARITIES,
            plain_places=places,
            plain_dtype=model_dtype if places else None,
            open_dtype=model_dtype if self.granularity == "channel" else None,
        )

    def _plain_places(self, groups: Sequence[LayerGroup]) -> tuple[int, ...]:
        """Return the places of a block that skipped layers take, in every group alike."""
        num_layers = sum(len(group.layers) for group in groups)
        if self.skip_layers and self.skip_layers[-1] >= num_layers:
            raise ConfigError(
                f"kv.skip_layers={list(self.skip_layers)}: the model has layers 0 to "
                f"{num_layers - 1}. Try kv.skip_layers=[0]."
            )
        if self.skip_layers and len(self.skip_layers) == num_layers:
            raise ConfigError(
                f"kv.skip_layers={list(self.skip_layers)}: no layer is left to be stored as "
                f"{self.name}. Try kv=auto."
            )
        plain = []
        for place in range(layers_per_block(groups)):
            layers = [group.layers[place] for group in groups if place < len(group.layers)]
            skipped = [layer for layer in layers if layer in self.skip_layers]
            if skipped and len(skipped) < len(layers):
                whole = sorted({*self.skip_layers, *layers})
                raise ConfigError(
                    f"kv.skip_layers={list(self.skip_layers)}: layers {layers} have different "
                    "windows and share a place in a block, so that they are stored alike. Try "
                    f"kv.skip_layers={str(whole).replace(' ', '')}."
                )
            if skipped:
                plain.append(place)
        return tuple(plain)

    def _granularity_problems(self) -> list[str]:
        given = f"kv.granularity={self.granularity}"
        if self.granularity not in GRANULARITIES:
            return [f"{given}: there is {', '.join(GRANULARITIES)}. Try kv.granularity=token_head."]
        if self.granularity != "token_head" and not self.quantised:
            return [f"{given}: kv={self.name} stores numbers without scales. Try kv=int8."]
        return []

    def _scale_problems(self) -> list[str]:
        if self.scale is None:
            return []
        given = f"kv.scale={self.scale}"
        if self.granularity not in STATIC_GRANULARITIES:
            return [
                f"{given}: kv.granularity={self.granularity} has no static scale. Try "
                "kv.scale=null, or kv.granularity=tensor."
            ]
        if self.scale == CALIBRATE:
            return []
        if isinstance(self.scale, (str, bool)):
            return [f"{given}: must be a number or {CALIBRATE}. Try kv.scale={CALIBRATE}."]
        reason = why_not_scale(self.scale)
        return [f"{given}: {reason}. Try kv.scale={CALIBRATE}."] if reason else []

    def _skip_problems(self) -> list[str]:
        given = f"kv.skip_layers={self.skip_layers}"
        whole = not isinstance(self.skip_layers, str) and all(
            isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0
            for layer in self.skip_layers
        )
        if not whole:
            return [f"{given}: must be a list of layers, 0 or more. Try kv.skip_layers=[0,1]."]
        if self.skip_layers and not self.quantised:
            return [f"{given}: kv={self.name} quantises no layer. Try kv=int8."]
        if self.skip_layers and self.granularity == "channel":
            return [
                f"{given}, kv.granularity=channel: with channels all layers are stored alike. Try "
                "kv.skip_layers=[], or kv.granularity=token_head."
            ]
        return []
