"""Find out with a chapter's own script whether it accepts a layout, and write its command."""

import argparse
import contextlib
import itertools
import re
import shlex
from unittest import mock

from report import launcher
from setting import UnsupportedModelError, setting_of
from step_time import speed_of
from training_step import ROOT, SCRIPTS, check_split, newest_chapter, parse_training_args, refuse

# A layout sets these flags. No other flag with a value depends on the layout.
LAYOUT_FLAGS = ["--batch-size", "--recompute", "--replicas", "--tensor-parallel-size"]
LAYOUT_FLAGS += ["--pipeline-parallel-size", "--pipeline-schedule"]
LAYOUT_FLAGS += ["--context-parallel-size", "--context-parallel-style", "--expert-parallel-size"]


def words_without_layout(args, chapter):
    """Return the training arguments without flags that layouts set or that the chapter lacks."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("-b", *LAYOUT_FLAGS):
        parser.add_argument(flag)
    parser.add_argument("--cpu-offload", action="store_true")
    parser.add_argument("--reshard-after-forward", action=argparse.BooleanOptionalAction)
    if chapter < "04":
        parser.add_argument("--checkpoint-async", action="store_true")
    if chapter < "09":
        parser.add_argument("--expert-balance-rate")
        parser.add_argument("--expert-balance-loss")
    return parser.parse_known_args(args.training_words)[1]


def layout_of(args, chapter, words, layout_words):
    """Return the setting, the command and the speed of a layout as a dictionary.

    Return None if the chapter's script refuses the layout.
    """
    script = SCRIPTS[chapter].relative_to(ROOT)
    # If the chapter refuses the layout, return None. For example, a chapter refuses to divide 4
    # heads among 8 ranks.
    refusing = mock.patch.object(newest_chapter(), "fail", refuse)
    with contextlib.suppress(UnsupportedModelError), refusing:
        training_args = parse_training_args([*words, *layout_words], args.ranks)
        values = argparse.Namespace(**vars(args) | vars(training_args))
        setting = setting_of(values, chapter)
        # Check the model, because the scripts from chapter 05 on refuse some models.
        if chapter >= "05":
            check_split(setting, args.model)
        script_words = shlex.join([str(script), *last_of_each(words)])
        command = " \\\n    ".join([launcher(args), script_words, shlex.join(layout_words)])
        return {"setting": setting, "command": command, "speed": speed_of(setting)}
    return None


def last_of_each(words):
    """Return the arguments in `words`, but keep each flag only once, with its last value."""
    flags = {}
    for word in words:
        if re.match("--?[a-z]", word):
            flag = word
            flags[flag] = []
        flags[flag].append(word)
    return list(itertools.chain(*flags.values()))
