"""Define the parts of Python that the planner needs, and that MicroPython lacks."""

import builtins
import sys
from math import ceil, log2  # noqa: F401


class SimpleNamespace:
    def __init__(self, **values):
        for name, value in values.items():
            setattr(self, name, value)


class Counter(dict):
    def __init__(self, values=None, **named):
        super().__init__()
        self.update(values or named)

    def __getitem__(self, key):
        return self.get(key, 0)

    def update(self, values):
        pairs = values.items() if isinstance(values, dict) else [(key, 1) for key in values]
        for key, value in pairs:
            self[key] = self.get(key, 0) + value

    def total(self):
        return sum(self.values())

    def __add__(self, other):
        added = Counter(self)
        added.update(other)
        return added

    def __sub__(self, other):
        return self + {key: -value for key, value in other.items()}


def cache(function):
    found = {}

    def call(*args):
        if args not in found:
            found[args] = function(*args)
        return found[args]

    return call


def prod(values):
    result = 1
    for value in values:
        result *= value
    return result


def product(*lists):
    found = [()]
    for choices in lists:
        found = [chosen + (choice,) for chosen in found for choice in choices]
    return found


def stable_sorted(values, key=None, reverse=False):
    """Return the sorted values; values with equal keys keep their order, unlike in MicroPython.

    `reverse` has an effect only without `key`.
    """
    if not key:
        return plain_sorted(values, reverse=reverse)
    values = list(values)
    order = plain_sorted(range(len(values)), key=lambda n: (key(values[n]), n))
    return [values[n] for n in order]


# Replace sorted() for all modules. Let the planner's modules import Counter, cache and the other
# names above from this module, because MicroPython's own modules lack most of these names.
plain_sorted, builtins.sorted = sorted, stable_sorted
for name in ("collections", "functools", "itertools", "math", "types"):
    sys.modules[name] = sys.modules[__name__]
