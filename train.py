"""Trains any model of this repository on bytes or tokens, and compares the steps that models need.

    python train.py                                            tiny H-Mamba on the text that ships with Python
    python train.py --model hmamba,mamba --seeds 1,2,3         a sweep: the same data order, ratios at the end
    python train.py --model hmamba:N=4,hmamba:field=real       settings of a model (fields of its Config)
    torchrun --nproc_per_node 4 train.py --data FILE --size 253m       the paper's size and protocol on four GPUs
    python train.py --resume runs/hmamba-stdlib-tiny-s1        goes on where a stopped run left off
    python train.py --out RUN --resume RUN                     begins RUN, or goes on with it: for what restarts by itself
    python train.py --resume RUN --eval_only --split test      loss of its best checkpoint on the test split
    python train.py --model hmamba,mamba --size 253m --params  parameters by component
    python train.py --task mod3                                state tracking: hands over to tasks.py and its flags

Paper: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691), section 7
and table 4. Losses are in nats per token; divided by ln 2 they are bpc, bits per character, if the tokens are bytes.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from pathlib import Path

import numpy as np
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
# warmup: steps, or below 1 a share of all steps; min_lr: where the cosine ends.
PROTOCOLS = {
    "tiny": {"steps": 240, "batch": 16, "micro": 16, "seq": 256, "lr": 2e-3, "min_lr": 2e-4, "warmup": 0.75,
             "schedule": "cosine", "dtype": "float32", "checkpointing": False,
             "eval_every": 20, "eval_seqs": 128, "ckpt_every": 60},
    "small": {"steps": 1000, "batch": 64, "micro": 16, "seq": 512, "lr": 1e-3, "min_lr": 1e-4, "warmup": 0.75,
              "schedule": "cosine", "dtype": "bfloat16", "checkpointing": False,
              "eval_every": 20, "eval_seqs": 512, "ckpt_every": 100},
    "253m": {"steps": 1000, "batch": 1024, "micro": 32, "seq": 1024, "lr": 6e-4, "min_lr": 6e-5, "warmup": 750,
             "schedule": "cosine", "dtype": "bfloat16", "checkpointing": True,
             "eval_every": 20, "eval_seqs": 5120, "ckpt_every": 20},  # QS table 4; D: 20 x 256
}  # fmt: skip
# PAM table 2: epochs in place of steps. Each is evaluated at its end and three times before, which the paper leaves open.
PAM_PROTOCOL = {"epochs": 10, "batch": 8, "micro": 8, "seq": 512, "lr": 3e-5, "min_lr": 0.0, "warmup": 500,
                "schedule": "cosine", "dtype": "float32", "checkpointing": False, "eval_seqs": 512, "ckpt_every": 1000,
                "sample_every": 5000}  # fmt: skip
PROTOCOLS |= dict.fromkeys(sample.PAM_SIZES, PAM_PROTOCOL)
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0  # QS section 7, table 4
PAM_BETAS, PAM_DECAY = (0.9, 0.999), 0.01  # PAM table 2; its betas are not given, these are AdamW's own
PAPER_STEPS = {"enwik8": 1500, "owt": 1000, "fineweb": 1000}  # QS section 7, budget at 253m
PEAK_FLOPS = {  # dense bf16, by the device's full name; for others there is no MFU
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989e12,
    "NVIDIA GeForce RTX 4090": 165e12, "NVIDIA GeForce RTX 3090": 71e12,
}  # fmt: skip
# What a resumed run may set anew: the rest would change its course.
MAY_CHANGE = {"resume", "data", "stop_at", "micro", "device", "compile", "checkpointing", "log_every", "ckpt_every",
              "eval_only", "split"}  # fmt: skip


def flag(default, text, type=str, choices=None):
    return field(default=default, metadata={"help": text, "type": type, "choices": choices})


@dataclass
class Settings:
    """Every flag. None: taken from PROTOCOLS for the size."""

    model: str = flag("hmamba", "model spec NAME[:key=value...], or a comma-separated list of them")
    data: str = flag("stdlib", "stdlib, enwik8, owt, fineweb, wikitext103 (see python data.py), a file or a folder")
    tokens: str = flag(
        None, "bytes, or gpt2: GPT-2's BPE (default: bytes; gpt2 for wikitext103 and .tokens files)", choices=TOKENS
    )
    size: str = flag(None, "size, or a list: tiny, small, 253m, 5m ... 100m (default: tiny; QS data on CUDA: 253m)")
    seeds: str = flag("1", "seed of initialisation and data order, or a list")
    steps: int = flag(None, "optimizer steps of the schedule", int)
    epochs: int = flag(None, "passes over the training data, if --steps is not given (default: by size)", int)
    stop_at: int = flag(None, "stop after this step, the schedule unchanged; --resume goes on", int)
    batch: int = flag(None, "sequences a step, over all devices", int)
    micro: int = flag(None, "sequences that a device takes at once; changes memory and speed, not the result", int)
    seq: int = flag(None, "tokens a sequence", int)
    lr: float = flag(None, "peak learning rate; one below min_lr's default lowers that too", float)
    min_lr: float = flag(None, "learning rate at the end of the cosine", float)
    warmup: float = flag(None, "steps of linear warmup; below 1: share of the steps", float)
    schedule: str = flag(None, "cosine, or constant: --lr throughout, no warmup", choices=("cosine", "constant"))
    dtype: str = flag(None, "float32, or bfloat16: autocast, parameters stay float32", choices=("float32", "bfloat16"))
    checkpointing: bool = flag(None, "recompute each layer in the backward: less memory", bool)
    compile: bool = flag(False, "torch.compile each layer", bool)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    eval_every: int = flag(None, "steps between validations; per-layer gradient norms are logged as often", int)
    eval_seqs: int = flag(None, "fixed windows of a validation during training; the last takes the whole split", int)
    log_every: int = flag(10, "steps between log lines of the training loss", int)
    ckpt_every: int = flag(None, "steps between checkpoints", int)
    sample_every: int = flag(None, "steps between generated texts in the log (default: none; 5m to 100m: 5000)", int)
    out: str = flag(None, "run folder, which must not exist; for several runs, what holds theirs (default runs/)")
    resume: str = flag(None, "go on with this run folder or checkpoint; if --out names it too, begin it if need be")
    eval_only: bool = flag(False, "only evaluate the checkpoint named by --resume, on the whole --split", bool)
    split: str = flag("val", "split for --eval_only", choices=("train", "val", "test"))
    params: bool = flag(False, "only print the parameters by component", bool)


def parse_flags():
    """Only the flags that were given, as a dict."""
    protocols = "\n".join(f"  {size:6}" + " ".join(f"{k}={v}" for k, v in p.items()) for size, p in PROTOCOLS.items())
    parser = Parser(description=__doc__, epilog=f"defaults by size:\n{protocols}")
    for f in dataclasses.fields(Settings):
        kind, default = f.metadata["type"], "by size" if f.name in PROTOCOLS["tiny"] else f.default
        text = f.metadata["help"] + (f" (default: {default})" if default not in (None, False) else "")
        if kind is bool:
            action = argparse.BooleanOptionalAction if f.default is None else "store_true"
            parser.add_argument(f"--{f.name}", action=action, default=None, help=text)
        else:
            parser.add_argument(f"--{f.name}", type=kind, choices=f.metadata["choices"], help=text)
    return {k: v for k, v in vars(parser.parse_args()).items() if v is not None}


def resolve(given, model, size, seed, device):
    """Settings of one run: what was given, then the protocol of its size. Raises InputError for impossible values."""
    if size is None:
        size = "253m" if given.get("data") in PAPER_STEPS and device.type == "cuda" else "tiny"
        if given.get("data") in PAPER_STEPS and size == "tiny":
            print_rank0("no CUDA device: --size tiny instead of 253m")
    if size not in PROTOCOLS:
        raise InputError(f"unknown size {size!r}; known: {', '.join(PROTOCOLS)}")
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
    if s.data not in data.NAMED and Path(s.data).exists():
        s.data = str(Path(s.data).absolute())  # so that --resume finds it from anywhere
    if s.min_lr > s.lr and "min_lr" not in given:
        s.min_lr = s.lr
    sample.parse_spec(s.model, s.size, 256)
    return check(s)


def check(s):
    """The settings of one run, if they are possible. Raises InputError."""
    for key in ("steps", "epochs", "batch", "micro", "seq", "eval_every", "eval_seqs", "log_every", "ckpt_every",
                "sample_every", "stop_at"):  # fmt: skip
        if getattr(s, key) is not None and getattr(s, key) < 1:
            raise InputError(f"--{key} {getattr(s, key)} must be at least 1")
    if not (s.seeds.isascii() and s.seeds.isdecimal()) or int(s.seeds) >= 2**32:
        raise InputError(f"--seeds {s.seeds!r} must be whole numbers from 0 to 2^32 - 1")
    if not (0 < s.lr < math.inf and 0 <= s.min_lr <= s.lr and 0 <= s.warmup < math.inf):
        raise InputError(f"impossible schedule: --lr {s.lr} --min_lr {s.min_lr} --warmup {s.warmup}")
    if s.stop_at and s.steps and s.stop_at > s.steps:
        raise InputError(f"--stop_at {s.stop_at} lies beyond --steps {s.steps}")
    if s.batch % world:
        raise InputError(f"--batch {s.batch} must be a multiple of the {world} devices")
    return s


def set_epochs(s, corpus):
    """Turns epochs of this corpus into steps; --eval_every counts from the start of each and is by default a quarter."""
    if s.epochs and not (s.steps and s.eval_every):
        per_epoch = data.epoch_steps(corpus, s.seq, s.batch)
        s.steps, s.eval_every = s.steps or s.epochs * per_epoch, s.eval_every or -(-per_epoch // 4)
        check(s)


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
# Several devices (torchrun sets these variables), signals, output

rank, world, local_rank = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
stop_signals = []  # SIGINT and SIGTERM end the run after the present step


def print_rank0(*text):
    if rank == 0:
        with contextlib.suppress(OSError):  # a reader that went away, or a full disk behind it, does not end a run
            tqdm.write(" ".join(map(str, text)), file=sys.stdout)
            sys.stdout.flush()


def sum_over_ranks(value):
    """Sum over all ranks of a list of numbers."""
    if world == 1:
        return value
    x = torch.tensor(value, dtype=torch.float64, device="cpu" if dist.get_backend() == "gloo" else "cuda")
    dist.all_reduce(x)
    return x.tolist()


def broadcast_from_rank0(make):
    """make() on rank 0, its result on every rank; an InputError likewise."""
    box = [None]
    if rank == 0:
        try:
            box = [make()]
        except InputError as e:
            box = [e]
    if world > 1:
        dist.broadcast_object_list(box)
    if isinstance(box[0], InputError):
        raise box[0]
    return box[0]


def exit_on_signal():
    """Ends the program, if a signal asked any rank to, with the exit code 128 + signal."""
    if sum_over_ranks([len(stop_signals)])[0]:
        raise SystemExit(128 + max(stop_signals, default=signal.SIGTERM))


def on_signal(signum, _):
    if stop_signals:
        raise KeyboardInterrupt
    stop_signals.append(signum)
    print_rank0(f"{signal.Signals(signum).name}: stopping after this step (again: at once, without saving)")


# ----------------------------------------------------------------------------------------------------------------------
# Training


def autocast(s, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=s.dtype == "bfloat16")


@torch.no_grad()
def evaluate(model, tokens, index, s, device):
    """Mean loss in nats per token over the windows `index` of a split; the same for any micro-batch and world size."""
    model.eval()
    nats, mine = 0.0, index[rank::world]
    for i in range(0, len(mine), s.micro):
        x, y = (z.to(device) for z in data.get_windows(tokens, s.seq, mine[i : i + s.micro]))
        with autocast(s, device):
            nats += model(x, y)[1].item() * y.numel()
    model.train()
    return sum_over_ranks([nats])[0] / (len(index) * s.seq)


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


def check_finite(loss, grad_norm, layers, step, folder, last_step):
    """Stops a run whose loss or gradient is not finite, naming the step, the place and the last good checkpoint."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    bad = [i for i, norm in enumerate(layers) if not norm.isfinite()]
    # The backward runs from the last layer to the first: the last one that is not finite is where it began.
    place = "the loss itself" if not math.isfinite(loss) else f"layer {bad[-1]}" if bad else "the embedding or the head"
    # A loss that is not finite condemns the weights it was computed from; None: there is no sound last.pt.
    good = last_good(folder, last_is_bad=last_step in ((None,) if math.isfinite(loss) else (None, step - 1)))
    raise InputError(f"step {step}: loss {loss}, gradient norm {grad_norm}, first not finite in {place}; {good}")


def last_good(folder, last_is_bad):
    path = folder / ("prev.pt" if last_is_bad else "last.pt")
    return f"the last good checkpoint is {path}" if path.exists() else "no good checkpoint was saved yet"


def train(s, corpus, device, single, checkpoint=None):
    """One run. Returns its folder; SystemExit if a signal ended it."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, on_signal)
    torch.manual_seed(int(s.seeds))
    if checkpoint:
        model, folder = sample.build(checkpoint).to(device), Path(checkpoint["path"]).parent
    else:
        model_class, config = sample.parse_spec(s.model, s.size, corpus.vocab_size)
        model = model_class(config).to(device)
        folder = Path(broadcast_from_rank0(lambda: str(report.make_folder(s, corpus, single))))
    start_time = time.time() - (checkpoint["meta"]["time_s"] if checkpoint else 0)
    for part in folder.glob("*.pt.*.part") if rank == 0 else ():  # what a kill left half written
        part.unlink(missing_ok=True)
    model.checkpointing = s.checkpointing
    betas, decay = (PAM_BETAS, PAM_DECAY) if PROTOCOLS[s.size] is PAM_PROTOCOL else (BETAS, WEIGHT_DECAY)
    optimizer, decay_groups = make_optimizer(model, s.lr, device, betas, decay)
    meta = {
        "spec": s.model, "size": s.size, "config": dataclasses.asdict(model.config), "settings": dataclasses.asdict(s),
        "data": broadcast_from_rank0(lambda: {"name": corpus.name, "size": len(corpus.tokens), "sha256": corpus.sha256}),
    }  # fmt: skip
    step, best, last_step = 0, {"val_loss": math.inf, "step": 0}, None  # last_step: of last.pt, None if it is damaged
    log = report.Log(folder, start_time, keep=checkpoint and checkpoint["step"], active=rank == 0)
    if checkpoint:
        step, best = checkpoint["step"], checkpoint["best"]
        last_step = step if Path(checkpoint["path"]).name == "last.pt" else None
        try:
            optimizer.load_state_dict(checkpoint["optimizer"])
        except (KeyError, TypeError, ValueError) as e:
            raise InputError(f"{checkpoint['path']}: its optimizer state does not fit ({e})") from None
        torch.set_rng_state(checkpoint["rng"]["cpu"])
    if log.path.exists() and checkpoint:
        log.write("resume", step, step * s.batch * s.seq, **report.provenance(device, world))
    else:
        log.write("header", 0, 0, settings=meta["settings"], config=meta["config"], data=meta["data"],
                  params=model.num_params(), flops_per_token=model.flops_per_token(s.seq), weight_decay=decay_groups,
                  optimizer={"betas": betas, "decay": decay, "clip": CLIP}, **report.provenance(device, world))  # fmt: skip
    if s.compile:
        for layer in model.layers:
            layer.compile()
    ids = [device.index] if device.type == "cuda" else None
    network = DistributedDataParallel(model, device_ids=ids) if world > 1 else model

    train_tokens, val_tokens = corpus.split("train"), corpus.split("val")
    windows, val_windows = data.num_windows(train_tokens, s.seq), data.num_windows(val_tokens, s.seq)
    fixed, per_epoch = data.eval_index(val_windows, s.eval_seqs), data.epoch_steps(corpus, s.seq, s.batch)
    local, end, tokens_per_step = s.batch // world, s.stop_at or s.steps, s.batch * s.seq
    peak = None
    if device.type == "cuda":
        peak = PEAK_FLOPS.get(torch.cuda.get_device_name(device)) if s.dtype == "bfloat16" else None
        torch.cuda.reset_peak_memory_stats(device)
    if s.schedule == "cosine" and s.warmup >= s.steps:
        print_rank0(f"note: the warmup of {s.warmup:g} steps does not end within {s.steps} steps")
    show = rank == 0 and sys.stderr.isatty()
    print_rank0(f"{folder}: {model.num_params()['total']:,} parameters on {device}, {corpus.name} {len(corpus.tokens):,} tokens, "
        f"{s.steps} steps of {tokens_per_step:,} tokens")  # fmt: skip

    def save(name, optimizer=None, keep=None):
        if rank == 0:
            log.sync()  # or after a power cut the log could end before its checkpoint
            now = meta | {"time_s": time.time() - start_time}
            sample.save_checkpoint(folder / name, now, model, optimizer, step, best, keep)

    def save_last():
        nonlocal last_step
        # A last.pt that could not be read does not take the place of the prev.pt that could.
        save("last.pt", optimizer, keep=None if last_step is None else folder / "prev.pt")
        last_step = step

    def validate():
        nonlocal best
        loss = evaluate(model, val_tokens, fixed, s, device)
        epoch = {"epoch": step / per_epoch} if s.epochs else {}
        log.write("val", step, step * tokens_per_step, val_loss=loss, split="val", n_tokens=len(fixed) * s.seq, **epoch)
        if loss < best["val_loss"]:
            best = {"val_loss": loss, "step": step}
            save("best.pt")
        return loss

    val_loss = best["val_loss"]
    if not math.isfinite(val_loss):  # a new run
        val_loss = validate()
        save_last()  # from here on the run can be resumed
    bar = tqdm(total=end, initial=step, unit="step", disable=not show, dynamic_ncols=True)
    clock, clock_step, begin, begin_step = time.perf_counter(), step, time.perf_counter(), step
    while step < end:
        lr = learning_rate(step, s)
        for group in optimizer.param_groups:
            group["lr"] = lr
        index = data.train_index(windows, int(s.seeds), step, s.batch)[rank * local : (rank + 1) * local]
        nats = 0.0
        for i in range(0, local, s.micro):
            x, y = (z.to(device) for z in data.get_windows(train_tokens, s.seq, index[i : i + s.micro]))
            with network.no_sync() if world > 1 and i + s.micro < local else contextlib.nullcontext():
                with autocast(s, device):
                    loss = network(x, y)[1]
                (loss * (len(x) / local)).backward()  # the mean over the whole step, whatever the micro-batches
            nats += loss.detach() * (len(x) / local)
        layers = [get_total_norm([p.grad for p in layer.parameters()]) for layer in model.layers]
        rest = get_total_norm([p.grad for n, p in model.named_parameters() if not n.startswith("layers.")])
        grad_norm = torch.stack([*layers, rest]).norm()
        loss, stop = sum_over_ranks([float(nats) / world, len(stop_signals)])
        step += 1
        check_finite(loss, grad_norm.item(), layers, step, folder, last_step)
        clip_grads_with_norm_(model.parameters(), CLIP, grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        tokens = step * tokens_per_step
        tok_s = (step - clock_step) * tokens_per_step / (time.perf_counter() - clock)
        speed = {"tok_s": round(tok_s, 1)}
        speed |= {"mfu": tok_s * model.flops_per_token(s.seq) / (peak * world)} if peak else {}
        logs, saves = (step % n == 0 or step == s.steps for n in (s.log_every, s.ckpt_every))
        evaluates = (step % per_epoch if s.epochs else step) % s.eval_every == 0 or step == s.steps
        if s.sample_every and step % s.sample_every == 0 and rank == 0:  # PAM section II
            log.write("generated", step, tokens, text=sample.text(model, s.seq, 1.0, 50, 0.9, 1.2))
        if logs or step == 1:
            log.write("train", step, tokens, loss=loss, lr=lr, grad_norm=grad_norm.item(), **speed)
        if evaluates:
            log.write("grad", step, tokens, layers=[norm.item() for norm in layers])
            val_loss = validate()
        shown = f"train {loss / math.log(2):.3f} val {val_loss / math.log(2):.3f} {report.unit(s.tokens)} {tok_s:,.0f} tok/s"
        shown += f" MFU {speed['mfu']:.1%}" if peak else ""
        bar.set_postfix_str(shown, refresh=False)
        bar.update()
        if evaluates and not show:
            left = (time.perf_counter() - begin) / (step - begin_step) * (end - step)
            print_rank0(f"step {step}/{end}  {shown}  ETA {timedelta(seconds=round(left))}")
        if saves or step == end or stop:
            save_last()
        if logs or evaluates or saves:
            clock, clock_step = time.perf_counter(), step  # evaluations and checkpoints do not count
        if stop and step < end:
            bar.close()
            print_rank0(f"stopped after step {step}; go on with: python train.py --resume {folder}")
            exit_on_signal()
    bar.close()

    loss = evaluate(model, val_tokens, np.arange(val_windows), s, device)
    if not math.isfinite(loss):
        good = last_good(folder, last_is_bad=True)
        raise InputError(f"the loss after step {step} is {loss}: the last update diverged, lower --lr; {good}")
    memory = {"peak_memory": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
    whole = {"val_loss": loss, "split": "val", "n_tokens": val_windows * s.seq, "best": best} | memory
    log.write("final", step, step * tokens_per_step, **whole)
    print_rank0(f"validation {loss / math.log(2):.3f} {report.unit(s.tokens)} ({loss:.4f} nats) over the whole split "
                f"after {step} steps, {folder}")  # fmt: skip
    if rank == 0:
        with autocast(s, device):
            text = sample.text(model, 400, 0.8, 50, 1.0, 1.0)
        with data.explain(f"write {folder}"):
            (folder / "sample.txt").write_text(text, encoding="utf-8")
        try:
            report.plot_curves(*report.group_runs([report.read_log(folder)])[0], folder / "curve.png")
        except ImportError as e:
            print_rank0(f"note: no curve.png, as matplotlib cannot be imported ({e})")
        log.write("sample", step, step * tokens_per_step, text=text)  # the last event of a run that is complete
        print_rank0(f"--- a sample, temperature 0.8 (more: python sample.py {folder})\n{text.strip()}\n---")
    if s.epochs and single:
        print_rank0(report.epochs_table([report.read_log(folder)]))
    exit_on_signal()
    return folder


def evaluate_checkpoint(s, corpus, device, checkpoint):
    """Prints the loss of a checkpoint over a whole split, and logs it beside the checkpoint as an "eval" event."""
    model, tokens = sample.build(checkpoint).to(device), corpus.split(s.split)
    n, step = data.num_windows(tokens, s.seq), checkpoint["step"]
    loss = evaluate(model, tokens, np.arange(n), s, device)
    log = report.Log(Path(checkpoint["path"]).parent, time.time() - checkpoint["meta"]["time_s"], active=rank == 0)
    if not log.path.exists():
        raise InputError(f"{log.path} is missing: the result belongs beside the log of its run")
    log.write("eval", step, step * s.batch * s.seq, val_loss=loss, split=s.split, n_tokens=n * s.seq,
              checkpoint=Path(checkpoint["path"]).name, **report.provenance(device, world))  # fmt: skip
    print_rank0(f"{checkpoint['path']}, step {step}: {s.split} loss {loss:.4f} nats, {loss / math.log(2):.4f} {report.unit(s.tokens)} "
                f"over {n * s.seq:,} tokens")  # fmt: skip


def resume_settings(given, checkpoint):
    """Settings of a resumed run: its own, but for the flags that do not change its course."""
    saved = checkpoint["meta"]["settings"]
    for key, value in given.items():
        begun = key == "out" and value == given["resume"]
        if key not in MAY_CHANGE and not begun and value != saved.get(key):
            raise InputError(f"--{key} {value} differs from this run's {saved.get(key)}: drop it, or start a new run")
    try:
        return check(Settings(**saved | {"stop_at": None} | given))
    except TypeError as e:
        raise InputError(f"{checkpoint['path']} was written by another version of train.py ({e})") from None


@contextlib.contextmanager
def told_by_its_rank():
    """For what one rank alone may meet: what all of them meet is told by rank 0, once (data.command_line)."""
    try:
        yield
    except InputError as e:
        if rank:
            print(f"error on rank {rank}: {e}", file=sys.stderr)
        raise


def load_data(s):
    """Rank 0 prepares a corpus, and what turns its tokens into text; the others then find it; a fault is told once."""
    broadcast_from_rank0(lambda: data.codec(data.load(s.data, s.seq, tokens=s.tokens).vocab_size) and None)
    with told_by_its_rank():
        return data.load(s.data, s.seq, tokens=s.tokens)


def find_checkpoint(given):
    """What --resume names, the same on every rank; None if --out says that it may be begun, and it holds none yet."""
    found, names = None, ("best.pt",) * bool(given.get("eval_only")) + ("last.pt", "prev.pt")

    def find():
        nonlocal found
        run = Path(given["resume"])
        may_begin = given.get("out") == given["resume"] and not given.get("eval_only") and not run.is_file()
        if may_begin and not any((run / name).exists() for name in names):
            if (run / "log.jsonl").exists() and re.search(rb'"train".*}\n', (run / "log.jsonl").read_bytes()):
                raise InputError(f"{run} holds the log of a run, but no checkpoint: name another folder")
            return None
        found = sample.read_checkpoint(run, names)
        return found["path"]

    path = broadcast_from_rank0(find)
    with told_by_its_rank():
        return found or (path and sample.read_checkpoint(path))


def main():
    if any(argument.partition("=")[0] == "--task" for argument in sys.argv[1:]):
        return tasks.main()  # with flags of its own
    given = parse_flags()
    if (given.get("eval_only") or "split" in given) and not ("resume" in given and given.get("eval_only")):
        raise InputError("--eval_only (and --split) judge a checkpoint: name it with --resume RUN --eval_only")
    device = sample.pick_device(given.get("device", "auto"))
    if world > 1:
        # torchrun's own store keeps the addresses of ranks that died, and a restart may wait for them.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
            raise InputError("--max-restarts needs --rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
        device = torch.device("cuda", local_rank) if device.type == "cuda" else torch.device("cpu")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=1))  # of a download
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        run(given, device)
    except (MemoryError, RuntimeError) as e:
        with told_by_its_rank():
            if isinstance(e, MemoryError) or re.search("out of memory|allocate", str(e)):
                raise InputError("out of memory: set --checkpointing, lower --micro (same result) or --seq") from None
        if world > 1 and (isinstance(e, dist.DistError) or re.search("gloo|NCCL", str(e))):
            why = " ".join(str(e).split())[:160]
            raise InputError(f"another rank ended, it or torchrun says why; here it was: {why}") from None  # by rank 0
        raise
    if world > 1:  # not after a fault: it could wait for a rank that will not come
        dist.destroy_process_group()


def run(given, device):
    checkpoint = find_checkpoint(given) if "resume" in given else None
    if checkpoint:
        s = resume_settings(given, checkpoint)
        corpus = load_data(s)
        was = checkpoint["meta"]["data"]
        size, sha256 = broadcast_from_rank0(lambda: (len(corpus.tokens), corpus.sha256))
        if (size, sha256) != (was["size"], was["sha256"]):
            had = f"{was['size']:,} bytes, SHA-256 {was['sha256'][:12]}"
            raise InputError(f"{corpus.path} ({size:,} bytes, {sha256[:12]}) is not the data of this run ({had})")
        if s.eval_only:
            return evaluate_checkpoint(s, corpus, device, checkpoint)
        if not checkpoint["optimizer"]:
            raise InputError(f"{checkpoint['path']} holds no optimizer state; resume from last.pt")
        step, end = checkpoint["step"], s.stop_at or s.steps
        log = Path(checkpoint["path"]).with_name("log.jsonl")
        done = [e["step"] for e in report.read_log(log) if e["event"] == "sample"] if log.exists() else []
        if step > end or (step == end and done == [step]):
            advice = "the run is complete" if end == s.steps else "give a later --stop_at, or none"
            message = f"{checkpoint['path']} is at step {step} of {end} already: {advice}"
            if step > end or given.get("out") != given["resume"]:
                raise InputError(message)
            return print_rank0(message)  # to a command that is started until it succeeds
        return train(s, corpus, device, True, checkpoint)
    defaults = {"size": None, "seeds": Settings.seeds, "model": Settings.model}
    lists = [[v.strip() for v in given[k].split(",")] if k in given else [d] for k, d in defaults.items()]
    runs = [resolve(given, model, size, seed, device) for size, seed, model in product(*lists)]
    if given.get("params"):
        return print_rank0("\n".join(sample.params_table(s.model, s.size, s.seq) for s in runs))
    # What can be told before the first run is: a fault in the last of a sweep would come hours later.
    if len({(s.model, s.size, s.seeds) for s in runs}) < len(runs):
        raise InputError("--model, --size and --seeds must not repeat an entry")
    if "resume" in given and len(runs) > 1:
        raise InputError("--resume goes on with one run, not with a list of them")
    if "out" in given and "resume" not in given and (not given["out"] or Path(given["out"]).exists()):
        raise InputError(f"--out {given['out']} exists: name another folder, or --resume {given['out']}")
    corpora = [load_data(s) for s in runs]
    for s, corpus in zip(runs, corpora):
        set_epochs(s, corpus)
    finished = [train(s, corpus, device, single=len(runs) == 1) for s, corpus in zip(runs, corpora)]
    if rank == 0 and len(finished) > 1:
        print_rank0(report.training_report([report.read_log(f) for f in finished])[0])


if __name__ == "__main__":
    command_line(main)
