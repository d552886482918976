"""Write the numbers of a plan as text, for the command line and for the planner's form."""

GIB = 2**30


def checkpoint_text(args, plan):
    """Return the size of a checkpoint, and the time of a save, as text."""
    size = plan["checkpoint"] / 1e9
    seconds, rate = size / args.storage_gbs, args.storage_gbs
    return f"a checkpoint: {grouped(size, '.4g')} GB, {grouped(seconds, '.0f')} s at {rate:g} GB/s"


def speed_text(args, plan):
    """Return the speed of a plan as text, with the time and the cost of the run."""
    speed = plan["speed"]
    rate = grouped(speed["tokens_per_second"], ".0f")
    text = f"{rate} tokens/s per GPU, {speed['mfu']:.1%} MFU, "
    text += f"{speed['exposed']:.1%} of a step waits for communication"
    days = args.tokens / speed["tokens_per_second"] / args.ranks / 86400
    is_long = days >= 0.1
    time = f"{grouped(days, '.2f')} days" if is_long else f"{grouped(1440 * days, '.1f')} minutes"
    signal = f"SBATCH_SIGNAL=B:USR1@{plan['stop_seconds']}"
    return f"{text}, {time} for {cost_text(args, plan)}; under Slurm: {signal}"


def cost_text(args, plan):
    """Return the number of tokens, the GPU-hours and the price of the run as text.

    Leave out the price if no price per GPU-hour is given.
    """
    hours, millions = args.tokens / plan["speed"]["tokens_per_second"] / 3600, args.tokens / 1e6
    is_large = millions >= 1e3
    count = grouped(millions / 1e3 if is_large else millions, ".4g")
    text = f"{count} {'billion' if is_large else 'million'} tokens"
    text += f", {grouped(hours, '.1f')} GPU-hours"
    if args.dollars_per_gpu_hour:
        text += f", {grouped(hours * args.dollars_per_gpu_hour, '.2f')} dollars"
    return text


def grouped(value, layout):
    """Return a number as text in the format `layout`, with a comma between groups of three digits.

    MicroPython, which runs this module in a browser, puts commas only into integers.
    """
    text = ("{:" + layout + "}").format(value)
    integer, point, decimals = text.partition(".")
    return f"{int(integer):,}{point}{decimals}" if abs(value) >= 1000 else text


def text_of(size):
    """Format a number of bytes in GiB, or in MiB if it is below 0.1 GiB."""
    if not size:
        return "0"
    if abs(size) < GIB / 10:
        return f"{grouped(size / 2**20, '.2f')} MiB"
    return f"{grouped(size / GIB, '.2f')} GiB"


def verdict(plan, sizes=False):
    """Return "fits", or "tight" or "no" with the names of the memories that cause this verdict.

    "no" names each memory that is too small. "tight" names each memory whose free part is smaller
    than a tenth of the size that the plan needs. With `sizes`, also give the size of the missing or
    free part.
    """
    margins = {name: plan[f"{name}_margin"] for name in ("gpu", "host")}
    too_small = [name for name, size in margins.items() if size < 0]
    tight = [name for name, size in margins.items() if size < plan[f"{name}_needs"] / 10]
    word, by, names = ("no", "by", too_small) if too_small else ("tight", "has", tight)
    words = [f"{name} {by} {text_of(abs(margins[name]))}" if sizes else name for name in names]
    return f"{word}: {', '.join(words).replace('gpu', 'GPU')}" if names else "fits"


def needs_text(plan):
    """Return the verdict of a layout, and the memory that a GPU and a host need, as text."""
    needs = [text_of(plan[name + "_needs"]) + " per " + name for name in ("gpu", "host")]
    return f"{verdict(plan, sizes=True)}; {', '.join(needs).replace('gpu', 'GPU')}"


def launcher(args):
    """Return the torchrun part of the command that starts the ranks on each node."""
    if args.nodes == 1:
        return f"torchrun --standalone --nproc-per-node {args.gpus_per_node}"
    nodes = f"torchrun --nnodes {args.nodes} --nproc-per-node {args.gpus_per_node}"
    return f"{nodes} --rdzv-backend c10d --rdzv-id my-run --rdzv-endpoint node1:29400"
