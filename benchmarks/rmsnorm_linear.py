"""RMSNorm + linear: the normalised rows in memory between two launches, or one launch."""

from __future__ import annotations

import math

import numpy as np

from cufuse import ops, reference
from cufuse.benchmarks import cublas
from cufuse.benchmarks.case import Arrays, Case, Spec, double
from cufuse.benchmarks.verify import row_error
from cufuse.ops.rmsnorm import Norm


class RmsnormLinear(Case):
    """y = rmsnorm(x) w^T."""

    name = "rmsnorm_linear"
    size_names = "m n k"
    gpu_sizes = ((1, 6144, 4096), (16, 6144, 4096), (1024, 6144, 4096))
    cpu_sizes = ((1, 6144, 4096),)
    small_size = (2, 40, 32)
    rounded = 2

    def inputs(self) -> Spec:
        m, n, k = self.sizes
        return {"x": ((m, k), self.dtype), "g": ((k,), self.dtype), "w": ((n, k), self.dtype)}

    def outputs(self) -> Spec:
        m, n, _ = self.sizes
        return {"y": ((m, n), self.dtype)}

    def between(self) -> Spec:
        m, _, k = self.sizes
        return {"normal": ((m, k), self.dtype)}

    def scale(self, name: str) -> float:
        return 3.0 / math.sqrt(self.size["k"]) if name == "w" else 1.0

    def unfused(self, a: Arrays) -> None:
        ops.rmsnorm(a["x"], a["g"], out=a["normal"])
        ops.matmul(a["normal"], a["w"], out=a["y"])

    def fused(self, a: Arrays) -> None:
        ops.linear(a["x"], a["w"], norm=Norm(a["g"]), out=a["y"])

    def cublas(self, a: Arrays) -> None:
        cublas.product(a["x"], a["w"], a["y"])

    def reference(self, a: Arrays) -> None:
        normal, _ = reference.rmsnorm(a["x"], a["g"])
        a["y"][...] = reference.linear(normal, a["w"])

    def error(self, a: Arrays, rows: np.ndarray, rng: np.random.Generator) -> float:
        columns = self.columns(self.size["n"], rng)
        normal, _ = reference.rmsnorm(double(a["x"][rows]), double(a["g"]))
        wanted = reference.linear(normal, double(a["w"][columns]))
        return row_error(a["y"][rows][:, columns], wanted)

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.sizes)
