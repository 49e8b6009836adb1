"""What moves information through time in every model.

Papers: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691), eqs. 2-5
and Algorithms 1-3; "Mamba" (Gu and Dao, arXiv 2312.00752), Algorithm 2 and section 3.3; "Phase-Associative Memory:
Sequence Modeling in Complex Hilbert Space" (PAM), eqs. 5-7.

    complex_scan     h_t = exp(log_decay_t + i theta_t) h_{t-1} + b_t              used by H-Mamba
                     through cayley_scan, which forms log_decay and theta inside, QS Algorithm 1
    selective_scan   h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t,  y_t = C_t . h_t    used by Mamba
    born_attention   o_i = sum_{j<=i} |<q_i|k_j>|^2 v_j / sum_{j<=i} |<q_i|k_j>|^2   used by H-Transformer
    phase_memory     S_t = gamma_t S_{t-1} + v_t (x) k_t^*,  y_t = S_t q_t         used by PAM and SAM

Part I says what each operation is: its mathematics and adjoint, its float64 reference, its public function. A reader
beside the papers needs no more, but for QS Algorithm 2 as printed (`complex_scan_clamped`) and PAM eq. 7
(`phase_memory_dual`). Part II computes the operations in PyTorch, Part III in Triton.

Glossary   B batch   T time   C channels of a scan (QS: H heads x N state width)   E d_inner   N state width
    log_decay (B, T, C)     log|a_t|, QS eq. 2            theta (B, T, C)   arg a_t in radians, QS eq. 3
    b         (B, T, C, 2)  complex input, QS eq. 2       h     (B, T, C, 2) complex state psi_t, QS eq. 2
    q, k, v   (B, H, T, N, 2)  complex queries, keys and values of H heads, QS eq. 5; PAM eq. 4: (B, H, T, d, 2)
    log_gamma (B, H, T)     log of the decay gamma_t, PAM eq. 5
    S         (B, H, d, d, 2)  matrix state, PAM eq. 6, indexed [value, key]
Complex numbers are real pairs: the last axis holds (re, im).

Inputs may have any float dtype and strides, T >= 1, and empty batches. Each operation takes an initial state, returns
the final one, and has gradients for both. States and sums are float32 (float64 if an input is) whatever the input
dtype; only the Triton kernels of Born attention and phase memory multiply half-precision inputs, and under autocast all
inputs, in bfloat16. The backward recomputes what it needs, so memory is O(T), but for the references and "dual".
Algorithms are deterministic: the same inputs give the same bits, unless torch.cumsum runs on CUDA, for which PyTorch
does not promise it: in "clamped", "dual", the torch paths of Born attention and phase memory, and Born's reference.

Gradients are those of backward() and torch.autograd.grad, once: the core of each torch and Triton path is one custom
operator (for torch.compile, autocast, activation checkpointing and DDP). Other derivatives (jvp, torch.func, double
backward) end in an error and need backend="reference". The references, "dual", "clamped" and one token of phase memory
are plain PyTorch.

backend=    None picks by the device of the inputs: "triton" on CUDA where Triton is installed and no input is
            float64, else "torch". "triton", "torch" and "reference" (float64 inside, in the same dtypes outside)
            force one; so does the environment variable NANOHILBERT_BACKEND for every call that does not say.
            On a CPU "triton" runs in its interpreter (TRITON_INTERPRET=1).

    python kernels.py    checks every operation on the present device against its reference
"""

import argparse
import os
import re
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # as on macOS and Windows: the torch paths do the work
    triton = None

# ----------------------------------------------------------------------------------------------------------------------
# Part I: what each operation is
#
# Four times in the same order: the recurrence, and its adjoint, that is how the gradient of a loss L comes back from
# the outputs to the inputs (for a complex z, dL/dz is dL/dRe z + i dL/dIm z); the reference, which says the
# recurrence as it is written; the public function.

# ---- complex_scan: h_t = a_t h_{t-1} + b_t with a_t = exp(log_decay_t + i theta_t)                     (QS eq. 2) ----
#
# The adjoint runs backwards in time. What arrives at h_t, from its own output and from h_{t+1}, is
# g_t = dL/dh_t + conj(a_{t+1}) g_{t+1}. With z_t = a_t h_{t-1}, the part of h_t that the transition made:
#     dL/db_t = g_t    dL/dlog_decay_t = Re(conj(z_t) g_t)    dL/dtheta_t = Im(conj(z_t) g_t)    dL/dh0 = conj(a_1) g_1


def _numbers(x, real=False):
    """x in float64; its pairs as complex numbers, unless it is real."""
    return x.double() if real else torch.complex(*x.double().unbind(-1))


def complex_scan_reference(log_decay, theta, b, h0):
    """The recurrence as written, step by step in complex128 (float64 if theta is None). The oracle of the tests."""
    real, log_a, states = theta is None, log_decay.double(), []
    b, h = _numbers(b, real), _numbers(h0, real)
    if not real:
        log_a = torch.complex(log_a.expand(theta.shape), theta.double())
    for a_t, b_t in zip(log_a.exp().unbind(1), b.unbind(1)):
        h = a_t * h + b_t  # QS eq. 2, with the current input included as in Algorithm 2
        states.append(h)
    h_all = torch.stack(states, 1)
    return (h_all, h) if real else (torch.view_as_real(h_all), torch.view_as_real(h))


def complex_scan(log_decay, theta, b, h0=None, method="exact", backend=None):
    """Complex (or real) diagonal linear recurrence h_t = exp(log_decay_t + i theta_t) h_{t-1} + b_t, QS eq. 2.

    Args:
        log_decay: (B, T, C) or (B, T, 1), log-modulus of the transition, usually <= 0: over some hundred steps it may
            grow to e^88.
        theta: (B, T, C), its angle in radians; None for a real recurrence. Beyond 1e5 the Triton kernel loses digits.
        b: (B, T, C, 2) input, or (B, T, C) if theta is None.
        h0: (B, C, 2) or (B, C) state before the first step; None is zero.
        method: "exact", or "clamped" for QS Algorithm 2 as printed (chunks of 64, log-decay clamped at -30).
        backend: of method=exact: None, "torch", "triton" or "reference", as above.
    Returns:
        (h, hT): every state, in b's shape, and the last one; float32 (float64 if an input is).
    Raises:
        ValueError: shapes, dtypes or devices that do not fit; an unknown method or backend; one that cannot run here.
    """
    _expect_one_of("method", method, "exact", "clamped")
    tensors = b, theta, log_decay, h0
    _check(REAL_SCAN if theta is None else SCAN, *tensors)
    backend, dtype = _pick(backend, *tensors, torch_only=method == "clamped")
    h0 = b.new_zeros(b.shape[:1] + b.shape[2:], dtype=dtype) if h0 is None else h0.to(dtype)
    if method == "clamped":
        if theta is None:
            raise ValueError("method='clamped' is Algorithm 2, which is complex: give theta")
        return complex_scan_clamped(*_in_dtype(dtype, log_decay, theta, b), h0)
    if backend == "reference":
        return _in_dtype(dtype, *complex_scan_reference(log_decay, theta, b, h0))
    if backend == "triton":
        h = _triton_scan(log_decay.expand(b.shape[:3]), theta, None, None, b, h0, b.dtype)
    else:
        log_decay, theta, b = _in_dtype(dtype, log_decay, theta, b)
        h, _ = _complex_scan(log_decay.expand(b.shape[:3]), theta, b, h0)
    return h, h[:, -1].clone()  # a view would keep all of h alive


def cayley_scan(delta, dt, gate, omega, b, h0=None, method="exact", backend=None):
    """complex_scan with H-Mamba's transition: log_decay = log sigmoid(gate) and theta = 2 atan(phi) with
    phi = dt / 2 (delta + omega); QS Algorithm 1, eqs. 2 and 3. On a GPU the transition never reaches memory.

    Args:
        delta: (B, T, H, N) logits, QS 5.2.               dt: (B, T, H) step size, one a head, QS 5.7.
        gate: (B, T, H, N) logits; None: alpha = 1.       omega: (H, N) angular rates.
        b: (B, T, H, N, 2) complex input.                 h0: (B, H, N, 2) state before the first step; None is zero.
        method, backend: as complex_scan.
    Returns:
        (h, hT): every state (B, T, H, N, 2) and the last one; float32 (float64 if an input is).
    Raises:
        ValueError: as complex_scan.
    """
    _expect_one_of("method", method, "exact", "clamped")
    tensors = delta, dt, gate, omega, b, h0
    B, T, H, N = _check(CAYLEY, *tensors)
    backend, dtype = _pick(backend, *tensors, torch_only=method == "clamped")
    if backend == "triton":
        h0 = b.new_zeros(B, H, N, 2, dtype=dtype) if h0 is None else h0.to(dtype)
        h = _triton_scan(gate, delta, dt, omega.float(), b, h0, b.dtype)
        return h, h[:, -1].clone()
    # Under bf16 autocast the logits come in bf16; everything made of them from here on is float32.
    exact = torch.float64 if backend == "reference" else dtype
    delta, dt, gate, omega = _in_dtype(exact, delta, dt, gate, omega)
    phi = 0.5 * dt.unsqueeze(-1) * (delta + omega)  # QS 5.2
    # Eq. 3 and Algorithm 1, line 1: the Cayley map (1 + i phi) / (1 - i phi), the diagonal form of eq. 1, has modulus 1
    # and this angle.
    theta = (2 * phi.atan()).flatten(2)
    log_decay = b.new_zeros(B, T, 1, dtype=exact) if gate is None else F.logsigmoid(gate).flatten(2)  # line 2
    h0 = None if h0 is None else h0.flatten(1, 2)
    h, last = complex_scan(log_decay, theta, b.flatten(2, 3), h0, method, backend)
    return _in_dtype(dtype, h.unflatten(2, (H, N)), last.unflatten(1, (H, N)))


# ---- selective_scan: h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t,  y_t = C_t . h_t              (Mamba, Algorithm 2) ----
#
# The adjoint: g_t = dL/dy_t C_t + exp(dt_{t+1} A) g_{t+1}, and with x_t = dt_t u_t, w_t = g_t exp(dt_t A) h_{t-1}:
#     dL/dC_t = sum_E dL/dy_t h_t    dL/dB_t = sum_E x_t g_t    dL/dx_t = g_t . B_t    dL/ddt_t = w_t . A + u_t dL/dx_t
#     dL/dA = sum_{B,T} dt_t w_t     dL/du_t = dt_t dL/dx_t     dL/dh0 = exp(dt_1 A) g_1


def selective_scan_reference(u, dt, A, B, C, h0):
    """The recurrence as written, step by step in float64. The oracle of the tests."""
    (u, dt, A, B, C, h), ys = (x.double() for x in (u, dt, A, B, C, h0)), []
    for u_t, dt_t, B_t, C_t in zip(*(x.unbind(1) for x in (u, dt, B, C))):
        h = torch.exp(dt_t.unsqueeze(-1) * A) * h + (dt_t * u_t).unsqueeze(-1) * B_t.unsqueeze(1)  # (B, E, N)
        ys.append((h * C_t.unsqueeze(1)).sum(-1))
    return torch.stack(ys, 1), h


def selective_scan(u, dt, A, B, C, h0=None, backend=None):
    """Mamba's selective state-space recurrence: h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t, y_t = C_t . h_t.

    Args:
        u: (B, T, E) input.          dt: (B, T, E) step size, after softplus.
        A: (E, N) real, negative.    B, C: (B, T, N) input and output projections.
        h0: (B, E, N) state before the first step; None is zero.
        backend: None, "torch", "triton" or "reference", as above.
    Returns:
        (y, hT): y (B, T, E) in u's dtype, without the skip D u; hT (B, E, N) in float32 (float64 if an input is).
    Raises:
        ValueError: as complex_scan.
    """
    tensors = u, dt, A, B, C, h0
    batch, T, E, N = _check(SELECTIVE, *tensors)
    backend, dtype = _pick(backend, *tensors)
    h0 = u.new_zeros(batch, E, N, dtype=dtype) if h0 is None else h0.to(dtype)
    if backend == "reference":
        y, hT = selective_scan_reference(u, dt, A, B, C, h0)
        return y.to(u.dtype), hT.to(dtype)
    inputs = tensors[:5] if backend == "triton" else _in_dtype(dtype, *tensors[:5])
    y, hT, _ = _selective_scan(*inputs, h0, backend == "triton")
    return y.to(u.dtype), hT


# ---- born_attention: o_i = sum_{j<=i} w_ij v_j / sum_{j<=i} w_ij, w_ij = |<q_i|k_j>|^2   (QS eq. 5, Algorithm 3) ----
#
# D and tau_i of eq. 5 stand in numerator and denominator alike and cancel; so does |q_i|, which is set to 1. Both are
# one sum over the past, s_i = sum_{j<=i} w_ij u_j with u_j = (v_j, 1), the value and a one beside it: its last entry is
# the denominator. There are three equal ways to it:
#   quadratic   Take a complex vector of N numbers as a real one of 2N. Then <q|k> = Q.K + i (iQ).K, so
#               w = (Q.K)^2 + ((iQ).K)^2: two matrix products and squares, no exponential.
#   linear      w = tr(q q^* k k^*) is linear in the Hermitian matrix k k^*, which N^2 real numbers describe, the
#               features phi(k) = (|k_n|^2; sqrt2 Re k_m k_n^* for m > n, sqrt2 Im k_m k_n^* for m < n). So
#               w_ij = phi(q_i).phi(k_j), and s_i = phi(q_i) S_i with a state S_i = sum_{j<=i} phi(k_j) u_j^T of
#               N^2 x (2N+1) numbers.
#   recurrent   The linear form with the state carried on. The newest tokens, up to a chunk, are scored quadratically
#               and then folded into S: signed features alone would lose digits where the sum has few terms.
# The adjoint, with the weights w_ij as a matrix W, the u_j and s_i as rows of U and of s = W U, and G = dL/ds:
#     dL/dU = W^T G     dL/dW = G U^T where j <= i     dL/d(Q.K) = 2 (Q.K) dL/dW     dL/d((iQ).K) = 2 ((iQ).K) dL/dW

# Where a query is orthogonal to all keys eq. 5 is 0/0, and near that the rounding of the features decides. So the
# denominator is raised by this share of sum_{j<=i} |k_j|^2, which it is compared with: on average it is 1/N of that.
BORN_FLOOR = 1e-6
TINY = 1e-30


def born_attention_reference(q, k, v, S=None):
    """QS Algorithm 3 in complex128, without D and tau, which cancel, but with what keeps it finite: q of unit norm,
    which cancels too, the floor, and TINY where all keys are zero. The oracle of the tests; O(T^2) memory. q may be the
    last of the positions of k; S sums what came before those."""
    unit = _unit(q.double().flatten(-2))
    q, k, v = _numbers(unit.view(q.shape)), _numbers(k), _numbers(v)
    w = torch.view_as_real(q.conj() @ k.mT).square().sum(-1).tril(k.shape[-2] - q.shape[-2])  # line 1
    s, total = torch.view_as_real(w.to(v.dtype) @ v), w.sum(-1)
    mass = torch.view_as_real(k).square().sum((-2, -1)).cumsum(-1)[..., -q.shape[-2] :]
    if S is not None:
        past = _features(unit) @ S.double()
        s, total = s + past[..., :-1].view(s.shape), (total + past[..., -1]).clamp(min=0)
        mass = mass + _mass(S.double())
    return s / (total + BORN_FLOOR * mass + TINY)[..., None, None]  # line 2, eq. 5


def born_attention(q, k, v, state=None, method="auto", backend=None):
    """Causal attention whose weight is the squared modulus of a complex inner product: QS eq. 5, Algorithm 3.

    Args:
        q, k, v: (B, H, T, N, 2) complex, of one float dtype. In float32 the sizes of q and of k do not matter from
            1e-12 to 1e12; beyond, squares may leave float32, and o is wrong without an error. NaN or inf in k or v may
            also reach the outputs of earlier tokens of the same tile.
        state: what came before, from an earlier call; None is nothing. (S, k, v): S (B, H, N^2, 2N+1) sums the whole
            chunks of 64 tokens folded so far (None: no chunk yet), k and v (B, H, n, N, 2) are the tokens after them.
            All are float32 (float64 if q is).
        method: "quadratic" or "linear" form, equal up to rounding; "auto" takes the faster one.
        backend: None, "torch", "triton" or "reference" (its state is never folded), as above. Triton has the quadratic
            form of a sequence from its beginning, and the linear form for N up to 32; for the rest the torch path runs.
    Returns:
        (o, state): o (B, H, T, N, 2) float32 (float64 if q is). It is eq. 5 with a denominator raised by 1e-6 of the
        summed |k_j|^2: 0, not 0/0, where a query is orthogonal to every key so far, or all are zero.
        The state after the last token. Where nothing needs a gradient it is folded, so that k and v hold fewer than 64
        tokens however long the past. Else they hold all T tokens, behind those that the state before had not folded,
        and the next call folds them: a training step, which drops the state, does not pay for it. It may share memory
        with k, v and the state before: change none of these in place. The rounding of S grows with the past: from
        65,536 tokens on it may outweigh the sum for a query nearly orthogonal to many equal keys, and o is then not
        bounded by v.
    Raises:
        ValueError: as complex_scan.
    """
    _expect_one_of("method", method, "auto", "quadratic", "linear")
    B, H, T, N = _check(BORN, q, k, v, one_dtype=True)
    backend, dtype = _pick(backend, q, k, v)
    S, all_k, all_v = None, k.to(dtype), v.to(dtype)  # the state keeps what autocast would round
    if state is not None:
        if len(state) != 3 or state[1] is None or state[2] is None:
            raise ValueError("the state is not (S or None, k, v), as an earlier call returns it")
        S, old_k, old_v = state
        known = {"B": B, "H": H, "N": N, "N^2": N * N, "2N+1": 2 * N + 1}
        _check(BORN_STATE, all_k, S, old_k, old_v, one_dtype=True, **known)
        if backend != "reference":
            S, old_k, old_v = born_fold(state)
        all_k, all_v = torch.cat((old_k, all_k), 2), torch.cat((old_v, all_v), 2)
    if backend == "reference":
        return born_attention_reference(q, all_k, all_v, S).to(dtype), (S, all_k, all_v)
    linear = method == "linear" or (method == "auto" and _linear_is_faster(T, N, backend == "triton" and state is None))
    if backend == "triton" and (N <= BORN_WIDEST if linear else state is None):
        o, state = _born_in_triton((q, k, v), S, all_k, all_v, linear)
    else:
        o, state = _born_in_torch(q.to(dtype), S, all_k, all_v, linear), (S, all_k, all_v)
    if o.requires_grad:
        return o, state
    S, k, v = born_fold(state)
    return o, (S, k.clone(), v.clone())  # not views, which would keep the whole sequence


# ---- phase_memory: S_t = gamma_t S_{t-1} + v_t (x) k_t^*,  y_t = S_t q_t    (PAM eq. 6 and the line before eq. 7) ----
#
# It is computed in chunks. In a chunk of c tokens, with S the state before it and E_ti = prod_{i<j<=t} gamma_j what is
# left at token t of what token i added (E_t0: of S):
#     y_t = sum_{i<=t} E_ti (k_i^* . q_t) v_i + E_t0 S q_t          S' = sum_i E_ci v_i (x) k_i^* + E_c0 S
# The first sum is PAM eq. 7, the dual form, inside the chunk. log E is summed over the gates between i and t, never
# taken as a difference of two prefix sums: beside one gate near 0 the difference would lose the gates near 1.
# As matrices: Q, K, V and Y hold a token a row, E is (c, c) and 0 for i > t, * is element by element, E_0 and E_c scale
# rows by E_t0 and E_ci, X^H is the conjugate transpose, and the state is M = S^T, keys by values:
#     Y = (Q K^H * E) V + E_0 Q M           M' = (E_c K)^H V + E_c0 M
# The adjoint, with G = dL/dY, N = dL/dM' from the next chunk, and P = Q K^H:
#     dL/dP = G V^H * E        dL/dQ = dL/dP K + E_0 G M^H       dL/dK = dL/dP^H Q + E_c V N^H
#     dL/dV = (P * E)^H G + E_c K N       dL/dM = (E_0 Q)^H G + E_c0 N
#     dL/dlog gamma_j = sum_{t>=j} sum_{i<j} E_ti dL/dE_ti: every path from before token j to after it


def phase_memory_reference(q, k, v, log_gamma, state, real=False):
    """The recurrence as written, step by step in complex128 (float64 if real). The oracle of the tests."""
    (q, k, v, S), ys = (_numbers(x, real) for x in (q, k, v, state)), []
    for q_t, k_t, v_t, log_gamma_t in zip(*(x.unbind(2) for x in (q, k, v, log_gamma.double()))):
        outer = v_t.unsqueeze(-1) * k_t.conj().unsqueeze(-2)  # (B, H, v, k)
        S = log_gamma_t.exp()[..., None, None] * S + outer  # PAM eq. 6
        ys.append((S @ q_t.unsqueeze(-1)).squeeze(-1))  # PAM, before eq. 7
    y = torch.stack(ys, 2)
    return (y, S) if real else (torch.view_as_real(y), torch.view_as_real(S))


def phase_memory(q, k, v, log_gamma, state=None, real=False, backend=None):
    """Associative memory with a matrix state: S_t = gamma_t S_{t-1} + v_t (x) k_t^*, PAM eq. 6, and y_t = S_t q_t,
    which eq. 7 writes as a sum over the past. The scale 1/sqrt(d) of the query and the factor 1 - p of the value are
    the caller's.

    Args:
        q, k, v: (B, H, T, d, 2) complex queries, keys and values; (B, H, T, d) if real. NaN or inf in k or v may also
            reach the outputs of earlier tokens of the same chunk.
        log_gamma: (B, H, T), log of the decay, <= 0; -inf forgets all.
        state: S before the first token, (B, H, d, d, 2) or (B, H, d, d), indexed [v, k]; None is zero.
        real: a real memory, PAM's ablation SAM: k^* is k.
        backend: None, "torch" and "triton" (chunks, O(T)) or "reference" (complex128 loop), as above, but that None
            takes one token by eq. 6 itself; "dual" (the paper's O(T^2) form, no state out). What Triton multiplies in
            bfloat16 (see above; with it the states that it reads) costs about 2e-3 of the largest y, and of the
            largest S, at d = 64 and T = 1024. If q, k and v differ in dtype, it multiplies in float32.
    Returns:
        (y, S): y in v's shape; the state after the last token, None for "dual"; float32 (float64 if an input is).
    Raises:
        ValueError: as complex_scan.
    """
    tensors = q, k, v, log_gamma, state
    B, H, T, d = _check(REAL_MEMORY if real else MEMORY, *tensors)
    one_token = T == 1 and backend is None and check_backend() is None
    backend, dtype = _pick(backend, *tensors, torch_only=one_token, more=("dual",))
    if backend == "dual":
        return phase_memory_dual(*tensors, real), None
    S = q.new_zeros(B, H, d, *q.shape[3:], dtype=dtype) if state is None else state.to(dtype)
    if backend == "reference":
        return _in_dtype(dtype, *phase_memory_reference(q, k, v, log_gamma, S, real))
    if backend == "triton":
        if not q.dtype == k.dtype == v.dtype:
            q, k, v = _in_dtype(torch.float32, q, k, v)
        return _triton_phase(*_autocast(q, k, v), log_gamma, S.contiguous(), real)[:2]
    inputs = _in_dtype(dtype, q, k, v, log_gamma)
    if not one_token:
        return _phase_in_chunks(*inputs, S, real)
    y, S = phase_memory_step(*(x.squeeze(2) for x in inputs), S, real)
    return y.unsqueeze(2), S


# ----------------------------------------------------------------------------------------------------------------------
# Part II: in PyTorch

# ---- what all share: backends, shapes and dtypes ----

BACKENDS = "torch", "triton", "reference"


def check_backend():
    """The backend that the environment variable NANOHILBERT_BACKEND names, or None. ValueError if there is no such."""
    backend = os.environ.get("NANOHILBERT_BACKEND") or None
    _expect_one_of("NANOHILBERT_BACKEND", backend, None, *BACKENDS)
    return backend


def _expect_one_of(name, value, *known):
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(str(x) for x in known if x is not None)}")


def _pick(backend, *tensors, torch_only=False, more=()):
    """The backend for these inputs: as told (`more` are known too), as the environment says, or by device and dtype.
    And the dtype of states and sums."""
    _expect_one_of("backend", backend, None, *BACKENDS, *more)
    x, dtype, backend = tensors[0], _compute_dtype(*tensors), backend or check_backend()
    if backend is None:
        backend = "triton" if triton is not None and x.is_cuda and dtype != torch.float64 else "torch"
    if torch_only or (backend == "triton" and not x.numel()):
        return "torch", dtype  # without elements there is nothing to launch
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and (triton is None or dtype == torch.float64 or not (x.is_cuda or interpreted)):
        here = f"Triton {'missing' if triton is None else 'installed'}, tensors on {x.device}, to compute in {dtype}"
        needed = "Triton and CUDA tensors (or TRITON_INTERPRET=1), none of float64"
        raise ValueError(f"backend='triton' needs {needed}; here: {here}")
    return backend, dtype


def _axes(shapes):
    """Name and axes of each tensor of "b: B T C 2, theta: B T C"."""
    return [(name, axes.split()) for name, axes in (named.split(": ") for named in shapes.split(", "))]


def _real(shapes):
    """The same without the axis of pairs."""
    return [(name, [axis for axis in axes if axis != "2"]) for name, axes in shapes]


# What the operations take, in their order
SCAN = _axes("b: B T C 2, theta: B T C, log_decay: B T C|1, h0: B C 2")
REAL_SCAN = _real(SCAN)
CAYLEY = _axes("delta: B T H N, dt: B T H, gate: B T H N, omega: H N, b: B T H N 2, h0: B H N 2")
SELECTIVE = _axes("u: B T E, dt: B T E, A: E N, B: B T N, C: B T N, h0: B E N")
BORN = _axes("q: B H T N 2, k: B H T N 2, v: B H T N 2")
BORN_STATE = _axes("k: B H T N 2, state_S: B H N^2 2N+1, state_k: B H n N 2, state_v: B H n N 2")
MEMORY = _axes("q: B H T d 2, k: B H T d 2, v: B H T d 2, log_gamma: B H T, state: B H d d 2")
REAL_MEMORY = _real(MEMORY)


def _check(shapes, *tensors, one_dtype=False, **sizes):
    """The sizes of the letters of `shapes`, in their order; "C|1" stands for C or 1. ValueError unless each tensor that
    is given has its shape, with at least one step T and one coordinate N or d, a float dtype, and the device of the
    first; with one_dtype also its dtype. Sizes that are known already come by name."""
    sizes["2"], first = 2, None
    for (name, axes), x in zip(shapes, tensors, strict=True):
        if x is None:
            continue
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"{name} is {kind}; expected a tensor of floats (complex: torch.view_as_real({name}))")
        fits = x.dim() == len(axes)
        for axis, n in zip(axes, x.shape):
            if axis == "C|1":
                axis = "C" if n != 1 else "1"
            if n != sizes.setdefault(axis, n) or (n == 0 and axis in "TNd"):
                fits = False
        if not fits:
            known = [f"{axis} = {n}" for axis, n in sizes.items() if axis in axes and axis != "2" and n]
            known += [f"{axis} > 0" for axis in axes if axis in "TNd" and not sizes.get(axis)]
            expected = f"({', '.join(axes)}) with {', '.join(known)}"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {expected}")
        first = x if first is None else first
        if x.device != first.device or (x.dtype != first.dtype and one_dtype):
            raise ValueError(f"{name} is {x.dtype} on {x.device}; expected {first.dtype} on {first.device}, as others")
    return tuple(n for axis, n in sizes.items() if axis not in "12")


def check_tokens(idx, targets, state, start):
    """For the models. ValueError unless idx and targets are tokens (B, T), and state, if any, fits `start`, the model's
    init_state(0), but for the batch."""
    if idx.dim() != 2 or 0 in idx.shape:
        raise ValueError(f"idx has shape {tuple(idx.shape)}; expected (B, T) with at least one sequence and one token")
    for name, x in (("idx", idx), ("targets", targets)):
        if x is not None and (x.shape != idx.shape or x.dtype not in (torch.int32, torch.int64)):
            raise ValueError(f"{name}: {x.dtype} {tuple(x.shape)}; expected int64 of shape {tuple(idx.shape)}")
    if state is not None and not _fits(state, start, idx):
        raise ValueError(f"no state of this model for {len(idx)} sequences on {idx.device}: take one of init_state")


def _fits(state, start, idx):
    """Whether a state has the structure of `start`, its shapes but for the batch, and the batch and device of idx. None
    stands for the state of an operation, which checks it."""
    if isinstance(start, Tensor):
        is_float = isinstance(state, Tensor) and state.is_floating_point()
        return is_float and (state.shape, state.device) == ((len(idx), *start.shape[1:]), idx.device)
    if start is None or isinstance(start, int):
        return isinstance(state, (tuple, type(None)) if start is None else int)
    is_list = isinstance(state, (list, tuple)) and len(state) == len(start)
    return is_list and all(_fits(*pair, idx) for pair in zip(state, start))


def _compute_dtype(*tensors):
    return torch.float64 if torch.float64 in [x.dtype for x in tensors if x is not None] else torch.float32


def _in_dtype(dtype, *tensors):
    return tuple(x if x is None or x.dtype == dtype else x.to(dtype) for x in tensors)


def _refuse_forward_mode():
    if forward_ad._current_level >= 0:  # PyTorch would take the tangent of an operator for zero, without a word
        raise NotImplementedError("no forward mode (jvp, jacfwd, forward_ad) but with backend='reference'")


def _operator(schema, forward, like, backward, grads_like, saved, outputs=1):
    """A differentiable operator, forward and backward each one opaque node for torch.compile, autocast and DDP.

    schema      "name(Tensor q, bool real) -> (Tensor, Tensor)" of forward, as in torch.library; tensors come first
    backward    takes the gradients of the first `outputs` results, what is saved, and the arguments that are no
                tensors; returns a gradient for each tensor argument, any tensor for one that is None
    saved       names of arguments and numbers of results
    like, grads_like    take the same as forward and backward, and return empty tensors of the right shapes
    """
    name, arguments, results = re.fullmatch(r"(\w+)\((.*)\) -> (.*)", schema).groups()
    arguments = arguments.split(", ")
    names = [x.split()[1] for x in arguments]
    n = sum(x.startswith("Tensor") for x in arguments)
    numbers = [names.index(x) if isinstance(x, str) else len(names) + x for x in saved]
    given = [f"Tensor grad{i}" for i in range(outputs)] + [f"Tensor? saved{i}" for i in range(len(saved))]
    signature = f"({', '.join(given + arguments[n:])}) -> ({', '.join(n * ['Tensor'])})"
    create = partial(torch.library.custom_op, mutates_args=())
    operator = create(f"nanohilbert::{name}", forward, schema=f"({', '.join(arguments)}) -> {results}")
    gradient = create(f"nanohilbert::{name}_backward", backward, schema=signature)
    operator.register_fake(like)
    gradient.register_fake(grads_like)

    def setup(ctx, inputs, output):
        ctx.set_materialize_grads(False)  # no zeros for what is only there for the backward
        output = output if isinstance(output, tuple) else (output,)
        values = *inputs, *output
        ctx.save_for_backward(*(values[i] for i in numbers))
        ctx.given, ctx.rest = [x is not None for x in inputs[:n]], inputs[n:]
        ctx.zeros = [partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device) for x in output[:outputs]]

    def vjp(ctx, *grads):
        _refuse_forward_mode()
        grads = [zeros() if grad is None else grad for grad, zeros in zip(grads, ctx.zeros)]
        found = gradient(*grads, *ctx.saved_tensors, *ctx.rest)
        return *(grad if given else None for grad, given in zip(found, ctx.given)), *(None for _ in ctx.rest)

    operator.register_autograd(vjp, setup_context=setup)

    def call(*inputs):
        _refuse_forward_mode()
        return operator(*inputs)

    return call


def _empty_like(*tensors):
    """Contiguous, of the same shapes and dtypes; without elements for None."""
    given = next(x for x in tensors if x is not None)
    return tuple(given.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def _slices(n, size):
    """0 ... n in pieces of at most `size`."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _groups(n, numbers, device):
    """0 ... n in pieces to work on together: on a CPU what stays in cache, at so many numbers each; elsewhere all."""
    return _slices(n, max(1, 2**17 // max(1, numbers) if device.type == "cpu" else n))


def _times_i(x):
    """i x for rows of pairs (..., 2n)."""
    re, im = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-im, re), -1).flatten(-2)


# ---- complex_scan, on planes: lists [re, im], or [re] alone where everything is real ----

CLAMPED_CHUNK = 64  # chunk length of QS section 5.7


def complex_scan_clamped(log_decay, theta, b, h0):
    """QS Algorithm 2 to the letter, chunk by chunk. Wrong once a chunk's summed log-decay passes -30: see PAPERS.md."""
    log_decay, x, chunks = log_decay.expand(theta.shape), h0, []  # x (B, C, 2)
    for ld, th, b_chunk in zip(*(t.split(CLAMPED_CHUNK, dim=1) for t in (log_decay, theta, b))):
        ell = ld.cumsum(1).clamp(-30, 0)  # line 1, l
        angle = th.cumsum(1)  # line 1, vartheta
        P = _polar(ell.exp(), angle)  # line 2
        P_inverse = _polar((-ell).exp(), -angle)
        chunks.append(_complex_mul(P, x.unsqueeze(1) + _complex_mul(b_chunk, P_inverse).cumsum(1)))  # line 3, QS eq. 4
        x = chunks[-1][:, -1]
    return torch.cat(chunks, 1), x.clone()  # a view would keep its chunk alive


def _polar(modulus, angle):
    return torch.stack((modulus * angle.cos(), modulus * angle.sin()), -1)


def _complex_mul(x, y):
    (x_re, x_im), (y_re, y_im) = x.unbind(-1), y.unbind(-1)
    return torch.stack((x_re * y_re - x_im * y_im, x_re * y_im + x_im * y_re), -1)


def _step(a, h, b, out=(None, None)):
    """a h + b for lists of planes: [re, im], or [re] alone where everything is real."""
    re = torch.addcmul(b[0], a[0], h[0], out=out[0])
    if len(a) == 1:
        return [re]
    re.addcmul_(a[1], h[1], value=-1)
    return [re, torch.addcmul(b[1], a[0], h[1], out=out[1]).addcmul_(a[1], h[0])]


def _scan(a, b, h0, reverse=False):
    """h_t = a_t h_{t-1} + b_t on lists of planes (B, T, C); h0 planes (B, C). Returns planes (B, T, C).

    Time is cut into chunks that advance together: a first pass finds each chunk's end state and the product of its a_t,
    a short loop carries the states from chunk to chunk, and a second pass writes the trajectory. Exact: only products
    of a_t occur, never a quotient. With `reverse`, time runs from the end to the start.
    """
    B, T, C = b[0].shape
    # On a CPU one step should fill the cache but not leave it; elsewhere few large launches win.
    chunks = max(1, min(T // 8, 16384 // max(1, B * C))) if b[0].device.type == "cpu" else max(1, int(T**0.5))
    length = -(-T // chunks)

    def time_major(x, identity):  # (B, T, C) -> (length, chunks, B, C), padded with a = 1, b = 0
        x = F.pad(x, (0, 0, 0, chunks * length - T), value=identity) if chunks * length > T else x
        return x.reshape(B, chunks, length, C).permute(2, 1, 0, 3).clone(memory_format=torch.contiguous_format)

    def in_order(planes):  # planes (n, ...) -> n lists of planes (...), in the order of time
        return list(zip(*(x.unbind(0)[::-1] if reverse else x.unbind(0) for x in planes)))

    trajectory = [time_major(x, 0.0) for x in b]  # holds b, which the second pass overwrites with h
    a_steps = in_order([time_major(x, 1.0 if i == 0 else 0.0) for i, x in enumerate(a)])
    b_steps = in_order(trajectory)
    h = [x.unsqueeze(0) for x in h0]  # (chunks, B, C): the state before each chunk
    if chunks > 1:
        end, product = b_steps[0], a_steps[0]
        zero = [torch.zeros_like(x) for x in product]
        for a_t, b_t in zip(a_steps[1:], b_steps[1:]):
            end, product = _step(a_t, end, b_t), _step(a_t, product, zero)
        starts = [h0]
        for product_k, end_k in list(zip(in_order(product), in_order(end)))[:-1]:
            starts.append(_step(product_k, starts[-1], end_k))
        h = [torch.stack(x[::-1] if reverse else x) for x in zip(*starts)]
    for a_t, b_t in zip(a_steps, b_steps):
        h = _step(a_t, h, b_t, out=b_t)
    return [x.permute(2, 1, 0, 3).reshape(B, chunks * length, C)[:, :T] for x in trajectory]


def _transition(log_decay, theta):
    """a_t = alpha_t lambda_t (Algorithm 1, line 3): (1, B, T, C) if real, else its two parts, (2, B, T, C)."""
    modulus = log_decay.exp()
    if theta is None:
        return modulus.unsqueeze(0).contiguous()
    a = modulus.new_empty(2, *theta.shape)
    torch.cos(theta, out=a[0])
    torch.sin(theta, out=a[1])
    return a.mul_(modulus)


def _planes(x, is_complex):
    return list(x.unbind(-1)) if is_complex else [x]


def _pairs(planes):
    if len(planes) == 1:
        return planes[0].contiguous()
    pairs = planes[0].new_empty(*planes[0].shape, 2)
    pairs[..., 0], pairs[..., 1] = planes  # a third of the time of torch.stack
    return pairs


def _complex_scan_forward(log_decay, theta, b, h0):
    """h, and a for the backward: it takes the place of log_decay and theta, so keeping it costs nothing."""
    a, is_complex = _transition(log_decay, theta), theta is not None
    return _pairs(_scan(a.unbind(0), _planes(b, is_complex), _planes(h0, is_complex))), a


def _complex_scan_backward(grad, a, h, h0):
    is_complex = len(a) == 2
    conj_next = F.pad(a[:, :, 1:], (0, 0, 0, 1))  # conj(a_{t+1}); nothing follows the last step
    conj_next[1:].neg_()
    first = _planes(h0, is_complex)
    g = _scan(conj_next.unbind(0), _planes(grad, is_complex), [torch.zeros_like(x) for x in first], reverse=True)
    previous = [torch.cat((x.unsqueeze(1), y[:, :-1]), 1) for x, y in zip(first, _planes(h, is_complex))]  # h_{t-1}
    carried = _conj_mul(a, g)  # conj(a_t) g_t, what flows back into h_{t-1}
    grads = *_conj_mul(previous, carried), a.new_empty(0)  # conj(z_t) g_t = conj(h_{t-1}) conj(a_t) g_t
    return *grads[:2], _pairs(g), _pairs([x[:, 0] for x in carried])


def _conj_mul(x, y):
    """conj(x) y for lists of planes."""
    if len(x) == 1:
        return [x[0] * y[0]]
    return [(x[0] * y[0]).addcmul_(x[1], y[1]), (x[0] * y[1]).addcmul_(x[1], y[0], value=-1)]


_complex_scan = _operator(
    "complex_scan(Tensor log_decay, Tensor? theta, Tensor b, Tensor h0) -> (Tensor, Tensor)",
    _complex_scan_forward,
    lambda log_decay, theta, b, h0: (*_empty_like(b), b.new_empty(1 if theta is None else 2, *log_decay.shape)),
    _complex_scan_backward,
    lambda grad, a, h, h0: (*_empty_like(a[0], a[1] if len(a) == 2 else None), *_empty_like(h, h0)),
    saved=(1, 0, "h0"),
)

# ---- selective_scan, in chunks; the backward recomputes h inside each of them from the state before it ----

SELECTIVE_CHUNK = 16


def _chunk_states(u, dt, A, B, h):
    """States of one chunk from the state before it. u, dt (L, B, E), B (L, B, N), h (B, E, N).

    Returns exp(dt A) and the states, both (L, B, E, N)."""
    decay = (dt.unsqueeze(-1) * A).exp_()
    states = (dt * u).unsqueeze(-1) * B.unsqueeze(-2)
    for decay_t, state_t in zip(decay.unbind(0), states.unbind(0)):
        h = state_t.addcmul_(decay_t, h)
    return decay, states


def _selective_like(u, dt, A, B, C, h0, use_triton):
    """y, the last state, and the states before each chunk."""
    return *_empty_like(u, h0), h0.new_empty(-(-u.shape[1] // SELECTIVE_CHUNK), *h0.shape)


def _selective_forward(u, dt, A, B, C, h0, use_triton):
    y, hT, starts = _selective_like(u, dt, A, B, C, h0, use_triton)
    if use_triton:
        _selective_forward_triton(u, dt, A, B, C, h0, y, hT, starts)
        return y, hT, starts
    for rows in _groups(len(u), SELECTIVE_CHUNK * A.numel(), u.device):
        u_r, dt_r, B_r, C_r = (x[rows].transpose(0, 1).contiguous() for x in (u, dt, B, C))  # time-major
        h = h0[rows]
        for start, s in zip(starts, _slices(u.shape[1], SELECTIVE_CHUNK)):
            start[rows] = h
            _, states = _chunk_states(u_r[s], dt_r[s], A, B_r[s], h)
            h = states[-1].clone()
            y[rows, s] = states.mul_(C_r[s].unsqueeze(-2)).sum(-1).transpose(0, 1)
        hT[rows] = h
    return y, hT, starts


def _selective_backward(grad_y, grad_hT, u, dt, A, B, C, starts, use_triton):
    if use_triton:
        return _selective_backward_triton(grad_y, grad_hT, u, dt, A, B, C, starts)
    grad_u, grad_dt, grad_A, grad_B, grad_C, grad_h0 = _empty_like(u, dt, A, B, C, starts[0])
    grad_A.zero_()
    for rows in _groups(len(u), SELECTIVE_CHUNK * A.numel(), u.device):
        gy_r, u_r, dt_r, B_r, C_r = (x[rows].transpose(0, 1).contiguous() for x in (grad_y, u, dt, B, C))
        g = grad_hT[rows]  # what flows back into the last state of the chunk
        for start, s in reversed(list(zip(starts, _slices(u.shape[1], SELECTIVE_CHUNK)))):
            gy, u_s, dt_s, B_s = gy_r[s], u_r[s], dt_r[s], B_r[s]
            x, h = dt_s * u_s, start[rows]
            decay, states = _chunk_states(u_s, dt_s, A, B_s, h)
            chunk_grad_C = (gy.unsqueeze(-1) * states).sum(-2)  # not matmul: autocast or TF32 would round it
            adjoint = gy.unsqueeze(-1) * C_r[s].unsqueeze(-2)  # (L, B, E, N)
            adjoint[-1] += g
            for t in range(len(adjoint) - 1, 0, -1):
                adjoint[t - 1].addcmul_(decay[t], adjoint[t])
            g = decay[0] * adjoint[0]
            chunk_grad_B = (x.unsqueeze(-1) * adjoint).sum(-2)
            grad_x = (adjoint * B_s.unsqueeze(-2)).sum(-1)
            w = adjoint.mul_(decay)
            w[0] *= h
            w[1:] *= states[:-1]
            chunk_grad_dt = (w * A).sum(-1).addcmul_(grad_x, u_s)
            grad_A += w.mul_(dt_s.unsqueeze(-1)).sum((0, 1))
            chunk_grads = grad_x * dt_s, chunk_grad_dt, chunk_grad_B, chunk_grad_C
            for out, value in zip((grad_u, grad_dt, grad_B, grad_C), chunk_grads):
                out[rows, s] = value.transpose(0, 1)
        grad_h0[rows] = g
    return grad_u, grad_dt, grad_A, grad_B, grad_C, grad_h0


_selective_scan = _operator(
    "selective_scan(Tensor u, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor h0, bool use_triton)"
    " -> (Tensor, Tensor, Tensor)",
    _selective_forward,
    _selective_like,
    _selective_backward,
    lambda grad_y, grad_hT, u, dt, A, B, C, starts, use_triton: _empty_like(u, dt, A, B, C, starts[0]),
    saved=("u", "dt", "A", "B", "C", 2),
    outputs=2,
)

# ---- born_attention: rows of N pairs, 2N wide; u = (v, 1) ----

BORN_CHUNK = 64  # tokens a chunk


def _linear_is_faster(T, N, triton):
    """Quadratic costs about T N a token, linear N^3. Where they cross was measured on a CPU, forward and backward; for
    Triton it was estimated from the number of compiled instructions, and is yet to be measured."""
    return T >= max(2048, 16 * N * N) and N <= BORN_WIDEST if triton else T >= max(384, 3 * N * N)


def _unit(q):
    """q / |q| over the last axis, 0 for q = 0, with finite gradients; scaled first, as squares leave float32 early."""
    q = q / q.detach().abs().amax(-1, keepdim=True).clamp(min=TINY)
    return q * (q.square().sum(-1, keepdim=True) + 1e-12).rsqrt()  # the sum is 1 or more, unless |q| < TINY


def _feature_masks(N, like):
    """phi keeps the lower triangle of Re x x^* and the strict upper of Im x x^*; sqrt 2 counts what is left out."""
    ones = torch.full((N, N), 2**0.5, dtype=like.dtype, device=like.device)
    return ones.tril(-1) + torch.eye(N, dtype=like.dtype, device=like.device), ones.triu(1)


def _re_im(x):
    """Real and imaginary parts of rows of pairs, each in one piece."""
    return x.unflatten(-1, (-1, 2)).movedim(-1, 0).contiguous()


def _features(x):
    """phi: (..., 2N) -> (..., N^2) with phi(x).phi(y) = |<x|y>|^2."""
    re, im = _re_im(x)
    lower, upper = _feature_masks(re.shape[-1], x)
    symmetric = re.unsqueeze(-1) * re.unsqueeze(-2) + im.unsqueeze(-1) * im.unsqueeze(-2)  # Re x x^*
    skew = im.unsqueeze(-1) * re.unsqueeze(-2) - re.unsqueeze(-1) * im.unsqueeze(-2)  # Im x x^*
    return (symmetric * lower + skew * upper).flatten(-2)


def _features_backward(grad, x):
    re, im = _re_im(x).unsqueeze(-1)  # (..., N, 1)
    N = x.shape[-1] // 2
    lower, upper = _feature_masks(N, x)
    grad = grad.unflatten(-1, (N, N))
    symmetric, skew = grad * lower, grad * upper
    symmetric, skew = symmetric + symmetric.mT, skew - skew.mT
    return torch.cat((symmetric @ re - skew @ im, symmetric @ im + skew @ re), -1).flatten(-2)


def _mass(S):
    """sum |k|^2 of what S sums, (..., 1): the features |k_n|^2 in the column of ones."""
    return S[..., :: S.shape[-1] // 2 + 1, -1].sum(-1, keepdim=True)


def _scores(q, k):
    """Real and imaginary part of <q|k>, and the causal weights. q (G, t, 2N) are the last t of the s positions of k."""
    re, im = q @ k.mT, _times_i(q) @ k.mT
    return re, im, (re.square() + im.square()).tril(k.shape[1] - q.shape[1])


def _scores_backward(grad, q, k, u):
    """Gradients for q, k and u of w u."""
    re, im, w = _scores(q, k)
    grad_w = (grad @ u.mT).tril_(k.shape[1] - q.shape[1]).mul_(2)
    grad_re, grad_im = re * grad_w, im * grad_w
    grad_q = grad_re @ k - _times_i(grad_im @ k)  # the adjoint of i is -i
    return grad_q, grad_re.mT @ q + grad_im.mT @ _times_i(q), w.mT @ grad


def _born_chunks(q, k):
    """(queries, keys) of each chunk; k holds fewer tokens than a chunk before the first query."""
    before = k.shape[1] - q.shape[1]
    return [(slice(max(0, s.start - before), s.stop - before), s) for s in _slices(k.shape[1], BORN_CHUNK)]


def _born_sum_like(q, k, u, S, linear):
    """s (G, T, 2N+1); and for the backward of the linear form the state before each chunk (chunks, G, N^2, 2N+1)."""
    states = (-(-k.shape[1] // BORN_CHUNK), len(q), q.shape[2] ** 2 // 4, u.shape[2]) if linear else (0,)
    return q.new_empty(*q.shape[:2], u.shape[2]), q.new_empty(states)


def _born_sum_forward(q, k, u, S, linear):
    s, states = _born_sum_like(q, k, u, S, linear)
    with torch.autocast(q.device.type, enabled=False):
        for i, (queries, keys) in enumerate(_born_chunks(q, k)):
            # The forms differ in how much of the past is seen as keys; what came before those is in S.
            seen = keys if linear else slice(0, keys.stop)
            s[:, queries] = _scores(q[:, queries], k[:, seen])[2] @ u[:, seen]  # quadratic: W U
            if S is not None:
                s[:, queries] += _features(q[:, queries]) @ S  # linear: phi(q) S
            if linear:
                states[i] = 0 if S is None else S
                S = states[i] + _features(k[:, keys]).mT @ u[:, keys]
    return s, states


def _born_sum_backward(grad, q, k, u, S, states, linear):
    grad_q, grad_k, grad_u = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(u)
    grad_S = q.new_zeros(len(q), q.shape[2] ** 2 // 4, u.shape[2])
    with torch.autocast(q.device.type, enabled=False):
        for i, (queries, keys) in reversed(list(enumerate(_born_chunks(q, k)))):
            seen = keys if linear else slice(0, keys.stop)
            q_i, k_i, u_i, g = q[:, queries], k[:, seen], u[:, seen], grad[:, queries]
            if linear:  # grad_S is dL/dS after this chunk
                grad_k[:, keys] += _features_backward(u_i @ grad_S.mT, k_i)
                grad_u[:, keys] += _features(k_i) @ grad_S
            parts = _scores_backward(g, q_i, k_i, u_i)
            for total, part in zip((grad_q[:, queries], grad_k[:, seen], grad_u[:, seen]), parts):
                total += part
            before = states[i] if linear else S
            if before is not None:
                grad_q[:, queries] += _features_backward(g @ before.mT, q_i)
                grad_S += _features(q_i).mT @ g
    return grad_q, grad_k, grad_u, grad_S


_born_sum = _operator(
    "born_sum(Tensor q, Tensor k, Tensor u, Tensor? S, bool linear) -> (Tensor, Tensor)",
    _born_sum_forward,
    _born_sum_like,
    _born_sum_backward,
    lambda grad, q, k, u, S, *_: (*_empty_like(q, k, u), q.new_empty(len(q), q.shape[2] ** 2 // 4, u.shape[2])),
    saved=("q", "k", "u", "S", 1),
)


def _born_in_torch(q, S, k, v, linear):
    """o, of queries that are the last of the positions of k; S (B, H, N^2, 2N+1) sums what came before those."""
    q, k, u = _unit(q.flatten(-2)), k.flatten(-2), F.pad(v.flatten(-2), (0, 1), value=1.0)
    inputs = q, k, u, S
    s, _ = _born_sum(*(None if x is None else x.flatten(0, 1) for x in inputs), linear)
    s = s.unflatten(0, q.shape[:2])
    mass = k.square().sum(-1).cumsum(2)[:, :, -q.shape[2] :]  # sum_{j<=i} |k_j|^2
    if S is not None:
        mass = mass + _mass(S)
    weight = s[..., -1].clamp(min=0)  # the rounding of a state can make it negative
    o = s[..., :-1] / (weight + BORN_FLOOR * mass + TINY).unsqueeze(-1)
    return o.unflatten(-1, (-1, 2))


def born_fold(state):
    """Folds the whole chunks among a state's newest tokens into S. Afterwards fewer than 64 tokens are left."""
    S, k, v = state
    full = k.shape[2] // BORN_CHUNK * BORN_CHUNK
    if not full:
        return S, k, v
    with torch.autocast("cpu" if k.is_meta else k.device.type, enabled=False):
        for chunk in _slices(full, BORN_CHUNK):
            u = F.pad(v[:, :, chunk].flatten(-2), (0, 1), value=1.0)
            part = _features(k[:, :, chunk].flatten(-2)).mT @ u
            S = part if S is None else S + part
    return S, k[:, :, full:], v[:, :, full:]


# ---- phase_memory ----
# Complex products are real ones. A row of n complex numbers is one of 2n reals, the real parts first. `_rows` of X is
# [X; iX], with the rows of iX below those of X; its adjoint, `_fold` of [X; Y], is X - iY. Then, in real products,
#     Q M = Q [M; iM]        G M^H = G [M; iM]^T        K^H V = fold(K^T V)        Q K^H V = fold(([Q; iQ] K^T) V)
# A real memory takes the same path without either.

PHASE_CHUNK = 32  # tokens a chunk, but no fewer than coordinates: a chunk costs work on its state


def _rows(x, real):
    """x (..., m, n) if real, else (..., m, 2n) -> (..., 2m, 2n)"""
    if real:
        return x
    re, im = x.chunk(2, -1)
    return torch.cat((x, torch.cat((-im, re), -1)), -2)


def _fold(x, real):
    """x (..., m, n) if real, else (..., 2m, 2n) -> (..., m, 2n)"""
    if real:
        return x
    x, y = x.chunk(2, -2)
    re, im = y.chunk(2, -1)
    return x + torch.cat((im, -re), -1)


def _decays(log_gamma):
    """log_gamma (..., c) -> what is left at token t of the state before the chunk (..., c, 1), and of token i: E."""
    c = log_gamma.shape[-1]
    before = torch.ones(c, c, dtype=torch.bool, device=log_gamma.device).tril(-1)  # [j, i]: i < j
    between = torch.where(before, log_gamma.unsqueeze(-1), 0.0).cumsum(-2)  # [t, i]: sum over i < j <= t
    return log_gamma.cumsum(-1).exp().unsqueeze(-1), between.masked_fill_(before.mT, -torch.inf).exp_()


def _weigh(scores, E):
    """scores (..., c, c), or of both parts (..., 2c, c), times the decay from every token of the chunk."""
    c = E.shape[-1]
    return (scores.unflatten(-2, (-1, c)) * E.unsqueeze(-3)).flatten(-3, -2)


def _phase_like(q, k, v, log_gamma, M, real):
    return *_empty_like(v, M), M.new_empty(q.shape[1], *M.shape)


def _phase_forward(q, k, v, log_gamma, M, real):
    """q, k, v (G, chunks, c, d or 2d), log_gamma (G, chunks, c), M (G, d, d or 2d): y, last M, M before each chunk."""
    y, _, starts = _phase_like(q, k, v, log_gamma, M, real)
    with torch.autocast(q.device.type, enabled=False):
        for part in _groups(q.shape[1], len(q) * q.shape[2] ** 2, q.device):
            q_, k_, v_, (head, E) = q[:, part], k[:, part], v[:, part], _decays(log_gamma[:, part])
            added = _fold((k_ * E[..., -1, :, None]).mT @ v_, real)
            for start, whole, new in zip(starts[part], head[..., -1:, :].unbind(1), added.unbind(1)):
                start.copy_(M)
                M = torch.addcmul(new, whole, M)
            y_ = _fold(_weigh(_rows(q_, real) @ k_.mT, E) @ v_, real)
            y[:, part] = y_.addcmul_(head, q_ @ _rows(starts[part].transpose(0, 1), real))
    return y, M.clone(), starts


def _phase_backward(grad, grad_M, q, k, v, log_gamma, starts, real):
    grad_q, grad_k, grad_v, grad_gates = _empty_like(q, k, v, log_gamma)
    N = grad_M
    before = torch.ones(q.shape[2], q.shape[2], dtype=q.dtype, device=q.device).tril(-1)  # [j, i]: i < j
    with torch.autocast(q.device.type, enabled=False):
        for part in reversed(_groups(q.shape[1], len(q) * q.shape[2] ** 2, q.device)):
            q_, k_, v_, g, (head, E) = q[:, part], k[:, part], v[:, part], grad[:, part], _decays(log_gamma[:, part])
            M, whole, tail = starts[part].transpose(0, 1), head[..., -1:, :], E[..., -1, :, None]
            added, ends = _fold((head * q_).mT @ g, real), []
            for by, new in zip(whole.unbind(1)[::-1], added.unbind(1)[::-1]):
                ends.append(N)  # dL/dM after this chunk
                N = torch.addcmul(new, by, N)
            ends = torch.stack(ends[::-1], 1)
            rows_q, rows_g, rows_N = _rows(q_, real), _rows(g, real), _rows(ends, real)
            scores, grad_scores = _weigh(rows_q @ k_.mT, E), rows_g @ v_.mT
            through = scores * grad_scores  # E dL/dE
            through = through.unflatten(-2, (-1, E.shape[-1])).sum(-3)
            grad_scores = _weigh(grad_scores, E)
            q_state, k_state = head * (g @ _rows(M, real).mT), tail * (v_ @ rows_N.mT)
            grad_q[:, part] = _fold(grad_scores @ k_, real) + q_state
            grad_k[:, part] = grad_scores.mT @ rows_q + k_state
            grad_v[:, part] = scores.mT @ rows_g + tail * (k_ @ rows_N)
            from_state = (q_ * q_state).sum(-1, keepdim=True)
            from_state[..., -1:, :] += whole * (M * ends).sum((-2, -1), keepdim=True)
            through[..., -1, :] += (k_ * k_state).sum(-1)  # to the end of the chunk
            # [t, j]: sum over i < j; then the sum over t >= j
            grad_gates[:, part] = (through @ before.mT + from_state).tril_().sum(-2)
    return grad_q, grad_k, grad_v, grad_gates, N.clone()


_phase_memory = _operator(
    "phase_memory(Tensor q, Tensor k, Tensor v, Tensor log_gamma, Tensor M, bool real) -> (Tensor, Tensor, Tensor)",
    _phase_forward,
    _phase_like,
    _phase_backward,
    lambda grad, grad_M, q, k, v, log_gamma, starts, real: _empty_like(q, k, v, log_gamma, starts[0]),
    saved=("q", "k", "v", "log_gamma", 2),
    outputs=2,
)


def _in_rows(x, real):
    """x (..., d) if real, else (..., d, 2) -> (..., 2d), real parts first"""
    return x if real else x.mT.flatten(-2)


def _in_pairs(x, real):
    return x if real else x.unflatten(-1, (2, -1)).mT.contiguous()


def _phase_in_chunks(q, k, v, log_gamma, S, real):
    B, H, T = log_gamma.shape
    c = min(T, max(PHASE_CHUNK, q.shape[3]))

    def in_chunks(x):  # (B, H, T, n) -> (B*H, chunks, c, n), padded with gamma = 1 and zeros
        return F.pad(x, (0, 0, 0, -T % c)).flatten(0, 1).unflatten(1, (-1, c))

    M = _in_rows(S.transpose(2, 3), real).flatten(0, 1)  # (B*H, k, v or 2v)
    q, k, v = (in_chunks(_in_rows(x, real)) for x in (q, k, v))
    y, M, _ = _phase_memory(q, k, v, in_chunks(log_gamma.contiguous().unsqueeze(-1)).squeeze(-1), M.contiguous(), real)
    y = _in_pairs(y.flatten(1, 2)[:, :T].unflatten(0, (B, H)), real)
    return y, _in_pairs(M.unflatten(0, (B, H)), real).transpose(2, 3)


def phase_memory_dual(q, k, v, log_gamma, state=None, real=False):
    """The O(T^2) form in which the paper trains, eq. 7: Y = (Q K^H * D) V with log D_ti = sum_{i<j<=t} log gamma_j.
    Arguments as phase_memory. Only y: the state is what the recurrence is for."""
    dtype = _compute_dtype(q, k, v, log_gamma, state)
    q, k, v = (_in_rows(x.to(dtype), real) for x in (q, k, v))
    head, D = _decays(log_gamma.to(dtype))
    with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):
        y = _fold(_weigh(_rows(q, real) @ k.mT, D) @ v, real)
        if state is not None:
            y = y + head * (q @ _rows(_in_rows(state.to(dtype).transpose(2, 3), real), real))
    return _in_pairs(y, real)


def phase_memory_step(q, k, v, log_gamma, S, real=False):
    """One token of the recurrence, O(d^2) a head whatever came before. q, k, v (B, H, d, 2), log_gamma (B, H),
    S (B, H, d, d, 2), all without the last axis if real; returns y (B, H, d, 2) and the next S."""
    gamma = log_gamma.exp()
    if real:
        S = gamma[..., None, None] * S + v.unsqueeze(-1) * k.unsqueeze(-2)  # PAM eq. 6
        return (S * q.unsqueeze(-2)).sum(-1), S  # PAM, before eq. 7
    v_re, v_im = v.unsqueeze(-2).unbind(-1)  # (B, H, d, 1)
    k_re, k_im = k.unsqueeze(-3).unbind(-1)  # (B, H, 1, d)
    outer = torch.stack((v_re * k_re + v_im * k_im, v_im * k_re - v_re * k_im), -1)
    S = gamma[..., None, None, None] * S + outer  # PAM eq. 6
    (S_re, S_im), (q_re, q_im) = S.unbind(-1), q.unsqueeze(-3).unbind(-1)
    return torch.stack(((S_re * q_re - S_im * q_im).sum(-1), (S_re * q_im + S_im * q_re).sum(-1)), -1), S


# ----------------------------------------------------------------------------------------------------------------------
# Part III: in Triton

# Of every Triton program. With 8 warps, compilers of several versions failed on H100; the default of fusion is
# changing, and with it bits; without a bound of its own the assembler spills a few registers to fit one more program on
# a multiprocessor.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True, "maxnreg": 255}


def _launch(kernel, programs, *args, **constants):
    """Every start of a Triton kernel, on one grid axis."""
    device = next(x for x in args if isinstance(x, Tensor)).device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](*args, **constants, **OPTIONS)


class Rows(NamedTuple):
    """A tensor that a kernel reads where it lies: the numbers of a row follow one another, and rows, sequences of the
    batch, and heads are so many numbers apart. Tensors that kernels take are Rows unless their names end in _ptr;
    what is written in capitals is a constant of the compilation."""

    ptr: Tensor
    row: int
    batch: int = 0
    head: int = 0


def _heads(*tensors):
    """Tensors (B, H, T, ...) as Rows, copied only where the numbers of a row do not follow one another."""
    for x in tensors:
        x = x if x is None or x[0, 0, 0].is_contiguous() else x.contiguous()
        yield None if x is None else Rows(x, x.stride(2), x.stride(0), x.stride(1))


def _autocast(*tensors):
    """Under autocast, of either dtype, bfloat16: in that the kernels multiply half precision, and what went through
    float16 before would have the range of one and the digits of the other."""
    if not torch.is_autocast_enabled(tensors[0].device.type) or all(x.dtype == torch.float16 for x in tensors):
        return tensors
    return [x.bfloat16() for x in tensors]


def _matrix(x, rows):
    """x as so many Rows, copied only where the strides ask for it: not for a slice of the last axis."""
    if x is None:
        return None
    x = x.reshape(rows, -1)
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    return Rows(x, x.stride(0))


# ---- complex_scan ----
# Programs share out (batch, segments of time, channels). Each walks over tiles of time by channels: an associative scan
# inside the tile, the state carried from tile to tile. Where batch and channels alone would leave the chip idle, time
# is cut into segments: a first pass finds the product and the end state of each, and every program composes those
# before its own. a_t is formed in registers from (log_decay, theta), or from what H-Mamba's projection emits. The
# backward walks from the end to the start by index and forms a_t and a_{t+1} again. A complex number is a tuple
# (re, im); in a real scan, which has no angles, both are the real number, and the second is never stored.

SCAN_TILES = (32, 32), (32, 16)  # time and channels in the forward, and in the backward, which needs more registers
SCAN_PROGRAMS = 512  # below this, time is cut into segments: about four for each multiprocessor of an A100 or H100

if triton is not None:

    @triton.jit
    def _compose(a1_re, a1_im, b1_re, b1_im, a2_re, a2_im, b2_re, b2_im):
        """The map h -> a2 (a1 h + b1) + b2: one step after another."""
        return (
            a2_re * a1_re - a2_im * a1_im,
            a2_re * a1_im + a2_im * a1_re,
            a2_re * b1_re - a2_im * b1_im + b2_re,
            a2_re * b1_im + a2_im * b1_re + b2_im,
        )

    @triton.jit
    def _compose_real(a1, b1, a2, b2):
        return a2 * a1, a2 * b1 + b2

    @triton.jit
    def _cos_sin(x):
        """cos x and sin x to 2e-7 for |x| < 1e5, without the branches and the local memory of the library's. x is
        k pi/2 + r with pi/2 in three parts (Cody and Waite), then come the polynomials of Cephes for |r| < pi/4."""
        k = tl.floor(x * 0.6366197723675814 + 0.5)
        r = tl.fma(k, -1.5703125, x)
        r = tl.fma(k, -4.837512969970703e-4, r)
        r = tl.fma(k, -7.549789948768648e-8, r)
        z = r * r
        sin = r + r * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
        cos = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 - z * (1.388731625493765e-3 - z * 2.443315711809948e-5))
        quadrant = k.to(tl.int32)
        odd = quadrant & 1 == 1
        cos, sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
        return tl.where((quadrant + 1) & 2 == 0, cos, -cos), tl.where(quadrant & 2 == 0, sin, -sin)

    @triton.jit
    def _load(x, row, column, mask):
        return tl.load(x.ptr + row * x.row + column[None, :], mask=mask, other=0.0).to(tl.float32)

    @triton.jit
    def _scan_place(T, H, N, tiles, segments, TIME, CHANNELS, WIDTH):
        """Where this program works: its row of the batch, the channel of each column (WIDTH columns a head, of which N
        are used), which columns there are, its segment, the head of each column, the segment's first time and end."""
        blocks = tl.cdiv(H, CHANNELS // WIDTH)
        batch, rest = tl.program_id(0) // (blocks * segments), tl.program_id(0) % (blocks * segments)
        column = tl.arange(0, CHANNELS)
        head, n = rest % blocks * (CHANNELS // WIDTH) + column // WIDTH, column % WIDTH
        first = rest // blocks * tiles * TIME
        end = tl.minimum(first + tiles * TIME, T)
        return batch.to(tl.int64), head * N + n, (head < H) & (n < N), rest // blocks, head, first, end

    @triton.jit
    def _scan_transition(inputs, row, head, c, mask):
        """a_t, and 1 outside the mask: exp(x) if there is no y, exp(x + i y) if there is no dt, else H-Mamba's, without
        an angle: sigmoid(x) (1 + i phi) / (1 - i phi) with phi = dt / 2 (y + omega), QS Algorithm 1 and eq. 3."""
        xs, ys, dts, omega = inputs
        if dts is None:
            modulus = tl.exp(_load(xs, row, c, mask))
            if ys is None:
                a_re, a_im = modulus, modulus
            else:
                cos, sin = _cos_sin(_load(ys, row, c, mask))
                a_re, a_im = modulus * cos, modulus * sin
        else:
            phi = 0.5 * _load(dts, row, head, mask) * (_load(ys, row, c, mask) + omega)
            phi = tl.where(tl.abs(phi) > 1e18, 1e18, phi)  # half a turn; the square stays finite, and NaN is NaN
            scale = 1.0 + phi * phi
            if xs is not None:
                scale *= 1.0 + tl.exp(-_load(xs, row, c, mask))
            scale = tl.where(mask, 1.0 / scale, 1.0)  # alpha / (1 + phi^2)
            a_re, a_im = scale * (1.0 - phi * phi), scale * 2.0 * phi
        return a_re, a_im

    @triton.jit
    def _scan_tile(inputs, bs, place, start, T, TIME, REAL, REVERSE):
        """The associative scan of one tile whose first step is number `start` of the segment: times, row numbers, mask,
        products of a, states from zero. With REVERSE, time runs backwards from the end, through conj(a_{t+1})."""
        batch, c, used, _, head, first, end = place
        t = end - 1 - start - tl.arange(0, TIME) if REVERSE else first + start + tl.arange(0, TIME)
        inside = (t >= first) & (t < end)
        row = (batch * T + t)[:, None]
        mask = inside[:, None] & used[None, :]
        if REVERSE:  # nothing follows the last step
            a_re, a_im = _scan_transition(inputs, row + 1, head, c, mask & (t + 1 < T)[:, None])
            a_im = -a_im
        else:
            a_re, a_im = _scan_transition(inputs, row, head, c, mask)
        if REAL:
            b_re = _load(bs, row, c, mask)
            a_re, b_re = tl.associative_scan((a_re, b_re), 0, _compose_real)
            a_im, b_im = a_re, b_re
        else:
            b_re, b_im = _load(bs, row, 2 * c, mask), _load(bs, row, 2 * c + 1, mask)
            a_re, a_im, b_re, b_im = tl.associative_scan((a_re, a_im, b_re, b_im), 0, _compose)
        return t, row, mask, (a_re, a_im), (b_re, b_im)

    @triton.jit
    def _scan_after(a, h, b, REAL):
        """a h + b"""
        re = a[0] * h[0] + b[0] if REAL else a[0] * h[0] - a[1] * h[1] + b[0]
        im = re if REAL else a[0] * h[1] + a[1] * h[0] + b[1]
        return re, im

    @triton.jit
    def _last(x, ROWS):
        last = (tl.arange(0, ROWS) == ROWS - 1)[:, None]
        return tl.sum(tl.where(last, x[0], 0.0), 0), tl.sum(tl.where(last, x[1], 0.0), 0)

    @triton.jit
    def _load_pair(ptr, index, mask, REAL):
        re = tl.load(ptr + (index if REAL else 2 * index), mask=mask, other=0.0)
        im = re if REAL else tl.load(ptr + 2 * index + 1, mask=mask, other=0.0)
        return re, im

    @triton.jit
    def _store_pair(ptr, index, x, mask, REAL):
        tl.store(ptr + (index if REAL else 2 * index), x[0], mask=mask)
        if not REAL:
            tl.store(ptr + 2 * index + 1, x[1], mask=mask)

    @triton.jit(do_not_specialize=["T", "tiles", "segments"])  # one compilation for all lengths
    def _scan_summary_kernel(xs, ys, dts, omega_ptr, bs, product_ptr, state_ptr, T, H, N, tiles, segments,
                             TIME: constexpr, CHANNELS: constexpr, WIDTH: constexpr, REVERSE: constexpr):  # fmt: skip
        """The product of a and the state from zero of every segment, (B, segments, C) each."""
        REAL: constexpr = ys is None
        place = _scan_place(T, H, N, tiles, segments, TIME, CHANNELS, WIDTH)
        batch, c, used, segment, head, first, end = place
        omega = 0.0 if omega_ptr is None else tl.load(omega_ptr + c, mask=used, other=0.0)[None, :]
        inputs = xs, ys, dts, omega
        zero = tl.zeros((CHANNELS,), tl.float32)
        product, h = (zero + 1.0, zero), (zero, zero)
        for tile in range(tiles):
            _, _, _, a, b = _scan_tile(inputs, bs, place, tile * TIME, T, TIME, REAL, REVERSE)
            a, b = _last(a, TIME), _last(b, TIME)
            h = _scan_after(a, h, b, REAL)
            product = _scan_after(a, product, (0.0, 0.0), REAL)
        index = (batch * segments + segment) * H * N + c
        _store_pair(product_ptr, index, product, used, REAL)
        _store_pair(state_ptr, index, h, used, REAL)

    @triton.jit
    def _scan_start(product_ptr, state_ptr, batch, begin, count, step, segments, C, c, used, h, REAL):
        """The state after `count` segments from `begin` on, in the order of `step`."""
        for k in range(count):
            index = (batch * segments + begin + k * step) * C + c
            product, state = _load_pair(product_ptr, index, used, REAL), _load_pair(state_ptr, index, used, REAL)
            h = _scan_after(product, h, state, REAL)
        return h

    @triton.jit(do_not_specialize=["T", "tiles", "segments"])
    def _scan_forward_kernel(xs, ys, dts, omega_ptr, bs, product_ptr, state_ptr, h0_ptr, h_ptr,
                             T, H, N, tiles, segments, TIME: constexpr, CHANNELS: constexpr,
                             WIDTH: constexpr):  # fmt: skip
        REAL: constexpr = ys is None
        place = _scan_place(T, H, N, tiles, segments, TIME, CHANNELS, WIDTH)
        batch, c, used, segment, head, first, end = place
        omega = 0.0 if omega_ptr is None else tl.load(omega_ptr + c, mask=used, other=0.0)[None, :]
        inputs = xs, ys, dts, omega
        C = H * N
        h = _load_pair(h0_ptr, batch * C + c, used, REAL)
        h = _scan_start(product_ptr, state_ptr, batch, 0, segment, 1, segments, C, c, used, h, REAL)
        for tile in range(tiles):
            _, row, mask, a, b = _scan_tile(inputs, bs, place, tile * TIME, T, TIME, REAL, False)
            states = _scan_after(a, (h[0][None, :], h[1][None, :]), b, REAL)
            _store_pair(h_ptr, row * C + c[None, :], states, mask, REAL)
            h = _last(states, TIME)

    @triton.jit(do_not_specialize=["T", "tiles", "segments"])
    def _scan_backward_kernel(xs, ys, dts, omega_ptr, grads, product_ptr, state_ptr, h0_ptr, h_ptr, dx_ptr, dy_ptr,
                              ddt_ptr, domega_ptr, db_ptr, dh0_ptr, T, H, N, tiles, segments,
                              TIME: constexpr, CHANNELS: constexpr, WIDTH: constexpr):  # fmt: skip
        REAL: constexpr = ys is None
        place = _scan_place(T, H, N, tiles, segments, TIME, CHANNELS, WIDTH)
        batch, c, used, segment, head, first, end = place
        omega = 0.0 if omega_ptr is None else tl.load(omega_ptr + c, mask=used, other=0.0)[None, :]
        inputs = xs, ys, dts, omega
        C = H * N
        zero = tl.zeros((CHANNELS,), tl.float32)
        g = _scan_start(product_ptr, state_ptr, batch, segments - 1, segments - 1 - segment, -1, segments,
                        C, c, used, (zero, zero), REAL)  # fmt: skip
        omega_sum = zero
        for tile in range(tiles):
            t, row, mask, a, b = _scan_tile(inputs, grads, place, tile * TIME, T, TIME, REAL, True)
            g_t = _scan_after(a, (g[0][None, :], g[1][None, :]), b, REAL)
            g = _last(g_t, TIME)
            index = row * C + c[None, :]
            _store_pair(db_ptr, index, g_t, mask, REAL)
            a = _scan_transition(inputs, row, head, c, mask)
            c_re, c_im = _scan_after((a[0], -a[1]), g_t, (0.0, 0.0), REAL)  # conj(a_t) g_t, carried into h_{t-1}
            later = (t > 0)[:, None]
            at_0 = index - batch * (T - 1) * C  # (batch, c) for t = 0
            _store_pair(dh0_ptr, at_0, (c_re, c_im), mask & (t == 0)[:, None], REAL)
            h, h0 = _load_pair(h_ptr, index - C, mask & later, REAL), _load_pair(h0_ptr, batch * C + c, used, REAL)
            h_re, h_im = tl.where(later, h[0], h0[0][None, :]), tl.where(later, h[1], h0[1][None, :])
            dlog_decay = h_re * c_re if REAL else h_re * c_re + h_im * c_im  # conj(h_{t-1}) times that
            dtheta = h_re * c_im - h_im * c_re
            if dts is None:
                tl.store(dx_ptr + index, dlog_decay, mask=mask)
                if not REAL:
                    tl.store(dy_ptr + index, dtheta, mask=mask)
            else:
                if xs is not None:  # d log sigmoid(x) / dx = sigmoid(-x)
                    dx = dlog_decay / (1.0 + tl.exp(_load(xs, row, c, mask)))
                    tl.store(dx_ptr + index, dx, mask=mask)
                dt = _load(dts, row, head, mask)
                shifted = _load(ys, row, c, mask) + omega
                phi = 0.5 * dt * shifted
                dphi = tl.where(mask, 2.0 * dtheta / (1.0 + phi * phi), 0.0)  # theta = 2 atan(phi)
                tl.store(dy_ptr + index, 0.5 * dt * dphi, mask=mask)
                omega_sum += tl.sum(0.5 * dt * dphi, 0)
                ddt = tl.sum(tl.reshape(0.5 * shifted * dphi, (TIME, CHANNELS // WIDTH, WIDTH)), 2)
                head_of = tl.min(tl.reshape(head, (CHANNELS // WIDTH, WIDTH)), 1)
                ddt_mask = ((t >= first) & (t < end))[:, None] & (head_of < H)[None, :]
                tl.store(ddt_ptr + row * H + head_of[None, :], ddt, mask=ddt_mask)
        if dts is not None:
            tl.store(domega_ptr + (batch * segments + segment) * C + c, omega_sum, mask=used)


def _scan_arguments(x, y, dt, omega, b, tile):
    """For both directions: programs, tensors, numbers, how the work is cut, and the segments."""
    B, T = b.shape[:2]
    H, N = b.shape[2:4] if dt is not None else (b[0, 0].numel() // (1 if y is None else 2), 1)
    x, y, dt, b = (_matrix(tensor, B * T) for tensor in (x, y, dt, b))
    time, channels = tile
    width = triton.next_power_of_2(N)
    while channels < width:  # whole heads, in a tile of the same size
        time, channels = max(1, time // 2), 2 * channels
    tiles, programs = -(-T // time), B * -(-H * width // channels)
    tiles = -(-tiles // max(1, min(tiles, SCAN_PROGRAMS // programs)))  # of a segment
    segments, sizes = -(-T // (tiles * time)), {"TIME": time, "CHANNELS": channels, "WIDTH": width}
    tensors = x, y, dt, None if omega is None else omega.contiguous(), b
    return programs * segments, tensors, (T, H, N, tiles, segments), sizes, segments


def _launch_scan(kernel, arguments, h0, *tensors, reverse=False):
    """With the product and the end state of each segment, or h0 twice where there is one and nobody reads them."""
    programs, inputs, numbers, sizes, segments = arguments
    product = state = h0
    if segments > 1:
        product, state = h0.new_empty(2, len(h0), segments, *h0.shape[1:])
        _launch(_scan_summary_kernel, programs, *inputs, product, state, *numbers, **sizes, REVERSE=reverse)
    _launch(kernel, programs, *inputs, product, state, h0, *tensors, *numbers, **sizes)


def _scan_forward_triton(x, y, dt, omega, b, h0, b_dtype):
    """(x, y) = (log_decay, theta), or (gate, delta) if dt and omega are given; h0 and omega float32."""
    h = h0.new_empty(b.shape)
    _launch_scan(_scan_forward_kernel, _scan_arguments(x, y, dt, omega, b, SCAN_TILES[0]), h0.contiguous(), h)
    return h


def _scan_backward_triton(grad, x, y, dt, omega, h0, h, b_dtype):
    arguments, h0 = _scan_arguments(x, y, dt, omega, grad, SCAN_TILES[1]), h0.contiguous()
    dx, dy, ddt, domega, db, dh0 = _scan_backward_like(grad, x, y, dt, omega, h0, h, b_dtype)
    if omega is not None:
        domega = h0.new_empty(len(h0), arguments[-1], *omega.shape)  # of every segment
    _launch_scan(_scan_backward_kernel, arguments, h0, h, dx, dy, ddt, domega, db, dh0, reverse=True)
    return dx, dy, ddt, domega.sum((0, 1)) if omega is not None else domega, db, dh0


def _scan_backward_like(grad, x, y, dt, omega, h0, h, b_dtype):
    dx, dy, ddt, domega, dh0 = _empty_like(x, y, dt, omega, h0)
    return dx, dy, ddt, domega, h.new_empty(h.shape, dtype=b_dtype), dh0


_triton_scan = _operator(
    "triton_scan(Tensor? x, Tensor? y, Tensor? dt, Tensor? omega, Tensor b, Tensor h0, ScalarType b_dtype) -> Tensor",
    _scan_forward_triton,
    lambda x, y, dt, omega, b, h0, b_dtype: h0.new_empty(b.shape),
    _scan_backward_triton,
    _scan_backward_like,
    saved=("x", "y", "dt", "omega", "h0", 0),
)

# ---- selective_scan ----
# Programs share out (batch, channels) and walk over chunks of time, h in registers: an associative scan along the time
# of a (time, channels, states) tile. The forward stores the state before each chunk. The backward starts from it, runs
# the scan again for the states before each step, turns them round, and scans from the end. What grad_A, grad_B and
# grad_C sum over several programs is written apart and added up afterwards, without atomics; so that this stays small
# beside the inputs, a program of the backward takes several blocks of channels, one after another.

SELECTIVE_TILE = 256, 128  # states of a block (channels times N), in the forward and in the backward
SELECTIVE_PROGRAMS = 1024  # of the backward, at most: two rounds of four for each multiprocessor of an A100 or H100

if triton is not None:

    @triton.jit
    def _selective_place(block, E, N, CHANNELS, WIDTH):
        """The channels of a block and the state numbers, and where the (E, N) states lie and exist."""
        e, n = block * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
        return e, n, e[:, None] * N + n[None, :], (e < E)[:, None] & (n < N)[None, :]

    @triton.jit
    def _selective_rows(batch, T, t, e, E, n, N):
        inside = (t < T)[:, None]
        return (batch * T + t)[:, None], inside & (e < E)[None, :], inside & (n < N)[None, :]

    @triton.jit
    def _compose_before(a1, b1, p1, q1, a2, b2, p2, q2):
        """_compose_real, and beside it the composition of all but the last step."""
        return a2 * a1, a2 * b1 + b2, p2 * a1, p2 * b1 + q2

    @triton.jit(do_not_specialize=["T"])
    def _selective_forward_kernel(us, dts, Bs, Cs, A_ptr, h0_ptr, y_ptr, hT_ptr, starts_ptr, T, E, N,
                                  TIME: constexpr, CHANNELS: constexpr, WIDTH: constexpr):  # fmt: skip
        blocks = tl.cdiv(E, CHANNELS)
        batch, batches = (tl.program_id(0) // blocks).to(tl.int64), tl.num_programs(0) // blocks
        e, n, state, exists = _selective_place(tl.program_id(0) % blocks, E, N, CHANNELS, WIDTH)
        A = tl.load(A_ptr + state, mask=exists, other=0.0).to(tl.float32)
        h = tl.load(h0_ptr + batch * E * N + state, mask=exists, other=0.0)
        for chunk in range(tl.cdiv(T, TIME)):
            tl.store(starts_ptr + (chunk * batches + batch) * E * N + state, h, mask=exists)
            t = chunk * TIME + tl.arange(0, TIME)
            row, mask_e, mask_n = _selective_rows(batch, T, t, e, E, n, N)
            dt = _load(dts, row, e, mask_e)  # 0 outside: decay 1, input 0
            x = dt * _load(us, row, e, mask_e)
            decay = tl.exp(dt[:, :, None] * A[None, :, :])
            states = x[:, :, None] * _load(Bs, row, n, mask_n)[:, None, :]
            decay, states = tl.associative_scan((decay, states), 0, _compose_real)
            states += decay * h[None, :, :]
            y = tl.sum(states * _load(Cs, row, n, mask_n)[:, None, :], 2)
            tl.store(y_ptr + row * E + e[None, :], y, mask=mask_e)
            h = tl.sum(tl.where((tl.arange(0, TIME) == TIME - 1)[:, None, None], states, 0.0), 0)
        tl.store(hT_ptr + batch * E * N + state, h, mask=exists)

    @triton.jit
    def _add(ptr, x, mask, again):
        """x to memory, on top of what this program has written there before, if it has."""
        if again:
            x += tl.load(ptr, mask=mask, other=0.0)
        tl.store(ptr, x, mask=mask)

    @triton.jit(do_not_specialize=["T", "groups"])
    def _selective_backward_kernel(grads, us, dts, Bs, Cs, carry_ptr, A_ptr, starts_ptr, du_ptr, ddt_ptr, dA_ptr,
                                   dB_ptr, dC_ptr, dh0_ptr, groups, T, E, N,
                                   TIME: constexpr, CHANNELS: constexpr, WIDTH: constexpr):  # fmt: skip
        batch, group = (tl.program_id(0) // groups).to(tl.int64), (tl.program_id(0) % groups).to(tl.int64)
        batches = tl.num_programs(0) // groups
        block = group
        while block * CHANNELS < E:
            e, n, state, exists = _selective_place(block, E, N, CHANNELS, WIDTH)
            A = tl.load(A_ptr + state, mask=exists, other=0.0).to(tl.float32)
            carry = tl.load(carry_ptr + batch * E * N + state, mask=exists, other=0.0)  # exp(dt_{t+1} A) g_{t+1}
            dA = tl.zeros((CHANNELS, WIDTH), tl.float32)
            one = tl.full((TIME, CHANNELS, WIDTH), 1.0, tl.float32)
            zero = tl.zeros((TIME, CHANNELS, WIDTH), tl.float32)
            chunks = tl.cdiv(T, TIME)
            for k in range(chunks):
                chunk = chunks - 1 - k
                t = chunk * TIME + tl.arange(0, TIME)
                row, mask_e, mask_n = _selective_rows(batch, T, t, e, E, n, N)
                dt = _load(dts, row, e, mask_e)
                x = dt * _load(us, row, e, mask_e)
                decay = tl.exp(dt[:, :, None] * A[None, :, :])
                added = x[:, :, None] * _load(Bs, row, n, mask_n)[:, None, :]
                h = tl.load(starts_ptr + (chunk * batches + batch) * E * N + state, mask=exists, other=0.0)
                _, _, decay_before, before = tl.associative_scan((decay, added, one, zero), 0, _compose_before)
                before += decay_before * h[None, :, :]  # h_{t-1}
                grad = _load(grads, row, e, mask_e)
                dC = tl.sum(grad[:, :, None] * (decay * before + added), 1)
                _add(dC_ptr + (group * batches * T + row) * N + n[None, :], dC, mask_n, block != group)

                t = chunk * TIME + TIME - 1 - tl.arange(0, TIME)  # from here on time runs backwards
                row, mask_e, mask_n = _selective_rows(batch, T, t, e, E, n, N)
                before = tl.flip(before, 0)
                u, dt = _load(us, row, e, mask_e), _load(dts, row, e, mask_e)
                B = _load(Bs, row, n, mask_n)
                decay = tl.exp(dt[:, :, None] * A[None, :, :])
                grad = _load(grads, row, e, mask_e)
                direct = grad[:, :, None] * _load(Cs, row, n, mask_n)[:, None, :]
                a, g, decay_after, after = tl.associative_scan((decay, decay * direct, one, zero), 0, _compose_before)
                carried = a * carry[None, :, :] + g  # exp(dt_t A) g_t
                g = direct + decay_after * carry[None, :, :] + after
                carry = tl.sum(tl.where((tl.arange(0, TIME) == TIME - 1)[:, None, None], carried, 0.0), 0)
                w = carried * before
                dx = tl.sum(g * B[:, None, :], 2)
                tl.store(du_ptr + row * E + e[None, :], dx * dt, mask=mask_e)
                tl.store(ddt_ptr + row * E + e[None, :], dx * u + tl.sum(w * A[None, :, :], 2), mask=mask_e)
                dB = tl.sum(g * (dt * u)[:, :, None], 1)
                _add(dB_ptr + (group * batches * T + row) * N + n[None, :], dB, mask_n, block != group)
                dA += tl.sum(w * dt[:, :, None], 0)
            tl.store(dA_ptr + batch * E * N + state, dA, mask=exists)
            tl.store(dh0_ptr + batch * E * N + state, carry, mask=exists)
            tl.debug_barrier()  # the next block adds to the sums that other threads have written
            block += groups


def _selective_arguments(tensors, A, states):
    """Blocks of channels, the tensors as Rows, T, E and N, and the tile."""
    (B, T), (E, N) = tensors[0].shape[:2], A.shape
    width = triton.next_power_of_2(N)
    sizes = {"TIME": SELECTIVE_CHUNK, "CHANNELS": max(1, states // width), "WIDTH": width}
    return -(-E // sizes["CHANNELS"]), [_matrix(x, B * T) for x in tensors], (T, E, N), sizes


def _selective_forward_triton(u, dt, A, B, C, h0, y, hT, starts):
    blocks, rows, numbers, sizes = _selective_arguments((u, dt, B, C), A, SELECTIVE_TILE[0])
    tensors = A.contiguous(), h0.contiguous(), y, hT, starts
    _launch(_selective_forward_kernel, len(h0) * blocks, *rows, *tensors, *numbers, **sizes)


def _selective_backward_triton(grad_y, grad_hT, u, dt, A, B, C, starts):
    blocks, rows, numbers, sizes = _selective_arguments((grad_y, u, dt, B, C), A, SELECTIVE_TILE[1])
    groups = min(blocks, max(1, SELECTIVE_PROGRAMS // len(u)))
    du, ddt = _empty_like(u, dt)
    dA, dh0 = (starts.new_empty(len(u), *A.shape) for _ in range(2))
    dB, dC = (starts.new_empty(groups, *x.shape) for x in (B, C))
    tensors = grad_hT.contiguous(), A.contiguous(), starts, du, ddt, dA, dB, dC, dh0
    _launch(_selective_backward_kernel, len(u) * groups, *rows, *tensors, groups, *numbers, **sizes)
    return du, ddt, dA.sum(0).to(A.dtype), dB.sum(0).to(B.dtype), dC.sum(0).to(C.dtype), dh0


# ---- born_attention ----
# The quadratic form. The product of two rows of 2N reals is Re <q|k>, and Im <q|k> is that of i q with k, or of q with
# -i k. A program of the forward, or of the pass for q, keeps a tile of queries, multiplied by i once, and reads keys
# that they see, one tile after another. One of the pass for k and v keeps keys and reads the queries that see them.
# Instead of |q| = 1, the rows of q are scaled by a power of two, exact in bfloat16 too, to Q with 1 <= |Q|^2 <= 8N
# (less for subnormal q, up to 32N from 2^127 on). That factor cancels but beside the floor:
#     o_i = sum_{j<=i} W_ij v_j / d_i,   W_ij = |<Q_i|k_j>|^2,   d_i = sum_{j<=i} W_ij + |Q_i|^2 floor_i
# With G_i = dL/do_i / d_i: dL/dW_ij = G_i . v_j - G_i . o_i, dL/dfloor_i = -|Q_i|^2 G_i . o_i, and dL/dq_i is what
# dL/dQ_i has across Q_i. float32 inputs are multiplied in float32; others, and the weights with them, in bfloat16,
# whose exponents hold a square, and summed in float32.
#
# The linear form is the same kernels, with keys, and in the pass for k and v queries, of one span of tokens only. What
# is before the span is in its state S = sum_j phi(k_j) u_j^T, what comes after it in dL/dS = sum_i phi(Q_i) (G_i, -G_i
# . o_i)^T, where the floor stands as a gradient of the masses of |k_n|^2, the last column. `_born_state_kernel` makes
# the summands span by span, for all of them at once, `_born_prefix_kernel` the sums. phi never reaches memory; a state
# is float32: its values in pairs, then its masses. As the features are signed and cancel, their products keep 16 bits
# of each factor, and the masses all 24.

# Rows that a program holds (queries, or keys in the pass for k and v), keys that it walks over at a time, queries
# likewise. For bfloat16 and N up to 16: half of it in float32, and for twice the N, but 16 at least.
BORN_TILE = 64, 64, 32
BORN_FEATURES = 32  # that are formed at a time, likewise
BORN_SPAN = 256  # tokens between two states of the linear form: whole tiles, and whole chunks of born_fold
BORN_WIDEST = 32  # N of the linear form; beyond that its tiles leave the registers, and PyTorch takes it

if triton is not None:
    # In the interpreter bfloat16 numbers would be multiplied as bits.
    INTERPRETED = constexpr(os.environ.get("TRITON_INTERPRET") == "1")

    @triton.jit
    def _head(x, g, H):
        """Head g of the B H: where it begins, and how far apart its rows are."""
        return x.ptr + (g // H).to(tl.int64) * x.batch + (g % H).to(tl.int64) * x.head, x.row

    @triton.jit
    def _tile(rows, first, T, columns, ROWS, WIDTH, start=0):
        """Pointers to ROWS rows from `first` on, to WIDTH of their columns from `start` on, and which numbers exist."""
        ptr, stride = rows
        row, column = tl.arange(0, ROWS)[:, None], start + tl.arange(0, WIDTH)[None, :]
        pointers = ptr + tl.cast(first, tl.int64) * stride + (row * stride + column)
        return pointers, (first + row < T) & (column < columns)

    @triton.jit
    def _operand(x, ptr):
        """x in the type in which to multiply what lies at ptr."""
        return x.to(tl.float32 if ptr.dtype.element_ty == tl.float32 else tl.bfloat16)

    @triton.jit
    def _load_tile(rows, first, T, COLUMNS, ROWS, WIDTH, WHOLE):
        """WHOLE: every row is there, and no mask is needed unless columns are missing."""
        pointers, mask = _tile(rows, first, T, COLUMNS, ROWS, WIDTH)
        if WHOLE and COLUMNS == WIDTH:
            x = tl.load(pointers)
        else:
            x = tl.load(pointers, mask=mask, other=0.0)
        return _operand(x, rows[0])

    @triton.jit
    def _store_tile(rows, x, first, T, COLUMNS, ROWS, WIDTH):
        pointers, mask = _tile(rows, first, T, COLUMNS, ROWS, WIDTH)
        tl.store(pointers, x, mask=mask)

    @triton.jit
    def _dot(x, y):
        """x y, in the type of y, summed in float32."""
        x = x.to(y.dtype)
        if INTERPRETED:
            x, y = x.to(tl.float32), y.to(tl.float32)
        return tl.dot(x, y, input_precision="ieee")

    @triton.jit
    def _dot_fine(x, y, ptr):
        """x y for float32 y; beside half precision at ptr with each float32 number as the sum of two of bfloat16."""
        if ptr.dtype.element_ty == tl.float32 or (INTERPRETED and x.dtype == tl.float32):
            return tl.dot(x, y.to(tl.float32), input_precision="ieee")
        elif x.dtype == tl.float32:
            return tl.dot(x, y.to(tl.float32), input_precision="bf16x3")
        else:
            high = _operand(y, ptr)
            return _dot(x, high) + _dot(x, _operand(y - high.to(tl.float32), ptr))

    @triton.jit
    def _times_i_tile(x, ROWS, WIDTH):
        """i x for rows of pairs."""
        re, im = tl.split(tl.reshape(x.to(tl.float32), (ROWS, WIDTH // 2, 2)))
        return tl.reshape(tl.join(-im, re), (ROWS, WIDTH))

    @triton.jit
    def _born_query(queries, first, T, COLUMNS, ROWS, WIDTH):
        """Q, |Q|^2 (1 for Q = 0), and the power of two that made it."""
        pointers, mask = _tile(queries, first, T, COLUMNS, ROWS, WIDTH)
        q = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        exponent = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23
        power = ((254 - tl.minimum(tl.maximum(exponent, 1), 253)) << 23).to(tl.float32, bitcast=True)
        q *= power[:, None]
        square = tl.sum(q * q, 1)
        return _operand(q, queries[0]), tl.where(square == 0.0, 1.0, square), power

    @triton.jit
    def _born_mass_kernel(keys, S_ptr, mass_ptr, H, T, COLUMNS: constexpr, ROWS: constexpr, WIDTH: constexpr):
        """sum_{j<=i} |k_j|^2 of one head, on from the masses of the features (n, n) of S, if there is one."""
        g = tl.program_id(0)
        keys, before = _head(keys, g, H), 0.0
        if S_ptr is not None:
            N: constexpr = COLUMNS // 2
            n, masses = tl.arange(0, WIDTH), S_ptr + g.to(tl.int64) * N * N * (COLUMNS + 1) + N * N * COLUMNS
            before = tl.sum(tl.load(masses + n * (N + 1), mask=n < N, other=0.0), 0)
        for first in range(0, T, ROWS):
            pointers, mask = _tile(keys, first, T, COLUMNS, ROWS, WIDTH)
            k = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
            square = tl.sum(k * k, 1)
            t = first + tl.arange(0, ROWS)
            tl.store(mass_ptr + g.to(tl.int64) * T + t, before + tl.cumsum(square, 0), mask=t < T)
            before += tl.sum(square, 0)

    @triton.jit
    def _born_features(x, xs, first, T, m, power, COLUMNS, ROWS, WIDTH, BLOCK):
        """The factors of the features (m, n) of the rows x, which were loaded from xs and multiplied by power: the
        complex x_m (ROWS, BLOCK, 1) and x_n (ROWS, 1, WIDTH / 2); and the features, (ROWS, BLOCK * WIDTH / 2)."""
        x_ptr, stride = xs
        rows, ms = tl.arange(0, ROWS)[:, None], m + tl.arange(0, BLOCK)[None, :]
        pointers, mask = x_ptr + tl.cast(first, tl.int64) * stride + (rows * stride + 2 * ms), first + rows < T
        mask &= 2 * ms < COLUMNS
        m_re = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        m_im = tl.load(pointers + 1, mask=mask, other=0.0).to(tl.float32)
        if power is not None:
            m_re, m_im = m_re * power[:, None], m_im * power[:, None]
        m_re, m_im = _operand(m_re, x_ptr).to(tl.float32), _operand(m_im, x_ptr).to(tl.float32)
        m_re, m_im = m_re[:, :, None], m_im[:, :, None]
        re, im = tl.split(tl.reshape(x.to(tl.float32), (ROWS, WIDTH // 2, 2)))
        re, im = re[:, None, :], im[:, None, :]
        lower, scale = _born_triangle(m, WIDTH, BLOCK)
        phi = scale * tl.where(lower, m_re * re + m_im * im, m_im * re - m_re * im)
        return (m_re, m_im), (re, im), tl.reshape(phi, (ROWS, BLOCK * (WIDTH // 2)))

    @triton.jit
    def _born_triangle(m, WIDTH, BLOCK):
        """Which of the features (m, n) are of Re x x^*, not of Im x x^*, and the factor of each."""
        m, n = m + tl.arange(0, BLOCK)[None, :, None], tl.arange(0, WIDTH // 2)[None, None, :]
        return n <= m, tl.where(n == m, 1.0, 1.4142135623730951)

    @triton.jit
    def _born_features_backward(grad, x, xs, first, T, m, power, COLUMNS, ROWS, WIDTH, BLOCK):
        """Half of what dL/dphi of the features (m, n) adds to dL/dx."""
        x_m, x_n, _ = _born_features(x, xs, first, T, m, power, COLUMNS, ROWS, WIDTH, BLOCK)
        m_re, m_im = x_m
        re, im = x_n
        lower, scale = _born_triangle(m, WIDTH, BLOCK)
        grad = scale * tl.reshape(grad, (ROWS, BLOCK, WIDTH // 2))
        symmetric, skew, diagonal = tl.where(lower, grad, 0.0), tl.where(lower, 0.0, grad), scale == 1.0
        dm_re, dm_im = tl.sum(symmetric * re - skew * im, 2), tl.sum(symmetric * im + skew * re, 2)
        dn_re = tl.sum(symmetric * m_re + skew * m_im + tl.where(diagonal, dm_re[:, :, None], 0.0), 1)
        dn_im = tl.sum(symmetric * m_im - skew * m_re + tl.where(diagonal, dm_im[:, :, None], 0.0), 1)
        return 0.5 * tl.reshape(tl.join(dn_re, dn_im), (ROWS, WIDTH))

    @triton.jit
    def _born_state_at(m, COLUMNS, WIDTH, BLOCK):
        """Where the values and the masses of the features (m, n) are in a state, and which of them there are."""
        N: constexpr = COLUMNS // 2
        feature, columns = tl.arange(0, BLOCK * (WIDTH // 2)), tl.arange(0, WIDTH)[None, :]
        m, n = m + feature // (WIDTH // 2), feature % (WIDTH // 2)
        mask, feature = (m < N) & (n < N), m * N + n
        values, mass = feature[:, None] * COLUMNS + columns, N * N * COLUMNS + feature
        return values, mask[:, None] & (columns < COLUMNS), mass, mask, m == n

    @triton.jit
    def _born_load_state(ptr, m, COLUMNS, WIDTH, BLOCK):
        values, values_mask, mass, mass_mask, _ = _born_state_at(m, COLUMNS, WIDTH, BLOCK)
        return tl.load(ptr + values, mask=values_mask, other=0.0), tl.load(ptr + mass, mask=mass_mask, other=0.0)

    @triton.jit
    def _born_state_of(states_ptr, g, T, chunk, COLUMNS, CHUNK):
        """Where the state of a chunk of head g is."""
        SIZE: constexpr = (COLUMNS // 2) * (COLUMNS // 2) * (COLUMNS + 1)
        return states_ptr + (g.to(tl.int64) * (tl.cdiv(T, CHUNK) + 1) + chunk) * SIZE

    @triton.jit
    def _born_state_kernel(xs, ys, shift_ptr, floor_ptr, states_ptr, G, H, T, COLUMNS: constexpr, ROWS: constexpr,
                           WIDTH: constexpr, BLOCK: constexpr, CHUNK: constexpr):  # fmt: skip
        """What a chunk adds to a block of the state: sum_i phi(x_i) (y_i, 1)^T for keys and values. For Q and G it is
        sum_i phi(Q_i) (G_i, -shift_i)^T, and the gradient of the floor for the masses of |k_n|^2."""
        BLOCKS: constexpr = (COLUMNS // 2 + BLOCK - 1) // BLOCK
        g, chunk, m = tl.program_id(0) % G, tl.program_id(0) // G // BLOCKS, tl.program_id(0) // G % BLOCKS * BLOCK
        xs, ys = _head(xs, g, H), _head(ys, g, H)
        values, values_mask, mass, mass_mask, diagonal = _born_state_at(m, COLUMNS, WIDTH, BLOCK)
        S, z = tl.zeros((BLOCK * (WIDTH // 2), WIDTH), tl.float32), tl.zeros((BLOCK * (WIDTH // 2),), tl.float32)
        dfloor = tl.zeros((ROWS,), tl.float32)
        for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T), ROWS):
            x = _load_tile(xs, first, T, COLUMNS, ROWS, WIDTH, False)
            phi = _born_features(x, xs, first, T, m, None, COLUMNS, ROWS, WIDTH, BLOCK)[2]
            y = _load_tile(ys, first, T, COLUMNS, ROWS, WIDTH, False)
            S += _dot_fine(tl.trans(phi), y, xs[0])
            if shift_ptr is not None:
                t = first + tl.arange(0, ROWS)
                phi *= -tl.load(shift_ptr + g.to(tl.int64) * T + t, mask=t < T, other=0.0)[:, None]
                dfloor += tl.load(floor_ptr + g.to(tl.int64) * T + t, mask=t < T, other=0.0)
            z += tl.sum(phi, 0)
        state_ptr = _born_state_of(states_ptr, g, T, chunk, COLUMNS, CHUNK)
        tl.store(state_ptr + values, S, mask=values_mask)
        tl.store(state_ptr + mass, z + tl.where(diagonal, tl.sum(dfloor, 0), 0.0), mask=mass_mask)

    @triton.jit
    def _born_prefix_kernel(states_ptr, S_ptr, G, chunks, SIZE: constexpr, BLOCK: constexpr, REVERSE: constexpr):
        """From what each chunk adds, in place: the state before each chunk and, in the last place, after all. With
        REVERSE, dL/dS after each chunk and, in the last place, before all."""
        g, at = tl.program_id(0) % G, tl.program_id(0) // G * BLOCK + tl.arange(0, BLOCK)
        states_ptr += g.to(tl.int64) * (chunks + 1) * SIZE + at
        S = tl.zeros((BLOCK,), tl.float32)
        if S_ptr is not None:
            S = tl.load(S_ptr + g.to(tl.int64) * SIZE + at, mask=at < SIZE)
        for n in range(chunks):
            pointers = states_ptr + tl.cast(chunks - 1 - n if REVERSE else n, tl.int64) * SIZE
            more = tl.load(pointers, mask=at < SIZE)
            tl.store(pointers, S, mask=at < SIZE)
            S += more
        tl.store(states_ptr + tl.cast(chunks, tl.int64) * SIZE, S, mask=at < SIZE)

    @triton.jit
    def _born_rounded(w, ptr, NEAREST):
        """The weights in the type of v, as bfloat16 or float32, so that numerator and denominator sum the same numbers.
        Cutting digits off is one instruction, and what it takes from all weights in the mean cancels in o; but not
        beside a state, whose weights are not cut: there they are rounded to NEAREST."""
        if ptr.dtype.element_ty == tl.float32:
            return w
        elif NEAREST:
            return w.to(tl.bfloat16).to(tl.float32)
        else:
            return (w.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)

    @triton.jit
    def _born_forward_kernel(queries, keys, values, mass_ptr, states_ptr, o_ptr, d_ptr, G, H, T, floor, tiny,
                             COLUMNS: constexpr, QUERIES: constexpr, KEYS: constexpr, WIDTH: constexpr,
                             BLOCK: constexpr, CHUNK: constexpr):  # fmt: skip
        """o and d. If there are states, the keys are those of the chunk, and the past before is in its state."""
        g = tl.program_id(0) % G
        start = (tl.cdiv(T, QUERIES) - 1 - tl.program_id(0) // G) * QUERIES  # the longest first
        queries, keys, values = _head(queries, g, H), _head(keys, g, H), _head(values, g, H)
        q, square, power = _born_query(queries, start, T, COLUMNS, QUERIES, WIDTH)
        i_q = _operand(_times_i_tile(q, QUERIES, WIDTH), queries[0])
        numerator, weights = tl.zeros((QUERIES, WIDTH), tl.float32), tl.zeros((QUERIES, KEYS), tl.float32)
        begin = 0
        if states_ptr is not None:
            begin = start // CHUNK * CHUNK
            masses = tl.zeros((QUERIES, BLOCK * (WIDTH // 2)), tl.float32)
            state_ptr = _born_state_of(states_ptr, g, T, start // CHUNK, COLUMNS, CHUNK)
            for m in range(0, COLUMNS // 2, BLOCK):
                phi = _born_features(q, queries, start, T, m, power, COLUMNS, QUERIES, WIDTH, BLOCK)[2]
                S, z = _born_load_state(state_ptr, m, COLUMNS, WIDTH, BLOCK)
                numerator += _dot_fine(phi, S, queries[0])
                masses += phi * z[None, :]
            first_key = tl.arange(0, KEYS)[None, :] == 0
            weights += tl.where(first_key, tl.sum(masses, 1)[:, None], 0.0)
        i, whole = start + tl.arange(0, QUERIES), start // KEYS * KEYS
        for tail in tl.static_range(2):  # every query sees every key before `whole`
            for first in range(whole if tail else begin, tl.minimum(start + QUERIES, T) if tail else whole, KEYS):
                k = tl.trans(_load_tile(keys, first, T, COLUMNS, KEYS, WIDTH, tail == 0))
                re, im = _dot(q, k), _dot(i_q, k)
                w = re * re + im * im
                if tail:
                    w = tl.where(first + tl.arange(0, KEYS)[None, :] <= i[:, None], w, 0.0)
                v = _load_tile(values, first, T, COLUMNS, KEYS, WIDTH, tail == 0)
                w = _born_rounded(w, values[0], CHUNK > 0)
                numerator += _dot(w, v)
                weights += w
        row = g.to(tl.int64) * T + start
        mass = tl.load(mass_ptr + row + tl.arange(0, QUERIES), mask=i < T, other=1.0)
        total = tl.sum(weights, 1)
        negative = total < 0.0  # so far the rounding of a state can go; d tells it the backward by its sign
        d = tl.where(negative, 0.0, total) + square * (floor * mass + tiny)
        tl.store(d_ptr + row + tl.arange(0, QUERIES), tl.where(negative, -d, d), mask=i < T)
        o = o_ptr + g.to(tl.int64) * T * COLUMNS, COLUMNS
        _store_tile(o, numerator / d[:, None], start, T, COLUMNS, QUERIES, WIDTH)

    @triton.jit
    def _born_query_kernel(queries, keys, values, grads, states_ptr, o_ptr, d_ptr, dq_ptr, Q_ptr, G_ptr, shift_ptr,
                           floor_ptr, G, H, T, floor, COLUMNS: constexpr, QUERIES: constexpr, KEYS: constexpr,
                           WIDTH: constexpr, BLOCK: constexpr, CHUNK: constexpr):  # fmt: skip
        """dL/dq; and for the pass for k and v, row by row: Q, G, G . o and the gradient of the floor, padded with zeros
        to whole tiles."""
        blocks = tl.cdiv(T, QUERIES)
        g = tl.program_id(0) % G
        start = (blocks - 1 - tl.program_id(0) // G) * QUERIES
        queries, keys, values = _head(queries, g, H), _head(keys, g, H), _head(values, g, H)
        q, square, power = _born_query(queries, start, T, COLUMNS, QUERIES, WIDTH)
        i, row = start + tl.arange(0, QUERIES), g.to(tl.int64) * T + start
        d = tl.load(d_ptr + row + tl.arange(0, QUERIES), mask=i < T, other=1.0)
        pointers, mask = _tile(_head(grads, g, H), start, T, COLUMNS, QUERIES, WIDTH)
        grad = _operand(tl.load(pointers, mask=mask, other=0.0).to(tl.float32) / tl.abs(d)[:, None], G_ptr)
        pointers, mask = _tile((o_ptr + g.to(tl.int64) * T * COLUMNS, COLUMNS), start, T, COLUMNS, QUERIES, WIDTH)
        shift = tl.sum(grad.to(tl.float32) * tl.load(pointers, mask=mask, other=0.0), 1)

        padded = g.to(tl.int64) * blocks * QUERIES + start
        tl.store(floor_ptr + padded + tl.arange(0, QUERIES), -floor * square * shift)
        shift = tl.where(d < 0.0, 0.0, shift)  # the weights are not in the denominator
        tl.store(shift_ptr + padded + tl.arange(0, QUERIES), shift)
        _store_tile((Q_ptr, WIDTH), q, padded, padded + QUERIES, WIDTH, QUERIES, WIDTH)
        _store_tile((G_ptr, WIDTH), grad, padded, padded + QUERIES, WIDTH, QUERIES, WIDTH)

        i_q = _operand(_times_i_tile(q, QUERIES, WIDTH), queries[0])
        dq_re, dq_im = tl.zeros((QUERIES, WIDTH), tl.float32), tl.zeros((QUERIES, WIDTH), tl.float32)
        begin = 0
        if states_ptr is not None:
            begin = start // CHUNK * CHUNK
            state_ptr = _born_state_of(states_ptr, g, T, start // CHUNK, COLUMNS, CHUNK)
            for m in range(0, COLUMNS // 2, BLOCK):
                S, z = _born_load_state(state_ptr, m, COLUMNS, WIDTH, BLOCK)
                dphi = _dot_fine(grad, tl.trans(S), queries[0]) - shift[:, None] * z[None, :]
                dq_re += _born_features_backward(dphi, q, queries, start, T, m, power, COLUMNS, QUERIES, WIDTH, BLOCK)
        whole = start // KEYS * KEYS
        for tail in tl.static_range(2):
            for first in range(whole if tail else begin, tl.minimum(start + QUERIES, T) if tail else whole, KEYS):
                k = _load_tile(keys, first, T, COLUMNS, KEYS, WIDTH, tail == 0)
                re, im = _dot(q, tl.trans(k)), _dot(i_q, tl.trans(k))
                v = _load_tile(values, first, T, COLUMNS, KEYS, WIDTH, tail == 0)
                dw = _dot(grad, tl.trans(v)) - shift[:, None]
                if tail:
                    dw = tl.where(first + tl.arange(0, KEYS)[None, :] <= i[:, None], dw, 0.0)
                dq_re += _dot(re * dw, k)
                dq_im += _dot(im * dw, k)
        dq = 2.0 * (dq_re - _times_i_tile(dq_im, QUERIES, WIDTH))  # the adjoint of i is -i
        q = q.to(tl.float32)
        dq = (dq - q * (tl.sum(q * dq, 1) / square)[:, None]) * power[:, None]  # |q| has no effect
        _store_tile((dq_ptr + g.to(tl.int64) * T * COLUMNS, COLUMNS), dq, start, T, COLUMNS, QUERIES, WIDTH)

    @triton.jit
    def _born_key_kernel(keys, values, Q_ptr, G_ptr, shift_ptr, floor_ptr, states_ptr, dk_ptr, dv_ptr, G, H, T,
                         COLUMNS: constexpr, QUERIES: constexpr, KEYS: constexpr, WIDTH: constexpr, BLOCK: constexpr,
                         CHUNK: constexpr):  # fmt: skip
        """dL/dk and dL/dv of KEYS keys; the queries come in tiles of QUERIES, which divides KEYS. If there are states,
        these are dL/dS after each chunk, in the place of the queries of later ones."""
        g, start = tl.program_id(0) % G, tl.program_id(0) // G * KEYS  # the longest first
        padded = tl.cdiv(T, KEYS) * KEYS
        row = g.to(tl.int64) * padded
        Q_ptr, G_ptr, shift_ptr, floor_ptr = Q_ptr + row * WIDTH, G_ptr + row * WIDTH, shift_ptr + row, floor_ptr + row
        here = tl.arange(0, KEYS)
        from_floor = tl.where(here[:, None] >= here[None, :], tl.load(floor_ptr + start + here)[:, None], 0.0)
        dfloor, later = tl.sum(from_floor, 0), tl.zeros((QUERIES,), tl.float32)  # sum_{i>=j} dL/dfloor_i, in two

        keys, values = _head(keys, g, H), _head(values, g, H)
        k = _load_tile(keys, start, T, COLUMNS, KEYS, WIDTH, False)
        v = _load_tile(values, start, T, COLUMNS, KEYS, WIDTH, False)
        minus_i_k = _operand(-_times_i_tile(k, KEYS, WIDTH), keys[0])
        dk_re, dk_im = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, WIDTH), tl.float32)
        dv, end = tl.zeros((KEYS, WIDTH), tl.float32), padded
        if states_ptr is not None:
            end = tl.minimum(start // CHUNK * CHUNK + CHUNK, padded)
            state_ptr = _born_state_of(states_ptr, g, T, start // CHUNK, COLUMNS, CHUNK)
            for m in range(0, COLUMNS // 2, BLOCK):
                S, _ = _born_load_state(state_ptr, m, COLUMNS, WIDTH, BLOCK)
                phi = _born_features(k, keys, start, T, m, None, COLUMNS, KEYS, WIDTH, BLOCK)[2]
                dv += _dot_fine(phi, S, keys[0])
            for m in range(0, COLUMNS // 2, BLOCK):  # apart, as the registers do not hold both
                S, z = _born_load_state(state_ptr, m, COLUMNS, WIDTH, BLOCK)
                dphi = _dot_fine(v, tl.trans(S), keys[0]) + z[None, :]
                dk_re += _born_features_backward(dphi, k, keys, start, T, m, None, COLUMNS, KEYS, WIDTH, BLOCK)
        for rest in tl.static_range(2):  # those queries see every key
            for first in range(start + KEYS if rest else start, end if rest else start + KEYS, QUERIES):
                q = _load_tile((Q_ptr, WIDTH), first, 0, WIDTH, QUERIES, WIDTH, True)
                re, im = _dot(k, tl.trans(q)), _dot(minus_i_k, tl.trans(q))
                w = re * re + im * im
                grad = _load_tile((G_ptr, WIDTH), first, 0, WIDTH, QUERIES, WIDTH, True)
                dw = _dot(v, tl.trans(grad)) - tl.load(shift_ptr + first + tl.arange(0, QUERIES))[None, :]
                if rest:
                    later += tl.load(floor_ptr + first + tl.arange(0, QUERIES))
                else:
                    seen = start + here[:, None] <= first + tl.arange(0, QUERIES)[None, :]
                    w, dw = tl.where(seen, w, 0.0), tl.where(seen, dw, 0.0)
                w = _born_rounded(w, G_ptr, CHUNK > 0)
                dk_re += _dot(re * dw, q)
                dk_im += _dot(im * dw, q)
                dv += _dot(w, grad)
        dfloor += tl.sum(later, 0)
        dk = 2.0 * (dk_re + _times_i_tile(dk_im, KEYS, WIDTH) + k.to(tl.float32) * dfloor[:, None])
        _store_tile((dk_ptr + g.to(tl.int64) * T * COLUMNS, COLUMNS), dk, start, T, COLUMNS, KEYS, WIDTH)
        _store_tile((dv_ptr + g.to(tl.int64) * T * COLUMNS, COLUMNS), dv, start, T, COLUMNS, KEYS, WIDTH)


def _born_sizes(x, linear):
    """B H, H and T; programs; and the constants of kernels where queries are held, then where keys are."""
    B, H, T, N, _ = x.shape
    width = max(16, triton.next_power_of_2(2 * N))
    shrink = (2 if x.dtype == torch.float32 else 1) * max(1, width // 32)  # so that all stays in registers
    rows, keys, queries = (max(16, x // shrink) for x in BORN_TILE)
    block = min(width // 2, max(1, BORN_FEATURES // shrink // (width // 2)))
    pairs = {"COLUMNS": 2 * N, "WIDTH": width, "BLOCK": block if linear else 0, "CHUNK": BORN_SPAN if linear else 0}
    held = pairs | {"QUERIES": rows, "KEYS": keys}, pairs | {"QUERIES": queries, "KEYS": rows}
    return (B * H, H, T), B * H * -(-T // rows), *held


def _born_states(x, y, shift, floor, S, sizes):
    """(B H, chunks + 1, numbers of a state): see `_born_prefix_kernel`."""
    (B, H, T), N = x.shape[:3], sizes["COLUMNS"] // 2
    G, chunks, size = B * H, -(-T // BORN_SPAN), N * N * (2 * N + 1)
    states = x.new_empty(G, chunks + 1, size, dtype=torch.float32)
    block = min(2 * sizes["BLOCK"], sizes["WIDTH"] // 2)  # there is room for more
    constants = {key: sizes[key] for key in ("COLUMNS", "WIDTH", "CHUNK")} | {"ROWS": sizes["KEYS"], "BLOCK": block}
    _launch(_born_state_kernel, G * chunks * -(-N // block), *_heads(x, y), shift, floor, states, G, H, T, **constants)
    reverse = shift is not None
    _launch(_born_prefix_kernel, G * -(-size // 512), states, S, G, chunks, SIZE=size, BLOCK=512, REVERSE=reverse)
    return states


def _born_forward_triton(q, k, v, S, linear):
    """o; for the backward d; and of the linear form the states before each chunk."""
    numbers, programs, sizes, _ = _born_sizes(q, linear)
    o, d, _ = _born_like(q, k, v, S, linear)
    mass = torch.empty_like(d)
    states = _born_states(k, v, None, None, S, sizes) if linear else None
    constants = {"COLUMNS": sizes["COLUMNS"], "ROWS": sizes["KEYS"], "WIDTH": sizes["WIDTH"]}
    _launch(_born_mass_kernel, numbers[0], *_heads(k), S, mass, *numbers[1:], **constants)
    _launch(_born_forward_kernel, programs, *_heads(q, k, v), mass, states, o, d, *numbers, BORN_FLOOR, TINY, **sizes)
    return o, d, d.new_empty(0) if states is None else states


def _born_backward_triton(grad, q, k, v, S, o, d, states, linear):
    numbers, programs, query_sizes, key_sizes = _born_sizes(q, linear)
    dq, dk, dv = _empty_like(q, k, v)
    padded = *q.shape[:2], programs // numbers[0] * query_sizes["QUERIES"]  # (B, H, whole tiles)
    rows = d.new_empty(2, *padded)  # G . o, and the gradient of the floor
    dtype = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    pairs = rows.new_empty(2, *padded, query_sizes["WIDTH"], dtype=dtype)  # Q and G
    _launch(_born_query_kernel, programs, *_heads(q, k, v, grad), states if linear else None, o, d, dq, *pairs, *rows,
            *numbers, BORN_FLOOR, **query_sizes)  # fmt: skip
    ends = _born_states(*pairs, *rows, None, query_sizes) if linear else None
    _launch(_born_key_kernel, programs, *_heads(k, v), *pairs, *rows, ends, dk, dv, *numbers, **key_sizes)
    return dq, dk, dv, d.new_empty(0) if S is None else ends[:, -1].clone()


def _born_like(q, k, v, S, linear):
    N, chunks = q.shape[3], -(-q.shape[2] // BORN_SPAN)
    states = (q.shape[0] * q.shape[1], chunks + 1, N * N * (2 * N + 1)) if linear else (0,)
    return tuple(q.new_empty(shape, dtype=torch.float32) for shape in (q.shape, q.shape[:3], states))


_triton_born = _operator(
    "triton_born(Tensor q, Tensor k, Tensor v, Tensor? S, bool linear) -> (Tensor, Tensor, Tensor)",
    _born_forward_triton,
    _born_like,
    _born_backward_triton,
    lambda grad, q, k, v, S, o, d, states, linear: _empty_like(q, k, v, S),
    saved=("q", "k", "v", "S", 0, 1, 2),
)


def _born_in_triton(inputs, S, k, v, linear):
    """o and the state, for q, k and v as they came, and S, k and v as a state keeps them, the inputs at their end."""
    q, _, _ = inputs = _autocast(*inputs)
    (B, H, _, N, _), before, packed = q.shape, k.shape[2] - q.shape[2], None
    if before:  # those tokens ask nothing
        inputs = F.pad(q, (0, 0, 0, 0, before, 0)), k.to(q.dtype), v.to(q.dtype)
    if S is not None:  # as the kernels keep it: all values, then the masses
        packed = torch.cat((S[..., :-1].flatten(2), S[..., -1]), -1).flatten(0, 1)
    o, _, states = _triton_born(*inputs, packed, linear)
    if linear and not o.requires_grad:
        whole = k.shape[2] // BORN_SPAN
        values, masses = states[:, whole].unflatten(0, (B, H)).split((2 * N**3, N * N), -1)
        S = torch.cat((values.unflatten(-1, (N * N, 2 * N)), masses.unsqueeze(-1)), -1)
        k, v = k[:, :, whole * BORN_SPAN :], v[:, :, whole * BORN_SPAN :]
    return o[:, :, before:], (S, k, v)


# ---- phase_memory ----
# `_phase_state_kernel` walks over the chunks for a block of M and writes what stands before each, or from the end N,
# what stands after each. All else has a program for each chunk, and forms E and the scores again:
# `_phase_value_kernel`, one for each block of coordinates too, makes Y, dL/dQ, dL/dK and dL/dV, which are the same
# sum of two products, and `_phase_gate_kernel` what is left. float32 inputs are multiplied in float32. Beside others
# all that is multiplied is rounded to bfloat16: the keys and the scores times E, and M and N as stored for each chunk.
# E, the sums, and M and N as they are carried on, are float32. Complex tiles are tuples (re, im), in a real memory
# twice the same.

# Tokens of a chunk, coordinates of a block, and of a block of M; in float32 16 (real 32), 32, 16.
PHASE_TILE = 64, 64, 32

if triton is not None:

    @triton.jit
    def _phase_tile(rows, first, T, column, COLUMNS, ROWS, WIDTH, REAL):
        """Pointers to WIDTH coordinates of ROWS tokens, and which there are."""
        EACH: constexpr = 1 if REAL else 2
        return _tile(rows, first, T, EACH * COLUMNS, ROWS, EACH * WIDTH, EACH * column)

    @triton.jit
    def _phase_load(rows, first, T, column, COLUMNS, ROWS, WIDTH, REAL):
        """In the type to multiply in."""
        pointers, mask = _phase_tile(rows, first, T, column, COLUMNS, ROWS, WIDTH, REAL)
        x = _operand(tl.load(pointers, mask=mask, other=0.0), rows[0])
        return (x, x) if REAL else tl.split(tl.reshape(x, (ROWS, WIDTH, 2)))

    @triton.jit
    def _phase_state_at(row, column, COLUMNS, KEYS, VALUES):
        """Key and value of each entry of a block of M, and which there are."""
        keys, values = row + tl.arange(0, KEYS)[:, None], column + tl.arange(0, VALUES)[None, :]
        return keys, values, (keys < COLUMNS) & (values < COLUMNS)

    @triton.jit
    def _phase_load_state(ptr, place, row, column, COLUMNS, KEYS, VALUES, REAL):
        """A block of the stored state number `place`, which is a plane of real parts, then one of imaginary parts."""
        keys, values, mask = _phase_state_at(row, column, COLUMNS, KEYS, VALUES)
        pointers = ptr + place * (1 if REAL else 2) * COLUMNS * COLUMNS + (keys * COLUMNS + values)
        re = tl.load(pointers, mask=mask, other=0.0)
        return re, re if REAL else tl.load(pointers + COLUMNS * COLUMNS, mask=mask, other=0.0)

    @triton.jit
    def _transposed(x):
        return tl.trans(x[0]), tl.trans(x[1])

    @triton.jit
    def _minus(x):
        return (-x.to(tl.float32)).to(x.dtype)

    @triton.jit
    def _product(out, x, y, CONJ_X, CONJ_Y, REAL):
        """out + x y, with conj(x) or conj(y) if told: one real product, or four. In the type of y."""
        re, im = out[0] + _dot(x[0], y[0]), out[1]
        if not REAL:
            re += _dot(x[1], _minus(y[1]) if CONJ_X == CONJ_Y else y[1])
            im += _dot(x[0], _minus(y[1]) if CONJ_Y else y[1])
            im += _dot(x[1], _minus(y[0]) if CONJ_X else y[0])
        return re, re if REAL else im

    @triton.jit
    def _scaled(x, factor):
        """The rows of x times a real factor, in the type of x."""
        factor = factor[:, None]
        return (x[0].to(tl.float32) * factor).to(x[0].dtype), (x[1].to(tl.float32) * factor).to(x[1].dtype)

    @triton.jit
    def _phase_gates(rows, first, T, ROWS):
        """log gamma of a chunk, 0 beyond the end."""
        t = first + tl.arange(0, ROWS)
        return tl.load(rows[0] + t.to(tl.int64) * rows[1], mask=t < T, other=0.0).to(tl.float32)

    @triton.jit
    def _phase_decays(gates, ROWS, TRANSPOSED):
        """E_ti for the tokens of a chunk, at [t, i], or [i, t] if TRANSPOSED; by sums as in `_decays`."""
        row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
        if TRANSPOSED:
            between = tl.cumsum(tl.where(row < column, gates[None, :], 0.0), 1)
            seen = row <= column
        else:
            between = tl.cumsum(tl.where(column < row, gates[:, None], 0.0), 0)
            seen = column <= row
        return tl.exp(tl.where(seen, between, -float("inf")))

    @triton.jit
    def _phase_edge(gates, ROWS, START):
        """E_t0, from the start of the chunk, or E_ci, to its end."""
        if START:
            total = tl.cumsum(gates, 0)
        else:
            j, i = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
            total = tl.sum(tl.where(i < j, gates[:, None], 0.0), 0)
        return tl.exp(total)

    @triton.jit
    def _phase_state_kernel(keys, values, gates, S_ptr, states_ptr, last_ptr, G, H, T, REVERSE: constexpr,
                            REAL: constexpr, COLUMNS: constexpr, CHUNK: constexpr, WIDTH: constexpr):  # fmt: skip
        """M before each chunk and after the last, from the keys and values, M' = (E_c K)^H V + E_c0 M. With REVERSE
        dL/dM after each chunk and before the first, from the queries and dL/dY: N = (E_0 Q)^H G + E_c0 N'."""
        EACH: constexpr = 1 if REAL else 2
        BLOCKS: constexpr = (COLUMNS + WIDTH - 1) // WIDTH
        g, block = tl.program_id(0) % G, tl.program_id(0) // G
        row, column = block // BLOCKS * WIDTH, block % BLOCKS * WIDTH
        keys, values, gates = _head(keys, g, H), _head(values, g, H), _head(gates, g, H)
        i, j, mask = _phase_state_at(row, column, COLUMNS, WIDTH, WIDTH)
        outside = g.to(tl.int64) * COLUMNS * COLUMNS + (j * COLUMNS + i)  # S is indexed [value, key]
        M = _load_pair(S_ptr, outside, mask, REAL)
        chunks = tl.cdiv(T, CHUNK)
        for n in range(chunks):
            chunk = chunks - 1 - n if REVERSE else n
            pointers = states_ptr + (g.to(tl.int64) * chunks + chunk) * EACH * COLUMNS * COLUMNS + (i * COLUMNS + j)
            tl.store(pointers, M[0], mask=mask)
            if not REAL:
                tl.store(pointers + COLUMNS * COLUMNS, M[1], mask=mask)
            gate = _phase_gates(gates, chunk * CHUNK, T, CHUNK)
            k = _phase_load(keys, chunk * CHUNK, T, row, COLUMNS, CHUNK, WIDTH, REAL)
            v = _phase_load(values, chunk * CHUNK, T, column, COLUMNS, CHUNK, WIDTH, REAL)
            k = _transposed(_scaled(k, _phase_edge(gate, CHUNK, REVERSE)))
            whole = tl.exp(tl.sum(gate, 0))
            M = _product((whole * M[0], whole * M[1]), k, v, True, False, REAL)
        _store_pair(last_ptr, outside, M, mask, REAL)

    @triton.jit
    def _phase_scores(xs, ys, first, T, COLUMNS, CHUNK, WIDTH, REAL):
        """X Y^H for a chunk."""
        scores = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
        for block in range((COLUMNS + WIDTH - 1) // WIDTH):
            x = _phase_load(xs, first, T, block * WIDTH, COLUMNS, CHUNK, WIDTH, REAL)
            y = _phase_load(ys, first, T, block * WIDTH, COLUMNS, CHUNK, WIDTH, REAL)
            scores = _product(scores, x, _transposed(y), False, True, REAL)
        return scores

    @triton.jit
    def _real_part(x, y, REAL):
        """Of conj(x) y, number by number."""
        re = x[0].to(tl.float32) * y[0].to(tl.float32)
        if not REAL:
            re += x[1].to(tl.float32) * y[1].to(tl.float32)
        return re

    @triton.jit
    def _phase_value_kernel(own, seen, summed, gates, factors, states_ptr, out_ptr, dots_ptr, G, H, T, LATER: constexpr,
                            FLIP: constexpr, REAL: constexpr, COLUMNS: constexpr, CHUNK: constexpr, WIDTH: constexpr,
                            DEPTH: constexpr):  # fmt: skip
        """For a chunk and a block of coordinates, the same sum for Y, dL/dQ, dL/dK and dL/dV: the rows Z, `summed`,
        weighted by how X, `seen`, and Y, `own`, match, and what the state holds for Y: (X Y^H * E)^H Z + E_c Y M. With
        LATER the rows of Y come after those of X: E^T for E and E_0 for E_c. With FLIP, M^H for M. If there are
        factors, also the real product of each of their rows with that of the second part: `dots`."""
        EACH: constexpr = 1 if REAL else 2
        BLOCKS: constexpr = (COLUMNS + WIDTH - 1) // WIDTH
        g, chunk, block = tl.program_id(0) % G, tl.program_id(0) // G // BLOCKS, tl.program_id(0) // G % BLOCKS
        first, column, place = chunk * CHUNK, block * WIDTH, g.to(tl.int64) * tl.cdiv(T, CHUNK) + chunk
        own, seen = _head(own, g, H), _head(seen, g, H)
        gate = _phase_gates(_head(gates, g, H), first, T, CHUNK)
        out = tl.zeros((CHUNK, WIDTH), tl.float32), tl.zeros((CHUNK, WIDTH), tl.float32)
        for k in range((COLUMNS + DEPTH - 1) // DEPTH):
            y = _phase_load(own, first, T, k * DEPTH, COLUMNS, CHUNK, DEPTH, REAL)
            if FLIP:
                M = _transposed(_phase_load_state(states_ptr, place, column, k * DEPTH, COLUMNS, WIDTH, DEPTH, REAL))
            else:
                M = _phase_load_state(states_ptr, place, k * DEPTH, column, COLUMNS, DEPTH, WIDTH, REAL)
            out = _product(out, y, M, False, FLIP, REAL)
        out = _scaled(out, _phase_edge(gate, CHUNK, LATER))
        if factors is not None:
            factor = _phase_load(_head(factors, g, H), first, T, column, COLUMNS, CHUNK, WIDTH, REAL)
            t = first + tl.arange(0, CHUNK)
            dots = tl.sum(_real_part(factor, out, REAL), 1)
            tl.store(dots_ptr + (block * G + g).to(tl.int64) * T + t, dots, mask=t < T)
        P = _phase_scores(seen, own, first, T, COLUMNS, CHUNK, DEPTH, REAL)
        E = _phase_decays(gate, CHUNK, LATER)
        P = _transposed((_operand(P[0] * E, summed.ptr), _operand(P[1] * E, summed.ptr)))
        z = _phase_load(_head(summed, g, H), first, T, column, COLUMNS, CHUNK, WIDTH, REAL)
        out = _product(out, P, z, True, False, REAL)
        rows = out_ptr + g.to(tl.int64) * T * EACH * COLUMNS, EACH * COLUMNS
        pointers, mask = _phase_tile(rows, first, T, column, COLUMNS, CHUNK, WIDTH, REAL)
        tl.store(pointers, out[0] if REAL else tl.reshape(tl.join(out[0], out[1]), (CHUNK, 2 * WIDTH)), mask=mask)

    @triton.jit
    def _phase_gate_kernel(queries, keys, values, grads, gates, M_ptr, N_ptr, from_ptr, to_ptr, dgate_ptr, G, H, T,
                           REAL: constexpr, COLUMNS: constexpr, CHUNK: constexpr, WIDTH: constexpr,
                           DEPTH: constexpr):  # fmt: skip
        """dL/dlog gamma of a chunk."""
        g, chunk = tl.program_id(0) % G, tl.program_id(0) // G
        first, place = chunk * CHUNK, g.to(tl.int64) * tl.cdiv(T, CHUNK) + chunk
        gate = _phase_gates(_head(gates, g, H), first, T, CHUNK)
        P = _phase_scores(_head(queries, g, H), _head(keys, g, H), first, T, COLUMNS, CHUNK, DEPTH, REAL)
        dP = _phase_scores(_head(grads, g, H), _head(values, g, H), first, T, COLUMNS, CHUNK, DEPTH, REAL)
        E = _phase_decays(gate, CHUNK, False)
        # E dL/dE: between tokens, from the state before the chunk, to the state after it, and past all tokens
        through = _real_part((P[0] * E, P[1] * E), dP, REAL)
        t, j = first + tl.arange(0, CHUNK), tl.arange(0, CHUNK)
        from_state, to_state, past = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32), 0.0
        for block in range((COLUMNS + WIDTH - 1) // WIDTH):
            at = (block * G + g).to(tl.int64) * T + t
            from_state += tl.load(from_ptr + at, mask=t < T, other=0.0)
            to_state += tl.load(to_ptr + at, mask=t < T, other=0.0)
        for row in range(0, COLUMNS, DEPTH):
            for column in range(0, COLUMNS, DEPTH):
                M = _phase_load_state(M_ptr, place, row, column, COLUMNS, DEPTH, DEPTH, REAL)
                N = _phase_load_state(N_ptr, place, row, column, COLUMNS, DEPTH, DEPTH, REAL)
                past += tl.sum(_real_part(M, N, REAL))
        past *= tl.exp(tl.sum(gate, 0))
        # Column j is about the gate after token j: it stands between i <= j and t > j.
        through = tl.cumsum(through, 1) + from_state[:, None]
        dgates = past + tl.sum(tl.where(j[:, None] > j[None, :], through, to_state[:, None]), 0)
        dgate_ptr += g.to(tl.int64) * T
        tl.store(dgate_ptr + t + 1, dgates, mask=(j < CHUNK - 1) & (t + 1 < T))
        tl.store(dgate_ptr + first, past + tl.sum(from_state, 0))


def _phase_sizes(q, real):
    """B H, H and T; chunks; constants of the kernels."""
    B, H, T, d = q.shape[:4]
    shrink = (2 if real else 4, 2, 2) if q.dtype == torch.float32 else (1, 1, 1)
    chunk, width, depth = (max(16, x // by) for x, by in zip(PHASE_TILE, shrink))
    width, depth = (min(x, max(16, triton.next_power_of_2(d))) for x in (width, depth))
    return (B * H, H, T), -(-T // chunk), {"REAL": real, "COLUMNS": d, "CHUNK": chunk, "WIDTH": width, "DEPTH": depth}


def _phase_states(k, v, log_gamma, S, reverse, real):
    """The state before each chunk and after the last; in reverse, after each chunk and before the first."""
    numbers, _, sizes = _phase_sizes(k, real)
    states, last, width = _phase_states_like(k, real), torch.empty_like(S), sizes.pop("DEPTH")
    programs = numbers[0] * (-(-sizes["COLUMNS"] // width)) ** 2
    sizes |= {"WIDTH": width, "REVERSE": reverse}
    _launch(_phase_state_kernel, programs, *_heads(k, v, log_gamma), S, states, last, *numbers, **sizes)
    return states, last


def _phase_states_like(k, real):
    """Room for a state a chunk, in the type to multiply in; what is carried from chunk to chunk is float32."""
    (G, *_), chunks, sizes = _phase_sizes(k, real)
    dtype = torch.float32 if k.dtype == torch.float32 else torch.bfloat16
    return k.new_empty(G, chunks, 1 if real else 2, sizes["COLUMNS"], sizes["COLUMNS"], dtype=dtype)


def _phase_values(own, seen, summed, log_gamma, states, later, flip, real, dtype, factor=None):
    numbers, chunks, sizes = _phase_sizes(own, real)
    blocks = -(-sizes["COLUMNS"] // sizes["WIDTH"])
    out = summed.new_empty(summed.shape, dtype=dtype)
    dots = None if factor is None else states.new_empty(blocks, *log_gamma.shape, dtype=torch.float32)
    _launch(_phase_value_kernel, numbers[0] * chunks * blocks, *_heads(own, seen, summed, log_gamma, factor),
            states, out, dots, *numbers, LATER=later, FLIP=flip, **sizes)  # fmt: skip
    return out, dots


def _phase_forward_triton(q, k, v, log_gamma, S, real):
    """y, the last state, and M before each chunk; q, k, v of one dtype, S float32 and contiguous."""
    states, last = _phase_states(k, v, log_gamma, S, False, real)
    return _phase_values(q, k, v, log_gamma, states, True, False, real, torch.float32)[0], last, states


def _phase_backward_triton(grad, grad_S, q, k, v, log_gamma, S, states, real):
    grad = grad.to(torch.float32 if q.dtype == torch.float32 else torch.bfloat16)  # as it is multiplied
    ends, dS = _phase_states(q, grad, log_gamma, grad_S.contiguous(), True, real)  # N
    dv, _ = _phase_values(k, q, grad, log_gamma, ends, False, False, real, v.dtype)
    dq, from_state = _phase_values(grad, v, k, log_gamma, states, True, True, real, q.dtype, q)
    dk, to_state = _phase_values(v, grad, q, log_gamma, ends, False, True, real, k.dtype, k)
    (dlog_gamma,) = _empty_like(log_gamma)
    numbers, chunks, sizes = _phase_sizes(q, real)
    _launch(_phase_gate_kernel, numbers[0] * chunks, *_heads(q, k, v, grad, log_gamma), states, ends, from_state,
            to_state, dlog_gamma, *numbers, **sizes)  # fmt: skip
    return dq, dk, dv, dlog_gamma, dS


_triton_phase = _operator(
    "triton_phase(Tensor q, Tensor k, Tensor v, Tensor log_gamma, Tensor S, bool real) -> (Tensor, Tensor, Tensor)",
    _phase_forward_triton,
    lambda q, k, v, log_gamma, S, real: (S.new_empty(v.shape), S.new_empty(S.shape), _phase_states_like(k, real)),
    _phase_backward_triton,
    lambda grad, grad_S, q, k, v, log_gamma, S, states, real: _empty_like(q, k, v, log_gamma, S),
    saved=("q", "k", "v", "log_gamma", "S", 2),
    outputs=2,
)


# ----------------------------------------------------------------------------------------------------------------------
# python kernels.py

CHECKS = {  # every operation and form: a function, and the shapes of its inputs, the initial state last
    "complex_scan": (complex_scan, _axes("log_decay: B T C, theta: B T C, b: B T C 2, h0: B C 2")),
    "complex_scan, real": (
        lambda a, *x, **k: complex_scan(a, None, *x, **k), _axes("log_decay: B T 1, b: B T C, h0: B C")),
    "cayley_scan": (cayley_scan, CAYLEY),
    "cayley_scan, no gate": (lambda *x, **k: cayley_scan(*x[:2], None, *x[2:], **k), CAYLEY[:2] + CAYLEY[3:]),
    "selective_scan": (selective_scan, SELECTIVE),
    "born_attention, quadratic": (partial(born_attention, method="quadratic"), BORN),
    "born_attention, linear": (partial(born_attention, method="linear"), BORN),
    "phase_memory": (phase_memory, MEMORY),
    "phase_memory, real": (partial(phase_memory, real=True), REAL_MEMORY),
}  # fmt: skip


def check_inputs(shapes, **sizes):
    """Typical inputs of these shapes in float64, the same in every call."""
    inputs = []
    for seed, (name, axes) in enumerate(shapes):
        size = [int(axis) if axis.isdigit() else sizes[axis] for axis in axes]
        x = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        typical = {"log_decay": -x.abs(), "log_gamma": -F.softplus(x - 2), "A": -1 - x.abs(), "dt": F.softplus(x - 3)}
        inputs.append((typical | {"theta": 3 * x}).get(name, x))
    return tuple(inputs)


def check_cases():
    """(name, function, inputs) of every row: each of CHECKS, many sequences, and several blocks, as in PAM."""
    usual = {"B": 2, "T": 257, "C": 48, "E": 40, "H": 3, "N": 16, "d": 16}
    wide = {"B": 1, "d": 64}
    more = {"complex_scan": {"B": 180, "T": 100, "C": 80}, "phase_memory": wide, "phase_memory, real": wide}
    for name, (function, shapes) in CHECKS.items():
        yield name, function, check_inputs(shapes, **usual)
        if name in more:
            sizes = ", ".join(f"{axis} = {n}" for axis, n in more[name].items())
            yield f"{name}, {sizes}", function, check_inputs(shapes, **usual | more[name])


def check_device():
    """Checks every operation on the present device against its float64 reference."""
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    runs = [("torch", torch.float32, 2e-4)]  # the tolerance is that of a sum over some hundred steps
    if device == "cuda" and triton is not None:
        runs += [("triton", torch.float32, 2e-4), ("triton", torch.bfloat16, 2e-2)]
    if wanted := check_backend():
        runs = [run for run in runs if run[0] == wanted] or [(wanted, torch.float32, 2e-4)]
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if device == 'cuda' else device}")
    print("largest error / largest value, against float64 on the same rounded inputs\n")
    print("| operation | backend | inputs | output | gradients | |\n|" + "---|" * 6)

    def run(function, inputs, backend):
        """Outputs, but for a state of several tensors, and gradients, in float64."""
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = [x for x in function(*leaves, backend=backend) if isinstance(x, Tensor)]
        weights = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(x) for x in outputs]
        grads = torch.autograd.grad(outputs, leaves, weights)
        return [[x.detach().cpu().double() for x in group] for group in (outputs, grads)]

    right = True
    for (name, function, inputs), (backend, dtype, tolerance) in product(check_cases(), runs):
        rounded = [x.to(dtype) for x in inputs]
        try:
            exact = run(function, [x.double() for x in rounded], "reference")
            found = run(function, [x.to(device) for x in rounded], backend)
            pairs = [zip(*group) for group in zip(found, exact)]
            each = ([(x - y).abs().max() / y.abs().max() for x, y in group] for group in pairs)
            errors = [torch.stack(of_group).max().item() for of_group in each]
            good = all(error < tolerance for error in errors)  # False for a nan, which max keeps
            cells = [*(f"{error:.1e}" for error in errors), "" if good else "FAILED"]
        except Exception as e:  # noqa: BLE001  (whatever stops one row: the others are worth seeing)
            cells, good = ["", "", f"FAILED: {type(e).__name__}: {' '.join(str(e).split())[-200:]}"], False
        right &= good
        print("|", " | ".join((name, backend, str(dtype).removeprefix("torch."), *cells)), "|", flush=True)
    return right


def main():
    parser = argparse.ArgumentParser(description=check_device.__doc__)
    parser.parse_args()
    try:
        raise SystemExit(not check_device())
    except ValueError as e:  # of NANOHILBERT_BACKEND
        parser.exit(2, f"error: {e}\n")


if __name__ == "__main__":
    from data import command_line  # here, as the operations need no other file

    command_line(main)
