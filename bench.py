"""Speed and memory of the models and their kernels on this machine's CPU, beside peers where they are installed.

    python bench.py                                     everything, a few minutes; prints Markdown tables
    python bench.py --sections train,scan --threads 2   two sections, with two threads

sections   params  parameters at every size             loss  untrained loss, to be compared with ln 256
           train   a training step, beside peers        scan  the scans alone, against the copy bandwidth
           born    Born attention's forms over lengths  step  one generated token, at two contexts
           tasks   a step of the models of csp.py       phase   phase memory, beside a peer
           memory  peak memory of what train and scan time
           data    converting a corpus, hashing, importing data.py
           start   python train.py: time to its first step, and what a step waits for data
times      Candidates take turns in one process, in a new random order each round, so that the machine's drift and the
           caches' contents meet all of them alike. A time is the median over the rounds, and so is a ratio.
allocator  By default glibc hands large tensors back to the system after every use, and page faults can cost half of a
           step. So all is timed in a child process that keeps freed memory, and once more in a default one.
"""

import argparse
import json
import math
import os
import platform
import random
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from timeit import timeit

import torch
import torch.nn.functional as F
from tqdm import tqdm

import csp
import tasks
from data import InputError, Parser, command_line, explain, get_windows, hash_file, load, num_windows, train_index
from hmamba import HMamba, HMambaConfig, Mamba, MambaConfig
from htransformer import HTransformer, HTransformerConfig, Transformer, TransformerConfig
from kernels import born_attention, complex_scan, phase_memory, selective_scan
from sample import MODELS

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}  # glibc reads them at start
V, D, L, N = 256, 128, 2, 16  # of the training step
TOKENS = 2**14  # of an attention case
CONTEXTS = (128, 4096)  # tokens before the generated one
progress = partial(tqdm, leave=False, disable=None)  # None: only on a terminal

# ----------------------------------------------------------------------------------------------------------------------
# Candidates: each builds its case from a shape and returns what one repetition does


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


def train_transformer(B, T):  # mlp=512 is nanoGPT's width
    return training_step(Transformer(TransformerConfig(V=V, D=D, L=L, head=32, mlp=4 * D)), B, T, lambda out: out[0])


def train_htransformer(B, T):
    return training_step(HTransformer(HTransformerConfig(V=V, D=D, L=L, N=N)), B, T, lambda out: out[0])


def train_nanogpt(B, T):
    try:
        from model import GPT, GPTConfig
    except ImportError:
        return "not found (put the folder of nanoGPT on PYTHONPATH)"
    model = GPT(GPTConfig(block_size=T, vocab_size=V, n_layer=L, n_head=4, n_embd=D, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    idx = torch.randint(V, (B, T + 1))

    def once():
        model(idx[:, :-1], idx[:, 1:].contiguous())[1].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return once


def gradients(function, *leaves):
    """Forward and backward, with an upstream gradient that is already there."""
    leaves = [x.requires_grad_() for x in leaves]
    upstream = torch.randn_like(function(*leaves).detach())
    return lambda: torch.autograd.grad(function(*leaves), leaves, upstream)


def scan_complex(B, C, T, backend=None):
    modulus, theta = torch.empty(B, T, C).uniform_(0.9, 1), torch.empty(B, T, C).uniform_(-3, 3)
    return gradients(lambda *x: complex_scan(*x, backend=backend)[0], modulus.log(), theta, torch.randn(B, T, C, 2))


def scan_accelerated(B, C, T):  # is given exp(log_decay + i theta), which complex_scan computes
    from accelerated_scan.ref import scan

    a = torch.polar(torch.empty(B, C, T).uniform_(0.9, 1), torch.empty(B, C, T).uniform_(-3, 3))
    return gradients(scan, a, torch.randn(B, C, T, dtype=torch.complex64))


def scan_accelerated_from_angles(B, C, T):  # the same work as complex_scan
    from accelerated_scan.ref import scan

    log_decay, theta = torch.empty(B, C, T).uniform_(0.9, 1).log(), torch.empty(B, C, T).uniform_(-3, 3)
    b = torch.randn(B, C, T, dtype=torch.complex64)
    return gradients(lambda ld, th, b: scan(torch.polar(ld.exp(), th), b), log_decay, theta, b)


def scan_selective(B, T, E, N, backend=None):
    A = -torch.arange(1, N + 1).float().repeat(E, 1)
    inputs = torch.randn(B, T, E), 0.1 * torch.rand(B, T, E), A, torch.randn(B, T, N), torch.randn(B, T, N)
    return gradients(lambda *x: selective_scan(*x, backend=backend)[0], *inputs)


def attend(function, width, T):
    """Sequences of T tokens one after another, TOKENS in all: equal times are equal times a token."""
    once = gradients(function, *(torch.randn(1, 2, T, *width) for _ in range(3)))
    return lambda: [once() for _ in range(TOKENS // T)]


def attend_born(method, T):
    return attend(lambda *x: born_attention(*x, method=method)[0], (N, 2), T)


def attend_softmax(T):
    return attend(partial(F.scaled_dot_product_attention, is_causal=True), (64,), T)


def remember(B, T, H, D, real=False, backend=None):
    pair = () if real else (2,)
    inputs = *(torch.randn(B, H, T, D, *pair) for _ in range(3)), -F.softplus(torch.randn(B, H, T) - 3)
    return gradients(lambda *x: phase_memory(*x, real=real, backend=backend)[0], *inputs)


def remember_fla(B, T, H, D):
    try:
        from naive import naive_chunk_simple_gla
    except ImportError:
        return "not found (put fla/ops/simple_gla of flash-linear-attention on PYTHONPATH; it needs einops)"
    inputs = *(torch.randn(B, T, H, D) for _ in range(3)), -F.softplus(torch.randn(B, T, H) - 3)
    return gradients(lambda *x: naive_chunk_simple_gla(*x)[0], *inputs)


def remember_in_pieces(real, T):
    """Sequences of T tokens one after another, TOKENS in all: equal times are equal times a token."""
    once = remember(1, T, 2, 64, real)
    return lambda: [once() for _ in range(TOKENS // T)]


def copy(*_):
    source, target = torch.zeros(2, 2**26)  # 256 MB each: far larger than a cache
    return lambda: target.copy_(source)


def generate(name, context):
    model = MODELS[name](MODELS[name].SIZES["tiny"]).requires_grad_(False)
    state = model(torch.randint(V, (1, context)))[2]
    return torch.no_grad()(lambda: model.step(torch.zeros(1, dtype=torch.long), state))


def train_task(name):
    """Five seeds at once, and each step with its own data, as tasks.py trains."""
    seeds, steps = range(42, 47), count(1)
    model = tasks.build(name, 2, seeds)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def once():
        x, y = tasks.batches("parity", seeds, 64, 16, (1, next(steps)), "cpu")
        losses = F.cross_entropy(model(x, generators).flatten(0, 2), y.flatten(), reduction="none")
        tasks.update(model, optimizer, losses.view(len(seeds), -1).mean(1))

    return once


COPY = "memory copy, 256 MB"
MAMBAS = {
    "nanoHilbert Mamba, mlp=0": train_mamba,
    "nanoHilbert H-Mamba": train_hmamba,
    "mambapy, pscan": train_mambapy,
    "transformers, use_mambapy=True": train_transformers,
}
TRANSFORMERS = {
    "nanoHilbert Transformer, mlp=512": train_transformer,
    "nanoHilbert H-Transformer": train_htransformer,
    "nanoGPT": train_nanogpt,
}
BORN = {
    "Born attention, quadratic": partial(attend_born, "quadratic"),
    "Born attention, linear": partial(attend_born, "linear"),
    "softmax, width 64 (scaled_dot_product_attention)": attend_softmax,
}
COMPLEX = {
    "nanoHilbert complex_scan": scan_complex,
    "accelerated_scan.ref.scan, complex64, a given": scan_accelerated,
    "accelerated_scan.ref.scan, from log_decay and theta": scan_accelerated_from_angles,
    "time loop, complex128": partial(scan_complex, backend="reference"),
    COPY: copy,
}
SELECTIVE = {
    "nanoHilbert selective_scan": scan_selective,
    "time loop, float64": partial(scan_selective, backend="reference"),
    COPY: copy,
}
PHASE = {
    "nanoHilbert phase_memory, real (SAM)": partial(remember, real=True),
    "nanoHilbert phase_memory, complex (PAM)": remember,
    "the same, the paper's O(T^2) form": partial(remember, backend="dual"),
    "fla naive_chunk_simple_gla, real": remember_fla,
}
LENGTHS = {"real (SAM)": partial(remember_in_pieces, True), "complex (PAM)": partial(remember_in_pieces, False)}
STEPS = {f"{name} after {T} tokens": partial(generate, name, T) for name in MODELS for T in CONTEXTS}
CASES = {  # section: {title: (candidates; shape; float32 numbers that have to move, each of them once in both passes)}
    "train": {
        **{f"training step, B{B} T{T}": (MAMBAS, (B, T), None) for B, T in ((2, 128), (16, 256))},
        "Transformer training step, B2 T128": (TRANSFORMERS, (2, 128), None),
    },
    "scan": {
        # log_decay and theta are 1 number per element, b and h 2; each has a gradient
        "complex_scan, B2 C256 T512": (COMPLEX, (2, 256, 512), 2 * (2 * 256 * 512) * (1 + 1 + 2 + 2)),
        # u, dt and y are E numbers per token, B and C N; and A
        "selective_scan, B16 T256 E256 N16": (
            SELECTIVE,
            (16, 256, 256, 16),
            2 * (16 * 256 * (3 * 256 + 2 * 16) + 256 * 16),
        ),
    },
    "born": {f"two heads, {TOKENS // T} times {T} tokens": (BORN, (T,), None) for T in (256, 1024, 2048, 4096, TOKENS)},
    "tasks": {"task models, five seeds": ({name: partial(train_task, name) for name in csp.MODELS}, (), None)},
    "phase": {
        "phase memory, B2 T512 H4 D64": (PHASE, (2, 512, 4, 64), None),
        **{
            f"phase memory, H2 D64, {TOKENS // T} times {T} tokens": (LENGTHS, (T,), None) for T in (1024, 4096, TOKENS)
        },
    },
    "step": {"one generated token, size tiny": (STEPS, (), None)},
}

# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def in_child(threads, function, *args, keep_memory=True):
    """function(*args) in a fresh process: nothing else in its memory, and an allocator that is set before it starts."""
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
    except ImportError as e:
        return f"not installed (pip install {(e.name or str(e)).partition('.')[0].replace('_', '-')})"


def take_turns(section, title, repeats):
    """name -> seconds of each round, or a line."""
    candidates, shape, _ = CASES[section][title]
    built = {name: build(make, *shape) for name, make in candidates.items()}
    ready = [name for name, once in built.items() if callable(once)]
    rng = random.Random(0)

    def one_round():
        return {name: timeit(built[name], number=1) for name in rng.sample(ready, len(ready))}

    one_round()  # the first of two rounds to warm up
    enough = int(3 / sum(one_round().values()))  # short work is noisy: go on for three seconds, at most 100 rounds
    rounds = [one_round() for _ in progress(range(max(repeats, min(100, enough))), desc=title, unit="round")]
    return built | {name: [seconds[name] for seconds in rounds] for name in ready}


def peak():
    """Peak resident memory of this process so far, in MB."""
    # On Linux ru_maxrss starts from the peak of the parent process; VmHWM is this process's own.
    if sys.platform == "linux" and (own := re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())):
        return int(own[1]) / 1024
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def added_memory(section, title, name):
    """What two repetitions add to the peak of this process, or a line."""
    candidates, shape, _ = CASES[section][title]
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


# ----------------------------------------------------------------------------------------------------------------------
# Sections: each yields tables as (title, columns, rows)


def params(args):
    rows = []
    for size in dict.fromkeys(size for model in MODELS.values() for size in model.SIZES):
        with torch.device("meta"):  # counts only: nothing is allocated
            counts = [model(model.SIZES[size]).num_params()["total"] if size in model.SIZES else None
                      for model in MODELS.values()]  # fmt: skip
        pairs = [f"{100 * (twin / ours - 1):+.4f} %" if ours else "-" for ours, twin in zip(counts[::2], counts[1::2])]
        rows.append((size, *(f"{count:,}" if count else "-" for count in counts), *pairs))
    yield "parameters, vocabulary 256", ("size", *MODELS, "first pair", "second pair", "third pair"), rows


def loss(args):
    sizes = HMamba.SIZES if args.large else [size for size in HMamba.SIZES if size != "253m"]
    jobs = [(name, size) for size in sizes for name in MODELS if size in MODELS[name].SIZES]
    rows = [(*job, f"{in_child(args.threads, untrained_loss, *job):.3f}") for job in progress(jobs, unit="model")]
    yield f"untrained loss on random bytes, nats per byte (ln {V} = {math.log(V):.3f})", ("model", "size", "loss"), rows


def timings(args, section):
    for title, (_, _, numbers) in CASES[section].items():
        job = args.threads, take_turns, section, title, args.repeats
        kept, default = (in_child(*job, keep_memory=keep) for keep in (True, False))
        first, rows = next(iter(kept)), []
        for name, times in kept.items():
            if isinstance(times, str):
                rows.append((name, times))
                continue
            row = [name]
            for seconds, base in ((times, kept[first]), (default[name], default[first])):
                ms = [1e3 * x for x in (median(seconds), min(seconds), max(seconds))]
                row += ["{:.2f} ({:.2f} - {:.2f})".format(*ms), f"{median(x / y for x, y in zip(seconds, base)):.2f}"]
            if numbers:
                roof = 2 * 2**28 / median(kept[COPY])  # a copy reads and writes
                rate = roof if name == COPY else 4 * numbers / median(times)
                row += [f"{rate / 1e9:.2f}", f"{100 * rate / roof:.0f} %"]
            rows.append(row)
        what = {
            "train": f", V{V} D{D} L{L} N{N}: forward, backward, AdamW",
            "scan": ": forward, backward",
            "born": f", N{N}: forward, backward",
            "tasks": " of 64 sequences of length 16 together: data, forward, backward, clipping, Adam",
            "phase": ": forward, backward",
            "step": "",
        }
        columns = ["candidate", "ms (min - max)", "time / first", "ms, default allocator", "time / first"]
        yield title + what[section], columns + ["GB/s of necessary traffic", "of copy bandwidth"] * bool(numbers), rows


def state_kb(state):
    """kB of all tensors in a state."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size() / 1000
    return sum(map(state_kb, state)) if isinstance(state, (list, tuple)) else 0.0


@torch.no_grad()
def step(args):
    yield from timings(args, "step")
    rows = []
    for name, model_class in MODELS.items():
        model = model_class(model_class.SIZES["tiny"])
        rows.append((name, *(f"{state_kb(model(torch.randint(V, (1, T)))[2]):.1f}" for T in CONTEXTS)))
    yield "state of one sequence, size tiny, kB", ("model", *(f"after {T} tokens" for T in CONTEXTS)), rows


def start(args):
    batch, seq = 16, 256  # of size tiny
    corpus = load("stdlib", seq)  # so that preparing it, once for ever, is not timed
    tokens = corpus.split("train")
    with TemporaryDirectory() as folder:
        log, begin = Path(folder) / "run/log.jsonl", perf_counter()
        command = [sys.executable, Path(__file__).with_name("train.py"), "--device", "cpu", "--out", log.parent]
        env = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
            first, speed = None, None
            while speed is None and process.poll() is None:
                sleep(0.01)
                lines = log.read_text().splitlines(keepends=True) if log.exists() else []
                steps = [json.loads(line) for line in lines if '"train"' in line and line.endswith("\n")]
                first = first or (perf_counter() - begin if steps else None)
                speed = steps[1]["tok_s"] if len(steps) > 1 else None  # of steps 2 to 10
            process.kill()
    if speed is None:
        raise InputError("python train.py ended before its tenth step")

    def read(step):
        get_windows(tokens, seq, train_index(num_windows(tokens, seq), 1, step, batch))

    waits = [timeit(partial(read, step), number=1) for step in range(100)]
    share = median(waits) * speed / (batch * seq)
    rows = [
        ("from the command to the end of the first step", f"{first:.1f} s"),
        ("a step", f"{1e3 * batch * seq / speed:.0f} ms"),
        ("of which waiting for data", f"{1e3 * median(waits):.2f} ms, {100 * share:.2f} %"),
    ]
    yield "python train.py, size tiny, data stdlib once prepared, default allocator", ("what", "time"), rows


def memory(args):
    if sys.platform == "win32":
        return print("memory: left out, as Windows does not tell Python the peak memory of a process", file=sys.stderr)
    jobs = [(s, title, name) for s in ("train", "scan") for title in CASES[s] for name in CASES[s][title][0]]
    jobs = progress([job for job in jobs if job[2] != COPY], desc="memory", unit="case")
    rows = [(*job[1:], in_child(args.threads, added_memory, *job, keep_memory=False)) for job in jobs]
    yield "peak memory that the work adds, default allocator", ("case", "candidate", "MB"), rows


def convert(repeats):
    """Rows of the section data: a parquet file like those of owt, 100 MB of text, made into a corpus; and its hash."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    pa.set_cpu_count(1)
    text = load("stdlib", 1).tokens[:10_000_000].tobytes().decode("ascii", "replace")
    rows = []
    with TemporaryDirectory() as folder:
        documents = [text[i : i + 5000] for shift in range(10) for i in range(100 * shift, len(text) - 5000, 5000)]
        write_table(pa.table({"text": documents}), f"{folder}/x.parquet", row_group_size=1000, use_dictionary=False)
        os.environ["NANOHILBERT_DATA"] = folder
        seconds = []
        for i in range(repeats):
            os.utime(f"{folder}/x.parquet", (i, i))  # a new file: it is converted again
            seconds.append(timeit(lambda: load(f"{folder}/x.parquet", 1), number=1))
        path = load(f"{folder}/x.parquet", 1).path
        hashing = [timeit(lambda: hash_file(path), number=1) for _ in range(repeats)]
        for what, times in (
            ("parquet to corpus: read, join, hash, write, fsync", seconds),
            ("SHA-256 of a file", hashing),
        ):
            rates = [path.stat().st_size / 1e6 / x for x in (median(times), max(times), min(times))]
            rows.append((what, "{:.0f} MB/s ({:.0f} - {:.0f})".format(*rates)))
    return rows


def corpus(args):
    timed = "import time; t = time.perf_counter(); import data; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", timed]
    runs = [
        subprocess.run(command, capture_output=True, check=True, cwd=Path(__file__).parent) for _ in range(args.repeats)
    ]
    ms = sorted(1e3 * float(run.stdout) for run in runs)
    imported = ("import data", f"{median(ms):.0f} ms ({ms[0]:.0f} - {ms[-1]:.0f})")
    yield (
        "corpora, one core",
        ("what", "median (min - max)"),
        [*in_child(args.threads, convert, args.repeats), imported],
    )


SECTIONS = {
    "params": params,
    "loss": loss,
    **{s: partial(timings, section=s) for s in CASES},
    "step": step,
    "memory": memory,
    "data": corpus,
    "start": start,
}

# ----------------------------------------------------------------------------------------------------------------------
# python bench.py


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def section_names(text):
    for name in text.split(","):
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"unknown section {name!r}; known: {', '.join(SECTIONS)}")
    return text.split(",")


def machine(threads):
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    cpu = cpu[1] if cpu else platform.processor() or platform.machine()
    malloc = " ".join(f"{variable}={value}" for variable, value in KEEP_MEMORY.items())
    return (
        f"{cpu}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}, threads: {threads}. "
        f"Timed with {malloc} except where it says default allocator."
    )


def main():
    description, _, notes = __doc__.partition("\n\n")
    parser = Parser(description=description, epilog=notes)
    parser.add_argument("--sections", type=section_names, default=SECTIONS, metavar="A,B", help="default: all of them")
    threads = "threads of torch; more than there are free cores can be far slower than one (default: %(default)s)"
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help=threads)
    repeats = "rounds to time, at least, after 2 to warm up (default: %(default)s)"
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help=repeats)
    parser.add_argument("--large", action="store_true", help="the untrained loss at 253m too: 2 GB, half a minute")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the output to FILE, which must be new")
    args = parser.parse_args()
    with explain(f"create {args.out}"):
        out = args.out.open("x") if args.out else None

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
    command_line(main)
