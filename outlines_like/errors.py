"""Everything that can go wrong, by kind.

OutlinesError
├── ShapeError            arguments that do not broadcast, ragged lists (also a ValueError)
├── SignatureError        a signature text that says nothing (also a ValueError)
├── BlockingError         a blocking call where it would wait for itself (also a RuntimeError)
├── ProgramError          a program that says nothing, or something that its model can't do (also a RuntimeError)
├── RowErrors             some rows of a call failed (also an ExceptionGroup)
└── ModelError            a model did not answer one request
    ├── BadRequestError           the request itself is at fault
    │   ├── ContextLengthError    it is longer than the model can read
    │   └── PromptError           its text is not valid (also a ValueError)
    ├── AuthenticationError       the key is missing or refused
    ├── AccessError               the key may not do this
    ├── NotFoundError             no such model or address
    ├── QuotaError                the account is used up
    ├── RateLimitError            too many requests just now
    ├── ServerError               the server failed
    ├── BatchError                a batch was refused, or ended before it reached a row
    ├── UnreachableError          no connection, or it broke
    ├── TimedOutError             no answer in time
    ├── ContentFilterError        the answer was withheld
    ├── TruncatedError            the answer was cut before it began to be one
    ├── MalformedError            the answer can't be read
    └── WorkerError               a local worker did not start, or died
StoreWarning (a UserWarning)      the store is not usable, or a value in it is not
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self


class OutlinesError(Exception):
    """Any error of this library."""


class ShapeError(OutlinesError, ValueError):
    """Arguments that do not fit together as arrays."""


class SignatureError(OutlinesError, ValueError):
    """A signature that can't be read, or that a function does not keep."""


class BlockingError(OutlinesError, RuntimeError):
    """A blocking call on the event loop that would have to answer it."""


class ProgramError(OutlinesError, RuntimeError):
    """A program that says nothing, or something that its model can't do."""


class RowErrors(OutlinesError, ExceptionGroup[Exception]):
    """Some rows failed; the others are done, and stored where a store is used.

    ``errors`` maps the loop index of each failed row to its error, and ``partial`` is the result
    with the errors standing in the failed cells.
    """

    errors: Mapping[tuple[int, ...], Exception]
    partial: Any

    def __new__(cls, message: str, errors: Mapping[tuple[int, ...], Exception], partial: Any) -> Self:
        return super().__new__(cls, message, list(errors.values()))

    def __init__(self, message: str, errors: Mapping[tuple[int, ...], Exception], partial: Any) -> None:
        self.errors, self.partial = errors, partial

    def derive(self, excs: Sequence[Exception]) -> Self:  # type: ignore[override]
        """The same about some of the errors, as ``split`` and ``except*`` need it."""
        kept = {index: error for index, error in self.errors.items() if error in excs}
        return type(self)(self.message, kept, self.partial)


class ModelError(OutlinesError):
    """A model did not answer one request.

    ``status`` is the HTTP status where there was one, ``retryable`` says whether the same request
    may do better later, ``retry_after`` (seconds) is the server's word on when, and ``hint`` is
    what to do about it. After a ``hopeless`` one no other request to this server is worth sending:
    it ends its whole call.
    """

    retryable = False
    hopeless = False
    hint = ""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        retryable: bool | None = None,
        hint: str | None = None,
    ) -> None:
        self.status, self.request_id, self.retry_after = status, request_id, retry_after
        self.retryable = type(self).retryable if retryable is None else retryable
        self.hint = type(self).hint if hint is None else hint
        super().__init__(message)

    def __str__(self) -> str:
        status = f"status {self.status}" if self.status is not None else ""
        facts = ", ".join(filter(None, [status, f"request {self.request_id}" if self.request_id else ""]))
        return ". ".join(filter(None, [f"{self.args[0]} ({facts})" if facts else str(self.args[0]), self.hint]))


class BadRequestError(ModelError):
    """The request itself is at fault; sending it again will not help."""


class ContextLengthError(BadRequestError):
    """The prompt is longer than the model can read."""

    hint = "Shorten this prompt or lower max_tokens."


class PromptError(BadRequestError, ValueError):
    """The prompt's text is not valid."""


class AuthenticationError(ModelError):
    """The key is missing or refused."""

    hopeless = True
    hint = "Set OPENAI_API_KEY or pass api_key=."


class AccessError(ModelError):
    """The key may not do this."""


class NotFoundError(ModelError):
    """No such model or address."""

    hint = "Check the model's name and base_url=."


class QuotaError(ModelError):
    """The account's quota is used up; waiting a little will not help."""

    hopeless = True


class RateLimitError(ModelError):
    """Too many requests just now."""

    retryable = True


class ServerError(ModelError):
    """The server failed."""

    retryable = True


class BatchError(ModelError):
    """A batch was refused, or ended before it reached this row."""

    hint = "Call again to order what is missing."


class UnreachableError(ModelError):
    """No connection to the server, or it broke."""

    retryable = True


class TimedOutError(ModelError, TimeoutError):
    """No answer in time."""

    retryable = True


class ContentFilterError(ModelError):
    """The server withheld the answer."""


class TruncatedError(ModelError):
    """The token limit was reached before there was an answer."""

    hint = "Raise max_tokens."


class MalformedError(ModelError):
    """The answer can't be read."""

    retryable = True


class WorkerError(ModelError):
    """A local worker did not start, or died."""


class StoreWarning(UserWarning):
    """The store is not usable, or a value in it is not."""
