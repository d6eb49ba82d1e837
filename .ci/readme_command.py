"""Print the shell block of the README that stands behind `<!-- ci: NAME -->`."""

import re
import sys
from pathlib import Path

name = sys.argv[1]
text = (Path(__file__).parent.parent / "README.md").read_text()
found = re.search(rf"<!-- ci: {name} -->\s*```sh\n(.*?)```", text, re.DOTALL)
if not found:
    sys.exit(f"README.md has no block marked <!-- ci: {name} -->")
print(found[1].strip())
