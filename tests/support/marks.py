"""Mark parameters of tests that take too long to run in every check of a change."""

import pytest


def slow(*values):
    """Return the values of a test case as one pytest.param with the mark `slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values):
    """Return the values of a test case as one pytest.param with the mark `exhaustive`."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)
