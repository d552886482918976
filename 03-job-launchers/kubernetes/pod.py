"""Run torchrun in a pod, and exit with a status that tells Kubernetes what to do next.

job.yaml and trainjob.yaml run this script with torchrun's arguments.

torchrun itself exits with 1 for every failure of its workers. It exits with 0 both if its workers
have finished and if they have stopped on request, but after a stop the pod must start again.
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path

# The rules in job.yaml restart a pod that exits with this status (EX_TEMPFAIL of sysexits.h), and
# do not count the exit as a failure.
RETRY_STATUS = 75


def main():
    """Run torchrun, and exit with the status that torchrun() returns.

    If no worker has failed, but the run has not finished, exit with RETRY_STATUS, because the
    workers have then stopped on request.
    """
    # Handle SIGTERM from the start. Process 1 of a container ignores a signal that has no handler,
    # and torchrun sets its own handler only later.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    status = torchrun(sys.argv[1:])
    if status == 0 and not is_finished(os.environ.get("RUN_DIR")):
        print("pod.py: a different pod was stopped; exiting to restart with it", file=sys.stderr)
        status = RETRY_STATUS
    sys.exit(status)


def torchrun(arguments):
    """Run torchrun; return the status of the worker that failed first, or 0 if no worker failed.

    If a signal stops torchrun itself, return 128 + the number of the signal.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.launcher import api

    StaticTCPRendezvous.next_rendezvous = join_once(StaticTCPRendezvous.next_rendezvous)
    # When its workers have ended, torchrun waits up to 300 s for the workers of other nodes. A
    # stopped pod never reports that its workers have ended, so do not wait that long. All ranks
    # exit at the same time, so 5 s are enough.
    api.LocalElasticAgent = functools.partial(api.LocalElasticAgent, exit_barrier_timeout=5)
    try:
        run.main(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        status = error.get_first_failure()[1].exitcode
        # If a signal killed the worker, its exit code is minus the number of the signal. Return
        # 128 + the number, as a shell does.
        return status if status > 0 else 128 - status
    except SignalException as error:
        return 128 + error.sigval
    return 0


def join_once(next_rendezvous):
    """Return a `next_rendezvous` that waits until all pods of the old attempt have been replaced.

    The first pod may still run the rendezvous of the old attempt, because the pods of the old
    attempt leave this rendezvous only after a timeout. There, torchrun would mistake a new pod for
    the old pod of the same rank. So each pod counts itself in the store of the rendezvous: a count
    above 1 means that the store belongs to the old attempt.

    torchrun calls the returned function only once, because torchrun's own restarts are off.
    """

    def join_new_attempt(self):
        while True:
            rendezvous = next_rendezvous(self)
            # If the first pod, which runs the store, has ended, add() raises RuntimeError. Join
            # again after a second.
            try:
                if rendezvous.store.add(f"pod-{self.rank}", 1) == 1:
                    return rendezvous
            except RuntimeError:
                pass
            self._store = None
            time.sleep(1)

    return join_new_attempt


def is_finished(run_dir):
    """Return whether a run has finished: its final model is then newer than its checkpoints.

    Return True without `run_dir`, and for a run without checkpoints, because then no files show
    whether the run has finished.
    """
    if not run_dir or not Path(run_dir, "checkpoints").exists():
        return True
    model = Path(run_dir, "model")
    return model.exists() and model.stat().st_mtime >= Path(run_dir, "checkpoints").stat().st_mtime


if __name__ == "__main__":
    main()
