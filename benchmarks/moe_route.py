"""Routing to experts: router product, softmax and top-k in three launches, or in one."""

from __future__ import annotations

import math

import numpy as np

from cufuse import ops, reference
from cufuse.benchmarks import cublas
from cufuse.benchmarks.case import Arrays, Case, Spec, double
from cufuse.benchmarks.verify import OP_LIMIT, row_error

# Logits are sums in float32 of exact products of the inputs: experts closer than this are a tie.
_TIE = 1e-4


class MoeRoute(Case):
    """ids, weights = the k likeliest of softmax(x w^T)."""

    name = "moe_route"
    size_names = "m n_experts k dim"
    gpu_sizes = ((1, 64, 8, 2048), (1, 128, 8, 2048), (16, 64, 8, 2048), (1024, 64, 8, 2048))
    cpu_sizes = ((1, 64, 8, 2048), (16, 64, 8, 2048))
    small_size = (3, 16, 2, 32)

    def inputs(self) -> Spec:
        m, n, _, dim = self.sizes
        return {"x": ((m, dim), self.dtype), "w": ((n, dim), self.dtype)}

    def outputs(self) -> Spec:
        m, _, k, _ = self.sizes
        return {"ids": ((m, k), np.int32), "weights": ((m, k), np.float32)}

    def between(self) -> Spec:
        m, n, _, _ = self.sizes
        return {"logits": ((m, n), np.float32), "product": ((m, n), self.dtype)}

    def limit(self, engine: str) -> float:
        return 3 * OP_LIMIT["float32"]  # logits and weights are float32 whatever the inputs are

    def scale(self, name: str) -> float:
        return 3.0 / math.sqrt(self.size["dim"]) if name == "w" else 1.0

    def unfused(self, a: Arrays) -> None:
        ops.router_logits(a["x"], a["w"], out=a["logits"])
        ops.softmax(a["logits"], out=a["logits"])
        ops.topk(a["logits"], self.size["k"], normalize="sum", out=(a["weights"], a["ids"]))

    def fused(self, a: Arrays) -> None:
        ops.moe_route(
            a["x"],
            a["w"],
            k=self.size["k"],
            router="softmax_topk",
            renormalize=True,
            out=(a["ids"], a["weights"]),
        )

    def cublas(self, a: Arrays) -> None:
        cublas.product(a["x"], a["w"], a["product"])

    def reference(self, a: Arrays) -> None:
        a["ids"][...], a["weights"][...] = reference.moe_route(
            a["x"], a["w"], k=self.size["k"], router="softmax_topk", renormalize=True
        )

    def error(self, a: Arrays, rows: np.ndarray, rng: np.random.Generator) -> float:
        k = self.size["k"]
        logits = double(a["x"][rows]) @ double(a["w"]).T
        ids = a["ids"][rows]
        in_range = (ids >= 0) & (ids < logits.shape[1])
        if not in_range.all() or any(len(set(row)) != k for row in ids.tolist()):
            return math.inf
        chosen = np.take_along_axis(logits, ids, axis=1)
        least = np.sort(logits, axis=1)[:, -k]
        if (chosen.min(1) < least - _TIE).any() or (np.diff(chosen, axis=1) > _TIE).any():
            return math.inf
        wanted = np.exp(chosen - chosen.max(1, keepdims=True))
        return row_error(a["weights"][rows], wanted / wanted.sum(1, keepdims=True))

    @property
    def flops(self) -> int:
        return 2 * self.size["m"] * self.size["n_experts"] * self.size["dim"]
