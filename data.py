"""Corpora: fetch or find one, verify it, convert it, memory-map it, cut it into windows, and order the windows.

A corpus is one flat file of tokens (bytes: 256 of them). It is memory-mapped and only the windows asked for are read,
so it may be larger than memory. `python data.py` lists what there is, `python data.py NAME_OR_PATH` prepares one.

corpus    arrives whole or not at all. A named one (owt, ...) is made in a folder of its own, source by source: each is
          downloaded, verified, converted, deleted. meta.json there records how far that came, and at the end what was
          made of what. Whatever stops it, the next call goes on from there and ends with the same bytes.
split     the first 90 % is train, the next 5 % val, the last 5 % test; wikitext103 has its own
window    k covers tokens k*seq .. k*seq+seq, its targets lie one token on; a split holds n = (len-1) // seq windows
order     sequence j of step s is window perm(seed, epoch)[(s*batch + j) mod n]: a pure function of the step, so ranks
          and micro-batches only choose which j they take, and resuming needs no saved state
"""

import argparse
import hashlib
import json
import mmap
import os
import platform
import random
import re
import shutil
import stat
import sys
import sysconfig
import time
import uuid
import zipfile
import zlib
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

# requests, pyarrow and torch are imported where they are used: together they take over a second.

NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # what pip installed, and tests
SPLITS = {"train": (0, 90), "val": (90, 95), "test": (95, 100)}  # from, to: percent of the tokens
progress = partial(tqdm, unit="B", unit_scale=True, leave=False, delay=1, disable=None)  # None: only on a terminal


class InputError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


class DataChanged(InputError):
    """The file of a corpus is no longer the one that a run began with."""


class Parser(argparse.ArgumentParser):
    """argparse with the module docstring kept as it is laid out, and one line for a mistake."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        raise InputError(f"{message} (see {self.prog} --help)")


def command_line(main, silent=False):
    """Runs a program's main(): an InputError becomes one line on stderr and exit code 2, Ctrl-C exit code 130. A stream that
    is closed, or that cannot show a character, stops nothing. silent: another rank prints what went wrong."""
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
        if not silent:
            print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as e:
        if not isinstance(e, MemoryError) and not re.search("out of memory|allocate", str(e)):
            raise
        print("error: out of memory: take a smaller model, batch or length", file=sys.stderr)
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


@contextmanager
def needs(package):
    """Turns an import that fails into an InputError."""
    try:
        yield
    except ImportError as e:
        raise InputError(f"{package} cannot be imported ({e}): pip install {package}") from e


def read_chunks(path):
    """Yields the bytes of a file, at most a megabyte at a time."""
    with explain(f"read {path}"), open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            yield chunk


def cache_dir():
    """Where prepared corpora are kept: $NANOHILBERT_DATA, or else data/ beside this file."""
    return Path(os.environ.get("NANOHILBERT_DATA") or Path(__file__).parent / "data").resolve()


def replace_file(path, write, keep=None):
    """write(f) makes the content of `path`: at any moment, also after a crash, it is the old file or the new one, whole.
    `keep`: the old file gets this name (and for a moment `path` is missing)."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")  # unique: another process may be doing the same
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
    """SHA-256 of a file, in hex. `file`: it, open already, if its path may be another file's by now."""
    digest = hashlib.sha256()
    with (
        explain(f"read {path}"),
        nullcontext(file) if file else open(path, "rb") as f,
        progress(total=os.fstat(f.fileno()).st_size, desc=f"hashing {path.name}") as bar,
    ):
        f.seek(0)
        while chunk := f.read(1 << 20):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def note(text):
    """A line for who waits, on stderr."""
    tqdm.write(text, file=sys.stderr)


@dataclass
class Corpus:
    name: str  # safe for a folder name: "stdlib", or the path's stem with odd characters replaced by _
    path: Path  # the memory-mapped file
    tokens: np.ndarray  # (size,) uint8, or uint16 for GPT-2's tokens: a read-only memory map
    record: dict = field(default_factory=dict)  # meta.json of a converted corpus
    vocab_size: int = 256
    file: object = None  # the mapped file, held open: its path may become the name of another one
    stamp: tuple | None = None  # (size, mtime_ns) of it when it was mapped

    @cached_property
    def sha256(self):
        """SHA-256 of the file, in hex: as recorded, or else read on first use, about a second per GB."""
        return self.record.get("sha256") or hash_file(self.path, self.file)

    def check_unchanged(self):
        """Raises DataChanged if the mapped file is no longer what it was. Takes a microsecond: call it before each step.

        The file is judged by its size and time of change; where only the time differs, by its hash, if `sha256` was read
        before. To read a mapped file where it was cut ends the process with a bus error. If another file takes its place
        under the same name, nothing changes: the map is still the old one."""
        info = os.fstat(self.file.fileno())
        now, was = (info.st_size, info.st_mtime_ns), self.stamp
        if now == was:
            return
        known = self.record.get("sha256") or self.__dict__.get("sha256")
        if now[0] != was[0] or known is None or hash_file(self.path, self.file) != known:
            how = "was written to" if now[0] == was[0] else f"has {now[0]:,} bytes instead of {was[0]:,}"
            raise DataChanged(f"{self.path} {how} since the run began, so that its losses are of two texts: run it anew")
        self.stamp = now

    def split(self, name):
        """The tokens of "train", "val" or "test", a view of the map. Raises InputError for any other name."""
        if name not in SPLITS:
            raise InputError(f"unknown split {name!r}: choose one of {', '.join(SPLITS)}")
        first, last = self.record.get("splits", {}).get(name) or (
            len(self.tokens) * percent // 100 for percent in SPLITS[name]
        )
        return self.tokens[first:last]


# ----------------------------------------------------------------------------------------------------------------------
# What the named corpora are made of


@dataclass(frozen=True)
class Source:
    """One file to make a corpus of."""

    url: str  # or the path of a file here
    size: int | None = None  # bytes; None: what the server says
    sha256: str | None = None  # in hex; None: what the server says on first use. Of a .zip: of what is packed in it
    split: str | None = None  # that it belongs to, if the corpus comes with splits of its own
    mirrors: tuple = ()  # more URLs
    tries: int | None = None  # of each URL; None: TRIES


@dataclass(frozen=True)
class Recipe:
    """A corpus: the text of its sources, one after another."""

    about: str
    sources: tuple = ()
    separator: str = ""  # after every document of a parquet file
    cut: int | None = None  # bytes: ends with the last document that fits whole
    size: int = 0  # bytes, about
    download: int = 0  # bytes, about
    disk: int = 0  # bytes needed while it is prepared: the corpus and its largest source


SEPARATOR = "\n\n"  # after every document of a parquet file
HUB = "https://huggingface.co"  # $HF_ENDPOINT may name a mirror: the hashes make any safe
OWT = f"{HUB}/datasets/Skylion007/openwebtext/resolve/79d93d786212f7344586290adb811d4ae6a1762c/plain_text/"
FINEWEB = f"{HUB}/datasets/HuggingFaceFW/fineweb/resolve/9bb295ddab0e05d785b879661af7260fed5140fc/sample/10BT/"
WIKITEXT = f"{HUB}/datasets/Salesforce/wikitext/resolve/b08601e04326c79dfdd32d625aee71d232d685c3/wikitext-103-raw-v1/"
# fmt: off
NAMED = {
    "stdlib": Recipe("the .py files of the running Python's standard library"),
    "enwik8": Recipe("the first 100 MB of English Wikipedia, as XML", (
        Source("http://mattmahoney.net/dc/enwik8.zip", mirrors=("https://data.deepai.org/enwik8.zip",),
               sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"),
    ), size=100_000_000, download=36_445_475, disk=136_445_475),
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
    ), separator=SEPARATOR, cut=3_000_000_000, size=3_000_000_000, download=2_123_745_973, disk=3_305_678_548),
    "fineweb": Recipe("FineWeb, the first 15 GB of its 10BT sample", (
        Source(f"{FINEWEB}000_00000.parquet", 2_147_292_183,
               "6b552ea48424648dc86d00df276f93fdfc55e9ad342ce3e4affc23a3a370792b"),
        *(Source(f"{FINEWEB}{i:03}_00000.parquet") for i in range(1, 6)),  # the last one is taken only if it has to be
    ), separator=SEPARATOR, cut=15_000_000_000, size=15_000_000_000, download=10_740_000_000, disk=17_150_000_000),
    "wikitext103": Recipe("WikiText-103, raw: good and featured articles of Wikipedia", (
        Source(f"{WIKITEXT}train-00000-of-00002.parquet", 156_987_808,
               "74da360f23826045b3e6ac6375411fdb15f003030aa74f2596ed08b857cb9212", "train"),
        Source(f"{WIKITEXT}train-00001-of-00002.parquet", 157_088_770,
               "ba090ac30dbf5461e8dcbdd1a1b8e6f3cf9c2c756d64f0c1220450acd514f720", "train"),
        Source(f"{WIKITEXT}validation-00000-of-00001.parquet", 657_209,
               "204929b7ff9d6184953f867dedb860e40aa69c078fc1e54b3baaa8fb28511c4c", "val"),
        Source(f"{WIKITEXT}test-00000-of-00001.parquet", 732_610,
               "5f1bea067869d04849c0f975a2b29c4ff47d867f484f5010ea5e861eab246d91", "test"),
    ), size=543_000_000, download=315_466_397, disk=700_000_000),
}
# fmt: on


# ----------------------------------------------------------------------------------------------------------------------
# Downloading

TIMEOUT = 10, 60  # seconds to connect, and without a byte
TRIES = 6  # in a row without a megabyte gained
BACKOFF = 1.0  # seconds after the first failure, doubled after each further one
LONGEST_WAIT = 900  # seconds that a server may ask for
MAY_PASS = {401, 403, 408, 416, 425, 429}  # a signed URL that expired, a crowded server, ...; and all from 500 on


def request(url, start=0):
    """Asks for a file from byte `start` on, always at its original URL: those that it redirects to expire."""
    import requests

    headers = {"User-Agent": "nanoHilbert", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    if url.startswith(f"{HUB}/"):
        url = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/") + url[len(HUB) :]
        if token := os.environ.get("HF_TOKEN", "").strip():
            headers["Authorization"] = f"Bearer {token}"  # requests drops it on a redirect to another host
    return requests.get(url, headers=headers, stream=True, timeout=TIMEOUT)


def check_answer(answer):
    """Raises RequestException for an answer that is not the file."""
    import requests

    if answer.status_code not in (200, 206):
        raise requests.HTTPError(f"HTTP status {answer.status_code}", response=answer)
    if answer.headers.get("Content-Type", "").startswith("text/html"):
        raise requests.RequestException("a web page instead of the file")


def linked_sha256(answer):
    """The SHA-256 that the hub states beside its redirect to the storage, or None."""
    etags = (a.headers.get("X-Linked-Etag", "").strip('"') for a in (*answer.history, answer))
    return next((etag for etag in etags if re.fullmatch("[0-9a-f]{64}", etag)), None)  # of small files another hash


def wait_asked(answer):
    """Seconds that a 429 or 503 asks to wait: `Retry-After`, or the hub's `RateLimit: "api";r=0;t=55`. Else None."""
    from email.utils import parsedate_to_datetime

    if answer is None or answer.status_code not in (429, 503):
        return None
    after = answer.headers.get("Retry-After", "")
    if after.isdecimal():
        return int(after)
    with suppress(TypeError, ValueError):
        return max(0, parsedate_to_datetime(after).timestamp() - time.time())
    limit = re.search(r"\bt=(\d+)", answer.headers.get("RateLimit", ""))
    return int(limit[1]) if limit else None


def insist(action, url, path, position=lambda: 0, tries=None):
    """Returns what action() returns, once it succeeds; pauses between the tries.

    Args: url, path: what is downloaded whereto, for messages; position: a function that tells how many bytes have come;
        tries: how often in a row without a megabyte gained (default TRIES).
    Raises: InputError when it is in vain.
    """
    with needs("requests"):
        import requests

    failures = 0
    while True:
        before = position()
        try:
            return action()
        except requests.RequestException as e:
            failures = 1 if position() - before >= 1 << 20 else failures + 1
            reason = " ".join(str(e).rpartition("Caused by ")[2].split())[:200]
            status = getattr(e.response, "status_code", 500)
            if (wait := wait_asked(e.response)) is None:
                wait = BACKOFF * 2 ** (failures - 1) * random.uniform(0.75, 1.25)  # not in step with others
            elif wait > LONGEST_WAIT:
                reason, status = f"{reason}, asks to wait {wait:.0f} s", 400
            if failures == (tries or TRIES) or (status < 500 and status not in MAY_PASS):
                raise InputError(
                    f"cannot download {url} ({reason}): run again later, which goes on where it stopped, or fetch "
                    f"{path.name} by hand and put it into {path.parent}"
                ) from None
            note(f"{path.name}: {reason}; trying again in {wait:.1f} s")
            time.sleep(wait)


def look_up(url, path):
    """Size in bytes and SHA-256 (None: not told) that the server states for the file at url."""
    import requests

    def ask():
        with request(url) as answer:
            check_answer(answer)
            size, sha256 = answer.headers.get("Content-Length", ""), linked_sha256(answer)
            if not size.isdecimal():
                raise requests.RequestException("its size is not told")
        if url.startswith(f"{HUB}/") and not sha256:  # a mirror may not pass it on: the list of the folder has it too
            repository, _, file = url.removeprefix(HUB).partition("/resolve/")
            revision, _, file = file.partition("/")
            with request(f"{HUB}/api{repository}/tree/{revision}/{os.path.dirname(file)}") as answer:
                entries = answer.json() if answer.ok else []
            with suppress(KeyError, TypeError):
                sha256 = next((e["lfs"]["oid"] for e in entries if e["path"] == file), None)
        return int(size), sha256

    return insist(ask, url, path)


def download(url, size, sha256, path, tries=None):
    """Fetches the file at url to path: whole and verified, or not at all.

    What has come is kept in a .part file, which is tied to url (with its revision), size and hash, and is not fetched
    again, by a later call neither.

    Args: size: in bytes; sha256: in hex, of a .zip that of its content; tries: of `insist`. Raises: InputError, OSError.
    """
    import requests

    tie = hashlib.sha256(f"{url}\0{size}\0{sha256}".encode()).hexdigest()[:12]
    part = path.with_name(f"{path.name}.{tie}.part")
    part.touch()
    with open(part, "r+b") as f, progress(total=size, desc=path.name) as bar:

        def restart():
            nonlocal digest
            f.seek(0)
            f.truncate()
            digest = hashlib.sha256()
            bar.reset()

        def transfer():
            start = f.tell()
            if start == size:
                return
            with request(url, start) as answer:
                if answer.status_code == 416:  # the file ends before `start`: this is no part of it
                    restart()
                check_answer(answer)
                if linked_sha256(answer) not in (None, sha256):
                    raise InputError(
                        f"{url} is another file than before (SHA-256 {linked_sha256(answer)}, was {sha256})"
                    )
                total = answer.headers.get("Content-Length", "*")
                if answer.status_code == 206:
                    span, _, total = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
                    if span.partition("-")[0] != str(start):
                        raise requests.RequestException("another part than was asked for")
                if total not in ("*", str(size)):
                    raise requests.RequestException(f"{total} bytes instead of {size}")
                if answer.status_code == 200 and start:  # it sends the whole file
                    restart()
                for chunk in answer.iter_content(1 << 16):
                    if f.tell() + len(chunk) > size:
                        restart()
                        raise requests.RequestException(f"more than {size} bytes")
                    f.write(chunk)
                    digest.update(chunk)
                    bar.update(len(chunk))
            if f.tell() < size:
                raise requests.RequestException("the connection ended early")

        digest = hashlib.sha256()
        for chunk in iter(partial(f.read, 1 << 20), b""):  # from an earlier call
            digest.update(chunk)
        bar.update(f.tell())
        if f.tell() > size:
            restart()
        for again in (True, False):
            insist(transfer, url, path, f.tell, tries)
            f.flush()
            found = content_sha256(part) if path.suffix == ".zip" else digest.hexdigest()
            if found == sha256:
                break
            restart()
            if not again:
                raise InputError(f"{url} came damaged, twice (SHA-256 {found} instead of {sha256}): run again later")
            note(f"{path.name} came damaged: fetching it once more")
        os.fsync(f.fileno())
    os.replace(part, path)
    for old in path.parent.glob(f"{path.name}.*.part"):  # of a file that it was before
        old.unlink()


def obtain(source, folder, record):
    """The path and SHA-256 of a source, verified: where it lies, put into the folder by hand, or downloaded."""
    path = folder / source.url.rpartition("/")[2]
    if "://" not in source.url:
        return Path(source.url), hash_file(Path(source.url))
    if path.exists():
        _, sha256 = record["pins"].get(source.url) or (source.size, source.sha256)
        found = content_sha256(path)
        if sha256 is None:
            with suppress(InputError):  # without a network whoever put it there is to be trusted
                _, sha256 = look_up(source.url, path)
        if found and sha256 in (None, found):
            return path, found
        os.replace(path, f"{path}.bad")
        note(f"{path} is not the right file (SHA-256 {found} instead of {sha256}): renamed to {path.name}.bad")
    for url in (source.url, *source.mirrors):
        try:
            size, sha256 = record["pins"].get(url) or (source.size, source.sha256)
            if size is None:
                size, told = look_up(url, path)
                sha256 = sha256 or told
                if sha256 is None:
                    raise InputError(f"cannot verify {url}, as the server does not tell its SHA-256: unset HF_ENDPOINT")
                if source.sha256 is None:
                    record["pins"][url] = size, sha256
                    write_record(folder, record)
            note(f"downloading {url} ({size / 1e6:,.1f} MB)")
            download(url, size, sha256, path, source.tries)
            return path, sha256
        except InputError as e:
            if url == (source.url, *source.mirrors)[-1]:
                raise
            note(str(e))


# ----------------------------------------------------------------------------------------------------------------------
# Converting

SAVE_EVERY = 1 << 26  # bytes of text after which the record is brought up to date

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def try_lock(file):
    """Locks an open file for this process alone. Raises BlockingIOError or PermissionError if another one holds it."""
    if fcntl:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        import msvcrt

        file.seek(1 << 30)  # far behind what the file says, which others may read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)


@contextmanager
def locked(path):
    """One process at a time, on this machine. The lock ends with the process that holds it, however that ends."""
    with open(path, "ab") as f:
        told = False
        while True:
            try:
                try_lock(f)
                break
            except (BlockingIOError, PermissionError):
                if not told:
                    note(f"another process prepares {path.parent}: waiting until it is done")
                told = True
                time.sleep(0.2)
        yield


def read_zip(path):
    """Yields the bytes of the files in a zip archive, sorted by name, without those whose name begins with a dot."""
    with explain(f"read {path}"):
        try:
            with zipfile.ZipFile(path) as archive:
                members = sorted(archive.infolist(), key=lambda m: m.filename)
                # Nothing is unpacked under these names, but an archive that has such ones is not to be trusted.
                for member in members:
                    parts = re.split(r"[/\\]", member.filename)
                    if ".." in parts or parts[0] == "" or ":" in parts[0] or stat.S_ISLNK(member.external_attr >> 16):
                        raise InputError(f"{path} holds {member.filename!r}, a link or a path out of it: refused")
                for member in members:
                    if not any(p.startswith(".") for p in member.filename.split("/")) and not member.is_dir():
                        with archive.open(member) as f:
                            yield from iter(partial(f.read, 1 << 20), b"")
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as e:
            raise InputError(f"{path} is a damaged or encrypted zip archive ({e})") from None


def read_parquet(path, first):
    """Yields (row group, documents) from the row group `first` on: the column `text`, at most 1,000 rows at a time."""
    with needs("pyarrow"):
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    with explain(f"read {path}"):
        try:
            # With pre_buffer, or without the row group named, it reads ahead: memory would grow with the file.
            with ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as table:
                columns = {c.name: str(c.type) for c in table.schema_arrow}
                if columns.get("text", "") not in ("string", "large_string", "string_view", "binary", "large_binary"):
                    listed = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
                    raise InputError(f"{path} has no column of strings named text; its columns: {listed}")
                for group in range(first, table.num_row_groups):
                    for batch in table.iter_batches(1000, row_groups=[group], columns=["text"]):
                        yield group, batch.column(0).cast(pa.large_binary()).drop_null().to_pylist()
        except pa.ArrowException as e:
            raise InputError(f"{path} is not a readable parquet file ({' '.join(str(e).split())[:200]})") from None


def content_sha256(path):
    """SHA-256 of a source, in hex: of a zip archive that of its content. None if it cannot be read."""
    if not zipfile.is_zipfile(path):
        return hash_file(path)
    digest = hashlib.sha256()
    with suppress(InputError):
        for chunk in read_zip(path):
            digest.update(chunk)
        return digest.hexdigest()


def new_record(recipe):
    """What meta.json says of a corpus: what was made so far (`sha256`: only once it is whole), and of what."""
    return {
        "about": recipe.about,
        "recipe": {
            "sources": [[s.url, s.size, s.sha256, s.split] for s in recipe.sources],
            "separator": recipe.separator,  # after every document
            "cut": recipe.cut,
        },
        "pins": {},  # url: size and SHA-256 that its server told on first use
        "sources": [],  # those converted: url, size, SHA-256
        "row_group": 0,  # of the next one, to go on with
        "documents": 0,  # rows of parquet files, so far
        "cut": None,  # or the source in which it ends, and after how many documents in all
        "splits": {},  # from, to: in bytes, where the corpus has its own
        "size": 0,  # bytes, so far
        "sha256": None,
    }


def read_record(path, recipe):
    """The record of the corpus that is made in path, or a new one. Raises InputError if it is damaged or does not fit."""
    folder, new = path.parent, new_record(recipe)
    try:
        record = json.loads((folder / "meta.json").read_bytes())
        if record["recipe"] != new["recipe"]:
            raise InputError(f"{folder} was prepared in another way than now: delete it to prepare the corpus again")
        return new if record["sha256"] and not path.exists() else {key: record[key] for key in new} | record
    except FileNotFoundError:
        return new
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{folder / 'meta.json'} is damaged: delete {folder} to prepare the corpus again") from None


def write_record(folder, record):
    replace_file(folder / "meta.json", lambda f: f.write(json.dumps(record, indent=1).encode()))


def build(path, recipe, record):
    """Makes a corpus in path, from where its record ends. Returns the finished record."""
    folder, part, separator = path.parent, path.with_name(f"{path.name}.part"), recipe.separator.encode()
    if path.exists() and not part.exists():  # it was stopped before the last line of this function
        os.replace(path, part)
    part.touch()
    with open(part, "r+b") as out:
        if out.seek(0, os.SEEK_END) < record["size"]:
            raise InputError(f"{part} is shorter than its record says: delete {folder} to prepare the corpus again")
        out.truncate(record["size"])
        out.seek(0)
        digest = hashlib.sha256()
        for chunk in iter(partial(out.read, 1 << 20), b""):
            digest.update(chunk)

        def write(text):
            out.write(text)
            digest.update(text)
            bar.update(len(text))

        def save():
            out.flush()
            os.fsync(out.fileno())  # the record must not be ahead of the bytes
            record["size"] = out.tell()
            write_record(folder, record)

        def write_documents(documents, source):
            text = b"".join(document + separator for document in documents)
            if recipe.cut and out.tell() + len(text) > recipe.cut:
                ends = out.tell() + np.cumsum([len(document + separator) for document in documents])
                documents = documents[: int((ends <= recipe.cut).sum())]
                text = b"".join(document + separator for document in documents)
                record["cut"] = {"source": source.url, "documents": record["documents"] + len(documents)}
            write(text)
            record["documents"] += len(documents)

        for number, source in enumerate(recipe.sources):
            here = folder / source.url.rpartition("/")[2] if "://" in source.url else None
            if number >= len(record["sources"]) and not record["cut"]:
                file, sha256 = obtain(source, folder, record)
                with progress(total=recipe.size or None, initial=out.tell(), desc=f"converting {file.name}") as bar:
                    if file.suffix.lower() == ".zip":
                        for chunk in read_zip(file):
                            write(chunk)
                    else:
                        last = record["row_group"]
                        for group, documents in read_parquet(file, last):
                            if group != last and out.tell() - record["size"] >= SAVE_EVERY:
                                record["row_group"] = group
                                save()
                            last = group
                            write_documents(documents, source)
                            if record["cut"]:
                                break
                record["row_group"] = 0
                record["sources"].append({"url": source.url, "size": file.stat().st_size, "sha256": sha256})
                if source.split:
                    begin = max((end for _, end in record["splits"].values()), default=0)
                    record["splits"].setdefault(source.split, [begin, 0])[1] = out.tell()
                save()
            if here:
                here.unlink(missing_ok=True)
        record["sha256"] = digest.hexdigest()
    os.replace(part, path)
    tools = {name: sys.modules[name].__version__ for name in ("numpy", "pyarrow", "requests") if name in sys.modules}
    record |= {"mtime_ns": path.stat().st_mtime_ns, "versions": {"python": platform.python_version()} | tools}
    write_record(folder, record)
    return record


def prepare(path, recipe, verify=False):
    """Makes the corpus of a recipe in path, unless it is there, whole.

    That is seen at its size and time of change; its hash is taken if `verify`, or if something wrote to it since.
    Returns: its record (see new_record). Raises: InputError.
    """
    folder = path.parent
    record = read_record(path, recipe)
    if not record["sha256"]:
        with explain(f"write into {folder} (NANOHILBERT_DATA may name another folder)"):
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / "lock"):
                record = read_record(path, recipe)  # another process may have made it meanwhile
                if not record["sha256"]:
                    for old in folder.glob("meta.json.*.part"):  # of a process that was killed
                        old.unlink()
                    missing = recipe.disk - sum(f.stat().st_size for f in folder.iterdir() if f.suffix != ".bad")
                    if missing > (free := shutil.disk_usage(folder).free):
                        raise InputError(f"{folder} needs {missing:,} bytes more, and its disk has {free:,} free: make "
                                         "room, or let NANOHILBERT_DATA name another folder")  # fmt: skip
                    note(f"preparing {path} ({recipe.about})")
                    record = build(path, recipe, record)
    with explain(f"read {path}"):
        info = path.stat()
    whole = info.st_size == record["size"]
    if whole and (verify or info.st_mtime_ns != record["mtime_ns"]):
        whole = hash_file(path) == record["sha256"]
        if whole and info.st_mtime_ns != record["mtime_ns"]:  # a copy of it: not to be hashed at every start
            with suppress(OSError):
                write_record(folder, record | {"mtime_ns": info.st_mtime_ns})
    if not whole:
        raise InputError(f"{path} is damaged: it is not the {record['size']:,} bytes with SHA-256 {record['sha256']} that "
                         f"were prepared; delete {folder} to prepare it again")  # fmt: skip
    return record


def find_recipe(name_or_path):
    """(name, file to make, recipe) of a corpus that has to be converted; None of one that is bytes already."""
    if name_or_path in NAMED:
        recipe = NAMED[name_or_path]
        return (name_or_path, cache_dir() / name_or_path / f"{name_or_path}.bin", recipe) if recipe.sources else None
    path = Path(os.path.abspath(name_or_path))
    with explain(f"read {name_or_path}"):
        if path.suffix.lower() not in (".parquet", ".zip") or not path.is_file():
            return None
        info = path.stat()
    tie = hashlib.sha256(os.fsencode(f"{path}\0{info.st_size}\0{info.st_mtime_ns}")).hexdigest()[:12]  # as of a folder
    name = safe_name(path.stem)
    recipe = Recipe(str(path), (Source(str(path)),), separator=SEPARATOR if path.suffix.lower() == ".parquet" else "")
    return name, cache_dir() / f"{name}-{tie}" / f"{name}.bin", recipe


# ----------------------------------------------------------------------------------------------------------------------
# Files and folders


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


def safe_name(stem):
    return re.sub(r"[^A-Za-z0-9._-]", "_", stem).strip(".")[:40] or "_"


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
        name = safe_name("stdlib" if stdlib else Path(os.path.abspath(given)).stem)
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


# ----------------------------------------------------------------------------------------------------------------------
# Tokens of GPT-2: byte pair encoding with a vocabulary of 50,257 (Radford et al. 2019)

GPT2_VOCAB = 50257
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
VOCAB_BPE = Source(
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe", 456_318,
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    mirrors=("https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/vocab.bpe",
             f"{HUB}/openai-community/gpt2/resolve/main/merges.txt"),
    tries=1,  # of half a megabyte at three places: without a network the error comes within seconds
)  # fmt: skip
WIKITEXT_TOKENS = {"train": 117_920_140, "val": 247_289, "test": 283_287}  # known counts: the check of the conversion
# Where text may be cut so that its parts have the tokens of the whole: behind a line break that a printable ASCII
# character follows, or a space and then one, and in the first case one comes before it.
CUT = re.compile(rb"\n(?= [!-~])|(?<=[!-~])\n(?=[!-~])")
TOKENS = ("bytes", "gpt2")


@lru_cache(maxsize=1)
def gpt2_encoding():
    """The tiktoken.Encoding of GPT-2. Its merges are fetched on first use, verified, and kept in the cache folder."""
    try:
        import tiktoken
    except ImportError as e:
        raise InputError(f"GPT-2's tokens need tiktoken (pip install tiktoken): {e}") from None
    folder = cache_dir() / "gpt2"
    with explain(f"write into {folder} (NANOHILBERT_DATA may name another folder)"):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            try:
                path, _ = obtain(VOCAB_BPE, folder, new_record(Recipe("the merges of GPT-2's tokens")))
            except InputError as e:
                raise InputError(f"{e}; without a network put {VOCAB_BPE.url} as vocab.bpe into {folder}") from None
    # Ids 0 to 255 are the bytes, those that print first; each merge is the next id.
    order = sorted(range(256), key=lambda b: (not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b), b))
    letters = {
        chr(b if i < 188 else 256 + i - 188): bytes([b]) for i, b in enumerate(order)
    }  # how the file writes them
    ranks = {bytes([b]): i for i, b in enumerate(order)}
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        ranks[b"".join(letters[c] for c in line.replace(" ", ""))] = len(ranks)
    special = {"<|endoftext|>": GPT2_VOCAB - 1}
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def codec(vocab_size):
    """(encode: bytes -> list of tokens, decode: token -> bytes) of a model with this vocabulary. Raises InputError."""
    if vocab_size == 256:
        return list, lambda token: bytes([token])
    if vocab_size != GPT2_VOCAB:
        raise InputError(f"a vocabulary of {vocab_size}: neither bytes (256) nor GPT-2's tokens ({GPT2_VOCAB})")
    encoding = gpt2_encoding()
    return lambda text: encoding.encode_ordinary(text.decode(errors="replace")), encoding.decode_single_token_bytes


def tokenize(corpus):
    """The corpus in GPT-2's tokens: a file beside the prepared corpora, made on first use, whole or not at all.

    Text is encoded split by split if the corpus has its own. Raises InputError: not UTF-8, wrong counts of WikiText-103."""
    path = cache_dir() / f"{corpus.name}-{corpus.sha256[:12]}.tokens"
    about = path.with_suffix(".json")
    parts = {"all": corpus.tokens} if not corpus.record.get("splits") else {s: corpus.split(s) for s in SPLITS}
    if not (path.is_file() and about.is_file()):
        encoding, splits = gpt2_encoding(), {}
        note(f"tokenizing {corpus.path}")

        def write(out):
            for name, text in parts.items():
                begin, at, view = out.tell() // 2, 0, memoryview(text)
                while at < len(text):
                    # About 200 kB at once: longer strings are slower.
                    found = CUT.search(view, min(at + 200_000, len(text)))
                    end = found.end() if found else len(text)
                    try:
                        tokens = encoding.encode_ordinary(bytes(view[at:end]).decode())
                    except UnicodeDecodeError as e:
                        raise InputError(f"{corpus.path} is not UTF-8 text: byte {at + e.start:,} of {name}") from None
                    out.write(np.array(tokens, np.uint16).tobytes())
                    bar.update(end - at)
                    at = end
                splits[name] = [begin, out.tell() // 2]

        with explain(f"write {path} (NANOHILBERT_DATA may name another folder)"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with progress(total=len(corpus.tokens), desc=f"tokenizing {corpus.name}") as bar:
                replace_file(path, write)
            counts = {name: end - begin for name, (begin, end) in splits.items()}
            if corpus.name == "wikitext103" and corpus.record.get("splits") and counts != WIKITEXT_TOKENS:
                path.unlink()
                raise InputError(
                    f"WikiText-103 became {counts} tokens instead of {WIKITEXT_TOKENS}: not the raw corpus?"
                )
            replace_file(about, lambda f: f.write(json.dumps({"splits": splits}).encode()))
    try:
        splits = json.loads(about.read_bytes())["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{about} is damaged: delete it to tokenize {corpus.name} again") from None
    return map_tokens(corpus.name, path, {} if "all" in splits else {"splits": splits})


def map_tokens(name, path, record=None):
    """A Corpus from a file of uint16 tokens. Raises InputError if they are not GPT-2's."""
    with explain(f"read {path}"):
        size = path.stat().st_size
        if size == 0 or size % 2:
            raise InputError(f"{path} has {size:,} bytes, which are no 2-byte tokens")
        corpus = map_file(name, path, "<u2", record or {}, GPT2_VOCAB)
        tokens = corpus.tokens
        for begin in range(0, len(tokens), 1 << 22):
            block = tokens[begin : begin + (1 << 22)]
            if block.max() >= GPT2_VOCAB:
                at = begin + int((block >= GPT2_VOCAB).argmax())
                raise InputError(
                    f"{path} is no file of GPT-2's tokens: number {at:,} is {tokens[at]}, above {GPT2_VOCAB - 1}"
                )
    return corpus


def map_file(name, path, dtype, record, vocab_size=256):
    """A Corpus of the numbers in a file, mapped. It is not written to while it is mapped: see Corpus.check_unchanged."""
    file = open(path, "rb")  # noqa: SIM115  open as long as the corpus
    info = os.fstat(file.fileno())
    return Corpus(name, path, np.memmap(file, dtype, "r"), record, vocab_size, file, (info.st_size, info.st_mtime_ns))


def load(name_or_path, seq, verify=False, tokens="bytes"):
    """Finds a corpus, prepares it if it is not yet, and maps it.

    Args: name_or_path: a name in NAMED, a file (mapped where it lies; a .parquet or .zip file is converted), or a folder
        (its files joined, sorted by path); seq: tokens per window, of which every split must hold at least one;
        verify: hash a converted corpus, and compare; tokens: "bytes", or "gpt2" (a file that ends in .tokens holds them
        ready, as little-endian uint16; any other is text that is converted).
    Returns: a Corpus. Raises: InputError for whatever is wrong with it.
    """
    if seq < 1:
        raise InputError(f"--seq must be at least 1, not {seq}")
    record, files = {}, []
    if found := find_recipe(name_or_path):
        name, path, recipe = found
        record = prepare(path, recipe, verify)
        size = record["size"]
    else:
        name, path, size, root, files = locate(name_or_path)
    if size == 0:
        raise InputError(f"{name_or_path} is empty: give a file or folder with data in it (hidden files do not count)")
    if files:
        join(root, files, size, path)
    with explain(f"read {path}"):
        corpus = map_file(name, path, np.uint8, record)
    if tokens == "gpt2":
        corpus = map_tokens(name, path) if path.suffix == ".tokens" else tokenize(corpus)
    if hasattr(mmap, "MADV_RANDOM"):  # else every window read from a cold disk drags in its whole neighbourhood
        corpus.tokens.base.madvise(mmap.MADV_RANDOM)
    shortest, unit = min(len(corpus.split(split)) for split in SPLITS), "tokens" if tokens == "gpt2" else "bytes"
    if shortest < seq + 1:
        raise InputError(
            f"{name_or_path} is too short for --seq {seq}: each split needs {seq + 1} {unit}, the shortest "
            f"has {shortest}; lower --seq, or bring {20 * (seq + 1):,} {unit} in all (now {len(corpus.tokens):,})"
        )
    return corpus


def num_windows(tokens, seq):
    """The number of windows of `seq` tokens, and their targets, in tokens (size,)."""
    return (len(tokens) - 1) // seq


def get_windows(tokens, seq, index):
    """Reads the windows `index` (n,) of tokens (size,), and no other bytes.

    Returns: x, y, (n, seq) int64 tensors and contiguous; y is x one token on. Raises: IndexError past the last window.
    """
    import torch

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


def status(name, recipe):
    """Size of a named corpus, what it takes to prepare it, and how far that is."""
    if not recipe.sources:
        _, _, size, _, missing = locate(name)
        return f"{size:,} bytes, {'not prepared yet' if missing else 'prepared'}"
    record = read_record(cache_dir() / name / f"{name}.bin", recipe)
    if record["sha256"]:
        return f"{record['size']:,} bytes, prepared"
    cost = f"downloads {recipe.download / 1e9:.2f} GB, takes up to {recipe.disk / 1e9:.2f} GB of disk"
    begun = f"prepared up to byte {record['size']:,}" if record["size"] else "not prepared yet"
    return f"about {recipe.size:,} bytes, {cost}, {begun}"


def main():
    parser = Parser(
        description="List the corpora, or prepare one and print its size, hash and splits.",
        epilog="Prepared corpora are kept in $NANOHILBERT_DATA, or else in data/ beside this file.",
    )
    parser.add_argument(
        "corpus",
        nargs="?",
        metavar="NAME_OR_PATH",
        help=f"{', '.join(NAMED)}, a file (of a .parquet its column text, of a .zip what it holds), or a folder (its files "
        "joined, sorted by path, without those whose name begins with a dot); left out: list what is available",
    )
    parser.add_argument(
        "--seq", type=int, default=256, help="bytes in a window; each split must hold one (default: %(default)s)"
    )
    parser.add_argument("--tokens", choices=TOKENS, default="bytes", help="gpt2: convert to GPT-2's BPE as well")
    parser.add_argument("--verify", action="store_true", help="read all of a converted corpus, and compare its hash")
    args = parser.parse_args()
    if args.corpus is None:
        for name, recipe in NAMED.items():
            print(f"{name:<12} {status(name, recipe)}: {recipe.about}")
        print(
            "PATH         any file or folder, as raw bytes; the column text of a .parquet file; what a .zip file holds"
        )
        return
    corpus, unit = load(args.corpus, args.seq, args.verify, args.tokens), "tokens" if args.tokens == "gpt2" else "bytes"
    print(f"name   {corpus.name}\nfile   {corpus.path}\nsize   {len(corpus.tokens):,} {unit}")
    print(f"sha256 {corpus.sha256}{' (verified)' if args.verify else ''}")
    for split in SPLITS:
        tokens = corpus.split(split)
        print(f"{split:<6} {len(tokens):,} {unit}, {num_windows(tokens, args.seq):,} windows of {args.seq}")


if __name__ == "__main__":
    command_line(main)
