"""Write a planned setting as the configuration file of DeepSpeed or Accelerate."""

import json

import yaml

from training_step import fail

# For these flags, a framework's configuration file can express only the values in SUPPORTED.
SPLITS = ("tensor", "pipeline", "context", "expert")
SUPPORTED = {f"{name}_parallel_size": [1] for name in SPLITS}
SUPPORTED |= {"replicas": [1], "recompute": ["none", "full"]}


def config_text(args):
    """Return the text of a framework's file; exit if the file cannot express the setting."""
    framework, _ = args.write_config
    flags, supported = f"--write-config {framework}", SUPPORTED
    if framework not in WRITERS:
        fail(f"{flags}: unknown framework; choose {' or '.join(WRITERS)}")
    if framework == "accelerate":
        supported = SUPPORTED | {"weights_dtype": ["fp32"]}
    elif args.chapter == "02":
        problem = "ZeRO shards the optimizer state, but chapter 02 does not"
        fail(f"{flags} --chapter 02: {problem}; choose --chapter 04 or 05")
    for name, values in supported.items():
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value not in values:
            choices = " or ".join(map(str, values))
            fail(f"{flags} {flag} {value}: a file cannot express this value; choose {choices}")
    return WRITERS[framework](args)


def deepspeed(args):
    """Return the text of DeepSpeed's configuration file, in JSON."""
    # Use ZeRO-3 if FSDP gathers weights again for the backward pass. Use ZeRO-2 if FSDP keeps the
    # gathered weights.
    stage = 3 if args.reshard_after_forward else 2
    config = {
        "train_batch_size": args.global_batch_size,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": args.max_grad_norm,
        "zero_optimization": {"stage": stage},
    }
    if args.weights_dtype == "bf16":
        # Keep the weights in bf16, but add up their gradients in fp32. DeepSpeed's optimizer also
        # keeps a copy of the weights in fp32.
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    elif args.precision == "bf16":
        # With DeepSpeed's default list of modules, gradients of linear layers would be summed in
        # bf16, so pass an empty list.
        autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        config["torch_autocast"] = autocast
    if args.cpu_offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        # Allow torch's AdamW, because DeepSpeed would have to compile its own Adam for CPUs.
        config["zero_force_ds_cpu_optimizer"] = False
        # Offload weights only under ZeRO-3, because ZeRO-2 keeps all weights on each GPU.
        if stage == 3:
            config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if args.recompute == "full":
        config["activation_checkpointing"] = {"partition_activations": False}
    return json.dumps(config, indent=2) + "\n"


def accelerate(args):
    """Return the text of Accelerate's configuration file, in YAML.

    The file selects DDP for chapter 02, and FSDP2 for later chapters.
    """
    config = {"compute_environment": "LOCAL_MACHINE"}
    # Use MULTI_GPU on CPUs, too, because MULTI_CPU would start only one process.
    config["distributed_type"] = "MULTI_GPU" if args.chapter == "02" else "FSDP"
    config["mixed_precision"] = "bf16" if args.precision == "bf16" else "no"
    config |= {"num_machines": args.nodes, "num_processes": args.ranks, "rdzv_backend": "c10d"}
    if args.chapter != "02":
        fsdp = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": args.reshard_after_forward,
            "offload_params": args.cpu_offload,
            "activation_checkpointing": args.recompute == "full",
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": False,
        }
        config["fsdp_config"] = {f"fsdp_{name}": value for name, value in fsdp.items()}
    return yaml.safe_dump(config, sort_keys=False)


WRITERS = {"deepspeed": deepspeed, "accelerate": accelerate}
