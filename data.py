"""Corpora: find or fetch one, verify it, convert it, memory-map it, cut it into windows, and order the windows.

    python data.py                          the named corpora, and what each takes to prepare
    python data.py owt                      downloads, verifies and converts one; the next call goes on where it stopped
    python data.py FOLDER --tokens gpt2     joins the files of a folder, and converts them to GPT-2's tokens
    python data.py FILE --column content    of a parquet or JSON lines file another column than `text`
    python data.py owt --verify             compares size and hash with what was prepared

corpus    one flat file of tokens (bytes: 256 of them), memory-mapped: it may be larger than memory. It is made whole or
          not at all, in a folder of its own, where meta.json records how far that came
file      bytes, mapped where they lie; of a parquet or JSON lines file the column `text`, of a zip archive the files in
          it. Its first 64 kB show which it is, not its name. What holds no text as it is (gzip, image, ...) is refused
folder    its files, one after another, sorted by path. Hidden names, caches, folders of runs and what holds no text as
          it is are left out: the console and the log of a run say so
split     the first 90 % is train, the next 5 % val, the last 5 % test; wikitext103 has its own
window    k covers tokens k*seq .. k*seq+seq, its targets lie one token on; a split holds n = (len-1) // seq windows
order     sequence j of step s is window perm(seed, epoch)[(s*batch + j) mod n]: a pure function of the step, so ranks
          and micro-batches only choose which j they take, and resuming needs no saved state
"""

import argparse
import codecs
import hashlib
import io
import itertools
import json
import mmap
import os
import random
import re
import shlex
import shutil
import socket
import stat
import sys
import sysconfig
import time
import unicodedata
import uuid
import zipfile
import zlib
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np

try:
    from tqdm import tqdm
except ValueError:  # a variable TQDM_... that should be a number
    for name in [name for name in os.environ if name.startswith("TQDM_")]:
        del os.environ[name]
    from tqdm import tqdm

# requests, pyarrow and torch are imported where they are used: together they take over a second.

NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # what pip installed, and tests
SPLITS = {"train": (0, 90), "val": (90, 95), "test": (95, 100)}  # from, to: percent of the tokens


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


@contextmanager
def may_fail(stream):
    """What the block writes to a stream that takes no more is lost, as is all that follows, and ends nothing."""
    try:
        yield
    except (OSError, ValueError):  # full, its reader or terminal is gone, or closed
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Extra:
    """stderr as it is now, for what no program needs: see may_fail."""

    def __getattr__(self, name):
        return getattr(sys.stderr, name)

    def write(self, text=""):
        with may_fail(sys.stderr):
            sys.stderr.write(text)
            sys.stderr.flush()

    flush = write


EXTRA = Extra()
progress = partial(tqdm, file=EXTRA, unit="B", unit_scale=True, leave=False, delay=1, disable=None)  # on a terminal


def note(text):
    """A line for who waits, on stderr."""
    tqdm.write(text, file=EXTRA)


@lru_cache
def note_once(text):
    """A note that is the same for every load: once, and of the processes of a torchrun by the first alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK") == "0":
        note(text)


def command_line(main, silent=False):
    """Runs a program's main(): an InputError becomes one line on stderr and exit code 2, Ctrl-C exit code 130. A stream
    that is closed, or cannot show a character, stops nothing. silent: another rank prints what went wrong."""
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
        pass
    except (InputError, OSError) as e:
        if not silent:
            note(f"error: {e}")
        sys.exit(2)
    except (MemoryError, RuntimeError) as e:
        if not isinstance(e, MemoryError) and not re.search("out of memory|allocate", str(e)):
            raise
        note("error: out of memory: take a smaller model, batch or length")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for stream in (sys.stdout, sys.stderr):  # else Python would end with the code 120
            with may_fail(stream):
                stream.flush()


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


def cache_dir():
    """Where prepared corpora are kept: $NANOHILBERT_DATA, or else data/ beside this file."""
    return Path(os.path.expanduser(os.environ.get("NANOHILBERT_DATA") or Path(__file__).parent / "data")).resolve()


def replace_file(path, write, keep=None):
    """write(f) makes the content of `path`. At any moment, also after a crash, it is the old file or the new one.
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
    with explain(f"read {path}"), nullcontext(file) if file else open(path, "rb") as f:
        f.seek(0)
        with progress(total=os.fstat(f.fileno()).st_size, desc=f"hashing {path.name}") as bar:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
                bar.update(len(chunk))
    return digest.hexdigest()


def stamp_of(file):
    """(size, mtime_ns, ctime_ns) of a path or number of a file: no write leaves them all, even if mtime is set back."""
    info = os.stat(file)
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns


@dataclass
class Corpus:
    name: str  # safe for a folder name: "stdlib", or the path's stem with odd characters replaced by _
    path: Path  # the memory-mapped file
    tokens: np.ndarray  # (size,) uint8, or uint16 for GPT-2's tokens: a read-only memory map
    record: dict = field(default_factory=dict)  # meta.json of a converted corpus
    vocab_size: int = 256
    file: object = None  # the mapped file, held open: its path may become the name of another one
    stamp: tuple | None = None  # (size, mtime_ns, ctime_ns) of it when it was mapped
    left_out: str = ""  # what the folder or archive holds besides, and why that is no data
    verified: bool = False  # its hash was compared with that of what was prepared

    @cached_property
    def sha256(self):
        """SHA-256 of the file, in hex: as recorded, or else read on first use, about a second per GB."""
        self.check_unchanged()
        return self.record.get("sha256") or hash_file(self.path, self.file)

    def summary(self):
        """What the log of a run says of its data."""
        said = {"name": self.name, "size": len(self.tokens), "sha256": self.sha256}
        return said | ({"left_out": self.left_out} if self.left_out else {})

    def check_unchanged(self):
        """Raises DataChanged if size and times of change of the mapped file are no longer what they were; where only
        the times differ, its hash decides, if that was read before. Takes a microsecond."""
        now, was = stamp_of(self.file.fileno()), self.stamp
        if now == was:
            return
        known = self.record.get("sha256") or self.__dict__.get("sha256")
        same = now[0] == was[0] and hash_file(self.path, self.file) == known if known else now[:2] == was[:2]
        if not same:
            how = "was written to" if now[0] == was[0] else f"has {now[0]:,} bytes instead of {was[0]:,}"
            raise DataChanged(f"{self.path} {how} since the run began: put the text back and resume, or run it anew")
        self.stamp = now

    def split(self, name):
        """The tokens of "train", "val" or "test", a view of the map. Raises InputError for any other name."""
        if name not in SPLITS:
            raise InputError(f"unknown split {name!r}: choose one of {', '.join(SPLITS)}")
        if splits := self.record.get("splits"):
            return self.tokens[slice(*(place // self.tokens.itemsize for place in splits[name]))]
        return self.tokens[slice(*(len(self.tokens) * percent // 100 for percent in SPLITS[name]))]


# ----------------------------------------------------------------------------------------------------------------------
# What the named corpora are made of


@dataclass(frozen=True)
class Source:
    """One file to make a corpus of."""

    url: str  # or the path of a file or folder here
    size: int | None = None  # bytes; None: what the server says
    sha256: str | None = None  # in hex; None: as the hub lists it. Of a .zip: of what is packed in it
    split: str | None = None  # that it belongs to, if the corpus comes with splits of its own
    mirrors: tuple = ()  # more URLs


@dataclass(frozen=True)
class Recipe:
    """A corpus: the text of its sources, one after another."""

    about: str
    sources: tuple = ()
    separator: str = ""  # after every document
    cut: int | None = None  # bytes: ends with the last document that fits whole
    size: int = 0  # bytes, about
    download: int = 0  # bytes, about
    disk: int = 0  # bytes needed while it is prepared: the corpus and its largest source
    column: str = "text"
    origin: str | Path | None = None  # of files here, what the user named; their one source is that file or folder


SEPARATOR = "\n\n"
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
TRIES = 6  # in a row without a megabyte gained, over all places that have the file
BACKOFF = 1.0  # seconds after the first failure, doubled after each further one
LONGEST_WAIT = 900  # seconds that a server may ask for
MAY_PASS = {401, 403, 408, 416, 425, 429}  # a signed URL that expired, a crowded server, ...; and all from 500 on


def request(url, start=0):
    """The answer that holds a file from byte `start` on. Raises RequestException, or InputError if nothing helps."""
    import requests

    headers = {"User-Agent": "nanoHilbert", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={start}-"} if start else {}
    if url.startswith(f"{HUB}/"):
        endpoint, token = os.environ.get("HF_ENDPOINT") or HUB, os.environ.get("HF_TOKEN", "").strip()
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
            raise InputError(f"HF_ENDPOINT={endpoint!r} is no address: write https://HOST, or unset it")
        if not re.fullmatch("[!-~]*", token):  # requests would show it
            raise InputError("HF_TOKEN holds a character that no token has, such as a blank or ...: copy it whole")
        url = endpoint.rstrip("/") + url.removeprefix(HUB)
        headers |= {"Authorization": f"Bearer {token}"} if token else {}  # dropped on a redirect to another host
    try:
        answer = requests.get(url, headers=headers, stream=True, timeout=TIMEOUT)
    except (OSError, ValueError) as e:
        if isinstance(e, requests.RequestException):
            raise
        raise InputError(f"cannot download {url}: {e}") from None  # a file of certificates that is none, ...
    if answer.status_code not in (200, 206):
        raise requests.HTTPError(f"HTTP status {answer.status_code}", response=answer)
    if answer.headers.get("Content-Type", "").startswith("text/html"):
        raise requests.RequestException("a web page instead of the file")
    return answer


def retry(action, url, path, tries, position=lambda: 0):
    """Returns what action() returns, once it succeeds; pauses between the tries, as long as the server asks to.
    Raises InputError after `tries` in a row without a megabyte gained; position() tells how many bytes have come."""
    with needs("requests"):
        import requests
        from urllib3 import Retry
        from urllib3.exceptions import InvalidHeader

    failures = 0
    while True:
        received = position()
        try:
            return action()
        except requests.RequestException as e:
            failures = 1 if position() - received >= 1 << 20 else failures + 1
            reason = " ".join(str(e).rpartition("Caused by ")[2].split())[:200]
            lasts = isinstance(e, ValueError) or "certificate" in str(e)  # a URL that is none, ...
            status = 400 if lasts else 500 if e.response is None else e.response.status_code
            wait = BACKOFF * 2 ** (failures - 1) * random.uniform(0.75, 1.25)  # not in step with others
            if status in (429, 503):  # `Retry-After`, or the hub's `RateLimit: "api";r=0;t=55`
                limit = re.search(r"\bt=(\d+)", e.response.headers.get("RateLimit", ""))
                wait = int(limit[1]) if limit else wait
                with suppress(InvalidHeader):
                    wait = Retry().get_retry_after(e.response.raw) or wait
            if wait > LONGEST_WAIT:
                reason, status = f"{reason}, asks to wait {wait:.0f} s", 400
            if failures == tries or (status < 500 and status not in MAY_PASS):
                raise InputError(f"cannot download {url} ({reason}): run again later, which goes on where it stopped, "
                                 f"or fetch {path.name} by hand and put it into {path.parent}") from None  # fmt: skip
            note(f"{path.name}: {reason}; trying again in {wait:.1f} s")
            time.sleep(wait)


def look_up(url):
    """Size in bytes and SHA-256 of the file at url: of one of the hub as the list of its folder says, or else None."""
    if not url.startswith(f"{HUB}/"):
        with request(url) as answer:
            return int(answer.headers.get("Content-Length", 0)), None
    repository, revision, file = re.fullmatch("(.*)/resolve/([^/]*)/(.*)", url.removeprefix(HUB)).groups()
    with request(f"{HUB}/api{repository}/tree/{revision}/{os.path.dirname(file)}") as answer:
        with suppress(KeyError, TypeError, StopIteration):
            entry = next(e for e in answer.json() if e["path"] == file)
            return entry["size"], entry["lfs"]["oid"]
    return None, None


def download(url, size, sha256, path, tries):
    """Fetches the file at url to path: whole and verified, or not at all. sha256: of a .zip that of its content.
    What has come is kept for later calls, in a .part file tied to url, size and hash."""
    import requests

    tie = hashlib.sha256(f"{url}\0{size}\0{sha256}".encode()).hexdigest()[:12]
    part = path.with_name(f"{path.name}.{tie}.part")
    with open(part, "ab") as f, progress(total=size, desc=path.name) as bar:

        def restart():
            f.seek(0)
            f.truncate()
            bar.reset()

        def transfer():
            if (start := f.tell()) == size:
                return
            with request(url, start) as answer:
                if answer.status_code == 200 and start:  # it sends the whole file
                    restart()
                elif not answer.headers.get("Content-Range", f"bytes {start}-").startswith(f"bytes {start}-"):
                    raise requests.RequestException("another part than was asked for")
                for chunk in answer.iter_content(1 << 16):
                    bar.update(f.write(chunk[: size - f.tell()]))  # more would be found by the hash
            if f.tell() < size:
                raise requests.RequestException("the connection ended early")

        bar.update(f.tell())  # from an earlier call
        for last in (False, True):
            retry(transfer, url, path, tries, f.tell)
            f.flush()
            if (found := content_sha256(part)) == sha256:
                break
            restart()
            if last:
                raise InputError(f"{url} came damaged, twice (SHA-256 {found} instead of {sha256}): run again later")
            note(f"{path.name} came damaged: fetching it once more")
        os.fsync(f.fileno())
    os.replace(part, path)
    for old in path.parent.glob(f"{path.name}.*.part"):  # of a file that it was before
        old.unlink()


def obtain(source, path):
    """Brings a source to path, verified, unless it was put there by hand. Returns its SHA-256."""
    if path.exists():
        found, sha256 = content_sha256(path), source.sha256
        if not sha256:
            with suppress(InputError):  # without a network whoever put it there is to be trusted
                _, sha256 = retry(partial(look_up, source.url), source.url, path, TRIES)
        if found and sha256 in (None, found):
            return found
        os.replace(path, f"{path}.bad")
        note(f"{path} is not the right file (SHA-256 {found} instead of {sha256}): renamed to {path.name}.bad")
    urls = source.url, *source.mirrors
    tries = TRIES // len(urls)
    for url in urls:
        try:
            size, told = (source.size, None) if source.size else retry(partial(look_up, url), url, path, tries)
            sha256 = source.sha256 or told
            if not sha256 or not size:
                raise InputError(f"cannot verify {url}, as the server does not tell its SHA-256: unset HF_ENDPOINT")
            note(f"downloading {url} ({size / 1e6:,.1f} MB)")
            download(url, size, sha256, path, tries)
            return sha256
        except InputError as e:
            if url == urls[-1]:
                raise
            note(str(e))


# ----------------------------------------------------------------------------------------------------------------------
# What files hold

NOTHING = 'it holds no text to train on (--column "" takes the bytes of any file)'
KINDS = {  # (offset, bytes) of what is no text: what it is, and how to make it one, or None if that is done here
    (0, b"PK\3\4"): ("zip", None),
    (0, b"PK\5\6"): ("zip", None),  # an empty one
    (0, b"PAR1"): ("parquet", None),
    (0, b"\x1f\x8b\x08"): ("gzip", "gunzip {}"),
    (4, b"1AY&SY"): ("bzip2", "bunzip2 {}"),
    (0, b"\xfd7zXZ\0"): ("xz", "unxz {}"),
    (0, b"\x28\xb5\x2f\xfd"): ("Zstandard", "unzstd {}"),
    (257, b"ustar"): ("tar archive", "tar -xf {}"),
    (0, b"7z\xbc\xaf\x27\x1c"): ("7-Zip archive", "7z x {}"),
    (0, b"Rar!\x1a\x07"): ("RAR archive", "unrar x {}"),
    (0, b"SQLite format 3\0"): ("SQLite database", "sqlite3 {} .dump > FILE.txt"),
    (0, b"%PDF-"): ("PDF", "pdftotext {}"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"): ("Office document", "soffice --convert-to txt {}"),
    (0, b"\xff\xfe\0\0"): ("UTF-32 text", "iconv -f UTF-32 -t UTF-8 {} > FILE.txt"),
    (0, b"\xff\xfe"): ("UTF-16 text", "iconv -f UTF-16 -t UTF-8 {} > FILE.txt"),
    (0, b"\xfe\xff"): ("UTF-16 text", "iconv -f UTF-16 -t UTF-8 {} > FILE.txt"),
    (0, b"\x93NUMPY"): ("numpy array", "write GPT-2's tokens as little-endian uint16 to a file NAME.tokens"),
}
ZIPS = {  # the files that only such an archive holds; *: in its one folder
    "*/data.pkl */version": ("checkpoint of PyTorch", NOTHING),
    "[Content_Types].xml": ("Office document", "soffice --convert-to txt {}"),
    "mimetype META-INF/container.xml": ("e-book", "pandoc -t plain {} > FILE.txt"),
    "mimetype META-INF/manifest.xml": ("OpenDocument", "soffice --convert-to txt {}"),
}
CONTROLS = bytes({*range(32), 127} - {*b"\a\b\t\n\v\f\r\x1b"})  # as `file` judges
LONGEST_LINE = 1 << 26  # bytes, of a JSON lines file


def kind_of(file, column):
    """What an open file holds ("bytes", "JSON lines", or one of KINDS), and what to do about it, or None.
    Its first 64 kB decide. Text has no NUL in them, no mark of UTF-16, and hardly a control character."""
    file.seek(0)
    head, tokens = file.read(1 << 16), str(file.name).lower().endswith(".tokens")
    if not column and not tokens:
        return "bytes", None
    controls = len(head) - len(head.translate(None, CONTROLS))
    if b"\0" in head or 100 * controls > len(head) or head.startswith((b"\xff\xfe", b"\xfe\xff")) or tokens:
        other = ("GPT-2's tokens", None) if tokens else ("binary data", NOTHING)
        kind, advice = next((found for (at, magic), found in KINDS.items() if head.startswith(magic, at)), other)
        if isinstance(file, zipfile.ZipExtFile) and not advice:
            return f"{kind} in a zip archive", "unzip it"
        if kind == "zip":
            with suppress(zipfile.BadZipFile, ValueError, OSError), zipfile.ZipFile(file) as archive:  # told later
                names = archive.namelist()
                for members, found in ZIPS.items():
                    if set(members.replace("*", "".join(names[:1]).partition("/")[0]).split()) <= set(names):
                        return found
        return kind, advice
    start, rows = head.removeprefix(codecs.BOM_UTF8).lstrip(), []
    if re.match(rb'\[\s*\{(?s:.*?)%s\s*:' % re.escape(json.dumps(column)).encode(), start):
        return "JSON array", "jq -c '.[]' {} > FILE.jsonl"
    if start.startswith(b"{"):  # one object a line; of a single one it must be told by the column
        file.seek(0)
        lines = filter(bytes.strip, iter(partial(file.readline, LONGEST_LINE), b""))
        with suppress(ValueError, RecursionError):
            rows.extend(itertools.islice(filter(None, map(json.loads, lines)), 2))  # the first that are not empty
        if rows and isinstance(rows[0], dict) and column in rows[0]:
            return "JSON lines", None
        if len(rows) == 2 and all(isinstance(row, dict) for row in rows):
            strings = ", ".join(name for name, value in rows[0].items() if isinstance(value, str))
            advice = 'name its column with --column, or "" for the lines as they are'
            return f"JSON lines without a column {column}", f"{advice}: {strings or 'its first line has no string'}"
    return "bytes", None


def leave_out(left, name, kind, advice=NOTHING):
    advice = advice.replace("{}", "FILE").partition(":")[0]  # without the columns, which differ from file to file
    left.setdefault(kind if advice == NOTHING else f"{kind} ({advice})", []).append(name)


def describe(left):
    """What was left out, {why: names}, in a line."""
    more = {why: f" and {len(names) - 3:,} more" if len(names) > 3 else "" for why, names in left.items()}
    return "; ".join(f"{why}: {', '.join(sorted(names)[:3])}{more[why]}" for why, names in sorted(left.items()))


def is_run(folder):
    """Whether a folder is that of a run: its log and checkpoints grow with the run that reads it, and are no data."""
    log, header = folder / "log.jsonl", b'{"event": "header"'
    if not log.is_file():
        return False
    with open(log, "rb") as file:
        return file.read(len(header)) == header or any(folder.glob("*.pt"))


def is_report(path):
    """Whether a file holds the tables of report.py, diagnose.py or tasks.py."""
    first = rb"Data: .*SHA-256|Runs of \d+ kinds|Trained at length \d+ for|### (Effective rank|Repetition|Phase coh)"
    with open(path, "rb") as file:
        return re.match(first, file.readline(1000)) is not None


def list_files(root, stdlib=False):
    """[(path below root, *stamp_of), ...] of a folder or file, sorted by path; and what is left out, {why: names}."""
    if not root.is_dir():
        return [("", *stamp_of(root))], {}
    files, left, todo, own, output = [], {}, [root], cache_dir(), []
    for stream in (1, 2):  # what this program prints may go into the folder
        with suppress(OSError):
            output.append(os.fstat(stream))
    if own.is_relative_to(root):  # named before it exists as well: what is left out is the same at every load
        leave_out(left, own.relative_to(root).as_posix(), "cache")
    while todo:
        for path in todo.pop().iterdir():
            name, link, why = path.relative_to(root).as_posix(), path.is_symlink(), None
            if stdlib and (path.name in NOT_STDLIB or not (path.is_dir() or (path.suffix == ".py" and path.is_file()))):
                continue
            if path.name.startswith("."):
                why = "hidden"
            elif link and not path.exists():
                why = "broken link"
            elif link and not stdlib and not Path(os.path.realpath(path)).is_relative_to(root):
                # It could pull any of the user's files into a downloaded folder. Python's own folder is trusted.
                raise InputError(f"{path} is a link out of {root}: replace it by a copy, or remove it")
            elif any(os.path.samestat(path.stat(), stream) for stream in output):
                why = "output of this program"
            elif path.is_file() and path.name == "tables.md" and is_report(path):
                why = "tables of runs"
            elif path.is_file():
                files.append((name, *stamp_of(path)))
            elif not path.is_dir():
                raise InputError(f"{path} is not a regular file: remove it from the folder")
            elif is_run(path):
                why = "folder of a run"
            elif path.name == "__pycache__" or (path / "pyvenv.cfg").exists():
                why = "cache"
            elif link:
                why = "another name of what is here"
            elif path != own:
                todo.append(path)
            if why:
                leave_out(left, name, why)
    if stdlib:
        return sorted(files), {}
    places = {}  # the first name of each file, one that is no link if there is such
    for file in sorted(files, key=lambda file: ((root / file[0]).is_symlink(), file)):
        info = (root / file[0]).stat()
        if places.setdefault((info.st_dev, info.st_ino or file[0], *file[1:]), file) != file:
            leave_out(left, file[0], "another name of what is here")
    return sorted(places.values()), left


def read_source(recipe, _, root, left):
    """Yields the texts of a file, or of the files of a folder; adds to `left` what holds none as it is."""
    files, _ = list_files(root, recipe.origin == "stdlib")
    for name, *_ in files:
        path = root / name if name else root
        with explain(f"read {path}"), open(path, "rb") as file:
            yield from read_file(file, path, name or root.name, recipe, left)
    if recipe.origin and list_files(root, recipe.origin == "stdlib")[0] != files:
        raise InputError(f"{root} changed while it was read: run again when nothing writes to it")


def read_file(file, path, name, recipe, left):
    """Yields the texts of an open file: documents, each with the separator, or bytes as they come."""
    (kind, advice), separator = kind_of(file, recipe.column), recipe.separator.encode()
    file.seek(0)
    if advice:
        leave_out(left, name, kind, advice)
    elif kind == "GPT-2's tokens":
        leave_out(left, name, kind, "name such a file alone")
    elif kind == "zip":
        yield from read_zip(file, path, name, recipe, left)
    elif kind == "parquet":
        yield from (text + separator for text in read_parquet(file, path, recipe.column))
    elif kind == "JSON lines":
        for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE), b""), 1):
            try:
                text = json.loads(line)[recipe.column] if line.strip() else None
                if text is not None:
                    yield text.encode(errors="replace") + separator
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError(f"{path}, line {number:,}: no JSON with a string named {recipe.column}") from None
    else:
        yield from iter(partial(file.read, 1 << 20), b"")


def read_zip(file, path, name, recipe, left):
    """`read_file` of the files in a zip archive, sorted by name, without those whose name begins with a dot."""
    try:
        with zipfile.ZipFile(file) as archive:
            for member in sorted(archive.infolist(), key=lambda m: m.filename):  # nothing is unpacked under these names
                inner = f"{name}/{member.filename}"
                if "/." in f"/{member.filename}":
                    leave_out(left, inner, "hidden")
                elif not member.is_dir():
                    with archive.open(member) as f:
                        yield from read_file(f, path / member.filename, inner, recipe, left)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as e:
        raise InputError(f"{path} is a damaged or encrypted zip archive ({e})") from None


def read_parquet(file, path, column):
    """Yields the documents in a column of a parquet file. At most 1,000 rows are read at a time."""
    with needs("pyarrow"):
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    try:
        # With pre_buffer, or without the row group named, it reads ahead: memory would grow with the file.
        with ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as table:
            columns = {c.name: c.type for c in table.schema_arrow}
            if not re.search(r"(?:^|<values=)(large_)?(string|binary)(_view)?(,|$)", str(columns.get(column))):
                listed = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
                raise InputError(f"{path} has no column of strings named {column} (--column); its columns: {listed}")
            kind = getattr(columns[column], "value_type", columns[column])  # of a dictionary that of its values
            for group in range(table.num_row_groups):
                for batch in table.iter_batches(1000, row_groups=[group], columns=[column]):
                    yield from batch.column(0).cast(kind).cast(pa.large_binary()).drop_null().to_pylist()
    except pa.ArrowException as e:
        raise InputError(f"{path} is not a readable parquet file ({' '.join(str(e).split())[:200]})") from None


def content_sha256(path):
    """SHA-256 of a source, in hex: of a zip archive that of its content. None if it cannot be read."""
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            return hash_file(path)
        digest = hashlib.sha256()
        with suppress(InputError):
            for text in read_file(file, path, path.name, Recipe(""), {}):
                digest.update(text)
            return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Preparing

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
def hold(folder):
    """A run folder for this process alone, until the block or the process ends. Its file `lock` says whose it is.

    Raises InputError, and touches nothing, if another process has it. A file system without locks is noted."""
    path = Path(folder, "lock")
    foreign = InputError(f"{path} is no lock of a run: move it away, or name another folder")
    if path.is_symlink():
        raise foreign
    with explain(f"write {path}"):
        f = open(path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed below
    with f:
        try:
            try_lock(f)
            if not os.path.samestat(os.fstat(f.fileno()), path.stat()):
                raise BlockingIOError  # the one before ended this moment, and took the file with it
        except (BlockingIOError, PermissionError, FileNotFoundError):
            f.seek(0)
            holder = f.read().strip() or "another process"
            raise InputError(f"{folder} is in use by {holder}: wait until that ends, or name another folder") from None
        except OSError as e:
            note(f"note: {folder} cannot be locked ({e.strerror}): start no second run in it")
        f.seek(0)
        if not re.match(r"process \d+ on .* since |$", f.read(200)):
            raise foreign
        f.truncate(0)
        f.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        f.flush()
        try:
            yield
        finally:
            with suppress(OSError):  # Windows does not remove a file that is open
                path.unlink()


@contextmanager
def writes_into(folder):
    """Makes the folder; one process at a time, on this machine, is in the block. The lock ends with its process."""
    with explain(f"write into {folder} (NANOHILBERT_DATA may name another folder)"):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "ab") as f:
            for tries in itertools.count():
                with suppress(BlockingIOError, PermissionError):
                    try_lock(f)
                    break
                if tries == 0:
                    note(f"another process prepares {folder}: waiting until it is done")
                time.sleep(0.2)
            yield


def read_record(path, recipe):
    """What meta.json says of the corpus that is made in path, or a new record. Raises InputError if it does not fit."""
    sources = [[s.url, s.size, s.sha256, s.split] for s in recipe.sources]
    new = {
        "about": recipe.about,
        "recipe": {"sources": sources, "separator": recipe.separator, "cut": recipe.cut},
        "sources": [],  # those converted: url, SHA-256
        "cut": None,  # or the source in which it ends
        "splits": {},  # from, to: in bytes of the file, where the corpus has its own
        "left_out": {},  # why: files that hold no text
        "size": 0,  # bytes, so far
        "sha256": None,  # only once it is whole
    }
    meta = path.with_name("meta.json")
    try:
        record = new | json.loads(meta.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return new
    except (ValueError, TypeError):
        raise InputError(f"{meta} is damaged: delete {path.parent} to prepare the corpus again") from None
    if record["recipe"] != new["recipe"]:
        raise InputError(f"{path.parent} was prepared in another way than now: delete it to prepare the corpus again")
    return new if record["sha256"] and not path.exists() else record


def write_record(folder, record):
    replace_file(folder / "meta.json", lambda f: f.write(json.dumps(record, indent=1).encode()))


def build(path, recipe, record, read):
    """Makes a corpus in path, from where its record ends. Returns the finished record. read: see `prepare`."""
    folder, part = path.parent, path.with_name(f"{path.name}.part")
    for old in folder.glob("meta.json.*.part"):  # of a process that was killed
        old.unlink()
    missing = recipe.disk - sum(f.stat().st_size for f in folder.iterdir() if f.suffix != ".bad")
    if missing > (free := shutil.disk_usage(folder).free):
        raise InputError(f"{folder} needs {missing:,} bytes more, and its disk has {free:,} free: make room, or let "
                         "NANOHILBERT_DATA name another folder")  # fmt: skip
    if not recipe.origin or recipe.disk > 1e8:
        note(f"preparing {path} ({recipe.about})")
    if path.exists() and not part.exists():  # it was stopped before the last line of this function
        os.replace(path, part)
    with open(part, "ab") as out, progress(total=recipe.size or None, desc=f"preparing {path.name}") as bar:
        if out.tell() < record["size"]:
            raise InputError(f"{part} is shorter than its record says: delete {folder} to prepare the corpus again")
        bar.update(out.seek(record["size"]))
        out.truncate()
        for number, source in enumerate(recipe.sources):
            file = Path(source.url) if recipe.origin else folder / source.url.rpartition("/")[2]
            if number >= len(record["sources"]) and not record["cut"]:
                sha256 = None if recipe.origin else obtain(source, file)
                for text in read(source, file, record["left_out"]):
                    if recipe.cut and out.tell() + len(text) > recipe.cut:
                        record["cut"] = {"source": source.url}
                        break
                    bar.update(out.write(text))
                record["sources"].append({"url": source.url, "sha256": sha256})
                if source.split:
                    begin = max((end for _, end in record["splits"].values()), default=0)
                    record["splits"].setdefault(source.split, [begin, 0])[1] = out.tell()
                out.flush()
                os.fsync(out.fileno())  # the record must not be ahead of the bytes
                record["size"] = out.tell()
                write_record(folder, record)
            if not recipe.origin:
                file.unlink(missing_ok=True)
    record["sha256"] = hash_file(part)
    os.replace(part, path)
    record["mtime_ns"] = path.stat().st_mtime_ns
    write_record(folder, record)
    return record


def prepare(path, recipe, read, verify=False):
    """Makes the corpus of a recipe in path, unless it is there, whole. Returns its record (see read_record).
    Size and time of change tell whether it is; its hash, if `verify`, or if something wrote to it since.
    read: a function of a source, its path and {why: names} of what it leaves out, that yields texts."""
    folder, record = path.parent, read_record(path, recipe)
    if not record["sha256"]:
        with writes_into(folder):
            record = read_record(path, recipe)  # another process may have made it meanwhile
            try:
                record = record if record["sha256"] else build(path, recipe, record, read)
            except BaseException:
                for name in (f"{path.name}.part", "meta.json") if recipe.origin else ():  # to begin anew
                    (folder / name).unlink(missing_ok=True)
                raise
    with explain(f"read {path}"):
        info = path.stat()
    whole, moved = info.st_size == record["size"], info.st_mtime_ns != record["mtime_ns"]
    if whole and (verify or moved):
        whole = hash_file(path) == record["sha256"]
        if whole and moved:  # a copy of it: not to be hashed at every start
            with suppress(OSError):
                write_record(folder, record | {"mtime_ns": info.st_mtime_ns})
    if not whole:
        raise InputError(f"{path} is damaged: it is not the {record['size']:,} bytes with SHA-256 {record['sha256']} "
                         f"that were prepared; delete {folder} to prepare it again")  # fmt: skip
    return record


def find(name_or_path, column="text"):
    """Finds a corpus without preparing it. A known name comes before a path: write ./stdlib for a file called so.

    Returns: its name; the file to map; the recipe to make it of, or None if it is mapped where it lies; what a folder
        holds besides, {why: names}."""
    stdlib = name_or_path == "stdlib"
    if name_or_path in NAMED and column != "text":
        raise InputError(f"--column {column!r}: {name_or_path} has no other columns; leave it out")
    if name_or_path in NAMED and not stdlib:
        return name_or_path, cache_dir() / name_or_path / f"{name_or_path}.bin", NAMED[name_or_path], {}
    given = Path(os.path.expanduser(sysconfig.get_paths()["stdlib"] if stdlib else name_or_path))
    stem = "stdlib" if stdlib else Path(os.path.abspath(given)).stem
    name = re.sub(r"[^A-Za-z0-9._-]", "_", stem).strip(".")[:40] or "_"
    with explain(f"read {given}"):
        if not name_or_path or not given.exists():
            raise InputError(f"no corpus {str(name_or_path)!r}: give a name ({', '.join(NAMED)}), a file or a folder")
        mode, root = given.stat().st_mode, given.resolve()
        if stat.S_ISREG(mode):
            with open(given, "rb") as file:
                kind, advice = kind_of(file, column)
            if advice:
                advice = advice.replace("{}", shlex.quote(str(given)))
                raise InputError(f"{given} cannot be read as it is ({kind}): {advice}")
            if kind in ("bytes", "GPT-2's tokens"):
                return name, given, None, {}
        elif not stat.S_ISDIR(mode):
            raise InputError(f"{given} is not a regular file or a folder: copy what you want of it into a file")
        elif root == cache_dir() or is_run(root):
            kept = "a run and its checkpoints" if is_run(root) else "prepared corpora"
            raise InputError(f"{given} is where {kept} are kept: name a file in it, or another folder")
        files, left = list_files(root, stdlib)
    tie = hashlib.sha256(os.fsencode(f"{root}\0{column}\0{files}")).hexdigest()[:12]  # a folder that changed: a new one
    about, size = NAMED["stdlib"].about if stdlib else str(root), sum(size for _, size, *_ in files)
    recipe = Recipe(about, (Source(str(root)),), SEPARATOR, size=size, disk=size, column=column, origin=name_or_path)
    return name, cache_dir() / f"{name}-{tie}" / f"{name}.bin", recipe, left


# ----------------------------------------------------------------------------------------------------------------------
# Tokens of GPT-2: byte pair encoding with a vocabulary of 50,257 (Radford et al. 2019)

GPT2_VOCAB = 50257
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
VOCAB_BPE = Source(
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe", 456_318,
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    mirrors=("https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/vocab.bpe",
             f"{HUB}/openai-community/gpt2/resolve/main/merges.txt"),
)  # fmt: skip
WIKITEXT_TOKENS = {"train": 117_920_140, "val": 247_289, "test": 283_287}  # known counts: the check of the conversion
BLOCK = 200_000  # bytes encoded at once: longer strings are slower
LONGEST_PIECE = 400_000  # bytes: tiktoken fails on a million blanks in a row, and takes memory for a long piece
TOKENS = ("bytes", "gpt2")


@lru_cache(maxsize=1)
def gpt2_encoding():
    """The tiktoken.Encoding of GPT-2. Its merges are fetched on first use, verified, and kept in the cache folder."""
    with needs("tiktoken"):
        import tiktoken
    path = cache_dir() / "gpt2" / "vocab.bpe"
    with writes_into(path.parent):
        try:
            obtain(VOCAB_BPE, path)
        except InputError as e:
            raise InputError(f"{e}; without a network put {VOCAB_BPE.url} as vocab.bpe into {path.parent}") from None
    # Ids 0 to 255 are the bytes, those that print first; each merge is the next id. The file writes a byte as a letter.
    order = sorted(range(256), key=lambda b: (not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b), b))
    letters = {chr(b if i < 188 else 256 + i - 188): bytes([b]) for i, b in enumerate(order)}
    ranks = {bytes([b]): i for i, b in enumerate(order)}
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        ranks[b"".join(letters[c] for c in line.replace(" ", ""))] = len(ranks)
    special = {"<|endoftext|>": GPT2_VOCAB - 1}
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)


# Where a piece of GPT2_PATTERN ends whatever follows: before blanks, before the last of several, and behind a word or
# number. Over the categories of characters; Z: blanks, C: controls, and what a newer Unicode may call otherwise.
CUT = re.compile("[^Z]Z|ZZ[^Z]|L[MNPS]|N[LMPS]")


def last_cut(text, within):
    """The last place that CUT allows in the last `within` characters of text, or 0."""
    kinds = ""
    for place in range(len(text) - 1, max(-1, len(text) - 1 - within), -1):
        kinds = ("Z" if text[place] in "\t\n\v\f\r\x85" else unicodedata.category(text[place])[0]) + kinds[:2]
        if CUT.match(kinds):
            return place + 1
    return 0


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
        text = text if last else text[: last_cut(text, len(more) + 2)]  # what is before was not cut
        if not text and len(raw) > LONGEST_PIECE:
            raise InputError(f"{path} cannot be cut into GPT-2's tokens: byte {begin:,} begins a word, or a blank, of "
                             f"more than {LONGEST_PIECE:,} bytes; break it up")  # fmt: skip
        yield encoding.encode_ordinary(text)
        used = len(text.encode())
        raw, begin = raw[used:], begin + used


def tokenize(corpus, verify=False):
    """The corpus in GPT-2's tokens, prepared as it was; split by split if it has its own."""
    splits = corpus.record.get("splits") or {"": [0, len(corpus.tokens)]}

    def read(source, _, left_out):
        begin, end = splits[source.split]
        corpus.file.seek(begin)
        count = 0
        for tokens in encode_blocks(corpus.file, end - begin, corpus.path, begin):
            count += len(tokens)
            yield np.array(tokens, "<u2").tobytes()
        corpus.check_unchanged()
        if corpus.name == "wikitext103" and source.split and count != WIKITEXT_TOKENS[source.split]:
            raise InputError(f"{source.split} of WikiText-103 became {count:,} tokens instead of "
                             f"{WIKITEXT_TOKENS[source.split]:,}: not the raw corpus?")  # fmt: skip

    path = cache_dir() / f"{corpus.name}-{corpus.sha256[:12]}-gpt2" / f"{corpus.name}.tokens"
    sources = tuple(Source(corpus.sha256, split=split) for split in splits)  # of the text: it may lie elsewhere
    recipe = Recipe(f"{corpus.path} in GPT-2's tokens", sources, disk=len(corpus.tokens), origin=corpus.path)
    return map_file(corpus.name, path, "<u2", prepare(path, recipe, read, verify), GPT2_VOCAB)


def check_tokens(path):
    """Raises InputError if a file does not hold GPT-2's tokens, as little-endian uint16. Reads it whole."""
    size, counts = path.stat().st_size, np.zeros(1 << 16, np.int64)
    for begin in range(0, size // 2, 1 << 22):
        counts += np.bincount(np.fromfile(path, "<u2", 1 << 22, offset=2 * begin), minlength=1 << 16)
    seen = counts.nonzero()[0] if size > 1 else counts[:1]
    for wrong, why in (
        (size % 2, f"it has {size:,} bytes"),
        ((seen & 255).min() >= 9 and (seen >> 8).min() >= 9, "it is text"),  # which has no control characters
        (seen[-1] >= GPT2_VOCAB, f"it holds {seen[-1]}, above {GPT2_VOCAB - 1}"),
        (len(seen) == 1 or seen[-1] < 256, f"its numbers run from {seen[0]} to {seen[-1]}"),
        (counts[0] * 8 > size, "a fourth of its numbers or more is 0, as in numbers of 4 bytes"),
    ):
        if wrong:
            raise InputError(f"{path} is no file of GPT-2's tokens, little-endian uint16: {why}")


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
    name, path, recipe, left = find(name_or_path, "text" if column is None else column)
    record = prepare(path, recipe, partial(read_source, recipe), verify) if recipe else {}
    more = record.get("left_out", {})
    left_out = describe({why: left.get(why, []) + more.get(why, []) for why in left | more})
    with explain(f"read {path}"):
        if path.stat().st_size == 0:
            besides = f" (left out: {left_out})" if left_out else ""
            raise InputError(f"{name_or_path} holds nothing to train on: give a file or folder of text{besides}")
        ready = path.suffix.lower() == ".tokens" and not recipe
        if ready and tokens != "gpt2":
            raise InputError(f"{path} holds GPT-2's tokens, as its name says: add --tokens gpt2")
        if ready:
            check_tokens(path)
        corpus = map_file(name, path, "<u2" if ready else "u1", record, GPT2_VOCAB if ready else 256)
    if tokens == "gpt2" and not ready:
        corpus = tokenize(corpus, verify)
    corpus.left_out, corpus.verified = left_out, verify and bool(recipe or corpus.path != path)
    if left_out:
        note_once(f"{name_or_path}: left out {left_out}")
    if hasattr(mmap, "MADV_RANDOM"):  # else every window read from a cold disk drags in its whole neighbourhood
        corpus.tokens.base.madvise(mmap.MADV_RANDOM)
    shortest, unit = min(len(corpus.split(split)) for split in SPLITS), "tokens" if tokens == "gpt2" else "bytes"
    if shortest < seq + 1:
        raise InputError(f"{name_or_path} is too short for --seq {seq}: each split needs {seq + 1} {unit}, the "
                         f"shortest has {shortest}; lower --seq, or bring {20 * (seq + 1):,} {unit} in all (now "
                         f"{len(corpus.tokens):,})")  # fmt: skip
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


def status(name):
    """Size of a named corpus, what it takes to prepare it, and how far that is."""
    _, path, recipe, _ = find(name)
    record = read_record(path, recipe)
    if record["sha256"]:
        return f"{record['size']:,} bytes, prepared"
    cost = f"downloads {recipe.download / 1e9:.2f} GB, takes up to {recipe.disk / 1e9:.2f} GB of disk, "
    cost = "" if recipe.origin else cost
    begun = f"prepared up to byte {record['size']:,}" if record["size"] else "not prepared yet"
    return f"about {recipe.size:,} bytes, {cost}{begun}"


def main():
    kept = "Prepared corpora are kept in $NANOHILBERT_DATA (default: data/ beside this file)."
    parser = Parser(description=__doc__, epilog=kept)
    named = f"{', '.join(NAMED)}, a file or a folder (default: list what there is)"
    parser.add_argument("corpus", nargs="?", metavar="NAME_OR_PATH", help=named)
    parser.add_argument("--seq", type=int, default=256, help="tokens in a window, of which each split needs one (256)")
    parser.add_argument("--tokens", choices=TOKENS, default="bytes", help="bytes, or GPT-2's BPE (default: bytes)")
    text = "of parquet and JSON lines files: what holds the text (default: text); empty: the bytes of any file"
    parser.add_argument("--column", default="text", help=text)
    parser.add_argument("--verify", action="store_true", help="read all of what was prepared, and compare its hash")
    args = parser.parse_args()
    if args.corpus is None and args != parser.parse_args([]):
        parser.error("name a corpus, a file or a folder")
    if args.corpus is None:
        for name, recipe in NAMED.items():
            print(f"{name:<12} {status(name)}: {recipe.about}")
        print("PATH         any file or folder: bytes, parquet, JSON lines, zip")
        return
    corpus = load(args.corpus, args.seq, args.verify, args.tokens, args.column)
    unit, verified = "tokens" if args.tokens == "gpt2" else "bytes", ""
    if args.verify:
        verified = " (verified)" if corpus.verified else " (nothing was prepared that it could be compared with)"
    print(f"name   {corpus.name}\nfile   {corpus.path}\nsize   {len(corpus.tokens):,} {unit}")
    print(f"sha256 {corpus.sha256}{verified}")
    for split in SPLITS:
        tokens = corpus.split(split)
        print(f"{split:<6} {len(tokens):,} {unit}, {num_windows(tokens, args.seq):,} windows of {args.seq}")


if __name__ == "__main__":
    command_line(main)
