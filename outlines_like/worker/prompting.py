"""From a prompt to token ids: chat templates, beginnings, and control tokens that a prompt may not forge."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from ..errors import BadRequestError, PromptError
from ..requests import Message
from .bounds import bounded

FORMS: tuple[Callable[[str], str], ...] = (str, str.strip, str.lstrip, str.rstrip)  # what templates do to contents


def words(content: Any) -> str:
    """A turn's text. Text parts, as chat servers write them, are joined.

    >>> words([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    'ab'
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list | tuple) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    raise PromptError("this model reads text only, but a turn of the conversation holds something else")


class Reader:
    """Reads prompts as one model's tokenizer and chat template want them read."""

    def __init__(self, tokenizer: Any, raw: bool = False) -> None:
        self._tokenizer = tokenizer
        self.chat = not raw and bool(tokenizer.chat_template)
        self._specials = frozenset(tokenizer.all_special_ids)
        self._bos = [tokenizer.bos_token_id] if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else []
        self._mark = uuid4().hex

    def ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """The tokens of a prompt, never none."""
        if self.chat:
            return self._chat_ids([Message("user", prompt)] if isinstance(prompt, str) else prompt)
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"]) or self._start()
        raise BadRequestError("this model has no chat template (or raw=True was set), so it reads text, not a conversation")

    def words(self, text: str) -> list[int]:
        """The tokens of an answer, which begins no text and holds no control tokens."""
        return self._encode(text, literal=True)

    def _start(self) -> list[int]:
        """What an empty prompt begins with."""
        for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
            if token is not None:
                return [token]
        raise PromptError("the prompt is empty and this model has no token to begin with")

    def _chat_ids(self, turns: Sequence[Message]) -> list[int]:
        if len(turns) > 1 and turns[-1].role == "assistant" and not words(turns[-1].content).strip():
            turns = turns[:-1]  # nothing to go on with
        contents = [words(turn.content) for turn in turns]
        marks = [f"{self._mark}{number}x" for number in range(len(turns))]
        text, frame = self._render(turns, contents), self._render(turns, marks)
        ids = self._encode(text)
        if self._controls(ids) != self._controls(self._encode(frame)):
            ids = self._guarded(text, frame, dict(zip(marks, contents, strict=True)))
        return ids if ids[:1] == self._bos else self._bos + ids

    def _render(self, turns: Sequence[Message], contents: Sequence[str]) -> str:
        wired = [{**turn.wire(), "content": content} for turn, content in zip(turns, contents, strict=True)]
        begun = turns[-1].role == "assistant"  # the model goes on with its own words
        ending = {"continue_final_message": begun, "add_generation_prompt": not begun}
        try:
            with bounded():
                return str(self._tokenizer.apply_chat_template(wired, tokenize=False, **ending))
        except Exception as error:  # a template may raise whatever it likes
            raise PromptError(f"the model's chat template refuses this conversation: {error}") from error

    def _encode(self, text: str, literal: bool = False) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=literal)
        return list(encoded["input_ids"])

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._specials]

    def _guarded(self, text: str, frame: str, contents: dict[str, str]) -> list[int]:
        """Tokens of ``text`` where only the template's own words count as control tokens.

        ``frame`` is the same conversation with marks for contents. A template may trim what it is given: the form that
        gives ``text`` is used.
        """
        pieces = re.split(f"({self._mark}[0-9]+x)", frame)
        tries = [[form(contents[piece]) if piece in contents else piece for piece in pieces] for form in FORMS]
        filled = next((parts for parts in tries if "".join(parts) == text), tries[0])
        coded = (self._encode(part, literal=piece in contents) for piece, part in zip(pieces, filled, strict=True))
        return [token for ids in coded for token in ids]
