"""What CSP learns: are its angles multiples of 2 pi / m, and does their error tell where the answers go wrong?

A block adds an angle theta_k at each symbol k: n0 zeros and n1 ones make n0 theta_0 + n1 theta_1. It counts modulo m if
both angles are near multiples k 2 pi / (m j), for a small whole number j, of which that sum tells n1 mod m. Their mean
error e adds up, and after pi / (m j e) symbols, the onset, the phase is nearer to another answer.

    PYTHONPATH=. python results/angles/angles.py results/angles/*.jsonl
"""

import math
import re
from itertools import product

import numpy as np

import report
from data import InputError, Parser, command_line

FINEST = 3  # the largest j
TRAINED, LONGEST = 16, 65  # a block that counts must count for the length of training; 65: never wrong up to 64
WRONG = 0.9  # the measured onset is the first position with a lower accuracy


def onset(angles, m):
    """Of a model's blocks [(theta_0, theta_1)] that with the latest predicted onset, at most 65: (onset, its number
    from 1, j, (k_0, k_1), mean error); or None if none counts to the length of training."""
    found = []
    for (block, thetas), j in product(enumerate(angles, 1), range(1, FINEST + 1)):
        n, unit = m * j, 2 * math.pi / (m * j)
        k = [round(theta / unit) for theta in thetas]
        answers = {((k[0] * n0 + k[1] * n1) % n, n1 % m) for n0, n1 in product(range(n), repeat=2)}
        if len(answers) == len({phase for phase, _ in answers}):  # each phase has one answer
            error = sum(abs(theta - unit * times) for theta, times in zip(thetas, k)) / 2
            found.append((min(LONGEST, math.pi / n / max(error, 1e-9)), block, j, tuple(k), error))
    found = [counts for counts in found if counts[0] > TRAINED]
    return max(found, key=lambda counts: (counts[0], -counts[2]), default=None)  # of equal ones that of the smallest j


def by_chance(m, blocks=3, draws=2000):
    """The share of models with random angles that have a block that counts."""
    angles = np.random.RandomState(m).uniform(-math.pi, math.pi, (draws, blocks, 2))
    return sum(onset(model, m) is not None for model in angles) / draws


def centred_ranks(values):
    """Ranks with mean 0; equal values share the mean of theirs."""
    values = np.asarray(values)
    return ((values[:, None] > values).sum(1) + (values[:, None] >= values).sum(1)) / 2 - len(values) / 2


def correlation(groups):
    """Spearman's rank correlation of pairs (x, y) in groups, each ranked by itself, with a 95 % interval (Fisher)."""
    sides = zip(*(zip(*group) for group in groups))
    x, y = (np.concatenate([centred_ranks(values) for values in side]) for side in sides)
    r, half = np.corrcoef(x, y)[0, 1], 1.96 / math.sqrt(len(x) - 3)
    return r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("logs", nargs="+")
    parser.add_argument("--out", default="results/angles/onset/onset.png")
    args = parser.parse_args()
    rows, points, shares = [], {}, []
    for path in args.logs:
        events = report.read_log(path)
        header, last, lengths = events[0], events[-1], {e["length"]: e for e in events if e["event"] == "eval"}
        if not ("theta" in last and re.fullmatch(r"parity|mod\d+", header["data"]["name"]) and LONGEST - 1 in lengths):
            raise InputError(f"{path}: no angles of csp on mod-m or parity, tested at length {LONGEST - 1}")
        m, seed = header["data"]["classes"], header["settings"]["seed"]
        accuracy = lengths[LONGEST - 1]["acc_by_pos"]
        measured = next((i for i, share in enumerate(accuracy, 1) if share < WRONG), LONGEST)
        counts = onset([[theta for theta, _ in block] for block in last["theta"]], m)
        points.setdefault(m, []).append((counts, measured))
        if counts:
            predicted, block, j, k, error = counts
            rows.append([m, seed, block, f"{k[0]}, {k[1]} of {m * j}", f"{error:.4f}", f"{predicted:.0f}", measured])
        else:
            rows.append([m, seed, "none", "-", "-", "-", measured])
    groups = {m: [(c[0], y) for c, y in found if c] for m, found in sorted(points.items())}
    for m, group in groups.items():
        shares.append([m, len(points[m]), len(group), f"{100 * by_chance(m):.0f} %"])
    r, low, high = correlation([group for group in groups.values() if group])
    print(report.markdown(["m", "seeds", "with a block that counts", "of random angles"], shares), end="\n\n")
    print(f"Predicted and measured onset, Spearman's rank correlation: {r:.2f} [{low:.2f}, {high:.2f}]\n")
    rows.sort(key=lambda row: row[:2])
    print(report.markdown(["m", "seed", "block", "angles", "error a step", "predicted onset", "measured onset"], rows))
    title = f"The first position at which CSP-Fast is right less than {WRONG:.0%} of the time; {LONGEST}: none"
    names = {"xlabel": "predicted from the angles' error", "ylabel": "measured"}
    with report.figure(args.out, title, [""], height=3.4, **names) as (ax,):
        ax.plot([TRAINED, LONGEST], [TRAINED, LONGEST], color="0.6", lw=0.8)
        for (m, group), marker, colour in zip(groups.items(), "o^sD", report.shades(len(groups))):
            ax.plot(*zip(*group), marker, color=colour, ls="", ms=5, alpha=0.7, label=f"modulus {m}")


if __name__ == "__main__":
    command_line(main)
