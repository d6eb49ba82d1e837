"""What `stream=` means: everything an op does, copies and allocations too, happens on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from cufuse import device

Op = TypeVar("Op", bound=Callable[..., Any])


def on_stream(op: Op) -> Op:
    """Make the stream a caller names the current one for the op, and its arrays' device too."""

    @functools.wraps(op)
    def call(*args: Any, stream: Any = None, **options: Any) -> Any:
        if stream is None:
            return op(*args, **options)
        first = args[0] if args else next(iter(options.values()), None)
        try:
            stream = device.as_stream(stream)
        except TypeError as error:
            raise TypeError(f"{op.__name__}: {error}") from None
        with device.on_device_of(first), stream:
            return op(*args, stream=stream, **options)

    return call  # type: ignore[return-value]
