"""Tokenize documents or conversations into a folder of pieces for the training scripts.

Here:      python preparing-data/prepare.py -m tiny -o outputs/pydoc.tokens pydoc
A file:    python preparing-data/prepare.py -m MODEL -o notes.tokens notes.txt
Mixed:     python preparing-data/prepare.py -m MODEL -o mix.tokens web:0.8 code:0.2
Chats:     python preparing-data/prepare.py --conversations -m MODEL -s 4096 -o chats.tokens chats
On nodes:  sbatch --array=0-7 --wrap "python preparing-data/prepare.py -m MODEL -o mix.tokens web"

Each piece, such as `000007.tokens`, holds `--piece` tokens. It has this name only once it is
complete, so a training run may read the pieces while more are written. Part k of n writes the
pieces k, k + n, and so on; the last piece of a part may be shorter. The documents, the tokenizer
and the arguments other than --workers determine the content of each piece. After a kill, start the
same command again: it continues with the piece that it was writing.
"""

import argparse
import codecs
import csv
import ctypes
import hashlib
import io
import json
import lzma
import os
import random
import re
import shlex
import signal
import string
import sys
import time
import uuid
from collections import Counter, deque, namedtuple
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime
from functools import cache, partial
from itertools import accumulate, chain, groupby, takewhile
from multiprocessing import get_context
from operator import eq
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow
import pyarrow.parquet

# index.json records this version of the format, so that no folder mixes pieces of two versions.
FORMAT = 2
# At most this number of a source's shards are open at a time. Each document comes from a random
# open shard.
OPEN_SHARDS = 16
# A worker tokenizes a batch of at most this number of texts at a time.
BATCH = 256
# A worker packs a batch of at most this number of conversations or pairs at a time.
PACKED_BATCH = 1000
# These flags are upper bits of a token. FIRST marks the first token of a document. CONTEXT marks a
# token that the model reads but does not learn.
FIRST = 1 << 30
CONTEXT = 1 << 29
# Map the roles in data sets to the roles in chat templates. The last four roles are ShareGPT's.
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
# A chat template must not leave out the texts under these keys of an answer.
TEXTS = ("content", "reasoning_content", "reasoning", "thinking")
# If a turn has 0 or false under one of these keys, the model does not learn the turn.
LEARNED = ("weight", "train", "trainable", "loss_mask")
# Tokenizers without a chat template, such as those of most base models, get this template.
CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages -%}
{{ message.role }}:
{{ message.content }}{{ eos_token if message.role == "assistant" }}
{% endfor %}{{ "assistant:\n" if add_generation_prompt }}"""
# By default, use one worker if all sources together have fewer than this number of bytes, because
# starting processes would cost more time than the processes save.
SMALL = 2**26
# To notice that a file has changed, hash three of its blocks, each with this number of bytes.
BLOCK = 2**16
FORMATS = ("jsonl", "json", "txt", "parquet", "csv", "tsv")
COMPRESSIONS = {"gz": "gzip", "bz2": "bz2", "zst": "zstd", "xz": "xz"}
# The name of a data file has a stem, perhaps a number such as -00000-of-00012, a format, and
# perhaps a compression.
NAME = re.compile(
    r"(?P<stem>.+?)([-_.]\d+(-of-\d+)?(-[0-9a-f]+)?)?"
    rf"\.(?P<format>{'|'.join(FORMATS)})(\.(?P<compression>{'|'.join(COMPRESSIONS)}))?"
)
# Skip these files of a folder: hidden files, descriptions of the data, and pieces that this program
# has written.
NO_DATA = re.compile(
    r"(.*/)?(\..*|[^/]*\.tokens/.*|[^/]*\.md|(readme|license)(\.\w+)?|dataset_(infos?|dict)\.json)"
)
# If a file or a subfolder of a source is named train, skip the files and subfolders with the
# following names, because they hold documents for evaluation.
HELD_OUT = {"test", "validation", "valid", "val", "dev", "eval"}
# This pattern matches SOURCE or SOURCE:WEIGHT; a weight is a number such as 2, 0.25 or 1e-3.
WEIGHTED = re.compile(r"(.*?)(?::(\d*\.?\d+(?:[eE][-+]?\d+)?))?")
# A shard is a part of a source. It has a name, a size in bytes (0 if the size is unknown), a hash
# of its content, and a function that yields its records.
Shard = namedtuple("Shard", "name size content read")
# A source has a number, a name, its share of the tokens, and its shards. A source with the share 0
# is read once; any other source repeats its documents.
Source = namedtuple("Source", "number name share shards")
# A source begins with this state; batches_of() explains the values.
BEGINNING = {"pass": 0, "batch": 0, "shards": 0, "open": []}


def parse_args():
    """Parse and check the command line; return the arguments."""
    options = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], **options)
    parser.error = fail
    add = parser.add_argument
    add(
        "sources", nargs="+", metavar="SOURCE[:WEIGHT]", help="file, folder, hub id[/subset], pydoc"
    )
    add("-o", "--output", type=Path, required=True, help="folder to write, FOLDER.tokens")
    model = "model whose tokenizer to use: hub id, local folder, or tiny"
    add("-m", "--model-name", default="tiny", help=model)
    column = "column with the text (default: text), or the turns (messages or conversations)"
    add("--text-column", default=argparse.SUPPRESS, help=column)
    add = parser.add_mutually_exclusive_group().add_argument
    options = {"dest": "kind", "action": "store_const", "default": "text"}
    conversations = "pack conversations, and mark the answers"
    add("--conversations", const="conversations", help=conversations, **options)
    pairs = "pack pairs of a chosen and a rejected answer"
    add("--preferences", const="preferences", help=pairs, **options)
    add = parser.add_argument
    add("-s", "--seq-length", type=int, default=256, help="tokens in a packed sample")
    add("--piece", type=int, default=2**28, metavar="TOKENS", help="tokens in a piece")
    workers = "number of processes that tokenize; 0: one per core, or a thread for small sources"
    add("--workers", type=int, default=0, help=workers)
    add("--seed", type=int, default=0, help="seed of the order of the documents")
    add("--part", type=part_of, default=slurm_part(), metavar="K/N", help="part K, from 0, of N")
    add("--skip-bad", action="store_true", help="leave out documents that cannot be read")
    args = parser.parse_args()
    if args.output.suffix != ".tokens":
        fail(f"--output {args.output}: must end in .tokens; use --output {args.output}.tokens")
    args.text_column = getattr(args, "text_column", "text" if args.kind == "text" else None)
    if args.kind != "text":
        # Round --piece down to a multiple of --seq-length, because a packed sample must not
        # continue in the next piece.
        args.piece -= args.piece % max(1, args.seq_length)
    for name, minimum in {"seq_length": 2, "piece": 1, "workers": 0}.items():
        if getattr(args, name) < minimum:
            option = name.replace("_", "-")
            fail(f"--{option} {getattr(args, name)}: must be at least {minimum}")
    return args


def num_cores():
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def part_of(text):
    """Convert the text `k/n` to the numbers (k, n)."""
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: must be K/N, with K from 0 to N - 1")
    return int(part), int(parts)


def slurm_part():
    """Return `k/n` for the part that this task of a Slurm array writes; outside an array, `0/1`."""
    get = os.environ.get
    part = int(get("SLURM_ARRAY_TASK_ID", 0)) - int(get("SLURM_ARRAY_TASK_MIN", 0))
    return f"{part}/{get('SLURM_ARRAY_TASK_COUNT', 1)}"


def fail(problem):
    """Print the problem in one line on stderr, and exit with status 2."""
    print(f"prepare.py: error: {problem}", file=sys.stderr, flush=True)
    sys.exit(2)


# ---- documents -------------------------------------------------------------------------------
def match_name(path):
    """Return the match of a file's name with NAME, or None if the format of the file is unknown."""
    return NAME.fullmatch(path.name.lower())


def open_decompressed(path):
    """Return a stream of a file's decompressed bytes; skip a UTF-8 byte order mark at the start."""
    compression = COMPRESSIONS.get(match_name(path)["compression"])
    if compression == "xz":
        stream = lzma.open(path)
    else:
        stream = pyarrow.input_stream(path, compression=compression)
    file = io.BufferedReader(stream)
    if file.peek(3).startswith(codecs.BOM_UTF8):
        file.read(3)
    return file


def files_of(folder):
    """Return the files in a folder and its subfolders that, by their names, have training data.

    Print the number of files that are left out, and the names of at most three of them. This number
    does not include files that match NO_DATA.
    """
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = sorted(path.relative_to(folder) for path in paths)
    names = [name for name in names if not NO_DATA.fullmatch(str(name).lower())]
    files = [name for name in names if (folder / name).is_file() and match_name(name)]
    if any("train" in words_of(name) for name in files):
        files = [name for name in files if not HELD_OUT & words_of(name)]
    if left := sorted({*names} - {*files}):
        shown = ", ".join(map(str, left[:3])) + ", ..." * (len(left) > 3)
        count = f"{len(left)} of {len(names)} files"
        print(f"{folder}: left out {count} (unknown format or held-out split): {shown}")
    return [folder / name for name in files]


def words_of(name):
    """Return the words of a file's path that may be the name of a split, such as `test`."""
    return {*map(str.lower, name.parent.parts), match_name(name)["stem"]}


def shard_of(path):
    """Return a file as a Shard, with a hash of the file's first, middle and last block."""
    size, content = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        for start in (0, size // 2, size - BLOCK):
            file.seek(max(0, start))
            content.update(file.read(BLOCK))
    return Shard(str(path), size, content.hexdigest(), partial(records_of, path))


def records_of(path, column):
    """Yield (number, record) for each record of a file, such as a row of a table or a paragraph.

    In a Parquet file or a JSON array, the number counts records, from 1; in other files, it counts
    lines.
    """
    kind = match_name(path)["format"]
    if kind == "parquet":
        table = pyarrow.parquet.ParquetFile(path)
        columns = [column] if column in table.schema_arrow.names else None
        batches = table.iter_batches(1000, columns=columns)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
        return
    with open_decompressed(path) as file:
        if kind == "txt":
            yield from paragraphs_of(file, column)
        elif kind in ("csv", "tsv"):
            yield from rows_of(file, "," if kind == "csv" else "\t")
        elif kind == "json" and file.peek(1).lstrip()[:1] == b"[":
            yield from enumerate(json.load(file), 1)
        else:
            yield from ((line, record) for line, record in enumerate(file, 1) if record.strip())


def paragraphs_of(file, column):
    """Yield (number, {column: paragraph}) for each paragraph of a text.

    Blank lines separate paragraphs. The number is the line number of the paragraph's first line.
    """
    for is_blank, lines in groupby(enumerate(file, 1), lambda numbered: numbered[1].isspace()):
        if not is_blank:
            numbers, texts = zip(*lines, strict=True)
            yield numbers[0], {column: b"".join(texts).rstrip(b"\r\n")}


def rows_of(file, delimiter):
    """Yield (number, row) for each row of a table; the row ends in the line with this number.

    If a row has more or fewer fields than the header, yield a ValueError in place of the row.
    """
    csv.field_size_limit(2**31 - 1)
    # Accept bytes that are not UTF-8 here, so that text_of() rejects only the rows that contain
    # such bytes.
    lines = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
    problem = "more or fewer fields than the header; put quotes around each text"
    for row in rows:
        # DictReader stores surplus fields under the key None, and stores None for a missing field.
        has_all = None not in row and None not in row.values()
        yield rows.line_num, row if has_all else ValueError(problem)


def pydoc_records(column):
    """Yield (number, {column: text}) for each topic of the documentation that Python contains."""
    yield from enumerate(({column: text} for text in topics.values()), 1)


def letters_records(_):
    """Yield (number, record) for 5,000 records whose prompts ask to sort six letters.

    Each record has a right and a wrong answer.
    """
    generator = random.Random(0)
    for number in range(1, 5001):
        given = generator.choices(string.ascii_lowercase, k=6)
        up, down = "".join(sorted(given)), "".join(sorted(given, reverse=True))
        row = {"prompt": f"Sort {''.join(given)}", "completion": up}
        yield number, row | {"chosen": up, "rejected": down}


def row_of(record):
    """Return a record as a dictionary; raise ValueError if the record is not a JSON object.

    If reading has failed, the record is an exception; then raise this exception.
    """
    if isinstance(record, Exception):
        raise record
    if isinstance(record, bytes):
        record = json.loads(record)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def text_of(row, column):
    """Return the text in a column of a row; raise ValueError if the column has no valid text."""
    if column not in row:
        raise ValueError(f"no column {column}; choose --text-column from: {', '.join(row)}")
    text = row[column]
    if isinstance(text, str):
        # Restore the bytes that rows_of() has stored as surrogates, so that decode() rejects them
        # below. For any other surrogate, encode() raises an error.
        text = text.encode(errors="surrogateescape")
    if not isinstance(text, bytes):
        raise ValueError(f"column {column} holds {text!r:.80} instead of text")
    return text.decode()


def sources_of(args):
    """Return a list of Source tuples for the names on the command line.

    With weights, each name becomes a Source; the share of the Source is the weight of the name,
    divided by the sum of all weights. Without weights above 0, all names become a single Source
    with the share 0.
    """
    weights = {}
    for word in args.sources:
        # If a file or folder with this name exists, do not split the name, because the name itself
        # may end in a colon and a number.
        name, weight = (word, 0) if os.path.exists(word) else WEIGHTED.fullmatch(word).groups()
        if os.path.abspath(name) in map(os.path.abspath, weights):
            fail(f"{name}: given twice; give each source once")
        weights[name] = float(weight or 0)
    if not any(weights.values()):
        return [Source(0, " ".join(weights), 0, [*chain(*map(shards_of, weights))])]
    if missing := [name for name, weight in weights.items() if not weight]:
        fail(f"{missing[0]}: has no weight above 0; give each source a weight, or omit all weights")
    total = sum(weights.values())
    return [
        Source(number, name, weight / total, shards_of(name))
        for number, (name, weight) in enumerate(weights.items())
    ]


def batches_of(args, source, state):
    """Yield (state before the batch, batch) for each batch of a source; begin at `state`.

    A batch is a list of tuples (number of the shard, number of the line, record). Up to OPEN_SHARDS
    shards are open at a time, and each record comes from a random open shard. Each of n parts reads
    every n-th shard or, if the source has fewer than n shards, every n-th record of each shard.

    A state has the number of the pass over the documents, the number of the batch in this pass, and
    the number of shards that this pass has opened. A state also has a pair for each open shard: the
    shard's number, and the number of its records that come before the batch. At the end of a source
    that does not repeat, yield an empty batch.
    """
    part, parts = args.part
    by_shard = len(source.shards) >= parts
    numbers = range(len(source.shards))[part::parts] if by_shard else range(len(source.shards))

    def records_of_part(number, used):
        """Yield the records of this part that come after the first `used` records of a shard.

        Yield pairs: the number of the record in the shard, counted from 1, and the record's tuple
        for the batch.
        """
        # For conversations and pairs, read all columns, because each row may need several columns.
        column = args.text_column if args.kind == "text" else None
        for index, (line, record) in enumerate(until_error(source.shards[number].read(column))):
            if index >= used and (by_shard or index % parts == part):
                yield index + 1, (number, line, record)

    num_passes, batch, num_opened = state["pass"], state["batch"], state["shards"]
    used = dict(state["open"])
    readers = {number: records_of_part(number, used[number]) for number in used}
    while source.share or not num_passes:
        state = {"pass": num_passes, "batch": batch, "shards": num_opened, "open": [*used.items()]}
        # Seed the order of the shards with numbers, not with names, so that the order stays the
        # same if the shards move to a different folder.
        key, order = f"{args.seed} {source.number} {num_passes}", [*numbers]
        random.Random(key).shuffle(order)
        choose, records = random.Random(f"{key} {batch}"), []
        while len(records) < (BATCH if args.kind == "text" else PACKED_BATCH):
            for number in order[num_opened : num_opened + OPEN_SHARDS - len(used)]:
                used[number], readers[number] = 0, records_of_part(number, 0)
                num_opened += 1
            if not used:
                break
            number = choose.choice([*used])
            try:
                used[number], record = next(readers[number])
                records.append(record)
            except StopIteration:
                del used[number], readers[number]
        batch += 1
        if not used and num_opened == len(order):
            if not records and batch == 1 and source.share:
                fail(f"{source.name}: too few documents for {parts} parts; start fewer parts")
            num_passes, batch, num_opened = num_passes + 1, 0, 0
        yield state, records
    yield BEGINNING | {"pass": num_passes}, []


def until_error(records):
    """Yield the records; if reading fails or finds no record, yield an error as the last record."""
    line = 0
    try:
        for line, record in records:
            yield line, record
        if not line:
            raise ValueError("it has no documents")
    except Exception as error:
        yield f"{line + 1} or later" if line else "", ValueError(reason_of(error))


def reason_of(error):
    """Return an exception as one line: its type, unless the type is ValueError, and its message."""
    name = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())


def shards_of(name):
    """Return the shards of `name`, which is a file, a folder, a hub dataset, or built-in data."""
    path = Path(name)
    if name == "pydoc":
        text = "".join(topics.values()).encode()
        return [Shard(name, len(text), hashlib.sha256(text).hexdigest(), pydoc_records)]
    if name == "letters":
        return [Shard(name, 1, "", letters_records)]
    # Do not call path.exists(), because an empty name would exist: Path("") is the current folder.
    if os.path.exists(name):
        files = [path] if path.is_file() and match_name(path) else files_of(path)
        if not files:
            endings = ", ".join(f".{ending}" for ending in FORMATS)
            fail(f"{name}: no file with documents; give {endings} files, compressed or not")
        with ThreadPoolExecutor() as pool:
            return list(pool.map(shard_of, files))
    # Import datasets only here, because each worker imports this file, and the import of datasets
    # takes seconds.
    import datasets

    datasets.disable_progress_bars()
    dataset, _, subset = name.rpartition("/") if name.count("/") > 1 else (name, "", None)
    load = partial(datasets.load_dataset, dataset, subset, split="train", streaming=True)
    try:
        stream = load()
        # By default, datasets makes each line of a text file a document. Load text files again, so
        # that each paragraph is a document.
        if stream.info.builder_name == "text":
            stream = load(sample_by="paragraph")
    except Exception as error:
        fail(
            f"{name}: no such file or folder, and the hub gives no dataset of this name; "
            f"check the name: {reason_of(error)}"
        )

    def read(number, _):
        return enumerate(stream.shard(num_shards=stream.num_shards, index=number), 1)

    numbers = range(stream.num_shards)
    return [Shard(f"{name}, shard {number}", 0, "", partial(read, number)) for number in numbers]


# ---- tokens ----------------------------------------------------------------------------------
class FixedDate(datetime):
    """Give chat templates a fixed date, so that the tokens do not depend on today's date."""

    @classmethod
    def now(cls):
        return cls(2024, 7, 26)


@cache
def load_tokenizer(name):
    """Return a model's tokenizer; if the tokenizer has no chat template, give it CHAT_TEMPLATE."""
    # Unless torch is already imported, hide it from transformers, and turn off the warning about
    # it: no tokenizer needs torch, and the import of torch takes seconds.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    torch = sys.modules.setdefault("torch", None)
    import transformers

    if not torch:
        del sys.modules["torch"]
    transformers.utils.chat_template_utils.datetime = FixedDate
    tiny, from_pretrained = transformers.ByT5Tokenizer, transformers.AutoTokenizer.from_pretrained
    tokenizer = tiny() if name == "tiny" else from_pretrained(name)
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    return tokenizer


def fingerprint_of(tokenizer):
    """Return a hash of a tokenizer's vocabulary and of its end-of-text token."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    text = json.dumps([vocabulary, tokenizer.eos_token_id])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def num_workers(sources):
    """Return the number of workers: 1 for sources known to be small, and otherwise 1 per core."""
    sizes = [shard.size for source in sources for shard in source.shards]
    return 1 if all(sizes) and sum(sizes) < SMALL else num_cores()


def start_workers(args):
    """Return an executor that runs tokenize() in processes or, for a single worker, in a thread."""
    if args.workers == 1:
        return ThreadPoolExecutor(1)
    # Let each process tokenize with one thread, because by default each core has its own process.
    os.environ["RAYON_NUM_THREADS"] = "1"
    return ProcessPoolExecutor(args.workers, get_context("spawn"), initializer=start_worker)


def start_worker():
    """Ignore Ctrl-C, which the parent handles; on Linux, end this worker when the parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def tokenize(args, records):
    """Tokenize records, and return (tokens, ends, problems, counts).

    `tokens` joins the tokens of all documents, and `ends` has the position after each document's
    last token. Here, a packed sample is a document. `problems` has a tuple (shard, line, reason)
    for each record that cannot be used. `counts` has the numbers that report() prints about packed
    samples.
    """
    tokenizer, units, problems, counts = load_tokenizer(args.model_name), [], [], Counter()
    for shard, line, record in records:
        try:
            row = row_of(record)
            if args.kind == "text":
                units.append(text_of(row, args.text_column))
            else:
                units += units_of(args, tokenizer, row, counts)
        except Exception as error:
            problems.append((shard, line, reason_of(error)))
    is_text = args.kind == "text"
    documents = tokens_of_texts(tokenizer, units) if is_text else pack(args, tokenizer, units)
    tokens = np.array([*chain(*documents)], dtype=np.int32)
    if not is_text:
        counts.update(read=len(records), samples=len(documents), tokens=sum(map(len, units)))
        counts["answers"] = int(np.count_nonzero(tokens & CONTEXT == 0))
    return tokens, [*accumulate(map(len, documents))], problems, counts


def tokens_of_texts(tokenizer, texts):
    """Return a list of tokens for each text; each list ends with an end-of-text token."""
    # Split a control token, such as </s>, into ordinary tokens, because a text only quotes it.
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids = tokenizer(texts, **options)["input_ids"] if texts else []
    return [[*tokens, tokenizer.eos_token_id] for tokens in ids]


# ---- conversations ---------------------------------------------------------------------------
def units_of(args, tokenizer, row, counts):
    """Return the units of a row: lists of tokens that packing must not split.

    A unit is a document of a conversation or, with --preferences, the entire pair. Leave out units
    that are longer than --seq-length. If the row quotes a control token, return no units. Add
    numbers for the report to `counts`.
    """
    is_pair, tools = args.kind == "preferences", row.get("tools") or None
    tools = without_nulls(json.loads(tools) if isinstance(tools, str) else tools)
    conversations = pair_of(row) if is_pair else [messages_of(turns_of(args, row))]
    # Leave out a row that quotes a control token, because the tokenizer would mistake the quotation
    # for a real control token.
    quoted = json.dumps([conversations, tools], ensure_ascii=False, default=str)
    if any(token in quoted for token in control_tokens(tokenizer)):
        counts["control"] += 1
        return []
    documents = [
        tokens_of(tokenizer, *document, counts)
        for messages in conversations
        for document in documents_of(tokenizer, messages, tools)
    ]
    units = [list(chain(*documents))] if is_pair else documents
    fitting = [unit for unit in units if len(unit) <= args.seq_length]
    counts["long"] += len(units) - len(fitting)
    return fitting


@cache
def control_tokens(tokenizer):
    """Return the texts that the tokenizer turns into control tokens, such as </s>."""
    added = tokenizer.added_tokens_decoder.values()
    return [*{str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)]


def turns_of(args, row):
    """Return the turns of a row, which are in one column, or in the columns prompt and completion.

    If the turns are in one column, a column `system` adds a turn before them.
    """
    names = [args.text_column] if args.text_column else ["messages", "conversations"]
    for name in names:
        if name in row:
            return [*as_turns(row.get("system") or [], "system"), *(row[name] or [])]
    if not {"prompt", "completion"} <= row.keys():
        problem = f"no column {' or '.join(names)}, and no prompt and completion"
        raise ValueError(f"{problem}; choose --text-column from: {', '.join(row)}")
    # Give each turn of the prompt the weight 0, so that the model does not learn earlier answers
    # in the prompt.
    prompt = [turn | {"weight": 0} for turn in as_turns(row["prompt"], "user")]
    return [*prompt, *as_turns(row["completion"], "assistant")]


def as_turns(text_or_turns, role):
    """Return `text_or_turns` as a list of turns; a text becomes a single turn by `role`."""
    if isinstance(text_or_turns, str):
        return [{"role": role, "content": text_or_turns}]
    return list(text_or_turns or [])


def pair_of(row):
    """Return two lists of messages, which end with the chosen and with the rejected answer."""
    if not {"chosen", "rejected"} <= row.keys():
        raise ValueError(f"no columns chosen and rejected; the columns are: {', '.join(row)}")
    pair = []
    for name in ("chosen", "rejected"):
        turns = as_turns(row[name], "assistant")
        # If the turns begin with the assistant's answer, put the prompt before the turns.
        if turns and ROLES.get(turns[0].get("role", turns[0].get("from"))) == "assistant":
            turns = as_turns(row.get("prompt"), "user") + turns
        pair.append(messages_of(turns))
    if pair[0][:-1] != pair[1][:-1]:
        raise ValueError("chosen and rejected differ before their last turn")
    if pair[0] == pair[1]:
        raise ValueError("chosen and rejected are the same")
    for message in (*pair[0][:-1], *pair[1][:-1]):
        message["is_learned"] = False
    return pair


def without_nulls(value):
    """Return `value` without the keys whose value is null.

    Tables add a key with the value null to a row if a different row has the key.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def messages_of(turns):
    """Return turns as messages for a chat template; raise ValueError if the turns are invalid."""
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise ValueError(f"a turn is {turn!r:.80}; make it an object with role and content")
        message = without_nulls(turn)
        if "from" in message:
            message |= {"role": message.pop("from"), "content": message.pop("value", "")}
        role, content = message.get("role"), message.get("content", "")
        if role not in ROLES:
            raise ValueError(f"unknown role {role}; use one of {', '.join(ROLES)}")
        if role == "function_call":
            calls = json.loads(message.pop("content"))
            calls = calls if isinstance(calls, list) else [calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        elif isinstance(content, list) and all(part.get("type") == "text" for part in content):
            message["content"] = "".join(part["text"] for part in content)
        elif not isinstance(content, str):
            raise ValueError(f"a turn's content is {content!r:.80}; make it text")
        if not {"content", "tool_calls"} & message.keys():
            raise ValueError(f"a turn by the {role} has no content")
        # If the arguments of a call are text, convert them to an object, because chat templates
        # expect an object.
        for call in message.get("tool_calls", []):
            function = call.get("function", call)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
        marks = {key: message.pop(key) for key in LEARNED if key in message}
        for key, mark in marks.items():
            if mark not in (0, 1):
                raise ValueError(f"a turn has {key} {mark!r}; use 0 or 1")
        messages.append(message | {"role": ROLES[role], "is_learned": all(marks.values())})
    if not messages:
        raise ValueError("it has no messages")
    if messages[0]["role"] == "assistant":
        raise ValueError("its first turn is by the assistant; begin it with a turn by the user")
    if messages[-1]["role"] != "assistant":
        role = messages[-1]["role"]
        raise ValueError(f"its last turn is by the {role}; end it with an answer by the assistant")
    return messages


def documents_of(tokenizer, messages, tools):
    """Yield (text, answers) for each document of a conversation.

    `answers` has the positions in the text where each learned answer starts and ends. Most
    conversations are one document. But some chat templates change an earlier turn when a later turn
    follows: Qwen3's template drops earlier thoughts. Before such a change, yield the conversation
    so far; the next document has the same turns again, with the change.
    """
    options = {"tools": tools, "date_string": FixedDate.now().strftime("%d %b %Y")}
    render = partial(tokenizer.apply_chat_template, tokenize=False, **options)
    text, answers = "", []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or not message["is_learned"]:
            continue
        prompt = render(messages[:number], add_generation_prompt=True)
        answered = render(messages[: number + 1]).rstrip()
        if not answered.startswith(prompt):
            problem = f"the answer's text {answered!r:.200} does not begin with the prompt"
            raise ValueError(f"with the model's chat template, {problem} {prompt!r:.200}")
        # Collect words that the rendered answer must contain, because a template may leave out tool
        # calls or thoughts: the names of the called tools, and the last word under each key in
        # TEXTS.
        words = [call.get("function", call)["name"] for call in message.get("tool_calls", [])]
        words += [word for key in TEXTS for word in message.get(key, "").split()[-1:]]
        for word in words:
            if word not in answered[len(prompt) :]:
                raise ValueError(f"the model's chat template leaves out {word!r} of an answer")
        if not prompt.startswith(text):
            yield text, answers
            answers = []
        answers.append((len(prompt), len(answered)))
        text = answered
    if not answers:
        raise ValueError("it has no answer to learn")
    yield text, answers


def tokens_of(tokenizer, text, answers, counts):
    """Return the tokens of a document, marked with the flags FIRST and CONTEXT."""
    # Tokenize the entire text, and each beginning of the text that ends where an answer starts or
    # ends. Tokenize no text from the middle, because some tokenizers put a space before each text.
    # An answer starts after the tokens that the entire text shares with the answer's prompt,
    # because at inference the model continues after the tokens of the prompt.
    ends = [end for answer in answers for end in answer]
    texts = {end: text[:end] for end in [*ends, len(text)]}
    options = {"add_special_tokens": False, "verbose": False}
    ids = dict(zip(texts, tokenizer([*texts.values()], **options)["input_ids"], strict=True))
    tokens, beginnings = ids[len(text)], [ids[end] for end in ends]
    # For each beginning of the text, count the first tokens that it shares with the entire text.
    shared = [sum(takewhile(bool, map(eq, tokens, beginning))) for beginning in beginnings]
    control_ids = tokenizer.convert_tokens_to_ids(control_tokens(tokenizer))
    document = [token | CONTEXT for token in tokens]
    for start, end, prompt in zip(shared[::2], shared[1::2], beginnings[::2], strict=True):
        document[start:end] = tokens[start:end]
        counts["joined"] += start < len(prompt)
        counts["endless"] += tokens[end - 1] not in control_ids
    document[0] |= FIRST | CONTEXT
    return document


def pack(args, tokenizer, units):
    """Pack units into samples of --seq-length tokens, and return the samples.

    Begin with the longest unit. Each unit joins the fullest sample that has space for it (best
    fit), or begins a sample. Padding fills the rest of each sample. Sort the samples by the
    positions of their longest units in `units`. In the order of packing, the last samples, which
    the scripts hold out for evaluation, would have only short units.
    """
    samples = {}
    for number in sorted(range(len(units)), key=lambda number: -len(units[number])):
        space = args.seq_length - len(units[number])
        fitting = [sample for sample in samples.values() if len(sample) <= space]
        sample = max(fitting, key=len) if fitting else samples.setdefault(number, [])
        sample.extend(units[number])
    padding = [tokenizer.eos_token_id | CONTEXT] * args.seq_length
    padding[0] |= FIRST
    in_order = [samples[number] for number in sorted(samples)]
    return [sample + padding[: args.seq_length - len(sample)] for sample in in_order]


def show_sample(args, tokenizer):
    """Print the first sample up to the end of its last answer, but at most 1,000 tokens.

    A line of dashes marks the start of a document, and »...« marks an answer.
    """
    looks = {0: "»{}«", CONTEXT: "{}", CONTEXT | FIRST: "\n----\n{}"}
    tokens = np.fromfile(args.output / "000000.tokens", dtype=np.int32, count=args.seq_length)
    tokens = tokens[: np.flatnonzero(tokens & CONTEXT == 0)[-1] + 1]
    for flags, group in groupby(tokens[:1000].tolist(), lambda token: token & (FIRST | CONTEXT)):
        text = tokenizer.decode([token & (CONTEXT - 1) for token in group])
        print(looks[flags].format(text), end="")
    print()


# ---- streams ---------------------------------------------------------------------------------
class Stream:
    """Provide the tokens of a source in order, while workers tokenize the next batches."""

    def __init__(self, args, source, state, pool):
        self.args, self.source = args, source
        self.num_tokens = self.num_bad = 0
        # `batch_counts` holds the counts of tokenize() for the current batch, and `counts` holds
        # the counts for all earlier batches.
        self.counts, self.batch_counts = Counter(state.get("counts")), Counter()
        self.batches = tokenized_batches(args, source, state.get("source", BEGINNING), pool)
        self.next_batch()
        self.num_tokens, self.used = state.get("tokens", 0), state.get("used", 0)
        self.num_bad = state.get("bad", self.num_bad)

    def state(self):
        """Return a state; a new Stream with this state continues where this stream is now."""
        state = {"tokens": self.num_tokens, "bad": self.num_bad, "used": self.used}
        return state | {"counts": self.counts, "source": self.batch}

    def next_batch(self):
        """Move to the next batch that has documents, or to an empty batch at the source's end."""
        for state, result in self.batches:
            self.counts.update(self.batch_counts)
            # Set the attributes that describe a batch: its state, its number of used tokens, its
            # tokens, the ends of its documents, and its counts.
            self.batch, self.used = state, 0
            self.tokens, self.ends, problems, self.batch_counts = result.result()
            for shard, line, reason in problems:
                where = self.source.shards[shard].name + (f", line {line}" if line else "")
                if not self.args.skip_bad:
                    fail(f"{where}: {reason}; repair it, or pass --skip-bad to leave it out")
                if not isinstance(line, int):
                    print(f"{where}: {reason}; the rest of this shard is left out")
            self.num_bad += len(problems)
            if len(self.tokens):
                return

    def take(self, most):
        """Return the remaining tokens of the current document, but at most `most` tokens."""
        # In an empty batch, `ends` is empty; use 0 as the end, so that the result has no tokens.
        end = next((end for end in self.ends if end > self.used), 0)
        tokens = self.tokens[self.used : min(self.used + most, end)]
        self.used += len(tokens)
        self.num_tokens += len(tokens)
        if self.used == len(self.tokens):
            self.next_batch()
        return tokens

    def urgency(self, total):
        """Return a pair of values; the source with the largest pair provides the next tokens.

        The first value is True if the pieces so far contain only the start of this source's current
        document. The second value is the number of tokens that this source lacks, compared with its
        share of `total`.
        """
        is_within_document = self.used > 0 and self.used not in self.ends
        return is_within_document, self.source.share * total - self.num_tokens


def tokenized_batches(args, source, state, pool):
    """Yield (state, future) for each batch of a source.

    `state` is the source's state before the batch, and `future` is the Future of tokenize() for the
    batch. Up to two batches per worker are submitted in advance.
    """
    waiting = deque()
    for before, records in batches_of(args, source, state):
        waiting.append((before, pool.submit(tokenize, args, records)))
        if len(waiting) == 2 * args.workers:
            yield waiting.popleft()
    yield from waiting


# ---- pieces ----------------------------------------------------------------------------------
def write(path, data):
    """Write bytes to a file, which gets its name only once it is complete and on the disk."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        fail(f"{path}: {error}")


def describe(args, sources, tokenizer):
    """Return the content of index.json: facts that determine the pieces, or that scripts need."""
    largest = max(tokenizer.get_vocab().values())
    listing = [shard[:3] for source in sources for shard in source.shards]
    packed = {"kind": args.kind, "seq_length": args.seq_length}
    packed["chat_template"] = tokenizer.chat_template
    return {
        "format": FORMAT,
        **(packed if args.kind != "text" else {}),
        "dtype": "uint16" if largest < 2**16 and args.kind == "text" else "int32",
        "tokenizer": fingerprint_of(tokenizer),
        "parts": args.part[1],
        **{name: getattr(args, name) for name in ("piece", "seed", "text_column")},
        "sources": {source.name: source.share or None for source in sources},
        "shards": hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16],
    }


def write_index(path, index):
    """Write index.json unless it exists; if it has different facts, exit with an error."""
    if not path.exists():
        return write(path, json.dumps(index, indent=1).encode())
    before = json.loads(path.read_text())
    for name, value in index.items():
        if before.get(name) != value:
            problem = f"{name} was {before.get(name)}, is now {value}"
            fail(f"{path.parent}: {problem}; choose a different --output")


def write_pieces(args, index, sources, pool):
    """Write this part's missing pieces, and save the state after each piece; return the streams."""
    part, parts = args.part
    state_path = args.output / f"part-{part}.json"
    state = json.loads(state_path.read_text()) if state_path.exists() else {}
    start, number = time.monotonic(), state.get("pieces", 0)
    states = state.get("streams", [{}] * len(sources))
    streams = [Stream(args, *pair, pool) for pair in zip(sources, states, strict=True)]
    total_before = sum(stream.num_tokens for stream in streams)
    piece, filled = np.empty(args.piece, dtype=index["dtype"]), 0
    ended = state.get("ended", False)
    while not ended:
        # If the pieces contain only the start of a document so far, continue this document.
        # Otherwise, use the source that is furthest behind its share of the tokens.
        total = sum(stream.num_tokens for stream in streams)
        stream = max(streams, key=lambda it: it.urgency(total))
        tokens = stream.take(args.piece - filled)
        piece[filled : filled + len(tokens)] = tokens
        filled += len(tokens)
        # Stop as soon as every source has been read at least once.
        ended = all(stream.batch["pass"] for stream in streams)
        if filled < args.piece and not ended:
            continue
        if filled:
            name = f"{part + number * parts:06}.tokens"
            write(args.output / name, piece[:filled].data)
            total += len(tokens)
            speed = (total - total_before) / (time.monotonic() - start)
            print(f"{name}  tokens {total:,}  tokens_per_second {speed:,.0f}")
            filled, number = 0, number + 1
        state = {"pieces": number, "ended": ended, "streams": [it.state() for it in streams]}
        write(state_path, json.dumps(state).encode())
    return streams


def report(args, streams):
    """Print what this part has read and, once all parts have ended, a command to train."""
    for stream in streams:
        passes = stream.batch["pass"]
        read = f", read {passes} times" if passes > 1 else ""
        bad = f", {stream.num_bad:,} bad documents left out" if stream.num_bad else ""
        print(f"{stream.source.name}: {stream.num_tokens:,} tokens{read}{bad}")
        if counts := stream.counts:
            size = max(1, counts["samples"] * args.seq_length)
            print(
                f"{counts['read']:,} rows are packed into {counts['samples']:,} samples: "
                f"{counts['answers'] / size:.1%} of the tokens are in answers, "
                f"{1 - counts['tokens'] / size:.1%} are padding. Left out: {counts['long']:,} too "
                f"long for --seq-length, {counts['control']:,} with a control token in their text."
            )
            if counts["joined"]:
                print(f"{counts['joined']:,} answers share their first token with the prompt")
            if counts["endless"]:
                problem = "end without a control token, so the model does not learn to stop there"
                print(f"{counts['endless']:,} answers {problem}")
    states = [json.loads(path.read_text()) for path in args.output.glob("part-*.json")]
    num_ended, has_pieces = sum(it["ended"] for it in states), any(it["pieces"] for it in states)
    if num_ended == args.part[1] and has_pieces:
        words = ["python", "01-single-gpu/train_llm.py", "-m", args.model_name, "-d", args.output]
        if args.kind != "text":
            words[:2] = ["torchrun", "--standalone", f"fine-tuning/{args.kind}/train_llm.py"]
            words += ["-s", args.seq_length]
            show_sample(args, load_tokenizer(args.model_name))
        print("train on it:", shlex.join(map(str, words)))


def main():
    """Tokenize the sources, and write the pieces of one part."""
    args = parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    sources = sources_of(args)
    args.workers = args.workers or num_workers(sources)
    try:
        tokenizer = load_tokenizer(args.model_name)
    except Exception as error:
        fail(f"--model-name {args.model_name}: {reason_of(error)}; choose a model with a tokenizer")
    if tokenizer.eos_token_id is None:
        fail(f"--model-name {args.model_name}: its tokenizer has no end-of-text token; define one")
    args.output.mkdir(parents=True, exist_ok=True)
    index = describe(args, sources, tokenizer)
    write_index(args.output / "index.json", index)
    try:
        with start_workers(args) as pool:
            report(args, write_pieces(args, index, sources, pool))
    except BrokenProcessPool:
        problem = "a worker was killed, perhaps for lack of memory"
        fail(f"--workers {args.workers}: {problem}; choose a smaller number")


if __name__ == "__main__":
    # After Ctrl-C, exit with the status that a shell reports, and without a traceback.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    main()
