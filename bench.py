"""Speed of the models and their kernels, beside peers where they are installed, as Markdown tables.

    python bench.py                                     all sections, on a GPU if there is one
    python bench.py --sections train,scan --threads 2   two sections, with two threads
    python bench.py --device cpu --out cpu.md           on the CPU, a few minutes; also into a file

ceiling    copy bandwidth and the rate of matrix products, to which the later sections of the same run are compared
scan       the scans of H-Mamba, CSP and Mamba         born   Born attention's forms and softmax attention over lengths
phase      phase memory of PAM and SAM                 train  a training step
tasks      a training step of the models of csp.py     step   one generated token, at two contexts
GPU        the shapes of the papers, and training at 253m as train.py trains: bf16 autocast, float32 parameters,
           checkpointing. A model is the faster one if the steps that it needs, divided by its twin's, are fewer than
           1 / (time / first): QS 9.3, where the paper has 1/3 for H-Mamba and 1/2 for H-Transformer.
times      Candidates take turns in one process, in a new random order each round, so that drift of the machine and the
           contents of its caches affect all alike. Times and ratios are medians over the rounds. A GPU is timed by its
           own events, its caches flushed before each repetition. A row that fails says why in a line.
work       Scans: bytes that have to move. Others: floating-point operations, recomputation not counted.
allocator  By default glibc returns large tensors to the system after every use, and page faults can take half of a
           step, most of it in the peers. So each section runs in a process that keeps freed memory, as train.py does.
peers      mambapy, transformers, accelerated-scan and flash-linear-attention (fla) by pip; on PYTHONPATH the folder of
           nanoGPT (model), and fla/ops/simple_gla of flash-linear-attention (naive).
"""

import gc
import os
import platform
import random
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib import import_module
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from timeit import timeit

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import csp
import data
import kernels
import tasks
from data import InputError, Parser, command_line, explain
from report import markdown, provenance
from sample import MODELS, PAM_SIZES, parse_spec, pick_device, unknown

V, D, L, N = 256, 128, 2, 16  # of the training step on a CPU; N also of the operations
CONTEXTS = (128, 4096)  # tokens before the generated one
UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
FLUSH = 2**31  # bytes that empty a GPU's caches: writing them takes half a millisecond or more

# ----------------------------------------------------------------------------------------------------------------------
# Work: functions of a shape that return one repetition, a function without arguments. Tensors are made on torch's
# default device.


def training_step(model, B, T, vocab_size=V, logits=None):
    """logits: function of what a peer's model returns. None: the model takes targets and returns its loss second."""
    device = torch.get_default_device().type
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, fused=device == "cuda")
    idx = torch.randint(vocab_size, (B, T + 1))
    x, y = idx[:, :-1].contiguous(), idx[:, 1:].contiguous()

    def repetition():
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(logits(model(x)).flatten(0, 1), y.flatten()) if logits else model(x, y)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if hasattr(model, "flops_per_token"):
        repetition.work = B * T * model.flops_per_token(T)
    return repetition


def train_ours(spec, B, T, size="tiny", compiled=False):
    model_class, config = parse_spec(spec, size, data.GPT2_VOCAB if size in PAM_SIZES else V)
    model = model_class(config)
    model.checkpointing = torch.get_default_device().type == "cuda"
    for layer in model.layers if compiled else ():
        layer.compile()
    return training_step(model, B, T, config.V)


def train_mambapy(B, T):
    # mambapy.lm also imports its Mamba-2, which needs CUDA packages that we do not.
    stub = type("stub", (), {"Mamba2": None, "Mamba2Config": type("Mamba2Config", (), {})})
    sys.modules.setdefault("mambapy.mamba2", stub)
    from mambapy import lm

    model = lm.LM(lm.MambaConfig(d_model=D, n_layers=L, d_state=N, pscan=True), vocab_size=V)
    return training_step(model, B, T, logits=lambda out: out)


def train_transformers(B, T):
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import mambapy.pscan  # noqa: F401  (without it transformers would run a far slower loop)
    import transformers as hf

    sizes = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "state_size": N}
    model = hf.MambaForCausalLM(hf.MambaConfig(**sizes, use_cache=False, use_mambapy=True))
    return training_step(model, B, T, logits=lambda out: out.logits)


def train_nanogpt(B, T):
    from model import GPT, GPTConfig

    config = GPTConfig(block_size=T, vocab_size=V, n_layer=L, n_head=4, n_embd=D, bias=False)
    return training_step(GPT(config), B, T)


def gradients(function, *leaves):
    """Forward and backward of function(*leaves), with an upstream gradient that is already there."""
    leaves = [x.requires_grad_() for x in leaves]
    upstream = torch.randn_like(function(*leaves))
    repetition = lambda: torch.autograd.grad(function(*leaves), leaves, upstream)  # noqa: E731
    # Bytes that have to move. The forward reads the inputs and writes the output; the backward reads the inputs
    # again, from which it can recompute the rest, and the output's gradient, and writes the inputs' gradients.
    repetition.work = 3 * sum(x.nbytes for x in leaves) + 2 * upstream.nbytes
    return repetition


def uniform(low, high, *shape):
    return torch.empty(*shape).uniform_(low, high)


def scan_complex(B, T, C, backend=None):
    scan = lambda *x: kernels.complex_scan(*x, backend=backend)[0]  # noqa: E731
    return gradients(scan, uniform(0.9, 1, B, T, C).log(), uniform(-3, 3, B, T, C), torch.randn(B, T, C, 2))


def scan_cayley(B, T, C, dtype=torch.float32):
    H = C // N
    delta, dt, gate = torch.randn(B, T, H, N), 0.1 * torch.rand(B, T, H), torch.randn(B, T, H, N)
    omega, b = torch.logspace(-1, 1, N).repeat(H, 1), torch.randn(B, T, H, N, 2)
    delta, dt, gate, b = (x.to(dtype) for x in (delta, dt, gate, b))
    return gradients(lambda *x: kernels.cayley_scan(*x)[0], delta, dt, gate, omega, b)


def scan_real(B, T, C, fla=False):
    if fla:
        from fla.ops.hgrn import chunk_hgrn
    scan = (lambda ld, b: chunk_hgrn(b, ld)[0]) if fla else (lambda ld, b: kernels.complex_scan(ld, None, b)[0])
    return gradients(scan, uniform(0.9, 1, B, T, C).log(), torch.randn(B, T, C))


def scan_accelerated(B, T, C, module, from_angles=False):
    """from_angles: exp(log_decay + i theta) is computed in each repetition, as in complex_scan, and not given."""
    scan = import_module(f"accelerated_scan.{module}").scan
    log_decay, theta = uniform(0.9, 1, B, C, T).log(), uniform(-3, 3, B, C, T)
    b = torch.randn(B, C, T, dtype=torch.complex64)
    if from_angles:
        return gradients(lambda ld, th, b: scan(torch.polar(ld.exp(), th), b), log_decay, theta, b)
    return gradients(scan, torch.polar(log_decay.exp(), theta), b)


def scan_selective(B, T, E, backend=None):
    A = -torch.arange(1, N + 1).float().repeat(E, 1)
    inputs = torch.randn(B, T, E), 0.1 * torch.rand(B, T, E), A, torch.randn(B, T, N), torch.randn(B, T, N)
    return gradients(lambda *x: kernels.selective_scan(*x, backend=backend)[0], *inputs)


def attend_born(B, T, H, method):
    q, k, v = (torch.randn(B, H, T, N, 2) for _ in range(3))  # float32, as H-Transformer hands them over
    return gradients(lambda *x: kernels.born_attention(*x, method=method)[0], q, k, v)


def attend_softmax(B, T, H, flash=False):
    attention = partial(F.scaled_dot_product_attention, is_causal=True)
    dtype = torch.bfloat16 if flash else torch.float32
    attention = sdpa_kernel(SDPBackend.FLASH_ATTENTION)(attention) if flash else attention
    return gradients(attention, *(torch.randn(B, H, T, 64, dtype=dtype) for _ in range(3)))


def remember(B, T, H, d, real=False, backend=None):
    pair = () if real else (2,)
    inputs = *(torch.randn(B, H, T, d, *pair) for _ in range(3)), -F.softplus(torch.randn(B, H, T) - 3)
    return gradients(lambda *x: kernels.phase_memory(*x, real=real, backend=backend)[0], *inputs)


def remember_fla(B, T, H, d, dtype=None):
    """Simple gated linear attention of flash-linear-attention: its chunked kernel, or without a dtype in PyTorch."""
    gates = -F.softplus(torch.randn(B, T, H) - 3)
    if dtype:
        attend = partial(import_module("fla.ops.simple_gla").chunk_simple_gla, scale=1.0)
    else:
        attend = import_module("naive").naive_chunk_simple_gla
    return gradients(lambda *x: attend(*x)[0], *(torch.randn(B, T, H, d, dtype=dtype) for _ in range(3)), gates)


def matmul(n, dtype):
    x, y = torch.randn(2, n, n, dtype=dtype)
    return lambda: x @ y


def copy(n):
    source, target = torch.zeros(2, n)
    return lambda: target.copy_(source)


def generate(name, context):
    model = MODELS[name](MODELS[name].SIZES["tiny"]).requires_grad_(False)
    state, idx_t = model(torch.randint(V, (1, context)))[2], torch.zeros(1, dtype=torch.long)
    return torch.no_grad()(lambda: model.step(idx_t, state))


def train_task(name):
    """Five seeds at once, and each step with its own data, as tasks.py trains."""
    seeds, steps, device = range(42, 47), count(1), torch.get_default_device()
    with torch.device("cpu"):
        model = tasks.build(name, "parity", seeds).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def repetition():
        x, y = tasks.batches("parity", seeds, 64, 16, (1, next(steps)), device)
        tasks.update(model, optimizer, tasks.losses(model, x, y, generators))

    return repetition


# ----------------------------------------------------------------------------------------------------------------------
# Sections: section(cuda), whether it is for a GPU, yields tables (title, unit, rows) with rows (name, function of a
# shape, the shape, work). The work is None where the repetition has it as an attribute, or where it is not known.


def ceiling(cuda):
    n, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    yield "memory copy, 256 MB", "GB/s", [("copy", copy, (2**26,), 2 * 2**28)]  # it reads and writes
    yield f"matrix product, {n} x {n}", "TFLOP/s", [(str(dtype).removeprefix("torch."), matmul, (n, dtype), 2 * n**3)]


def scan(cuda):
    C, E, peer = 256, 2048 if cuda else 256, "complex" if cuda else "ref"
    for B, T in ((8, 1024), (32, 1024)) if cuda else ((2, 512), (16, 256)):
        shape = B, T, C
        yield f"complex scans, B{B} T{T} C{C}", "GB/s", [
            ("complex_scan", scan_complex, shape, None),
            (f"cayley_scan, heads of {N}", scan_cayley, shape, None),
            ("cayley_scan, bf16", scan_cayley, (*shape, torch.bfloat16), None),
            (f"accelerated_scan.{peer}.scan, a given", scan_accelerated, (*shape, peer), None),
            (f"accelerated_scan.{peer}.scan, from log_decay and theta", scan_accelerated, (*shape, peer, True), None),
            ("time loop, complex128", scan_complex, (*shape, "reference"), None),
        ]
        shape = (B, T, 2 * C)  # a state of as many numbers
        yield f"real scans, B{B} T{T} C{2 * C}", "GB/s", [
            ("complex_scan, theta=None", scan_real, shape, None), ("fla chunk_hgrn", scan_real, (*shape, True), None),
        ]  # fmt: skip
        yield f"selective scan, B{B} T{T} E{E} N{N}", "GB/s", [
            ("selective_scan", scan_selective, (B, T, E), None),
            ("time loop, float64", scan_selective, (B, T, E, "reference"), None),
        ]


def born(cuda):
    large = (8, 1024), (32, 1024), (16, 2048), (8, 4096), (4, 8192), (2, 16384)
    small, H = ((64, 256), (16, 1024), (8, 2048), (4, 4096), (1, 16384)), 16 if cuda else 2
    for B, T in large if cuda else small:
        shape, tokens = (B, T, H), B * H * T
        # For half of the pairs a product 2N wide each for the two parts of the score, and for the value; the backward
        # repeats the first two and has two for each of the three. Softmax has 2 products, 64 wide, and then 5.
        quadratic, softmax = tokens * T / 2 * 2 * 2 * N * (3 + 8), tokens * T / 2 * 2 * 64 * (2 + 5)
        # The N^2 features of k and of q meet a state of width 2N+1; inside a chunk of 64 it is as above.
        linear = tokens * (2 * 2 * N**2 * (2 * N + 1) + 64 / 2 * 2 * 2 * N * 3) * (1 + 2)
        yield f"attention, B{B} H{H} T{T}: forward, backward", "TFLOP/s", [
            ("Born attention, quadratic", attend_born, (*shape, "quadratic"), quadratic),
            ("Born attention, linear", attend_born, (*shape, "linear"), linear),
            ("softmax, width 64 (scaled_dot_product_attention)", attend_softmax, (*shape, cuda), softmax),
        ]


def phase(cuda):
    large = (8, 6, 1024), (32, 6, 1024), (2, 6, 16384)
    small = (2, 4, 512), (16, 2, 1024), (4, 2, 4096), (1, 2, 16384)
    for B, H, T in large if cuda else small:
        # PAM eqs. 6-7: a number of S takes part in an outer product and in a read; 4 products for a complex one
        shape, real = (B, T, H, 64), B * T * H * 64**2 * 2 * 2 * (1 + 2)
        rows = [("phase_memory, real (SAM)", remember, (*shape, True), real)]
        rows += [("phase_memory, complex (PAM)", remember, shape, 4 * real)]
        rows += [("the same, the paper's O(T^2) form", remember, (*shape, False, "dual"), None)] * (T <= 1024)
        for dtype in (torch.float32, torch.bfloat16) if cuda else ():
            rows += [(f"fla chunk_simple_gla, real, {str(dtype)[6:]}", remember_fla, (*shape, dtype), real)]
        rows += [("fla naive_chunk_simple_gla, real", remember_fla, shape, real)] * (not cuda)
        yield f"phase memory, B{B} T{T} H{H} D64: forward, backward", "TFLOP/s", rows


def train(cuda):
    small = f"D={D}:L={L}"
    mambas = [  # without our SwiGLU branch ours is the same model as the peers'
        ("nanoHilbert Mamba, mlp=0", train_ours, (f"mamba:{small}:N={N}:mlp=0",)),
        ("nanoHilbert H-Mamba", train_ours, (f"hmamba:{small}:N={N}",)),
        ("mambapy, pscan", train_mambapy, ()),
        ("transformers, use_mambapy=True", train_transformers, ()),
    ]
    transformers = [
        ("nanoHilbert Transformer, mlp=512", train_ours, (f"transformer:{small}:head=32:mlp=512",)),
        ("nanoHilbert H-Transformer", train_ours, (f"htransformer:{small}:N={N}",)),
        ("nanoGPT", train_nanogpt, ()),
    ]
    memories = [(f"nanoHilbert {name}", train_ours, (name.lower(),)) for name in ("PAM", "SAM")]
    small = f"V{V} D{D} L{L} N{N}"
    tables = [(f"Mamba, {small}", mambas, (2, 128)), (f"Mamba, {small}", mambas, (16, 256)),
              (f"Transformer, {small}", transformers, (2, 128)), ("PAM, size tiny", memories, (2, 128))]  # fmt: skip
    if cuda:  # the sizes of QS table 4 and PAM table 2, and train.py's micro-batches
        tables = []
        for ours, twin in zip(*[iter(MODELS)] * 2):
            size, B, T = ("253m", 32, 1024) if "253m" in MODELS[ours].SIZES else ("100m", 8, 512)
            for blocks in ("eager", "compiled"):
                pair = [(name, train_ours, (name,)) for name in (twin, ours)]
                tables.append((f"{ours}, {size}, bf16, {blocks} blocks", pair, (B, T, size, blocks == "compiled")))
    for title, rows, (B, T, *shape) in tables:
        title += f", B{B} T{T}: forward, backward, AdamW"
        yield f"training step, {title}", "TFLOP/s", [(name, f, (*spec, B, T, *shape), None) for name, f, spec in rows]


def task_step(cuda):
    title = "task models, five seeds of 64 sequences of length 16 together: data, forward, backward, clipping, Adam"
    yield title, None, [(name, train_task, (name,), None) for name in csp.MODELS]


def token(cuda):
    rows = [(f"{name} after {T} tokens", generate, (name, T), None) for name in MODELS for T in CONTEXTS]
    yield "one generated token, size tiny", None, rows


SECTIONS = {"ceiling": ceiling, "scan": scan, "born": born, "phase": phase, "train": train, "tasks": task_step,
            "step": token}  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def timed(repetition, device):
    """Seconds. While a GPU's caches are flushed the CPU gets ahead, so that launching kernels is not timed."""
    if device.type != "cuda":
        return timeit(repetition, number=1)
    torch.empty(FLUSH, dtype=torch.int8, device=device).zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    repetition()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def take_turns(title, rows, device, repeats):
    """{name: (seconds of each round, work, bytes that it adds to a GPU's memory)}, or why there is no measurement."""
    found, ready, rng, cuda = {}, {}, random.Random(0), device.type == "cuda"
    gc.collect()  # the models of the table before
    for name, make, shape, work in rows:
        torch.manual_seed(0)
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        try:
            with device:
                repetition = make(*shape)
            repetition()
            memory = torch.cuda.max_memory_allocated(device) - before if cuda else None
            found[name], ready[name] = ([], work or getattr(repetition, "work", None), memory), repetition
        except Exception as e:  # noqa: BLE001  whatever it is, the others are timed
            missing = isinstance(e, ImportError)
            found[name] = f"{'not installed' if missing else f'failed: {type(e).__name__}'}: {data.one_line(e)}"

    def one_round():
        return {name: timed(ready[name], device) for name in rng.sample(list(ready), len(ready))}

    one_round()
    # Short work is noisy: it goes on for three seconds, at most 100 rounds.
    enough = int(3 / (sum(one_round().values()) or 1))
    for _ in data.progress(range(max(repeats, min(100, enough))), desc=title, unit="round", unit_scale=False):
        for name, seconds in one_round().items():
            found[name][0].append(seconds)
    return found


def measure(section, device, repeats):
    """(title, unit, what take_turns found) of each table of a section."""
    tables = SECTIONS[section](device.type == "cuda")
    return [(title, unit, take_turns(title, rows, device, repeats)) for title, unit, rows in tables]


def set_up(threads):
    torch.set_num_threads(threads)
    data.keep_memory()  # as train.py does


def in_child(threads, function, *args):
    """function(*args) in a fresh process."""
    with ProcessPoolExecutor(1, get_context("spawn"), set_up, (threads,)) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool:
            raise InputError("the process of a section ended: too many --threads, or out of memory") from None


# ----------------------------------------------------------------------------------------------------------------------
# python bench.py


def tables(args, names):
    """(title, columns, rows of cells) of each table of some sections."""
    ceilings, cuda = {}, args.device.type == "cuda"
    for section in names:
        for title, unit, found in in_child(args.threads, measure, section, args.device, args.repeats):
            columns = ["candidate", "ms (min - max)", "time / first"]
            columns += [unit, "of ceiling"] * bool(unit) + ["GB"] * cuda
            first, rows = None, []
            for name, result in found.items():
                if isinstance(result, str):
                    rows.append([name, result])
                    continue
                times, work, memory = result
                first = first or times
                ms = [1e3 * x for x in (median(times), min(times), max(times))]
                row = [name, "{:.2f} ({:.2f} - {:.2f})".format(*ms)]
                row += [f"{median(x / y for x, y in zip(times, first)):.2f}"]
                if unit and work:
                    rate = work / median(times) / UNITS[unit]
                    if section == "ceiling":
                        ceilings[unit] = rate
                    row += [f"{rate:.3g}", f"{rate / ceilings[unit]:.0%}" if unit in ceilings else "-"]
                elif unit:
                    row += ["-", "-"]
                rows.append(row + [f"{memory / 1e9:.2f}"] if cuda else row)
            yield title, columns, rows


def machine(args):
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    cpu = cpu[1] if cpu else platform.processor() or platform.machine()
    git = provenance(torch.device("cpu"), 1)["git"]
    text = f"{cpu}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}, revision {git}"
    if args.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(args.device)
        return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}; {text}"
    return f"{text}, threads: {args.threads}, freed memory kept"


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    parser.add_argument("--sections", metavar="A,B", default=",".join(SECTIONS), help="(default: %(default)s)")
    threads = "of torch; on a CPU more than there are free cores can be far slower than one (default: %(default)s)"
    parser.add_argument("--threads", type=int, default=1, metavar="N", help=threads)
    repeats = "rounds to time, at least, after 2 to warm up (default: %(default)s)"
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help=repeats)
    parser.add_argument("--out", metavar="FILE", help="also write the output to FILE, which must be new")
    args = parser.parse_args()
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    args.device, names = pick_device(auto if args.device == "auto" else args.device), args.sections.split(",")
    for name in names:
        if name not in SECTIONS:
            raise unknown("unknown section", name, SECTIONS)
    if not 1 <= args.threads <= 1024 or args.repeats < 1:
        raise InputError("--threads must lie between 1 and 1024, and --repeats be at least 1")
    try:
        kernels.check_backend()
    except ValueError as e:
        raise InputError(str(e)) from None
    if args.out:
        with explain(f"create {args.out}"):
            open(os.path.expanduser(args.out), "x").close()

    def say(line):
        print(line, flush=True)
        if args.out:
            with explain(f"write {args.out}"), open(os.path.expanduser(args.out), "a") as f:
                print(line, file=f)

    say(machine(args))
    for title, columns, rows in tables(args, names):
        rows = [cells + [""] * (len(columns) - len(cells)) for cells in rows]
        say("\n" + markdown(columns, rows, f"### {title}"))


if __name__ == "__main__":
    command_line(main)
