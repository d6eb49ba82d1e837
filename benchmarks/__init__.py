"""What `cufuse bench` runs: ops launched apart and glued, and steps of every engine.

Each case is verified against float64 before it is timed. Rows go to `results/*.jsonl`; `readme.py`
writes the README's table from them.
"""
