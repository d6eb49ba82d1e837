"""SwiGLU: two products and a gate in three launches, or all of it in one."""

from __future__ import annotations

import math

import numpy as np

from cufuse import ops, reference
from cufuse.benchmarks import cublas
from cufuse.benchmarks.case import Arrays, Case, Spec, double
from cufuse.benchmarks.verify import row_error


class GatedLinear(Case):
    """y = silu(x w_gate^T) * (x w_up^T)."""

    name = "gated_linear"
    size_names = "m n k"
    gpu_sizes = ((1, 14336, 4096), (16, 14336, 4096), (512, 14336, 4096), (4096, 14336, 4096))
    cpu_sizes = ((1, 4096, 2048),)
    small_size = (2, 24, 32)
    rounded = 3

    def inputs(self) -> Spec:
        m, n, k = self.sizes
        return {
            "x": ((m, k), self.dtype),
            "w_gate": ((n, k), self.dtype),
            "w_up": ((n, k), self.dtype),
        }

    def outputs(self) -> Spec:
        m, n, _ = self.sizes
        return {"y": ((m, n), self.dtype)}

    def between(self) -> Spec:
        m, n, _ = self.sizes
        return {"gate": ((m, n), self.dtype), "up": ((m, n), self.dtype)}

    def scale(self, name: str) -> float:
        return 1.0 if name == "x" else 3.0 / math.sqrt(self.size["k"])

    def unfused(self, a: Arrays) -> None:
        ops.matmul(a["x"], a["w_gate"], out=a["gate"])
        ops.matmul(a["x"], a["w_up"], out=a["up"])
        ops.glu(a["gate"], a["up"], activation="silu", out=a["y"])

    def fused(self, a: Arrays) -> None:
        ops.gated_linear(a["x"], a["w_gate"], a["w_up"], activation="silu", out=a["y"])

    def cublas(self, a: Arrays) -> None:
        cublas.product(a["x"], a["w_gate"], a["gate"])
        cublas.product(a["x"], a["w_up"], a["up"])

    def reference(self, a: Arrays) -> None:
        a["y"][...] = reference.gated_linear(a["x"], a["w_gate"], a["w_up"], activation="silu")

    def error(self, a: Arrays, rows: np.ndarray, rng: np.random.Generator) -> float:
        columns = self.columns(self.size["n"], rng)
        wanted = reference.gated_linear(
            double(a["x"][rows]),
            double(a["w_gate"][columns]),
            double(a["w_up"][columns]),
            activation="silu",
        )
        return row_error(a["y"][rows][:, columns], wanted)

    @property
    def flops(self) -> int:
        return 4 * math.prod(self.sizes)
