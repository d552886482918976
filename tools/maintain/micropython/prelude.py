"""Define the parts of Python that MicroPython lacks, and that the planner needs."""

import builtins
import json  # noqa: F401
import math as few_math
from collections import OrderedDict  # noqa: F401
from itertools import chain  # noqa: F401


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


class math:
    ceil = few_math.ceil

    def prod(values):
        product = 1
        for value in values:
            product *= value
        return product


class itertools:
    def product(*lists):
        found = [()]
        for choices in lists:
            found = [(*chosen, choice) for chosen in found for choice in choices]
        return found


class contextlib:
    class suppress:
        def __init__(self, error):
            self.error = error

        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            return kind is self.error


def zip(*lists, strict=False):
    return builtins.zip(*lists)  # noqa: B905


def sorted(values, key=lambda value: value, reverse=False):
    """Keep the order of equal values."""
    values = list(values)[::-1] if reverse else list(values)
    numbers = builtins.sorted(range(len(values)), key=lambda n: (key(values[n]), n))
    return [values[n] for n in (numbers[::-1] if reverse else numbers)]


def bit_length(number):
    return len(bin(number)) - 2 if number else 0


def formatted(value, layout):
    """Return a value as text; MicroPython puts commas between the thousands of integers only."""
    text = ("{:" + layout.replace(",", "") + "}").format(value)
    if "," not in layout:
        return text
    integer, point, decimals = text.partition(".")
    return "{:,}".format(int(integer)) + point + decimals  # noqa: UP032
