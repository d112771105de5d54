"""What an answer is held to: one of some texts, a regular expression, or a JSON schema. llguidance does the parsing.

Reading one row's mask takes about 10 microseconds, a pass of the model thousands of times as long: so masks are not
computed beside the pass, which would take the cores from it, but after it.
"""

from __future__ import annotations

import importlib.util
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from ..errors import BadRequestError

FORMS = ("choices", "regex", "json_schema")
SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}  # as json.dumps writes it
KEPT = 64  # grammars that stay compiled
DEAD_ENDS = ("", "NoExtension", "NoExtensionBias")
UNMET = "nothing that the model can write meets it"


class Constraint:
    """Holds one answer to a grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether the answer is whole and nothing may follow."""
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    def push(self, token: int) -> None:
        """Take in a token of the answer."""
        self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        """The tokens that can't but follow."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def mask(self) -> bytes:
        """A bit for each token: whether it may follow. The lowest bit of a byte comes first."""
        bits: bytes = self._matcher.compute_bitmask()
        return bits

    def fault(self) -> str:
        """Why nothing can follow although the answer is not whole; empty if something can."""
        if self._matcher.is_error():
            return reason(self._matcher)
        return UNMET if self._matcher.is_stopped() and not self._matcher.is_accepting() else ""


class Grammars:
    """Makes constraints for the answers of one model. The grammars used last stay compiled."""

    def __init__(self, tokenizer: Any, ends: Iterable[int]) -> None:
        self._tokenizer, self._ends = tokenizer, sorted(ends)
        self._vocabulary: Any = None
        self._known: OrderedDict[str, Any] = OrderedDict()

    def open(self, params: Mapping[str, Any]) -> Constraint | None:
        """What ``params`` hold an answer to, if anything; a BadRequestError where it can't be held to that."""
        forms = [name for name in FORMS if name in params]
        if not forms:
            return None
        if len(forms) > 1:
            raise BadRequestError(f"an answer is held to one thing, not to {' and '.join(forms)}; give one of them")
        return Constraint(self._compiled(forms[0], params[forms[0]]).deep_copy())

    def _compiled(self, form: str, wish: Any) -> Any:
        key = json.dumps([form, wish])
        if key not in self._known:
            self._known[key] = self._compile(form, wish)
        self._known.move_to_end(key)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return self._known[key]

    def _compile(self, form: str, wish: Any) -> Any:
        try:
            matcher = library().LLMatcher(self._words(), grammar(form, wish), log_level=0)
        except ValueError as error:
            raise refusal(form, wish, str(error)) from error
        trial = Constraint(matcher.deep_copy())
        trial.mask()  # what can't be met shows with the first mask
        if fault := trial.fault():
            raise refusal(form, wish, fault)
        return matcher

    def _words(self) -> Any:
        """The model's vocabulary as llguidance knows it: made once, as it takes a third of a second."""
        if self._vocabulary is None:
            self._vocabulary = library().hf.from_tokenizer(self._tokenizer, eos_token=self._ends or None)
        return self._vocabulary


def library() -> Any:
    """llguidance, which is imported when the first constraint comes."""
    if importlib.util.find_spec("llguidance") is None:
        raise BadRequestError("choices, regex and json_schema need llguidance: run pip install 'outlines_like[local]'")
    import llguidance.hf

    return llguidance


def grammar(form: str, wish: Any) -> str:
    """A wish as llguidance reads it."""
    matcher = library().LLMatcher
    if form == "choices":
        return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in wish)))
    if form == "regex":
        return str(matcher.grammar_from_regex(wish))
    if large := beyond(wish):
        raise ValueError(f"it names {large[0]}, and numbers are kept exactly only up to 2**53")
    return str(matcher.grammar_from_json_schema(wish, overrides=SPACING))


def beyond(value: Any) -> list[int]:
    """The numbers in a schema that the parser, which counts in doubles, would change.

    >>> beyond({"enum": [1, 2**53 + 1]})
    [9007199254740993]
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in beyond(part)]
    return [value] if isinstance(value, int) and abs(value) > 2**53 else []


def refusal(form: str, wish: Any, fault: str) -> BadRequestError:
    """What is said of a wish that can't be kept, before anything is written."""
    return BadRequestError(f"{form}={wish!r:.80} can't be kept by a local model: {fault}")


def reason(matcher: Any) -> str:
    """llguidance's error in one line."""
    lines = [line.strip() for line in str(matcher.get_error()).partition("<state>")[0].splitlines()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    words = (told or [line for line in lines if line] or [""])[0]
    return UNMET if words in DEAD_ENDS else words


def forbidding(masks: Iterable[bytes], width: int, dtype: torch.dtype) -> Tensor:
    """What to add to logits of ``width`` tokens so that only those that the masks allow are left: 0 or minus infinity.

    A byte's eight tokens are looked up at once, as rows of a table: several times faster than taking bits apart.

    >>> forbidding([bytes([5])], 4, torch.float32).tolist()
    [[0.0, -inf, 0.0, -inf]]
    """
    rows = list(masks)
    table = torch.where((torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 1, 0.0, float("-inf")).to(dtype)
    packed = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).reshape(len(rows), -1)
    found = embedding(packed.int(), table).reshape(len(rows), -1)
    return pad(found, (0, width - found.shape[1]), value=float("-inf"))
