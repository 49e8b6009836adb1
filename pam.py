"""PAM, phase-associative memory: a language model of complex numbers throughout whose memory is a matrix, and SAM, its
real twin of equal size.

Paper: "Phase-Associative Memory: Sequence Modeling in Complex Hilbert Space" (PAM), section II, eqs. 1-7, tables 1-2.

Glossary   B batch   T time   D width   L layers   H heads (the paper's memory banks)   d their width   V vocabulary
    here       paper            shape             meaning
    z, x       z, x_t           (B, T, D, 2)      the complex residual stream, and what a layer sees: its norm
    q, k, v    Q, K, V, eq. 4   (B, H, T, d, 2)   queries (scaled by 1/sqrt d), keys and values
    dt         dt_t, eq. 5      (B, T, H)         decay rate before protection
    p          p_t, eq. 5       (B, T, H)         protect gate: at 1 the state is frozen; here 1 - p
    log_gamma  log gamma_t      (B, T, H)         log of the decay of the state
    S          S_t, eq. 6       (B, H, d, d, 2)   the memory, indexed [value, key]
    alpha      alpha, eqs. 2-3  scalar            learned scale of a residual branch, alpha_cgu and alpha_pam
Complex numbers are real pairs, last axis (re, im). In memory all real parts of a vector come first, then all imaginary
ones: element-wise work is several times faster so. Gates, angles, moduli and sums are at least float32, whatever the
dtype of the parameters; a float64 model is float64 throughout. SAM is the same model in real arithmetic, without that
axis: k for k^*, ReLU for modReLU, a sigmoid for the gate, turns of pairs of channels for turns of a channel. It gets
twice the heads (equal numbers in the state) and the width that brings its parameters nearest (`matched_width`).

Variants that the paper tried: order=sequential, all channel mixing before all memory, without rotary positions;
qk=unit, queries and keys of modulus 1 in each coordinate; window=W, the hybrid "that adds sparse windowed attention
every fourth block" (section III). Heads, width and scale of that attention, and its place in the block, are ours: see
`WindowAttention`.

Initialisation. What the paper does not give is ours and marked *.
    complex maps                   W_r and W_i (semi-)orthogonal, each / sqrt 2 *; real maps of SAM * (semi-)orthogonal
    alpha_cgu, alpha_pam           1.0, 0.1
    b_dt, b_p                      -4, -3; W_dt, W_p normal, std 0.02 *
    embedding *                    normal, std 0.01 in both parts; tied to the output head
    modReLU bias b *               0, so that at first it passes everything
    norm scales *                  1
"""

import math
from argparse import ArgumentParser
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels import check_tokens, phase_memory

EXPANSION = 3  # of the channel mixing
ROPE_BASE = 10000  # not given in the paper
EMBEDDING_STD = 0.01  # as in the other models: the tied head must not start by scoring the present token
RealNorm = partial(nn.RMSNorm, eps=1e-6)  # of SAM


@dataclass
class PAMConfig:
    V: int = 256  # vocabulary
    D: int = 100  # complex width
    L: int = 4  # blocks
    H: int = 4  # heads
    d: int = 16  # complex head width
    order: str = "interleaved"  # interleaved | sequential: L channel mixings, then L memories, no rotary positions
    qk: str = "free"  # free | unit: q / |q| and k / |k| in each coordinate
    window: int = 0  # positions that softmax attention sees, in the last block and every fourth before it; 0: none

    def __post_init__(self):
        _check(self, order=("interleaved", "sequential"), qk=("free", "unit"))


@dataclass
class SAMConfig:
    V: int = 256  # vocabulary
    D: int = 100  # complex width of the PAM that it is matched to
    L: int = 4  # blocks
    H: int = 4  # heads of that PAM
    d: int = 16  # head width
    width: int = -1  # real width; -1: matched
    heads: int = -1  # -1: 2 H
    order: str = "interleaved"  # interleaved | sequential

    def __post_init__(self):
        _check(self, order=("interleaved", "sequential"))
        if self.d % 2:
            raise ValueError(f"d={self.d} must be even: rotary positions turn pairs of channels")


def _check(config, **choices):
    for key, known in choices.items():
        if getattr(config, key) not in known:
            raise ValueError(f"{key}={getattr(config, key)} is unknown; known: {', '.join(known)}")
    for key, value in vars(config).items():
        if type(value) is int and value < 1 and (key, value) not in (("width", -1), ("heads", -1), ("window", 0)):
            raise ValueError(f"{key}={value} must be at least 1")


# ----------------------------------------------------------------------------------------------------------------------
# Primitives


def wide(x):
    """x in float32; in float64 if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def re_im(z):
    """z_r and z_i of z (..., n, 2). Their gradient, unlike unbind(-1)'s, lies in memory as the model's vectors do."""
    return z.mT.unbind(-2)


class ComplexLinear(nn.Module):
    """W z for a complex matrix W = W_r + i W_i, (m, n): y_r = W_r x_r - W_i x_i, y_i = W_i x_r + W_r x_i. No bias."""

    def __init__(self, n, m):
        super().__init__()
        self.weight_r, self.weight_i = (
            nn.Parameter(nn.init.orthogonal_(torch.empty(m, n), gain=0.5**0.5)) for _ in range(2)
        )

    def forward(self, z):
        """z (..., n, 2) -> (..., m, 2)"""
        # As one real matrix (2m, 2n) on (x_r, x_i), at least in float32, also under autocast: the phase z / |z| of the
        # gate divides by |z| what bf16 has rounded, and one small |z| spoils the gradient of all below it.
        with torch.autocast("cpu" if z.is_meta else z.device.type, enabled=False):
            r, i = wide(self.weight_r), wide(self.weight_i)
            matrix = torch.cat((torch.cat((r, -i), 1), torch.cat((i, r), 1)))
            return F.linear(z.mT.flatten(-2).to(matrix.dtype), matrix).unflatten(-1, (2, -1)).mT


class RealLinear(nn.Linear):
    """Its real counterpart."""

    def __init__(self, n, m):
        super().__init__(n, m, bias=False)
        nn.init.orthogonal_(self.weight)


def modulus(z):
    """|z| of z (..., n, 2), at least float32, with a finite gradient at 0."""
    return (wide(z).square().sum(-1) + 1e-12).sqrt()


class ModReLU(nn.Module):
    """The modulus ReLU(|z| + b) of modReLU, with a learned bias b per channel: a threshold, the phase untouched."""

    def __init__(self, n):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(n))

    def forward(self, size):
        return F.relu(size + self.bias)


class ComplexNorm(nn.Module):
    """s (|z| / RMS(|z|)) z / |z| = s z / RMS(|z|): scales moduli, keeps phases; s is learned, one real per channel."""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, z):
        rms = (wide(z).square().sum(-1).mean(-1) + 1e-6).sqrt()  # over the channels; 1e-6: finite at 0
        return (z * (self.weight / rms.unsqueeze(-1)).unsqueeze(-1)).to(z.dtype)


def rope(q, k, position):
    """Turns pairs q, k (B, H, T, n, 2) at positions m = position, ... by e^{i m theta_j}, theta_j = 10000^(-j/n)."""
    T, n = q.shape[2:4]
    theta = ROPE_BASE ** (-torch.arange(n).to(q) / n)
    m = torch.arange(position, position + T, device=q.device).unsqueeze(-1)  # (T, 1)
    if theta.dtype == torch.float64 or position + T <= 256:
        angle = m * theta
    else:
        # At m = 1e7 a float32 product m theta has no digits left for the angle. So whole multiples of 256 positions are
        # turned in integers, in units of 2^-38 radians modulo 2 pi.
        unit, turn = 2**38, round(2 * math.pi * 2**38)
        start = m // 256 * ((theta * unit).long() * 256 % turn) % turn
        angle = m % 256 * theta + start.to(theta.dtype) / unit
    cos, sin = angle.cos(), angle.sin()
    return [torch.stack((re * cos - im * sin, re * sin + im * cos), -1) for re, im in (re_im(q), re_im(k))]


# ----------------------------------------------------------------------------------------------------------------------
# Channel mixing and memory, complex and real


class CGU(nn.Module):
    """Complex gated unit: W_down(gate_phase * modReLU(W_up z) * sigmoid(|W_g z|)), eq. 1."""

    def __init__(self, D):
        super().__init__()
        self.gate_proj, self.up_proj = ComplexLinear(D, EXPANSION * D), ComplexLinear(D, EXPANSION * D)
        self.act = ModReLU(EXPANSION * D)
        self.down_proj = ComplexLinear(EXPANSION * D, D)

    def forward(self, z):
        """z (B, T, D, 2) -> the same"""
        g, u = wide(self.gate_proj(z)), wide(self.up_proj(z))
        size_g, size_u = modulus(g), modulus(u)
        scale = size_g.sigmoid() * self.act(size_u) / (size_g * size_u)  # eq. 1: the product g u keeps its phase alone
        (g_re, g_im), (u_re, u_im) = re_im(g), re_im(u)
        product = torch.stack((g_re * u_re - g_im * u_im, g_re * u_im + g_im * u_re), -2).mT
        return self.down_proj((product * scale.unsqueeze(-1)).to(z.dtype))


class RealGU(nn.Module):
    """The same in real arithmetic: W_down(ReLU(W_up x) * sigmoid(W_g x))."""

    def __init__(self, D):
        super().__init__()
        self.gate_proj, self.up_proj = RealLinear(D, EXPANSION * D), RealLinear(D, EXPANSION * D)
        self.down_proj = RealLinear(EXPANSION * D, D)

    def forward(self, x):
        return self.down_proj((F.relu(self.up_proj(x)) * wide(self.gate_proj(x)).sigmoid()).to(x.dtype))


class Memory(nn.Module):
    """The PAM layer, eqs. 4-7. With real=True the memory of SAM."""

    def __init__(self, D, H, d, order, qk="free", real=False):
        super().__init__()
        self.H, self.d, self.real, self.unit = H, d, real, qk == "unit"
        self.rotary = order == "interleaved"
        Linear = RealLinear if real else ComplexLinear
        self.qkv_proj = Linear(D, 3 * H * d)  # eq. 4
        self.dt_proj = nn.Linear(D if real else 2 * D, H)  # on concat(x_r, x_i)
        self.protect_proj = nn.Linear(D, H)  # on |x|
        self.out_proj = Linear(H * d, D)
        for proj, bias in ((self.dt_proj, -4.0), (self.protect_proj, -3.0)):
            nn.init.normal_(proj.weight, std=0.02)
            nn.init.constant_(proj.bias, bias)

    def init_state(self, batch_size):
        """(S (B, H, d, d, 2), or without the last axis if real; position of the next token)"""
        pair = () if self.real else (2,)
        return wide(self.dt_proj.weight).new_zeros(batch_size, self.H, self.d, self.d, *pair), 0

    def gates(self, x):
        """x (B, T, D, 2), or (B, T, D) if real -> log_gamma and 1 - p, (B, T, H) each, at least float32."""
        flat, size = (x, x.abs()) if self.real else (x.mT.flatten(-2), modulus(x))
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):  # as in ComplexLinear
            dt, protect = (
                F.linear(wide(y), wide(proj.weight), wide(proj.bias))
                for y, proj in ((flat, self.dt_proj), (size, self.protect_proj))
            )
        # sigmoid(-x) is 1 - sigmoid(x) with all its digits: at a logit of 17 a float32 p is 1.
        dt, one_minus_p = F.softplus(dt), (-protect).sigmoid()
        # eq. 5: gamma = e^-dt (1 - p) + p = 1 - (1 - p)(1 - e^-dt), whose log keeps its digits near gamma = 1. Below
        # gamma = 1e-7, where float32 has no digits of 1 - gamma, it stays there: no log of 0.
        closing = one_minus_p * torch.expm1(-dt)
        return torch.log1p(closing.clamp(min=-1 + 2**-23)), one_minus_p

    def forward(self, x, state):
        """x (B, T, D, 2), or (B, T, D) if real -> the same, and the state after it."""
        S, position = state
        log_gamma, one_minus_p = self.gates(x)
        qkv = wide(self.qkv_proj(x))
        qkv = (qkv if self.real else qkv.mT).unflatten(-1, (3, self.H, self.d))  # (B, T, 2, 3, H, d)
        q, k, v = (y.movedim(-2, 1) if self.real else y.movedim(-2, 1).mT for y in qkv.unbind(-3))  # (B, H, T, d, 2)
        if self.unit:
            q, k = q / modulus(q).unsqueeze(-1), k / modulus(k).unsqueeze(-1)
        if self.rotary:
            pairs = (y.view(*y.shape[:3], -1, 2) for y in (q, k))  # of channels, if real
            q, k = (y.view(q.shape) for y in rope(*pairs, position))
        v = v * one_minus_p.transpose(1, 2).view(*v.shape[:3], *(v.dim() - 3) * (1,))  # eq. 5: V' = V (1 - p)
        y, S = phase_memory(q / self.d**0.5, k, v.contiguous(), log_gamma.transpose(1, 2), S, self.real)  # eqs. 6-7
        y = (y if self.real else y.mT).movedim(1, -2).flatten(-2).to(x.dtype)  # (B, T, 2, H*d)
        return self.out_proj(y if self.real else y.mT), (S, position + x.shape[1])


class WindowAttention(nn.Module):
    """Softmax attention of Re<q|k> / sqrt(2d) to the present and the W - 1 positions before it, for the hybrid. Ours:
    heads and rotary positions of the memory, whose normed input it shares; its scale, which starts as alpha_pam."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.qkv_proj, self.out_proj = ComplexLinear(c.D, 3 * c.H * c.d), ComplexLinear(c.H * c.d, c.D)

    def init_state(self, batch_size):
        """(keys and values of the W - 1 positions before (B, 2, H, W-1, 2d), position of the next token)"""
        c = self.c
        return wide(self.qkv_proj.weight_r).new_zeros(batch_size, 2, c.H, c.window - 1, 2 * c.d), 0

    def forward(self, x, state):
        """x (B, T, D, 2) -> the same, and the state after it. In pieces of W queries, so in O(T W) time and memory."""
        (past, position), T, W = state, x.shape[1], self.c.window
        q, k, v = wide(self.qkv_proj(x)).unflatten(2, (3, self.c.H, self.c.d)).transpose(1, 3).unbind(2)
        q, k, v = (y.flatten(-2) for y in (*rope(q, k, position), v))  # (B, H, T, 2d)
        kv = torch.cat((past.to(k.dtype), torch.stack((k, v), 1)), 3)
        size = min(T, W)  # of a piece; the last is filled up, and what fills it is cut off below
        fill = -T % size
        k, v = F.pad(kv, (0, 0, 0, fill)).unfold(3, W - 1 + size, size).transpose(-1, -2).unbind(1)
        q = F.pad(q, (0, 0, 0, fill)).unflatten(2, (-1, size))  # (B, H, pieces, size, 2d)
        query = torch.arange(T + fill, device=x.device).view(-1, size, 1)  # positions from that of x[:, 0]
        key = torch.arange(1 - W, T + fill, device=x.device).unfold(0, W - 1 + size, size).unsqueeze(1)
        mask = (query - W < key) & (key <= query) & (key >= -position)  # (pieces, size, W - 1 + size)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).flatten(2, 3)[:, :, :T]
        y = y.transpose(1, 2).flatten(2).unflatten(-1, (-1, 2))  # (B, T, H*d, 2)
        return self.out_proj(y.to(x.dtype)), (kv[:, :, :, T:].to(past.dtype, copy=True), position + T)


class Block(nn.Module):
    """Channel mixing, then memory, each on the normed stream with a learned scale, eqs. 2-3; one of them alone in
    order=sequential. With `windowed`, attention beside the memory."""

    def __init__(self, D, H, c, real, mixes, remembers, windowed):
        super().__init__()
        self.mixes, self.remembers, self.windowed = mixes, remembers, windowed
        norm = RealNorm if real else ComplexNorm
        if mixes:
            self.cgu_norm, self.cgu = norm(D), (RealGU if real else CGU)(D)
            self.alpha_cgu = nn.Parameter(torch.tensor(1.0))
        if remembers:
            self.pam_norm = norm(D)
            self.pam = Memory(D, H, c.d, c.order, "free" if real else c.qk, real)
            self.alpha_pam = nn.Parameter(torch.tensor(0.1))
        if windowed:
            self.window = WindowAttention(c)
            self.alpha_window = nn.Parameter(torch.tensor(0.1))

    def init_state(self, batch_size):
        state = self.pam.init_state(batch_size) if self.remembers else ()
        return (state, self.window.init_state(batch_size)) if self.windowed else state

    def forward(self, z, state):
        """z (B, T, D, 2) -> the same, and the state after it."""
        if self.mixes:
            z = z + self.alpha_cgu * self.cgu(self.cgu_norm(z))  # eq. 2
        if self.remembers:
            x, (memory, window) = self.pam_norm(z), state if self.windowed else (state, None)
            y, state = self.pam(x, memory)
            z = z + self.alpha_pam * y  # eq. 3
        if self.windowed:
            y, window = self.window(x, window)
            z, state = z + self.alpha_window * y, (state, window)
        return z, state


# ----------------------------------------------------------------------------------------------------------------------
# Models


class PAM(nn.Module):
    """Complex language model: embedding, L blocks, tied head."""

    Config, real = PAMConfig, False
    NO_DECAY = ()  # the paper decays with 0.01 and names no exemption; here the decayed tensors are those of rank 2
    SIZES: ClassVar = {  # table 1, but for tiny
        "tiny": PAMConfig(D=100, L=4, H=4, d=16),
        "5m": PAMConfig(D=44, L=12, H=2, d=16),
        "10m": PAMConfig(D=80, L=12, H=4, d=16),
        "25m": PAMConfig(D=200, L=6, H=4, d=16),
        "50m": PAMConfig(D=292, L=12, H=4, d=16),
        "100m": PAMConfig(D=384, L=16, H=6, d=64),
    }

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.checkpointing = False  # activation checkpointing per layer, while training
        D, H = (c.width, c.heads) if self.real else (c.D, c.H)
        self.embedding = nn.Embedding(c.V, D if self.real else 2 * D)  # (re, im) of a channel side by side
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        fourth = [not self.real and c.window > 0 and (c.L - i) % 4 == 1 for i in range(c.L)]
        parts = [(c.order == "interleaved", True, windowed) for windowed in fourth]  # mixes, remembers, windowed
        if c.order == "sequential":
            parts = c.L * [(True, False, False)] + parts
        self.layers = nn.ModuleList(Block(D, H, c, self.real, *part) for part in parts)
        self.norm_f = (RealNorm if self.real else ComplexNorm)(D)  # not in the paper
        with torch.no_grad():
            self.start = self.init_state(0)  # for its structure and shapes

    def init_state(self, batch_size):
        """The state before the first token, one entry a layer. Its size does not depend on the sequence."""
        return [layer.init_state(batch_size) for layer in self.layers]

    def forward(self, idx, targets=None, state=None):
        """
        Args: idx (B, T) int64 or int32; targets likewise or None; state from init_state or an earlier call, or None.
        Returns: logits (B, T, V), at least float32; loss, the mean in nats per token, or None; state after the last
            token, but None after a training step: targets and no state given.
        Raises: ValueError if idx is empty, or targets or state do not fit it.
        """
        check_tokens(idx, targets, state, self.start)
        keep_state = targets is None or state is not None
        state = self.init_state(idx.shape[0]) if state is None else state
        z, new_state = self.embedding(idx), []
        z = z if self.real else wide(z).unflatten(-1, (-1, 2)).mT.contiguous().mT  # (B, T, D, 2)
        for layer, layer_state in zip(self.layers, state):
            if self.checkpointing and self.training:
                z, layer_state = checkpoint(layer, z, layer_state, use_reentrant=False)
            else:
                z, layer_state = layer(z, layer_state)
            if keep_state:
                new_state.append(layer_state)
        z = self.norm_f(z)
        # z_r E_r^T + z_i E_i^T, the real part of <E|z>, is a real product of the pairs.
        z = z if self.real else torch.stack(re_im(z), -1).flatten(-2)
        logits = wide(F.linear(z, self.embedding.weight.to(z.dtype)))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten().long())
        return logits, loss, new_state if keep_state else None

    def step(self, idx_t, state):
        """One token: idx_t (B,) -> logits (B, V) and the next state, in time and memory that do not grow."""
        logits, _, state = self(idx_t.unsqueeze(1), state=state)
        return logits[:, 0], state

    def num_params(self):
        """Parameters by component; "total" is their sum."""
        counts, unnamed = Counter(), ("layers", "weight", "weight_r", "weight_i", "bias")
        for name, p in self.named_parameters():
            parts = (x for x in name.split(".") if not x.isdigit() and x not in unnamed)
            counts[".".join(parts)] += p.numel() * (1 + p.is_complex())
        return {**counts, "total": counts.total()}

    def mixing_flops(self, seq):
        """Forward flops of the recurrence per token: for an entry of S 18 if complex, 5 if real (eqs. 6-7); and of the
        attention to windows, 4 for each of the 2d numbers of the keys that a token sees on average."""
        c = self.config
        if self.real:
            return c.L * c.heads * c.d**2 * 5
        W = min(c.window, seq)
        seen = W - W * (W - 1) / (2 * seq)  # the first ones have no whole window behind them
        return c.L * c.H * c.d**2 * 18 + -(-c.L // 4) * c.H * seen * 4 * 2 * c.d

    def flops_per_token(self, seq):
        """Forward and backward flops a token, without a window the same at every sequence length `seq`: 6 per weight of
        a real map and of the tied head, 12 per number of a complex map, which meets both parts of its input; and the
        recurrence. Element-wise work and recomputation are not counted."""
        weights = self.embedding.weight.numel()
        weights += sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        weights += sum(4 * m.weight_r.numel() for m in self.modules() if isinstance(m, ComplexLinear))
        return 6 * weights + 3 * self.mixing_flops(seq)


class SAM(PAM):
    """The real twin: twice the heads, and the width that matches the parameters."""

    Config, real = SAMConfig, True
    SIZES: ClassVar = {size: SAMConfig(D=c.D, L=c.L, H=c.H, d=c.d) for size, c in PAM.SIZES.items()}

    def __init__(self, config):
        config = replace(config, heads=2 * config.H) if config.heads < 0 else config
        super().__init__(replace(config, width=matched_width(config)) if config.width < 0 else config)


def matched_width(config):
    """Real width that brings SAM, with its heads, nearest to the PAM of the same V, D, L, H and d."""

    def total(model_class, one_block):
        with torch.device("meta"):  # counts only: nothing is allocated
            model = model_class(one_block)
        return model.num_params()["total"] + (config.L - 1) * sum(p.numel() for p in model.layers.parameters())

    def real_total(width):
        return total(SAM, replace(config, L=1, width=width))

    target = total(PAM, PAMConfig(V=config.V, D=config.D, L=1, H=config.H, d=config.d))
    widths = range(1, 4 * (config.D + config.H * config.d))  # far beyond what the embedding or the memories may take
    above = bisect_left(widths, target, key=real_total)
    return min(widths[max(0, above - 1) : above + 1], key=lambda width: abs(real_total(width) - target))


MODELS = {"pam": PAM, "sam": SAM}

if __name__ == "__main__":
    epilog = "No flags: the file alone compares steps with a full pass. To train: python train.py --model pam"
    ArgumentParser(description=__doc__.split("\n\n")[0], epilog=epilog).parse_args()
    for name, model_class in MODELS.items():
        torch.manual_seed(0)
        model = model_class(model_class.SIZES["tiny"])
        idx = torch.randint(256, (2, 65))
        logits, loss, _ = model(idx[:, :-1], idx[:, 1:])
        state = model.init_state(2)
        for t in range(64):
            logits_t, state = model.step(idx[:, t], state)
        error, total = (logits_t - logits[:, -1]).abs().max(), model.num_params()["total"]
        print(f"{name}: {total:,} parameters, untrained loss {loss:.3f} (ln 256 = 5.545), step off by {error:.1e}")
