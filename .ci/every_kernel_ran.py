"""Fail unless the tests ran every kernel on the CPU: `every_kernel_ran.py FILE`.

FILE: what `pytest --kernels-ran FILE` wrote, a line for each kernel: its file and its name
"""

import sys
from pathlib import Path

from cufuse import jit

ran = set(Path(sys.argv[1]).read_text().splitlines())
missing = sorted({f"{kernel.file} {kernel.name}" for kernel in jit.samples()} - ran)
if missing:
    sys.exit(f"no test ran {', '.join(missing)}")
