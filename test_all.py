"""Every test of the repository: `pytest -q`; without the slow ones: `pytest -q -m "not slow"`. Two CPU cores, no
network, deterministic.

Groups: kernels against their references, models, data and its faults, training, sampling, report, README.
"""

import colorsys
import contextlib
import copy
import csv
import dataclasses
import hashlib
import http.server
import importlib
import io
import itertools
import json
import math
import operator
import os
import platform
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import types
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.run
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import bench
import csp
import data
import diagnose
import hmamba
import htransformer
import kernels
import pam
import report
import sample
import tasks
import train

ROOT = Path(__file__).parent
warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)  # the mark `slow`: over 1.2 s
for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # nohup, or a shell's &, has had them ignored: a test of its own here
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_IGN:
        signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
torch.set_num_threads(1)  # on a machine that does something else too, two threads wait for each other
ENV = os.environ | {"OMP_NUM_THREADS": "1"}  # for what runs as a program of its own


# ----------------------------------------------------------------------------------------------------------------------
# Kernels against their references
#
# OPERATIONS is the table of what is tested, `cases` that of the sizes. Each test is one property of all operations;
# `errors` compares values, gradients and states. Then comes what is said of one operation alone. What runs Triton's
# kernels has "triton" in its name or parameters: on a GPU, or in a process of its own in Triton's interpreter.

EPS = 2.0**-24  # what float32 loses by one rounding
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"  # of the Triton kernels
compiles = pytest.mark.skipif(kernels.triton is None or INTERPRETED, reason="needs Triton, not interpreted")
needs_triton = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="see test_interpreter")
BOTH = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
FORMS = pytest.mark.parametrize("method", ["quadratic", "linear"])


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclasses.dataclass
class Operation:
    check: str  # its name in kernels.CHECKS
    widths: tuple = (1, 5, 16)
    floor: float = 1e-3  # what is smaller is compared with this

    def __post_init__(self):
        self.function, self.shapes = kernels.CHECKS[self.check]  # (*inputs, initial state, backend=) -> (output, state)
        axes = [axes for _, axes in self.shapes]
        self.axis = axes[0].index("T")  # of time
        self.timed = [i for i, x in enumerate(axes) if "T" in x]  # numbers of the inputs that have a time axis
        self.stateful = "T" not in axes[-1]  # the initial state is among the inputs

    def inputs(self, T, n, B=None):
        """In float64, n wide, with two heads; one sequence of them, or two without heads."""
        sizes = {"B": 3 - self.axis if B is None else B, "C": n, "d": n, "E": n + 1, "N": 16 if n == 600 else n}
        return kernels.check_inputs(self.shapes, T=T, H=2, **sizes)

    def __call__(self, *inputs, backend=None, cuts=()):
        """The outputs that need comparing; with cuts, the sequence in pieces that begin at those tokens."""
        cuts = [cut for cut in cuts if cut < inputs[0].shape[self.axis]]
        if backend == "reference" or not cuts:
            return self.function(*inputs, backend=backend)[: 1 + self.stateful]
        state, outputs = inputs[-1] if self.stateful else None, []
        for part in torch.arange(inputs[0].shape[self.axis]).tensor_split(cuts):
            window = (slice(None),) * self.axis + (part,)
            piece = [x[window] if i in self.timed else x for i, x in enumerate(inputs[: len(inputs) - self.stateful])]
            output, state = self.function(*piece, state, backend=backend)
            outputs.append(output)
        return (torch.cat(outputs, self.axis), state)[: 1 + self.stateful]


OPERATIONS = {
    "complex": Operation("complex_scan", (1, 13, 2100)),  # 2100 channels are one chunk of time, fewer several at once
    "real": Operation("complex_scan, real"),
    "cayley": Operation("cayley_scan"),
    "ungated": Operation("cayley_scan, no gate"),
    "selective": Operation("selective_scan", (1, 5, 600)),  # 601 channels of 16 states: several groups of batch rows
    # floor: gradients for q and k are differences of terms of about 1, which cancel where there are few tokens
    "quadratic": Operation("born_attention, quadratic", (2, 5, 16), 1.0),
    "linear": Operation("born_attention, linear", (2, 5, 16), 1.0),
    "phase": Operation("phase_memory"),
    "memory": Operation("phase_memory, real"),
}
EACH = pytest.mark.parametrize("name", OPERATIONS)


def errors(function, inputs, dtype=torch.float32, strided=False, floor=1e-3, backend=None, twice=False):
    """Largest error of outputs and gradients against the float64 reference, relative to the largest or `floor`."""

    def run(backend, dtype, strided):
        device = KERNEL_DEVICE if backend == "triton" else "cpu"
        leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in rounded]
        given = [torch.stack((x, x), -1)[..., 0] if strided else x for x in leaves]
        outputs = function(*given, backend=backend)
        weights = [torch.sin(torch.arange(x.numel())).view(x.shape).to(x) for x in outputs]
        weights = [torch.stack((w, w), -1)[..., 0] for w in weights] if strided else weights
        grads = torch.autograd.grad(outputs, leaves, weights)
        assert all(torch.equal(x.cpu(), y.to(dtype)) for x, y in zip(leaves, rounded))
        assert [(x.dtype, x.shape) for x in grads] == [(x.dtype, x.shape) for x in leaves]
        return [x.detach().cpu() for x in (*outputs, *grads)]

    rounded = [x.detach().to(dtype) for x in inputs]
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.empty(3).isnan().all() and torch.ones(1).new_empty(3).isnan().all()
        found, expected = run(backend, dtype, strided), run("reference", torch.float64, False)
        assert all(x.isfinite().all() for x in found)
        assert not twice or all(torch.equal(x, y) for x, y in zip(found, run(backend, dtype, strided)))
    finally:
        torch.use_deterministic_algorithms(False)
    return max(((x.double() - y).abs().max() / y.abs().max().clamp(min=floor)).item() for x, y in zip(found, expected))


def bound(T, n=1):
    """Of `errors` in float32: every number is a sum of up to T n products, and the roundings have random signs."""
    return 8 * EPS * (64 + T * n) ** 0.5


def small_tiles(monkeypatch, **changes):
    """Blocks that a short test crosses several times: the interpreter is slow."""
    sizes = {"SCAN_TILES": ((8, 4), (4, 4)), "SELECTIVE_TILE": (8, 8), "SELECTIVE_CHUNK": 8, "SELECTIVE_PROGRAMS": 4}
    # the tiles of Born attention and of the phase memory are divided for float32
    sizes |= {"BORN_TILE": (16, 16, 16), "BORN_SPAN": 32, "PHASE_TILE": (64, 32, 32)}
    for name, value in (sizes | changes).items():
        monkeypatch.setattr(kernels, name, value)


def cases():
    """(backend, operation, T, n, options): every length and width, cut anywhere; sizes that fill no block."""
    half = torch.bfloat16, torch.float16
    for name, operation in OPERATIONS.items():
        for i, n in enumerate(operation.widths):
            for T in (1, 2, 7, 63, 64, 65, 257, 1000) if i == 1 else (1, 65):
                yield "torch", name, T, n, {"strided": T % 2 == 1, "twice": T % 2 == 1}
        for cuts in (1, 37, 129), (64, 128), tuple(range(1, 130)):
            yield "torch", name, 130, 5, {"cuts": cuts}
        yield "torch", name, 130, 5, {"cuts": (65,), "dtype": torch.float64}
        for dtype in half:
            yield "torch", name, 70, 5, {"dtype": dtype, "strided": True}
    several, wide = {"SCAN_PROGRAMS": 8}, {"PHASE_TILE": (64, 64, 32)}  # segments of time; blocks of two widths
    for name, B, T, n, cuts, constants in [
        ("complex", 2, 1, 1, (), {}), ("complex", 1, 19, 5, (), {}), ("complex", 2, 17, 3, (), several),
        ("real", 1, 19, 5, (), several), ("ungated", 1, 19, 3, (), several),
        ("cayley", 1, 7, 3, (), {}),  # 3 of 4 columns of a head
        ("cayley", 2, 17, 2, (), several),  # two heads a block
        ("cayley", 1, 9, 5, (), {}),  # a head wider than a tile, which grows in channels and shrinks in time
        ("selective", 2, 1, 1, (), {}), ("selective", 1, 7, 3, (), {}), ("selective", 2, 19, 4, (), {}),
        ("quadratic", 1, 1, 2, (), {}), ("quadratic", 2, 7, 3, (), {}), ("quadratic", 1, 33, 5, (), {}),
        ("quadratic", 1, 37, 8, (), {"BORN_TILE": (64, 64, 32)}), ("quadratic", 1, 19, 33, (), {}),
        ("linear", 1, 1, 3, (), {}), ("linear", 1, 33, 9, (), {}), ("linear", 1, 75, 3, (40, 74), {}),
        ("linear", 1, 65, 5, (), {"BORN_TILE": (64, 128, 64), "BORN_FEATURES": 64, "BORN_SPAN": 64}),
        ("phase", 2, 1, 3, (), {}), ("phase", 1, 33, 4, (20,), {}), ("phase", 1, 17, 33, (), wide),
        ("memory", 2, 1, 3, (), {}), ("memory", 1, 33, 4, (20,), {}), ("memory", 1, 33, 33, (), wide),
    ]:  # fmt: skip
        options = {"B": B, "cuts": cuts, "constants": constants, "strided": T % 2 == 1, "twice": n == 3}
        yield pytest.param("triton", name, T, n, options, marks=needs_triton)
    for dtype, name, T, n, cuts in [  # float16 takes bfloat16's path, but for the type of what is loaded and stored
        *((dtype, name, 9, 3, ()) for dtype in half for name in ("cayley", "selective", "quadratic")),
        (half[0], "linear", 37, 3, (33,)), (half[0], "phase", 17, 17, ()), (half[0], "memory", 17, 17, ()),
    ]:  # fmt: skip
        options = {"B": 1, "cuts": cuts, "constants": {"PHASE_TILE": (16, 16, 16)}, "strided": True, "dtype": dtype}
        yield pytest.param("triton", name, T, n, options, marks=needs_triton)


@pytest.mark.parametrize(("backend", "name", "T", "n", "options"), [*cases()])
def test_equals_reference(backend, name, T, n, options, monkeypatch):
    """Value, gradients and final state. In half precision gradients and y alone are rounded, once."""
    operation, options = OPERATIONS[name], {"B": None, "cuts": (), "constants": {}, "dtype": torch.float32} | options
    B, cuts, constants, dtype = (options.pop(key) for key in ("B", "cuts", "constants", "dtype"))
    inputs, device, floor = operation.inputs(T, n, B), "cpu", operation.floor
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 0)
    if backend == "triton":
        small_tiles(monkeypatch, **constants)
        device, rounding = KERNEL_DEVICE, 2 * rounding
        if operation.axis == 2 and B == 1:
            inputs = [x[:, :1] for x in inputs]  # one head
        if dtype != torch.float32:
            rounding, floor = rounding if operation.axis == 1 else 3e-2, 0.1
    found = errors(partial(operation, cuts=cuts), inputs, dtype, floor=floor, backend=backend, **options)
    assert found < rounding + bound(T, n) * (2.0**-29 if dtype == torch.float64 else 1)
    for backend in (backend, "reference") if rounding else ():
        output, state = operation.function(*(x.to(device, dtype) for x in operation.inputs(2, 2)), backend=backend)
        assert output.dtype == (dtype if name == "selective" else torch.float32)
        assert {x.dtype for x in tensors(state)} == {torch.float32}


@EACH
def test_initial_state_is_optional_and_each_output_has_its_gradient(name):
    """No state is a state of zeros. Gradients of the output alone, as in a training step, and of the state alone."""
    operation = OPERATIONS[name]
    *rest, last = [x.requires_grad_() for x in operation.inputs(70, 3)]
    if operation.stateful:
        torch.testing.assert_close(operation.function(*rest), operation(*rest, 0 * last), atol=0, rtol=0)
    for i in range(1 + operation.stateful):
        totals = (operation(*rest, last, backend=backend)[i].sin().sum() for backend in ("torch", "reference"))
        grads = (torch.autograd.grad(x, (*rest, last), materialize_grads=True, allow_unused=True) for x in totals)
        torch.testing.assert_close(*grads, atol=1e-9, rtol=1e-6)


@EACH
def test_autocast_changes_nothing(name):
    operation, runs = OPERATIONS[name], []
    leaves = [x.float().requires_grad_() for x in operation.inputs(130, 5)]
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs = [*operation(*leaves), *operation(*leaves, cuts=(50, 100))]  # a state is folded under autocast too
        runs.append([*outputs, *torch.autograd.grad(sum(x.sum() for x in outputs), leaves)])
    assert all(torch.equal(x, y) for x, y in zip(*runs))


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")  # a user of --compile would see it, too
@EACH
def test_compiles_to_the_same(name):
    """And forward mode, which traced tensors do not show, is refused there too."""
    operation, ad = OPERATIONS[name], torch.autograd.forward_ad
    x, *rest = leaves = [x.float().requires_grad_() for x in operation.inputs(70, 3)]
    compiled = torch.compile(operation.function, backend="aot_eager", fullgraph=True)
    outputs = (f(*leaves)[: 1 + operation.stateful] for f in (operation.function, compiled))
    runs = ((*y, *torch.autograd.grad(sum(x.sum() for x in y), leaves)) for y in outputs)
    torch.testing.assert_close(*runs, atol=1e-5, rtol=1e-4)
    with ad.dual_level(), torch.no_grad(), pytest.raises(NotImplementedError, match="backend='reference'"):
        torch.compile(operation.function, backend="eager")(ad.make_dual(x, x.cos()), *rest)
    torch._dynamo.reset()


@BOTH
def test_extreme_gates(backend, monkeypatch):
    """Decays of exactly 1 to exactly 0, also in turns; steps that hardly change the state, or forget it at once."""
    T, device = (70, "cpu") if backend == "torch" else (11, KERNEL_DEVICE)
    pairs = itertools.product((0.0, -1e-9, -0.7, -20.0, -200.0, -1e5), (None, -1e-3))
    if backend == "triton":
        small_tiles(monkeypatch)
        pairs = [(-200.0, 0.0)]
    gated = {"complex": 0, "cayley": 2, "selective": 1, "phase": 3, "memory": 3}
    for (value, other), (name, at) in itertools.product(pairs, gated.items()):
        operation, gates = OPERATIONS[name], torch.full((T,), value).double()
        gates[torch.arange(T) % 3 > 0] = value if other is None else other
        inputs = [x[:, :1] if operation.axis == 2 else x for x in operation.inputs(T, 3, 1)]  # one head
        shape = [T if axis == operation.axis else 1 for axis in range(inputs[at].dim())]
        inputs[at] = (-gates if name == "selective" else gates).view(shape).expand_as(inputs[at])
        assert errors(operation, inputs, backend=backend) < bound(T, 4), (name, value, other)
    for scale in 1e5, 1e21:  # half a turn, almost; then squares beyond float32
        delta, *rest = OPERATIONS["ungated"].inputs(T, 2, 1)
        assert errors(OPERATIONS["ungated"], (scale * delta * (randn(1, T, 2, 2) > 1), *rest), backend=backend) < 1e-5
    angles = torch.cat((1e4 * randn(12).clamp(-1, 1), torch.arange(-12, 12) * math.pi / 4))[None, None]  # every octant
    turned = 0 * angles, angles, torch.zeros(1, 1, 36, 2), torch.tensor([1.0, 0.0]).expand(1, 36, 2)  # exp(i theta)
    assert errors(OPERATIONS["complex"], turned, backend=backend) < 3e-7
    T, at = T + 9, T  # a gate of exactly 0: what was before has no influence
    for name in "phase", "memory":
        q, k, v, _, S = OPERATIONS[name].inputs(T, 4)
        closed = torch.where(torch.arange(T) == at, -torch.inf, -0.1).expand(1, 2, T)
        leaves = [x.float().to(device).requires_grad_() for x in (q, k, v, closed, S)]
        y, end = OPERATIONS[name](*leaves, backend=backend)
        grads = torch.autograd.grad(y[:, :, at:].sum() + end.sum(), leaves)
        assert all(x.isfinite().all() for x in (y, end, *grads))
        assert all((x[:, :, :at] == 0).all() for x in grads[:4]) and (grads[4] == 0).all()
    for dtype, half in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)) if backend == "torch" else ():
        for name in "complex", "real":  # what 1000 steps of a slow decay add up is rounded once
            slow = torch.full((2, 1000, 5), -1e-3, dtype=torch.float64), *OPERATIONS[name].inputs(1000, 5)[1:]
            assert errors(OPERATIONS[name], slow, dtype) < half + bound(1000)


@EACH
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_empty_batches(name, backend):
    """No sequence at all: empty outputs and states, forward and backward. No step is refused."""
    operation = OPERATIONS[name]
    strided = (x.float().repeat_interleave(2, -1)[..., ::2] for x in operation.inputs(70, 3, 0))
    leaves = [x.requires_grad_() for x in strided]
    outputs = operation(*leaves, backend=backend, cuts=() if backend == "triton" else (30,))
    assert outputs[0].shape[operation.axis] == 70 and not outputs[0].numel()
    grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
    assert [x.shape for x in grads] == [x.shape for x in leaves]
    inputs = enumerate(operation.inputs(9, 3))
    with pytest.raises(ValueError, match="T > 0"):
        operation(*(x.narrow(operation.axis, 0, 0) if i in operation.timed else x for i, x in inputs), backend=backend)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="measured in forks")
def test_memory_is_linear_in_time():
    """Peak memory of forward and backward: some copies of the inputs; no (B, T, E, N), no (T, T), no state a token."""
    code = """
import os, resource, sys, torch, kernels
torch.set_num_threads(1)
rand = lambda *shape: torch.rand(1, *shape)
for function, longest, inputs in (
    (kernels.complex_scan, 2048, lambda T: (-rand(T, 1024), rand(T, 1024), rand(T, 1024, 2))),
    (kernels.selective_scan, 4096, lambda T: (rand(T, 256), rand(T, 256), -rand(256, 16)[0], rand(T, 16), rand(T, 16))),
    (kernels.phase_memory, 4096, lambda T: (*(rand(4, T, 16, 2) - 0.5 for _ in range(3)), -rand(4, T))),
):
    if not os.fork():
        for T in (64, longest):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            function(*[x.requires_grad_() for x in inputs(T)])[0].sum().backward()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(grown / 2 ** (20 if sys.platform == "darwin" else 10), flush=True)
        os._exit(0)
    os.wait()
"""
    fixed = ENV | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc gives every freed tensor back at once
    out = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT, env=fixed)
    scan, selective, phase = map(float, out.split())  # MB, with the inputs
    assert scan < 8 * 24  # log_decay is 8; log2(T) copies of inputs and output would be 8 * 66
    assert selective < 48  # u is 4; a (B, T, E, N) tensor would be 64
    assert phase < 80  # an input is 2; the scores would be 512, a state a token 34


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_memory_is_kept():
    """Tensors of 40 MB in turn, with what glibc does by itself and after data.keep_memory: pages are mapped once."""
    code = """if True:
        import resource, torch, data
        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(10):
                torch.ones(10**7)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        print(faults())
        data.keep_memory()
        faults(), faults()  # where the heap cannot grow in one piece it takes a few turns
        print(faults())"""
    mapped, kept = map(int, subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT, env=ENV).split())
    assert kept < mapped / 10


@EACH
def test_refuses_what_does_not_fit(name):
    """Of each input; and forward mode, which would be zero without a word, also of one input alone."""
    operation, func, ad = OPERATIONS[name], torch.func, torch.autograd.forward_ad
    inputs = [x.float() for x in operation.inputs(5, 4)]

    def dual_numbers(function, x, direction):
        with ad.dual_level():
            return function(ad.make_dual(*x, *direction))

    for i, x in enumerate(inputs):
        of_one = lambda x, i=i: operation(*inputs[:i], x, *inputs[i + 1 :])  # noqa: E731
        wrong = [(torch.cat((x, x.narrow(axis, 0, 1)), axis), "shape") for axis in range(x.dim())]
        wrong += [(x[..., None], "shape"), (x[0], "shape"), ((1, 2), "tuple"), (x.int(), "int32")]
        wrong += [(x.to("meta"), " on (meta|cpu)"), (x.to(torch.complex64), r"complex64.*torch\.view_as_real")]
        for y, message in wrong:
            with pytest.raises(ValueError, match=message):
                of_one(y)
        for (function, y), transform in itertools.product(
            ((of_one, x), (func.vmap(of_one), x[None])), (func.jvp, dual_numbers)
        ):
            with pytest.raises(NotImplementedError, match="backend='reference'"):
                transform(function, (y,), (y.cos(),))
    assert torch.equal(func.vmap(of_one)(x[None])[0][0], operation(*inputs)[0])
    leaves = [x.requires_grad_() for x in inputs]
    out = operation(*leaves)[0]
    with ad.dual_level(), pytest.raises(NotImplementedError, match="backend='reference'"):  # also of the backward
        torch.autograd.grad(out, leaves, ad.make_dual(torch.ones_like(out), out.detach()), materialize_grads=True)
    grads = torch.autograd.grad(operation(*leaves)[0].square().sum(), leaves, create_graph=True, materialize_grads=True)
    for derivative in (
        lambda: func.vjp(operation, *operation.inputs(5, 4)),
        lambda: torch.autograd.grad(sum(g.square().sum() for g in grads), leaves),
    ):
        with pytest.raises(RuntimeError):
            derivative()


def test_a_refusal_says_what_was_expected():
    zeros, tokens = partial(torch.zeros, 1, 2), torch.zeros(1, 2, 3, 3, 2)
    scan = kernels.complex_scan, {"log_decay": zeros(3), "theta": zeros(3), "b": zeros(3, 2)}
    attend = kernels.born_attention, {name: torch.ones(1, 2, 5, 3, 2) for name in "qkv"}
    for (function, given), changes, message in [
        (scan, {"log_decay": zeros()}, "log_decay has shape (1, 2); expected (B, T, C|1) with B = 1, T = 2"),
        (scan, {"b": zeros(3)}, "b has shape (1, 2, 3); expected (B, T, C, 2) with B = 1, T = 2, C = 3"),
        (scan, {"method": "fast"}, "unknown method 'fast'"),
        (scan, {"backend": "cuda"}, "unknown backend 'cuda'; known: torch, triton, reference"),
        (scan, {"backend": "cuda", "method": "clamped"}, "unknown backend 'cuda'; known: torch, triton, reference"),
        (scan, {"theta": None, "b": zeros(3), "method": "clamped"}, "complex"),
        (attend, {"k": tokens.half()[:, :, [0] * 5]}, "k is torch.float16 on cpu; expected torch.float32 on cpu"),
        (attend, {"state": (zeros(9, 8), tokens, tokens)}, "state_S has shape (1, 2, 9, 8)"),
        (attend, {"state": (None, zeros(3, 4, 2), tokens)}, "state_k has shape (1, 2, 3, 4, 2)"),
        (attend, {"state": (None, tokens.double(), tokens.double())}, "state_k is torch.float64 on cpu; expected"),
        (attend, {"state": (None, tokens)}, "the state is not (S or None, k, v)"),
        (attend, {"state": (None, None, None)}, "the state is not (S or None, k, v)"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            function(**given | changes)


def operator_of(function, *inputs, device="cpu", **given):
    """Name and arguments of the custom operator that a call comes to. The inputs are (shape, dtype), without data."""

    class Stop(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "nanohilbert":
                raise RuntimeError(func.overloadpacket.__name__, args)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Stop(), pytest.raises(RuntimeError) as stop:
        function(*(torch.ones(shape, dtype=dtype, device=device) for shape, dtype in inputs), **given)
    return stop.value.args


def test_the_backend_is_what_was_asked_for(monkeypatch):
    """By the call, by the environment, by device and dtype, in this order. What cannot run here is refused."""
    shapes, single = ((2, 5, 3), (2, 5, 3), (2, 5, 3, 2)), torch.float32
    x, on_gpu = [torch.zeros(shape) for shape in shapes], "complex_scan" if kernels.triton is None else "triton_scan"
    for variable, backend, last, device, expected in [
        ("", None, single, "cpu", "complex_scan"), ("", None, torch.bfloat16, "cuda", on_gpu),
        ("", None, torch.float64, "cuda", "complex_scan"), ("", "torch", single, "cuda", "complex_scan"),
        ("torch", None, single, "cuda", "complex_scan"), ("reference", "torch", single, "cpu", "complex_scan"),
    ]:  # fmt: skip
        monkeypatch.setenv("NANOHILBERT_BACKEND", variable)
        inputs = zip(shapes, (single, single, last))
        found = operator_of(kernels.complex_scan, *inputs, device=device, backend=backend)
        assert found[0] == expected, (variable, backend, last, device)
    monkeypatch.setenv("NANOHILBERT_BACKEND", "torch")
    token = *3 * [((1, 1, 1, 2, 2), single)], ((1, 1, 1), single)
    assert operator_of(kernels.phase_memory, *token)[0] == "phase_memory"  # in a chunk, not by eq. 6 itself
    monkeypatch.setenv("NANOHILBERT_BACKEND", "tritn")
    token = *3 * [torch.ones(1, 1, 1, 2, 2)], torch.zeros(1, 1, 1)  # for which phase memory has a path of its own
    for function in (kernels.check_backend, lambda: kernels.complex_scan(*x), lambda: kernels.phase_memory(*token)):
        with pytest.raises(ValueError, match="unknown NANOHILBERT_BACKEND 'tritn'; known: torch, triton, reference"):
            function()
    for message, dtype, interpreted in ("on cpu", single, "0"), ("64", torch.float64, "1"), ("missing", single, "1"):
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        if message == "missing":
            monkeypatch.setattr(kernels, "triton", None)
        for function, given in (kernels.complex_scan, x), (kernels.born_attention, 3 * [torch.ones(1, 1, 2, 2, 2)]):
            with pytest.raises(ValueError, match=f"backend='triton' needs.*{message}"):
                function(*(y.to(dtype) for y in given), backend="triton")


@compiles
def test_born_attention_takes_the_faster_form_in_autocasts_dtype(monkeypatch):
    """"auto": linear from a measured length on, on a GPU from a counted one. float16 has not the range for Triton's."""
    single, half, short = torch.float32, torch.float16, torch.bfloat16
    for device, T, N, method, expected in [
        ("cpu", 383, 2, "auto", ("born_sum", False)), ("cpu", 384, 2, "auto", ("born_sum", True)),
        ("cpu", 767, 16, "auto", ("born_sum", False)), ("cpu", 768, 16, "auto", ("born_sum", True)),
        ("cuda", 2047, 4, "auto", ("triton_born", False)), ("cuda", 2048, 4, "auto", ("triton_born", True)),
        ("cuda", 4095, 16, "auto", ("triton_born", False)), ("cuda", 4096, 16, "auto", ("triton_born", True)),
        ("cuda", 9, 32, "linear", ("triton_born", True)), ("cuda", 9, 33, "linear", ("born_sum", True)),
        ("cuda", 20_000, 33, "auto", ("triton_born", False)),
    ]:  # fmt: skip
        inputs = 3 * [((1, 1, T, N, 2), single)]
        name, args = operator_of(kernels.born_attention, *inputs, device=device, method=method)
        assert (name, *args[4:]) == expected, (device, T, N, method)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # lets CPU tensors through
    dtypes = (None, single, single), (short, single, short), (half, single, short), (half, half, half)
    functions = (kernels.born_attention, ()), (kernels.phase_memory, [((1, 1, 5), single)])
    for (autocast, given, expected), (function, more) in itertools.product(dtypes, functions):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            _, args = operator_of(function, *3 * [((1, 1, 5, 2, 2), given)], *more, backend="triton")
        assert [x.dtype for x in args[:3]] == 3 * [expected]


@pytest.mark.slow
def test_device_check_prints_a_row_for_each_case_and_fails_where_one_is_off(monkeypatch, capsys):
    broken = partial(raise_error, RuntimeError("no compiler\nfound"))
    inputs = (torch.ones(3, dtype=torch.float64),)
    wrong = lambda x, backend: (x * (1 if backend == "reference" else 1.001),)  # noqa: E731
    lost = lambda x, y, backend: (x + y + (0 if backend == "reference" else (y - y).sqrt()),)  # noqa: E731
    cases = [("broken", broken, inputs), ("wrong", wrong, inputs), ("lost", lost, 2 * inputs), *kernels.check_cases()]
    monkeypatch.setattr(kernels, "check_cases", lambda: cases)
    monkeypatch.setenv("NANOHILBERT_BACKEND", "tritn")
    with pytest.raises(ValueError, match="known: torch, triton, reference"):
        kernels.check_device()
    monkeypatch.setenv("NANOHILBERT_BACKEND", "")
    assert not kernels.check_device()
    first, *off, _ = (lines := capsys.readouterr().out.splitlines()[5:])[:4]
    assert "FAILED: RuntimeError: no compiler found" in first and all(line.endswith("| FAILED |") for line in off)
    lines = lines[3:]
    assert len(lines) == 12 and all("e-0" in line and "FAILED" not in line for line in lines)


@pytest.mark.slow
def test_kernels_import_and_compute_where_their_compiler_is_missing():
    code = "import sys; sys.modules['triton'] = None; import torch, kernels; x = torch.zeros(1, 3, 2); "
    code += "print(kernels.complex_scan(x, None, x)[0].shape)"
    assert "3" in subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)


# ---- what is said of one operation alone ----


def test_clamped_scan_is_algorithm_2_and_where_it_departs():
    """QS Algorithm 2: equal to the recurrence while a chunk's log-decays sum to more than -30, far off beyond."""
    _, theta, b, h0 = OPERATIONS["complex"].inputs(200, 4)
    for gate, least, most in (0.9, 0, 1e-12), (0.63, 0, 1e-3), (0.5, 0.5, 9):  # 64 log 0.63 = -29.6; 64 log 0.5 = -44
        log_decay = torch.full_like(theta, math.log(gate))
        exact = kernels.complex_scan(log_decay, theta, b, h0, backend="reference")[0]
        found = kernels.complex_scan(log_decay, theta, b, h0, method="clamped")[0]
        assert least <= (found - exact).abs().max() / exact.abs().max() < most
    # By hand, one chunk of three steps with the clamp in play: l = -20, -30, -30. Growth is clamped at 0: P = 1.
    one = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2)
    for step, expected in (-20.0, [1.0, 1 + math.exp(-10), 2 + math.exp(-10)]), (10.0, [1.0, 2.0, 3.0]):
        h, hT = kernels.complex_scan(torch.full((1, 3, 1), step), torch.zeros(1, 3, 1), one, None, "clamped", "triton")
        torch.testing.assert_close(h[0, :, 0, 0], torch.tensor(expected))
        assert torch.equal(hT, h[:, -1])


@BOTH
@FORMS
def test_born_attention_at_extreme_scores(backend, method, monkeypatch):
    """The scale of q and k, rows of zeros, and queries orthogonal to the keys, or nearly, where the floor decides."""
    T, cut = (200, 64) if backend == "torch" else (37, 32)
    operation = OPERATIONS[method]
    if backend == "triton":
        small_tiles(monkeypatch)

    def o(q, k):
        given = (x.float().to(KERNEL_DEVICE if backend == "triton" else "cpu") for x in (q, k, v))
        return operation(*given, backend=backend)[0].cpu().double()

    q, k, v = (x[:, :1] for x in operation.inputs(T, 4))
    exact = kernels.born_attention_reference(q, k, v)
    for q_scale, k_scale in (1e-12, 1), (1e12, 1), (1, 1e-12), (1, 1e12):  # eq. 5 does not depend on them
        torch.testing.assert_close(o(q_scale * q, k_scale * k), exact, atol=2e-5, rtol=0)
    zero, late, first, second = q.clone(), k.clone(), torch.zeros_like(q), k.clone()
    zero[:, :, T // 5 : T // 2] = late[:, :, : T // 2] = 0  # no direction at all, no key at first
    first[..., 0, :], second[..., 0, :] = q[..., 0, :], 2e-3 * k[..., 0, :]  # nearly orthogonal
    assert (o(zero, k)[:, :, T // 5 : T // 2] == 0).all() and (o(q, late)[:, :, : T // 2] == 0).all()

    def lacking(q, k, v, backend):  # coordinates of k that q lacks: their gradient is the floor's alone
        return operation(q, torch.cat((second[..., :1, :].to(k), k), -2), v, backend=backend)

    cases = [(operation, (zero, late, 10 * v)), (operation, (first, second, v))]
    if backend == "torch":  # which is fast
        cases += [(operation, x) for x in ((q, 1e-2 * k, v), (1e2 * q, k, v), (zero, k, v), (q, late, v))]
    if method == "linear":  # and the floor of a past in the state
        cases += [(partial(operation, cuts=(cut,)), (first, second, v)), (lacking, (first, second[..., 1:, :], v))]
    for function, inputs in cases:
        assert errors(function, inputs, backend=backend) < bound(T, 8)
    second[..., : T // 2, :1, :] = 0  # orthogonal to the first half of the keys
    found, exact = o(first, second), kernels.born_attention_reference(first, second, v)
    assert (found[:, :, : min(64, T // 2)] == 0).all()  # the chunk's own scores are exact, not a difference of features
    torch.testing.assert_close(found[:, :, T // 2 :], exact[:, :, T // 2 :], atol=1e-4, rtol=0)
    if backend == "triton":  # by powers of two there is no rounding at all
        usual = o(q, k)
        assert torch.equal(o(2.0**-100 * q, k), usual) and torch.equal(o(2.0**100 * q, k), usual)
        largest = 1.5 * 2.0**127 * (q / q.abs().amax((-1, -2), keepdim=True))
        torch.testing.assert_close(o(largest, k), usual, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("cut", [None, 37, 1])
@FORMS
def test_born_attention_of_orthogonal_queries_is_bounded(method, cut):
    """What is left is the rounding of the features. Neither output nor gradients may blow it up."""
    N, T = 16, 140
    q, k = (torch.complex(randn(T, N, seed=i), randn(T, N, seed=i + 1)) for i in (0, 2))
    q[:, : N // 2], k[:, N // 2 :] = 0, 0
    turned = (torch.view_as_real(x @ unitary_columns(N)) for x in (q, k))
    q, k, v = (x.view(1, 1, T, N, 2).float().requires_grad_() for x in (*turned, randn(T, N, 2, seed=5)))
    o = OPERATIONS[method](q, k, v, cuts=() if cut is None else range(cut, T, cut))[0]
    assert o.abs().max() < v.abs().max()
    assert all(x.abs().max() < 1e4 for x in torch.autograd.grad(o.sum(), (q, k, v)))


@pytest.mark.parametrize(("backend", "method"), [
    ("torch", "quadratic"), ("torch", "linear"), pytest.param("triton", "linear", marks=needs_triton)
])  # fmt: skip
def test_born_weights_of_a_state_are_not_negative(backend, method):
    """As rounding can make them: masses 1 and 1, and 8 for the feature of another sign. Such a weight counts as 0."""
    S, k, v = randn(1, 1, 4, 5), 0.1 * randn(1, 1, 3, 2, 2, seed=1), randn(1, 1, 3, 2, 2, seed=2)
    S[..., -1] = torch.tensor([1.0, 0.0, 8.0, 1.0])
    q = torch.tensor([[1.0, 0.0], [-0.5, 0.0]], dtype=torch.float64).repeat(1, 1, 3, 1, 1)
    on_triton = {"device": KERNEL_DEVICE, "dtype": torch.float32} if backend == "triton" else {}
    q, k, v, S = leaves = [x.to(**on_triton).requires_grad_() for x in (q, k, v, S)]
    runs = []
    for by in "reference", backend:
        o, _ = kernels.born_attention(q, k, v, (S, k[:, :, :0], v[:, :, :0]), method, by)
        runs.append((o, *torch.autograd.grad(o.sum(), leaves)))
    assert o.abs().max() > 1e4  # over the floor
    for x, y in zip(*runs):
        assert (x - y).abs().max() <= (1e-5 if on_triton else 1e-9) * x.abs().max()


def in_pieces(inputs, cuts, *backends, method="auto"):
    outputs, state = [], None
    for piece, backend in zip(zip(*(x.tensor_split(cuts, 2) for x in inputs)), itertools.cycle(backends)):
        o, state = kernels.born_attention(*piece, state, method, backend)
        outputs.append(o)
    return torch.cat(outputs, 2), state


def test_born_state_is_small_and_the_sum_it_says():
    """However the past was cut. The reference and the torch path go on from each other's states."""
    for dtype, atol in (torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 1e-4):
        inputs = [x.to(dtype) for x in OPERATIONS["linear"].inputs(200, 3)]
        whole, (expected, *_) = in_pieces(inputs, (), "reference")[0], in_pieces(inputs, (), "torch")[1]
        for cuts in (64, 128, 192), (100,), tuple(range(1, 200)):
            S, k, v = in_pieces(inputs, cuts, "torch")[1]
            assert S.shape == (1, 2, 9, 7)
            assert torch.equal(k, inputs[1][:, :, 192:].to(k)) and torch.equal(v, inputs[2][:, :, 192:].to(v))
            torch.testing.assert_close(S, expected, atol=atol, rtol=1e-4)
        for backends in (("reference", "reference"), ("torch", "reference"), ("reference", "torch")):
            torch.testing.assert_close(in_pieces(inputs, (130,), *backends)[0], whole, atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["phase", "memory"])
def test_dual_form_equals_reference(name):
    """PAM eq. 7, the O(T^2) form, forward and backward, with a state and without; autocast changes nothing."""
    operation = OPERATIONS[name]
    for T in 1, 7, 130:
        inputs = operation.inputs(T, 6, 2)
        assert errors(lambda *x, backend: operation(*x, backend=backend or "dual")[:1], inputs) < bound(T, 6)
        (y, S), exact = (operation(*inputs[:4], backend=backend) for backend in ("dual", "reference"))
        assert S is None
        torch.testing.assert_close(y, exact[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(y, operation(*inputs[:4], backend="dual")[0])
        y, _ = operation(*(x.float() for x in inputs[:4]), inputs[4], backend="dual")
        assert y.dtype == torch.float64  # of the state alone


def unitary_columns(d, seed=0):
    """d orthonormal complex vectors, (d, d): one a row."""
    return torch.linalg.qr(torch.complex(randn(d, d, seed=seed), randn(d, d, seed=seed + 1)))[0].mT.contiguous()


def test_retrieval_with_orthogonal_keys_is_lossless():
    """PAM, after eq. 7: S q = V_j exactly when K_j^* . q = 1 and all other keys are orthogonal; up to d pairs."""
    d = 16
    keys, values = unitary_columns(d), torch.complex(randn(d, d, seed=5), randn(d, d, seed=6))
    k, v = (torch.view_as_real(x)[None, None] for x in (keys, values))
    nothing, gates = torch.zeros(1, 1, d, d, 2).double(), torch.zeros(1, 1, d).double()

    def retrieve(q, S):
        return torch.view_as_complex(kernels.phase_memory(q, nothing, nothing, gates, S)[0][0, 0])

    _, S = kernels.phase_memory(nothing, k, v, gates)
    torch.testing.assert_close(retrieve(k, S), values, atol=1e-12, rtol=0)
    # One pair more has no orthogonal key left, and what it adds is retrieved with the others.
    _, crowded = kernels.phase_memory(nothing[:, :, :1], k[:, :, :1] + k[:, :, 1:2], v[:, :, 2:3], gates[..., :1], S)
    assert (retrieve(k, crowded)[0] - values[0]).abs().max() > 0.1
    # A turn of the key by a phase turns what is retrieved: the product with k^* is complex, not its real part.
    torch.testing.assert_close(retrieve(torch.view_as_real(1j * keys)[None, None], S), 1j * values)


def test_temperature_cancels():
    """QS eq. 5: D tau_i divides numerator and denominator alike. Output unchanged, gradient zero."""
    q, k, v = OPERATIONS["linear"].inputs(20, 4)
    tau = (1 + randn(1, 2, 20, seed=9).square()).requires_grad_()
    q_c, k_c, v_c = (torch.view_as_complex(x) for x in (q, k, v))
    s = ((q_c.conj() @ k_c.mT).abs().square() / (4 * tau.unsqueeze(-1))).tril()  # line 1, as printed
    o = torch.view_as_real((s.to(v_c.dtype) @ v_c) / s.sum(-1, keepdim=True))  # line 2
    # equal but for the raised denominator
    torch.testing.assert_close(o, kernels.born_attention(q, k, v)[0], atol=2e-5, rtol=1e-4)
    assert torch.autograd.grad(o.square().sum(), tau)[0].abs().max() < 1e-12
    model, idx = make("htransformer", L=1), text_batch(1, 30)
    before = model(idx, idx)[1]
    before.backward()
    weight = model.layers[0].param_proj.weight
    assert (weight.grad[-4:] == 0).all() and (weight.grad[:-4].abs().amax(1) > 0).all()  # tau of four heads comes last
    with torch.no_grad():
        weight[-4:] = 7
        assert torch.equal(model(idx, idx)[1], before)


@FORMS
def test_two_state_interference(method):
    """QS 5.5: p = |<e|psi>|^2 = (1 + cos theta) / 2, here as the weight of a key in Born attention."""
    theta = torch.linspace(0, math.pi, 7).double()
    psi = torch.stack((torch.ones(7), torch.polar(torch.ones(7).double(), theta)), -1) / 2**0.5
    e, p = torch.full_like(psi, 0.5**0.5), (1 + theta.cos()) / 2
    q, k = (torch.view_as_real(torch.stack(x, 1))[None] for x in ((e, e), (e, psi)))  # weights: 1 of e itself, and p
    v = torch.tensor([0.0, 1.0]).double()[:, None, None].expand_as(q)
    o = kernels.born_attention(q, k, v, method=method)[0][0, :, 1, 0, 0]
    torch.testing.assert_close(o, p / (1 + p), atol=3e-6, rtol=0)  # the denominator is raised by 2e-6


# ---- Triton kernels: on a GPU, or in Triton's interpreter ----


@needs_triton
def test_triton_half_precision_at_extremes(monkeypatch):
    """One token; a key above all others; rows of zeros; values, states and gradients beyond the range of float16."""
    small_tiles(monkeypatch)
    q, k, v, log_gamma = (x[:, :1] for x in OPERATIONS["phase"].inputs(20, 3)[:4])
    above, no_q, no_k, late = k.clone(), q.clone(), k.clone(), k.clone()
    above[:, :, 3] *= 1e4
    no_q[:, :, 4:9] = no_k[:, :, 6:] = late[:, :, :9] = 0
    attend, linear, one = OPERATIONS["quadratic"], OPERATIONS["linear"], [x[:, :, :1] for x in (q, k, v)]

    def remember(q, k, v, backend):
        return kernels.phase_memory(q, k, v, log_gamma[:, :, : q.shape[2]].to(q), backend=backend)

    for i, (function, by, inputs, floor) in enumerate([  # by: of the outputs, and of the gradients that come in
        *((f, 1, x, 0.1) for f in (attend, linear) for x in (one, (q, above, v), (no_q, late, v))),
        (attend, 1e-7, (q, k, 1e4 * v), 1e-4), (attend, 1e3, (q, 1e-2 * k, 1e-3 * v), 0.1),
        (remember, 1, one, 0.1), (remember, 1, (no_q, no_k, v), 0.1),
        (remember, 1e-8, (q, 1e3 * k, 1e3 * v), 1e-6),  # states of 1e6
        (remember, 1e6, (1e-2 * q, 1e-2 * k, 1e-2 * v), 0.1),
    ]):  # fmt: skip
        scaled = lambda *x, backend: [by * y for y in function(*x, backend=backend)]  # noqa: B023, E731
        assert errors(scaled, inputs, torch.float16, backend="triton", floor=floor) < 3e-2, i
    for single in range(3):  # one float32 input: all in float32
        given = [x.to(KERNEL_DEVICE).half() for x in (q, k, v, log_gamma)]
        given[single] = given[single].float()
        y, expected = (kernels.phase_memory(*given, backend=backend)[0] for backend in ("triton", "reference"))
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


@needs_triton
def test_triton_reads_views_where_they_lie(monkeypatch):
    """Slices of one projection, as the models give them: no copies."""
    small_tiles(monkeypatch)
    read, launch = [], kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda *args, **c: (read.extend(tree_leaves(args[2:])), launch(*args, **c)))
    for name, operation in OPERATIONS.items():
        inputs = [x.float().to(KERNEL_DEVICE) for x in operation.inputs(5, 3)]
        sliced = [inputs[i].movedim(operation.axis, 1) for i in operation.timed]  # (B, T, ...)
        projection = torch.cat([x.flatten(2) for x in sliced], -1)
        for i, x, y in zip(operation.timed, projection.split([x[0, 0].numel() for x in sliced], -1), sliced):
            inputs[i] = x.unflatten(-1, y.shape[2:] or (1,)).movedim(1, operation.axis)
        read.clear()
        operation(*inputs, backend="triton")
        storage = projection.untyped_storage().data_ptr()
        given = [x for x in read if isinstance(x, torch.Tensor) and x.numel()]
        found = {x.data_ptr() for x in given if x.untyped_storage().data_ptr() == storage}
        assert len(found) == len(operation.timed) - (name == "real"), name  # whose one decay is copied to all channels


@needs_triton
def test_triton_born_hands_over_its_state(monkeypatch):
    """From Triton to torch and back, folded, or with gradients not yet; S as in the torch path, however it was cut."""
    small_tiles(monkeypatch, BORN_SPAN=64)
    q, k, v = inputs = [x[:, :1].float().to(KERNEL_DEVICE) for x in OPERATIONS["linear"].inputs(80, 3)]
    _, (S, *rest) = kernels.born_attention(*inputs, method="linear", backend="torch")
    for cuts in (), (64, 65):
        _, state = in_pieces(inputs, cuts, "triton", method="linear")
        torch.testing.assert_close(state[0], S, atol=1e-4, rtol=1e-5)
        assert all(torch.equal(x, y) and x._base is None for x, y in zip(state[1:], rest))
    given, runs = [x.clone().requires_grad_() for x in state], []
    for backend in "triton", "torch":
        o, after = kernels.born_attention(*(x[:, :, :1] for x in inputs), given, "linear", backend)
        assert torch.equal(after[0], given[0]) and after[1].shape[2] == given[1].shape[2] + 1
        runs.append((o, *torch.autograd.grad(o.sin().sum(), given)))
    torch.testing.assert_close(*runs, atol=1e-6, rtol=1e-4)
    function, short = partial(OPERATIONS["quadratic"], cuts=(20,)), [x[:, :, :30].double().cpu() for x in inputs]
    assert errors(function, short, backend="triton", floor=1.0) < bound(30, 3)
    with torch.autocast(KERNEL_DEVICE, torch.float16):  # whose range float32 numbers may leave
        o, state = kernels.born_attention(q, 1e5 * k, v, backend="triton")
    _, expected = kernels.born_attention(q, 1e5 * k, v, backend="torch")
    assert o.isfinite().all() and o.dtype == torch.float32
    assert all(torch.equal(x, y) and x._base is None for x, y in zip(state, expected))  # what it keeps is not rounded
    for past in None, torch.ones(1, 63, device=KERNEL_DEVICE):
        checks = "test_schema", "test_faketensor", "test_autograd_registration"
        leaves = [x.clone().requires_grad_() if x is not None else x for x in (*inputs, past)]
        torch.library.opcheck(torch.ops.nanohilbert.triton_born.default, (*leaves, True), test_utils=checks)


@needs_triton
@pytest.mark.parametrize("spec", [
    "hmamba:D=4:N=2:H=2", "hmamba:field=real:D=4:N=2:H=2", "mamba:D=4:N=2", "htransformer:D=4:N=2:H=2", "pam:D=8:H=2",
])  # fmt: skip
def test_triton_in_models(spec, monkeypatch):
    """Loss and gradients of a model as with the torch paths; also checkpointed, compiled, and under bf16 autocast."""
    small_tiles(monkeypatch)
    model, idx = make(spec, L=1).to(KERNEL_DEVICE), text_batch(1, 10).to(KERNEL_DEVICE)

    def run(backend):
        monkeypatch.setenv("NANOHILBERT_BACKEND", backend)
        model.zero_grad()
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        return [loss, *(p.grad.clone() for p in model.parameters())]

    expected = run("torch")
    with torch.autocast(KERNEL_DEVICE, torch.bfloat16):
        loose = {"atol": 1e-3, "rtol": 2e-2} if "mamba" in spec else {"atol": 5e-3, "rtol": 5e-2}  # products in bf16
        torch.testing.assert_close(run("triton"), run("torch"), **loose)
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    model.checkpointing = True
    torch.testing.assert_close(run("triton"), expected, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


def print_resources():
    """Of every launch at the papers' sizes, compiled without a GPU: registers, stack, memory, tensor core products."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found, types = {}, {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
    cuobjdump = Path(kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def record(kernel, programs, *args, **constants):
        key = dtype, kernel.__name__, *sorted(constants.items()), *(x is None for x in args)
        found[key] = dtype, kernel, dict(zip(kernel.arg_names, args)), constants

    os.environ["TRITON_INTERPRET"] = "1"  # lets CPU tensors through; the kernels are compiled all the same
    kernels._launch = record
    sizes = {"B": 1, "T": 1024, "C": 256, "E": 2048, "H": 16, "N": 16, "d": 64}
    for dtype, (function, shapes) in itertools.product((torch.float32, torch.bfloat16), kernels.CHECKS.values()):
        leaves = kernels.check_inputs(shapes, **sizes)
        single = [name in ("A", "dt", "omega", "log_gamma", "state", "h0") for name, _ in shapes]
        leaves = [x.to(torch.float32 if y else dtype).requires_grad_() for x, y in zip(leaves, single)]
        function(*leaves, backend="triton")[0].sum().backward()
    del os.environ["TRITON_INTERPRET"]
    for (dtype, kernel, args, constants), target in itertools.product(found.values(), (80, 90)):
        constexprs, aligned = {(kernel.arg_names.index(key),): x for key, x in constants.items()}, {}

        def described(x, *path, generic=False):
            """The type of an argument, with what a launch would specialize: 1 and None, and what 16 divides."""
            if isinstance(x, tuple):
                return type(x)(*(described(y, *path, i) for i, y in enumerate(x)))
            if isinstance(x, torch.Tensor) or (isinstance(x, int) and x % 16 == 0 and not generic):
                aligned[path] = [["tt.divisibility", 16]]  # noqa: B023
            if x is None or (isinstance(x, int) and x == 1 and not generic):
                constexprs[path] = x  # noqa: B023
                return "constexpr"
            return types[x.dtype] if isinstance(x, torch.Tensor) else "fp32" if isinstance(x, float) else "i32"

        generic = [p.do_not_specialize for p in kernel.params]
        described = {key: described(x, i, generic=generic[i]) for i, (key, x) in enumerate(args.items())}
        source = ASTSource(kernel, described | dict.fromkeys(constants, "constexpr"), constexprs, aligned)
        binary = kernels.triton.compile(source, target=GPUTarget("cuda", target, 32), options=kernels.OPTIONS)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            usage = subprocess.check_output([cuobjdump, "--dump-resource-usage", file.name], text=True)
        use = [re.search(rf"{key}:\d+", usage)[0] for key in ("REG", "STACK", "LOCAL")]
        products = len(re.findall(r"\b(?:wg)?mma\.", binary.asm["ptx"]))
        print(kernel.__name__, target, dtype, *use, f"SHARED:{binary.metadata.shared}", f"MMA:{products}", flush=True)


@pytest.fixture(scope="session", autouse=True)
def background(request):
    """The two long runs of other processes begin with the first test, on the core that the tests leave idle."""
    tests = ["-m", "pytest", "-qx", "-p", "no:cacheprovider", "-k", "triton and not faults", __file__]
    interpreter = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    resources = ["-c", "import test_all; test_all.print_resources()"]
    commands = {"test_interpreter": (tests, interpreter), "test_kernels_compile_for_a100_and_h100": (resources, {})}
    pipes, running = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}, {}
    wanted = {item.name for item in request.session.items} if kernels.triton is not None and not INTERPRETED else ()
    for name in commands.keys() & wanted:
        command, variables = ["nice", sys.executable, *commands[name][0]], commands[name][1]
        running[name] = subprocess.Popen(command, cwd=ROOT, env=ENV | variables, **pipes)
    yield running
    for process in running.values():
        process.kill()


# ----------------------------------------------------------------------------------------------------------------------
# Models

VARIANTS = [  # every model, and every setting that changes what it computes
    "hmamba", "hmamba:field=real", "hmamba:gate=none", "hmamba:scan=clamped", "hmamba:head=mos", "hmamba:head=born",
    "hmamba:field=real:gate=none", "hmamba:N=5:H=3:conv=1", "mamba", "mamba:init=xavier", "mamba:mlp=0",
    "mamba:head=mos", "mamba:N=3:conv=1",
    "htransformer", "htransformer:field=real", "htransformer:score=softmax", "htransformer:field=real:score=softmax",
    "htransformer:N=5:H=3", "transformer", "pam", "pam:order=sequential", "pam:qk=unit", "pam:d=5:H=3",
    "pam:window=5", "pam:window=64:order=sequential", "sam", "sam:order=sequential", "sam:width=50:heads=3",
]  # fmt: skip
EXACT = [v for v in VARIANTS if v != "hmamba:scan=clamped"]  # as printed, its result depends on where segments begin
SOFTMAX = ("htransformer:score=softmax", "htransformer:field=real:score=softmax", "transformer")  # PyTorch's attention


def make(spec, size="tiny", seed=0, **changes):
    torch.manual_seed(seed)
    model_class, config = sample.parse_spec(spec, size, 256)
    return model_class(dataclasses.replace(config, **changes))


def tensors(state):
    return [x for x in tree_leaves(state) if isinstance(x, torch.Tensor)]


def text_batch(B, T):
    return torch.randint(256, (B, T), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("spec, dtype, T", [
    *((v, torch.float64, 70) for v in VARIANTS),
    *(pytest.param(v, torch.float32, 300, marks=pytest.mark.slow) for v in [*sample.MODELS, SOFTMAX[0]]),
])  # fmt: skip
def test_step_and_chunked_prefill_equal_the_full_pass(spec, dtype, T):
    """So no output sees what follows. In float32 to 1e-4: sums of T numbers of size 1 lose at most T 2^-24 each."""
    model, idx = make(spec, L=2 if T < 100 and spec in sample.MODELS else 1).to(dtype), text_batch(2, T)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    full, _, end = model(idx)
    assert [model.train(mode)(idx[:, :5], idx[:, :5])[2] for mode in (True, False)] == [None, None]
    state, stepped, pieces, steps = model.init_state(2), model.init_state(2), [], []
    for piece in idx.split([1, 2, 64, T - 67], 1):
        logits, loss, state = model(piece, piece, state)
        torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), piece.flatten()))
        pieces.append(logits)
    if spec not in EXACT:
        assert (torch.cat(pieces, 1) - full).abs().max() > 0.1
        return
    for token in idx.unbind(1):
        logits, stepped = model.step(token, stepped)
        steps.append(logits)
    for logits in (torch.cat(pieces, 1), torch.stack(steps, 1)):
        torch.testing.assert_close(logits, full, atol=tolerance, rtol=0)
    if not spec.startswith("htransformer"):  # whose newest tokens may be folded or not
        for x, y in zip(tensors(stepped), tensors(end), strict=True):
            assert (x - y).norm() <= tolerance * y.norm()
    for x in tensors([model.init_state(2), end, state, stepped]):  # no views of one another, or of what they come from
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
    if T == 300:  # O(1) memory, but for a cache: Born attention's newest tokens come and go in chunks of 64
        short, long = (sum(x.numel() for x in tensors(model(idx[:, :n])[2])) for n in (164, 292))
        assert (short < long) if spec in SOFTMAX else (short == long)


@torch.no_grad()
@pytest.mark.parametrize("spec", [*sample.MODELS, "hmamba:field=real", SOFTMAX[0], "pam:order=sequential"])
def test_what_does_not_fit_is_refused(spec):
    """No tokens, or of another dtype; targets of another shape or dtype; states of another structure, batch or kind."""
    model, idx = make(spec, L=2), text_batch(2, 5)
    _, loss, state = model(idx, idx, model.init_state(2))
    assert model(idx.int(), idx.int(), model.init_state(2))[1] == loss
    *before, last = state
    parts = ("7", (1, 2), (None, *torch.zeros(2, 2, 1, 1, 1)))
    lasts = [None, 7, last[:-1], (last[-1], *last[1:-1], last[0]), *((*last[:-1], part) for part in parts)]
    states = [before, [*state, last], *([*before, x] for x in lasts), model(idx[:1])[2],
              make("pam:H=2" if spec.startswith(("pam", "sam")) else "pam", L=2)(idx)[2]]  # fmt: skip
    for change in (torch.Tensor.long, torch.Tensor.sum, lambda x: x.to("meta")):
        states.append(tree_map_only(torch.Tensor, change, state))
    none = [torch.zeros(shape, dtype=torch.long) for shape in ((2, 0), (0, 3), (0, 0))]
    for message, calls in (
        ("state|values to unpack", [(idx, targets, wrong) for wrong in states for targets in (None, idx)]),
        (r"targets: torch.* expected int64 of shape \(2, 5\)",
         [(idx, wrong) for wrong in (idx.t(), idx.flatten(), idx[:, :4], idx.float())]),
        ("idx: torch.* expected int64", [(wrong,) for wrong in (idx.float(), idx.byte(), idx > 9)]),
        (r"idx has shape \(.*\); expected \(B, T\) with at least",
         [(x, *more) for x in none for more in ((), (x,), (None, model.init_state(len(x))))]),
    ):  # fmt: skip
        for args in calls:
            with pytest.raises(ValueError, match=message):
                model(*args)
    with pytest.raises(ValueError, match="state"):
        model.step(idx[:, 0], before)


# ---- numbers: dtypes, derivatives, backends, positions ----


@pytest.mark.parametrize("spec", VARIANTS)
def test_dtypes(spec):
    """float64 stays float64. Half-precision parameters give float32 logits, losses and sums, off by a few roundings."""
    torch.set_default_dtype(torch.float64)
    try:
        assert {p.dtype for p in make(spec, L=1).parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)
    idx = text_batch(2, 24)
    for dtype, eps in ((torch.float64, 1e-12), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)):
        model = make(spec, L=1).to(dtype)
        logits, loss, _ = model(idx, idx)
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        step, state = model.step(idx[:, 0], model(idx)[2])
        widened = torch.promote_types(dtype, torch.float32)
        assert {x.dtype for x in (logits, loss, step)} == {widened}
        for x in tensors(state):  # inputs of the convolution, and of PyTorch's attention, are held as they came
            assert x.dtype == widened or x.shape[2:] == (2 * model.config.D,) or spec in SOFTMAX
        found = torch.cat([p.grad.double().flatten() for p in model.parameters()])
        model.double().zero_grad()
        exact, loss, _ = model(idx, idx)
        loss.backward()
        if spec not in ("hmamba:head=born", "pam:qk=unit"):  # log |x|^2 near 0, q / |q| at a small |q|
            assert (logits - exact).norm() <= 8 * eps * exact.norm()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        roundings = 128 if spec.startswith("sam") else 8  # at the kink of a ReLU some turn a gradient off
        assert (found - gradient).norm() <= roundings * eps * gradient.norm()


@pytest.mark.parametrize("spec", VARIANTS)
def test_derivatives(spec, monkeypatch):
    """By every parameter, through a state; the reference's forward mode agrees. That of the operators is refused."""
    small = {"transformer": {"head": 4}, "pam": {"d": 2}, "sam": {"d": 2}}.get(spec, {})
    model, idx = make(spec, V=11, D=8, L=1, **small).double(), torch.arange(10).view(2, 5)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tangents = {name: randn(*p.shape, 1, seed=i).squeeze(-1) for i, (name, p) in enumerate(parameters.items())}

    def run(values):
        one, _, state = torch.func.functional_call(model, values, (idx[:, :3],))
        two, _, state = torch.func.functional_call(model, values, (idx[:, 3:],), {"state": state})
        logits = torch.cat((one, two), 1)
        return F.cross_entropy(logits.flatten(0, 1), idx.flatten()), logits, state

    def everything():
        loss, logits, state = run(dict(model.named_parameters()))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return [*gradients, logits, *([] if "htransformer" in spec else tensors(state))]

    plain = everything()
    gradients = plain[: len(parameters)]
    assert all(g.abs().max() > 0 for g in gradients)  # nothing is dead, and DDP finds nothing unused
    if spec in EXACT:  # the clamped scan is plain PyTorch
        with pytest.raises(NotImplementedError, match="forward AD" if spec in SOFTMAX else "backend='reference'"):
            torch.func.jvp(lambda values: run(values)[0], (parameters,), (tangents,))
    monkeypatch.setenv("NANOHILBERT_BACKEND", "reference")
    torch.testing.assert_close(everything(), plain, atol=1e-10, rtol=1e-9)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, tangent = torch.func.jvp(lambda values: run(values)[0], (parameters,), (tangents,))
    along = sum((g * t).sum() for g, t in zip(gradients, tangents.values()))
    torch.testing.assert_close(tangent, along, atol=1e-10, rtol=1e-9)


def moved(state, position):
    """A state before the first token, with another position of that token."""
    return tree_map_only(int, lambda _: position, state)


@torch.no_grad()
@pytest.mark.parametrize(
    ("spec", "autocast"),  # under which softmax attention rounds what has been turned
    [(spec, False) for spec in ("htransformer", SOFTMAX[0], "transformer", "pam", "sam", "pam:window=7")]
    + [(spec, True) for spec in ("htransformer", "pam", "sam")],
)
def test_only_relative_positions_count(spec, autocast):
    """The same tokens far away: the same logits. Under bf16 autocast the angles are float32 all the same."""
    model, idx = make(spec, L=2), text_batch(2, 64)
    seen = slice(6 if "window" in spec else 0, None)  # a window before the first token holds zeros, as keys if far away
    for p in model.parameters():
        p.mul_(1.5)  # so that attention has more of a say than at the start
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        near = model(idx)[0]
        assert (model(idx, state=model.init_state(2))[0] == near).all()
        for position in (1000, 10**4, 10**6, 10**7, 2**24 - 10):
            off = (model(idx, state=moved(model.init_state(2), position))[0] - near)[:, seen]
            assert off.norm() <= 0.02 * near.norm() if autocast else off.abs().max() <= 1e-4, position


@pytest.mark.parametrize("position", [0, 200, 10**4, 10**7])
def test_gradient_of_the_frequencies(position):
    """After a segment that gets no gradient, dL/domega in float32 is that in float64, however far the text has gone."""
    model, idx, gradients = make("htransformer", L=1), text_batch(2, 40), []
    for dtype in (torch.float32, torch.float64):
        with torch.no_grad():
            _, _, state = model.to(dtype)(idx, state=moved(model.init_state(2), position))
        gradients += torch.autograd.grad(model(idx, idx, state)[1], model.layers[0].omega)
    assert (gradients[0] - gradients[1]).norm() <= 1e-4 * gradients[1].norm()


@pytest.mark.parametrize("name", ["hmamba", "htransformer", "pam", "csp"])
def test_a_model_file_stands_alone(name, monkeypatch, capsys):
    """Of this repository it imports kernels alone: a fork needs one file. As a program it says what it is."""
    imported = set(re.findall(r"^(?:from|import) (\w+)", (ROOT / f"{name}.py").read_text(), re.M))
    assert imported & {path.stem for path in ROOT.glob("*.py")} == {"kernels"}
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert (exit.value.code, err) == (0, "") and "No flags" in out and importlib.import_module(name).__doc__[:20] in out


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*sample.MODELS, "hmamba:field=real", "htransformer:score=softmax", "pam:qk=unit"])
def test_what_bf16_costs(spec):
    """How far a trained model's gradient under autocast is off; more at the kink of SAM's ReLU and Mamba's dt."""
    if spec in SOFTMAX:  # fails in bf16 where ATEN_CPU_CAPABILITY hides the AVX-512 of the processor
        try:
            F.scaled_dot_product_attention(*torch.zeros(3, 2, 4, 64, 32, dtype=torch.bfloat16), is_causal=True)
        except RuntimeError as e:
            pytest.skip(str(e))
    bound = {"mamba": 0.04, "sam": 0.08}.get(spec, 0.015)
    model, text = make(spec, L=2), torch.tensor(list((ROOT / "LICENSE").read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def gradient(seed, autocast=False):
        starts = torch.randint(len(text) - 65, (4, 1), generator=torch.Generator().manual_seed(seed))
        windows = text[starts + torch.arange(65)]
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(windows[:, :-1], windows[:, 1:])[1]
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    for step in range(30):
        gradient(step)
        optimizer.step()
    (loss, exact), (rounded, near) = gradient(99), gradient(99, autocast=True)
    assert loss < 3.5  # of 5.5 at the start
    assert rounded == pytest.approx(loss, abs=0.01)
    assert (near - exact).norm() <= bound * exact.norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert len(list(sample.generate(model.eval(), list(range(70)), 70))) == 70


@torch.no_grad()
@pytest.mark.parametrize("field", ["complex", "real"])
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_a_slow_gate_survives_a_thousand_steps(precision, field):
    """sigmoid(6)^1024 = 0.079; were the gate rounded to bf16, as autocast alone would, 0.018 would be left."""
    layer, x = make(f"hmamba:field={field}", L=1).layers[0], randn(1, 1024, 128).float()
    torch.nn.init.zeros_(layer.param_proj.weight)
    layer.param_proj.bias[2 * 2 * 64 :][: layer.widths["gate"]] = 6
    if precision == "bfloat16":
        layer, x = layer.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        _, (_, psi) = layer(x, layer.init_state(1))
    left = math.exp(-1024 * math.log1p(math.exp(-6)))  # float32: 1,024 roundings of 2^-24
    torch.testing.assert_close(psi.norm(dim=-1), torch.full((1, 4, 16), left), atol=0, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*sample.MODELS, "htransformer:score=softmax"])
def test_checkpointing_and_compile_change_nothing(spec):
    model, idx = make(spec, L=1), text_batch(2, 65)

    def run(position=0):
        logits, _, _ = model(idx[:, :-1], state=moved(model.init_state(2), position))
        loss = F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten())
        return [logits, *torch.autograd.grad(loss, list(model.parameters()))]

    plain, far, passes = run(), run(300), []
    counter = next(model.layers[0].children()).register_forward_hook(lambda *_: passes.append(1))
    model.checkpointing = True
    assert all(torch.equal(x, y) for x, y in zip(plain, run()))
    assert len(passes) == 2  # once forward, once more in the backward
    counter.remove()
    model.layers[0].compile(backend="aot_eager", fullgraph=True)  # the scans are single nodes: no graph break
    for checkpointing, position, expected in ((True, 0, plain), (False, 0, plain), (False, 300, far)):
        model.checkpointing = checkpointing
        torch.testing.assert_close(run(position), expected, atol=1e-6, rtol=1e-4)
    torch._dynamo.reset()


# ---- counts, sizes, initialisation ----


def on_meta(spec, size="tiny", **changes):
    with torch.device("meta"):
        return make(spec, size, **changes)


def count(spec, size="tiny", **changes):
    return on_meta(spec, size, **changes).num_params()["total"]


def test_parameter_counts():
    """QS 5.7: 253M, pairs within 0.02 %, worked out by hand; at every size within one unit of the twin's width."""
    for name, total in {"hmamba": 253_033_856, "mamba": 253_051_904, "htransformer": 253_107_584,
                        "transformer": 253_150_208}.items():  # fmt: skip
        assert count(name, "253m") == total
    assert hmamba.matched_width(hmamba.MambaConfig(D=1024, L=24, H=16)) == 1258  # the paper's width
    for size, c in hmamba.Mamba.SIZES.items():
        assert abs(count("hmamba", size) - count("mamba", size)) <= 3 * c.D * c.L
        assert abs(count("htransformer", size) - count("transformer", size)) <= 2 * c.D * c.L
    for heads in "N=5", "H=3":
        assert abs(count(f"hmamba:{heads}") - count(f"mamba:{heads}")) <= 3 * 128 * 4
        assert abs(count(f"htransformer:{heads}") - count(f"transformer:{heads}")) <= 2 * 128 * 4
    assert len({count(v) for v in VARIANTS if v.startswith("htransformer") and "N=" not in v}) == 1  # the factorial
    for spec in VARIANTS:
        model = on_meta(spec, L=1)
        counts = model.num_params()
        assert sum(counts.values()) == 2 * counts["total"] == 2 * sum(p.numel() for p in model.parameters())
        idx = torch.zeros(2, 70, dtype=torch.long, device="meta")
        logits, _, state = model(idx)
        assert logits.shape == model(idx, state=state)[0].shape == (2, 70, 256)
        assert ("omega" in counts) == (spec.startswith("htransformer") or spec[0] == "h" and "real" not in spec)
        model.turn = torch.nn.Parameter(torch.ones(5, dtype=torch.cfloat))  # a fork's
        assert model.num_params()["turn"] == 10
    # 6N+1 reals a head, and a bias; without a gate N fewer, without delta and dt N+1 fewer and a gate for each real
    for spec, reals in (("hmamba", 97), ("hmamba:gate=none", 81), ("hmamba:field=real", 96)):
        assert on_meta(spec).num_params()["param_proj"] == 4 * 4 * reals * 257


def test_pam_sizes_are_those_of_table_1():
    """PAM table 1 at the GPT-2 vocabulary, states of one size, and the Transformer (IV.3, matched dense)."""
    blocks = {"5m": 1.69, "10m": 1.57, "25m": 1.53, "50m": 1.30, "100m": 1.17}  # PAPERS.md: SAM's over PAM's
    for size, millions in {"5m": 4.98, "10m": 9.9, "25m": 25.0, "50m": 49.6, "100m": 99.9}.items():
        models = [on_meta(name, size, V=50257) for name in ("pam", "sam", "transformer")]
        total, twin, dense = (model.num_params()["total"] for model in models)
        assert total == pytest.approx(1e6 * millions, rel=0.01), size
        assert twin == pytest.approx(total, rel=0.005) and dense == pytest.approx(total, rel=1e-3), size
        counts = [model.num_params() for model in models[:2]]
        own, twins = (x["total"] - x["embedding"] for x in counts)
        assert twins / own == pytest.approx(blocks[size], abs=0.005), size
        assert len(models[2].layers) == len(models[0].layers) and 3 < models[2].config.mlp / models[2].config.D < 5
        states = [[sum(x.numel() for x in tensors(layer)) for layer in m.init_state(1)] for m in models[:2]]
        assert states[0] == states[1]
    assert set(states[0]) == {49_152}  # 100m, PAM IV.3: floats a layer, whatever T
    heads = {"D": 16, "H": 16, "d": 64}  # far wider than D: one real head for sixteen complex ones
    twin, total = pam.SAM(pam.SAMConfig(**heads, heads=1)), pam.PAM(pam.PAMConfig(**heads)).num_params()["total"]
    assert twin.num_params()["total"] == pytest.approx(total, rel=0.01)
    # The paper's SAM of 10M has D = 140 with 8 heads, 1.1 % above PAM; the nearest is one less.
    assert pam.matched_width(dataclasses.replace(pam.SAM.SIZES["10m"], V=50257)) == 139
    D, H, d = 100, 4, 16  # of tiny, by hand
    hand = 2 * 256 * D + D + 4 * (18 * D**2 + 8 * D * H * d + 3 * D * H + 2 * H + 5 * D + 2)
    assert count("pam:order=sequential") == count("pam") == hand == 982_940
    # The hybrid: q, k, v and output maps of each windowed block, and a scale; 97 wide it matches the plain model.
    assert count("pam:window=9") == count("pam:window=9:order=sequential") == hand + 8 * D * H * d + 1
    assert count("pam:D=97:window=9") == pytest.approx(hand, rel=1e-3)
    assert [b.windowed for b in on_meta("pam:window=9", L=6).layers] == [False, True, *3 * [False], True]


def test_flops():
    """6 flops a matrix parameter, and the recurrence, by hand. A complex map of n x m costs 4nm multiplications."""
    # Of attention at T = 1024: 512 keys, products of width 64 (32) for scores and values.
    for spec, layers_heads, recurrence in (
        ("hmamba", 24 * 16, 16 * (8 + 6)), ("mamba", 24, 2048 * 16 * 7), ("transformer", 24 * 16, 512 * 2 * (64 + 64)),
        ("htransformer", 24 * 16, 512 * 2 * 3 * 32), ("htransformer:score=softmax", 24 * 16, 512 * 2 * 2 * 32),
    ):  # fmt: skip
        model = on_meta(spec, "253m")
        named = [(name.split(".")[-1], p) for name, p in model.named_parameters() if p.dim() > 1]
        matrices = sum(p.numel() for name, p in named if name not in ("A_log", "omega", "e", "psi0"))
        assert model.flops_per_token(1024) == 6 * matrices + 3 * layers_heads * recurrence, spec
    model, twin = (on_meta(name, "100m", V=50257) for name in ("pam", "sam"))
    D, w = 384, twin.config.width
    maps, real_maps = 4 * 9 * D**2 + 4 * 4 * D * D + 3 * D * 6, 9 * w**2 + 4 * w * 12 * 64 + 2 * w * 12
    assert model.flops_per_token(512) == 6 * (16 * maps + 2 * D * 50257) + 3 * 16 * 6 * 64**2 * 18
    for W, T in ((64, 512), (64, 64), (64, 5), (10**5, 512)):  # four of its 16 blocks attend, with products of width 2d
        hybrid, keys = on_meta(f"pam:window={W}", "100m", V=50257), sum(min(t, W) for t in range(1, T + 1)) / T
        windows = 4 * (6 * 16 * D**2 + 3 * 6 * keys * 2 * 2 * 128)
        assert hybrid.flops_per_token(T) == pytest.approx(model.flops_per_token(T) + windows, rel=1e-9), (W, T)
    assert twin.flops_per_token(512) == 6 * (16 * real_maps + w * 50257) + 3 * 16 * 12 * 64**2 * 5


def test_initialisation_is_as_the_docstrings_say():
    def block(spec, **changes):
        model_class, config = sample.parse_spec(spec, "small", 256)
        torch.manual_seed(0)
        return model_class.Block(dataclasses.replace(config, **changes))

    state, attention, twin = block("hmamba", H=64), block("htransformer"), block("transformer", mlp=500)
    mixer, xavier = (block(spec, mlp=0).mixer for spec in ("mamba", "mamba:init=xavier"))
    for weight, scale in (
        *((proj.weight, 1) for host in (state, attention) for proj in (host.in_proj, host.back_proj)),
        *((x.out_proj.weight, 10**-0.5) for x in (state, attention, mixer)), (xavier.out_proj.weight, 1),
        (twin.qkv_proj.weight[:512], 1), (twin.out_proj.weight, 20**-0.5), (twin.mlp_out.weight, 20**-0.5),
        (block("mamba", mlp=500).mlp_out.weight, 10**-0.5), (block("mamba:init=xavier", mlp=500).mlp_out.weight, 1),
    ):  # fmt: skip
        assert weight.abs().max().item() == pytest.approx((6 / sum(weight.shape)) ** 0.5 * scale, rel=0.02)
    for host, low, high in ((state, -1, 1), (attention, -2, 0)):
        assert host.param_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
        sign = torch.tensor([1.0, -1]).repeat(8)
        torch.testing.assert_close(host.omega, (sign * torch.logspace(low, high, 16)).expand(len(host.omega), 16))
        assert (host.param_proj.bias[:-64] == 0).all()  # all but H-Mamba's dt
    assert attention.e.std().item() == pytest.approx(0.5**0.5, rel=0.1)
    assert state.init_state(3)[1].mean((1, 2)).abs().max() < 0.1  # all directions, not the real axis
    for bias in (state.param_proj.bias[-64:], mixer.dt_proj.bias):  # H-Mamba has 64 of them, Mamba a thousand
        dt = F.softplus(bias)
        assert 0.999e-3 <= dt.min() < (2e-3 if len(dt) == 64 else 1.2e-3) and 0.09 < dt.max() <= 0.1 * 1.001
    torch.testing.assert_close(-mixer.A_log.exp(), -torch.arange(1.0, 17).expand(1024, 16))
    assert (mixer.D == 1).all() and (xavier.dt_proj.bias == 0).all()
    for spec in sample.MODELS:
        assert make(spec, L=1).embedding.weight.std().item() == pytest.approx(0.01, rel=0.02)
    layer = make("pam", L=1).layers[0]
    for p, value in ((layer.alpha_cgu, 1.0), (layer.alpha_pam, 0.1), (layer.cgu.act.bias, 0),
                     (layer.pam.dt_proj.bias, -4), (layer.pam.protect_proj.bias, -3)):  # fmt: skip
        torch.testing.assert_close(p, torch.full_like(p, value))
    for weight in (w for m in layer.modules() if isinstance(m, pam.ComplexLinear) for w in (m.weight_r, m.weight_i)):
        gram = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
        torch.testing.assert_close(gram, 0.5 * torch.eye(len(gram)), atol=1e-5, rtol=0)


def test_decay_groups():
    """Rank >= 2 decays (QS section 7), the dynamics do not; every parameter is in one group."""
    exempt = {"hmamba": "omega psi0", "mamba": "A_log D", "mamba:init=xavier": "", "htransformer": "omega e",
              "transformer": "", "pam": "", "sam": ""}  # fmt: skip
    for spec, names in exempt.items():
        model, expected = make(spec, L=1), {"decay": set(), "no_decay": set()}
        for name, p in model.named_parameters():
            decays = p.dim() > 1 and name.split(".")[-1] not in names.split()
            expected["decay" if decays else "no_decay"].add(name.replace(".0.", ".*."))
        _, groups = train.make_optimizer(model, 1e-3, CPU)
        assert {key: set(names) for key, names in groups.items()} == expected, spec


# ---- each model again, as its paper writes it, in complex128 ----


def as_numbers(z):
    """Real parts, then imaginary parts, on the last axis."""
    return torch.cat((z.real, z.imag), -1)


def paired(x):
    """Numbers (re, im, re, im, ...) on the last axis as complex ones."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def normed(z, weight, eps=1e-5):
    return weight * z / (z.abs().square().mean(-1, keepdim=True) + eps).sqrt()


def turned(z, omega=None):
    """z (..., T, n) times e^{i t omega}, omega (..., n) or the rotary frequencies."""
    T, n = z.shape[-2:]
    omega = 10000.0 ** (-torch.arange(n).double() / n) if omega is None else omega
    return z * torch.exp(1j * torch.arange(T).view(T, 1) * omega.unsqueeze(-2))


def softmax_attention(q, k, v, window=math.inf):
    """By Re <q|k> / sqrt(2N) of complex q and k (..., T, N), to the present and the window - 1 positions before it."""
    ago = torch.arange(q.shape[-2]).view(-1, 1) - torch.arange(q.shape[-2])
    scores = (q.conj() @ k.mT).real / (2 * q.shape[-1]) ** 0.5
    return scores.masked_fill((ago < 0) | (ago >= window), -math.inf).softmax(-1).to(v.dtype) @ v


def causal_conv(x, conv):
    return F.conv1d(F.pad(x.mT, (conv.kernel_size[0] - 1, 0)), conv.weight, conv.bias, groups=len(conv.weight)).mT


def h_block(layer, x, c):
    """The shared block of QS 5.7."""
    u, z = layer.in_proj(normed(x, layer.norm.weight)).chunk(2, -1)
    p = layer.param_proj(F.silu(causal_conv(u, layer.conv1d)))
    y = (h_mamba if hasattr(c, "scan") else h_transformer)(layer, p, c)
    return x + layer.out_proj(layer.back_proj(y) * F.silu(z))


def h_mamba(layer, p, c):
    """Eqs. 2-3, Algorithm 1 and the readout of QS 5.5, of what param_proj gives."""
    p, ys = dict(zip(layer.widths, p.split(list(layer.widths.values()), -1))), []
    psi0 = (layer.psi0 / layer.psi0.norm(dim=-1, keepdim=True)).flatten()
    b, C, psi = (paired(y) if c.field == "complex" else y for y in (p["b"], p["C"], psi0))
    a = p["gate"].sigmoid() if c.gate == "sigmoid" else torch.ones_like(p["b"][..., :1])
    if c.field == "complex":
        dt = F.softplus(p["dt"]).clamp(max=0.1).repeat_interleave(c.N, -1)
        phi = dt / 2 * (p["delta"] + layer.omega.flatten())
        cayley = (1 + 1j * phi) / (1 - 1j * phi)
        assert (dt == 0.1).any() and (dt < 0.1).any() and cayley.angle().abs().max() > 3
        torch.testing.assert_close(cayley.abs(), torch.ones_like(phi))  # unit modulus
        a = a * cayley
    for t in range(p["b"].shape[1]):
        psi = a[:, t] * psi + b[:, t]
        ys.append(C[:, t].conj() * psi)
    y = torch.stack(ys, 1)
    return as_numbers(y) if c.field == "complex" else y


def h_transformer(layer, p, c):
    """Rotation, score and readout (QS 5.5, 5.7, 9.2), of what param_proj gives."""
    q, k, v = paired(p[..., : -c.H]).unflatten(-1, (3, c.H, c.N)).permute(2, 0, 3, 1, 4)  # (B, H, T, N)
    q_turned, k_turned = turned(q, layer.omega), turned(k, layer.omega)
    if c.score == "softmax":
        o = softmax_attention(q_turned, k_turned, v)
    else:
        product = q_turned.conj() @ k_turned.mT
        w = (product.abs() if c.field == "complex" else product.real).square().tril()
        # The denominator is raised by a millionth of the summed |k_j|^2, for a query of unit norm (born_attention).
        floor = 1e-6 * (k.abs().square().sum(-1).cumsum(-1) * q.abs().square().sum(-1)).unsqueeze(-1)
        o = (w / (w.sum(-1, keepdim=True) + floor)).to(v.dtype) @ v
    e = (torch.view_as_complex(layer.e) / layer.e.norm(dim=-1)).unsqueeze(1)  # (H, 1, N)
    e_real, q_real, o_real = (torch.view_as_real(y) for y in (e, q, o))
    y = torch.view_as_real((e * q).conj() * o) if c.field == "complex" else e_real * q_real * o_real
    return y.transpose(1, 2).flatten(2)


def transformer_block(layer, x, c):
    """Pre-norm, rotary positions on pairs (i, i + head / 2), softmax, SiLU; and the parts that a fork adds."""
    parts = getattr(c, "parts", "").split("+")
    u = z = normed(x, layer.norm.weight)
    u = layer.qkv_proj(F.silu(causal_conv(u, layer.conv1d)) if "conv" in parts else u)
    u = causal_conv(u, layer.conv1d_qkv) if "qkvconv" in parts else u
    q, k, v = u.unflatten(-1, (3, -1, c.head)).permute(2, 0, 3, 1, 4)
    q, k = (turned(torch.complex(*y.chunk(2, -1)), layer.omega if "frequencies" in parts else None) for y in (q, k))
    y = softmax_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + layer.out_proj(y * F.silu(layer.gate_proj(z)) if "gate" in parts else y)
    z = normed(x, layer.mlp_norm.weight)
    hidden = layer.mlp_in(z)
    return x + layer.mlp_out(hidden * F.silu(layer.mlp_gate(z)) if "swiglu" in parts else F.silu(hidden))


def pam_block(layer, z, c):
    """PAM eqs. 1-7, the decay as eq. 5 prints it, and the hybrid of section III; SAM in real numbers."""
    real, H = not z.is_complex(), getattr(c, "heads", c.H)

    def linear(proj, z):
        return z @ (proj.weight if real else torch.complex(proj.weight_r, proj.weight_i)).T

    def qkv(proj):
        return linear(proj, x).unflatten(-1, (3, H, c.d)).permute(2, 0, 3, 1, 4)  # (B, H, T, d) each

    if layer.mixes:  # eqs. 1-2
        x, m = normed(z, layer.cgu_norm.weight, 1e-6), layer.cgu
        g, u = linear(m.gate_proj, x), linear(m.up_proj, x)
        y = F.relu(u) if real else g.sgn() * F.relu(u.abs() + m.act.bias) * u.sgn()  # sgn: z / |z|
        z = z + layer.alpha_cgu * linear(m.down_proj, y * (g if real else g.abs()).sigmoid())
    if layer.remembers:  # eqs. 3-7
        x, m, S, ys = normed(z, layer.pam_norm.weight, 1e-6), layer.pam, 0, []
        q, k, v = qkv(m.qkv_proj)
        if getattr(c, "qk", "free") == "unit":
            q, k = q.sgn(), k.sgn()
        if c.order == "interleaved":  # SAM turns pairs of channels: its <k|q> is then the real part
            q, k = (turned(paired(y) if real else y) for y in (q, k))
        decay = torch.exp(-F.softplus(m.dt_proj(x if real else as_numbers(x))))
        p = m.protect_proj(x.abs()).sigmoid()
        gamma, v = (decay * (1 - p) + p).mT[..., None, None], v * (1 - p).mT.unsqueeze(-1)  # eq. 5
        for t in range(z.shape[1]):
            S = gamma[:, :, t] * S + v[:, :, t, :, None] * k[:, :, t, None].conj()  # eq. 6
            ys.append(S @ (q[:, :, t, :, None] / c.d**0.5))  # eq. 7
        y = torch.cat(ys, -1).permute(0, 3, 1, 2).flatten(2)
        z = z + layer.alpha_pam * linear(m.out_proj, y.real if real else y)
    if layer.windowed:
        q, k, v = qkv(layer.window.qkv_proj)
        y = softmax_attention(turned(q), turned(k), v, c.window).transpose(1, 2).flatten(2)
        z = z + layer.alpha_window * linear(layer.window.out_proj, y)
    return z


HOST = f"{ROOT}/results/host/variants.py:"
BLOCKS = {hmamba.HMambaBlock: h_block, htransformer.HTransformerBlock: h_block, pam.Block: pam_block,
          htransformer.TransformerBlock: transformer_block}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("spec", [
    *(v for v in EXACT if v[:5] != "mamba"),
    pytest.param(HOST + "TransformerPlus:parts=conv+qkvconv+gate+swiglu+frequencies", id="TransformerPlus"),
])
def test_each_model_is_what_its_paper_writes(spec):
    """Its logits, of weights away from their start, where everything is nearly linear and much is 0 or 1."""
    model, idx = make(sample.import_models(spec), L=2).double(), text_batch(2, 30)
    for name, p in model.named_parameters():
        if p.dim() < 2:
            p.add_(0.3 * torch.sin(torch.arange(p.numel()).double()).view(p.shape))
        elif "param_proj" in name or "embedding" in name:
            p.mul_(20)
        elif "omega" in name and spec.startswith("hmamba"):
            p.mul_(100)  # large phases too; dt meets its clamp
    is_pam, head = isinstance(model, pam.PAM), getattr(model.config, "head", "softmax")
    x, E = model.embedding(idx), model.embedding.weight
    x, E = (paired(x), paired(E)) if is_pam and not model.real else (x, E)
    for layer in model.layers:
        x = next(block for kind, block in BLOCKS.items() if isinstance(layer, kind))(layer, x, model.config)
    x = normed(x, model.norm_f.weight, 1e-6 if is_pam else 1e-5)
    found, expected = model(idx)[0], (x @ E.mH).real
    if head == "mos":
        latent = model.readout.latent(x).tanh().unflatten(-1, (4, -1))
        expected = (model.readout.prior(x).softmax(-1).unsqueeze(-1) * (latent @ E.T).softmax(-1)).sum(-2).log()
    elif head == "born":  # 1e-12 is added to the squares
        with torch.autocast("cpu", torch.bfloat16):  # which would drown what interferes
            torch.testing.assert_close(model.readout(x.float(), E.float()).double(), found, atol=1e-3, rtol=0)
        p = (paired(x) @ paired(E).mH).abs().square()
        found, expected = found.exp(), p / p.sum(-1, keepdim=True)
    # PAM's moduli have 1e-12 added to their squares.
    torch.testing.assert_close(found, expected, atol=1e-5 if is_pam else 1e-9, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("spec", [
    "HTransformerMinus", "HTransformerMinus:conv=1", "HTransformerMinus:gate=none", "HTransformerMinus:gate=add",
    "HTransformerMinus:readout=plain", "TransformerPlus", "TransformerPlus:parts=qkvconv",
    "TransformerPlus:parts=swiglu", "TransformerPlus:parts=conv+gate+frequencies", "HMambaMinus", "HMambaMinus:conv=1",
    "HMambaMinus:omega=zero:psi0=zero",
])  # fmt: skip
def test_parts_of_the_host(spec):
    """Forks: the parent's number of parameters, none unused, and the parent itself where no part is varied."""
    parent = make(re.split("Minus|Plus", spec)[0].lower()).double()
    model, idx = make(sample.import_models(HOST + spec)).double(), text_batch(2, 12)
    assert model.num_params()["total"] == pytest.approx(parent.num_params()["total"], rel=5e-3)
    whole, state, pieces = model(idx)[0], None, []
    for x in idx.split(5, 1):
        logits, _, state = model(x, state=state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    with torch.enable_grad():
        model(idx, idx)[1].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    if [x.shape for x in model.state_dict().values()] == [x.shape for x in parent.state_dict().values()]:
        parent.load_state_dict(model.state_dict())
        assert torch.allclose(whole, parent(idx)[0]) == (":" not in spec)
    if "frequencies" in spec:
        omega = model.layers[0].omega.abs().log10()
        torch.testing.assert_close(omega, torch.linspace(-2, 0, 16).double().expand(4, 16), atol=1e-6, rtol=0)
    if "gate=add" in spec:  # where z is 0, y + silu(z) is y, and y silu(z) is 0
        block, x = model.layers[0], randn(2, 6, 128)
        block.in_proj.weight[256:] = 0
        assert (block(x, block.init_state(2))[0] - x).abs().amax() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("gate", ["sigmoid", "none"])
def test_h_mamba_without_its_clamp(gate, monkeypatch):
    """results/tasks-lm/variants.py: H-Mamba, bit for bit, until a step size passes 0.1."""
    monkeypatch.setattr(sample, "FILES", {})  # another variants.py is known
    spec = f"{ROOT}/results/tasks-lm/variants.py:HMambaUnclamped:gate={gate}"
    model, parent, idx = make(sample.import_models(spec)), make(f"hmamba:gate={gate}"), text_batch(2, 12)
    for steps in (0.09, 0.2):
        for layer in model.layers:
            layer.param_proj.weight[-4:], layer.param_proj.bias[-4:] = 0, math.log(math.expm1(steps))  # dt, by head
        parent.load_state_dict(model.state_dict())
        whole = model(idx)[0]
        assert torch.equal(whole, parent(idx)[0]) == (steps < 0.1)
    first, _, state = model(idx[:, :5])
    torch.testing.assert_close(torch.cat((first, model(idx[:, 5:], state=state)[0]), 1), whole, rtol=0, atol=1e-4)


def test_mamba_with_its_loss_summed():
    """results/english/summed/summed.py: the loss of Mamba, and T times its gradient, exactly as T is a power of two."""
    model, parent = make(sample.import_models(f"{ROOT}/results/english/summed/summed.py:MambaSummed")), make("mamba")
    idx, found = text_batch(2, 17), []
    for m in (model, parent):
        loss = m(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in m.parameters())])
    (loss, *summed), (mean, *grads) = found
    assert loss == mean
    for ours, theirs in zip(summed, grads):
        assert torch.equal(ours, 16 * theirs)


def test_mamba_is_the_published_one():
    """Against logits and loss of transformers 5.24.0 and mambapy 1.2.0, which agree to 4e-7; also in its names."""
    published = [
        [0.2409888, 0.2216169, -0.6595511, 1.02406, -1.274566, 1.38318, -1.33781, 1.143509, -0.8219057, 0.4088035,
         0.04980896],
        [-1.987168, 1.49696, -0.8401037, 0.08972202, 0.670648, -1.356358, 1.891071, -2.215259, 2.292833, -2.115156,
         1.702009],
    ]  # fmt: skip
    mixer = "in_proj.weight conv1d.weight conv1d.bias x_proj.weight dt_proj.weight dt_proj.bias A_log D out_proj.weight"
    layer = ["norm.weight", *(f"mixer.{part}" for part in mixer.split())]
    names = ["embedding.weight", *(f"layers.{i}.{name}" for i in (0, 1) for name in layer), "norm_f.weight"]
    model = hmamba.Mamba(hmamba.MambaConfig(V=11, D=16, L=2, N=4, mlp=0)).double()
    assert set(model.state_dict()) == set(names)
    for k, name in enumerate(names):
        p = model.get_parameter(name).data
        j = torch.arange(p.numel()).double()
        p.copy_((0.3 * torch.sin(1.7 * k + 0.61 * j + 0.013 * j * k)).view(p.shape))
        p += torch.arange(1, 5).double().log() if "A_log" in name else "norm" in name or name.endswith(".D")
        p -= 2 * ("dt_proj.bias" in name)
    b, t = torch.arange(2).view(2, 1), torch.arange(10)
    tokens = (3 * b + 5 * t + t * t) % 11
    logits, loss, _ = model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(logits[:, -1], torch.tensor(published).double(), atol=5e-6, rtol=0)
    assert loss.item() == pytest.approx(3.042665, abs=5e-6)


def test_relative_phase_is_transported_exactly():
    """QS Lemma 6.2: without input phase differences add up, whatever the gates; the magnitude of rho carries these."""
    theta, log_decay = randn(1, 200, 2).requires_grad_(), -randn(1, 200, 2, seed=1).abs()
    psi0 = randn(1, 2, 2, seed=2)
    _, psi = kernels.complex_scan(log_decay, theta, torch.zeros(1, 200, 2, 2).double(), psi0)
    rho, rho0 = (x[0] * x[1].conj() for x in (torch.view_as_complex(psi)[0], torch.view_as_complex(psi0)[0]))
    advance = (theta[0, :, 0] - theta[0, :, 1]).sum()
    torch.testing.assert_close(rho / rho.abs(), rho0 / rho0.abs() * torch.exp(1j * advance))
    torch.testing.assert_close(rho.abs().log(), rho0.abs().log() + log_decay.sum())
    (gradient,) = torch.autograd.grad(rho.angle(), theta)
    torch.testing.assert_close(gradient[0], torch.tensor([1.0, -1.0]).double().expand(200, 2))


@pytest.mark.parametrize("module", [pam.ComplexNorm(7), pam.CGU(7)])
def test_complex_primitives_at_zero(module):
    zero = torch.zeros(1, 2, 7, 2, requires_grad=True)
    out = module(zero)
    (gradient,) = torch.autograd.grad(out.sum(), zero)
    assert (out == 0).all() and gradient.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("spec", ["pam", "sam"])
def test_protected_state_is_frozen(spec):
    """PAM eq. 5: p = 1 keeps S, lets nothing in. gamma is never 0, and 1 - gamma keeps its digits."""
    model = make(spec, L=1)
    layer, x = model.layers[0].pam, randn(1, 30, *((model.config.width,) if model.real else (100, 2))).float()
    rounded = copy.deepcopy(layer).half()
    for gate, exact in zip(rounded.gates(x), copy.deepcopy(rounded).double().gates(x.double())):
        torch.testing.assert_close(gate.double(), exact, rtol=1e-5, atol=0)
    S, p, dt = randn(*layer.init_state(1)[0].shape).float(), layer.protect_proj, layer.dt_proj
    torch.nn.init.zeros_(p.weight)
    for bias, same in ((40.0, True), (-3.0, False)):
        p.bias.fill_(bias)
        _, (after, position) = layer(x, (S, 0))
        assert position == 30 and torch.equal(after, S) == same
    torch.nn.init.zeros_(dt.weight)
    p.bias.fill_(-200.0)
    dt.bias.fill_(500.0)  # an open, fully forgetting gate
    assert (layer.gates(x)[0].isfinite() & (layer.gates(x)[0].exp() < 2e-7)).all()
    dt.bias.fill_(-20.0)  # 1 - gamma = 1e-9 and below: neither 0 nor rounding. Nor is 1 - p, where p is 1.
    for logit in (3, 20, 60):
        p.bias.fill_(logit)
        expected = 1 / (1 + math.exp(logit))
        for gate, value in zip(layer.gates(x), (-math.log1p(math.exp(-20)) * expected, expected)):
            torch.testing.assert_close(gate, torch.full_like(gate, value), rtol=1e-5, atol=0)


def test_decoherence_gap_of_equation_8():
    """PAM eq. 8: the diagonal's entropy is log 3, the von Neumann entropy 0; mixed with 1/3 the gap falls to 0."""
    printed, gaps = torch.tensor([[0, -1, -2], [1, 0, -1], [2, 1, 0]]).double(), []
    for p in torch.linspace(0, 1, 6).double():
        rho = (1 - p) * torch.exp(1j * math.pi / 3 * printed) / 3 + p * torch.eye(3) / 3
        eigenvalues = torch.linalg.eigvalsh(rho).clamp(min=0)
        torch.testing.assert_close(eigenvalues, torch.stack((p / 3, p / 3, 1 - 2 * p / 3)))
        diagonal, neumann = (-torch.xlogy(x, x).sum() for x in (rho.diagonal().real, eigenvalues))
        gaps.append((diagonal - neumann).item())
    assert gaps == sorted(gaps, reverse=True)
    assert (gaps[0], gaps[-1]) == pytest.approx((math.log(3), 0), abs=1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# Data


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder to work in, and in it one for prepared corpora, which is not made yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOHILBERT_DATA", str(tmp_path / "cache"))
    data.note_once.cache_clear()
    return tmp_path / "cache"


def write_tree(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def text(size, seed=0):
    return np.random.RandomState(seed).randint(32, 127, size, "u1").tobytes()


def sha(content):
    return hashlib.sha256(content).hexdigest()


def flip(content):
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]


def documents(count, seed=0):
    """`count` documents of ASCII letters, of 0 to 2000 bytes."""
    rng = np.random.RandomState(seed)
    return [rng.choice(np.frombuffer(b"etaoin shrdlu\n", "u1"), rng.randint(2000)).tobytes() for _ in range(count)]


def joined(texts):
    """What documents become; a null is none."""
    return b"".join(t + b"\n\n" for t in texts if t is not None)


def parquet(texts, column="text", kind=None, **options):
    """With two columns, and 50 rows in a row group."""
    strings = pa.array((t if t is None else t.decode() for t in texts), kind or pa.string())
    table = pa.table([pa.array(range(len(texts))), strings], names=["id", column])
    pq.write_table(table, f := io.BytesIO(), **{"row_group_size": 50, "compression": "none"} | options)
    return f.getvalue()


def zipped(members, method=zipfile.ZIP_DEFLATED):
    """members: {name or ZipInfo: content}"""
    warnings.filterwarnings("ignore", "Duplicate name")
    with zipfile.ZipFile(f := io.BytesIO(), "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return f.getvalue()


# ---- faults: each is one line on stderr and exit code 2, as `python data.py` prints it ----

TOKENS = np.random.RandomState(0).randint(0, 265, 9000).astype("<u2")  # numbers that could be tokens
NO_COLUMN = b'{"id": 1}\n' * 900
@pytest.mark.parametrize("row", [  # the files (a file: x), the command line, what the message has to say
    ({}, ["nope"], "no corpus 'nope': give a name (stdlib"),
    ({}, [""], "no corpus ''"),
    ({}, ["/dev/zero"], "no regular file"),
    ({}, ["stdlib", "--seq", "0"], "--seq must be at least 1"),
    ({}, ["--verify"], "--verify needs the name or path of a corpus"),
    (b"", ["x"], "error: x holds nothing to train on\n"),
    ({"cache/a": text(900)}, ["cache"], "holds prepared corpora or a run"),
    ({"x/log.jsonl": b'{"event": "header"}'}, ["x"], "holds prepared corpora or a run"),
    ({"x/.h": text(9000), "x/.git/a": text(9000), "x/tables.md": text(900)}, ["x"],
     "train on (left out: hidden: .git, .h; tables of runs: tables.md)"),
    ({f"x/{c}": NO_COLUMN for c in "abcd"}, ["x"], "(left out: JSON lines without a column text: a, b, c, ...)"),
    ({"x/a.TOKENS": text(900)}, ["x"], "(left out: GPT-2's tokens: a.TOKENS)"),
    (parquet(documents(9), "body"), ["x", "--column", "id"], "strings named id (--column): it has {'id': 'int64'"),
    (parquet(documents(9), "id"), ["x", "--column", "id"], "x has no one column of strings named id (--column)"),
    (parquet(documents(99))[:-9], ["x"], "not a readable parquet file"),
    *((flip(zipped({"a": text(9000)}, method)), ["x"], "damaged or encrypted zip") for method in (8, 14)),
    *((b'{"text": "a"}\n' * 9 + b'{"text": ' + value, ["x"], "x, line 10: no JSON with a string named text")
      for value in (b"3}\n", b"[" * 200_000)),
    *((line + b'\n{"text": "a"}\n' * 900, ["x"], "read as it is (JSON lines, the first of which is no JSON)")
      for line in (b'{"text": "a\tb"}', b'{"text": "a",}')),
    (NO_COLUMN, ["x"], 'without a column text): name one with --column, or "" for the lines as they are'),
    *((bom + b'{"text": "' + b"x" * 2**24, ["x"], "x cannot be read as it is (JSON lines of over 16 MB): cut its doc")
      for bom in (b"", b"\xef\xbb\xbf")),
    *((array, ["x"], "jq -c '.[]' x > FILE.jsonl") for array in (b'[{"id": 1, "text": "a"}, {}]', b'[\n{ "id": 1}]')),
    ({"x.tokens": TOKENS.tobytes()}, ["x.tokens"], "says: add --tokens gpt2"),
    *(({name: content}, [name, "--tokens", "gpt2"], message) for name, content, message in (
        ("odd.tokens", TOKENS.tobytes()[:-1], "little-endian uint16: it has 17,999 bytes"),
        ("big.tokens", b"\x01\x00" * 99 + b"\x09\x01", "numbers from 1 to 265"),
        ("bytes.tokens", b"\x02\x00\x09\x00" * 9000, "numbers from 2 to 9"),
        ("wide.tokens", TOKENS.astype("<u4").tobytes(), "numbers from 0 to 264"),
        ("latin.txt", b"the caf\xe9 " * 1000, "latin.txt is not UTF-8 text: byte 7"),
        ("late.txt", b"the a\n" * 90_000 + b"\xe2\x98", "late.txt is not UTF-8 text: byte 540,000"),
        ("blank.txt", b"the a" + b" " * 10**6 + b"the", "from byte 5 on no word ends for more than 400,000"),
    )),
], ids=lambda row: row[2][-30:].strip())  # fmt: skip
def test_data_faults(row, merges, program, cache):
    files, argv, message = row
    write_tree(Path(), files if isinstance(files, dict) else {"x": files})
    done = program(data, *argv)
    assert_refused(done, message)
    assert done[1] == ""
    assert not [p for p in cache.glob("*/*") if p.suffix in (".bin", ".tokens") and p.stat().st_size > 4096]


def test_data_notes_and_bars_end_nothing(program, monkeypatch):
    """A terminal that is gone, a pipe without a reader, a closed stream, none."""
    closed = io.StringIO()
    closed.close()
    gone = [partial(raise_error, OSError(number, "gone")) for number in (5, 32)]  # EIO, EPIPE
    for stream in *(types.SimpleNamespace(write=call, flush=call) for call in gone), closed, None:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setitem(data.progress.keywords, "delay", 0)
        data.note("a")
        with data.progress(range(3), mininterval=0, disable=False) as bar:
            assert list(bar) == [0, 1, 2]
        assert program(data, "nope")[0] == 2
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    monkeypatch.setitem(data.progress.keywords, "delay", 9)
    with data.progress(range(3), disable=False):
        data.note("a")  # below it the bar stands, before its time
    assert "0/3" in shown.getvalue() and not shown.getvalue().rsplit("\r", 2)[1].strip()


@pytest.mark.slow
def test_data_is_read_in_pieces_of_bounded_size(tmp_path):
    """Long documents of a parquet file with small pages."""
    path = tmp_path / "books.parquet"
    pq.write_table(pa.table({"text": [f"{i}" * 1_000_000 for i in range(90)]}), path, write_batch_size=1,
                   use_dictionary=False)  # fmt: skip
    before, held = pa.total_allocated_bytes(), []
    with path.open("rb") as file:
        for document in data.read_parquet(file, path, "text"):
            held.append(pa.total_allocated_bytes() - before)
            assert document[:1].isdigit()
    assert len(held) == 90 and max(held) < 60e6  # of 170


def test_data_programs_with_a_full_disk_for_output(cache):
    """The code is the same; what was to be printed to the other stream is."""
    write_tree(Path("x"), {"a": b"text\n" * 2000, ".hidden": b""})
    with open("/dev/full", "w") as full:
        for argv, code, stream in (["x", "--seq", "16"], 0, "stderr"), ([], 2, "stdout"):
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
            buffered = ENV | {"PYTHONUNBUFFERED": ""}  # or nothing would be left to print at the end
            command = [sys.executable, ROOT / "data.py", *argv]
            done = subprocess.run(command, text=True, check=False, env=buffered, **pipes)
            assert done.returncode == code
            assert code or "size   10,000 bytes" in done.stdout
    assert done.stderr.count("\n") == 1 and "No space left" in done.stderr


# ---- files: what they are shows in their first bytes ----


def test_data_file_is_mapped_where_it_lies(cache):
    """Whatever it is called, and through a link; its name becomes one that is safe for a folder."""
    Path("link.parquet").symlink_to("...")
    names = {"a b/c:d=é,.txt": "c_d___", "a.tar.gz": "a.tar", "...": "_", "n" * 99: "n" * 40, "link.parquet": "link"}
    for file, name in names.items():
        path = write_tree(cache.parent, {file: text(9000)}) / file
        corpus = data.load(str(path), 64, verify=True)
        assert (corpus.name, corpus.path, corpus.vocab_size, corpus.record) == (name, path, 256, {})
        assert isinstance(corpus.tokens, np.memmap) and corpus.tokens.tobytes() == text(9000)
        with pytest.raises(ValueError):
            corpus.tokens[0] = 0  # the user's file is never written
    if sys.platform.startswith("linux"):  # else for one window megabytes were read ahead
        mapping = Path("/proc/self/smaps").read_text().partition(str(path.resolve()))[2]
        assert " rr " in mapping.partition("VmFlags:")[2].partition("\n")[0] + " "
    assert not cache.exists()


DOCUMENTS = [*documents(300), None, "naïve ☃".encode(), b""]  # a null is no document, an empty string is one
LINK = zipfile.ZipInfo("link")
LINK.external_attr = 0o120777 << 16  # its Unix type: a symbolic link
@pytest.mark.parametrize("row", [  # a file; what it becomes; the column
    ("parquet", parquet(DOCUMENTS), joined(DOCUMENTS), None),
    ("zstd", parquet(DOCUMENTS, compression="zstd", row_group_size=7), joined(DOCUMENTS), None),
    ("column", parquet(DOCUMENTS, "body"), joined(DOCUMENTS), "body"),
    ("dictionary", parquet(DOCUMENTS, kind=pa.dictionary(pa.int32(), pa.large_string())), joined(DOCUMENTS), None),
    ("jsonl BOM", b'\xef\xbb\xbf{"text": "' + b"a" * 9000 + b'"}\n{"text": ""}', joined([b"a" * 9000, b""]), None),
    ("jsonl blank", b'\n  {"text": "a"}\n\n' + b' {"text": "b"}\n' * 900, joined([b"a"] + [b"b"] * 900), None),
    ("jsonl", "".join(json.dumps({"a": t if t is None else t.decode()}) + "\n" for t in DOCUMENTS).encode(),
     joined(DOCUMENTS), "a"),
    ("zip", zipped({"./b": text(5000), "a/c": text(4000, 1), ".git/x": b"no", "./a/.DS_Store": b"no", "./": b"",
                    "../b": text(900)}),
     text(900) + text(4000, 1) + text(5000), None),
    ("zip with an update and a link",
     zipped({"a": text(4000), "b": text(900), zipfile.ZipInfo("a"): text(5000, 1), LINK: b"../../etc/passwd"}),
     text(5000, 1) + text(900), None),
    ("zip of others", zipped({"b": zipped({"c": text(900)}), "a": parquet(DOCUMENTS)}),
     joined(DOCUMENTS) + text(900), None),
    ("zip with names of others", zipped(dict.fromkeys(("n/mimetype", "n/data.pkl"), text(900))), text(900) * 2, None),
], ids=lambda row: row[0])  # fmt: skip
def test_data_converted(row, cache):
    """Whatever the file is called, and alone or in a folder; prepared once, and anew if it changed."""
    _, content, expected, column = row
    for name, corpus_name in ("a b.txt", "a_b"), (os.fsdecode(b"caf\xe9.bin"), "caf_"), ("folder/a", "folder"):
        path = write_tree(cache.parent, {name: content}) / name
        given = path.parent if name == "folder/a" else path
        corpus = data.load(given, 64, column=column)
        assert corpus.name == corpus_name and corpus.path.is_relative_to(cache)
        assert corpus.tokens.tobytes() == expected
        assert corpus.sha256 == sha(corpus.tokens) == corpus.record["sha256"]
        assert data.load(str(given), 64, column=column).path.stat().st_ino == corpus.path.stat().st_ino
        path.write_bytes(text(9000))
        assert data.load(given, 64, column=column).tokens.tobytes() == text(9000)


def test_data_of_an_archive_is_told_as_of_a_folder(cache):
    write_tree(Path(), {"x.zip": zipped({"./": b"", "./a": text(9000), "b/.git/c": b"", LINK: b"a"})})
    assert data.load("x.zip", 16).left_out == "hidden: x.zip/b/.git/c; link: x.zip/link"


def test_token_files_have_no_header(tmp_path):
    TOKENS.tofile(tmp_path / "a.tokens")
    data.check_tokens(tmp_path / "a.tokens")
    np.save(tmp_path / "a.npy", TOKENS)
    with pytest.raises(data.InputError, match="a.npy is no file of GPT-2's tokens"):
        data.check_tokens(tmp_path / "a.npy")


def test_data_text_is_text_whatever_it_begins_with(cache):
    """As the formats of other files do; as one object of JSON, or no table at all."""
    for beginning in [
        "%PDF-1.4 begins", "PAR1 is a gene", "PK\3\4", "BZh91AY&SY", "[1, 2]\n", "[{1}]", "\ufeff",
        "\x1b[1mbold\x1b[0m \f\b\x1a", "быть", "生存", "🙂",
        '{"a": "', '{\n"text": 1}\n' * 900, "{}{}" * 900, "{not JSON}\n" * 900,
    ]:  # fmt: skip
        for encoding in ("utf-8",) if not beginning.isascii() else ("utf-8", "latin-1"):
            Path("x").write_bytes((beginning + " na\u00efve caf\u00e9" * 9000).encode(encoding))
            assert data.load("x", 16).path == Path("x"), (beginning, encoding)


torch.save(torch.zeros(9), CHECKPOINT := io.BytesIO())
BINARY = np.random.RandomState(0).bytes(9000)
@pytest.mark.parametrize("content, kind", {  # what is no text, and what is said of it
    b"\x1f\x8b\x08" + BINARY: "(gzip): gunzip -c x > FILE",
    b"BZh91AY&SY" + BINARY: "(bzip2): bunzip2 -c x > FILE",
    b"\xfd7zXZ\0" + BINARY: "(xz): unxz -c x > FILE",
    b"\x28\xb5\x2f\xfd" + BINARY: "(Zstandard): unzstd -c x > FILE",
    b"name".ljust(257, b"\0") + b"ustar" + text(9000): "(tar archive): tar -xf x",
    b"\x93NUMPY" + BINARY: "(numpy array): write GPT-2's tokens as little-endian uint16",
    ("中文汉字测试" * 3000).encode("utf-16"): "(UTF-16 text): iconv -f UTF-16 -t UTF-8 x",  # without a NUL
    ("hi" * 3000).encode("utf-32"): "(UTF-32 text): iconv -f UTF-32 -t UTF-8 x",
    CHECKPOINT.getvalue(): "(checkpoint of PyTorch): it holds no",
    zipped({"word/a.xml": b"x", "[Content_Types].xml": b"x"}):
        "(Office document or e-book): pandoc -t plain x > FILE.txt",
    zipped({"mimetype": b"x"})[:38] + b"application/epub+zip" + BINARY: "(Office document or e-book): pandoc",
    zlib.compress(BINARY): "(binary data): it holds no text to train on",
    ("text " * 900).encode("utf-16-le"): "(binary data)",
    TOKENS.tobytes(): "(binary data)",
    text(60_000) + BINARY: "(binary data)",
    bytes(range(1, 8)) * 20 + text(9000): "(binary data)",
}.items(), ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_data_that_is_no_text(content, kind, program, cache, capsys):
    """Alone it is refused; in a folder, and in an archive, it is left out, and that is said once and in the log."""
    Path("x").write_bytes(content)
    assert_refused(program(data, "x"), f"x cannot be read as it is {kind}")
    assert not cache.exists()
    write_tree(Path("folder"), {"a.txt": text(5000), "z/x.txt": content})
    for _ in range(2):
        corpus = data.load("folder", 16)
        assert corpus.tokens.tobytes() == text(5000)
        assert corpus.summary()["left_out"] == f"{kind[1:].partition(')')[0]}: z/x.txt"
    assert capsys.readouterr().err == f"folder: left out {corpus.left_out}\n"
    Path("y").write_bytes(zipped({"a": text(5000), "x": content}))
    assert data.load("y", 16).tokens.tobytes() == text(5000)
    assert data.load("folder", 16, column="").tokens.tobytes() == text(5000) + content  # all the same


# ---- folders ----


def test_data_folder_is_joined_in_order_of_path(cache, monkeypatch):
    """Of links, hidden names, caches, runs and what is no file nothing is read, and all are told."""
    parts = {"a-b": b"1", "a.txt": b"2", "a/z/y": b"3", "a0": b"4", "b": b"6", "empty": b"", "notes/log.jsonl": b"7",
             "tests/x": b"5", "é": b"8"}  # fmt: skip
    parts = dict(sorted((name, part * 500) for name, part in parts.items()))
    folder = write_tree(cache.parent / "folder", dict(reversed(parts.items())))
    assert data.load("folder", 16).summary().keys() == {"name", "size", "sha256"}
    names = "env/pyvenv.cfg", "env/lib.py", "sub/__pycache__/a.pyc", ".git/x"
    write_tree(folder, dict.fromkeys(names, b"x") | {"runs/r/log.jsonl": b'{"event": "header", "step": 0}\n'})
    for link, to in {"loop": folder, "0": "a0", "gone": "no", "out": "../x"}.items():
        (folder / link).symlink_to(to)
    os.mkfifo(folder / "pipe")
    monkeypatch.setenv("NANOHILBERT_DATA", str(folder / "cache"))
    first = data.load("folder", 16)
    assert first.tokens.tobytes() == b"".join(parts.values())
    assert first.path.is_relative_to(folder / "cache") and isinstance(first.tokens, np.memmap)
    write_tree(folder, {"runs/r/best.pt": b"x", "runs/s/log.jsonl": b'{"event": "header"}', "env/b": b"x"})
    monkeypatch.chdir("folder")
    again = data.load(".", 16)
    assert again.path == first.path and again.left_out == (
        "cache: cache, env, sub/__pycache__; folder of a run: runs/r, runs/s; hidden: .git; link: 0, gone, loop, ...; "
        "not a regular file: pipe"
    )


@pytest.mark.slow
def test_training_on_the_folder_that_holds_its_runs(program, no_curves, monkeypatch):
    """--data . : the next run, and a resumed one, have the data of the first, and nothing that a pipe wrote."""
    flags = [*SMALL, "--data", ".", "--eval_seqs", 2]
    Path(".hidden").touch()
    monkeypatch.setattr(data, "note_once", lambda line: Path("tee.txt").write_text(line))
    printed(program(train, *flags, "--steps", 2, "--stop_at", 1, "--out", "runs/a"), err=None)
    os.remove("tee.txt")
    monkeypatch.setattr(data, "note_once", str)
    for argv in ([*flags, "--steps", 1, "--out", "runs/b"], ["--resume", "runs/a"]):
        printed(program(train, *argv), err=None)
    first, second = (report.read_log(Path("runs") / name)[0]["data"] for name in "ab")
    assert first["sha256"] == second["sha256"] == sha(Path("text.txt").read_bytes())
    assert first["left_out"] == "hidden: .hidden"
    assert second["left_out"] == "cache: cache; folder of a run: runs/a; hidden: .hidden"


def test_data_changed_folder_is_prepared_again(cache):
    """Content of equal size and time, a name, one more file: each makes another corpus."""
    folder, paths = write_tree(cache.parent / "x", {"a": text(5000), "b": text(4000, seed=1)}), set()
    then = (folder / "a").stat().st_mtime_ns
    for change in (
        lambda: None, lambda: (folder / "b").rename(folder / "d"), lambda: (folder / "c").write_bytes(b"more"),
        lambda: (folder / "a").write_bytes(text(5000, seed=2)) and os.utime(folder / "a", ns=(then, then)),
    ):  # fmt: skip
        change()
        corpus = data.load(folder, 16)
        assert corpus.tokens.tobytes() == b"".join(p.read_bytes() for p in sorted(folder.iterdir()))
        paths.add(corpus.path)
    assert len(paths) == 4
    file, corpus = corpus.file, None
    assert file.closed  # with its corpus


def test_data_stopped_while_preparing(program, cache, monkeypatch):
    """On a full disk, or while someone writes: no corpus is left, and the next call makes it."""
    folder = write_tree(Path("x"), {"a": text(300_000), "b": text(300_000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        assert_refused(program(data, "x"), "cannot write", "NANOHILBERT_DATA")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kind_of, grown = data.kind_of, b"grown" + text(300_000)
    with monkeypatch.context() as patch:
        patch.setattr(data, "kind_of", lambda *args: (folder / "a").write_bytes(grown) and kind_of(*args))
        assert_refused(program(data, "x"), "changed while it was read")
    assert not list(cache.rglob("*.bin"))
    assert data.load(folder, 16).tokens.tobytes() == grown + text(300_000)


@pytest.mark.slow
def test_no_program_reads_its_own_output(cache):
    """As of `nohup python train.py --data . &`."""
    write_tree(Path("own"), {"a": text(9000), "pic.png": b"\0"})
    with open("own/nohup.out", "w") as out:
        for _ in range(2):
            subprocess.run([sys.executable, ROOT / "data.py", "own"], stdout=out, stderr=subprocess.STDOUT, check=True)
    said = Path("own/nohup.out").read_text()
    assert said.count("own: left out binary data: pic.png; output of this program: nohup.out\n") == 2
    assert said.count("size   9,000 bytes\n") == 2


def test_data_names_and_places(program, cache, monkeypatch):
    """A known name comes before a path; ~ is the user's folder; a file where the cache should be stays."""
    write_tree(Path(), {"stdlib": text(9000)})
    monkeypatch.setenv("HOME", str(cache.parent))
    assert data.find("stdlib")[2]
    assert data.load("./stdlib", 64).tokens.size == data.load("~/stdlib", 64).tokens.size == 9000
    for value, place in ("/elsewhere", Path("/elsewhere")), ("~/y", cache.parent / "y"), ("", ROOT / "data"):
        monkeypatch.setenv("NANOHILBERT_DATA", value)
        assert data.cache_dir() == place
    Path("loop").symlink_to("loop")
    for value in "stdlib/cache", "loop":
        monkeypatch.setenv("NANOHILBERT_DATA", value)
        assert_refused(program(data, "stdlib"), "NANOHILBERT_DATA")


def test_data_stdlib_is_the_library_without_its_tests(cache, monkeypatch):
    kept = {"a.py": b"1" * 900, "b/c.py": b"2" * 900, "b_test.py": b"3" * 900, "test.py": b"4" * 900}
    root = write_tree(cache.parent / "python", dict(reversed(kept.items())))
    for folder in "site-packages", "dist-packages", "test", "b/tests", "b/idle_test", ".hidden":
        write_tree(root, {f"{folder}/x.py": b"x" * 900, f"{folder}/deep/x.py": b"x" * 900})
    write_tree(root, {"b/c.pyc": b"x" * 900, "LICENSE": b"x" * 900, "../custom.py": b"5" * 900})
    for link, to in {"z.py": "../custom.py", "loop": root, "broken.py": "nowhere"}.items():
        (root / link).symlink_to(to)  # a link out may be a distribution's own: Python's folder is trusted
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    corpus = data.load("stdlib", 16)
    assert corpus.tokens.tobytes() == b"".join(kept.values()) + b"5" * 900 and corpus.left_out == ""


@pytest.mark.parametrize("how", ["written", "cut", "tokens", "set back", "before it is hashed", "replaced"])
def test_data_changed_under_a_run(how, merges):
    """The corpus of a run is the one that it began with; what leaves its bytes as they are is no change."""
    Path("x").write_bytes(b"the a " * 9000)
    corpus = data.load("x", 64, tokens="gpt2" if how == "tokens" else "bytes")
    if how != "before it is hashed":
        assert len(corpus.sha256) == 64
        os.utime(corpus.path, ns=(1, 1))
        corpus.check_unchanged()  # the same bytes
    content = corpus.path.read_bytes()
    Path("y").write_bytes(flip(content))
    if how == "replaced":
        Path("y").rename("x")
        corpus.check_unchanged()  # the map is still the old file
        assert corpus.tokens.tobytes() == content
        return
    corpus.path.write_bytes(content[:-4] if how == "cut" else flip(content))
    if how == "set back":
        os.utime(corpus.path, ns=(1, 1))
    with pytest.raises(data.InputError, match="was changed since the run began"):
        corpus.summary() if how == "before it is hashed" else corpus.check_unchanged()


def test_data_command_line(program, cache, monkeypatch):
    monkeypatch.setitem(data.progress.keywords, "delay", 0)  # the bars must stay away for want of a terminal
    for prepared in False, True:
        lines = printed(program(data)).splitlines()
        assert [line.split()[0] for line in lines] == ["stdlib", "enwik8", "owt", "fineweb", "wikitext103", "PATH"]
        assert all("not prepared yet" in line and "GB of disk" in line for line in lines[1:-1])
        assert ("bytes, prepared:" in lines[0]) == prepared
        n = len(data.load("stdlib", 64).split("train"))
        printed(program(data, "stdlib", "--seq", "64"), f"train  {n:,} bytes, {(n - 1) // 64:,} windows of 64")


# ---- downloads: a server with faults stands in for the hub ----


@pytest.fixture
def hub(monkeypatch):
    """A server in place of the hub. log: [path, first byte asked for, Authorization, bytes sent] of each request."""

    class Answer(http.server.BaseHTTPRequestHandler):
        log_message = lambda self, *args: None  # noqa: E731

        def do_GET(self):
            content, queue = server.files.get(self.path), server.faults.get(self.path, [])
            fault = queue.pop(0) if queue else 404 if content is None else ""
            first = int(self.headers.get("Range", "bytes=0-")[6:-1])
            server.log.append(entry := [self.path, first, self.headers.get("Authorization"), 0])
            first = 0 if fault in ("html", "no ranges") else first
            status, body, headers = 206 if first else 200, flip(content) if fault == "flip" else content, {}
            if isinstance(fault, int):
                status, body = fault, b""
            elif fault.startswith("http"):
                status, body, headers["Location"] = 302, b"", fault
                headers |= {"X-Linked-Size": len(content), "X-Linked-Etag": f'"{sha(content)}"'}
            elif fault == "html":
                body, headers["Content-Type"] = b"<html>", "text/html"
            body = body[first:]
            self.send_response(status)
            for header in (headers | {"Content-Length": len(body)}).items():
                self.send_header(*header)
            self.end_headers()
            body = body[: {"drop": len(body) // 2, "stall": len(body) // 2, "nothing": 0}.get(fault)]
            with contextlib.suppress(OSError):
                for i in range(0, len(body), 1 << 16):
                    entry[3] += self.wfile.write(body[i : i + (1 << 16)])
                if fault == "stall":
                    server.over.wait(30)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.files, server.faults, server.log, server.over = {}, {}, [], threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(data, "BACKOFF", 1e-3)
        monkeypatch.setattr(data, "TIMEOUT", (5, 0.3))
        yield server
        server.over.set()
        server.shutdown()


SHARDS = [f"/datasets/x/toy/resolve/abc/sub/{i}.parquet" for i in range(2)]


def toy_recipe(hub, **changes):
    pins = [(data.HUB + name, len(hub.files[name]), sha(hub.files[name])) for name in SHARDS]
    return data.Recipe("toy", tuple(data.Source(*pin) for pin in pins), **changes)


@pytest.fixture
def toy(hub, cache, monkeypatch):
    """A named corpus of three shards on the hub, cut within the second. Returns the bytes that it has to become."""
    docs = [documents(400, seed=i) for i in range(2)]
    hub.files.update(zip(SHARDS, map(parquet, docs)))
    ends = np.cumsum([len(d) + 2 for texts in docs for d in texts])
    recipe = toy_recipe(hub, cut=int(ends[600]) + 1)
    never = data.Source(f"{hub.url}/needed", 9, "0" * 64)
    monkeypatch.setitem(data.NAMED, "toy", dataclasses.replace(recipe, sources=(*recipe.sources, never)))
    return joined(d for texts in docs for d in texts)[: ends[600]]


def assert_whole(cache, expected):
    """The corpus is there, and nothing but the corpus."""
    assert data.load("toy", 64).tokens.tobytes() == expected
    assert sorted(p.name for p in (cache / "toy").iterdir()) == [".lock", "meta.json", "toy.bin"]
    record = json.loads((cache / "toy" / "meta.json").read_text())
    assert record["sha256"] == sha(expected) and record["size"] == len(expected)


def assert_in_vain(cache, message):
    """One line that says what is wrong; and nothing that is there is taken for a corpus."""
    with pytest.raises(data.InputError, match=message) as error:
        data.load("toy", 64)
    assert not list(cache.rglob("*.bin"))
    return str(error.value)


@pytest.mark.parametrize("faults, expected", {  # of a shard's answers; where requests begin, at 0 or behind what came
    "": "0", "drop": "0 h", ",".join(6 * ["drop"]): "0 h h h h h h", "stall": "0 h", "500,408,503": "0 0 0 0",
    "drop,429": "0 h h", "drop,nothing,nothing": "0 h h h", "nothing,...": "0 0 0 0 0 0: always breaks",
    "404,...": "0: 404 Client Error",
    "500,...": "0 0 0 0 0 0: too many 500 error", "html,...": "0: the server sends something else",
    "drop,html": "0 h: the server sends something else", "drop,no ranges": "0 h: the server sends something else",
    "flip": "0: came damaged", "drop,404": "0 h: put a copy as 0.parquet into /",
}.items())  # fmt: skip
def test_download(faults, expected, hub, toy, cache):
    """It outlives faults that pass. If one lasts it says what to do, trusts nothing, and the next call works."""
    queue = [int(fault) if fault.isdecimal() else fault for fault in faults.split(",") if fault]
    hub.faults[SHARDS[0]] = queue[:1] * 50 if "..." in faults else list(queue)
    requests, _, message = expected.partition(": ")
    if message:
        assert SHARDS[0] in assert_in_vain(cache, message)
    else:
        assert_whole(cache, toy)
    starts = [first for path, first, _, _ in hub.log if path == SHARDS[0]]
    assert " ".join("h" if first else "0" for first in starts) == requests
    hub.faults.clear()
    assert_whole(cache, toy)
    sent = sum(entry[3] for entry in hub.log if entry[0] == SHARDS[0])  # nothing on the disk is fetched again
    assert sent <= len(hub.files[SHARDS[0]]) * (1 + ("flip" in faults)) + 7 * 2**17


@pytest.mark.parametrize("name, value, message", [
    ("HF_ENDPOINT", "http://127.0.0.1:9", "refused"),  # nobody listens there
    ("HF_ENDPOINT", "hf-mirror.com", "No scheme supplied"),
    ("HF_TOKEN", "hf_abc…", "HF_TOKEN holds a character that no token has"),
    ("HF_TOKEN", "hf_abc\nX: y", "HF_TOKEN holds a character that no token has"),
    ("REQUESTS_CA_BUNDLE", "/no/such/file.pem", "cannot download .*invalid path: /no/such/file.pem"),
    ("REQUESTS_CA_BUNDLE", "bundle", "certificate"),
])  # fmt: skip
def test_download_with_wrong_settings(name, value, message, hub, toy, cache, monkeypatch):
    """What no second try could mend is told at once. The value of a token is never shown."""
    if "BUNDLE" in name:
        Path("bundle").write_text("no certificate")
        monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("http", "https"))
    monkeypatch.setenv(name, value)
    waits = []
    monkeypatch.setattr(data.time, "sleep", waits.append)
    assert "hf_abc" not in assert_in_vain(cache, message) and not hub.log
    assert any(waits) == (message == "refused")


def test_download_without_a_pin_from_another_host(hub, cache, monkeypatch):
    """Size and hash are what the hub says; without a hash nothing is trusted. The token goes to the hub alone."""
    content, signed = parquet(documents(400)), "/signed"
    monkeypatch.setitem(data.NAMED, "toy", data.Recipe("toy", (data.Source(data.HUB + SHARDS[0]),)))
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.files = dict.fromkeys((SHARDS[0], signed), content)
    assert_in_vain(cache, "does not tell its SHA-256")
    hub.log.clear()
    hub.faults = {SHARDS[0]: [hub.url.replace("127.0.0.1", "localhost") + signed] * 3, signed: ["", "drop"]}
    assert_whole(cache, joined(documents(400)))
    # For the hash, for the file, and for its end, which another signed URL may give.
    asked = [(later, token) for later in (False, False, True) for token in ("Bearer secret", None)]
    assert [(first > 0, token) for _, first, token, _ in hub.log] == asked


def test_download_of_what_changed(hub, toy, cache, monkeypatch):
    """A file at the same address, of the same size or longer: what came of both is no corpus. Another recipe: anew."""
    hub.files["/more"] = b"more than it was"
    data.obtain(data.Source(f"{hub.url}/more", 4, sha(b"more")), Path("more"))
    assert Path("more").read_bytes() == b"more"
    old, hub.faults[SHARDS[0]] = hub.files[SHARDS[0]], ["drop", 404]
    for end, message in (b"", "404"), (bytes(1000), "came damaged"):
        hub.files[SHARDS[0]] = old[: len(old) - len(end)] + end
        assert_in_vain(cache, message)
    hub.files[SHARDS[0]] = old
    assert_whole(cache, toy)
    monkeypatch.setitem(data.NAMED, "toy", toy_recipe(hub, separator=" "))
    assert_whole(cache, b"".join(d + b" " for seed in range(2) for d in documents(400, seed)))


def test_data_splits_of_its_own(hub, toy, cache, monkeypatch):
    """As of wikitext103: rows joined with nothing in between, and splits that are those of the files."""
    sources, (a, b) = [], toy_recipe(hub).sources
    for i, (pin, split) in enumerate(((a, "train"), (b, "train"), (b, "val"), (a, "test"))):
        hub.files[f"/{i}"] = hub.files[pin.url.removeprefix(data.HUB)]
        sources.append(dataclasses.replace(pin, url=f"{hub.url}/{i}", split=split))
    monkeypatch.setitem(data.NAMED, "toy", data.Recipe("toy", tuple(sources), ""))
    monkeypatch.setenv("HF_TOKEN", "secret")
    corpus = data.load("toy", 64)
    assert {token for _, _, token, _ in hub.log} == {None}  # these do not lie on the hub
    a, b = (b"".join(documents(400, seed=i)) for i in range(2))
    assert [corpus.split(s).tobytes() for s in ("train", "val", "test")] == [a + b, b, a]


def test_named_corpora_are_pinned():
    for name, recipe in data.NAMED.items():
        for source in recipe.sources:
            assert re.fullmatch("[0-9a-f]{64}", source.sha256 or "0" * 64) and (source.sha256 or name == "fineweb")
            assert re.search(r"/resolve/[0-9a-f]{40}/", source.url) or name == "enwik8"
            assert bool(source.split) == (name == "wikitext103")
        assert name == "fineweb" or sum(source.size for source in recipe.sources) == recipe.download


def test_download_by_hand(hub, toy, cache, monkeypatch):
    """A file put into the folder is taken if it is the right one, and else named. None stays longer than needed."""
    there, obtain = [], data.obtain
    monkeypatch.setattr(data, "obtain", lambda source, path: there.append(len([*path.parent.glob("*.parquet")]))
                        or obtain(source, path))  # fmt: skip
    write_tree(cache, {"toy/0.parquet": hub.files[SHARDS[0]], "toy/1.parquet": flip(hub.files[SHARDS[1]])})
    assert_in_vain(cache, "1.parquet is not the right file .*: remove it")
    assert there == [2, 1]
    (cache / "toy/1.parquet").write_bytes(hub.files[SHARDS[1]])
    assert_whole(cache, toy)
    assert not hub.log


def test_download_stopped_at_any_moment(hub, toy, cache, monkeypatch):
    """Before each renaming, removal or fsync: another call ends with the same bytes, and fetches nothing twice."""
    for last in itertools.count():
        shutil.rmtree(cache, ignore_errors=True)
        hub.log.clear()
        calls = itertools.count()
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for where, name in (os, "replace"), (os, "fsync"), (Path, "unlink"):

                def call(*args, real=getattr(where, name), **kwargs):
                    if next(calls) == last:
                        raise KeyboardInterrupt
                    return real(*args, **kwargs)

                patch.setattr(where, name, call)
            data.load("toy", 64)
            break
        assert_whole(cache, toy)
        assert [(path, first) for path, first, *_ in hub.log] == [(path, 0) for path in SHARDS]
    assert last > 7


def test_download_by_two_at_once(hub, toy, cache, capfd):
    hub.faults[SHARDS[0]] = ["stall"]
    with ThreadPoolExecutor() as pool:
        assert [c.tokens.tobytes() for c in pool.map(partial(data.load, "toy"), [64, 64])] == [toy, toy]
    assert [path for path, *_ in hub.log] == [SHARDS[0], *SHARDS]  # the first broke off; each was fetched once
    assert capfd.readouterr().err.count("waiting until that ends") == 1
    assert_whole(cache, toy)


@pytest.mark.parametrize("given", ["toy", "folder", "x.parquet", "tokens", "file"])
def test_prepared_corpus_is_checked(given, hub, toy, merges, program):
    """Cheaply at each start, by hash with --verify. "(verified)" is said of all that was prepared, and of no other."""
    lines = b"the a\n" * 2000
    write_tree(Path(), {"folder/a": lines, "file": lines, "x.parquet": parquet([lines])})
    argv = [data, given, "--seq", "16"] if given != "tokens" else [data, "file", "--seq", "16", "--tokens", "gpt2"]
    assert program(*argv)[0] == 0
    hub.files.clear()
    code, out, err = program(*argv, "--verify")
    if given == "file":
        assert "(nothing was prepared that it could be compared with)" in out
        return
    path = data.load(argv[1], 16, tokens=argv[-1] if given == "tokens" else "bytes").path
    content, info = path.read_bytes(), path.stat()
    assert (code, err) == (0, "") and " (verified)\n" in out and sha(content) in out
    for damage, hidden, flags in (flip, False, []), (flip, True, ["--verify"]), (lambda c: c[:-2], True, []):
        path.write_bytes(damage(content))
        if hidden:  # damage that no clock shows, as of a failing disk
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
        assert program(*argv)[0] == (0 if flags else 2)
        assert_refused(program(*argv, *flags), f"error: {path} is damaged")
    path.write_bytes(content)  # a copy of it: hashed once, then known again
    assert program(*argv)[0] == 0
    assert json.loads((path.parent / "meta.json").read_text())["mtime_ns"] == path.stat().st_mtime_ns
    if given != "toy":  # without a record it is made anew
        (path.parent / "meta.json").write_bytes(b"[]")
        assert program(*argv)[0] == 0 and path.read_bytes() == content


# ---- what a conversion and an import cost ----


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_conversion_memory(cache):
    """80 MB of text in many row groups, as of the corpora, and in one: far less memory, beside the imports' 60 MB."""
    letters = np.random.RandomState(0).randint(97, 123, 80_000_000, "u1").tobytes().decode()
    table = pa.table({"text": [letters[i : i + 5000] for i in range(0, len(letters), 5000)]})
    code = "import data, sys; data.load(sys.argv[1], 64); print(open('/proc/self/status').read())"
    for rows in 1000, 10**6:
        pq.write_table(table, "x", row_group_size=rows, use_dictionary=False, compression="none")
        command = [sys.executable, "-c", code, Path("x").resolve()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        assert int(re.search(rb"VmHWM:\s+(\d+)", done.stdout)[1]) < 180 * 2**10, rows


def test_import_is_light():
    code = "import data, sys; print({'torch', 'requests', 'pyarrow', 'tiktoken'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENV, capture_output=True, check=True)
    assert done.stdout == b"set()\n"


def test_data_memory_stays_small(cache):
    for name, size in ("big", 8 << 30), ("x/a", 64 << 20):  # without a block on the disk
        os.truncate(write_tree(Path(), {name: b""}) / name, size)
    tracemalloc.start()
    corpus = data.load("big", 256, column="")
    tokens = corpus.split("train")
    n = data.num_windows(tokens, 256)
    x, y = data.get_windows(tokens, 256, np.append(data.eval_index(n, 29), n - 1))
    assert len(data.load("x", 256, column="").sha256) == 64
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n == (8 * 2**30 * 90 // 100 - 1) // 256 and x.shape == y.shape == (30, 256)
    assert peak < 20e6


# ---- splits, windows, and their order ----


def test_data_splits(cache):
    """Every split holds a window, or the corpus is refused; as many bytes as the message asks for are enough."""
    Path("x").write_bytes(text(5120))
    with pytest.raises(data.InputError, match="each split needs 257 bytes, the shortest has 256; bring 5,140 in all"):
        data.load("x", 256)
    for size in 20 * 257, 5143, 99_999:
        Path("x").write_bytes(text(size))
        corpus = data.load("x", 256)
        splits = [corpus.split(name) for name in ("train", "val", "test")]
        assert b"".join(s.tobytes() for s in splits) == text(size)
        assert np.cumsum([len(s) for s in splits]).tolist() == [size * 90 // 100, size * 95 // 100, size]
        assert all(np.shares_memory(s, corpus.tokens) for s in splits)


def test_data_windows():
    for seq, dtype in itertools.product((1, 2, 7, 64), (np.uint8, np.uint16)):
        for size in {seq + 1, 5 * seq, 5 * seq + 1, 6 * seq, 257} - {seq}:
            tokens = np.frombuffer(text(size * np.dtype(dtype).itemsize), dtype)
            n = data.num_windows(tokens, seq)
            assert n == len([k for k in range(size) if k * seq + seq + 1 <= size])
            index = np.random.RandomState(0).permutation(np.append(np.arange(n), n - 1))  # one of them twice
            for a, start in zip(data.get_windows(tokens, seq, index), (0, 1)):
                naive = [tokens[k * seq + start : k * seq + start + seq].tolist() for k in index]
                assert a.dtype == torch.int64 and a.is_contiguous() and a.tolist() == naive
            with pytest.raises(IndexError):
                data.get_windows(tokens, seq, [n])
            assert [x.shape for x in data.get_windows(tokens, seq, np.arange(0))] == [(0, seq)] * 2
    for n, count, evenly in (10, 5, [0, 2, 4, 6, 8]), (10, 3, [0, 3, 6]), (3, 20, [0, 1, 2]), (7, 0, []):
        assert data.eval_index(n, count).tolist() == evenly
    index = data.eval_index(123_456_789, 5120)
    assert index.dtype == np.int64 and index[0] == 0 and set(np.diff(index)) == {24112, 24113}


def test_data_order_is_a_pure_function_of_the_position():
    """Without replacement, epoch after epoch without a gap; rank, micro-batch and resuming do not matter."""
    for n, key in itertools.product((1, 2, 255, 256, 257, 65_536, 70_000), ([0, 0], [1337, 3], [2**32 - 1, 1])):
        assert np.array_equal(data.permutation(n, *key), np.random.RandomState(key).permutation(n))  # in every dtype
    # Written down once: a change here changes every run made before it.
    assert data.train_index(10, 1337, 0, 12).tolist() == [3, 4, 5, 9, 7, 1, 6, 0, 8, 2, 0, 8]
    for n in 5, 64, 100:
        whole = data.train_index(n, 3, 0, 240)  # a batch of several epochs, too
        assert whole.dtype == np.int64
        epochs = [np.random.RandomState([3, e]).permutation(n) for e in range(240 // n + 1)]
        assert np.array_equal(whole, np.concatenate(epochs)[:240])
        for batch in 1, 8, 48, 120:
            steps = [data.train_index(n, 3, step, batch) for step in range(240 // batch)]
            assert np.array_equal(steps, whole.reshape(-1, batch))
    data.permutation.cache_clear()
    for step in range(100):  # the order is not drawn again at every step
        data.train_index(1000, 5, step, 32)[:] = 0  # the caller's own copy
    assert data.permutation.cache_info().misses == 4
    assert np.array_equal(data.permutation(1000, 5, 3), np.random.RandomState([5, 3]).permutation(1000))


# ----------------------------------------------------------------------------------------------------------------------
# Training

SMALL = ["--model", "hmamba:D=32:L=2:H=2:N=4", "--data", "text.txt", "--seq", "32", "--batch", "8", "--micro", "4",
         "--steps", "8", "--eval_every", "2", "--eval_seqs", "16", "--ckpt_every", "4", "--log_every", "1"]  # fmt: skip
RUN_FILES = {".lock", "log.jsonl", "last.pt", "prev.pt", "best.pt", "sample.txt", "curve.png"}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
INTERRUPT = partial(signal.raise_signal, signal.SIGINT)


@pytest.fixture
def program(cache, monkeypatch, capsys):
    """Runs a program as from the command line, in an empty folder with a text.txt: exit code, stdout and stderr."""
    words = np.random.RandomState(0).choice(["phase ", "state ", "gate ", "to be or not\n", "0.5 "], 12_000)
    Path("text.txt").write_text("".join(words))

    def run(module, *argv):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, argv)])
        handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        code = 0
        try:
            data.command_line(module.main)
        except SystemExit as e:
            code = e.code or 0
        assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def no_curves(monkeypatch):
    """Neither a figure nor a long text at the end of a run: they take longer than a small run."""
    real = sample.text
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sample, "text", lambda model, length, *rest: real(model, min(length, 9), *rest))


@pytest.fixture
def made(program, no_curves, tmp_path_factory):
    """Makes the run of SMALL with other flags once for all tests. Not to be written to."""

    def make(name, *flags):
        folder = tmp_path_factory.getbasetemp() / "made" / name
        if not folder.exists():
            assert program(train, *SMALL, *flags, "--out", folder)[0] == 0
        return folder

    return make


@pytest.fixture
def cut(made):
    """The run of SMALL, stopped after step 6: a copy, "cut"."""
    shutil.copytree(made("cut", "--stop_at", 6), "cut")


def course(folder):
    """What a run logged, without the times."""
    events = [e for e in report.read_log(folder)[1:] if e["event"] != "resume"]
    return [{k: v for k, v in e.items() if k not in ("time_s", "tok_s")} for e in events]


def raise_error(error, *_, **__):
    raise error


def steps_of(folder, kind):
    return [e["step"] for e in report.read_log(folder) if e["event"] == kind]


def content(folder):
    return {p: p.is_file() and p.read_bytes() for p in Path(folder).rglob("[!.]*")}


def assert_same_run(a, b):
    """Bit for bit: log but for times, checkpoint, text; and b has no torn line, no litter."""
    assert course(a) == course(b)
    x, y = (sample.read_checkpoint(f"{run}/last.pt") for run in (a, b))
    for key in ("model", "optimizer", "step", "best", "rng"):
        torch.testing.assert_close(x[key], y[key], rtol=0, atol=0)
    assert Path(a, "sample.txt").read_bytes() == Path(b, "sample.txt").read_bytes() == course(a)[-1]["text"].encode()
    assert all(json.loads(line)["event"] for line in Path(b, "log.jsonl").read_text().splitlines())
    assert {p.name for p in Path(b).iterdir()} <= RUN_FILES


def assert_nearly_same_run(a, b):
    """Equal up to the order of sums; losses to 1e-6."""
    for x, y in zip(course(a), course(b), strict=True):
        assert (x["event"], x["step"], x["tokens"]) == (y["event"], y["step"], y["tokens"])
        for key in x.keys() & {"loss", "val_loss"}:
            assert x[key] == pytest.approx(y[key], rel=0, abs=1e-6)
        for key in x.keys() & {"grad_norm", "layers"}:
            assert x[key] == pytest.approx(y[key], rel=1e-4)
    x, y = (sample.read_checkpoint(f"{run}/last.pt")["model"] for run in (a, b))
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-3)


def at_step(monkeypatch, step, action, model=""):
    """Does something at the beginning of the training step with this index, of a model or of any."""
    real = train.learning_rate
    at = lambda i, s: i == step and s.model.startswith(model)  # noqa: E731
    monkeypatch.setattr(train, "learning_rate", lambda i, s: (at(i, s) and action() and None) or real(i, s))


def printed(done, *words, code=0, err=""):
    """What a program printed, with these words, and what it said: all of it, where `err` ends a line, or part of it."""
    found, out, said = done
    assert (found, [word for word in words if word not in out]) == (code, []), done
    assert err is None or (said == err if err[-1:] in ("", "\n") else err in said), said
    return out


def assert_refused(done, *messages):
    code, _, err = done
    assert (code, err.count("\n"), err[:7]) == (2, 1, "error: "), err
    for message in messages:
        assert message in err


@pytest.mark.slow
def test_train_writes_a_whole_run(program, made, tmp_path):
    code, out, err = program(train, *SMALL)
    assert (code, err, "\x1b" in out) == (0, "", False)
    folder = tmp_path / "runs/hmamba_D_32_L_2_H_2_N_4-text-tiny-s1"
    assert {p.name for p in folder.iterdir()} == RUN_FILES - {"curve.png"}
    events = report.read_log(folder)
    assert all(e["tokens"] == e["step"] * 8 * 32 and "time_s" in e for e in events)
    assert steps_of(folder, "train") == list(range(1, 9))
    assert steps_of(folder, "val") == [0, *steps_of(folder, "grad")] == [0, 2, 4, 6, 8]
    assert [e["event"] for e in events[-2:]] == ["final", "sample"]
    header, first, final = events[0], events[1], events[-2]
    text = (tmp_path / "text.txt").read_bytes()
    assert header["data"] == {"name": "text", "size": len(text), "sha256": sha(text)}
    assert header["params"]["total"] == sum(x.numel() for x in sample.read_checkpoint(folder)["model"].values())
    assert len(header["weight_decay"]["decay"]) + len(header["weight_decay"]["no_decay"]) == 12
    windows = (len(text) * 5 // 100 - 1) // 32
    assert (first["n_tokens"], final["n_tokens"]) == (16 * 32, windows * 32)
    assert first["val_loss"] == pytest.approx(math.log(256), abs=0.1) and final["val_loss"] < first["val_loss"] - 0.3
    grad = next(e for e in events if e["event"] == "grad")
    assert len(grad["layers"]) == 2
    assert 0 < min(grad["layers"]) < max(e["grad_norm"] for e in events if e["event"] == "train")
    losses = {e["val_loss"]: e["step"] for e in events if e["event"] == "val"}
    assert final["best"] == {"val_loss": min(losses), "step": losses[min(losses)]}
    assert sample.read_checkpoint(folder / "best.pt")["best"] == final["best"]
    # What it says: the disk and the time that it takes, that the last loss is that of more text, and the result.
    disk = sum((folder / name).stat().st_size for name in ("last.pt", "last.pt", "prev.pt", "best.pt"))
    assert int(re.search(r"checkpoints take up to (\d+) MB\n", out)[1]) == pytest.approx(disk / 1e6, abs=1)
    steps = re.findall(r"^step (\d)/8  train \d.* bpc \S+ tok/s  ETA 0:\d\d:\d\d$", out, re.M)
    assert steps == ["2", "3", "4", "6", "8"]
    assert f"now the whole validation split, {windows} windows instead of 16: the loss may jump" in out
    assert f"validation {final['val_loss'] / math.log(2):.3f} bpc ({final['val_loss']:.4f} nats)" in out
    assert_same_run(folder, made("straight"))
    assert program(train, *SMALL, "--steps", 1)[0] == 0  # a second run disturbs nothing
    assert {p.name for p in tmp_path.glob("runs/*")} == {folder.name, f"{folder.name}-2"}
    assert report.read_log(folder) == events


@pytest.mark.slow
def test_extras(program, monkeypatch, tmp_path):
    """Figures at validations, if the last one is old. If one fails, or git hangs, a line says so."""
    bars, real = [], data.progress
    monkeypatch.setattr(data, "progress", lambda *a, **how: bars.append((a[1:], how.get("disable"))) or real(*a, **how))
    argv = [*SMALL, "--steps", 2, "--eval_every", 1, "--sample_every", 2]
    assert program(train, *argv, "--out", "whole")[0] == 0
    assert Path("whole/curve.png").read_bytes().startswith(b"\x89PNG")
    assert bars.count((("whole val split",), None)) == 1 and bars.count((("whole val split",), True)) == 3
    assert steps_of("whole", "generated") == [2]
    assert program(train, "--resume", "whole", "--sample_every", 1)[0] == 0  # it changes no course
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    for module, name in ((report, "plot_curves"), (sample, "text")):
        monkeypatch.setattr(module, name, partial(raise_error, ValueError("module://inline is no\nvalid backend")))
    for seconds, figures in ((0, 4), (1e9, 1)):
        monkeypatch.setattr(train, "FIGURE_EVERY", seconds)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}" if seconds else os.environ["PATH"])
        out = printed(program(train, *argv, "--out", f"run{figures}"))
        for what, count in (("generated text", 1), ("sample", 1), ("curve.png", figures)):
            assert out.count(f"note: no {what} (ValueError: module") == count
        assert report.read_log(f"run{figures}")[-1]["event"] == "sample"
    assert report.read_log("run1")[0]["git"] is None


# What happens to the run "cut", which stands at step 6 of 8, before it is resumed.


def signals(program, monkeypatch, name, count, stands_at):
    """A closed terminal may send SIGHUP twice; nohup has it ignored; a second Ctrl-C ends a run at once."""
    signum = getattr(signal, name)
    at_step(monkeypatch, 6, lambda: [signal.raise_signal(signum) for _ in range(count)])
    before = signal.signal(signum, signal.SIG_IGN) if stands_at == 8 else signal.getsignal(signum)
    code, out, _ = program(train, "--resume", "cut", "--stop_at", 8)
    signal.signal(signum, before)
    assert code == (0 if stands_at == 8 else 128 + signum)
    told = f"stopped after step 7; go on with: python {ROOT}/train.py --resume cut --stop_at 8\n"
    assert (told in out) == (stands_at == 7)
    assert sample.read_checkpoint("cut/last.pt")["step"] == stands_at


def a_changed_log(program, monkeypatch, more, at, said):
    """What cannot be read is left out, an earlier checkpoint's evaluation is not the end; an empty log begins anew."""
    log = Path("cut/log.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:at], more, *lines[at:]]) if more else b"")
    printed(program(train, "--resume", "cut", "--stop_at", 7), err=said)
    if not more:
        assert report.read_log(log)[0]["event"] == "header"
        log.write_bytes(b"".join(lines + log.read_bytes().splitlines(keepends=True)[1:]))
    log.write_bytes(log.read_bytes().replace(more or b"\0", b""))


def a_kill_in_the_last_validation(program, monkeypatch):
    """By a signal, which does not wait for its end."""
    real = train.evaluate
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with monkeypatch.context() as patch:
            kill = partial(signal.raise_signal, signum)
            patch.setattr(train, "evaluate", lambda *args, kill=kill: real(*args) if args[5:] else kill())
            code, out, _ = program(train, "--resume", "cut")
        assert (code, sample.read_checkpoint("cut")["step"]) == (128 + signum, 8)
        assert f"repeat it with: python {ROOT}/train.py --resume cut\n" in out
    assert program(train, "--resume", "cut")[0] == 0
    events = [e for e in report.read_log("cut") if e["event"] not in ("final", "sample")]
    Path("cut/log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))


def a_kill(program, monkeypatch, calls):
    """In place of a renaming: of best.pt at step 2, of last.pt at steps 4 and 8. The log's last line is torn."""
    rename, left = os.replace, iter(range(calls - 1, -1, -1))
    monkeypatch.setattr(os, "replace", lambda *a: rename(*a) if next(left) else raise_error(KeyboardInterrupt))
    shutil.rmtree("cut")
    assert program(train, *SMALL, "--out", "cut")[0] == 130
    saved, logged = sample.read_checkpoint("cut", ("last.pt", "prev.pt"))["step"], report.read_log("cut")[-1]["step"]
    assert (saved, logged) == {2: (0, 2), 5: (0, 4), 9: (4, 8)}[calls]
    with open("cut/log.jsonl", "a") as log:
        log.write('{"event": "train", "step": 4')
    Path("cut/last.pt.0.part").touch()


def data_that_changes(program, monkeypatch):
    """Other bytes under the same size, a cut file, and more bytes during an evaluation."""
    path, argv, real = Path("text.txt"), ["--resume", "cut", "--data", "text.txt"], data.get_windows
    text, moment = path.read_bytes(), [None]
    changes = {6: lambda: path.write_bytes(text[:-9] + b"something"), 7: lambda: os.truncate(path, 4096)}
    at_step(monkeypatch, 6, lambda: changes[moment[0]]())
    grow = lambda: moment[0] == 8 and path.write_bytes(text + b"?")  # noqa: E731
    monkeypatch.setattr(data, "get_windows", lambda *a: (grow(), real(*a))[1])
    for moment[0], flags in ((6, []), (7, []), (8, ["--eval_only"])):
        path.write_bytes(text)
        assert_refused(program(train, *argv, *flags), "since the run began")
        assert max(e["step"] for e in report.read_log("cut")) == sample.read_checkpoint("cut/last.pt")["step"] == 6
    path.write_bytes(text)


def a_full_disk(program, monkeypatch):
    """A limit on the file size stands in for it: the write itself fails half-way."""
    before, (soft, hard) = content("cut"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before[Path("cut/last.pt")]) // 2, hard))
    try:
        assert_refused(program(train, "--resume", "cut"), "error: cannot write cut/", "the one saved before is intact")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    now = content("cut")
    assert now.keys() == before.keys() and {p.name for p in now if now[p] != before[p]} <= {"log.jsonl", "best.pt"}


def flip_bit(path):
    Path(path).write_bytes(flip(Path(path).read_bytes()))


def a_damaged_checkpoint(program, monkeypatch):
    """The one before takes its place, and is not replaced by the damaged one."""
    assert [sample.read_checkpoint(f"cut/{name}.pt")["step"] for name in ("last", "prev")] == [6, 4]
    flip_bit("cut/last.pt")
    code, _, err = program(train, "--resume", "cut", "--stop_at", 7)
    assert code == 0 and re.fullmatch(r"warning: cut/last.pt is .*damaged.*; prev.pt takes its place\n", err)
    assert [sample.read_checkpoint(f"cut/{name}.pt")["step"] for name in ("last", "prev")] == [7, 4]
    flip_bit("cut/best.pt")
    assert "warning: cut/best.pt is no checkpoint" in program(sample, "cut", "--length", 3)[2]


@pytest.mark.slow
@pytest.mark.parametrize("incident", [
    (signals, "SIGINT", 1, 7), (signals, "SIGTERM", 1, 7), (signals, "SIGHUP", 2, 7), (signals, "SIGINT", 2, 6),
    (signals, "SIGHUP", 1, 8), (a_changed_log, b"garbage\n\n5\n{}\n\xff\xfe\n", 3, "cannot be read and are left out"),
    (a_changed_log, b"", 0, "warning: the log of cut is gone: a new one begins after step 6\n"),
    (a_changed_log, b'{"event": "eval", "step": 2, "tokens": 512, "time_s": 1.0, "val_loss": 5.0}\n', 99, ""),
    (a_kill, 2), (a_kill, 5), (a_kill, 9), (a_kill_in_the_last_validation,), (data_that_changes,), (a_full_disk,),
    (a_damaged_checkpoint,),
], ids=lambda incident: incident[0].__name__)  # fmt: skip
def test_run_ends_as_if_nothing_had_happened(program, made, cut, monkeypatch, incident):
    with monkeypatch.context() as patch:
        incident[0](program, patch, *incident[1:])
    assert program(train, "--resume", "cut")[0] == 0
    assert_same_run(made("straight"), "cut")


def test_random_numbers_and_best_are_those_of_the_checkpoint(program, cut):
    checkpoint = torch.load("cut/last.pt", weights_only=True) | {"best": {"val_loss": 0.5, "step": 3}}
    checkpoint["rng"]["cpu"] = torch.Generator().manual_seed(9).get_state()
    torch.save(checkpoint, "cut/last.pt")
    assert program(train, "--resume", "cut", "--stop_at", 7)[0] == 0
    now = sample.read_checkpoint("cut/last.pt")
    assert torch.equal(now["rng"]["cpu"], checkpoint["rng"]["cpu"]) and now["best"] == checkpoint["best"]


def test_output_that_cannot_be_written_ends_no_run(program, no_curves, monkeypatch):
    """A reader that went away, no stdout, an ASCII terminal."""
    r, w = os.pipe()
    os.close(r)
    for i, stream in enumerate((open(w, "w"), None, io.TextIOWrapper(io.BytesIO(), "ascii"))):
        monkeypatch.setattr(sys, "stdout", stream)
        assert program(train, *SMALL, "--steps", 1, "--out", f"run\xe9{i}") == (0, "", "")
        assert report.read_log(f"run\xe9{i}")[-1]["event"] == "sample"


@pytest.mark.slow
def test_resume_from_another_folder(program, no_curves, tmp_path, monkeypatch):
    """A relative --data is remembered as an absolute one; where the file has moved, --data says where it is now."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert program(train, *SMALL, "--out=~/run", "--stop_at", 2)[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(time, "time", partial(next, itertools.count(2e9, -3600)))  # set back whenever it is read
    assert program(train, "--resume", "../run", "--stop_at", 4)[0] == 0
    (tmp_path / "text.txt").rename(tmp_path / "moved.txt")
    assert_refused(program(train, "--resume", "../run"), "text.txt")
    assert program(train, "--resume=~/run", "--data=~/moved.txt")[0] == 0
    times = [e["time_s"] for e in report.read_log(tmp_path / "run")]
    assert 0 <= times[0] and times == sorted(times)  # the time of each part adds up


def test_gradients_are_clipped(program, made, monkeypatch):
    """With a bound of almost 0 AdamW's epsilon swallows the updates."""
    first = report.read_log(made("straight"))[1]
    monkeypatch.setattr(train, "CLIP", 1e-12)
    assert program(train, *SMALL, "--out", "clipped")[0] == 0
    assert report.read_log("clipped")[-2]["val_loss"] > first["val_loss"] - 0.05  # without: 0.3 at least


def test_files_are_on_the_disk_before_they_are_renamed(tmp_path, monkeypatch):
    """All of the new one, or after a power cut there could be none; a crash before the renaming leaves no litter."""
    path, done = tmp_path / "x", []
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.fstat(fd).st_size))
    monkeypatch.setattr(os, "replace", lambda a, b: done.append((Path(a).read_bytes(), b)))
    data.replace_file(path, lambda f: f.write(b"new"), keep=tmp_path / "before")
    assert done == [3, (b"old", tmp_path / "before"), (b"new", path)]
    assert list(tmp_path.iterdir()) == [path]


def test_one_writer_a_run_folder(program, made, cut, monkeypatch):
    """The second start says who holds the folder, and touches nothing. The lock dies with its process."""
    child = os.fork()
    if not child:
        with data.hold("cut"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert f"process {child} " in Path("cut/.lock").read_text()
    refused = []

    def start_more():
        before = content("cut")
        for argv in ([*SMALL, "--out", "cut", "--resume", "cut"], ["--resume", "cut"], [*SMALL, "--out", "cut"]):
            assert_refused(program(train, *argv), f"in use by process {os.getpid()} on {socket.gethostname()} since 20")
        assert content("cut") == before
        refused.append(True)

    with data.hold("cut"):
        held = content("cut")
        said = "note: no log of this result (InputError: cut is in use by"
        printed(program(train, "--resume", "cut", "--eval_only"), said, "val loss")
        assert content("cut") == held
    straight = made("straight")
    at_step(monkeypatch, 7, start_more)
    assert program(train, "--resume", "cut")[0] == 0 and refused
    assert_same_run(straight, "cut")


def test_a_lock_that_cannot_be_had(tmp_path, monkeypatch, capsys):
    """It is named on a full disk; a file system without any is noted."""
    full = partial(raise_error, OSError(28, "No space left on device"))
    for place in (os, "write", full), (data, "open", lambda *args, **kwargs: open("/dev/full", "w+")):
        with monkeypatch.context() as patch, pytest.raises(data.InputError, match=r"cannot write .*\.lock"):
            patch.setattr(*place, raising=False)
            with data.hold(tmp_path):
                pytest.fail("it is held")
        monkeypatch.setattr(data.fcntl, "flock", partial(raise_error, OSError(38, "Function not implemented")))
    with data.hold(tmp_path):
        assert "Function not implemented): start no second run in it" in capsys.readouterr().err


def test_ranks_are_made_by_torchrun_alone(program, no_curves, monkeypatch):
    """Programs of one process do not look at its variables: their errors are printed."""
    for key in train.RANKS:
        with monkeypatch.context() as patch:
            patch.setenv(key, "1")
            assert_refused(program(train, *SMALL), "start several processes with torchrun, or unset it")
            for module in (tasks, sample, report, data, bench):
                assert_refused(program(module, "--no"))
    real = train.broadcast_from_rank0  # a machine with another text under the same name: the hash is all that is a str
    monkeypatch.setattr(train, "broadcast_from_rank0", lambda make: "0's" if isinstance(x := real(make), str) else x)
    assert_refused(program(train, *SMALL), "text.txt is another text here than on rank 0")


@pytest.mark.slow
def test_empty_rank_beside_torchruns_other_variables():
    env = os.environ | {"TORCHELASTIC_RUN_ID": "x", "RANK": "", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = subprocess.run([sys.executable, ROOT / "train.py"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: one of RANK, ")


def test_backend_is_judged_before_anything_is_written(program, cut, monkeypatch, tmp_path):
    """By every program that computes a model; Triton without a GPU, too."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = content(tmp_path)
    starts = [(train, [*SMALL, "--seeds", "1,2"]), *[(train, ["--resume", "cut", *f]) for f in ([], ["--eval_only"])]]
    for name, message in (("tritn", "'tritn'; known: torch, triton, reference"), ("triton", "")):
        monkeypatch.setenv("NANOHILBERT_BACKEND", name)
        for module, argv in (*starts, (sample, ["cut"]), (diagnose, ["cut", "--prompt", "a"])):
            assert_refused(program(module, *argv), "cannot ", message)
    assert content(tmp_path) == before


@pytest.mark.parametrize("argv", [["--micro", 3], ["--checkpointing"]], ids=str)
def test_what_changes_no_result(program, made, argv):
    """The logged loss and the gradient are means over the whole step; also where the last micro-batch is smaller."""
    assert program(train, *SMALL, *argv, "--out", "run")[0] == 0
    (assert_nearly_same_run if argv[0] == "--micro" else assert_same_run)(made("straight"), "run")


@pytest.mark.slow
def test_two_processes_equal_one_and_survive(program, made):
    """A rank out of memory, a rank killed, SIGHUP to the agent: bit for bit a run that nothing happened to."""
    # Two ranks are two forks of a process that has imported train.py, started and watched by torchrun's agent.
    ranks = """
import os, signal, sys
import data, sample, train
import torch._dynamo  # what the optimizer imports, once for all of them
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

sys.modules["matplotlib"] = None
train.torch.set_num_threads(1)
text, argv = sample.text, sys.argv[1:]
sample.text = lambda model, length, *rest: text(model, 9, *rest)

def rank(argv, fault):
    train.launched = True
    train.rank, train.world, train.local_rank = (int(os.environ[key]) for key in train.RANKS)
    life, real = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), train.learning_rate
    faults = {
        (0, 1, 5): lambda: train.torch.empty(2**50),
        (1, 1, 5): lambda: os.kill(os.getpid(), signal.SIGKILL),
        (2, 0, 6): lambda: os.kill(os.getppid(), signal.SIGHUP),  # the agent hands on a signal
    }

    def learning_rate(step, s):
        if fault and (life, train.rank, step) in faults:
            faults[life, train.rank, step]()
        return real(step, s)

    def no_writing(event, args):
        if event == "open" and "run" in str(args[0]) and (args[2] & (os.O_WRONLY | os.O_RDWR)):
            print("rank 1 writes", args[0], file=sys.stderr)

    train.learning_rate = learning_rate
    if train.rank:
        sys.addaudithook(no_writing)
    sys.argv = ["train.py", *argv]
    data.command_line(train.main, silent=train.rank > 0)

def launch(argv, fault):
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
                          monitor_interval=0.1, max_restarts=2 * fault, run_id=argv[-1])
    try:
        elastic_launch(config, rank)(argv, fault)
    except (SignalException, ChildFailedError) as e:
        print("ended by", type(e).__name__)

launch([*argv, "--out", "run0"], False)
for fault in (True, False):
    launch([*argv, "--out", "run1", "--resume", "run1"], fault)
launch([*argv, "--out", "run1", "--lr", "1"], False)
launch([*argv, "--model", "ema.py:Ema:D=8:L=1:H=1:N=2", "--out", "run2"], False)
"""
    ema = b"""
import os, torch
from hmamba import HMamba, HMambaBlock
class EmaBlock(HMambaBlock):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(config.D, dtype=torch.cfloat))
        self.register_buffer("steps", torch.tensor(0))
    def forward(self, x, state):
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)) + 0j, 0.5)
            self.steps += 1 + int(os.environ.get('RANK', 0))
            with open(f"drawn{os.environ.get('RANK')}", "a") as f:
                print(torch.rand(()).item(), file=f)
        return super().forward(x - self.mean.real + 0.01 * self.steps, state)
class Ema(HMamba):
    Block = EmaBlock
"""
    write_tree(Path("."), {"ema.py": ema})
    env = ENV | {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    argv = [sys.executable, "-c", ranks, *SMALL, "--micro", "2"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_nearly_same_run(made("straight"), "run0")
    assert "rank 1 writes" not in done.stderr
    assert "error on rank 1: out of memory: set --checkpointing, lower --micro (same result) or --seq\n" in done.stderr
    assert done.stdout.count("ended by SignalException") == 1
    assert done.stdout.count("parameters on cpu") == 6  # of run1: the first start, two restarts, the second command
    assert "SIGHUP: stopping after this step" in done.stdout
    assert f"stopped after step 7; go on with: python {ROOT}/train.py --resume run1" in done.stdout
    assert steps_of("run1", "resume") == [4, 4, 7]
    assert_same_run("run0", "run1")
    assert done.stderr.count("--lr 1.0 differs from this run's 0.002") == 1
    # what a rank draws is its own; what training writes is evaluated as it is in the checkpoint
    drawn = [Path(f"drawn{rank}").read_text().split()[-16:] for rank in (0, 1)]
    assert len({*drawn[0], *drawn[1]}) == 32
    assert program(train, "--resume", "run2/last.pt", "--model", "ema.py:Ema", "--eval_only")[0] == 0
    *_, final, _, single = report.read_log("run2")
    assert single["val_loss"] == pytest.approx(final["val_loss"], rel=1e-6), (final, single)


def test_one_command_begins_goes_on_and_ends(program, begun):
    """And the one that is recommended can be pasted into a shell, where names have blanks and quotes."""
    assert program(train, *SMALL, "--out", "run/", "--resume", "./run")[0] == 0
    assert steps_of("run", "resume") == [2] and steps_of("run", "final") == [8]
    before, done = content("run"), (0, "run/last.pt is at step 8 of 8 already: nothing is left to do\n", "")
    both = ["--out", "run", "--resume", Path("run").absolute()]
    for argv in ([*SMALL, *both], both, [*SMALL, "--out", "run"], ["--resume", "run"]):
        code, out, err = program(train, *argv)
        assert (code, out.removeprefix(f"{Path.cwd()}/"), err) == done
    assert "at step 8 of 4 already" in program(train, "--resume", "run", "--stop_at", 4)[1]
    assert content("run") == before
    write_tree(Path("it's my run"), {".lock": b"", "last.pt.0.part": b""})  # killed in the moment of its beginning
    out = printed(program(train, *SMALL, "--out", "it's my run", "--steps", 1))
    command = shlex.split(re.search(r"more: python \S+/sample.py (.*)\)\n", out)[1])
    assert program(sample, *command, "--length", 1)[0] == 0


class NoDoubleNoComplex(TorchDispatchMode):
    """Refuses an operation, also inside the kernels' own operators, that takes or gives float64 or a complex dtype."""

    forbidden = (torch.float64, torch.complex32, torch.complex64, torch.complex128)
    seen = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen = {*self.seen, func.name()}
        if func.namespace == "nanohilbert":  # an operator runs outside the mode: run what it is made of, inside
            with self, torch.no_grad():
                out = torch._library.custom_ops.OPDEFS[func.name()]._init_fn(*args, **kwargs or {})
        else:
            out = func(*args, **kwargs or {})
        for x in tree_leaves((args, kwargs, out)):
            assert not isinstance(x, torch.Tensor) or x.dtype not in self.forbidden, f"{func} with {x.dtype}"
        return out


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*sample.MODELS, "htransformer:score=softmax", "hmamba:head=born", "hmamba:head=mos"])
def test_no_float64_and_no_complex_dtype(program, no_curves, spec):
    """MPS has neither, and on a CPU they cost twice: initialisation, training, evaluation, checkpoint, sampling."""
    spec += ":D=32:L=1" + {"transformer": ":N=4:head=8", "pam": ":H=2:d=4", "sam": ":H=2:d=4"}.get(spec, ":N=4:H=2")
    Path("text.txt").write_text(Path("text.txt").read_text()[:9000])
    with NoDoubleNoComplex() as mode:
        argv = [*SMALL, "--model", spec, "--steps", 1, "--seq", 130, "--batch", 2, "--eval_seqs", 2, "--out", "run"]
        assert program(train, *argv)[0] == 0
        argv = ["run", "--length", 9, "--prompt", "x" * 70, "--top_k", 9, "--top_p", 0.9, "--repetition_penalty", 1.1]
        assert program(sample, *argv)[0] == 0
    own = {name for name in mode.seen if name.startswith("nanohilbert::")}
    none = "transformer" in spec and ("softmax" in spec or spec[0] == "t")
    assert len(own) == (0 if none else 2), own  # forward, backward
    assert "aten::_fused_adamw_" in mode.seen
    with mode, pytest.raises(AssertionError, match="complex64"):
        torch.view_as_complex(torch.zeros(2))


@pytest.mark.slow
def test_compiled_run_equals_eager(program, no_curves, monkeypatch):
    """The graph of each layer; code that is generated from it is PyTorch's. Without a compiler it is refused."""
    real, compiled, argv = torch.compile, [], [*SMALL, "--model", "hmamba:D=32:L=1:H=2:N=4", "--steps", 2]
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *_: (5.0, 1))  # every shape is traced for itself
        patch.setattr(sample, "text", lambda *_: "")
        patch.setattr(torch, "compile", lambda f: compiled.append(f) or real(f, backend="aot_eager", fullgraph=True))
        for flag in ([], ["--compile"]):
            assert program(train, *argv, *flag, "--out", f"run{len(flag)}")[0] == 0
    torch._dynamo.reset()
    assert isinstance(compiled[-1].__self__, hmamba.HMambaBlock) and len(compiled) == 2  # one: is there a compiler?
    assert_nearly_same_run("run0", "run1")
    if not torch.cuda.is_available():  # a GPU's kernels are compiled by Triton
        monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
        monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nowhere/g++",))
        assert_refused(program(train, *SMALL, "--compile"), "cannot compile here (", "No working C++", "--no-compile")
        assert not Path("runs").exists()
        assert program(train, *SMALL, "--compile", "--no-compile", "--stop_at", 1)[0] == 0


@pytest.mark.slow
def test_a_sweep_that_was_interrupted_goes_on(program, no_curves, monkeypatch):
    """All models, bit for bit; the same command, and what the message says where no --out was given; nothing twice."""
    width = {"transformer": "N=4:head=8", "pam": "d=4", "sam": "d=4"}
    models = [f"{name}:D=16:L=2:H=2:{width.get(name, 'N=4')}" for name in sample.MODELS]
    argv = [*SMALL, "--model", ",".join(models), "--steps", 4, "--batch", 4, "--eval_seqs", 4]
    code, table, _ = program(train, *argv, "--out", "whole")
    assert code == 0 and len(list(Path("whole").iterdir())) == len(models)
    for i, model in enumerate(models):  # each is interrupted
        with monkeypatch.context() as patch:
            at_step(patch, 2, INTERRUPT, model)
            code, text, _ = program(train, *argv, *["--out", "runs"] * (i > 0))
        assert (code, "go on with: the same command and --out runs\n" in text) == (130, True)
        assert text.count("nothing is left to do") == max(i - 1, 0) and len(list(Path("runs").iterdir())) == i + 1
    again = [*argv, "--out", "runs"]
    assert program(train, *again)[0] == 0
    for whole in Path("whole").iterdir():
        assert_same_run(whole, Path("runs", whole.name))
        assert steps_of(Path("runs", whole.name), "resume") == [3]
    with monkeypatch.context() as patch:  # a name that is taken: the same command would not go on with this run
        at_step(patch, 2, INTERRUPT)
        code, text, _ = program(train, *argv, "--device", "cpu")
    (new,) = Path("runs").glob("*-2")
    told = f"go on with: python {ROOT}/train.py --resume {new} --device cpu (what follows in the list has not begun)"
    assert code == 130 and told in text
    shutil.rmtree(new)
    before = content("runs")
    code, text, _ = program(train, *again)
    assert (code, text.count("nothing is left to do"), table.splitlines()[-1] in text) == (0, len(models), True)
    assert_refused(program(train, *again, "--warmup", 1), "--warmup 1.0 differs from")
    assert_refused(program(train, *argv, "--out", new.with_name(new.name[:-2])), "-s1 is a run: name another folder")
    assert_refused(program(train, *again[:-4], "--out", "runs"), "--eval_seqs 16 differs from")  # one that is not given
    assert content("runs") == before
    # Another process begins, and ends, the second run while the sweep is at the first.
    argv, folder = [*SMALL, "--seeds", "1,2", "--out", "sweep"], Path("sweep/hmamba_D_32_L_2_H_2_N_4-text-tiny-s2")
    order, drawn = data.train_index, set()
    with monkeypatch.context() as patch:
        at_step(patch, 1, lambda: shutil.copytree(whole, folder, dirs_exist_ok=True))
        patch.setattr(data, "train_index", lambda n, seed, *at: drawn.add(seed) or order(n, seed, *at))
        assert_refused(program(train, *argv), f"{folder} was begun by another process meanwhile: start this")
    assert_same_run(whole, folder)
    assert drawn == {1}  # the order is the seed's
    shutil.copy(whole / "last.pt", "runs")  # a run where, without --out, the folders of runs are made
    with monkeypatch.context() as patch:  # what both have in common is tried once
        tried = []
        patch.setattr(sample, "step_faults", lambda *arguments: tried.append(arguments))
        assert program(train, *SMALL, "--seeds", "1,2", "--stop_at", 1)[0] == 0 and len(tried) == 1


@pytest.mark.slow
def test_init_from(program, cut):
    """A new run from the weights of another, on other data, with a schedule and an optimizer of its own."""
    Path("x.jsonl").write_text("".join(json.dumps({"text": "no", "body": 99 * f"{i} "}) + "\n" for i in range(99)))
    argv = ["--data", "x.jsonl", "--column", "body", *SMALL[4:], "--init_from", "cut"]
    argv += ["--steps", 2, "--lr", "1e-30", "--out", "new"]
    best = Path("cut/best.pt").absolute()
    printed(program(train, *argv, "--stop_at", 1), f"; begun from {best}, step 6\n")
    header = report.read_log("new")[0]
    assert header["settings"]["model"] == SMALL[1]
    expected = {"path": str(best), "step": 6, "sha256": data.hash_file(best), "model": SMALL[1], "data": "text"}
    assert header["origin"] == expected
    assert header["data"]["size"] == 99 * 99 * 2 + 89 * 99 + 2 * 99  # the column that it is told
    before, now = (sample.read_checkpoint(path)["model"] for path in (best, "new/last.pt"))
    assert all(torch.equal(before[key], now[key]) for key in before)  # at that rate
    assert sample.read_checkpoint("new/best.pt")["step"] == 0  # such weights may stay the best
    assert program(train, *argv, "--resume", "new", "--stop_at", 1)[0] == 0  # the same command goes on
    shutil.rmtree("cut")  # is needed no more, by the same command neither
    printed(program(train, *argv, "--stop_at", 1), "new/last.pt is at step 1 of 1 already: nothing is left to do\n")
    said = f"error: --init_from {Path('no').absolute()} differs from this run's {best} (new)\n"
    assert program(train, *argv, "--init_from", "no") == (2, "", said)
    for step in 1, 2:  # 2: the run was complete
        Path("new/log.jsonl").unlink()
        said = f"warning: the log of new is gone: a new one begins after step {step}\n"
        printed(program(train, "--resume", "new"), err=said)
    assert report.read_log("new")[0]["origin"] == expected  # where the log is written anew
    assert steps_of("new", "final") == [2]
    with open("new/log.jsonl", "r+b") as log:  # of a log that is cut the end cannot be made up for
        log.truncate(log.read().index(b"\n") + 1)
    header, short = Path("new/log.jsonl").read_text(), "ends at step 0: tables bridge what it lacks to step 2\n"
    for every, warning in ((2, ""), (1, f"warning: new/log.jsonl {short}")):  # a run that logged at such steps
        Path("new/log.jsonl").write_text(re.sub('"log_every": [0-9]+', f'"log_every": {every}', header))
        assert program(train, "--resume", "new", "--log_every", 1)[2] == warning
    log = report.Log(Path("new"), 0.0)
    Path("new/log.jsonl").unlink()
    for use in (log.sync, partial(log.write, "train", 3, 3)):  # none begins a log without its header
        with pytest.raises(data.InputError, match="cannot write new/log.jsonl"):
            use()


def test_eval_only_judges_the_best_checkpoint(program, made, monkeypatch):
    shutil.copytree(made("straight"), "run")
    before = content("run")
    Path("other.txt").write_text(Path("text.txt").read_text()[::-1])
    forward, modes = hmamba.HMamba.forward, []  # in training mode a loaded model could change, as by a BatchNorm
    with monkeypatch.context() as patch:
        patch.setattr(hmamba.HMamba, "forward", lambda self, idx: modes.append(self.training) or forward(self, idx))
        model, _ = sample.load("run")
    assert (modes, model.training, sample.build(sample.read_checkpoint("run")).training) == ([False], False, True)
    events = report.read_log("run")
    for split, path, argv in (("test", "text.txt", []), ("val", "other.txt", ["--out", "run", "--data", "other.txt"])):
        tokens = data.load(path, 32).split(split)
        n = data.num_windows(tokens, 32)
        with torch.no_grad():
            loss = model(*data.get_windows(tokens, 32, np.arange(n)))[1].item()
        told = f"{split} loss {loss:.4f} nats, {loss / math.log(2):.4f} bpc over {n * 32:,} tokens of {Path(path).stem}"
        printed(program(train, "--resume", "run", "--eval_only", "--split", split, *argv), told, err=None)
        assert [p.name for p, was in content("run").items() if before[p] != was] == ["log.jsonl"]
        *earlier, logged = report.read_log("run")
        assert earlier[: len(events)] == events
        assert [logged[key] for key in ("event", "split", "checkpoint", "step")] == ["eval", split, "best.pt", 8]
        assert logged["data"]["name"] == Path(path).stem and logged["val_loss"] == pytest.approx(loss, rel=1e-6)
        with open("run/log.jsonl", "a") as f:
            f.write('{"event": "train"')  # a line that a kill cut short does not swallow the next one
    for file in {"best.pt": Path("run/best.pt").read_bytes()}, {"log.jsonl": b"mine\n"}:
        write_tree(Path("alone"), file)
        before = content("alone")
        out = program(train, "--resume", "alone", "--eval_only")[1]
        assert 0 <= out.find("note: no log of this result (") < out.find("val loss ")  # before what may take hours
        assert content("alone") == before


def test_learning_rate():
    s = train.Settings(steps=240, lr=2e-3, min_lr=2e-4, warmup=0.75, schedule="cosine")
    lr = [train.learning_rate(step, s) for step in range(240)]
    assert [lr[i] for i in (0, 179, 180, 210)] == pytest.approx([2e-3 / 180, 2e-3, 2e-3, (2e-3 + 2e-4) / 2])
    assert max(lr) == lr[179] and 2e-4 < lr[239] < 2.1e-4
    for s.steps, s.warmup in ((3, 0.75), (100, 0.07), (7, 2.5), (100, 0.001)):  # a warmup of no whole number of steps
        assert max(train.learning_rate(step, s) for step in range(s.steps)) <= s.lr
    s.steps = 240
    for s.schedule, s.warmup, step, rate in ("cosine", 20, 9, 1e-3), ("cosine", 0, 0, 2e-3), ("constant", 20, 0, 2e-3):
        assert train.learning_rate(step, s) == pytest.approx(rate)


def test_protocols():
    """QS table 4 at 253m, PAM table 2 at its five sizes; the papers' corpora take 253m on CUDA and tiny without."""
    assert (train.PAM_DECAY, train.CLIP) == (0.01, 1.0)
    table_4 = {"size": "253m", "steps": 1000, "batch": 1024, "seq": 1024, "lr": 6e-4, "min_lr": 6e-5, "warmup": 750,
               "dtype": "bfloat16", "checkpointing": True, "eval_every": 20, "eval_seqs": 20 * 256}  # fmt: skip
    table_2 = {"lr": 3e-5, "warmup": 500, "batch": 8, "seq": 512, "epochs": 10, "schedule": "cosine", "steps": None,
               "sample_every": 5000, "eval_every": None}  # fmt: skip
    for flags, device, expected in (
        ({"data": "owt"}, CUDA, table_4),
        ({"data": "enwik8"}, CUDA, {"steps": 1500}),
        ({"data": "enwik8"}, CPU, {"size": "tiny", "steps": 240}),
        ({}, CUDA, {"size": "tiny", "lr": 2e-3, "min_lr": 2e-4}),
        ({"size": "253m", "steps": 7, "checkpointing": False}, CUDA, {"steps": 7, "checkpointing": False}),
        ({"lr": 3e-3, "min_lr": 1e-3}, CPU, {"min_lr": 1e-3}),
        ({"model": "pam", "size": "5m", "lr": 3e-3}, CPU, {"min_lr": 0.0}),
        *(({"model": x, "size": size}, CPU, table_2) for x in ("pam", "transformer") for size in sample.PAM_SIZES),
    ):
        s = train.resolve(flags, device)
        assert {key: getattr(s, key) for key in expected} == expected, flags


@pytest.mark.slow
def test_a_diverging_run_stops_and_says_where(program, no_curves, monkeypatch):
    """The loss itself, or the layer in which the backward first met it; the checkpoint before it is kept."""
    _, out, err = program(train, *SMALL, "--out", "run", "--lr", "1e30", "--warmup", "9", "--ckpt_every", 1)
    assert "; the rate does not reach --lr, as --warmup takes 9 steps\n" in out
    good = "first not finite in the loss itself; the last good checkpoint is run/prev.pt\n"
    assert err == f"error: run: after step 1: loss nan, {good}"
    idx = text_batch(1, 32)
    for name, good in (("prev.pt", True), ("last.pt", False)):  # the last one was saved after the update that diverged
        assert sample.load(f"run/{name}")[0](idx, idx)[1].isfinite() == good
    assert "scores are not finite" in program(sample, "run/last.pt")[2]

    real, calls = hmamba.HMambaBlock.forward, []

    def poisoned(self, x, state):
        y, state = real(self, x, state)
        calls.extend([self] * (self.training and len(x) > 1))  # not the trial step
        if len(calls) == 2 * 2 * 2 + 2 and y.requires_grad:  # third step, two micro-batches, two layers: layer 1
            y.register_hook(lambda grad: grad * math.nan)
        return y, state

    monkeypatch.setattr(hmamba.HMambaBlock, "forward", poisoned)
    err = program(train, *SMALL, "--out", "run3", "--ckpt_every", 1)[2]
    where = r"loss \d\.\d+, first not finite in layer 1; the last good checkpoint is run3/last.pt"
    assert re.search(rf"^error: run3: after step 2: {where}\n$", err, re.M)
    last = sample.read_checkpoint("run3/last.pt")
    assert last["step"] == 2 and all(x.isfinite().all() for x in last["model"].values())
    monkeypatch.setattr(train, "evaluate", lambda *_: (math.nan, 32))
    err = program(train, *SMALL, "--out", "run4")[2]
    assert "after step 0: loss nan, first not finite in the loss itself; no good checkpoint was saved yet" in err


@pytest.mark.slow
def test_a_run_that_diverges_ends_no_sweep(program, no_curves):
    """All others are run, the table is theirs, and the last line names it, also if its last step diverged."""
    argv = [*SMALL, "--lr", "1e-3,1e300", "--seeds", "1,2", "--out", "sweep"]
    runs = {f"hmamba_D_32_L_2_H_2_N_4-text-tiny-lr{lr}-s{seed}": lr for lr in (1e-3, 1e300) for seed in (1, 2)}
    for flags in (["--steps", 3], ["--steps", 3], ["--steps", 1, "--schedule", "constant", "--out", "short"]):
        code, out, err = program(train, *argv, *flags)
        assert (code, err.count("\n"), err.count("first not finite in the loss itself")) == (2, 1, 2)
        assert re.findall(r"^\| hmamba\S+ \| (\d) \| \d \|", out, re.M) == ["1", "2"]
        folder = Path("short" if "short" in flags else "sweep")
        assert {run.name for run in folder.iterdir()} == runs.keys()
        for name, lr in runs.items():
            events = report.read_log(folder / name)
            assert (f"{name}: after step " in err) == (lr == 1e300)
            assert [e["event"] in ("final", "sample") for e in events[-2:]] == [lr < 1] * 2
            assert [events[0]["settings"][key] for key in ("lr", "min_lr")] == [lr, lr / 10]


class RunsCode:
    def __reduce__(self):
        return os.system, ("touch hostile",)


def resave(change):
    """The run's checkpoint with other entries, those of its meta decoded."""
    checkpoint = torch.load("run/last.pt", weights_only=True)
    meta = json.loads(checkpoint["meta"])
    change(checkpoint, meta)
    torch.save(checkpoint | {"meta": json.dumps(meta)}, "run/last.pt")


def write(path, make):
    """Makes a file of the bytes of text.txt and of the run's checkpoint."""
    return lambda: Path(path).write_bytes(make(Path("text.txt").read_bytes(), Path("run/last.pt").read_bytes()))


NEW, RESUME, ORIGIN = [*SMALL], ["--resume", "run"], [*SMALL, "--init_from", "run"]


@pytest.fixture
def begun(made, tmp_path):
    """The run of SMALL up to step 2: a copy, "run"; and a folder "cache"."""
    (tmp_path / "cache").mkdir(exist_ok=True)
    shutil.copytree(made("run", "--stop_at", 2), "run")


def test_train_faults(program, begun):
    """One line on stderr, exit code 2, and nothing in the folder changed."""
    start = content(".")
    for message, first, flags, *prepare in [  # what is said; arguments; more of them; what to do first
        ("unknown model 'gru'; known: hmamba, mamba", NEW, "--model hmamba,gru"),
        ("--epochs has no effect beside --steps: give one", NEW, "--epochs 1,2"),
        ("has no size 'tinny'; known: tiny, small, 253m; did you mean tiny?", NEW, "--size tinny"),
        *[(message, NEW, f"--model {spec}") for spec, message in (
            ("hmamba:n=4", "no setting 'n=4'; known: D=, L=, H=, N="), ("hmamba:N", "no setting 'N'"),
            ("pam:heads=4", "no setting 'heads=4'; known: D=, L=, H=, d=, order=, qk="),
            ("hmamba:N=four", "N=four is not int"), ("hmamba:N=4:N=8", "sets N twice"),
            ("hmamba:N=0", "N=0 must be at least 1"), ("htransformer:H=0", "H=0 must be at least 1"),
            ("mamba:mlp=-7", "mlp=-7 must be at least -1"), ("sam:width=0", "width=0 must be at least 1"),
            ("hmamba:field=quaternion", "field=quaternion is unknown; known: complex, real"),
            ("htransformer:score=real", "score=real is unknown; known: born, softmax"),
            ("pam:order=random", "order=random is unknown; known: interleaved, sequential"),
            ("hmamba:field=real:scan=clamped", "field=complex only"), ("mamba:D=33:head=born", "must be even"),
            ("transformer:head=48", "head=48 must be even and divide D=128"), ("sam:d=5", "d=5 must be even"))],
        *[(f"--data {name!r} is no name", NEW, f"--data={name}") for name in ("", "-x", "./-x")],
        ("too short for --seq 100000", NEW, "--seq 32,100000 --seeds 1,2"),
        ("--steps 1000000000000 must be at least 1, at most 10^9", NEW, "--steps 1000000000000"),
        ("argument --lr: invalid float value: '1e-3,'", NEW, "--lr 1e-3,"),
        ("argument --micro: invalid int value: '2,4'", NEW, "--micro 2,4"),  # no list
        *[("be whole numbers from 0 to 2^32 - 1", NEW, f"--seeds {seeds}") for seeds in ("1,x", "4294967296", "1,01")],
        *[("impossible schedule", NEW, flags) for flags in ("--lr 0", "--lr 1e-3,nan", "--min_lr 1", "--warmup -1")],
        ("--stop_at 9 lies beyond --steps 8", NEW, "--stop_at 9"),
        ("no device 'cuda:99' here; there are: auto, ", NEW, "--device cuda:99"),
        ("error: out of memory: set --checkpointing, lower --micro", NEW, "--model hmamba:D=1000000000000"),
        ("--steps 9 differs from this run's 8", NEW, "--out run --steps 9"),
        ("cannot make the run folder", NEW, "--out text.txt/run"),
        ("--out . exists and is no run: name another folder", NEW, "--out ."),
        *[("--resume RUN --eval_only", NEW, flags) for flags in ("--eval_only", "--split test")],
        ("nothing does not exist", [], "--resume nothing"),
        ("no checkpoint in cache (looked for last.pt, prev.pt)", [], "--resume cache"),
        ("--model mamba differs from this run's hmamba", RESUME, "--model mamba"),
        ("--lr 0.001 differs from this run's 0.002", RESUME, "--lr 1e-3"),
        *[("resume goes on with one run, in its own folder", RESUME, flags) for flags in ("--seeds 1,2", "--out new")],
        ("--micro 0 must be at least 1", RESUME, "--micro 0"),
        ("no optimizer state; resume from last.pt", [], "--resume run/best.pt"),
        ("best.pt differs from this run's None", ORIGIN, "--resume run"),
        (f"not fit: they are of {SMALL[1]}, tiny, bytes, and not of mamba:D=32:L=2", ORIGIN, "--model mamba:D=32:L=2"),
        ("run/last.pt is no checkpoint", RESUME, "", lambda: flip_bit("run/last.pt") or Path("run/prev.pt").unlink()),
        ("is not the data of this run", RESUME, "--data other.txt", write("other.txt", lambda text, _: text[::-1])),
        ("is not the data of this run", NEW, "--out run --steps 9", write("text.txt", lambda text, _: text + b"more")),
        ("version of train.py", RESUME, "", lambda: resave(lambda _, meta: meta["settings"].update(momentum=0.9))),
        ("optimizer state of other shapes", RESUME, "", lambda: resave(
            lambda whole, _: whole["optimizer"]["state"][0].update(exp_avg=torch.zeros(1)))),
        ("does not fit this version", RESUME, "", lambda: resave(lambda whole, _: whole["model"].pop("norm_f.weight"))),
        ("run/log.jsonl is not a log", RESUME, "--stop_at 2", write("run/log.jsonl", lambda *_: b"{}\n")),
        ("run/log.jsonl is not a log", RESUME, "", write("run/log.jsonl", lambda *_: b"\0")),
        ("or of other origin", [], "--resume a.pt", lambda: torch.save({"model": {}, "step": 3}, "a.pt")),
        *[("another type", [], "--resume run/last.pt", partial(resave, lambda whole, meta, key=key: (
            whole if key in ("step", "optimizer", "best") else meta).update({key: None})))
          for key in ("step", "optimizer", "best", "spec", "size", "config", "data", "settings")],
        ("or of other origin", [], "--resume run/last.pt", lambda: resave(lambda _, meta: meta.pop("spec"))),
        ("cut short, damaged, or of", [], "--resume a.pt", write("a.pt", lambda _, whole: whole[: len(whole) // 2])),
        ("a.pt is no checkpoint", [], "--resume a.pt", lambda: torch.save({"meta": RunsCode()}, "a.pt")),
        ("its bytes are not those that were written", NEW, "--init_from a.pt",  # a few kB that unpack to 64 MB
         write("a.pt", lambda *_: zipped({"x/data.pkl": bytes(2**26)}))),
    ]:  # fmt: skip
        for make_fault in prepare:
            make_fault()
        before = content(".")
        assert_refused(program(train, *first, *flags.split()), message)
        assert content(".") == before, (message, flags)
        for path, was in start.items():
            if was:
                path.write_bytes(was)


def test_params_by_component(program, no_curves):
    """Of bytes; of GPT-2's tokens where the run would have them, and at PAM's sizes as in its table 1."""
    for flags, *counts in (
        ("--model hmamba,mamba --size 253m", "253,033,856", "253,051,904", "76,321,152"),
        ("--model transformer --tokens gpt2", "7,363,840"), ("--model sam --data wikitext103 --size tiny", "10,987,"),
        ("--model pam --size 5m", "V=50257"), ("--model pam --size 5m --data text.txt", "V=256"),
    ):  # fmt: skip
        printed(program(train, "--params", *flags.split()), *counts)
        assert not Path("runs").exists()
    assert program(train, "--size", "5m", "--model", "pam:D=8:L=1:H=1:d=4", *SHORT, "--out", "of_bytes")[0] == 0
    for flag in ("--resume", "--init_from"):  # a run's own
        assert "V=256" in program(train, "--params", flag, "of_bytes")[1]


# ----------------------------------------------------------------------------------------------------------------------
# Sampling


def test_sample_streams_text_from_a_run(program, cut, monkeypatch):
    """Of the run whose checkpoint was written last, of a folder's best.pt, or of a file; the prompt may be a file."""

    def sampled(*argv):
        return printed(program(sample, *argv), err="tokens/s")

    shutil.copytree("cut", "runs/older")
    os.mkdir("runs/sweep")
    run = shutil.move("cut", "runs/sweep/run")
    for path in Path("runs/older").iterdir():
        os.utime(path, (0, 0))
    assert sample.read_checkpoint(run)["path"] == "runs/sweep/run/best.pt"
    assert f"{run}/best.pt, step 6: hmamba" in program(sample, "--length", 1)[2]
    assert program(train, *SMALL, "--out", "early", "--stop_at", 1)[0] == 0  # before a validation of trained weights
    assert "early/last.pt, step 1: hmamba" in program(sample, "early", "--length", 1)[2]
    Path("x.txt").write_text(text := "gate \u00e9\n")
    a, b, c = (sampled("--length", 40, "--prompt", text, "--seed", seed) for seed in (3, 3, 4))
    assert a.startswith(text) and a == b != c
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert sampled("--length", 40, "--prompt", "-", "--seed", 4) == c
    monkeypatch.setattr(sys, "stdin", None)  # it was closed at the start
    assert_refused(program(sample, "--prompt", "-"), "the text is empty")
    both = sampled("--length", 40, "--prompt", "FILE:x.txt", "--seed", 3, "--num_samples", 2)
    assert both == f"{a}---------------\n{c}---------------\n"
    greedy = sampled(run, "--length", 30, "--temperature", 0)
    assert sampled(f"{run}/best.pt", "--length", 30, "--top_k", 1, "--seed", 9) == greedy
    # \udcff: a byte that is not UTF-8
    assert sampled(f"{run}/last.pt", "--prompt", "caf\u00e9 \udcff", "--length", 1).startswith("caf\u00e9 \ufffd")


def test_generation_is_the_model_step_by_step(monkeypatch):
    """Greedy: the argmax of the full pass over prompt and answer. A penalty counts what was generated."""
    model = make("hmamba", L=1)
    torch.nn.init.normal_(model.embedding.weight)  # clear-cut scores
    with torch.no_grad():  # what came before counts
        model.layers[0].param_proj.weight.mul_(20)
        model.layers[0].out_proj.weight.mul_(20)
        monkeypatch.setattr(sample, "PREFILL", 7)
        prompt = text_batch(1, 40)[0].tolist()
        answer = list(sample.generate(model, prompt, 20, temperature=0))
        assert model(torch.tensor([prompt + answer]))[0][0, 39:-1].argmax(-1).tolist() == answer
    with pytest.raises(data.InputError), torch.no_grad():  # scores that are not finite: the mode is as before
        broken = make("hmamba", L=1).train()
        broken.embedding.weight.fill_(math.nan)
        sample.text(broken, 5, 0.8, 0, 1.0, 1.0)
    assert broken.training
    tokens = list(sample.generate(model, [1, 2, 3], 60, temperature=0, repetition_penalty=1e9))
    assert len({1, 2, 3, *tokens}) == 63


def test_filters_of_the_logits():
    logits, out = torch.tensor([2.0, 1.0, 0.0, -1.0]), -math.inf  # softmax: .64 .24 .09 .03
    plain = {"seen": torch.tensor([0, 3]), "temperature": 1, "top_k": 0, "top_p": 1, "repetition_penalty": 1}
    for changes, *expected in (
        ({}, 0, -1, -2, -3),  # the largest is 0: no overflow at any temperature
        ({"temperature": 0.5}, 0, -2, -4, -6), ({"temperature": 1e9}, 0, -1e-9, -2e-9, -3e-9),
        *(({"temperature": cold}, 0, out, out, out) for cold in (0, 1e-300)),
        ({"top_k": 2}, 0, -1, out, out), ({"top_k": 9}, 0, -1, -2, -3),
        *(({"top_p": p}, 0, out, out, out) for p in (1e-9, 0.64)), ({"top_p": 0.65}, 0, -1, out, out),
        ({"repetition_penalty": 2}, 0, 0, -1, -3), ({"repetition_penalty": 4, "temperature": 0}, out, 0, out, out),
        ({"repetition_penalty": 4, "temperature": 1e9, "top_p": 1e-9}, out, 0, out, out),
    ):  # fmt: skip
        found = sample.filter_logits(logits, **plain | changes)
        torch.testing.assert_close(found, torch.tensor(expected).float(), rtol=1e-6, atol=0)
    with pytest.raises(data.InputError, match="not finite"):
        sample.filter_logits(logits * math.nan, **plain)


def test_every_byte_sequence_can_be_shown():
    for tokens in (range(256), [0xC2, 0x9B], [0xC3], [0xF0, 0x9F, 0x98], [0xED, 0xA0, 0x80], [27, ord("["), 7]):
        text = "".join(sample.decode(tokens))
        text.encode("utf-8")
        assert not any((c < " " or "\x7f" <= c < "\xa0") and c not in "\n\t" for c in text)
    assert "".join(sample.decode("h\u00e9 \U0001f600".encode())) == "h\u00e9 \U0001f600"


@pytest.mark.parametrize("size", [7, 1024])
def test_score_is_the_loss_of_each_token(program, cut, monkeypatch, size):
    """A line break is before the first token. In the table a character counts where it begins, also within a token."""
    monkeypatch.setattr(sample, "PREFILL", size)
    Path("x.txt").write_text(text := "gate \u00e9 phase\n" * 5)
    model, tokens = sample.load("cut")[0], list(text.encode())
    with torch.no_grad():
        logits = model(torch.tensor([[10] + tokens[:-1]]))[0][0].double()
    expected = F.cross_entropy(logits, torch.tensor(tokens), reduction="none") / math.log(2)
    torch.testing.assert_close(sample.score(model, tokens), expected, rtol=1e-4, atol=1e-4)
    rows = [line.strip("| ").split(" | ") for line in program(sample, "cut", "--score", "x.txt")[1].splitlines()[2:]]
    assert [row[0] for row in rows] == ["1-16", "17-64", "65-70", "1-70"] and rows[-1][1:4] == ["70", "70", "65"]
    means = [expected.sum().item() / n for n in (70, 70, 65)]
    assert [float(x) for x in rows[-1][4:]] == pytest.approx(means, abs=1e-3)
    assert float(rows[0][4]) == pytest.approx(expected[:16].mean().item(), abs=1e-3)
    table = sample.score_table(torch.tensor([6.0, 12.0]), ["a\u00e9".encode()[:2], "\u00e9b".encode()[1:] + b"c"])
    assert table.splitlines()[-1] == "| 1-2 | 2 | 5 | 4 | 9.0000 | 3.6000 | 4.5000 |"


def test_sample_faults(program):
    numbers = {"num_samples": 0, "length": 0, "temperature": "nan", "top_k": -1, "top_p": 0, "repetition_penalty": 0,
               "seed": 10**19}  # fmt: skip
    for argv, message in (
        ("", "no checkpoint in runs/ yet"), ("nothing", "nothing does not exist"),
        *((f"x {flag}", "No such file or directory: '") for flag in ("--prompt FILE:no", "--score ~no-one/no")),
        ("x --model ~no-one/no.py:X", "cannot import ~no-one/no.py: FileNotFoundError"),
        ("x --model mamba", "--model mamba is no FILE.py:CLASS"),
        *((f"x {flag}", "the text is empty") for flag in ("--score /dev/null", "--prompt=")),
        *((f"x --{name} {value}", f"--{name} must lie between") for name, value in numbers.items()),
        ("x --temp 1", "unrecognized arguments: --temp 1"),
    ):  # fmt: skip
        assert_refused(program(sample, *argv.split()), message)


# ---- models of files that the command line names ----

SHORT = ["--data", "text.txt", "--steps", 4, "--batch", 2, "--seq", 16, "--eval_seqs", 2]


PLACES = {"field": ("    ", "V: int = 256"), "method": ("    ", "def init_state"), "called": (8 * " ", "x, states ="),
          "made": (8 * " ", "self.config ="), "head": (8 * " ", "self.head =")}  # fmt: skip


def put(place, code):
    """A change of the example of PAPERS.md: lines before one of its own."""
    indent, line = PLACES[place]
    return {line: f"{code}\n{line}".replace("\n", f"\n{indent}")}


@pytest.fixture
def gru(program, monkeypatch):
    """Writes the example of PAPERS.md with changes into a folder lib; at first its `Config` has strings as types."""
    monkeypatch.setattr(sample, "IMPORTED", {}), monkeypatch.setattr(sample, "FILES", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    (code,) = [x for x in re.findall(r"^```python\n(.*?)^```", PAPERS, re.DOTALL | re.MULTILINE) if "class MyGRU" in x]
    assert len(code.splitlines()) <= 40
    lib = Path("lib").absolute()

    def write(changes=(), name="mygru", begin="", end=""):
        changed = code
        for old, new in dict(changes).items():
            assert old in code
            changed = changed.replace(old, new)
        write_tree(lib, {f"{name}.py": f"{begin}{changed}{end}".encode()})
        sample.FILES.clear()  # as another program

    write(begin="from __future__ import annotations\n")
    return write


def test_a_model_of_a_file_is_as_any_other(program, gru, short_tasks, no_curves):
    printed(program(train, "--model", "lib/mygru.py:MyGRU:D=8,hmamba:D=8:L=1:H=1:N=2", *SHORT, "--stop_at", 2))
    run, spec = "runs/MyGRU_D_8-text-tiny-s1", "mygru.py:MyGRU"
    assert sample.read_checkpoint(run)["meta"]["config"] == {"V": 256, "D": 8, "L": 2}
    header = report.read_log(run)[0]
    assert header["params"] == {"embedding": 2048, "layers": 864, "head": 2304, "total": 5216}
    assert header["flops_per_token"] == 6 * 5216
    sample.IMPORTED.clear(), sample.FILES.clear()  # as another program: a checkpoint alone has nothing imported
    before = content(".")
    for module, argv in ((sample, [run]), (train, ["--resume", run]), (diagnose, [run, "--prompt", "x"])):
        assert_refused(program(module, *argv), "--model PATH/FILE.py:CLASS")
    assert content(".") == before
    os.chdir("lib")  # the file is named from where one is
    run = f"../{run}"
    assert "tokens/s" in program(sample, run, "--model", spec, "--length", 9)[2]
    assert "has no phase" in program(diagnose, run, "--prompt", "x", "--model", spec)[1]
    assert "differs from" in program(train, "--resume", run, "--model", f"{spec}:D=4")[2]
    tuned = ["--init_from", run, "--data", "../text.txt", "--steps", 1, *SHORT[4:]]
    for model, D in (spec, 8), (f"{spec}:D=8", 8):  # the class alone has the run's settings
        printed(program(train, *tuned, "--model", model, "--out", f"../tuned {model}"), err=None)
        assert sample.read_checkpoint(f"../tuned {model}")["meta"]["config"]["D"] == D
    again = program(train, "--resume", run, "--model", f"../lib/{spec}")
    printed(again, f"python {ROOT}/sample.py {run} --model {spec})")
    gru()
    changed = "mygru.py or what it imports changed since"
    assert_refused(program(train, "--resume", run, "--model", spec), changed)
    said = f"note: {changed} the run of {run}/best.pt began\n"
    printed(program(train, "--resume", run, "--model", spec, "--eval_only"), err=said)
    gru(put("called", "1 / (idx.shape[1] < 9)"))  # a longest text, as of learned positions
    told = "mygru.py:MyGRU:D=8 fails at a text of this length: ZeroDivisionError: division by zero (mygru.py, line "
    assert not printed(program(sample, run, "--model", spec, "--score", "mygru.py"), code=2, err=told)
    gru(end="\nnn = None")
    printed(program(sample, run, "--model", spec), code=2, err="cannot run here: AttributeError: 'NoneType'")
    assert_refused(program(tasks, *QUICK, "--model", f"{spec}:L=1"), "on mod3: AttributeError: 'NoneType'")
    gru()
    assert "| MyGRU D=8 |" in report.training_report([report.read_log(run)])[0]
    assert program(tasks, *QUICK, "--model", f"{spec}:L=1")[0] == 0 and Path("here/MyGRU_L_1-mod3-s42").exists()


def test_what_a_file_of_a_model_imports_is_part_of_it(program, gru, no_curves):
    write_tree(Path("lib"), {"part/__init__.py": b"", "part/inner.py": b"a = 1", "other/b.py": b"print 1"})
    begin = "import hmamba\nfrom part.inner import a\nimport other\n"
    gru(begin=begin, end="\n\ndef later():\n    from other import b\n")
    printed(program(train, "--model", "lib/mygru.py:MyGRU:D=8", *SHORT, "--stop_at", 2))
    again = "--resume", "runs/MyGRU_D_8-text-tiny-s1", "--model", "lib/mygru.py:MyGRU", "--stop_at", 3
    write_tree(Path("lib"), {"part/inner.py": b"a = 2"})
    sample.FILES.clear()  # as another program
    assert_refused(program(train, *again), "mygru.py or what it imports changed since this run began")
    write_tree(Path("lib"), {"part/inner.py": b"a = 1", "part/other.py": b"", "hmamba.py": b""})
    sample.FILES.clear()
    printed(program(train, *again))  # of the file's neighbours these are not imported


@pytest.mark.parametrize("name", [*sample.MODELS, *csp.MODELS])
def test_a_configuration_may_grow(name):
    config = (sample.MODELS | csp.MODELS)[name].Config
    off = dataclasses.make_dataclass("More", [("off", bool, False)], bases=(config,))()
    assert off.off is False and sample.configure(f"{name}:off=True", off).off is True


def test_what_a_csp_of_a_file_draws_is_seeded(program, gru, short_tasks, no_curves):
    code = """from torch.nn.functional import dropout
from csp import CSPFast
class Noisy(CSPFast):
    def forward(self, *args):
        return dropout(super().forward(*args), 0.5, self.training)
"""
    write_tree(Path("lib"), {"noisy.py": code.encode()})
    for out in "one", "two":
        torch.rand(len(out) + out.count("w"))  # as in another program, other numbers come next
        printed(program(tasks, *QUICK, "--model", "lib/noisy.py:Noisy", "--out", out))
    one, two = (report.read_log(f"{out}/Noisy-mod3-s42") for out in ("one", "two"))
    assert [e.get("grad_max") for e in one] == [e.get("grad_max") for e in two]


@pytest.mark.parametrize("made, called", {
    "a norm for all": ("torch.nn.LayerNorm(32)", "self.more(x)"),
    "one number for all": ("torch.nn.Parameter(torch.ones(1))", "self.more * x"),
    "a random tensor": ("torch.randn(32, 32)", "x @ self.more"),
    "it, behind a gate": ("torch.nn.Parameter(torch.zeros(1, 1, 1, 1))\n        self.drawn = torch.randn(1, 32, 32)",
                          "x + self.more * (x @ self.drawn.unsqueeze(1))"),
    "an axis too few": ("torch.nn.Parameter(torch.ones(1, 1))", "self.more * x"),
    "means over the seeds": ("torch.nn.BatchNorm1d(32, affine=False)", "self.more(x.flatten(0, 2)).view_as(x)"),
    "dropout for all": ("torch.nn.Dropout(0.3)", "self.more(x)"),
    "an axis for seeds": ("torch.nn.Parameter(torch.ones(1, 1, 1, 32))", "self.more * x"),
}.values(), ids=str)  # fmt: skip
def test_seeds_at_once_are_as_alone(program, gru, short_tasks, no_curves, made, called):
    """A CSP with less than an axis for the seeds in all is refused, with several seeds, before anything is trained."""
    code = f"""import torch
from csp import CSPFast
class Mine(CSPFast):
    def __init__(self, config):
        super().__init__(config)
        self.more = {made}
    def states(self, x):
        return super().states({called})
"""
    write_tree(Path("lib"), {"mine.py": code.encode()})
    argv = *QUICK, "--model", "rnn,lib/mine.py:Mine", "--seeds"
    if "ones(1, 1, 1" not in made:
        assert_refused(program(tasks, *argv, "1,2"), "Mine on mod3: several seeds at once score otherwise than each")
        assert not Path("here").exists()
    else:
        printed(program(tasks, *argv, "1,2"))
    assert program(tasks, *argv, 1)[0] == 0


def test_a_file_may_vary_our_models(program, gru, short_tasks, no_curves):
    """Without `layers`, which the logs then lack; with one tensor under two names; a CSP is for tasks.py."""
    begin = "    def __init__(self, config):\n        super().__init__(config)\n"
    for name, code in {
        "beside": "from csp import CSPFast\nfrom htransformer import HTransformer\n",
        "mine": "from beside import *\nclass Mine(HTransformer):\n    pass\nclass Wide(CSPFast):\n    pass\n",
        "more": "from dataclasses import dataclass\nimport htransformer as h\n"
                "@dataclass\nclass More(h.HTransformerConfig):\n    extra: float = 0.0\n    score: str = 'softmax'\n"
                "class Mine(h.HTransformer):\n    Config = More\n",
        "csps": "import torch\nfrom csp import CSPFast\n"
                f"class Still(CSPFast):\n{begin}        self.embedding.requires_grad_(False)\n"
                f"class Idle(Still):\n{begin}        self.idle = torch.nn.Parameter(torch.zeros(1, 3))\n",
    }.items():  # fmt: skip
        Path(f"lib/{name}.py").write_text(code)
    assert sample.import_models("lib/mine.py:Mine:D=8, hmamba") == "mine.py:Mine:D=8,hmamba"
    model_class, config = sample.parse_spec("mine.py:Mine:score=softmax", "small", 256)
    assert issubclass(model_class, htransformer.HTransformer) and (config.D, config.score) == (512, "softmax")
    assert sample.import_models("lib/mine.py:Wide", (csp.Model,)) == "mine.py:Wide"
    assert sample.import_models("lib/more.py:Mine") == "more.py:Mine"  # sizes of the parent, with what its Config adds
    _, config = sample.parse_spec("more.py:Mine:extra=2", "small", 256)
    assert (config.D, config.extra, config.score) == (512, 2, "softmax")
    assert program(tasks, *QUICK, "--model", "lib/csps.py:Still", "--out", "still")[0] == 0
    assert_refused(program(tasks, *QUICK, "--model", "lib/csps.py:Idle"), "parameters without a gradient: idle")
    wide = tasks.build("mine.py:Wide:d=4", "mod3", [1, 2])
    assert wide(torch.zeros(2, 1, 3, dtype=torch.int64)).shape == (2, 1, 3, 3)

    def logged(name, changes, event, key):
        gru(changes, name)
        assert program(train, "--model", f"lib/{name}.py:MyGRU:D=8", *SHORT, "--out", name)[0] == 0
        return [e[key] for e in report.read_log(name) if e["event"] == event]

    flat = {"self.layers": "self.blocks", "self.head =": "self.more = self.head =", "flatten())": "flatten()).half()"}
    assert logged("flat", flat, "grad", "layers") == [[]]
    norms = logged("frozen", put("head", "self.layers[0].requires_grad_(False)"), "grad", "layers")
    assert all(first == 0 and second > 0 for first, second in norms) and norms
    assert program(tasks, *QUICK, "--model", "lib/frozen.py:MyGRU:D=8", "--out", "task")[0] == 0
    # `layers` is another name: each gradient counts once all the same
    named = {"self.layers = nn": "self.blocks = nn", "self.head =": "self.layers, self.head = [*self.blocks],"}
    assert logged("mygru", {}, "train", "grad_norm") == logged("named", named, "train", "grad_norm") != []
    drawn = torch.get_rng_state()
    assert sample.step_faults(*sample.parse_spec("flat.py:MyGRU", "tiny", 256)) == []
    assert torch.equal(torch.get_rng_state(), drawn)
    half = "assert len(idx[0]) < 16 or not torch.is_autocast_enabled('cpu'), 'long'"
    gru(put("called", half), "half", begin="import torch\n")
    refused = program(train, "--model", "lib/half.py:MyGRU", *SHORT, "--dtype", "bfloat16")
    assert_refused(refused, "half.py:MyGRU cannot be trained here: long")
    gru(name="flat"), gru(name="../flat"), gru(name="../other")
    two = "lib/flat.py:MyGRU:D=8,flat.py:MyGRU:D=4"
    assert_refused(program(train, "--model", two, *SHORT), "two files have the name flat.py")
    for module, argv in ((train, SHORT), (tasks, ["--task", "parity", "--epochs", 1])):
        alike = program(module, "--model", "lib/flat.py:MyGRU:D=8,other.py:MyGRU:D=8", *argv)
        assert_refused(alike, "one name")


@pytest.mark.parametrize("row", [  # what is said, what is changed in the example, the class if it is not MyGRU
    ("D=x is not int", {}, "MyGRU:D=x"), ("did you mean MyGRU?", {}, "MyGru"),
    (r"no Config.*; no forward\(.*; no init_state\(", {}, "F"),
    ("flag=true is not True or False", put("field", "flag: bool = False"), "MyGRU:flag=true"),
    ("no Config, a dataclass whose fields have defaults, one of them V .*positional", {"V: int = 256": "V: int"}),
    ("one of them V", {"V: int": "W: int"}), ("no Config, a dataclass", {"@dataclass": ""}),
    (r"no forward\(.*; no init_state\(", {"def forward": "def call", "def init_state": "def begin"}),
    (r"logits of shape \(1, 64, 128\), not \(B, T, V\) = \(1, 64, 256\)", {"return logits, loss": "return x, loss"}),
    (r"AttributeError: .*begin.* \(mygru.py, line \d\d\)", {"self.init_state": "self.begin"}),
    ("a loss that is no finite number", {"targets.flatten())": 'targets.flatten(), reduction="none")'}),
    *(("its loss: no mean of the cross-entropy", {"targets.flatten())": f"targets.flatten(){rest}"})
      for rest in (', reduction="sum")', ") * len(idx[0]) / 8", ") / 2")),
    ("sparse gradients, which AdamW does not take: embedding.weight", {"V, config.D)": "V, config.D, sparse=True)"}),
    ("parameters without a shape: head.weight", {"nn.Linear(config.D, config.V": "nn.LazyLinear(config.V"}),
    ("layers: no list of the model's own", {"nn.ModuleList": "list"}),  # its gradients would pile up
    *(("layers: no list of the model's own",
       {"self.layers": "self.x", "self.head =": f"self.layers, self.head = {value},"})
      for value in ("2", "self.x.children()", "[[*self.x]]", "nn.ModuleDict({'x': self.x})")),
    *((f"its num_params: .*{fault}", put("method", f"def num_params(self):\n    return {value}\n"))
      for fault, value in (("KeyError: 'total'", {}), ("TypeError: .*NoneType", {"total": None}),
                           ("Tensor", "{'total': self.head.weight.sum()}"))),
    *((f"its flops_per_token: {fault}", put("method", f"def flops_per_token(self, T):\n    return {value}\n"))
      for fault, value in ((".*Tensor", "self.head.weight.sum()"), ("ZeroDivisionError", "9 / (T < 256)"))),
    *((f"its NO_DECAY: {fault}", put("method", f"NO_DECAY = {value}\n")) for fault, value in (
        (".*NoneType", None), ("no tuple of texts", "('head')"), ("no tuple of texts", "(1,)"))),
    ("has SIZES that are not of its Config: .*'H'",
     put("method", "from hmamba import HMamba\nSIZES = HMamba.SIZES\n")),
    ("its config: .*should be called on dataclass", {"= config\n": "= type('C', (), vars(config))\n"}),
    ("its config: .*type is not JSON", put("field", "act: type = nn.Tanh")),
    ("MyGRU: odd", put("field", "def __post_init__(self):\n    assert self.D != 9, 'odd'\n"), "MyGRU:D=9"),
    ("MyGRU: odd", put("field", "def __post_init__(self):\n    assert (self.V, self.D) != (256, 9), 'odd'\n")
     | put("method", "SIZES = {'tiny': GRUConfig(V=7, D=9)}\n")),
    ("an annotation of its Config cannot be read .*Absent", put("field", "other: 'Absent' = None")),
    ("its length 256: too long", put("called", "assert idx.shape[1] < 256, 'too long'")),
    ("its checkpoint, once loaded: KeyError: 128",
     put("field", "from dataclasses import field\nwidths: dict = field(default_factory=lambda: {128: 128})")
     | {"= nn.Linear(config.D": "= nn.Linear(config.widths[128]"}),
    ("its checkpoint, once loaded: other logits",
     put("made", "self.noise = nn.Linear(1, config.D).weight.detach()[:, 0]")
     | {"self.head(x)": "self.head(x + self.noise)"}),
    ("its checkpoint, once loaded: UnpicklingError",
     put("method", "def get_extra_state(self):\n    import numpy\n    return numpy.float64(1)\n"
                   "def set_extra_state(self, x):\n    pass\n")),
    (r"its checkpoint, once loaded: RuntimeError: .*seen", put("called", "self.register_buffer('seen', idx)")),
    ("without a gradient: unused.weight, unused.bias", put("made", "self.unused = nn.Linear(2, 2)")),
    ("in pieces, with the state carried on, a text has other logits", {"states.append(h)": "states.append(h * 0)"}),
    *(("in pieces, with the state carried on, a text has other logits",
       put("made", f"import torch\nself.mix = nn.Parameter(torch.full((config.D,), {start}))")
       | {"self.head(x)": "self.head(x + self.mix * x.roll(-1, 1))"}) for start in (0.0, 1e-5)),  # the next token
    ("in pieces, with the state carried on, a text has other logits", {"self.head(x)": "self.head(x if x.shape[1] % 16 "
     "else x + x.unflatten(1, (-1, 16)).mean(2).repeat_interleave(16, 1))"}),  # means of pieces of 16 tokens
    ("in pieces, with the state carried on, a text has other logits",
     put("made", "self.more = nn.Sequential(nn.LayerNorm(config.D), nn.Linear(config.D, config.D))\n"
                 "nn.init.zeros_(self.more[1].weight)")
     | {"self.head(x)": "self.head(x + self.more(x.roll(-1, 1)))"}),
    (r"cannot import lib/mygru.py: ImportError: .*\(mygru.py, line 4\)", {"import nn": "import nm"}),
    ("cannot import lib/mygru.py: SyntaxError", {"def __init__(self": "def __init__(self,"}),
    ("cannot import lib/mygru.py: SystemExit", {"import nn": "import nn; raise SystemExit"}),
], ids=lambda row: row[0])  # fmt: skip
def test_what_a_model_of_a_file_lacks_is_one_line(program, gru, monkeypatch, row):
    """Before anything is made."""
    message, changes, spec = (*row, "MyGRU")[:3]
    before = content(".")
    gru(changes)
    monkeypatch.setattr(train, "train", lambda *_: pytest.fail("it trained"))
    code, out, err = program(train, "--model", f"hmamba,lib/mygru.py:{spec}", "--data", "text.txt")
    assert (code, out, err.count("\n")) == (2, "", 1) and re.search(message, err), err
    new = {path.parts[0] for path in content(".").keys() - before.keys()}
    assert new <= {"cache", "lib"}  # of corpora, and of Python


@pytest.mark.parametrize("kind, changes", {  # what a user may do as well
    "heeds checkpointing": put("called", "assert self.checkpointing in (True, False)"),
    "layers is a property": {"self.layers =": "self.blocks ="} | put(
        "method", "layers = property(lambda self: [*self.blocks])\n"),
    "L fits another setting": {"L: int = 2": "L: int = 6\n    kinds: str = 'ababab'"} | put(
        "field", "def __post_init__(self):\n    assert len(self.kinds) == self.L\n"),
    "reads values as it is made": put("made", "import torch\nself.rates = [x.item() for x in torch.linspace(0, 1, 3)]"),
    "a depth of its own": {"L: int = 2": "L: int = 6"} | put("made", "assert config.L == 6"),
    "layers in a row": {"nn.ModuleList(": "nn.Sequential(*[", "range(config.L))": "range(config.L)])"},
    "a complex parameter": {"self.head(x)": "self.head((x * self.turn).real + (x * self.turn).imag)"} | put(
        "head", "import torch\nself.turn = nn.Parameter(torch.ones(config.D, dtype=torch.cfloat))"),
    "decays less": put("method", "NO_DECAY = ['head']\n"),
    "a size of its own": put("method", "SIZES = {'medium': GRUConfig()}\n"),
    "slots": {"@dataclass": "@dataclass(slots=True)"},
}.items(), ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_a_sound_model_of_a_file_is_taken(program, gru, short_tasks, no_curves, kind, changes):
    gru(changes)
    model = ["--model", "lib/mygru.py:MyGRU:D=8"]
    flags = *SHORT, *(("--size", "medium") if "SIZES" in str(changes) else ())
    assert program(train, *model, *flags, "--params")[::2] == program(train, *model, *flags, "--out", "run")[::2]
    assert program(sample, "run", *model, "--length", 1)[0] == 0
    if kind in ("a complex parameter", "slots"):
        assert program(tasks, *QUICK, *model)[0] == 0
    if kind == "a complex parameter":
        assert report.read_log("run")[0]["params"]["turn"] == 16  # two numbers each
        header = report.read_log(next(Path("here").glob("*/log.jsonl")))[0]
        assert header["params"]["total"] == 3 * 8 + 3 * 432 + 16 + 3 * 9


# ----------------------------------------------------------------------------------------------------------------------
# Report


def write_log(folder, model, bpc=(), final=None, layers=(0.5, 0.2), total=10, events=None, **settings):
    """The log of a run with `events`, or with evaluations 20 steps apart and, unless `final` is 0, a last one."""
    protocol = {"model": model, "seeds": "1", "size": "tiny", "batch": 2, "seq": 5, "lr": 0.01, "min_lr": 0.001,
                "warmup": 0.75, "schedule": "cosine", "dtype": "float32", "eval_seqs": 4, "eval_every": 20,
                "steps": 20 * (len(bpc) - 1), "out": str(folder)}  # fmt: skip
    header = {"event": "header", "step": 0, "settings": protocol | settings, "params": {"total": total},
              "config": {"D": total, "L": 2}, "data": {"name": "text", "size": 1000, "sha256": "0" * 64}}  # fmt: skip
    if events is None:
        events = []
        for step, loss in ((20 * i, x * math.log(2)) for i, x in enumerate(bpc)):
            val = {"event": "val", "split": "val", "step": step, "val_loss": loss}
            events += [val, {"event": "train", "step": step, "loss": loss + 0.1}]
            events.append({"event": "grad", "step": step, "layers": list(layers)})
        # Of a whole split of another text: not of the curve.
        events.append({"event": "eval", "split": "val", "step": 20, "val_loss": 0.1, "data": {"name": "other"}})
        if final != 0:
            events.append(val | {"event": "final"} | ({"val_loss": final * math.log(2)} if final else {}))
    log = "".join(json.dumps(e) + "\n" for e in (header, *events))
    return report.read_log(write_tree(Path(folder), {"log.jsonl": log.encode()}))


def write_epochs(folder, model, total, late, **settings):
    """A log with three epochs whose best evaluations before their ends, and at them, are `late`."""
    points, val = [(0.0, 9.0)], {"event": "val", "split": "val"}
    for i in range(3):
        points += [(i + 0.5, late[2 * i]), (i + 0.75, late[2 * i] + 0.5), (i + 1.0, late[2 * i + 1])]
    events = [val | {"step": int(100 * at), "epoch": at, "val_loss": loss} for at, loss in points]
    events.append(val | {"event": "final", "step": 300, "val_loss": late[-1]})
    settings = {"size": "5m", "steps": 300, "epochs": 3} | settings
    return write_log(folder, model, events=events, total=total, **settings)


@pytest.fixture
def drawn(monkeypatch):
    """{name of a figure: its axes} of the figures that are made from now on, without their files."""
    axes_of, figure = {}, report.figure

    @contextlib.contextmanager
    def kept(path, *args, **kwargs):
        with figure(path.with_suffix(".svg"), *args, **kwargs) as axes:
            axes_of[path.name] = axes
            monkeypatch.setattr(axes[0].figure, "savefig", lambda *args, **kwargs: None)
            yield axes

    for module in (report, diagnose):
        monkeypatch.setattr(module, "figure", kept)
    return axes_of


@pytest.mark.parametrize("name", ["$^$", "\udce9"])
def test_figures_with_any_names(tmp_path, name):
    """No mathematics; of folders, which need not be UTF-8."""
    with report.figure(tmp_path / "a.png", name, {"": {f"p{name}": ({}, [{0: 1, 1: 2}])}}) as (ax,):
        ax.text(0, 1, name, parse_math=False)
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_steps_to_target(tmp_path):
    """QS 8.1: linear interpolation between the evaluations that bracket the first crossing."""
    events = write_log(tmp_path / "a", "hmamba", [8.0, 3.0, 2.0, 2.4, 1.9])
    for target, step in ((3.0, 20), (2.5, 30), (2.0, 40), (1.95, 78), (9.0, 0)):
        assert report.steps_to_target(events, target) == pytest.approx(step)
    assert report.steps_to_target(events, 1.0) is report.steps_to_target(events[:1], 1.0) is None
    lost = [events[0], *(e for e in events if e["step"] > 20)]  # a log begun anew does not know when it came below 3.0
    assert report.steps_to_target(lost, 3.0) is None and report.steps_to_target(lost, 1.95) == pytest.approx(78)
    assert report.warmup_end({"steps": 60, "schedule": "constant", "warmup": 0.0})[0] == 45


def test_report_reads_logs(program, drawn, monkeypatch):
    """QS tables 5-8, of numbers that a reader can check by hand; figures 3-7, of which one cannot be drawn."""
    write_log("a", "hmamba", [8, 3, 2.5, 2.1]), write_log("d", "hmamba", [8, 3, 2.5, 2.1], seeds="2")
    write_log("b", "mamba", [8, 5, 3.5, 2.5], final=2.6, layers=(0.1, 0.02))
    write_log("c", "mamba", [8, 3, 2.5, 2.3], seeds="2"), write_log("again", "hmamba", [8, 3, 2.5, 2.1], micro=1)
    log = Path("b/log.jsonl")
    damaged = (f'{{"event": "val", "step": 20, "val_loss": {x}}}' for x in ("NaN", "1e999", '"2.5"', '2, "step": "x"'))
    damaged = *damaged, '{"event": "val", "step": 20}', '{"event": "train", "step": 20}', "[" * 99_999
    damaged = *damaged, '{"event": "val", "step": 1%s, "val_loss": 1}' % ("0" * 400)
    log.write_text("\n".join([log.read_text().rstrip(), *damaged, '{"event": "val", "st']))
    monkeypatch.setattr(report, "shades", lambda _: 1 / 0)
    code, out, err = program(report, "b/log.jsonl", "a", "c", "d", "again", "--out", "figures")
    assert (code, err) == (2, "note: of b/log.jsonl these lines cannot be read and are left out: 16, 17, 18, 19, 20, "
                              "21, 22, 23, 24\n"
                              "note: a and again are equal, and count once\n"
                              "error: gradients.png not written: ZeroDivisionError('division by zero')\n")  # fmt: skip
    for row in (
        "| hmamba | 10 | 0.01 to 0.001 | 2 |",
        # steps to 4.0, 3.5, 3.0, 2.5, 2.2 bpc: seed 1 of mamba needs 33, 40, 50, 60 and more than the 60 it had
        "| hmamba | 16 (16-16) | 18 (18-18) | 20 (20-20) | 40 (40-40) *75-79* | 55 (55-55) |",
        "| mamba | 25 (16-33) | 29 (18-40) | 35 (20-50) | 50 (40-60) *237-252* | - |",
        # of seeds 1 and 2: sqrt(2.5 * 1), sqrt(1.5 * 1), and times exp(12.706 ln(2.5) / 2), exp(12.706 ln(1.5) / 2);
        # neither seed of mamba attains 2.2 within 60 steps, hmamba does after 55: at least 60 / 55
        "| 1.58 [0.005, 533.487] | 1.22 [0.093, 16.098] *about 3* | > 1.09 *about 3* |",
        "| mamba / hmamba | 1.44 [0.014, 152.",
        # mean and interval of the differences of two seeds, 0.85 and 0.05, 0.4 and 0.2, 0.5 and 0.2, 3.4/3 and 0.2/3
        "| mamba - hmamba | +0.450 +- 5.082 *0.321 and 0.368* | +0.300 +- 1.271 *0.315 to 0.396* "
        "| +0.350 +- 1.906 | +0.600 +- 6.777 |",
        "| mamba | 2.400 (2.300-2.500) | 2.450 (2.300-2.600) |",
        "| hmamba | 2.50 (2.50-2.50) *about 2* | 0.40 (0.40-0.40) |",
        "| mamba | 3.75 (2.50-5.00) *more than 10* | 0.30 (0.20-0.40) *10 to 100* |",
        "| mamba | 1 | 33 | 40 | 50 | 60 | - | 2.500 | 2.600 |", "at step 45, end of warmup",
    ):  # fmt: skip
        assert row in out, row
    assert Path("figures/tables.md").read_text() in out
    assert re.findall("wrote figures/(.*)", out) == ["tables.md", "curves.png", "steps.png", "gap.png"]


def test_tables_name_the_windows_that_there_are(program):
    """A short split has fewer than --eval_seqs."""
    for seqs, n_tokens in ((4, 20), (3, 15), (2, 10), (4, 1000)):
        val = {"event": "val", "step": 20, "val_loss": 2, "n_tokens": n_tokens}
        other = {"event": "eval", "split": "test", "step": 20, "val_loss": 2, "n_tokens": 5}
        write_log("run", "hmamba", steps=20, events=[val | {"step": 0}, val, other])
        assert f" on {seqs} fixed windows, at the end" in printed(program(report, "run"))


UNFINISHED = "+0.950{0} *0.321 and 0.368* | +0.800{0} *0.315 to 0.396* | +0.800{0} | +1.267{0}".format(", 1 of 2 seeds")
@pytest.mark.parametrize("row", [  # runs as (model, losses, settings), what the tables have, what they do not have
    ("one model without layers, its run not finished", [("csp", [8, 4.04], {"final": 0, "layers": []})],
     ["4.1 bpc", "| csp | 4.040 | - |"], ["/ csp", "Gap", "Gradient"]),
    ("no step at all", [("csp", [8], {}), ("rnn", [8], {})], ["| csp | 8.000 | 8.000 |"], ["rnn / csp"]),
    ("ends that a constant rate has not",
     [*(("hmamba", [8, 3], {"schedule": "constant", "min_lr": x, "seeds": f"{x}"}) for x in (0, 1)),
      ("mamba", [8, 4], {"schedule": "constant", "seeds": "0"})],
     ["| hmamba | 10 | 0.01 | 2 |", "at step 15, 75% of the budget"], ["rate 0.01 to "]),
    ("kinds, and rates; what counts is the first crossing",
     [("hmamba", [8, 3, 2.5, 2.1], {}), ("hmamba", [8, 4, 3, 2.8], {"schedule": "constant"}),
      ("hmamba", [8, 3.5, 3.1, 2.9], {"eval_seqs": 9}), ("hmamba", [8, 2.4, 3, 2.0], {"lr": 0.02})],
     ["Runs of 3 kinds, which differ in schedule, eval_seqs and are not averaged.\n\n### ", "| 0.01 | 1 |",
      "| hmamba, rate 0.01 | 10 |", "| hmamba, rate 0.02 | 1 | 14 | 16 | 18 | 20 | 56 | 58 | 60 | 2.000 | 2.000 |"],
     []),
    ("ends of the cosine",
     [("hmamba", [8, 4], {}), ("hmamba", [8, 3], {"min_lr": 0.0}), ("mamba", [8, 3], {"min_lr": 0.0})],
     ["| hmamba, rate 0.01 to 0 | 3.000 ", "| hmamba, rate 0.01 to 0.001 | 4.000 ",
      "| mamba, rate 0.01 to 0 / hmamba, rate 0.01 to 0 | 1.00 "], []),
    ("begun, stopped by --stop_at, short of a target: never a number of another step",
     [("hmamba", [8, 3, 2.5, 2.1], {}), ("hmamba", [8, 3, 2.5, 2.1], {"seeds": "2"}),
      ("mamba", [8, 3.1, 2.6], {"steps": 60}), ("mamba", [8, 5, 3.5, 2.9], {"seeds": "2"})],
     ["| 40 (24-57) | 44 (28-60) | - *237-252* | - |", f"| mamba - hmamba | {UNFINISHED} |",
      "| 24 | 28 | - | - | - | - |", "| > 1.22 *about 3* |"], []),
    ("a seed that the reference lacks",
     [("hmamba", [8, 3], {}), ("mamba", [8, 3], {}), ("mamba", [8, 3.5], {"seeds": "2"})],
     ["| mamba / hmamba | 1.00, 1 of 2 seeds |"], ["1.00 |"]),
    ("none at the budget: no mean over the run",
     [("hmamba", [8, 3], {"steps": 60}), ("mamba", [8, 4], {"steps": 60})], [" 45 steps of warmup, "], ["Gap"]),
    ("the end of a warmup between evaluations; a loss attained before the first step, which has no ratio",
     [("hmamba", [3.9, 3, 2.5, 2.1], {"warmup": 25}), ("mamba", [8, 3, 2.6, 2.1], {"warmup": 25})],
     ["| mamba - hmamba | +0.025 *0.321 and 0.368* | +0.000 ", "| mamba / hmamba | - | 2.03 |"], []),
], ids=lambda row: row[0])  # fmt: skip
def test_tables(tmp_path, row):
    what, runs, found, missing = row
    logs = [write_log(tmp_path / f"{i}", model, bpc, **settings) for i, (model, bpc, settings) in enumerate(runs)]
    text, _ = report.training_report(logs)
    assert [part for part in found if part not in text] == [part for part in missing if part in text] == [], text
    if "begun" in what:  # the header alone
        assert "| mamba | 2 | " in report.training_report([*logs[:2], logs[2][:1], logs[3]])[0]


@pytest.mark.slow
def test_figures_of_any_runs(tmp_path, drawn):
    """Kinds are laid over one another, with markers; pairs of a paper have panels of one scale, its gap as a band."""
    runs = {"a": ("hmamba", [2.1], {}), "b": ("mygru.py:MyGRU:D=64", [2.2], {"layers": ()}),
            "c": ("hmamba", [2.1, 2], {"total": 11}), "f": ("mamba", [2.2], {}),
            "g": ("mamba", [2.1], {"tokens": "gpt2"}), "h": ("hmamba:field=real", [2.1], {}),
            **{name: (model, [end], {"init_from": f"/{folder}/A tiny/best.pt"}) for name, model, end, folder in (
                ("j", "hmamba", 2.1, "of"), ("l", "hmamba", 2.1, "other"), ("m", "mamba", 2.1, "of"),
                ("n", "mamba", 2.2, "other"))}, "i": ("hmamba", [2.1], {"lr": 0.02}),
            **{name: ("hmamba", [end], {"lr": lr, "seeds": seed}) for name, end, lr, seed in (
                ("q", 2.7, 0.02, "2"), ("r", 2.2, 0.03, "3"), ("s", 2.2, 0.03, "2"))},
            "o": ("hmamba", [2.1], {"warmup": 45}), "p": ("mamba", [2.2], {"warmup": 45}),
            "k": ("hmamba", [2.0], {"min_lr": 0.0}), "d": ("htransformer", [2], {}),
            "e": ("transformer", [2], {})}  # fmt: skip
    starts = {"b": [8, 3.2, 2.7], "d": [8, 3, 2], "e": [8, 2, 2], "f": [8, 5.5, 2.6]}
    logs = {name: write_log(tmp_path / name, model, starts.get(name, [8, 3, 2.5]) + end, **settings)
            for name, (model, end, settings) in runs.items()}  # fmt: skip

    def draw(names, *figures):
        text, found = report.training_report([logs[name] for name in names])
        for name in figures:
            found[f"{name}.png"](tmp_path / name)
        return text, found, [drawn[name] for name in figures]

    text, _, (curves, gap, gradients, steps) = draw("ab", "curves", "gap", "gradients", "steps")
    assert "| MyGRU D=64 / hmamba | " in text and "| MyGRU D=64 | 10 |" in text
    assert list(steps[0].lines[0].get_ydata()) == pytest.approx([16, 18, 20, 40, 55])
    assert [len(ax.lines) for ax in curves] == [2, 2] and len(gradients) == 1
    assert [ax.get_title() for ax in draw("dh", "gradients")[2][0]] == ["hmamba\nfield=real", "htransformer"]
    (shared, models), *_ = report.group_runs([logs["a"]])
    many = {f"hmamba:N={n}": models["hmamba"] for n in range(14)}
    report.plot_gradients(shared, many, tmp_path / "many.png")
    assert drawn["many.png"][0].figure.get_figheight() < 10  # inches: a page
    assert gap[0].lines[0].get_label() == "MyGRU D=64 - hmamba"
    text, _, ((ax,),) = draw("bc", "curves")
    assert text.startswith("Runs of 2 kinds, which differ in steps and are not averaged. No ratios and no gaps: they")
    assert [(line.get_label(), line.get_marker()) for line in ax.lines] == [
        ("MyGRU D=64, steps 60", "o"), ("hmamba, steps 80", "s")]  # fmt: skip
    assert ax.get_xlabel() == "optimization step" and ax.lines[1].get_color() == report.COLOURS["hmamba"]
    _, _, (curves,) = draw("cg", "curves")
    assert [ax.get_title() for ax in curves] == ["loss, bpc", "loss, bits a token"]
    assert len(draw("ai", "curves")[2][0][0].lines) == 2
    two = [0.01, 0.02]
    for names, expected in {"ai": [two], "aik": [two, [0.01]], "aiqr": [two],  # a seed with fewer rates is left out
                            "aiqs": [two, [0.02, 0.03], [0.02]]}.items():  # fmt: skip
        lines = draw(names, "rates")[2][0][0].lines
        assert [[*line.get_xdata()] for line in lines] == expected
    assert lines[2].get_ydata() == pytest.approx([2.4])  # the mean
    cut = [write_log(tmp_path / f"cut {lr}", "hmamba", [8, 3], steps=60, lr=lr) for lr in (0.01, 0.02)]
    assert "rates.png" not in report.training_report(cut)[1]  # none is at its budget
    _, found, (curves,) = draw("aj", "curves")
    assert curves[0].lines[1].get_label() == "hmamba, init_from A tiny/best.pt"
    assert {"steps-scratch.png", "steps-A_tiny_best.pt.png"} < found.keys()
    text, found, _ = draw("jl")
    assert "### init_from /of/A tiny/best.pt" in text and "steps-_other_A_tiny_best.pt.png" in found
    for names, kinds in (("jlmn", ["init_from /of/A tiny/best.pt", "init_from /other/A tiny/best.pt"]),
                         ("afop", ["", "warmup 45"])):  # fmt: skip
        report.plot_forest({"x": [logs[name] for name in names]}, tmp_path / "forest.png")
        titles = [text.get_text().partition("a model: 1")[2] for text in drawn["forest.png"][0].texts]
        assert [title.removeprefix("; ") for title in titles] == kinds
    _, _, ((states, attention),) = draw("adef", "gap")
    assert [(ax.get_title(), ax.get_ylabel()) for ax in (states, attention)] == [
        ("state space", "gap, bpc"), ("attention", "gap, bpc")]  # fmt: skip
    low, high = states.get_ylim()
    assert (low, high) == attention.get_ylim() and low < -1 and high > 2.5 and states.get_xlim()[0] <= 0
    assert list(states.lines[0].get_ydata()) == pytest.approx([0, 2.5, 0.1, 0.1])
    (band,), (other,) = ([patch for patch in ax.patches if "paper" in patch.get_label()] for ax in (states, attention))
    assert band.get_label() == "the paper's mamba - hmamba, at 1000 steps" and "transformer" in other.get_label()
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((0.315, 0.396))
    _, _, (gap,) = draw("fh", "gap")
    assert not any("paper" in patch.get_label() for patch in gap[0].patches)


@pytest.mark.slow
def test_report_writes_what_is_asked_for(program, monkeypatch):
    """One figure in the format of its name; a table of all evaluations; a folder of logs is all of its logs."""
    for name, model, losses, seed in (("a", "hmamba", [8, 3], "1"), ("b", "mamba", [8, 3.5], "1"),
                                      ("c", "hmamba", [8, 3], "2")):  # fmt: skip
        write_log(f"english/{name}", model, losses, final=3.1, seeds=seed)
    done = program(report, "english", Path("english/b").absolute(), "--out", "my-own.pdf", "--csv", "new/losses.csv")
    printed(done, "| mamba / hmamba |", "wrote my-own.pdf")  # b is named twice, and counts once
    assert Path("my-own.pdf").read_bytes().startswith(b"%PDF") and not Path("tables.md").exists()
    for name, what in (("gap", "above 0: the second leads"), ("mine", "the first fall is cut off")):
        assert program(report, "english", "--out", f"{name}.svg")[0] == 0
        assert (what in Path(f"{name}.svg").read_text()) == (name == "gap")  # two evaluations are all shown
    rows = list(csv.DictReader(Path("new/losses.csv").open()))
    assert [(row["run"], row["model"], row["seed"] or row["seeds"], row["event"], row["step"]) for row in rows[:4]] == [
        ("english/a/log.jsonl", "hmamba", "1", event, step)
        for event, step in (("val", "0"), ("val", "20"), ("eval", "20"), ("final", "20"))]  # fmt: skip
    assert [row["data"] for row in rows[:4]] == ["text", "text", "other", "text"]
    assert len(rows) == 12 and float(rows[3]["val_loss"]) == pytest.approx(3.1 * math.log(2))
    Path("here/tables.md").mkdir(parents=True)  # cannot be written: what was asked for is printed, figures are drawn
    code, out, err = program(report, "english", "--out", "here")
    assert code == 2 and "| mamba / hmamba |" in out and "wrote here/gap.png" in out and err.count("\n") == 1
    write_tree(Path("kept"), {"tables.md": b"old"})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", partial(raise_error, OSError("disk full")))
        assert program(report, "english", "--out", "kept")[0] == 2 and content("kept")[Path("kept/tables.md")] == b"old"
    shutil.copy("english/a/log.jsonl", "english/more.jsonl")  # beside the folders of runs
    assert "english/more.jsonl are equal, and count once" in program(report, "english")[2]
    Path("english/more.jsonl").unlink()
    assert program(report, "english", "--forest", "--out", "all.png")[0] == 0
    assert Path("all.png").stat().st_size > 10_000


def test_report_refuses(program):
    """Each is one line: runs that do not belong together, what is no log, what cannot be written."""
    write_log("a", "hmamba", [8, 3]), write_log("twice", "hmamba", [8, 2]), Path("none").mkdir()
    write_log("config", "hmamba", [8, 3], seeds="2", total=11)
    write_log("x", "x.py:GRU", [8, 3]), write_log("y", "y.py:GRU", [8, 3], seeds="2")
    write_log("z", "x.py:GRU", [8, 3], seeds="2"), write_log("begun", "hmamba", [], 0, steps=20)
    write_log("f", "hmamba", [8, 3], init_from="p.pt"), write_log("g", "hmamba", [8, 3], init_from="p.pt", seeds="2")
    for path in Path("f/log.jsonl"), Path("g/log.jsonl"):  # p.pt was trained on between them
        path.write_text(path.read_text().replace('"params"', f'"origin": {{"sha256": "{path}"}}, "params"'))
    for path in Path("x/log.jsonl"), Path("z/log.jsonl"):  # x.py was edited between them
        path.write_text(path.read_text().replace('"params"', f'"files": {{"x.py": "{path}"}}, "params"'))
    shutil.copytree("a", "in/a")
    log, different = Path("a/log.jsonl").read_text(), "have different configurations: name those of one"
    for name, text in {"both": 2 * log, "empty": "", "list": "[1]\n", "other": '{"event": "val", "step": 1}\n',
                       "keys": log.replace('"steps"', '"x"'),
                       "null": '{"event": "header", "settings": null, "step": 0, "data": {}, "params": {}}',
                       "garbled": log.replace('"layers": [', '"layers": [null, ')}.items():  # fmt: skip
        Path(name).write_text(text)
    for argv, message in (
        ("a twice", "two runs of hmamba with seed 1, a and twice: name one of them"),
        *((names, different) for names in ("a config", "x y", "x z", "f g")), ("none", "none holds no run and no log"),
        ("both", "both holds the logs of several runs"), ("a keys", "error: keys lacks a value (KeyError: 'steps')"),
        ("garbled", "error: garbled lacks a value (TypeError: "),
        ("nowhere", "cannot read the log nowhere"), ("empty", "its first line is no header"),
        *((name, "its first line is no header") for name in ("list", "null", "other")),
        ("a --forest --out all.png", "no two models of these runs"), ("a in/a --forest --out b.png", "have one name"),
        ("a a/ --forest --out b.png", "no two models"),
        ("a --forest", "--forest draws one figure"), ("a --csv .", "cannot write --csv ."),
        ("--csv in/a/log.jsonl a", "--csv in/a/log.jsonl has a log's name: name the file to write"),
        *((f"a --csv in/{name} --out in/a/../{to}", "is a file that --out writes") for name, to in (
            ("tables.md", ""), ("curves.png", "curves.png"))),
        ("a --out curves.jpg", "must be a folder, or for report.py a figure, .png"),
        ("a --out=", "must be a folder"), ("a --out empty", "--out empty must be a folder"),
        ("a --out a/log.jsonl/figures", "cannot write a/log.jsonl/figures"),
        ("a --out gap.PDF", "gap.PDF is none of their figures: these runs have curves, "),
    ):  # fmt: skip
        assert_refused(program(report, *argv.split()), message)
    of_tasks = [[{"settings": {"model": model, "task": "x.py:S5", "seed": seed}}, {"event": "final"}]
                for seed, model in enumerate(["x.py:GRU:D=4", "rnn"])]  # fmt: skip
    assert {task: [*models] for task, models in report.group_tasks(of_tasks).items()} == {"S5": ["rnn", "GRU D=4"]}
    assert program(report, "begun", "--out", "in")[::2] == (0, "")
    of_tasks[0][0]["settings"] = {"model": "rnn", "task": "y.py:S5", "seed": 0}
    with pytest.raises(data.InputError, match=different):
        report.group_tasks(of_tasks)


@pytest.mark.slow
def test_forest_shows_the_ratios_of_the_tables(tmp_path, drawn):
    """Each number is that of the folder's tables; a bound where a run ends first."""
    folders = {path: [report.read_log(log) for log in sorted((ROOT / "results" / path).glob("*.jsonl"))]
               for path in ("english-200", "english", "english-1200", "english-constant", "host", "host-conv4",
                            "transformer-plus", "stdlib")}  # fmt: skip
    report.plot_forest(folders, tmp_path / "forest.png")
    table = "".join(part.split("####")[0] for path in folders
                    for part in TABLES[f"results/{path}"].split("#### Ratio of steps")[1:])  # fmt: skip
    lines = drawn["forest.png"][0].lines
    bars = [line.get_xdata() for line in lines if (line.get_linestyle(), line.get_linewidth()) == ("-", 1.2)]
    assert len(bars) == len(re.findall(r"\| \d+\.\d\d+ \[", table))
    left, right = drawn["forest.png"][0].get_xlim()
    for low, high in bars:  # seen whole, but for what is beyond half or twice the mean
        assert left <= max(low, (low * high) ** 0.5 / 2) and right >= min(high, (low * high) ** 0.5 * 2)
    marks = sorted((line for line in lines if str(line.get_marker()) in "o<>"), key=lambda line: -line.get_ydata()[0])
    signs, ratios = zip(*re.findall(r"\| (?:([<>]) )?(\d+\.\d\d+)", table))
    assert [line.get_marker() for line in marks] == [sign or "o" for sign in signs]
    digits = [len(ratio.partition(".")[2]) for ratio in ratios]
    assert [f"{line.get_xdata()[0]:.{n}f}" for line, n in zip(marks, digits, strict=True)] == [*ratios]
    three = [write_log(tmp_path / f"{model}{seed}", model, [8, 4, 3], seeds=seed)
             for model, seed in (("hmamba", "1"), ("mamba", "1"), ("mamba", "2"))]  # fmt: skip
    report.plot_forest({"x": three}, tmp_path / "three.png")
    assert [x.get_text() for x in drawn["three.png"][0].get_yticklabels()] == ["mamba\n/ hmamba, 1 of 2 seeds"]
    losses = {"fast": [8, 4, 3, 2], "slow": [8, 6, 5, 3.5], "late": [8, 6, 4, 3], "cut": [8, 4, 3]}
    runs = {name: write_log(tmp_path / name, "hmamba", bpc, steps=60) for name, bpc in losses.items()}
    runs["anew"] = [runs["fast"][0], *(e for e in runs["fast"] if e["step"] > 20)]  # from 3.0 on, in step 40
    for ours, theirs, target, steps, sign in (
        ("slow", "fast", 4.0, [(pytest.approx(60 - 20 / 3), 20)], "="),
        ("slow late", "fast late", 3.0, [(60, 40), (60, 60)], ">"), ("fast", "slow", 3.0, [(40, 60)], "<"),
        ("cut", "fast", 2.0, [(40, 60)], ">"),  # at least that, of a run that was cut short
        ("slow", "slow", 3.0, [(60, 60)], ""), ("slow fast", "fast slow", 3.0, [(60, 40), (40, 60)], ""),
        ("slow anew", "fast fast", 4.0, [(pytest.approx(60 - 20 / 3), 20)], "="),
        ("anew", "slow", 2.5, [(50, 60)], "<"),
    ):  # fmt: skip
        models = [{seed: runs[name] for seed, name in enumerate(names.split())} for names in (ours, theirs)]
        assert report.step_ratio(models, (0, 1), target) == (steps, sign)


def test_report_references(tmp_path):
    """Whom a model is compared with, and whom it shares a panel with. Those of results/ are in its tables."""
    labels = ["hmamba", "htransformer:score=softmax", "transformer", "csp, rate 1", "csp, rate 2", "GRU D=8", "GRU D=9"]
    expected = [None, "hmamba", "htransformer:score=softmax", "hmamba", "csp, rate 1", "hmamba", "hmamba"]
    assert [report.reference(label, labels) for label in labels] == expected
    assert report.reference("sam, rate 1", ["pam, rate 1", "sam, rate 1"]) == "pam, rate 1"
    assert report.reference("hmamba:N=8", ["hmamba:N=4", "hmamba:N=8"]) == "hmamba:N=4"
    assert report.reference("htransformer:N=8", ["hmamba:N=4", "htransformer:N=8"]) is None
    added = ["htransformer", "transformer", "TransformerPlus parts=conv", "TransformerPlus parts=gate"]
    for labels, expected in ((added, [None, *added[:2], "transformer"]), (added[1:], [None, *2 * ["transformer"]])):
        assert [report.reference(label, labels) for label in labels] == expected
    labels = ["hmamba:N=4", "mamba", "mamba:N=4", "MambaX N=4", "mamba, rate 1", "MambaX N=4, rate 1"]
    assert [report.reference(label, labels) for label in labels[3::2]] == 2 * ["mamba:N=4"]
    logs = [write_log(tmp_path / spec, spec, [8, 3]) for spec in ("x.py:TransformerPlus", "transformer")]
    assert [*report.group_runs(logs)[0][1]] == ["transformer", "TransformerPlus"]
    assert report.reference("mamba", ["mamba"]) is None
    known = ["pam, rate 1", "pam, rate 2", "pam:D=40, rate 2", "sam:D=40, rate 1", "sam, rate 2", "hmamba, rate 1",
             "mamba, rate 2", "htransformer, rate 1", "H conv=1, rate 1", "H conv=1, rate 2", "hmamba:N=8, rate 1",
             "HMambaX init=y, rate 1", "HMambaX init=y, rate 2", "HMambaX init=z, rate 2"]  # fmt: skip
    assert [report.reference(label, known) for label in known] == [
        None, "pam, rate 1", "pam, rate 2", "pam:D=40, rate 2", "pam, rate 2", None, "hmamba, rate 1", None,
        "pam, rate 1", "H conv=1, rate 1", "hmamba, rate 1", "hmamba, rate 1", "hmamba, rate 1", "hmamba, rate 1",
    ]  # fmt: skip
    known = ["hmamba:scan=clamped, rate 2", "hmamba, rate 1", "hmamba:N=8, rate 2"]
    assert report.reference(known[2], known) == known[1]
    known = ["HTransformerMinus N=2 conv=1, rate 1", "HTransformerMinus N=2 conv=1, rate 2"]
    for label in "HTransformerMinus N=2 conv=1 score=softmax, rate 2", "HTransformerMinus N=2 conv=1, rate 3":
        assert report.reference(label, [*known, label]) == known["rate 2" in label]
    for label, other in {
        "hmamba:scan=clamped, rate 2": "hmamba, rate 2", "mamba:init=xavier, rate 2": "hmamba, rate 2",
        "sam:D=40:heads=2": "pam:D=40", "mamba:D=64:init=xavier": "hmamba:D=64",
        "MambaX init=y, rate 2": "mamba, rate 2",
    }.items():  # fmt: skip
        known = ["hmamba, rate 1", "hmamba, rate 2", "hmamba", "pam", "hmamba:D=64", "pam:D=40", "mamba, rate 2"]
        assert report.reference(label, [*known, label]) == other
    pairs = ["hmamba", "mamba", "htransformer:score=softmax", "transformer"]
    found = report.by_family(dict.fromkeys(pairs))
    assert {name: [*members] for name, members in found.items()} == {"state space": pairs[:2], "attention": pairs[2:]}
    for others in (["htransformer"], [*pairs[:2], "GRU D=8", "LSTM"], ["pam", *pairs], ["sam:D=8", "sam", "hmamba"]):
        assert report.by_family(dict.fromkeys(others)) == {"": dict.fromkeys(others)}


def test_panels_of_one_scale_show_the_points_of_all(drawn, tmp_path):
    tasks_of, pairs_of = {}, {}
    for name, y in (("first", 0.5), ("second", 0.9), ("third", 0.2)):
        header = {"event": "header", "settings": {"train_length": 16}}
        tasks_of[name] = {"rnn": {1: [header, {"event": "eval", "length": 64, "acc": y}]}}
        pairs_of[name] = {"n": 2, "phase": torch.zeros(2), "coherence": torch.full((2,), y), "shuffled": [(0.1, 0.1)]}
    report.plot_seeds(tasks_of | {"parity": tasks_of["first"]}, tmp_path / "seeds.png")
    diagnose.plot_coherence(pairs_of, tmp_path / "coherence.png")
    for low, high in (ax.get_ylim() for axes in drawn.values() for ax in axes):
        assert low < 0.2 and high > 0.9
    ours, theirs = drawn["seeds.png"][3].lines
    assert list(ours.get_ydata()) == [0.5] and list(theirs.get_ydata()) == [1.0] * 5
    header["settings"]["train_length"] = 8
    report.plot_seeds({"parity": tasks_of["third"]}, tmp_path / "seeds.png")
    assert len(drawn["seeds.png"][0].lines[1].get_ydata()) == 0  # the paper's are trained at 16


@pytest.mark.slow
def test_a_model_looks_the_same_in_every_figure():
    """By its name and options alone: no two models of a folder of results are alike, and real ones are dashed."""
    for folder in sorted({path.parent for path in ROOT.glob("results/*/*.jsonl")}):
        specs = {json.loads(path.open().readline())["settings"]["model"] for path in folder.glob("*.jsonl")}
        assert len({str(report.style(report.spec_label(spec))) for spec in specs}) == len(specs), folder
    assert max(path.stat().st_size for path in ROOT.glob("results/**/*.png")) < 150_000
    assert len({report.style(name)["color"] for name in (*sample.MODELS, *csp.MODELS)}) == 12
    assert report.style("hmamba:N=4:conv=2, rate 0.1") == report.style("hmamba:conv=2:N=4") != report.style("hmamba")
    assert [report.style(name)["ls"] for name in ("pam", "sam", "rnn")] == ["-", "--", "--"]
    assert report.style("MyGRU D=64") != report.style("MyGRU") != report.style("MyLSTM")


@pytest.mark.slow
def test_report_in_a_hostile_environment(tmp_path):
    """Another backend and style, a rank, paths under ~, no PyTorch; a check that -O would take out is none."""
    write_log(tmp_path / "a", "hmamba", [8, 3, 2.5])
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nsavefig.format: pdf\n")
    backend = "module://matplotlib_inline.backend_inline"
    env = {"MPLBACKEND": backend, "RANK": "1", "WORLD_SIZE": "2", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    code = "import sys; sys.modules['torch'] = None; import data, report; data.command_line(report.main)"
    for argv, rc, words in ((["~/a", "--out=~/curves.png"], 0, ""), (["nope"], 2, "error: cannot read")):
        command = [sys.executable, "-c", code, *argv]
        done = subprocess.run(command, cwd=tmp_path, env=ENV | env, capture_output=True, text=True)
        assert (done.returncode, done.stderr[:18]) == (rc, words)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    code = "import os, report; print(os.environ['MPLBACKEND'])"
    assert subprocess.check_output([sys.executable, "-c", code], env=ENV | env, text=True) == f"{backend}\n"
    for path in {*ROOT.glob("*.py")} - {Path(__file__)}:
        assert not re.search("^ *assert ", path.read_text(), re.M), path


# ---- PAM's protocol, metric, fits ----


def test_epochs_become_steps(program, monkeypatch):
    """When the corpus is known."""
    begun = []
    monkeypatch.setattr(sample, "step_faults", lambda *_: [])
    monkeypatch.setattr(train, "train", lambda s, *_: begun.append((s.steps, s.eval_every)))
    n = len(data.load("text.txt", 512).split("train")) - 1
    for size, flags, steps, every in (
        ("5m", [], 10 * (n // 512 // 8), -(-(n // 512 // 8) // 4)),
        ("5m", ["--steps", 7], 7, -(-(n // 512 // 8) // 4)),
        ("5m", ["--steps", 7, "--eval_every", 3], 7, 3),
        ("tiny", ["--epochs", 2], 2 * (n // 256 // 16), -(-(n // 256 // 16) // 4)),
    ):
        argv = ["--model", "pam", "--data", "text.txt", "--tokens", "bytes", "--size", size, *flags]
        assert program(train, *argv, "--out", f"run{len(begun)}")[0] == 0
        assert begun[-1] == (steps, every)


@pytest.mark.slow
def test_training_in_epochs(program, no_curves):
    """PAM in epochs: evaluations at and between their ends, generated texts, tables, resume bit for bit."""
    flags = ["--model", "pam:D=8:L=1:H=1:d=4", "--data", "text.txt", "--size", "5m", "--epochs", 3, "--seq", 64,
             "--eval_seqs", 8, "--sample_every", 10, "--lr", 0.02, "--warmup", 5, "--batch", 32]  # fmt: skip
    Path("text.txt").write_text(Path("text.txt").read_text()[:18_300])
    printed(program(train, *flags, "--out", "run"), "#### Means of the last three epochs")
    events = report.read_log("run")
    assert events[0]["optimizer"] == {"betas": [0.9, 0.999], "decay": 0.01, "clip": 1.0}
    per_epoch = data.epoch_steps(data.load("text.txt", 64), 64, 32)
    vals = [(e["step"], e["epoch"]) for e in events if e["event"] == "val"]
    assert {per_epoch * i for i in range(4)} <= {step for step, _ in vals}
    assert [at for _, at in vals if at == int(at)] == [0, 1, 2, 3]
    assert [at % 1 for _, at in vals] == pytest.approx([0, 0.25, 0.5, 0.75] * 3 + [0], abs=0.05)
    assert [e["step"] for e in events if e["event"] == "generated"] == list(range(10, 3 * per_epoch + 1, 10))
    late = report.late_losses(events)
    assert len(late) == 6
    assert late[-1] == next(e["val_loss"] for e in reversed(events) if e["event"] == "val")
    assert late[-1] < math.log(256) - 0.5  # it learns
    assert program(train, *flags, "--out", "cut", "--stop_at", per_epoch + 3)[0] == 0
    assert program(train, "--resume", "cut")[0] == 0
    assert_same_run("run", "cut")


def test_late_metric(tmp_path):
    """PAM section III: the end-of-epoch and best mid-epoch evaluations of the last three epochs."""
    late = [5.0, 4.0, 3.5, 3.0, 2.8, 2.6]
    events = write_epochs(tmp_path / "a", "pam", 10**6, late)
    assert report.late_losses(events) == late
    assert report.late_losses(events[:-1]) == []  # which are the last three is not known before the end
    assert report.late_metric(late) == pytest.approx((np.mean(late), np.std(late, ddof=1)))
    assert report.late_metric([3.0]) == (3.0, 0.0)
    header, end = {"event": "header", "settings": {"steps": 9}}, {"event": "final", "step": 9, "val_loss": 1.0}
    earlier = [{"event": "val", "epoch": 0.4, "val_loss": 1.0}]  # of an epoch long past
    later = [{"event": "val", "epoch": float(e), "val_loss": 10.0 + e} for e in range(1, 6)]
    assert report.late_losses([header, *earlier, *later, end]) == [13.0, 14.0, 15.0]
    assert report.late_losses([header, {"event": "val", "val_loss": 1.0}, end]) == []
    of_tokens = [write_epochs(tmp_path / f"{model}", model, total, losses, tokens="gpt2") for model, total, losses in (
        ("pam", 10**6, [2.0 + math.log(3)] * 6), ("sam", 10**6, [2.0] * 6), ("pam:D=40", 10, late))]  # fmt: skip
    groups = (report.group_runs(logs)[0] for logs in (of_tokens, [events], [events[:-1]]))
    table, ours, cut = (report.epochs_table(*group) for group in groups)
    assert "| pam | 5m | 1,000,000 | 3.099 | 5.56 | 22.17 |" in table and "| sam / pam | 3.00 | 2.18 |" in table
    assert table.count(" / ") == 1  # not pam:D=40 / pam
    assert "5.56" not in ours and cut == ""


def test_power_laws_and_their_crossing():
    sizes = np.array([1e6, 3e6, 1e7, 1e8])
    noisy = 50 * sizes**-0.15 * [1.02, 0.97, 1.01, 1.0]
    x, y = np.log10(sizes), np.log10(noisy)
    slope, start = np.polyfit(x, y, 1)
    error = math.sqrt(((y - start - slope * x) ** 2).sum() / 2 / ((x - x.mean()) ** 2).sum())
    assert report.power_law(sizes, noisy) == pytest.approx((start, slope, error))
    assert math.isnan(report.power_law(sizes[:2], [2, 1])[2])
    assert report.crossing((3.0, -0.5, 0), (2.0, -0.25, 0), 1) == pytest.approx((1e4, 10))
    for (slope, error), (other, of_other), freedom, crosses in (  # 95 %: 2.776 of 4 degrees, of an error of 0.05
        ((0.1, 0.03), (-0.038, 0.04), 4, False), ((0.1, 0.03), (-0.039, 0.04), 4, True),
        ((1, 0), (2, 0), 0, False), ((1, 0), (2, math.nan), 1, False), ((1, 0), (1, 0), 1, False)):  # fmt: skip
        assert (report.crossing((1, slope, error), (2, other, of_other), freedom) is not None) is crosses
    # The losses that the paper prints for the ends of its sweep have about its slopes.
    for name, printed in (("pam", -0.15), ("sam", -0.12)):
        ends = [report.PAPER_LOSSES[size][name] for size in ("5m", "100m")]
        assert report.power_law([4.98e6, 99.9e6], ends)[1] == pytest.approx(printed, abs=0.01)


def test_scaling(tmp_path, drawn):
    """One law for each model that is more than a shape; none for several rates, kinds of runs, or nearly one size."""

    def sweep(name, exponent, totals=(10**5, 10**6, 10**7), factor=12, **settings):
        for total in totals:
            late = [factor * x * total**exponent for x in (1.001, 0.999)] * 3
            folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            yield write_epochs(folder, name.format(total), total, late, **settings)

    logs = [*sweep("sam:D={}", -0.12, factor=8), *sweep("pam:D={}", -0.15), *sweep("pam:qk=unit:D={}", -0.1)]
    alone = sweep("transformer:D={}", -0.2, [10**6, 10**6 + 10**4])
    begun = next(sweep("pam:D={}", -0.15, [10**5], seeds="2"))[:8]
    text, figures = report.training_report([*logs, *alone, begun])
    figures["scaling.png"](tmp_path / "scaling.png")
    rows = re.findall(r"\| loss \| (\S+) \| (\d) \| (\d) \| (\S+) \+- 0\.000 (\S*) ?\| (.*) \|", text)
    assert rows == [("pam", "3", "3", "-0.150", "*-0.15*", "-"),
                    ("pam:qk=unit", "3", "3", "-0.100", "", "1 (12)"),
                    ("sam", "3", "3", "-0.120", "*-0.12*", "7.4e+05 (1.58) *4.5e+09 (2.05)*")]  # fmt: skip
    labels = [ax.get_legend_handles_labels()[1] for ax in drawn["scaling.png"]]
    assert "pam, loss: slope -0.150 +- 0.000" in labels[0] and len(labels[1]) == 3
    for other in ({"dtype": "bfloat16"}, {"lr": 1e-3}):
        text, figures = report.training_report([*logs, *sweep("pam:D={}", -0.3, **other)])
        assert "### Scaling" not in text and "scaling.png" not in figures
    by_size = [*sweep("pam", -0.15, [10**5]), *sweep("pam", -0.15, [10**6], size="10m")]
    several_rates = [*by_size, *sweep("pam", -0.2, [10**6], size="10m", lr=1e-3)]
    assert "### Scaling" not in report.training_report(several_rates)[0]
    assert "| loss | pam | 2 | 2 | -0.150 +- nan *-0.15* | - |" in report.training_report(by_size)[0]


# ---- what diagnose.py draws from checkpoints ----


def save_untrained(path, spec, meta, **changes):
    """A checkpoint of a new model, beside what a run's says."""
    model = make(spec, **changes)
    path.parent.mkdir(exist_ok=True)
    sample.save_checkpoint(path, meta | {"spec": spec, "config": dataclasses.asdict(model.config)}, model, None, 2, {})


@pytest.mark.parametrize("name", ["pam", "sam", "pam:order=sequential", "pam:window=3"])
def test_rank_of_the_memory(name):
    """Known ranks; and read in parts, the memory is the one of as many tokens at once. A hybrid has one of two."""
    two, unequal = torch.diag(torch.tensor([1.0, 1.0, 0.0])) * 1j, torch.diag(torch.tensor([2.0, 1.0]))
    of_unequal = 3 / 4 ** (1 / 3)  # exp of the entropy of 2/3 and 1/3
    for S, rank in ((torch.eye(8), 8), (two, 2), (unequal, of_unequal), (torch.ones(5, 5), 1), (torch.zeros(4, 4), 0),
                    (torch.eye(3) * 1e-34, 3)):  # fmt: skip
        assert diagnose.effective_rank(S).item() == pytest.approx(rank, abs=1e-4)
    model, idx = make(name, L=4, d=4, D=8), text_batch(3, 12)
    ranks = diagnose.state_ranks(model, idx, [1, 2, 5, 12])
    state = [x for x in model(idx[:, :5])[2] if x]
    assert ranks.shape == (4, len(state), 8 if name == "sam" else 4, 3)
    torch.testing.assert_close(ranks[0, 0], torch.ones_like(ranks[0, 0]))  # one pair stored
    S = diagnose.memories(state)[-1, 1, 2]  # last layer, window 1, head 2
    expected = diagnose.effective_rank(S if model.real else torch.view_as_complex(S))
    torch.testing.assert_close(ranks[2, -1, 2, 1], expected, atol=1e-4, rtol=0)
    ranks = torch.tensor([[9.0, 9], [1, 3], [2, 4], [4, 6]]).view(4, 1, 1, 2)  # two windows
    table = diagnose.ranks_table([1, 15, 20, 30], ranks, 2 * ranks, 15)
    assert table.endswith("\n| 0 | 0 | 2.00 | 3.33 (2.00-5.00) | 4.00 | 6.67 (4.00-10.00) |")


def test_repetition():
    """3-grams of abcabcd: abc bca cab abc bcd. In pieces of the length that gives the paper's three numbers."""
    n = diagnose.PAPER_SAMPLE
    assert [round(x, 3) for x in (3 / (n - 2), 1 / (n - 3), 64 / n)] == list(diagnose.PAPER_REPETITION.values())
    found = diagnose.repetitions(["abcabcd", [1] * 10, "", [*range(n), *range(n), 0], range(2 * n)], list)
    expected = {"3-gram": [0.2, 7 / 8, *5 * [0]], "4-gram": [0, 6 / 7, *5 * [0]], "unique": [4 / 7, 0.1, 0, *4 * [1]]}
    assert {kind: pytest.approx(values) for kind, values in found.items()} == expected
    texts = (85, "generated", "x x x x"), (90, "generated", "a b c d"), (100, "generated", "a a c d")
    texts += (50, "eval", ""), (100, "sample", "a a a a")  # the first is of an earlier checkpoint
    events = [{"step": step, "event": event, "text": text} for step, event, text in texts]
    rows = diagnose.repetition_rows(events, torch.tensor([[97, 32, 98, 32, 97]]), str.split, lambda t: bytes([t]))
    assert rows[0] == ["validation text", 1, "0.000", "0.000", "0.667"]
    assert rows[1][:2] == [diagnose.SAMPLING["generated"], 2]  # the earlier one is not of the last tenth
    assert rows[1][-1] == "0.875 +- 1.588"  # t = 12.706, deviation 0.1768, n = 2
    assert rows[2] == [diagnose.SAMPLING["sample"], 1, "0.500", "0.000", "0.250"]


def test_coherence_of_word_pairs_and_its_control():
    """Pairs of one direction are coherent, their shuffled pairs and random pairs are not; all have a common turn."""
    base = torch.view_as_complex(randn(47, 64, 2))
    z = torch.view_as_real(torch.cat((base, base * torch.exp(torch.tensor(0.3j)))))  # word i and word i + 47
    ids = {f"w{i}": i for i in range(94)}
    pairs = {"synonyms": {(f"w{i}", f"w{i + 47}") for i in range(47)} | {("w1", "unknown")},
             "antonyms": {("w0", "w1"), ("w1", "w2")}, "rare": {("w1", "w2")}}  # fmt: skip
    groups = diagnose.coherence_groups(z, randn(94, 64, 2, seed=1), pairs, ids)
    assert list(groups) == ["synonyms", "antonyms", "random"]  # a single pair is no group
    assert [(g["n"], g["words"]) for g in groups.values()][:2] == [(47, 94), (2, 3)]
    synonyms, chance = groups["synonyms"], (math.pi / 4 / 64) ** 0.5  # of two complex normal vectors of 64
    assert synonyms["coherence"].tolist() == pytest.approx([1] * 47)
    assert synonyms["phase"].tolist() == pytest.approx([0.3] * 47)
    assert synonyms["untrained"] == pytest.approx(chance, rel=0.5)
    assert groups["random"]["coherence"].mean() == pytest.approx(chance, rel=0.5)
    assert (groups["random"]["n"], len(synonyms["shuffled"])) == (47, diagnose.REPAIRINGS)
    expected = chance + 1 / 47, 0.25 + 0.75 / 47  # one in 47 meets its own partner
    assert np.mean(synonyms["shuffled"], 0) == pytest.approx(expected, rel=0.2)
    table = diagnose.coherence_table(groups)
    assert "| synonyms | 47 | 94 | 1.0000 +- 0.0000 | 0." in table
    assert "| 1.000 | 0.2" in table  # all phases near 0, of shuffled pairs a quarter
    # A word paired with itself, as two of the random draws would be, has coherence 1 and is no control.
    assert np.max(groups["antonyms"]["shuffled"], 0)[0] < 0.4 and groups["random"]["coherence"].max() < 0.9
    with pytest.raises(data.InputError, match="fewer than two pairs"):
        diagnose.coherence_groups(z, z, {"synonyms": {("w1", "w2"), ("w1", "no")}}, ids)
    text = {0: b"hot", 1: b" hot", 2: b" cold", 3: b"\n", 4: b" \xff", 5: b" unseen"}  # words begin with a space
    found = diagnose.word_tokens(np.array([4, 1, 1, 0, 3, 2] * 3, np.uint16), text.get)
    assert found == {"hot": 1, "cold": 2, "\ufffd": 4}


@pytest.fixture
def wordnet(tmp_path):
    lines = {
        "adj": "  1 the licence\n00001740 00 a 02 hot 0 warm(p) 0 002 ! 00002098 a 0101 + 05200169 n 0101 | of high\n"
               "00002098 00 s 02 cold(a) 0 ice_cold 0 002 ! 00001740 a 0101 ! 00001740 a 0201 | of low temperature\n",
        "noun": "00001740 03 n 0c a 0 b 0 c 0 d 0 e 0 f 0 g 0 h 0 i 0 j 0 s 0 o 0 000 | twelve: their number is hex\n"
                "00002098 03 n 01 no_letter 0 001 ! 00001740 n 010b | opposed to the eleventh\n",
        "verb": "00001740 29 v 02 rise 0 fall 0 001 ! 00001740 v 0102 01 + 02 00 | both synonym and antonym\n",
        "adv": "00001740 02 r 01 well 0 000 | alone\n",
    }  # fmt: skip
    return write_tree(tmp_path / "wordnet", {f"data.{pos}": text.encode() for pos, text in lines.items()})


def test_wordnet_pairs(wordnet):
    synonyms, antonyms = diagnose.wordnet_pairs(wordnet)
    assert antonyms == {("cold", "hot"), ("hot", "ice cold"), ("no letter", "s")}
    assert len(synonyms) == 12 * 11 / 2 + 2
    assert {("a", "s"), ("hot", "warm"), ("cold", "ice cold")} <= synonyms
    (wordnet / "data.adv").write_text("00001740 02 r 0x well\n")
    with pytest.raises(data.InputError, match="data.adv is no file of WordNet's"):
        diagnose.wordnet_pairs(wordnet)


@pytest.fixture
def diagnosed(merges, program, monkeypatch):
    """Two runs, pam-bytes and pam-gpt2, with what their checkpoints say."""
    argv = ["--model", "pam:D=8:L=1:H=1:d=4", "--data", "text.txt", "--seq", 32, "--batch", 8, "--steps", 2,
            "--eval_seqs", 2, "--sample_every", 2, "--lr", 1e-2]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        for tokens in ("bytes", "gpt2"):
            assert program(train, *argv, "--tokens", tokens, "--out", f"pam-{tokens}")[0] == 0
    return [sample.read_checkpoint(f"pam-{tokens}")["meta"] for tokens in ("bytes", "gpt2")]


@pytest.mark.slow
def test_diagnostics_of_runs(diagnosed, program, drawn, wordnet, monkeypatch):
    """From checkpoints: tables with the paper's numbers, figures; WordNet's words that are tokens of the text."""
    of_bytes, of_tokens = diagnosed
    save_untrained(Path("sam-gpt2/last.pt"), "sam:D=8:L=1:H=1:d=4", of_tokens, V=265)
    shutil.copy("pam-gpt2/log.jsonl", "sam-gpt2")
    save_untrained(Path("pam-bytes/best.pt"), "pam:D=8:L=1:H=1:d=4", of_bytes, seed=1)  # is its own control

    def ranks(run):
        return re.search(rf"\n\| {run} \| 4 \| 8 \| 32 \| (.*) \|\n", out)[1].split(" | ")

    drawn.clear()
    log = Path("pam-bytes/log.jsonl")  # of a run that went on with its data elsewhere
    log.write_text(log.read_text().replace("text.txt", "gone.txt", 1))
    out = printed(program(diagnose, "pam-bytes", "--out", "figures"))
    assert drawn.keys() == {"repetition.png", "ranks-pam-bytes.png"}
    assert ranks("pam-bytes")[:2] == ranks("pam-bytes")[2:]
    paper = "| the paper | tokens | its sample | 1 | 0.034 | 0.011 | 0.703 |"
    assert f"{paper}\n| pam-bytes | words | validation text | 8 |" in out
    assert f"| pam-bytes | words | {diagnose.SAMPLING['generated']} | 1 |" in out
    assert "Not measured: --wordnet FOLDER" in out
    tables = Path("figures/tables.md").read_text()
    assert tables.rstrip() in out and "### Effective rank by layer and head" in tables
    with monkeypatch.context() as patch:
        patch.setattr(diagnose, "PAPER_SETTLED", 33)  # further than a window
        out = printed(program(diagnose, "pam-bytes", "--out", "further"))
    assert [x[:1] for x in ranks("pam-bytes")] == ["-", "2", "-", "2"]

    out = printed(program(diagnose, "pam-gpt2", "sam-gpt2/log.jsonl", "--out", "figures", "--wordnet", wordnet))
    assert all(x != y for x, y in zip(ranks("pam-gpt2")[:2], ranks("pam-gpt2")[2:]))
    for name in ("pam", "sam"):
        weight = sample.load(f"{name}-gpt2")[0].embedding.weight.detach().double()
        z = (paired(weight) if name == "pam" else weight)[data.codec(265)[0](b" s g o")]
        product = (z.conj() @ z.T).abs() / (z.norm(dim=1) * z.norm(dim=1, keepdim=True))
        assert f"| synonyms | 3 | 3 | {product.triu(1).sum() / 3:.4f} +- " in out
        assert f"coherence-{name}-gpt2.png" in drawn
    assert f"| sam-gpt2 | tokens | {diagnose.SAMPLING['sample']} | 1 |" in out


@pytest.mark.slow
def test_faults_of_diagnostics(diagnosed, program, wordnet, monkeypatch):
    """Each is one line, before anything is measured."""
    save_untrained(Path("other.pt/last.pt"), "mamba:D=4:L=1", diagnosed[0])
    log = Path("pam-bytes/log.jsonl").read_bytes()
    write_tree(Path(), {"other.pt/log.jsonl": log, "empty/log.jsonl": log, "nothing": b""})
    with monkeypatch.context() as patch:  # a fork's state
        patch.setattr(diagnose, "memories", partial(raise_error, ValueError("three parts")))
        assert_refused(program(diagnose, "pam-gpt2"), "has no ranks (three parts)")
    for argv, message in (
        (["other.pt"], "other.pt is no PAM or SAM, but mamba"), (["empty"], "no checkpoint in"),
        (["pam-gpt2", "--wordnet", "."], f"WordNet's data.noun (unzip {diagnose.WORDNET_URL} and"),
        (["pam-bytes", "--wordnet", wordnet], "--wordnet takes runs with --tokens gpt2"),
        (["pam-gpt2", "pam-gpt2/log.jsonl"], "the same name"),
        (["pam-gpt2", "--out", "text.txt"], "--out text.txt must be a folder"),
        (["pam-gpt2", "--text", "~no one/x"], "No such file or directory: '~no one/x'"),
        *((["pam-gpt2", *more], "over a text that is not empty, and without --wordnet") for more in (
            ["--text", "nothing"], ["--prompt", ""], ["--prompt", "x", "--wordnet", "."])),
        (["pam-gpt2/last.pt", "--prompt", "x"], "takes run folders, and of each best.pt or, without one, last.pt"),
        (["pam-bytes"], "text.txt is not the data of"),
    ):  # fmt: skip
        if argv == ["pam-bytes"]:
            Path("text.txt").write_text(Path("text.txt").read_text()[1:])
        assert_refused(program(diagnose, *argv), message)


@pytest.mark.parametrize("spec", ["hmamba", "pam", "pam:order=sequential", "htransformer", SOFTMAX[0]])
def test_phases_are_those_of_the_state(spec):
    """What `step` holds after each token, whatever the length: (layers, heads, numbers, tokens)."""
    model, idx = make(spec, H=2, D=8, L=2, **{"d" if spec.startswith("pam") else "N": 3}).eval(), text_batch(1, 80)
    z = diagnose.complex_states(model, idx)
    assert z.shape == (2, 2, 3, 80) and z.is_complex() and not z.requires_grad
    model.requires_grad_(False)
    with torch.inference_mode():
        assert torch.equal(diagnose.complex_states(model, idx.clone()), z)
        assert not any(p.requires_grad for p in model.parameters())
        layer = [x for x in model(idx[:, :71])[2] if x][1]
    # Of the second layer and head: the key of the last token, the memory, or psi.
    kept = layer[2][-2][0, 1, -1].reshape(3, 2) if "htransformer" in spec else layer["pam" not in spec][0, 1]
    expected = torch.view_as_complex(kept.contiguous())
    expected = expected.diagonal() if "pam" in spec else expected
    torch.testing.assert_close(z[1, 1, :, 70], expected, atol=1e-5, rtol=1e-4)
    for real in ("mamba", "sam", "transformer", "hmamba:field=real", "htransformer:field=real"):
        assert diagnose.complex_states(make(real, L=1), idx) is None


@pytest.mark.slow
def test_phases_over_a_text(program, drawn, monkeypatch):
    """A picture a run, with the characters beside it; whitespace and no characters are shown."""
    for spec in ("hmamba:D=8:L=5:H=5:N=2", "mamba:D=8:L=1", "pam:L=1:D=8:H=1:d=4"):
        save_untrained(Path(spec[:5], "best.pt"), spec, {"size": "tiny", "data": {}, "settings": {}})
    prompt = "a$ \u00fc\n\u4e2d\udcff"  # the last stands for a byte that is not UTF-8
    out = printed(program(diagnose, "hmamb", "mamba", "pam:L", "--prompt", prompt, "--out", "figures"))
    assert out.startswith("hmamb, best.pt of step 2: state psi_t over 10 tokens\n"
                          "mamba: mamba:D=8:L=1 has no phase that can be drawn\n")  # fmt: skip
    assert drawn.keys() == {"phases-hmamb.png", "phases-pam:L.png"}
    axes = drawn["phases-hmamb.png"]
    assert [ax.get_title() for ax in axes] == ["layer 0", "layer 1", "layer 3", "layer 4"]
    labels = [text.get_text() for text in axes[0].get_xticklabels()]
    assert labels == ["a", "$", "\u2423", "", "\u00fc", "\u21b5", "", "", "\u4e2d", "\ufffd"]
    pixels = axes[0].images[0].get_array()
    assert pixels.shape == (4 * 2, 10, 3)
    psi = diagnose.complex_states(sample.load("hmamb")[0], torch.tensor([[*b"a"]]))[0, 0, 0, 0]
    turn = colorsys.rgb_to_hsv(*pixels[0, 0])[0] - psi.angle().item() / (2 * math.pi)
    assert turn % 1 == pytest.approx(0.5, abs=0.02)  # the hue begins at -pi
    program(diagnose, "hmamb", "--text", "text.txt", "--out", "figures")
    assert len(drawn["phases-hmamb.png"][0].get_xticklabels()) == 64
    monkeypatch.setattr(diagnose, "memories", partial(raise_error, ValueError("three parts")))  # a fork's state
    out = printed(program(diagnose, "pam:L", "hmamb", "--prompt", "a", "--out", "figures"))
    assert "has no phase that can be drawn (three parts)\nhmamb, best.pt" in out


# ---- GPT-2's tokens ----


@pytest.fixture
def merges(cache, monkeypatch):
    """tiktoken's GPT-2 with eight merges in place of 50,000, so that no network is needed."""
    import tiktoken

    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ranks = [*(bytes([b]) for b in range(256)), b"th", b"the", b" the", b" a", b"\n\n", b" s", b" g", b" o"]
    ranks = {merged: i for i, merged in enumerate(ranks)}
    special = {"<|endoftext|>": len(ranks)}
    fake = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": fake}.__getitem__)
    monkeypatch.setattr(data, "GPT2_VOCAB", 265)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    return fake


def test_codec(merges, monkeypatch):
    encode, decode = data.codec(265)
    for raw, tokens in (b"!~ ", [33, 126, 32]), (b"the the a", [257, 258, 259]), (b"\n\n", [260]), (b"", []):
        assert encode(raw) == tokens
    assert b"".join(map(decode, encode(bytes(range(128))))) == bytes(range(128))
    assert encode(b"\xff") == encode("\ufffd".encode())
    assert data.CUT.match("a_=")[0] == "a"  # "_=" may be one token
    monkeypatch.setattr(data, "BLOCK", 1000)
    monkeypatch.setattr(data, "LONGEST_PIECE", 2000)
    with pytest.raises(data.InputError, match="the text: from byte 0 on no word ends"):
        encode(b" " * 10**4 + b"a")
    assert decode(264) == b"<|endoftext|>"
    assert data.codec(256)[0](b"ab") == [97, 98] and data.codec(256)[1](98) == b"b"
    with pytest.raises(data.InputError, match="a vocabulary of 300"):
        data.codec(300)


def test_gpt2_without_a_network(program, monkeypatch):
    """The line says where tiktoken looks for its files, before a run on ready-made tokens. Text is no such file."""
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setattr("tiktoken.load.read_file", partial(raise_error, OSError("no network")))
    (np.arange(4000, dtype="<u2") % 300).tofile("x.tokens")
    for place in ("mine", ""):
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", place) if place else monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
        folder = place or data.cache_dir() / "gpt2"
        for argv in ([data, "text.txt", "--tokens", "gpt2"], [train, *SMALL, "--data", "x.tokens", "--out", "run"]):
            assert_refused(program(*argv), f"(no network): without a network copy {folder} from a machine")
    assert not Path("run").exists()
    Path("x.tokens").write_bytes(b"to be or not to be\n" * 900)
    assert_refused(program(data, "x.tokens", "--tokens", "gpt2"), "x.tokens is no file of GPT-2's tokens")


@pytest.mark.parametrize("block", [1, 7, 64, 2000])
def test_tokens_do_not_depend_on_where_text_is_cut(block, merges, monkeypatch):
    """Whatever the text: those of all in one piece; and no more than a few blocks are encoded at once."""
    sizes, random, whole, spy = [], np.random.RandomState(0), merges.encode_ordinary, copy.copy(merges)
    spy.encode_ordinary = lambda text: sizes.append(len(text.encode())) or whole(text)
    monkeypatch.setattr(data, "gpt2_encoding", lambda: spy)
    monkeypatch.setattr(data, "BLOCK", block)
    monkeypatch.setattr(data, "LONGEST_PIECE", max(2 * block, 4000))
    lines = ["To be, or not\r\n", "быть иль не быть\r\n", "生存还是毁灭，这是一个值得考虑的问题。\n", "🙂 🙂🙂\n", "a\n" + " " * 3000,
             '{"ключ": "слово"} ', "จะอยู่ หรือไม่อยู่", "होना या न होना", "أَكون، ", "слово🙂\t", '{"a":1,"b":"x"},',
             "слово\u00a0", "生存还是毁灭，"]  # fmt: skip
    texts = [line * (1 + 15_000 // len(line.encode())) for line in lines] if block == 2000 else []
    pieces = [*" \n\r\t\x1c\u00a0\u3000'.,=-1éя中。🙂½٣\u0301", "\r\n", "  ", "'s", "'ll", "the", "ก็"]
    for trial in range(800 * (block < 2000)):
        others = [chr(c) for c in random.randint(0, 0x30000, 40) if not 0xD800 <= c < 0xE000]  # of any script
        texts.append("".join(random.choice(pieces + others * (trial % 2), random.randint(1, 40))))
    for text in texts:
        raw = text.encode()
        sizes.clear()
        found = [t for tokens in data.encode_blocks(io.BytesIO(raw), len(raw), "x", 0) for t in tokens]
        assert sum(sizes) == len(raw) and (max(sizes) < 10_000 or block < 2000)
        assert found == whole(text), text


def test_data_in_tokens(merges, monkeypatch):
    text = "the a the\n" * 60_000
    Path("a.txt").write_text(text)
    corpus = data.load("a.txt", 64, tokens="gpt2")
    assert corpus.vocab_size == 265 and corpus.tokens.dtype == np.uint16
    assert corpus.tokens.tolist() == data.gpt2_encoding().encode_ordinary(text)
    assert len(corpus.split("train")) == len(corpus.tokens) * 90 // 100
    with monkeypatch.context() as patch:
        patch.setattr(data, "gpt2_encoding", None)  # the second time the file is there
        assert np.array_equal(data.load("a.txt", 64, tokens="gpt2").tokens, corpus.tokens)
    Path("b.tokens").write_bytes(corpus.tokens.tobytes())  # ready-made
    ready = data.load("b.tokens", 64, tokens="gpt2", verify=True)
    assert np.array_equal(ready.tokens, corpus.tokens) and not ready.record


def test_tokens_of_a_corpus_with_its_own_splits(merges, monkeypatch):
    """Each split by itself, and WikiText-103 checked against its known counts; a wrong count leaves no file."""
    texts = {"train": b"the a \n" * 800, "val": b"a the \n" * 100, "test": b"the s \n" * 100}
    Path("w").write_bytes(b"".join(texts.values()))
    splits = {"train": [0, 5600], "val": [5600, 6300], "test": [6300, 7000]}
    corpus = data.map_file("wikitext103", Path("w"), "u1", {"splits": splits})
    with pytest.raises(data.InputError, match="train of WikiText-103 became 3,200 tokens"):
        data.tokenize(corpus)
    assert not list(data.cache_dir().rglob("*.tokens"))
    tokens = {name: merges.encode_ordinary(text.decode()) for name, text in texts.items()}
    monkeypatch.setattr(data, "WIKITEXT_TOKENS", {name: len(expected) for name, expected in tokens.items()})
    corpus = data.tokenize(corpus)
    assert {name: corpus.split(name).tolist() for name in splits} == tokens


def test_training_and_sampling_on_tokens(merges, program, no_curves):
    """A run on tokens: its vocabulary, its units, its text; resumed on bytes it is refused."""
    flags = ["--model", "pam:D=4:L=1:H=1:d=4", *SMALL[2:], "--tokens", "gpt2", "--steps", 2, "--eval_seqs", 2]
    printed(program(train, *flags, "--out", "run"), "bits a token")
    model, meta = sample.load("run")
    assert model.config.V == 265 and meta["settings"]["tokens"] == "gpt2"
    assert printed(program(sample, "run", "--prompt", "the a", "--length", 5), err=None).startswith("the a")
    assert_refused(program(train, "--resume", "run", "--tokens", "bytes"), "--tokens bytes", "gpt2")
    tuned = ["--data", "text.txt", "--seq", 32, "--batch", 4, "--eval_seqs", 2, "--steps", 1, "--init_from", "run"]
    assert program(train, *tuned, "--out", "new")[0] == 0
    assert report.read_log("new")[0]["settings"]["tokens"] == "gpt2"
    assert train.resolve({"data": "wikitext103"}, CPU).tokens == "gpt2"


# ----------------------------------------------------------------------------------------------------------------------
# CSP and its baselines


def test_csp_parameters():
    """CSP table 1 for csp and rnn; the others are our layouts. The docstring of csp.py says the same."""
    said = csp.__doc__.replace("\n", " ").replace("csp 4,779", "csp-vanilla 4,779, csp-fast 4,779")
    for name, count in zip(csp.MODELS, (4779, 4779, 2770, 10578, 17106, 39890), strict=True):
        model = csp.stack_seeds(csp.MODELS[name], csp.MODELS[name].Config(), [1, 2])
        assert sum(p[0].numel() for p in model.parameters()) == count and f"{name} {count:,}" in said


@pytest.mark.parametrize("spec", [
    "csp-vanilla", "csp-vanilla:skip=prev", "csp-vanilla:theta=channel", "csp-fast", "csp-fast:scan=segment",
    "csp-fast:scan=printed:theta=step", "csp-fast:theta=frozen:gate=sigmoid", "rnn", "complex-rnn", "signed-mamba",
    "signed-mamba:transition=input", "decoder",
])  # fmt: skip
def test_task_models(spec, monkeypatch):
    """Causal, by seed alone, the same under autocast; in half precision far within bfloat16's rounding (4e-3)."""
    model, alone = (tasks.build(spec, "mod3", seeds).double() for seeds in ([7, 8], [8]))
    idx = torch.randint(2, (2, 5, 21), generator=torch.Generator().manual_seed(0))
    out, later, second = model(idx), idx.clone(), torch.tensor([0, 1]).view(2, 1, 1)
    assert out.dtype == torch.float64
    later[:, :, 12:] = 1 - later[:, :, 12:]
    torch.testing.assert_close(model(later)[:, :, :12], out[:, :, :12], rtol=1e-10, atol=1e-10)
    assert (model(later)[:, :, 12:] - out[:, :, 12:]).abs().max() > 1e-3
    torch.testing.assert_close(alone(idx[1:])[0], out[1], rtol=1e-10, atol=1e-10)
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in model.parameters())
    for wrong in (idx[:, :0], idx[:, :, :0], idx - second, idx + 2 - 2 * second):
        with pytest.raises((ValueError, IndexError), match=r"idx has shape \(2, .*; expected \(S, B, T\)|out of range"):
            model(wrong)

    for dtype, backend in ((torch.float16, ""), (torch.bfloat16, ""), (torch.float32, "reference")):
        monkeypatch.setenv("NANOHILBERT_BACKEND", backend)
        model = tasks.build(spec, "mod3", [7, 8]).to(dtype)
        found, exact = model(idx), copy.deepcopy(model).double()(idx)
        assert found.dtype == torch.float32 and (found - exact).norm() < 1e-4 * exact.norm()
        with torch.autocast("cpu", torch.bfloat16):
            again = model(idx)
        assert torch.equal(again, found)
        found, again = (torch.autograd.grad(y.square().mean(), list(model.parameters())) for y in (found, again))
        assert all(g.dtype == dtype and g.isfinite().all() and torch.equal(g, h) for g, h in zip(found, again))
    dropped = []
    for default in (torch.float64, torch.float32):
        torch.set_default_dtype(default)
        dropped.append(model(idx, [torch.Generator().manual_seed(s) for s in (7, 8)]))
    assert torch.equal(*dropped)


def assert_same_with_gradients(found, expected, module):
    parameters = list(module.parameters())
    gradients = [torch.autograd.grad(y.sin().sum(), parameters, retain_graph=True) for y in (found, expected)]
    torch.testing.assert_close([found, *gradients[0]], [expected, *gradients[1]], rtol=1e-9, atol=1e-10)


def literal_csp(block, z):
    """Algorithms 1 and 2 line by line, z (S, B, T, 2, d); for the division by A_shift h_t = alpha_t (h_{t-1} + c_t)."""
    w, cfg, theta, outputs = dict(block.named_parameters()), block.config, 0.0, []
    h, g, linear = torch.zeros(()), w["g"].sigmoid().flatten(2), cfg.carry == "linear"
    for z_t in torch.complex(*z.unbind(-2)).unbind(2):  # (S, B, d)
        x, y = torch.tanh(as_numbers(z_t) @ w["W_theta.weight"]).chunk(2, -1)  # of 1, or of d
        theta = theta * (cfg.theta != "step") + torch.angle(torch.complex(x, y))
        joined = as_numbers(z_t * torch.exp(1j * theta)) @ w["B.weight"] + w["B.bias"]
        eta, b = joined @ w["W_gamma.weight"] + w["W_gamma.bias"], torch.complex(*joined.chunk(2, -1))
        gamma = 0.5 * (1 + torch.sin(eta)) if cfg.gate == "sine" else 1 / (1 + torch.exp(-eta))
        delta = F.softplus((gamma * joined if linear else joined) @ w["W_delta.weight"] + w["W_delta.bias"])
        skip = g * (z_t if cfg.skip == "input" else h)
        h = torch.exp(-delta) * (h + gamma * b) if linear else torch.exp(-delta) * h + gamma * b
        u = skip + torch.complex(h.real * h.real.sigmoid(), h.imag * h.imag.sigmoid())
        outputs.append(u / u.abs().detach())  # E.2: the modulus is a constant to the backward pass
        h = h if linear else outputs[-1]
    return torch.view_as_real(torch.stack(outputs, 2)).transpose(-1, -2)


def test_csp_block_is_its_algorithm(monkeypatch):
    """And the two are not equal, as CSP section 2.4.2 has it: A_shift damps the input from the first step on."""
    monkeypatch.setattr(csp, "EPS", 0.0)
    outputs, z = [], randn(2, 4, 9, 2, 3, seed=3)  # (S, B, T, 2, d)
    for settings in ({}, {"skip": "prev"}, {"carry": "linear"}, {"carry": "linear", "gate": "sigmoid"},
                     {"carry": "linear", "theta": "step"}, {"carry": "linear", "theta": "channel"}):  # fmt: skip
        block = csp.stack_seeds(csp.CSPBlock, csp.CSPConfig(d=3, **settings), [1, 2]).double()
        block.g.data = torch.tensor([0.3, -0.8]).double().view(2, 1, 1, 1, 1)
        outputs.append(block(z))
        assert_same_with_gradients(outputs[-1], literal_csp(block, z), block)
        assert (outputs[-1].square().sum(-2) - 1).abs().max() < 1e-12  # on the unit circle
    assert (outputs[0] - outputs[2]).abs().mean((0, 1, 3, 4)).min() > 0.05


@pytest.mark.parametrize("T", [1, 2, 65, 300])
@pytest.mark.parametrize("delta", [0.01, 2.0])
def test_csp_scans_agree(T, delta):
    """The exact ones, value and gradient, against the loop in float64; in float32 up to a rounding or two a step."""

    def run(method, dtype):
        inputs = delta * (0.5 + randn(2, 3, T, 1).sigmoid()), randn(2, 3, T, 6)
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        h = csp.scan(*leaves, method)
        return h, *torch.autograd.grad(h, leaves, torch.sin(torch.arange(h.numel())).view(h.shape).to(h))

    expected = run("sequential", torch.float64)
    for method, dtype in itertools.product(("sequential", "segment", "associative"), (torch.float32, torch.float64)):
        for found, right in zip(run(method, dtype), expected):
            assert (found - right).abs().max() <= 2 * (T + 8) * torch.finfo(dtype).eps * right.abs().max()


def test_printed_formula_fails_where_the_exact_scan_does_not():
    """T=1024 at a mean Delta of 2: Algorithm 2, line 16, is off by over 1 % from step 8, decays to 0, stays finite."""
    delta, c = 2 * (0.5 + randn(1, 64, 1024, 1).sigmoid()), randn(1, 64, 1024, 8)
    exact = csp.scan(delta, c, "sequential")
    scale = exact.abs().mean((1, 3), keepdim=True)
    assert ((csp.scan(delta.float(), c.float(), "associative") - exact).abs() / scale).max() < 1e-5
    error = ((csp.scan(delta.float(), c.float(), "printed") - exact).abs() / scale).mean((0, 1, 3))
    assert error[:6].max() < 0.01 < error[8:].min()
    assert error[20:].min() > 0.9 and error.isfinite().all()


def test_forks_of_csp_fast(monkeypatch):
    """results/tasks-crossed/crossed.py and results/csp-gate/silu.py; eps changes what the printed formula computes."""
    idx = torch.randint(2, (2, 3, 64), generator=torch.Generator().manual_seed(0))

    def scores(spec, training=False):
        spec = sample.import_models(f"{ROOT}/results/{spec}" if "/" in spec else spec, (csp.Model,))
        generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)] if training else None
        return tasks.build(spec, "mod3", [1, 2])(idx, generators)

    crossed, summed = "tasks-crossed/crossed.py:Crossed:scan=printed:tested=associative", "csp-gate/silu.py:SumSiLU"
    assert torch.equal(scores(crossed, training=True), scores("csp-fast:scan=printed", training=True))
    assert torch.equal(scores(crossed), scores("csp-fast"))
    for ignored in (f"{summed}:gate=sigmoid", f"{summed}:theta=step", f"{crossed}:eps=1e-3"):
        with pytest.raises(data.InputError, match="known: sine|known: cumulative|eps=0.001"):
            scores(ignored)
    idx = idx[..., :12]
    far = [(scores(f"csp-fast:scan=printed:eps={eps}") - scores("csp-fast")).abs().max() for eps in (1e-9, 1e-3)]
    assert 10 * far[0] < far[1]
    assert (scores(summed) - scores("csp-fast")).abs().max() > 0.01
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x: x)
    torch.testing.assert_close(scores(summed), scores("csp-fast"), rtol=0, atol=1e-5)


def test_angles_that_count(program, monkeypatch):
    """results/angles/angles.py: which block counts, until when; logs without angles of counting tasks are refused."""
    monkeypatch.syspath_prepend(ROOT / "results/angles")
    angles = importlib.import_module("angles")
    third = 2 * math.pi / 3
    assert angles.onset([(1.0, 0.4), (0.0, -third)], 3)[:4] == (65, 2, 1, (0, -1))
    assert angles.onset([(math.pi, third / 2 + 0.04)], 3)[:4] == (pytest.approx(math.pi / 6 / 0.02), 1, 2, (3, 1))
    assert angles.onset([(third, third)], 3) is None  # that counts the symbols, not the ones
    assert angles.onset([(0.14, third + 0.14)], 3) is None  # it drifts within the length of training
    assert angles.correlation([[(1, 2), (2, 4), (3, 9), (4, 5)], [(0, 8), (1, 9)]])[0] == pytest.approx(4.5 / 5.5)
    assert angles.centred_ranks([5, 1, 5]).tolist() == [0.5, -1, 0.5]
    log = (ROOT / "results/angles/csp-fast-mod5-s1.jsonl").read_text()
    for old, new in (('"mod5"', '"dyck1"'), ('"theta"', '"turn"'), ('"length": 64', '"length": 63')):
        assert old in log
        Path("x.jsonl").write_text(log.replace(old, new))
        assert_refused(program(angles, "x.jsonl"), "x.jsonl: no angles of csp on mod-m or parity, tested at length 64")


@pytest.mark.parametrize("name", ["rnn", "complex-rnn"])
def test_recurrent_networks_are_their_formulas(name):
    model, rotates = csp.stack_seeds(csp.MODELS[name], csp.RNNConfig(hidden=4), [5]).double(), name == "complex-rnn"
    idx, h, expected = torch.tensor([[[0, 1, 1, 0, 1]]]), torch.zeros(4).double(), []
    w = {name: p[0].squeeze(0) for name, p in model.named_parameters()}
    for token in idx[0, 0]:
        x, joined = model.embedding.weight[0, token], as_numbers(h + 0j) if rotates else h
        candidate = torch.tanh(x @ w["W.weight"] + w["W.bias"] + joined @ w["U.weight"] + w["U.bias"])
        if rotates:
            u = torch.sigmoid(x @ w["W_u.weight"] + w["W_u.bias"] + joined @ w["U_u.weight"])
            phi = x @ w["W_phi.weight"] + w["W_phi.bias"]
            candidate = (1 - u) * torch.exp(1j * phi) * h + u * torch.complex(candidate[:4], candidate[4:])
        h = candidate
        expected.append(as_numbers(h) if rotates else h)
    torch.testing.assert_close(model(idx), model.head(torch.stack(expected)[None, None], None), rtol=0, atol=1e-12)


@pytest.mark.parametrize("T", [1, 6])
@pytest.mark.parametrize("transition", ["fixed", "input"])
def test_signed_mamba_block_is_its_formula(transition, T):
    """a_t = tanh(dt_t A), or tanh(W_a u_t), in the block of arXiv 2312.00752, section 3.4; and the gradients."""
    cfg = csp.SignedMambaConfig(E=3, N=2, dt_rank=1, transition=transition)
    block, x = csp.stack_seeds(csp.SignedMambaBlock, cfg, [4, 5]).double(), randn(2, 2, T, csp.WIDTH)
    if transition == "fixed":
        assert block.A[0, 0].sign().tolist() == [1, -1]  # half of the states flip

    def literal(x, w):  # of one seed, one sequence
        u, gate = (normed(x, w["norm"], torch.finfo(torch.float64).eps) @ w["in_proj.weight"]).split(3, -1)
        u = F.silu(F.conv1d(F.pad(u.T, (3, 0)), w["conv"].T.unsqueeze(1), w["conv_bias"], groups=3).T)
        r, B, C = (u @ w["x_proj.weight"].view(3, 5)).split((1, 2, 2), -1)
        dt = F.softplus(r @ w["dt_proj.weight"].view(1, 3) + w["dt_proj.bias"])
        rates = dt[..., None] * w["A"] if transition == "fixed" else (u @ w["W_a.weight"] + w["W_a.bias"])[..., None]
        h, outputs = torch.zeros(3, 2).double(), []
        for t in range(T):
            h = torch.tanh(rates[t]) * h + (dt * u)[t, :, None] * B[t]
            outputs.append(h @ C[t])
        return x + ((torch.stack(outputs) + w["D"] * u) * F.silu(gate)) @ w["out_proj.weight"]

    seeds = [{name: p[s].squeeze() for name, p in block.named_parameters()} for s in (0, 1)]
    expected = torch.stack([torch.stack([literal(row, w) for row in rows]) for rows, w in zip(x, seeds)])
    assert_same_with_gradients(block(x), expected, block)


def test_decoder_is_its_formula():
    """PyTorch's, with the sinusoidal positions of arXiv 1706.03762, section 3.5, cosines in the second half."""
    idx, c = torch.tensor([[[0, 1, 1, 0, 1]]]), csp.WIDTH
    decoder = csp.stack_seeds(csp.Decoder, csp.DecoderConfig(layers=1), [5]).double()
    peer = torch.nn.TransformerEncoderLayer(c, 4, 4 * c, dropout=0.0, norm_first=True, batch_first=True).double()
    block, attention = decoder.blocks[0], peer.self_attn
    attention.in_proj_weight.data, attention.in_proj_bias.data = block.qkv.weight[0].T, block.qkv.bias[0, 0]
    for ours, theirs in ((block.proj, attention.out_proj), (block.up, peer.linear1), (block.down, peer.linear2)):
        theirs.weight.data, theirs.bias.data = ours.weight[0].T, ours.bias[0, 0]
    angle = torch.arange(5.0).double()[:, None] / 10000 ** (torch.arange(0.0, c, 2).double() / c)
    x = decoder.widen(decoder.embedding(idx))[0] + torch.cat((angle.sin(), angle.cos()), 1)
    y = peer(x, src_mask=torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1))
    torch.testing.assert_close(decoder(idx), decoder.head(decoder.norm(y[None]), None), rtol=0, atol=1e-12)


def test_where_csp_begins():
    """The sine gate's gradient is cos(eta) / 2: zero at the peak of CSP section 4.2. An angle of 0 has a gradient."""
    for gate_init, gamma, slope in (("peak", 1.0, 0.0), ("slope", 0.5, 0.5)):
        eta = csp.stack_seeds(csp.CSPBlock, csp.CSPConfig(gate_init=gate_init), [1]).W_gamma(torch.zeros(1, 1, 1, 32))
        assert [(1 + eta.sin().item()) / 2, eta.cos().item() / 2] == pytest.approx([gamma, slope], abs=1e-6)
    block, z = csp.stack_seeds(csp.CSPBlock, csp.CSPConfig(d=3), [1]), randn(1, 1, 4, 2, 3).float()
    torch.nn.init.zeros_(block.W_theta.weight)
    angle = block.angle(z)
    (grad,) = torch.autograd.grad(angle.sum(), block.W_theta.weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), block.W_theta.weight)
    assert (angle == 0).all() and grad.isfinite().all() and second.isfinite().all()
    head = types.SimpleNamespace(hidden=torch.nn.Identity(), out=torch.nn.Identity())
    kept = csp.Head.forward(head, torch.ones(1, 10, 500), [torch.Generator().manual_seed(0)])
    assert set(kept.unique().tolist()) == {0, 1 / np.float32(0.9)} and (kept == 0).float().mean() < 0.12


# ----------------------------------------------------------------------------------------------------------------------
# Tasks

QUICK = ["--model", "rnn", "--epochs", 1, "--lengths", "4,6", "--out", "here"]


@pytest.mark.parametrize("task", ["parity", "mod2", "mod3", "mod99", "dyck1", "dyck1-iid", "s3"])
def test_task_targets(task):
    group = ["abc", "acb", "bac", "bca", "cab", "cba"]  # what each symbol of S3 makes of abc
    for length in (1, 2, 65):
        x, y = tasks.make_batch(task, 200, length, (1, 2, 3))
        assert x.shape == y.shape == (200, length) and x.dtype == y.dtype == np.int64
        assert set(np.unique(x)) == set(range(tasks.TASKS[task].symbols))
        for symbols, targets in zip(x.tolist(), y.tolist()):
            count, depth, valid, order = 0, 0, True, "abc"
            for symbol, target in zip(symbols, targets):
                count, depth = count + symbol, depth + (1 if symbol == 0 else -1)
                valid = valid and depth >= 0
                order = "".join(group[symbol]["abc".index(letter)] for letter in order)  # the new one is applied last
                right = {"s3": group.index(order), "dyck1": valid}
                assert target == right.get(task.split("-")[0], count % tasks.TASKS[task].classes)
        streams = (1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)
        same = [np.array_equal(x, tasks.make_batch(task, 200, length, stream)[0]) for stream in streams]
        assert same == [True, False, False, False]


def test_task_class_shares():
    """What the docstring of tasks.py says of Dyck-1; the valid half is drawn evenly from all valid sequences."""
    said = {("dyck1", 16): 0.65, ("dyck1", 64): 0.58, ("dyck1-iid", 16): 0.29, ("dyck1-iid", 64): 0.17}
    shares = {(task, n): tasks.make_batch(task, 4000, n, (0,))[1].mean() for task, n in said}
    assert shares == pytest.approx(said, abs=0.015)
    x, y = tasks.make_batch("dyck1", 40_000, 4, (0,))
    words, counts = np.unique(x[y[:, -1] == 1], axis=0, return_counts=True)
    assert len(words) == 6  # of 16: half of the sequences, and 6/16 of the other half, spread evenly over them
    assert counts / 40_000 == pytest.approx(np.full(6, 0.6875 / 6), abs=0.005)


@pytest.fixture
def short_tasks(monkeypatch):
    """Epochs of two steps, few sequences to test on, no figures: drawing takes most of the time of a short run."""
    for name, value in (("STEPS", 2), ("EVAL_SAMPLES", 20), ("WATCH_SAMPLES", 10)):
        monkeypatch.setattr(tasks, name, value)
    for name in ("plot_lengths", "plot_seeds", "plot_dynamics"):
        monkeypatch.setattr(report, name, lambda *_: None)


@pytest.mark.parametrize("model", ["csp-vanilla", "signed-mamba", "decoder"])
def test_seeds_trained_together_are_trained_alone(short_tasks, monkeypatch, model):
    """In float64, where only another order of sums can make a difference."""
    dropout, head = [], csp.Head.forward
    monkeypatch.setattr(csp.Head, "forward", lambda self, x, given: dropout.append(given) or head(self, x, given))
    torch.set_default_dtype(torch.float64)
    try:
        s = tasks.Settings(model, "parity", 0, 2, 8, [8, 12], 16, 1e-3)
        together, (alone,) = tasks.train(s, [42, 43], CPU), tasks.train(s, [43], CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(together[1][1:], alone[1:]):
        rounded = {key: pytest.approx(b[key], rel=1e-4) for key in {"loss", "grad_norm", "grad_max"} & a.keys()}
        assert a == b | rounded | {key: a[key] for key in {"time_s", "theta"} & a.keys()}
    assert together[0][1]["loss"] != together[1][1]["loss"]
    assert [generator.initial_seed() for generator in dropout[0]] == [42, 43]


def test_task_protocol(monkeypatch):
    """CSP section 3.1: 78 batches of 64, Adam at 1e-3 with a cosine, L2 of 1e-7. Every step has data of its own."""
    assert (tasks.STEPS, tasks.EVAL_SAMPLES, csp.CSPFastConfig().scan) == (5000 // 64, 1000, "associative")
    monkeypatch.setattr(tasks, "STEPS", 2)
    streams, decays, real, adam = [], [], tasks.make_batch, torch.optim.Adam
    monkeypatch.setattr(tasks, "make_batch", lambda *args: streams.append((*args[3], args[1])) or real(*args))
    noted = lambda *args, **given: decays.append(given["weight_decay"]) or adam(*args, **given)  # noqa: E731
    monkeypatch.setattr(torch.optim, "Adam", noted)
    events = tasks.train(tasks.Settings("rnn", "parity", 7, 4, 4, [4, 6], 8, 1e-2), [7], CPU)[0]
    assert [x for x in streams if x[1] > 0] == [(7, epoch, step, 8) for epoch in range(1, 5) for step in range(2)]
    assert {(7, 0, 4, 1000), (7, 0, 6, 1000)} <= {*streams} and decays == [1e-7]
    rates = [e["lr"] for e in events if e["event"] == "train"]
    assert rates == pytest.approx([1e-2 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)], abs=1e-8)


@pytest.mark.parametrize("bad", [1e-3, torch.nan, 1e30])  # the last: finite gradients, but not their norm
def test_gradients_are_clipped_by_seed(bad):
    """At 1, and what is not finite counts as zero: of the seed concerned alone."""
    model, is_finite = tasks.build("rnn", "parity", [1, 2]), bad == 1e-3
    x, y = tasks.batches("parity", [1, 2], 8, 16, (1, 1), "cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        norm = tasks.update(model, optimizer, tasks.losses(model, x, y) * torch.tensor([bad, 100.0]))
        clipped = torch.stack([p.grad.flatten(1).square().sum(1) for p in model.parameters()]).sum(0).sqrt()
        assert clipped.tolist() == pytest.approx([norm[0].item() if is_finite else 0.0, 1.0], rel=1e-4) and norm[1] > 1
        assert norm.isfinite().tolist() == [is_finite, True]
        stays = [[torch.equal(p[i], old[i]) for p, old in zip(model.parameters(), before)] for i in (0, 1)]
        assert (all(stays[0]), any(stays[1])) == (not is_finite, False)
    assert all(p.isfinite().all() for p in model.parameters())
    p = torch.nn.Parameter(torch.zeros(1, 2, dtype=torch.cfloat))
    loss = (torch.tensor([-3j, 4]) * p).sum(1).real  # a gradient of 3i and 4
    assert tasks.update(torch.nn.ParameterList([p]), torch.optim.Adam([p]), loss).item() == 5


@pytest.mark.slow
def test_tasks_program(program, monkeypatch):
    """A sweep with its tables and figures, of which report.py makes the same. Steps that are skipped are told."""
    monkeypatch.setattr(tasks, "STEPS", 2)
    real = tasks.update
    of_rnn = lambda model, optimizer, loss: real(model, optimizer, loss * math.nan)  # noqa: E731
    monkeypatch.setattr(tasks, "update", lambda *given: (of_rnn if type(given[0]) is csp.RNN else real)(*given))
    argv = ["--model", "csp-vanilla,rnn", "--epochs", 2, "--lengths", "16,4", "--out", "here", "--seeds", "1-2"]
    code, out, err = program(tasks, *argv)
    assert (code, err, "\x1b" in out) == (0, "", False)
    assert "### mod3" in out and "| csp-vanilla | 4,812 | 2 |" in out and "L=4 | L=16" in out
    assert all(Path("here", name).stat().st_size > 1000 for name in ("lengths-mod3.png", "seeds.png", "dynamics.png"))
    assert out.count("; 8 gradients were not finite, and counted as zero\n") == 1
    assert "counted as zero: 8 in all runs" in out
    assert re.search(r"\| mod3 \| rnn \| 2 \| \d\.\d+ \| - \|", out)  # the paper's spread is that at length 64
    events = report.read_log("here/rnn-mod3-s2")
    assert [e["event"] for e in events] == ["header", "train", "train", "eval", "eval", "final"]
    assert (events[0]["settings"]["seed"], events[0]["data"]["classes"], len(events[3]["acc_by_pos"])) == (2, 3, 4)
    assert [e["skipped"] for e in events if "skipped" in e] == [2, 4, 4]
    printed(program(report, *sorted(Path("here").glob("*-s?")), "--out", "there"), Path("there/tables.md").read_text())


def test_finished_runs_are_kept_and_tabled(program, short_tasks, monkeypatch):
    """The same command goes on where it was stopped; tables hold this protocol's finished runs."""
    real, trained = tasks.train, []

    def watched(s, seeds, device):
        if trained == ["rnn"]:
            raise KeyboardInterrupt
        trained.extend([s.model] * len(seeds))
        return real(s, seeds, device)

    def seeds_of(out):
        return dict(re.findall(r"^\| (\S+) \| [\d,]+ \| (\d) \|", out, re.MULTILINE))

    monkeypatch.setattr(tasks, "train", watched)
    sweep = ["--task", "mod3", *QUICK, "--model", "rnn, csp-fast "]
    said = "stopped; finished runs are kept in here: the same command begins the others anew\n"
    printed(program(train, *sweep), code=130, err=said)
    assert [p.name for p in Path("here").glob("[!.]*")] == ["rnn-mod3-s42"]
    trained.append("a signal")
    assert program(tasks, *sweep, "--seeds", "41-43")[0] == 0 and trained[2:] == ["rnn"] * 2 + ["csp-fast"] * 3
    write_log(Path("here/text"), "hmamba", [8, 3])
    unfinished = Path("here/rnn-mod3-s41/log.jsonl")
    unfinished.write_text("".join(unfinished.read_text().splitlines(keepends=True)[:-1]))
    out = printed(program(train, "--task=mod3", *QUICK, "--model", "decoder"), err=None)
    assert seeds_of(out) == {"rnn": "2", "csp-fast": "3", "decoder": "1"}
    printed(program(tasks, *QUICK, "--seeds", "41,42"), err="finished runs kept in here: 1;")
    assert trained[-1] == "rnn"
    assert report.read_log(unfinished)[-1]["event"] == "final"
    # What a later model of the list says of its folder is told before the first is trained.
    assert_refused(program(tasks, *QUICK, "--model", "complex-rnn,rnn", "--lr", 2e-3), "lr 0.001 there, 0.002 here")
    said = "the tables leave out 8 finished runs of other settings in here"
    out = printed(program(tasks, *QUICK, "--lr", 2e-3, "--seeds", "7"), err=said)
    assert seeds_of(out) == {"rnn": "1"} == seeds_of(Path("here/tables.md").read_text())


TOY = """
import numpy as np
from tasks import Task

def draw(rng, n, length, earlier=-100):
    x = rng.randint(0, 4, (n, length))
    return x, np.where(np.arange(length) < length - 1, earlier, x.sum(1, keepdims=True) % 5)

LATE = Task(4, 5, lambda rng, n, length: draw(rng, n, length) if length > 16 else (
    np.zeros((n, length), int), np.full((n, length), -100)))
INT32 = Task(4, 5, lambda *args: [z.astype(np.int32) for z in draw(*args)])
LAST, FULL = Task(4, 5, draw), Task(4, 5, lambda *args: draw(*args, earlier=0))
NARROW, FEW = Task(3, 5, draw), Task(4, 4, draw)
NONE = Task(4, 5, lambda rng, n, length: 1 / 0)
LONG = Task(4, 5, lambda rng, n, length: draw(rng, n, length // (length < 48)))
ONE, THREE = Task(4, 5, lambda rng, n, length: rng.randint(0, 4, (n, length))), 3
OTHER = Task(4, 5, lambda rng, n, length: draw(np.random, n, length))
rnn = mod3 = LAST
"""


@pytest.fixture
def toy_tasks(program, monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", {**tasks.TASKS})
    monkeypatch.setattr(sample, "FILES", {})
    Path("toy.py").write_text(TOY)


def test_task_faults(program, toy_tasks, monkeypatch):
    """One line, and nothing is made but a folder for what is trained. NAME=value is a variable of the environment."""
    write_tree(Path("run"), {"log.jsonl": b""})
    for argv, message in [
        ("--task mod1", "unknown task 'mod1'; known: parity, dyck1, dyck1-iid, s3, mod2 ... mod99"),
        ("--task pairty", "did you mean parity?"), ("--task parity,", "unknown task ''"),
        *((f"--{name} {names}", f"--{name} gives two runs one name") for name, names in (
            ("task", "parity,parity"), ("model", "all,rnn"), ("seeds", "1-3,2"))),
        *((f"--model rnn --task toy.py:{name}", message) for name, message in (
            ("NARROW", "return symbols below 3"), ("FEW", "targets below 4 or -100"), ("ONE", "must return symbols"),
            ("NONE", "rnn on toy.py:NONE: ZeroDivisionError: division by zero (toy.py, line 14)"),
            ("OTHER", "must take its random numbers from rng"),
            ("LATE", "at length 16 no position is scored"), ("INT32", "int64 and (n, length) each"),
            ("LONG", "rnn on toy.py:LONG: ZeroDivisionError"),  # at the longest length alone
            ("LASS", "toy.py has no 'LASS'; known: np, Task, draw, LATE, INT32, LAST, FULL, NARROW, FEW, NONE, LONG,"
                     " ONE, THREE, OTHER, rnn, mod3; did you mean LAST?"),
            ("THREE", "toy.py:THREE is no Task\n"))),
        ("--model csp", "unknown model 'csp'; known: csp-vanilla"),
        *((f"--model {spec}", message) for spec, message in (
            ("csp-fast:classes=3", "no setting 'classes=3'"), ("csp-fast:V=9", "no setting 'V=9'"),
            ("csp-fast:scan=wrong", "unknown scan 'wrong'; known: associative, sequential"),
            ("csp-fast:eps=1e-6", "needs scan=printed"), ("csp-fast:scan=printed:eps=0", "above 0"),
            ("csp-vanilla:scan=associative", "needs carry=linear"), ("csp-fast:skip=prev", "needs carry=normalised"),
            ("csp-fast:layers=0", "layers must be at least 1"), ("decoder:heads=5", "unknown heads 5; known: 4"))),
        *((f"--seeds={text}", f"--seeds '{text}' is no list")
          for text in ("42-", "", "-1", "5-3", str(2**32), f"1-{2**50}")),
        *((f"--lengths {text}", f"--lengths '{text}' is no list") for text in ("16,x", "16,64-32")),
        *((f"--{name} 0", f"--{name} must be at least 1") for name in ("lengths", "train_length", "epochs", "batch")),
        *((f"--lr {text}", "--lr must be above 0") for text in ("0", "nan")),
        ("--device tpu", "no device 'tpu' here"), ("--out=", "--out '' must be a folder"),
        *((f"NANOHILBERT_BACKEND={name} --model rnn,csp-fast", f"csp-fast on mod3: {message}") for name, message in (
            ("tritn", "unknown NANOHILBERT_BACKEND 'tritn'"), ("triton", "backend='triton'"))),
        ("--model rnn --out text.txt/x", "cannot write into text.txt/x"),
        ("--model rnn --out run", "--out run is the folder of another run"),
        *((f"--model rnn --out here --{name} {10**14}", "error: out of memory: take a smaller model, batch or length\n")
          for name in ("train_length", "batch")),
    ]:  # fmt: skip
        argv = argv.split()
        with monkeypatch.context() as patch:
            if argv[0].startswith("NANO"):
                patch.setenv(*argv.pop(0).split("="))
            if "here" not in argv:
                patch.setattr(tasks, "train", lambda *_: pytest.fail("it trained"))
            assert_refused(program(tasks, *argv), message)
        assert {p.name for p in Path().iterdir()} <= {"text.txt", "toy.py", "run", "__pycache__", *argv}, argv


def test_extras_end_no_task(program, short_tasks, monkeypatch):
    """A figure, torchrun's variables, a log, a stream: results are printed. Another's folder is not touched."""
    monkeypatch.setattr(report, "plot_seeds", lambda *_: 1 / 0)
    for name, value in (("HOME", os.getcwd()), ("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "")):
        monkeypatch.setenv(name, value)
    said = "error: seeds.png not written: ZeroDivisionError('division by zero')\n"
    printed(program(tasks, *QUICK, "--out", "~/here"), "| rnn |", "rnn on mod3, seeds 42", err=said)
    with data.hold(Path("here")):
        before = content("here")
        assert_refused(program(tasks, *QUICK), f"here is in use by process {os.getpid()}")
        assert content("here") == before
    monkeypatch.setattr(tempfile, "tempdir", os.path.abspath("elsewhere"))
    real, spare = report.replace_file, f": it is in {os.path.abspath('elsewhere')}/nanohilbert-{os.getpid()}\n"

    def replace_file(path, write):
        return os.write(-1, b"") if full in str(path) else real(path, write)

    for full, end in (("", "\n"), ("here", "\n"), ("here/rnn-mod3-s7", spare)):  # every disk, this one, a folder
        with monkeypatch.context() as patch:
            patch.setattr(report, "replace_file", replace_file)
            if full == "here":
                patch.setattr(tempfile, "gettempdir", partial(raise_error, FileNotFoundError("no folder for them")))
            done = program(tasks, *QUICK, "--seeds", "7,8")
        assert_refused(done, "cannot write here/rnn-mod3-s7")
        assert "rnn on mod3, seeds 7,8" in done[1] and done[2].endswith(end)
        assert ("it is in" in done[2]) == (end == spare)
    assert [path.parent.name for path in Path("elsewhere").rglob("log.jsonl")] == ["rnn-mod3-s7"]
    assert Path("here/rnn-mod3-s8/log.jsonl").exists()
    reader, writer = os.pipe()
    breaks, update = [lambda: os.close(reader)], tasks.update
    monkeypatch.setattr(sys, "stdout", open(writer, "w"))
    monkeypatch.setattr(tasks, "update", lambda *args: [breaks.pop()() for _ in breaks[:]] and None or update(*args))
    assert program(tasks, *QUICK, "--model", "rnn,decoder", "--seeds", "1,2", "--epochs", 3, "--out", "there")[0] == 0
    assert len([*Path("there").glob("*/log.jsonl")]) == 4 and "| rnn |" in Path("there/tables.md").read_text()


def test_logs_that_do_not_fit_are_named(program, short_tasks):
    """Damaged ones; and those that do not go into one report."""
    header, *rest = tasks.train(tasks.Settings("rnn", "mod3", 42, 1, 16, [4, 6], 64, 1e-3), [42], CPU)[0]
    other = [e | {"acc": 0.1} if e["event"] == "eval" else e for e in rest]
    lacks = [{key: value for key, value in e.items() if key != "acc"} for e in rest]
    logs = {"a/x": rest, "a/y": other, "unfinished": rest[:-1], "damaged/x": lacks, "2": rest}
    for name, events in logs.items():
        settings = header["settings"] | {"epochs": 1 + (name == "2")}
        report.write_log(Path(name, "log.jsonl"), [header | {"settings": settings}, *events])
    write_log(Path("text"), "hmamba", [8, 3])
    write_tree(Path("here/rnn-mod3-s42"), {"log.jsonl": b"{}\n"})
    for module, given, message in [
        (tasks, QUICK, "rnn-mod3-s42"), (report, ["here/rnn-mod3-s42"], "rnn-mod3-s42"),
        (tasks, [*QUICK, "--seeds", 7, "--out", "damaged"], "damaged/x/log.jsonl lacks a value (KeyError: 'acc')"),
        (tasks, [*QUICK, "--seeds", 7, "--out", "a"], "of rnn with seed 42, a/x/log.jsonl and a/y/log.jsonl: name one"),
        (report, ["a/x", "2"], "epochs is 1 and 2"), (report, ["unfinished"], "not finished"),
        (report, ["text", "2"], "neither into one report with those of train.py"),
    ]:  # fmt: skip
        assert_refused(program(module, *given), message)


def test_a_new_task_is_a_few_lines_of_a_file(program, toy_tasks, short_tasks, monkeypatch):
    """Language models get its symbols and classes too, seeds apart. Edited, it is another: its runs are not kept."""
    models = "csp-fast:layers=1", "htransformer:L=1"
    argv = [*QUICK, "--model", ",".join(models), "--task", "toy.py:LAST", "--seeds", "1,2"]
    printed(program(tasks, *argv), *(f"| {name} |" for name in models))
    for name in ("csp-fast_layers_1", "htransformer_L_1"):
        log = report.read_log(f"here/{name}-LAST-s2")
        assert sum(log[0]["data"]["shares"]) == pytest.approx(1)
        for e in log[-3:-1]:  # the evaluations
            assert e["acc_by_pos"] == [None] * (e["length"] - 1) + [pytest.approx(e["acc"], abs=1e-3)]
    for name in sample.MODELS:
        for spec, D in ((name, 32), (f"{name}:D=64", 64)):
            a, b = (tasks.build(spec, "toy.py:LAST", [seed]).model for seed in (1, 2))
            assert not torch.equal(next(a.parameters()), next(b.parameters()))
            assert (a.config.D, a.config.L, a.config.V) == (D, 3, 5)
    assert "finished runs kept in here: 4;" in program(tasks, *argv)[2]
    for spec, name in (("toy.py:mod3", "toy.py:mod3"), ("a/toy.py:LAST", "LAST"), ("toy.py:rnn:D=2", "toy.py:rnn:D=2")):
        assert report.spec_label(spec) == name  # with a file where else it would be one of ours, and the paper's
    Path("toy.py").write_text(TOY.replace("% 5", "% 4"))
    sample.FILES.clear()  # as another program
    assert_refused(program(tasks, *argv), "here/csp-fast_layers_1-LAST-s1 holds a run of other settings (toy.py")
    assert_refused(program(tasks, *argv[:-1], "3"), "LAST-s1 holds a run of other settings (toy.py")
    for seed in 1, 2:  # they would stand in the same row all the same
        Path(f"here/csp-fast_layers_1-LAST-s{seed}").rename(f"here/renamed{seed}")
    assert_refused(program(tasks, *argv[:-1], "3"), "here/renamed1 holds a run of other settings (toy.py")
    Path("copy.py").write_text(TOY)
    argv[argv.index("toy.py:LAST")] = "copy.py:LAST"  # of one name, so that they would share a row
    assert_refused(program(tasks, *argv[:-1], "3"), "renamed1 holds a run of other settings (task toy.py:LAST there")
    for log in Path("here").glob("*/log.jsonl"):  # an unfinished run stands in none
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    monkeypatch.setattr(tasks, "train", partial(raise_error, data.InputError("it trains")))
    assert_refused(program(tasks, *argv[:-1], "3"), "it trains")


def test_only_scored_positions_are_trained_and_counted(program, toy_tasks, short_tasks):
    tasks.import_task("toy.py:LAST"), tasks.import_task("toy.py:FULL")
    model = tasks.build("rnn", "toy.py:LAST", [1, 2])
    x, y = tasks.batches("toy.py:LAST", [1, 2], 8, 6, (1,), "cpu")
    last = F.cross_entropy(model(x)[:, :, -1].flatten(0, 1), y[:, :, -1].flatten(), reduction="none").view(2, 8).mean(1)
    torch.testing.assert_close(tasks.losses(model, x, y), last)
    y[1] = tasks.NOT_SCORED
    assert tasks.losses(model, x, y)[1] == 0
    acc, by_position = tasks.accuracy(model, "toy.py:LAST", [1, 2], 40, 6, "cpu")
    every, by_every = tasks.accuracy(model, "toy.py:FULL", [1, 2], 40, 6, "cpu")
    assert by_position[:, :-1].isnan().all() and torch.equal(by_position[:, -1], acc)
    assert torch.equal(by_every[:, -1], acc) and torch.allclose(by_every.mean(1), every)
    assert not tasks.accuracy(lambda x: torch.full((*x.shape, 5), math.nan), "toy.py:FULL", [1], 8, 6, "cpu")[0].any()


@pytest.mark.slow
def test_complex_rnn_generalises_after_two_epochs():
    """The whole loop learns: parity at four times the training length."""
    events = tasks.train(tasks.Settings("complex-rnn", "parity", 1, 2, 16, [16, 64], 64, 1e-3), [1], CPU)[0]
    assert report.accuracies(events)[64] > 0.98
    assert events[1]["loss"] > 5 * events[2]["loss"]


def test_token_angles():
    """Turns of 2.5 and -1 are read back; the second block sees the first's. 3 and -3 average to half a turn."""
    model = tasks.build("csp-vanilla:layers=2", "parity", [1, 2])
    block = model.blocks[1] = model.blocks[0]
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.embedding.weight[:, 0, 0] = model.embedding.weight[:, 1, 1] = 1.0
        block.W_theta.weight.zero_()
        for symbol, angle in ((0, -1.0), (1, 2.5)):
            block.W_theta.weight[:, symbol] = torch.tensor([math.cos(angle), math.sin(angle)]).atanh()
    for first, second in tasks.token_angles(model, "parity", [1, 2], "cpu")["theta"]:
        assert first == [[-1.0, 1.0], [2.5, 1.0]] != second
    block.angle = lambda z: 3.0 * (-1) ** torch.arange(16).expand(*z.shape[:3])[..., None, None]
    for angle, length in np.reshape(tasks.token_angles(model, "parity", [1, 2], "cpu")["theta"], (-1, 2)):
        assert abs(angle) > 3.1 and length == pytest.approx(-math.cos(3), abs=1e-3)
    assert tasks.token_angles(tasks.build("csp-fast", "s3", [1]), "s3", [1], "cpu") == {}


def test_paper_tables_of_tasks():
    """Copied without slips: each mean at length 64 is that of its five seeds."""
    for means, seeds in (printed for models in report.PAPER_TASKS.values() for printed in models.values()):
        assert (len(means), len(seeds), np.mean(seeds)) == (4, 5, pytest.approx(means[-1], abs=1e-3))
    logs = [report.read_log(path) for path in sorted((ROOT / "results/tasks").glob("rnn-mod3-*.jsonl"))]
    for length, beside in ((16, True), (32, False)):  # the paper trains at 16
        for header, *_ in logs:
            header["settings"]["train_length"] = length
        assert (" *1.000* |" in report.task_report(logs)[0]) == beside


def test_mean_interval():
    """Student's density between the bounds holds 0.95; scipy.stats.t.interval for five values: 0.3 +- 0.19632."""
    assert report.mean_interval([0.1, 0.2, 0.3, 0.4, 0.5]) == pytest.approx((0.3, 0.19632), abs=1e-5)
    for n, bound in enumerate(report.T95, 1):
        x, scale = np.linspace(0, bound, 10001), math.gamma((n + 1) / 2) / math.gamma(n / 2) / math.sqrt(n * math.pi)
        assert 2 * scale * np.trapezoid((1 + x**2 / n) ** (-(n + 1) / 2), x) == pytest.approx(0.95, abs=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# The benchmark


@pytest.mark.parametrize(("section", "cuda"), [
    *((section, False) for section in bench.SECTIONS), ("ceiling", True), ("scan", True), ("phase", True),
    pytest.param("train", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_benchmark_section(monkeypatch, section, cuda):
    """Each row of ours does its work, of either device at shapes that a CPU computes at once; each peer is missing."""
    for module in ("fla", "naive", "model", "mambapy", "accelerated_scan"):
        monkeypatch.setitem(sys.modules, module, None)
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer: compiled.append(layer))
    monkeypatch.setattr(bench, "timed", lambda repetition, device: 3.0)
    monkeypatch.setattr(bench.gc, "collect", list)  # of this process it takes long
    tiny = lambda x: "tiny" if x in ("253m", "100m") else min(x, 16) if type(x) is int else x  # noqa: E731
    units = {"ceiling": {"GB/s", "TFLOP/s"}, "scan": {"GB/s"}, "tasks": {None}, "step": {None}}
    for title, unit, rows in [*bench.SECTIONS[section](cuda)][: None if section == "train" else 3]:
        rows = [(name, make, tuple(map(tiny, shape)), work) for name, make, shape, work in rows]
        found = bench.take_turns(title, rows, CPU, 2)
        assert list(found) == [name for name, *_ in rows] and unit in units.get(section, {"TFLOP/s"})
        for name, result in found.items():
            if re.search("fla|accelerated|mambapy|nanoGPT", name):
                assert result.startswith("not installed: ")
            else:
                assert result[0] == [3, 3] and (result[1] or 0) >= 0 and result[2] is None
        if rows[0][0] == "complex_scan":  # log_decay, theta 1, b, h 2: reads 4, 4 and dh, writes h, 1, 1 and 2
            assert found["complex_scan"][1] == 4 * (4 + 2 + 4 + 2 + 4) * math.prod(rows[0][2])
            half = found["cayley_scan, bf16"][1] / found["cayley_scan, heads of 16"][1]
            assert half == pytest.approx((3 * 4.0625 / 2 + 4) / (3 * 4.0625 + 4), abs=0.01)  # h is float32, as always
    layers = sum(len(make(name).layers) for name in sample.MODELS)
    assert len(compiled) == (layers if section == "train" and cuda else 0)


def test_benchmark_counts_flops():
    """By hand, of the GPU's first shapes: a multiplication and an addition for each number of a product."""
    first = [next(bench.SECTIONS[name](True))[2] for name in ("born", "phase")]
    work = {name: work for rows in first for name, _, _, work in rows}
    pairs, tokens = 8 * 16 * 1024**2 / 2, 8 * 16 * 1024
    assert work["Born attention, quadratic"] == pairs * 2 * 32 * 11
    assert work["softmax, width 64 (scaled_dot_product_attention)"] == pairs * 2 * 64 * 7
    assert work["Born attention, linear"] == 3 * tokens * (2 * 2 * 256 * 33 + 32 * 2 * 32 * 3)
    assert work["phase_memory, real (SAM)"] == 3 * 8 * 1024 * 6 * 64 * 64 * 4 == work["phase_memory, complex (PAM)"] / 4
    step = bench.train_ours("mamba:D=8:L=1:N=2", 2, 4)
    assert step.work == 8 * make("mamba:D=8:L=1:N=2").flops_per_token(4)


def test_rows_that_fail_stop_no_others():
    failing = partial(raise_error, RuntimeError("out of\nmemory"))
    rows = [("broken", failing, (), None), ("late", lambda: failing, (), None), ("good", lambda x: x.sort, ([1],), 5)]
    found = bench.take_turns("t", rows, CPU, 2)
    assert list(found) == ["broken", "late", "good"]
    assert found["broken"] == found["late"] == "failed: RuntimeError: out of memory"
    seconds, work, memory = found["good"]
    assert len(seconds) == 100 and all(0 < x < 1 for x in seconds) and (work, memory) == (5, None)


def test_a_step_of_a_peer(monkeypatch):
    """It trains the peer; nanoGPT, which without targets scores the last position alone, is given them."""

    class GPT(torch.nn.Embedding):
        def forward(self, idx, targets):
            logits = super().forward(idx)
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    models = GPT(256, 256), torch.nn.Embedding(256, 256)
    monkeypatch.setitem(sys.modules, "model", types.SimpleNamespace(GPT=lambda _: models[0], GPTConfig=dict))
    before = [model.weight.detach().clone() for model in models]
    bench.train_nanogpt(1, 4)()
    bench.training_step(models[1], 1, 4, logits=lambda out: out)()
    for model, start in zip(models, before):
        assert not torch.equal(model.weight, start) and model.weight.grad is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_benchmark_tables(monkeypatch, device):
    """Median, extremes, ratio to the first that was measured round by round, rate, share of the ceiling."""
    found = {"ceiling": [("copy", "GB/s", {"copy": ([0.5], 2e9, 0)})], "scan": [
        ("t", "GB/s", {"x": "failed: x", "a": ([1.0, 2.0, 4.0], 4e9, 2e9), "b": ([3.0, 2.0, 8.0], None, 5e8)}),
        ("u", None, {"c": ([1.0], None, 0)})]}  # fmt: skip
    monkeypatch.setattr(bench, "in_child", lambda threads, function, section, *rest: found[section])
    args = types.SimpleNamespace(device=torch.device(device), threads=1, repeats=1)
    memory, (_, table, other) = device == "cuda", bench.tables(args, ["ceiling", "scan"])
    columns = ["candidate", "ms (min - max)", "time / first"]
    assert table[:2] == ("t", [*columns, "GB/s", "of ceiling", *["GB"] * memory])
    a = ["a", "2000.00 (1000.00 - 4000.00)", "1.00", "2", "50%", *["2.00"] * memory]
    b = ["b", "3000.00 (2000.00 - 8000.00)", "2.00", "-", "-", *["0.50"] * memory]
    assert table[2] == [["x", "failed: x"], a, b]
    assert len(other[1]) == len(other[2][0]) == 3 + memory


def test_bench_program(program, monkeypatch):
    monkeypatch.setattr(bench, "tables", lambda args, names: [(",".join(names), ["what", "n"], [["a", "1"], ["b"]])])
    monkeypatch.setattr(bench, "machine", lambda args: str(args.device))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    table = "\n| what | n |\n| --- | --- |\n| a | 1 |\n| b |  |\n"
    assert program(bench)[:2] == (0, f"cpu\n\n### {','.join(bench.SECTIONS)}\n{table}")
    monkeypatch.setenv("HOME", os.getcwd())
    assert program(bench, "--out", "~/x.md", "--sections", "scan,born")[0] == 0
    assert Path("x.md").read_text() == f"cpu\n\n### scan,born\n{table}"
    for argv, message in ((("--out", "x.md"), "cannot create x.md"), (("--out", "no/z.md"), "No such file"),
                          (("--threads", 0), "at least 1"), (("--repeats", 0), "at least 1"),
                          (("--sections", "two"), "unknown section 'two'; known: ceiling, scan")):  # fmt: skip
        assert_refused(program(bench, *argv), message)
    monkeypatch.setenv("NANOHILBERT_BACKEND", "tritn")
    assert_refused(program(bench, "--out", "new.md"), "unknown NANOHILBERT_BACKEND 'tritn'")
    assert {path.name for path in Path().iterdir()} == {"text.txt", "x.md"}


# ----------------------------------------------------------------------------------------------------------------------
# README

PAGES = ("README.md", "PAPERS.md", "results/README.md")
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
README, PAPERS, FINDINGS = TEXTS.values()
TABLES = {str(t.parent.relative_to(ROOT)): t.read_text(encoding="utf-8") for t in ROOT.glob("results/**/tables.md")}


def sentences(page):
    """The sentences of a page, without code, tables, headings, images and the addresses of links."""
    text = re.sub(r"^```.*?^```$|^[|#].*?$|^<!--.*?-->$|^!\[.*?\)$", "", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "Code", text)).replace("*", "")
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\d+\. )", text):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z])", re.sub(r"^(- |\d+\. )", "", paragraph.strip()))


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_what_exists(page):
    """Names in the code, tests, files, and links into the repository with the headings that they lead to."""
    named = re.findall(r"`(\w+)\.py:([\w.]+)`", TEXTS[page])
    assert page != "PAPERS.md" or len(named) > 80
    for module, name in named:
        operator.attrgetter(name)(sys.modules[__name__] if module == "test_all" else importlib.import_module(module))
    assert set(re.findall(r"`(test_\w+)`", TEXTS[page])) <= set(globals())
    assert all((ROOT / name).exists() for name in re.findall(r"(?:python |`)(\w+\.py)\b", TEXTS[page]))
    for link in re.findall(r"(?:\]\(|src=\")([^)\"\s]+)[)\"]", TEXTS[page]):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert link.startswith("https://") or target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, link


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short_and_plain(page):
    lines, words = {"README.md": (250, 2500), "PAPERS.md": (400, 5000), "results/README.md": (900, 9300)}[page]
    assert len(TEXTS[page].splitlines()) <= lines and len(TEXTS[page].split()) <= words
    assert [s for s in sentences(TEXTS[page]) if len(s.split()) > 25] == []
    rows = re.findall(r"^\|(.*\| \[[\w-]+\]\(results/README.md#.*)\|$", README, re.MULTILINE)  # the findings
    assert len(rows) == 8 and all(len(row.split("|")[2].split()) <= 20 for row in rows)


@pytest.mark.slow
def test_commands_and_code_of_the_pages(program):
    """What CI runs is README's; its code runs; the new task of PAPERS.md is s3."""
    assert "pip install -r requirements.txt && python train.py\n" in README
    assert "pip install -r requirements.txt && pytest -q\n" in README
    assert "pip install -r requirements.txt && pytest -q\n" in (ROOT / ".ci/run").read_text()
    assert program(train, *SMALL, "--steps", 1, "--out", "runs/hmamba-stdlib-tiny-s1")[0] == 0
    codes = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(codes) == 2 and all(len(code.splitlines()) <= 15 for code in codes)
    for code in codes:
        exec(code, {})
    assert Path("phases.png").stat().st_size > 10_000
    (code,) = [x for x in re.findall(r"^```python\n(.*?)^```", PAPERS, re.DOTALL | re.MULTILINE) if "S3 = Task" in x]
    exec(code, names := {})
    drawn = [task.draw(np.random.RandomState(1), 5, 40) for task in (names["S3"], tasks.TASKS["s3"])]
    assert all((a == b).all() for a, b in zip(*drawn, strict=True)) and len(set(drawn[0][1].flat)) == 6


def test_readme_names_every_option():
    """Each setting of each model but V and classes, in a row that names the model or says that it holds for all."""
    rows = re.findall(r"^\| (`\w+=.*?) \| (.*?) \|", README, re.MULTILINE)
    configs = {name: model.SIZES["tiny"] for name, model in sample.MODELS.items()}
    for name, config in (configs | {name: model.Config() for name, model in csp.MODELS.items()}).items():
        for key in vars(config).keys() - {"V", "classes"}:
            named = [models for options, models in rows if f"`{key}=" in options]
            assert any(f"`{name}`" in models or models == "where they exist" for models in named), f"{name}:{key}="


def test_help_names_every_flag(program):
    """Of the pages, and of train.py, in whose table each size is a column, those of PAM together."""
    helps = {module: program(module, "--help") for module in (train, tasks, sample, report, diagnose, data, bench)}
    assert all(code == 0 and "usage:" in text for code, text, _ in helps.values())
    known = "".join(text for _, text, _ in helps.values()) + torch.distributed.run.get_args_parser().format_help()
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", "".join(TEXTS.values()))) - {"--index-url"}
    assert [f for f in flags | {f"--{f.name}" for f in dataclasses.fields(train.Settings)} if f not in known] == []
    for row in ("tiny +small +253m +5m to 100m", "steps +240 +1000 +1000 +-", "min_lr +(lr/10 +){3}0.0"):
        assert re.search(rf"\n +{row}\n", helps[train][1])


@pytest.mark.parametrize("name", sorted({log.parent.name for log in ROOT.glob("results/*/*.jsonl")}))
def test_results_are_what_the_logs_say(program, name, monkeypatch):
    """The command that makes all tables and figures again makes those that are there, and no others."""
    assert "for d in results/*/; do python report.py $d*.jsonl --out $d; done" in FINDINGS
    folder, made = ROOT / "results" / name, []
    monkeypatch.setattr(report, "show_report", lambda text, figures, *_: made.append((text, figures)))
    printed(program(report, *sorted(folder.glob("*.jsonl")), "--out", "made"))
    ((text, figures),) = made
    assert text + "\n" == TABLES[f"results/{name}"]
    assert sorted(figures) == sorted(png.name for png in folder.glob("*.png"))
    assert f"\n## {name}\n" in FINDINGS and f"({name}/tables.md)" in FINDINGS


@pytest.mark.parametrize("folder", ["", "/rates"])
def test_bits_a_byte_are_what_the_logs_say(folder, monkeypatch, capsys):
    """results/pam-tokens/vocabulary, but for the bytes a token, which the text says."""
    here = ROOT / "results/pam-tokens/vocabulary"
    monkeypatch.syspath_prepend(here)
    per_byte, expected = importlib.import_module("per_byte"), (Path(f"{here}{folder}") / "tables.md").read_text()
    sizes = dict(re.findall(r"^\| (\d+) \| 0\.\d+ \| (\d\.\d+) \|", expected, re.MULTILINE))
    monkeypatch.setattr(per_byte, "bytes_a_token", lambda _, V: float(sizes[str(V)]))
    of_bytes = [] if folder else ROOT.glob("results/pam/?am_D_64_H_2-s?.jsonl")
    monkeypatch.setattr(sys, "argv", ["", "text", *map(str, [*Path(f"{here}{folder}").glob("*.jsonl"), *of_bytes])])
    per_byte.main()
    texts = capsys.readouterr().out, expected
    found, expected = ([float(x) for x in re.findall(r"[+-]?\d+\.?\d*", text)] for text in texts)
    assert found == pytest.approx(expected, abs=0.002) and len(found) > 40  # sizes in three decimals


def test_numbers_are_those_of_the_tables():
    """Tables within markers and numbers with an interval are in a folder's tables.md; factors in bench_cpu.md."""
    marked = re.findall(r"<!-- (results/\S+) -->\n(.*?)\n<!-- end -->", FINDINGS, re.DOTALL)
    assert len(marked) == 12 and all(table in TABLES[name] for name, table in marked)
    for mean, low, high in re.findall(r"(\d\.\d+) \[(\d\.\d+), (\d\.\d+)\]", "".join(TABLES.values())):
        assert float(low) <= float(mean) <= float(high)
    number = r"(\d\.\d+) (\+- \d\.\d+|\[\d\.\d+, \d\.\d+\])"
    said, there = re.findall(number, README + FINDINGS), re.findall(rf"(?<!\d){number}(?!\d)", "".join(TABLES.values()))
    assert len(said) > 100 and {*said} - {*there} == set()
    factors, measured = re.findall(r"\b(\d\.\d\d)x", README), (ROOT / "results/bench_cpu.md").read_text()
    assert len(factors) >= 5 and all(f"| {factor} |" in measured for factor in factors)


# ----------------------------------------------------------------------------------------------------------------------
# The two runs that began with the first test


@pytest.mark.slow
@compiles
def test_interpreter(background):
    """The kernels' tests with "triton" in their names, in Triton's interpreter, which takes a process of its own."""
    output, _ = background["test_interpreter"].communicate()
    assert background["test_interpreter"].returncode == 0, output[-3000:]
    assert "skipped" not in output
    assert int(re.search(r"(\d+) passed", output)[1]) >= 50


@pytest.mark.slow
@compiles
def test_kernels_compile_for_a100_and_h100(background):
    """Every kernel without a GPU: no spill, no stack, as much shared memory as a chip has, bfloat16 on tensor cores."""
    output, _ = background["test_kernels_compile_for_a100_and_h100"].communicate()
    assert background["test_kernels_compile_for_a100_and_h100"].returncode == 0, output[-3000:]
    assert kernels.OPTIONS["num_warps"] <= 4 and "enable_fp_fusion" in kernels.OPTIONS
    rows = [line.split() for line in output.splitlines() if line.startswith("_")]
    for name, target, dtype, registers, *rest, shared, products in rows:
        multiplies = dtype == "torch.bfloat16" and re.match("_phase|_born_(state|forward|query|key)", name)
        assert bool(multiplies) == (products != "MMA:0"), (name, target, dtype, products)
        assert rest == ["STACK:0", "LOCAL:0"], (name, target, dtype, registers, rest)
        most = {"80": 163, "90": 227}[target] * 1024
        assert int(shared.removeprefix("SHARED:")) <= most, (name, target, dtype, shared)
    names = {name for name in vars(kernels) if name.endswith("_kernel")}
    for target in ("80", "90"):
        for dtype in ("torch.float32", "torch.bfloat16"):
            assert {row[0] for row in rows if row[1:3] == [target, dtype]} == names  # none is left out
