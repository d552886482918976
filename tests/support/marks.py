"""Mark parameters of a test: only some of them are worth their time in every check of a change."""

import pytest


def slow(*values):
    """Return parameters with which a test is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values):
    """Return parameters with which a test is exhaustive."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)
