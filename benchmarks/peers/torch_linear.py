#!/usr/bin/env python3
"""PyTorch's matrix products: what `cufuse bench linear` and `gated_linear` are compared with.

  python benchmarks/peers/torch_linear.py
  python benchmarks/peers/torch_linear.py --op linear --sizes 4096x4096x4096 --no-compile

A JSON line for each op, size and mode; its time is the median of single launches, each behind a
pause and on inputs that rotate through more memory than the L2 cache holds, as "us alone" of
`cufuse bench` is.

modes of linear, x w^T + b and GELU
  matmul    the product alone (cuBLAS)
  eager     the product, the sum and the activation, three launches
  cublaslt  all in one launch: cuBLASLt's epilogue GELU_BIAS, GELU by tanh
  compile   torch.compile(mode="max-autotune-no-cudagraphs")
modes of gated_linear, silu(gate) * up with both in one product: matmul, eager and compile
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_timing import choose_device, samples_ms, write_row

SIZES: dict[str, tuple[tuple[int, ...], ...]] = {  # m x n x k
    "linear": (
        (8192, 8192, 8192),
        (4096, 4096, 4096),
        (1024, 4096, 4096),
        (256, 4096, 4096),
        (64, 4096, 4096),
        (16, 4096, 4096),
        (8, 4096, 4096),
        (1, 4096, 4096),
        (4096, 14336, 4096),
        (4096, 8192, 2048),
    ),
    "gated_linear": (
        (4096, 14336, 4096),
        (512, 14336, 4096),
        (16, 14336, 4096),
        (1, 14336, 4096),
    ),
}
MOST_SETS = 64  # of inputs


def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w)


def three_launches(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(torch.matmul(x, w.t()) + b)


def epilogue(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch._addmm_activation(b, x, w.t(), use_gelu=True)


def gelu_of_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def swiglu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


MODE_OF = {
    "linear": {"matmul": product, "eager": three_launches, "cublaslt": epilogue},
    "gated_linear": {"matmul": product, "eager": swiglu},
}
COMPILED = {"linear": gelu_of_linear, "gated_linear": swiglu}


def modes(op: str, *, compiled: bool) -> dict[str, Callable[..., Tensor]]:
    """Return the functions to time by their names; compiled for the next shape only."""
    made: dict[str, Callable[..., Tensor]] = dict(MODE_OF[op])
    if compiled:
        # A function compiled for too many shapes is run as it is written.
        torch._dynamo.reset()
        made["compile"] = torch.compile(
            COMPILED[op], mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False
        )
    return made


def inputs(
    m: int, n: int, k: int, device: torch.device, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return two sets or more of x [m, k], w [n, k] and b [n]: three times the L2 cache."""
    set_bytes = (m * k + n * k + m * n) * dtype.itemsize
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    count = min(max(math.ceil(3 * l2 / set_bytes), 2), MOST_SETS)

    def made(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype) * scale

    return [(made(m, k), made(n, k, scale=k**-0.5), made(n)) for _ in range(count)]


def run(op: str, sizes: tuple[int, ...], options: argparse.Namespace) -> None:
    """Print the rows of one op and size."""
    m, n, k = sizes
    device, dtype = choose_device(options.device), getattr(torch, options.dtype)
    weight_rows = 2 * n if op == "gated_linear" else n
    sets = inputs(m, weight_rows, k, device, dtype)
    for mode, function in modes(op, compiled=not options.no_compile).items():
        calls = [lambda given=given, f=function: f(*given) for given in sets]
        samples = samples_ms(calls, device, options.launches, pause=True)
        flops = 2 * m * weight_rows * k
        write_row(
            device,
            samples,
            op=op,
            sizes=f"{m} x {n} x {k}",
            mode=mode,
            dtype=options.dtype,
            tflops=round(flops / sorted(samples)[len(samples) // 2] / 1e9, 1),
        )


def main() -> None:
    """Print a row for each op, size and mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=SIZES, help="one op only")
    parser.add_argument("--sizes", help="m x n x k, a comma list such as 1x4096x4096,8x4096x4096")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--launches", type=int, default=41, help="of which the median counts")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    with torch.no_grad():
        for op in [options.op] if options.op else SIZES:
            chosen = SIZES[op]
            if options.sizes:
                chosen = tuple(tuple(map(int, s.split("x"))) for s in options.sizes.split(","))
            for sizes in chosen:
                run(op, sizes, options)


if __name__ == "__main__":
    main()
