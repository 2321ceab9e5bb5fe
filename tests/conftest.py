"""Fixtures for all tests."""

from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The test material beside the repository (../shared/data); a test that needs it skips where it is absent."""
    path = _ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("needs ../shared/data beside the repository")
    return path
