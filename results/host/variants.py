"""The host, part by part: what makes H-Transformer need fewer steps than the Transformer, if not its score?

A fork beside its results. `HTransformerMinus` is H-Transformer with one part of its block taken away or replaced,
`TransformerPlus` the Transformer with parts of that block added, `HMambaMinus` H-Mamba without parts of its phase. All
keep the parameters of their parents within 0.5 %: what a part adds or saves is a matter of width.

    python train.py --model results/host/variants.py:TransformerPlus:parts=conv+gate --data english.txt
"""

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import hmamba
import htransformer
from htransformer import CausalConv1d, HTransformer, HTransformerBlock, Transformer, TransformerBlock, wide
from kernels import born_attention


def count(module):
    return sum(p.numel() for p in module.parameters())


def start_as_identity(conv):
    """In place: a convolution of width 1 passes its input on; it may learn a scale and a shift of each channel."""
    nn.init.ones_(conv.weight)
    nn.init.zeros_(conv.bias)


# ----------------------------------------------------------------------------------------------------------------------
# Taken from H-Transformer


@dataclass
class MinusConfig(htransformer.HTransformerConfig):
    gate: str = "multiply"  # multiply: y silu(z), QS 5.7 | none: y, wider by what z had | add: y + silu(z)
    readout: str = "bilinear"  # bilinear: conj(e q) o, QS 5.7 | plain: o

    def __post_init__(self):
        super().__post_init__()
        htransformer._check(self, gate=("multiply", "none", "add"), readout=("bilinear", "plain"))
        if (self.gate, self.readout) != ("multiply", "bilinear") and (self.field, self.score) != ("complex", "born"):
            raise ValueError("gate and readout are varied for field=complex:score=born only")


class MinusBlock(HTransformerBlock):
    """HTransformerBlock with conv=1 as the identity, another gate or another readout."""

    def __init__(self, c):
        super().__init__(c)
        if c.conv == 1:
            start_as_identity(self.conv1d)
        if c.gate == "none":  # without z a channel costs the weights of one here: those of z are spent on more channels
            a_channel = c.D + (c.conv + 1) + self.param_proj.out_features + (2 * c.H * c.N + 1) + c.D
            half = round(c.D * (1 + c.D / a_channel))  # of the channels, as D is in the block
            wider = HTransformerBlock(dataclasses.replace(c, D=half))
            self.conv1d, self.param_proj, self.back_proj = wider.conv1d, wider.param_proj, wider.back_proj
            self.in_proj, self.out_proj = nn.Linear(c.D, 2 * half, bias=False), nn.Linear(2 * half, c.D)
            for proj in (self.in_proj, self.out_proj):
                nn.init.xavier_uniform_(proj.weight)
            nn.init.zeros_(self.out_proj.bias)
            with torch.no_grad():
                self.out_proj.weight /= c.L**0.5
        if c.readout == "plain":
            del self.e

    def init_state(self, batch_size):
        tail, position, past = super().init_state(batch_size)
        return tail.new_zeros(batch_size, self.c.conv - 1, self.conv1d.in_channels), position, past

    def forward(self, x, state):
        c, (tail, position, past), T = self.c, state, x.shape[1]
        if (c.gate, c.readout) == ("multiply", "bilinear"):
            return super().forward(x, state)
        u = self.in_proj(self.norm(x))
        u, z = (u, None) if c.gate == "none" else u.chunk(2, -1)
        u, tail = self.conv1d(u, tail)
        params = wide(self.param_proj(F.silu(u)))[..., : 6 * c.H * c.N]
        q, k, v = params.unflatten(-1, (3, c.H, c.N, 2)).permute(2, 0, 3, 1, 4, 5).unbind(0)  # (B, H, T, N, 2)
        angle = htransformer.angles(position, T, wide(self.omega))
        o, past = born_attention(htransformer.rotate(q, angle), htransformer.rotate(k, angle), v, past)  # eq. 5
        if c.readout == "bilinear":
            e = wide(self.e).unsqueeze(1)
            e, q, o = (torch.view_as_complex(y.contiguous()) for y in (e / e.norm(dim=-1, keepdim=True), q, o))
            o = torch.view_as_real((e * q).conj() * o)
        y = self.back_proj(o.transpose(1, 2).flatten(2).to(x.dtype))
        if c.gate != "none":
            y = y * F.silu(z) if c.gate == "multiply" else y + F.silu(z)
        return x + self.out_proj(y), (tail, position + T, past)


class HTransformerMinus(HTransformer):
    Config, Block = MinusConfig, MinusBlock
    SIZES = {name: MinusConfig(**vars(c)) for name, c in HTransformer.SIZES.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Added to the Transformer

PARTS = {
    "conv": "causal convolution (width 4) and SiLU before the projections to q, k, v, as in the host",
    "qkvconv": "the convolution on q, k and v instead",
    "gate": "the output of attention times silu(W x), as in the host",
    "swiglu": "a gated feed-forward layer",
    "frequencies": "learned frequencies, 0.01 to 1 with alternating sign, as H-Transformer's omega",
}


@dataclass
class PlusConfig(htransformer.TransformerConfig):
    parts: str = ""  # of PARTS, joined by +

    def __post_init__(self):
        super().__post_init__()
        for part in filter(None, self.parts.split("+")):
            if part not in PARTS:
                raise ValueError(f"parts={part} is unknown; known: {', '.join(PARTS)}")


class PlusBlock(TransformerBlock):
    """TransformerBlock with the parts of the configuration."""

    def __init__(self, c):
        super().__init__(c)
        self.parts = c.parts.split("+")
        if "conv" in self.parts:
            self.conv1d = CausalConv1d(c.D, 4)
        if "qkvconv" in self.parts:
            self.conv1d_qkv = CausalConv1d(3 * c.D, 4)
        if "gate" in self.parts:
            self.gate_proj = nn.Linear(c.D, c.D, bias=False)
            nn.init.xavier_uniform_(self.gate_proj.weight)
        if "swiglu" in self.parts:
            self.mlp_gate = nn.Linear(c.D, c.mlp, bias=False)
            nn.init.xavier_uniform_(self.mlp_gate.weight)
        if "frequencies" in self.parts:
            sign = 1 - 2 * (torch.arange(c.head // 2) % 2)
            self.omega = nn.Parameter((sign * torch.logspace(-2, 0, c.head // 2)).repeat(c.D // c.head, 1))

    def init_state(self, batch_size):
        """(position, keys and values of the past or None, tails of the two convolutions, (B, 3, channels) each)"""
        tail = self.qkv_proj.weight.new_zeros(batch_size, 3, 3 * self.c.D)
        return 0, None, tail[..., : self.c.D], tail

    def forward(self, x, state):
        c, T, (position, past, tail, tail_qkv) = self.c, x.shape[1], state
        u = normed = self.norm(x)
        if "conv" in self.parts:
            u, tail = self.conv1d(u, tail)
            u = F.silu(u)
        qkv = self.qkv_proj(u)
        if "qkvconv" in self.parts:
            qkv, tail_qkv = self.conv1d_qkv(qkv, tail_qkv)
        q, k, v = qkv.unflatten(-1, (3, -1, c.head)).permute(2, 0, 3, 1, 4)  # (B, heads, T, head) each
        omega = 10000 ** (-torch.arange(0, c.head, 2).to(wide(q)) / c.head)
        angle = htransformer.angles(position, T, wide(self.omega) if "frequencies" in self.parts else omega)
        cos, sin = angle.cos(), angle.sin()  # (heads, T, head / 2) or (T, head / 2)
        q, k = (torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(v.dtype)
                for a, b in (wide(y).chunk(2, -1) for y in (q, k)))  # fmt: skip
        y, past = htransformer.softmax_attention(q, k, v, past)
        y = y.transpose(1, 2).flatten(2)
        if "gate" in self.parts:
            y = y * F.silu(self.gate_proj(normed))
        x = x + self.out_proj(y)
        normed = self.mlp_norm(x)
        hidden = self.mlp_in(normed)
        hidden = F.silu(self.mlp_gate(normed)) * hidden if "swiglu" in self.parts else F.silu(hidden)
        return x + self.mlp_out(hidden), (position + T, past, tail, tail_qkv)


class TransformerPlus(Transformer):
    Config, Block, NO_DECAY = PlusConfig, PlusBlock, ("omega",)
    SIZES = {name: PlusConfig(**vars(c)) for name, c in Transformer.SIZES.items()}

    def __init__(self, config):
        if config.mlp < 0:  # the feed-forward layer takes what is left by the parts
            with torch.device("meta"):
                given = count(TransformerBlock(dataclasses.replace(config, mlp=htransformer.matched_width(config))))
                one, two = (count(PlusBlock(dataclasses.replace(config, mlp=mlp))) for mlp in (1, 2))
            config = dataclasses.replace(config, mlp=1 + round((given - one) / (two - one)))
        super().__init__(config)


# ----------------------------------------------------------------------------------------------------------------------
# Taken from H-Mamba


@dataclass
class HMambaMinusConfig(hmamba.HMambaConfig):
    omega: str = "learned"  # learned | zero: frozen at 0, so that the phase comes from the input alone
    psi0: str = "learned"  # learned | zero: no prior

    def __post_init__(self):
        super().__post_init__()
        hmamba._check(self, omega=("learned", "zero"), psi0=("learned", "zero"))


class HMambaMinusBlock(hmamba.HMambaBlock):
    """HMambaBlock with conv=1 as the identity, without its own frequencies or without the prior state."""

    def __init__(self, c):
        super().__init__(c)
        if c.conv == 1:
            start_as_identity(self.conv1d)
        for name in ("omega", "psi0"):
            if getattr(c, name) == "zero":
                zero = torch.zeros_like(getattr(self, name))
                delattr(self, name)
                self.register_buffer(name, zero, persistent=False)

    def init_state(self, batch_size):
        tail, psi = super().init_state(batch_size)
        return tail, torch.zeros_like(psi) if self.c.psi0 == "zero" else psi


class HMambaMinus(hmamba.HMamba):
    Config, Block = HMambaMinusConfig, HMambaMinusBlock
    SIZES = {name: HMambaMinusConfig(**vars(c)) for name, c in hmamba.HMamba.SIZES.items()}
