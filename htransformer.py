"""H-Transformer, whose attention weighs by the Born rule on complex queries and keys, and Transformer, its real twin.

Paper: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691), sections
5.5-5.7, eq. 5, Algorithm 3, and the factorial of section 9.2. The twin: Vaswani et al. (arXiv 1706.03762) with rotary
positions (Su et al., arXiv 2104.09864).

Glossary   B batch   T time   D d_model   E d_inner = 2 D   H heads   N complex width per head   V vocabulary
    here      paper                 shape             meaning
    q, k, v   |q>, |k>, |v>, eq. 5  (B, H, T, N, 2)   complex queries, keys and values, functions of the token
    o         |psi_i>, eq. 5        (B, H, T, N, 2)   what attention returns
    omega     omega_k, QS 5.5       (H, N)            learned frequencies: q_t and k_t are turned by t omega, radians
    e         QS 5.6                (H, N, 2)         measurement vector of the readout, unit modulus per coordinate
    tau       tau_i, eq. 5          (B, T, H)         temperature: projected, for the count of parameters, and not used:
                                                      it cancels between numerator and denominator
Complex numbers are real pairs, last axis (re, im). Angles, scores and sums are at least float32, whatever the dtype of
the parameters; a float64 model is float64 throughout.

The factorial of QS 9.2, in one host block with equal parameters, so that the host is no confounder:
    field=complex  score=born      w = |<q|k>|^2            readout y = conj(e q) o
    field=real     score=born      w = (Re <q|k>)^2         readout y = e q o, element-wise on 2N reals
    field=complex  score=softmax   Re <q|k> / sqrt(2N)      readout y = conj(e q) o
    field=real     score=softmax   Re <q|k> / sqrt(2N)      readout y = e q o
The real readout starts at about half the size of the complex one: it sums one product a number, not two. Under bf16
autocast softmax runs in bf16, Born attention in float32 (in Triton its products are of bf16). With the rotation
Re <q|k> is the rotary dot product of real vectors of width 2N: under softmax the field changes nothing but the readout.

Initialisation. From QS 5.6: Xavier for the input projections, a small std for param_proj, omega on a geometric grid
with alternating sign, e. The numbers and the rows marked * are ours: the paper does not give them.
    embedding *                     normal, std 0.01, as in hmamba.py and for its reason; tied to the output head. Even
                                    so an untrained 253m starts 1 nat above ln 256 on English
    in_proj, back_proj *            Xavier uniform; bias 0
    out_proj *                      Xavier uniform / sqrt(L); bias 0
    param_proj                      normal, std 0.02; bias 0
    omega                           geometric grid 0.01 ... 1 in each head, alternating sign
    e                               circularly symmetric complex normal, used divided by its modulus, never 0
    conv1d, norms *                 PyTorch's own: uniform +-1/2 for a width of 4; 1
    Transformer *                   Xavier uniform; the two matrices that write to the residual stream / sqrt(2L)
"""

import math
from argparse import ArgumentParser
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels import born_attention, check_tokens

EMBEDDING_STD = 0.01


@dataclass
class HTransformerConfig:
    V: int = 256  # vocabulary
    D: int = 128  # d_model
    L: int = 4  # layers
    H: int = 4  # heads
    N: int = 16  # complex width per head
    conv: int = 4  # width of the causal convolution
    field: str = "complex"  # complex | real, see the factorial above
    score: str = "born"  # born | softmax

    def __post_init__(self):
        _check(self, field=("complex", "real"), score=("born", "softmax"))


@dataclass
class TransformerConfig:
    V: int = 256  # vocabulary
    D: int = 128  # d_model
    L: int = 4  # layers
    head: int = 32  # real width of a head
    mlp: int = -1  # hidden width of the feed-forward layer; -1: matched to the H-Transformer of the same D, L, H and N
    H: int = 4  # heads of that H-Transformer, of no other effect
    N: int = 16  # the width of its heads, likewise

    def __post_init__(self):
        _check(self)
        if self.D % self.head or self.head % 2:
            raise ValueError(f"head={self.head} must be even and divide D={self.D}")


def _check(config, **choices):
    for key, value in vars(config).items():
        if type(value) is int and value < 1 and (key, value) != ("mlp", -1):
            raise ValueError(f"{key}={value} must be at least 1")
        if key in choices and value not in choices[key]:
            raise ValueError(f"{key}={value} is unknown; known: {', '.join(choices[key])}")


# ----------------------------------------------------------------------------------------------------------------------
# Blocks


def wide(x):
    """x in float32; in float64 if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class CausalConv1d(nn.Conv1d):
    """Depthwise convolution over time that sees the present and the K-1 inputs before it."""

    def __init__(self, E, K):
        super().__init__(E, E, K, groups=E)

    def forward(self, u, tail):
        """u (B, T, E), tail (B, K-1, E): the inputs before it. Returns the output (B, T, E) and the next tail,
        a copy: a view would keep all of u alive."""
        u = torch.cat((tail.to(u.dtype), u), 1)
        # As a 2-D convolution the channels stay the fastest axis: half the time of conv1d on a CPU.
        y = F.conv2d(u.transpose(1, 2).unsqueeze(2), self.weight.unsqueeze(2), self.bias, groups=self.groups)
        return y.squeeze(2).transpose(1, 2), u[:, u.shape[1] - tail.shape[1] :].to(tail.dtype, copy=True)


def angles(position, T, omega):
    """The angles t omega of the positions t = position, ..., position + T - 1, in radians up to whole turns.

    Args: omega (..., N), radians a position. Returns: (..., T, N), with the gradient t d omega.
    """
    t = torch.arange(position, position + T, device=omega.device).unsqueeze(-1)  # (T, 1)
    omega = omega.unsqueeze(-2)
    if omega.dtype == torch.float64:
        return t * omega
    # At t = 1e7 a float32 product t omega has no digits left for the angle. So t = 256 n + m, and the turn up to 256 n
    # is an integer in units of 2^-38 radians, modulo 2 pi. Lost are the rounding of 2 pi to that unit, once a turn, at
    # most 2^-41 t |omega| radians, 5e-6 at t = 1e7, omega = 1; and digits of omega below the unit, if |omega| < 2^-14.
    n, m = t // 256, t % 256
    angle = m * omega
    if position + T > 256:
        unit, turn = 2**38, round(2 * math.pi * 2**38)
        start = n * ((omega.detach() * unit).long() * 256 % turn) % turn
        angle = angle + start.to(omega.dtype) / unit + 256 * n * (omega - omega.detach())  # the last is 0: the gradient
    return angle


def rotate(x, angle):
    """x (B, H, T, N, 2) times e^{i angle}, angle (H, T, N) or (T, N) in radians."""
    cos, sin = angle.cos(), angle.sin()
    re, im = x.unbind(-1)
    return torch.stack((re * cos - im * sin, re * sin + im * cos), -1)


def softmax_attention(q, k, v, cache):
    """Causal softmax attention of real q, k, v (B, H, T, width) with the (k, v) before them, or None. Returns the
    output and the grown cache: as long as the past, and no view of more unless a gradient needs that."""
    if cache is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y, (k, v) if y.requires_grad else (k.clone(), v.clone())
    given = [x.shape for x in cache if isinstance(x, torch.Tensor) and x.is_floating_point() and x.device == k.device]
    pair = len(cache) == len(given) == 2 and given[0] == given[1]
    if not pair or given[0][:2] + given[0][3:] != k.shape[:2] + k.shape[3:]:
        raise ValueError(f"keys and values of the state do not go with keys (B, heads, T, width) of {tuple(k.shape)}")
    k, v = torch.cat((cache[0].to(k.dtype), k), 2), torch.cat((cache[1].to(v.dtype), v), 2)
    T, S = q.shape[2], k.shape[2]
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), (k, v)


class HTransformerBlock(nn.Module):
    """The shared block of QS 5.7, as in H-Mamba, around attention: norm, in_proj to a signal and a gate branch, causal
    convolution and SiLU, param_proj to q, k, v, tau, attention, readout, back_proj, gate, out_proj, residual."""

    def __init__(self, c):
        super().__init__()
        E, self.c = 2 * c.D, c
        self.norm = nn.RMSNorm(c.D, eps=1e-5)
        self.in_proj = nn.Linear(c.D, 2 * E, bias=False)
        self.conv1d = CausalConv1d(E, c.conv)
        self.param_proj = nn.Linear(E, c.H * (6 * c.N + 1))  # q, k, v and tau, QS 5.7
        sign = 1 - 2 * (torch.arange(c.N) % 2)
        self.omega = nn.Parameter((sign * torch.logspace(-2, 0, c.N)).repeat(c.H, 1))  # QS 5.6
        self.e = nn.Parameter(torch.randn(c.H, c.N, 2) * 0.5**0.5)  # QS 5.6
        self.back_proj = nn.Linear(2 * c.H * c.N, E)
        self.out_proj = nn.Linear(E, c.D)

        for proj in (self.in_proj, self.back_proj, self.out_proj):
            nn.init.xavier_uniform_(proj.weight)
        nn.init.normal_(self.param_proj.weight, std=0.02)
        for proj in (self.param_proj, self.back_proj, self.out_proj):
            nn.init.zeros_(proj.bias)
        with torch.no_grad():
            self.out_proj.weight /= c.L**0.5

    def init_state(self, batch_size):
        """(tail of the convolution (B, conv-1, E), position of the next token, state of the attention or None)"""
        return self.conv1d.weight.new_zeros(batch_size, self.c.conv - 1, 2 * self.c.D), 0, None

    def forward(self, x, state):
        """x (B, T, D) -> the same, and the state after it."""
        c, (tail, position, past), T = self.c, state, x.shape[1]
        u, z = self.in_proj(self.norm(x)).chunk(2, -1)  # (B, T, E) each: signal and gate branch
        u, tail = self.conv1d(u, tail)
        # Under bf16 autocast the projection is rounded to bf16; everything made of it from here on is at least float32.
        params = wide(self.param_proj(F.silu(u)))[..., : 6 * c.H * c.N]  # tau_i, the rest, cancels in eq. 5
        q, k, v = params.unflatten(-1, (3, c.H, c.N, 2)).permute(2, 0, 3, 1, 4, 5).unbind(0)  # (B, H, T, N, 2)
        angle = angles(position, T, wide(self.omega))  # (H, T, N): theta = t omega, QS 5.5
        q_turned, k = rotate(q, angle), rotate(k, angle)
        if c.score == "born" and c.field == "complex":
            o, past = born_attention(q_turned, k, v, past)  # eq. 5
        elif c.score == "born":  # as complex vectors of 2N with no imaginary part, <q|k> is the real product
            real = [F.pad(y.flatten(-2).unsqueeze(-1), (0, 1)) for y in (q_turned, k, v)]
            o, past = born_attention(*real, past)
            o = o[..., 0].unflatten(-1, (-1, 2))
        else:
            o, past = softmax_attention(q_turned.flatten(-2), k.flatten(-2), v.flatten(-2), past)
            o = o.unflatten(-1, (-1, 2))
        # Read out against the query as it was before the turn, so that only relative positions count.
        e = wide(self.e).unsqueeze(1)
        e = e / e.norm(dim=-1, keepdim=True)  # (H, 1, N, 2), unit modulus
        if c.field == "complex":
            (q_re, q_im), (e_re, e_im), (o_re, o_im) = q.unbind(-1), e.unbind(-1), o.unbind(-1)
            m_re, m_im = e_re * q_re - e_im * q_im, e_re * q_im + e_im * q_re  # e q
            y = torch.stack((m_re * o_re + m_im * o_im, m_re * o_im - m_im * o_re), -1)  # conj(e q) o
        else:
            y = e * q * o
        y = self.back_proj(y.transpose(1, 2).flatten(2).to(z.dtype))  # (B, T, 2*H*N) -> (B, T, E)
        return x + self.out_proj(y * F.silu(z)), (tail, position + T, past)


class TransformerBlock(nn.Module):
    """Pre-norm attention with rotary positions, then a SiLU feed-forward layer of two matrices; no biases."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.norm = nn.RMSNorm(c.D, eps=1e-5)
        self.qkv_proj = nn.Linear(c.D, 3 * c.D, bias=False)
        self.out_proj = nn.Linear(c.D, c.D, bias=False)
        for proj in (*self.qkv_proj.weight.split(c.D), self.out_proj.weight):
            nn.init.xavier_uniform_(proj)
        self.mlp_norm = nn.RMSNorm(c.D, eps=1e-5)
        self.mlp_in = nn.Linear(c.D, c.mlp, bias=False)
        self.mlp_out = nn.Linear(c.mlp, c.D, bias=False)
        nn.init.xavier_uniform_(self.mlp_in.weight)
        nn.init.xavier_uniform_(self.mlp_out.weight)
        with torch.no_grad():
            self.out_proj.weight /= (2 * c.L) ** 0.5
            self.mlp_out.weight /= (2 * c.L) ** 0.5

    def init_state(self, batch_size):
        """(position of the next token, None; later the keys and values of the past, (B, heads, T, head) each)"""
        return 0, None

    def forward(self, x, state):
        """x (B, T, D) -> the same, and the state after it."""
        c, (B, T, _), (position, past) = self.c, x.shape, state
        qk, v = self.qkv_proj(self.norm(x)).split((2 * c.D, c.D), -1)
        qk, v = (y.view(B, T, -1, c.head).transpose(1, 2) for y in (qk, v))  # (B, 2 heads or heads, T, head)
        turned = wide(qk)
        angle = angles(position, T, 10000 ** (-torch.arange(0, c.head, 2).to(turned) / c.head))  # (T, head / 2)
        # A pair is (i, i + head / 2), a permutation of (2i, 2i + 1): (re, im) -> (re cos - im sin, im cos + re sin).
        cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
        turned = torch.addcmul(turned * cos, turned.roll(c.head // 2, -1), sin)
        q, k = turned.to(v.dtype).chunk(2, 1)
        y, past = softmax_attention(q, k, v, past)
        x = x + self.out_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.silu(self.mlp_in(self.mlp_norm(x)))), (position + T, past)


# ----------------------------------------------------------------------------------------------------------------------
# Models


class HTransformer(nn.Module):
    """Byte-level language model with Born attention."""

    Config, Block = HTransformerConfig, HTransformerBlock
    NO_DECAY = ("omega", "e")  # exempt from weight decay whatever their rank, unlike QS 7: frequencies and directions
    SIZES: ClassVar = {
        "tiny": HTransformerConfig(D=128, L=4, H=4),
        "small": HTransformerConfig(D=512, L=10, H=8),
        "253m": HTransformerConfig(D=1024, L=24, H=16),
    }

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.checkpointing = False  # activation checkpointing per layer, while training
        self.embedding = nn.Embedding(config.V, config.D)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        self.layers = nn.ModuleList(self.Block(config) for _ in range(config.L))
        self.norm_f = nn.RMSNorm(config.D, eps=1e-5)
        with torch.no_grad():
            self.start = self.init_state(0)  # for its structure and shapes

    def init_state(self, batch_size):
        """The state before the first token, one tuple a layer."""
        return [layer.init_state(batch_size) for layer in self.layers]

    def forward(self, idx, targets=None, state=None):
        """
        Args: idx (B, T) int64 or int32; targets likewise or None; state from init_state or an earlier call, or None.
        Returns: logits (B, T, V), at least float32; loss, the mean in nats per token, or None; state after the last
            token, but None after a training step: targets and no state given. It would hold all keys and values.
        Raises: ValueError if idx is empty, or targets or state do not fit it.
        """
        check_tokens(idx, targets, state, self.start)
        keep_state = targets is None or state is not None
        state = self.init_state(idx.shape[0]) if state is None else state
        x, new_state = self.embedding(idx), []
        for layer, layer_state in zip(self.layers, state):
            if self.checkpointing and self.training:
                x, layer_state = checkpoint(layer, x, layer_state, use_reentrant=False)
            else:
                x, layer_state = layer(x, layer_state)
            if keep_state:
                new_state.append(layer_state)
        logits = wide(F.linear(self.norm_f(x), self.embedding.weight))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten().long())
        return logits, loss, new_state if keep_state else None

    def step(self, idx_t, state):
        """One token: idx_t (B,) -> logits (B, V) and the next state. Time and memory do not grow with Born attention;
        under softmax they do, with the cache of keys and values."""
        logits, _, state = self(idx_t.unsqueeze(1), state=state)
        return logits[:, 0], state

    def num_params(self):
        """Parameters by component; "total" is their sum."""
        counts = Counter()
        for name, p in self.named_parameters():
            parts = (x for x in name.split(".") if not x.isdigit() and x not in ("layers", "weight", "bias"))
            counts[".".join(parts)] += p.numel() * (1 + p.is_complex())
        return {**counts, "total": counts.total()}

    def mixing_flops(self, seq):
        """Forward flops of attention per token, over the seq/2 keys that it sees on average: products of width 2N for
        the scores (two for a complex Born score) and one with the values. field=real:score=born spends twice that: it
        runs as a complex score whose imaginary parts are 0."""
        c = self.config
        products = 3 if (c.score, c.field) == ("born", "complex") else 2
        return c.L * c.H * (seq / 2) * 2 * 2 * c.N * products

    def flops_per_token(self, seq):
        """Forward and backward flops a token at sequence length `seq`: 6 per weight of the projections, convolutions
        and tied head, and attention in its quadratic form. Element-wise work and recomputation are not counted."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Embedding)))
        return 6 * weights + 3 * self.mixing_flops(seq)


class Transformer(HTransformer):
    """Pre-norm decoder with rotary softmax attention, at the same number of parameters."""

    Config, Block, NO_DECAY = TransformerConfig, TransformerBlock, ()
    SIZES: ClassVar = {
        "tiny": TransformerConfig(D=128, L=4, H=4, head=32),
        "small": TransformerConfig(D=512, L=10, H=8, head=64),
        "253m": TransformerConfig(D=1024, L=24, H=16, head=64, mlp=3096),  # the paper's width, QS 5.7; matched: 3095
        # Beside PAM's sweep: its layers, and at GPT-2's vocabulary its parameters; D so that mlp comes near 4 D.
        "5m": TransformerConfig(D=80, L=12, head=16, mlp=340),
        "10m": TransformerConfig(D=144, L=12, head=16, mlp=491),
        "25m": TransformerConfig(D=336, L=6, head=48, mlp=1354),
        "50m": TransformerConfig(D=432, L=12, head=48, mlp=1827),
        "100m": TransformerConfig(D=576, L=16, head=64, mlp=2706),
    }

    def __init__(self, config):
        super().__init__(replace(config, mlp=matched_width(config)) if config.mlp < 0 else config)

    def mixing_flops(self, seq):
        """Forward flops of attention per token, over the seq/2 keys that it sees on average."""
        return self.config.L * (seq / 2) * 4 * self.config.D


def matched_width(config):
    """Hidden width of the feed-forward layer that brings Transformer nearest to H-Transformer of equal D, L, H, N."""
    with torch.device("meta"):  # counts only: nothing is allocated
        complex_block = HTransformerBlock(HTransformerConfig(D=config.D, L=config.L, H=config.H, N=config.N))
        real_block = TransformerBlock(replace(config, mlp=1))
    surplus = sum(p.numel() for p in complex_block.parameters()) - sum(p.numel() for p in real_block.parameters())
    return max(1, 1 + round(surplus / (2 * config.D)))  # two matrices


MODELS = {"htransformer": HTransformer, "transformer": Transformer}

if __name__ == "__main__":
    epilog = "No flags: the file alone compares steps with a full pass. To train: python train.py --model htransformer"
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
        print(f"{name}: {total:,} parameters, untrained loss {loss:.3f} (ln 256 = 5.545),", end=" ")
        print(f"step against full pass {error:.1e}")
