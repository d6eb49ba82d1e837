"""Fail unless the tests, on a cold cache, built every kernel for the CPU: unbuilt is untested."""

import sys

from cufuse import jit

built = {path.name.rsplit("-", 1)[0] for path in (jit.cache_folder() / "twin").glob("*/*.so")}
missing = sorted({kernel.name for kernel in jit.samples()} - built)
if missing:
    sys.exit(f"no test ran {', '.join(missing)}")
