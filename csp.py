"""CSP (complex state propagator) and the four baselines of its paper: small models that track a discrete state.

Paper: "State Propagation Also Satisfies: A Complex-Valued State-Space Model for Deterministic State Tracking" (CSP).

A CSP block turns its input by a phase that accumulates over the sequence, feeds it to a leaky recurrence, adds a skip
and projects every complex coordinate onto the unit circle. Two models share it. Section 2.4.2 calls them equal; they
differ in what the recurrence carries on, in what Delta is computed from, and in A_shift (see `scan`).

    csp-vanilla   the block's own normalised output (Algorithm 1)             a non-linear recurrence
    csp-fast      the state before the non-linearity (Algorithm 2)            a linear one, which a scan can evaluate
    rnn           tanh RNN, one layer                   complex-rnn    per-channel rotation, gated non-linear update
    signed-mamba  Mamba with transitions in [-1, 1]     decoder        decoder-only Transformer, sinusoidal positions

Glossary   S seeds   B batch   T time   d complex width   H heads   E d_inner   N state width
    z      (S, B, T, 2, d)  z_t, input of a block; axis 2 holds the planes re, im, as in Algorithm 2
    theta  (S, B, T, 1, 1)  rotation angle in radians, eq. 10, accumulated: Algorithm 1, line 6
    b      (S, B, T, 2d)    b_t, eq. 12                  gamma  (S, B, T, 1)   input gate, eq. 16
    alpha  (S, B, T, 1)     decay exp(-Delta), eq. 14    h      (S, B, T, 2d)  state before the non-linearity, eq. 17
    g      (S, 1, 1, 1, 1)  skip gate

Every tensor begins with an axis of seeds: `stack_seeds` trains several initialisations at once, each as if alone, but
for rounding.

Parameters for two classes, ours and the paper's: csp 4,779 (4,779), rnn 2,770 (2,770), complex-rnn 10,578 (10,323),
signed-mamba 17,106 (18,742), decoder 39,890 (41,235). The paper does not give the last three layouts.
"""

import math
from argparse import ArgumentParser
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import nn

from kernels import complex_scan

WIDTH = 32  # real units of every model's residual stream, and of the head
EMBED = 16  # CSP section 3.1, embed_dim; complex ones in CSP itself
DROPOUT = 0.1  # CSP appendix E.3, at the head
EPS = 1e-9  # CSP appendix E.2, of the modulus


def choice(*known):
    """A setting that is one of `known`: the first, if it is left out."""
    return field(default=known[0], metadata={"known": known})


@dataclass
class Config:
    """The settings that all six models have. Every whole number is at least 1."""

    classes: int = 2
    V: int = 3  # symbols: two, and the third that the paper's parameter counts imply

    def __post_init__(self):
        for f in fields(self):
            value, known = getattr(self, f.name), f.metadata.get("known")
            if known and value not in known:
                raise ValueError(f"unknown {f.name} {value!r}; known: {', '.join(map(str, known))}")
            if type(value) is int and value < 1:
                raise ValueError(f"{f.name} must be at least 1")


def at_least_float32(x):
    """Gates, angles, states and maps are computed so, whatever the weights' dtype; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Linear(nn.Module):
    """One linear map per seed, x (S, ..., n_in) -> (S, ..., n_out), initialised as torch.nn.Linear is. Appendix E.1 has
    "standard PyTorch defaults" with biases of zero; PyTorch's are uniform, and so are ours."""

    def __init__(self, n_in, n_out, bias=True):
        super().__init__()
        bound = n_in**-0.5
        self.weight = nn.Parameter(torch.empty(1, n_in, n_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(1, 1, n_out).uniform_(-bound, bound)) if bias else None

    def forward(self, x):
        flat, weight = x.flatten(1, -2), at_least_float32(self.weight)
        y = flat @ weight if self.bias is None else torch.baddbmm(at_least_float32(self.bias), flat, weight)
        return y.view(*x.shape[:-1], -1)


class Embedding(nn.Module):
    """idx (S, B, T), symbols below V -> (S, B, T, width). Raises ValueError if B or T is 0, for all six models, and
    IndexError for other symbols, on a CPU; on CUDA they end the program."""

    def __init__(self, V, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, V, width))

    def forward(self, idx):
        if not idx.numel():
            raise ValueError(f"idx has shape {tuple(idx.shape)}; expected (S, B, T) with at least one of each")
        S, V, _ = self.weight.shape
        rows = idx + V * torch.arange(S, device=idx.device).view(S, 1, 1)
        rows = rows.masked_fill((idx < 0) | (idx >= V), -1)  # not a row of another seed
        return at_least_float32(F.embedding(rows, self.weight.flatten(0, 1)))


class Head(nn.Module):
    """Two layers, with dropout at the input while `generators`, one for each seed, are given."""

    def __init__(self, width, classes):
        super().__init__()
        self.hidden, self.out = Linear(width, WIDTH), Linear(WIDTH, classes)

    def forward(self, x, generators):
        if generators is not None:
            drawn = torch.stack([torch.rand(x.shape[1:], generator=g, dtype=torch.float32) for g in generators])
            x = x * (drawn >= DROPOUT).to(x) / (1 - DROPOUT)
        return self.out(self.hidden(x).relu())


class Model(nn.Module):
    """idx (S, B, T) -> scores (S, B, T, classes). `states` maps the embedding (S, B, T, width) to the head's input.
    Autocast has no effect: with maps in bfloat16 the gradients of CSP would be off by half and more."""

    def forward(self, idx, generators=None):
        with torch.autocast("cpu" if idx.is_meta else idx.device.type, enabled=False):
            return self.head(self.states(self.embedding(idx)), generators)


def stack_seeds(model_class, config, seeds):
    """One model that holds an initialisation for each of `seeds`. Inputs and outputs begin with that axis."""
    models = []
    for seed in seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            models.append(model_class(config))
    for parameters in zip(*(m.parameters() for m in models)):
        parameters[0].data = torch.cat([p.data for p in parameters])
    return models[0]


# ----------------------------------------------------------------------------------------------------------------------
# CSP


@dataclass
class CSPConfig(Config):
    layers: int = 3
    d: int = 16  # complex width: 32 real units, which fit the paper's 4,779 parameters (its text says 64)
    carry: str = choice("normalised", "linear")  # Algorithm 1 | Algorithm 2
    scan: str = choice("sequential", "segment", "associative", "printed")  # of the linear carry, see `scan`
    eps: float = EPS  # of scan=printed, Algorithm 2, line 16: it gives no value
    skip: str = choice("input", "prev")  # g z_t (eq. 9, Algorithm 2) | g h_{t-1} (Algorithm 1, line 17)
    theta: str = choice("cumulative", "step", "frozen", "channel")  # both algorithms | eq. 10 | 0 | section 4.2
    gate: str = choice("sine", "sigmoid")  # eq. 16 | which section 2.2 says fails
    gate_init: str = choice("default", "peak", "slope")  # see CSPBlock

    def __post_init__(self):
        super().__post_init__()
        if self.carry == "normalised" and self.scan != "sequential":
            raise ValueError(f"scan={self.scan} needs carry=linear: the normalised carry is not a linear recurrence")
        if not self.eps > 0 or (self.eps != CSPConfig.eps and self.scan != "printed"):
            raise ValueError(f"eps={self.eps} must be above 0, and needs scan=printed")
        if self.carry == "linear" and self.skip == "prev":
            raise ValueError("skip=prev needs carry=normalised: Algorithm 2 has no earlier output to skip from")


def rotate(z, theta):
    """e^{i theta} z on planes z (..., 2, d); theta broadcasts against (..., 1, d).                      (eq. 11)"""
    cos, sin = theta.cos(), theta.sin()
    re, im = z.split(1, dim=-2)
    return torch.cat((cos * re - sin * im, sin * re + cos * im), -2)


def normalise(u):
    """Every complex coordinate of u (..., 2, d) onto the unit circle; its modulus gets no gradient (appendix E.2)."""
    return u / (torch.hypot(*u.detach().split(1, dim=-2)) + EPS)


def scan(delta, c, method, eps=EPS):
    """h_t = alpha_t (h_{t-1} + c_t), h_0 = 0, alpha = exp(-delta): what lines 14-16 of Algorithm 2 say. Equation 17 has
    h_t = alpha_t h_{t-1} + c_t; A_shift makes the difference, and the division by A_shift the trouble:

    sequential, segment, associative: exact; a loop, a masked (T, T) matrix of decays, kernels.complex_scan.
    printed: A_t * cumsum(c / (A_shift + eps)). Wrong, and silently so, once A_t is no longer far above eps: when the
        summed delta passes about 16. Without eps it overflows at 87.

    Args: delta (S, B, T, 1); c (S, B, T, C). Returns: h (S, B, T, C).
    """
    if method == "sequential":
        alpha, h, states = torch.exp(-delta), torch.zeros_like(c[:, :, 0]), []
        for alpha_t, c_t in zip(alpha.unbind(2), c.unbind(2)):
            h = alpha_t * (h + c_t)
            states.append(h)
        return torch.stack(states, 2)
    if method == "associative":
        h, _ = complex_scan(-delta.flatten(0, 1), None, (torch.exp(-delta) * c).flatten(0, 1))
        return h.view_as(c)
    if method == "printed":
        A = (-delta.cumsum(2)).exp()  # line 14
        A_shift = (delta - delta.cumsum(2)).exp()  # line 15
        return A * (c / (A_shift + eps)).cumsum(2)  # line 16
    T = c.shape[2]
    future = torch.ones(T, T, dtype=torch.bool, device=c.device).triu(1)
    # log A_t - log A_shift_i summed from i to t: as a difference of two long sums it would lose digits.
    log_decay = -delta.expand(*c.shape[:3], T).tril().cumsum(2)
    return log_decay.masked_fill(future, -math.inf).exp() @ c  # eq. 22 with A_shift; the future would overflow in exp


class CSPBlock(nn.Module):
    """1,187 parameters at d=16, which fit the paper's count: B on the joined planes (appendix D.1; section 2.1 has one
    for each), W_theta without bias, W_delta, W_gamma, one skip gate (eq. 2 has one per dimension).

    W_theta starts at PyTorch's default and not at zero (appendix E.1), where atan2 has gradient zero. Section 4.2 calls
    the gate's gradient strongest near a peak of the sine, but it is cos(eta) / 2, zero there: gate_init=peak starts
    there all the same, `slope` where it is strongest."""

    def __init__(self, config):
        super().__init__()
        width = 2 * config.d
        self.config = config
        self.B = Linear(width, width)
        if config.theta != "frozen":
            self.W_theta = Linear(width, width if config.theta == "channel" else 2, bias=False)
        self.W_delta, self.W_gamma = Linear(width, 1), Linear(width, 1)
        self.g = nn.Parameter(torch.zeros(1, 1, 1, 1, 1))
        if config.gate_init != "default":
            nn.init.normal_(self.W_gamma.weight, std=0.02)
            nn.init.constant_(self.W_gamma.bias, math.pi / 2 if config.gate_init == "peak" else 0.0)

    def angle(self, z):
        """The rotation that each input asks for, in radians: (S, B, T, 1, 1), or (S, B, T, 1, d) with theta=channel."""
        if self.config.theta == "frozen":
            return z.new_zeros(*z.shape[:3], 1, 1)
        x, y = self.W_theta(z.flatten(3)).tanh().unflatten(-1, (2, -1)).split(1, dim=-2)
        x = torch.where(x.square() + y.square() < 1e-30, 1.0, x)  # at (0, 0) the angle is 0, its gradients finite
        return torch.atan2(y, x)  # eq. 10

    def forward(self, z):
        cfg = self.config
        theta = self.angle(z)
        if cfg.theta != "step":
            theta = theta.cumsum(2)  # Algorithm 1, line 6, and Algorithm 2, line 4; eq. 10 has the angle of one step
        b = self.B(rotate(z, theta).flatten(3))  # eqs. 11-12
        eta = self.W_gamma(b)  # eq. 15 and both algorithms; eq. 7 has z_t in the place of b_t
        gamma = (1 + eta.sin()) / 2 if cfg.gate == "sine" else eta.sigmoid()  # eq. 16
        c = gamma * b  # Algorithm 2, line 10; eqs. 24-27 then multiply c by gamma once more
        g = at_least_float32(self.g).sigmoid()  # Algorithm 2, line 18; Algorithm 1, line 17 has a raw g
        if cfg.carry == "linear":
            delta = F.softplus(self.W_delta(c))  # Algorithm 2, line 12: from c, where eq. 13 has b
            h = scan(delta, c, cfg.scan, cfg.eps).view_as(z)
            return normalise(g * z + F.silu(h))  # lines 19-20
        alpha = torch.exp(-F.softplus(self.W_delta(b)))  # eqs. 13-14
        alpha, c = (x.movedim(2, 0).contiguous() for x in (alpha.unsqueeze(-1), c.view_as(z)))
        skip = (g * z).movedim(2, 0).contiguous() if cfg.skip == "input" else len(c) * [None]
        g, o, outputs = g.squeeze(1), torch.zeros_like(c[0]), []
        for alpha_t, c_t, skip_t in zip(alpha, c, skip):
            y = F.silu(torch.addcmul(c_t, alpha_t, o))  # Algorithm 1, line 15; SiLU: line 17
            o = normalise(torch.addcmul(y, g, o) if skip_t is None else y + skip_t)  # line 17
            outputs.append(o)
        return torch.stack(outputs, 2)


class CSPVanilla(Model):
    Config, Block = CSPConfig, CSPBlock

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.V, 2 * config.d)
        self.blocks = nn.Sequential(*[self.Block(config) for _ in range(config.layers)])
        self.head = Head(2 * config.d, config.classes)

    def states(self, x):
        return self.blocks(x.unflatten(-1, (2, -1))).flatten(3)  # between blocks (S, B, T, 2, d)


@dataclass
class CSPFastConfig(CSPConfig):
    carry: str = choice("linear", "normalised")
    scan: str = choice("associative", "sequential", "segment", "printed")


class CSPFast(CSPVanilla):
    Config = CSPFastConfig


# ----------------------------------------------------------------------------------------------------------------------
# Baselines (section 3.1)


@dataclass
class RNNConfig(Config):
    hidden: int = 32  # real units, or complex ones


class RNN(Model):
    """h_t = tanh(W x_t + U h_{t-1}). One layer: 2,770 parameters leave no room for the three of section 3.1."""

    Config = RNNConfig

    def __init__(self, config):
        super().__init__()
        self.embedding = Embedding(config.V, EMBED)
        self.W, self.U = Linear(EMBED, config.hidden), Linear(config.hidden, config.hidden)
        self.head = Head(config.hidden, config.classes)

    def states(self, x):
        x = self.W(x) + self.U.bias.unsqueeze(1)
        U, h, states = at_least_float32(self.U.weight), torch.zeros_like(x[:, :, 0]), []
        for x_t in x.unbind(2):
            h = torch.baddbmm(x_t, h, U).tanh()
            states.append(h)
        return torch.stack(states, 2)


class ComplexRNN(Model):
    """h_t = (1 - u_t) e^{i phi_t} h_{t-1} + u_t tanh(W x_t + U h_{t-1}) with phi_t = W_phi x_t and
    u_t = sigmoid(W_u x_t + U_u h_{t-1}). Section 3.1 has "per-channel rotation and gated nonlinear state
    update", and three layers; the one layer is ours."""

    Config = RNNConfig

    def __init__(self, config):
        super().__init__()
        d = config.hidden
        self.embedding = Embedding(config.V, EMBED)
        self.W, self.W_phi = Linear(EMBED, 2 * d), Linear(EMBED, d)
        self.U = Linear(2 * d, 2 * d)
        self.W_u, self.U_u = Linear(EMBED, d), Linear(2 * d, d, bias=False)
        self.head = Head(2 * d, config.classes)

    def states(self, x):
        d = self.W_phi.weight.shape[-1]
        phi = self.W_phi(x)  # (S, B, T, d)
        cos, sin = phi.cos(), phi.sin()
        inputs = torch.cat((self.W(x) + self.U.bias.unsqueeze(1), self.W_u(x)), -1)  # (S, B, T, 3d)
        U = at_least_float32(torch.cat((self.U.weight, self.U_u.weight), -1))
        h, states = x.new_zeros(*x.shape[:2], 2 * d), []
        for input_t, cos_t, sin_t in zip(inputs.unbind(2), cos.unbind(2), sin.unbind(2)):
            candidate, u = torch.baddbmm(input_t, h, U).split((2 * d, d), -1)
            re, im = h.split(d, -1)
            turned = torch.cat((cos_t * re - sin_t * im, sin_t * re + cos_t * im), -1)
            h = torch.lerp(turned, candidate.tanh(), u.sigmoid().repeat(1, 1, 2))
            states.append(h)
        return torch.stack(states, 2)


@dataclass
class SignedMambaConfig(Config):
    layers: int = 3
    E: int = 32
    N: int = 16
    dt_rank: int = 4
    transition: str = choice("fixed", "input")  # tanh(dt A), a sign for each state | tanh(W_a x), the input's choice


def signed_scan(r, A, x, B, C):
    """h_t = tanh(r_t A) h_{t-1} + x_t B_t, y_t = C_t . h_t, with h_0 = 0.

    Args: r, x (S, B, T, E); A (S, E, N) or (S, E, 1); B, C (S, B, T, N). Returns: y (S, B, T, E).
    """
    h, outputs = x.new_zeros(*x.shape[:2], x.shape[3], B.shape[3]), []
    for r_t, x_t, B_t, C_t in zip(*(z.unbind(2) for z in (r, x, B, C))):
        a_t = 2 * (2 * r_t.unsqueeze(-1) * A.unsqueeze(1)).sigmoid() - 1  # tanh, six times as fast on a CPU
        h = torch.addcmul(x_t.unsqueeze(-1) * B_t.unsqueeze(-2), a_t, h)
        outputs.append((h @ C_t.unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, 2)


class SignedMambaBlock(nn.Module):
    """Mamba-1 (arXiv 2312.00752, section 3.4) with tanh in the place of exp: the transition may be negative."""

    def __init__(self, config):
        super().__init__()
        E, N, R = config.E, config.N, config.dt_rank
        self.config = config
        self.norm = nn.Parameter(torch.ones(1, 1, 1, WIDTH))
        self.in_proj = Linear(WIDTH, 2 * E, bias=False)
        self.conv = nn.Parameter(torch.empty(1, 4, E).uniform_(-0.5, 0.5))
        self.conv_bias = nn.Parameter(torch.empty(1, E).uniform_(-0.5, 0.5))
        self.x_proj = Linear(E, R + 2 * N, bias=False)
        self.dt_proj = Linear(R, E)
        if config.transition == "fixed":
            self.A = nn.Parameter(torch.tensor([(-1.0) ** n * (n + 1) for n in range(N)]).repeat(1, E, 1))
        else:
            self.W_a = Linear(E, E)
        self.D = nn.Parameter(torch.ones(1, 1, 1, E))
        self.out_proj = Linear(E, WIDTH, bias=False)

    def forward(self, x):
        cfg = self.config
        u, gate = self.in_proj(F.rms_norm(x, (WIDTH,)) * self.norm).split(cfg.E, -1)
        padded = F.pad(u, (0, 0, 3, 0))
        u = self.conv_bias.view(-1, 1, 1, cfg.E)
        for k, weight in enumerate(self.conv.unbind(1)):  # causal, depthwise, width 4
            u = torch.addcmul(u, padded[:, :, k : k + x.shape[2]], weight.view(-1, 1, 1, cfg.E))
        u = F.silu(u)
        r, B, C = self.x_proj(u).split((cfg.dt_rank, cfg.N, cfg.N), -1)
        dt = F.softplus(self.dt_proj(r))
        rate, A = (dt, self.A) if cfg.transition == "fixed" else (self.W_a(u), u.new_ones(len(u), cfg.E, 1))
        y = signed_scan(rate, A, dt * u, B, C)
        return x + self.out_proj((y + self.D * u) * F.silu(gate))


class SignedMamba(Model):
    Config = SignedMambaConfig

    def __init__(self, config):
        super().__init__()
        self.embedding, self.widen = Embedding(config.V, EMBED), Linear(EMBED, WIDTH)
        self.blocks = nn.Sequential(*[SignedMambaBlock(config) for _ in range(config.layers)])
        self.norm = nn.Parameter(torch.ones(1, 1, 1, WIDTH))
        self.head = Head(WIDTH, config.classes)

    def states(self, x):
        return F.rms_norm(self.blocks(self.widen(x)), (WIDTH,)) * self.norm


@dataclass
class DecoderConfig(Config):
    layers: int = 3
    heads: int = choice(4, 1, 2, 8, 16, 32)  # divisors of WIDTH


class LayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(1, 1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 1, 1, WIDTH))

    def forward(self, x):
        return torch.addcmul(self.bias, F.layer_norm(x, (WIDTH,)), self.weight)


class DecoderBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.norm1, self.norm2 = LayerNorm(), LayerNorm()
        self.qkv, self.proj = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.up, self.down = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).flatten(0, 1).unflatten(-1, (3, self.heads, -1))  # (S B, T, 3, H, N)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(y)
        return x + self.down(self.up(self.norm2(x)).relu())


class Decoder(Model):
    """Pre-norm, with sinusoidal positions (arXiv 1706.03762, section 3.5): they exist for any length."""

    Config = DecoderConfig

    def __init__(self, config):
        super().__init__()
        self.embedding, self.widen = Embedding(config.V, EMBED), Linear(EMBED, WIDTH)
        self.blocks = nn.Sequential(*[DecoderBlock(config) for _ in range(config.layers)])
        self.norm = LayerNorm()
        self.head = Head(WIDTH, config.classes)

    def states(self, x):
        x = self.widen(x)
        frequency = 10000 ** (-torch.arange(0, WIDTH, 2, device=x.device, dtype=x.dtype) / WIDTH)
        angle = torch.arange(x.shape[2], device=x.device).unsqueeze(1) * frequency
        return self.norm(self.blocks(x + torch.cat((angle.sin(), angle.cos()), -1)))


MODELS = {"csp-vanilla": CSPVanilla, "csp-fast": CSPFast, "rnn": RNN, "complex-rnn": ComplexRNN,
          "signed-mamba": SignedMamba, "decoder": Decoder}  # fmt: skip

if __name__ == "__main__":
    epilog = "No flags: the file alone gives each model's untrained loss. To train: python tasks.py --model csp-fast"
    ArgumentParser(description=__doc__.split("\n\n")[0], epilog=epilog).parse_args()
    idx = torch.randint(2, (1, 64, 16))
    for name, model_class in MODELS.items():
        model = stack_seeds(model_class, model_class.Config(), [0])
        loss = F.cross_entropy(model(idx).flatten(0, 2), (idx.cumsum(-1) % 2).flatten())
        count = sum(p.numel() for p in model.parameters())
        print(f"{name}: {count:,} parameters, untrained loss on parity {loss:.3f} (ln 2 = {math.log(2):.3f})")
