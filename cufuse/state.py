"""What a decode keeps between steps: KV cache, positions, rotary tables, intermediate buffers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cufuse import device, jit, reference
from cufuse.device import Array
from cufuse.weights import Weights

_PADDING = 128
_CONTROL_WORDS = 32  # of device/decode_shape.cuh
_FAULT = 1  # which of them


class KernelStopped(RuntimeError):
    """A decode kernel gave up waiting; the cache is as it was, and the next step may be right."""


class State:
    """The KV cache of `batch` sequences of up to `capacity` tokens, and all a step writes.

    Everything a kernel reads lives on the weights' device at addresses that stay, so that a
    captured step can be replayed: how many tokens the cache holds is `start`, an int32 [batch]
    array there. A launch draws up to `tokens_per_launch` tokens into `ids`; the last of them are
    `tokens`, which the next step takes.
    """

    def __init__(
        self, weights: Weights, *, batch: int = 1, capacity: int, tokens_per_launch: int = 1
    ) -> None:
        c = weights.config
        if not 1 <= capacity <= c.max_seq_len:
            raise ValueError(
                f"state: capacity is {capacity} tokens, wanted 1 to {c.max_seq_len}, the context "
                f"of {c.name}"
            )
        if batch < 1:
            raise ValueError(f"state: batch is {batch}, wanted at least 1")
        if tokens_per_launch < 1:
            raise ValueError(f"state: tokens_per_launch is {tokens_per_launch}, wanted at least 1")
        self.config = c
        self.batch = batch
        self.tokens_per_launch = tokens_per_launch
        self.capacity = capacity
        self.length = 0  # tokens in the cache: what `start` holds, known to the host
        self.unfinished = False  # a step of several launches was interrupted between two of them
        self.like = weights.embedding
        # Whole accesses however long a row of scores is: bits do not depend on the capacity.
        padded = -(-capacity // _PADDING) * _PADDING
        shape = (c.n_layers, batch, c.n_kv_heads, padded, c.head_dim)
        self.all_keys = device.zeros(shape, weights.dtype, self.like)
        self.all_values = device.zeros(shape, weights.dtype, self.like)
        self.k_cache = list(self.all_keys)  # of each layer
        self.v_cache = list(self.all_values)
        self.start = device.zeros((batch,), np.int32, self.like)
        # What a launch draws and whether it gave up, together: one copy brings both to the host.
        size = (-(-batch * tokens_per_launch // _CONTROL_WORDS) + 1) * _CONTROL_WORDS
        self.drawn = device.zeros((size,), np.int32, self.like)
        self.ids = self.ids_in(self.drawn)  # [tokens_per_launch, batch]
        self.tokens = self.ids[-1].reshape(batch, 1)
        self.control = self.drawn[-_CONTROL_WORDS:].view(np.uint32)
        self.cos: Array = None  # [capacity, rotary_dim / 2] float32
        self.sin: Array = None
        if c.rope_theta:
            cos, sin = reference.rope_table(c, capacity)
            self.cos, self.sin = self.upload(cos), self.upload(sin)
        self._buffers: dict[tuple[str, np.dtype], list[Array]] = {}
        self._zeroed: dict[str, Array] = {}
        self._uploads: dict[str, Array] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self.all_keys.nbytes + self.all_values.nbytes

    def keys(self, layer: int) -> Array:
        """The key cache of a layer, a view: [batch, padded capacity, n_kv_heads, head_dim]."""
        return self.k_cache[layer].transpose(0, 2, 1, 3)

    def values(self, layer: int) -> Array:
        """The value cache of a layer, a view: [batch, padded capacity, n_kv_heads, head_dim]."""
        return self.v_cache[layer].transpose(0, 2, 1, 3)

    def upload(self, host: np.ndarray) -> Array:
        """Copy a NumPy array to where the weights live."""
        kind = device.kind(self.like)
        if kind != "cupy":
            return device.twin(host) if kind == "twin" else host
        # Through pinned memory that CuPy keeps until the copy is done. ndarray.set would copy from
        # `host` itself, later, on a stream that is busy: it may be gone by then (seen on an H200).
        with device.on_device_of(self.like):
            return device.require_cupy().asarray(host)

    def upload_once(self, name: str, host: np.ndarray) -> Array:
        """As `upload`, kept under a name: later calls return the first one's array."""
        if name not in self._uploads:
            self._uploads[name] = self.upload(host)
        return self._uploads[name]

    def buffer(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """Return an intermediate of that shape; the same memory for the same name.

        Memory grows for a larger shape and is never given back while the state lives: a captured
        step goes on writing to it.
        """
        dtype = np.dtype(self.like.dtype if dtype is None else dtype)
        size = math.prod(shape)
        blocks = self._buffers.setdefault((name, dtype), [])
        if not blocks or blocks[-1].size < size:
            blocks.append(device.empty((max(size, 1),), dtype, self.like))
        return blocks[-1][:size].reshape(shape)

    def zeroed(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array that was zeros when the first call made it; kernels keep words there."""
        if name not in self._zeroed:
            self._zeroed[name] = device.zeros(shape, dtype, self.like)
        return self._zeroed[name]

    def ids_in(self, drawn: Array) -> Array:
        """Return the ids in `drawn`, or in a copy of it: [tokens_per_launch, batch]."""
        return drawn[: self.tokens_per_launch * self.batch].reshape(-1, self.batch)

    def stopped(self, drawn: np.ndarray) -> KernelStopped | None:
        """Tell from a copy of `drawn` why the kernel gave up; None if it did not."""
        if not drawn[_FAULT - _CONTROL_WORDS]:
            return None
        return KernelStopped(
            "a decode kernel gave up waiting when its time was over; is another program using this "
            "GPU? The cache holds what it held before that launch"
        )

    def check_fault(self) -> None:
        """Raise KernelStopped when a kernel gave up waiting, and forget it. Waits for the GPU.

        The cache then counts the tokens that it held before the launch that gave up.
        """
        stopped = self.stopped(self.drawn.get() if device.is_gpu(self.drawn) else self.drawn)
        if stopped is not None:
            self.restart(int(self.start[0]))
            raise stopped

    def restart(self, length: int) -> None:
        """Go back to `length` tokens and forget that a kernel gave up, on the current stream.

        Nothing of the state may be in use any more.
        """
        self.length = length
        fault = self.control[_FAULT : _FAULT + 1]
        start = np.full(self.batch, length, np.int32)
        if device.is_gpu(self.start):
            with device.on_device_of(self.start):
                fault.data.memset_async(0, fault.nbytes)
                self.start.set(start)
        else:
            fault[...] = 0
            self.start[...] = start

    def check_room(self, n: int) -> None:
        """Raise ValueError when n more tokens do not fit; nothing has been written then."""
        if self.length + n > self.capacity:
            raise ValueError(
                f"step: {n} more tokens do not fit: the cache holds {self.length} of "
                f"{self.capacity}; make a State with a larger capacity"
            )

    def advance(self, n: int) -> None:
        """Count n more tokens in the cache, here and (one launch) on the device."""
        self.length += n
        if device.kind(self.start) == "numpy":
            self.start += np.int32(n)
            return
        jit.kernel("unfused/advance.cu", "advance").launch(
            (self.batch + 31) // 32,
            32,
            {"start": self.start, "batch": self.batch, "n": n},
            like=self.start,
        )

    def positions(self, n: int) -> Array:
        """Return where n more tokens of every sequence stand, int32 [batch * n] (one launch)."""
        if n == 1:
            return self.start
        made = self.buffer("positions", (self.batch * n,), np.int32)
        if device.kind(self.start) == "numpy":
            made.reshape(self.batch, n)[...] = self.start[:, None] + np.arange(n, dtype=np.int32)
            return made
        jit.kernel("unfused/positions.cu", "positions").launch(
            (made.size + 127) // 128,
            128,
            {"start": self.start, "positions": made, "rows": made.size, "n": n},
            like=self.start,
        )
        return made

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self.length = 0
        if device.is_gpu(self.start):
            with device.on_device_of(self.start):
                self.start.data.memset_async(0, self.start.nbytes)
        else:
            self.start[...] = 0
