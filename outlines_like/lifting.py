"""``vectorize`` and ``elemwise``: anything elementwise, over arrays of any shape."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

from . import arrays, bridge, cache, frames
from .arrays import Array
from .calling import Options, Work, choose
from .checks import count
from .events import Layer, Snapshot, stack
from .garbage import seldom
from .occasions import scope
from .running import each, in_lists
from .signatures import bind, form_of
from .streaming import Stream, reading
from .targets import FunctionTarget, Given, Plan, Target, Ways, answered

T = TypeVar("T")
Fn = Callable[..., Any]
LATER: Any = object()  # the function comes with the next call: a decorator with arguments
Scalar = str | bytes | int | float | Mapping[str, Any] | None


class Lifted(Generic[T]):
    """A function lifted over arrays. See :func:`vectorize`."""

    def __init__(self, target: Target, fn: Fn, options: Options, form: inspect.Signature | None = None) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.target, self.fn = target, fn
        self.options = options._replace(signature=options.signature or target.signature)
        self.__signature__ = form or form_of(fn)

    def _work(self, args: tuple[Any, ...], samples: int | None, kwargs: Mapping[str, Any], live: bool = False) -> Work:
        """Check and take apart a call. Nothing runs yet."""
        samples = None if samples is None else count("samples", samples, 0)
        arguments = bind(self.__signature__, args, kwargs)
        columns = arrays.columns(arguments, self.options.signature, self.options.excluded)
        frames.check_labels(columns)
        grid = arrays.flatten(arguments, self.options.signature, self.options.excluded)
        terms = cache.terms(live=live, scope=scope())
        with seldom(len(grid.calls)):
            rows = self.target.prepare(grid.calls, samples, terms)
        return Work(answered(self.target.run), rows, grid, samples, self.options, columns, self.target.concurrency)

    @overload
    def __call__(self, /, *args: Scalar, samples: None = None, **kwargs: Scalar) -> T: ...
    @overload
    def __call__(self, /, *args: Any, samples: int, **kwargs: Any) -> Array: ...
    @overload
    def __call__(self, first: Sequence[Any] | Array, /, *args: Any, samples: int | None = None, **kwargs: Any) -> Array: ...
    @overload
    def __call__(self, /, *args: Any, samples: int | None = None, **kwargs: Any) -> Any: ...
    def __call__(self, /, *args: Any, samples: int | None = None, **kwargs: Any) -> Any:
        """Answers in the shape of the arguments, with a trailing axis of ``samples`` if asked. Blocks until all are there."""
        work = self._work(args, samples, kwargs)
        return work.result(bridge.wait(work.values) if work.rows else [])

    async def acall(self, /, *args: Any, samples: int | None = None, **kwargs: Any) -> Any:
        """The same, awaited. An async function runs in this loop."""
        work = self._work(args, samples, kwargs)
        return work.result(await work.values() if work.rows else [])

    def stream(self, /, *args: Any, samples: int | None = None, **kwargs: Any) -> Stream[Snapshot[T]]:
        """Watch ``(index, value so far, done)`` as it comes."""
        return reading(self._work(args, samples, kwargs, live=True))

    def plan(self, /, *args: Any, samples: int | None = None, **kwargs: Any) -> Plan:
        """What the call would do. Nothing runs."""
        work = self._work(args, samples, kwargs)
        todo = [row for row in work.rows if not isinstance(row, Given)]
        return self.target.preview(todo)._replace(rows=len(work.rows))

    def layered(self, *layers: Layer) -> Lifted[T]:
        """The same function with layers round it."""
        return Lifted(self.target.layered(*layers), self.fn, self.options, self.__signature__)

    def __get__(self, owner: object, kind: type | None = None) -> Lifted[T]:
        if owner is None or self.target.bound(owner) is self.target:
            return self
        return Lifted(self.target.bound(owner), types.MethodType(self.fn, owner), self.options)

    def __repr__(self) -> str:
        return f"vectorize({getattr(self.fn, '__qualname__', self.fn)})"


def lift(fn: Any, concurrency: int | None = None, via: str | None = None, **given: Any) -> Lifted[Any]:
    """A lifted function: of a lifted one with further options, of a target, or of a plain function."""
    if not isinstance(fn, Lifted):
        fn = Lifted(target_of(fn), fn, Options())
    target = fn.target if concurrency is None else fn.target.bounded(concurrency)
    if via is not None:
        target = by(target, via)
    return Lifted(target, fn.fn, choose(fn.options, given, fn.__signature__), fn.__signature__)


def by(target: Target, via: str) -> Target:
    """The same target, asked in another way than its usual one."""
    if isinstance(target, Ways):
        return target.via(via)
    raise TypeError(
        f"via={via!r} is a way to ask a model of models.openai; this is a function: give via= to the model inside it"
    )


def target_of(fn: Any) -> Target:
    """What runs ``fn``."""
    if isinstance(fn, Target):
        return fn
    if not callable(fn):
        raise TypeError(f"vectorize takes a model or a function, not {type(fn).__name__} {fn!r:.60}")
    return FunctionTarget(fn, each)


class Vectorize:
    """Lift a model or a function of one element over arrays of any shape.

    ``vectorize(fn)(*arrays, samples=None, **kwargs)`` broadcasts the arrays against each other, runs ``fn`` for every
    row, many at a time, and gives the answers in the same shape, as an object array; with ``samples=n`` there is one
    more axis, of n draws. Scalars give a scalar. A Series gives a Series under the same index. A missing first argument
    gives None.

    Arguments: ``signature`` in NumPy's gufunc notation ("(m),()->()", or with names, "texts:(m), k:()->()") says which
    axes ``fn`` takes whole, as object arrays; ``excluded`` names (or counts) arguments that are one element each;
    ``concurrency`` bounds how many rows are under way (default 64; for a model, its own limit); ``on_error`` is "raise"
    (the other rows finish first, then :class:`RowErrors`), "return" (the error stands in its cell) or "missing" (None
    does); with ``fail_fast`` the first failure cancels the rest; ``progress`` is called with rows done and rows in all;
    ``partial`` says that as a stage of a :func:`pipe` the function also takes values that are not whole yet.

    ``via="batch"`` has a model of ``models.openai`` asked through its provider's Batch API: at half the price, within a
    day. A script that was ended meanwhile finds its batches when it is run again; docs/batch.md tells more.

    A generator function shows each value that it yields to whoever watches; the last one is its answer.

    The result also has ``acall`` (awaited), ``stream`` (watched) and ``plan`` (what would be done).

    >>> import outlines_like as ol
    >>> ol.vectorize(lambda word, mark: word + mark)([["a"], ["b"]], ["!", "?"]).tolist()
    [['a!', 'a?'], ['b!', 'b?']]
    """

    @overload
    def __call__(self, fn: Lifted[T], **options: Any) -> Lifted[T]: ...
    @overload
    def __call__(self, fn: Target, **options: Any) -> Lifted[str]: ...
    @overload
    def __call__(self, fn: Callable[..., Awaitable[T]], **options: Any) -> Lifted[T]: ...
    @overload
    def __call__(self, fn: Callable[..., T], **options: Any) -> Lifted[T]: ...
    @overload
    def __call__(self, fn: Any, **options: Any) -> Lifted[Any]: ...
    @overload
    def __call__(self, **options: Any) -> Callable[[Callable[..., T]], Lifted[T]]: ...
    def __call__(self, fn: Any = LATER, *, concurrency: int | None = None, via: str | None = None, **options: Any) -> Any:
        if fn is LATER:
            return functools.partial(self, concurrency=concurrency, via=via, **options)
        return lift(fn, concurrency, via, **options)

    def batched(self, fn: Fn, *, size: int = 32, concurrency: int = 1, **options: Any) -> Lifted[Any]:
        """Lift a function from lists to a list: each of its arguments comes as a list of up to ``size`` values.

        >>> import outlines_like as ol
        >>> ol.vectorize.batched(lambda words: [w.upper() for w in words])(["a", "b"]).tolist()
        ['A', 'B']
        """
        target = FunctionTarget(fn, functools.partial(in_lists, count("size", size)), count("concurrency", concurrency))
        return Lifted(target, fn, choose(Options(), options, form_of(fn)))


vectorize = Vectorize()


@overload
def elemwise(fn: Callable[..., Awaitable[T]], **options: Any) -> Lifted[T]: ...
@overload
def elemwise(fn: Callable[..., T], **options: Any) -> Lifted[T]: ...
@overload
def elemwise(**options: Any) -> Callable[[Callable[..., T]], Lifted[T]]: ...
def elemwise(fn: Any = LATER, **options: Any) -> Any:
    """:class:`vectorize <Vectorize>` as a decorator, with or without arguments.

    >>> import outlines_like as ol
    >>> @ol.elemwise
    ... def shout(text):
    ...     return text.upper()
    >>> shout(["a", "b"]).tolist()
    ['A', 'B']
    """
    return vectorize(fn, **options)


def through(f: Any, *layers: Layer) -> Any:
    """``f`` with ``layers`` round it, innermost first: a lifted function, a model, or a bare backend.

    >>> import outlines_like as ol
    >>> model = ol.through(ol.models.fake(), ol.retried(3))
    >>> model("hi")
    'HI'
    """
    for layer in layers:
        if not callable(layer) or isinstance(layer, (Lifted, Target)):
            raise TypeError(f"{layer!r:.60} is no layer; write through(f, layer, ...), the function or model first")
    if inspect.isasyncgenfunction(f):
        return stack(f, *layers)
    return (f if isinstance(f, (Lifted, Target)) else vectorize(f)).layered(*layers)


def stream(fn: Any, **options: Any) -> Callable[..., Stream[Snapshot[Any]]]:
    """``stream(fn)(*arrays)`` watches a model or function over arrays: the same as ``vectorize(fn, **options).stream``.

    >>> import outlines_like as ol
    >>> for index, text, done in ol.stream(ol.models.fake())(["so it goes"]):
    ...     print(index, text, done)
    (0,) SO False
    (0,) SO IT False
    (0,) SO IT GOES True
    """
    return lift(fn, **options).stream
