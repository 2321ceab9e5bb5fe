"""Lets the tests in this directory run the core on the property tests' executor without a model."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "property"))
