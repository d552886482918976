"""Describe a training step of a chapter: the shapes of the model's weights, and the setting.

memory.py adds up the bytes of this step, and step_time.py adds up its seconds. Functions of the
newest chapter's script determine which weights a rank holds.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import moe

from setting import ExpertShape, Model, UnsupportedModelError

# On the meta device, torch knows the shapes of grouped_mm() in bf16 only, so make transformers
# compute experts in a loop.
moe._can_use_grouped_mm = lambda *_: False
# Let autocast compute experts on the CPU in bf16, as the scripts of chapters 01 to 03 do.
torch.library.register_autocast("transformers::grouped_mm_fallback", "cpu", torch.bfloat16)
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {path.parent.name[:2]: path for path in sorted(ROOT.glob("[0-9][0-9]-*/train_llm.py"))}
# This cache lets model_of() build each model only once.
BUILT_MODELS = {}


def fail(message):
    """Stop because of a user's mistake: print one line on stderr, and exit with status 2."""
    line = f"{Path(sys.argv[0]).name}: error: {' '.join(message.split())}"
    print(line, file=sys.stderr, flush=True)
    sys.exit(2)


def at_least(minimum):
    """Return a function that converts a flag's text to a finite number of at least `minimum`."""

    def number(text):
        value = type(minimum)(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {text}")
        return value

    # argparse prints this name if the text is not a number.
    number.__name__ = type(minimum).__name__
    return number


def refuse(message):
    """Raise an exception with a chapter's message; the planner can then try other chapters."""
    raise UnsupportedModelError(message)


# ---- the chapters' scripts -------------------------------------------------------------------


@functools.cache
def load_chapter(name):
    """Import a script by its short name: "05" is a chapter, and "lora" is fine-tuning/lora.

    Return the module. Replace its functions that need the hub, the values of tensors, masks in
    memory, or other ranks.
    """
    module = import_script(SCRIPTS.get(name, ROOT / f"fine-tuning/{name}/train_llm.py"))
    module.fail = fail
    # Search a model for its layers and experts only once, because a large model has many modules.
    for name in {"layers_of", "experts_of"} & vars(module).keys():
        setattr(module, name, functools.cache(getattr(module, name)))
    # Do not save the random state for recomputation, because fake tensors have no random state. A
    # real random state needs almost no memory.
    if hasattr(module, "recompute"):
        module.recompute = functools.partial(module.recompute, preserve_rng_state=False)
    # On a GPU, attention needs no mask in memory, so let a single number stand in for the mask.
    module.causal_lower_right = lambda *shape: torch.zeros(()).expand(shape)
    # The result of an all-to-all is as large as its input, so replace it with a local reshape.
    module.all_to_all = lambda mesh, tensor: torch.cat(tensor.chunk(mesh.size(), 1), 2)
    return module


def import_script(path):
    """Import a script as a module; replace functions that need the hub or the values of tensors."""
    spec = importlib.util.spec_from_file_location("script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Replace the loaders, because configurations may come from configs/, which has no tokenizers.
    module.AutoConfig = SimpleNamespace(from_pretrained=lambda name: find_config(name)[0])
    module.AutoTokenizer = SimpleNamespace(from_pretrained=tokenizer_of)
    # Derive the need for a mask from the configuration, because fake tensors have no values to
    # compare.
    module.needs_mask = needs_mask
    return module


def newest_chapter():
    """Return the module of the newest chapter's script, which supports every kind of split."""
    return load_chapter(max(SCRIPTS))


def needs_mask(setting, model):
    """Return whether a layer of the model needs a mask for samples of the setting's length."""
    window = getattr(model.config, "sliding_window", None) or setting.seq_length
    uses_sdpa = model._supports_attention_backend and model.config._attn_implementation == "sdpa"
    return not uses_sdpa or setting.seq_length > window


def check_split(setting, model):
    """Raise an error if the newest chapter cannot split the model as `setting` specifies.

    The planner checks masks and split sequences later, when the layers run on fake tensors.
    """
    chapter = newest_chapter()
    no_masks = mock.patch.object(chapter, "needs_mask", return_value=False)
    with mock.patch.object(chapter, "fail", refuse), no_masks:
        chapter.check_model(setting.changed(context_parallel_size=1), model.built)


def balanced(dispatch, wait=lambda: None):
    """Return a version of chapter 09's dispatch() for fake tensors, which have no values.

    Assume that each rank sends an equal number of tokens to each of the ranks that spread the
    experts; the first rank also gets the remainder. Call `wait` where the host would wait for the
    device to count the tokens.
    """

    def dispatch_evenly(mesh, num_local_experts, run_experts, hidden, indices, weights):
        num_sent = [indices.numel() // mesh.size()] * mesh.size()
        num_sent[0] += indices.numel() % mesh.size()

        def read(_):
            wait()
            return num_sent, num_sent

        with mock.patch.object(FakeTensor, "tolist", read):
            return dispatch(mesh, num_local_experts, run_experts, hidden, indices, weights)

    return dispatch_evenly


def simulate_ranks():
    """Make this process rank 0 of a group of simulated ranks, whose collectives do nothing."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=4096, store=FakeStore())


def mesh_of(ranks):
    """Return a device mesh with one dimension; the list `ranks` names its simulated ranks."""
    simulate_ranks()
    with unset_fake_temporarily():
        return DeviceMesh("cpu", ranks)


def parse_training_args(words, ranks, script=None):
    """Parse the arguments of a script as rank 0 of `ranks` ranks with GPUs.

    Without `script`, use the script of the newest chapter.
    """
    launcher = {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    launcher |= {"MASTER_ADDR": "none", "MASTER_PORT": "0"}
    with (
        mock.patch.dict(os.environ, launcher, clear=True),
        mock.patch.object(sys, "argv", [sys.argv[0], *words]),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
    ):
        return (script or newest_chapter()).parse_args()


# ---- the model's shapes ----------------------------------------------------------------------


def load_config(args):
    """Return the model's configuration, and a text that names its origin, such as a path.

    --model-name in `args` names the model, and --config changes the configuration.
    """
    # Call the function without its decorator, which would make ranks wait for each other.
    _, config = newest_chapter().build_tokenizer_and_config.__wrapped__(args)
    source = "built in" if args.model_name == "tiny" else find_config(args.model_name)[1]
    return config, source


def tokenizer_of(name):
    """Return the tokenizer of a model, or a stand-in if this machine lacks the tokenizer."""
    with contextlib.suppress(Exception):
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
        # Ignore an empty tokenizer, which transformers makes from a folder without a tokenizer.
        if len(tokenizer) > 1:
            return tokenizer
    stand_in = transformers.ByT5Tokenizer()
    if not Path(name).exists():
        # Assume that the tokenizer on the hub has a token for each row of the embedding.
        vocabulary_size = find_config(name)[0].get_text_config(decoder=True).vocab_size
        stand_in.get_vocab = lambda: {"": vocabulary_size - 1}
    return stand_in


def find_config(name):
    """Return a model's configuration, and a text that names its source; read no weights.

    The configurations under configs/ take precedence over a download from the hub, so that
    planning needs neither a network nor a login.
    """
    if Path(name).exists():
        return AutoConfig.from_pretrained(name), name
    if name.endswith(".json"):
        raise FileNotFoundError("file not found; check the path")
    with contextlib.suppress(OSError, ValueError):
        return AutoConfig.from_pretrained(name, local_files_only=True), "the cache of the hub"
    for shape in ROOT.glob("0*/configs/*.json"):
        if name.rpartition("/")[2].lower().startswith(shape.stem):
            source = f"{shape.relative_to(ROOT)}; the hub was not asked"
            return AutoConfig.from_pretrained(shape), source
    # Without a network, this request fails at once, whereas transformers would retry.
    try:
        huggingface_hub.model_info(name, timeout=4)
    except Exception as error:
        raise OSError(f"the hub does not give this model ({error})") from error
    return AutoConfig.from_pretrained(name), "the hub"


def model_of(config, tp_size=1):
    """Return a Model with the shapes of the weights on one of `tp_size` tensor-parallel ranks.

    Build each model only once.
    """
    key = (config.to_json_string(use_diff=False), tp_size)
    if key not in BUILT_MODELS:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        split_matrices(model, tp_size)
        BUILT_MODELS[key] = shapes_in(model, model.modules())
    return BUILT_MODELS[key]


def split_matrices(model, tp_size):
    """Split the weights of a model across `tp_size` ranks in place, as chapters 06 to 09 do."""
    if tp_size > 1:
        newest_chapter().split_matrices(model, model.modules(), mesh_of(list(range(tp_size))))
        model.tie_weights()


def shapes_in(model, modules):
    """Return a Model with the shapes of the weights in `modules`."""
    modules, layers = list(modules), set(newest_chapter().layers_of(model))
    layers = [module for module in modules if module in layers]
    in_layers = {weight for layer in layers for weight in layer.parameters()}
    direct_weights = (module.parameters(recurse=False) for module in modules)
    # Tied weights occur twice. A dict drops the second occurrence and keeps the order.
    unique_weights = dict.fromkeys(itertools.chain(*direct_weights))
    all_experts = newest_chapter().experts_of(model)
    types = {weight: ExpertShape for experts in all_experts for weight in experts.parameters()}

    def shapes_of(weights):
        return [types.get(weight, tuple)(local(weight).shape) for weight in weights]

    return Model(
        config=model.config,
        layers=[shapes_of(layer.parameters()) for layer in layers],
        root=shapes_of(weight for weight in unique_weights if weight not in in_layers),
        built=model,
    )


def local(tensor):
    """Return the first rank's part of a tensor, or the tensor itself if it is not split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stages_of(setting):
    """Return a list with a Model for each rank of a pipeline.

    With tensor parallelism, a Model has the shapes of the weights of one tensor-parallel rank.
    """
    model, ranks = setting.model, setting.pipeline_parallel_size
    if setting.tensor_parallel_size > 1:
        model = model_of(model.config, setting.tensor_parallel_size)
    return split_stages(model, setting.model_name, ranks, setting.num_stages)


@functools.cache
def split_stages(model, model_name, ranks, num_stages):
    """Split a model into `num_stages` stages; return a Model for each of the `ranks` ranks."""
    if ranks == 1:
        return [model]
    args = SimpleNamespace(model_name=model_name, num_stages=num_stages)
    args.pipeline_parallel_size = ranks
    # Set the sizes of all other splits to 1, because only the stages matter here.
    args.tensor_parallel_size = args.context_parallel_size = args.expert_parallel_size = 1
    args.expert_balance_rate, args.expert_balance_loss, args.seq_length = 0.0, 0.0, 1
    chapter = newest_chapter()
    with mock.patch.object(chapter, "fail", refuse), contextlib.redirect_stdout(None):
        chapter.check_model(args, model.built)
        stages = chapter.split_into_stages(args, model.built)
    modules_by_rank = [itertools.chain(*stages[rank::ranks]) for rank in range(ranks)]
    return [shapes_in(model.built, modules) for modules in modules_by_rank]


@functools.cache
def active_numbers(model):
    """Count the elements of the layers' weights, without the experts that a token does not use."""
    num_used, total = getattr(model.config, "num_experts_per_tok", None) or 1, 0
    for layer in newest_chapter().layers_of(model.built):
        for name, weight in layer.named_parameters():
            # In a weight of the shape [experts, ...], count only the experts that a token uses.
            is_stacked = "experts" in name.split(".") and weight.ndim > 1
            total += num_used * weight[0].numel() if is_stacked else weight.numel()
    return total
