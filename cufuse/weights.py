"""A model's weights as arrays: one copy that every engine reads.

NumPy arrays lie row by row. Where kernels run, the matrices of a model that the decode kernels have
(`Config.decode_problem` is None) are packed (pack.py), one after the other as they come, and those
of a kind lie one behind the other; only the embedding stays a table of rows, also where it is the
head too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cufuse import checks, device, jit, mxfp4, pack
from cufuse.config import Config
from cufuse.device import Array
from cufuse.mxfp4 import Mxfp4
from cufuse.pack import Packed
from cufuse.reference import random as counter


@dataclass
class Layer:
    """One block. Linear weights are [out, in]; what a family does not have is None.

    Packed, qkv, out and down are `Packed`, and gate_up takes the place of gate and up. Experts of
    4-bit weights are `Mxfp4`, gate_up and down, wherever they lie.
    """

    attn_norm: Array = None  # [dim]
    attn_norm_bias: Array = None  # [dim]; LayerNorm only
    qkv: Array = None  # [q_dim + 2 kv_dim, dim]; rows of q, then k, then v
    qkv_bias: Array = None  # [q_dim + 2 kv_dim]
    q_norm: Array = None  # [head_dim] or [q_dim]
    k_norm: Array = None  # [head_dim] or [kv_dim]
    sinks: Array = None  # [n_heads]
    out: Array = None  # [dim, q_dim]
    out_bias: Array = None  # [dim]
    mlp_norm: Array = None  # [dim]
    mlp_norm_bias: Array = None  # [dim]; LayerNorm only
    router: Array = None  # [n_experts, dim]
    router_bias: Array = None  # [n_experts]
    router_correction: Array = None  # float32 [n_experts]
    # hidden_dim is dense_hidden_dim in a dense layer of a mixture
    gate: Array = None  # [hidden_dim, dim], with experts [n_experts, hidden_dim, dim]
    gate_bias: Array = None  # [hidden_dim], with experts [n_experts, hidden_dim]
    up: Array = None  # as gate
    up_bias: Array = None  # as gate_bias
    gate_up: Packed | Mxfp4 | None = None  # [hidden_dim, dim] twice; with experts Mxfp4 alone
    down: Array = None  # [dim, hidden_dim], with experts [n_experts, dim, hidden_dim]
    down_bias: Array = None  # [dim], with experts [n_experts, dim]
    shared_gate: Array = None  # [shared_hidden_dim, dim]
    shared_up: Array = None  # [shared_hidden_dim, dim]
    shared_down: Array = None  # [dim, shared_hidden_dim]
    shared_router: Array = None  # [1, dim]


@dataclass
class Weights:
    """All arrays of a model."""

    config: Config
    embedding: Array = None  # [vocab_size, dim]
    position_embedding: Array = None  # [max_seq_len, dim]; learned positions only
    token_type: Array = None  # [n_token_types, dim]; BERT only
    embedding_norm: Array = None  # [dim]; BERT only
    embedding_norm_bias: Array = None  # [dim]; BERT only
    layers: list[Layer] = dataclasses.field(default_factory=list)
    final_norm: Array = None  # [dim]
    head: Array = None  # [vocab_size, dim]; when tied and not packed, the same array as `embedding`
    # Packed: what the arrays of all layers are views of, as `stack_place` says.
    stacks: dict[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def dtype(self) -> Any:
        """The dtype of all arrays but the float32 `router_correction`."""
        return self.embedding.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, shared ones counted once."""
        arrays = {id(value): value for _, value in self.named()}
        packed = (Packed, Mxfp4)
        return sum(v.size_bytes if isinstance(v, packed) else v.nbytes for v in arrays.values())

    def named(self) -> Iterator[tuple[str, Array | Packed | Mxfp4]]:
        """Yield (name, array) of everything that is there, layers as "layers.3.qkv"."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in _NOT_ARRAYS and value is not None:
                yield field.name, value
        for i, layer in enumerate(self.layers):
            for field in dataclasses.fields(layer):
                value = getattr(layer, field.name)
                if value is not None:
                    yield f"layers.{i}.{field.name}", value

    def rows(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, array) as `shapes` names them: a matrix is row by row, unpacked for that."""
        for name, value in self.named():
            if name != "head" or not self._head_is_tied():
                yield from _rows(name, value)

    def map(self, change: Callable[[Array], Array]) -> Weights:
        """Apply a function to every array, matrices row by row; the result is packed anew.

        A tied head stays tied. Experts of 4-bit weights stay such, their bytes changed, unless
        that makes them anything but bytes: then they are taken row by row too.
        """
        filled = _Filling(self.config, len(self.layers))
        for name, value in self.named():
            if name == "head" and self._head_is_tied():
                continue
            if isinstance(value, Mxfp4):
                changed = change(value.array)
                if changed.dtype == np.uint8:
                    filled.put(name, dataclasses.replace(value, array=changed))
                    continue
                del changed
            for row_name, array in _rows(name, value):
                filled.put(row_name, change(array))
                del array
        return filled.weights(tied=self._head_is_tied())

    def _head_is_tied(self) -> bool:
        return self.head is not None and self.config.tied_embeddings


def _rows(name: str, value: Array | Packed | Mxfp4) -> Iterator[tuple[str, Array]]:
    """Yield an array as `shapes` names it, or both of a gate and its up, unpacked."""
    if not isinstance(value, Packed | Mxfp4):
        yield name, value
        return
    made = pack.unpack(value) if isinstance(value, Packed) else mxfp4.dequantize(value)
    if value.gated:
        for part, array in zip(("gate", "up"), made, strict=True):
            yield name.replace("gate_up", part), array
    else:
        yield name, made


_NOT_ARRAYS = ("config", "layers", "stacks")
_MATRICES = ("qkv", "out", "gate", "up", "down")  # of a layer, those that are packed
# Of a mixture: what its experts and its router are made of stays row-major.
_ROWS = ("router", "gate", "up", "down", "shared_router", "shared_gate", "shared_up", "shared_down")
_EXPERTS_ALONE = ("router_bias", "router_correction", "gate_bias", "up_bias", "down_bias")


class _Filling:
    """Weights that arrays are put into as they come, one after the other."""

    def __init__(self, config: Config, n_layers: int) -> None:
        self._made = Weights(config, layers=[Layer() for _ in range(n_layers)])
        self._halves: dict[str, Array] = {}  # a gate, or an up, that waits for the other
        self._replaced = {part for parts in quantized(config).values() for part in parts}

    def put(self, name: str, array: Array) -> None:
        """Take an array; one that is packed or copied is not kept."""
        made = self._made
        flat = array.array if isinstance(array, Mxfp4) else array
        packs = device.kind(flat) != "numpy" and made.config.decode_problem is None
        if not name.startswith("layers."):
            setattr(made, name, pack.pack(array) if packs and name == "head" else array)
            return
        _, index_text, field = name.split(".")
        index = int(index_text)
        in_rows = made.config.n_experts > 0 and field in _ROWS
        # Row by row, 4-bit experts are for no decode kernel.
        expanded = name in self._replaced and not isinstance(array, Mxfp4)
        if not packs or expanded:
            setattr(made.layers[index], field, array)
        elif isinstance(array, Mxfp4):
            place = self._copy(field, index, flat)
            setattr(made.layers[index], field, dataclasses.replace(array, array=place))
        elif field in ("gate", "up") and not in_rows:
            self._halves[field] = array
            if len(self._halves) == 2:
                gate, up = self._halves.pop("gate"), self._halves.pop("up")
                self._pack("gate_up", index, gate, up)
        elif field in _MATRICES and not in_rows:
            self._pack(field, index, array)
        else:
            setattr(made.layers[index], field, self._copy(field, index, array))

    def weights(self, *, tied: bool) -> Weights:
        """Return what was put together; a tied head is made of the embedding."""
        if tied:
            self.put("head", self._made.embedding)
        return self._made

    def _pack(self, field: str, index: int, w: Array, up: Array = None) -> None:
        n, k = w.shape
        size = pack.packed_size(n, k, w.dtype, gated=up is not None)
        packed = pack.pack(w, up=up, out=self._place(field, index, size, w))
        setattr(self._made.layers[index], field, packed)

    def _copy(self, field: str, index: int, array: Array) -> Array:
        place = self._place(field, index, array.size, array).reshape(array.shape)
        with jit.unrecorded() as runs, device.on_device_of(array):
            if runs:  # as what packs does
                place[...] = array
        return place

    def _place(self, field: str, index: int, size: int, like: Array) -> Array:
        """Return the part of a stack that belongs to a layer."""
        stacks = self._made.stacks
        stack, first, total = stack_place(self._made.config, field, index, size)
        if stack not in stacks:
            stacks[stack] = device.empty((total,), like.dtype, like)
        return stacks[stack][first : first + size]


def stack_place(config: Config, field: str, layer: int, size: int) -> tuple[str, int, int]:
    """Return the stack in which a layer's field lies, its first element there and the whole's size.

    size: elements of the field

    A field has a stack of its name, layer after layer. In a mixture, layers with experts and those
    with one MLP have stacks of their own, but for gates and ups; a shared gate (or up) comes behind
    the layer's experts, and the shared expert's router behind the experts' routers. Experts of
    4-bit weights have the stacks gate_up4 and down4.
    """
    c = config
    mixtures = [i for i in range(c.n_layers) if c.is_moe_layer(i)]
    before = sum(i < layer for i in mixtures)
    dense_before, n_dense = layer - before, c.n_layers - len(mixtures)
    four_bits = c.expert_dtype == "mxfp4"
    if four_bits and c.is_moe_layer(layer) and field in ("gate_up", "down"):
        return f"{field}4", before * size, len(mixtures) * size
    if not c.n_experts or field not in (*_ROWS, *_EXPERTS_ALONE):
        return field, layer * size, c.n_layers * size
    if field in ("router", "shared_router"):
        each = (c.n_experts + c.shared_gated) * c.dim
        behind = c.n_experts * c.dim if field == "shared_router" else 0
        return "router", before * each + behind, len(mixtures) * each
    if field in ("gate", "up", "shared_gate", "shared_up"):
        experts = 0 if four_bits else c.n_experts * c.hidden_dim * c.dim
        each, dense = experts + c.shared_hidden_dim * c.dim, c.dense_hidden_dim * c.dim
        first = before * each + dense_before * dense
        behind = experts if field.startswith("shared_") else 0
        total = len(mixtures) * each + n_dense * dense
        return field.removeprefix("shared_"), first + behind, total
    if field == "down" and not c.is_moe_layer(layer):
        return "dense_down", dense_before * size, n_dense * size
    return field, before * size, len(mixtures) * size


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array a config asks for, by the names of `Weights.named`.

    A tied head is left out: it is the embedding.
    """
    c, d = config, config.dim
    layernorm, post = c.norm == "layernorm", c.norm_placement == "post"
    made: dict[str, tuple[int, ...] | None] = {"embedding": (c.vocab_size, d)}
    if not c.rope_theta:
        made["position_embedding"] = (c.max_seq_len, d)
    if c.n_token_types:
        made["token_type"] = (c.n_token_types, d)
    if post:
        made["embedding_norm"] = (d,)
        made["embedding_norm_bias"] = (d,) if layernorm else None
    qkv_rows = c.q_dim + 2 * c.kv_dim
    full = c.qk_norm == "full"
    block = {
        "attn_norm": (d,),
        "attn_norm_bias": (d,) if layernorm else None,
        "qkv": (qkv_rows, d),
        "qkv_bias": (qkv_rows,) if c.qkv_bias else None,
        "q_norm": None if c.qk_norm == "none" else (c.q_dim if full else c.head_dim,),
        "k_norm": None if c.qk_norm == "none" else (c.kv_dim if full else c.head_dim,),
        "sinks": (c.n_heads,) if c.sinks else None,
        "out": (d, c.q_dim),
        "out_bias": (d,) if c.output_bias else None,
        "mlp_norm": (d,),
        "mlp_norm_bias": (d,) if layernorm else None,
    }
    for i in range(c.n_layers):
        layer = block | _mlp_shapes(c, c.layer_hidden_dim(i), experts=c.is_moe_layer(i))
        made.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    if not post:
        made["final_norm"] = (d,)
    if c.has_head and not c.tied_embeddings:
        made["head"] = (c.vocab_size, d)
    return {name: shape for name, shape in made.items() if shape is not None}


def _mlp_shapes(c: Config, hidden_dim: int, *, experts: bool) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of one layer's MLP, or of its router, experts and shared expert."""
    d, shared = c.dim, c.shared_hidden_dim if experts else 0
    each = (c.n_experts,) if experts else ()
    return {
        "router": (c.n_experts, d) if experts else None,
        "router_bias": (c.n_experts,) if experts and c.router_bias else None,
        "router_correction": (c.n_experts,) if experts and c.router_correction else None,
        "gate": (*each, hidden_dim, d) if c.gated else None,
        "gate_bias": (*each, hidden_dim) if c.gated and c.mlp_bias else None,
        "up": (*each, hidden_dim, d),
        "up_bias": (*each, hidden_dim) if c.mlp_bias else None,
        "down": (*each, d, hidden_dim),
        "down_bias": (*each, d) if c.mlp_bias else None,
        "shared_gate": (shared, d) if shared else None,
        "shared_up": (shared, d) if shared else None,
        "shared_down": (d, shared) if shared else None,
        "shared_router": (1, d) if shared and c.shared_gated else None,
    }


def quantized(config: Config) -> dict[str, tuple[str, ...]]:
    """Return which arrays of a config are `Mxfp4`, and which of `shapes` each takes the place of.

    They are named as in `Layer`: gate_up, whose gate and up come one after the other, and down.
    """
    made: dict[str, tuple[str, ...]] = {}
    for i in range(config.n_layers):
        if config.expert_dtype == "mxfp4" and config.is_moe_layer(i):
            before = f"layers.{i}."
            made[before + "gate_up"] = (before + "gate", before + "up")
            made[before + "down"] = (before + "down",)
    return made


def dtype_of(name: str, dtype: Any) -> np.dtype:
    """Return what an array has in a model of that dtype: a router's correction stays float32."""
    exact = name.endswith("router_correction") and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32 if exact else dtype)


def assemble(config: Config, arrays: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> Weights:
    """Put arrays named as in `shapes` together; raises ValueError for a missing or wrong one.

    arrays: by name, or pairs of a name and an array, each of which may be made when it is asked for
        and is dropped once it is packed
    """
    wanted, missing = shapes(config), dict.fromkeys(shapes(config))
    filled = _Filling(config, config.n_layers)
    for name, array in arrays.items() if isinstance(arrays, Mapping) else arrays:
        if isinstance(array, Mxfp4):
            for part in quantized(config).get(name, ()):
                _check_shape(config, part, array.shape, wanted[part])
                missing.pop(part)
            filled.put(name, array)
            continue
        if name not in wanted:
            continue
        _check_shape(config, name, array.shape, wanted[name])
        filled.put(name, array)
        missing.pop(name)
        del array
    if missing:
        raise ValueError(f"model {config.name}: tensor {next(iter(missing))} is missing")
    return filled.weights(tied=config.has_head and config.tied_embeddings)


def _check_shape(
    config: Config, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    if tuple(shape) != wanted:
        raise ValueError(
            f"model {config.name}: tensor {name} is {list(shape)}, wanted {list(wanted)}"
        )


# ---- a model that nobody trained ----------------------------------------------------------------

_STD = 0.02  # of every matrix and both embeddings, the usual initialisation
_NORM = (1.0, 0.2)  # center and half width of a norm's weight


def random(
    config: Config,
    *,
    seed: int = 0,
    dtype: Any,
    kind: str = "numpy",
    gpu: int = 0,
) -> Weights:
    """Make the weights of a model that nobody trained, the same to the bit wherever they are made.

    kind: "numpy", "cupy" (on `gpu`) or "twin"

    Every number is uniform and a function of (seed, name of the tensor, index), so the first layers
    of a cut model are those of the whole one. Matrices and embeddings have a standard deviation of
    0.02; the routers have dim^-0.5, which gives logits of about 1 and a top-k mass well below 1;
    norm weights lie in [0.8, 1.2), biases in [-0.02, 0.02), sinks in [-0.5, 0.5) and the router's
    correction, float32 whatever the dtype, in [-0.1, 0.1); 4-bit experts are made as
    `mxfp4.random_blocks` says. Returns Weights.
    """
    return assemble(config, random_arrays(config, seed=seed, dtype=dtype, kind=kind, gpu=gpu))


def random_arrays(
    config: Config, *, seed: int = 0, dtype: Any, kind: str = "numpy", gpu: int = 0
) -> Iterator[tuple[str, Array | Mxfp4]]:
    """Return the pairs (name, array) of which `random` is made, each made when it is asked for."""
    dtype = np.dtype(dtype)
    if dtype not in device.FLOAT_DTYPES:
        raise TypeError(f"random: dtype is {dtype}, wanted float16, bfloat16 or float32")
    checks.option("random", "kind", kind, ("numpy", "cupy", "twin"))
    _check_seed("random", seed)

    def tensor(name: str, shape: tuple[int, ...]) -> Array:
        center, half_width = _range(config, name)
        options: dict[str, Any] = {"seed": seed, "kind": kind, "gpu": gpu}
        return hash_uniform(
            shape,
            dtype_of(name, dtype),
            tensor=name,
            half_width=half_width,
            center=center,
            **options,
        )

    def experts(name: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
        streams = _stream(name + ".blocks"), _stream(name + ".scales")
        return mxfp4.random_blocks(shape, seed=seed, streams=streams, kind=kind, gpu=gpu)  # type: ignore[arg-type]

    def arrays() -> Iterator[tuple[str, Array | Mxfp4]]:
        wanted, packed = shapes(config), quantized(config)
        for name, parts in packed.items():
            first, *up = (experts(part, wanted[part]) for part in parts)
            yield name, mxfp4.from_blocks(*first, up=up[0] if up else None, dtype=dtype)
        replaced = {part for parts in packed.values() for part in parts}
        for name, shape in wanted.items():
            if name not in replaced:
                yield name, tensor(name, shape)

    return arrays()


def _range(config: Config, name: str) -> tuple[float, float]:
    """Return center and half width of a tensor's numbers."""
    field = name.rpartition(".")[2]
    if field.endswith("bias"):
        return 0.0, 0.02
    if field.endswith("norm"):
        center, half_width = _NORM
        return (center - 1.0 if config.norm_rounding == "one_plus" else center), half_width
    if field == "sinks":
        return 0.0, 0.5
    if field == "router_correction":
        return 0.0, 0.1
    std = config.dim**-0.5 if field in ("router", "shared_router") else _STD
    return 0.0, std * math.sqrt(3.0)  # a uniform of half width a has a deviation of a / sqrt(3)


def hash_uniform(
    shape: tuple[int, ...],
    dtype: Any,
    *,
    seed: int,
    tensor: str,
    half_width: float,
    center: float = 0.0,
    kind: str = "numpy",
    gpu: int = 0,
) -> Array:
    """Fill a new array with numbers uniform in [center - half_width, center + half_width).

    tensor: its name; element i depends on (seed, tensor, i) alone
    kind: "numpy", "cupy" (one launch on `gpu`) or "twin"

    Returns the same bits for every kind.
    """
    _check_seed("hash_uniform", seed)
    stream = _stream(tensor)
    if kind == "numpy":
        return counter.hash_uniform(
            shape, dtype, seed=seed, stream=stream, half_width=half_width, center=center
        )
    where = device.require_cupy().cuda.Device(gpu) if kind == "cupy" else contextlib.nullcontext()
    with where:
        y = device.namespace(kind).empty(shape, dtype)
        y = device.twin(y) if kind == "twin" else y
        if y.size:
            per_cta = 256 * (16 // y.dtype.itemsize)
            args = {
                "y": y,
                "count": y.size,
                "seed": seed,
                "stream": stream,
                "step": np.float32(half_width) * np.float32(2.0**-23),
                "center": center,
            }
            kernel = jit.kernel("unfused/hash_uniform.cu", "hash_uniform", y.dtype)
            kernel.launch(-(-y.size // per_cta), 256, args, like=y)
    return y


def _stream(tensor: str) -> int:
    """Turn a tensor's name into 64 bits (FNV-1a); its place in the model plays no part."""
    value = 0xCBF29CE484222325
    for byte in tensor.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def _check_seed(op: str, seed: int) -> None:
    if not 0 <= seed < 2**64:
        raise ValueError(f"{op}: seed is {seed}, wanted 0 <= seed < 2^64")
