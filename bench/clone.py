"""Lets a Python in which nanovllm is not installed find it: the scripts beside this one measure this clone."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
