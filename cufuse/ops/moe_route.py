"""Mixture of experts: choose the experts of each token, in one launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, device, jit, reference, tiles
from cufuse.config import ROUTERS
from cufuse.device import Array
from cufuse.ops import _matmul
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width
from cufuse.ops.rmsnorm import Norm
from cufuse.ops.topk import check_choice

# Tokens from which a CTA keeps several of them in shared memory and multiplies each router row it
# has loaded by all; below, more CTAs finish sooner.
_MANY_TOKENS = 64
_SHARED_BYTES = 48 * 1024


@on_stream
def moe_route(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    k: int,
    router: str = "softmax_topk",
    renormalize: bool = True,
    correction: Array | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    norm: Norm | None = None,
    out: tuple[Array | None, Array | None] | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """Choose the k experts of each token and weigh them, in one launch.

    x: [m, dim]
    w: [n_experts, dim]
    b: [n_experts]
    router: "softmax_topk" takes the softmax over all experts and keeps its k largest (Mixtral,
        OLMoE, Qwen3, DeepSeek-V2), "topk_softmax" the softmax over the k largest logits (Shazeer et
        al. 2017; gpt-oss), "sigmoid_topk" the k largest sigmoids (DeepSeek-V3, 2024)
    renormalize: divide the weights by their sum; "topk_softmax" has a sum of one anyway
    correction: float32 [n_experts], added to the sigmoids for the choice and not for the weights;
        "sigmoid_topk" only
    groups, top_groups: choose from those top_groups of so many equal groups of experts that have
        the best score: with "sigmoid_topk" the sum of the two best sigmoids, corrected, else the
        best logit; not for "topk_softmax"
    scale: multiplies the weights
    norm: an RMSNorm of x on the way in
    out: (ids, weights)

    Returns ids, int32 [m, k], the best choice first and ties to the lower id or group (NaN counts
    as the smallest), and weights, float32 [m, k]. Logits are computed in float32 and not rounded.
    Raises ValueError for sizes and options and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "moe_route",
        optional=("b", "correction", "norm"),
        x=(x, "m dim"),
        w=(w, "n_experts dim"),
        b=(b, "n_experts"),
        correction=(correction, "n_experts", np.float32),
        norm=(_matmul.norm_weight("moe_route", norm), "dim"),
    )
    checks.option("moe_route", "router", router, ROUTERS)
    m, dim, n_experts = (bound.sizes[name] for name in ("m", "dim", "n_experts"))
    check_choice("moe_route", "n_experts", n_experts, k, groups, top_groups)
    if groups > 1 and router == "topk_softmax":
        raise ValueError(f'moe_route: router "topk_softmax" has no groups and groups is {groups}')
    if correction is not None and router != "sigmoid_topk":
        raise ValueError(f'moe_route: correction is for "sigmoid_topk" and router is "{router}"')
    ids_out, weights_out = checks.pair("moe_route", out)
    ids = bound.output("out[0]", ids_out, (m, k), np.int32)
    weights = bound.output("out[1]", weights_out, (m, k), np.float32)
    if m == 0:
        return ids, weights
    if bound.kind == "numpy":
        ids[...], weights[...] = reference.moe_route(
            bound["x"],
            bound["w"],
            bound["b"],
            k=k,
            router=router,
            renormalize=renormalize,
            correction=bound["correction"],
            groups=groups,
            top_groups=top_groups,
            scale=scale,
            norm=_matmul.norm_tuple(bound, norm),
        )
        return ids, weights
    tokens, row_bytes = router_tile(m, dim, bound.dtype.itemsize)
    n_tiles = -(-m // tokens)
    arrays = {"x": bound["x"], "norm_weight": bound["norm"], "w": bound["w"], "b": bound["b"]}
    kernel = jit.kernel(
        "fused/moe_route.cu",
        "moe_route",
        bound.dtype,
        _matmul.rounding(norm),
        tokens,
        width(dim, *arrays.values()),
    )
    scratch = device.SCRATCH
    kernel.launch(
        (-(-n_experts // experts_per_cta(tokens)), min(n_tiles, 65535)),
        256,
        {
            **arrays,
            "correction": bound["correction"],
            "logits": scratch.get("moe_route logits", m * n_experts * 4, weights, stream),
            "arrived": scratch.get("moe_route arrived", n_tiles * 4, weights, stream),
            "ids": ids,
            "weights": weights,
            "rows": m,
            "dim": dim,
            "n_experts": n_experts,
            "k": k,
            "groups": groups,
            "top_groups": top_groups,
            "eps": 0.0 if norm is None else norm.eps,
            "scale": scale,
            "sigmoid": router == "sigmoid_topk",
            "over_all": router == "softmax_topk" and not renormalize,
            "over_chosen": renormalize or router == "topk_softmax",
        },
        like=weights,
        shared_bytes=tokens * max(row_bytes, (n_experts + k + groups) * 4),
        stream=stream,
        size_bytes=sum(a.nbytes for a in (*arrays.values(), ids, weights) if a is not None),
    )
    return ids, weights


def router_tile(m: int, dim: int, itemsize: int) -> tuple[int, int]:
    """Return how many tokens a CTA keeps in shared memory, and the bytes that each takes there."""
    row_bytes = tiles.chunks(dim, itemsize) * 512
    if m >= _MANY_TOKENS:
        for tokens in (8, 4):
            if tokens * row_bytes <= _SHARED_BYTES:
                return tokens, row_bytes
    return 1, row_bytes


def experts_per_cta(tokens: int) -> int:
    """One for each of eight warps; more where the tokens have to be worth staging."""
    return 8 if tokens == 1 else 16
