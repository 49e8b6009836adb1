"""CSP-Fast with SiLU on the sum of the skip and the recurrence (eq. 33); eq. 9 has it on the recurrence alone.

A fork beside its results. Weights, their names and their start are csp-fast's.

    python tasks.py --task mod3 --epochs 60 --model results/csp-gate/silu.py:SumSiLU
"""

import torch.nn.functional as F

import csp


class SumBlock(csp.CSPBlock):
    def forward(self, z):
        b = self.B(csp.rotate(z, self.angle(z).cumsum(2)).flatten(3))  # eqs. 10-12
        c = (1 + self.W_gamma(b).sin()) / 2 * b  # eqs. 15-16
        h = csp.scan(F.softplus(self.W_delta(c)), c, self.config.scan).view_as(z)
        return csp.normalise(F.silu(self.g.sigmoid() * z + h))  # eq. 33


class SumSiLU(csp.CSPFast):
    Block = SumBlock
