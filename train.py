"""Trains any model of this repository on bytes or tokens, and compares the steps that models need.

    python train.py                                            tiny H-Mamba on the text that ships with Python
    python train.py --model hmamba,mamba --seeds 1,2,3         a sweep: the same data order, ratios at the end
    python train.py --model hmamba:N=4,hmamba:field=real       settings of a model (fields of its Config)
    python train.py --model mygru.py:MyGRU:D=64                a class of your own file: PAPERS.md, "A new model"
    python train.py --lr 1e-3,2e-3,4e-3 --out SWEEP            three peak rates; the same command goes on with a sweep
    torchrun --nproc_per_node 4 train.py --data FILE --size 253m       the paper's size and protocol on four GPUs
    python train.py --resume runs/hmamba-stdlib-tiny-s1        goes on where a stopped run left off
    python train.py --out RUN --resume RUN                     begins RUN, or goes on with it: for what restarts by itself
    python train.py --init_from RUN --data FOLDER              fine-tuning: a new run from the weights of another
    python train.py --resume RUN --eval_only --split test      loss of its best checkpoint; with --data, on other data
    python train.py --model hmamba,mamba --size 253m --params  parameters by component
    python train.py --task mod3                                state tracking: hands over to tasks.py and its flags

Paper: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691), section 7
and table 4. Losses are in nats per token; divided by ln 2 they are bpc, bits per character, if the tokens are bytes.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import re
import select
import shlex
import signal
import sys
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from tqdm import tqdm

import data
import report
import sample
import tasks
from data import TOKENS, InputError, Parser, command_line

# Defaults by size. batch: sequences a step over all devices; micro: sequences that one device takes at once;
# warmup: steps, or below 1 a share of all steps; min_lr: where the cosine ends, by QS table 4 at a tenth of the peak.
PROTOCOLS = {
    "tiny": {"steps": 240, "batch": 16, "micro": 16, "seq": 256, "lr": 2e-3, "min_lr": "lr/10", "warmup": 0.75,
             "schedule": "cosine", "dtype": "float32", "checkpointing": False,
             "eval_every": 20, "eval_seqs": 128, "ckpt_every": 60},
    "small": {"steps": 1000, "batch": 64, "micro": 16, "seq": 512, "lr": 1e-3, "min_lr": "lr/10", "warmup": 0.75,
              "schedule": "cosine", "dtype": "bfloat16", "checkpointing": False,
              "eval_every": 20, "eval_seqs": 512, "ckpt_every": 100},
    "253m": {"steps": 1000, "batch": 1024, "micro": 32, "seq": 1024, "lr": 6e-4, "min_lr": "lr/10", "warmup": 750,
             "schedule": "cosine", "dtype": "bfloat16", "checkpointing": True,
             "eval_every": 20, "eval_seqs": 5120, "ckpt_every": 20},  # QS table 4; D: 20 x 256
}  # fmt: skip
# PAM table 2: epochs in place of steps. Each is evaluated at its end and three times before, which the paper leaves open,
# as it does the end of the cosine: 0, and the betas: AdamW's own.
PAM_PROTOCOL = {"epochs": 10, "batch": 8, "micro": 8, "seq": 512, "lr": 3e-5, "min_lr": 0.0, "warmup": 500,
                "schedule": "cosine", "dtype": "float32", "checkpointing": False, "eval_seqs": 512, "ckpt_every": 1000,
                "sample_every": 5000}  # fmt: skip
PROTOCOLS |= dict.fromkeys(sample.PAM_SIZES, PAM_PROTOCOL)
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0  # QS section 7, table 4
PAM_BETAS, PAM_DECAY = (0.9, 0.999), 0.01
PAPER_STEPS = {"enwik8": 1500, "owt": 1000, "fineweb": 1000}  # QS section 7, budget at 253m
PEAK_FLOPS = {  # dense bf16, by the device's full name; for others there is no MFU
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989e12,
    "NVIDIA GeForce RTX 4090": 165e12, "NVIDIA GeForce RTX 3090": 71e12,
}  # fmt: skip
MAX_BATCH = 2**24  # the order of a step's sequences is in memory
FIGURE_SHARE = 20  # curve.png is drawn at a validation if that takes at most a 20th of the time since it was last
# Flags that take a list: a run for each combination; the last varies fastest.
LISTS = ("size", "steps", "epochs", "batch", "seq", "lr", "min_lr", "warmup", "seeds", "model")
# What a resumed run may set anew: the rest would change its course.
MAY_CHANGE = {"resume", "data", "stop_at", "micro", "device", "compile", "checkpointing", "log_every", "ckpt_every",
              "eval_only", "split"}  # fmt: skip


def flag(default, text, type=str, choices=None):
    return field(default=default, metadata={"help": text, "type": type, "choices": choices})


@dataclass
class Settings:
    """Every flag. None: taken from PROTOCOLS for the size."""

    model: str = flag("hmamba", "model spec NAME[:key=value...] or FILE.py:CLASS[:key=value...]")
    data: str = flag("stdlib", "stdlib, enwik8, owt, fineweb, wikitext103 (see python data.py), a file or a folder")
    tokens: str = flag(None, "bytes, or GPT-2's BPE (default: bytes; gpt2: wikitext103, .tokens files)", choices=TOKENS)
    column: str = flag(None, "what holds the text of parquet and JSON lines files (default: text); '': bytes of any file")
    size: str = flag(None, "tiny, small, 253m, 5m ... 100m (default: tiny; QS data on CUDA: 253m)")
    seeds: str = flag("1", "seed of initialisation and data order")
    steps: int = flag(None, "optimizer steps of the schedule", int)
    epochs: int = flag(None, "passes over the training data, if --steps is not given", int)
    stop_at: int = flag(None, "stop after this step, the schedule unchanged; --resume goes on", int)
    batch: int = flag(None, "sequences a step, over all devices", int)
    micro: int = flag(None, "sequences that a device takes at once; changes memory and speed, not the result", int)
    seq: int = flag(None, "tokens a sequence", int)
    lr: float = flag(None, "peak learning rate", float)
    min_lr: float = flag(None, "learning rate at the end of the cosine", float)
    warmup: float = flag(None, "steps of linear warmup; below 1: share of the steps", float)
    schedule: str = flag(None, "cosine, or constant: --lr throughout, no warmup", choices=("cosine", "constant"))
    dtype: str = flag(None, "float32, or bfloat16: autocast, parameters stay float32", choices=("float32", "bfloat16"))
    checkpointing: bool = flag(None, "recompute each layer in the backward: less memory", bool)
    compile: bool = flag(False, "torch.compile each layer", bool)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    eval_every: int = flag(None, "steps between validations, from an epoch's start; per-layer gradient norms too", int)
    eval_seqs: int = flag(None, "fixed windows of a validation during training; the last takes the whole split", int)
    log_every: int = flag(10, "steps between log lines of the training loss", int)
    ckpt_every: int = flag(None, "steps between checkpoints", int)
    sample_every: int = flag(None, "steps between generated texts in the log (default: none; 5m to 100m: 5000)", int)
    out: str = flag(None, "folder of a new run; of a sweep: what holds its runs, and goes on with them (default: runs/)")
    resume: str = flag(None, "go on with this run folder or checkpoint; if --out names it too, begin it if need be")
    init_from: str = flag(None, "begin with the weights of this run folder or checkpoint; its model, size and tokens "
                                "unless others are given")  # fmt: skip
    eval_only: bool = flag(False, "only evaluate the checkpoint named by --resume, on the whole --split", bool)
    split: str = flag("val", "split for --eval_only", choices=("train", "val", "test"))
    params: bool = flag(False, "only print the parameters by component", bool)


def parse_flags():
    """Only the flags that were given, {name: value}; of those in LISTS the list of its values."""
    columns = {size: PROTOCOLS[size] for size in ("tiny", "small", "253m")} | {"5m to 100m": PAM_PROTOCOL}
    rows = {"": columns} | {key: [p.get(key, "-") for p in columns.values()] for key in PROTOCOLS["tiny"] | PAM_PROTOCOL}
    table = "\n".join(f"  {key:14}" + "".join(f"{value!s:>12}" for value in row) for key, row in rows.items())
    lists = "X,...: a value, or a list of values with commas between them; then there is a run for each combination."
    parser = Parser(description=__doc__, epilog=f"{lists}\n\ndefaults by size:\n{table}")
    for f in dataclasses.fields(Settings):
        kind, default = f.metadata["type"], "by size" if f.name in rows and f.default is None else f.default
        text = f.metadata["help"]
        text += f" (default: {default})" if default and "(default" not in text else ""
        if kind is bool:
            action = argparse.BooleanOptionalAction if f.default is None else "store_true"
            parser.add_argument(f"--{f.name}", action=action, default=None, help=text)
        elif f.name in LISTS:
            parser.add_argument(f"--{f.name}", type=list_of(kind), metavar=f"{f.name.upper()},...", help=text)
        else:
            parser.add_argument(f"--{f.name}", type=kind, choices=f.metadata["choices"], help=text)
    given = {k: v for k, v in vars(parser.parse_args()).items() if v is not None}
    given |= {k: os.path.expanduser(given[k]) for k in ("data", "out", "resume", "init_from") if k in given}
    if "model" in given:
        given["model"] = sample.import_models(",".join(given["model"])).split(",")
    for key in ("data", "out", "resume", "init_from"):
        if given.get(key) == "":
            raise InputError(f"--{key} '' names no {'text' if key == 'data' else 'folder'}")
    if {"out", "resume"} <= given.keys() and os.path.realpath(given["out"]) == os.path.realpath(given["resume"]):
        given["resume"] = given["out"]  # one folder under two names
    return given


def list_of(kind):
    """What reads the values of a list, with commas between them."""

    def read(text):
        return [kind(part.strip()) for part in text.split(",")]

    read.__name__ = kind.__name__  # for argparse's message
    return read


def combinations(given):
    """For each combination of the lists: (the flags of a run, what varies from run to run as words of its name)."""
    lists = {key: given[key] for key in LISTS if key in given}
    for key, values in lists.items():
        if len(set(values)) < len(values):
            raise InputError(f"--{key} must not repeat an entry")
    varied = [key for key in lists if len(lists[key]) > 1 and key not in ("size", "seeds", "model")]
    for values in itertools.product(*lists.values()):
        flags = given | dict(zip(lists, values))
        yield flags, [f"{key}{flags[key]}" for key in varied]


def resolve(given, model, size, seed, device):
    """Settings of one run: what was given, then the protocol of its size. Raises InputError for impossible values."""
    if size is None:
        size = "253m" if given.get("data") in PAPER_STEPS and device.type == "cuda" else "tiny"
        if given.get("data") in PAPER_STEPS and size == "tiny":
            print_rank0("no CUDA device: --size tiny instead of 253m")
    if size not in PROTOCOLS:
        raise sample.unknown("unknown size", size, PROTOCOLS)
    s = Settings(**given | {"model": model, "size": size, "seeds": seed})
    s.tokens = s.tokens or ("gpt2" if s.data == "wikitext103" or s.data.endswith(".tokens") else "bytes")
    protocol = dict(PROTOCOLS[size])
    if size == "253m":
        protocol["steps"] = PAPER_STEPS.get(s.data, protocol["steps"])
    if "epochs" in given and "steps" not in given:
        protocol |= {"steps": None, "eval_every": None}
    for key, value in protocol.items():
        if getattr(s, key) is None:
            setattr(s, key, value)
    if s.min_lr == "lr/10":
        s.min_lr = float(f"{s.lr / 10:.12g}")  # 6e-4 / 10 is 5.9999999999999995e-05
    if s.data not in data.NAMED and Path(s.data).exists():
        s.data = str(Path(s.data).absolute())  # so that --resume finds it from anywhere
    sample.parse_spec(s.model, s.size, 256)
    return check(s)


def check(s):
    """The settings of one run, if they are possible. Raises InputError."""
    for f in dataclasses.fields(s):
        value = getattr(s, f.name)
        if f.metadata["type"] is int and value is not None and not 1 <= value <= 10**9:
            raise InputError(f"--{f.name} {value} must be at least 1, at most 10^9")
    if not re.fullmatch("0|[1-9][0-9]{0,9}", s.seeds) or int(s.seeds) >= 2**32:  # 01 would be another name for 1
        raise InputError(f"--seeds {s.seeds!r} must be whole numbers from 0 to 2^32 - 1")
    if not (0 < s.lr < math.inf and 0 <= s.min_lr <= s.lr and 0 <= s.warmup < math.inf):
        raise InputError(f"impossible schedule: --lr {s.lr} --min_lr {s.min_lr} --warmup {s.warmup}")
    if s.stop_at and s.steps and s.stop_at > s.steps:
        raise InputError(f"--stop_at {s.stop_at} lies beyond --steps {s.steps}")
    if s.batch > MAX_BATCH:
        raise InputError(f"--batch {s.batch} must be at most {MAX_BATCH}")
    if s.batch % world:
        raise InputError(f"--batch {s.batch} must be a multiple of the {world} devices")
    return s


def learning_rate(step, s):
    """Of the step with this index, from 0: linear warmup, then a cosine from lr to min_lr."""
    if s.schedule == "constant":
        return s.lr
    warmup = s.warmup if s.warmup >= 1 else s.warmup * s.steps
    if step < warmup:
        return s.lr * (step + 1) / max(warmup, 1)
    done = (step - warmup) / max(1, s.steps - warmup)
    return s.min_lr + 0.5 * (s.lr - s.min_lr) * (1 + math.cos(math.pi * done))


# ----------------------------------------------------------------------------------------------------------------------
# Several devices, signals, output

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")  # what it sets for each process


def read_ranks(env):
    """(rank, world size, local rank, error) from torchrun's variables; without them those of a single process."""
    named = [f"{k}={env[k]}" for k in TORCHRUN[:3] if k in env]
    needed = TORCHRUN + ("TORCHELASTIC_MAX_RESTARTS",) * (env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    wrong = [k for k in needed if not env.get(k) or not (k == "MASTER_ADDR" or env[k].isdecimal())]
    wrong += ["MASTER_PORT"] * (not wrong and int(env["MASTER_PORT"]) > 65535)
    if named and not wrong and int(env["RANK"]) < int(env["WORLD_SIZE"]):
        return *(int(env[k]) for k in TORCHRUN[:3]), None
    lacks = f"no possible value in {', '.join(wrong)}" if wrong else "no rank below WORLD_SIZE"
    return 0, 1, 0, named and f"{' '.join(named)}, but {lacks}: start several processes with torchrun, or unset it"


rank, world, local_rank, ranks_error = read_ranks(os.environ)
stop_signals = []  # these signals end the run after the present step


def print_rank0(*text):
    if stop_signals:
        drop_blocked_output()
    if rank == 0:
        # No run ends at a reader that went away, a full disk, or (RuntimeError) a signal in the middle of a print.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            tqdm.write(" ".join(map(str, text)), file=sys.stdout)
            sys.stdout.flush()


def drop_blocked_output():
    """Sends what nobody reads to nowhere, also a write that waits for its reader: a run that shall end could not."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # what is no stream of the system cannot be asked
            if not select.select([], [stream], [], 0)[1]:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def quote(path):
    """A path as a word of a shell's command line."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


@contextlib.contextmanager
def extra(what):
    """For what is no part of a result: if it fails, one line says so, and the run goes on."""
    try:
        yield
    except Exception as e:
        print_rank0(f"note: no {what} ({one_line(e)})")


def one_line(error):
    """An error of a library, short enough for a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def sum_over_ranks(value):
    """Sum over all ranks of a list of numbers."""
    if world == 1:
        return value
    x = torch.tensor(value, dtype=torch.float64, device="cpu" if dist.get_backend() == "gloo" else "cuda")
    dist.all_reduce(x)
    return x.tolist()


def broadcast_from_rank0(make):
    """make() on rank 0, its result on every rank; an InputError likewise."""
    try:
        box = [make() if rank == 0 else None]
    except InputError as e:
        box = [e]
    if world > 1:
        dist.broadcast_object_list(box)
    if isinstance(box[0], InputError):
        raise box[0]
    return box[0]


@contextlib.contextmanager
def rank_in_errors():
    """For errors that one rank alone may meet: that rank prints them. Those of all ranks are printed by rank 0, once."""
    try:
        yield
    except InputError as e:
        if rank:
            data.note(f"error on rank {rank}: {e}")
        raise


def on_signal(signum, _):
    # A closed terminal may send SIGHUP twice, and torchrun hands on what its ranks got already.
    if stop_signals and world == 1 and signum in (signal.SIGINT, signal.SIGTERM):
        raise KeyboardInterrupt
    stop_signals.append(signum)
    again = " (again: at once, without saving)" if world == 1 else ""
    print_rank0(f"{signal.Signals(signum).name}: stopping after this step{again}")


# ----------------------------------------------------------------------------------------------------------------------
# Training


def autocast(s, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=s.dtype == "bfloat16")


def read_windows(corpus, split, s, index, device):
    """data.get_windows on a device, of a file that is still what it was: a page cut from it would end the process."""
    with rank_in_errors():
        corpus.check_unchanged()
    return (x.to(device) for x in data.get_windows(corpus.split(split), s.seq, index))


@torch.no_grad()
def evaluate(model, corpus, split, s, device, count=None):
    """(loss in nats per token, number of tokens) of `count` evenly spread windows of a split, or of all of them, with a
    progress bar. It is the same for any micro-batch and world size."""
    model.eval()
    n = data.num_windows(corpus.split(split), s.seq)
    index, nats = data.eval_index(n, count or n), 0.0
    mine = index[rank::world]
    hidden = True if count or rank else None  # None: on a terminal alone
    for i in data.progress(range(0, len(mine), s.micro), f"whole {split} split", unit="batch", disable=hidden):
        x, y = read_windows(corpus, split, s, mine[i : i + s.micro], device)
        with autocast(s, device):
            nats += model(x, y)[1].item() * y.numel()
    model.train()
    with rank_in_errors():
        corpus.check_unchanged()
    n_tokens = len(index) * s.seq
    return sum_over_ranks([nats])[0] / n_tokens, n_tokens


def make_optimizer(model, lr, device, betas=BETAS, decay=WEIGHT_DECAY):
    """AdamW, decay on tensors of rank >= 2 (QS section 7) except NO_DECAY. Also returns the names in both groups."""
    groups = {True: [], False: []}
    for name, p in model.named_parameters():
        groups[p.dim() >= 2 and name.rsplit(".", 1)[-1] not in model.NO_DECAY].append((name, p))
    optimizer = torch.optim.AdamW(
        [{"params": [p for _, p in groups[decays]], "weight_decay": decay * decays} for decays in (True, False)],
        lr=lr, betas=betas, fused=device.type != "mps",
    )  # fmt: skip
    names = {k: sorted({re.sub(r"layers\.\d+\.", "layers.*.", n) for n, _ in groups[k]}) for k in (True, False)}
    return optimizer, {"decay": names[True], "no_decay": names[False]}


def new_model(s, vocab_size):
    """(model, origin) with random weights, or those that --init_from names; origin: what the log says of these, or None.

    Raises InputError for weights that do not fit."""
    model_class, config = sample.parse_spec(s.model, s.size, vocab_size)
    model = model_class(config)
    if not s.init_from:
        return model, None
    source = sample.read_checkpoint(s.init_from)
    try:
        model.load_state_dict(source["model"])
    except RuntimeError as e:
        saved = source["meta"]["settings"]
        differs = [f"its {key} is {saved[key]}, not {getattr(s, key)}" for key in ("model", "size", "tokens")
                   if saved[key] != getattr(s, key)]  # fmt: skip
        raise InputError(f"the weights of {s.init_from} do not fit: {'; '.join(differs) or one_line(e)}") from None
    return model, {"path": s.init_from, "step": source["step"], "sha256": data.hash_file(Path(s.init_from)),
                   "model": source["meta"]["spec"], "data": source["meta"]["data"]["name"]}  # fmt: skip


def try_step(s, corpus, device):
    """A step of 1 x 8 tokens with at most 4 layers, before a folder is made. Raises InputError if it is refused."""
    with autocast(s, device):
        faults = sample.step_faults(*sample.parse_spec(s.model, s.size, corpus.vocab_size), device, s.checkpointing)
    if faults:
        raise InputError(f"{s.model} cannot be trained here: {'; '.join(faults)}")
    if s.compile:
        try:
            import torch._inductor.config as inductor

            with inductor.patch(force_disable_caches=True), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no cache: what it holds needs no compiler
                torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
        except Exception as e:  # the compilers raise many kinds
            raise InputError(f"cannot compile here ({one_line(e)}): install a compiler, or drop --compile") from None


class Diverged(InputError):
    """The loss or the gradient of a run is not finite."""


class Run:
    """A run of one model: what its steps change and its checkpoints hold. The caller holds the folder."""

    def __init__(self, s, corpus, device, folder, checkpoint):
        self.s, self.corpus, self.device, self.folder = s, corpus, device, folder
        self.end, self.per_epoch = s.stop_at or s.steps, data.epoch_steps(corpus, s.seq, s.batch)
        self.step, self.best, self.val_loss = 0, {"val_loss": math.inf, "step": 0}, math.nan
        self.last_step = None  # of last.pt; None: there is none, or it is damaged
        self.val_windows, self.window_s = data.num_windows(corpus.split("val"), s.seq), None  # seconds a window
        self.figure_s, self.figure_at = 1.0, time.monotonic()  # seconds to draw curve.png, and when it was
        torch.manual_seed(int(s.seeds))
        if checkpoint:
            self.model, origin = sample.build(checkpoint, device), checkpoint["meta"].get("origin")
        else:
            self.model, origin = new_model(s, corpus.vocab_size)
        self.model.to(device).checkpointing = s.checkpointing
        betas, decay = (PAM_BETAS, PAM_DECAY) if PROTOCOLS[s.size] is PAM_PROTOCOL else (BETAS, WEIGHT_DECAY)
        self.optimizer, decay_groups = make_optimizer(self.model, s.lr, device, betas, decay)
        if checkpoint:
            self.step, self.best, self.val_loss = checkpoint["step"], checkpoint["best"], checkpoint["best"]["val_loss"]
            self.last_step = self.step if Path(checkpoint["path"]).name == "last.pt" else None
            try:
                self.optimizer.load_state_dict(checkpoint["optimizer"])
            except (KeyError, TypeError, ValueError) as e:
                raise InputError(f"{checkpoint['path']}: its optimizer state does not fit ({e})") from None
            torch.set_rng_state(checkpoint["rng"]["cpu"])
        self.start = time.monotonic() - (checkpoint["meta"]["time_s"] if checkpoint else 0)
        self.meta = {
            "spec": s.model, "size": s.size, "config": dataclasses.asdict(self.model.config),
            "settings": dataclasses.asdict(s), "data": broadcast_from_rank0(corpus.summary), "origin": origin,
        }  # fmt: skip
        self.open_log(checkpoint, weight_decay=decay_groups, optimizer={"betas": betas, "decay": decay, "clip": CLIP})
        if s.compile:
            for layer in self.model.layers:
                layer.compile()
        self.network = DistributedDataParallel(self.model) if world > 1 else self.model

    def open_log(self, checkpoint, **optimizer):
        for path in [*self.folder.glob("*.pt.*.part"), *self.folder.glob("log.jsonl")] if rank == 0 else ():
            if path.suffix == ".part" or not path.stat().st_size:  # what a kill left half written, or empty
                path.unlink()
        self.log = report.Log(self.folder, self.start, keep=checkpoint and checkpoint["step"], active=rank == 0)
        ran = report.provenance(self.device, world)
        if self.log.path.exists() and checkpoint:
            self.write("resume", **ran)
        else:
            what = {key: self.meta[key] for key in ("settings", "config", "data", "origin") if self.meta[key]}
            self.log.write("header", 0, 0, **what, params=self.model.num_params(),
                           flops_per_token=self.model.flops_per_token(self.s.seq), **optimizer, **ran)  # fmt: skip

    def write(self, event, **values):
        self.log.write(event, self.step, self.step * self.s.batch * self.s.seq, **values)

    def announce(self):
        """What is trained, and the disk that it takes."""
        s, params = self.s, self.model.num_params()["total"]
        if s.schedule == "cosine" and s.warmup >= s.steps:
            print_rank0(f"note: the warmup of {s.warmup:g} steps does not end within {s.steps} steps")
        origin = self.meta["origin"]
        begun = f"; begun from {origin['path']}, step {origin['step']}" if origin else ""
        disk = params * (3 * 12 + 4)  # last.pt, prev.pt and the one being written; best.pt has no optimizer state
        print_rank0(f"{self.folder}: {params:,} parameters on {self.device}, {self.corpus.name} "
                    f"{len(self.corpus.tokens):,} tokens, {s.steps} steps of {s.batch * s.seq:,} tokens; checkpoints "
                    f"take up to {disk / 1e6:,.0f} MB{begun}")  # fmt: skip

    def save(self, name, optimizer=None, keep=None):
        if rank == 0:
            self.log.sync()  # or after a power cut the log could end before its checkpoint
            now = self.meta | {"time_s": time.monotonic() - self.start}
            sample.save_checkpoint(self.folder / name, now, self.model, optimizer, self.step, self.best, keep)

    def save_last(self):
        # A last.pt that could not be read does not take the place of the prev.pt that could.
        self.save("last.pt", self.optimizer, keep=None if self.last_step is None else self.folder / "prev.pt")
        self.last_step = self.step

    def last_good(self, last_is_bad):
        path = self.folder / ("prev.pt" if last_is_bad else "last.pt")
        return f"the last good checkpoint is {path}" if path.exists() else "no good checkpoint was saved yet"

    def is_due(self, every, step=None):
        """What happens every so many steps, and at the end of the schedule."""
        return (self.step if step is None else step) % every == 0 or self.step == self.s.steps

    def validate(self):
        """On the fixed windows. Keeps the best checkpoint, and draws the curve where that takes little of the time."""
        s, begin = self.s, time.monotonic()
        loss, n_tokens = evaluate(self.model, self.corpus, "val", s, self.device, s.eval_seqs)
        self.val_loss, self.window_s = loss, (time.monotonic() - begin) * s.seq / n_tokens
        epoch = {"epoch": self.step / self.per_epoch} if s.epochs else {}
        self.write("val", val_loss=loss, split="val", n_tokens=n_tokens, **epoch)
        if loss < self.best["val_loss"]:
            self.best = {"val_loss": loss, "step": self.step}
            self.save("best.pt")
        if time.monotonic() - self.figure_at > FIGURE_SHARE * self.figure_s:
            self.draw()

    def draw(self):
        """curve.png."""
        begin, self.figure_s = time.monotonic(), math.inf  # after a fault: at the end alone
        if rank == 0:
            with extra("curve.png"):
                report.plot_curves(*report.group_runs([report.read_log(self.folder)])[0], self.folder / "curve.png")
                self.figure_at = time.monotonic()
                self.figure_s = self.figure_at - begin

    def update(self):
        """One step of the optimizer. Returns numbers for the log, the gradient norm of each layer, and whether to stop."""
        s, model, local = self.s, self.model, self.s.batch // world
        lr, windows = learning_rate(self.step, s), data.num_windows(self.corpus.split("train"), s.seq)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        order = data.train_index(windows, int(s.seeds), self.step, s.batch)
        index = order[rank * local : (rank + 1) * local]
        nats = 0.0
        for i in range(0, local, s.micro):
            x, y = read_windows(self.corpus, "train", s, index[i : i + s.micro], self.device)
            with self.network.no_sync() if world > 1 and i + s.micro < local else contextlib.nullcontext():
                with autocast(s, self.device):
                    loss = self.network(x, y)[1]
                (loss * (len(x) / local)).backward()  # the mean over the whole step, whatever the micro-batches
            nats += loss.detach() * (len(x) / local)
        with rank_in_errors():
            self.corpus.check_unchanged()
        layers = [get_total_norm([p.grad for p in layer.parameters()]) for layer in model.layers]
        rest = get_total_norm([p.grad for n, p in model.named_parameters() if not n.startswith("layers.")])
        grad_norm = torch.stack([*layers, rest]).norm()
        loss, stop = sum_over_ranks([float(nats) / world, len(stop_signals)])
        self.step += 1
        self.check_finite(loss, grad_norm.item(), layers)
        clip_grads_with_norm_(model.parameters(), CLIP, grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss, "lr": lr, "grad_norm": grad_norm.item()}, layers, stop

    def check_finite(self, loss, grad_norm, layers):
        """Stops a run whose loss or gradient is not finite, naming the step, the place and the last good checkpoint."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        bad = [i for i, norm in enumerate(layers) if not norm.isfinite()]
        # The backward runs from the last layer to the first: the last one that is not finite is where it began.
        place = "the loss itself" if not math.isfinite(loss) else f"layer {bad[-1]}" if bad else "the embedding or the head"
        # A loss that is not finite condemns the weights it was computed from; None: there is no sound last.pt.
        condemned = (None,) if math.isfinite(loss) else (None, self.step - 1)
        raise Diverged(f"step {self.step}: loss {loss}, gradient norm {grad_norm}, first not finite in {place}; "
                       f"{self.last_good(last_is_bad=self.last_step in condemned)}")  # fmt: skip

    def finish(self):
        """The loss over the whole validation split, and the extras: a sample and a figure."""
        s, step = self.s, self.step
        if self.val_windows > s.eval_seqs:
            takes = f"; about {self.val_windows * self.window_s:.0f} s" if self.window_s else ""
            print_rank0(f"now the whole validation split, {self.val_windows:,} windows instead of {s.eval_seqs:,}: the loss "
                        f"may jump{takes}")  # fmt: skip
        loss, n_tokens = evaluate(self.model, self.corpus, "val", s, self.device)
        if not math.isfinite(loss):
            good = self.last_good(last_is_bad=True)
            raise Diverged(f"the loss after step {step} is {loss}: the last update diverged, lower --lr; {good}")
        print_rank0(f"validation {loss / math.log(2):.3f} {report.unit(s.tokens)} ({loss:.4f} nats) over the whole split "
                    f"after {step} steps, {self.folder}")  # fmt: skip
        memory = {"peak_memory": torch.cuda.max_memory_allocated()} if self.device.type == "cuda" else {}
        self.write("final", val_loss=loss, split="val", n_tokens=n_tokens, best=self.best, **memory)
        self.draw()
        if rank == 0:
            text = ""
            with extra("sample"):
                with autocast(s, self.device):
                    text = sample.text(self.model, 400, 0.8, 50, 1.0, 1.0)
                (self.folder / "sample.txt").write_text(text, encoding="utf-8")
            self.write("sample", text=text)  # the last event of a run that is complete
            more = f"python sample.py {quote(self.folder)}{sample.model_flag(s.model)}"
            print_rank0(f"--- a sample, temperature 0.8 (more: {more})\n{text.strip()}\n---")
        if s.epochs:
            with extra("table"):
                print_rank0(report.epochs_table([report.read_log(self.folder)]))


class Progress:
    """What rank 0 tells who waits: a bar on a terminal, else a line at each validation."""

    def __init__(self, run):
        self.run, self.tokens, self.peak = run, run.s.batch * run.s.seq, None
        self.begin, self.seconds = run.step, deque(maxlen=max(10, run.s.log_every))  # of the last steps but the first
        if run.device.type == "cuda":
            self.peak = PEAK_FLOPS.get(torch.cuda.get_device_name(run.device)) if run.s.dtype == "bfloat16" else None
            torch.cuda.reset_peak_memory_stats(run.device)
        style = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        self.bar = data.progress(total=run.end, initial=run.step, unit_scale=False, leave=True, disable=bool(rank) or None,
                                 dynamic_ncols=True, bar_format=style)  # fmt: skip

    def count(self, seconds):
        """After each step, with what it took."""
        if self.run.step == self.begin + 2:
            self.seconds.clear()  # the first compiles, and fills caches
        self.seconds.append(seconds)
        if self.run.step == self.begin + 3:
            print_rank0(f"about {self.left()} to go, {fmean(self.seconds):.2g} s a step")

    def speed(self):
        tok_s = self.tokens / fmean(self.seconds)
        mfu = {"mfu": tok_s * self.run.model.flops_per_token(self.run.s.seq) / (self.peak * world)} if self.peak else {}
        return {"tok_s": round(tok_s, 1)} | mfu

    def left(self):
        """The time to the end: steps, validations, and the last one on the whole split."""
        s, steps, step_s = self.run.s, self.run.end - self.run.step, fmean(self.seconds)
        windows = steps // s.eval_every * min(s.eval_seqs, self.run.val_windows) + self.run.val_windows
        window_s = self.run.window_s or step_s / (3 * s.batch)  # 3: there is no backward
        return timedelta(seconds=round(steps * step_s + windows * window_s))

    def show(self, loss, evaluated):
        run, speed = self.run, self.speed()
        shown = f"train {loss / math.log(2):.3f} val {run.val_loss / math.log(2):.3f} {report.unit(run.s.tokens)}"
        shown += f" {speed['tok_s']:,.0f} tok/s" + (f" MFU {speed['mfu']:.1%}" if "mfu" in speed else "")
        shown += f"  ETA {self.left()}"
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update()
        if evaluated and self.bar.disable:
            print_rank0(f"step {run.step}/{run.end}  {shown}")


def train(s, corpus, device, folder, again, checkpoint=None):
    """One run. again: the command that goes on with it, if not --resume.

    Raises SystemExit with 128 + signal if one asked any rank to end."""
    for signum in (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")):  # Windows has no SIGHUP
        if signum and signal.getsignal(signum) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(signum, on_signal)
    run = Run(s, corpus, device, folder, checkpoint)
    run.announce()
    if not math.isfinite(run.best["val_loss"]):  # a new run
        run.validate()
        run.save_last()  # from here on the run can be resumed
    progress, stop = Progress(run), False
    while run.step < run.end and not stop:
        begin = time.perf_counter()
        numbers, layers, stop = run.update()
        progress.count(time.perf_counter() - begin)
        if s.sample_every and run.step % s.sample_every == 0 and rank == 0:  # PAM section II
            with extra("generated text"):
                run.write("generated", text=sample.text(run.model, s.seq, 1.0, 50, 0.9, 1.2))
        if run.is_due(s.log_every) or run.step == 1:
            run.write("train", **numbers, **progress.speed())
        evaluates = run.is_due(s.eval_every, run.step % run.per_epoch if s.epochs else run.step)
        if evaluates:
            run.write("grad", layers=[norm.item() for norm in layers])
            run.validate()
        progress.show(numbers["loss"], evaluates)
        if run.is_due(s.ckpt_every) or run.step == run.end or stop:
            run.save_last()
    progress.bar.close()
    if run.step < run.end:
        alone = f"python train.py --resume {quote(folder)}{sample.model_flag(s.model)}"
        print_rank0(f"stopped after step {run.step}; go on with: {again or alone}")
    else:
        run.finish()
    if sum_over_ranks([len(stop_signals)])[0]:
        raise SystemExit(128 + max(stop_signals, default=signal.SIGTERM))


def evaluate_checkpoint(s, corpus, device, checkpoint):
    """Prints the loss of a checkpoint over a whole split, and logs it beside the checkpoint as an "eval" event."""
    path, step, log = Path(checkpoint["path"]), checkpoint["step"], None
    with contextlib.ExitStack() as stack:
        if rank == 0:
            with extra("log of this result"):  # said before an evaluation that may take hours
                open(path.with_name("log.jsonl"), "rb+").close()
                stack.enter_context(data.hold(path.parent))
                report.read_log(path.parent)  # nothing is added to what is no log of ours
                log = report.Log(path.parent, time.monotonic() - checkpoint["meta"]["time_s"])
        loss, n_tokens = evaluate(sample.build(checkpoint, device), corpus, s.split, s, device)
        print_rank0(f"{path}, step {step}: {s.split} loss {loss:.4f} nats, {loss / math.log(2):.4f} {report.unit(s.tokens)} "
                    f"over {n_tokens:,} tokens of {corpus.name}")  # fmt: skip
        if log:
            log.write("eval", step, step * s.batch * s.seq, val_loss=loss, split=s.split, n_tokens=n_tokens,
                      checkpoint=path.name, data=corpus.summary(), **report.provenance(device, world))  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# From the command line to runs in their folders


def check_out(given, several):
    """Raises InputError unless the folder of a new run, or of a sweep's runs, can be made and written."""
    out = given.get("out", "runs")
    base = Path(out)
    if "out" in given and "resume" not in given and base.exists() and (not several or holds_run(base)):
        how = "a stopped run goes on with --resume alone" if holds_run(base) else f"--out {out} --resume {out} begins there"
        raise InputError(f"--out {out} exists: name another folder ({how})")
    above = next(p for p in (base, *base.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"cannot make the run folder {out}: {above} is no folder that can be written")


def holds_run(folder):
    """Whether a folder holds a checkpoint. Raises InputError for a log without one, unless a start of ours left it that
    ended before the first step: it is a result, or another program's."""
    log, header = folder / "log.jsonl", b'{"event": "header"'
    if any((folder / name).exists() for name in ("last.pt", "prev.pt")):
        return True
    content = log.read_bytes() if log.exists() else b""
    if not header.startswith(content[: len(header)]) or re.search(rb'"train".*}\n', content):
        raise InputError(f"{folder} holds the log of a run, but no checkpoint: name another folder")
    return False


def begin_folder(folder, explicit, stack):
    """Makes the folder of a new run, and holds it. A default name that exists gets -2, -3, ... Returns its path."""
    for n in itertools.count(1):
        unique = folder if n == 1 else folder.with_name(f"{folder.name}-{n}")
        with data.explain(f"make the run folder {unique}"), contextlib.suppress(FileExistsError):
            unique.mkdir(parents=True, exist_ok=explicit)
            break
    stack.enter_context(data.hold(unique))
    if holds_run(unique):
        raise InputError(f"{unique} was begun by another process meanwhile: start this one again")
    (unique / "log.jsonl").unlink(missing_ok=True)  # of a start that a kill ended before its first checkpoint
    return unique


def load_data(s, checkpoint=None):
    """Rank 0 prepares a corpus, and what turns its tokens into text; the others then find it.

    Raises InputError if it is not the data of the checkpoint's run."""
    how = {"tokens": s.tokens, "column": s.column}
    broadcast_from_rank0(lambda: data.codec(data.load(s.data, s.seq, **how).vocab_size) and None)
    with rank_in_errors():
        corpus = data.load(s.data, s.seq, **how)
        if world > 1 and corpus.sha256 != broadcast_from_rank0(lambda: corpus.sha256):
            raise InputError(f"{corpus.path} is another text here than on rank 0")
    if checkpoint:
        now, was = broadcast_from_rank0(corpus.summary), checkpoint["meta"]["data"]
        if (now["size"], now["sha256"]) != (was["size"], was["sha256"]):
            this, had = (f"{d['size']:,} bytes, SHA-256 {d['sha256'][:12]}" for d in (now, was))
            raise InputError(f"{corpus.path} ({this}) is not the data of this run ({had}): take out what came to it since")
    return corpus


def find_run(flags, stack):
    """(settings, checkpoint) of what --resume names, the same on every rank, its folder held by this process.

    Returns (None, None) if --out says that it may be begun, and it is not. Raises InputError for a flag that would change
    the run's course."""
    path, evaluates, checkpoint = Path(flags["resume"]), bool(flags.get("eval_only")), None
    begins = flags.get("out") == flags["resume"] and not evaluates  # a command that begins a run or goes on with it

    def find():
        nonlocal checkpoint
        folder = path.parent if path.is_file() else path
        if not evaluates and [*folder.glob("log.jsonl"), *folder.glob("*.pt")]:
            stack.enter_context(data.hold(folder))
        if not begins or holds_run(path):
            checkpoint = sample.read_checkpoint(path, ("best.pt",) * evaluates + ("last.pt", "prev.pt"))
            return checkpoint["path"]

    file = broadcast_from_rank0(find)
    if not file:
        return None, None
    with rank_in_errors():
        checkpoint = checkpoint or sample.read_checkpoint(file)
    saved = checkpoint["meta"]["settings"]
    if flags.get("model") in sample.IMPORTED and not begins:  # which names the class, and not its settings
        flags = {k: v for k, v in flags.items() if k != "model" or v != sample.split_spec(saved["model"])[0]}
    may_change = MAY_CHANGE | ({"out"} if begins else {"column"} if evaluates else set())
    for key, value in flags.items():
        if key not in may_change and value != saved.get(key):
            was = f"{value} differs from this run's {saved.get(key)}"
            raise InputError(f"--{key} {was} ({path}): drop it, or start a new run")
    try:
        return check(Settings(**saved | {"stop_at": None} | flags)), checkpoint
    except TypeError as e:
        raise InputError(f"{file} was written by another version of train.py ({e})") from None


def go_on(flags, device, again=None):
    """Goes on with what --resume names, or evaluates it. Returns whether it did: False if it is still to be begun.

    again: the command that goes on with the sweep that the run is part of."""
    with contextlib.ExitStack() as stack:
        s, checkpoint = find_run(flags, stack)
        if not checkpoint:
            return False
        if s.eval_only:  # on the data of the run, or on any that is named
            evaluate_checkpoint(s, load_data(s, None if "data" in flags else checkpoint), device, checkpoint)
            return True
        corpus, folder = load_data(s, checkpoint), Path(checkpoint["path"]).parent
        if not checkpoint["optimizer"]:
            raise InputError(f"{checkpoint['path']} holds no optimizer state; resume from last.pt")
        step, end = checkpoint["step"], s.stop_at or s.steps
        log = folder / "log.jsonl"
        try:
            events = report.read_log(folder) if log.exists() and log.stat().st_size else []
        except InputError as e:
            raise InputError(f"{e}; move {log} away, and the run goes on without what it logged") from None
        if step > end or (step == end and step in [e["step"] for e in events if e["event"] == "sample"]):
            advice = "the run is complete" if end == s.steps else "give a later --stop_at, or none"
            message = f"{checkpoint['path']} is at step {step} of {end} already: {advice}"
            if step > end or flags.get("out") != flags["resume"]:
                raise InputError(message)
            print_rank0(message)  # to a command that is started until it succeeds
            return True
        try_step(s, corpus, device)
        train(s, corpus, device, folder, again, checkpoint)
    return True


def prepare(runs, device):
    """The corpus of all runs, once each of them could be trained on it; epochs become steps."""
    corpus = [load_data(s) for s in runs][0]  # one text, that each --seq must fit
    for s in runs:
        if s.epochs and not (s.steps and s.eval_every):
            per_epoch = data.epoch_steps(corpus, s.seq, s.batch)
            s.steps, s.eval_every = s.steps or s.epochs * per_epoch, s.eval_every or -(-per_epoch // 4)
            check(s)
        try_step(s, corpus, device)
        if s.init_from:
            with rank_in_errors():
                new_model(s, corpus.vocab_size)
    broadcast_from_rank0(corpus.summary)  # its hash, before there is a folder
    return corpus


def run(given, device):
    """Goes on with a run, or begins one for each combination of the lists."""
    with rank_in_errors():
        if given != broadcast_from_rank0(lambda: given):
            raise InputError("the flags are others here than on rank 0")
    if "init_from" in given:
        with rank_in_errors():
            origin = sample.read_checkpoint(given["init_from"])
        saved = origin["meta"]["settings"]
        given = {"model": [saved["model"]], "size": [saved["size"]], "tokens": saved["tokens"]} | given
        given["init_from"] = os.path.abspath(origin["path"])
    cells = [*combinations(given)]
    named, several, base = "out" in given, len(cells) > 1, Path(given.get("out", "runs"))
    if "resume" in given:
        if several:
            raise InputError("--resume goes on with one run, not with a list of them")
        if go_on(cells[0][0], device):
            return
    # All runs are checked before the first: a fault in the last of a sweep would come hours later.
    runs = [resolve(flags, flags.get("model", Settings.model), flags.get("size"), flags.get("seeds", Settings.seeds), device)
            for flags, _ in cells]  # fmt: skip
    if given.get("params"):
        print_rank0("\n".join(sample.params_table(s.model, s.size, s.seq) for s in runs))
        return
    broadcast_from_rank0(lambda: check_out(given, several))
    corpus = prepare(runs, device)
    folders = [base / report.run_name(s.model, corpus.name, s.size, *varied, f"s{s.seeds}")
               for s, (_, varied) in zip(runs, cells)]  # fmt: skip
    again = f"the same command and --out {quote(base)}"
    if named or not several or not broadcast_from_rank0(lambda: not any(f.exists() for f in folders)):
        again = "the same command" if named and several else None  # None: that of the run alone
    jobs = []  # of a sweep that may have begun: flags that begin each of its runs, or go on with it
    for s, folder in zip(runs, folders) if named and several else ():
        by_epochs = {"steps", "eval_every"} if s.epochs else set()  # they follow from the text, which is compared
        course = {k: v for k, v in dataclasses.asdict(s).items() if k in given or k not in MAY_CHANGE | by_epochs}
        jobs.append(course | {"out": str(folder), "resume": str(folder)})
        with contextlib.ExitStack() as stack:
            find_run(jobs[-1], stack)
    if named and not several:
        folders = [base]
    diverged = {}  # the others of a sweep are run all the same
    for i, s in enumerate(runs):
        try:
            if jobs and go_on(jobs[i], device, again):
                continue
            broadcast_from_rank0(corpus.check_unchanged)
            with contextlib.ExitStack() as stack:
                folders[i] = broadcast_from_rank0(partial(begin_folder, folders[i], named, stack))
                train(s, corpus, device, folders[i], again)
        except Diverged as e:
            diverged[folders[i]] = f"{folders[i]}: {e}" if several else str(e)
    ends = {}  # runs that end at another --min_lr have tables of their own
    for folder, (flags, _) in zip(folders, cells):
        ends.setdefault(flags.get("min_lr"), []).extend([folder] * (folder not in diverged))
    for finished in filter(None, ends.values()) if several and rank == 0 else ():
        with extra("table"):
            print_rank0(report.training_report([report.read_log(folder) for folder in finished])[0])
    if diverged:
        raise Diverged("; ".join(diverged.values()))


def main():
    if any(argument.partition("=")[0] == "--task" for argument in sys.argv[1:]):
        return tasks.main()  # with flags of its own
    given = parse_flags()
    if ranks_error:
        raise InputError(ranks_error)
    if (given.get("eval_only") or "split" in given) and not ("resume" in given and given.get("eval_only")):
        raise InputError("--eval_only (and --split) judge a checkpoint: name it with --resume RUN --eval_only")
    if "init_from" in given and given.get("resume", given.get("out")) != given.get("out"):
        raise InputError("--init_from begins a new run, --resume goes on with one: give one of them")
    device = sample.pick_device(given.get("device", "auto"))
    if world > 1:
        # torchrun's own store keeps the addresses of ranks that died, and a restart may wait for them.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
            raise InputError("--max-restarts needs --rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
        with rank_in_errors():
            device = sample.pick_device(f"cuda:{local_rank}" if device.type == "cuda" else "cpu")
            waiting = threading.Timer(10, data.note, [f"rank {rank} waits until all {world} have started"])
            waiting.start()
            try:  # the timeout is that of a download
                dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=1))
            except (RuntimeError, ValueError) as e:
                raise InputError(f"the ranks cannot be connected ({one_line(e)})") from None
            finally:
                waiting.cancel()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        run(given, device)
    except (MemoryError, RuntimeError) as e:
        with rank_in_errors():
            if isinstance(e, MemoryError) or re.search("out of memory|allocate", str(e)):
                raise InputError("out of memory: set --checkpointing, lower --micro (same result) or --seq") from None
        if world > 1 and (isinstance(e, dist.DistError) or re.search("gloo|NCCL", str(e))):
            raise InputError(f"another rank ended, it or torchrun says why; here it was: {one_line(e)}") from None
        raise
    if world > 1:  # not after a fault: it could wait for a rank that will not come
        dist.destroy_process_group()


if __name__ == "__main__":
    command_line(main, silent=rank > 0)
