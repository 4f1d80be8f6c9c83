"""Fixtures of several test files."""

import pytest

from flashpatch import patcher, tagging


@pytest.fixture
def enabled():
    """flashpatch.enable(), and nothing left of it afterwards."""
    patcher.enable()
    yield
    patcher.disable()
    tagging._adopted.clear()
    patcher._enabled.honoured.clear()
