"""Text to token ids and back, from a GGUF file's metadata or a Hugging Face folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paxkv.errors import ConfigError
from paxkv.models.chat import ChatTemplate
from paxkv.models.safetensors import read_json

if TYPE_CHECKING:
    import tokenizers

Messages = Sequence[Mapping[str, str]]  # each with "role" and "content"
_OLDER_FILES = ("tokenizer.model", "vocab.json")
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched whole, before any splitting


class Tokenizer(Protocol):
    """What the engine and the workloads need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an output; may be empty."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens in it are recognised, none are added."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of any ids; an incomplete UTF-8 sequence becomes U+FFFD."""
        ...

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of a conversation as the model was trained to see it."""
        ...


@dataclass(frozen=True, kw_only=True)
class FastTokenizer:
    """A `tokenizers` tokenizer with the model's chat template.

    Attributes:
        chat_template: None for base models, whose conversations are refused.
    """

    backend: "tokenizers.Tokenizer"
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens in it are recognised, none are added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of any ids; an incomplete UTF-8 sequence becomes U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of a conversation as the model was trained to see it.

        Raises:
            ConfigError: The model has no chat template.
        """
        if self.chat_template is None:
            raise ConfigError(
                "model: it has no chat template, so chat prompts cannot be built. Use a model that "
                "was tuned for chat, or workload=prompts."
            )
        return self.encode(self.chat_template.render(messages, add_generation_prompt))


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """One id a UTF-8 byte, an end token and a start-of-message token: needs no file."""

    END = 256
    START = 257

    @property
    def vocab_size(self) -> int:
        """256 bytes and two special ids."""
        return 258

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The one end token."""
        return (self.END,)

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of any ids; an incomplete UTF-8 sequence becomes U+FFFD."""
        special = {self.END: b"" if skip_special_tokens else b"<end>"}
        special[self.START] = b"" if skip_special_tokens else b"<start>"
        parts = [special[i] if i in special else bytes([i]) for i in ids]
        return b"".join(parts).decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return start, "role: content" and end for each message."""
        ids: list[int] = []
        for message in messages:
            text = f"{message['role']}: {message['content']}"
            ids += [self.START, *self.encode(text), self.END]
        return [*ids, self.START, *self.encode("assistant: ")] if add_generation_prompt else ids


@dataclass(frozen=True, kw_only=True)
class IdsOnly:
    """Stands in where a checkpoint came without a tokenizer: ids work, text does not."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    folder: str

    def encode(self, text: str) -> list[int]:
        """Raise ConfigError: there is no tokenizer."""
        raise ConfigError(
            f"model.path={self.folder}: the folder has no tokenizer, so text cannot be "
            "encoded. Add tokenizer.json, or give prompts as ids: workload=prompts with "
            "prompt_token_ids."
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the ids themselves, as text."""
        return " ".join(str(i) for i in ids)

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True
    ) -> list[int]:
        """Raise ConfigError: there is no tokenizer."""
        return self.encode("")


def from_gguf(metadata: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> FastTokenizer:
    """Build the byte-level BPE tokenizer that a GGUF file describes.

    Raises:
        ConfigError: Another kind of tokenizer, or splitting rules that are not known here.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if (kind, split) != ("gpt2", "smollm"):
        raise ConfigError(
            f"model: the GGUF file has a tokenizer of kind {kind!r} with pre-tokenizer {split!r}; "
            "only 'gpt2' with 'smollm' is read from GGUF. Use the model's Hugging Face folder: "
            "model.path=DIR."
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", ())
    backend.add_special_tokens(
        [tokens[i] for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    )

    def token(key: str) -> str:
        index = metadata.get(f"tokenizer.ggml.{key}")
        return "" if index is None else tokens[index]

    template = metadata.get("tokenizer.chat_template")
    return FastTokenizer(
        backend=backend,
        eos_token_ids=eos_token_ids,
        chat_template=_chat_template(template, token("bos_token_id"), token("eos_token_id")),
    )


def from_folder(
    folder: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> FastTokenizer | IdsOnly:
    """Read the tokenizer and the chat template of a Hugging Face folder.

    `tokenizer.json` is read as it is; older files are converted by `transformers`. A folder
    without either gives a stand-in that works with ids only.
    """
    import tokenizers

    if (folder / "tokenizer.json").exists():
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    elif any((folder / name).exists() for name in _OLDER_FILES):
        backend = _convert_older_files(folder)
    else:
        return IdsOnly(vocab_size=vocab_size, eos_token_ids=eos_token_ids, folder=str(folder))
    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    template_file = folder / "chat_template.jinja"
    template = settings.get("chat_template")
    if template_file.exists():
        template = template_file.read_text(encoding="utf-8")
    if isinstance(template, list):  # several, each with a name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")

    def token(key: str) -> str:
        value = settings.get(key) or ""
        return value["content"] if isinstance(value, dict) else value

    return FastTokenizer(
        backend=backend,
        eos_token_ids=eos_token_ids,
        chat_template=_chat_template(template, token("bos_token"), token("eos_token")),
    )


def _convert_older_files(folder: Path) -> "tokenizers.Tokenizer":
    import transformers  # takes seconds to import, and few folders need it

    try:
        converted = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return converted.backend_tokenizer
    except (AttributeError, ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={folder}: the tokenizer cannot be converted ({error}). Add the "
            "tokenizer.json of the checkpoint."
        ) from error


def _chat_template(source: str | None, bos_token: str, eos_token: str) -> ChatTemplate | None:
    if not source:
        return None
    return ChatTemplate(source=source, bos_token=bos_token, eos_token=eos_token)
