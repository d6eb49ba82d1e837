#!/usr/bin/env python3
"""PyTorch reads a prompt: what `cufuse bench decode -p` is compared with.

  python benchmarks/peers/torch_prefill.py --tokens 512,4096 --mode eager,compile

A decoder of Llama's kind with random weights of the real shapes: embedding, layers (RMSNorm, one
product for q, k and v, RoPE, causal attention, output, SwiGLU with gate and up in one product), the
keys and values written into a cache, the final norm and the logits of the last position. One JSON
line a row, its time the median of single prompts.

modes
  eager          as written, a launch for each operation
  graph          the same, captured in a CUDA graph
  compile        torch.compile(mode="max-autotune"), which brings CUDA graphs of its own
  compile-graph  torch.compile(mode="max-autotune-no-cudagraphs") in one CUDA graph
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch_timing import choose_device, samples_ms, write_row

MODES = ("eager", "graph", "compile", "compile-graph")
WARM_UP = 5  # prompts: torch records its graphs in the second and third


@dataclass(frozen=True)
class Sizes:
    """A model's numbers."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    rope_theta: float = 5e5
    norm_eps: float = 1e-5


MODELS = {
    "llama-3.2-1b": Sizes(2048, 16, 32, 8, 64, 8192, 128256),
    "llama-3.1-8b": Sizes(4096, 32, 32, 8, 128, 14336, 128256),
    "tiny": Sizes(64, 2, 4, 2, 16, 128, 256),
}


class Layer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, sizes: Sizes, batch: int, n_tokens: int, *, repeat_kv: bool) -> None:
        super().__init__()
        self.sizes, self.repeat_kv = sizes, repeat_kv
        q_dim, kv_dim = (n * sizes.head_dim for n in (sizes.n_heads, sizes.n_kv_heads))
        self.attn_norm, self.mlp_norm = ones(sizes.dim), ones(sizes.dim)
        self.qkv = uniform(q_dim + 2 * kv_dim, sizes.dim)
        self.out = uniform(sizes.dim, q_dim)
        self.gate_up = uniform(2 * sizes.hidden_dim, sizes.dim)
        self.down = uniform(sizes.dim, sizes.hidden_dim)
        for name in ("k_cache", "v_cache"):  # [batch, n_kv_heads, n_tokens, head_dim]
            cache = torch.zeros(batch, sizes.n_kv_heads, n_tokens, sizes.head_dim)
            cache = cache.to(self.qkv.device, self.qkv.dtype)
            torch._dynamo.mark_static_address(cache)  # compiled code writes to where it lies
            self.register_buffer(name, cache)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, n_tokens, dim]; cos, sin: [n_tokens, head_dim / 2]."""
        s, (batch, n, _) = self.sizes, x.shape
        h = F.rms_norm(x, (s.dim,), self.attn_norm, s.norm_eps)
        heads = F.linear(h, self.qkv).view(batch, n, -1, s.head_dim).transpose(1, 2)
        q, k, v = heads.split((s.n_heads, s.n_kv_heads, s.n_kv_heads), 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.k_cache.copy_(k)
        self.v_cache.copy_(v)
        group = s.n_heads // s.n_kv_heads
        if self.repeat_kv:
            k, v = (a.repeat_interleave(group, 1) for a in (k, v))
        a = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=group > 1 and not self.repeat_kv
        )
        x = x + F.linear(a.transpose(1, 2).reshape(batch, n, -1), self.out)
        h = F.rms_norm(x, (s.dim,), self.mlp_norm, s.norm_eps)
        gate, up = F.linear(h, self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Decoder(nn.Module):
    """Reads a prompt of n_tokens into an empty cache."""

    def __init__(self, sizes: Sizes, batch: int, n_tokens: int, *, repeat_kv: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = uniform(sizes.vocab_size, sizes.dim)  # and the head
        self.layers = nn.ModuleList(
            Layer(sizes, batch, n_tokens, repeat_kv=repeat_kv) for _ in range(sizes.n_layers)
        )
        self.final_norm = ones(sizes.dim)
        steps = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
        angles = torch.arange(n_tokens)[:, None] / sizes.rope_theta**steps
        self.register_buffer("cos", angles.cos().to(self.embedding.device))
        self.register_buffer("sin", angles.sin().to(self.embedding.device))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, n_tokens]; returns the last position's logits, [batch, vocab_size]."""
        x = F.embedding(tokens, self.embedding)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        h = F.rms_norm(x[:, -1], (self.sizes.dim,), self.final_norm, self.sizes.norm_eps)
        return F.linear(h, self.embedding)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of half-split pairs in float32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def uniform(*shape: int) -> nn.Parameter:
    """A matrix that keeps the size of what it multiplies."""
    bound = (3 / shape[-1]) ** 0.5
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound), requires_grad=False)


def ones(n: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(n), requires_grad=False)


def in_mode(model: nn.Module, tokens: Tensor, mode: str) -> Callable[[], Tensor]:
    """Return what reads the prompt once."""
    if mode.startswith("compile"):
        inner = "max-autotune" if mode == "compile" else "max-autotune-no-cudagraphs"
        model = torch.compile(model, mode=inner, fullgraph=True, dynamic=False)

    def read() -> Tensor:
        if mode == "compile":
            torch.compiler.cudagraph_mark_step_begin()
        return model(tokens)

    if mode not in ("graph", "compile-graph"):
        return read
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            read()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = read()

    def replay() -> Tensor:
        graph.replay()
        return made

    return replay


def count_kernels(read: Callable[[], Tensor]) -> int:
    """Kernels that the GPU runs for one prompt."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        read()
        torch.cuda.synchronize()
    names = [e.name for e in profiled.events() if str(e.device_type).endswith("CUDA")]
    return sum(not name.startswith(("Memcpy", "Memset", "Torch-", "##")) for name in names)


def choose_attention(name: str) -> None:
    """Leave torch one way to compute attention, or, with "auto", the choice."""
    for kind in () if name == "auto" else ("flash", "cudnn", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(kind == name)


def main() -> None:
    """Print a row for each number of tokens and mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.2-1b", choices=MODELS)
    parser.add_argument("--tokens", default="512,4096", help="lengths of the prompt, a comma list")
    parser.add_argument("--mode", default="eager,compile", help=f"comma list of {', '.join(MODES)}")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--repetitions", type=int, default=31)
    parser.add_argument("--attention", default="auto", choices=("auto", "flash", "cudnn"))
    parser.add_argument(
        "--repeat-kv", action="store_true", help="copy keys and values for every query head"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    modes = options.mode.split(",")
    if wrong := set(modes) - set(MODES):
        parser.error(f"--mode: {', '.join(sorted(wrong))} is not one of {', '.join(MODES)}")
    device = choose_device(options.device)
    choose_attention(options.attention)
    sizes = MODELS[options.model]
    sizes = replace(sizes, n_layers=options.layers or sizes.n_layers)
    for n_tokens in map(int, options.tokens.split(",")):
        torch.manual_seed(0)
        torch.set_default_device(device)
        torch.set_default_dtype(torch.bfloat16)
        model = Decoder(sizes, options.batch, n_tokens, repeat_kv=options.repeat_kv).eval()
        tokens = torch.randint(sizes.vocab_size, (options.batch, n_tokens))
        with torch.no_grad():
            plain = model(tokens).float()
            for mode in modes:
                torch._dynamo.reset()
                counters.clear()
                read = in_mode(model, tokens, mode)
                for _ in range(WARM_UP):
                    made = read()
                error = (made.float() - plain).norm() / plain.norm()
                if not error < 0.1:
                    sys.exit(f"{mode}, {n_tokens} tokens: {error:.3g} away from eager")
                samples = samples_ms([read], device, options.repetitions, pause=False)
                write_row(
                    device,
                    samples,
                    mode=mode,
                    model=options.model,
                    n_layers=sizes.n_layers,
                    dtype="bfloat16",
                    batch=options.batch,
                    test=f"pp{n_tokens}",
                    tokens=n_tokens,
                    attention=options.attention + " repeated" * options.repeat_kv,
                    kernels=count_kernels(read) if device.type == "cuda" else None,
                    relative_to_eager=float(error),
                    # What torch ran without a graph in mode compile; not 0: try compile-graph.
                    cudagraph_skips=counters["inductor"]["cudagraph_skips"],
                )
                del read, made


if __name__ == "__main__":
    main()
