"""Corpora: find or prepare one, memory-map it, split it, cut it into windows, and order the windows.

A corpus is one flat file of tokens (bytes: 256 of them). It is memory-mapped and only the windows asked for are read,
so it may be larger than memory. `python data.py` lists what there is, `python data.py NAME_OR_PATH` prepares one.

split     the first 90 % is train, the next 5 % val, the last 5 % test
window    k covers tokens k*seq .. k*seq+seq, its targets lie one token on; a split holds n = (len-1) // seq windows
order     sequence j of step s is window perm(seed, epoch)[(s*batch + j) mod n]: a pure function of the step, so ranks
          and micro-batches only choose which j they take, and resuming needs no saved state
"""

import argparse
import hashlib
import mmap
import os
import re
import stat
import sys
import sysconfig
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

NAMED = {"stdlib": "the .py files of the running Python's standard library"}  # locate() finds each of these
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # what pip installed, and tests
SPLITS = {"train": (0, 90), "val": (90, 95), "test": (95, 100)}  # from, to: percent of the tokens
progress = partial(tqdm, unit="B", unit_scale=True, leave=False, delay=1, disable=None)  # None: only on a terminal


class InputError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


class Parser(argparse.ArgumentParser):
    """argparse with the module docstring kept as it is laid out, and one line for a mistake."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        raise InputError(f"{message} (see {self.prog} --help)")


def command_line(main):
    """Runs a program's main(): an InputError becomes one line on stderr and exit code 2, Ctrl-C exit code 130. A stream that
    is closed, or that cannot show a character, stops nothing."""
    if sys.stdout is None or sys.stderr is None:
        nowhere = open(os.devnull, "w")  # noqa: SIM115  open as long as the program runs
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (InputError, OSError) as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


@contextmanager
def explain(action):
    """Turns what the operating system refuses (no permission, disk full, ...) into an InputError."""
    try:
        yield
    except OSError as e:
        raise InputError(f"cannot {action}: {e}") from e


def read_chunks(path):
    """Yields the bytes of a file, at most a megabyte at a time."""
    with explain(f"read {path}"), open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            yield chunk


@dataclass
class Corpus:
    name: str  # safe for a folder name: "stdlib", or the path's stem with odd characters replaced by _
    path: Path  # the memory-mapped file
    tokens: np.ndarray  # (size,) uint8, a read-only memory map
    vocab_size: int = 256

    @cached_property
    def sha256(self):
        """SHA-256 of the file, in hex. Read on first use, about a second per GB."""
        digest = hashlib.sha256()
        with progress(total=self.tokens.nbytes, desc=f"hashing {self.name}") as bar:
            for chunk in read_chunks(self.path):
                digest.update(chunk)
                bar.update(len(chunk))
        return digest.hexdigest()

    def split(self, name):
        """The tokens of "train", "val" or "test", a view of the map. Raises InputError for any other name."""
        if name not in SPLITS:
            raise InputError(f"unknown split {name!r}: choose one of {', '.join(SPLITS)}")
        first, last = (len(self.tokens) * percent // 100 for percent in SPLITS[name])
        return self.tokens[first:last]


def cache_dir():
    """Where prepared corpora are kept: $NANOHILBERT_DATA, or else data/ beside this file."""
    return Path(os.environ.get("NANOHILBERT_DATA") or Path(__file__).parent / "data").resolve()


def list_files(root, stdlib):
    """[(path below root, size, mtime_ns), ...] sorted by path. Names that begin with a dot do not count."""
    files, todo = [], [root]
    while todo:
        for path in todo.pop().iterdir():
            wanted = not stdlib or path.is_dir() or (path.suffix == ".py" and path.is_file())
            if path.name.startswith(".") or not wanted or (stdlib and path.name in NOT_STDLIB):
                continue
            # A link out could pull any of the user's files into a downloaded folder. Python's own folder is trusted.
            link = path.is_symlink()
            if link and not stdlib and not Path(os.path.realpath(path)).is_relative_to(root):
                raise InputError(f"{path} is a link out of {root}: replace it by a copy, or remove it")
            info = path.stat()
            if stat.S_ISREG(info.st_mode):
                files.append((path.relative_to(root).as_posix(), info.st_size, info.st_mtime_ns))
            elif not stat.S_ISDIR(info.st_mode):
                raise InputError(f"{path} is not a regular file: remove it from the folder")
            elif not link and path != cache_dir():  # a linked folder is read under its own name; our output never
                todo.append(path)
    return sorted(files)


def locate(name_or_path):
    """Finds a corpus without preparing it. A known name comes before a path: write ./stdlib for a file called so.

    Returns: its name; the file to map; the size that file must have; the folder, and the files in it that have to be
        joined first ([] if that is done already, or if a file was given: it is mapped where it lies).
    """
    stdlib = name_or_path == "stdlib"
    given = Path(sysconfig.get_paths()["stdlib"] if stdlib else name_or_path)
    with explain(f"read {given}"):
        if not name_or_path or not given.exists():
            raise InputError(f"no corpus {str(name_or_path)!r}: give a name ({', '.join(NAMED)}), a file or a folder")
        info = given.stat()
        stem = "stdlib" if stdlib else Path(os.path.abspath(given)).stem
        name = re.sub(r"[^A-Za-z0-9._-]", "_", stem).strip(".")[:40] or "_"
        if stat.S_ISREG(info.st_mode):
            return name, given, info.st_size, given.parent, []
        if not stat.S_ISDIR(info.st_mode):
            raise InputError(f"{given} is not a regular file or a folder: copy what you want of it into a file")
        root = given.resolve()
        if root == cache_dir():
            raise InputError(f"{given} is where prepared corpora are kept: name a file in it, or another folder")
        files = list_files(root, stdlib)
        total = sum(size for _, size, _ in files)
        fingerprint = hashlib.sha256(os.fsencode(f"{root}\0"))  # a folder that changed gets a new file
        for file, size, mtime in files:
            fingerprint.update(os.fsencode(f"{file}\0{size}\0{mtime}\0"))
        path = cache_dir() / f"{name}-{fingerprint.hexdigest()[:12]}.bin"
        ready = path.is_file() and path.stat().st_size == total
        return name, path, total, root, [] if ready else files


def replace_file(path, write):
    """write(f) makes the content of `path`: at any moment, also after a crash, it is the old file or the new one, whole."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")  # unique: another process may be doing the same
    try:
        with open(part, "xb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def join(root, files, size, path):
    """Writes the files one after another to `path`, whole or not at all."""

    def write(out):
        with progress(total=size, desc=f"preparing {path.name}") as bar:
            for file, _, _ in files:
                for chunk in read_chunks(root / file):
                    out.write(chunk)
                    bar.update(len(chunk))
        if out.tell() != size:
            raise InputError(f"{root} changed while it was read: run again when nothing writes to it")

    with explain(f"write {path} ({size:,} bytes; NANOHILBERT_DATA may name another folder)"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, write)


def load(name_or_path, seq):
    """Finds a corpus, prepares it if it is not yet, and maps it.

    Args: name_or_path: a name in NAMED, a file (mapped where it lies), or a folder (its files joined, sorted by path);
        seq: tokens per window, of which every split must hold at least one.
    Returns: a Corpus. Raises: InputError for whatever is wrong with it.
    """
    if seq < 1:
        raise InputError(f"--seq must be at least 1, not {seq}")
    name, path, size, root, files = locate(name_or_path)
    if size == 0:
        raise InputError(f"{name_or_path} is empty: give a file or folder with data in it (hidden files do not count)")
    if files:
        join(root, files, size, path)
    with explain(f"read {path}"):
        corpus = Corpus(name, path, np.memmap(path, dtype=np.uint8, mode="r"))
    if hasattr(mmap, "MADV_RANDOM"):  # else every window read from a cold disk drags in its whole neighbourhood
        corpus.tokens.base.madvise(mmap.MADV_RANDOM)
    shortest = min(len(corpus.split(split)) for split in SPLITS)
    if shortest < seq + 1:
        raise InputError(
            f"{name_or_path} is too short for --seq {seq}: each split needs {seq + 1} bytes, the shortest "
            f"has {shortest}; lower --seq, or bring {20 * (seq + 1):,} bytes in all (now {size:,})"
        )
    return corpus


def num_windows(tokens, seq):
    """The number of windows of `seq` tokens, and their targets, in tokens (size,)."""
    return (len(tokens) - 1) // seq


def get_windows(tokens, seq, index):
    """Reads the windows `index` (n,) of tokens (size,), and no other bytes.

    Returns: x, y, (n, seq) int64 and contiguous; y is x one token on. Raises: IndexError past the last window.
    """
    windows = np.lib.stride_tricks.sliding_window_view(tokens, seq + 1)[::seq]  # (num_windows, seq + 1), a view
    xy = windows[np.asarray(index)]
    return torch.from_numpy(xy[:, :-1].astype(np.int64)), torch.from_numpy(xy[:, 1:].astype(np.int64))


@lru_cache(maxsize=2)  # the epoch that ends and the one that begins
def permutation(n, seed, epoch):
    """RandomState([seed, epoch]).permutation(n): numpy froze that stream for good, so its version changes no run.

    Shuffling the smallest dtype gives the same order in half the memory or less: 4 bytes a window up to 2^32 windows.
    """
    order = np.arange(n, dtype=np.min_scalar_type(n))
    np.random.RandomState([seed, epoch]).shuffle(order)
    return order


def train_index(n, seed, step, batch):
    """The windows of a training step, drawn without replacement from n; one epoch follows the other without a gap.

    Args: n: windows in the split; seed: 0 .. 2^32-1; step: from 0; batch: sequences in a step, over all ranks.
    Returns: (batch,) int64.
    """
    position = np.arange(step * batch, (step + 1) * batch)
    epoch, place = position // n, position % n
    parts = [permutation(n, seed, e)[place[epoch == e]] for e in range(epoch[0], epoch[-1] + 1)]
    return np.concatenate(parts).astype(np.int64)


def epoch_steps(corpus, seq, batch):
    """Whole steps of `batch` windows of `seq` tokens in one pass over the training split, at least 1."""
    return max(1, num_windows(corpus.split("train"), seq) // batch)


def eval_index(n, count):
    """The windows to evaluate on: min(count, n) of the n, evenly spread, int64."""
    count = min(count, n)
    return np.arange(count) * n // count


def main():
    parser = Parser(
        description="List the corpora, or prepare one and print its size, hash and splits.",
        epilog="Prepared corpora are kept in $NANOHILBERT_DATA, or else in data/ beside this file.",
    )
    parser.add_argument(
        "corpus",
        nargs="?",
        metavar="NAME_OR_PATH",
        help=f"{', '.join(NAMED)}, a file, or a folder (its files joined, sorted by path, without those whose name "
        "begins with a dot); left out: list what is available",
    )
    parser.add_argument(
        "--seq", type=int, default=256, help="bytes in a window; each split must hold one (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.corpus is None:
        for known, what in NAMED.items():
            _, _, size, _, missing = locate(known)
            print(f"{known:<8} {size:,} bytes, {'not prepared yet' if missing else 'prepared'}: {what}")
        print("PATH     any file or folder, as raw bytes")
        return
    corpus = load(args.corpus, args.seq)
    print(f"name   {corpus.name}\nfile   {corpus.path}\nsize   {len(corpus.tokens):,} bytes")
    print(f"sha256 {corpus.sha256}")
    for split in SPLITS:
        tokens = corpus.split(split)
        print(f"{split:<6} {len(tokens):,} bytes, {num_windows(tokens, args.seq):,} windows of {args.seq}")


if __name__ == "__main__":
    command_line(main)
