"""Tokenize documents into a folder of pieces, which every chapter can train on.

Here:      python preparing-data/prepare.py -m tiny -o outputs/pydoc.tokens pydoc
Mixed:     python preparing-data/prepare.py -m MODEL -o mix.tokens web:0.8 code:0.2
On nodes:  sbatch --array=0-7 --wrap "python preparing-data/prepare.py -m MODEL -o mix.tokens web"

Each piece, such as `000007.tokens`, holds `--piece` tokens. It has this name only once it is
complete, so a training run may read the pieces while more are written. Part k of n writes the
pieces k, k + n, and so on; the last piece of a part may be shorter. What a piece contains depends
on the documents, the weights, the seed, the size of a piece and the number of parts, but not on
the number of workers. Start the same command again after a kill: it continues with the piece that
it was writing.
"""

import argparse
import bz2
import csv
import ctypes
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import signal
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow
import pyarrow.parquet
from tqdm import tqdm
from transformers import AutoTokenizer, ByT5Tokenizer

# The version of the format of a folder.
FORMAT = 1
# The number of shards of a source that are open. Each document comes from one of them, at random.
OPEN_SHARDS = 16
# The number of documents that a worker tokenizes at a time.
BATCH = 256
SUFFIXES = (".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet")


def parse_args():
    """Return the checked arguments."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=formatter, allow_abbrev=False
    )
    parser.error = fail
    add = parser.add_argument
    add(
        "sources", nargs="+", metavar="SOURCE[:WEIGHT]", help="file, folder, hub id[/subset], pydoc"
    )
    add("-o", "--output", type=Path, required=True, help="folder to write, FOLDER.tokens")
    add("-m", "--model-name", default="tiny", help="whose tokenizer: hub id, local folder, or tiny")
    add("--text-column", default="text", help="which column is the text")
    add("--piece", type=int, default=2**28, metavar="TOKENS", help="tokens in a piece")
    add("--workers", type=int, default=num_cores(), help="tokenizing processes")
    add("--seed", type=int, default=0, help="for the order of the documents")
    add("--part", type=part_of, default=slurm_part(), metavar="K/N", help="part K, from 0, of N")
    add("--skip-bad", action="store_true", help="count documents that cannot be read, and continue")
    args = parser.parse_args()
    if args.output.suffix != ".tokens":
        fail(f"--output {args.output}: must end in .tokens; use --output {args.output}.tokens")
    for name in ("piece", "workers"):
        if getattr(args, name) < 1:
            fail(f"--{name} {getattr(args, name)}: must be at least 1")
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
class CountedFile(io.FileIO):
    """A file that counts what has been read from all such files, for the progress bar."""

    num_read = 0

    def readinto(self, buffer):
        """Read into a buffer, as a FileIO does."""
        count = super().readinto(buffer)
        CountedFile.num_read += count
        return count


def open_decompressed(path):
    """Open a file for reading bytes; its content says whether and how it is compressed."""
    file = io.BufferedReader(CountedFile(path))
    start = file.peek(6)
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd"))
    readers = {b"\x1f\x8b": gzip.GzipFile, b"\xfd7zXZ\x00": lzma.LZMAFile, b"BZh": bz2.BZ2File}
    for magic, reader in readers.items():
        if start.startswith(magic):
            options = {"fileobj": file} if reader is gzip.GzipFile else {"filename": file}
            return io.BufferedReader(reader(**options))
    return file


def format_of(path):
    """Return the suffix that names a file's format, or None; a last suffix may name compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    return next((suffix for suffix in reversed(suffixes) if suffix in SUFFIXES), None)


def records_of(path, column):
    """Yield the records of a file, each with its line: texts, rows, lines of JSON, or errors."""
    kind = format_of(path)
    if kind == ".parquet":
        table = pyarrow.parquet.ParquetFile(CountedFile(path))
        names = table.schema_arrow.names
        if column not in names:
            raise ValueError(f"it has no column {column}, but {' '.join(names)}")
        batches = table.iter_batches(1000, columns=[column])
        yield from enumerate((text for rows in batches for text in rows.column(0).to_pylist()), 1)
        return
    with open_decompressed(path) as file:
        if kind == ".txt":
            yield from paragraphs_of(file)
        elif kind in (".csv", ".tsv"):
            yield from fields_of(file, column, "\t" if kind == ".tsv" else ",")
        elif kind == ".json" and file.peek(1)[:1] == b"[":
            yield from enumerate(json.load(file), 1)
        else:
            yield from ((line, record) for line, record in enumerate(file, 1) if record.strip())


def paragraphs_of(file):
    """Yield the paragraphs of a text, which blank lines separate, each with its first line."""
    lines = []
    for number, line in enumerate(chain(file, [b""]), 1):
        if line.strip():
            lines.append(line)
        elif lines:
            try:
                record = b"".join(lines).decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                record = ValueError(reason_of(error))
            yield number - len(lines), record
            lines = []


def fields_of(file, column, separator):
    """Yield one column of a table, each field with its line."""
    # By default, a field has at most 128 KiB.
    csv.field_size_limit(2**31 - 1)
    rows = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=separator)
    names = next(rows, [])
    if names and column not in names:
        raise ValueError(f"it has no column {column}, but {' '.join(names)}")
    for row in rows:
        record = ValueError(f"it has {len(row)} fields, and the first line {len(names)}")
        yield rows.line_num, row[names.index(column)] if len(row) == len(names) else record


def text_of(record, column):
    """Return the text of a record; raise what is wrong with it."""
    if isinstance(record, Exception):
        raise record
    if isinstance(record, bytes):
        record = json.loads(record)
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
    if isinstance(record, dict):
        if column not in record:
            raise ValueError(f"it has no column {column}, but {' '.join(record)}")
        record = record[column]
    if not isinstance(record, str | None):
        raise ValueError(f"column {column} has a {type(record).__name__}, and not text")
    return record or ""


def sources_of(args):
    """Return the sources: one for each that has a weight, or a single one that is read once."""
    weights = {}
    for word in args.sources:
        name, _, weight = word.rpartition(":")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[word] = None
    if not any(weights.values()):
        return [Source(args, 0, list(weights), 1.0, False)]
    if missing := [name for name, weight in weights.items() if not weight]:
        fail(f"{missing[0]}: give each source a weight above 0, or none of them")
    total = sum(weights.values())
    return [
        Source(args, number, [name], weight / total, True)
        for number, (name, weight) in enumerate(weights.items())
    ]


class Source:
    """The shuffled documents of files, folders or datasets: pass after pass, batch after batch.

    Up to OPEN_SHARDS shards are open at a time, and each document comes from one of them at random.
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
        self.num_bytes = sum(self.shards[number].size for number in self.numbers)
        self.load_state({"pass": 0, "batch": 0, "shards": 0, "open": []})

    def load_state(self, state):
        """Continue with the batch that followed when state() returned `state`."""
        self.pass_number, self.batch = state["pass"], state["batch"]
        self.num_opened, self.readers = state["shards"], []
        for number, used in state["open"]:
            self.readers.append([number, used, self.records_of(number, used)])

    def records_of(self, number, used):
        """Yield this part's records of a shard from an index on: (index, line, record)."""
        part, parts = self.args.part
        index = -1
        for index, (line, record) in enumerate(self.shards[number].records(self.args.text_column)):
            if index >= used and (self.by_shard or index % parts == part):
                yield index, line, record
        if index < 0:
            raise ValueError("it has no documents")

    def state(self):
        """Return a state for load_state(), which then continues with the next batch."""
        state = {"pass": self.pass_number, "batch": self.batch, "shards": self.num_opened}
        return state | {"open": [[number, used] for number, used, _ in self.readers]}

    def has_ended(self):
        """Return whether there is no further batch."""
        return self.pass_number > 0 and not self.repeats

    def next_batch(self):
        """Return the next records, each with its shard and its line."""
        # The order does not depend on names, so a folder can be moved.
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
            except StopIteration:
                self.readers.remove(reader)
                continue
            # The rest of this shard cannot be read.
            except Exception as error:
                line, record = None, ValueError(reason_of(error))
                self.readers.remove(reader)
            else:
                reader[1] = index + 1
            records.append((reader[0], line, record))
        self.batch += 1
        if not self.readers and self.num_opened == len(order):
            if not records and self.batch == 1 and self.repeats:
                fail(f"{self.name}: too few documents for {self.args.part[1]} parts")
            self.pass_number, self.batch, self.num_opened = self.pass_number + 1, 0, 0
        return records


@dataclass(frozen=True)
class Shard:
    """A part of a source: where it is, its size in bytes, and how its records are read."""

    name: str
    size: int
    read: Callable

    def records(self, column):
        """Yield its records, each with its line."""
        return self.read(column)


def reason_of(error):
    """Return the message of an exception, in one line."""
    name = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())


def shards_of(name):
    """Return the shards of a source."""
    path = Path(name)
    if name == "pydoc":
        size = sum(map(len, topics.values()))
        return [Shard(name, size, lambda column: enumerate(topics.values(), 1))]
    if path.is_file() and not format_of(path):
        fail(f"{name}: its format is unknown; known are {' '.join(SUFFIXES)}")
    if path.exists():
        paths = sorted([path] if path.is_file() else path.rglob("*"))
        paths = [path for path in paths if path.is_file() and format_of(path)]
        if not paths:
            fail(f"{name}: the folder has no {' '.join(SUFFIXES)} files")
        return [Shard(str(file), file.stat().st_size, partial(records_of, file)) for file in paths]
    # Import it only here, because the import takes each worker seconds.
    import datasets

    datasets.disable_progress_bars()
    dataset, _, subset = name.rpartition("/") if name.count("/") > 1 else (name, "", None)
    try:
        stream = datasets.load_dataset(dataset, subset, split="train", streaming=True)
    except Exception as error:
        fail(f"{name}: no such file or folder, and no dataset of the hub: {reason_of(error)}")

    def read(number, column):
        rows = stream.shard(num_shards=stream.num_shards, index=number)
        return enumerate(({column: row[column]} if column in row else row for row in rows), 1)

    numbers = range(stream.num_shards)
    return [Shard(f"{name}, shard {number}", 0, partial(read, number)) for number in numbers]


# ---- tokens ----------------------------------------------------------------------------------
def load_tokenizer(name):
    """Return a model's tokenizer, as the chapters load it."""
    return ByT5Tokenizer() if name == "tiny" else AutoTokenizer.from_pretrained(name)


def fingerprint_of(tokenizer):
    """Return a short name for what a tokenizer does: a hash of its vocabulary and end of text."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    text = json.dumps([vocabulary, tokenizer.eos_token_id])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def start_workers(args):
    """Return an executor of tokenize(): processes or, for a single worker, this process."""
    # Each worker tokenizes with one thread.
    os.environ["RAYON_NUM_THREADS"] = "1"
    if args.workers == 1:
        load(args)
        return InThisProcess()
    context = get_context("spawn")
    return ProcessPoolExecutor(args.workers, context, initializer=start_worker, initargs=[args])


class InThisProcess(Executor):
    """Runs in this process what an executor is given."""

    def submit(self, function, *args):
        """Return a future that is done."""
        future = Future()
        future.set_result(function(*args))
        return future


def start_worker(args):
    """Prepare a worker, which the system ends together with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    load(args)


def load(args):
    """Load what tokenize() needs."""
    global ARGS, TOKENIZER
    ARGS, TOKENIZER = args, load_tokenizer(args.model_name)


def tokenize(records):
    """Return the tokens of all records in a row, the lengths of the documents, and the problems."""
    texts, ids, problems = [], [], []
    for shard, line, record in records:
        try:
            texts.append((shard, line, text_of(record, ARGS.text_column)))
        except Exception as error:
            problems.append((shard, line, reason_of(error)))
    try:
        ids = ids_of([text for *_, text in texts])
    except Exception:
        # Find the documents that cannot be tokenized, such as one with half of a surrogate pair.
        for shard, line, text in texts:
            try:
                ids += ids_of([text])
            except Exception as error:
                problems.append((shard, line, reason_of(error)))
    documents = [np.array([*tokens, TOKENIZER.eos_token_id], dtype=np.int32) for tokens in ids]
    lengths = [len(document) for document in documents]
    return np.concatenate([np.zeros(0, dtype=np.int32), *documents]), lengths, problems


def ids_of(texts):
    """Return the token ids of each text."""
    return TOKENIZER(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []


class Stream:
    """The tokens of a source, which workers make a few batches ahead."""

    def __init__(self, source, pool, state):
        self.source, self.pool, self.waiting = source, pool, deque()
        self.num_tokens = self.num_bad = 0
        self.next_batch()
        self.num_tokens = state.get("tokens", 0)
        self.num_bad = state.get("bad", self.num_bad)
        self.document, self.token = state.get("document", 0), state.get("token", 0)
        self.first = sum(self.lengths[: self.document])

    def state(self):
        """Return the state of this stream; its "source" is for Source.load_state()."""
        names = ("num_tokens", "num_bad", "document", "token")
        state = {name.removeprefix("num_"): getattr(self, name) for name in names}
        return state | {"source": self.batch}

    def next_batch(self):
        """Take the next batch that has documents, or none at the end of a source."""
        source, self.lengths = self.source, []
        self.document = self.token = self.first = 0
        most = 2 * source.args.workers
        while not self.lengths:
            try:
                while len(self.waiting) < most and not source.has_ended():
                    state = source.state()
                    self.waiting.append((state, self.pool.submit(tokenize, source.next_batch())))
                if not self.waiting:
                    self.batch = source.state()
                    return
                self.batch, result = self.waiting.popleft()
                self.tokens, self.lengths, problems = result.result()
            except BrokenProcessPool:
                fail("a worker was killed, perhaps for lack of memory; lower --workers")
            for shard, line, reason in problems:
                where = source.shards[shard].name + (f", line {line}" if line else "")
                if not source.args.skip_bad:
                    fail(f"{where}: {reason}")
                if not line:
                    tqdm.write(f"{where}: {reason}; the rest of this shard is left out")
            self.num_bad += len(problems)

    def take(self, most):
        """Return the tokens that are left of a document, but at most `most`."""
        first = self.first + self.token
        tokens = self.tokens[first : min(first + most, self.first + self.lengths[self.document])]
        self.token += len(tokens)
        self.num_tokens += len(tokens)
        if self.token == self.lengths[self.document]:
            self.first += self.token
            self.document, self.token = self.document + 1, 0
            if self.document == len(self.lengths):
                self.next_batch()
        return tokens

    def behind(self, total):
        """Return the number of tokens that are missing from this source, of `total` tokens."""
        return self.source.weight * total - self.num_tokens

    def passes(self):
        """Return the number of complete passes over the documents of the source."""
        return self.batch["pass"]


# ---- pieces ----------------------------------------------------------------------------------
def write(path, data):
    """Write bytes to a file that has its name only once it is complete and on the disk."""
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


def write_json(path, value):
    """Write a value as a JSON file."""
    write(path, json.dumps(value, indent=1).encode())


def describe(args, sources, tokenizer):
    """Return the facts that determine the content of the pieces, and how they are read."""
    largest = max(tokenizer.get_vocab().values())
    listing = [[shard.name, shard.size] for source in sources for shard in source.shards]
    return {
        "format": FORMAT,
        "dtype": "uint16" if largest < 2**16 else "int32",
        "tokenizer": fingerprint_of(tokenizer),
        "piece": args.piece,
        "parts": args.part[1],
        "seed": args.seed,
        "text_column": args.text_column,
        "skip_bad": args.skip_bad,
        "sources": {source.name: source.weight if source.repeats else None for source in sources},
        "shards": hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16],
    }


def write_index(path, index):
    """Write index.json, or stop if the folder was begun with other arguments."""
    if not path.exists():
        return write_json(path, index)
    before = json.loads(path.read_text())
    for name, value in index.items():
        if before.get(name) != value:
            problem = f"{name} was {before.get(name)}, is now {value}"
            fail(f"{path.parent}: {problem}; choose a different --output")


def write_pieces(args, index, streams, state, start):
    """Write the pieces of this part, from the first that is missing to its end mark.

    `start` is the value of time.monotonic() before tokenizing.
    """
    part, parts = args.part
    state_path = args.output / f"part-{part}.json"
    piece, filled, number = np.empty(args.piece, dtype=index["dtype"]), 0, state.get("pieces", 0)

    def finish_piece():
        nonlocal filled, number
        name = f"{part + number * parts:06}.tokens"
        write(args.output / name, piece[:filled].data)
        filled, number = 0, number + 1
        total = sum(stream.num_tokens for stream in streams)
        speed = (total - before) / (time.monotonic() - start)
        tqdm.write(f"{name}  tokens {total:,}  tokens_per_second {speed:,.0f}")

    def save(**more):
        state = {"pieces": number, "streams": [stream.state() for stream in streams]}
        write_json(state_path, state | more)

    size = sum(stream.source.num_bytes for stream in streams)
    once = not any(stream.source.repeats for stream in streams)
    bar = tqdm(total=(size if once else 0) or None, unit="B", unit_scale=True, disable=None)
    before = sum(stream.num_tokens for stream in streams)
    shown = start
    while min(stream.passes() for stream in streams) == 0:
        total = sum(stream.num_tokens for stream in streams)
        if time.monotonic() > shown + 0.5:
            shown = time.monotonic()
            speed = (total - before) / (shown - start)
            bar.set_postfix_str(f"{total:,} tokens, {speed:,.0f} tokens/s", refresh=False)
            bar.update(CountedFile.num_read - bar.n)
        # Finish a document first; then take the source that is furthest behind its weight.
        stream = max(streams, key=lambda it: (it.token > 0, it.behind(total)))
        tokens = stream.take(args.piece - filled)
        piece[filled : filled + len(tokens)] = tokens
        filled += len(tokens)
        if filled == args.piece:
            finish_piece()
            save()
    if filled:
        finish_piece()
    save(ended=True)
    bar.close()


def main():
    """Write one part of the folder."""
    args = parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    sources = sources_of(args)
    try:
        tokenizer = load_tokenizer(args.model_name)
    except Exception as error:
        fail(f"--model-name {args.model_name}: {reason_of(error)}")
    index = describe(args, sources, tokenizer)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output {args.output}: {error}")
    write_index(args.output / "index.json", index)
    state_path = args.output / f"part-{args.part[0]}.json"
    state = json.loads(state_path.read_text()) if state_path.exists() else {}
    if state.get("ended"):
        return print(f"{args.output}: part {args.part[0]} is complete already")
    for source, stream in zip(sources, state.get("streams", []), strict=False):
        source.load_state(stream["source"])
    with start_workers(args) as pool:
        start = time.monotonic()
        states = state.get("streams") or [{}] * len(sources)
        streams = [
            Stream(source, pool, state) for source, state in zip(sources, states, strict=True)
        ]
        write_pieces(args, index, streams, state, start)
    report(args, index, streams)


def report(args, index, streams):
    """Print what this part has; once all parts are complete, add the sums to index.json."""
    for stream in streams:
        read = f", read {stream.passes()} times" if stream.passes() > 1 else ""
        bad = f", {stream.num_bad:,} bad documents left out" if stream.num_bad else ""
        print(f"{stream.source.name}: {stream.num_tokens:,} tokens{read}{bad}")
    paths = [args.output / f"part-{part}.json" for part in range(args.part[1])]
    parts = [json.loads(path.read_text()) for path in paths if path.exists()]
    if len(parts) == len(paths) and all(part.get("ended") for part in parts):
        sums = {"pieces": sum(part["pieces"] for part in parts)}
        for name in ("tokens", "bad"):
            sums[name] = sum(stream[name] for part in parts for stream in part["streams"])
        sums["bytes"] = sums["tokens"] * np.dtype(index["dtype"]).itemsize
        write_json(args.output / "index.json", index | {"complete": sums})
        print(f"{args.output}: complete, with {sums['tokens']:,} tokens in {sums['pieces']} pieces")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # A shell reports Ctrl-C with status 130.
        sys.exit(130)
