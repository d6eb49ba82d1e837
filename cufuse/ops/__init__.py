"""Ops on NumPy or CuPy arrays: `op(x, ..., *, out=None, stream=None)`.

NumPy in gives NumPy out through the reference; CuPy in gives CuPy out through the kernels, on the
arrays' device and the current stream, asynchronously. What holds for every op:

Inputs are arrays of one library on one device, or anything with DLPack or the CUDA array interface.
Floating ones share one dtype: float32, float16 or bfloat16. Strides do not matter: what a kernel
cannot read as it lies is copied first.
`out` is written and returned; it is C-contiguous and shares no memory with an input unless the op
says that it may be one. Left out, it is allocated.
`stream` is a CuPy stream, an object with `__cuda_stream__` or a raw handle; everything the op does,
copies and allocations too, happens on it.
Nothing is launched for an empty output. ValueError, TypeError and Unsupported name the op, the
argument, what came and what was wanted; they come before anything is launched.
"""

from cufuse.ops.activation import activation
from cufuse.ops.add import add
from cufuse.ops.add_layernorm import add_layernorm
from cufuse.ops.add_rmsnorm import add_rmsnorm
from cufuse.ops.append import append
from cufuse.ops.argmax import argmax
from cufuse.ops.attention import attention
from cufuse.ops.combine import combine
from cufuse.ops.embed import embed
from cufuse.ops.expert_matmul import expert_matmul
from cufuse.ops.gated_linear import gated_linear
from cufuse.ops.glu import glu
from cufuse.ops.layernorm import layernorm
from cufuse.ops.linear import linear
from cufuse.ops.matmul import matmul
from cufuse.ops.moe import moe
from cufuse.ops.moe_route import moe_route
from cufuse.ops.mul import mul
from cufuse.ops.qkv_rope_append import qkv_rope_append
from cufuse.ops.rmsnorm import Norm, rmsnorm
from cufuse.ops.rope import rope
from cufuse.ops.rope_append import rope_append
from cufuse.ops.router_logits import router_logits
from cufuse.ops.sample import sample
from cufuse.ops.scores import scores
from cufuse.ops.softmax import softmax
from cufuse.ops.topk import topk
from cufuse.ops.values import values

__all__ = [
    "Norm",
    "activation",
    "add",
    "add_layernorm",
    "add_rmsnorm",
    "append",
    "argmax",
    "attention",
    "combine",
    "embed",
    "expert_matmul",
    "gated_linear",
    "glu",
    "layernorm",
    "linear",
    "matmul",
    "moe",
    "moe_route",
    "mul",
    "qkv_rope_append",
    "rmsnorm",
    "rope",
    "rope_append",
    "router_logits",
    "sample",
    "scores",
    "softmax",
    "topk",
    "values",
]
