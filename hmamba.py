"""H-Mamba, a state-space model whose state is complex, and Mamba, its real twin of equal size.

Papers: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691),
sections 5.1-5.7, eqs. 2-4, Algorithms 1-2; "Mamba" (Gu and Dao, arXiv 2312.00752), sections 3.3-3.6.

Glossary   B batch   T time   D d_model   E d_inner = 2 D   H heads   N state width per head   V vocabulary   R dt rank
    here     paper                          shape            meaning
    psi      |psi_t>, QS 5.1                (B, T, H, N, 2)  the complex state
    psi0     complex prior, QS 5.1          (H, N, 2)        state before the first token, unit modulus per coordinate
    b, C     b_t and C_t, QS eq. 2, 5.5     (B, T, H, N, 2)  input and output projections, functions of the token
    delta    delta_t, QS 5.2                (B, T, H, N)     input-dependent frequency shift
    omega    omega, QS 5.2                  (H, N)           learned base frequencies
    dt       Delta t, QS 5.2                (B, T, H)        step size
    phi      phi, QS eq. 3                  (B, T, H, N)     argument of the Cayley map, in kernels.cayley_scan
    theta    arg lambda, QS eq. 3           (B, T, H, N)     phase of the transition, radians, there
    alpha    alpha, QS eq. 2                (B, T, H, N)     modulus of the transition, exp(log_decay), there
Complex numbers are real pairs, last axis (re, im). Gates, angles, decays and sums are at least float32, whatever the
dtype of the parameters; a float64 model is float64 throughout.

Initialisation. From QS 5.6: Xavier for the input projections, a small std for param_proj, omega over two decades with
alternating sign, psi0. The numbers and the rows marked * are ours: the paper does not give them.
    embedding *                         normal, std 0.01 (EMBEDDING_STD says why); tied to the output head
    in_proj, back_proj *                Xavier uniform
    out_proj *                          Xavier uniform / sqrt(L)
    param_proj                          normal, std 0.02: the modulation begins near zero
    its bias *                          0 (so alpha = 0.5), but for dt: softplus^-1 of log-uniform [1e-3, 0.1]
    omega                               geometric grid 0.1 ... 10 in each head, alternating sign
    psi0                                circularly symmetric complex normal, used divided by its modulus, never 0
    conv1d, norms, head=mos *           PyTorch's own: uniform +-1/2 for a width of 4; 1; uniform
Mamba takes the same for the tensors that both have (QS figure 2). Its own, init=official, as published: A_log =
log(1..N), D = 1, dt_proj weight uniform +-R^-1/2 and bias as dt above; x_proj and SwiGLU Xavier, its last
matrix / sqrt(L).
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

from kernels import cayley_scan, check_tokens, complex_scan, selective_scan

MOS_COMPONENTS = 4  # softmaxes in head=mos
# The untrained H-Mamba block adds little to the residual stream, so the tied head sees mostly the embedding itself: the
# present token's own score is about D * std. With 0.02 that is 20 at D = 1024, and the loss would start near 11 nats.
EMBEDDING_STD = 0.01


@dataclass
class HMambaConfig:
    V: int = 256  # vocabulary
    D: int = 128  # d_model
    L: int = 4  # layers
    H: int = 4  # heads
    N: int = 16  # complex state width per head
    conv: int = 4  # width of the causal convolution
    # complex | real: 2N real channels a head, each with its gate, no phase (0.3 to 0.5 % fewer parameters)
    field: str = "complex"
    gate: str = "sigmoid"  # sigmoid | none: alpha = 1, an exactly unitary transition
    scan: str = "exact"  # exact | clamped: QS Algorithm 2 as printed
    head: str = "softmax"  # softmax | mos: mixture of softmaxes (adds 4 D^2) | born: |<e_v|psi>|^2 over the vocabulary

    def __post_init__(self):
        _check(self, field=("complex", "real"), gate=("sigmoid", "none"), scan=("exact", "clamped"))
        if self.field == "real" and self.scan == "clamped":
            raise ValueError("scan=clamped is defined for field=complex only")


@dataclass
class MambaConfig:
    V: int = 256  # vocabulary
    D: int = 128  # d_model
    L: int = 4  # layers
    N: int = 16  # real state width per channel
    conv: int = 4  # width of the causal convolution
    # hidden width of the SwiGLU branch; 0: none; -1: matched to the H-Mamba of the same D, L, N and H heads
    mlp: int = -1
    H: int = 4  # heads of that H-Mamba
    init: str = "official"  # official | xavier: dt_proj Xavier with bias 0, no 1/sqrt(L), A_log decayed
    head: str = "softmax"  # softmax | mos | born

    def __post_init__(self):
        _check(self, init=("official", "xavier"))


def _check(config, **choices):
    choices["head"] = ("softmax", "mos", "born")
    for key, value in vars(config).items():
        least = -1 if key == "mlp" else 1
        if type(value) is int and value < least:
            raise ValueError(f"{key}={value} must be at least {least}")
        if key in choices and value not in choices[key]:
            raise ValueError(f"{key}={value} is unknown; known: {', '.join(choices[key])}")
    if config.head == "born" and config.D % 2:
        raise ValueError(f"head=born reads D/2 complex numbers, so D={config.D} must be even")


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


class HMambaBlock(nn.Module):
    """The shared block of QS 5.7 around the complex recurrence: norm, in_proj into a signal and a gate branch, causal
    convolution and SiLU, param_proj to the substrate's parameters, recurrence, back_proj, gate, out_proj, residual."""

    def __init__(self, c):
        super().__init__()
        E, self.c = 2 * c.D, c
        channels = c.H * c.N  # complex
        # Widths of what param_proj emits, over all heads: 6N + 1 reals a head (QS 5.7) if complex and gated.
        self.widths = {"b": 2 * channels, "C": 2 * channels}
        if c.gate == "sigmoid":
            self.widths["gate"] = channels if c.field == "complex" else 2 * channels
        if c.field == "complex":
            self.widths |= {"delta": channels, "dt": c.H}
        self.norm = nn.RMSNorm(c.D, eps=1e-5)
        self.in_proj = nn.Linear(c.D, 2 * E, bias=False)
        self.conv1d = CausalConv1d(E, c.conv)
        self.param_proj = nn.Linear(E, sum(self.widths.values()))
        self.psi0 = nn.Parameter(torch.randn(c.H, c.N, 2) * 0.5**0.5)  # QS 5.6
        if c.field == "complex":
            sign = 1 - 2 * (torch.arange(c.N) % 2)
            self.omega = nn.Parameter((sign * torch.logspace(-1, 1, c.N)).repeat(c.H, 1))  # QS 5.6
        self.back_proj = nn.Linear(2 * channels, E, bias=False)
        self.out_proj = nn.Linear(E, c.D, bias=False)

        for proj in (self.in_proj, self.back_proj, self.out_proj):
            nn.init.xavier_uniform_(proj.weight)
        nn.init.normal_(self.param_proj.weight, std=0.02)
        nn.init.zeros_(self.param_proj.bias)
        if c.field == "complex":
            # With a bias of 0, dt = softplus(0) = 0.69 would sit above the clamp at 0.1 and have no gradient.
            _init_dt_bias(self.param_proj.bias.split(list(self.widths.values()))[-1])
        with torch.no_grad():
            self.out_proj.weight /= c.L**0.5

    def init_state(self, batch_size):
        """(tail of the convolution (B, conv-1, E), psi (B, H, N, 2))"""
        psi0 = wide(self.psi0)
        psi0 = psi0 / psi0.norm(dim=-1, keepdim=True)  # QS 5.1: unit modulus, per coordinate
        tail = self.conv1d.weight.new_zeros(batch_size, self.c.conv - 1, 2 * self.c.D)
        return tail, psi0.expand(batch_size, -1, -1, -1).contiguous()  # rows apart

    def forward(self, x, state):
        """x (B, T, D) -> the same, and the state after it."""
        c, (tail, psi) = self.c, state
        u, z = self.in_proj(self.norm(x)).chunk(2, -1)  # (B, T, E) each: signal and gate branch
        u, tail = self.conv1d(u, tail)
        # Under bf16 autocast these logits are rounded to bf16; everything made of them is at least float32.
        p = dict(zip(self.widths, self.param_proj(F.silu(u)).split(list(self.widths.values()), -1)))
        if c.field == "complex":
            heads = {key: logits.unflatten(-1, (c.H, -1)) for key, logits in p.items()}  # (B, T, H, N or 2N or 1)
            b, C = heads["b"].unflatten(-1, (-1, 2)), wide(heads["C"]).unflatten(-1, (-1, 2))
            dt = F.softplus(wide(p["dt"])).clamp(max=0.1)  # (B, T, H): one a head, QS 5.7
            # Algorithm 1 and eqs. 2-3: psi_t = alpha_t lambda_t psi_{t-1} + b_t with alpha = sigmoid(gate), of which
            # only the logits are given, and lambda = (1 + i phi) / (1 - i phi), phi = dt/2 (delta + omega).
            psi, last = cayley_scan(heads["delta"], dt, heads.get("gate"), self.omega, b, psi, method=c.scan)
            (C_re, C_im), (psi_re, psi_im) = C.unbind(-1), psi.unbind(-1)
            y = (C_re * psi_re + C_im * psi_im, C_re * psi_im - C_im * psi_re)  # conj(C) psi, QS 5.5
            y = torch.stack(y, 2).flatten(2)
        else:
            b, C = wide(p["b"]), wide(p["C"])
            # Algorithm 1, line 2: log alpha (its u is this gate logit)
            log_decay = F.logsigmoid(wide(p["gate"])) if c.gate == "sigmoid" else b.new_zeros(*b.shape[:2], 1)
            psi, last = complex_scan(log_decay, None, b, psi.flatten(1))  # 2N real channels a head
            y, last = C * psi, last.unflatten(-1, (c.H, c.N, 2))
        y = self.back_proj(y.to(z.dtype))  # (B, T, 2*H*N) -> (B, T, E)
        return x + self.out_proj(y * F.silu(z)), (tail, last)


class MambaMixer(nn.Module):
    """Mamba-1; parameter names as in the published implementations, so that a state dict moves between them."""

    def __init__(self, c):
        super().__init__()
        E, self.c = 2 * c.D, c
        self.rank = math.ceil(c.D / 16)
        self.in_proj = nn.Linear(c.D, 2 * E, bias=False)
        self.conv1d = CausalConv1d(E, c.conv)
        self.x_proj = nn.Linear(E, self.rank + 2 * c.N, bias=False)
        self.dt_proj = nn.Linear(self.rank, E)
        self.A_log = nn.Parameter(torch.arange(1, c.N + 1).log().repeat(E, 1))
        self.D = nn.Parameter(torch.ones(E))
        self.out_proj = nn.Linear(E, c.D, bias=False)

        for proj in (self.in_proj, self.x_proj, self.out_proj):
            nn.init.xavier_uniform_(proj.weight)
        if c.init == "official":
            nn.init.uniform_(self.dt_proj.weight, -(self.rank**-0.5), self.rank**-0.5)
            _init_dt_bias(self.dt_proj.bias)
            with torch.no_grad():
                self.out_proj.weight /= c.L**0.5
        else:
            nn.init.xavier_uniform_(self.dt_proj.weight)
            nn.init.zeros_(self.dt_proj.bias)

    def forward(self, x, state):
        tail, h = state
        u, z = self.in_proj(x).chunk(2, -1)  # (B, T, E) each
        u, tail = self.conv1d(u, tail)
        u = F.silu(u)
        dt, B, C = self.x_proj(u).split((self.rank, self.c.N, self.c.N), -1)
        dt = F.softplus(wide(self.dt_proj(dt)))  # (B, T, E)
        y, h = selective_scan(u, dt, -wide(self.A_log).exp(), B, C, h)
        return self.out_proj((y + self.D * u) * F.silu(z)), (tail, h)


class MambaBlock(nn.Module):
    """The Mamba mixer, then the SwiGLU branch whose width matches the parameters of H-Mamba (QS 5.7)."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.norm = nn.RMSNorm(c.D, eps=1e-5)
        self.mixer = MambaMixer(c)
        if c.mlp:
            self.mlp_norm = nn.RMSNorm(c.D, eps=1e-5)
            self.mlp_in = nn.Linear(c.D, 2 * c.mlp, bias=False)
            self.mlp_out = nn.Linear(c.mlp, c.D, bias=False)
            nn.init.xavier_uniform_(self.mlp_in.weight)
            nn.init.xavier_uniform_(self.mlp_out.weight)
            if c.init == "official":
                with torch.no_grad():
                    self.mlp_out.weight /= c.L**0.5

    def init_state(self, batch_size):
        """(tail of the convolution (B, conv-1, E), h (B, E, N))"""
        A_log, c = self.mixer.A_log, self.c
        return A_log.new_zeros(batch_size, c.conv - 1, 2 * c.D), wide(A_log).new_zeros(batch_size, *A_log.shape)

    def forward(self, x, state):
        y, state = self.mixer(self.norm(x), state)
        x = x + y
        if self.c.mlp:
            gate, value = self.mlp_in(self.mlp_norm(x)).chunk(2, -1)
            x = x + self.mlp_out(F.silu(gate) * value)
        return x, state


def _init_dt_bias(bias):
    """In place: softplus(bias) is log-uniform in [1e-3, 0.1]."""
    dt = torch.exp(torch.empty_like(bias).uniform_(math.log(1e-3), math.log(0.1)))
    with torch.no_grad():
        bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus


# ----------------------------------------------------------------------------------------------------------------------
# Models


class Readout(nn.Module):
    """From the last hidden vector to scores over the vocabulary, tied to the embedding."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        if c.head == "mos":  # mixture of softmaxes (Yang et al., arXiv 1711.03953), the control of QS 9.2
            self.prior = nn.Linear(c.D, MOS_COMPONENTS, bias=False)
            self.latent = nn.Linear(c.D, MOS_COMPONENTS * c.D, bias=False)

    def forward(self, x, embedding):
        """x (B, T, D), embedding (V, D) -> logits (log-probabilities of mos and born) (B, T, V), at least float32"""
        if self.c.head == "softmax":
            return wide(F.linear(x, embedding))
        if self.c.head == "mos":
            latent = self.latent(x).tanh().unflatten(-1, (MOS_COMPONENTS, -1))  # (B, T, K, D)
            log_prior = wide(self.prior(x)).log_softmax(-1).unsqueeze(-1)
            return torch.logsumexp(log_prior + wide(F.linear(latent, embedding)).log_softmax(-1), -2)
        # Born rule, QS section 2: p_v = |<e_v|psi>|^2 / sum over v, psi and e_v being D/2 complex numbers. At least in
        # float32, as bf16 products would drown the interference of their parts.
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
            e_re, e_im = wide(embedding).unflatten(-1, (-1, 2)).unbind(-1)  # (V, D/2)
            x_re, x_im = wide(x).unflatten(-1, (-1, 2)).unbind(-1)  # (B, T, D/2)
            re = F.linear(x_re, e_re) + F.linear(x_im, e_im)
            im = F.linear(x_im, e_re) - F.linear(x_re, e_im)
            return torch.log(re.square() + im.square() + 1e-12).log_softmax(-1)  # 1e-12: finite where p = 0


class HMamba(nn.Module):
    """Byte-level language model with the complex substrate of QS."""

    Config, Block = HMambaConfig, HMambaBlock
    NO_DECAY = ("omega", "psi0")  # exempt from weight decay whatever their rank, unlike QS 7: the dynamics
    SIZES: ClassVar = {
        "tiny": HMambaConfig(D=128, L=4, H=4),
        "small": HMambaConfig(D=512, L=10, H=8),
        "253m": HMambaConfig(D=1024, L=24, H=16),
    }

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.checkpointing = False  # activation checkpointing per layer, while training
        self.embedding = nn.Embedding(config.V, config.D)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        self.layers = nn.ModuleList(self.Block(config) for _ in range(config.L))
        self.norm_f = nn.RMSNorm(config.D, eps=1e-5)
        self.readout = Readout(config)
        with torch.no_grad():
            self.start = self.init_state(0)  # for its structure and shapes

    def init_state(self, batch_size):
        """The state before the first token: one tuple a layer. Its size does not depend on the sequence.
        Gradients reach psi0 through it, in one backward pass: a second one needs a new state, or a detached one."""
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
        x, new_state = self.embedding(idx), []
        for layer, layer_state in zip(self.layers, state):
            if self.checkpointing and self.training:
                x, layer_state = checkpoint(layer, x, layer_state, use_reentrant=False)
            else:
                x, layer_state = layer(x, layer_state)
            if keep_state:
                new_state.append(layer_state)
        logits = self.readout(self.norm_f(x), self.embedding.weight)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten().long())
        return logits, loss, new_state if keep_state else None

    def step(self, idx_t, state):
        """One token: idx_t (B,) -> logits (B, V) and the next state, in time and memory that do not grow."""
        logits, _, state = self(idx_t.unsqueeze(1), state=state)
        return logits[:, 0], state

    def num_params(self):
        """Parameters by component; "total" is their sum."""
        counts = Counter()
        for name, p in self.named_parameters():
            parts = (x for x in name.split(".") if not x.isdigit() and x not in ("layers", "weight", "bias"))
            counts[".".join(parts)] += p.numel() * (1 + p.is_complex())
        return {**counts, "total": counts.total()}

    def mixing_flops(self):
        """Forward flops of the recurrence per token: 8 for a complex multiply-add, 6 for conj(C) psi; if real 2, 1."""
        c = self.config
        return c.L * c.H * c.N * (14 if c.field == "complex" else 6)

    def flops_per_token(self, seq):
        """Forward and backward flops a token, the same at every sequence length `seq`: 6 per weight of the projections,
        convolutions and tied head, and the recurrence. Element-wise work and recomputation are not counted."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, (nn.Linear, nn.Conv1d)))
        head = {"softmax": 1, "mos": MOS_COMPONENTS, "born": 2}[self.config.head] * self.embedding.weight.numel()
        return 6 * (weights + head) + 3 * self.mixing_flops()


class Mamba(HMamba):
    """Mamba-1 with a SwiGLU branch that matches the parameters of H-Mamba."""

    Config, Block = MambaConfig, MambaBlock
    SIZES: ClassVar = {size: MambaConfig(D=c.D, L=c.L, H=c.H) for size, c in HMamba.SIZES.items()}

    def __init__(self, config):
        super().__init__(replace(config, mlp=matched_width(config)) if config.mlp < 0 else config)
        self.NO_DECAY = ("A_log", "D") if config.init == "official" else ()

    def mixing_flops(self):
        """Forward flops of the recurrence per token: exp(dt A), the update and C . h, 7 per state element."""
        c = self.config
        return c.L * 2 * c.D * c.N * 7


def matched_width(config):
    """Hidden width of the SwiGLU branch that brings Mamba nearest to the H-Mamba of the same D, L, N and H heads."""
    with torch.device("meta"):  # counts only: nothing is allocated
        complex_block = HMambaBlock(HMambaConfig(D=config.D, L=config.L, H=config.H, N=config.N, conv=config.conv))
        real_block = MambaBlock(replace(config, mlp=0))
    surplus = sum(p.numel() for p in complex_block.parameters()) - sum(p.numel() for p in real_block.parameters())
    return max(0, round((surplus - config.D) / (3 * config.D)))  # one more norm, three matrices


MODELS = {"hmamba": HMamba, "mamba": Mamba}

if __name__ == "__main__":
    epilog = "No flags: the file alone compares steps with a full pass. To train: python train.py --model hmamba"
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
