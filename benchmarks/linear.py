"""MatMul + Bias + GELU: three launches with the product in memory between them, or one."""

from __future__ import annotations

import math

import numpy as np

from cufuse import ops, reference
from cufuse.benchmarks import cublas
from cufuse.benchmarks.case import Arrays, Case, Spec, double
from cufuse.benchmarks.verify import row_error


class Linear(Case):
    """y = gelu(x w^T + b)."""

    name = "linear"
    size_names = "m n k"
    gpu_sizes = (
        (1, 4096, 4096),
        (8, 4096, 4096),
        (16, 4096, 4096),
        (64, 4096, 4096),
        (256, 4096, 4096),
        (1024, 4096, 4096),
        (4096, 4096, 4096),
        (4096, 8192, 2048),
        (4096, 14336, 4096),
        (8192, 8192, 8192),
    )
    cpu_sizes = ((1, 4096, 4096), (256, 1024, 1024))
    small_size = (3, 40, 32)
    rounded = 3

    def inputs(self) -> Spec:
        m, n, k = self.sizes
        return {"x": ((m, k), self.dtype), "w": ((n, k), self.dtype), "b": ((n,), self.dtype)}

    def outputs(self) -> Spec:
        m, n, _ = self.sizes
        return {"y": ((m, n), self.dtype)}

    def between(self) -> Spec:
        m, n, _ = self.sizes
        return {"product": ((m, n), self.dtype), "sum": ((m, n), self.dtype)}

    def scale(self, name: str) -> float:
        return 3.0 / math.sqrt(self.size["k"]) if name == "w" else 1.0

    def unfused(self, a: Arrays) -> None:
        ops.matmul(a["x"], a["w"], out=a["product"])
        ops.add(a["product"], a["b"], out=a["sum"])
        ops.activation(a["sum"], "gelu", out=a["y"])

    def fused(self, a: Arrays) -> None:
        ops.linear(a["x"], a["w"], a["b"], activation="gelu", out=a["y"])

    def cublas(self, a: Arrays) -> None:
        cublas.product(a["x"], a["w"], a["product"])

    def reference(self, a: Arrays) -> None:
        a["y"][...] = reference.linear(a["x"], a["w"], a["b"], activation="gelu")

    def error(self, a: Arrays, rows: np.ndarray, rng: np.random.Generator) -> float:
        columns = self.columns(self.size["n"], rng)
        wanted = reference.linear(
            double(a["x"][rows]),
            double(a["w"][columns]),
            double(a["b"][columns]),
            activation="gelu",
        )
        return row_error(a["y"][rows][:, columns], wanted)

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.sizes)
