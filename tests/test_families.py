"""No family starts with values that nobody has set, and chapters 01 and 05 start with the same.

Memory that torch has not filled is NaN here, so whatever is forgotten shows.
"""

import argparse
import contextlib

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from families import ARGS, FAMILY_NAMES, MODERN, shrink


@contextlib.contextmanager
def poisoned_memory():
    """Have torch fill new memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def start(load, monkeypatch):
    """Return a function that gives what the models of both chapters start with, by name."""
    first, last = load("01"), load("05")
    monkeypatch.setattr(last, "fully_shard", lambda *_, **__: None)
    monkeypatch.setattr(last, "build_mesh", lambda *_: {"shard": None})

    def values(kind):
        config, args = shrink(CONFIG_MAPPING[kind]()), argparse.Namespace(**ARGS)
        with poisoned_memory():
            whole = first.build_model(args, config)
            split = last.shard(args, last.build_model(args, config), torch.device("cpu"))
        return [
            dict(model.named_parameters()) | dict(model.named_buffers()) for model in (whole, split)
        ]

    return values


def wrong(one, other):
    """Return the names of what is not the same, bit for bit; NaN is never the same."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("kind", MODERN)
def test_every_value_is_set_and_the_same_in_chapter_05(start, kind):
    assert wrong(*start(kind)) == []


@pytest.mark.exhaustive
def test_all_families(start):
    """All that can be made small by the rule above, and that the chapters do not refuse."""
    found, left_out = {}, {}
    for kind in FAMILY_NAMES:
        try:
            with torch.device("meta"):
                config = shrink(CONFIG_MAPPING[kind]())
                model = transformers.AutoModelForCausalLM.from_config(config)
            assert model.num_parameters() < 20_000_000
            found[kind] = wrong(*start(kind))
        except (Exception, SystemExit) as error:
            left_out[kind] = f"{type(error).__name__}: {error}"
    print(f"{len(found)} families; left out: {left_out}")
    assert not {kind: names for kind, names in found.items() if names}
    assert len(found) > 100, left_out
