"""Speed of the models and their kernels, beside peers where they are installed, as Markdown tables and JSON.

    python bench.py                                     with CUDA the GPU part, under four minutes; else the CPU's
    python bench.py --sections train,scan --threads 2   two sections, with two threads
    python bench.py --device cpu                        the CPU part, a few minutes, on any machine

CPU        train   a training step of every model         scan   the scans alone, against the copy bandwidth
           born    Born attention's forms over lengths    phase  phase memory
           tasks   a step of the models of csp.py         step   one generated token, at two contexts
           start   python train.py: time to its first step, and what a step waits for data
GPU        ceiling copy bandwidth and bf16 matrix rate, to which the other sections of the same run are compared
           scan    the scans at the paper's shape         born   Born attention and SDPA flash over lengths
           phase   phase memory, at the heads of PAM 100m train  training steps at 253m, and the break-even of QS 9.3
           Every section has a deadline, and what a section leaves of its time goes to the next. A row that fails, hangs
           or comes too late says so in one line. Training is that of train.py: bf16 autocast, float32 parameters,
           activation checkpointing, and the largest micro-batch that fits among 256, 128, ...
times      On the CPU candidates take turns in one process, in a new random order each round, so that the machine's drift and
           the caches' contents meet all of them alike. A time is the median over the rounds, and so is a ratio. On a GPU
           a time is the median of its own clock, with the caches flushed before each repetition.
allocator  By default glibc hands large tensors back to the system after every use, and page faults can cost half of a
           step. So on the CPU all is timed in a child process that keeps freed memory, and once more in a default one.
"""

import argparse
import gc
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import count, product
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep, strftime
from timeit import timeit

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import csp
import data
import kernels
import tasks
from data import InputError, Parser, command_line, explain
from report import provenance
from sample import MODELS, PAM_SIZES, parse_spec, pick_device

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}  # glibc reads them at start
V, D, L, N = 256, 128, 2, 16  # of the training step
TOKENS = 2**14  # of an attention case
CONTEXTS = (128, 4096)  # tokens before the generated one
# Of the GPU part, QS 5.7 and table 4. MICRO: the share of one of the paper's four devices in its 1,024 sequences.
HEADS, E, MICRO = 16, 2048, 256
SECONDS = {"ceiling": 25, "scan": 40, "born": 30, "phase": 20, "train": 110}  # 225: starting takes a few more
PAPER_STEPS = {"hmamba": 1 / 3, "htransformer": 1 / 2}  # QS 9: steps to a loss, divided by the real twin's
START = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"  # after a fork CUDA could not be used
FLUSH = 2**31  # bytes: far more than a cache, and half a millisecond or more
progress = partial(tqdm, leave=False, disable=None)  # None: only on a terminal

# ----------------------------------------------------------------------------------------------------------------------
# Cases: a function of a shape returns one repetition of its work, as a function without arguments


def training_step(model, B, T, logits=None):
    """The loss is the second thing that the model returns, or is computed from logits(what it returns)."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    idx = torch.randint(V, (B, T + 1))
    x, y = idx[:, :-1].contiguous(), idx[:, 1:].contiguous()

    def repetition():
        loss = F.cross_entropy(logits(model(x)).flatten(0, 1), y.flatten()) if logits else model(x, y)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return repetition


def train_ours(spec, B, T):
    model_class, config = parse_spec(spec, "tiny", V)
    return training_step(model_class(config), B, T)


def train_mambapy(B, T):
    # mambapy.lm also imports its Mamba-2, which needs CUDA packages that we do not.
    stub = type("stub", (), {"Mamba2": None, "Mamba2Config": type("Mamba2Config", (), {})})
    sys.modules.setdefault("mambapy.mamba2", stub)
    from mambapy import lm

    model = lm.LM(lm.MambaConfig(d_model=D, n_layers=L, d_state=N, pscan=True), vocab_size=V)
    return training_step(model, B, T, lambda out: out)


def train_transformers(B, T):
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import mambapy.pscan  # noqa: F401  (without it transformers would run a far slower loop)
    import transformers as hf

    sizes = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "state_size": N}
    model = hf.MambaForCausalLM(hf.MambaConfig(**sizes, use_cache=False, use_mambapy=True))
    return training_step(model, B, T, lambda out: out.logits)


def train_nanogpt(B, T):
    from model import GPT, GPTConfig

    config = GPTConfig(block_size=T, vocab_size=V, n_layer=L, n_head=4, n_embd=D, bias=False)
    return training_step(GPT(config), B, T)


class Gradients:
    """Forward and backward of function(*leaves), with an upstream gradient that is already there."""

    def __init__(self, function, *leaves):
        self.function, self.leaves = function, [x.requires_grad_() for x in leaves]
        self.upstream = torch.randn_like(self.forward().detach())

    def forward(self):
        """As in training: keeps what a backward would need."""
        return self.function(*self.leaves)

    def __call__(self):
        return torch.autograd.grad(self.forward(), self.leaves, self.upstream)

    def traffic(self, backward):
        """Bytes that have to move. The forward reads the inputs and writes the output; the backward reads the inputs again,
        from which it can recompute the rest, and the output's gradient, and writes the inputs' gradients."""
        inputs, output = sum(x.nbytes for x in self.leaves), self.upstream.nbytes
        return inputs + output + backward * (inputs + output + inputs)


def uniform(low, high, *shape):
    return torch.empty(*shape).uniform_(low, high)


def scan_complex(B, C, T, backend=None):
    scan = lambda *x: kernels.complex_scan(*x, backend=backend)[0]  # noqa: E731
    return Gradients(scan, uniform(0.9, 1, B, T, C).log(), uniform(-3, 3, B, T, C), torch.randn(B, T, C, 2))


def scan_cayley(B, T, H, N, dtype=torch.float32):
    delta, dt, gate = torch.randn(B, T, H, N), 0.1 * torch.rand(B, T, H), torch.randn(B, T, H, N)
    omega, b = torch.logspace(-1, 1, N).repeat(H, 1), torch.randn(B, T, H, N, 2)
    delta, dt, gate, b = (x.to(dtype) for x in (delta, dt, gate, b))
    return Gradients(lambda *x: kernels.cayley_scan(*x)[0], delta, dt, gate, omega, b)


def scan_real(B, C, T, fla=False):
    if fla:
        from fla.ops.hgrn import chunk_hgrn
    scan = (lambda ld, b: chunk_hgrn(b, ld)[0]) if fla else (lambda ld, b: kernels.complex_scan(ld, None, b)[0])
    return Gradients(scan, uniform(0.9, 1, B, T, C).log(), torch.randn(B, T, C))


def scan_accelerated(B, C, T, module="ref", from_angles=False):
    """accelerated_scan is given exp(log_decay + i theta); `from_angles` computes it too, as complex_scan does."""
    scan = import_module(f"accelerated_scan.{module}").scan
    log_decay, theta = uniform(0.9, 1, B, C, T).log(), uniform(-3, 3, B, C, T)
    b = torch.randn(B, C, T, dtype=torch.complex64)
    if from_angles:
        return Gradients(lambda ld, th, b: scan(torch.polar(ld.exp(), th), b), log_decay, theta, b)
    return Gradients(scan, torch.polar(log_decay.exp(), theta), b)


def scan_selective(B, T, E, N, backend=None):
    A = -torch.arange(1, N + 1).float().repeat(E, 1)
    inputs = torch.randn(B, T, E), 0.1 * torch.rand(B, T, E), A, torch.randn(B, T, N), torch.randn(B, T, N)
    return Gradients(lambda *x: kernels.selective_scan(*x, backend=backend)[0], *inputs)


def attend_born(B, H, T, method):
    q, k, v = (torch.randn(B, H, T, N, 2) for _ in range(3))  # float32, as H-Transformer hands them over
    return Gradients(lambda *x: kernels.born_attention(*x, method=method)[0], q, k, v)


def attend_softmax(B, H, T, flash=False):
    attention = partial(F.scaled_dot_product_attention, is_causal=True)
    dtype = torch.bfloat16 if flash else torch.float32
    attention = sdpa_kernel(SDPBackend.FLASH_ATTENTION)(attention) if flash else attention
    return Gradients(attention, *(torch.randn(B, H, T, 64, dtype=dtype) for _ in range(3)))


def remember(B, T, H, D, real=False, backend=None):
    pair = () if real else (2,)
    inputs = *(torch.randn(B, H, T, D, *pair) for _ in range(3)), -F.softplus(torch.randn(B, H, T) - 3)
    return Gradients(lambda *x: kernels.phase_memory(*x, real=real, backend=backend)[0], *inputs)


def remember_fla(B, T, H, D, dtype=None):
    """Simple gated linear attention of flash-linear-attention: its chunked kernel, or without a dtype its PyTorch form."""
    inputs = [torch.randn(B, T, H, D, dtype=dtype) for _ in range(3)]
    inputs.append(-F.softplus(torch.randn(B, T, H) - 3))
    if dtype:
        from fla.ops.simple_gla import chunk_simple_gla

        return Gradients(lambda *x: chunk_simple_gla(*x, scale=1.0)[0], *inputs)
    from naive import naive_chunk_simple_gla

    return Gradients(lambda *x: naive_chunk_simple_gla(*x)[0], *inputs)


def in_pieces(make, T):
    """Sequences of T tokens one after another, TOKENS in all: equal times are equal times a token."""
    repetition = make(T=T)
    return lambda: [repetition() for _ in range(TOKENS // T)]


def matmul(n):
    x, y = torch.randn(2, n, n, dtype=torch.bfloat16)
    return lambda: x @ y


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
    model = tasks.build(name, "parity", seeds)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def repetition():
        x, y = tasks.batches("parity", seeds, 64, 16, (1, next(steps)), "cpu")
        tasks.update(model, optimizer, tasks.losses(model, x, y, generators))

    return repetition


COPY = "memory copy, 256 MB"
MAMBAS = {  # without our SwiGLU branch ours is the same model as the peers'
    "nanoHilbert Mamba, mlp=0": partial(train_ours, f"mamba:D={D}:L={L}:N={N}:mlp=0"),
    "nanoHilbert H-Mamba": partial(train_ours, f"hmamba:D={D}:L={L}:N={N}"),
    "mambapy, pscan": train_mambapy,
    "transformers, use_mambapy=True": train_transformers,
}
TRANSFORMERS = {
    "nanoHilbert Transformer, mlp=512": partial(train_ours, f"transformer:D={D}:L={L}:head=32:mlp=512"),
    "nanoHilbert H-Transformer": partial(train_ours, f"htransformer:D={D}:L={L}:N={N}"),
    "nanoGPT": train_nanogpt,
}
MEMORIES = {"nanoHilbert PAM": partial(train_ours, "pam"), "nanoHilbert SAM": partial(train_ours, "sam")}
BORN = {
    "Born attention, quadratic": partial(in_pieces, partial(attend_born, 1, 2, method="quadratic")),
    "Born attention, linear": partial(in_pieces, partial(attend_born, 1, 2, method="linear")),
    "softmax, width 64 (scaled_dot_product_attention)": partial(in_pieces, partial(attend_softmax, 1, 2)),
}
COMPLEX = {
    "nanoHilbert complex_scan": scan_complex,
    "accelerated_scan.ref.scan, complex64, a given": scan_accelerated,
    "accelerated_scan.ref.scan, from log_decay and theta": partial(scan_accelerated, from_angles=True),
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
LENGTHS = {
    "real (SAM)": partial(in_pieces, partial(remember, 1, H=2, D=64, real=True)),
    "complex (PAM)": partial(in_pieces, partial(remember, 1, H=2, D=64)),
}
STEPS = {f"{name} after {T} tokens": partial(generate, name, T) for name in MODELS for T in CONTEXTS}
SIZES = f", V{V} D{D} L{L} N{N}: forward, backward, AdamW"
CASES = {  # section: {title: (candidates; shape; float32 numbers that have to move, each of them once in both passes)}
    "train": {
        **{f"training step, B{B} T{T}{SIZES}": (MAMBAS, (B, T), None) for B, T in ((2, 128), (16, 256))},
        f"Transformer training step, B2 T128{SIZES}": (TRANSFORMERS, (2, 128), None),
        "PAM training step, B2 T128, size tiny: forward, backward, AdamW": (MEMORIES, (2, 128), None),
    },
    "scan": {
        # log_decay and theta are 1 number per element, b and h 2; each has a gradient
        "complex_scan, B2 C256 T512: forward, backward": (COMPLEX, (2, 256, 512), 2 * (2 * 256 * 512) * (1 + 1 + 2 + 2)),
        # u, dt and y are E numbers per token, B and C N, together 800; and A
        "selective_scan, B16 T256 E256 N16: forward, backward": (
            SELECTIVE, (16, 256, 256, 16), 2 * (16 * 256 * 800 + 256 * 16),
        ),
    },
    "born": {
        f"two heads, {TOKENS // T} times {T} tokens, N{N}: forward, backward": (BORN, (T,), None)
        for T in (256, 1024, 2048, 4096, TOKENS)
    },
    "tasks": {
        "task models, five seeds of 64 sequences of length 16 together: data, forward, backward, clipping, Adam": (
            {name: partial(train_task, name) for name in csp.MODELS}, (), None,
        ),
    },
    "phase": {
        "phase memory, B2 T512 H4 D64: forward, backward": (PHASE, (2, 512, 4, 64), None),
        **{
            f"phase memory, H2 D64, {TOKENS // T} times {T} tokens: forward, backward": (LENGTHS, (T,), None)
            for T in (1024, 4096, TOKENS)
        },
    },
    "step": {"one generated token, size tiny": (STEPS, (), None)},
}  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------------
# The CPU part. A section yields tables as (title, columns, rows)


def in_child(threads, function, *args, keep_memory):
    """function(*args) in a fresh process: nothing else in its memory, and an allocator that is set before it starts."""
    for variable, value in KEEP_MEMORY.items():
        os.environ.pop(variable, None)
        if keep_memory:
            os.environ[variable] = value
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        return pool.submit(function, *args).result()


def reason(e):
    """Why there is no measurement, in a line."""
    if isinstance(e, ImportError):
        package = (e.name or str(e)).partition(".")[0].replace("_", "-")
        where = {"model": "nanoGPT", "naive": "fla/ops/simple_gla of flash-linear-attention"}.get(package)
        if where:
            return f"not found (put the folder {where} on PYTHONPATH)"
        return f"not installed (pip install {'flash-linear-attention' if package == 'fla' else package})"
    return f"failed: {' '.join(f'{type(e).__name__}: {e}'.split())[:160]}"


def take_turns(section, title, repeats):
    """name -> seconds of each round, or why there are none."""
    candidates, shape, _ = CASES[section][title]
    found, ready, rng = {}, {}, random.Random(0)
    for name, make in candidates.items():
        torch.manual_seed(0)
        try:
            ready[name] = make(*shape)
            ready[name]()
        except Exception as e:  # noqa: BLE001  whatever it is, the others are timed
            ready.pop(name, None)
            found[name] = reason(e)

    def one_round():
        return {name: timeit(ready[name], number=1) for name in rng.sample(list(ready), len(ready))}

    enough = int(3 / sum(one_round().values()))  # short work is noisy: go on for three seconds, at most 100 rounds
    rounds = [one_round() for _ in progress(range(max(repeats, min(100, enough))), desc=title, unit="round")]
    return {name: found.get(name) or [seconds[name] for seconds in rounds] for name in candidates}


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
        columns = ["candidate", "ms (min - max)", "time / first", "ms, default allocator", "time / first"]
        yield title, columns + ["GB/s of necessary traffic", "of copy bandwidth"] * bool(numbers), rows


def start(args):
    batch, seq = 16, 256  # of size tiny
    corpus = data.load("stdlib", seq)  # so that preparing it, once for ever, is not timed
    tokens, first, speed = corpus.split("train"), None, None
    with TemporaryDirectory() as folder:
        log, begin = Path(folder) / "run/log.jsonl", perf_counter()
        command = [sys.executable, Path(__file__).with_name("train.py"), "--device", "cpu", "--out", log.parent]
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}  # of torchrun
        env["OMP_NUM_THREADS"] = str(args.threads)
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
            while speed is None and process.poll() is None:
                sleep(0.01)
                whole_lines = log.read_text().split("\n")[:-1] if log.exists() else []
                steps = [event for event in map(json.loads, whole_lines) if event["event"] == "train"]
                first = first or (perf_counter() - begin if steps else None)
                speed = steps[1]["tok_s"] if len(steps) > 1 else None  # of steps 2 to 10
            process.kill()
    if speed is None:
        raise InputError("python train.py ended before its tenth step")

    def read(step):
        data.get_windows(tokens, seq, data.train_index(data.num_windows(tokens, seq), 1, step, batch))

    wait = median(timeit(partial(read, step), number=1) for step in range(100))
    rows = [
        ("from the command to the end of the first step", f"{first:.1f} s"),
        ("a step", f"{1e3 * batch * seq / speed:.0f} ms"),
        ("of which waiting for data", f"{1e3 * wait:.2f} ms, {100 * wait * speed / (batch * seq):.2f} %"),
    ]
    yield "python train.py, size tiny, data stdlib once prepared, default allocator", ("what", "time"), rows


# ----------------------------------------------------------------------------------------------------------------------
# The GPU part. A job (cells, function, *arguments) becomes a row: the cells, then what the function measured. It runs in a
# child process, which can be killed, as a kernel that hangs cannot be interrupted, and which CUDA errors may spoil.


def timed(repetition, device):
    if device.type != "cuda":
        return timeit(repetition, number=1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    repetition()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def measure(repetition, device, seconds=0.2, least=5, flush=True):
    """Seconds of each repetition: at least `least`, at most 100, about `seconds` in all. With `flush` a GPU writes FLUSH
    bytes before each: that empties its caches, and lets the CPU get ahead, so that launching kernels is not timed."""
    buffer = torch.empty(FLUSH if flush and device.type == "cuda" else 0, dtype=torch.int8, device=device)
    times = []
    while len(times) < least or (len(times) < 100 and sum(times) < seconds):
        buffer.zero_()
        times.append(timed(repetition, device))
    return times


def operation_job(device, make, shape, backward, work):
    """Times what make(*shape) returns, or without `backward` its forward; the work is given, or the bytes it has to move."""
    with device:
        made = make(*shape)
    repetition = made if backward else made.forward
    repetition(), repetition()  # the first may compile
    return {"seconds": measure(repetition, device), "work": work or made.traffic(backward)}


def largest_micro(step, micro):
    """The first of micro, micro / 2, ... whose step does not run out of memory."""
    while True:
        try:
            step(micro)
            return micro
        except RuntimeError as e:
            if micro == 1 or not re.search("out of memory|allocate", str(e)):
                raise
        gc.collect()
        torch.cuda.empty_cache()  # outside of the except clause, which keeps the tensors of the step alive
        micro //= 2


def train_job(device, name, size, seq, compiled, micro=MICRO):
    model_class, config = parse_spec(name, size, data.GPT2_VOCAB if size in PAM_SIZES else V)
    gc.collect()  # of the model before
    with device:
        model = model_class(config).train()
    model.checkpointing = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(micro):
        optimizer.zero_grad(set_to_none=True)
        idx = torch.randint(config.V, (micro, seq + 1), device=device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    micro = largest_micro(step, micro)
    if compiled:  # only now, as every size would be compiled; the layers share one graph
        torch.compiler.reset()
        for layer in model.layers:
            layer.compile()
        micro = largest_micro(step, micro)
    cuda, tokens = device.type == "cuda", micro * seq
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = measure(partial(step, micro), device, seconds=3, least=2, flush=False)
    return {"seconds": seconds, "micro": micro, "tokens": tokens, "work": tokens * model.flops_per_token(seq),
            "memory": torch.cuda.max_memory_allocated(device) / 1e9 if cuda else None}  # fmt: skip


def attempt(function, *arguments):
    """In the child: what a job returns, or why it does not in a line; and whether this process can go on."""
    torch.manual_seed(0)
    try:
        return function(*arguments), True
    except Exception as e:  # noqa: BLE001  whatever it is, the other jobs follow
        return reason(e), not re.search(r"CUDA error|Triton Error \[CUDA\]", str(e))  # after these nothing works there
    finally:
        torch.cuda.empty_cache()


def results(jobs, deadline, patience):
    """What becomes of each job, in order: what it returned, or a line. None may take more than `patience` seconds, and all
    end at `deadline`; after a child that was killed or died, another one goes on with the rest."""
    context, pool = get_context(START), None
    if START == "forkserver":
        context.set_forkserver_preload(["torch"])
    try:
        for job in jobs:
            if perf_counter() >= deadline:
                yield "left out: deadline"
                continue
            if not pool:  # Ctrl-C is for the parent, which ends the child
                pool = ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
                child = pool.submit(os.getpid).result()
            left = deadline - perf_counter()
            try:
                result, usable = pool.submit(attempt, *job).result(max(0, min(patience, left)))
            except TimeoutError:
                late = f"no result within {patience:g} s" if patience < left else "deadline"
                result, usable = f"left out: {late}", False
            except BrokenProcessPool:
                result, usable = "failed: its process died", False
            if not usable:
                pool = end_pool(pool, child)
            yield result
    finally:
        if pool:
            end_pool(pool, child)


def end_pool(pool, child):
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # a kernel that hangs cannot be interrupted
    pool.shutdown(cancel_futures=True)


def rows_of(jobs, args, section, cells):
    """A row per job, as soon as it is there: its first cells, then cells(result, *first cells), or why there are none."""
    calls = [(function, args.device, *arguments) for _, function, *arguments in jobs]
    for result, (first, *_) in zip(results(calls, args.deadline, SECONDS[section] / 2), jobs):
        yield [*first, *([result] if isinstance(result, str) else cells(result, *first))]


def times_and_rate(result, unit):
    """Median, smallest and largest time in ms, and work per second in the unit."""
    seconds = result["seconds"]
    rate = result["work"] / median(seconds) / {"GB/s": 1e9, "TFLOP/s": 1e12}[unit]
    return [1e3 * median(seconds), 1e3 * min(seconds), 1e3 * max(seconds), rate]


def operations(args, section):
    cases = sorted(OPERATIONS[section](), key=lambda case: case[0].startswith("fla"))  # last: importing it takes long
    jobs = [((name, shape, passes, unit), operation_job, make, arguments, passes != "forward", amount)
            for name, shape, make, arguments, unit, work in cases for passes, amount in work.items()]  # fmt: skip

    def cells(result, name, shape, passes, unit):
        values = times_and_rate(result, unit)
        if section == "ceiling":
            args.ceiling[unit] = values[-1]
        return [*values, values[-1] / args.ceiling[unit] if unit in args.ceiling else None]

    columns = "operation", "shape", "passes", "unit", "ms", "min", "max", "rate", "of ceiling"
    yield f"GPU: {section}", columns, rows_of(jobs, args, section, cells)


def ceiling_cases():
    yield "copy", "256 MB", copy, (), "GB/s", {"-": 2 * 2**28}  # it reads and writes
    yield "bf16 matrix product", "8192", matmul, (8192,), "TFLOP/s", {"-": 2 * 8192**3}


def scan_cases():
    T, C = 1024, HEADS * N
    both = dict.fromkeys(("forward", "forward, backward"))  # None: the bytes of Gradients.traffic
    for B in (8, 32):
        heads, complex_, real = f"B{B} T{T} H{HEADS} N{N}", f"B{B} T{T} C{C}", f"B{B} T{T} C{2 * C}"
        yield "complex_scan", complex_, scan_complex, (B, C, T), "GB/s", both
        yield "cayley_scan", heads, scan_cayley, (B, T, HEADS, N), "GB/s", both
        yield "cayley_scan, bf16", heads, scan_cayley, (B, T, HEADS, N, torch.bfloat16), "GB/s", both
        yield "selective_scan", f"B{B} T{T} E{E} N{N}", scan_selective, (B, T, E, N), "GB/s", both
        yield "complex_scan, theta=None", real, scan_real, (B, 2 * C, T), "GB/s", both  # a state of as many numbers
        yield "accelerated_scan.complex.scan, a given", complex_, scan_accelerated, (B, C, T, "complex"), "GB/s", both
        yield "fla chunk_hgrn", real, scan_real, (B, 2 * C, T, True), "GB/s", both


def flops(one, forward, backward):
    return {"forward": one * forward, "forward, backward": one * (forward + backward)}


def born_cases():
    for B, T in ((8, 1024), (32, 1024), (16, 2048), (8, 4096), (4, 8192), (2, 16384)):
        shape, tokens = f"B{B} H{HEADS} T{T}", B * HEADS * T
        # For half of the pairs a product 2N wide each for the two parts of the score, and for the value; the backward
        # repeats the first two and has two for each of the three. Softmax has 2 products, 64 wide, and then 5.
        quadratic, softmax = flops(tokens * T / 2 * 2 * 2 * N, 3, 8), flops(tokens * T / 2 * 2 * 64, 2, 5)
        # The N^2 features of k and of q meet a state of width 2N+1; inside a chunk of 64 it is as above.
        linear = flops(tokens * (2 * 2 * N**2 * (2 * N + 1) + 64 / 2 * 2 * 2 * N * 3), 1, 2)
        yield "born_attention, quadratic", shape, attend_born, (B, HEADS, T, "quadratic"), "TFLOP/s", quadratic
        yield "born_attention, linear", shape, attend_born, (B, HEADS, T, "linear"), "TFLOP/s", linear
        yield "SDPA flash, width 64, bf16", shape, attend_softmax, (B, HEADS, T, True), "TFLOP/s", softmax


def phase_cases():
    for B, T, H, D in ((8, 1024, 6, 64), (32, 1024, 6, 64), (2, 16384, 6, 64)):
        # PAM eqs. 6-7: a number of S takes part in an outer product and in a read; 4 products for a complex one
        shape, real = f"B{B} T{T} H{H} D{D}", B * T * H * D**2 * 2 * 2
        yield "phase_memory, complex (PAM)", shape, remember, (B, T, H, D), "TFLOP/s", flops(4 * real, 1, 2)
        yield "phase_memory, real (SAM)", shape, remember, (B, T, H, D, True), "TFLOP/s", flops(real, 1, 2)
        for dtype in (torch.float32, torch.bfloat16):
            name = f"fla chunk_simple_gla, {str(dtype)[6:]}"
            yield name, shape, remember_fla, (B, T, H, D, dtype), "TFLOP/s", flops(real, 1, 2)


OPERATIONS = {"ceiling": ceiling_cases, "scan": scan_cases, "born": born_cases, "phase": phase_cases}


def train(args):
    names, speed, rows = list(MODELS), {}, []
    pairs = list(product(zip(names[::2], names[1::2]), ("eager", "compiled")))
    jobs = []
    for pair, blocks in pairs:
        for name in pair:
            size, seq = ("253m", 1024) if "253m" in MODELS[name].SIZES else ("100m", 512)  # QS table 4, PAM table 2
            jobs.append(((name, size, blocks), train_job, name, size, seq, blocks == "compiled"))

    def cells(result, name, size, blocks):
        *ms, rate = times_and_rate(result, "TFLOP/s")
        speed[name, blocks] = tokens = result["tokens"] / median(result["seconds"])
        peak = args.ceiling.get("TFLOP/s")
        return [result["micro"], *ms, tokens, peak and rate / peak, result["memory"]]

    columns = "model", "size", "blocks", "micro-batch", "ms", "min", "max", "tokens/s", "MFU", "GB at peak"
    yield "GPU: training steps, bf16", columns, rows_of(jobs, args, "train", cells)
    for pair, blocks in pairs:
        (ours, theirs), steps = (MODELS[name].__name__ for name in pair), PAPER_STEPS.get(pair[0])
        if all((name, blocks) in speed for name in pair):
            ratio = speed[pair[0], blocks] / speed[pair[1], blocks]
            need = f"{ours} must need fewer than {100 * ratio:.1f} % of {theirs}'s steps"
            rows.append([need, blocks, ratio, steps, steps and steps / ratio])
        else:
            rows.append([f"{ours} and {theirs}", blocks, "not both measured"])
    columns = "to be the faster one", "blocks", "ratio of tokens/s", "the paper's ratio of steps", "time at that ratio"
    yield "GPU: break-even (QS 9.3)", columns, rows


CPU_SECTIONS = {**{s: partial(timings, section=s) for s in CASES}, "start": start}
GPU_SECTIONS = {**{s: partial(operations, section=s) for s in OPERATIONS}, "train": train}

# ----------------------------------------------------------------------------------------------------------------------
# python bench.py


def machine(args):
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    cpu = cpu[1] if cpu else platform.processor() or platform.machine()
    text = f"{cpu}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}"
    if args.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(args.device)
        return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}; {text}"
    malloc = " ".join(f"{variable}={value}" for variable, value in KEEP_MEMORY.items())
    return f"{text}, threads: {args.threads}. Timed with {malloc} except where it says default allocator."


def cell(x):
    if x is None or isinstance(x, str):
        return x or "-"
    return f"{x:,.0f}" if isinstance(x, int) or x >= 1000 else f"{x:.3g}"


def write(tables, document, out):
    """Prints tables as Markdown, each row as soon as it is there. `out`, if given, gets the same, and `document`, which
    gathers it, goes beside it as JSON, whole after every row."""

    def say(line):
        for file in filter(None, (sys.stdout, out)):
            print(line, file=file, flush=True)

    def say_row(cells, width):
        say("| " + " | ".join([*map(cell, cells), *[""] * (width - len(cells))]) + " |")

    say(document["machine"])
    for title, columns, rows in tables:
        say(f"\n### {title}\n")
        say_row(columns, len(columns))
        say_row(["---"] * len(columns), len(columns))
        document["tables"].append({"title": title, "columns": columns, "rows": []})
        for cells in rows:
            say_row(cells, len(columns))
            document["tables"][-1]["rows"].append(cells)
            if out:
                data.replace_file(Path(out.name).with_suffix(".json"), lambda f: f.write(json.dumps(document).encode()))


def tables(args, sections, names):
    for name in names:
        args.deadline += SECONDS.get(name, 0)
        yield from sections[name](args)


def main():
    description, _, notes = (__doc__ or "").partition("\n\n")  # python -OO has none
    parser = Parser(description=description, epilog=notes)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    parser.add_argument("--sections", metavar="A,B", help="of the CPU or the GPU part (default: all of them)")
    threads = "CPU: threads of torch; more than there are free cores can be far slower than one (default: %(default)s)"
    parser.add_argument("--threads", type=int, default=1, metavar="N", help=threads)
    repeats = "CPU: rounds to time, at least, after 2 to warm up (default: %(default)s)"
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help=repeats)
    out = "also write the output to FILE, which must be new, and as JSON beside it (CUDA: default bench-DATE-TIME.md)"
    parser.add_argument("--out", metavar="FILE", help=out)
    args = parser.parse_args()
    args.device, args.ceiling, args.deadline = pick_device(args.device), {}, perf_counter()
    cuda = args.device.type == "cuda"
    sections = GPU_SECTIONS if cuda else CPU_SECTIONS
    names = args.sections.split(",") if args.sections else list(sections)
    for name in names:
        if name not in sections:
            raise InputError(f"unknown section {name!r}; known: {', '.join(sections)} (see bench.py --help)")
    if min(args.threads, args.repeats) < 1:
        raise InputError("--threads and --repeats must be at least 1")
    try:
        kernels.check_backend()
    except ValueError as e:
        raise InputError(str(e)) from None
    path = args.out or (strftime("bench-%Y%m%d-%H%M%S.md") if cuda else None)
    out = None
    if path:
        path = Path(path).expanduser()
        both = path, path.with_suffix(".json")
        for file in both:
            if file.exists() or path.suffix == ".json":
                raise InputError(f"--out {path}: " + (f"{file} exists" if file.exists() else "that is the JSON's name"))
        with explain(f"create {path}"):
            out = path.open("x", encoding="utf-8")
    document = {"machine": machine(args), "git": provenance(torch.device("cpu"), 1)["git"], "tables": []}
    write(tables(args, sections, names), document, out)


if __name__ == "__main__":
    command_line(main)
