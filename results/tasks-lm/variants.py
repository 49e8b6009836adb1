"""Which part of H-Mamba stops it from counting? A fork beside its results: H-Mamba whose step size has no upper bound.

QS 5.7 clamps dt at 0.1, so that at the start a state turns by 2 atan(0.1 / 2 * 10) = 53 degrees a token at most; to
count modulo 3 it has to turn by 120.

    python tasks.py --model results/tasks-lm/variants.py:HMambaUnclamped --task mod3 --lr 0.0005 --seeds 42
"""

import torch
import torch.nn.functional as F

from hmamba import HMamba, HMambaBlock, wide
from kernels import cayley_scan


class UnclampedBlock(HMambaBlock):
    """HMambaBlock of field=complex with dt = softplus, without QS 5.7's min(., 0.1)."""

    def forward(self, x, state):
        c, (tail, psi) = self.c, state
        u, z = self.in_proj(self.norm(x)).chunk(2, -1)
        u, tail = self.conv1d(u, tail)
        p = dict(zip(self.widths, self.param_proj(F.silu(u)).split(list(self.widths.values()), -1)))
        heads = {key: logits.unflatten(-1, (c.H, -1)) for key, logits in p.items()}
        b, C = heads["b"].unflatten(-1, (-1, 2)), wide(heads["C"]).unflatten(-1, (-1, 2))
        dt = F.softplus(wide(p["dt"]))  # here HMambaBlock clamps
        psi, last = cayley_scan(heads["delta"], dt, heads.get("gate"), self.omega, b, psi, method=c.scan)
        (C_re, C_im), (psi_re, psi_im) = C.unbind(-1), psi.unbind(-1)
        y = torch.stack((C_re * psi_re + C_im * psi_im, C_re * psi_im - C_im * psi_re), 2).flatten(2)
        y = self.back_proj(y.to(z.dtype))
        return x + self.out_proj(y * F.silu(z)), (tail, last)


class HMambaUnclamped(HMamba):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.__class__ = UnclampedBlock


MODELS = {"HMambaUnclamped": HMambaUnclamped}
