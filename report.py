"""Reads the logs of train.py: steps to a target loss, their ratios, learning curves.

    python report.py runs/hmamba-stdlib-tiny-s1 runs/mamba-stdlib-tiny-s1 --out curves.png
    python report.py runs/pam* runs/sam* --scaling scaling.png    runs in epochs: losses, power laws and their crossing

Paper: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691), section
8.1 and tables 5-6. bpc, bits per character, is the loss in nats per byte divided by ln 2.
"""

import json
import math
import sys
from itertools import combinations
from pathlib import Path

from data import InputError, Parser, command_line, explain

TARGETS = (3.0, 2.5, 2.2, 2.0)  # bpc; the last three are the paper's


def read_log(path):
    """Events of a run, in order. `path` is a log.jsonl or its run folder. Raises InputError if it holds no header.

    A line that a kill cut short, or that is no event, is left out, with a note on stderr."""
    path = Path(path)
    path = path / "log.jsonl" if path.is_dir() else path
    with explain(f"read the log {path}"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    events = [e for e in map(_event, lines) if e]
    if not events or events[0]["event"] != "header" or not {"settings", "data", "params"} <= events[0].keys():
        raise InputError(f"{path} is not a log of train.py: its first line is no header")
    if len(events) < len(lines):
        print(f"note: {len(lines) - len(events)} unreadable lines of {path} are left out", file=sys.stderr)
    return events


def _event(line):
    """The event of a line, or None."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(event, dict) and isinstance(event.get("event"), str) and isinstance(event.get("step"), int)
    return event if whole and isinstance(event.get("val_loss", 0.0), (int, float)) else None


def val_curve(events):
    """(steps, bpc) of the evaluations on the fixed validation windows."""
    points = [(e["step"], e["val_loss"] / math.log(2)) for e in events if e["event"] == "val" and e["split"] == "val"]
    return [s for s, _ in points], [loss for _, loss in points]


def steps_to_target(steps, losses, target):
    """The step at which the loss first attains `target`: linear interpolation between the evaluations that bracket it
    (QS 8.1). None if it never does."""
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return float(steps[0])
            share = (losses[i - 1] - target) / (losses[i - 1] - loss)
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    return None


def targets_table(logs):
    """Markdown table of steps to each target (QS table 6), the ratio to the first model (QS table 5), and the last loss.

    `logs` is a list of event lists. The ratio is formed between runs of equal data, size and seed: this model's steps
    divided by the first model's, so that with `--model hmamba,mamba` 3.0 means that Mamba needs three times as many. The
    last column is over the whole split."""
    first, rows = {}, []
    for events in logs:
        settings = events[0]["settings"]
        key = (events[0]["data"]["name"], settings["size"], settings["seeds"])
        found = [steps_to_target(*val_curve(events), target) for target in TARGETS]
        reference = first.setdefault(key, found)
        final = next((f"{e['val_loss'] / math.log(2):.3f}" for e in events if e["event"] == "final"), "-")
        cells = ["-" if x is None else f"{x:.0f}" + (f" ({x / r:.2f}x)" if r else "") for x, r in zip(found, reference)]
        rows.append([settings["model"], *key, *cells, final])
    head = ["model", "data", "size", "seed", *(f"{t} bpc" for t in TARGETS), "at the end, bpc"]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def plot_curves(logs, out):
    """Validation bpc against the optimization step, one line a run (QS figure 4), written to the PNG `out`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6, 4), dpi=150)
    models = list(dict.fromkeys(events[0]["settings"]["model"] for events in logs))
    seen = set()
    for events in logs:
        settings = events[0]["settings"]
        model = settings["model"]
        steps, bpc = val_curve(events)
        label = None if model in seen else f"{model} ({events[0]['params']['total'] / 1e6:.2f}M)"
        seen.add(model)
        ax.plot(steps, bpc, color=f"C{models.index(model)}", label=label, lw=1.5)
    ax.set(xlabel="optimization step", ylabel="validation bits per character")
    ax.set_title(
        " / ".join(dict.fromkeys(f"{e[0]['data']['name']}, {e[0]['settings']['size']}" for e in logs)), fontsize=10
    )
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    with explain(f"write {out}"):
        fig.savefig(out)
    plt.close(fig)


# ----------------------------------------------------------------------------------------------------------------------
# PAM: the paper's metric, its scaling fits, and what it looks for in a trained model


def late_losses(events):
    """PAM section III: the evaluations that its metric averages, in nats: in each of the last three epochs the one at
    its end and the best one before that. `events` is the log of a run in epochs. Raises InputError if it has none."""
    points = [(e["epoch"], e["val_loss"]) for e in events if e["event"] == "val" and e.get("epoch")]
    if not points:
        raise InputError(
            "the run was not trained in epochs (--epochs, or a size of PAM's sweep): it has no late evaluations"
        )
    last, chosen = math.ceil(points[-1][0]), []
    for epoch in range(max(1, last - 2), last + 1):
        inside = [loss for at, loss in points if epoch - 1 < at < epoch]
        chosen += [min(inside)] if inside else []
        chosen += [loss for at, loss in points if at == epoch]
    return chosen


def late_metric(values):
    """Mean, standard deviation (n - 1) and sigma_log10 = sigma / (y ln 10) of evaluations (PAM section III)."""
    mean = sum(values) / len(values)
    sigma = (sum((x - mean) ** 2 for x in values) / max(1, len(values) - 1)) ** 0.5
    return mean, sigma, sigma / (mean * math.log(10))


def epochs_table(logs):
    """Markdown table: validation loss in nats per token and perplexity at the end of each epoch, the best evaluation
    within it, and the paper's late metric of each run."""
    rows = [["model", "size", "seed", "epoch", "loss", "best before", "perplexity"]]
    rows.append(["---"] * len(rows[0]))
    for events in logs:
        settings, late = events[0]["settings"], late_losses(events)
        run = [settings["model"], settings["size"], settings["seeds"]]
        points = [(e["epoch"], e["val_loss"]) for e in events if e["event"] == "val" and e.get("epoch")]
        for epoch in range(1, int(points[-1][0]) + 1):
            end = next((loss for at, loss in points if at == epoch), math.nan)
            before = min((f"{loss:.4f}" for at, loss in points if epoch - 1 < at < epoch), default="-")
            rows.append([*run, epoch, f"{end:.4f}", before, f"{math.exp(end):.2f}"])
        (loss, sigma, _), (ppl, ppl_sigma, _) = late_metric(late), late_metric([math.exp(x) for x in late])
        rows.append([*run, f"late, n = {len(late)}", f"{loss:.4f} +- {sigma:.4f}", "", f"{ppl:.2f} +- {ppl_sigma:.2f}"])
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def power_law(sizes, values):
    """log10 y = a + b log10 N by least squares (PAM section III). Returns a, b and their 2 x 2 covariance, from the
    scatter of the points about the line (zero for two points, which say nothing of it)."""
    import numpy as np

    x, y = np.log10(np.asarray(sizes, float)), np.log10(np.asarray(values, float))
    if len(np.unique(x)) < 2:
        raise InputError("a power law needs at least two sizes")
    X = np.stack((np.ones_like(x), x), 1)
    coefficients, *_ = np.linalg.lstsq(X, y, rcond=None)
    scatter = ((y - X @ coefficients) ** 2).sum() / (len(x) - 2) if len(x) > 2 else 0.0
    return float(coefficients[0]), float(coefficients[1]), scatter * np.linalg.inv(X.T @ X)


def crossing(first, second):
    """(N, y) at which two power laws (a, b, ...) meet; None if they are parallel."""
    (a, b), (c, d) = first[:2], second[:2]
    if b == d:
        return None
    x = (c - a) / (b - d)
    return 10**x, 10 ** (a + b * x)


PAPER_FITS = {  # PAM: slopes in loss and perplexity, the points where the fits cross, ends of the sweep in nats
    "loss": {"pam": -0.15, "sam": -0.12, "crossing": 4.5e9, "5m": (5.56, 4.78), "100m": (3.56, 3.26)},
    "perplexity": {"pam": -0.65, "sam": -0.49, "crossing": 5.5e8, "ratio": (2.18, 1.36)},
}


def scaling_table(logs):
    """Fits of every model family in `logs`, in loss and in perplexity, beside the paper's. Returns (Markdown, fits),
    fits being {quantity: {model: ([N], [y], [sigma_log10], (a, b, covariance))}}."""
    fits = {"loss": {}, "perplexity": {}}
    for quantity, of in (("loss", float), ("perplexity", math.exp)):
        points = {}
        for events in logs:
            mean, _, sigma_log = late_metric([of(x) for x in late_losses(events)])
            name = events[0]["settings"]["model"].split(":")[0]
            points.setdefault(name, []).append((events[0]["params"]["total"], mean, sigma_log))
        for name, of_model in points.items():
            sizes, values, sigmas = zip(*sorted(of_model))
            fits[quantity][name] = sizes, values, sigmas, power_law(sizes, values)
    rows = [
        [
            "quantity",
            "model",
            "runs",
            "sizes",
            "slope +- standard error",
            "the paper's slope",
            "crosses the first at N",
            "the paper's",
        ]
    ]
    rows.append(["---"] * len(rows[0]))
    for quantity, models in fits.items():
        first, paper = next(iter(models)), PAPER_FITS[quantity]
        for name, (sizes, _, _, law) in models.items():
            met = None if name == first else crossing(models[first][3], law)
            slope = f"{law[1]:.3f} +- {law[2][1, 1] ** 0.5:.3f}"
            met = [f"{met[0]:.2g} ({met[1]:.3g})", f"{paper['crossing']:.2g}"] if met else ["-", "-"]
            rows.append([quantity, name, len(sizes), len(set(sizes)), slope, paper.get(name, "-"), *met])
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows), fits


def plot_scaling(fits, out):
    """PAM figure 2: loss and perplexity against parameters, error bars, fits, their crossing, into the PNG `out`."""
    plt = _pyplot()
    fig, axes = plt.subplots(2, 1, figsize=(6, 7), dpi=150)
    for ax, (quantity, models) in zip(axes, fits.items()):
        laws = [law for *_, law in models.values()]
        met = crossing(*laws[:2]) if len(laws) > 1 else None
        largest = max(max(sizes) for sizes, *_ in models.values())
        drawn = met if met and largest / 1e3 < met[0] < 1e3 * largest else None
        for i, (name, (sizes, values, sigmas, law)) in enumerate(models.items()):
            bars = [y * s * math.log(10) for y, s in zip(values, sigmas)]
            ax.errorbar(
                sizes, values, bars, fmt="^*os"[i % 4], color=f"C{i}", capsize=2, label=f"{name}, slope {law[1]:.2f}"
            )
            ends = [min(*sizes, *drawn[:1]) if drawn else min(sizes), max(*sizes, *drawn[:1]) if drawn else max(sizes)]
            ax.plot(ends, [10 ** (law[0] + law[1] * math.log10(n)) for n in ends], "--", color=f"C{i}", lw=1)
        if drawn:
            ax.axvline(drawn[0], ls=":", color="grey", label=f"crossing at {drawn[0]:.2g}")
        ax.set(xscale="log", yscale="log", ylabel=f"validation {quantity}" + (", nats" if quantity == "loss" else ""))
        ax.legend(frameon=False, fontsize=8)
    axes[-1].set_xlabel("parameters")
    _save(fig, out)


def effective_rank(S):
    """exp of the entropy of the normalised singular values of (..., n, n) (PAM section III); 0 for a zero matrix."""
    import torch

    s = torch.linalg.svdvals(S)
    p = s / s.sum(-1, keepdim=True).clamp(min=1e-30)
    return torch.where(s.sum(-1) > 0, torch.exp(-torch.xlogy(p, p).sum(-1)), 0.0)


def state_ranks(run, tokens):
    """Effective rank of every S_t while a trained PAM or SAM reads tokens (B, T), averaged over B: (T, layers, heads).

    `run` is a checkpoint or run folder. Raises InputError if its model has no matrix memory."""
    import torch

    import sample

    model, _ = sample.load(run)
    if not hasattr(model, "real"):
        raise InputError(f"{run} is no PAM or SAM: its state is not a matrix memory")
    state, ranks = model.init_state(len(tokens)), []
    with torch.no_grad():
        for t in range(tokens.shape[1]):
            _, state = model.step(tokens[:, t], state)
            memories = torch.stack([layer[0] for layer in state if layer is not None])  # (layers, B, H, d, d, 2)
            memories = memories if model.real else torch.view_as_complex(memories.contiguous())
            ranks.append(effective_rank(memories).mean(1))
    return torch.stack(ranks)


def plot_ranks(ranks, d, out):
    """Effective rank against the position, a line a layer (mean over heads), into the PNG `out`. ranks: state_ranks."""
    plt = _pyplot()
    fig, ax = plt.subplots(figsize=(6, 4), dpi=150)
    for layer, of_layer in enumerate(ranks.mean(-1).T.tolist()):
        ax.plot(range(1, len(of_layer) + 1), of_layer, lw=1, label=f"layer {layer}")
    ax.set(xlabel="tokens read", ylabel=f"effective rank of S (of {d})", xscale="log")
    ax.legend(frameon=False, fontsize=7, ncols=2)
    _save(fig, out)


def repetition(tokens):
    """PAM section III: {"3-gram": share of the 3-grams that occurred before, "4-gram": ..., "unique": distinct tokens
    over tokens} of one sample, a list of tokens (or words)."""

    def repeated(n):
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        return 1 - len(set(grams)) / len(grams) if grams else 0.0

    return {"3-gram": repeated(3), "4-gram": repeated(4), "unique": len(set(tokens)) / max(1, len(tokens))}


def phase_coherence(embedding, pairs):
    """Normalised conjugate inner product <z1|z2> / (|z1| |z2|) of token pairs (PAM section II, figure 3).

    Args: embedding (V, D, 2) real pairs; pairs (n, 2) token ids.
    Returns: coherence, its modulus, and phase, its angle in (-pi, pi], (n,) each."""
    import torch

    z = torch.view_as_complex(embedding.double().contiguous())
    first, second = z[pairs[:, 0]], z[pairs[:, 1]]
    product = (first.conj() * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))
    return product.abs(), product.angle()


WORDNET_URL = "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora/wordnet.zip"  # WordNet 3.0


def wordnet_pairs(folder):
    """Synonym and antonym pairs of WordNet (PAM section II) from its files data.noun, data.verb, data.adj and data.adv.

    Returns: (synonyms, antonyms), sets of (lemma, lemma) in alphabetical order, spaces for underscores; what is both is in
        neither. Raises InputError for a file that is missing or not WordNet's."""
    words, opposites = {}, []  # (part of speech, offset) -> lemmas; ((its synset, word number), (the other's))
    for pos in ("noun", "verb", "adj", "adv"):
        path = Path(folder) / f"data.{pos}"
        with explain(f"read WordNet's {path} (from {WORDNET_URL}, or Debian's package wordnet-base)"):
            lines = path.read_text(encoding="latin-1").splitlines()
        try:
            for line in lines:
                if line.startswith("  "):  # the licence
                    continue
                fields = line.partition(" | ")[0].split(" ")
                key, count = (pos, fields[0]), int(fields[3], 16)
                lemmas = [word.partition("(")[0].replace("_", " ") for word in fields[4 : 4 + 2 * count : 2]]
                words[key], at = lemmas, 5 + 2 * count  # behind the number of pointers
                for i in range(at, at + 4 * int(fields[at - 1]), 4):
                    symbol, offset, other, places = fields[i : i + 4]
                    if symbol == "!":  # between words: their numbers in both synsets, in hex, from 1
                        other = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}[other]
                        source, target = (int(n, 16) for n in (places[:2], places[2:]))
                        opposites.append(((key, source), ((other, offset), target)))
        except (ValueError, IndexError, KeyError):
            raise InputError(f"{path} is not a data file of WordNet: {line[:60]!r}") from None
    synonyms = {tuple(sorted(pair)) for lemmas in words.values() for pair in combinations(set(lemmas), 2)}
    antonyms = {tuple(sorted(words[key][n - 1] for key, n in pair)) for pair in opposites}
    antonyms = {(a, b) for a, b in antonyms if a != b}  # WordNet 3.0 opposes two meanings of "kern"
    return synonyms - antonyms, antonyms - synonyms


def plot_coherence(groups, out):
    """PAM figure 3: coherence against phase, a colour for each group of word pairs and a dashed line at its mean coherence,
    into the PNG `out`. groups: {name: (coherence, phase)} of phase_coherence."""
    plt = _pyplot()
    fig, ax = plt.subplots(figsize=(6, 4), dpi=150)
    for i, (name, (coherence, phase)) in enumerate(groups.items()):
        mean, low, high = mean_interval(coherence)
        label = f"{name}, n = {len(coherence)}: {mean:.3f} ({low:.3f} to {high:.3f})"
        ax.plot(phase, coherence, ".", ms=2, alpha=0.4, color=f"C{i}", label=label)
        ax.axhline(mean, ls="--", lw=1, color=f"C{i}")
    ax.set(xlabel="phase of <z1|z2>, radians", ylabel="coherence", xlim=(-math.pi, math.pi))
    ax.legend(frameon=False, fontsize=7, markerscale=4)
    _save(fig, out)


def mean_interval(values, draws=2000, seed=0):
    """Mean of values (n,) and its 95 % bootstrap interval: (mean, low, high)."""
    import numpy as np

    values, rng = np.asarray(values, float), np.random.RandomState(seed)
    means = [values[rng.randint(len(values), size=len(values))].mean() for _ in range(draws)]
    return float(values.mean()), float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def _pyplot():
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(fig, out):
    for ax in fig.axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    with explain(f"write {out}"):
        fig.savefig(out)
    _pyplot().close(fig)


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders or log.jsonl files")
    parser.add_argument("--out", help="also draw the learning curves into this PNG")
    parser.add_argument(
        "--scaling", help="of runs in epochs: their epochs, PAM's power laws, drawn into this PNG; nothing else"
    )
    args = parser.parse_args()
    for name, png in (("out", args.out), ("scaling", args.scaling)):
        if png and Path(png).suffix != ".png":
            raise InputError(f"--{name} {png} must end in .png")
    logs = [read_log(run) for run in args.runs]
    if args.scaling:
        table, fits = scaling_table(logs)
        print(f"{epochs_table(logs)}\n\n{table}")
        plot_scaling(fits, args.scaling)
        print(f"wrote {args.scaling}")
        return
    print(targets_table(logs))
    if args.out:
        plot_curves(logs, args.out)
        print(f"wrote {args.out}")


if __name__ == "__main__":
    command_line(main)
