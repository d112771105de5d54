"""How likely given answers are after a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import BadRequestError, ContextLengthError
from ..requests import Completion, Usage
from .prompting import Reader
from .sampling import wide
from .wire import Ask

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Quiz:
    """A prompt and the answers to it that are to be scored, in tokens."""

    id: int
    text: Tokens
    options: tuple[Tokens, ...]
    call: int = 0

    @property
    def tails(self) -> tuple[Tokens, ...]:
        """What has to be read after the prompt, once each: an answer's last token is only looked up."""
        return tuple(dict.fromkeys(option[:-1] for option in self.options if len(option) > 1))

    def completion(self, first: Tensor, after: dict[Tokens, Tensor]) -> Completion:
        """The answers' log-probabilities, given those after the prompt, and those after each token of each tail."""
        scores = (
            float(first[option[0]]) + sum(float(after[option[:-1]][k, token]) for k, token in enumerate(option[1:]))
            for option in self.options
        )
        return Completion("", "stop", Usage(len(self.text), 0), scores=tuple(scores))


def open_quiz(ask: Ask, reader: Reader, context: int) -> Quiz:
    """The quiz that ``ask`` is; one of our errors where it can't be answered."""
    options = tuple(tuple(reader.words(text)) for text in ask.params["options"])
    quiz = Quiz(ask.id, tuple(reader.ids(ask.prompt)), options, ask.call)
    if not all(quiz.options):
        raise BadRequestError("an option has no tokens, so it can't be scored")
    length = len(quiz.text) + max(map(len, quiz.options))
    if length > context:
        raise ContextLengthError(
            f"the prompt and the longest option have {length} tokens and the model reads at most {context}"
        )
    return quiz


def logarithms(logits: Tensor) -> Tensor:
    """Log-probabilities, in float32 at least."""
    return logits.to("cpu", wide(logits.dtype)).log_softmax(-1)
