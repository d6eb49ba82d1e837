"""The ops that are benchmarked, by name."""

from __future__ import annotations

from cufuse.benchmarks.case import Case
from cufuse.benchmarks.gated_linear import GatedLinear
from cufuse.benchmarks.linear import Linear
from cufuse.benchmarks.moe_route import MoeRoute
from cufuse.benchmarks.rmsnorm_linear import RmsnormLinear

CASES: dict[str, type[Case]] = {
    case.name: case for case in (Linear, RmsnormLinear, GatedLinear, MoeRoute)
}
