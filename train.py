"""Trains any model of this repository on bytes or tokens, and compares the steps that models need.

    python train.py                                            tiny H-Mamba on the text that ships with Python
    python train.py --model hmamba,mamba --seeds 1,2,3         a sweep: the same data order, ratios at the end
    python train.py --model mygru.py:MyGRU:D=64                a class of your own file: PAPERS.md, "A new model"
    python train.py --lr 1e-3,2e-3,4e-3 --out SWEEP            three peak rates; the same command goes on with a sweep
    torchrun --nproc_per_node 4 train.py --data FILE --size 253m       the paper's size and protocol on four GPUs
    python train.py --resume runs/hmamba-stdlib-tiny-s1        goes on where a stopped run left off
    python train.py --out RUN                                  begins RUN, or goes on with it: for jobs that restart
    python train.py --init_from RUN --data FOLDER              fine-tuning: a new run from the weights of another
    python train.py --resume RUN --eval_only --split test      loss of its best checkpoint; with --data, on other data
    python train.py --task mod3                                state tracking: hands over to tasks.py and its flags

Paper: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691), section 7
and table 4. Losses are in nats per token; divided by ln 2 they are bpc, bits per character, if the tokens are bytes.
"""

import argparse
import contextlib
import itertools
import math
import os
import re
import shlex
import signal
import sys
import time
import warnings
from collections import deque
from dataclasses import asdict, dataclass, field, fields
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
# warmup: steps, or below 1 a share of all steps; min_lr: where the cosine ends. 253m: QS table 4, D (20 x 256 windows).
PROTOCOLS = {
    "tiny": dict(steps=240, batch=16, micro=16, seq=256, lr=2e-3, min_lr="lr/10", warmup=0.75, schedule="cosine",
                 dtype="float32", checkpointing=False, eval_every=20, eval_seqs=128, ckpt_every=60),
    "small": dict(steps=1000, batch=64, micro=16, seq=512, lr=1e-3, min_lr="lr/10", warmup=0.75, schedule="cosine",
                  dtype="bfloat16", checkpointing=False, eval_every=20, eval_seqs=512, ckpt_every=100),
    "253m": dict(steps=1000, batch=1024, micro=32, seq=1024, lr=6e-4, min_lr="lr/10", warmup=750, schedule="cosine",
                 dtype="bfloat16", checkpointing=True, eval_every=20, eval_seqs=5120, ckpt_every=20),
}  # fmt: skip
# PAM table 2: epochs in place of steps. The paper leaves open when to evaluate (here four times an epoch, last at its
# end), where the cosine ends (0), and the betas (AdamW's defaults).
PAM_PROTOCOL = dict(
    epochs=10, batch=8, micro=8, seq=512, lr=3e-5, min_lr=0.0, warmup=500, schedule="cosine", dtype="float32",
    checkpointing=False, eval_seqs=512, ckpt_every=1000, sample_every=5000)  # fmt: skip
PROTOCOLS |= dict.fromkeys(sample.PAM_SIZES, PAM_PROTOCOL)
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0  # QS section 7, table 4
PAM_BETAS, PAM_DECAY = (0.9, 0.999), 0.01
PAPER_STEPS = {"enwik8": 1500, "owt": 1000, "fineweb": 1000}  # QS section 7, budget at 253m
PEAK_FLOPS = {  # dense bf16, by the device's full name; for others there is no MFU
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989e12,
    "NVIDIA GeForce RTX 4090": 165e12, "NVIDIA GeForce RTX 3090": 71e12,
}  # fmt: skip
FIGURE_EVERY = 60  # seconds from one curve.png to the next
# Flags that take a list: a run for each combination; the last varies fastest.
LISTS = ("size", "steps", "epochs", "batch", "seq", "lr", "min_lr", "warmup", "seeds", "model")
# What a resumed run may set anew: the rest would change its course.
MAY_CHANGE = {"resume", "out", "data", "column", "stop_at", "micro", "device", "compile", "checkpointing", "log_every",
              "ckpt_every", "sample_every", "eval_only", "split"}  # fmt: skip


def flag(default, text, **how):
    return field(default=default, metadata={"help": text} | how)


@dataclass
class Settings:
    """Every flag. None: taken from PROTOCOLS for the size, or as its help says."""

    model: str = flag("hmamba", "model spec NAME[:key=value...] or FILE.py:CLASS[:key=value...]")
    data: str = flag("stdlib", "stdlib, enwik8, owt, fineweb, wikitext103 (see python data.py), a file or a folder")
    tokens: str = flag(None, "bytes, or GPT-2's BPE (default: bytes; gpt2: wikitext103, .tokens files)", choices=TOKENS)
    column: str = flag(None, "holds the text of parquet and JSON lines files (default: text); '': the bytes")
    size: str = flag(None, "tiny, small, 253m, 5m ... 100m (default: tiny; QS data on CUDA: 253m)")
    seeds: str = flag("1", "seed of initialisation and data order")
    steps: int = flag(None, "optimizer steps of the schedule (of enwik8 at 253m: 1500)")
    epochs: int = flag(None, "passes over the training data, if --steps is not given")
    stop_at: int = flag(None, "stop after this step, the schedule unchanged; --resume goes on")
    batch: int = flag(None, "sequences a step, over all devices")
    micro: int = flag(None, "sequences that a device takes at once; changes memory, speed and rounding")
    seq: int = flag(None, "tokens a sequence")
    lr: float = flag(None, "peak learning rate")
    min_lr: float = flag(None, "learning rate at the end of the cosine")
    warmup: float = flag(None, "steps of linear warmup; below 1: share of the steps")
    schedule: str = flag(None, "cosine, or constant: --lr throughout, no warmup", choices=("cosine", "constant"))
    dtype: str = flag(None, "float32, or bfloat16: autocast, parameters stay float32", choices=("float32", "bfloat16"))
    checkpointing: bool = flag(None, "recompute each layer in the backward: less memory")
    compile: bool = flag(None, "torch.compile each layer")
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    eval_every: int = flag(None, "steps between validations, from an epoch's start; per-layer gradient norms too")
    eval_seqs: int = flag(None, "fixed windows of a validation during training; the last takes the whole split")
    log_every: int = flag(10, "steps between log lines of the training loss")
    ckpt_every: int = flag(None, "steps between checkpoints")
    sample_every: int = flag(None, "steps between generated texts in the log (default: none; 5m to 100m: 5000)")
    out: str = flag(None, "folder of a run, or of a sweep: begins it, or goes on with it (default: a new one in runs/)")
    resume: str = flag(None, "go on with the run of this folder or checkpoint")
    init_from: str = flag(None, "begin with the weights of this run folder or checkpoint; its model, size and tokens "
                                "unless others are given")  # fmt: skip
    eval_only: bool = flag(False, "only evaluate the checkpoint named by --resume, on the whole --split")
    split: str = flag("val", "split for --eval_only", choices=("train", "val", "test"))
    params: bool = flag(False, "only print the parameters by component")


def parse_flags():
    """{name: value} of the flags that were given; for those in LISTS a list of values."""
    sizes = {size: PROTOCOLS[size] for size in ("tiny", "small", "253m")} | {"5m to 100m": PAM_PROTOCOL}
    rows = {"": sizes} | {key: [p.get(key, "-") for p in sizes.values()] for key in PROTOCOLS["tiny"] | PAM_PROTOCOL}
    table = "\n".join(f"  {key:14}" + "".join(f"{value!s:>12}" for value in row) for key, row in rows.items())
    lists = "X,...: a value, or a list of values with commas between them; then there is a run for each combination."
    epilog = f"{lists}\n\ndefaults by size:\n{table}"
    parser = Parser(description=__doc__, epilog=epilog, argument_default=argparse.SUPPRESS)
    for f in fields(Settings):
        how, default = dict(f.metadata), "by size" if f.name in rows and f.default is None else f.default
        how["help"] += f" (default: {default})" if default and "(default" not in how["help"] else ""
        if f.type is bool:
            how["action"] = argparse.BooleanOptionalAction if f.default is None else "store_true"
        elif f.name in LISTS:
            how |= {"type": list_of(f.type), "metavar": f"{f.name.upper()},..."}
        else:
            how["type"] = f.type
        parser.add_argument(f"--{f.name}", **how)
    given = vars(parser.parse_args())
    if "model" in given:
        given["model"] = sample.import_models(",".join(given["model"])).split(",")
    for key in given.keys() & {"data", "out", "resume", "init_from"}:
        if not given[key] or str(Path(given[key])).startswith("-"):  # a command to go on would take it for a flag
            raise InputError(f"--{key} {given[key]!r} is no name: it is empty, or begins with -")
        given[key] = os.path.expanduser(given[key])
    if "out" in given and Path(given["out"]).absolute() == Path(given.get("resume", "\0")).absolute():
        goes_on = "eval_only" in given or holds_run(Path(given["out"]))
        del given["out" if goes_on else "resume"]  # --out alone begins a run
    if ("eval_only" in given or "split" in given) and not {"eval_only", "resume"} <= given.keys():
        raise InputError("--eval_only (and --split) judge a checkpoint: name it with --resume RUN --eval_only")
    return given


def list_of(kind):
    def read(text):
        return list(dict.fromkeys(kind(part.strip()) for part in text.split(",")))  # each once

    read.__name__ = kind.__name__  # for argparse's message
    return read


def resolve(flags, device):
    """Settings of one run: what was given, then the protocol of its size. Raises InputError for impossible values."""
    s = Settings(**flags)
    if not s.size:
        s.size = "253m" if s.data in PAPER_STEPS and device.type == "cuda" else "tiny"
        if s.data in PAPER_STEPS and s.size == "tiny":
            print_rank0("no CUDA device: --size tiny instead of 253m")
    sample.parse_spec(s.model, s.size, 256)
    s.tokens = s.tokens or ("gpt2" if s.data == "wikitext103" or s.data.endswith(".tokens") else "bytes")
    protocol = dict(PROTOCOLS.get(s.size, PROTOCOLS["tiny"]))  # for sizes that a class of a file adds
    if s.size == "253m":
        protocol["steps"] = PAPER_STEPS.get(s.data, protocol["steps"])
    if s.epochs and not s.steps:
        protocol |= {"steps": None, "eval_every": None}
    for key, value in protocol.items():
        if getattr(s, key) is None:
            setattr(s, key, value)
    if s.min_lr == "lr/10":
        s.min_lr = float(f"{s.lr / 10:.12g}")  # 6e-4 / 10 is 5.9999999999999995e-05
    if s.data not in data.NAMED and Path(s.data).exists():
        s.data = str(Path(s.data).absolute())  # so that --resume finds it from anywhere
    check(s)
    return s


def check(s):
    """Raises InputError for settings of a run that are impossible."""
    for f in fields(s):
        value = getattr(s, f.name)
        if f.type is int and value is not None and not 1 <= value <= 10**9:
            raise InputError(f"--{f.name} {value} must be at least 1, at most 10^9")
    if not re.fullmatch("0|[1-9][0-9]{0,9}", s.seeds) or int(s.seeds) >= 2**32:  # 01 would be another name for 1
        raise InputError(f"--seeds {s.seeds!r} must be whole numbers from 0 to 2^32 - 1")
    if not (0 < s.lr < math.inf and 0 <= s.min_lr <= s.lr and 0 <= s.warmup < math.inf):
        raise InputError(f"impossible schedule: --lr {s.lr} --min_lr {s.min_lr} --warmup {s.warmup}")
    if s.stop_at and s.steps and s.stop_at > s.steps:
        raise InputError(f"--stop_at {s.stop_at} lies beyond --steps {s.steps}")
    if s.batch % world:
        raise InputError(f"--batch {s.batch} must be a multiple of the {world} devices")


def learning_rate(step, s):
    """Of the step with this index, from 0: linear warmup, then a cosine from lr to min_lr."""
    if s.schedule == "constant":
        return s.lr
    warmup = s.warmup if s.warmup >= 1 else s.warmup * s.steps
    if step < warmup:
        return s.lr * min(1, (step + 1) / warmup)
    done = (step - warmup) / max(1, s.steps - warmup)
    return s.min_lr + 0.5 * (s.lr - s.min_lr) * (1 + math.cos(math.pi * done))


# ----------------------------------------------------------------------------------------------------------------------
# Several devices, signals, output

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # what torchrun sets for each of its processes; no other ranks are known
launched = dist.is_torchelastic_launched() and all(os.environ.get(key, "").isdecimal() for key in RANKS)
rank, world, local_rank = (int(os.environ[key]) for key in RANKS) if launched else (0, 1, 0)
stop_signals = []  # these signals end the run after the present step


def print_rank0(text):
    if rank == 0:
        # No run ends at a reader that went away, a full disk, or (RuntimeError) a signal in the middle of a print.
        with contextlib.suppress(OSError, ValueError, RuntimeError), tqdm.external_write_mode(data.EXTRA):
            print(text, flush=True)


@contextlib.contextmanager
def signals_handled(handler, *names):
    """Inside, handler(signum, frame) has these signals, but for those that are ignored, as nohup leaves SIGHUP."""
    with contextlib.ExitStack() as before:
        for name in names:
            signum = getattr(signal, name, None)  # Windows has no SIGHUP
            if signum and signal.getsignal(signum) != signal.SIG_IGN:
                before.callback(signal.signal, signum, signal.signal(signum, handler))
        yield


def note_signal(signum, _):
    # A closed terminal may send SIGHUP twice, and torchrun hands on what its ranks got already.
    if stop_signals and world == 1 and signum in (signal.SIGINT, signal.SIGTERM):
        raise KeyboardInterrupt(signum)  # at once, without saving
    stop_signals.append(signum)
    print_rank0(f"{signal.Signals(signum).name}: stopping after this step")


def end_now(signum, _):
    raise KeyboardInterrupt(signum)  # as Ctrl-C does


@contextlib.contextmanager
def extra(what):
    """For what is no part of a result: if it fails, one line says so, and the run goes on."""
    try:
        yield
    except Exception as e:
        print_rank0(f"note: no {what} ({type(e).__name__}: {data.one_line(e)})")


def sum_over_ranks(value):
    """Sum over all ranks of a list of numbers."""
    if world == 1:
        return value
    x = torch.tensor(value, dtype=torch.float64, device="cpu" if dist.get_backend() == "gloo" else "cuda")
    dist.all_reduce(x)
    return x.tolist()


def broadcast_from_rank0(make):
    """make() on rank 0, its result on every rank. An InputError of rank 0 ends the others silently."""
    try:
        box = [make() if rank == 0 else None]
    except InputError as e:
        box = [e]
    if world > 1:
        dist.broadcast_object_list(box)
    if isinstance(box[0], InputError):
        raise box[0] if rank == 0 else SystemExit(2)
    return box[0]


# ----------------------------------------------------------------------------------------------------------------------
# Training


def autocast(s, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=s.dtype == "bfloat16")


def read_windows(corpus, split, s, index, device):
    """data.get_windows on a device, of a file that is still what it was when the run began."""
    corpus.check_unchanged()  # to read a page that was cut from it would end the process
    return (x.to(device) for x in data.get_windows(corpus.split(split), s.seq, index))


@torch.no_grad()
def evaluate(model, corpus, split, s, device, count=None):
    """(loss in nats per token, number of tokens) of `count` evenly spread windows of a split, or of all of them, with a
    progress bar. But for rounding it is the same for any micro-batch and world size."""
    model.eval()
    for buffer in model.buffers() if world > 1 else ():
        if buffer.is_contiguous():  # such as running means: each rank's own, but rank 0's are in the checkpoint
            dist.broadcast(buffer.flatten().view(torch.uint8), 0)  # as bytes, as not every backend takes every dtype
    n = data.num_windows(corpus.split(split), s.seq)
    index, nats = data.eval_index(n, count or n), 0.0
    mine = index[rank::world]
    steps = range(0, len(mine), s.micro)
    for i in data.progress(steps, f"whole {split} split", unit="batch", disable=bool(count or rank) or None):
        x, y = read_windows(corpus, split, s, mine[i : i + s.micro], device)
        with autocast(s, device):
            nats += model(x, y)[1].item() * y.numel()
    corpus.check_unchanged()
    model.train()
    n_tokens = len(index) * s.seq
    return sum_over_ranks([nats])[0] / n_tokens, n_tokens


def make_optimizer(model, lr, device, betas=BETAS, decay=WEIGHT_DECAY):
    """AdamW, decay on tensors of rank >= 2 (QS section 7) except NO_DECAY. Also returns the names in both groups."""
    groups = {True: [], False: []}
    for name, p in model.named_parameters():
        groups[p.dim() >= 2 and name.rsplit(".", 1)[-1] not in model.NO_DECAY].append((name, p))
    optimizer = torch.optim.AdamW(
        [{"params": [p for _, p in groups[decays]], "weight_decay": decay * decays} for decays in (True, False)],
        lr=lr, betas=betas, fused=device.type != "mps" and all(p.is_floating_point() for p in model.parameters()),
    )  # fmt: skip
    names = {k: sorted({re.sub(r"layers\.\d+\.", "layers.*.", n) for n, _ in groups[k]}) for k in (True, False)}
    return optimizer, {"decay": names[True], "no_decay": names[False]}


def new_model(s, vocab_size):
    """(model, None), or with the weights that --init_from names (model, what the log says of their origin)."""
    model_class, config = sample.parse_spec(s.model, s.size, vocab_size)
    model = model_class(config)
    if not s.init_from:
        return model, None
    source = sample.read_checkpoint(s.init_from)
    try:
        model.load_state_dict(source["model"])
    except RuntimeError:
        own, its = (f"{x['model']}, {x['size']}, {x['tokens']}" for x in (vars(s), source["meta"]["settings"]))
        raise InputError(f"the weights of {s.init_from} do not fit: they are of {its}, and not of {own}") from None
    return model, {"path": s.init_from, "step": source["step"], "sha256": data.hash_file(Path(s.init_from)),
                   "model": source["meta"]["spec"], "data": source["meta"]["data"]["name"]}  # fmt: skip


class Diverged(InputError):
    """The loss or the gradient of a run is not finite."""


class Run:
    """One model in training: what its steps change and its checkpoints hold. The caller has locked the folder."""

    def __init__(self, s, corpus, device, folder, checkpoint):
        self.s, self.corpus, self.device, self.folder = s, corpus, device, folder
        self.end, self.per_epoch = s.stop_at or s.steps, data.epoch_steps(corpus, s.seq, s.batch)
        self.seconds = deque(maxlen=max(10, s.log_every))  # of the last steps
        self.val_windows, self.window_s = data.num_windows(corpus.split("val"), s.seq), 0.0  # seconds to evaluate one
        self.drawn = time.monotonic()  # when curve.png was drawn
        torch.manual_seed(int(s.seeds))
        self.step, self.best, self.start, self.saved = 0, {"val_loss": math.inf, "step": 0}, time.monotonic(), None
        if checkpoint:
            self.model, origin = sample.build(checkpoint, device), checkpoint["meta"].get("origin")
            self.step, self.best = checkpoint["step"], checkpoint["best"]
            self.start -= checkpoint["meta"]["time_s"]
            if Path(checkpoint["path"]).name == "last.pt":
                self.saved = self.step  # the step of last.pt, if that is sound
        else:
            self.model, origin = new_model(s, corpus.vocab_size)
        self.model.to(device).checkpointing = s.checkpointing
        betas, decay = (PAM_BETAS, PAM_DECAY) if s.size in sample.PAM_SIZES else (BETAS, WEIGHT_DECAY)
        self.optimizer, decay_groups = make_optimizer(self.model, s.lr, device, betas, decay)
        if checkpoint:
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            for p, moments in self.optimizer.state.items():  # AdamW would read past the end of shorter ones
                if any(getattr(moments.get(key), "shape", None) != p.shape for key in ("exp_avg", "exp_avg_sq")):
                    raise InputError(f"{checkpoint['path']} has an optimizer state of other shapes than its model")
            torch.set_rng_state(checkpoint["rng"]["cpu"])
        self.val_loss = self.best["val_loss"]
        self.meta = {
            "spec": s.model, "size": s.size, "config": asdict(self.model.config),
            "settings": asdict(s), "data": corpus.summary(), "origin": origin, "files": sample.file_hashes(s.model),
        }  # fmt: skip
        if not checkpoint:
            self.save("last.pt")  # from its first moment on a run can be resumed
        self.open_log(weight_decay=decay_groups, optimizer={"betas": betas, "decay": decay, "clip": CLIP})
        if s.compile:
            for layer in self.model.layers:
                layer.compile()
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")  # of a convolution: no fault
        self.network = DistributedDataParallel(self.model) if world > 1 else self.model

    def open_log(self, **optimizer):
        """Begins the log, or goes on with it; says what is trained, and the disk that it takes."""
        s, log, params, origin = self.s, self.folder / "log.jsonl", self.model.num_params(), self.meta["origin"]
        ran = report.provenance(self.device, world)
        self.peak_flops = PEAK_FLOPS.get(ran["device"]) if s.dtype == "bfloat16" else None
        if rank == 0:
            for part in self.folder.glob("*.pt.*.part"):
                part.unlink()  # a checkpoint that a kill left half written
        if rank == 0 and self.step > 0 and log.exists() and log.stat().st_size > 0:
            self.log = report.Log(self.folder, self.start, keep=self.step)
            events = report.read_log(log)
            ends = max(e["step"] for e in events)  # the last line may be of --eval_only, and of an earlier best.pt
            logs_every = events[0].get("settings", {}).get("log_every", 0)
            if self.step - ends > max(s.log_every, logs_every):
                data.note(f"warning: {log} ends at step {ends}: tables bridge what it lacks to step {self.step}")
            self.write("resume", **ran)
        elif rank == 0:
            if self.step:
                data.note(f"warning: the log of {self.folder} is gone: a new one begins after step {self.step}")
            log.unlink(missing_ok=True)
            self.log = report.Log(self.folder, self.start)
            what = {key: self.meta[key] for key in ("settings", "config", "data", "origin", "files") if self.meta[key]}
            self.log.write("header", 0, 0, **what, params=params, flops_per_token=self.model.flops_per_token(s.seq),
                           **optimizer, **ran)  # fmt: skip
        begun = f"; begun from {origin['path']}, step {origin['step']}" if origin else ""
        if s.schedule == "cosine" and s.warmup > s.steps:
            begun += f"; the rate does not reach --lr, as --warmup takes {s.warmup:g} steps"
        disk = params["total"] * (3 * 12 + 4)  # last.pt, prev.pt and the one being written; best.pt has weights alone
        print_rank0(f"{self.folder}: {params['total']:,} parameters on {self.device}, {self.corpus.name} "
                    f"{len(self.corpus.tokens):,} tokens, {s.steps} steps of {s.batch * s.seq:,} tokens; checkpoints "
                    f"take up to {disk / 1e6:,.0f} MB{begun}")  # fmt: skip

    def write(self, event, **values):
        if rank == 0:
            self.log.write(event, self.step, self.step * self.s.batch * self.s.seq, **values)

    def save(self, name):
        """Writes best.pt, or last.pt with the optimizer's state; the one before becomes prev.pt, if it was sound."""
        last = name == "last.pt"
        if rank == 0:
            if self.step:
                self.log.sync()  # or after a power cut the log could end before its checkpoint
            now, keep = self.meta | {"time_s": time.monotonic() - self.start}, self.folder / "prev.pt"
            sample.save_checkpoint(self.folder / name, now, self.model, self.optimizer if last else None, self.step,
                                   self.best, keep if last and self.saved is not None else None)  # fmt: skip
        if last:
            self.saved = self.step

    def validate(self):
        """Evaluates on the fixed windows. Keeps the best checkpoint, and draws the curve now and then."""
        s, begin = self.s, time.monotonic()
        loss, n_tokens = evaluate(self.model, self.corpus, "val", s, self.device, s.eval_seqs)
        self.check_finite(loss)
        self.val_loss, self.window_s = loss, (time.monotonic() - begin) * s.seq / n_tokens
        epoch = {"epoch": self.step / self.per_epoch} if s.epochs else {}
        self.write("val", val_loss=loss, split="val", n_tokens=n_tokens, **epoch)
        if loss < self.best["val_loss"]:
            self.best = {"val_loss": loss, "step": self.step}
            if self.step or self.meta["origin"]:  # untrained weights are not worth keeping
                self.save("best.pt")
        if time.monotonic() - self.drawn > FIGURE_EVERY:
            self.draw()

    def draw(self):
        if rank == 0:
            with extra("curve.png"):
                report.plot_curves(*report.group_runs([report.read_log(self.folder)])[0], self.folder / "curve.png")
        self.drawn = time.monotonic()

    def update(self):
        """One step of the optimizer. Returns numbers for the log, the layers' gradient norms, and whether to stop."""
        s, model, local = self.s, self.model, self.s.batch // world
        lr, windows = learning_rate(self.step, s), data.num_windows(self.corpus.split("train"), s.seq)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        order = data.train_index(windows, int(s.seeds), self.step, s.batch)
        index = order[rank * local : (rank + 1) * local]
        nats = 0.0
        if world > 1:  # else what a model draws, as for dropout, would be the same on all ranks
            torch.manual_seed((int(s.seeds) * 2**20 + self.step) * world + rank)
        for i in range(0, local, s.micro):
            x, y = read_windows(self.corpus, "train", s, index[i : i + s.micro], self.device)
            with self.network.no_sync() if world > 1 and i + s.micro < local else contextlib.nullcontext():
                with autocast(s, self.device):
                    loss = self.network(x, y)[1]
                (loss * (len(x) / local)).backward()  # the mean over the whole step, whatever the micro-batches
            nats += loss.detach() * (len(x) / local)
        norms, counted = [], set()  # the last norm is of what no layer has; what several have counts once, in the first
        for part in (*(layer.parameters() for layer in model.layers), model.parameters()):
            part = [p for p in part if p not in counted and p.grad is not None]  # frozen ones have none
            counted.update(part)
            norms.append(get_total_norm([p.grad for p in part]).to(self.device))
        layers, grad_norm = norms[:-1], torch.stack(norms).norm()
        loss, stop = sum_over_ranks([float(nats) / world, len(stop_signals)])
        self.check_finite(loss, grad_norm.item(), layers)
        clip_grads_with_norm_(model.parameters(), CLIP, grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {"loss": loss, "lr": lr, "grad_norm": grad_norm.item()}, layers, stop

    def check_finite(self, loss, grad_norm=0.0, layers=()):
        """Ends a run whose loss or gradient is not finite, naming the step, the place and the last good checkpoint."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        # The backward runs from the last layer to the first: the last one that is not finite is where it began.
        bad = [f"layer {i}" for i, norm in enumerate(layers) if not norm.isfinite()]
        place = "the loss itself" if not math.isfinite(loss) else bad[-1] if bad else "the embedding or the head"
        # A loss that is not finite condemns the weights it was computed from.
        last_is_good = self.saved is not None and (math.isfinite(loss) or self.saved < self.step)
        path = self.folder / ("last.pt" if last_is_good else "prev.pt")
        good = f"the last good checkpoint is {path}" if path.exists() else "no good checkpoint was saved yet"
        raise Diverged(f"after step {self.step}: loss {loss}, first not finite in {place}; {good}")

    def finish(self):
        """The loss over the whole validation split, and the extras: a sample and a figure."""
        s = self.s
        if self.val_windows > s.eval_seqs:
            print_rank0(f"now the whole validation split, {self.val_windows:,} windows instead of {s.eval_seqs:,}: the "
                        f"loss may jump; about {self.val_windows * self.window_s:.0f} s")  # fmt: skip
        loss, n_tokens = evaluate(self.model, self.corpus, "val", s, self.device)
        self.check_finite(loss)
        print_rank0(f"validation {loss / math.log(2):.3f} {report.unit(s.tokens)} ({loss:.4f} nats) over the whole "
                    f"split after {self.step} steps, {self.folder}")  # fmt: skip
        self.write("final", val_loss=loss, split="val", n_tokens=n_tokens, best=self.best)
        self.draw()
        if rank == 0:
            text = ""
            with extra("sample"):
                with autocast(s, self.device):
                    text = sample.text(self.model, 400, 0.8, 50, 1.0, 1.0)
                (self.folder / "sample.txt").write_text(text, encoding="utf-8")
            self.write("sample", text=text)  # the last event of a run that is complete
            more = f"{data.program('sample.py')} {shlex.quote(str(self.folder))}{sample.model_flag(s.model)}"
            print_rank0(f"--- a sample, temperature 0.8 (more: {more})\n{text.strip()}\n---")
        if s.epochs:
            with extra("table"):
                print_rank0(report.epochs_table(*report.group_runs([report.read_log(self.folder)])[0]))

    def speed(self):
        """The speed of the last steps, for the log; and the time to the end, with the validations to come."""
        s, step_s, steps, n = self.s, fmean(self.seconds), self.end - self.step, self.val_windows
        speed = {"tok_s": round(s.batch * s.seq / step_s, 1)}
        if self.peak_flops:
            speed["mfu"] = speed["tok_s"] * self.model.flops_per_token(s.seq) / (self.peak_flops * world)
        windows = steps // s.eval_every * min(s.eval_seqs, n) + n
        return speed, timedelta(seconds=round(steps * step_s + windows * self.window_s))


def take_steps(run):
    """All steps of a run, or those until a signal asked any rank to end, with their validations and checkpoints."""
    s = run.s
    if run.step == 0:
        run.validate()
    first, stop = run.step + 1, False
    bar = data.progress(
        total=run.end, initial=run.step, unit_scale=False, leave=True, disable=bool(rank) or None, dynamic_ncols=True,
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]")  # fmt: skip
    while run.step < run.end and not stop:
        begin = time.perf_counter()
        numbers, layers, stop = run.update()
        if run.step == first + 1:
            run.seconds.clear()  # the first step compiles, and fills caches
        run.seconds.append(time.perf_counter() - begin)
        speed, left = run.speed()
        if s.sample_every and run.step % s.sample_every == 0 and rank == 0:  # PAM section II
            with extra("generated text"):
                run.write("generated", text=sample.text(run.model, s.seq, 1.0, 50, 0.9, 1.2))
        if run.step % s.log_every == 0 or run.step in (1, s.steps):
            run.write("train", **numbers, **speed)
        evaluates = (run.step % run.per_epoch if s.epochs else run.step) % s.eval_every == 0 or run.step == s.steps
        if evaluates:
            run.write("grad", layers=[norm.item() for norm in layers])
            run.validate()
        bits, mfu = numbers["loss"] / math.log(2), f" MFU {speed['mfu']:.1%}" if "mfu" in speed else ""
        shown = f"train {bits:.3f} val {run.val_loss / math.log(2):.3f} {report.unit(s.tokens)} "
        shown += f"{speed['tok_s']:,.0f} tok/s{mfu}  ETA {left}"
        bar.set_postfix_str(shown, refresh=False)
        bar.update()
        if bar.disable and (evaluates or run.step == first + 2):  # no terminal; the third step has the first sound ETA
            print_rank0(f"step {run.step}/{run.end}  {shown}")
        if run.step % s.ckpt_every == 0 or run.step == run.end or stop:
            run.save("last.pt")
    bar.close()


def train(s, corpus, device, folder, checkpoint, again):
    """One run. again: the command that goes on with it. Raises SystemExit if a signal asked any rank to end."""
    stop_signals.clear()
    data.keep_memory()
    with signals_handled(note_signal, "SIGINT", "SIGTERM", "SIGHUP"):
        run = Run(s, corpus, device, folder, checkpoint)
        take_steps(run)
    if run.step < run.end:
        print_rank0(f"stopped after step {run.step}; go on with: {again}")
    else:
        try:
            run.finish()
        except KeyboardInterrupt:
            print_rank0(f"stopped in the last evaluation; repeat it with: {again}")
            raise
    if sum_over_ranks([len(stop_signals)])[0]:
        raise SystemExit(128 + max(stop_signals, default=signal.SIGTERM))


def evaluate_checkpoint(s, corpus, device, checkpoint):
    """Prints the loss of a checkpoint over a whole split, and logs it beside the checkpoint as an "eval" event."""
    path, step, log = Path(checkpoint["path"]), checkpoint["step"], None
    with contextlib.ExitStack() as held:
        with extra("log of this result"):  # said before an evaluation that may take hours
            if rank == 0:
                report.read_log(path.parent)  # nothing is added to what is no log of ours
                held.enter_context(data.hold(path.parent))
                log = report.Log(path.parent, time.monotonic() - checkpoint["meta"]["time_s"])
        loss, n_tokens = evaluate(sample.build(checkpoint, device), corpus, s.split, s, device)
        print_rank0(f"{path}, step {step}: {s.split} loss {loss:.4f} nats, {loss / math.log(2):.4f} "
                    f"{report.unit(s.tokens)} over {n_tokens:,} tokens of {corpus.name}")  # fmt: skip
        with extra("log of this result"):
            if log:
                log.write("eval", step, step * s.batch * s.seq, val_loss=loss, split=s.split, n_tokens=n_tokens,
                          checkpoint=path.name, data=corpus.summary(), **report.provenance(device, world))  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# From the command line to runs in their folders


@dataclass
class Job:
    """A run to begin, to go on with, or to evaluate."""

    s: Settings
    folder: Path | None = None
    checkpoint: dict | None = None  # path, step and meta of the one that it goes on from
    complete: bool = False


def with_saved(given, saved, keys):
    """The flags, and for `keys` a run's own settings beside. A file's class alone means the run's settings of it."""
    if ".py:" in saved["model"] and given.get("model") == [sample.split_spec(saved["model"])[0]]:
        given = {key: value for key, value in given.items() if key != "model"}
    return {key: [saved[key]] if key in LISTS else saved[key] for key in keys} | given


def list_jobs(given, device):
    """The runs that the flags ask for, one for each combination of the lists, with checked settings."""
    found = ()
    if "init_from" in given:
        path, out = os.path.abspath(given["init_from"]), Path(given.get("resume") or given.get("out", os.devnull))
        begun = [folder for folder in (out, *sorted(out.glob("*/"))) if holds_run(folder)]
        if begun and not os.path.exists(path):  # these need it no more
            origin = find_checkpoint(begun[0])[1]
            was = origin["meta"]["settings"]["init_from"] or ""
            origin["path"] = was if path in (was, os.path.dirname(was)) else path
        else:
            origin = sample.read_checkpoint(path)
        given = with_saved(given, origin["meta"]["settings"], ("model", "size", "tokens"))
        given["init_from"] = os.path.abspath(origin["path"])
    if "resume" in given:
        if "out" in given or any(len(given.get(key, ())) > 1 for key in LISTS):
            raise InputError("--resume goes on with one run, in its own folder: no lists, no other --out")
        found = find_checkpoint(Path(given["resume"]), "eval_only" in given)
        saved = found[1]["meta"]["settings"] | {"stop_at": None}
        if unknown := saved.keys() - vars(Settings()).keys():
            raise InputError(f"{given['resume']} was written by another version of train.py: it has {unknown}")
        given = with_saved(given, saved, saved)
    elif "steps" in given and len(given.get("epochs", ())) > 1:
        raise InputError("--epochs has no effect beside --steps: give one of them")
    lists = {key: given[key] for key in LISTS if key in given}
    cells = itertools.product(*lists.values())
    return [Job(resolve(given | dict(zip(lists, values)), device), *found) for values in cells]


def find_checkpoint(path, evaluates=False):
    """(folder, checkpoint without its tensors) of a run folder or of a checkpoint's file."""
    checkpoint = sample.read_checkpoint(path, ("best.pt",) * evaluates + ("last.pt", "prev.pt"))
    if not (evaluates or checkpoint["optimizer"]):
        raise InputError(f"{checkpoint['path']} holds no optimizer state; resume from last.pt")
    return Path(checkpoint["path"]).parent, {key: checkpoint[key] for key in ("path", "step", "meta")}


def holds_run(folder):
    return any((folder / name).exists() for name in ("last.pt", "prev.pt"))


def judge(job, corpus, device, given, several, tried):
    """The job with its folder, the checkpoint there, if any, and its epochs as steps. Raises InputError now for what
    would end the run later: the last run of a sweep would fail after hours. tried: what runs before it have tried."""
    s = job.s
    if not job.folder:
        job.folder = Path(given.get("out", "runs"))
        if several and "out" in given and holds_run(job.folder):
            raise InputError(f"--out {job.folder} is a run: name another folder for several")
        if several or "out" not in given:
            varied = [key for key in LISTS if len(given.get(key, ())) > 1 and key not in ("size", "seeds", "model")]
            words = [f"{key}{getattr(s, key)}" for key in varied]
            job.folder /= report.run_name(s.model, corpus.name, s.size, *words, f"s{s.seeds}")
        if "out" in given and holds_run(job.folder):
            job = Job(s, *find_checkpoint(job.folder))
        elif "out" in given and {path.name for path in job.folder.glob("*") if path.suffix != ".part"} - {".lock"}:
            raise InputError(f"--out {job.folder} exists and is no run: name another folder")
    if s.epochs and not (s.steps and s.eval_every):
        per_epoch = data.epoch_steps(corpus, s.seq, s.batch)
        s.steps, s.eval_every = s.steps or s.epochs * per_epoch, s.eval_every or -(-per_epoch // 4)
    check(s)
    if was := job.checkpoint:
        saved, end = was["meta"]["settings"], s.stop_at or s.steps
        for file, now in sample.file_hashes(s.model).items():
            if not s.eval_only and was["meta"].get("files", {}).get(file, now) != now:
                what = f"{file} or what it imports changed since this run began ({job.folder})"
                raise InputError(f"{what}: put it back, or begin anew")
        same_data = corpus.sha256 == was["meta"]["data"]["sha256"] or (s.eval_only and "data" in given)
        if not same_data and s.tokens == saved["tokens"]:
            raise InputError(f"{corpus.path} is not the data of this run ({job.folder}): take out what is new")
        for key, value in vars(s).items():
            if key not in MAY_CHANGE and value != saved.get(key):
                raise InputError(f"--{key} {value} differs from this run's {saved.get(key)} ({job.folder})")
        if s.eval_only:
            return job
        log, ended = job.folder / "log.jsonl", was["step"] == end
        sampled = ended and log.exists() and any(e["event"] == "sample" for e in report.read_log(log))
        job.complete = was["step"] > end or sampled
        if job.complete:
            return job
    if (trial := (s.model, s.size, s.dtype, s.checkpointing, s.seq)) not in tried:
        tried.add(trial)
        model_class, config = sample.parse_spec(s.model, s.size, corpus.vocab_size)
        with autocast(s, device):
            if faults := sample.step_faults(model_class, config, device, s.checkpointing, s.seq):
                raise InputError(f"{s.model} cannot be trained here: {'; '.join(faults)}")
    if s.compile:
        try:
            torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
        except Exception as e:  # the compilers raise many kinds
            raise InputError(f"cannot compile here ({data.one_line(e)}): add a compiler or --no-compile") from None
    if s.init_from and not job.checkpoint:
        new_model(s, corpus.vocab_size)  # whether the weights fit
    return job


def open_folder(job, named, held):
    """Makes the folder of a job, and locks it until `held` closes. A default name that exists gets -2, -3, ..."""
    folder, n = job.folder, 1
    while folder.exists() and not (named or job.checkpoint):
        n += 1
        folder = job.folder.with_name(f"{job.folder.name}-{n}")
    with data.explain(f"make the run folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    held.enter_context(data.hold(folder))
    if holds_run(folder) and not job.checkpoint:
        raise InputError(f"{folder} was begun by another process meanwhile: start this command again")
    return folder


def run(given):
    """Does the runs that the flags ask for, one after the other. One that diverges does not end the others."""
    device = sample.pick_device(given.get("device", "auto"))
    if given.get("params"):
        for s in (job.s for job in list_jobs(given, device)):
            own = {"data", "tokens", "resume", "init_from"} & given.keys()
            paper = s.size in sample.PAM_SIZES and not own  # its tables are of GPT-2's tokens
            vocab_size = data.GPT2_VOCAB if paper or s.tokens == "gpt2" else 256
            print_rank0(sample.params_table(s.model, s.size, s.seq, vocab_size))
        return
    if world > 1:
        device = sample.pick_device(f"cuda:{local_rank}" if device.type == "cuda" else "cpu")
        # The others wait while rank 0 downloads a text.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=1))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    jobs = broadcast_from_rank0(lambda: list_jobs(given, device))
    s, several = jobs[0].s, len(jobs) > 1
    load = partial(data.load, s.data, max(job.s.seq for job in jobs), tokens=s.tokens, column=s.column)
    prepared, tried = [], set()  # rank 0 prepares the text, once: its notes may go to a file in the same folder
    broadcast_from_rank0(lambda: prepared.append(load()) or data.codec(prepared[0].vocab_size) and None)
    corpus = prepared[0] if prepared else load()
    jobs = broadcast_from_rank0(lambda: [judge(job, corpus, device, given, several, tried) for job in jobs])
    if len({job.folder for job in jobs}) < len(jobs):
        raise InputError("two of these runs have one folder, as their classes have one name: rename one")
    if corpus.sha256 != broadcast_from_rank0(lambda: corpus.sha256):
        raise InputError(f"{corpus.path} is another text here than on rank 0")
    done, diverged = [], []
    all_go_on = several and ("out" in given or not any(job.folder.exists() for job in jobs))
    for job in jobs:
        s, was, path = job.s, job.checkpoint, job.checkpoint and job.checkpoint["path"]
        if s.eval_only:
            return evaluate_checkpoint(s, corpus, device, sample.read_checkpoint(path))
        if job.complete:
            print_rank0(f"{path} is at step {was['step']} of {s.stop_at or s.steps} already: nothing is left to do")
            done.append(job.folder)
            continue
        with contextlib.ExitStack() as held:
            folder = broadcast_from_rank0(partial(open_folder, job, "out" in given, held))
            again = f"{data.program('train.py')} --resume {shlex.quote(str(folder))}{sample.model_flag(s.model)}"
            again += "".join(f" --{key} {given[key]}" for key in ("device", "stop_at") if key in given)
            again += " (what follows in the list has not begun)" * (job is not jobs[-1])
            if all_go_on:
                again = f"the same command and --out {shlex.quote(str(folder.parent))}"
            try:
                train(s, corpus, device, folder, path and sample.read_checkpoint(path), again)
                done.append(folder)
            except Diverged as e:
                diverged.append(f"{folder}: {e}")
    if several and done and rank == 0:
        with extra("table"):
            print_rank0(report.training_report([report.read_log(folder) for folder in done])[0])
    if diverged:
        raise Diverged("; ".join(diverged))


def main():
    if any(argument.partition("=")[0] == "--task" for argument in sys.argv[1:]):
        return tasks.main()  # with flags of its own
    given = parse_flags()
    if not launched and set(RANKS) & os.environ.keys():
        raise InputError(f"one of {', '.join(RANKS)} is set: start several processes with torchrun, or unset it")
    try:
        with signals_handled(end_now, *(() if launched else ("SIGTERM", "SIGHUP"))):  # torchrun ends its ranks itself
            run(given)
    except (InputError, MemoryError, RuntimeError) as e:
        if data.is_out_of_memory(e):
            e = InputError("out of memory: set --checkpointing, lower --micro (same result) or --seq")
        if rank and isinstance(e, InputError) and not isinstance(e, Diverged):
            data.note(f"error on rank {rank}: {e}")
        raise e from None
    if dist.is_initialized():  # not after a fault: it could wait for a rank that will not come
        dist.destroy_process_group()


if __name__ == "__main__":
    command_line(main, silent=rank > 0)
