"""Mamba as its training loop in QS may have been: appendix C logs a loss summed over the sequence, not its mean.

A fork beside its results. If that sum was also what was differentiated, its gradient is T times as large, and clipping at
norm 1 acts at every step. The value of the loss stays the mean, so that logs can be compared; the logged norm is T times
the mean's.

    python train.py --model results/english/summed/summed.py:MambaSummed --data english.txt --lr 0.0125
"""

from hmamba import Mamba


class MambaSummed(Mamba):
    def forward(self, idx, targets=None, state=None):
        """As Mamba's, with the gradient of the loss summed over the T tokens of a sequence, QS appendix C."""
        logits, loss, state = super().forward(idx, targets, state)
        if loss is not None:
            loss = loss + (idx.shape[1] - 1) * (loss - loss.detach())
        return logits, loss, state
