"""Every op in plain NumPy: the specification, read top to bottom.

The functions take float16, bfloat16, float32 (sums in float32, results rounded to the input's
dtype) and float64 (everything in float64: the oracle that tests compare with). They check nothing.
"""

from cufuse.reference.attention import append, attention, rope_append, scores, softmax, values
from cufuse.reference.embed import embed
from cufuse.reference.linear import activation, add, gated_linear, glu, linear, matmul, mul
from cufuse.reference.moe import combine, expert_matmul, moe, moe_route, router_logits, topk
from cufuse.reference.mxfp4 import (
    MXFP4_TILE_BYTES,
    mxfp4_values,
    pack_mxfp4,
    quantize_mxfp4,
    random_mxfp4,
    unpack_mxfp4,
)
from cufuse.reference.norm import layernorm, rmsnorm
from cufuse.reference.pack import pack, unpack
from cufuse.reference.rope import rope, rope_frequencies, rope_table
from cufuse.reference.sampling import argmax, sample

__all__ = [
    "MXFP4_TILE_BYTES",
    "activation",
    "add",
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
    "mxfp4_values",
    "pack",
    "pack_mxfp4",
    "quantize_mxfp4",
    "random_mxfp4",
    "rmsnorm",
    "rope",
    "rope_append",
    "rope_frequencies",
    "rope_table",
    "router_logits",
    "sample",
    "scores",
    "softmax",
    "topk",
    "unpack",
    "unpack_mxfp4",
    "values",
]
