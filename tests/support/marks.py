"""Mark parameters of tests that take too long to run in every check of a change."""

import pytest


def slow(*values):
    """Return test parameters with the mark `slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values):
    """Return test parameters with the mark `exhaustive`."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)
