"""CSP-Fast with SiLU on the sum of the skip and the recurrence (eq. 33); eq. 9 has it on the recurrence alone.

A fork beside its results. Weights, their names and their start are csp-fast's; so are the settings, but for those that
SumConfig fixes.

    python tasks.py --task mod3 --epochs 60 --model results/csp-gate/silu.py:SumSiLU
"""

from dataclasses import dataclass

import torch.nn.functional as F

import csp


@dataclass
class SumConfig(csp.CSPFastConfig):
    carry: str = csp.choice("linear")
    theta: str = csp.choice("cumulative")
    gate: str = csp.choice("sine")


class SumBlock(csp.CSPBlock):
    def forward(self, z):
        b = self.B(csp.rotate(z, self.angle(z).cumsum(2)).flatten(3))  # eqs. 10-12; Algorithm 2, line 4: the sum
        c = (1 + self.W_gamma(b).sin()) / 2 * b  # eqs. 15-16; line 10
        delta = F.softplus(self.W_delta(c))  # line 12
        h = csp.scan(delta, c, self.config.scan, self.config.eps).view_as(z)  # lines 14-16
        return csp.normalise(F.silu(self.g.sigmoid() * z + h))  # eq. 33, in place of line 19


class SumSiLU(csp.CSPFast):
    Config, Block = SumConfig, SumBlock
