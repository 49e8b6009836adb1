"""CSP-Fast trained with one scan and tested with another: does the printed formula harm the training, or only the test?

A fork beside its results. Validations during training are tests, too.

    python tasks.py --task mod3 --epochs 60 --model results/tasks-crossed/crossed.py:Crossed:scan=printed:tested=associative
"""

from dataclasses import dataclass, replace

import csp


@dataclass
class CrossedConfig(csp.CSPFastConfig):
    tested: str = csp.choice("printed", "associative")

    def __post_init__(self):
        super().__post_init__()
        if self.eps != csp.EPS:
            raise ValueError(f"eps={self.eps}: crossed scans have eps={csp.EPS}")


class Crossed(csp.CSPFast):
    Config = CrossedConfig

    def forward(self, idx, generators=None):
        scan = self.config.tested if generators is None else self.config.scan  # only training draws dropout
        for block in self.blocks:
            block.config = replace(self.config, scan=scan)
        return super().forward(idx, generators)
