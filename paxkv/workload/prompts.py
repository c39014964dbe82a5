"""Requests from a JSONL file, one a line, every line checked before any request runs."""

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paxkv.errors import ConfigError
from paxkv.workload.base import (
    SEED_BITS,
    ModelLimits,
    TextTokenizer,
    request_seeds,
    sample_ids,
    with_samples,
)
from paxkv.workload.checks import count_problem, number_problem
from paxkv.workload.request import Request

KEYS = (
    "prompt",
    "prompt_token_ids",
    "max_tokens",
    "request_id",
    "arrival_s",
    "priority",
    "tenant",
    "temperature",
    "top_p",
    "seed",
    "ignore_eos",
    "samples",
)
_DAY_S = 86_400.0
_INT32_MAX = 2**31 - 1
_MOST_SAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The requests of a JSONL file, in its order.

    A line is an object with `prompt` (text) or `prompt_token_ids`, with `max_tokens`, and if you
    like with `request_id`, `arrival_s`, `priority`, `tenant`, `temperature`, `top_p`, `seed`,
    `ignore_eos` and `samples` (of the prompt; those after the first share its cache). Ids are line
    numbers, from 1, where a line gives none; blank lines are skipped.

    Attributes:
        path: The file.
        chat_template: Hand each `prompt` to the model as a user's message, in its chat template;
            otherwise the text is what the model continues.
    """

    path: str
    chat_template: bool = False

    def requests(self, tokenizer: TextTokenizer, model: ModelLimits, seed: int) -> list[Request]:
        """Return the requests of the file.

        Raises:
            ConfigError: The file cannot be read, or lines of it are wrong: all of them, each with
                file and line number.
        """
        problems: list[str] = []
        entries: list[tuple[int, Request, bool]] = []
        samples: dict[str, int] = {}
        for number, line in self._lines():
            found, entry = _parse(line)
            if not found:
                found, ids = self._prompt(entry, tokenizer, model)
                if not found:
                    request = _request(entry, ids, number)
                    entries.append((number, request, "seed" in entry))
                    samples[request.request_id] = entry.get("samples", 1)
            problems += [f"{self.path}:{number}: {problem}" for problem in found]
        problems += self._file_problems(entries, samples, anything_wrong=bool(problems))
        if problems:
            raise ConfigError(problems)
        return [
            sample
            for request in _with_seeds(entries, seed)
            for sample in with_samples([request], samples[request.request_id])
        ]

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that hold something, with their numbers from 1."""
        try:
            content = Path(self.path).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"workload.path={self.path}: {error.strerror or error}. "
                "Try workload.path=FILE.jsonl with a file that exists."
            ) from error
        # A byte-order mark is no part of the first line. Lines end at line feeds only: JSON text
        # may hold other characters that Python's splitlines would break at.
        for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            if line.strip():
                yield number, line

    def _prompt(
        self, entry: dict[str, Any], tokenizer: TextTokenizer, model: ModelLimits
    ) -> tuple[list[str], list[int]]:
        """Return problems, and the prompt's token ids where there are none."""
        if "prompt" not in entry:
            ids = entry["prompt_token_ids"]
            outside = [t for t in ids if not 0 <= t < model.vocab_size]
            if outside:
                return [
                    f"prompt_token_ids: {outside[0]} is outside the model's vocabulary, "
                    f"0 .. {model.vocab_size - 1} ({len(outside)} such ids)."
                ], []
            return [], ids
        text = entry["prompt"]
        if self.chat_template:
            return [], tokenizer.apply_chat_template([{"role": "user", "content": text}])
        ids = tokenizer.encode(text)
        return ([] if ids else ["prompt: no tokens in it; a prompt needs at least one."]), ids

    def _file_problems(
        self,
        entries: list[tuple[int, Request, bool]],
        samples: Mapping[str, int],
        *,
        anything_wrong: bool,
    ) -> list[str]:
        """Return what is wrong with the lines taken together."""
        if not entries:
            return (
                [] if anything_wrong else [f"workload.path={self.path}: there is no request in it."]
            )
        problems = []
        lines_of: dict[str, list[str]] = {}
        for number, request, _ in entries:
            for request_id in sample_ids(request.request_id, samples[request.request_id]):
                lines_of.setdefault(request_id, []).append(str(number))
        for request_id, lines in lines_of.items():
            if len(lines) > 1:
                problems.append(
                    f"{self.path}:{lines[1]}: request_id {request_id!r} is used in lines "
                    f"{', '.join(lines)}; ids must differ (a line without one has its line number, "
                    "further samples of a are a/1, a/2)."
                )
        first_s = min(request.arrival_s for _, request, _ in entries)
        if first_s > _DAY_S:
            problems.append(
                f"{self.path}: the first arrival_s is {first_s:.6g}, more than a day after the "
                "start; arrival_s counts seconds from the start of the run. Subtract the first one."
            )
        return problems


def _parse(line: bytes) -> tuple[list[str], dict[str, Any]]:
    """Return the problems of a line by itself, and its object where there are none."""
    try:
        entry = json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        return [f"not UTF-8 text (byte {error.start})."], {}
    except json.JSONDecodeError as error:
        return [f"not JSON: {error.msg} (column {error.colno})."], {}
    except (ValueError, RecursionError) as error:
        return [f"not JSON: {error}."], {}
    if not isinstance(entry, dict):
        return [f"a line must be a JSON object, not {type(entry).__name__}."], {}
    problems = [_unknown(key) for key in entry if key not in KEYS]
    problems += _prompt_problems(entry)
    if "max_tokens" in entry:
        problems += count_problem("max_tokens", entry["max_tokens"], high=_INT32_MAX)
    else:
        problems.append("max_tokens is missing.")
    problems += _option_problems(entry)
    return problems, entry


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        repeated = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {repeated!r} is there twice")
    return entry


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, KEYS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(KEYS)}."
    return f"unknown key {key!r}: {hint}"


def _prompt_problems(entry: dict[str, Any]) -> list[str]:
    if ("prompt" in entry) == ("prompt_token_ids" in entry):
        return ["give either prompt or prompt_token_ids, and not both."]
    if "prompt" in entry:
        prompt = entry["prompt"]
        if not isinstance(prompt, str):
            return [f"prompt must be text, not {type(prompt).__name__}."]
        return [] if prompt else ["prompt is empty; a prompt needs at least one token."]
    ids = entry["prompt_token_ids"]
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        return ["prompt_token_ids must be a list of whole numbers."]
    return [] if ids else ["prompt_token_ids is empty; a prompt needs at least one token."]


def _option_problems(entry: dict[str, Any]) -> list[str]:
    """Return the problems of the keys a line may leave out."""
    problems = []
    if "arrival_s" in entry:
        problems += number_problem("arrival_s", entry["arrival_s"])
    if "priority" in entry:
        problems += count_problem("priority", entry["priority"], low=-_INT32_MAX, high=_INT32_MAX)
    if "temperature" in entry:
        problems += number_problem("temperature", entry["temperature"])
    if "top_p" in entry:
        problems += number_problem("top_p", entry["top_p"], high=1.0, open_low=True)
    if "seed" in entry:
        problems += count_problem("seed", entry["seed"], low=0, high=2**SEED_BITS - 1)
    if "ignore_eos" in entry and not isinstance(entry["ignore_eos"], bool):
        problems.append(f"ignore_eos={entry['ignore_eos']}: must be true or false.")
    if "samples" in entry:
        problems += count_problem("samples", entry["samples"], high=_MOST_SAMPLES)
    for key in ("tenant", "request_id"):
        value = entry.get(key, "-")
        text_or_id = isinstance(value, str) or (key == "request_id" and type(value) is int)
        if not text_or_id or value == "":
            problems.append(f"{key}={value!r}: must be text that is not empty.")
    return problems


def _request(entry: dict[str, Any], ids: list[int], number: int) -> Request:
    return Request(
        request_id=str(entry.get("request_id", number)),
        prompt_token_ids=tuple(ids),
        max_tokens=entry["max_tokens"],
        arrival_s=float(entry.get("arrival_s", 0.0)),
        priority=entry.get("priority", 0),
        tenant=entry.get("tenant", "default"),
        temperature=float(entry.get("temperature", 0.0)),
        top_p=float(entry.get("top_p", 1.0)),
        seed=entry.get("seed", 0),
        ignore_eos=entry.get("ignore_eos", False),
        prompt_text=entry.get("prompt", ""),
    )


def _with_seeds(entries: list[tuple[int, Request, bool]], seed: int) -> list[Request]:
    """Give a seed of its own to each request that names none."""
    taken = {request.seed for _, request, has_seed in entries if has_seed}
    # As many spare candidates as seeds are taken, so that the rest always suffice.
    free = (s for s in request_seeds(seed, len(entries) + len(taken)) if s not in taken)
    return [
        request if has_seed else replace(request, seed=next(free))
        for _, request, has_seed in entries
    ]
