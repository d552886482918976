"""Train a causal language model with the Hugging Face Trainer. Parent: 03-job-launchers.

Small:  torchrun --standalone --nproc-per-node 2 alternative-frameworks/trainer/train_llm.py
Real:   python tools/planner/will_it_fit.py --gpus-per-node 8 -m meta-llama/Llama-3.2-1B \
            -s 2048 --global-batch-size 64 --brief --write-config accelerate fsdp2.yaml
        accelerate launch --config_file fsdp2.yaml \
            alternative-frameworks/trainer/train_llm.py \
            -m meta-llama/Llama-3.2-1B -d roneneldan/TinyStories \
            -s 2048 --global-batch-size 64 --num-steps 5000 --compile
"""

import argparse
import bisect
import ctypes
import functools
import hashlib
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import wandb
from accelerate import DistributedType, PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from datasets.fingerprint import Hasher
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, masking_utils
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

# The name of this start of the run, as rank 0 writes it to the run's folder.
PROCESS = f"process {os.getpid()} on {socket.gethostname()}"
# The environment variables that each launcher sets to the rank, the world size and the local rank,
# in this order.
LAUNCHER_VARIABLES = {
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    "Open MPI": ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    "MPICH": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
    "srun": ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],
}


def parse_args():
    """Parse the command line, and compute the size and the number of the micro-batches."""
    adopt_launcher()
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@", allow_abbrev=False)
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.convert_arg_line_to_args = lambda line: shlex.split(line, comments=True)
    parser.error = lambda message: fail(f"{message}; docs/flags.md has the flags of each chapter")
    chapter = Path(__file__).resolve().parent.name
    add = parser.add_argument

    add("-m", "--model-name", default="tiny", help="hub id, folder, or tiny (a built-in Llama)")
    add("--config", nargs="+", default=[], metavar="NAME=VALUE", help="override model settings")
    add("--pretrained", action="store_true", help="start from the published weights")

    add("-d", "--dataset-name", default="pydoc", help="hub id, FOLDER.tokens, or pydoc")
    add("--dataset-subset", help="the subset to load, if the hub dataset has subsets")
    add("--text-column", default="text", help="the column that holds the text")
    add("-s", "--seq-length", type=positive, default=256, help="tokens per sample")

    add("--global-batch-size", type=positive, default=32, help="samples per optimizer step")
    add("-b", "--batch-size", type=positive, default=8, help="maximum samples per forward pass")
    add("--num-steps", type=positive, default=100, help="total number of optimizer steps")
    add("--lr", type=float, default=1e-3, help="peak learning rate, reached after the warmup")
    add("--warmup-steps", type=int, default=10, help="steps until the learning rate peaks")
    add("--weight-decay", type=float, default=0.1, help="decay of matrices; vectors have no decay")
    add("--max-grad-norm", type=float, default=1.0, help="maximum gradient norm; 0 means no limit")
    add("--skip-steps", type=int, default=0, help="steps whose samples are left out")
    add("--seed", type=int, default=0, help="seed for weights, data order and dropout")

    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if present")
    add("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="auto: bf16 if fast")
    add("--compile", action="store_true", help="compile the layers and the loss")
    add("--accelerate-config", help="Accelerate's config file, unless `accelerate launch` reads it")
    add("--deepspeed-config", help="DeepSpeed's config file; without it, the run uses DDP or FSDP2")

    add("-e", "--experiment-name", default=chapter, help="name of the run's folder in --save-dir")
    add("--save-dir", default="outputs", help="the folder that holds all runs")
    add("--checkpoint-every", type=positive, default=50, help="steps between checkpoints")
    add("--keep-checkpoints", type=positive, default=2, help="number of checkpoints to keep")
    add("--eval-every", type=positive, default=50, help="steps between evaluations")
    add("--eval-samples", type=positive, default=64, help="number of samples to hold out")
    add("--log-every", type=positive, default=10, help="steps between log lines")
    add("--wandb", choices=["disabled", "offline", "online"], default="disabled", help="wandb mode")
    add("--dist-timeout", type=positive, default=600, help="seconds to wait for other ranks")

    args = parser.parse_args()
    if args.device == "auto":
        # The driver creates /dev/nvidiactl, even if torch cannot use the GPU. A run with a broken
        # GPU must not continue on the CPU.
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
        has_gpu = torch.cuda.is_available() or (os.path.exists("/dev/nvidiactl") and not hidden)
        args.device = "cuda" if has_gpu else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("torch finds no working GPU; repair the driver, or pass --device cpu")
    adopt_config(args)
    if args.precision == "auto":
        # GPUs below compute capability 8.0 emulate bf16, and the emulation is slow.
        has_bf16 = args.device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        args.precision = "bf16" if has_bf16 else "fp32"
    needed = [*LAUNCHER_VARIABLES["torchrun"], "MASTER_ADDR", "MASTER_PORT"]
    if missing := [name for name in needed if not os.environ.get(name)]:
        fail(f"start this script with a launcher, such as torchrun: {missing[0]} is not set")
    num_data_ranks = int(os.environ["WORLD_SIZE"])
    # The samples that this device processes in each step.
    local_batch_size, remainder = divmod(args.global_batch_size, num_data_ranks)
    if remainder:
        problem = f"not divisible by {num_data_ranks} data-parallel ranks; choose a multiple"
        fail(f"--global-batch-size {args.global_batch_size}: {problem}")
    sizes = range(1, args.batch_size + 1)
    args.micro_batch_size = max(size for size in sizes if local_batch_size % size == 0)
    args.accumulation = local_batch_size // args.micro_batch_size
    args.wandb_id = os.urandom(4).hex()
    return args


def positive(text):
    """Convert the value of a flag to an integer; raise an error if it is below 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def adopt_config(args):
    """Set and check the environment variables that Accelerate derives from its config file."""
    if args.accelerate_config:
        # Accelerate: the launcher has already started the ranks, so the number of nodes and the
        # port in the file do not matter. Read the file as if it were for one node, and with port 0,
        # because Accelerate would warn if its default port were in use.
        words = ["--num_machines", "1", "--main_process_port", "0"]
        words += ["--config_file", args.accelerate_config, __file__]
        try:
            config, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
        except Exception as error:
            fail(f"--accelerate-config {args.accelerate_config}: {error}")
        os.environ |= prepare_multi_gpu_env(config)
    mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if mixed_precision is not None:
        precision = {"bf16": "bf16", "no": "fp32"}.get(mixed_precision)
        if precision is None:
            fail(f"mixed_precision {mixed_precision}: not supported; choose 'bf16' or 'no'")
        if args.precision not in ("auto", precision):
            problem = f"Accelerate has mixed_precision {mixed_precision}"
            fail(f"--precision {args.precision}: {problem}; change one of the two")
        args.precision = precision
    if args.device == "cpu" and os.environ.get("FSDP_OFFLOAD_PARAMS") == "true":
        fail("fsdp_offload_params true: this run uses no GPU; set it to false")


def adopt_launcher():
    """Set torchrun's variables from the variables of the launcher that started this rank."""
    for names in LAUNCHER_VARIABLES.values():
        if all(map(os.environ.get, names)):
            os.environ |= zip(LAUNCHER_VARIABLES["torchrun"], map(os.getenv, names), strict=True)
            break
    if "SLURM_STEP_NODELIST" in os.environ:
        # srun: rank 0 runs on the first node of the list. The list gpu[03-07,12] starts with gpu03.
        nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
        os.environ.setdefault("MASTER_ADDR", nodes.split(",")[0])
        # srun: derive the port from the job and step ids; each call of srun needs its own port.
        job_step = 10 * int(os.environ["SLURM_JOB_ID"]) + int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_PORT", str(10_000 + job_step % 20_000))


def setup(args):
    """Join the process group; return this rank's device and the run's folder."""
    # DDP: let Linux kill this rank when its launcher dies. Otherwise, this rank could keep training
    # and overwrite the files of the next run. The 1 is PR_SET_PDEATHSIG.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # Ctrl-C ends this rank without a traceback.
    signal.signal(signal.SIGINT, lambda *_: sys.exit("KeyboardInterrupt"))
    sys.stdout.reconfigure(line_buffering=True)
    # Let autocast run grouped_mm, which multiplies tokens by the weights of their experts, in bf16.
    for name in ("aten::_grouped_mm", "transformers::grouped_mm_fallback"):
        torch.library.register_autocast(name, args.device, torch.bfloat16)
    run_dir = Path(args.save_dir, args.experiment_name)
    run_dir.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    if args.device == "cuda":
        local_rank, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        # srun: with --gpus-per-task=1, each rank sees only its own GPU, which has index 0.
        if num_gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            local_rank = 0
        if local_rank >= num_gpus:
            fail(f"local rank {local_rank}: torch sees only {num_gpus} GPU(s); start fewer ranks")
        # DDP: without set_device(), every rank would also allocate memory on GPU 0.
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=args.dist_timeout))
    # DDP: NCCL connects the ranks in the first operation, so let all ranks take part in it.
    dist.all_reduce(torch.zeros((), device=device))
    # DDP: only rank 0 prints to stdout and talks to wandb.
    if dist.get_rank() != 0:
        sys.stdout, args.wandb = open(os.devnull, "w"), "disabled"
    check_shared(run_dir)
    print(f"training on {device} in {args.precision}")
    return device, run_dir


@functools.cache
def patient_group():
    """Return a group whose timeout is a week, because tokenizing may take hours."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


@contextmanager
def rank_first():
    """Run the body on rank 0, then on local rank 0 of the other nodes, then on the remaining ranks.

    Later ranks find the files that earlier ranks have written.
    """
    turn = (dist.get_rank() != 0) + (os.environ["LOCAL_RANK"] != "0")
    for _ in range(turn):
        wait_for_all()
    yield
    for _ in range(2 - turn):
        wait_for_all()


def wait_for_all():
    """Wait until all ranks have called this function, even if some ranks need hours."""
    try:
        dist.barrier(group=patient_group())
    except RuntimeError as error:
        # DDP: wait while the failed rank reports the reason; torchrun usually ends this rank then.
        time.sleep(10)
        sys.exit(f"another rank has failed: {error}")


def check_shared(run_dir):
    """Stop if a node cannot see the files that rank 0 writes to the run's folder."""
    if dist.get_rank() == 0:
        (run_dir / ".probe").write_text(PROCESS)
    wait_for_all()
    found = [path.read_text() for path in run_dir.glob(".probe")]
    found_by_all = [None] * dist.get_world_size()
    dist.all_gather_object(found_by_all, (socket.gethostname(), found), group=patient_group())
    if hosts := {host for host, found in found_by_all if found != found_by_all[0][1]}:
        fail(f"--save-dir: {', '.join(hosts)} cannot see {run_dir.resolve()}; use a shared folder")


def stop_requests(run_dir):
    """Yield, before each step, whether the run should stop after that step.

    SIGTERM, SIGUSR1 or SIGHUP on any rank requests a stop, and so does a file named `stop` in the
    run's folder, or a newer start of the same run. An all-reduce gives all ranks the same answer.
    The all-reduce runs in the background during the previous step, so that the ranks rarely wait
    for the answer.
    """
    received, newest = [], run_dir / "newest-start"
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    # A `stop` file that already exists was meant for an earlier run.
    (run_dir / "stop").unlink(missing_ok=True)
    if dist.get_rank() == 0:
        (run_dir / ".probe").rename(newest)
    stop = False
    while True:
        if dist.get_rank() == 0 and newest.exists() and newest.read_text() != PROCESS:
            print(f"{run_dir}: {newest.read_text()} has started the same run; this process stops")
            received.append(newest)
        requested = received or (dist.get_rank() == 0 and (run_dir / "stop").exists())
        any_requested = torch.tensor(bool(requested), dtype=torch.int32)
        exchange = dist.all_reduce(any_requested, dist.ReduceOp.MAX, patient_group(), async_op=True)
        yield stop
        exchange.wait()
        stop = bool(any_requested)


def fail(message):
    """Report a user error in one line on stderr, and exit with status 2."""
    # DDP: let rank 0 report an error that all ranks have; the launcher then ends this rank. If only
    # this rank has the error, this rank reports it after the wait.
    if os.environ.get("RANK", "0") != "0":
        time.sleep(10)
    print(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def hash_of(*values):
    """Hash the values, in their order, into 64 bits."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little")


# ---- model -----------------------------------------------------------------------------------
@rank_first()
def build_tokenizer_and_config(args):
    """Load the tokenizer and the configuration of `--model-name`, and apply `--config`."""
    try:
        if args.model_name == "tiny":
            # ByT5's tokens are bytes, so its tokenizer needs no vocabulary file.
            tokenizer = transformers.ByT5Tokenizer()
            settings = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": len(tokenizer)}
            settings |= {"num_hidden_layers": 4, "num_attention_heads": 4, "bos_token_id": None}
            config = transformers.LlamaConfig(**settings, eos_token_id=tokenizer.eos_token_id)
        else:
            tokenizer = AutoTokenizer.from_pretrained(args.model_name)
            config = AutoConfig.from_pretrained(args.model_name)
            if getattr(config, "quantization_config", None):
                raise ValueError("its weights are quantized; choose a model with bf16 weights")
            # Train only the text part of a multimodal model.
            config = config.get_text_config(decoder=True)
        if args.config:
            config.update_from_string(",".join(args.config))
            # Drop layer_types, so that from_dict() derives it from the new number of layers.
            items = config.to_dict().items()
            config = config.from_dict({key: value for key, value in items if key != "layer_types"})
        if getattr(config, "output_router_logits", False):
            raise ValueError("no router loss is added; pass --config output_router_logits=false")
    except (OSError, ValueError) as error:
        fail(f"--model-name {' '.join([args.model_name, *args.config])}: {error}")
    if len(tokenizer) < 2 or tokenizer.eos_token_id is None:
        fail(f"--model-name {args.model_name}: needs a tokenizer with an end-of-text token")
    # A tokenizer may leave out numbers, so its highest token id may be above its number of tokens.
    if (highest_id := max(tokenizer.get_vocab().values())) >= config.vocab_size:
        fail(f"--model-name {args.model_name}: vocab_size must exceed token id {highest_id}")
    args.config_fingerprint = hash_of(config.to_diff_dict() | {"transformers_version": None})
    return tokenizer, config


def build_model(args, config):
    """Build the model on the CPU, so that its initial weights do not depend on the device."""
    torch.manual_seed(args.seed)
    if args.pretrained:
        model = load_pretrained(args, config)
    else:
        # Skip random initialization in the constructors; init_weights() initializes all weights.
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.init_weights()
    model.loss_function = next_token_loss

    # In every forward pass, transformers asks the device whether samples hold several packed
    # sequences, and the host has to wait for the answer. Here, the answer is always no.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None

    # layer.compile() keeps the names of the weights; torch.compile(layer) would change the names.
    # With dynamic=False, torch compiles a separate graph for each input shape.
    if args.compile:
        for layer in layers_of(model):
            layer.compile(dynamic=False)
        model.loss_function = torch.compile(model.loss_function, dynamic=False)
    return model


def load_pretrained(args, config):
    """Load the published weights of `--model-name`; stop if a weight is missing."""
    name, options = args.model_name, {"dtype": torch.float32, "use_safetensors": True}
    load = functools.partial(AutoModelForCausalLM.from_pretrained, output_loading_info=True)
    try:
        model, loading = load(name, config=config, **options)
    except Exception as error:
        # Each kind of damaged file raises a different type of exception.
        fail(f"--pretrained: cannot read the safetensors files of {name}: {error!r:.300}")
    # Stop if a weight is missing, because it would start with random values.
    if missing := loading["missing_keys"]:
        fail(f"--pretrained: {name} lacks {min(missing)} ({len(missing)} weights); check its files")
    # transformers does not tie two weights if the files have different values for them.
    for key in model.get_expanded_tied_weights_keys().keys() - model.all_tied_weights_keys.keys():
        fail(f"--pretrained: the files do not tie {key}; pass --config tie_word_embeddings=false")
    return model.train()


def check_causal(args, model, device):
    """Stop if a token attends to later tokens, because the model would see what it predicts."""
    # These two sequences differ only in their second half.
    batch = torch.arange(16, device=device).repeat(2, 1)
    batch[1, 8:] = 0
    model.eval()
    # Do not compile graphs for these short sequences.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = model(input_ids=batch, use_cache=False).logits[:, :8]
    model.train()
    if (logits[0] - logits[1]).abs().max() > 1e-3 * logits.std():
        fail(f"--model-name {args.model_name}: tokens see later tokens; choose a causal model")


def layers_of(model):
    """Return the decoder layers, which in transformers share a base class."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def next_token_loss(logits, labels):
    """Return the mean cross entropy of predicting each token from the tokens before it.

    The shape of `logits` is [batch, sequence, vocabulary], that of `labels` [batch, sequence].
    """
    # The last position has no next token; cross_entropy() ignores the target -100.
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# ---- data ------------------------------------------------------------------------------------
@rank_first()
def build_data(args, tokenizer):
    """Return the training samples, and a [samples, seq_length] tensor of held-out samples."""
    pieces = pieces_of(args, tokenizer)
    piece = next(pieces, torch.empty(0, args.seq_length))
    if len(piece) <= args.eval_samples:
        fail(f"--eval-samples {args.eval_samples}: there are only {len(piece)} samples; lower it")
    piece, held_out = piece.tensor_split([-args.eval_samples])
    args.dataset_fingerprint = hash_of(len(piece), piece[:: 1 + len(piece) // 100].tolist())
    return Samples(args.seed, piece, pieces), held_out


class Samples:
    """Hold an endless sequence of training samples; each epoch has every sample once.

    The samples come in pieces. Each piece is shuffled on its own, differently in each epoch.
    """

    def __init__(self, seed, first_piece, later_pieces):
        self.seed, self.pieces, self.later_pieces = seed, [first_piece], later_pieces
        # The positions in an epoch where each piece begins, and where the last piece ends.
        self.starts = [0, len(first_piece)]

    def __getitem__(self, position):
        # Load pieces until a piece holds this position, or until there are no more pieces.
        while position >= self.starts[-1] and (piece := next(self.later_pieces, None)) is not None:
            self.pieces.append(piece)
            self.starts.append(self.starts[-1] + len(piece))
        epoch, position = divmod(position, self.starts[-1])
        number = bisect.bisect(self.starts, position) - 1
        shuffle, num_samples = epoch * len(self.pieces) + number, len(self.pieces[number])
        order = random_order(self.seed, shuffle, num_samples)
        return self.pieces[number][order[position - self.starts[number]]]


@functools.lru_cache(maxsize=2)
def random_order(seed, shuffle, num_samples):
    """Return a random order of the samples of a piece, different for each `shuffle`."""
    generator = torch.Generator().manual_seed(hash_of(seed, shuffle))
    return torch.randperm(num_samples, generator=generator).numpy()


def pieces_of(args, tokenizer):
    """Yield the samples of one token file, or of each piece in a folder that prepare.py writes."""
    folder = Path(args.dataset_name)
    if folder.suffix != ".tokens":
        yield map_samples(token_file(args, tokenizer), torch.int32, args.seq_length)
        return
    if not (folder / "index.json").exists():
        fail(f"--dataset-name {folder}: no index.json; write it with preparing-data/prepare.py")
    index = json.loads((folder / "index.json").read_text())
    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id])
    if index["tokenizer"] != hashlib.sha256(vocabulary.encode()).hexdigest()[:16]:
        fail(f"--dataset-name {folder}: was prepared with a different tokenizer; prepare it again")
    if kind := index.get("kind"):
        fail(f"--dataset-name {folder}: holds {kind}; train on it with fine-tuning/{kind}")
    # A process of prepare.py writes part k of n: the pieces k, k + n, k + 2n, ... until it ends.
    number, num_ended, num_parts = 0, 0, index["parts"]
    while num_ended < num_parts:
        path, part = folder / f"{number:06}.tokens", folder / f"part-{number % num_parts}.json"
        state = json.loads(part.read_text()) if part.exists() else {"ended": False}
        if path.exists():
            yield map_samples(path, getattr(torch, index["dtype"]), args.seq_length)
            number, num_ended = number + 1, 0
        elif state["ended"] and number // num_parts >= state["pieces"]:
            number, num_ended = number + 1, num_ended + 1
        else:
            print(f"waiting for {path}; is prepare.py running?", flush=True)
            time.sleep(10)


def map_samples(path, dtype, seq_length):
    """Return the samples in a token file as a memory-mapped [samples, seq_length] tensor."""
    size = path.stat().st_size // dtype.itemsize // seq_length * seq_length
    return torch.from_file(str(path), size=size, dtype=dtype).view(-1, seq_length)


def token_file(args, tokenizer):
    """Tokenize all documents into one int32 file, unless it exists; return the file's path."""
    documents = load_documents(args)
    # Split a control token that a text quotes, such as </s>, into ordinary tokens.
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    key = Hasher.hash([documents.cache_files, args.text_column, tokenizer, options])
    path = Path(datasets.config.HF_DATASETS_CACHE, f"{key}.tokens")
    if path.exists():
        return path
    # Two runs may write this file at the same time, so add a random id to the temporary name.
    partial = path.with_suffix(f".{args.wandb_id}")
    with open(partial, "wb") as file:
        for batch in tqdm(documents.iter(1000), "tokenizing", disable=None):
            if None in batch[args.text_column]:
                fail(f"--text-column {args.text_column}: a row has no text; prepare.py can skip it")
            for ids in tokenizer(batch[args.text_column], **options)["input_ids"]:
                np.array([*ids, tokenizer.eos_token_id], dtype=np.int32).tofile(file)
    return partial.rename(path)


def load_documents(args):
    """Return a dataset with one document per row."""
    name = args.dataset_name
    if name == "pydoc":
        return datasets.Dataset.from_generator(lambda: ({"text": text} for text in topics.values()))
    if os.path.exists(name):
        words = ["prepare.py", "-m", args.model_name, "-o", f"{Path(name).stem}.tokens", name]
        fail(f"--dataset-name {name}: prepare it: python preparing-data/{shlex.join(words)}")
    load = functools.partial(datasets.load_dataset, name, args.dataset_subset, split="train")
    try:
        documents = load()
        # Load text files again, because blank lines separate their documents.
        if documents.builder_name == "text":
            documents = load(sample_by="paragraph")
    except Exception as error:
        # The datasets library raises many exception types, and often hides the reason in __cause__.
        fail(f"--dataset-name {name}: {error.__cause__ or error}")
    if args.text_column not in documents.column_names:
        fail(f"--text-column {args.text_column}: no such column; choose {documents.column_names}")
    return documents


class OrderedSamples(torch.utils.data.Dataset):
    """Hold all samples of a run in training order; the Trainer assigns them to ranks and steps."""

    def __init__(self, args, samples):
        self.args, self.samples = args, samples

    def __len__(self):
        return self.args.num_steps * self.args.global_batch_size

    def __getitem__(self, position):
        step = 1 + position // self.args.global_batch_size
        # DDP: wait for the piece that contains the step's last sample, because collectives time
        # out.
        _ = self.samples[position_of(self.args, step + 1) - 1]
        # With --skip-steps, the first sample of the run is not at position 0.
        tokens = self.samples[position_of(self.args, 1) + position].long()
        return {"input_ids": tokens, "labels": tokens}


def position_of(args, step):
    """Return the position of the first sample of a step, counted over all epochs."""
    return (step - 1 + args.skip_steps) * args.global_batch_size


# ---- one step --------------------------------------------------------------------------------
class StepTrainer(transformers.Trainer):
    """Compute the loss as chapter 03 does, and record the loss of each step."""

    # Trainer: let the Trainer divide each mean loss by the number of micro-batches.
    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(input_ids=inputs["input_ids"], use_cache=False)
        loss = self.model.loss_function(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        # Trainer: record each loss here, because the Trainer itself logs only a mean over steps.
        self.guide.loss += loss
        return loss


class GuideCallback(transformers.TrainerCallback):
    """Log, check for bad gradients, stop on request and save, as main() does in chapter 03."""

    def __init__(self, args, run_dir, wandb_run, start):
        self.args, self.run_dir, self.wandb_run = args, run_dir, wandb_run
        # The first interval includes compilation, so its speed is not logged.
        self.interval_start = start + 1, None
        self.stops, self.interval_ended = stop_requests(run_dir), False

    def on_train_begin(self, args, state, control, optimizer, lr_scheduler, **_):
        """Replace the checkpoint's hyperparameters with the values from the command line."""
        state.compute_steps(args, args.max_steps)
        lr_scheduler.base_lrs = [args.learning_rate for _ in lr_scheduler.base_lrs]
        factor = lr_scheduler.lr_lambdas[0](lr_scheduler.last_epoch)
        decays = [args.weight_decay, 0.0]
        for group, weight_decay in zip(optimizer.param_groups, decays, strict=False):
            group |= {"lr": args.learning_rate * factor, "weight_decay": weight_decay}
        # Trainer: the Trainer logs the learning rate from _last_lr, so update _last_lr too.
        lr_scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]

    def on_step_begin(self, _, state, control, **__):
        if self.interval_ended:
            self.interval_start = state.global_step + 1, time.perf_counter()
            self.interval_ended = False
        self.stop, self.loss = next(self.stops), torch.zeros((), device=self.args.device)
        torch.manual_seed(hash_of(self.args.seed, state.global_step + 1, dist.get_rank()))

    def on_step_end(self, _, state, control, **__):
        control.should_save |= self.stop
        control.should_training_stop |= self.stop
        control.should_log |= control.should_evaluate or control.should_save

    def on_log(self, _, state, control, logs, model, **__):
        step = state.global_step
        if "loss" in logs:
            # ZeRO: if a gradient is not finite, DeepSpeed skips the update and continues, so check
            # whether it has skipped a step.
            skipped = getattr(self.trainer.deepspeed, "skipped_steps", 0)
            if skipped or not math.isfinite(logs["grad_norm"]):
                first = self.interval_start[0]
                fail(f"a gradient in steps {first} to {step} was not finite; lower --lr")
            train_set = self.trainer.train_dataset.samples
            start = self.interval_start
            self.row = measure(self.args, model, train_set, step, self.loss, logs, *start)
            self.interval_ended = True
        elif "eval_loss" in logs:
            row = self.row if step > 0 else {"step": 0}
            self.row = row | {"val_loss": logs["eval_loss"]}
        if "eval_loss" in logs or ("loss" in logs and not control.should_evaluate):
            log(self.run_dir, self.wandb_run, self.row)

    def on_save(self, args, state, control, **_):
        # Trainer: all ranks write files to the folder, so wait for all ranks before renaming it.
        wait_for_all()
        partial = Path(args.output_dir, f"checkpoint-{state.global_step}")
        save_checkpoint(self.args, self.run_dir, partial, state.global_step)


def load_zero_settings(args):
    """Load the settings of `--deepspeed-config`; return None if the run does not use DeepSpeed."""
    path = args.deepspeed_config
    if not path:
        return None
    # ZeRO: import deepspeed here, so that runs without DeepSpeed do not need it.
    import deepspeed

    # ZeRO: keep DeepSpeed from compiling its all-reduce for CPUs, which would take minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        settings = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        fail(f"--deepspeed-config {path}: {error}")
    for name in {"optimizer", "scheduler", "fp16", "activation_checkpointing"} & settings.keys():
        fail(f"--deepspeed-config {path}: {name} is not supported; remove it")
    if not settings.get("zero_optimization", {}).get("stage"):
        fail(f"--deepspeed-config {path}: ZeRO is off; choose stage 1, 2 or 3")
    has_bf16 = any(settings.get(name, {}).get("enabled") for name in ("bf16", "torch_autocast"))
    precision = "bf16" if has_bf16 else "fp32"
    if precision != args.precision:
        problem = f"its precision is {precision}, not {args.precision}"
        fail(f"--deepspeed-config {path}: {problem}; change it or the flags")
    # ZeRO: in stage 3, make the Trainer save the full model in each checkpoint. By default, it
    # would save a second copy of the shards instead.
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return settings


def build_trainer(args, run_dir, guide, model, train_set, held_out):
    """Build the Trainer with the settings that reproduce chapter 03."""
    uses_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    zero_settings = load_zero_settings(args)
    if args.device == "cpu":
        # Accelerate: FSDP2 needs MULTI_GPU even on CPUs; with MULTI_CPU, Accelerate would silently
        # use DDP.
        kind = DistributedType.MULTI_GPU if uses_fsdp else DistributedType.MULTI_CPU
        kind = DistributedType.DEEPSPEED if zero_settings else kind
        PartialState(cpu=True).distributed_type = kind
    # Trainer: the Trainer repeats samples to fill an incomplete last batch. If possible, choose a
    # batch size for evaluation that leaves no incomplete batch.
    num_ranks = dist.get_world_size()
    sizes = range(1, args.micro_batch_size + 1)
    eval_sizes = [size for size in sizes if args.eval_samples % (size * num_ranks) == 0]
    settings = transformers.TrainingArguments(
        output_dir=partial_of(run_dir / "model"),
        max_steps=args.num_steps,
        per_device_train_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=args.accumulation,
        # OrderedSamples already shuffles the samples, so the Trainer must not shuffle them again.
        train_sampling_strategy="sequential",
        learning_rate=args.lr,
        adam_beta2=0.95,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=args.warmup_steps,
        seed=args.seed,
        use_cpu=args.device == "cpu",
        # ZeRO: do not pass bf16=True together with torch_autocast, because DeepSpeed would then
        # keep the weights in bf16.
        bf16=args.precision == "bf16" and "torch_autocast" not in (zero_settings or {}),
        logging_steps=args.log_every,
        # Trainer: by default, the Trainer hides a loss that is not finite; log this loss too.
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=args.eval_every,
        eval_on_start=guide.interval_start[0] == 1,
        per_device_eval_batch_size=max(eval_sizes, default=1),
        prediction_loss_only=True,
        save_steps=args.checkpoint_every,
        ddp_find_unused_parameters=False,
        deepspeed=zero_settings,
        accelerator_config={
            "use_configured_state": args.device == "cpu",
            # FSDP2: reduce gradients in each micro-batch, so that no rank accumulates full
            # gradients.
            "gradient_accumulation_kwargs": {"sync_each_batch": uses_fsdp},
        },
        disable_tqdm=True,
    )
    trainer = StepTrainer(
        model,
        settings,
        train_dataset=OrderedSamples(args, train_set),
        eval_dataset=[{"input_ids": row.long(), "labels": row.long()} for row in held_out],
        callbacks=[guide],
    )
    trainer.guide, guide.trainer = guide, trainer
    trainer.remove_callback(transformers.PrinterCallback)
    if uses_fsdp and args.precision == "bf16":
        # Accelerate: reduce the gradients in fp32; by default, FSDP2 reduces them in bf16.
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    return trainer


# ---- checkpoint ------------------------------------------------------------------------------
def partial_of(folder):
    """Create an empty temporary folder beside `folder`; publish() renames it to `folder`."""
    partial = folder.with_name(".partial")
    if dist.get_rank() == 0:
        # A run that was killed during a save may have left files behind.
        delete(partial)
        partial.mkdir(parents=True, exist_ok=True)
    # Trainer: all ranks write to the temporary folder, so wait until rank 0 has created it.
    wait_for_all()
    return partial


def delete(folder):
    """Delete a folder if it exists; if it is a symbolic link, delete only the link."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def publish(args, partial, folder):
    """Flush `partial` to disk, rename it to `folder`, and delete the oldest checkpoints."""
    for path in (*partial.rglob("*"), partial):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    # The folder may hold the model of an earlier export.
    delete(folder)
    partial.rename(folder)
    for checkpoint in sorted(folder.parent.glob("step-????????"))[: -args.keep_checkpoints]:
        # Rename a checkpoint before deleting it, so that a kill leaves no half-deleted checkpoint.
        delete(checkpoint.rename(partial))


@rank_first()
def save_checkpoint(args, run_dir, partial, step):
    """Add args.json to the folder that the Trainer has written, and publish the folder."""
    if dist.get_rank() != 0:
        return
    (partial / "args.json").write_text(json.dumps(vars(args)))
    checkpoint = run_dir / f"checkpoints/step-{step:08}"
    checkpoint.parent.mkdir(exist_ok=True)
    publish(args, partial, checkpoint)


def load_checkpoint(args, run_dir):
    """Return the newest checkpoint and its step, or None and 0 for a new run.

    trainer.train() loads the checkpoint later.
    """
    checkpoint = max((run_dir / "checkpoints").glob("step-????????"), default=None)
    # DDP: all ranks load the checkpoint that rank 0 has found.
    found = [checkpoint]
    dist.broadcast_object_list(found, group=patient_group())
    checkpoint = found[0]
    if checkpoint is None:
        return None, 0
    compare_args(args, json.loads((checkpoint / "args.json").read_text()), checkpoint)
    print(f"continuing from {checkpoint}")
    return checkpoint, int(checkpoint.name.removeprefix("step-"))


def compare_args(args, saved_args, checkpoint):
    """Stop if an argument that must stay the same has changed; print all other changes."""
    args.wandb_id = saved_args["wandb_id"]
    args.skip_steps = args.skip_steps or saved_args.get("skip_steps", 0)
    fixed = ["config_fingerprint", "dataset_fingerprint", "seq_length", "global_batch_size", "seed"]
    for name, saved_value in saved_args.items():
        if (value := getattr(args, name, saved_value)) != saved_value:
            change = f"{checkpoint}: {name} was {saved_value}, is now {value}"
            if name in fixed:
                fail(f"{change}; choose a different --experiment-name")
            print(change)


def export_model(args, run_dir, trainer, tokenizer):
    """Write the finished model to a folder that `from_pretrained` can load."""
    # Trainer: at its end, train() reads the folder that partial_of() deletes, so wait until all
    # ranks have left train().
    wait_for_all()
    partial = partial_of(run_dir / "model")
    # Accelerate: with FSDP2, all ranks must call get_state_dict(), but only rank 0 gets the full
    # weights.
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if dist.get_rank() != 0:
        return
    # Trainer: the Trainer has turned use_cache off. Turn it on again, because generation without a
    # cache is slow.
    trainer.model.config.use_cache = True
    trainer.model.save_pretrained(partial, state_dict=weights)
    tokenizer.save_pretrained(partial)
    publish(args, partial, run_dir / "model")
    (run_dir / f"finished-{args.num_steps}").touch()


# ---- main ------------------------------------------------------------------------------------
# Peak bf16 TFLOP/s without sparsity, from the vendors' data sheets.
PEAK_TFLOPS = {"A100-SXM4-80GB": 312, "H100 80GB HBM3": 989, "H200": 989, "B200": 2250}
PEAK_TFLOPS |= {"L40S": 362, "H100 PCIe": 756, "GH200 480GB": 989, "AMD Instinct MI300X": 1307}


def mfu(args, model, tokens_per_second):
    """Return the model FLOPs utilization (PaLM, appendix B, arxiv.org/abs/2204.02311).

    Return None if the speed is unknown, if PEAK_TFLOPS does not list the device, or if the
    precision is not bf16.
    """
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    peak = PEAK_TFLOPS.get(device_name.removeprefix("NVIDIA "))
    if peak is None or tokens_per_second is None or args.precision != "bf16":
        return None
    config, heads = model.config, getattr(model.config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads))
    flops_per_token = 12 * config.num_hidden_layers * width * args.seq_length
    # A token uses only a few of a layer's experts, which transformers stacks into one weight.
    num_used = getattr(config, "num_experts_per_tok", None) or 1
    for module in [model.get_output_embeddings(), *layers_of(model)]:
        for name, weight in module.named_parameters():
            # ZeRO: stage 3 empties the tensor of each weight, and stores its shape in ds_shape.
            shape = getattr(weight, "ds_shape", weight.shape)
            is_stacked = "experts" in name.split(".") and len(shape) > 1
            flops_per_token += 6 * shape.numel() * (num_used / shape[0] if is_stacked else 1)
    return tokens_per_second * flops_per_token / (peak * 1e12 * dist.get_world_size())


def measure(args, model, train_set, step, loss, logs, first_step, start_time):
    """Return the metrics of `step`; loss.item() makes the host wait for the device."""
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    epoch = (position_of(args, step + 1) - 1) // train_set.starts[-1]
    row = {"step": step, "epoch": epoch, "loss": loss.item(), "grad_norm": logs["grad_norm"]}
    tokens = (step - first_step + 1) * args.global_batch_size * args.seq_length
    speed = tokens / (time.perf_counter() - start_time) if start_time else None
    # On Linux, the unit of ru_maxrss is KiB.
    host_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = torch.cuda.max_memory_allocated() if args.device == "cuda" else host_memory
    row |= {"lr": logs["learning_rate"], "tokens_per_second": speed, "mfu": mfu(args, model, speed)}
    return row | {"peak_memory_gib": memory / 2**30}


def start_tracking(args, run_dir):
    """Start a wandb run, or continue the wandb run whose id is in the checkpoint."""
    options = {"id": args.wandb_id, "name": args.experiment_name, "resume": "allow"}
    wandb_run = wandb.init(config=vars(args), dir=run_dir, mode=args.wandb, **options)
    # Plot each metric against the "step" in its row. By default, wandb numbers the rows itself, so
    # steps that a resume repeats would look like new steps.
    wandb_run.define_metric("*", step_metric="step")
    return wandb_run


def log(run_dir, wandb_run, row):
    """Append `row` to metrics.jsonl, and send `row` to wandb and stdout.

    After a resume, metrics.jsonl may have several rows for a step; the last row is valid.
    """
    if dist.get_rank() != 0:
        return
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    wandb_run.log(row)
    known = {name: value for name, value in row.items() if value is not None}
    try:
        tqdm.write("  ".join(f"{name} {value:,.6g}" for name, value in known.items()))
    except OSError:
        # DDP: the terminal is closed. Print to nowhere, because an error would end all ranks.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@record
def main():
    """Train the model; if the run has a checkpoint, continue from the newest checkpoint."""
    args = parse_args()
    _, run_dir = setup(args)
    tokenizer, config = build_tokenizer_and_config(args)
    train_set, held_out = build_data(args, tokenizer)
    model = build_model(args, config)
    check_causal(args, model, torch.device("cpu"))
    checkpoint, start = load_checkpoint(args, run_dir)
    if start >= args.num_steps and (run_dir / f"finished-{start}").exists():
        print(f"{run_dir} is already finished, at step {start}")
        return

    # DDP: keep torch.compile from splitting a layer's graph at the ends of gradient buckets.
    torch._dynamo.config.optimize_ddp = False
    wandb_run = start_tracking(args, run_dir)
    guide = GuideCallback(args, run_dir, wandb_run, start)
    trainer = build_trainer(args, run_dir, guide, model, train_set, held_out)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    step = trainer.state.global_step
    if step < args.num_steps:
        print(f"stopped at step {step}; run the same command to continue")
        wandb_run.finish()
        return

    export_model(args, run_dir, trainer, tokenizer)
    print(f"finished: {run_dir} has the model, the metrics and the last checkpoints")
    wandb_run.finish()


if __name__ == "__main__":
    main()
    # DDP: after --help, @record makes main() return before setup() has created a process group.
    if dist.is_initialized():
        # DDP: keep every rank alive until all ranks have finished.
        wait_for_all()
        dist.destroy_process_group()
