"""Chat templates: the Jinja program that a checkpoint brings along to turn messages into one prompt text.

The surroundings are those that templates are written for (Hugging Face's): block trimming, loop controls,
`tojson` without HTML escapes, `raise_exception`, `strftime_now` and the `{% generation %}` block. Templates
come with downloaded checkpoints, hence the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streamrl_jax.errors import UserError

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template.

    Attributes:
        template: What renders.
        variables: Names that templates expect beside the messages ("bos_token", "eos_token", ...).
        where: The file it came from, for errors.
    """

    template: jinja2.Template
    variables: Mapping[str, str]
    where: str

    @classmethod
    def compile(cls, source: str, variables: Mapping[str, str], where: str) -> ChatTemplate:
        """Compiles a template's source.

        Raises:
            UserError: The source is not a valid Jinja template.
        """
        try:
            return cls(_environment().from_string(source), variables, where)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"{where}: the chat template is no valid Jinja template (line {error.lineno}: "
                f"{error.message}); put the file right, or set data.apply_chat_template = false"
            ) from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Renders messages as one text, special tokens included.

        Args:
            messages: Objects with "role" and "content", oldest first; at least one.
            add_generation_prompt: Ends with the header that makes the model answer.

        Raises:
            UserError: The template refuses the messages.
        """
        if not messages:
            raise UserError(f"{self.where}: the chat template needs at least one message, got none")
        try:
            return self.template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self.variables,
            )
        # Beside its own errors a template passes on what its expressions raise, e.g. a TypeError from None + "text".
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError) as error:
            raise UserError(
                f"{self.where}: the chat template refuses the messages {_shorten(messages)}: {error}; "
                "each message needs a role that the template knows and a content"
            ) from error


def read_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Finds a checkpoint's chat template.

    The file `chat_template.jinja` comes before the entry of tokenizer_config.json, which is one template or a
    list of named ones, of which "default" is taken.

    Returns:
        The source and where it was found; None if the checkpoint has no template.

    Raises:
        UserError: The entry has another form, or no template is named "default".
    """
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    entry = tokenizer_config.get("chat_template")
    where = f"{model_dir / 'tokenizer_config.json'}, field 'chat_template'"
    if entry is None or isinstance(entry, str):
        return None if entry is None else (entry, where)
    if isinstance(entry, list) and all(isinstance(item, dict) and "name" in item for item in entry):
        named = {item["name"]: item.get("template") for item in entry}
        if isinstance(named.get("default"), str):
            return named["default"], where
        raise UserError(
            f"{where}: no template is named 'default' among {sorted(named)}; name the one to use so"
        )
    raise UserError(
        f"{where}: a template or a list of named templates is needed, found {type(entry).__name__}"
    )


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said; rendering keeps the text as it is."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _shorten(messages: Sequence[Message], limit: int = 120) -> str:
    text = repr(list(messages))
    return text if len(text) <= limit else text[:limit] + "…"
