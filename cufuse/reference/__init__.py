"""Every op in plain NumPy: the specification, read top to bottom.

The functions take float16, bfloat16, float32 (sums in float32, results rounded to the input's
dtype) and float64 (everything in float64: the oracle that tests compare with). They check nothing.
"""

from cufuse.reference.attention import append, attention, rope_append, scores, softmax, values
from cufuse.reference.embed import embed
from cufuse.reference.moe import combine, expert_matmul, moe, moe_route, router_logits, topk
from cufuse.reference.norm import layernorm, rmsnorm
from cufuse.reference.rope import rope, rope_frequencies, rope_table

__all__ = [
    "append",
    "attention",
    "combine",
    "embed",
    "expert_matmul",
    "layernorm",
    "moe",
    "moe_route",
    "rmsnorm",
    "rope",
    "rope_append",
    "rope_frequencies",
    "rope_table",
    "router_logits",
    "scores",
    "softmax",
    "topk",
    "values",
]
