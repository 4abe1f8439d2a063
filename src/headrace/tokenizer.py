"""Text to ids and back, and the chat template: everything about text, nothing about the model.

Owns the `tokenizers` object, the template, and the two filters of streamed text: bytes are held
back until UTF-8 is complete, and text until it can no longer become a stop string.
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from headrace.checkpoint import Checkpoint, GgufCheckpoint
from headrace.checkpoint.jsonfile import is_there
from headrace.errors import CheckpointError, ConfigError, RequestError

Message: TypeAlias = Mapping[str, Any]

_REPLACEMENT = "\ufffd"
# Decoding looks back this many ids of the prompt, so that a first word keeps its leading space.
_CONTEXT_IDS = 6
# Bytes that form no character are given out after so many ids, as replacement characters.
_MAX_HELD_IDS = 64


class Tokenizer:
    """The tokenizer and the chat template of one model."""

    def __init__(
        self, core: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None
    ) -> None:
        self._core = core
        self._config = config
        self._lock = threading.Lock()  # `encode_special_tokens` is a switch on the shared object
        added = core.get_added_tokens_decoder()
        self._special_ids = {str(t.content): i for i, t in added.items() if t.special and t.content}
        self._specials = _pattern(self._special_ids)
        self._template_text = template
        self._template = None if template is None else _compile(template)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Tokenizer":
        """Take the tokenizer that a checkpoint carries: files of its folder, or parts of its file.

        Raises:
            CheckpointError: the tokenizer is missing, or damaged.
            UnsupportedModelError: a GGUF file's tokenizer is of a kind that is not rebuilt here.
        """
        if not isinstance(checkpoint, GgufCheckpoint):
            return cls.load(checkpoint.tokenizer_dir)
        config = checkpoint.tokenizer_config()
        core = tokenizers.Tokenizer.from_str(checkpoint.tokenizer_json())
        return cls(core, config, config.get("chat_template"))

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template of a folder.

        Raises:
            CheckpointError: the tokenizer is missing, or a file is damaged.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"tokenizer is missing: {path}\n"
                "hint: copy the model's `tokenizer.json` and `tokenizer_config.json` there"
            )
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"tokenizer is damaged: {path}\n{error}") from None
        core.no_truncation()
        core.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        return cls(core, config, _find_template(folder, config))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation is written."""
        return self._template is not None

    @property
    def chat_template(self) -> str | None:
        """How the model writes a conversation, as its authors wrote it down."""
        return self._template_text

    @property
    def definition(self) -> dict[str, Any]:
        """The content of a `tokenizer.json` that makes this tokenizer."""
        return dict(json.loads(self._core.to_str()))

    def special_id(self, name: str) -> int | None:
        """The id of tokenizer_config's `{name}_token`, if it has one."""
        token = _content(self._config.get(f"{name}_token"))
        return None if token is None else self.id_of(token)

    @property
    def eos_id(self) -> int | None:
        """The id of tokenizer_config's `eos_token`, if it has one."""
        return self.special_id("eos")

    def id_of(self, token: str) -> int | None:
        """The id of one token's text."""
        found = self._core.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str) -> list[int]:
        """Turn a raw prompt into ids: special tokens written in it count, and the model's own
        beginning (bos, as the post-processor of tokenizer.json says) is added.
        """
        with self._lock:
            return list(self._core.encode(_checked(text)).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text, without special tokens."""
        return str(self._core.decode(ids, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """One token by itself, special or not; an incomplete character shows as U+FFFD."""
        return str(self._core.decode([token], skip_special_tokens=False))

    # Conversations

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Write a conversation as the model's template does.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template\nhint: give the prompt as plain text"
            )
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        tokens = {name: _content(self._config.get(name)) or "" for name in names}
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, **tokens, **variables},
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages\n{error}") from None
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(
                f"the chat template fails on these messages\n{type(error).__name__}: {error}"
            ) from None

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Turn a conversation into ids. Special tokens of the template count; the same characters
        inside a message are ordinary text, so that nobody can end a turn by writing its end token.
        """
        mark = _unused_character(messages)
        guarded = [self._guard(message, mark) for message in messages]
        text = self.render(guarded, add_generation_prompt=add_generation_prompt, **variables)
        with self._lock:
            if mark not in text:
                return list(self._core.encode(_checked(text), add_special_tokens=False).ids)
            return self._encode_guarded(text, mark)

    def _guard(self, value: Any, mark: str) -> Any:
        """Put `mark` into every special token found in the texts of a message."""
        if isinstance(value, str):
            while self._specials is not None and self._specials.search(value):
                value = self._specials.sub(lambda m: m[0][0] + mark + m[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {k: v if k == "role" else self._guard(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item, mark) for item in value]
        return value

    def _encode_guarded(self, text: str, mark: str) -> list[int]:
        """Encode what stands between the template's own special tokens, specials switched off."""
        assert self._specials is not None, "a mark was placed without special tokens"
        ids: list[int] = []
        self._core.encode_special_tokens = True
        try:
            start = 0
            for match in self._specials.finditer(text):
                ids += self._encode_plain(text[start : match.start()].replace(mark, ""))
                ids.append(self._special_ids[match[0]])
                start = match.end()
            ids += self._encode_plain(text[start:].replace(mark, ""))
        finally:
            self._core.encode_special_tokens = False
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        return list(self._core.encode(_checked(text), add_special_tokens=False).ids) if text else []

    # Streaming

    def stream(self, prompt: Sequence[int], stop: Iterable[str] = ()) -> "TextStream":
        """Start decoding the answer to `prompt`."""
        return TextStream(self._core, prompt, stop)


class TextStream:
    """The text of one answer, as its ids arrive."""

    def __init__(
        self, core: tokenizers.Tokenizer, prompt: Sequence[int], stop: Iterable[str]
    ) -> None:
        self._core = core
        self._ids = self._context(prompt)
        self._given = len(self._ids)  # ids before this are in text already given out
        self._filter = StopFilter(stop)
        self.text = ""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._filter.is_stopped

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain (often "")."""
        self._ids.append(token)
        before = self._decode(self._ids[: self._given])
        after = self._decode(self._ids)
        is_held = len(self._ids) - self._given < _MAX_HELD_IDS and after.endswith(_REPLACEMENT)
        if is_held or len(after) <= len(before):
            return ""
        return self._emit(after[len(before) :])

    def finish(self) -> str:
        """End the answer; return the text held back that was no stop string after all."""
        before = self._decode(self._ids[: self._given])
        rest = self._decode(self._ids)[len(before) :]
        text = self._filter.push(rest) + self._filter.finish()
        self._given = len(self._ids)
        self.text += text
        return text

    def _emit(self, new: str) -> str:
        # The ids just given out become the context. They begin where a text ended, so never inside
        # a character: a decoder may turn every byte beside half a character into U+FFFD.
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        text = self._filter.push(new)
        self.text += text
        return text

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last ids, from the beginning of a character on."""
        for count in range(_CONTEXT_IDS, 4 * _CONTEXT_IDS):
            if not self._decode(prompt[-count:]).startswith(_REPLACEMENT):
                return list(prompt[-count:])
        return list(prompt[-_CONTEXT_IDS:])

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._core.decode(ids, skip_special_tokens=True))


class StopFilter:
    """Passes text on until a stop string is complete; never passes part of one."""

    def __init__(self, stop: Iterable[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Take text; return what cannot become a stop string any more."""
        if self.is_stopped:
            return ""
        self._held += text
        found = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.is_stopped = True
            passed, self._held = self._held[: min(found)], ""
            return passed
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def finish(self) -> str:
        """Return what was held back: the text is over, so it is no stop string."""
        passed, self._held = self._held, ""
        return passed


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _unused_character(messages: Any) -> str:
    """A private-use character that no message contains."""
    text = json.dumps(messages, ensure_ascii=False, default=str)
    return next(c for c in map(chr, range(0xE000, 0xF8FF)) if c not in text)


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: lone surrogate at character {error.start}"
        ) from None
    return text


def _content(token: Any) -> str | None:
    """tokenizer_config writes a token as its text or as an object holding it."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not is_there(path):
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"malformed JSON: {path}\n{reason}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"malformed JSON: {path}\nexpected an object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"not UTF-8: {path}, byte {error.start}") from None


def _find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template's own file goes before tokenizer_config, where it is a text or a named list."""
    path = folder / "chat_template.jinja"
    if is_there(path):
        return _read_text(path)
    template = config.get("chat_template")
    if template is None and is_there(folder / "chat_template.json"):
        template = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list) and all(isinstance(item, Mapping) for item in template):
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"chat template is no text: {folder / 'tokenizer_config.json'}")
    return template


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the answer for training; for us its content is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the tag's content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> jinja2.Template:
    """Compile a chat template in the environment its authors tested it in.

    Source:
        Hugging Face Transformers, `utils/chat_template_utils.py`: immutable sandbox, trim and
        lstrip blocks, loop controls, plain `tojson`, `raise_exception`, `strftime_now`.
    """

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"chat template is damaged: line {error.lineno}\n{error.message}"
        ) from None
