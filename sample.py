"""Generates text from a checkpoint, token by token.

    python sample.py                                    the newest run in runs/
    python sample.py runs/hmamba-stdlib-tiny-s1 --prompt "def main(" --temperature 0.7 --length 1000
    python sample.py runs/hmamba-stdlib-tiny-s1 --prompt FILE:x.txt --num_samples 3    or --prompt -, standard input
    python sample.py runs/hmamba-stdlib-tiny-s1 --score x.txt      bits a character of a text, by position

Also the home of MODELS, of model specs ("hmamba:N=4", "FILE.py:CLASS:D=64") and of checkpoints: `save_checkpoint` and
the one loader, `load`.
"""

import codecs
import difflib
import hashlib
import importlib.util
import io
import json
import math
import modulefinder
import os
import re
import shlex
import sys
import time
import traceback
import typing
import zipfile
from collections import Counter
from collections.abc import Sized
from contextlib import suppress
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parameter import is_lazy

import hmamba
import htransformer
import pam
from data import (InputError, Parser, codec, command_line, hash_file, is_out_of_memory, note, one_line,
                  program, progress, replace_file)  # fmt: skip
from report import markdown

MODELS = hmamba.MODELS | htransformer.MODELS | pam.MODELS
PAM_SIZES = ("5m", "10m", "25m", "50m", "100m")  # PAM table 1
FORMAT = "nanohilbert-1"  # of checkpoints
PARTS = {"meta": dict, "optimizer": dict, "best": dict, "step": int,
         "spec": str, "size": str, "config": dict, "data": dict, "settings": dict}  # of a checkpoint and its meta
IMPORTED, FILES = {}, {}  # of files that the command line names: FILE.py:CLASS -> class, FILE.py -> (path, SHA-256)
OURS = "bench csp data diagnose hmamba htransformer kernels pam report sample tasks train".split()  # git has these
READ = {int: int, float: float, str: str, bool: lambda text: bool(["False", "True"].index(text))}  # a setting, by type
PREFILL = 1024  # tokens of a text that are read in one pass


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
    file, _, name = split_spec(spec)[0].partition(":")
    return f" --model {shlex.quote(f'{os.path.relpath(FILES[file][0])}:{name}')}" if file in FILES else ""


def file_hashes(*names):
    """{file: what its SHA-256 begins with} of the files that specs and tasks are from, as they were imported."""
    files = [name.partition(":")[0] for name in names]
    return {file: FILES[file][1][:12] for file in files if file in FILES}


def find_class(spec, models=MODELS):
    (name, _), known = split_spec(spec), models | IMPORTED
    if name not in known:
        raise unknown("unknown model", name, [*models, "a class of your file, by --model PATH/FILE.py:CLASS"])
    return known[name]


def parse_spec(spec, size, vocab_size):
    """Model spec and size -> (model class, config). Raises InputError for an unknown one, and as `configure` does."""
    model_class = find_class(spec)
    if size not in model_class.SIZES:
        raise unknown(f"{split_spec(spec)[0]} has no size", size, model_class.SIZES)
    return model_class, configure(spec, model_class.SIZES[size], V=vocab_size)


def configure(spec, config, **given):
    """`config` with what is given, and the settings of a spec. Raises InputError for an unknown key, or a value that
    the model refuses."""
    (name, pairs), values = split_spec(spec), {}
    try:
        types = typing.get_type_hints(type(config))
    except Exception as e:  # whatever a user's dataclass does
        raise InputError(f"{name}: an annotation of its Config cannot be read ({reason(e)})") from None
    known = [f.name for f in fields(config) if types[f.name] in READ and f.name not in ("V", "classes")]
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key in values:
            raise InputError(f"{spec!r} sets {key} twice")
        if key not in known or not equals:
            raise unknown(f"{name} has no setting", pair, [f"{key}=" for key in known])
        try:
            values[key] = READ[types[key]](value)
        except ValueError:
            kind = "True or False" if types[key] is bool else types[key].__name__
            raise InputError(f"{name}: {key}={value} is not {kind}") from None
    try:
        return replace(config, **given, **values)
    except Exception as e:
        raise InputError(f"{name}: {reason(e)}") from None


# ----------------------------------------------------------------------------------------------------------------------
# Models of other files: the contract stands in PAPERS.md, "A new model"


class Defaults:
    """What such a class may leave out, with `SIZES` (each is Config()), `config` and `layers` (none)."""

    NO_DECAY, checkpointing = (), False

    def step(self, idx_t, state):
        logits, _, state = self(idx_t[:, None], state=state)
        return logits[:, -1], state

    def num_params(self):
        counts = Counter()
        for name, p in self.named_parameters():
            counts[name.split(".")[0]] += p.numel() * (1 + p.is_complex())
        return {**counts, "total": counts.total()}

    def flops_per_token(self, seq):
        return 6 * self.num_params()["total"]


def complete(name, model_class):
    """A class of a file with what it may leave out. Raises InputError that names all that it may not."""
    faults = []
    try:
        config = replace(model_class.Config(), V=256)
    except Exception as e:  # whatever a file does
        faults.append(f"no Config, a dataclass whose fields have defaults, one of them V ({reason(e)})")
    if getattr(model_class, "forward", None) in (None, torch.nn.Module.forward):
        faults.append("no forward(idx, targets=None, state=None)")
    if not hasattr(model_class, "init_state"):
        faults.append("no init_state(batch_size)")
    if faults:
        raise InputError(f"{name} is no model (PAPERS.md, A new model): {'; '.join(faults)}")

    sizes = getattr(model_class, "SIZES", {size: config for known in MODELS.values() for size in known.SIZES})
    try:
        for size, config in sizes.items():
            if not isinstance(config, model_class.Config):  # but of a parent's, which has grown: what it sets
                usual = asdict(type(config)())
                given = {key: value for key, value in asdict(config).items() if value != usual[key]}
                sizes = sizes | {size: model_class.Config(**given)}
    except Exception as e:  # whatever a file does
        raise InputError(f"{name} has SIZES that are not of its Config: {reason(e)}") from None

    class Model(model_class, Defaults):
        SIZES = sizes

        def __init__(self, config):
            super().__init__(config)
            for part, value in (("config", config), ("layers", [])):
                if not hasattr(self, part):
                    setattr(self, part, value)

    return Model


def import_models(text, other_contracts=()):
    """Imports and checks the classes that a comma-separated list of specs names as FILE.py:CLASS. Returns the list
    without folders: from then on they are known so. other_contracts: base classes whose subclasses are not checked."""
    specs = []
    for spec in text.split(","):
        name, pairs = split_spec(spec.strip())
        if ".py:" in name:
            name, model_class = import_name(name)
            is_other = isinstance(model_class, type) and issubclass(model_class, other_contracts)
            IMPORTED[name] = model_class if is_other else complete(name, model_class)
        specs.append(":".join([name, *pairs]))
    return ",".join(specs)


def import_class(text):
    """Imports the class that --model names for runs that have one of a file. text: FILE.py:CLASS, or ""."""
    if text and ".py:" not in text:
        raise InputError(f"--model {text} is no FILE.py:CLASS: other models are known from their runs")
    import_models(text)


def hash_imports(path):
    """SHA-256 of a Python file, in hex; with those that it imports from its folder, but for ours, that of all."""
    finder = modulefinder.ModuleFinder([str(path.parent)], excludes=OURS)
    with suppress(Exception):  # of packages without __init__.py, and of what is never imported: the rest counts
        finder.run_script(str(path))
    paths = {Path(module.__file__) for module in finder.modules.values() if module.__file__} - {path}
    hashes = [hash_file(x) for x in (path, *sorted(filter(Path.is_file, paths)))]
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if hashes[1:] else hashes[0]


def import_name(typed):
    """FILE.py:NAME, as the command line gives it -> (that without a folder, what the file calls so)."""
    file, _, name = typed.rpartition(":")
    path = Path(os.path.expanduser(file)).resolve()
    if path.name not in FILES:
        found = importlib.util.spec_from_file_location(str(path), path)
        sys.modules[str(path)] = importlib.util.module_from_spec(found)  # where dataclasses look
        sys.path.append(str(path.parent))  # last, for what lies beside the file
        FILES[path.name] = path, None
        try:
            found.loader.exec_module(sys.modules[str(path)])
            FILES[path.name] = path, hash_imports(path)
        except (Exception, SystemExit) as e:  # whatever a file does
            raise InputError(f"cannot import {file}: {reason(e)}") from None
    if FILES[path.name][0] != path:
        raise InputError(f"two files have the name {path.name}: rename one")
    known = vars(sys.modules[str(path)])
    if name not in known:
        raise unknown(f"{file} has no", name, [key for key in known if not key.startswith("_")])
    return f"{path.name}:{name}", known[name]


def without_gradient(model):
    """[] or [which parameters a backward has left out]."""
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    return [f"parameters without a gradient: {', '.join(unused)}"] * bool(unused)


def step_faults(model_class, config, device="cpu", checkpointing=False, longest=8):
    """[] or [the first fault of a model]. A copy with 4 layers, if it can have so few, takes a training step of
    `longest` tokens, 8 to 64. A model of a file must also keep the rest of the contract. The random numbers go on as
    they would have."""
    T, part = max(8, min(longest, 64)), ""
    x = torch.arange(T, device=device)[None] % config.V
    with torch.random.fork_rng([x.device] if x.device.type == "cuda" else []):
        try:
            try:
                model = model_class(replace(config, L=min(config.L, 4)))
            except Exception:  # there may be no L, or one that fits other settings
                model = model_class(config)
            model.to(device).checkpointing = checkpointing
            if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
                raise ValueError(f"parameters without a shape: {', '.join(lazy)}")
            logits, loss, _ = model(x, x)
            if (shape := tuple(logits.shape)) != (1, T, config.V):
                raise ValueError(f"logits of shape {shape}, not (B, T, V) = (1, {T}, {config.V})")
            if loss.dim() or not loss.isfinite():
                raise ValueError("a loss that is no finite number: the mean in nats a token")
            loss.backward()
            if (faults := without_gradient(model)) or not isinstance(model, Defaults):
                return faults
            if sparse := [name for name, p in model.named_parameters() if p.grad is not None and p.grad.is_sparse]:
                raise ValueError(f"sparse gradients, which AdamW does not take: {', '.join(sparse)}")
            part = "its config: "  # for checkpoints and logs, as are the two behind it
            saved = json.dumps(asdict(model.config))
            part = "its num_params: "
            json.dumps([model.num_params(), int(model.num_params()["total"])])
            part = "its flops_per_token: "
            json.dumps(model.flops_per_token(longest) + 0)
            part = "its NO_DECAY: "
            if isinstance(model.NO_DECAY, str) or not all(isinstance(name, str) for name in model.NO_DECAY):
                raise ValueError("no tuple of texts")
            part = "its layers: "
            layers = model.layers
            if not isinstance(layers, Sized) or not {*map(id, layers)} <= {*map(id, model.modules())}:
                raise ValueError("no list of the model's own modules")
            part = "its state: "
            with torch.no_grad():
                for p in model.parameters():
                    if not (p.abs() > 0.01).any():
                        p.copy_(0.1 * torch.randn(p.shape))  # behind a gate that begins at zero anything would pass
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                whole = model.eval()(x)[0]
                first, _, state = model(x[:, : T // 2], state=model.init_state(1))
                second, _, state = model(x[:, T // 2 : -1], state=state)
                third, _ = model.step(x[:, -1], state)
                if not torch.allclose(torch.cat((first, second, third[:, None]), 1), whole, rtol=0.01, atol=0.01):
                    raise ValueError("in pieces, with the state carried on, a text has other logits")
                part, twice = "its loss: ", x[:, :5].expand(2, 5)  # a sum would be another number
                logits, loss, _ = model(twice, twice)
                nats = F.cross_entropy(logits.float().flatten(0, 1), twice.flatten()).item()
                if not math.isclose(nats, loss.item(), rel_tol=0.01):
                    raise ValueError("no mean of the cross-entropy of its logits, in nats a token")
            with torch.no_grad():
                part = "its checkpoint, once loaded: "
                again = model_class(model_class.Config(**json.loads(saved)))
                torch.save(model.state_dict(), file := io.BytesIO())
                file.seek(0)
                again.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
                if not torch.allclose(again.to(device).eval()(x)[0], whole, rtol=0.01, atol=0.01):
                    raise ValueError("other logits, as of a random tensor that it does not hold")
                part = f"its length {longest}: "
                model(x[:, :1].expand(2, longest))
        except Exception as e:  # whatever a model does
            if is_out_of_memory(e):
                raise
            return [part + reason(e)]
    return []


def reason(e):
    """An exception in a line, with the last line of a file of the command line that led to it."""
    paths = {str(path) for path, _ in FILES.values()}
    frames = [frame for frame in traceback.extract_tb(e.__traceback__) if frame.filename in paths]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    kind = "" if isinstance(e, (ValueError, AssertionError)) else f"{type(e).__name__}: "
    return f"{kind}{one_line(e)}{where}"


def params_table(spec, size, seq, vocab_size):
    """Parameters by component, and what one token costs (QS tables 2 and 3, PAM table 1)."""
    model_class, config = parse_spec(spec, size, vocab_size)
    try:
        try:
            with torch.device("meta"):
                model = model_class(config)
        except Exception:  # as where it reads a tensor's value
            model = model_class(config)
        lines = [f"{spec} {size}: {model.config}"]
        lines += [f"  {name:20}{count:>14,}" for name, count in model.num_params().items()]
        lines += [f"  {'flops a token':20}{model.flops_per_token(seq):>14,.0f}  forward and backward, seq {seq}"]
    except Exception as e:  # whatever a model does
        raise InputError(f"the parameters of {spec} cannot be counted: {reason(e)}") from None
    return "\n".join(lines)


def pick_device(name):
    """torch.device for "auto", "cpu", "cuda", "cuda:1" or "mps". Raises InputError if it is not there."""
    cards = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    there = ["cuda", *cards] * bool(cards) + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    if name not in ("auto", *there):
        raise InputError(f"no device {name!r} here; there are: {', '.join(['auto', *there])}")
    return torch.device(there[0] if name == "auto" else name)


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
    """The dict that save_checkpoint wrote, on the CPU, with "meta" decoded. `path` is a file, or a run folder: then it
    is the first of `names` there that is whole, with a warning for each that is not. Raises InputError if none is."""
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
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > path.stat().st_size or archive.testzip():  # a bomb; checksums, at which torch does not look
                raise ValueError("its bytes are not those that were written")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # a pickle can run code
        if checkpoint["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        meta = json.loads(checkpoint["meta"])
        kinds = {key: type(x) for key, x in {**checkpoint, **meta, "meta": meta}.items()}
        if any(kinds[key] is not kind for key, kind in PARTS.items()):
            raise ValueError("an entry has another type")
        return checkpoint | {"meta": meta, "path": str(path)}
    except MemoryError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except Exception as e:  # zipfile and torch raise many kinds
        why = str(e) if type(e) is ValueError else type(e).__name__
        raise InputError(f"{path} is no checkpoint: cut short, damaged, or of other origin ({why})") from None


def build(checkpoint, device="cpu"):
    """The model of a checkpoint from read_checkpoint, with its weights, on a device. Raises InputError if they do not
    fit, or if the model cannot be computed there (what NANOHILBERT_BACKEND names). A changed file is a note."""
    meta = checkpoint["meta"]
    model_class = find_class(meta["spec"])
    for file, now in file_hashes(meta["spec"]).items():
        if meta.get("files", {}).get(file, now) != now:
            note(f"note: {file} or what it imports changed since the run of {checkpoint['path']} began")
    try:
        model = model_class(model_class.Config(**meta["config"]))
        model.load_state_dict(checkpoint["model"])
        with torch.no_grad():
            model.to(device).eval()(torch.zeros(1, 8, dtype=torch.int64, device=device))
    except Exception as e:  # whatever a model does
        raise InputError(f"{checkpoint['path']} does not fit this version, or cannot run here: {reason(e)}") from None
    return model.train()


def load(path, device="cpu"):
    """(model in eval mode, meta) from a checkpoint file or run folder (best.pt before last.pt).

    meta: spec, size, config, data (name, size, sha256), settings, step, path of the file. Raises InputError."""
    checkpoint = read_checkpoint(path)
    return build(checkpoint, device).eval(), checkpoint["meta"] | {key: checkpoint[key] for key in ("step", "path")}


def filter_logits(logits, seen, temperature, top_k, top_p, repetition_penalty):
    """Scores (V,) of one step -> log-weights (V,) to sample from. `seen` (n,) holds the distinct tokens so far.

    Raises InputError if the scores are not finite."""
    if not logits.isfinite().all():
        raise InputError("the model's scores are not finite: its training diverged")
    logits = logits.float()
    if repetition_penalty != 1:  # Keskar et al., arXiv 1909.05858, section 4.1
        chosen = logits[seen]
        chosen = torch.where(chosen > 0, chosen / repetition_penalty, chosen * repetition_penalty)
        logits = logits.index_put((seen,), chosen)
    if temperature < 1e-9:
        return torch.full_like(logits, -torch.inf).index_fill(0, logits.argmax(), 0.0)
    logits = (logits - logits.max()) / temperature
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:  # the smallest set of tokens that holds top_p of the probability
        falling, order = logits.sort(descending=True, stable=True)  # probabilities may have rounded to one value
        p = falling.softmax(-1)
        logits = logits.index_fill(0, order[p.cumsum(-1) - p >= top_p], -torch.inf)
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
    nats, state = [], model.init_state(1)
    idx = torch.tensor(codec(model.config.V)[0](b"\n") + tokens, device=next(model.parameters()).device)
    for x, y in progress([*zip(idx[:-1].split(PREFILL), idx[1:].split(PREFILL))], unit="pass", unit_scale=False):
        logits, _, state = model(x[None], state=state)
        nats.append(F.cross_entropy(logits[0].float(), y, reduction="none").double().cpu())
    return torch.cat(nats) / math.log(2)


def score_table(bits, pieces):
    """Markdown of `score`, by position from the text's start. pieces: the bytes of each token. A character counts where
    it begins: bytes 10xxxxxx go on with one."""
    counts = torch.tensor([[1, len(p), sum(b & 0xC0 != 0x80 for b in p)] for p in pieces])
    bounds, rows = [0, *(4**i for i in range(2, 16) if 4**i < len(bits)), len(bits)], []
    for begin, end in dict.fromkeys([*pairwise(bounds), (0, len(bits))]):
        total, n = bits[begin:end].sum().item(), counts[begin:end].sum(0).tolist()
        rows.append([f"{begin + 1}-{end}", *n, *(f"{total / k:.4f}" if k else "-" for k in n)])
    head = ["tokens from the start", "tokens", "bytes", "characters", "bits a token", "a byte", "a character"]
    return markdown(head, rows)


def decode(tokens, vocab_size=256):
    """Tokens -> pieces of text as they become whole. What is not UTF-8, and control characters that could drive a
    terminal, become U+FFFD."""
    return map(printable, codecs.iterdecode(map(codec(vocab_size)[1], tokens), "utf-8", errors="replace"))


def text(model, length, temperature, top_k, top_p, repetition_penalty):
    """`length` tokens that continue a line break, as text; the model is left in the mode it was in."""
    mode, V = model.training, model.config.V
    try:
        tokens = generate(model.eval(), codec(V)[0](b"\n"), length, temperature, top_k, top_p, repetition_penalty)
        return "".join(decode(tokens, V))
    finally:
        model.train(mode)


def printable(text):
    return re.sub(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]", "\ufffd", text)


NUMBERS = {  # default, least and most, what it is
    "length": (500, 1, 10**9, "tokens to generate"),
    "num_samples": (1, 1, 10**9, "texts to generate, with the seed and those behind it"),
    "temperature": (0.8, 0, 1e9, "0 takes the likeliest token"),
    "top_k": (0, 0, 10**9, "sample among the K likeliest tokens; 0: all"),
    "top_p": (1.0, 1e-9, 1, "sample among the likeliest that hold this share"),
    "repetition_penalty": (1.0, 1e-9, 1e9, "above 1: fewer tokens seen before"),
    "seed": (1, 0, 10**18, "of the random draws"),
}


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("run", nargs="?", help="run folder or checkpoint file (default: the newest run in runs/)")
    start = "text to continue; FILE:x.txt: the text of x.txt; -: standard input (default: a line break)"
    parser.add_argument("--prompt", default="\n", help=start)
    parser.add_argument("--score", metavar="FILE", help="only print the bits a character of a text; -: standard input")
    for name, (default, _, _, what) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{what} (default: {default})")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    parser.add_argument("--model", default="", metavar="FILE.py:CLASS", help="the class, if a file of yours has it")
    args = parser.parse_args()
    for name, (_, least, most, _) in NUMBERS.items():
        if not least <= getattr(args, name) <= most:
            raise InputError(f"--{name} must lie between {least:g} and {most:g}")
    source = args.prompt if args.score is None else f"FILE:{args.score}"
    if source in ("-", "FILE:-"):
        prompt = sys.stdin.buffer.read() if sys.stdin else b""  # it may be closed
    elif source.startswith("FILE:"):
        prompt = Path(os.path.expanduser(source.removeprefix("FILE:"))).read_bytes()
    else:
        prompt = source.encode("utf-8", errors="surrogateescape")
    if not prompt:
        raise InputError("the text is empty: a model needs one token to start from")
    import_class(args.model)
    run, checkpoints = args.run and os.path.expanduser(args.run), [p for p in Path("runs").rglob("*.pt") if p.exists()]
    if not (run or checkpoints):
        raise InputError(f"no checkpoint in runs/ yet: train one with `{program('train.py')}`, or name a run folder")
    run = run or max(checkpoints, key=os.path.getmtime).parent
    model, meta = load(run, pick_device(args.device))
    note(f"{meta['path']}, step {meta['step']}: {meta['spec']} {meta['size']} trained on {meta['data']['name']}")
    encode, to_bytes = codec(model.config.V)
    tokens = encode(prompt)
    sampling, start = [args.temperature, args.top_k, args.top_p, args.repetition_penalty], time.perf_counter()
    try:
        if args.score is not None:
            print(score_table(score(model, tokens), [to_bytes(token) for token in tokens]))
            return
        for i in range(args.num_samples):
            print(printable(prompt.decode("utf-8", errors="replace")), end="", flush=True)
            for piece in decode(generate(model, tokens, args.length, *sampling, args.seed + i), model.config.V):
                print(piece, end="", flush=True)
            print("\n---------------" if args.num_samples > 1 else "", flush=True)
    except Exception as e:  # a model of a file may have a longest text
        if ".py:" not in meta["spec"] or isinstance(e, (InputError, OSError)) or is_out_of_memory(e):
            raise
        raise InputError(f"{meta['spec']} fails at a text of this length: {reason(e)}") from None
    note(f"{args.num_samples * args.length / (time.perf_counter() - start):,.0f} tokens/s")


if __name__ == "__main__":
    command_line(main)
