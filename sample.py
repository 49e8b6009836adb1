"""Generates text from a checkpoint, token by token, with a state whose size does not grow.

    python sample.py                                    the newest run in runs/
    python sample.py runs/hmamba-stdlib-tiny-s1 --prompt "def main(" --temperature 0.7 --length 1000
    python sample.py runs/hmamba-stdlib-tiny-s1 --prompt FILE:x.txt --num_samples 3    or --prompt -, standard input
    python sample.py runs/hmamba-stdlib-tiny-s1 --score x.txt      bits a character of a text, by position

Also the home of MODELS, of model specs ("hmamba:N=4", "FILE.py:CLASS:D=64") and of checkpoints: `save_checkpoint` and
the one loader, `load`.
"""

import codecs
import difflib
import importlib.util
import json
import math
import os
import pickletools
import re
import shlex
import sys
import time
import traceback
import typing
import unicodedata
import zipfile
from collections import Counter
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

import hmamba
import htransformer
import pam
from data import GPT2_VOCAB, InputError, Parser, codec, command_line, explain, hash_file, note, progress, replace_file
from report import markdown

MODELS = hmamba.MODELS | htransformer.MODELS | pam.MODELS
PAM_SIZES = ("5m", "10m", "25m", "50m", "100m")  # PAM table 1
FORMAT = "nanohilbert-1"  # of checkpoints
NO_STATE = "no init_state(batch_size)"
IMPORTED, FILES = {}, {}  # of the files that the command line has named: classes by FILE.py:CLASS, SHA-256 by path
TYPED = {}  # FILE.py:NAME without a folder -> as the command line gave it
READ = {int: int, float: float, str: str, bool: {"True": True, "False": False}.__getitem__}  # a setting's text, by type
PLAIN = re.compile(r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch \w+Storage")  # of its pickle
TINY = 1e-30  # float32 holds it, its inverse, and scores divided by it
PREFILL = 4096  # prompt tokens read in one pass
SCORES = 2**24  # logits that are held at once


def unknown(what, name, known):
    close = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return InputError(f"{what} {name!r}; known: {', '.join(known)}{hint}")


def split_spec(spec):
    """NAME:key=value:... or FILE.py:CLASS:key=value:... -> (the model's name, [key=value])."""
    name, *pairs = spec.split(":")
    return (f"{name}:{pairs[0]}", pairs[1:]) if name.endswith(".py") and pairs else (name, pairs)


def model_flag(spec):
    """What a command that loads a run of this model needs besides the run."""
    name, _ = split_spec(spec)
    return f" --model {shlex.quote(TYPED[name])}" if ".py:" in name else ""


def find_class(spec, models=MODELS):
    name, _ = split_spec(spec)
    if name in models | IMPORTED:
        return (models | IMPORTED)[name]
    if ".py:" in name:
        name = printable(name)
        raise InputError(f"{name} is a class of a file, which only the command line may name: add --model PATH/{name}")
    raise unknown("unknown model", name, (*models, "FILE.py:CLASS"))


def parse_spec(spec, size, vocab_size):
    """Model spec and size -> (model class, config). The settings of a spec are Config fields.

    Raises InputError for an unknown name or size, and as `configure` does."""
    model_class = find_class(spec)
    if size not in model_class.SIZES:
        raise unknown(f"{split_spec(spec)[0]} has no size", size, model_class.SIZES)
    return model_class, configure(spec, replace(model_class.SIZES[size], V=vocab_size))


def configure(spec, config):
    """`config` with the settings of a spec. Raises InputError for an unknown key, and for a value that the model refuses."""
    name, pairs = split_spec(spec)
    hints, of_data = typing.get_type_hints(type(config)), ("V", "classes")
    types = {f.name: hints[f.name] for f in fields(config) if hints[f.name] in READ and f.name not in of_data}
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key in values:
            raise InputError(f"{spec!r} sets {key} twice")
        if key not in types or not equals:
            raise unknown(f"{name} has no setting", pair, [f"{key}=" for key in types])
        try:
            values[key] = READ[types[key]](value)
        except (ValueError, KeyError):
            raise InputError(f"{name}: {key}={value} is not {types[key].__name__}") from None
    try:
        return replace(config, **values)
    except ValueError as e:
        raise InputError(f"{name}: {e}") from None


# ----------------------------------------------------------------------------------------------------------------------
# Models of other files: the contract stands in PAPERS.md, "A new model"


class Defaults:
    """What such a class may leave out, with `SIZES` (each is Config()), `config` and `layers` (none)."""

    NO_DECAY = ()

    def step(self, idx_t, state):
        logits, _, state = self(idx_t[:, None], state=state)
        return logits[:, -1], state

    def num_params(self):
        counts = Counter()
        for name, p in self.named_parameters():
            counts[name.split(".")[0]] += p.numel()
        return {**counts, "total": counts.total()}

    def flops_per_token(self, seq):
        return 6 * self.num_params()["total"]


def with_defaults(model_class):
    def __init__(self, config):
        model_class.__init__(self, config)
        for name, value in (("config", config), ("layers", [])):
            if not hasattr(self, name):
                setattr(self, name, value)

    added = {"__init__": __init__, "__module__": model_class.__module__}
    if not hasattr(model_class, "SIZES"):
        sizes = [size for known in MODELS.values() for size in known.SIZES]
        added["SIZES"] = dict.fromkeys(sizes, model_class.Config())
    return type(model_class.__name__, (model_class, Defaults), added)


def import_models(text, other_contracts=()):
    """Imports the classes that a comma-separated list of specs names as FILE.py:CLASS, and checks them; from then on they
    are known by that name, without a folder. Only the command line names files: a checkpoint's could be a stranger's.

    other_contracts: base classes whose subclasses are not checked. Returns the list, without folders."""
    return ",".join(import_model(spec.strip(), other_contracts) for spec in text.split(","))


def import_name(name, is_kind=lambda value: True):
    """FILE.py:NAME, as the command line gives it -> (that without a folder, what the file calls so). Raises InputError
    if there is none, which names those of the file that are of the kind."""
    file, _, wanted = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    module_name, key = re.sub(r"\W", "_", str(path)), f"{path.name}:{wanted}"
    if module_name not in sys.modules:
        found = importlib.util.spec_from_file_location(module_name, path)
        module = sys.modules[module_name] = importlib.util.module_from_spec(found)  # where dataclasses look
        sys.path.append(str(path.parent))  # last, for what lies beside the file
        FILES[str(path)] = None
        try:
            found.loader.exec_module(module)
            FILES[str(path)] = hash_file(path)
        except Exception as e:  # whatever a file does
            del sys.modules[module_name]
            raise InputError(f"cannot import {file}: {reason(e)}") from None
    known = {k: v for k, v in vars(sys.modules[module_name]).items() if not k.startswith("_")}
    if wanted not in known:
        raise unknown(f"{file} has no", wanted, [k for k, value in known.items() if is_kind(value)])
    TYPED[key] = name
    return key, known[wanted]


def import_model(spec, other_contracts):
    name, pairs = split_spec(spec)
    if ".py:" not in name:
        return spec
    key, model_class = import_name(name)
    if key in IMPORTED and IMPORTED[key].__module__ != model_class.__module__:
        raise InputError(f"two files have the name {key}: rename one")
    if not isinstance(model_class, type) or not issubclass(model_class, other_contracts):
        faults = missing(model_class)
        if set(faults) <= {NO_STATE}:
            model_class = with_defaults(model_class)
        if faults == [NO_STATE]:  # what else there is to mend
            faults += step_faults(model_class, next(iter(model_class.SIZES.values())))
        if faults:
            raise InputError(f"{key} is no model (PAPERS.md, A new model): {'; '.join(faults)}")
    IMPORTED[key] = model_class
    return ":".join([key, *pairs])


def missing(model_class):
    """What the contract asks of a class, and this one has not."""
    is_module = isinstance(model_class, type) and issubclass(model_class, torch.nn.Module)
    faults = [] if is_module else ["it is no torch.nn.Module"]
    try:
        fields(model_class.Config), range(model_class.Config().V)
    except Exception as e:
        faults.append(f"no Config, a dataclass whose fields have defaults, one of them V ({type(e).__name__}: {e})")
    if getattr(model_class, "forward", None) in (None, torch.nn.Module.forward):
        faults.append("no forward(idx, targets=None, state=None)")
    return faults if hasattr(model_class, "init_state") else [*faults, NO_STATE]


def step_faults(model_class, config, device="cpu", checkpointing=False):
    """What a training step of 1 x 8 tokens shows to be wrong, and for the class of a file a text read in pieces: on a copy
    with at most 4 layers. The random numbers go on as if it had not been."""
    if isinstance(getattr(config, "L", None), int):
        config = replace(config, L=min(config.L, 4))
    V, faults, call = config.V, [], "__init__(config)"

    def forward(*args, **state):
        returned = model(*args, **state)
        if not isinstance(returned, (tuple, list)) or len(returned) != 3:
            raise ValueError("must return logits, loss and state")
        return returned

    x = torch.arange(8, device=device)[None] % V
    with torch.random.fork_rng([x.device] if x.device.type == "cuda" else []):
        try:
            model = model_class(config).to(device)
            model.checkpointing, call = checkpointing, "forward(idx, targets)"
            logits, loss, _ = forward(x, x)
            if logits.shape != (1, 8, V):
                faults.append(f"logits of shape {tuple(logits.shape)}, not (B, T, V) = (1, 8, {V})")
            if loss.dim() or not loss.isfinite():
                faults.append("a loss that is no finite number: the mean in nats a token")
            loss.mean().backward()
            unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
            faults += [f"parameters without a gradient: {', '.join(unused)}"] * bool(unused)
            if isinstance(model, Defaults) and hasattr(model, "init_state"):
                with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                    call, whole = "forward(idx)", model.eval()(x)[0]
                    call, state = "init_state(1)", model.init_state(1)
                    call, (first, _, state) = "forward(idx, state=state)", forward(x[:, :4], state=state)
                    call, (second, _, state) = "forward(idx, state=state)", forward(x[:, 4:7], state=state)
                    call, (third, _) = "step(idx_t, state)", model.step(x[:, 7], state)
                apart = (torch.cat((first, second, third[:, None]), 1) - whole).abs().max().item()
                if not apart < 0.01 * (1 + whole.abs().max()):
                    faults.append(f"in pieces, with the state carried on, a text has other logits (by {apart:.2g})")
        except Exception as e:  # whatever a model does
            if isinstance(e, MemoryError) or "allocate" in str(e):
                raise
            faults.append(f"{call}: {reason(e)}")
    return faults


def reason(e):
    """An exception in a line, with the last line of a file of the command line that led to it."""
    frames = [frame for frame in traceback.extract_tb(e.__traceback__) if frame.filename in FILES]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    kind = "" if isinstance(e, ValueError) else f"{type(e).__name__}: "
    return f"{kind}{' '.join(str(e).split())[:200]}{where}"


def params_table(spec, size, seq):
    """Parameters by component, and what one token costs (QS tables 2 and 3, PAM table 1). The vocabulary is that of
    bytes, or GPT-2's at the sizes of PAM's sweep."""
    model_class, config = parse_spec(spec, size, GPT2_VOCAB if size in PAM_SIZES else 256)
    with torch.device("meta"):
        model = model_class(config)
    lines = [f"{spec} {size}: {model.config}"]
    lines += [f"  {name:20}{count:>14,}" for name, count in model.num_params().items()]
    lines += [f"  {'flops a token':20}{model.flops_per_token(seq):>14,.0f}  forward and backward, seq {seq}"]
    return "\n".join(lines)


def pick_device(name):
    """torch.device for "auto", "cpu", "cuda", "cuda:1" or "mps". Raises InputError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}: auto, cpu, cuda, cuda:N or mps") from None
    there = {"cpu": True, "mps": torch.backends.mps.is_available()}
    there["cuda"] = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    if not there.get(device.type):
        raise InputError(f"no {name} device is available to PyTorch here; use --device cpu (or auto)")
    return device


def save_checkpoint(path, meta, model, optimizer, step, best, keep=None):
    """Replaces the file `path` whole; what it held before gets the name `keep`, if one is given. optimizer: or None."""
    checkpoint = {"format": FORMAT, "meta": json.dumps(meta), "model": model.state_dict(), "step": step,
                  "optimizer": optimizer.state_dict() if optimizer else {}, "best": best,
                  "rng": {"cpu": torch.get_rng_state()}}  # fmt: skip
    try:
        replace_file(path, lambda f: torch.save(checkpoint, f), keep)
    except (OSError, RuntimeError) as e:  # torch.save turns a full disk into a RuntimeError
        kept = "; the one saved before is intact" if path.exists() else ""
        raise InputError(f"cannot write {path} ({str(e).splitlines()[0]}): is the disk full?{kept}") from None


def read_checkpoint(path, names=("best.pt", "last.pt", "prev.pt")):
    """The dict that save_checkpoint wrote, on the CPU, with "meta" decoded. `path` is a file, or a run folder: there the
    first of `names` that is whole, with a warning for each that is not. Raises InputError for anything that is not a whole
    checkpoint of ours."""
    path = Path(path)
    files = [path / name for name in names if (path / name).exists()] if path.is_dir() else [path]
    if not files:
        raise InputError(f"no checkpoint in {path} (looked for {', '.join(names)})")
    for file, other in pairwise(files):
        try:
            return read_file(file)
        except InputError as e:
            note(f"warning: {e}; {other.name} takes its place")
    return read_file(files[-1])


def read_file(path):
    if not path.is_file():
        raise InputError(f"no checkpoint {path}: give a run folder or a .pt file")
    try:
        with explain(f"read {path}"):
            check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (InputError, MemoryError):
        raise
    except Exception as e:  # zipfile, pickletools and torch raise many kinds
        if "allocate" in str(e):
            raise
        raise InputError(f"{path} is not a readable checkpoint: cut short, damaged, or of other origin "
                         f"({type(e).__name__})") from None  # fmt: skip
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise InputError(f"{path} is a checkpoint of other origin: its format is not {FORMAT}")
    try:
        meta = json.loads(checkpoint["meta"])
        lacks = wrong_keys(checkpoint, model=dict, optimizer=dict, step=int, best=dict, rng=dict)
        lacks += wrong_keys(meta, spec=str, size=str, config=dict, settings=dict, data=dict, time_s=float)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        lacks = ["meta"]
    if lacks:
        raise InputError(f"{path} is damaged or from another version: it lacks {', '.join(sorted(lacks))}")
    return checkpoint | {"meta": meta, "path": str(path)}


def wrong_keys(values, **kinds):
    return [key for key, kind in kinds.items() if not isinstance(values.get(key), kind)]


def check_archive(path):
    """Raises an exception unless the file is what torch.save makes of tensors, numbers and strings, and whole.

    Nothing is unpickled or unpacked for that: a pickle can run code, and a zip archive of a kilobyte can hold a terabyte."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        packed = any(e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size for e in entries)
        if packed or sum(e.file_size for e in entries) > path.stat().st_size:
            raise InputError(f"{path} is not a checkpoint: it unpacks to more than its own size")
        if archive.testzip():  # the checksums: torch does not look at them
            raise InputError(f"{path} is damaged: its bytes are not those that were written")
        for entry in entries:
            if entry.filename.endswith("/data.pkl"):
                for opcode, argument, _ in pickletools.genops(archive.read(entry)):
                    if opcode.name == "GLOBAL" and not PLAIN.fullmatch(argument):
                        name = printable(argument.replace(" ", "."))[:60]
                        raise InputError(f"{path} holds {name}, and only tensors, numbers and text are loaded")


def build(checkpoint, device="cpu"):
    """The model of a checkpoint from read_checkpoint, with its weights, on a device. Raises InputError if they do not
    fit, or if the model cannot be computed there (what NANOHILBERT_BACKEND names)."""
    meta, saved = checkpoint["meta"], checkpoint["model"]
    try:
        model_class = find_class(meta["spec"])
    except InputError as e:
        raise InputError(f"{checkpoint['path']}: {e}") from None
    try:
        config = model_class.Config(**meta["config"])
        with torch.device("meta"):  # nothing is allocated yet; a layer has several tensors
            sketch = model_class(config) if getattr(config, "L", 0) <= len(saved) else None
        if not sketch or 4 * sum(p.numel() for p in sketch.parameters()) > os.path.getsize(checkpoint["path"]):
            raise ValueError("its config asks for more parameters than it holds")
        model = model_class(config)
        model.load_state_dict(saved)
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        message = " ".join(str(e).split())[:200]
        raise InputError(f"{checkpoint['path']} does not fit this version of the models: {message}") from None
    try:
        with torch.no_grad():
            model.to(device)(torch.zeros(1, 8, dtype=torch.int64, device=device))
    except ValueError as e:
        raise InputError(f"{meta['spec']} cannot be run here: {e}") from None
    return model


def load(path, device="cpu"):
    """(model in eval mode, meta) from a checkpoint file or run folder (best.pt before last.pt).

    meta: spec, size, config, data (name, size, sha256), settings. Raises InputError."""
    checkpoint = read_checkpoint(path)
    return build(checkpoint, device).eval(), checkpoint["meta"]


def filter_logits(logits, seen, temperature, top_k, top_p, repetition_penalty):
    """Scores (V,) of one step -> log-weights (V,) to sample from. `seen` (n,) holds the distinct tokens so far.

    Raises InputError if the scores are not finite."""
    if not logits.isfinite().all():
        raise InputError("the model's scores are not finite: its training diverged")
    logits = logits.float()
    temperature, repetition_penalty = (x and min(max(x, TINY), 1 / TINY) for x in (temperature, repetition_penalty))
    if repetition_penalty != 1:  # Keskar et al., arXiv 1909.05858, section 4.1
        chosen = logits[seen]
        chosen = torch.where(chosen > 0, chosen / repetition_penalty, chosen * repetition_penalty)
        logits = logits.index_put((seen,), chosen)
    if temperature == 0:
        return torch.full_like(logits, -torch.inf).index_fill(0, logits.argmax(), 0.0)
    logits = (logits - logits.max()) / temperature
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:  # the smallest set of tokens that holds top_p of the probability
        p, order = logits.softmax(-1).sort(descending=True, stable=True)
        logits = logits.index_fill(0, order[p.cumsum(-1) - p >= max(top_p, TINY)], -torch.inf)
    return logits


@torch.no_grad()
def generate(model, prompt, length, temperature=0.8, top_k=0, top_p=1.0, repetition_penalty=1.0, seed=1):
    """Yields `length` tokens that continue `prompt`, a non-empty list of tokens. temperature 0 takes the likeliest.

    The random numbers are the CPU's, so that a seed gives the same draws on every device."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    seen, state = set(prompt), model.init_state(1)
    for chunk in torch.tensor([prompt], device=device).split(PREFILL, dim=1):
        logits, _, state = model(chunk, state=state)
    logits = logits[:, -1]
    for i in range(length):
        distinct = torch.tensor(sorted(seen))
        scores = filter_logits(logits[0].cpu(), distinct, temperature, top_k, top_p, repetition_penalty)
        token = int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
        yield token
        seen.add(token)
        if i + 1 < length:
            logits, state = model.step(torch.tensor([token], device=device), state)


@torch.no_grad()
def score(model, tokens):
    """Bits of each of `tokens`, a non-empty list, given a line break and those before it: (T,), float64."""
    V, nats, state = model.config.V, [], model.init_state(1)
    idx = torch.tensor(codec(V)[0](b"\n") + tokens, device=next(model.parameters()).device)
    size = min(PREFILL, max(1, SCORES // V))
    for x, y in progress([*zip(idx[:-1].split(size), idx[1:].split(size))], unit="pass", unit_scale=False):
        logits, _, state = model(x[None], state=state)
        nats.append(F.cross_entropy(logits[0].float(), y, reduction="none").double().cpu())
    return torch.cat(nats) / math.log(2)


def score_table(bits, pieces):
    """Markdown of `score`, by position from the text's start. pieces: the bytes of each token. A character counts where
    it begins: bytes 10xxxxxx go on with one."""
    counts = torch.tensor([[1, len(p), sum(b & 0xC0 != 0x80 for b in p)] for p in pieces])
    bounds = [0, *(4**i for i in range(2, 16) if 4**i < len(bits)), len(bits)]
    rows = []
    for begin, end in [*pairwise(bounds), (0, len(bits))]:
        total, n = bits[begin:end].sum().item(), counts[begin:end].sum(0).tolist()
        name = "all" if len(rows) == len(bounds) - 1 else f"{begin + 1}-{end}"
        rows.append([name, *n, *(f"{total / k:.4f}" if k else "-" for k in n)])
    head = ["tokens from the start", "tokens", "bytes", "characters", "bits a token", "a byte", "a character"]
    return markdown(head, rows)


def decode(tokens, vocab_size=256):
    """Tokens -> pieces of text as they become whole. What is not UTF-8, and control characters that could drive a
    terminal, become U+FFFD."""
    decoder, to_bytes = codecs.getincrementaldecoder("utf-8")(errors="replace"), codec(vocab_size)[1]
    for token in tokens:
        yield printable(decoder.decode(to_bytes(token)))
    yield printable(decoder.decode(b"", final=True))


def text(model, length, temperature, top_k, top_p, repetition_penalty):
    """`length` tokens that continue a line break, as text; the model is left in the mode it was in."""
    mode, V = model.training, model.config.V
    tokens = generate(model.eval(), codec(V)[0](b"\n"), length, temperature, top_k, top_p, repetition_penalty)
    written = "".join(decode(tokens, V))
    model.train(mode)
    return written


def printable(text):
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def newest_run():
    times = {}
    for path in Path("runs").glob("*/*.pt"):
        with suppress(OSError):  # a broken link, or a run that renames it just now
            times[path.stat().st_mtime] = path.parent
    if not times:
        raise InputError("no checkpoint in runs/ yet: train one with `python train.py`, or name a run folder")
    return times[max(times)]


def read_text(name, what):
    """The bytes of a file, of standard input if it is called -. Raises InputError if there are none.

    what: the flag as it was given."""
    with explain(f"read {what}"):
        text = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    if not text:
        raise InputError(f"{what} is empty: a model needs one token to start from")
    return text


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("run", nargs="?", help="run folder or checkpoint file (default: the newest run in runs/)")
    start = "text to continue; FILE:x.txt: the text of x.txt; -: standard input (default: a line break)"
    parser.add_argument("--prompt", default="\n", help=start)
    parser.add_argument("--score", metavar="FILE", help="only print the bits a character of a text; -: standard input")
    numbers = {  # default, what is allowed, and how that and the number are called
        "length": (500, lambda v: v >= 1, "be at least 1", "tokens to generate"),
        "num_samples": (1, lambda v: v >= 1, "be at least 1", "texts to generate, with the seed and those behind it"),
        "temperature": (0.8, lambda v: 0 <= v < math.inf, "be 0 or more", "0 takes the likeliest token"),
        "top_k": (0, lambda v: v >= 0, "be 0 or more", "sample among the K likeliest tokens; 0: all"),
        "top_p": (1.0, lambda v: 0 < v <= 1, "lie in (0, 1]", "sample among the likeliest that hold this share"),
        "repetition_penalty": (1.0, lambda v: 0 < v < math.inf, "be above 0", "above 1: fewer tokens seen before"),
        "seed": (1, lambda v: 0 <= v < 2**63, "lie in 0 ... 2^63 - 1", "of the random draws"),
    }
    for name, (default, _, _, text) in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default: {default})")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    parser.add_argument("--model", default="", metavar="FILE.py:CLASS", help="the class, if the run's model is a file's")
    args = parser.parse_args()
    for name, (_, allows, rule, _) in numbers.items():
        if not allows(getattr(args, name)):
            raise InputError(f"--{name} must {rule}")
    if args.score is not None:
        prompt = read_text(args.score, f"--score {args.score}")
    elif args.prompt == "-" or args.prompt.startswith("FILE:"):
        prompt = read_text(args.prompt.removeprefix("FILE:"), f"--prompt {args.prompt}")
    else:
        prompt = args.prompt.encode("utf-8", errors="surrogateescape")
    if not prompt:
        raise InputError("--prompt is empty: a model needs one token to start from")
    given = import_models(args.model)
    run = newest_run() if args.run is None else os.path.expanduser(args.run)
    model, meta = load(run, pick_device(args.device))
    if given and split_spec(given)[0] != split_spec(meta["spec"])[0]:
        raise InputError(f"--model {given} is not the class of {run}, a run of {meta['spec']}")
    note(f"{run}: {meta['spec']} {meta['size']} trained on {meta['data']['name']}")
    encode, to_bytes = codec(model.config.V)
    tokens = encode(prompt)
    if args.score is not None:
        print(score_table(score(model, tokens), [to_bytes(token) for token in tokens]))
        return
    sampling = [args.temperature, args.top_k, args.top_p, args.repetition_penalty]
    start = time.perf_counter()
    for i in range(args.num_samples):
        print(printable(prompt.decode("utf-8", errors="replace")), end="", flush=True)
        for text in decode(generate(model, tokens, args.length, *sampling, (args.seed + i) % 2**63), model.config.V):
            print(text, end="", flush=True)
        print("\n---------------" if args.num_samples > 1 else "", flush=True)
    note(f"{args.num_samples * args.length / (time.perf_counter() - start):,.0f} tokens/s")


if __name__ == "__main__":
    command_line(main)
