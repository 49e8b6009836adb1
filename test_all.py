"""Every test of the repository: `pytest -q`. Two CPU cores, no network, deterministic.

Groups: kernels against their references, models, data and its faults, training, sampling, report, README.
"""

import copy
import dataclasses
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bench
import data
import hmamba
import htransformer
import kernels
import report
import sample
import train

ROOT = Path(__file__).parent
torch.set_num_threads(1)  # on a machine that does something else too, two threads wait for each other
ENV = os.environ | {"OMP_NUM_THREADS": "1"}  # for what runs as a program of its own


# ----------------------------------------------------------------------------------------------------------------------
# Kernels against their references

LENGTHS = [1, 2, 7, 63, 64, 65, 257, 1000]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def errors(function, inputs, dtype, strided=False, floor=1e-3, **kwargs):
    """Largest relative error of outputs and gradients, against the float64 reference on the same (rounded) inputs. A tensor
    whose values are all below `floor` is compared with that."""

    def run(backend, dtype, strided):
        leaves = [x.to(dtype).requires_grad_() for x in rounded]
        given = [torch.stack((x, x), -1)[..., 0] if strided else x for x in leaves]
        outputs = function(*given, backend=backend, **kwargs)
        weights = [torch.sin(torch.arange(x.numel())).view(x.shape).to(x) for x in outputs]
        if strided:
            weights = [torch.stack((w, w), -1)[..., 0] for w in weights]
        return outputs, torch.autograd.grad(outputs, leaves, weights)

    rounded = [x.to(dtype) for x in inputs]
    found, expected = run(None, dtype, strided), run("reference", torch.float64, False)
    for x in (*found[0], *found[1]):
        assert x.isfinite().all()
    for x, leaf in zip(found[1], rounded):
        assert x.dtype == leaf.dtype
        assert x.shape == leaf.shape
    return max(
        ((x.double() - y).abs().max() / y.abs().max().clamp(min=floor)).item()
        for xs, ys in zip(found, expected)
        for x, y in zip(xs, ys)
    )


def real_scan(log_decay, b, h0, **kwargs):
    return kernels.complex_scan(log_decay, None, b, h0, **kwargs)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("C", [1, 13, 2100])  # 2100: one chunk; the others: several chunks at once
def test_complex_scan_equals_reference(T, C):
    if C == 2100 and T > 65:
        T = 65
    log_decay, theta, b, h0 = (
        -randn(2, T, C).abs(),
        3 * randn(2, T, C, seed=1),
        randn(2, T, C, 2, seed=2),
        randn(2, C, 2),
    )
    for strided in (False, True):
        assert errors(kernels.complex_scan, (log_decay, theta, b, h0), torch.float32, strided) < 5e-6
        assert errors(real_scan, (log_decay, b[..., 0], h0[..., 0]), torch.float32, strided) < 5e-6


@pytest.mark.parametrize("log_decay", [0.0, -1e-9, -0.7, -20.0, -200.0], ids=str)
def test_complex_scan_at_extreme_gates(log_decay):
    """alpha = 1 (unitary), just below, 1/2, and so small that a product or a quotient of gates leaves float32."""
    T, C = 300, 5
    gates = torch.full((2, T, C), log_decay, dtype=torch.float64)
    inputs = gates, 3 * randn(2, T, C), randn(2, T, C, 2), randn(2, C, 2)
    assert errors(kernels.complex_scan, inputs, torch.float32) < 1e-5
    alternating = gates * (torch.arange(T) % 3 == 0)[:, None]
    assert errors(kernels.complex_scan, (alternating, *inputs[1:]), torch.float32) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
def test_scans_compute_in_float32(dtype, tolerance):
    """Half-precision inputs: only the rounding of the gradients and of y remains, also after 1000 steps of slow decay."""
    T = 1000
    decay = torch.full((1, T, 1), -1e-3, dtype=torch.float64).expand(1, T, 3)
    h, hT = kernels.complex_scan(decay.to(dtype), randn(1, T, 3).to(dtype), randn(1, T, 3, 2).to(dtype))
    assert h.dtype == hT.dtype == torch.float32
    assert errors(kernels.complex_scan, (decay, randn(1, T, 3), randn(1, T, 3, 2), randn(1, 3, 2)), dtype) < tolerance
    assert errors(kernels.selective_scan, selective_inputs(1, T, 4, 3), dtype) < tolerance


def selective_inputs(B, T, E, N):
    dt = torch.nn.functional.softplus(randn(B, T, E, seed=1) - 3)
    A = -torch.arange(1, N + 1).double().repeat(E, 1)
    return randn(B, T, E), dt, A, randn(B, T, N, seed=2), randn(B, T, N, seed=3), randn(B, E, N, seed=4)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize(("E", "N"), [(1, 1), (6, 5), (600, 16)])  # 600 x 16: more than one group of batch rows
def test_selective_scan_equals_reference(T, E, N):
    if E == 600:
        T = min(T, 65)
    for strided in (False, True):
        assert errors(kernels.selective_scan, selective_inputs(3, T, E, N), torch.float32, strided) < 5e-6


@pytest.mark.parametrize("dt", [0.0, 1e-8, 1.0, 80.0], ids=str)
def test_selective_scan_at_extreme_steps(dt):
    """exp(dt A) from exactly 1 to an underflow."""
    u, _, A, B, C, h0 = selective_inputs(2, 150, 7, 5)
    assert errors(kernels.selective_scan, (u, torch.full_like(u, dt), A, B, C, h0), torch.float32) < 1e-5


@pytest.mark.parametrize(("B", "T", "C"), [(1, 9, 4), (1, 9, 2100), (2, 40, 3), (1, 1, 1)])
def test_scans_leave_their_inputs_alone(B, T, C):
    """Also where the time-major layout of an input is the input itself."""
    log_decay, theta, b, h0 = -randn(B, T, C).abs(), randn(B, T, C), randn(B, T, C, 2), randn(B, C, 2)
    for function, inputs in (
        (kernels.complex_scan, (log_decay, theta, b, h0)),
        (real_scan, (log_decay, b[..., 0].contiguous(), h0[..., 0].contiguous())),
        (kernels.selective_scan, selective_inputs(B, T, C, 3)),
    ):
        leaves = [x.float().requires_grad_() for x in inputs]
        before = [x.detach().clone() for x in leaves]
        outputs = function(*leaves)
        weights = [torch.ones_like(x) for x in outputs]
        torch.autograd.grad(outputs, leaves, weights)
        assert all(torch.equal(x, y) for x, y in zip(leaves, before))
        assert all((w == 1).all() for w in weights)


def test_gradients_are_the_derivatives():
    """Finite differences in float64: the reference and its autograd play no part."""
    log_decay, theta, b, h0 = -randn(2, 19, 3).abs(), randn(2, 19, 3), randn(2, 19, 3, 2), randn(2, 3, 2)
    leaves = [x.requires_grad_() for x in (log_decay, theta, b, h0)]
    assert torch.autograd.gradcheck(kernels.complex_scan, leaves)
    assert torch.autograd.gradcheck(kernels.complex_scan, (log_decay[..., :1].detach().requires_grad_(), *leaves[1:]))
    assert torch.autograd.gradcheck(real_scan, (log_decay, b[..., 0].detach().requires_grad_(), h0[..., 0]))
    assert torch.autograd.gradcheck(kernels.selective_scan, [x.requires_grad_() for x in selective_inputs(2, 19, 3, 2)])


def test_initial_state_is_optional_and_chunks_join():
    """No h0 is a zero h0; two halves with the state carried equal the whole."""
    log_decay, theta, b = (x.float() for x in (-randn(2, 50, 3).abs(), randn(2, 50, 3), randn(2, 50, 3, 2)))
    whole, end = kernels.complex_scan(log_decay, theta, b)
    zero = kernels.complex_scan(log_decay, theta, b, torch.zeros(2, 3, 2))
    assert torch.equal(whole, zero[0])
    assert torch.equal(end, whole[:, -1])
    _, middle = kernels.complex_scan(log_decay[:, :21], theta[:, :21], b[:, :21])
    rest, _ = kernels.complex_scan(log_decay[:, 21:], theta[:, 21:], b[:, 21:], middle)
    torch.testing.assert_close(rest, whole[:, 21:], atol=1e-5, rtol=0)
    u, dt, A, B, C, _ = (x.float() for x in selective_inputs(2, 50, 3, 4))
    y, end = kernels.selective_scan(u, dt, A, B, C)
    _, middle = kernels.selective_scan(u[:, :21], dt[:, :21], A, B[:, :21], C[:, :21])
    rest, last = kernels.selective_scan(u[:, 21:], dt[:, 21:], A, B[:, 21:], C[:, 21:], middle)
    torch.testing.assert_close(rest, y[:, 21:], atol=1e-5, rtol=0)
    torch.testing.assert_close(last, end, atol=1e-5, rtol=0)


def test_gradients_of_one_output_alone():
    """The state without the outputs, and the outputs without the state, as when a training step drops the state."""
    inputs = [x.requires_grad_() for x in selective_inputs(2, 40, 3, 4)]
    for i in (0, 1):
        found = torch.autograd.grad(kernels.selective_scan(*inputs)[i].sum(), inputs, allow_unused=True)
        expected = torch.autograd.grad(kernels.selective_scan_reference(*inputs)[i].sum(), inputs, allow_unused=True)
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y)


def test_scans_are_deterministic_and_write_every_output():
    """The same bits twice, with uninitialised memory filled with NaN."""
    torch.use_deterministic_algorithms(True)  # also fills torch.empty with NaN
    try:
        assert torch.empty(3).isnan().all()
        for function, inputs in (
            (kernels.complex_scan, (-randn(2, 70, 3).abs(), randn(2, 70, 3), randn(2, 70, 3, 2), randn(2, 3, 2))),
            (kernels.selective_scan, selective_inputs(3, 70, 600, 16)),
        ):
            runs = []
            for _ in range(2):
                leaves = [x.float().requires_grad_() for x in inputs]
                outputs = function(*leaves)
                runs.append([*outputs, *torch.autograd.grad(sum(x.sum() for x in outputs), leaves)])
            assert all(torch.equal(x, y) and x.isfinite().all() for x, y in zip(*runs))
    finally:
        torch.use_deterministic_algorithms(False)


def test_clamped_scan_is_algorithm_2_and_where_it_departs():
    """QS Algorithm 2: equal to the recurrence while a chunk's log-decays sum to more than -30, far off beyond."""
    T, C = 200, 4
    theta, b, h0 = randn(1, T, C), randn(1, T, C, 2), randn(1, C, 2)

    def relative_error(gate, method):
        log_decay = torch.full((1, T, C), math.log(gate), dtype=torch.float64)
        exact = kernels.complex_scan(log_decay, theta, b, h0, backend="reference")[0]
        return (
            (kernels.complex_scan(log_decay, theta, b, h0, method=method)[0] - exact).abs().max() / exact.abs().max()
        ).item()

    assert relative_error(0.63, "clamped") < 1e-3  # 64 log 0.63 = -29.6
    assert relative_error(0.9, "clamped") < 1e-12
    assert relative_error(0.5, "clamped") > 0.5  # 64 log 0.5 = -44: the initialisation of the paper
    for gate in (0.9, 0.63, 0.5, 1e-4):
        assert relative_error(gate, "exact") < 1e-12
    # By hand, one chunk of three steps with the clamp in play: l = -20, -30, -30.
    ld = torch.tensor([-20.0, -20.0, -20.0]).view(1, 3, 1)
    one = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2)
    h, hT = kernels.complex_scan(ld, torch.zeros(1, 3, 1), one, method="clamped")
    torch.testing.assert_close(h[0, :, 0, 0], torch.tensor([1.0, 1 + math.exp(-10), 2 + math.exp(-10)]))
    assert torch.equal(hT, h[:, -1])
    h, _ = kernels.complex_scan(-0.5 * ld, torch.zeros(1, 3, 1), one, method="clamped")  # growth is clamped at 0: P = 1
    torch.testing.assert_close(h[0, :, 0, 0], torch.tensor([1.0, 2.0, 3.0]))


def test_empty_batches_and_widths():
    for B, C in ((0, 3), (2, 0)):
        h, hT = kernels.complex_scan(torch.zeros(B, 20, C), torch.zeros(B, 20, C), torch.zeros(B, 20, C, 2))
        assert h.shape == (B, 20, C, 2)
        assert hT.shape == (B, C, 2)
    y, hT = kernels.selective_scan(
        *(torch.zeros(0, 20, n) for n in (3, 3)), torch.zeros(3, 2), *(torch.zeros(0, 20, 2),) * 2
    )
    assert y.shape == (0, 20, 3)
    assert hT.shape == (0, 3, 2)


@pytest.mark.skipif(sys.platform == "win32", reason="needs the resource module")
def test_scan_memory_is_linear_in_time():
    """Forward and backward stay far below one (B, T, E, N) tensor, and below log2(T) copies of the input."""
    code = """
import resource, torch, kernels
torch.set_num_threads(1)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if __import__("sys").platform == "darwin" else 2**10)
def selective(T, E=512, N=16):
    x = [torch.rand(1, T, E), torch.rand(1, T, E) / 10, -torch.ones(E, N), torch.rand(1, T, N), torch.rand(1, T, N)]
    return kernels.selective_scan(*[t.requires_grad_() for t in x])[0].sum()
def scan(T, C=2048):
    x = [-torch.rand(1, T, C), torch.rand(1, T, C), torch.rand(1, T, C, 2)]
    return kernels.complex_scan(*[t.requires_grad_() for t in x])[0].sum()
selective(64).backward(); scan(64).backward()
before = peak(); selective(4096).backward(); middle = peak(); scan(2048).backward()
print(middle - before, peak() - middle)
"""
    fixed = ENV | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc gives every freed tensor back at once
    out = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT, env=fixed)
    selective, scan = map(float, out.split())
    assert selective < 64  # MB; u is 8, a (B, T, E, N) tensor 128
    assert scan < 16 * 20  # MB; log_decay is 16, log2(T) copies of the inputs and the output would be 16 * 66


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay": torch.zeros(2, 5)}, "log_decay must be"),
        ({"log_decay": torch.zeros(2, 0, 3)}, "T > 0"),
        ({"log_decay": torch.zeros(2, 5, 2)}, "log_decay has shape"),
        ({"theta": torch.zeros(2, 4, 3)}, "theta has shape"),
        ({"b": torch.zeros(2, 5, 3)}, "b has shape"),
        ({"h0": torch.zeros(2, 3)}, "h0 has shape"),
        ({"method": "fast"}, "unknown method"),
        ({"backend": "cuda"}, "unknown backend"),
        ({"theta": None, "b": torch.zeros(2, 5, 3), "method": "clamped"}, "complex"),
    ],
)
def test_complex_scan_refuses_what_does_not_fit(change, message):
    good = {"log_decay": torch.zeros(2, 5, 3), "theta": torch.zeros(2, 5, 3), "b": torch.zeros(2, 5, 3, 2)}
    kernels.complex_scan(**good)
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.complex_scan(**good | change)


@pytest.mark.parametrize(
    ("position", "shape"),
    [(0, (2, 3)), (0, (2, 0, 3)), (1, (2, 5, 1)), (2, (4, 3)), (3, (2, 5, 3)), (4, (2, 4, 4)), (5, (3, 4))],
)
def test_selective_scan_refuses_what_does_not_fit(position, shape):
    inputs = [torch.zeros(s) for s in ((2, 5, 3), (2, 5, 3), (3, 4), (2, 5, 4), (2, 5, 4), (2, 3, 4))]
    kernels.selective_scan(*inputs)
    inputs[position] = torch.zeros(shape)
    with pytest.raises(ValueError, match="must be|expected"):
        kernels.selective_scan(*inputs)


def born_inputs(B, H, T, N):
    return tuple(randn(B, H, T, N, 2, seed=s) for s in range(3))


def born(method="auto", cut=None):
    """born_attention(q, k, v) -> (o,) for `errors`, the sequence cut into pieces of `cut` tokens with the state between."""

    def function(q, k, v, backend=None):
        if backend == "reference" or cut is None:
            return (kernels.born_attention(q, k, v, method=method, backend=backend)[0],)
        outputs, state = [], None
        for part in torch.arange(q.shape[2]).split(cut):
            o, state = kernels.born_attention(*(x[:, :, part] for x in (q, k, v)), state, method=method)
            outputs.append(o)
        return (torch.cat(outputs, 2),)

    return function


BORN_FORMS = {
    "quadratic": born("quadratic"),
    "linear": born("linear"),
    "pieces": born("linear", 37),
    "steps": born("auto", 1),
}


@pytest.mark.parametrize("form", BORN_FORMS)
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("N", [2, 5, 16, 32])
def test_born_attention_equals_reference(form, T, N):
    """Three forms of one operation: value and gradients, also through the state."""
    if form == "steps" or N == 32:
        T = min(T, 257)
    for strided in (False, True):
        # floor: the first token's output is v_1, so its gradients for q and k are differences that cancel to 0
        assert errors(BORN_FORMS[form], born_inputs(1, 2, T, N), torch.float32, strided, floor=0.1) < 5e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
@pytest.mark.parametrize("method", ["quadratic", "linear"])
def test_born_attention_computes_in_float32(dtype, tolerance, method):
    assert errors(born(method), born_inputs(1, 2, 200, 7), dtype, strided=True) < tolerance
    assert kernels.born_attention(*(x.to(dtype) for x in born_inputs(1, 1, 3, 2)))[0].dtype == torch.float32


@pytest.mark.parametrize("method", ["quadratic", "linear"])
def test_born_attention_at_extreme_scores(method):
    """Scores from 1e-4 to 1e4 times, keys of zero, and queries orthogonal to the first keys."""
    q, k, v = born_inputs(1, 2, 200, 4)
    for scale in (1e-12, 1e-2, 1e2, 1e12):  # eq. 5 does not depend on the scale of q or k; nor does the output here
        for inputs in ((q, scale * k, v), (scale * q, k, v)):
            o = kernels.born_attention(*(x.float() for x in inputs), method=method)[0].double()
            torch.testing.assert_close(o, kernels.born_attention_reference(q, k, v), atol=2e-5, rtol=0)
    for scale in (1e-2, 1e2):
        assert errors(born(method), (q, scale * k, v), torch.float32) < 2e-5
        assert errors(born(method), (scale * q, k, v), torch.float32) < 2e-5
    zero = q.clone()
    zero[:, :, 40:90] = 0  # no direction at all
    assert errors(born(method), (zero, k, v), torch.float32) < 2e-5
    assert (kernels.born_attention(zero.float(), k.float(), v.float(), method=method)[0][:, :, 40:90] == 0).all()
    half = torch.zeros_like(k)
    half[:, :, 100:] = k[:, :, 100:]  # no key at first: the output is 0 there, and finite gradients
    o, _ = kernels.born_attention(q.float(), half.float(), v.float(), method=method)
    assert (o[:, :, :100] == 0).all()
    assert errors(born(method), (q, half, v), torch.float32) < 2e-5
    first, second = q.clone(), k.clone()
    first[..., 2:, :], second[..., :90, :2, :], second[..., :90, 2:, :] = 0, 0, 1  # orthogonal to the first 90 keys
    o, _ = kernels.born_attention(first.float(), second.float(), v.float(), method=method)
    expected = kernels.born_attention_reference(first, second, v)
    torch.testing.assert_close(o[:, :, 90:].double(), expected[:, :, 90:], atol=2e-5, rtol=0)
    assert (o[:, :, :64] == 0).all()  # the chunk's own scores are exact, not a difference of features
    assert o.isfinite().all()


@pytest.mark.parametrize("form", BORN_FORMS)
def test_born_attention_of_orthogonal_queries_is_bounded(form):
    """Queries in a random orthogonal complement of the old keys: what is left is the rounding of the features, and neither
    output nor gradients may blow it up."""
    N, T = 16, 200
    basis = torch.linalg.qr(torch.complex(randn(N, N), randn(N, N, seed=1)))[0]
    q, k = torch.complex(randn(T, N), randn(T, N, seed=2)), torch.complex(randn(T, N, seed=3), randn(T, N, seed=4))
    q[:, : N // 2], k[:, N // 2 :] = 0, 0
    q, k = (torch.view_as_real(x @ basis.mT).view(1, 1, T, N, 2).float().requires_grad_() for x in (q, k))
    v = randn(1, 1, T, N, 2, seed=5).float().requires_grad_()
    o = BORN_FORMS[form](q, k, v)[0]
    assert o.abs().max() < v.abs().max()
    assert all(x.abs().max() < 1e4 for x in torch.autograd.grad(o.sum(), (q, k, v)))


def test_born_gradients_are_the_derivatives():
    for method in ("quadratic", "linear"):
        leaves = [x.requires_grad_() for x in born_inputs(1, 1, 66, 2)]
        assert torch.autograd.gradcheck(born(method, 65), leaves, atol=1e-4, fast_mode=True)
        assert torch.autograd.gradcheck(born(method), [x[:, :, :9].detach().requires_grad_() for x in leaves])


def test_auto_picks_the_form_for_length_and_width(monkeypatch):
    picked = []
    real = kernels._born_sum
    monkeypatch.setattr(kernels, "_born_sum", lambda *args: picked.append(args[-1]) or real(*args))
    for T, N in ((383, 2), (384, 2), (700, 16), (768, 16), (1024, 32), (3072, 32)):
        kernels.born_attention(*(torch.ones(1, 1, T, N, 2) for _ in range(3)))
    assert picked == [False, True, False, True, False, True]


def test_born_state_is_small_and_the_sum_it_says():
    """However the past was cut, S and the newest tokens are the same, and as large after 5 chunks as after 50."""
    q, k, v = (x.float() for x in born_inputs(1, 2, 340, 3))
    states = []
    for cut in (340, 64, 100, 1):
        state = None
        for part in torch.arange(340).split(cut):
            _, state = kernels.born_attention(q[:, :, part], k[:, :, part], v[:, :, part], state)
        states.append(kernels.born_fold(state))
    for S, tail_k, tail_v in states:
        torch.testing.assert_close(S, states[0][0], atol=1e-4, rtol=1e-4)
        assert torch.equal(tail_k, k[:, :, 320:])
        assert torch.equal(tail_v, v[:, :, 320:])
    feature = kernels._features(kernels._flat(k[:, :, :320]).double())
    u = kernels._with_one(kernels._flat(v[:, :, :320])).double()
    torch.testing.assert_close(states[0][0].double(), feature.mT @ u, atol=1e-4, rtol=1e-4)
    x, y = (torch.view_as_complex(t.double().contiguous()) for t in (q[0, 0], k[0, 0]))
    weights = (x.conj() * y).sum(-1).abs().square()
    products = (
        kernels._features(kernels._flat(q[0, 0].double())) * kernels._features(kernels._flat(k[0, 0].double()))
    ).sum(-1)
    torch.testing.assert_close(products, weights)  # phi(x).phi(y) = |<x|y>|^2


def test_born_attention_is_deterministic_and_keeps_its_inputs():
    torch.use_deterministic_algorithms(True)  # also fills torch.empty with NaN
    try:
        for method in ("quadratic", "linear"):
            runs = []
            for _ in range(2):
                leaves = [x.float().requires_grad_() for x in born_inputs(1, 2, 200, 5)]
                before = [x.detach().clone() for x in leaves]
                o, _ = kernels.born_attention(*leaves, method=method)
                runs.append([o, *torch.autograd.grad(o.sum(), leaves)])
                assert all(torch.equal(x, y) for x, y in zip(leaves, before))
            assert all(torch.equal(x, y) and x.isfinite().all() for x, y in zip(*runs))
    finally:
        torch.use_deterministic_algorithms(False)


def test_born_attention_under_autocast_stays_float32():
    leaves = [x.float().requires_grad_() for x in born_inputs(1, 2, 200, 8)]
    plain = kernels.born_attention(*leaves)[0]
    with torch.autocast("cpu", torch.bfloat16):
        mixed, state = kernels.born_attention(*leaves)
        gradients = torch.autograd.grad(mixed.sum(), leaves)
        pieces = born("auto", 50)(*leaves)[0]  # a state is folded under autocast too
    assert torch.equal(plain, mixed)
    torch.testing.assert_close(pieces, plain, atol=1e-5, rtol=0)
    assert {x.dtype for x in tensors(state)} == {torch.float32}
    assert all(torch.equal(x, y) for x, y in zip(gradients, torch.autograd.grad(plain.sum(), leaves)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 2, 5, 3)}, "q has shape (1, 2, 5, 3); expected (B, H, T, N, 2)"),
        ({"q": torch.zeros(1, 2, 0, 3, 2)}, "with T and N > 0"),
        ({"q": torch.zeros(1, 2, 5, 3, 3)}, "q has shape"),
        ({"k": torch.zeros(1, 2, 4, 3, 2)}, "k has shape (1, 2, 4, 3, 2); expected (1, 2, 5, 3, 2)"),
        ({"k": torch.zeros(1, 1, 5, 3, 2)}, "k has shape"),
        ({"v": torch.zeros(1, 2, 5, 4, 2)}, "v has shape"),
        (
            {"v": torch.zeros(1, 2, 5, 3, 2, device="meta")},
            "v (1, 2, 5, 3, 2) is torch.float32 on meta; expected torch.float32 on cpu",
        ),
        (
            {"state": (torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 0, 3, 2), torch.zeros(1, 2, 0, 3, 2))},
            "S of the state has",
        ),
        ({"state": (None, torch.zeros(1, 2, 3, 4, 2), torch.zeros(1, 2, 3, 3, 2))}, "k of the state has shape"),
        ({"state": (None, torch.zeros(1, 2, 3, 3, 2), torch.zeros(1, 2, 4, 3, 2))}, "v of the state has shape"),
        ({"state": (None, torch.zeros(1, 2, 3, 2), torch.zeros(1, 2, 3, 2))}, "k of the state has shape (1, 2, 3, 2)"),
        ({"state": (None, torch.zeros(1, 2, 3, 3, 2))}, "state has 2 parts"),
        (
            {"state": (None, *[torch.zeros(1, 2, 3, 3, 2).double()] * 2)},
            "is torch.float64 on cpu; expected torch.float32",
        ),
        (
            {"k": torch.zeros(1, 2, 5, 3, 2).bfloat16()},
            "k (1, 2, 5, 3, 2) is torch.bfloat16 on cpu; expected torch.float32",
        ),
        ({"q": torch.zeros(1, 2, 5, 3, 2).int()}, "q (1, 2, 5, 3, 2) is torch.int32; expected"),
        ({"q": torch.zeros(1, 2, 5, 0, 2)}, "with T and N > 0"),
        ({"method": "softmax"}, "unknown method 'softmax'"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_born_attention_refuses_what_does_not_fit(change, message):
    good = {name: torch.ones(1, 2, 5, 3, 2) for name in "qkv"}
    kernels.born_attention(**good)
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.born_attention(**good | change)


def test_self_check_fails_where_a_kernel_is_off(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        kernels.main()
    assert not stop.value.code
    out = capsys.readouterr().out
    assert out.count("e-0") >= 12
    assert "FAILED" not in out

    def off(x, backend):
        return (2.001 * x if backend == "torch" else 2 * x,)

    monkeypatch.setattr(kernels, "check_cases", lambda: [("off", off, (randn(3),))])
    with pytest.raises(SystemExit) as stop:
        kernels.main()
    assert stop.value.code
    assert "FAILED" in capsys.readouterr().out


def test_temperature_cancels():
    """QS eq. 5: D tau_i divides numerator and denominator alike. Output unchanged, gradient zero."""
    q, k, v = born_inputs(1, 2, 20, 4)
    tau = (1 + randn(1, 2, 20, seed=9).square()).requires_grad_()
    q_c, k_c, v_c = (torch.view_as_complex(x) for x in (q, k, v))
    s = ((q_c.conj() @ k_c.mT).abs().square() / (4 * tau.unsqueeze(-1))).tril()  # line 1, as printed
    o = torch.view_as_real((s.to(v_c.dtype) @ v_c) / s.sum(-1, keepdim=True))  # line 2
    torch.testing.assert_close(
        o, kernels.born_attention(q, k, v)[0], atol=2e-5, rtol=1e-4
    )  # but for the raised denominator
    (gradient,) = torch.autograd.grad(o.square().sum(), tau)
    assert gradient.abs().max() < 1e-12
    model = make("htransformer", L=1)
    idx = text_batch(1, 30)
    before = model(idx, idx)[1]
    before.backward()
    projection = model.layers[0].param_proj
    assert (projection.weight.grad[-4:] == 0).all()  # tau of four heads
    assert (projection.weight.grad[:-4].abs().amax(1) > 0).all()
    with torch.no_grad():
        projection.weight[-4:] = 7
        assert torch.equal(model(idx, idx)[1], before)


def test_two_state_interference():
    """QS 5.5: p = |<e|psi>|^2 = (1 + cos theta) / 2, here as the weight of a key in Born attention."""
    for theta in np.linspace(0, math.pi, 7):
        psi = torch.tensor([[1.0, 0.0], [math.cos(theta), math.sin(theta)]], dtype=torch.float64) / 2**0.5
        e = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64) / 2**0.5
        k = torch.stack((e, psi)).view(1, 1, 2, 2, 2)  # keys: e itself (weight 1) and the superposition (weight p)
        q = torch.stack((e, e)).view(1, 1, 2, 2, 2)
        v = torch.zeros(1, 1, 2, 2, 2, dtype=torch.float64)
        v[0, 0, 1, 0, 0] = 1
        for method in ("quadratic", "linear"):
            o = kernels.born_attention(q, k, v, method=method)[0][0, 0, 1, 0, 0].item()
            p = (1 + math.cos(theta)) / 2
            assert o == pytest.approx(p / (1 + p), abs=3e-6)  # the denominator is raised by 2e-6


def test_rotated_scores_depend_on_relative_positions():
    """QS 5.5: turned by t omega, queries and keys that both move by the same number of positions score the same."""
    x, omega = randn(1, 2, 6, 4, 2), randn(2, 4)
    y = randn(1, 2, 6, 4, 2, seed=1)
    outputs = []
    for shift in (0, 1000):
        angle = (shift + torch.arange(6)).double().unsqueeze(-1) * omega.unsqueeze(1)
        q, k = htransformer.rotate(x, angle), htransformer.rotate(y, angle)
        torch.testing.assert_close(q.norm(dim=-1), x.norm(dim=-1))
        outputs.append(kernels.born_attention(q, k, y)[0])
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-9, rtol=0)
    assert (outputs[0] - kernels.born_attention(x, y, y)[0]).abs().max() > 0.01


@torch.no_grad()
def test_softmax_cells_are_a_real_rotary_attention():
    """QS 9.2: softmax over Re <q|k> / sqrt(2N) is attention of real vectors of width 2N, under either field."""
    q, k, v = born_inputs(1, 2, 9, 4)
    q_c, k_c = torch.view_as_complex(q), torch.view_as_complex(k)
    scores = (q_c.conj() @ k_c.mT).real / 8**0.5
    w = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf).softmax(-1)
    o, _ = htransformer.softmax_attention(*(x.flatten(-2) for x in (q, k, v)), None)
    torch.testing.assert_close(o, w @ v.flatten(-2))
    one, cache = htransformer.softmax_attention(*(x.flatten(-2)[:, :, :5] for x in (q, k, v)), None)
    two, _ = htransformer.softmax_attention(*(x.flatten(-2)[:, :, 5:] for x in (q, k, v)), cache)
    torch.testing.assert_close(torch.cat((one, two), 2), o)


@torch.no_grad()
def test_real_born_cell_squares_the_real_product():
    """QS 9.2: a real state with a Born score, w = (q . k)^2 on 2N reals."""
    q, k, v = (x.flatten(-2) for x in born_inputs(1, 2, 70, 3))
    w = (q / q.norm(dim=-1, keepdim=True) @ k.mT).square().tril()
    raised = kernels.BORN_FLOOR * k.square().sum(-1, keepdim=True).cumsum(-2)
    expected = (w @ v) / (w.sum(-1, keepdim=True) + raised)
    real = [torch.nn.functional.pad(x.unsqueeze(-1), (0, 1)) for x in (q, k, v)]
    for method in ("quadratic", "linear"):
        o, _ = kernels.born_attention(*real, method=method)
        torch.testing.assert_close(o[..., 0], expected)
        assert o[..., 1].abs().max() < 1e-12


# ----------------------------------------------------------------------------------------------------------------------
# Models

VARIANTS = [  # every model, and every setting that changes what it computes
    "hmamba", "hmamba:field=real", "hmamba:gate=none", "hmamba:scan=clamped", "hmamba:head=mos", "hmamba:head=born",
    "hmamba:field=real:gate=none", "hmamba:N=5:H=3", "mamba", "mamba:init=xavier", "mamba:mlp=0", "mamba:head=mos", "mamba:N=3",
    "htransformer", "htransformer:field=real", "htransformer:score=softmax", "htransformer:field=real:score=softmax",
    "htransformer:N=5:H=3", "transformer",
]  # fmt: skip
GROWING = ("htransformer:score=softmax", "htransformer:field=real:score=softmax", "transformer")  # a cache as state


def make(spec, size="tiny", seed=0, **changes):
    torch.manual_seed(seed)
    model_class, config = sample.parse_spec(spec, size, 256)
    return model_class(dataclasses.replace(config, **changes))


def tensors(state):
    """Every tensor of a model's state."""
    if isinstance(state, torch.Tensor):
        return [state]
    return [x for part in state for x in tensors(part)] if isinstance(state, (list, tuple)) else []


def text_batch(B, T, seed=0):
    return torch.randint(256, (B, T), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("spec", VARIANTS)
def test_step_and_chunked_prefill_equal_the_full_pass(spec):
    model, idx = make(spec, L=2), text_batch(2, 300)
    full, loss, end = model(idx, idx)
    assert full.shape == (2, 300, 256)
    assert loss.shape == ()
    chunks, state = [], None
    for chunk in idx.split([1, 2, 64, 100, 133], dim=1):
        logits, none, state = model(chunk, state=state)
        assert none is None
        chunks.append(logits)
    if spec == "hmamba:scan=clamped":  # as printed, the result depends on where the chunks begin
        assert (torch.cat(chunks, 1) - full).abs().max() > 0.1
        return
    if spec == "hmamba:head=born":  # the logarithm of a squared modulus near 0 has no absolute tolerance
        chunks, full = [x.exp() for x in chunks], full.exp()
    torch.testing.assert_close(torch.cat(chunks, 1), full, atol=1e-4, rtol=0)
    state, steps, sizes = model.init_state(2), [], []
    for t in range(300):
        logits, state = model.step(idx[:, t], state)
        steps.append(logits)
        sizes.append(sum(x.numel() for x in tensors(state)))
    steps = torch.stack(steps, 1)
    torch.testing.assert_close(steps.exp() if spec == "hmamba:head=born" else steps, full, atol=1e-4, rtol=0)
    if spec in GROWING:
        assert sizes[291] > sizes[163]
    else:
        assert sizes[291] == sizes[163]  # O(1) memory; Born attention's newest tokens come and go in chunks of 64
    if "hmamba" in spec or "mamba" in spec:
        for x, y in zip(tensors(state), tensors(end), strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("spec", VARIANTS)
def test_models_are_causal(spec):
    model, idx = make(spec, L=2), text_batch(1, 80)
    changed = idx.clone()
    changed[:, 50] = (idx[:, 50] + 1) % 256
    before, after = model(idx)[0], model(changed)[0]
    torch.testing.assert_close(after[:, :50], before[:, :50], atol=1e-5, rtol=0)
    assert (after[:, 50:] - before[:, 50:]).abs().amax(-1).min() > 0  # the present and all that follows depend on it


@pytest.mark.parametrize("spec", VARIANTS)
def test_every_parameter_learns(spec):
    """Each gets a gradient that is finite and not zero: nothing is dead, and DDP finds nothing unused."""
    model, idx = make(spec, L=2), text_batch(2, 65)
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().max() > 0, name


def count(spec, size):
    with torch.device("meta"):
        return make(spec, size).num_params()


def test_parameter_counts():
    """QS 5.7: 253M, pairs within 0.02 %. The counts are worked out by hand."""
    assert count("hmamba", "253m")["total"] == 253_033_856
    assert count("mamba", "253m")["total"] == 253_051_904
    assert abs(253_033_856 - 253_051_904) / 253_051_904 < 2e-4
    assert count("hmamba", "253m")["param_proj"] == 24 * 16 * (6 * 16 + 1) * (2048 + 1)  # 6N+1 reals a head, and a bias
    assert hmamba.matched_width(hmamba.MambaConfig(D=1024, L=24, H=16)) == 1258  # the paper's width
    for size, config in hmamba.Mamba.SIZES.items():  # within one unit of width at every size
        difference = count("hmamba", size)["total"] - count("mamba", size)["total"]
        assert abs(difference) <= 3 * config.D * config.L
    assert count("htransformer", "253m")["total"] == 253_107_584
    assert count("transformer", "253m")["total"] == 253_150_208
    assert abs(253_107_584 - 253_150_208) / 253_150_208 < 2e-4
    for total in (253_107_584, 253_150_208):
        assert abs(total - 253_033_856) / 253_033_856 < 5e-4
    for size, config in htransformer.Transformer.SIZES.items():
        cells = {count(v, size)["total"] for v in VARIANTS if v.startswith("htransformer") and "N=" not in v}
        assert len(cells) == 1  # the factorial has equal parameters
        assert abs(cells.pop() - count("transformer", size)["total"]) <= 2 * config.D * config.L
    for spec in VARIANTS:
        counts = count(spec, "tiny")
        assert sum(counts.values()) == 2 * counts["total"]
    assert 24e6 < count("hmamba", "small")["total"] < 27e6
    assert "omega" not in count("hmamba:field=real", "tiny")  # what a setting disables is not registered
    widths = {spec: count(spec, "tiny")["param_proj"] for spec in VARIANTS if spec.startswith("hmamba")}
    assert widths["hmamba"] == 4 * 4 * 97 * 257
    assert widths["hmamba:gate=none"] == 4 * 4 * 81 * 257
    assert widths["hmamba:field=real"] == 4 * 4 * 96 * 257


@torch.no_grad()
@pytest.mark.parametrize("spec", [v for v in VARIANTS if "born" not in v])
def test_untrained_loss_is_uniform_at_tiny(spec):
    idx = text_batch(4, 257)
    assert abs(make(spec)(idx[:, :-1], idx[:, 1:])[1].item() - math.log(256)) < 0.05, spec


@torch.no_grad()
@pytest.mark.parametrize("spec", ["hmamba", "mamba", "mamba:init=xavier", "transformer"])
def test_untrained_loss_at_other_widths(spec):
    idx = text_batch(2, 65)
    assert make(spec, "small")(idx[:, :-1], idx[:, 1:])[1].item() < math.log(256) + 0.5
    assert make(spec, "253m", L=2)(idx[:, :-1], idx[:, 1:])[1].item() < math.log(256) + 0.5


def test_initialisation_is_as_the_docstring_says():
    model = make("hmamba", "small")
    layer = model.layers[3]
    assert model.embedding.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert layer.param_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for proj, scale in ((layer.in_proj, 1), (layer.back_proj, 1), (layer.out_proj, 10**-0.5)):
        bound = (6 / sum(proj.weight.shape)) ** 0.5 * scale
        assert 0.99 * bound < proj.weight.abs().max() <= bound
    biases = dict(zip(layer.widths, layer.param_proj.bias.split(list(layer.widths.values()))))
    assert all((biases[k] == 0).all() for k in ("b", "C", "gate", "delta"))
    dt = torch.cat([torch.nn.functional.softplus(x.param_proj.bias[-8:]) for x in model.layers])
    assert 1e-3 <= dt.min() < 5e-3
    assert 0.02 < dt.max() <= 0.1 * 1.001
    magnitude, sign = layer.omega.abs().log10(), layer.omega.sign()
    torch.testing.assert_close(magnitude, torch.linspace(-1, 1, 16).expand(8, 16))
    assert (sign[:, 1:] == -sign[:, :-1]).all()
    psi0 = model.init_state(3)[3][1]
    torch.testing.assert_close(psi0.norm(dim=-1), torch.ones(3, 128))
    assert psi0.mean(1).abs().max() < 0.3  # all directions, not the real axis

    mixer = make("mamba", "small").layers[3].mixer
    dt = torch.nn.functional.softplus(mixer.dt_proj.bias)
    assert 0.999e-3 <= dt.min() < 1.2e-3
    assert 0.09 < dt.max() <= 0.1 * 1.001
    torch.testing.assert_close(-mixer.A_log.exp(), -torch.arange(1.0, 17).expand(1024, 16))
    assert (mixer.D == 1).all()
    xavier = make("mamba:init=xavier", "small").layers[3].mixer
    assert (xavier.dt_proj.bias == 0).all()
    assert xavier.out_proj.weight.abs().max() > 3 * mixer.out_proj.weight.abs().max()  # no 1 / sqrt(10)


def test_decay_groups():
    """Rank >= 2 decays (QS section 7), the dynamics do not; every parameter is in one group."""
    _, groups = train.make_optimizer(make("hmamba"), 1e-3, torch.device("cpu"))
    assert groups["no_decay"] == [
        "layers.*.conv1d.bias", "layers.*.norm.weight", "layers.*.omega", "layers.*.param_proj.bias", "layers.*.psi0", "norm_f.weight",
    ]  # fmt: skip
    assert "embedding.weight" in groups["decay"]
    _, official = train.make_optimizer(make("mamba"), 1e-3, torch.device("cpu"))
    _, xavier = train.make_optimizer(make("mamba:init=xavier"), 1e-3, torch.device("cpu"))
    assert "layers.*.mixer.A_log" in official["no_decay"]
    assert "layers.*.mixer.A_log" in xavier["decay"]


def capture_scan(monkeypatch):
    """The arguments of every call of complex_scan from the model."""
    calls = []

    def spy(*args, **kwargs):
        calls.append(args)
        return kernels.complex_scan(*args, **kwargs)

    monkeypatch.setattr(hmamba, "complex_scan", spy)
    return calls


@torch.no_grad()
def test_transition_is_the_cayley_map_times_the_gate(monkeypatch):
    """QS Algorithm 1, computed as printed: a = sigmoid(u) (1 + i phi) / (1 - i phi), from the same projections."""
    calls, model, idx = capture_scan(monkeypatch), make("hmamba", L=1), text_batch(2, 50)
    layer, projected = model.layers[0], []
    layer.omega.mul_(100)  # large phases too
    layer.param_proj.register_forward_hook(lambda *args: projected.append(args[2].double()))
    model(idx)
    _, _, gate, delta, dt = projected[0].split(list(layer.widths.values()), -1)
    dt = torch.nn.functional.softplus(dt).clamp(max=0.1)
    phi = 0.5 * dt.unsqueeze(-1) * (delta.view(2, 50, 4, 16) + layer.omega.double())
    one = torch.ones_like(phi)
    cayley = (torch.complex(one, phi) / torch.complex(one, -phi)).flatten(2)
    torch.testing.assert_close(cayley.abs(), torch.ones_like(cayley.abs()))  # unit modulus
    log_decay, theta = calls[0][0].double(), calls[0][1].double()
    assert theta.abs().max() > 3
    torch.testing.assert_close(torch.exp(torch.complex(log_decay, theta)), gate.sigmoid() * cayley, atol=1e-6, rtol=0)


@torch.no_grad()
def test_h_mamba_block_is_what_the_paper_writes():
    """One block again in complex128, from its projections on: eqs. 2-3, Algorithm 1, readout, gate (QS 5.1-5.7)."""
    model = make("hmamba", L=1)
    layer, seen, T = model.layers[0], {}, 30
    c = layer.c
    layer.param_proj.weight.mul_(20)  # away from the start, where everything is nearly linear; dt meets its clamp
    for name in ("in_proj", "param_proj", "back_proj"):
        part = getattr(layer, name)
        part.register_forward_hook(lambda _, a, out, name=name: seen.__setitem__(name, (a[0], out)))
    x = randn(2, T, 128).float()
    y, (_, last) = layer(x, layer.init_state(2))
    z = seen["in_proj"][1].chunk(2, -1)[1].double()
    b, C, gate, delta, dt = seen["param_proj"][1].double().split([128, 128, 64, 64, 4], -1)
    b, C = (torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) for t in (b, C))  # (2, T, H*N)
    dt = torch.nn.functional.softplus(dt).clamp(max=0.1).repeat_interleave(c.N, -1)
    assert (dt == 0.1).any()
    assert (dt < 0.1).any()
    phi = dt / 2 * (delta + layer.omega.double().flatten())
    a = gate.sigmoid() * (1 + 1j * phi) / (1 - 1j * phi)
    psi = torch.view_as_complex(layer.psi0.double()).flatten()
    psi, outputs = (psi / psi.abs()).expand(2, -1), []
    for t in range(T):
        psi = a[:, t] * psi + b[:, t]
        outputs.append(C[:, t].conj() * psi)
    readout = torch.stack(outputs, 1)
    torch.testing.assert_close(torch.view_as_complex(last.double()), psi, atol=1e-5, rtol=1e-4)
    readout = torch.cat((readout.real, readout.imag), -1)
    torch.testing.assert_close(seen["back_proj"][0].double(), readout, atol=1e-5, rtol=1e-4)
    gated = seen["back_proj"][1].double() * torch.nn.functional.silu(z)
    torch.testing.assert_close(y.double(), x + gated @ layer.out_proj.weight.double().T, atol=1e-5, rtol=1e-4)


def test_relative_phase_is_transported_exactly():
    """QS Lemma 6.2: without input the phase difference of two coordinates adds up, whatever the gates, at unit
    sensitivity; the magnitude of rho carries the gates."""
    T = 200
    theta, log_decay = randn(1, T, 2).requires_grad_(), -randn(1, T, 2, seed=1).abs()
    psi0 = randn(1, 2, 2, seed=2)
    _, psi = kernels.complex_scan(log_decay, theta, torch.zeros(1, T, 2, 2, dtype=torch.float64), psi0)
    psi, psi0 = torch.view_as_complex(psi)[0], torch.view_as_complex(psi0)[0]
    rho, rho0 = psi[0] * psi[1].conj(), psi0[0] * psi0[1].conj()
    advance = (theta[0, :, 0] - theta[0, :, 1]).sum()
    turn = torch.polar(torch.ones((), dtype=torch.float64), rho0.angle() + advance)
    torch.testing.assert_close(rho / rho.abs(), turn)
    torch.testing.assert_close(rho.abs().log(), rho0.abs().log() + log_decay.sum())
    (gradient,) = torch.autograd.grad(rho.angle(), theta)
    torch.testing.assert_close(gradient[0], torch.tensor([1.0, -1.0], dtype=torch.float64).expand(T, 2))


@torch.no_grad()
def test_experiments_change_what_they_name(monkeypatch):
    calls, idx = capture_scan(monkeypatch), text_batch(1, 20)
    make("hmamba:gate=none", L=1)(idx)
    assert (calls[-1][0] == 0).all()  # alpha = 1
    make("hmamba:field=real", L=1)(idx)
    assert calls[-1][1] is None
    assert calls[-1][2].shape == (1, 20, 2 * 4 * 16)  # 2N real channels a head
    for spec in ("hmamba:head=mos", "hmamba:head=born", "mamba:head=mos", "mamba:head=born"):
        logits = make(spec, L=1)(idx)[0]
        torch.testing.assert_close(logits.logsumexp(-1), torch.zeros(1, 20), atol=1e-5, rtol=0)  # log-probabilities
    # Born rule against complex arithmetic
    model = make("hmamba:head=born", L=1)
    x = randn(1, 3, 128).float()
    psi, e = (torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) for t in (x, model.embedding.weight))
    p = torch.einsum("vk,btk->btv", e.conj(), psi).abs().square()
    torch.testing.assert_close(
        model.readout(x, model.embedding.weight).exp(), p / p.sum(-1, keepdim=True), atol=1e-6, rtol=1e-4
    )


def test_no_gate_means_a_unitary_transition():
    """Without input the norm of the state stays 1 per coordinate, and gate=sigmoid at 0 halves it."""
    for spec, expected in (("hmamba:gate=none", 1.0), ("hmamba", 0.5**10)):
        layer = make(spec, L=1).layers[0]
        torch.nn.init.zeros_(layer.param_proj.weight)
        _, (_, psi) = layer(randn(1, 10, 128).float(), layer.init_state(1))
        torch.testing.assert_close(psi.norm(dim=-1), torch.full((1, 64), expected), rtol=1e-5, atol=0)


# What transformers 5.24.0 and mambapy 1.2.0 compute (they agree to 4e-7) for the weights of the formula below:
# logits of the last position, the loss, and the gradient norms, in the order in which the formula numbers the parameters.
LOGITS_LAST = [
    [0.2409888, 0.2216169, -0.6595511, 1.02406, -1.274566, 1.38318, -1.33781, 1.143509, -0.8219057, 0.4088035, 0.04980896],
    [-1.987168, 1.49696, -0.8401037, 0.08972202, 0.670648, -1.356358, 1.891071, -2.215259, 2.292833, -2.115156, 1.702009],
]  # fmt: skip
LOSS = 3.042665
GRAD_NORMS = {
    "embedding.weight": 1.453945,
    "layers.0.norm.weight": 0.2826491,
    "layers.0.mixer.in_proj.weight": 0.8022123,
    "layers.0.mixer.conv1d.weight": 2.576505,
    "layers.0.mixer.conv1d.bias": 1.0223,
    "layers.0.mixer.x_proj.weight": 0.2546426,
    "layers.0.mixer.dt_proj.weight": 0.008027206,
    "layers.0.mixer.dt_proj.bias": 0.04162394,
    "layers.0.mixer.A_log": 0.01495401,
    "layers.0.mixer.D": 0.2872706,
    "layers.0.mixer.out_proj.weight": 1.757589,
    "layers.1.norm.weight": 0.08328699,
    "layers.1.mixer.in_proj.weight": 0.5491326,
    "layers.1.mixer.conv1d.weight": 0.375606,
    "layers.1.mixer.conv1d.bias": 0.1943965,
    "layers.1.mixer.x_proj.weight": 0.08900396,
    "layers.1.mixer.dt_proj.weight": 0.008842969,
    "layers.1.mixer.dt_proj.bias": 0.03614494,
    "layers.1.mixer.A_log": 0.004414224,
    "layers.1.mixer.D": 0.2096387,
    "layers.1.mixer.out_proj.weight": 0.6028824,
    "norm_f.weight": 0.28001,
}


def test_mamba_is_the_published_one():
    model = hmamba.Mamba(hmamba.MambaConfig(V=11, D=16, L=2, N=4, mlp=0))
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(GRAD_NORMS)
    with torch.no_grad():
        for k, name in enumerate(GRAD_NORMS):
            p, j = parameters[name], torch.arange(parameters[name].numel()).double()
            value = (0.3 * torch.sin(1.7 * k + 0.61 * j + 0.013 * j * k)).view(p.shape)
            if name.endswith(("norm.weight", "norm_f.weight", "mixer.D")):
                value = 1 + value
            if name.endswith("A_log"):
                value = torch.arange(1, 5).double().log() + value
            if name.endswith("dt_proj.bias"):
                value = value - 2
            p.copy_(value)
    b, t = torch.arange(2).view(2, 1), torch.arange(10)
    tokens = (3 * b + 5 * t + t * t) % 11
    logits, loss, _ = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    torch.testing.assert_close(logits[:, -1], torch.tensor(LOGITS_LAST), atol=5e-6, rtol=0)
    assert loss.item() == pytest.approx(LOSS, abs=5e-6)
    for name, expected in GRAD_NORMS.items():
        assert parameters[name].grad.norm().item() == pytest.approx(expected, rel=1e-5), name


@pytest.mark.parametrize("spec", ["hmamba", "hmamba:field=real", "mamba", "htransformer", "transformer"])
def test_autocast_keeps_gates_in_float32(spec, monkeypatch):
    """bf16 autocast: gates and angles are float32 functions of the (rounded) logits, and training stays finite."""
    calls, model, idx = capture_scan(monkeypatch), make(spec, L=2), text_batch(2, 65)
    projected = []
    if spec.startswith("hmamba"):
        model.layers[0].param_proj.register_forward_hook(lambda *args: projected.append(args[2]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    if spec.startswith("hmamba"):
        gate = projected[0].split(list(model.layers[0].widths.values()), -1)[2]
        assert gate.dtype == torch.bfloat16
        assert calls[0][0].dtype == torch.float32
        assert torch.equal(calls[0][0], torch.nn.functional.logsigmoid(gate.float()))


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
def test_a_slow_gate_survives_a_thousand_steps(autocast):
    """sigmoid(6)^1024 = 0.079; were the gate rounded to bf16, as autocast alone would, 0.018 would be left."""
    layer = make("hmamba", L=1).layers[0]
    torch.nn.init.zeros_(layer.param_proj.weight)
    layer.param_proj.bias[2 * 2 * 64 : 5 * 64] = 6
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, (_, psi) = layer(randn(1, 1024, 128).float(), layer.init_state(1))
    torch.testing.assert_close(psi.norm(dim=-1), torch.full((1, 64), 0.0792), atol=1e-3, rtol=0)


@pytest.mark.parametrize("spec", ["hmamba", "mamba", "htransformer", "htransformer:score=softmax", "transformer"])
def test_checkpointing_and_compile_change_nothing(spec):
    model, idx = make(spec, L=2), text_batch(2, 65)

    def run():
        model.zero_grad()
        logits, loss, _ = model(idx[:, :-1], idx[:, 1:])
        loss.backward()
        return [logits, *(p.grad.clone() for p in model.parameters())]

    plain, passes = run(), []
    counter = model.layers[0].norm.register_forward_hook(lambda *_: passes.append(1))
    model.checkpointing = True
    assert all(torch.equal(x, y) for x, y in zip(plain, run()))
    assert len(passes) == 2  # once forward, once more in the backward
    counter.remove()
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)  # the scans are single nodes: no graph break
    for checkpointing in (True, False):
        model.checkpointing = checkpointing
        for x, y in zip(plain, run()):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-4)
    torch._dynamo.reset()


def test_linear_born_attention_compiles():
    leaves = [x.float().requires_grad_() for x in born_inputs(1, 2, 130, 3)]
    function = born("linear")
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    plain, other = function(*leaves)[0], compiled(*leaves)[0]
    torch.testing.assert_close(plain, other, atol=1e-6, rtol=1e-5)
    for x, y in zip(torch.autograd.grad(plain.sum(), leaves), torch.autograd.grad(other.sum(), leaves)):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


def test_flops():
    """6 flops a matrix parameter, tied head included, forward and backward; the recurrence is a small rest."""
    for spec in ("hmamba", "mamba", "htransformer", "htransformer:score=softmax", "transformer"):
        with torch.device("meta"):
            model = make(spec, "253m")
        matrices = sum(
            p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "A_log" not in n and "omega" not in n
        )
        assert 6 * matrices <= model.flops_per_token(1024) < (1.05 if "mamba" in spec else 1.2) * 6 * matrices
    # By hand, per token, layer and head at T = 1024: 512 keys, products of width 64 for scores and values.
    with torch.device("meta"):
        assert make("transformer", "253m").mixing_flops(1024) == 24 * 16 * 512 * 2 * (64 + 64)
        assert make("htransformer", "253m").mixing_flops(1024) == 24 * 16 * 512 * 2 * (32 + 32 + 32)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gru", "unknown model 'gru'; known: hmamba, mamba, htransformer, transformer"),
        ("hmamba:n=4", "no setting 'n=4'; known: D=, L=, H=, N="),
        ("hmamba:N", "no setting 'N'"),
        ("hmamba:V=3", "no setting 'V=3'"),
        ("hmamba:N=four", "N=four is not int"),
        ("hmamba:N=0", "N=0 must be at least 1"),
        ("hmamba:field=quaternion", "field=quaternion is unknown; known: complex, real"),
        ("hmamba:field=real:scan=clamped", "field=complex only"),
        ("mamba:init=zero", "known: official, xavier"),
        ("mamba:D=33:head=born", "must be even"),
        ("htransformer:score=cosine", "score=cosine is unknown; known: born, softmax"),
        ("htransformer:H=0", "H=0 must be at least 1"),
        ("transformer:head=48", "head=48 must be even and divide D=128"),
    ],
)
def test_specs_refused(spec, message):
    with pytest.raises(data.InputError, match=re.escape(message)):
        sample.parse_spec(spec, "tiny", 256)
    with pytest.raises(data.InputError, match="no size 'huge'; known: tiny"):
        sample.parse_spec("hmamba", "huge", 256)


@torch.no_grad()
@pytest.mark.parametrize("spec", [v for v in VARIANTS if v.startswith("htransformer")])
def test_h_transformer_block_is_what_the_paper_writes(spec, monkeypatch):
    """One block again in complex128, from its projections on: rotation, score, readout, gate (QS 5.5, 5.7, 9.2)."""
    model = make(spec, L=1)
    layer, seen, T = model.layers[0], {}, 20
    c = layer.c
    for name in ("in_proj", "conv1d", "param_proj", "back_proj"):
        part = getattr(layer, name)
        part.register_forward_hook(lambda _, a, out, name=name: seen.__setitem__(name, (a[0], out)))
    x = randn(2, T, 128).float()
    y, _ = layer(x, layer.init_state(2))
    z = seen["in_proj"][1].chunk(2, -1)[1].double()
    params = seen["param_proj"][1][..., : -c.H].double().view(2, T, 3, c.H, c.N, 2)
    q, k, v = torch.view_as_complex(params.contiguous()).permute(2, 0, 3, 1, 4)  # (2, H, T, N)
    turn = torch.exp(1j * torch.arange(T).view(T, 1) * layer.omega.double().unsqueeze(1))  # (H, T, N)
    product = (q * turn).conj() @ (k * turn).mT
    if c.score == "softmax":
        w = (product.real / (2 * c.N) ** 0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
    else:
        w = (product.abs() if c.field == "complex" else product.real).square().tril()
        w = w / w.sum(-1, keepdim=True)
    o = w.to(v.dtype) @ v
    e = torch.view_as_complex(layer.e.double())
    e = (e / e.abs()).unsqueeze(1)  # (H, 1, N)
    if c.field == "complex":
        readout = torch.view_as_real((e * q).conj() * o)
    else:
        readout = torch.stack((e.real * q.real * o.real, e.imag * q.imag * o.imag), -1)
    readout = readout.transpose(1, 2).flatten(2)
    torch.testing.assert_close(seen["back_proj"][0].double(), readout, atol=2e-7, rtol=2e-3)
    gated = seen["back_proj"][1].double() * torch.nn.functional.silu(z)
    expected = x + gated @ layer.out_proj.weight.double().T + layer.out_proj.bias
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_transformer_block_is_the_textbook_one():
    """Pre-norm, rotary positions of base 10000 on pairs (i, i + 16), softmax, SiLU, in float64 by hand."""
    model = make("transformer", L=1)
    layer, T = model.layers[0], 12
    w = {name: p.double() for name, p in layer.named_parameters()}
    x = randn(1, T, 128)

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    q, k, v = (norm(x) @ w["qkv_proj.weight"].T).view(1, T, 3, 4, 32).permute(2, 0, 3, 1, 4)  # (1, 4, T, 32)
    turn = torch.exp(1j * torch.arange(T).view(T, 1) * 10000.0 ** (-torch.arange(16).double() / 16))
    q, k = (torch.complex(y[..., :16], y[..., 16:]) * turn for y in (q, k))
    scores = (q.conj() @ k.mT).real / 32**0.5
    weights = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
    expected = x + (weights @ v).transpose(1, 2).flatten(2) @ w["out_proj.weight"].T
    hidden = torch.nn.functional.silu(norm(expected) @ w["mlp_in.weight"].T)
    expected = expected + hidden @ w["mlp_out.weight"].T
    torch.testing.assert_close(layer(x.float(), None)[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_initialisation_of_the_attention_pair():
    layer = make("htransformer", "small").layers[3]
    assert layer.param_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for proj, scale in ((layer.in_proj, 1), (layer.back_proj, 1), (layer.out_proj, 10**-0.5)):
        bound = (6 / sum(proj.weight.shape)) ** 0.5 * scale
        assert 0.99 * bound < proj.weight.abs().max() <= bound
    assert all((proj.bias == 0).all() for proj in (layer.param_proj, layer.back_proj, layer.out_proj))
    torch.testing.assert_close(layer.omega.abs().log10(), torch.linspace(-2, 0, 16).expand(8, 16))
    assert (layer.omega.sign()[:, 1:] == -layer.omega.sign()[:, :-1]).all()
    assert layer.e.std().item() == pytest.approx(0.5**0.5, rel=0.1)
    layer = make("transformer", "small").layers[3]
    for weight, scale in (
        (layer.qkv_proj.weight[:512], 1),
        (layer.out_proj.weight, 20**-0.5),
        (layer.mlp_out.weight, 20**-0.5),
    ):
        bound = (6 / sum(weight.shape)) ** 0.5 * scale
        assert 0.99 * bound < weight.abs().max() <= bound
    _, groups = train.make_optimizer(make("htransformer"), 1e-3, torch.device("cpu"))
    assert {"layers.*.omega", "layers.*.e"} <= set(groups["no_decay"])
    assert "layers.*.param_proj.weight" in groups["decay"]


def test_attention_sees_float32_angles_under_autocast(monkeypatch):
    """Above position 256 bf16 would merge neighbours; q and k are turned in float32."""
    seen = []

    def spy(q, k, v, *rest):
        seen.append((q, k))
        return kernels.born_attention(q, k, v, *rest)

    monkeypatch.setattr(htransformer, "born_attention", spy)
    layer = make("htransformer", L=1).layers[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        state = layer.init_state(1)
        layer(randn(1, 70, 128).float(), (state[0], 1000, None))
    (q, k), angle = seen[0], (1000 + torch.arange(70)).double().unsqueeze(-1) * layer.omega.double().unsqueeze(1)
    assert q.dtype == k.dtype == torch.float32
    back = htransformer.rotate(q.double(), -angle)  # the projection was rounded to bf16, and nothing since
    torch.testing.assert_close(back.bfloat16().double(), back, atol=1e-4, rtol=0)


@torch.no_grad()
def test_generation_under_autocast_outlives_a_chunk():
    for spec in ("htransformer", "htransformer:score=softmax", "transformer", "hmamba", "mamba"):
        model = make(spec, L=1).eval()
        with torch.autocast("cpu", torch.bfloat16):
            tokens = list(sample.generate(model, list(range(70)), 70))
        assert len(tokens) == 70


def test_training_step_keeps_no_keys(monkeypatch):
    """The state, which would hold every layer's keys and values, is left out of a training step, and only there."""
    model, idx = make("htransformer", L=2), text_batch(1, 20)
    assert model(idx, idx)[2] is None
    assert model(idx)[2] is not None
    assert model.eval()(idx, idx)[2] is not None
    with torch.no_grad():
        (_, _, (S, k, v)), *_ = model.train()(text_batch(1, 200), text_batch(1, 200))[2]
    assert S.shape == (1, 4, 256, 33)
    assert k.shape == v.shape == (1, 4, 200 % 64, 16, 2)
    assert k.untyped_storage().nbytes() == k.numel() * 4  # not a view that keeps the rest


# ----------------------------------------------------------------------------------------------------------------------
# Data


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of prepared corpora."""
    monkeypatch.setenv("NANOHILBERT_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_tree(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def text(size, seed=0):
    return np.random.RandomState(seed).bytes(size)


# ---- faults: each is one line on stderr and exit code 2, as `python data.py` prints it ----


def empty_file(tmp):
    (tmp / "x").touch()


def empty_folder(tmp):
    (tmp / "x").mkdir()


def hidden_files_only(tmp):
    write_tree(tmp / "x", {".hidden": text(9000), ".git/objects": text(9000)})


def short_file(tmp):
    (tmp / "x").write_bytes(text(2000))


def short_folder(tmp):
    write_tree(tmp / "x", {"a": text(1000), "b": text(1000)})


def fifo(tmp):
    os.mkfifo(tmp / "x")


def fifo_in_folder(tmp):
    write_tree(tmp / "x", {"a": text(9000)})
    os.mkfifo(tmp / "x" / "pipe")


def socket_in_folder(tmp):
    write_tree(tmp / "x", {"a": text(9000)})
    here = os.getcwd()
    os.chdir(tmp / "x")  # the name of a socket may have 107 bytes only
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind("sock")
    finally:
        os.chdir(here)


def link_to_device_in_folder(tmp):
    write_tree(tmp / "x", {"a": text(9000)})
    (tmp / "x" / "zero").symlink_to("/dev/zero")


def link_to_file_outside(tmp):
    write_tree(tmp, {"x/a": text(9000), "x-secret": text(9000)})  # "x-secret" begins with "x", yet is not in it
    (tmp / "x" / "b").symlink_to("../x-secret")


def link_to_folder_outside(tmp):
    write_tree(tmp, {"x/sub/a": text(9000), "home/secret": text(9000)})
    (tmp / "x" / "sub" / "b").symlink_to(tmp / "home")


def dangling_link(tmp):
    (tmp / "x").symlink_to("nowhere")


def dangling_link_in_folder(tmp):
    write_tree(tmp / "x", {"a": text(9000)})
    (tmp / "x" / "b").symlink_to("nowhere")


def link_to_itself_in_folder(tmp):
    write_tree(tmp / "x", {"a": text(9000)})
    (tmp / "x" / "b").symlink_to("b")


def cache_itself(tmp):
    write_tree(tmp / "cache", {"stdlib-0123456789ab.bin": text(9000)})
    (tmp / "x").symlink_to("cache")


FAULTS = [
    (None, ["nope"], "no corpus 'nope': give a name (stdlib"),
    (None, [""], "no corpus ''"),
    (None, ["no/such/file.txt"], "no corpus 'no/such/file.txt'"),
    (None, ["n" * 300], "File name too long"),
    (None, ["/dev/zero"], "not a regular file"),
    (None, ["stdlib", "--seq", "x"], "invalid int value: 'x'"),
    (None, ["stdlib", "--frobnicate"], "unrecognized arguments: --frobnicate"),
    (None, ["stdlib", "--seq", "0"], "--seq must be at least 1"),
    (None, ["stdlib", "--seq", "10000000"], "each split needs 10000001 bytes"),
    (empty_file, ["x"], "x is empty"),
    (empty_folder, ["x"], "x is empty"),
    (hidden_files_only, ["x"], "x is empty"),
    (short_file, ["x"], "each split needs 257 bytes, the shortest has 100"),
    (short_folder, ["x"], "bring 5,140 bytes in all (now 2,000)"),
    (fifo, ["x"], "not a regular file"),
    (fifo_in_folder, ["x"], "pipe is not a regular file"),
    (socket_in_folder, ["x"], "sock is not a regular file"),
    (link_to_device_in_folder, ["x"], "zero is a link out of"),
    (link_to_file_outside, ["x"], "b is a link out of"),
    (link_to_folder_outside, ["x"], "b is a link out of"),
    (dangling_link, ["x"], "no corpus 'x'"),
    (dangling_link_in_folder, ["x"], "No such file"),
    (link_to_itself_in_folder, ["x"], "cannot read x"),
    (cache_itself, ["x"], "where prepared corpora are kept"),
]


def data_py(*argv):
    """Runs `python data.py ARGV` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["data.py", *argv])
        data.command_line(data.main)


def refused(argv, capsys):
    """Runs `python data.py ARGV`, which has to fail properly, and returns its message."""
    with pytest.raises(SystemExit) as exit:
        data_py(*argv)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == ""
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("make, argv, message", FAULTS, ids=[m.__name__ if m else a[-1][:9] for m, a, _ in FAULTS])
def test_data_faults(make, argv, message, cache, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if make:
        make(tmp_path)
    assert message in refused(argv, capsys)
    assert not list(cache.glob("*.part"))


def deny(real, denied):
    """`real`, but without the permission for one path. (chmod does not stop root, who runs many a CI.)"""

    def call(path, *args, **kwargs):
        if isinstance(path, (str, Path)) and Path(path).resolve() == denied:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    return call


@pytest.mark.parametrize("argument, denied", [("x/a", "x/a"), ("x", "x/a"), ("x", "x/sub")])
def test_data_without_permission(argument, denied, cache, tmp_path, monkeypatch, capsys):
    write_tree(tmp_path / "x", {"a": text(9000), "sub/b": text(9000)})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.open", deny(open, tmp_path / denied))
    monkeypatch.setattr(Path, "iterdir", deny(Path.iterdir, tmp_path / denied))
    message = refused([argument], capsys)
    assert "cannot read" in message and "Permission denied" in message and str(denied) in message
    assert not cache.exists() or not list(cache.iterdir())


def test_data_every_split_holds_a_window(tmp_path):
    (tmp_path / "x").write_bytes(text(20 * 257))
    data.load(tmp_path / "x", 256)  # as many bytes as the message asks for are enough
    for size in range(5000, 5200):
        (tmp_path / "x").write_bytes(text(size))
        ends = [0, size * 90 // 100, size * 95 // 100, size]
        if min(np.diff(ends)) >= 257:
            assert data.load(tmp_path / "x", 256).split("val").size >= 257
        else:
            with pytest.raises(data.InputError, match="too short"):
                data.load(tmp_path / "x", 256)


# ---- files and folders ----


def test_data_file_is_mapped_where_it_lies(cache, tmp_path):
    (tmp_path / "book.txt").write_bytes(text(9000))
    (tmp_path / "link.txt").symlink_to("book.txt")
    for name in "book", "link":
        corpus = data.load(str(tmp_path / f"{name}.txt"), 64)
        assert (corpus.name, corpus.path, corpus.vocab_size) == (name, tmp_path / f"{name}.txt", 256)
        assert isinstance(corpus.tokens, np.memmap) and corpus.tokens.dtype == np.uint8
        assert corpus.tokens.tobytes() == text(9000)
        with pytest.raises(ValueError):
            corpus.tokens[0] = 0  # the user's file is never written
    assert not cache.exists()


@pytest.mark.parametrize(
    "file, name",
    [
        ("a b/c:d=é,.txt", "c_d___"),
        ("archive.tar.gz", "archive.tar"),
        ("...", "_"),
        (".vimrc", "vimrc"),
        ("n" * 99 + ".txt", "n" * 40),
    ],
)
def test_data_name_is_safe_for_a_folder(file, name, tmp_path):
    write_tree(tmp_path, {file: text(9000)})
    corpus = data.load(tmp_path / file, 64)
    assert corpus.name == name and corpus.path == tmp_path / file


def test_data_known_name_comes_before_a_path(cache, tmp_path, monkeypatch):
    (tmp_path / "stdlib").write_bytes(text(9000))
    monkeypatch.chdir(tmp_path)
    assert data.load("stdlib", 64).tokens.size > 1e6
    assert data.load("./stdlib", 64).tokens.size == 9000


def test_data_folder_is_joined_in_order_of_path(cache, tmp_path, monkeypatch):
    parts = {
        "a-b": b"1" * 500,
        "a.txt": b"2" * 500,
        "a/z/y": b"3" * 500,
        "a0": b"4" * 500,
        "tests/x": b"5" * 500,
        "é": b"6" * 500,
    }
    folder = write_tree(tmp_path / "folder", dict(reversed(parts.items())))
    write_tree(folder, {".hidden": b"h" * 500, ".git/config": b"h" * 500, "a/.DS_Store": b"h" * 500, "empty": b""})
    corpus = data.load(folder, 16)
    assert corpus.tokens.tobytes() == b"".join(parts.values())
    assert corpus.name == "folder" and corpus.path.parent == cache
    assert isinstance(corpus.tokens, np.memmap)
    monkeypatch.chdir(folder)
    assert data.load(".", 16).path == corpus.path


def test_data_links_that_stay_inside(cache, tmp_path):
    folder = write_tree(tmp_path / "x", {"a/1": b"1" * 900, ".store/2": b"2" * 900})
    (folder / "b").symlink_to(".store/2")  # a file: read
    (folder / "a" / "loop").symlink_to(folder)  # a folder: its files are read under their own names already
    assert data.load(folder, 16).tokens.tobytes() == b"1" * 900 + b"2" * 900


def test_data_cache_does_not_feed_on_itself(tmp_path, monkeypatch):
    folder = write_tree(tmp_path / "x", {"a": text(9000)})
    monkeypatch.setenv("NANOHILBERT_DATA", str(folder / "cache"))
    first = data.load(folder, 16)
    assert first.path.parent == folder / "cache"
    assert data.load(folder, 16).path == first.path
    assert first.tokens.size == 9000


def test_data_folder_is_prepared_once(cache, tmp_path):
    folder = write_tree(tmp_path / "x", {"a": text(9000)})
    inode = data.load(folder, 16).path.stat().st_ino
    assert data.load(folder, 16).path.stat().st_ino == inode


@pytest.mark.parametrize("change", ["content", "name", "more"])
def test_data_changed_folder_is_prepared_again(change, cache, tmp_path):
    folder = write_tree(tmp_path / "x", {"a": text(5000), "b": text(4000, seed=1)})
    before = data.load(folder, 16)
    if change == "content":  # of equal size, a microsecond later
        info = (folder / "a").stat()
        (folder / "a").write_bytes(text(5000, seed=2))
        os.utime(folder / "a", ns=(info.st_atime_ns, info.st_mtime_ns + 1000))
    elif change == "name":
        (folder / "b").rename(folder / "c")
    else:
        (folder / "c").write_bytes(b"more")
    after = data.load(folder, 16)
    assert after.path != before.path
    assert after.tokens.tobytes() == b"".join(p.read_bytes() for p in sorted(folder.iterdir()))
    assert before.tokens.tobytes() == text(5000) + text(4000, seed=1)  # a run that goes on keeps its data


def test_data_equal_folders_elsewhere_do_not_collide(cache, tmp_path):
    for place in "here", "there":
        write_tree(tmp_path / place / "x", {"a": text(9000)})
        os.utime(tmp_path / place / "x" / "a", ns=(1, 1))
    assert data.load(tmp_path / "here/x", 16).path != data.load(tmp_path / "there/x", 16).path


@pytest.mark.parametrize("size", [0, 4096, 9001])
def test_data_damaged_cache_is_prepared_again(size, cache, tmp_path):
    folder = write_tree(tmp_path / "x", {"a": text(9000)})
    path = data.load(folder, 16).path
    os.truncate(path, size)
    corpus = data.load(folder, 16)
    assert corpus.path == path and corpus.tokens.tobytes() == text(9000)


def test_data_killed_while_preparing(cache, tmp_path):
    folder = write_tree(tmp_path / "x", {"a": text(9000), "b": text(9000)})
    code = (
        "import data, os, signal, sys; data.os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL); "
        "data.load(sys.argv[1], 16)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=Path(data.__file__).parent, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [p.suffix for p in cache.iterdir()] == [".part"]  # it was killed half-way, and left no corpus
    assert data.load(folder, 16).tokens.tobytes() == text(9000) * 2


def test_data_interrupted_while_preparing(cache, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    folder = write_tree(tmp_path / "x", {"a": text(9000)})
    monkeypatch.setattr(data.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        data.load(folder, 16)
    assert not list(cache.iterdir())


def test_data_disk_full(cache, tmp_path, capsys):
    folder = write_tree(tmp_path / "x", {"a": text(300_000), "b": text(300_000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))  # writing more fails, as on a full disk
    try:
        message = refused([str(folder)], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot write" in message and "600,000 bytes" in message and "NANOHILBERT_DATA" in message
    assert not list(cache.iterdir())


def test_data_cache_folder_cannot_be_made(tmp_path, monkeypatch, capsys):
    folder = write_tree(tmp_path / "x", {"a": text(9000)})
    monkeypatch.setenv("NANOHILBERT_DATA", str(folder / "a" / "cache"))
    assert "NANOHILBERT_DATA" in refused([str(folder)], capsys)


def test_data_two_processes_prepare_at_once(cache, tmp_path, monkeypatch):
    folder = write_tree(tmp_path / "x", {"a": text(5000), "b": text(4000)})
    read_chunks, others = data.read_chunks, []

    def meanwhile(path):  # the other one starts after we did, and ends before us
        if not others:
            others.append(None)
            others[0] = data.load(folder, 16)
        yield from read_chunks(path)

    monkeypatch.setattr(data, "read_chunks", meanwhile)
    ours = data.load(folder, 16)
    for corpus in ours, others[0]:
        assert corpus.tokens.tobytes() == text(5000) + text(4000)
    assert list(cache.iterdir()) == [ours.path]


def test_data_folder_that_changes_while_it_is_read(cache, tmp_path, monkeypatch):
    folder = write_tree(tmp_path / "x", {"a": text(5000)})
    monkeypatch.setattr(data, "read_chunks", lambda path: iter([text(5000), b"grown"]))
    with pytest.raises(data.InputError, match="changed while it was read"):
        data.load(folder, 16)
    assert not list(cache.iterdir())


def test_data_stdlib_is_the_library_without_its_tests(cache, tmp_path, monkeypatch):
    kept = {"a.py": b"1" * 900, "b/c.py": b"2" * 900, "b_test.py": b"3" * 900, "test.py": b"4" * 900}
    root = write_tree(tmp_path / "python", dict(reversed(kept.items())))
    for folder in "site-packages", "dist-packages", "test", "b/tests", "b/idle_test", ".hidden":
        write_tree(root, {f"{folder}/x.py": b"x" * 900, f"{folder}/deep/x.py": b"x" * 900})
    write_tree(root, {"b/c.pyc": b"x" * 900, "lib.so": b"x" * 900, "LICENSE": b"x" * 900})
    write_tree(tmp_path, {"etc/custom.py": b"5" * 900})
    (root / "z.py").symlink_to(tmp_path / "etc" / "custom.py")  # a distribution's own: Python's folder is trusted
    (root / "broken.py").symlink_to("nowhere")
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    assert data.load("stdlib", 16).tokens.tobytes() == b"".join(kept.values()) + b"5" * 900


def test_data_stdlib_of_this_python(cache):
    first = data.load("stdlib", 256)
    content = first.tokens.tobytes()
    first.path.unlink()
    second = data.load("stdlib", 256)
    assert second.path == first.path and second.tokens.tobytes() == content
    assert first.name == "stdlib" and first.path.name.startswith("stdlib-") and first.path.suffix == ".bin"
    root = Path(os.__file__).parent
    names = [str(p.relative_to(root)) for p in root.rglob("*.py") if p.is_file()]
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = sorted(n for n in names if not skip & set(Path(n).parts) and not any(p[0] == "." for p in Path(n).parts))
    assert hashlib.sha256(b"".join((root / n).read_bytes() for n in names)).hexdigest() == second.sha256


def test_data_sha256(cache, tmp_path):
    size = (1 << 20) + 7  # more than one chunk
    folder = write_tree(tmp_path / "x", {"a": text(size), "b": text(size, seed=1)})
    assert data.load(folder / "a", 16).sha256 == hashlib.sha256(text(size)).hexdigest()
    assert data.load(folder, 16).sha256 == hashlib.sha256(text(size) + text(size, seed=1)).hexdigest()


def test_data_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOHILBERT_DATA", str(tmp_path / "elsewhere"))
    assert data.cache_dir() == tmp_path / "elsewhere"
    for unset in True, False:
        monkeypatch.delenv("NANOHILBERT_DATA") if unset else monkeypatch.setenv("NANOHILBERT_DATA", "")
        assert data.cache_dir() == Path(data.__file__).resolve().parent / "data"


def test_data_command_line(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(data.progress.keywords, "delay", 0)  # the bars must stay away for want of a terminal
    data_py()
    out, err = capsys.readouterr()
    assert "not prepared yet" in out and err == "" and not cache.exists()
    data_py("stdlib", "--seq", "64")
    out, err = capsys.readouterr()
    corpus = data.load("stdlib", 64)
    train = corpus.split("train")
    assert corpus.sha256 in out and f"{len(corpus.tokens):,} bytes" in out and err == ""
    assert f"train  {len(train):,} bytes, {(len(train) - 1) // 64:,} windows of 64" in out
    data_py()
    out, _ = capsys.readouterr()
    assert "not prepared" not in out and "prepared" in out and f"{len(corpus.tokens):,}" in out
    with pytest.raises(SystemExit) as exit:
        data_py("--help")
    assert exit.value.code == 0 and "NANOHILBERT_DATA" in capsys.readouterr().out


# ---- splits and windows ----


@pytest.mark.parametrize("size", [1000, 1001, 1019, 99_999])
def test_data_splits(size, tmp_path):
    (tmp_path / "x").write_bytes(text(size))
    corpus = data.load(tmp_path / "x", 8)
    splits = [corpus.split(name) for name in ("train", "val", "test")]
    assert b"".join(s.tobytes() for s in splits) == text(size)
    assert np.abs(np.array([len(s) for s in splits]) - np.array([0.90, 0.05, 0.05]) * size).max() <= 1
    assert all(np.shares_memory(s, corpus.tokens) for s in splits)
    with pytest.raises(data.InputError, match="train, val, test"):
        corpus.split("valid")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("seq", [1, 2, 7, 64])
def test_data_windows(seq, dtype, tmp_path):
    for size in {seq + 1, 5 * seq, 5 * seq + 1, 6 * seq, 257}:
        if size < seq + 1:
            continue
        (tmp_path / "x").write_bytes(text(size * np.dtype(dtype).itemsize))
        tokens = np.memmap(tmp_path / "x", dtype=dtype, mode="r")
        n = data.num_windows(tokens, seq)
        assert n == len([k for k in range(size) if k * seq + seq + 1 <= size])
        index = np.random.RandomState(0).permutation(np.append(np.arange(n), n - 1))  # one of them twice
        x, y = data.get_windows(tokens, seq, index)
        for a, start in (x, 0), (y, 1):
            naive = [tokens[k * seq + start : k * seq + start + seq].tolist() for k in index]
            assert a.dtype == torch.int64 and a.is_contiguous() and a.tolist() == naive
        with pytest.raises(IndexError):
            data.get_windows(tokens, seq, [n])
        x, y = data.get_windows(tokens, seq, np.arange(0))
        assert x.shape == y.shape == (0, seq)


# ---- the data order ----


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 65_536, 70_000])
def test_data_order_is_numpys_frozen_permutation(n):
    for seed, epoch in (0, 0), (1337, 3), (2**32 - 1, 1):
        expected = np.random.RandomState([seed, epoch]).permutation(n)
        assert np.array_equal(data.permutation(n, seed, epoch), expected)


def test_data_order_of_old_runs():
    """Written down once: a change here changes every run made before it."""
    assert data.train_index(10, 1337, 0, 12).tolist() == [3, 4, 5, 9, 7, 1, 6, 0, 8, 2, 0, 8]


def test_data_order_is_without_replacement():
    n, batch = 103, 8
    order = np.concatenate([data.train_index(n, 1, step, batch) for step in range(3 * n)])
    epochs = order.reshape(-1, n)  # epochs follow one another without a gap: batches straddle them
    assert len(epochs) == 24
    for e, epoch in enumerate(epochs):
        assert np.array_equal(epoch, np.random.RandomState([1, e]).permutation(n))
        assert np.array_equal(np.sort(epoch), np.arange(n))
    assert len({e.tobytes() for e in epochs}) == 24
    assert not np.array_equal(data.train_index(n, 2, 0, n), epochs[0])


def test_data_order_depends_on_the_position_alone():
    """So rank, micro-batch and where a run was resumed do not matter."""
    for n in 5, 64, 100:
        whole = data.train_index(n, 3, 0, 240)  # a batch of several epochs, too
        assert whole.dtype == np.int64 and whole.shape == (240,)
        for batch in 1, 8, 48, 120:
            steps = list(range(240 // batch))
            np.random.RandomState(0).shuffle(steps)
            for step in steps:
                assert np.array_equal(data.train_index(n, 3, step, batch), whole[step * batch : (step + 1) * batch])


def test_data_order_is_a_pure_function():
    first = data.train_index(50, 4, 7, 16)
    again = first.copy()
    first[:] = 0  # the caller's own copy, not the cached permutation
    assert np.array_equal(data.train_index(50, 4, 7, 16), again)
    data.permutation.cache_clear()
    np.random.seed(99)  # numpy's global generator is neither used ...
    assert np.array_equal(data.train_index(50, 4, 7, 16), again)
    assert np.random.randint(10**6) == np.random.RandomState(99).randint(10**6)  # ... nor moved on


def test_data_order_is_not_drawn_again_at_every_step():
    data.permutation.cache_clear()
    for step in range(100):
        data.train_index(1000, 5, step, 32)
    assert data.permutation.cache_info().misses == 4


def test_data_eval_windows():
    assert data.eval_index(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert data.eval_index(10, 3).tolist() == [0, 3, 6]
    assert data.eval_index(3, 20).tolist() == [0, 1, 2]
    assert data.eval_index(7, 0).tolist() == []
    index = data.eval_index(123_456_789, 5120)
    assert index.dtype == np.int64 and index[0] == 0 and set(np.diff(index)) == {24112, 24113}


# ---- memory: a corpus is never loaded ----


def test_data_memory_stays_small(cache, tmp_path):
    with open(tmp_path / "big", "wb") as f:
        f.truncate(8 << 30)  # 8 GiB without a block on the disk
    (tmp_path / "x").mkdir()
    with open(tmp_path / "x" / "a", "wb") as f:
        f.truncate(64 << 20)
    tracemalloc.start()
    corpus = data.load(tmp_path / "big", 256)
    tokens = corpus.split("train")
    n = data.num_windows(tokens, 256)
    x, y = data.get_windows(tokens, 256, np.append(data.eval_index(n, 29), n - 1))
    assert len(data.load(tmp_path / "x", 256).sha256) == 64
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n == (8 * 2**30 * 90 // 100 - 1) // 256 and x.shape == y.shape == (30, 256)
    assert peak < 20e6


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_data_map_is_read_at_random(tmp_path):
    """Else the kernel reads ahead, up to megabytes for one window of a corpus larger than memory."""
    (tmp_path / "x").write_bytes(text(9000))
    corpus = data.load(tmp_path / "x", 16)
    mapping = Path("/proc/self/smaps").read_text().partition(str(corpus.path))[2]
    assert " rr " in mapping.partition("VmFlags:")[2].partition("\n")[0] + " "


# ----------------------------------------------------------------------------------------------------------------------
# Training

SMALL = ["--model", "hmamba:D=32:L=2:H=2:N=4", "--data", "text.txt", "--seq", "32", "--batch", "8", "--micro", "4",
         "--steps", "8", "--eval_every", "2", "--eval_seqs", "16", "--ckpt_every", "4", "--log_every", "1"]  # fmt: skip


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Runs train, sample, report or data as from the command line, in an empty folder with a text.txt.

    Returns the exit code and what was printed to stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOHILBERT_DATA", str(tmp_path / "cache"))
    words = np.random.RandomState(0).choice(["phase ", "state ", "gate ", "to be or not\n", "0.5 "], 12_000)
    (tmp_path / "text.txt").write_text("".join(words))
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    train.stop_signals.clear()

    def run(module, *argv):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, argv)])
        train.stop_signals.clear()
        code = 0
        try:
            data.command_line(module.main)
        except SystemExit as e:
            code = e.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    yield run
    for s, handler in handlers.items():
        signal.signal(s, handler)


def weights(path):
    checkpoint = sample.read_checkpoint(path)
    return checkpoint["model"] | {
        f"{k}.{name}": x for k, state in checkpoint["optimizer"]["state"].items() for name, x in state.items()
    }


def course(folder):
    """What a run logged, without the times."""
    events = [e for e in report.read_log(folder)[1:] if e["event"] != "resume"]
    return [{k: v for k, v in e.items() if k not in ("time_s", "tok_s")} for e in events]


def assert_same_run(a, b):
    """Bit for bit: log but for times, weights, optimizer, random numbers, text; and b has no torn line, no litter."""
    assert course(a) == course(b)
    x, y = weights(f"{a}/last.pt"), weights(f"{b}/last.pt")
    assert x.keys() == y.keys()
    assert all(torch.equal(x[k], y[k]) for k in x)
    x, y = sample.read_checkpoint(f"{a}/last.pt"), sample.read_checkpoint(f"{b}/last.pt")
    assert (x["step"], x["best"], x["optimizer"]["param_groups"]) == (
        y["step"],
        y["best"],
        y["optimizer"]["param_groups"],
    )
    assert torch.equal(x["rng"]["cpu"], y["rng"]["cpu"])
    assert Path(a, "sample.txt").read_bytes() == Path(b, "sample.txt").read_bytes()
    assert all(json.loads(line)["event"] for line in Path(b, "log.jsonl").read_text().splitlines())
    assert {p.name for p in Path(b).iterdir()} <= {
        "log.jsonl",
        "last.pt",
        "prev.pt",
        "best.pt",
        "sample.txt",
        "curve.png",
    }


def assert_nearly_same_course(a, b):
    """Equal up to the order of sums; losses to 1e-6."""
    for x, y in zip(course(a), course(b), strict=True):
        assert (x["event"], x["step"]) == (y["event"], y["step"])
        for key in x.keys() & {"loss", "val_loss"}:
            assert x[key] == pytest.approx(y[key], rel=0, abs=1e-6)
        for key in x.keys() & {"grad_norm", "layers"}:
            assert x[key] == pytest.approx(y[key], rel=1e-4)


def test_train_writes_a_whole_run(program, tmp_path):
    code, out, err = program(train, *SMALL)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    folder = tmp_path / "runs/hmamba_D_32_L_2_H_2_N_4-text-tiny-s1"
    assert {p.name for p in folder.iterdir()} == {
        "log.jsonl", "last.pt", "prev.pt", "best.pt", "sample.txt", "curve.png"
    }  # fmt: skip
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    events = report.read_log(folder)
    assert all({"event", "step", "tokens", "time_s"} <= e.keys() for e in events)
    assert [e["step"] for e in events if e["event"] == "train"] == list(range(1, 9))
    assert [e["step"] for e in events if e["event"] == "val"] == [0, 2, 4, 6, 8]
    assert [e["step"] for e in events if e["event"] == "grad"] == [2, 4, 6, 8]
    assert [e["event"] for e in events[-2:]] == ["final", "sample"]
    header, first, final = events[0], events[1], events[-2]
    text = (tmp_path / "text.txt").read_bytes()
    assert header["data"] == {"name": "text", "size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    assert header["params"]["total"] == sum(x.numel() for x in sample.read_checkpoint(folder)["model"].values())
    assert header["settings"]["lr"] == 2e-3  # from the protocol
    assert header["versions"]["torch"] == torch.__version__
    assert len(header["weight_decay"]["decay"]) + len(header["weight_decay"]["no_decay"]) == 12
    assert first["val_loss"] == pytest.approx(math.log(256), abs=0.1)
    assert first["n_tokens"] == 16 * 32
    assert final["n_tokens"] == (len(text) * 5 // 100 - 1) // 32 * 32
    assert final["val_loss"] < first["val_loss"] - 0.3
    grad = next(e for e in events if e["event"] == "grad")
    assert len(grad["layers"]) == 2
    assert 0 < min(grad["layers"]) < max(e["grad_norm"] for e in events if e["event"] == "train")
    assert (folder / "sample.txt").read_text(encoding="utf-8") == events[-1]["text"]
    assert sample.read_checkpoint(folder / "best.pt")["best"] == final["best"]

    assert program(train, *SMALL, "--steps", 2)[0] == 0  # a second run disturbs nothing
    assert {p.name for p in tmp_path.glob("runs/*")} == {folder.name, f"{folder.name}-2"}
    assert len(report.read_log(folder)) == len(events)


def test_two_runs_of_one_command_give_the_same_log(program):
    logs = []
    for folder in ("runs/hmamba_D_32_L_2_H_2_N_4-text-tiny-s1", "runs/hmamba_D_32_L_2_H_2_N_4-text-tiny-s1-2"):
        assert program(train, *SMALL)[0] == 0
        logs.append([{k: v for k, v in e.items() if k not in ("time_s", "tok_s")} for e in report.read_log(folder)])
    assert logs[0] == logs[1]  # the header, and every digit of the losses, norms and the text


@pytest.fixture
def no_curves(monkeypatch):
    """Drawing them takes longer than a small run."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_resume_continues_bit_for_bit(program, no_curves):
    for name in sample.MODELS:
        spec = f"{name}:D=32:L=2:H=2:N=4" + ":head=8" * (name == "transformer")
        assert program(train, *SMALL, "--model", spec, "--out", f"{name}-straight")[0] == 0
        assert program(train, *SMALL, "--model", spec, "--out", f"{name}-cut", "--stop_at", 3)[0] == 0
        assert sample.read_checkpoint(f"{name}-cut/last.pt")["step"] == 3
        code, _, _ = program(train, "--resume", f"{name}-cut", "--stop_at", 5)
        assert code == 0
        assert program(train, "--resume", f"{name}-cut/last.pt")[0] == 0
        assert_same_run(f"{name}-straight", f"{name}-cut")
        assert [e["step"] for e in report.read_log(f"{name}-cut") if e["event"] == "resume"] == [3, 5]
    code, _, err = program(train, "--resume", "mamba-cut")
    assert code == 2
    assert "the run is complete" in err
    code, _, err = program(train, "--resume", "mamba-cut", "--stop_at", 4)
    assert code == 2
    assert "is at step 8 of 4 already: give a later --stop_at" in err


def test_run_killed_in_its_last_validation_can_be_finished(program):
    assert program(train, *SMALL, "--out", "straight")[0] == 0
    assert program(train, *SMALL, "--out", "cut")[0] == 0
    events = report.read_log("cut")
    assert [e["event"] for e in events[-2:]] == ["final", "sample"]
    Path("cut/log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events[:-2]))
    assert program(train, "--resume", "cut")[0] == 0
    assert_same_run("straight", "cut")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signals_save_and_stop(program, monkeypatch, name):
    assert program(train, *SMALL, "--out", "straight")[0] == 0
    real = train.learning_rate

    def interrupt(step, s):
        if step == 4:
            os.kill(os.getpid(), getattr(signal, name))
        return real(step, s)

    monkeypatch.setattr(train, "learning_rate", interrupt)
    code, out, _ = program(train, *SMALL, "--out", "cut")
    assert code == 128 + getattr(signal, name)
    assert f"{name}: stopping after this step" in out
    assert "stopped after step 5; go on with: python train.py --resume cut" in out
    assert sample.read_checkpoint("cut/last.pt")["step"] == 5
    monkeypatch.setattr(train, "learning_rate", real)
    assert program(train, "--resume", "cut")[0] == 0
    assert_same_run("straight", "cut")


KILLS = """
import json, os, random, signal, sys, time
import data, train
import torch._dynamo  # what the optimizer imports, once for all of them

sys.modules["matplotlib"] = None
real = {name: getattr(os, name) for name in ("replace", "fsync")}

def run(argv, seconds=None, calls=None):
    # train.py in a process of its own, killed after some seconds, or in place of its n-th call of os.replace or os.fsync.
    child = os.fork()
    if child:
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    def counted(name):
        def call(*args):
            nonlocal calls
            calls -= 1
            if calls == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*args)
        return call
    if calls is not None:
        os.replace, os.fsync = counted("replace"), counted("fsync")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["train.py", *argv]
    try:
        data.command_line(train.main)
    except SystemExit as e:
        os._exit(e.code)
    os._exit(0)

train.torch.set_num_threads(1)
argv, rng, start = sys.argv[1:], random.Random(1), time.time()
assert run([*argv, "--out", "straight"]) == 0
duration = time.time() - start
for i in range(20):
    cut = [*argv, "--out", f"cut{i}", "--resume", f"cut{i}"]
    status = run(cut, calls=rng.randrange(1, 35)) if i % 2 else run(cut, seconds=rng.random() * duration)
    log = f"cut{i}/log.jsonl"
    if os.path.exists(log) and b'"sample"' not in open(log, "rb").read():
        with open(log, "a") as f:
            f.write('{"event": "train", "step": 4')  # what a kill in the middle of a line leaves
    try:
        step = train.sample.read_checkpoint(f"cut{i}", ("last.pt", "prev.pt"))["step"]
        logged = max(e["step"] for e in train.report.read_log(f"cut{i}"))
    except train.InputError:
        step, logged = None, 0
    print(json.dumps([status, step, logged, run(cut)]), flush=True)
"""


def test_second_signal_stops_at_once(program, monkeypatch):
    def interrupt(step, s):
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("went on")
        return 1e-3

    monkeypatch.setattr(train, "learning_rate", interrupt)
    assert program(train, *SMALL, "--out", "cut")[0] == 130
    assert sample.read_checkpoint("cut/last.pt")["step"] == 4  # the regular one


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_out_of_memory_is_one_line(program, monkeypatch, device):
    def allocate(*_):
        if device == "CUDA":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return torch.empty(2**50)  # a petabyte: the CPU's allocator refuses

    monkeypatch.setattr(train, "learning_rate", allocate)
    line = "error: out of memory: set --checkpointing, lower --micro (same result) or --seq\n"
    assert program(train, *SMALL, "--out", "run")[::2] == (2, line)
    assert sample.read_checkpoint("run/last.pt")["step"] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_run_killed_at_twenty_moments_resumes(program):
    """kill -9 at random times, and before random renames and flushes to the disk: the same command ends it, the same."""
    argv = [sys.executable, "-c", KILLS, *SMALL, "--steps", "10"]
    done = subprocess.run(argv, env=ENV | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kills) == 20
    for i, (status, step, logged, again) in enumerate(kills):
        assert (status, again) in ((-signal.SIGKILL, 0), (0, 0)), done.stderr
        assert logged - (step or 0) <= 4  # --ckpt_every
        assert_same_run("straight", f"cut{i}")
    assert sum(status != 0 for status, *_ in kills) >= 15
    assert {None, 0, 4, 8} <= {step for _, step, _, _ in kills}  # before the first checkpoint, and after each


def test_run_stopped_before_its_first_step_resumes(program, monkeypatch):
    assert program(train, *SMALL, "--out", "straight")[0] == 0

    def interrupt(step, s):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train, "learning_rate", interrupt)
        assert program(train, *SMALL, "--out", "cut")[0] == 130
    assert sample.read_checkpoint("cut/last.pt")["step"] == 0
    assert program(train, "--resume", "cut")[0] == 0
    assert_same_run("straight", "cut")


@pytest.mark.parametrize("damage", ["missing", "line", "bytes"])
def test_damaged_log_costs_its_damaged_lines_alone(program, damage):
    assert program(train, *SMALL, "--out", "straight")[0] == 0
    assert program(train, *SMALL, "--out", "cut", "--stop_at", 4)[0] == 0
    log = Path("cut/log.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    if damage == "missing":
        log.unlink()
    else:
        log.write_bytes(
            b"".join([*lines[:3], b"garbage\n\n5\n{}\n" if damage == "line" else b"\xff\xfe\n", *lines[3:]])
        )
    code, _, err = program(train, "--resume", "cut")
    assert code == 0
    assert ("unreadable lines" in err) == (damage != "missing")
    if damage == "missing":  # weights as they should be, and a log of its own from there on
        x, y = weights("straight/last.pt"), weights("cut/last.pt")
        assert all(torch.equal(x[k], y[k]) for k in x)
        assert report.read_log("cut")[0]["event"] == "header"
    else:
        assert_same_run("straight", "cut")


def test_resume_from_another_folder(program, tmp_path, monkeypatch):
    """A relative --data is remembered as an absolute one; where the file has moved, --data says where it is now."""
    assert program(train, *SMALL, "--out", "run", "--stop_at", 2)[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert program(train, "--resume", "../run", "--stop_at", 4)[0] == 0
    (tmp_path / "text.txt").rename("moved.txt")
    code, _, err = program(train, "--resume", "../run")
    assert code == 2
    assert "text.txt" in err
    assert program(train, "--resume", "../run", "--data", "moved.txt")[0] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_output_that_cannot_be_written_ends_no_run(program):
    """An ASCII terminal, a reader that goes away, no stdout at all, a full disk behind it."""
    command = f"{sys.executable} {ROOT / 'train.py'} {' '.join(SMALL)} --steps 2"
    for i, shell in enumerate(("PYTHONIOENCODING=ascii {}", "{} | head -n 1", "{} >&-", "{} 2>&-", "{} > /dev/full")):
        if "/dev/full" in shell and not Path("/dev/full").exists():
            continue
        line = "set -o pipefail; " + shell.format(f"{command} --out run{i}")
        done = subprocess.run(["bash", "-c", line], env=ENV, capture_output=True, check=False)
        assert b"Traceback" not in done.stderr
        assert report.read_log(f"run{i}")[-1]["event"] == "sample", shell


def test_a_last_step_that_diverges_is_no_result(program):
    code, _, err = program(train, *SMALL, "--steps", 1, "--lr", "1e30", "--schedule", "constant", "--out", "run")
    assert code == 2
    assert "the loss after step 1 is nan" in err
    assert "the last good checkpoint is run/prev.pt" in err
    assert not any(e["event"] == "final" for e in report.read_log("run"))
    code, _, err = program(sample, "run/last.pt")
    assert code == 2
    assert "scores are not finite" in err


def test_gradients_are_clipped(program, monkeypatch):
    """With a bound of almost 0 AdamW's epsilon swallows the updates."""
    assert program(train, *SMALL, "--out", "run")[0] == 0
    monkeypatch.setattr(train, "CLIP", 1e-12)
    assert program(train, *SMALL, "--out", "clipped")[0] == 0
    first, last, clipped = (report.read_log(r)[i] for r, i in (("run", 1), ("run", -2), ("clipped", -2)))
    assert last["val_loss"] < first["val_loss"] - 0.3
    assert clipped["val_loss"] > first["val_loss"] - 0.05


def test_files_are_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "x"
    data.replace_file(path, lambda f: f.write(b"old"))

    def fail(f):
        f.write(b"ne")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        data.replace_file(path, fail)
    moved = []  # a crash before the renaming
    monkeypatch.setattr(os, "fsync", lambda fd: moved.append(os.fstat(fd).st_size))
    monkeypatch.setattr(os, "replace", lambda a, b: moved.append((Path(a).read_bytes(), b)))
    data.replace_file(path, lambda f: f.write(b"new"))
    assert path.read_bytes() == b"old"
    assert moved == [3, (b"new", path)]  # all of it on the disk, then renamed
    moved.clear()
    data.replace_file(path, lambda f: f.write(b"new"), keep=tmp_path / "before")
    assert moved == [3, (b"old", tmp_path / "before"), (b"new", path)]
    assert list(tmp_path.iterdir()) == [path]


def test_training_without_matplotlib(program, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = program(train, *SMALL, "--steps", 1, "--out", "run")
    assert code == 0
    assert "note: no curve.png" in out


def test_micro_batches_change_nothing(program):
    """The logged loss and the gradient are means over the whole step; also where the last micro-batch is smaller."""
    for micro in (8, 3):
        assert program(train, *SMALL, "--micro", micro, "--steps", 3, "--out", f"m{micro}")[0] == 0
    assert_nearly_same_course("m8", "m3")


def torchrun(*argv, **env):
    """Two ranks. More than a minute counts as hanging: a rank that is gone for good would be waited for far longer."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *argv]
    return subprocess.run(command, env=ENV | env, capture_output=True, text=True, check=False, timeout=60)


RANKS = """
import os, signal, sys
import data, torch, train

real, life = train.learning_rate, int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def learning_rate(step, s):
    fault = os.environ["FAULT"]
    if fault == "kill and preempt" and (life, train.rank, step) == (0, 1, 5):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "kill and preempt" and (life, train.rank, step) == (1, 0, 6):
        os.kill(os.getppid(), signal.SIGTERM)  # torchrun, which hands it on
    if fault == "memory" and (train.rank, step) == (1, 3):
        torch.empty(2**50)
    return real(step, s)

def no_writing(event, args):
    if event == "open" and "run" in str(args[0]) and (args[2] & (os.O_WRONLY | os.O_RDWR)) and ".pyc" not in str(args[0]):
        print("rank 1 writes", args[0], file=sys.stderr)

train.learning_rate = learning_rate
if train.rank:
    sys.addaudithook(no_writing)
data.command_line(train.main)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_two_processes_survive(program, tmp_path):
    """A rank killed, torchrun restarting both, then SIGTERM to torchrun, and the same command again: the course of a run that
    nothing happened to, bit for bit; rank 0 alone writes. And a rank that runs out of memory ends both, with its reason."""
    (tmp_path / "ranks.py").write_text(RANKS)
    path = {"PYTHONPATH": str(ROOT)}
    argv = [*SMALL, "--micro", "2"]
    straight = torchrun("ranks.py", *argv, "--out", "run0", **path, FAULT="")
    assert straight.returncode == 0, straight.stderr
    assert "rank 1 writes" not in straight.stderr
    cut = ["--max-restarts", "1", "ranks.py", *argv, "--out", "run1", "--resume", "run1"]
    path["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    killed = torchrun(*cut, **path, FAULT="kill and preempt")
    assert killed.returncode != 0
    assert killed.stdout.count("parameters on cpu") == 2  # the first start and the restart
    assert "SIGTERM: stopping after this step" in killed.stdout
    assert "stopped after step 7; go on with: python train.py --resume run1" in killed.stdout
    assert sample.read_checkpoint("run1/last.pt")["step"] == 7
    assert [e["step"] for e in report.read_log("run1") if e["event"] == "resume"] == [4]
    again = torchrun(*cut, **path, FAULT="")
    assert again.returncode == 0, again.stderr
    assert_same_run("run0", "run1")
    died = torchrun("ranks.py", *argv, "--out", "run2", **path, FAULT="memory")
    assert died.returncode != 0
    assert "error on rank 1: out of memory: set --checkpointing, lower --micro (same result) or --seq\n" in died.stderr
    assert "error: another rank ended, it or torchrun says why" in died.stderr or "SIGTERM" in died.stderr
    assert 'train.py", line' not in died.stderr  # no traceback of ours


def test_restarts_with_torchruns_own_store_are_refused(program, monkeypatch):
    monkeypatch.setattr(train, "world", 2)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    code, _, err = program(train, *SMALL)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: --max-restarts needs --rdzv-backend c10d and TORCH_DISABLE_SHARE")


def test_one_command_begins_goes_on_and_ends(program, tmp_path):
    command = [*SMALL, "--out", "run", "--resume", "run"]
    assert program(train, *command, "--stop_at", 3)[0] == 0
    assert program(train, *command)[0] == 0
    before = {p: p.read_bytes() for p in Path("run").iterdir()}
    code, out, err = program(train, *command)
    assert (code, out, err) == (0, "run/last.pt is at step 8 of 8 already: the run is complete\n", "")
    assert {p: p.read_bytes() for p in Path("run").iterdir()} == before
    code, _, err = program(train, *command, "--lr", 1)
    assert code == 2
    assert "--lr 1.0 differs" in err
    for path in Path("run").glob("*.pt"):
        path.unlink()
    code, _, err = program(train, *command)  # a log alone is a result, too
    assert code == 2
    assert "holds the log of a run, but no checkpoint" in err
    for argv in (
        [*SMALL, "--out", "text.txt", "--resume", "text.txt"],
        [*command, "--seeds", "1,2"],
        [*command[:-1], "no"],
    ):
        assert program(train, *argv)[0] == 2


def test_two_processes_equal_accumulation(program, tmp_path):
    """torchrun with two ranks and two micro-batches each equals one process with four; a sweep of every cell."""
    small = ":D=32:L=1:H=2:N=4"
    cells = [
        f"htransformer{small}:field={field}:score={score}"
        for field in ("complex", "real")
        for score in ("born", "softmax")
    ]
    models = ",".join([f"hmamba{small}", f"mamba{small}", *cells, f"transformer{small}:head=8"])
    argv = [*SMALL, "--model", models, "--micro", "2", "--steps", "3"]
    assert program(train, *argv, "--out", "one")[0] == 0
    done = torchrun(ROOT / "train.py", *argv, "--out", "two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("steps of 256 tokens") == 7  # one rank speaks
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "two").iterdir())
    for name in names:
        assert_nearly_same_course(f"one/{name}", f"two/{name}")
        x, y = weights(f"one/{name}/last.pt"), weights(f"two/{name}/last.pt")
        for key in x:
            torch.testing.assert_close(x[key], y[key], atol=1e-4, rtol=1e-3)


class NoDoubleNoComplex(TorchDispatchMode):
    """Refuses every operation, also inside the kernels' own operators, that takes or gives float64 or a complex dtype."""

    forbidden = (torch.float64, torch.complex32, torch.complex64, torch.complex128)
    seen = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen = {*self.seen, func.name()}
        if func.namespace == "nanohilbert":  # an operator runs outside the mode: run what it is made of, inside
            with self, torch.no_grad():
                out = getattr(kernels, func.name().replace("nanohilbert::", "_"))._init_fn(*args, **kwargs or {})
        else:
            out = func(*args, **kwargs or {})
        for x in tree_leaves((args, kwargs, out)):
            assert not isinstance(x, torch.Tensor) or x.dtype not in self.forbidden, f"{func} with {x.dtype}"
        return out


@pytest.mark.parametrize("spec", [*sample.MODELS, "htransformer:score=softmax", "hmamba:head=born", "hmamba:head=mos"])
def test_no_float64_and_no_complex_dtype(program, no_curves, spec):
    """MPS has neither, and on a CPU they cost twice: initialisation, training, evaluation, checkpoint, sampling."""
    spec += ":D=32:L=1:N=4" + (":head=8" if spec == "transformer" else ":H=2")
    with NoDoubleNoComplex() as mode:
        assert program(train, *SMALL, "--model", spec, "--steps", 1, "--seq", 130, "--out", "run")[0] == 0
        assert program(train, "--resume", "run", "--eval_only")[0] == 0
        argv = ["run", "--length", 70, "--prompt", "x" * 70, "--top_k", 9, "--top_p", 0.9, "--repetition_penalty", 1.1]
        assert program(sample, *argv)[0] == 0
    own = {name for name in mode.seen if name.startswith("nanohilbert::")}
    assert len(own) == (0 if "transformer" in spec and ("softmax" in spec or spec[0] == "t") else 2), (
        own
    )  # forward, backward
    assert "aten::_fused_adamw_" in mode.seen
    with mode, pytest.raises(AssertionError, match="complex64"):
        torch.view_as_complex(torch.zeros(2))


def test_checkpointing_changes_no_run(program, no_curves):
    for i, flag in enumerate(("--checkpointing", "--no-checkpointing")):
        assert program(train, *SMALL, flag, "--steps", 3, "--out", f"run{i}")[0] == 0
    assert_same_run("run0", "run1")


@pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="--compile needs a C++ compiler, there is none"
)
def test_compiled_run_equals_eager(program, no_curves, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # compiled here and now
    # One shape, 132 windows of validation in fours, and no sample: every new shape is compiled again.
    argv = [*SMALL, "--model", "hmamba:D=32:L=1:H=2:N=4", "--steps", 3, "--seq", 31]
    monkeypatch.setattr(sample, "generate", lambda *args, **kwargs: iter(b"text"))
    counters = torch._dynamo.utils.counters
    for flag in ([], ["--compile"]):
        counters.clear()
        assert program(train, *argv, *flag, "--out", f"run{len(flag)}")[0] == 0
        assert (counters["stats"]["unique_graphs"] > 0) == bool(flag)
    torch._dynamo.reset()
    for x, y in zip(course("run0"), course("run1"), strict=True):
        for key in x.keys() & {"loss", "val_loss", "grad_norm"}:
            assert x[key] == pytest.approx(y[key], rel=1e-4)


def test_sweeps_share_the_data_order_and_print_ratios(program, tmp_path):
    argv = [*SMALL, "--model", "hmamba:D=32:L=1:H=2:N=4,mamba:D=32:L=1:H=2:N=4", "--seeds", "1,2", "--steps", "2"]
    code, out, _ = program(train, *argv, "--out", "sweep")
    assert code == 0
    assert len(list((tmp_path / "sweep").iterdir())) == 4
    assert "| model | data | size | seed | 3.0 bpc |" in out
    assert out.count("| mamba:D=32:L=1:H=2:N=4 | text | tiny |") == 2
    first = [report.read_log(p)[0]["settings"]["seeds"] for p in sorted((tmp_path / "sweep").iterdir())]
    assert first == ["1", "2", "1", "2"]


def test_evaluation_is_the_same_for_any_micro_batch():
    tokens = np.random.RandomState(0).randint(0, 256, 2000).astype(np.uint8)
    model = make("hmamba", L=1)
    settings = train.Settings(seq=32, dtype="float32")
    losses = []
    for micro in (1, 7, 100):
        settings.micro = micro
        losses.append(train.evaluate(model, tokens, np.arange(61), settings, torch.device("cpu")))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    with torch.no_grad():
        x, y = data.get_windows(tokens, 32, np.arange(61))
        assert losses[0] == pytest.approx(model(x, y)[1].item(), rel=1e-6)
    assert model.training


def test_eval_only_judges_the_best_checkpoint(program):
    assert program(train, *SMALL, "--out", "run")[0] == 0
    before = {p: p.read_bytes() for p in Path("run").iterdir()}
    code, out, _ = program(train, "--resume", "run", "--eval_only", "--split", "test")
    assert code == 0
    model, _ = sample.load("run")
    tokens = data.load("text.txt", 32).split("test")
    n = data.num_windows(tokens, 32)
    with torch.no_grad():
        expected = model(*data.get_windows(tokens, 32, np.arange(n)))[1].item()
    assert f"test loss {expected:.4f} nats, {expected / math.log(2):.4f} bpc over {n * 32:,} tokens" in out
    after = {p: p.read_bytes() for p in Path("run").iterdir()}
    assert [p.name for p in before if before[p] != after[p]] == ["log.jsonl"]
    logged = report.read_log("run")[-1]
    assert (logged["event"], logged["split"], logged["checkpoint"]) == ("eval", "test", "best.pt")
    assert logged["val_loss"] == pytest.approx(expected, rel=1e-6)
    with open("run/log.jsonl", "a") as f:
        f.write('{"event": "train"')  # a line that a kill cut short does not swallow the next one
    assert program(train, "--resume", "run", "--eval_only", "--split", "val")[0] == 0
    assert report.read_log("run")[-1]["split"] == "val"


def test_learning_rate():
    s = train.Settings(steps=240, lr=2e-3, min_lr=2e-4, warmup=0.75, schedule="cosine")
    lr = [train.learning_rate(step, s) for step in range(240)]
    assert lr[0] == pytest.approx(2e-3 / 180)
    assert lr[179] == lr[180] == max(lr) == pytest.approx(2e-3)
    assert lr[210] == pytest.approx((2e-3 + 2e-4) / 2)
    assert 2e-4 < lr[239] < 2.1e-4
    s.warmup = 20.0
    assert train.learning_rate(9, s) == pytest.approx(1e-3)
    s.schedule = "constant"
    assert {train.learning_rate(step, s) for step in range(240)} == {2e-3}
    s.schedule, s.warmup = "cosine", 0.0
    assert train.learning_rate(0, s) == 2e-3


def test_protocols(monkeypatch):
    """QS table 4 at 253m; the paper's corpora take 253m on CUDA and tiny without."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    s = train.resolve({"data": "owt"}, "hmamba", None, "1", cuda)
    assert (s.size, s.steps, s.batch, s.seq, s.lr, s.min_lr, s.warmup) == ("253m", 1000, 1024, 1024, 6e-4, 6e-5, 750)
    assert (s.dtype, s.checkpointing, s.eval_every, s.eval_seqs) == ("bfloat16", True, 20, 20 * 256)
    assert train.resolve({"data": "enwik8"}, "hmamba", None, "1", cuda).steps == 1500
    assert train.resolve({"data": "enwik8"}, "hmamba", None, "1", cpu).size == "tiny"
    assert train.resolve({}, "hmamba", None, "1", cuda).size == "tiny"
    assert train.resolve({"steps": 7, "checkpointing": False}, "hmamba", "253m", "1", cuda).steps == 7
    assert train.resolve({"checkpointing": False}, "hmamba", "253m", "1", cuda).checkpointing is False
    assert train.resolve({"lr": 1e-5}, "hmamba", "tiny", "1", cpu).min_lr == 1e-5


def test_a_diverging_run_stops_and_says_where(program, monkeypatch):
    """The loss itself, or the layer in which the backward first met it; the checkpoint before it is kept."""
    code, _, err = program(train, *SMALL, "--out", "run", "--lr", "1e30", "--warmup", "4", "--ckpt_every", 1)
    assert code == 2
    assert re.fullmatch(
        r"error: step 2: loss nan, gradient norm nan, first not finite in the loss itself; "
        r"the last good checkpoint is run/prev.pt\n", err
    )  # fmt: skip
    idx = text_batch(1, 32)
    for name, good in (("prev.pt", True), ("last.pt", False)):  # the last one was saved after the update that diverged
        assert sample.load(f"run/{name}")[0](idx, idx)[1].isfinite() == good

    real, calls = hmamba.HMambaBlock.forward, []

    def poisoned(self, x, state):
        y, state = real(self, x, state)
        if self.training:
            calls.append(self)
            if len(calls) == 2 * 2 * 2 + 1:  # third step, two micro-batches, two layers: layer 0
                y.register_hook(lambda grad: grad * math.nan)
        return y, state

    monkeypatch.setattr(hmamba.HMambaBlock, "forward", poisoned)
    code, _, err = program(train, *SMALL, "--out", "run2", "--ckpt_every", 1)
    assert code == 2
    assert re.fullmatch(
        r"error: step 3: loss \d\.\d+, gradient norm nan, first not finite in layer 0; "
        r"the last good checkpoint is run2/last.pt\n", err
    )  # fmt: skip
    last = sample.read_checkpoint("run2/last.pt")
    assert last["step"] == 2
    assert all(x.isfinite().all() for x in last["model"].values())


@pytest.mark.skipif(sys.platform == "win32", reason="needs the resource module")
def test_full_disk_keeps_the_old_checkpoint(program):
    """A limit on the file size stands in for the full disk: the write itself fails half-way."""
    assert program(train, *SMALL, "--out", "run", "--stop_at", 2)[0] == 0
    before = Path("run/last.pt").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        code, _, err = program(train, "--resume", "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert err.startswith("error: cannot write run/")
    assert "disk full? (" not in err
    assert "the one saved before is intact" in err
    assert err.count("\n") == 1
    assert Path("run/last.pt").read_bytes() == before
    assert not list(Path("run").glob("*.part"))
    assert program(train, "--resume", "run")[0] == 0


def flip(path):
    content = bytearray(Path(path).read_bytes())
    content[len(content) // 2] ^= 1
    Path(path).write_bytes(content)


def cut_short(path):
    os.truncate(path, os.path.getsize(path) - 100)


def remove(path):  # what a kill between the two renamings leaves
    Path(path).unlink()


@pytest.mark.parametrize("damage", [flip, cut_short, remove])
def test_damaged_last_checkpoint_falls_back_to_the_one_before(program, no_curves, damage):
    assert program(train, *SMALL, "--out", "straight")[0] == 0
    assert program(train, *SMALL, "--out", "cut", "--stop_at", 6)[0] == 0
    assert [sample.read_checkpoint(f"cut/{name}.pt")["step"] for name in ("last", "prev")] == [6, 4]
    damage("cut/last.pt")
    code, _, err = program(train, "--resume", "cut", "--stop_at", 7)
    assert code == 0
    warning = "" if damage is remove else r"warning: cut/last.pt is .*damaged.*; prev.pt takes its place\n"
    assert re.fullmatch(warning, err)
    # The damaged one has not taken the place of the good one.
    assert [sample.read_checkpoint(f"cut/{name}.pt")["step"] for name in ("last", "prev")] == [7, 4]
    assert program(train, "--resume", "cut")[::2] == (0, "")
    assert_same_run("straight", "cut")
    for path in ("cut/last.pt", "cut/prev.pt"):
        flip(path)
    code, _, err = program(train, "--resume", "cut")
    assert code == 2
    assert err.splitlines()[-1] == "error: cut/prev.pt is damaged: its bytes are not those that were written"


def test_damaged_best_checkpoint_falls_back_to_the_last(program):
    assert program(train, *SMALL, "--out", "run", "--stop_at", 4)[0] == 0
    flip("run/best.pt")
    code, _, err = program(sample, "run", "--length", 3)
    assert code == 0
    assert (
        "warning: run/best.pt is damaged: its bytes are not those that were written; last.pt takes its place\n" in err
    )


class RunsCode:
    def __reduce__(self):
        return os.system, ("touch hostile",)


def hostile_pickle():
    torch.save({"format": sample.FORMAT, "meta": RunsCode()}, "hostile.pt")


def hostile_old_format():
    torch.save({"meta": RunsCode()}, "hostile.pt", _use_new_zipfile_serialization=False)


def bytes_in_a_checkpoint():
    torch.save({"format": sample.FORMAT, "meta": bytearray(9)}, "hostile.pt")


def zip_bomb():
    """A file of a few kB that unpacks to 64 MB."""
    with zipfile.ZipFile("hostile.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(2**26))


def overlapping_zip_bomb():
    """A thousand entries that are all the same megabyte."""
    with zipfile.ZipFile("hostile.pt", "w") as archive:
        archive.writestr("x/data/0", bytes(2**20))
        for i in range(1000):
            info = copy.copy(archive.filelist[0])
            info.filename = f"x/data/{i + 1}"
            archive.filelist.append(info)


HOSTILE = [
    (hostile_pickle, "hostile.pt holds posix.system, and only tensors, numbers and text are loaded"),
    (hostile_old_format, "hostile.pt is not a readable checkpoint"),
    (bytes_in_a_checkpoint, "hostile.pt holds __builtin__.bytearray, and only tensors, numbers and text are loaded"),
    (zip_bomb, "hostile.pt is not a checkpoint: it unpacks to more than its own size"),
    (overlapping_zip_bomb, "hostile.pt is not a checkpoint: it unpacks to more than its own size"),
]


@pytest.mark.parametrize(("make_file", "message"), HOSTILE, ids=[f.__name__ for f, _ in HOSTILE])
@pytest.mark.parametrize("module", [train, sample], ids=["train", "sample"])
def test_hostile_checkpoints_are_not_even_opened(program, monkeypatch, make_file, message, module):
    """One line, exit code 2; nothing was run, handed to torch or, of the bombs, unpacked."""
    make_file()
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    if make_file in (zip_bomb, overlapping_zip_bomb):
        monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: pytest.fail("it was unpacked"))
    code, _, err = program(module, *(["--resume"] if module is train else []), "hostile.pt")
    assert code == 2
    assert re.fullmatch(f"error: {re.escape(message)}.*\n", err)
    assert not Path("hostile").exists()


@pytest.mark.parametrize("change", [{"D": 10**6}, {"L": 10**9}, {"V": 10**12}, {"N": 10**9}], ids=str)
def test_checkpoint_that_asks_for_a_huge_model(program, change):
    def grow(checkpoint):
        meta = json.loads(checkpoint["meta"])
        meta["config"] |= change
        checkpoint["meta"] = json.dumps(meta)

    assert program(train, *SMALL, "--stop_at", 1, "--out", "run")[0] == 0
    resave("run/huge.pt", grow)
    code, _, err = program(train, "--resume", "run/huge.pt")
    assert code == 2
    assert "its config asks for more parameters than it holds" in err
    assert err.count("\n") == 1


def foreign_checkpoint():
    torch.save({"model": {}, "step": 3}, "foreign.pt")


def truncated_checkpoint():
    whole = Path("run/last.pt").read_bytes()
    Path("short.pt").write_bytes(whole[: len(whole) // 2])


def unsafe_checkpoint():
    torch.save({"format": sample.FORMAT, "meta": Path("x")}, "unsafe.pt")


def other_version():
    checkpoint = torch.load("run/last.pt", weights_only=True)
    del checkpoint["model"]["norm_f.weight"]
    torch.save(checkpoint, "run/other.pt")


def changed_text():
    with open("text.txt", "a") as f:
        f.write("more")


def other_text():
    Path("other.txt").write_text("something else " * 999)


def resave(path, change):
    checkpoint = torch.load("run/last.pt", weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)


def other_settings():
    def change(checkpoint):
        meta = json.loads(checkpoint["meta"])
        meta["settings"]["momentum"] = 0.9
        checkpoint["meta"] = json.dumps(meta)

    resave("run/last.pt", change)


def lacks_meta():
    resave("run/lacks.pt", lambda checkpoint: checkpoint.update(meta="[1]"))


def lacks_optimizer():
    resave("run/lacks.pt", lambda checkpoint: (checkpoint.pop("best"), checkpoint.pop("optimizer")))


def no_log():
    Path("run/log.jsonl").unlink()


RESUME = ["--resume", "run"]
TRAIN_FAULTS = [  # (what to do first, arguments after `SMALL` or alone, what the one line must say)
    (None, [*SMALL, "--model", "gru"], "unknown model 'gru'; known: hmamba, mamba"),
    (None, [*SMALL, "--model", "hmamba,gru"], "unknown model 'gru'"),
    (None, [*SMALL, "--model", ""], "unknown model ''"),
    (None, [*SMALL, "--model", "hmamba:width=3"], "no setting 'width=3'; known: D="),
    (None, [*SMALL, "--model", "hmamba:field=octonion"], "known: complex, real"),
    (None, [*SMALL, "--size", "huge"], "unknown size 'huge'; known: tiny, small, 253m"),
    (None, [*SMALL, "--data", "nowhere.txt"], "nowhere.txt"),
    (None, [*SMALL, "--seq", "100000"], "too short for --seq 100000"),
    (None, [*SMALL, "--seq", "0"], "--seq 0 must be at least 1"),
    (None, [*SMALL, "--steps", "ten"], "argument --steps: invalid int value: 'ten'"),
    (None, [*SMALL, "--step", "10"], "unrecognized arguments: --step 10"),
    (None, [*SMALL, "--seeds", "1,x"], "--seeds 'x' must be whole numbers"),
    (None, [*SMALL, "--seeds", "4294967296"], "from 0 to 2^32 - 1"),
    (None, [*SMALL, "--lr", "0"], "impossible schedule: --lr 0.0"),
    (None, [*SMALL, "--lr", "nan"], "impossible schedule"),
    (None, [*SMALL, "--min_lr", "1"], "impossible schedule"),
    (None, [*SMALL, "--warmup", "-1"], "impossible schedule"),
    (None, [*SMALL, "--stop_at", "9"], "--stop_at 9 lies beyond --steps 8"),
    (None, [*SMALL, "--schedule", "linear"], "invalid choice: 'linear'"),
    (None, [*SMALL, "--device", "tpu"], "unknown device 'tpu'"),
    (None, [*SMALL, "--device", "cuda:99"], "no cuda:99 device is available"),
    (None, [*SMALL, "--out", "run"], "--out run exists"),
    (None, [*SMALL, "--out", "text.txt/run"], "cannot make the run folder"),
    (None, [*SMALL, "--eval_only"], "--resume RUN --eval_only"),
    (None, [*SMALL, "--split", "test"], "--resume RUN --eval_only"),
    (None, ["--resume", "nothing"], "no checkpoint nothing"),
    (None, ["--resume", "cache"], "no checkpoint in cache (looked for last.pt, prev.pt)"),
    (None, [*RESUME, "--model", "mamba"], "--model mamba differs from this run's hmamba"),
    (None, [*RESUME, "--size", "small"], "--size small differs from this run's tiny"),
    (other_text, [*RESUME, "--data", "other.txt"], "is not the data of this run"),
    (None, [*RESUME, "--lr", "1"], "--lr 1.0 differs"),
    (None, [*RESUME, "--micro", "0"], "--micro 0 must be at least 1"),
    (None, [*RESUME, "--log_every", "0"], "--log_every 0 must be at least 1"),
    (None, [*RESUME, "--stop_at", "40"], "--stop_at 40 lies beyond --steps 8"),
    (None, [*RESUME, "--stop_at", "1"], "is at step 2 of 1 already"),
    (None, ["--resume", "run/best.pt"], "no optimizer state; resume from last.pt"),
    (changed_text, [*RESUME, "--data", "text.txt"], "is not the data of this run"),
    (other_settings, RESUME, "was written by another version of train.py"),
    (lacks_meta, ["--resume", "run/lacks.pt"], "is damaged or from another version: it lacks meta"),
    (lacks_optimizer, ["--resume", "run/lacks.pt"], "it lacks best, optimizer"),
    (None, [*SMALL, "--seeds", "1,2,1"], "must not repeat an entry"),
    (None, [*SMALL, "--seeds", "\u0663"], "must be whole numbers"),
    (None, [*SMALL, "--out", ""], "--out  exists"),
    (None, [*SMALL, "--seeds", "1,2", "--out", "run"], "--out run exists"),
    (None, [*SMALL, "--seeds", "1,2", "--seq", "100000"], "too short for --seq 100000"),
    (None, [*SMALL, "--model", "mamba:mlp=-7"], "mlp=-7 must be at least -1"),
    (None, [*SMALL, "--model", "mamba:L=1:L=2"], "sets L twice"),
    (no_log, [*RESUME, "--eval_only"], "log.jsonl is missing"),
    (foreign_checkpoint, ["--resume", "foreign.pt"], "checkpoint of other origin"),
    (truncated_checkpoint, ["--resume", "short.pt"], "cut short, damaged, or of other origin"),
    (unsafe_checkpoint, ["--resume", "unsafe.pt"], "unsafe.pt holds pathlib.PosixPath, and only tensors"),
    (other_version, ["--resume", "run/other.pt"], "does not fit this version of the models"),
    (None, ["--resume", "text.txt"], "not a readable checkpoint"),
]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A run cut at step 2, to copy from."""
    return tmp_path_factory.mktemp("small") / "run"


@pytest.mark.parametrize(
    ("prepare", "argv", "message"), TRAIN_FAULTS, ids=[" ".join(map(str, a[-2:])) for _, a, _ in TRAIN_FAULTS]
)
def test_train_faults(program, small_run, tmp_path, prepare, argv, message):
    """One line on stderr, exit code 2, and nothing in the folder changed."""
    if not small_run.exists():
        assert program(train, *SMALL, "--stop_at", 2, "--out", small_run)[0] == 0
    shutil.copytree(small_run, tmp_path / "run")
    (tmp_path / "cache").mkdir(exist_ok=True)
    if prepare:
        prepare()
    before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    code, _, err = program(train, *argv)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == before


def test_cuda_is_asked_for_and_absent(program):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    code, _, err = program(train, *SMALL, "--device", "cuda")
    assert (code, err) == (2, "error: no cuda device is available to PyTorch here; use --device cpu (or auto)\n")


def test_params_by_component(program):
    code, out, _ = program(train, "--params", "--model", "hmamba,mamba", "--size", "253m")
    assert code == 0
    assert re.search(r"total +253,033,856", out)
    assert re.search(r"total +253,051,904", out)
    assert re.search(r"param_proj +76,321,152", out)
    assert not Path("runs").exists()


@pytest.mark.parametrize("module", [train, sample, report, data, bench], ids=lambda m: m.__name__)
def test_help_is_complete(program, module):
    code, out, _ = program(module, "--help")
    assert code == 0
    if module is train:
        for f in dataclasses.fields(train.Settings):
            assert f"--{f.name}" in out
        for value in ("steps=1000 batch=1024", "253m", "torchrun"):
            assert value in out
    assert "usage:" in out


# ----------------------------------------------------------------------------------------------------------------------
# Sampling


def test_sample_streams_text_from_a_run(program):
    assert program(train, *SMALL, "--stop_at", 2)[0] == 0
    code, out, err = program(sample, "--length", 40, "--prompt", "gate ", "--seed", 3)
    assert code == 0
    assert out.startswith("gate ")
    assert "tokens/s" in err
    assert program(sample, "--length", 40, "--prompt", "gate ", "--seed", 3)[1] == out
    assert program(sample, "--length", 40, "--prompt", "gate ", "--seed", 4)[1] != out
    run = next(Path("runs").iterdir())
    for path in (run, run / "last.pt", run / "best.pt"):
        assert program(sample, path, "--length", 3)[0] == 0
    greedy = program(sample, run, "--length", 30, "--temperature", 0)[1]
    assert program(sample, run, "--length", 30, "--top_k", 1, "--seed", 9)[1] == greedy
    assert program(sample, run, "--length", 30, "--top_p", 1e-9, "--seed", 9)[1] == greedy
    code, out, _ = program(
        sample, run, "--prompt", "caf\u00e9 \udcff", "--length", 1
    )  # \udcff: a byte that is not UTF-8
    assert code == 0
    assert out.startswith("caf\u00e9 \ufffd")


def test_checkpoints_are_found(program, monkeypatch):
    """A folder means its best.pt; no argument the run whose checkpoint was written last."""
    for name in ("b", "a"):
        assert program(train, *SMALL, "--steps", 2, "--out", f"runs/{name}")[0] == 0
    assert sample.read_checkpoint("runs/a")["path"] == "runs/a/best.pt"
    assert sample.newest_run() == Path("runs/a")
    for path in Path("runs/b").glob("*.pt"):
        os.utime(path, (time.time() + 9, time.time() + 9))
    assert sample.newest_run() == Path("runs/b")


def test_repetition_penalty_counts_what_was_generated():
    model = make("hmamba", L=1)
    torch.nn.init.normal_(model.embedding.weight)
    tokens = list(sample.generate(model, [1, 2, 3], 60, temperature=0, repetition_penalty=1e9))
    assert len(set(tokens)) == 60
    assert not {1, 2, 3} & set(tokens)


def test_generation_is_the_model_step_by_step(monkeypatch):
    """Greedy generation equals the argmax of the full pass over prompt and answer, also with a prompt of two chunks."""
    model = make("hmamba", L=1)
    torch.nn.init.normal_(model.embedding.weight)  # clear-cut scores
    with torch.no_grad():  # what came before counts
        model.layers[0].param_proj.weight.mul_(20)
        model.layers[0].out_proj.weight.mul_(20)
    monkeypatch.setattr(sample, "PREFILL", 7)
    prompt = text_batch(1, 40)[0].tolist()
    answer = list(sample.generate(model, prompt, 20, temperature=0))
    with torch.no_grad():
        full = model(torch.tensor([prompt + answer]))[0][0].argmax(-1).tolist()
    assert full[len(prompt) - 1 : -1] == answer


def test_filters_of_the_logits():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    none = torch.tensor([], dtype=torch.int64)

    def kept(**changes):
        arguments = {"seen": none, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0} | changes
        return sample.filter_logits(logits, **arguments)

    assert torch.equal(kept(), logits - 2)  # the largest is 0: no overflow at any temperature
    assert torch.equal(kept(temperature=0.5), 2 * logits - 4)
    assert kept(temperature=1e-300).softmax(-1).tolist() == [1, 0, 0, 0]
    assert kept(temperature=1e300).softmax(-1).tolist() == [0.25] * 4
    assert kept(top_p=1e-300).isfinite().tolist() == [True, False, False, False]
    with pytest.raises(data.InputError, match="not finite"):
        sample.filter_logits(logits * math.nan, none, 1.0, 0, 1.0, 1.0)
    assert kept(top_k=2).isfinite().tolist() == [True, True, False, False]
    assert kept(top_k=9).isfinite().all()
    assert kept(top_p=0.64).isfinite().tolist() == [True, False, False, False]  # softmax: .64 .24 .09 .03
    assert kept(top_p=0.65).isfinite().tolist() == [True, True, False, False]
    assert kept(temperature=0).tolist() == [0.0, -math.inf, -math.inf, -math.inf]
    assert kept(seen=torch.tensor([0, 3]), repetition_penalty=2.0).tolist() == [0.0, 0.0, -1.0, -3.0]
    assert kept(seen=torch.tensor([0]), repetition_penalty=4.0, temperature=0).argmax() == 1
    for penalty in (1e-300, 1e300):
        assert not kept(seen=torch.tensor([0, 2, 3]), repetition_penalty=penalty, temperature=1e-300).isnan().any()


def test_every_byte_sequence_can_be_shown():
    for tokens in (range(256), [0xC2, 0x9B], [0xC3], [0xF0, 0x9F, 0x98], [0xED, 0xA0, 0x80], [27, ord("["), 7]):
        text = "".join(sample.decode(tokens))
        text.encode("utf-8")
        assert not any((c < " " or "\x7f" <= c < "\xa0") and c not in "\n\t" for c in text)
    assert "".join(sample.decode("h\u00e9 \U0001f600".encode())) == "h\u00e9 \U0001f600"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no checkpoint in runs/ yet"),
        (["nothing"], "no checkpoint nothing"),
        (["text.txt"], "not a readable checkpoint"),
        (["x", "--length", "0"], "--length must be at least 1"),
        (["x", "--temperature", "-1"], "--temperature must be 0 or more"),
        (["x", "--temperature", "nan"], "--temperature must be 0 or more"),
        (["x", "--top_k", "-1"], "--top_k must be 0 or more"),
        (["x", "--top_p", "0"], "--top_p must lie in (0, 1]"),
        (["x", "--repetition_penalty", "0"], "--repetition_penalty must be above 0"),
        (["x", "--seed", "99999999999999999999"], "--seed must lie in"),
        ([""], "no checkpoint"),
        (["x", "--prompt", ""], "--prompt is empty"),
        (["x", "--temp", "1"], "unrecognized arguments: --temp 1"),
        (["x", "y"], "unrecognized arguments: y"),
    ],
)
def test_sample_faults(program, argv, message):
    code, out, err = program(sample, *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_piping_into_head_is_no_error(program):
    assert program(train, *SMALL, "--stop_at", 1, "--out", "run")[0] == 0
    command = f"{sys.executable} {ROOT / 'sample.py'} run --length 3000 | head -c 20"
    done = subprocess.run(["bash", "-c", command], env=ENV, check=False, capture_output=True)
    assert done.returncode == 0
    assert len(done.stdout) == 20
    assert b"Traceback" not in done.stderr
    assert b"Broken" not in done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# Report


def test_steps_to_target():
    """QS 8.1: linear interpolation between the evaluations that bracket the first crossing."""
    steps, losses = [0, 20, 40, 60, 80], [8.0, 3.0, 2.0, 2.4, 1.9]
    assert report.steps_to_target(steps, losses, 3.0) == 20
    assert report.steps_to_target(steps, losses, 2.5) == 30
    assert report.steps_to_target(steps, losses, 2.0) == 40
    assert report.steps_to_target(steps, losses, 1.95) == pytest.approx(78)
    assert report.steps_to_target(steps, losses, 9.0) == 0
    assert report.steps_to_target(steps, losses, 1.0) is None
    assert report.steps_to_target([], [], 1.0) is None


def write_log(folder, model, bpc, **settings):
    folder.mkdir()
    header = {
        "settings": {"model": model, "data": "text", "size": "tiny", "seeds": "1"} | settings,
        "params": {"total": 10},
    }
    events = [{"event": "header", "step": 0, "data": {"name": "text"}, **header}]
    events += [{"event": "val", "split": "val", "step": 20 * i, "val_loss": x * math.log(2)} for i, x in enumerate(bpc)]
    events.append(
        {"event": "eval", "split": "val", "step": 20, "val_loss": 0.1}
    )  # of a whole split: no point of the curve
    events.append({"event": "final", "split": "val", "step": events[-1]["step"], "val_loss": bpc[-1] * math.log(2)})
    (folder / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))


def test_report_reads_logs(program, tmp_path):
    write_log(tmp_path / "a", "hmamba", [8, 3, 2.5, 2.1])
    write_log(tmp_path / "b", "mamba", [8, 5, 3.5, 2.5])
    write_log(tmp_path / "c", "mamba", [8, 3, 2.5, 2.1], seeds="2")
    with open("b/log.jsonl", "a") as f:
        f.write('{"event": "val", "st')  # a line cut short
    code, out, _ = program(report, "a", "b/log.jsonl", "c", "--out", "curves.png")
    assert code == 0
    assert "| hmamba | text | tiny | 1 | 20 (1.00x) | 40 (1.00x) | 55 (1.00x) | - | 2.100 |" in out
    assert "| mamba | text | tiny | 1 | 50 (2.50x) | 60 (1.50x) | - | - | 2.500 |" in out
    assert "| mamba | text | tiny | 2 | 20 (1.00x) | 40 (1.00x) | 55 (1.00x) | - | 2.100 |" in out  # first of its seed
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
    for bad in ("curves.jpg", "nowhere/curves.png"):
        code, _, err = program(report, "a", "--out", bad)
        assert code == 2
        assert bad in err
        assert err.count("error: ") == 1


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"{}\n", b"[1]\n", b'{"event": "val"}\n'])
def test_report_faults(program, content):
    if content is not None:
        Path("log.jsonl").write_bytes(content)
    code, out, err = program(report, "log.jsonl")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------------------
# README

README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = {
    m.__name__: m for m in (bench, data, hmamba, htransformer, kernels, report, sample, train, sys.modules[__name__])
}


def test_readme_maps_to_names_that_exist():
    named = re.findall(r"`(\w+)\.py:([\w.]+)`", README)
    assert len(named) > 20
    for module, name in named:
        found = MODULES[module]
        for part in name.split("."):
            found = getattr(found, part)
    for test in re.findall(r"`(test_\w+)`", README):
        assert test in globals()


def test_readme_commands_are_what_ci_runs():
    assert "pip install -r requirements.txt && python train.py\n" in README
    assert "pip install -r requirements.txt && pytest -q\n" in README
    assert "pip install -r requirements.txt && pytest -q\n" in (ROOT / ".ci/run").read_text()


def test_readme_flags_and_files_exist(program):
    helps = "".join(program(m, "--help")[1] for m in (train, sample, report, data, bench))
    helps += torch.distributed.run.get_args_parser().format_help()  # torchrun
    elsewhere = {"--index-url"}
    for flag in set(re.findall(r"(?<![\w-])--[a-z][\w-]*", README)) - elsewhere:
        assert flag in helps, flag
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
    for name in re.findall(r"python (\w+\.py)", README):
        assert (ROOT / name).exists(), name


def test_readme_table_is_what_the_logs_say(program):
    """The numbers of the README come out of the logs in results/ with the command that stands above them."""
    tables = re.findall(r"<!-- python report\.py (\S+) --out \S+ -->\n(.*?)\n<!-- end -->", README, re.DOTALL)
    assert tables
    for pattern, table in tables:
        code, out, _ = program(report, *sorted(ROOT.glob(pattern)))
        assert code == 0
        assert out.strip() == table.strip()


def test_readme_factors_are_what_the_benchmark_printed():
    section = README.split("### Speed on a CPU")[1].split("\n## ")[0]
    factors = re.findall(r"\b(\d\.\d\d)x", section)
    assert len(factors) >= 5
    measured = (ROOT / "results/bench_cpu.md").read_text()
    for factor in factors:
        assert f"| {factor} |" in measured, factor
