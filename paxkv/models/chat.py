"""Renders a conversation with the Jinja template that a model ships with."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paxkv.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """A chat template and the tokens it may name.

    Attributes:
        source: Jinja text, as in `tokenizer_config.json` or GGUF's `tokenizer.chat_template`.
        bos_token: What the template's `bos_token` stands for.
        eos_token: What the template's `eos_token` stands for.
    """

    source: str
    bos_token: str = ""
    eos_token: str = ""

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """Return the conversation as one text, special tokens spelled out.

        Templates come with downloaded files, so they run in Jinja's sandbox.

        Raises:
            ConfigError: The template is broken or refuses the conversation.
        """
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        def to_json(value: Any, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.source).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"model: its chat template failed: {error}") from error
