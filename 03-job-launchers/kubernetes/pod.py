"""Run torchrun in a pod, and end with a status that tells Kubernetes what to do next.

manifest.py makes this the pods' command. The arguments are torchrun's.

torchrun ends with 1, whatever its workers ended with. And a worker that was asked to stop ends with
0, as does one that has finished, though only the latter's pod should not be started again.
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path

AGAIN = 75  # sysexits.h calls it EX_TEMPFAIL; manifest.py knows it too


def main():
    """Run torchrun; end as its workers did, or with AGAIN if there is more to train."""
    # process 1 of a container ignores what it has no handler for; torchrun sets one, but later
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    status = torchrun(sys.argv[1:])
    if status == 0 and not finished(os.environ.get("RUN_DIR")):
        print("pod.py: another pod was stopped; this one ends to continue with it", file=sys.stderr)
        status = AGAIN
    sys.exit(status)


def torchrun(arguments):
    """Run torchrun; return the status of the worker that failed first, or 0."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.launcher import api

    StaticTCPRendezvous.next_rendezvous = meet_once(StaticTCPRendezvous.next_rendezvous)
    # When its workers have ended, torchrun waits 300 s for those of other nodes. A pod that was
    # told to stop never reports, and our ranks leave together. So 5 s are enough.
    api.LocalElasticAgent = functools.partial(api.LocalElasticAgent, exit_barrier_timeout=5)
    try:
        run.main(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status  # a signal's number is negative
    except SignalException as error:
        return 128 + error.sigval
    return 0


def meet_once(meet):
    """Let a pod meet the others once; a replaced one waits until they have been replaced too.

    The first pod may still serve an attempt that the others will give up only after a time-out. To
    it, a replaced pod would be the one it replaces.

    It is called once, as torchrun's own restarts are off.
    """

    def meet_others(self):
        while True:
            met = meet(self)
            try:
                if met.store.add(f"pod-{self.rank}", 1) == 1:
                    return met
            except RuntimeError:
                pass  # now the first pod is gone
            self._store = None
            time.sleep(1)

    return meet_others


def finished(run_dir):
    """Return whether the run's model is newer than its checkpoints, if it has any."""
    if not run_dir or not Path(run_dir, "checkpoints").exists():
        return True  # we know nothing of this script's files
    model = Path(run_dir, "model")
    return model.exists() and model.stat().st_mtime >= Path(run_dir, "checkpoints").stat().st_mtime


if __name__ == "__main__":
    main()
