"""Print what Kubernetes needs to train on some nodes: JSON, for `kubectl apply -f -`.

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

from pod import AGAIN

ROOT = Path(__file__).resolve().parents[2]
PORT = 29500
SHARED = "/shared"  # where the volume is: its folders are code, outputs and hf
KUBEFLOW = "trainer.kubeflow.org"


def parse_args(argv):
    """Return the arguments, and after them the script's."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        usage="%(prog)s [options] -- SCRIPT [its arguments]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail
    add = parser.add_argument
    add("--nodes", type=at_least(1), required=True, help="pods")
    add("--gpus-per-node", type=at_least(0), required=True, help="ranks of a pod; 0: one, no GPU")
    add("--image", required=True, help="a container image that has requirements.txt installed")
    add("--name", default="train-llm", help="of the job, and of the run's folder")
    add("--volume", default="shared", help="the claim of a volume that all nodes can write to")
    add("--cpu", help="CPU cores of a pod, such as 64")
    add("--memory", help="memory of a pod, such as 512Gi")
    add("--shm", default="16Gi", help="at most so much of the memory is for /dev/shm")
    add("--grace", type=at_least(60), default=300, help="seconds to save when asked to stop")
    add("--restarts", type=at_least(0), default=5, help="times that a pod may fail")
    add("--kubeflow", action="store_true", help="a TrainJob for Kubeflow Trainer, not a Job")
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.script = argv[end + 1 :]
    check(args)
    return args


def check(args):
    """Stop if the cluster would only find out later."""
    if not args.script:
        fail("which script? write it and its arguments at the end, after --")
    if not Path(ROOT, args.script[0]).is_file():
        fail(f"{args.script[0]}: there is no such script; name it as seen from {ROOT}")
    for word in args.script:
        if re.match(r"-e|--experiment-name(=|$)|--save-dir(=|$)", word):
            fail(f"{word}: --name NAME, before the --, says where the run is kept")
    # with the index of a pod, a name is a host's, and that has 63 letters at most
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", args.name):
        fail(f"--name {args.name}: take up to 50 of a-z, 0-9 and -, from a letter on, no - last")
    for flag, size in (("--memory", args.memory), ("--shm", args.shm), ("--cpu", args.cpu)):
        if size and not re.fullmatch(r"\d+(\.\d+)?([mkMGTP]|[KMGTP]i)?", size):
            fail(f"{flag} {size}: write a number, and a unit such as Gi")


def fail(message):
    """Stop because of what the user gave us: one line on stderr, exit status 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


def at_least(minimum):
    """Return an argument type: whole numbers that are not below `minimum`."""

    def number(text):
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {text}")
        return int(text)

    return number


def command(args):
    """Return what a pod runs: torchrun's arguments, where Kubeflow gives some by variables."""
    launch = ["python", "03-job-launchers/kubernetes/pod.py", "--rdzv-conf", "timeout=3600"]
    if not args.kubeflow:
        launch += ["--nnodes", str(args.nodes), "--nproc-per-node", str(args.gpus_per_node or 1)]
        launch += ["--node-rank", "$(JOB_COMPLETION_INDEX)"]
        launch += ["--master-addr", f"{args.name}-0.{args.name}", "--master-port", str(PORT)]
    script = [*args.script, "--experiment-name", args.name, "--save-dir", f"{SHARED}/outputs"]
    return launch + [word.replace("$(", "$$(") for word in script]  # $$( is how to write $(


def environment(args):
    """Return the variables of a pod, as Kubernetes lists them."""
    values = {
        "HF_HOME": f"{SHARED}/hf",
        "RUN_DIR": f"{SHARED}/outputs/{args.name}",  # where pod.py looks if there is a model
        # torchrun's patience with its workers; what is left is for torchrun to end in
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(args.grace - 30),
    }
    secrets = {"HF_TOKEN": "huggingface", "WANDB_API_KEY": "wandb"}
    found = [{"name": name, "value": value} for name, value in values.items()]
    for name, secret in secrets.items():
        source = {"name": secret, "key": "token", "optional": True}
        found.append({"name": name, "valueFrom": {"secretKeyRef": source}})
    return found


def container(args):
    """Return the one container of a pod."""
    wanted = {"cpu": args.cpu, "memory": args.memory}
    if args.gpus_per_node:
        wanted["nvidia.com/gpu"] = str(args.gpus_per_node)
    wanted = {name: amount for name, amount in wanted.items() if amount}
    return {
        "name": "node",  # Kubeflow looks for this name
        "image": args.image,
        "command": command(args),
        "workingDir": f"{SHARED}/code",
        "env": environment(args),
        "resources": {"requests": wanted, "limits": wanted},
        "volumeMounts": [
            {"name": "shared", "mountPath": SHARED},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def pod(args):
    """Return the specification of a pod."""
    memory = {"medium": "Memory", "sizeLimit": args.shm}  # NCCL needs more than the usual 64 MiB
    return {
        "restartPolicy": "Never",  # so that the rules below decide, and not the node
        "terminationGracePeriodSeconds": args.grace,
        "containers": [container(args)],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": args.volume}},
            {"name": "shm", "emptyDir": memory},
        ],
    }


def job(args):
    """Return the specification of a job of numbered pods: which are replaced, and when it ends."""
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]  # preempted, drained, node lost
    spec = {
        "completionMode": "Indexed",
        "backoffLimitPerIndex": args.restarts,
        "maxFailedIndexes": 0,  # no pod can train without the others
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": disrupted},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [AGAIN]}},
            ]
        },
        # rank 0 writes the model: the other pods may see it late, and their status says little
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": {"spec": pod(args)},
    }
    if not args.kubeflow:  # which counts the pods itself, and also names them
        spec |= {"completions": args.nodes, "parallelism": args.nodes}
        spec["template"]["spec"]["subdomain"] = args.name
    return spec


def plain(args):
    """Return a job, and the service that gives its pods names: NAME-0.NAME is the first."""
    service = {
        "clusterIP": "None",
        "selector": {"batch.kubernetes.io/job-name": args.name},
        "publishNotReadyAddresses": True,  # they look for each other before they are ready
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return [thing("v1", "Service", args, service), thing("batch/v1", "Job", args, job(args))]


def kubeflow(args):
    """Return a runtime, which holds the pod, and a TrainJob that says how many."""
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
        thing(version, "TrainingRuntime", args, runtime),
        thing(version, "TrainJob", args, train),
    ]


def thing(version, kind, args, spec):
    """Return an object as Kubernetes takes it."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": args.name}, "spec": spec}


def main():
    """Print all objects as one list."""
    args = parse_args(sys.argv[1:])
    items = kubeflow(args) if args.kubeflow else plain(args)
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2))


if __name__ == "__main__":
    main()
