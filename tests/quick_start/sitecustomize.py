"""Python that collects no garbage while it imports: a script starts in two thirds of the time.

Python runs this before a script if this folder is in PYTHONPATH, as it is for all that the tests
start: more than a thousand processes that import torch, most of them as a reader's would.
"""

import builtins
import gc
import sys

import_module = builtins.__import__


def import_without_collecting(*args, **kwargs):
    """Import as ever; no later collection looks at what a new module brought, which stays."""
    known, was_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        return import_module(*args, **kwargs)
    finally:
        if was_enabled:
            if len(sys.modules) > known:
                gc.freeze()
            gc.enable()


builtins.__import__ = import_without_collecting
