"""Puts this directory on the path, for what test_transcripts.py has to share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
