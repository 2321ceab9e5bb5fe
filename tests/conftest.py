"""What all tests share."""

import os
from pathlib import Path

import hypothesis
import pytest

# Set before torch is first imported, and for child processes too: the models here are tiny, and two OpenMP threads on a
# busy machine wait for each other at every operation.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A loaded machine is no failure. CI draws the same examples every time; a developer's runs draw new ones.
hypothesis.settings.register_profile("local", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("local"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The test material beside the repository (../shared/data); a test that needs it skips where it is absent."""
    path = _ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("needs ../shared/data beside the repository")
    return path
