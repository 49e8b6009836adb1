"""Speed and memory of H-Mamba and Mamba on this machine's CPU, beside peers where they are installed.

    python bench.py                                     everything, about five minutes; prints Markdown tables
    python bench.py --sections train,scan --threads 2   two sections, with two threads

sections   params  parameters of both models at every size   loss  untrained loss, to be compared with ln 256
           train   a training step, beside other Mambas      scan  the scans alone, against the copy bandwidth
           memory  peak memory of the work of these two      step  time per generated token at two context lengths
times      Candidates take turns in one process, in a new random order each round, so that the machine's drift and the
           caches' contents meet all of them alike. A time is the median over the rounds, and so is a ratio.
allocator  By default glibc hands large tensors back to the system after every use, and page faults can cost half of a
           step. So all is timed in child processes that keep freed memory; train and scan are shown both ways.
"""

import argparse
import math
import os
import platform
import random
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from timeit import timeit

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hmamba import MODELS, HMamba, HMambaConfig, Mamba, MambaConfig
from kernels import complex_scan, selective_scan

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}  # glibc reads them at start
V, D, L, N = 256, 128, 2, 16  # of the training step
CONTEXTS, TOKENS = (128, 4096), 32  # of the generation
progress = partial(tqdm, leave=False, disable=None)  # None: only on a terminal

# ----------------------------------------------------------------------------------------------------------------------
# What is measured: each function builds its case from a shape and returns what one repetition does


def training_step(model, B, T, logits=lambda out: out):
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    idx = torch.randint(V, (B, T + 1))

    def once():
        F.cross_entropy(logits(model(idx[:, :-1])).flatten(0, 1), idx[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return once


def train_mamba(B, T):  # mlp=0: without our SwiGLU branch it is the same model as the peers'
    return training_step(Mamba(MambaConfig(V=V, D=D, L=L, N=N, mlp=0)), B, T, lambda out: out[0])


def train_hmamba(B, T):
    return training_step(HMamba(HMambaConfig(V=V, D=D, L=L, N=N)), B, T, lambda out: out[0])


def train_mambapy(B, T):
    # mambapy.lm also imports its Mamba-2, which needs CUDA packages that we do not.
    stub = type("stub", (), {"Mamba2": None, "Mamba2Config": type("Mamba2Config", (), {})})
    sys.modules.setdefault("mambapy.mamba2", stub)
    from mambapy import lm

    return training_step(lm.LM(lm.MambaConfig(d_model=D, n_layers=L, d_state=N, pscan=True), vocab_size=V), B, T)


def train_transformers(B, T):
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import mambapy.pscan  # noqa: F401  (without it transformers would run a far slower loop)
    import transformers as hf

    sizes = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "state_size": N}
    model = hf.MambaForCausalLM(hf.MambaConfig(**sizes, use_cache=False, use_mambapy=True))
    return training_step(model, B, T, lambda out: out.logits)


def gradients(function, *leaves):
    """Forward and backward, with an upstream gradient that is already there."""
    leaves = [x.requires_grad_() for x in leaves]
    upstream = torch.randn_like(function(*leaves).detach())
    return lambda: torch.autograd.grad(function(*leaves), leaves, upstream)


def scan_complex(B, C, T, backend=None):
    modulus, theta = torch.empty(B, T, C).uniform_(0.9, 1), torch.empty(B, T, C).uniform_(-3, 3)
    return gradients(lambda *x: complex_scan(*x, backend=backend)[0], modulus.log(), theta, torch.randn(B, T, C, 2))


def scan_accelerated(B, C, T):
    from accelerated_scan.ref import scan

    a = torch.polar(torch.empty(B, C, T).uniform_(0.9, 1), torch.empty(B, C, T).uniform_(-3, 3))
    return gradients(scan, a, torch.randn(B, C, T, dtype=torch.complex64))


def scan_selective(B, T, E, N, backend=None):
    A = -torch.arange(1, N + 1).float().repeat(E, 1)
    inputs = torch.randn(B, T, E), 0.1 * torch.rand(B, T, E), A, torch.randn(B, T, N), torch.randn(B, T, N)
    return gradients(lambda *x: selective_scan(*x, backend=backend)[0], *inputs)


def copy(*_):
    source, target = torch.zeros(2, 2**26)  # 256 MB each: far larger than a cache
    return lambda: target.copy_(source)


COPY = "memory copy, 256 MB"
MAMBAS = {
    "nanoHilbert Mamba, mlp=0": train_mamba,
    "nanoHilbert H-Mamba": train_hmamba,
    "mambapy, pscan": train_mambapy,
    "transformers, use_mambapy=True": train_transformers,
}
COMPLEX = {
    "nanoHilbert complex_scan": scan_complex,
    "accelerated_scan.ref.scan, complex64": scan_accelerated,
    "time loop, complex128": partial(scan_complex, backend="reference"),
    COPY: copy,
}
SELECTIVE = {
    "nanoHilbert selective_scan": scan_selective,
    "time loop, float64": partial(scan_selective, backend="reference"),
    COPY: copy,
}
INSTALL = {train_mambapy: "mambapy", train_transformers: "transformers mambapy", scan_accelerated: "accelerated-scan"}
# title: (candidates, ours first; shape; bytes that have to move: inputs, outputs and the gradient of each, in float32)
TRAIN = {"training step, B2 T128": (MAMBAS, (2, 128), None), "training step, B16 T256": (MAMBAS, (16, 256), None)}
SCAN = {
    # log_decay, theta: 1 number per element; b, h: 2
    "complex_scan, B2 C256 T512": (COMPLEX, (2, 256, 512), 2 * 4 * 2 * 256 * 512 * (1 + 1 + 2 + 2)),
    # u, dt, y: E numbers per token; B, C: N; and A
    "selective_scan, B16 T256 E256 N16":
        (SELECTIVE, (16, 256, 256, 16), 2 * 4 * (16 * 256 * (3 * 256 + 2 * 16) + 256 * 16)),
}

# ----------------------------------------------------------------------------------------------------------------------
# How it is measured: these run in fresh child processes


def in_child(threads, function, *args, keep_memory=True):
    """function(*args) in a process of its own: a clean memory count, and an allocator that is set before it starts."""
    for variable, value in KEEP_MEMORY.items():
        os.environ.pop(variable, None)
        if keep_memory:
            os.environ[variable] = value
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        return pool.submit(function, *args).result()


def build(make, *shape):
    """What one repetition does, or a line that says why there is none."""
    torch.manual_seed(0)
    try:
        return make(*shape)
    except ImportError:
        if make not in INSTALL:
            raise
        return f"not installed (pip install {INSTALL[make]})"


def take_turns(candidates, repeats):
    """candidates: name -> what to repeat. Returns name -> seconds, one number a round."""
    rng = random.Random(0)

    def one_round():
        return {name: timeit(candidates[name], number=1) for name in rng.sample(list(candidates), len(candidates))}

    one_round()  # the first of two rounds to warm up
    enough = int(3 / sum(one_round().values()))  # short work is noisy: go on for three seconds, at most 50 rounds
    rounds = [one_round() for _ in progress(range(max(repeats, min(50, enough))), unit="round")]
    return {name: [seconds[name] for seconds in rounds] for name in candidates}


def time_case(title, repeats):
    """name -> seconds of each round, or a line."""
    candidates, shape, _ = (TRAIN | SCAN)[title]
    built = {name: build(make, *shape) for name, make in candidates.items()}
    return built | take_turns({name: once for name, once in built.items() if callable(once)}, repeats)


def peak():
    """Peak resident memory of this process so far, in MB."""
    # On Linux ru_maxrss starts from the peak of the parent process; VmHWM is this process's own.
    if sys.platform == "linux" and (own := re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())):
        return int(own[1]) / 1024
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def added_memory(title, name):
    """What two repetitions add to the peak of this process, or a line."""
    candidates, shape, _ = (TRAIN | SCAN)[title]
    once = build(candidates[name], *(min(size, 16) for size in shape))
    if not callable(once):
        return once
    once()  # the first use of a library loads it; a small shape keeps that apart
    before = peak()
    once = build(candidates[name], *shape)
    once(), once()
    return f"{peak() - before:.0f}"


@torch.no_grad()
def untrained_loss(name, size):
    torch.manual_seed(0)
    model, idx = MODELS[name](MODELS[name].SIZES[size]), torch.randint(V, (4, 257))
    return model(idx[:, :-1], idx[:, 1:])[1].item()


@torch.no_grad()
def time_generation(repeats):
    """(model, context) -> seconds of each round of TOKENS tokens; and -> bytes of its state."""
    candidates, sizes = {}, {}
    for name in MODELS:
        model = MODELS[name](MODELS[name].SIZES["tiny"])
        for T in CONTEXTS:
            state = model(torch.randint(V, (1, T)))[2]
            sizes[name, T] = sum(x.numel() * x.element_size() for layer in state for x in layer)

            def once(model=model, state=state):
                idx_t = torch.zeros(1, dtype=torch.long)
                for _ in range(TOKENS):
                    logits, state = model.step(idx_t, state)
                    idx_t = logits.argmax(-1)

            candidates[name, T] = once
    return take_turns(candidates, repeats), sizes


# ----------------------------------------------------------------------------------------------------------------------
# Sections: each yields tables as (title, columns, rows)


def params(args):
    rows = []
    for size in HMamba.SIZES:
        with torch.device("meta"):  # counts only: nothing is allocated
            ours, twin = (model(model.SIZES[size]).num_params()["total"] for model in (HMamba, Mamba))
        rows.append((size, f"{ours:,}", f"{twin:,}", f"{100 * (twin / ours - 1):+.4f} %"))
    yield "parameters", ("size", "H-Mamba", "Mamba", "difference"), rows


def loss(args):
    sizes = [size for size in HMamba.SIZES if args.large or size != "253m"]
    jobs = [(name, size) for size in sizes for name in MODELS]
    rows = [(*job, f"{in_child(args.threads, untrained_loss, *job):.3f}") for job in progress(jobs, unit="model")]
    yield f"untrained loss on random bytes, nats per byte (ln {V} = {math.log(V):.3f})", ("model", "size", "loss"), rows


def ratio(seconds, ours):
    return f"{median(x / y for x, y in zip(seconds, ours)):.2f}"


def train(args, cases=TRAIN):
    for title, (_, _, traffic) in cases.items():
        kept, default = (in_child(args.threads, time_case, title, args.repeats, keep_memory=k) for k in (True, False))
        (ours, _), rows = next(iter(kept.items())), []
        for name, times in kept.items():
            if isinstance(times, str):
                rows.append((name, times))
                continue
            ms = [1e3 * x for x in (median(times), min(times), max(times), median(default[name]))]
            row = [name, f"{ms[0]:.1f}", f"{ms[1]:.1f} - {ms[2]:.1f}", ratio(times, kept[ours])]
            row += [f"{ms[3]:.1f}", ratio(default[name], default[ours])]
            if traffic:
                speed, roof = traffic / median(times), 2 * 2**28 / median(kept[COPY])  # a copy reads and writes
                speed = roof if name == COPY else speed
                row += [f"{speed / 1e9:.2f}", f"{100 * speed / roof:.0f} %"]
            rows.append(row)
        columns = ["candidate", "ms", "min - max", "time / ours", "ms, default allocator", "time / ours"]
        what = "forward and backward" if traffic else f"forward, backward and AdamW, V{V} D{D} L{L} N{N}"
        yield f"{title}: {what}", columns + ["GB/s of necessary traffic", "of the copy's"] * bool(traffic), rows


scan = partial(train, cases=SCAN)


def memory(args):
    if sys.platform == "win32":
        return print("memory: left out, as Windows does not tell Python the peak memory of a process", file=sys.stderr)
    jobs = [(title, name) for title, case in (TRAIN | SCAN).items() for name in case[0] if name != COPY]
    jobs = progress(jobs, unit="case")
    rows = [(*job, in_child(args.threads, added_memory, *job, keep_memory=False)) for job in jobs]
    yield "peak memory that the work adds, default allocator", ("case", "candidate", "MB"), rows


def step(args):
    times, sizes = in_child(args.threads, time_generation, args.repeats)
    rows = []
    for name in MODELS:
        ms = [f"{1e3 * median(times[name, T]) / TOKENS:.2f}" for T in CONTEXTS]
        size = [f"{sizes[name, T] / 1e3:.1f}" for T in CONTEXTS]
        rows.append((name, *ms, ratio(times[name, CONTEXTS[1]], times[name, CONTEXTS[0]]), *size))
    columns = [f"{what} after {T}" for what in ("ms per token", "kB of state") for T in CONTEXTS]
    yield "generation with step: tiny, batch 1", ("model", *columns[:2], "ratio", *columns[2:]), rows


SECTIONS = {"params": params, "loss": loss, "train": train, "scan": scan, "memory": memory, "step": step}

# ----------------------------------------------------------------------------------------------------------------------
# python bench.py


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def section_names(text):
    names = text.split(",")
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"unknown section {name!r}; known: {', '.join(SECTIONS)}")
    return names


def machine(threads):
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    cpu = cpu[1] if cpu else platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}, threads: {threads}. " + (
        f"Timed with {' '.join(f'{k}={v}' for k, v in KEEP_MEMORY.items())} except where it says default allocator.")


def main():
    description, _, notes = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=notes, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail  # one line, without the usage
    parser.add_argument("--sections", type=section_names, default=SECTIONS, metavar="A,B", help="default: all of them")
    parser.add_argument("--threads", type=positive, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=positive, default=5, help="rounds to time, at least, after 2 to warm up (default: %(default)s)")
    parser.add_argument("--large", action="store_true", help="the untrained loss at 253m too: 2 GB, half a minute")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write what is printed to FILE, which must be new")
    args = parser.parse_args()
    try:
        out = args.out.open("x") if args.out else None
    except OSError as e:
        fail(f"cannot create {args.out}: {e.strerror}")

    def say(line):
        for file in filter(None, (sys.stdout, out)):
            print(line, file=file, flush=True)

    say(machine(args.threads))
    for name in args.sections:
        for title, columns, rows in SECTIONS[name](args):
            say(f"\n### {title}\n")
            for cells in (columns, ["---"] * len(columns), *rows):
                say("| " + " | ".join([*cells, *[""] * (len(columns) - len(cells))]) + " |")


if __name__ == "__main__":
    main()
