"""Print a Kubernetes manifest for training on several nodes, as JSON for `kubectl apply -f -`.

Here:      python 03-job-launchers/kubernetes/manifest.py --nodes 2 --gpus-per-node 0 \
               --image IMAGE -- 03-job-launchers/train_llm.py
For real:  python 03-job-launchers/kubernetes/manifest.py --nodes 4 --gpus-per-node 8 \
               --image IMAGE -- 03-job-launchers/train_llm.py \
               -m meta-llama/Llama-3.2-1B -d roneneldan/TinyStories | kubectl apply -f -

It needs nothing but Python.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from pod import RETRY_STATUS

ROOT = Path(__file__).resolve().parents[2]
PORT = 29500
# The mount point of the volume, which has the folders code, outputs and hf.
SHARED = "/shared"
KUBEFLOW = "trainer.kubeflow.org"


def parse_args(argv):
    """Parse and check the options, and the script's command line after the `--`."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        usage="%(prog)s [options] -- SCRIPT [its arguments]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail
    add = parser.add_argument
    add("--nodes", type=int, required=True, help="number of nodes; each node runs one pod")
    add("--gpus-per-node", type=int, required=True, help="one rank per GPU; 0: one rank on a CPU")
    add("--image", required=True, help="a container image with requirements.txt installed")
    add("--name", default="train-llm", help="the name of the job and of the run's folder")
    add("--volume", default="shared", help="PersistentVolumeClaim that all nodes can write to")
    add("--cpu", help="CPU cores per pod, such as 64")
    add("--memory", help="memory per pod, such as 512Gi")
    add("--shm", default="16Gi", help="maximum size of /dev/shm, which counts as memory of the pod")
    add("--grace", type=int, default=300, help="seconds that a stopped pod has for its save")
    add("--restarts", type=int, default=5, help="number of failures that each pod may have")
    add("--kubeflow", action="store_true", help="print a TrainJob for Kubeflow Trainer, not a Job")
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.script = argv[end + 1 :]
    check(args)
    return args


def check(args):
    """Refuse arguments that the cluster would refuse later."""
    for name, minimum in {"nodes": 1, "gpus_per_node": 0, "grace": 60, "restarts": 0}.items():
        value = getattr(args, name)
        if value < minimum:
            fail(f"--{name.replace('_', '-')} {value}: must be at least {minimum}")
    if not args.script:
        fail("no script given; add -- and the script with its arguments to the end")
    if not Path(ROOT, args.script[0]).is_file():
        fail(f"{args.script[0]}: no such script; give its path relative to {ROOT}")
    for word in args.script:
        if re.match(r"-e|--experiment-name(=|$)|--save-dir(=|$)", word):
            fail(f"{word}: not allowed after the --; choose the run's folder with --name before it")
    # Kubernetes appends the pod's index to this name, and uses the result as the pod's host name. A
    # host name has at most 63 characters.
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", args.name):
        rules = "use at most 50 of a-z, 0-9 and -; begin with a letter, and do not end with -"
        fail(f"--name {args.name}: not a valid name; {rules}")
    for flag, size in (("--memory", args.memory), ("--shm", args.shm), ("--cpu", args.cpu)):
        if size and not re.fullmatch(r"\d+(\.\d+)?([mkMGTP]|[KMGTP]i)?", size):
            fail(f"{flag} {size}: not a quantity; write a number and a unit, such as 16Gi")


def fail(message):
    """Report a user error in one line on stderr, and exit with status 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


def command(args):
    """Return the command of a pod: pod.py with torchrun's arguments, then the script."""
    launch = ["python", "03-job-launchers/kubernetes/pod.py", "--rdzv-conf", "timeout=3600"]
    # Kubeflow sets these arguments with environment variables.
    if not args.kubeflow:
        launch += ["--nnodes", str(args.nodes), "--nproc-per-node", str(args.gpus_per_node or 1)]
        launch += ["--node-rank", "$(JOB_COMPLETION_INDEX)"]
        launch += ["--master-addr", f"{args.name}-0.{args.name}", "--master-port", str(PORT)]
    script = [*args.script, "--experiment-name", args.name, "--save-dir", f"{SHARED}/outputs"]
    # Kubernetes replaces $(NAME) with the value of a variable, and $$( with $(. So double the $ of
    # the script's own arguments.
    return launch + [word.replace("$(", "$$(") for word in script]


def environment(args):
    """Return the environment variables of a pod, in the form that Kubernetes reads."""
    values = {
        "HF_HOME": f"{SHARED}/hf",
        # pod.py looks for the finished model in this folder.
        "RUN_DIR": f"{SHARED}/outputs/{args.name}",
        # When Kubernetes stops the pod, torchrun gives its workers this number of seconds to save,
        # then kills them. torchrun then has 30 s left to exit.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(args.grace - 30),
    }
    variables = [{"name": name, "value": value} for name, value in values.items()]
    secrets = {"HF_TOKEN": "huggingface", "WANDB_API_KEY": "wandb"}
    for name, secret in secrets.items():
        source = {"name": secret, "key": "token", "optional": True}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": source}})
    return variables


def container(args):
    """Return the one container of a pod."""
    resources = {"cpu": args.cpu, "memory": args.memory}
    if args.gpus_per_node:
        resources["nvidia.com/gpu"] = str(args.gpus_per_node)
    resources = {name: amount for name, amount in resources.items() if amount}
    return {
        "name": "node",  # Kubeflow requires this name
        "image": args.image,
        "command": command(args),
        "workingDir": f"{SHARED}/code",
        "env": environment(args),
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [
            {"name": "shared", "mountPath": SHARED},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def pod(args):
    """Return the specification of a pod."""
    # NCCL needs a larger /dev/shm than the usual 64 MiB.
    shm = {"medium": "Memory", "sizeLimit": args.shm}
    return {
        # The failure policy of the job decides about restarts, not the node.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": args.grace,
        "containers": [container(args)],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": args.volume}},
            {"name": "shm", "emptyDir": shm},
        ],
    }


def job(args):
    """Return the specification of a job with numbered pods, which are replaced when they fail."""
    # A pod has this condition if it was preempted, or if its node was drained or lost.
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    spec = {
        "completionMode": "Indexed",
        "backoffLimitPerIndex": args.restarts,
        # No pod can train without the others, so one failed index fails the job.
        "maxFailedIndexes": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": disrupted},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [RETRY_STATUS]}},
            ]
        },
        # Only rank 0's pod knows whether the run is finished, because rank 0 writes the model. The
        # other pods may see the model late.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": {"spec": pod(args)},
    }
    # Kubeflow sets the number of pods, and their names.
    if not args.kubeflow:
        spec |= {"completions": args.nodes, "parallelism": args.nodes}
        spec["template"]["spec"]["subdomain"] = args.name
    return spec


def plain_objects(args):
    """Return a Job, and a Service that gives its pods host names; the first is NAME-0.NAME."""
    service = {
        "clusterIP": "None",
        "selector": {"batch.kubernetes.io/job-name": args.name},
        # The pods look up each other's names before they are ready.
        "publishNotReadyAddresses": True,
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return [
        kubernetes_object("v1", "Service", args, service),
        kubernetes_object("batch/v1", "Job", args, job(args)),
    ]


def kubeflow_objects(args):
    """Return a TrainingRuntime that describes the pods, and a TrainJob that sets their number."""
    node = {"metadata": {"labels": {f"{KUBEFLOW}/trainjob-ancestor-step": "trainer"}}}
    node["spec"] = job(args)
    runtime = {
        "mlPolicy": {"numNodes": args.nodes, "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": node}]}},
    }
    train = {
        "runtimeRef": {"apiGroup": KUBEFLOW, "kind": "TrainingRuntime", "name": args.name},
        "trainer": {"numNodes": args.nodes, "numProcPerNode": args.gpus_per_node or 1},
    }
    version = f"{KUBEFLOW}/v1alpha1"
    return [
        kubernetes_object(version, "TrainingRuntime", args, runtime),
        kubernetes_object(version, "TrainJob", args, train),
    ]


def kubernetes_object(version, kind, args, spec):
    """Return a Kubernetes object with the name of the job."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": args.name}, "spec": spec}


def main():
    """Print all objects as one list."""
    args = parse_args(sys.argv[1:])
    items = kubeflow_objects(args) if args.kubeflow else plain_objects(args)
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2))


if __name__ == "__main__":
    main()
