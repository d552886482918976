"""tests/promises.toml lists what the guide promises, with the tests of each promise."""

import tomllib

import pytest

from conftest import ROOT

PROMISES = tomllib.loads((ROOT / "tests/promises.toml").read_text())
ROWS = [(promise, tests) for group in PROMISES.values() for promise, tests in group.items()]


@pytest.mark.parametrize("promise, tests", ROWS, ids=[promise for promise, _ in ROWS])
def test_promise_has_tests_that_exist(promise, tests):
    assert tests, f"no test proves: {promise}"
    for test in tests:
        file, _, function = test.partition("::")
        path = ROOT / f"tests/{file}.py"
        assert f"def {function}(" in path.read_text(), f"{path.name} has no {function}"
