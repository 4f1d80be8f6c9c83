"""Fixtures of several test files."""

import pytest

from flashpatch import enabling, tagging


@pytest.fixture
def enabled():
    """flashpatch.enable(), and nothing left of it afterwards."""
    enabling.enable()
    yield
    enabling.disable()
    tagging._adopted.clear()
    enabling._enabled.honoured.clear()
