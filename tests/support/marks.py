"""Mark parameters of a test: only some of them are worth their time in every check of a change."""

import pytest


def slow(*values):
    """Return parameters that make a test slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values):
    """Return parameters that make a test exhaustive."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)
