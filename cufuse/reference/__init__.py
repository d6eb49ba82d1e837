"""Every op in plain NumPy: the specification, read top to bottom.

The functions take float16, bfloat16, float32 (sums in float32, results rounded to the input's
dtype) and float64 (everything in float64: the oracle that tests compare with). They check nothing.
"""

from cufuse.reference.norm import rmsnorm
from cufuse.reference.rope import rope, rope_frequencies, rope_table

__all__ = ["rmsnorm", "rope", "rope_frequencies", "rope_table"]
