"""Corpora: find or fetch one, verify it, convert it, memory-map it, cut it into windows, and order the windows.

    python data.py                          the named corpora, and what each takes to prepare
    python data.py owt                      downloads, verifies and converts one; the next call goes on where it stopped
    python data.py FOLDER --tokens gpt2     joins the files of a folder, and converts them to GPT-2's tokens
    python data.py FILE --column content    of a parquet or JSON lines file another column than `text`
    python data.py owt --verify             compares size and hash with what was prepared

corpus    one flat file of tokens (bytes: 256 of them), memory-mapped. It is made whole or not at all, in a folder where
          meta.json records how far that came
file      bytes, mapped where they lie; of a parquet or JSON lines file the column `text`, of a zip archive the files in
          it. Its first 64 kB show which it is, not its name, but for NAME.tokens. What holds no text (gzip, image, ...)
          is refused
folder    its files, sorted by path. Hidden names, caches, links, folders of runs and what holds no text are left out
split     the first 90 % is train, the next 5 % val, the last 5 % test; wikitext103 has its own
window    k covers tokens k*seq .. k*seq+seq, its targets lie one token on; a split holds n = (len-1) // seq windows
order     sequence j of step s is window perm(seed, epoch)[(s*batch + j) mod n]: a pure function of the step, so ranks
          and micro-batches only choose which j they take, and resuming needs no saved state
"""

import argparse
import codecs
import ctypes
import hashlib
import io
import json
import mmap
import os
import posixpath
import re
import shlex
import socket
import sys
import sysconfig
import time
import zipfile
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows: no locks
    fcntl = None

# requests, pyarrow and torch are imported where they are used: together they take over a second.

SEPARATOR = "\n\n"  # after every document of a parquet or JSON lines file
SPLITS = {"train": (0, 90), "val": (90, 95), "test": (95, 100)}  # from, to: percent of the tokens


class InputError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


def program(name):
    """The command that starts a program beside this file, from the present folder."""
    here = Path(__file__).parent
    return f"python {name if os.path.samefile('.', here) else shlex.quote(str(here / name))}"


class Parser(argparse.ArgumentParser):
    """argparse with the module docstring kept as it is laid out, and one line for a mistake."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        raise InputError(f"{message} (see {self.prog} --help)")


class Extra:
    """sys.stderr of the moment, for notes and progress bars. What cannot be written is lost, and ends nothing."""

    def __getattr__(self, name):
        return getattr(sys.stderr, name)

    def write(self, text=""):
        with suppress(OSError, ValueError, AttributeError):  # full, closed, none
            sys.stderr.write(text)
            sys.stderr.flush()

    flush = write


class Bar(tqdm):
    def close(self):
        self.delay = 0  # it may stand there already, if a note was printed above it: then it has to go
        super().close()


EXTRA = Extra()
progress = partial(Bar, file=EXTRA, unit="B", unit_scale=True, leave=False, delay=1, disable=None)  # on a terminal


def note(text):
    """Prints a line on stderr, above the progress bars."""
    tqdm.write(text, file=EXTRA)


note_once = lru_cache(note)


def keep_memory():
    """Lets glibc keep the memory of freed tensors: to map it anew takes up to a tenth of PAM's step on a CPU."""
    with suppress(AttributeError, TypeError):  # other systems have no mallopt
        allocator = ctypes.CDLL(None)
        allocator.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        allocator.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def command_line(main, silent=False):
    """Runs a program's main(): an InputError becomes one line on stderr and exit code 2, Ctrl-C exit code 130. A stream
    that is closed, or cannot show a character, stops nothing. silent: another rank prints what went wrong."""
    os.environ.pop("MPLBACKEND", None)  # a notebook's, which matplotlib may not know here: no window is opened
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        main()
        print(end="", flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        pass
    except (InputError, OSError, MemoryError, RuntimeError) as e:
        if is_out_of_memory(e):
            e = "out of memory: take a smaller model, batch or length"
        elif isinstance(e, RuntimeError):
            raise
        if not silent:
            note(f"error: {e}")
        sys.exit(2)
    except KeyboardInterrupt as e:
        sys.exit(128 + (e.args or (2,))[0])  # the signal's number
    finally:
        for name in ("stdout", "stderr"):
            try:
                getattr(sys, name).flush()
            except (OSError, ValueError, AttributeError):  # it takes no more: Python would end with the code 120
                setattr(sys, name, None)


@contextmanager
def explain(action):
    """Turns what the operating system refuses (no permission, disk full, ...) into an InputError."""
    try:
        yield
    except OSError as e:
        raise InputError(f"cannot {action}: {e}") from e


def one_line(error):
    """What an exception says, in a line, without the exceptions around it."""
    return " ".join(str(error).rpartition("Caused by ")[2].split())[:200]


def is_out_of_memory(e):
    return isinstance(e, MemoryError) or isinstance(e, RuntimeError) and re.search("out of memory|allocate", str(e))


def cache_dir():
    """Where prepared corpora are kept: $NANOHILBERT_DATA, or else data/ beside this file."""
    folder = os.environ.get("NANOHILBERT_DATA") or Path(__file__).parent / "data"
    return Path(os.path.realpath(os.path.expanduser(folder)))  # resolve() raises at links in a circle


def replace_file(path, write, keep=None):
    """write(f) makes the content of `path`. At any moment, also after a crash, it is the old file or the new one.
    `keep`: the old file gets this name (and for a moment `path` is missing)."""
    part = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")  # unique: another process may be doing the same
    try:
        with open(part, "xb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        if keep and path.exists():
            os.replace(path, keep)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def hash_file(path, file=None):
    """SHA-256 of a file, in hex. `file`: the open file, if another one may have its path by now."""
    digest = hashlib.sha256()
    with explain(f"read {path}"), nullcontext(file) if file else open(path, "rb") as f:
        f.seek(0)
        with progress(total=os.fstat(f.fileno()).st_size, desc=f"hashing {path.name}") as bar:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
                bar.update(len(chunk))
    return digest.hexdigest()


def stamp_of(file):
    """(size, mtime_ns, ctime_ns) of a file's path or number. A write changes one of them, even if mtime is set back."""
    info = os.stat(file)
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns


@dataclass
class Corpus:
    name: str  # safe for a folder name: "stdlib", or the path's stem with odd characters replaced by _
    path: Path  # the memory-mapped file
    tokens: np.ndarray  # (size,) uint8, or uint16 for GPT-2's tokens: a read-only memory map
    record: dict  # meta.json of a converted corpus, or {}
    vocab_size: int
    file: object  # the mapped file, held open: its path may become the name of another one
    stamp: tuple  # (size, mtime_ns, ctime_ns) of it when it was mapped
    left_out: str = ""  # what the folder or archive holds besides, and why that is no data

    def __del__(self):
        self.file.close()

    @cached_property
    def sha256(self):
        """SHA-256 of the file, in hex: as recorded, or else read on first use, about a second per GB."""
        self.check_unchanged()
        return self.record.get("sha256") or hash_file(self.path, self.file)

    def summary(self):
        """What a run's log records of its data."""
        said = {"name": self.name, "size": len(self.tokens), "sha256": self.sha256}
        return said | ({"left_out": self.left_out} if self.left_out else {})

    def check_unchanged(self):
        """Raises InputError if the mapped file has changed: if its size is another, or its times are, and its hash is
        another or was not known. Takes a microsecond while the times are the same."""
        if (now := stamp_of(self.file.fileno())) != self.stamp:
            known = self.record.get("sha256") or self.__dict__.get("sha256")
            if now[0] != self.stamp[0] or hash_file(self.path, self.file) != known:
                raise InputError(f"{self.path} was changed since the run began: put the text back, or begin anew")
            self.stamp = now

    def split(self, name):
        """The tokens of "train", "val" or "test", a view of the map."""
        if splits := self.record.get("splits"):
            return self.tokens[slice(*(place // self.tokens.itemsize for place in splits[name]))]
        return self.tokens[slice(*(len(self.tokens) * percent // 100 for percent in SPLITS[name]))]


# ----------------------------------------------------------------------------------------------------------------------
# What the named corpora are made of


@dataclass(frozen=True)
class Source:
    """One file to make a corpus of."""

    url: str
    size: int | None = None  # bytes
    sha256: str | None = None  # in hex; if this and the size are None, the hub is asked
    split: str | None = None  # where it belongs, if the corpus comes with splits of its own

    @property
    def name(self):
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Recipe:
    """A named corpus: the text of its sources, one after another."""

    about: str
    sources: tuple = ()
    separator: str = SEPARATOR
    cut: int | None = None  # bytes that the corpus may have: it ends with the last document that fits whole
    size: int = 0  # bytes, about
    download: int = 0  # bytes, about


HUB = "https://huggingface.co"  # $HF_ENDPOINT may name a mirror: pinned hashes make any safe
OWT = f"{HUB}/datasets/Skylion007/openwebtext/resolve/79d93d786212f7344586290adb811d4ae6a1762c/plain_text/"
FINEWEB = f"{HUB}/datasets/HuggingFaceFW/fineweb/resolve/9bb295ddab0e05d785b879661af7260fed5140fc/sample/10BT/"
WIKITEXT = f"{HUB}/datasets/Salesforce/wikitext/resolve/b08601e04326c79dfdd32d625aee71d232d685c3/wikitext-103-raw-v1/"
NAMED = {
    "stdlib": Recipe("the .py files of the running Python's standard library", size=12_000_000),
    "enwik8": Recipe("the first 100 MB of English Wikipedia, as XML", (
        Source("http://mattmahoney.net/dc/enwik8.zip", 36_445_475,
               "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),
    ), size=100_000_000, download=36_445_475),
    "owt": Recipe("OpenWebText, its first 3 GB", tuple(
        Source(f"{OWT}train-{i:05}-of-00080.parquet", size, sha256) for i, (size, sha256) in enumerate((
            (302_848_326, "caed9f4b7053d7cd4d1a13ce9ec9224d84a3bba1f11579193562a7e31ebe656e"),
            (305_678_548, "70307b7749e10cb0bfb895fde024dd82d96e6bb2710bca1886b952abe45bf3ea"),
            (304_419_240, "0d02a67f73464d383c8df2059f27b36b4b1652c855051be3c65930baef12bd2d"),
            (304_332_042, "437833e29326c3d88792e834d36368d2c4836e5c5f3535233a88f3cf7dd46aad"),
            (301_175_397, "7b3cef26e2d4e2b041e6e13a0102cb4d03277e8c6418b8ff1b865544a4695de3"),
            (301_755_705, "2d3200a936b021c9abafdda6714e4d678387e8854e56abaac5d2b62882fc6044"),
            (303_536_715, "76c0b96ce0250c3a32f2e8878172a4b79ac7970fede78edfcfc4d98d87ec5a6c"),
        ))
    ), cut=3_000_000_000, size=3_000_000_000, download=2_123_745_973),
    "fineweb": Recipe("FineWeb, the first 15 GB of its 10BT sample", (
        Source(f"{FINEWEB}000_00000.parquet", 2_147_292_183,
               "6b552ea48424648dc86d00df276f93fdfc55e9ad342ce3e4affc23a3a370792b"),
        *(Source(f"{FINEWEB}{i:03}_00000.parquet") for i in range(1, 6)),  # the last one is taken only if it has to be
    ), cut=15_000_000_000, size=15_000_000_000, download=10_740_000_000),
    "wikitext103": Recipe("WikiText-103, raw: good and featured articles of Wikipedia", (
        Source(f"{WIKITEXT}train-00000-of-00002.parquet", 156_987_808,
               "74da360f23826045b3e6ac6375411fdb15f003030aa74f2596ed08b857cb9212", "train"),
        Source(f"{WIKITEXT}train-00001-of-00002.parquet", 157_088_770,
               "ba090ac30dbf5461e8dcbdd1a1b8e6f3cf9c2c756d64f0c1220450acd514f720", "train"),
        Source(f"{WIKITEXT}validation-00000-of-00001.parquet", 657_209,
               "204929b7ff9d6184953f867dedb860e40aa69c078fc1e54b3baaa8fb28511c4c", "val"),
        Source(f"{WIKITEXT}test-00000-of-00001.parquet", 732_610,
               "5f1bea067869d04849c0f975a2b29c4ff47d867f484f5010ea5e861eab246d91", "test"),
    ), separator="", size=543_000_000, download=315_466_397),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Downloading

TIMEOUT = 10, 60  # seconds to connect, and without a byte
RETRIES = 5  # of a request; and of connections in a row that bring nothing
BACKOFF = 1.0  # seconds, doubled after each further failure
MAY_PASS = {408, 429, *range(500, 600)}  # a server that is crowded, or at fault


def request(url, path, start=0):
    """The answer that holds a file from byte `start` on. Faults that may pass are tried again, after the time that the
    server asks for. Raises InputError, which says that a copy may be put at `path` by hand."""
    import requests
    from urllib3 import Retry

    headers = {"User-Agent": "nanoHilbert", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={start}-"} if start else {}
    if url.startswith(f"{HUB}/"):
        url = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/") + url.removeprefix(HUB)
        token = os.environ.get("HF_TOKEN", "").strip()
        if not re.fullmatch("[!-~]*", token):  # requests would show it
            raise InputError("HF_TOKEN holds a character that no token has, such as a blank or ...: copy it whole")
        headers |= {"Authorization": f"Bearer {token}"} if token else {}  # dropped on a redirect to another host
    session = requests.Session()
    for adapter in session.adapters.values():  # other: faults of certificates
        adapter.max_retries = Retry(RETRIES, other=0, backoff_factor=BACKOFF, status_forcelist=MAY_PASS)
    try:
        answer = session.get(url, headers=headers, stream=True, timeout=TIMEOUT)
        answer.raise_for_status()
        if answer.status_code != (206 if start else 200) or "text/html" in answer.headers.get("Content-Type", ""):
            raise ValueError("the server sends something else")
        return answer
    except (OSError, ValueError) as e:  # those of requests are OSErrors
        raise InputError(f"cannot download {url} ({one_line(e)}): run again later, to go on where it stopped, or put a "
                         f"copy as {path.name} into {path.parent}") from None  # fmt: skip


def look_up(url, path):
    """Size in bytes and SHA-256 of a file of the hub, as its redirect to the storage says."""
    with request(url, path) as answer:
        for step in (*answer.history, answer):
            if "X-Linked-Etag" in step.headers:
                return int(step.headers["X-Linked-Size"]), step.headers["X-Linked-Etag"].strip('"')
    raise InputError(f"cannot verify {url}, as the server does not tell its SHA-256: unset HF_ENDPOINT")


def obtain(source, path):
    """Brings a source to path, whole and verified, or not at all; a file put there by hand is compared. What has come
    of a download is kept for later calls, in a .part file tied to the hash."""
    if path.exists():
        if source.sha256 and (found := hash_file(path)) != source.sha256:
            raise InputError(f"{path} is not the right file (SHA-256 {found} instead of {source.sha256}): remove it")
        return
    import requests

    note(f"downloading {source.url}")
    size, sha256 = (source.size, source.sha256) if source.sha256 else look_up(source.url, path)
    part = path.with_name(f"{path.name}.{sha256[:12]}.part")
    failures = 0
    with open(part, "ab") as f, progress(total=size, initial=f.tell(), desc=path.name) as bar:
        while (begin := f.tell()) < size:
            time.sleep(BACKOFF * 2**failures if failures else 0)
            with request(source.url, path, begin) as answer, suppress(requests.RequestException):  # it breaks off
                for chunk in answer.iter_content(1 << 16):
                    bar.update(f.write(chunk[: size - f.tell()]))  # more would be found by the hash
            failures = failures + 1 if f.tell() == begin else 0
            if failures > RETRIES:
                raise InputError(f"the connection to {source.url} always breaks: run again later, to go on")
    if (found := hash_file(part)) != sha256:
        part.unlink()
        raise InputError(f"{source.url} came damaged (SHA-256 {found} instead of {sha256}): run again")
    os.replace(part, path)


# ----------------------------------------------------------------------------------------------------------------------
# What files hold

NOTHING = 'it holds no text to train on (--column "" takes the bytes of any file)'
KINDS = {  # how the bytes of what is no text begin: what it is, and how to make it one, if that is not done here
    rb"PK\x03\x04.{26}[^/]{1,99}/data\.pkl": ("checkpoint of PyTorch", NOTHING),
    rb"PK\x03\x04.*\[Content_Types\]\.xml|PK\x03\x04.{26}mimetypeapplication/": (
        "Office document or e-book", "pandoc -t plain {} > FILE.txt"),
    rb"PK\x03\x04|PK\x05\x06": ("zip", None),
    rb"PAR1": ("parquet", None),
    rb"\x1f\x8b\x08": ("gzip", "gunzip -c {} > FILE"),
    rb"BZh": ("bzip2", "bunzip2 -c {} > FILE"),
    rb"\xfd7zXZ\0": ("xz", "unxz -c {} > FILE"),
    rb"\x28\xb5\x2f\xfd": ("Zstandard", "unzstd -c {} > FILE"),
    rb".{257}ustar": ("tar archive", "tar -xf {}"),
    rb"\xff\xfe\0\0": ("UTF-32 text", "iconv -f UTF-32 -t UTF-8 {} > FILE.txt"),
    rb"\xff\xfe|\xfe\xff": ("UTF-16 text", "iconv -f UTF-16 -t UTF-8 {} > FILE.txt"),
    rb"\x93NUMPY": ("numpy array", "write GPT-2's tokens as little-endian uint16 to a file NAME.tokens"),
}
CONTROLS = bytes({*range(32), 127} - {*b"\a\b\t\n\v\f\r\x1b"})  # as `file` judges
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # what pip installed, and tests


def kind_of(file, column):
    """What an open file holds ("bytes", "JSON lines", or one of KINDS), and what to do about it, or None.
    Its first 64 kB decide. Text has no NUL in them, no mark of UTF-16, and hardly a control character."""
    file.seek(0)
    head = file.read(1 << 16)
    if str(file.name).lower().endswith(".tokens"):
        return "GPT-2's tokens", None
    if not column:
        return "bytes", None
    controls = len(head) - len(head.translate(None, CONTROLS))
    if b"\0" in head or 100 * controls > len(head) or head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        kinds = (kind for begins, kind in KINDS.items() if re.match(begins, head, re.DOTALL))
        return next(kinds, ("binary data", NOTHING))
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if re.match(rb'\[\s*\{\s*"', start):
        return "JSON array", """jq -c '.[]' {} > FILE.jsonl, or --column "" for the bytes as they are"""
    if start.startswith(b"{"):
        file.seek(0)
        with suppress(ValueError, RecursionError):
            first = next(filter(bytes.strip, iter(partial(file.readline, 1 << 24), b"")))  # that is not empty
            if len(first) == 1 << 24 and re.match(rb'\s*\{\s*"', first.removeprefix(codecs.BOM_UTF8)):
                return "JSON lines of over 16 MB", 'cut its documents, or --column "" for the bytes as they are'
            looks_so = re.fullmatch(rb'\{\s*".*\}\s*', first.removeprefix(codecs.BOM_UTF8).lstrip())
            if column in json.loads(first):
                return "JSON lines", None
            return f"JSON lines without a column {column}", 'name one with --column, or "" for the lines as they are'
        if looks_so:
            return "JSON lines, the first of which is no JSON", 'mend it, or --column "" for the lines as they are'
    return "bytes", None


def is_run(folder):
    """Whether a folder is that of a run: its log and checkpoints grow with the run that reads it, and are no data."""
    with suppress(OSError), open(folder / "log.jsonl", "rb") as log:
        return log.read(18) == b'{"event": "header"'
    return False


def why_left_out(path, stdlib):
    """Why a file or folder in a folder is no data, or None."""
    if path.name.startswith(".") or stdlib and path.name in NOT_STDLIB:
        return "hidden"
    if stdlib and path.is_file():  # of which a distribution may have made some a link
        return None if path.suffix == ".py" else "no source"
    if path.is_symlink():
        return "link"  # what it leads to is read where it lies, or not meant
    if path.name == "tables.md":  # of report.py, which may come in between a run and its resumption
        return "tables of runs"
    if not path.is_dir():
        with suppress(OSError):  # a stream is closed
            if any(os.path.samestat(path.stat(), os.fstat(stream)) for stream in (1, 2)):
                return "output of this program"  # it grows as the program speaks
        return None if path.is_file() else "not a regular file"
    if path == cache_dir() or path.name == "__pycache__" or (path / "pyvenv.cfg").exists():
        return "cache"
    return "folder of a run" if is_run(path) else None


def list_files(root, stdlib=False):
    """[(path below root, *stamp_of), ...] of a folder or file, sorted by path; and what is left out, {why: names}."""
    files, left, todo = [], {}, [root]
    if not root.is_dir():
        return [("", *stamp_of(root))], left
    while todo:
        for path in todo.pop().iterdir():
            name = path.relative_to(root).as_posix()
            if why := why_left_out(path, stdlib):
                left.setdefault(why, []).append(name)
            elif path.is_dir():
                todo.append(path)
            else:
                files.append((name, *stamp_of(path)))
    return sorted(files), {} if stdlib else left


def read_path(root, stdlib, column, separator, record):
    """Yields (None, text) of a file, or of the files of a folder. The record gets what holds no text as it is."""
    files, _ = list_files(root, stdlib)
    for name, *_ in files:
        path = root / name
        with explain(f"read {path}"), open(path, "rb") as file:
            for text in read_file(file, path, name or root.name, column, separator, record["left_out"]):
                yield None, text
    if list_files(root, stdlib)[0] != files:
        raise InputError(f"{root} changed while it was read: run again when nothing writes to it")


def read_recipe(recipe, folder, record):
    """Yields (split, text) of a named corpus from where its record ends, and (its address, None) behind each source. A
    source is fetched into the folder when it is needed, and deleted when the caller has recorded it."""
    size = record["size"]
    for source in recipe.sources[len(record["sources"]) :]:
        path = folder / source.name
        obtain(source, path)
        for _, text in read_path(path, False, "text", recipe.separator, record):
            size += len(text)
            if recipe.cut and size > recipe.cut:
                return
            yield source.split, text
        yield source.url, None
        path.unlink()


def read_file(file, path, name, column, separator, left):
    """Yields the texts of an open file: documents, each with the separator, or bytes as they come. Adds it to `left` by
    its name if it holds none."""
    kind, advice = kind_of(file, column)
    file.seek(0)
    if advice or kind == "GPT-2's tokens":
        left.setdefault(kind, []).append(name)
    elif kind == "zip":
        try:
            with zipfile.ZipFile(file) as archive:
                # An update is added under the same name. Nothing is unpacked under these names.
                last = {posixpath.normpath(entry.filename): entry for entry in archive.infolist()}
                for inner, entry in sorted(last.items()):
                    is_link = entry.external_attr >> 28 == 0o12  # the type of a Unix file
                    inner = re.sub(r"^(\.\./)+", "", inner)
                    if is_link or "/." in f"/{inner}".removesuffix("/."):
                        left.setdefault("link" if is_link else "hidden", []).append(f"{name}/{inner}")
                    elif not entry.is_dir():
                        with archive.open(entry) as f:
                            yield from read_file(f, path / inner, f"{name}/{inner}", column, separator, left)
        except (InputError, OSError, MemoryError):
            raise
        except Exception as e:  # zipfile and its decompressors raise many kinds
            raise InputError(f"{path} is a damaged or encrypted zip archive ({e})") from None
    elif kind == "parquet":
        yield from (text + separator.encode() for text in read_parquet(file, path, column))
    elif kind == "JSON lines":
        for number, line in enumerate(file, 1):
            try:
                text = json.loads(line)[column] if line.strip() else None
                if text is not None:
                    yield (text + separator).encode(errors="replace")
            except (ValueError, KeyError, TypeError, RecursionError):
                raise InputError(f"{path}, line {number:,}: no JSON with a string named {column}") from None
    else:
        yield from iter(partial(file.read, 1 << 20), b"")


def read_parquet(file, path, column):
    """Yields the documents in a column of a parquet file. About 16 MB are read at a time, at least a page of it."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        # With pre_buffer, or without the row group named, it reads ahead: memory would grow with the file.
        with ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as table:
            columns, strings = {c.name: str(c.type) for c in table.schema_arrow}, "(large_)?(string|binary)(_view)?"
            is_text = re.fullmatch(f"{strings}|dictionary<values={strings},.*", columns.get(column, ""))
            if not is_text or table.schema_arrow.names.count(column) > 1:
                raise InputError(f"{path} has no one column of strings named {column} (--column): it has {columns}")
            for group in range(table.num_row_groups):
                about = table.metadata.row_group(group)
                rows = 1 + min(999, (about.num_rows << 24) // max(1, about.total_byte_size))
                for batch in table.iter_batches(rows, row_groups=[group], columns=[column]):
                    yield from batch.column(0).cast(pa.large_binary()).drop_null().to_pylist()
    except pa.ArrowException as e:
        raise InputError(f"{path} is not a readable parquet file ({one_line(e)})") from None


# ----------------------------------------------------------------------------------------------------------------------
# Preparing


@contextmanager
def hold(folder, wait=False):
    """Locks a folder for this process, until the block or the process ends. Its file .lock says whose it is.

    wait: until a process that holds it ends; else that is an InputError. Where locks do not work, a note says so."""
    path = Path(folder, ".lock")
    with explain(f"write {path}"):
        f = open(path, "a+", errors="replace")  # noqa: SIM115  closed below
    with f:
        f.seek(0)
        holder = f.read(200).strip() or "another process"
        try:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise InputError(f"{folder} is in use by {holder}: wait, or name another") from None
                note(f"{folder} is in use by {holder}: waiting until that ends")
                fcntl.flock(f, fcntl.LOCK_EX)
        except (OSError, AttributeError) as e:  # AttributeError: Windows
            note(f"note: {folder} cannot be locked ({e}): start no second run in it")
        with explain(f"write {path}"):
            f.truncate(0)
            now = time.strftime("%Y-%m-%d %H:%M:%S")  # written at once: closing f has nothing left that could fail
            os.write(f.fileno(), f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode())
        yield


def read_record(path, recipe):
    """What meta.json says of the file `path` that is made of `recipe`, or of its part: a new record, if neither is."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        record, part = json.loads(path.with_name("meta.json").read_bytes()), path.with_name(f"{path.name}.part")
        size = (part if part.exists() else path).stat().st_size
        if record["recipe"] == recipe and (path.exists() if record["sha256"] else size >= record["size"]):
            return record
    # sources: those that are in it whole; splits: {name: [from, to]} in bytes, where the corpus has its own;
    # left_out: {why: files that hold no text}; size: in bytes, so far; sha256: only once it is whole
    return {"recipe": recipe, "sources": [], "splits": {}, "left_out": {}, "size": 0, "sha256": None}


def write_record(path, record):
    replace_file(path.with_name("meta.json"), lambda f: f.write(json.dumps(record, indent=1).encode()))


def build(path, record, read, size):
    """Makes the file `path`, whole or not at all, from where its record ends. Returns the finished record. read and
    size: see `prepare`."""
    part = path.with_name(f"{path.name}.part")
    if record["size"] and not part.exists():  # it was stopped before its last line
        os.replace(path, part)
    with open(part, "ab") as out, progress(total=size, initial=record["size"], desc=f"preparing {path.name}") as bar:
        out.truncate(out.seek(record["size"]))
        for split, text in read(record):
            if text is None:
                out.flush()
                os.fsync(out.fileno())  # the record must not be ahead of the bytes
                record["sources"].append(split)
                write_record(path, record | {"size": out.tell()})
                continue
            begin = out.tell()
            bar.update(out.write(text))
            if split:
                record["splits"].setdefault(split, [begin, 0])[1] = out.tell()
        out.flush()
        os.fsync(out.fileno())
    record["sha256"] = hash_file(part)
    os.replace(part, path)
    record["size"], record["mtime_ns"], _ = stamp_of(path)
    write_record(path, record)
    return record


def prepare(path, recipe, read, size=None, verify=False):
    """Makes the file `path`, unless it is there whole, by its size and time or its hash. Returns its record.

    Args: recipe: what it is made of, a JSON value; read: function of the record that yields (split or None, bytes), and
        (name, None) where what came so far need not come again; size: in bytes, about; verify: compare the hash."""
    folder, record = path.parent, read_record(path, recipe)
    if not record["sha256"]:
        with explain(f"write into {folder} (NANOHILBERT_DATA may name another folder)"):
            folder.mkdir(parents=True, exist_ok=True)
            with hold(folder, wait=True):  # another process may have made it meanwhile
                record = read_record(path, recipe)
                record = record if record["sha256"] else build(path, record, read, size)
    with explain(f"read {path}"):
        length, mtime_ns, _ = stamp_of(path)
    if verify or (length, mtime_ns) != (record["size"], record["mtime_ns"]):
        if length != record["size"] or hash_file(path) != record["sha256"]:
            raise InputError(f"{path} is damaged: its size or SHA-256 is not the recorded one; delete {folder}")
        with suppress(OSError):  # a copy of it: not to be hashed at every start
            write_record(path, record | {"mtime_ns": mtime_ns})
    return record


def find(name_or_path, column="text"):
    """Finds a corpus without preparing it. A known name comes before a path: write ./stdlib for a file called so.

    Returns: its name, the file to map, a call that prepares it (None: it is there), what is left out, {why: names}."""
    stdlib = name_or_path == "stdlib"
    if name_or_path in NAMED and not stdlib:
        path, recipe = cache_dir() / name_or_path / f"{name_or_path}.bin", NAMED[name_or_path]
        made_of = [[list(astuple(source)) for source in recipe.sources], recipe.separator, recipe.cut]
        read = partial(read_recipe, recipe, path.parent)
        return name_or_path, path, partial(prepare, path, made_of, read, recipe.size), {}
    given = Path(os.path.expanduser(sysconfig.get_paths()["stdlib"] if stdlib else name_or_path))
    stem = "stdlib" if stdlib else Path(os.path.abspath(given)).stem
    name = re.sub(r"[^A-Za-z0-9._-]", "_", stem).strip(".")[:40] or "_"
    with explain(f"read {given}"):
        if not name_or_path or not given.exists():
            raise InputError(f"no corpus {str(name_or_path)!r}: give a name ({', '.join(NAMED)}), a file or a folder")
        root = given.resolve()
        if given.is_file():
            with open(given, "rb") as file:
                kind, advice = kind_of(file, column)
            if advice:
                advice = advice.replace("{}", shlex.quote(str(given)))
                raise InputError(f"{given} cannot be read as it is ({kind}): {advice}")
            if kind in ("bytes", "GPT-2's tokens"):
                return name, given, None, {}
        elif not given.is_dir() or root == cache_dir() or is_run(root):
            raise InputError(f"{given} is no regular file, or holds prepared corpora or a run: name another one")
        files, left = list_files(root, stdlib)
    tie = hashlib.sha256(os.fsencode(f"{root}\0{column}\0{files}")).hexdigest()[:12]  # a folder that changed: a new one
    path, size = cache_dir() / f"{name}-{tie}" / f"{name}.bin", sum(size for _, size, *_ in files)
    return name, path, partial(prepare, path, tie, partial(read_path, root, stdlib, column, SEPARATOR), size), left


# ----------------------------------------------------------------------------------------------------------------------
# Tokens of GPT-2: byte pair encoding with a vocabulary of 50,257 (Radford et al. 2019)

GPT2_VOCAB = 50257
WIKITEXT_TOKENS = {"train": 117_920_140, "val": 247_289, "test": 283_287}  # known counts: the check of the conversion
BLOCK = 200_000  # bytes encoded at once: longer strings are slower
LONGEST_PIECE = 400_000  # bytes: tiktoken fails on a million blanks in a row, and takes memory for a long piece
# Up to where a blank follows, or punctuation a letter or number: there every token ends, whatever comes next.
CUT = re.compile(r".*(?:\S(?=[ \t\r\n\xa0\u3000])|[^\W_](?=[!-/:-@\[-`{-~\u3001-\u3003\uff01-\uff0f\uff1a-\uff20]))",
                 re.DOTALL)  # fmt: skip
TOKENS = ("bytes", "gpt2")


def gpt2_encoding():
    """The tiktoken.Encoding of GPT-2, which fetches its files on first use, verified, into the cache folder."""
    import tiktoken

    folder = os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(cache_dir() / "gpt2"))
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as e:
        how = f"without a network copy {folder} from a machine where this was done"
        raise InputError(f"GPT-2's tokens cannot be fetched ({one_line(e)}): {how}") from None


def codec(vocab_size):
    """(encode: bytes -> list of tokens, decode: token -> bytes) of a model with this vocabulary. Raises InputError."""
    if vocab_size == 256:
        return list, lambda token: bytes([token])
    if vocab_size != GPT2_VOCAB:
        raise InputError(f"a vocabulary of {vocab_size}: neither bytes (256) nor GPT-2's tokens ({GPT2_VOCAB})")

    def encode(text):
        raw = text.decode(errors="replace").encode()
        return [token for tokens in encode_blocks(io.BytesIO(raw), len(raw), "the text", 0) for token in tokens]

    return encode, gpt2_encoding().decode_single_token_bytes


def encode_blocks(file, size, path, begin):
    """Yields the tokens of the next `size` bytes of an open file, block by block: the same as of all in one piece.
    path, and begin, the byte where the file stands, are for messages."""
    encoding, raw, end = gpt2_encoding(), b"", begin + size  # raw: what is read, and not encoded yet
    while begin < end:
        if not (more := file.read(min(BLOCK, end - begin - len(raw)))):
            raise InputError(f"{path} changed while it was read: run again when nothing writes to it")
        raw += more
        last = begin + len(raw) == end
        try:
            text, _ = codecs.utf_8_decode(raw, "strict", last)
        except UnicodeDecodeError as e:
            raise InputError(f"{path} is not UTF-8 text: byte {begin + e.start:,}") from None
        if not last:
            text = whole[0] if (whole := CUT.match(text)) else ""
        if not text and len(raw) > LONGEST_PIECE:
            raise InputError(f"{path}: from byte {begin:,} on no word ends for more than {LONGEST_PIECE:,}")
        yield encoding.encode_ordinary(text)
        used = len(text.encode())
        raw, begin = raw[used:], begin + used


def tokenize(corpus, verify=False):
    """The corpus in GPT-2's tokens, prepared in a folder of its own; split by split if it has its own splits."""
    splits = corpus.record.get("splits") or {"": [0, len(corpus.tokens)]}

    def read(_):
        for split, (begin, end) in splits.items():
            corpus.file.seek(begin)
            count = 0
            for tokens in encode_blocks(corpus.file, end - begin, corpus.path, begin):
                count += len(tokens)
                yield split, np.array(tokens, "<u2").tobytes()
            if corpus.name == "wikitext103" and count != WIKITEXT_TOKENS.get(split, count):
                raise InputError(f"{split} of WikiText-103 became {count:,} tokens: not the raw corpus")
        corpus.check_unchanged()

    path = cache_dir() / f"{corpus.name}-{corpus.sha256[:12]}-gpt2" / f"{corpus.name}.tokens"
    record = prepare(path, [corpus.sha256, splits], read, verify=verify)  # of the text: it may lie elsewhere
    return map_file(corpus.name, path, "<u2", record, GPT2_VOCAB)


def check_tokens(path):
    """Raises InputError if a file does not hold GPT-2's tokens, as little-endian uint16. Reads it whole."""
    size, counts = path.stat().st_size, np.zeros(1 << 16, np.int64)
    for begin in range(0, size // 2, 1 << 22):
        counts += np.bincount(np.fromfile(path, "<u2", 1 << 22, offset=2 * begin), minlength=1 << 16)
    seen = counts.nonzero()[0] if size > 1 else counts[:1]
    text = (seen & 255).min() >= 9 and (seen >> 8).min() >= 9  # pairs of characters: neither is a control character
    other = seen[-1] >= GPT2_VOCAB or seen[-1] < 256  # too large; single bytes
    numpy = np.fromfile(path, np.uint8, 6).tobytes() == b"\x93NUMPY"  # the header of a .npy file
    if size % 2 or text or other or numpy or counts[0] * 8 > size:  # more than a quarter is 0: numbers of 4 bytes
        numbers = f"it has {size:,} bytes, numbers from {seen[0]} to {seen[-1]}"
        raise InputError(f"{path} is no file of GPT-2's tokens, little-endian uint16: {numbers}")


def map_file(name, path, dtype, record, vocab_size=256):
    """A Corpus of the numbers in a file, mapped. Nothing may write to it meanwhile: see Corpus.check_unchanged."""
    file = open(path, "rb")  # noqa: SIM115  open as long as the corpus
    return Corpus(name, path, np.memmap(file, dtype, "r"), record, vocab_size, file, stamp_of(file.fileno()))


def load(name_or_path, seq, verify=False, tokens="bytes", column=None):
    """Finds a corpus, prepares it if it is not yet, and maps it.

    Args: name_or_path: a name in NAMED, a file, or a folder; seq: tokens per window, which every split must hold;
        verify: compare the hash of what was prepared; tokens: "bytes", or "gpt2" (a file NAME.tokens holds them ready,
        as little-endian uint16); column: of parquet and JSON lines files (default: text; "": the bytes of any file).
    Returns: a Corpus. Raises: InputError for whatever is wrong with it."""
    if seq < 1:
        raise InputError(f"--seq must be at least 1, not {seq}")
    name, path, make, left = find(name_or_path, "text" if column is None else column)
    record = make(verify=verify) if make else {}
    for source in NAMED[name_or_path].sources if name_or_path in NAMED else ():
        with suppress(OSError):  # the corpus is whole: the source in which it ends, or that a stop left
            path.with_name(source.name).unlink()
    left |= {why: left.get(why, []) + names for why, names in record.get("left_out", {}).items()}
    first = {why: ", ".join(sorted(names)[:3]) + ", ..." * (len(names) > 3) for why, names in sorted(left.items())}
    left_out = "; ".join(f"{why}: {names}" for why, names in first.items())
    with explain(f"read {path}"):
        if not path.stat().st_size:
            raise InputError(f"{name_or_path} holds nothing to train on" + f" (left out: {left_out})" * bool(left_out))
        ready = path.suffix.lower() == ".tokens" and not make
        if ready and tokens != "gpt2":
            raise InputError(f"{path} holds GPT-2's tokens, as its name says: add --tokens gpt2")
        if ready:
            check_tokens(path)
        corpus = map_file(name, path, "<u2" if ready else "u1", record, GPT2_VOCAB if ready else 256)
    if tokens == "gpt2" and not ready:
        corpus = tokenize(corpus, verify)
    corpus.left_out = left_out
    if left_out and ("TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK") == "0"):
        note_once(f"{name_or_path}: left out {left_out}")
    if hasattr(mmap, "MADV_RANDOM"):  # else every window read from a cold disk drags in its whole neighbourhood
        corpus.tokens.base.madvise(mmap.MADV_RANDOM)
    shortest, unit = min(len(corpus.split(split)) for split in SPLITS), "tokens" if tokens == "gpt2" else "bytes"
    if shortest < seq + 1:
        needed = f"each split needs {seq + 1} {unit}, the shortest has {shortest}"
        raise InputError(f"{name_or_path} is too short for --seq {seq}: {needed}; bring {20 * (seq + 1):,} in all")
    return corpus


def num_windows(tokens, seq):
    """The number of windows of `seq` tokens, and their targets, in tokens (size,)."""
    return (len(tokens) - 1) // seq


def get_windows(tokens, seq, index):
    """Reads the windows `index` (n,) of tokens (size,), and no other bytes.

    Returns: x, y, contiguous int64 tensors (n, seq); y is x one token on. Raises: IndexError past the last window."""
    import torch

    windows = np.lib.stride_tricks.sliding_window_view(tokens, seq + 1)[::seq]  # (num_windows, seq + 1), a view
    xy = windows[np.asarray(index)]
    return torch.from_numpy(xy[:, :-1].astype(np.int64)), torch.from_numpy(xy[:, 1:].astype(np.int64))


@lru_cache(maxsize=2)  # the epoch that ends and the one that begins
def permutation(n, seed, epoch):
    """RandomState([seed, epoch]).permutation(n): numpy froze that stream for good, so its version changes no run."""
    order = np.arange(n, dtype=np.min_scalar_type(n))  # the same order as of int64, in half the memory or less
    np.random.RandomState([seed, epoch]).shuffle(order)
    return order


def train_index(n, seed, step, batch):
    """The windows of a training step, drawn without replacement from n; one epoch follows the other without a gap.

    Args: seed: 0 .. 2^32-1; step: from 0; batch: sequences in a step, over all ranks. Returns: (batch,) int64."""
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
    kept = "Prepared corpora are kept in $NANOHILBERT_DATA (default: data/ beside this file)."
    parser = Parser(description=__doc__, epilog=kept)
    named = f"{', '.join(NAMED)}, a file or a folder (default: list what there is)"
    parser.add_argument("corpus", nargs="?", metavar="NAME_OR_PATH", help=named)
    parser.add_argument("--seq", type=int, default=256, help="tokens in a window, of which each split needs one (256)")
    parser.add_argument("--tokens", choices=TOKENS, default="bytes", help="bytes, or GPT-2's BPE (default: bytes)")
    parser.add_argument("--column", default="text", help="of parquet, JSON lines (text); empty: bytes as they are")
    parser.add_argument("--verify", action="store_true", help="read all of what was prepared, and compare its hash")
    args = parser.parse_args()
    if args.corpus is None and args.verify:
        raise InputError("--verify needs the name or path of a corpus")
    if args.corpus is None:
        for name in NAMED:
            recipe, path = NAMED[name], find(name)[1]
            largest = max((source.size or 0 for source in recipe.sources), default=0)  # with the corpus on the disk
            down, disk = recipe.download / 1e9, (recipe.size + largest) / 1e9
            cost = f", downloads {down:.2f} GB, takes up to {disk:.2f} GB of disk" if down else ""
            prepared = path.exists() and f"{path.stat().st_size:,} bytes, prepared"
            print(f"{name:<12} {prepared or f'about {recipe.size:,} bytes, not prepared yet{cost}'}: {recipe.about}")
        print("PATH         any file or folder: bytes, parquet, JSON lines, zip")
        return
    corpus = load(args.corpus, args.seq, args.verify, args.tokens, args.column)
    unit = "tokens" if args.tokens == "gpt2" else "bytes"
    verified = " (verified)" if corpus.record else " (nothing was prepared that it could be compared with)"
    print(f"name   {corpus.name}\nfile   {corpus.path}\nsize   {len(corpus.tokens):,} {unit}")
    print(f"sha256 {corpus.sha256}{verified * args.verify}")
    for split in SPLITS:
        tokens = corpus.split(split)
        print(f"{split:<6} {len(tokens):,} {unit}, {num_windows(tokens, args.seq):,} windows of {args.seq}")


if __name__ == "__main__":
    command_line(main)
