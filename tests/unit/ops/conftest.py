"""Lets the tests in this directory import the helper module beside them (`native_cases`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
