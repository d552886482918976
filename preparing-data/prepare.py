"""Tokenize documents into a folder of pieces, which every chapter can train on.

Here:      python preparing-data/prepare.py -m tiny -o outputs/pydoc.tokens pydoc
A file:    python preparing-data/prepare.py -m MODEL -o notes.tokens notes.txt
Mixed:     python preparing-data/prepare.py -m MODEL -o mix.tokens web:0.8 code:0.2
On nodes:  sbatch --array=0-7 --wrap "python preparing-data/prepare.py -m MODEL -o mix.tokens web"

Each piece, such as `000007.tokens`, holds `--piece` tokens. It has this name only once it is
complete, so a training run may read the pieces while more are written. Part k of n writes the
pieces k, k + n, and so on; the last piece of a part may be shorter. What a piece contains depends
on the documents and how they are read, the tokenizer, the weights, the seed, the size of a piece
and the number of parts, but not on the number of workers. Start the same command again after a
kill: it continues with the piece that it was writing.
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
import sys
import time
import uuid
from collections import deque, namedtuple
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate, groupby
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow
import pyarrow.parquet

# The version of the format of a folder.
FORMAT = 2
# The number of shards of a source that are open. Each document comes from a random open shard.
OPEN_SHARDS = 16
# The number of documents that a worker tokenizes at a time.
BATCH = 256
# Use one worker if all sources together have fewer bytes, because starting processes would take
# longer than the processes save.
SMALL = 2**26
# The size of the blocks of a file, in bytes, that tell whether its content has changed.
BLOCK = 2**16
FORMATS = ("jsonl", "json", "txt", "parquet", "csv", "tsv")
COMPRESSIONS = {"gz": "gzip", "bz2": "bz2", "zst": "zstd", "xz": "xz"}
# A file's name: a stem, perhaps a number such as -00000-of-00012, a format, perhaps a compression.
NAME = re.compile(
    r"(?P<stem>.+?)([-_.]\d+(-of-\d+)?(-[0-9a-f]+)?)?"
    rf"\.(?P<format>{'|'.join(FORMATS)})(\.(?P<compression>{'|'.join(COMPRESSIONS)}))?"
)
# Files of a folder that hold no data: hidden files, descriptions, and pieces from this program.
NO_DATA = re.compile(
    r"(.*/)?(\..*|[^/]*\.tokens/.*|[^/]*\.md|(readme|license)(\.\w+)?|dataset_(infos?|dict)\.json)"
)
# If a folder has a file or folder that is named train, files with these names are for evaluation.
HELD_OUT = {"test", "validation", "valid", "val", "dev", "eval"}
# SOURCE or SOURCE:WEIGHT; a weight may be 2, 0.25 or 1e-3.
WEIGHTED = re.compile(r"(.*?)(?::(\d*\.?\d+(?:[eE][-+]?\d+)?))?")
# A part of a source: its name, its size in bytes or 0 if it is unknown, a hash of its content, and
# a function that yields its records.
Shard = namedtuple("Shard", "name size content read")


def parse_args():
    """Return the checked arguments."""
    options = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], **options)
    parser.error = fail
    add = parser.add_argument
    add(
        "sources", nargs="+", metavar="SOURCE[:WEIGHT]", help="file, folder, hub id[/subset], pydoc"
    )
    add("-o", "--output", type=Path, required=True, help="folder to write, FOLDER.tokens")
    add("-m", "--model-name", default="tiny", help="whose tokenizer: hub id, local folder, or tiny")
    add("--text-column", default="text", help="which column is the text")
    add("--piece", type=int, default=2**28, metavar="TOKENS", help="tokens in a piece")
    workers = "tokenizing processes; 0: one for each core, or a thread if the sources are small"
    add("--workers", type=int, default=0, help=workers)
    add("--seed", type=int, default=0, help="for the order of the documents")
    add("--part", type=part_of, default=slurm_part(), metavar="K/N", help="part K, from 0, of N")
    add("--skip-bad", action="store_true", help="count documents that cannot be read, and continue")
    args = parser.parse_args()
    if args.output.suffix != ".tokens":
        fail(f"--output {args.output}: must end in .tokens; use --output {args.output}.tokens")
    for name, minimum in {"piece": 1, "workers": 0}.items():
        if getattr(args, name) < minimum:
            fail(f"--{name} {getattr(args, name)}: must be at least {minimum}")
    return args


def num_cores():
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def part_of(text):
    """Return (k, n) of `k/n`."""
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: must be K/N, with K from 0 to N - 1")
    return int(part), int(parts)


def slurm_part():
    """Return the part of this task of a Slurm array, as text, or the only part."""
    names = {"ID": "0", "MIN": "0", "COUNT": "1"}
    values = {name: os.environ.get(f"SLURM_ARRAY_TASK_{name}", names[name]) for name in names}
    return f"{int(values['ID']) - int(values['MIN'])}/{values['COUNT']}"


def fail(problem):
    """Print one line on stderr and exit with status 2."""
    print(f"prepare.py: error: {problem}", file=sys.stderr, flush=True)
    sys.exit(2)


# ---- documents -------------------------------------------------------------------------------
def match_name(path):
    """Return the match of a file's name, or None if the name does not end in a known format."""
    return NAME.fullmatch(path.name.lower())


def open_decompressed(path):
    """Open a file for reading bytes, without the byte order mark that it may begin with."""
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
    """Return the files of a folder that hold training data; print which files are left out."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = sorted(path.relative_to(folder) for path in paths)
    names = [name for name in names if not NO_DATA.fullmatch(str(name).lower())]
    files = [name for name in names if (folder / name).is_file() and match_name(name)]
    if any("train" in words_of(name) for name in files):
        files = [name for name in files if not HELD_OUT & words_of(name)]
    if left := sorted({*names} - {*files}):
        shown = ", ".join(map(str, left[:3])) + ", ..." * (len(left) > 3)
        count = f"{len(left)} of {len(names)} files"
        print(f"{folder}: leaves out {count} (unknown format or held-out split): {shown}")
    return [folder / name for name in files]


def words_of(name):
    """Return the words that may name a file's split: its folders, and its stem without a number."""
    return {*map(str.lower, name.parent.parts), match_name(name)["stem"]}


def shard_of(path):
    """Return a file as a shard, with a hash of its first, its middle and its last block."""
    size, content = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        for start in (0, size // 2, size - BLOCK):
            file.seek(max(0, start))
            content.update(file.read(BLOCK))
    return Shard(str(path), size, content.hexdigest(), partial(records_of, path))


def records_of(path, column):
    """Yield the records of a file, such as rows or lines of JSON, each with its number."""
    kind = match_name(path)["format"]
    if kind == "parquet":
        table = pyarrow.parquet.ParquetFile(path)
        check_column(column, table.schema_arrow.names)
        batches = table.iter_batches(1000, columns=[column])
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
    """Yield the paragraphs of a text, which blank lines separate, each with its first line."""
    for is_blank, lines in groupby(enumerate(file, 1), lambda numbered: numbered[1].isspace()):
        if not is_blank:
            numbers, texts = zip(*lines, strict=True)
            yield numbers[0], {column: b"".join(texts).rstrip(b"\r\n")}


def rows_of(file, delimiter):
    """Yield the rows of a table, each with its last line, and an error for a row that misfits."""
    csv.field_size_limit(2**31 - 1)
    # text_of() reports bytes that are not UTF-8.
    lines = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    names = next(rows, [])
    for row in filter(None, rows):
        if len(row) == len(names):
            yield rows.line_num, dict(zip(names, row, strict=True))
        else:
            problem = f"has {len(row)} fields, but the header has {len(names)}"
            yield rows.line_num, ValueError(f"{problem}; put quotes around each text")


def pydoc_records(column):
    """Yield the texts of Python's documentation."""
    yield from enumerate(({column: text} for text in topics.values()), 1)


def check_column(column, names):
    """Raise an error that names the columns if the column of the text is not there."""
    if column not in names:
        raise ValueError(f"no column {column}; choose --text-column from: {', '.join(names)}")


def text_of(record, column):
    """Return the text of a record, a row or a line of JSON; raise an error if there is none."""
    if isinstance(record, Exception):
        raise record
    if isinstance(record, bytes):
        record = json.loads(record)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    check_column(column, record)
    text = record[column]
    if isinstance(text, str):
        # Keep half of a surrogate pair as a byte, so that decode() rejects it below.
        text = text.encode(errors="surrogateescape")
    if not isinstance(text, bytes):
        kind = "null" if text is None else type(text).__name__
        raise ValueError(f"column {column} holds {kind}, and not text")
    return text.decode()


def sources_of(args):
    """Return a source for each name with a weight, or a single source that is read once."""
    weights = {}
    for word in args.sources:
        # The name of a file may itself end in a colon and a number.
        name, weight = (word, 0) if os.path.exists(word) else WEIGHTED.fullmatch(word).groups()
        if os.path.abspath(name) in map(os.path.abspath, weights):
            fail(f"{name}: given twice; give each source once")
        weights[name] = float(weight or 0)
    if not any(weights.values()):
        return [Source(args, 0, list(weights), 1.0, False)]
    if missing := [name for name, weight in weights.items() if not weight]:
        fail(f"{missing[0]}: give each source a weight above 0, or none of them")
    total, items = sum(weights.values()), enumerate(weights.items())
    return [Source(args, n, [name], weight / total, True) for n, (name, weight) in items]


class Source:
    """Shuffle the documents of files, folders or datasets, pass after pass, batch after batch.

    Up to OPEN_SHARDS shards are open at a time, and each document comes from a random open shard.
    A part reads every n-th shard or, if there are fewer shards than parts, every n-th document.
    """

    def __init__(self, args, number, names, weight, repeats):
        self.args, self.number, self.name = args, number, " ".join(names)
        self.weight, self.repeats = weight, repeats
        self.shards = [shard for name in names for shard in shards_of(name)]
        part, parts = args.part
        self.by_shard = len(self.shards) >= parts
        numbers = range(len(self.shards))
        self.numbers = numbers[part::parts] if self.by_shard else numbers
        self.load_state({"pass": 0, "batch": 0, "shards": 0, "open": []})

    def load_state(self, state):
        """Continue with the batch that followed when state() returned `state`."""
        self.pass_number, self.batch = state["pass"], state["batch"]
        self.num_opened = state["shards"]
        self.readers = [[*reader, self.records_of(*reader)] for reader in state["open"]]

    def records_of(self, number, used):
        """Yield this part's records of a shard from an index on: (index, line, record)."""
        part, parts = self.args.part
        records = until_error(self.shards[number].read(self.args.text_column))
        for index, (line, record) in enumerate(records):
            if index >= used and (self.by_shard or index % parts == part):
                yield index, line, record

    def state(self):
        """Return a state for load_state(), which then continues with the next batch."""
        state = {"pass": self.pass_number, "batch": self.batch, "shards": self.num_opened}
        return state | {"open": [[number, used] for number, used, _ in self.readers]}

    def has_ended(self):
        """Return whether there is no further batch."""
        return self.pass_number > 0 and not self.repeats

    def next_batch(self):
        """Return the next records, each with its shard and its line."""
        # Derive the order from numbers, not from names, so that a folder can be moved.
        key = f"{self.args.seed} {self.number} {self.pass_number}"
        order = list(self.numbers)
        random.Random(key).shuffle(order)
        choose, records = random.Random(f"{key} {self.batch}"), []
        while len(records) < BATCH:
            while len(self.readers) < OPEN_SHARDS and self.num_opened < len(order):
                number = order[self.num_opened]
                self.readers.append([number, 0, self.records_of(number, 0)])
                self.num_opened += 1
            if not self.readers:
                break
            reader = choose.choice(self.readers)
            try:
                index, line, record = next(reader[2])
                reader[1] = index + 1
            except StopIteration:
                self.readers.remove(reader)
                continue
            records.append((reader[0], line, record))
        self.batch += 1
        if not self.readers and self.num_opened == len(order):
            if not records and self.batch == 1 and self.repeats:
                fail(f"{self.name}: too few documents for {self.args.part[1]} parts")
            self.pass_number, self.batch, self.num_opened = self.pass_number + 1, 0, 0
        return records


def until_error(records):
    """Yield the records; if an error ends them, yield it as the last record."""
    line = 0
    try:
        for line, record in records:
            yield line, record
        if not line:
            raise ValueError("it has no documents")
    except Exception as error:
        yield f"{line + 1} or later" if line else "", ValueError(reason_of(error))


def reason_of(error):
    """Return the message of an exception, in one line."""
    name = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())


def shards_of(name):
    """Return the shards of a source."""
    path = Path(name)
    if name == "pydoc":
        text = "".join(topics.values()).encode()
        return [Shard(name, len(text), hashlib.sha256(text).hexdigest(), pydoc_records)]
    # Do not ask Path(""), because it would be the current folder.
    if os.path.exists(name):
        files = [path] if path.is_file() and match_name(path) else files_of(path)
        if not files:
            fail(f"{name}: no file with a name in .{' .'.join(FORMATS)}, compressed or not")
        try:
            with ThreadPoolExecutor() as pool:
                return list(pool.map(shard_of, files))
        except OSError as error:
            fail(f"{name}: {reason_of(error)}")
    # Import datasets only here, because the import would take each worker seconds.
    import datasets

    datasets.disable_progress_bars()
    dataset, _, subset = name.rpartition("/") if name.count("/") > 1 else (name, "", None)
    load = partial(datasets.load_dataset, dataset, subset, split="train", streaming=True)
    try:
        stream = load()
        # Split text files at blank lines, which separate the documents.
        if stream.info.builder_name == "text":
            stream = load(sample_by="paragraph")
    except Exception as error:
        fail(f"{name}: no such file or folder, and no dataset of the hub: {reason_of(error)}")

    def read(number, _):
        return enumerate(stream.shard(num_shards=stream.num_shards, index=number), 1)

    numbers = range(stream.num_shards)
    return [Shard(f"{name}, shard {number}", 0, "", partial(read, number)) for number in numbers]


# ---- tokens ----------------------------------------------------------------------------------
@cache
def load_tokenizer(name):
    """Return a model's tokenizer, as the chapters load it."""
    # Hide torch from transformers, because no tokenizer needs torch, and its import takes seconds.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    torch = sys.modules.setdefault("torch", None)
    import transformers

    if not torch:
        del sys.modules["torch"]
    if name == "tiny":
        return transformers.ByT5Tokenizer()
    return transformers.AutoTokenizer.from_pretrained(name)


def fingerprint_of(tokenizer):
    """Return a short name for what a tokenizer does: a hash of its vocabulary and end of text."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    text = json.dumps([vocabulary, tokenizer.eos_token_id])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def num_workers(sources):
    """Return 1 if the sources are small, and the number of cores otherwise."""
    sizes = [shard.size for source in sources for shard in source.shards]
    return 1 if all(sizes) and sum(sizes) < SMALL else num_cores()


def start_workers(args):
    """Return an executor of tokenize(): processes or, for a single worker, a thread."""
    if args.workers == 1:
        return ThreadPoolExecutor(1)
    # Let each process tokenize with one thread.
    os.environ["RAYON_NUM_THREADS"] = "1"
    return ProcessPoolExecutor(args.workers, get_context("spawn"), initializer=start_worker)


def start_worker():
    """Prepare a worker, which the system ends together with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def tokenize(model_name, column, records):
    """Return the joined tokens of all records, the end of each document, and the problems."""
    tokenizer, texts, problems = load_tokenizer(model_name), [], []
    for shard, line, record in records:
        try:
            texts.append(text_of(record, column))
        except Exception as error:
            problems.append((shard, line, reason_of(error)))
    # If a text quotes a control token, such as </s>, split it into ordinary tokens.
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids = tokenizer(texts, **options)["input_ids"] if texts else []
    documents = [np.array([*tokens, tokenizer.eos_token_id], dtype=np.int32) for tokens in ids]
    ends = list(accumulate(map(len, documents)))
    return np.concatenate([np.zeros(0, dtype=np.int32), *documents]), ends, problems


class Stream:
    """Hand out the tokens of a source, which workers tokenize a few batches ahead."""

    def __init__(self, source, state, pool):
        self.source, self.pool, self.waiting = source, pool, deque()
        self.num_tokens = self.num_bad = 0
        if state:
            source.load_state(state["source"])
        self.next_batch()
        self.num_tokens, self.used = state.get("tokens", 0), state.get("used", 0)
        self.num_bad = state.get("bad", self.num_bad)

    def state(self):
        """Return the state of this stream; its "source" is for Source.load_state()."""
        state = {"tokens": self.num_tokens, "bad": self.num_bad, "used": self.used}
        return state | {"source": self.batch}

    def next_batch(self):
        """Take the next batch that has documents, or an empty batch at the end of a source."""
        source, args = self.source, self.source.args
        # The tokens of the batch, where its documents end, and the number of its tokens in pieces.
        self.tokens, self.ends, self.used = [], [], 0
        while not len(self.tokens):
            try:
                while len(self.waiting) < 2 * args.workers and not source.has_ended():
                    state, work = source.state(), (args.model_name, args.text_column)
                    result = self.pool.submit(tokenize, *work, source.next_batch())
                    self.waiting.append((state, result))
                if not self.waiting:
                    self.batch = source.state()
                    return
                self.batch, result = self.waiting.popleft()
                self.tokens, self.ends, problems = result.result()
            except BrokenProcessPool:
                fail("a worker was killed, perhaps for lack of memory; lower --workers")
            for shard, line, reason in problems:
                where = source.shards[shard].name + (f", line {line}" if line else "")
                if not args.skip_bad:
                    fail(f"{where}: {reason}; --skip-bad leaves it out")
                if not isinstance(line, int):
                    print(f"{where}: {reason}; the rest of this shard is left out")
            self.num_bad += len(problems)

    def take(self, most):
        """Return the tokens that are left of a document, but at most `most`."""
        # End at 0 if the source has no documents.
        end = next((end for end in self.ends if end > self.used), 0)
        tokens = self.tokens[self.used : min(self.used + most, end)]
        self.used += len(tokens)
        self.num_tokens += len(tokens)
        if self.used == len(self.tokens):
            self.next_batch()
        return tokens

    def urgency(self, total):
        """Return whether a piece has the start of a document, but not its end.

        Also return the number of tokens that are missing from this source, of `total` tokens.
        """
        is_within_document = self.used > 0 and self.used not in self.ends
        return is_within_document, self.source.weight * total - self.num_tokens


# ---- pieces ----------------------------------------------------------------------------------
def write(path, data):
    """Write bytes to a file that has its name only once it is complete and on the disk."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        fail(f"{path}: {error}")


def describe(args, sources, tokenizer):
    """Return the facts that determine the content of the pieces, and how they are read."""
    largest = max(tokenizer.get_vocab().values())
    listing = [shard[:3] for source in sources for shard in source.shards]
    return {
        "format": FORMAT,
        "dtype": "uint16" if largest < 2**16 else "int32",
        "tokenizer": fingerprint_of(tokenizer),
        "parts": args.part[1],
        **{name: getattr(args, name) for name in ("piece", "seed", "text_column")},
        "sources": {source.name: source.weight if source.repeats else None for source in sources},
        "shards": hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16],
    }


def write_index(path, index):
    """Write index.json, or stop if the folder was begun with other arguments."""
    if not path.exists():
        return write(path, json.dumps(index, indent=1).encode())
    before = json.loads(path.read_text())
    for name, value in index.items():
        if before.get(name) != value:
            problem = f"{name} was {before.get(name)}, is now {value}"
            fail(f"{path.parent}: {problem}; choose a different --output")


def write_pieces(args, index, sources, pool):
    """Write the missing pieces of this part, each followed by the state; return the streams."""
    part, parts = args.part
    state_path = args.output / f"part-{part}.json"
    state = json.loads(state_path.read_text()) if state_path.exists() else {}
    start, number = time.monotonic(), state.get("pieces", 0)
    states = state.get("streams", [{}] * len(sources))
    streams = [Stream(*pair, pool) for pair in zip(sources, states, strict=True)]
    total_before = sum(stream.num_tokens for stream in streams)
    piece, filled, ended = np.empty(args.piece, dtype=index["dtype"]), 0, False
    while not ended:
        # Finish a document first; otherwise choose the source that is furthest behind its weight.
        total = sum(stream.num_tokens for stream in streams)
        stream = max(streams, key=lambda it: it.urgency(total))
        tokens = stream.take(args.piece - filled)
        piece[filled : filled + len(tokens)] = tokens
        filled += len(tokens)
        # Stop as soon as every source was read at least once.
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
    """Print how each source was read and, once all parts have ended, how to train."""
    for stream in streams:
        passes = stream.batch["pass"]
        read = f", read {passes} times" if passes > 1 else ""
        bad = f", {stream.num_bad:,} bad documents left out" if stream.num_bad else ""
        print(f"{stream.source.name}: {stream.num_tokens:,} tokens{read}{bad}")
    paths = [args.output / f"part-{part}.json" for part in range(args.part[1])]
    has_pieces = any(args.output.glob("*.tokens"))
    if has_pieces and all(
        path.exists() and json.loads(path.read_text())["ended"] for path in paths
    ):
        words = ["-m", args.model_name, "-d", str(args.output)]
        print("train on it:", shlex.join(["python", "01-single-gpu/train_llm.py", *words]))


def main():
    """Write one part of the folder."""
    args = parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    sources = sources_of(args)
    args.workers = args.workers or num_workers(sources)
    try:
        tokenizer = load_tokenizer(args.model_name)
    except Exception as error:
        fail(f"--model-name {args.model_name}: {reason_of(error)}")
    if tokenizer.eos_token_id is None:
        fail(f"--model-name {args.model_name}: its tokenizer has no end-of-text token; define one")
    index = describe(args, sources, tokenizer)
    write_index(args.output / "index.json", index)
    with start_workers(args) as pool:
        report(args, write_pieces(args, index, sources, pool))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # A shell reports Ctrl-C with status 130.
        sys.exit(130)
