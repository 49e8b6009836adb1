"""The logs of train.py and tasks.py, written and read: every table and figure of the three papers that logs can give.

    python report.py runs/*-stdlib-*                              steps to a loss, ratios, gaps, cost: tables on the terminal
    python report.py runs/*-stdlib-* --out figures                and, with the figures, into a folder
    python report.py runs/tasks-40/* --out figures                length generalization
    python report.py runs/pam* runs/sam* --out figures            runs in epochs: also power laws and their crossing
    python report.py runs/pam* runs/sam* --diagnostics figures    checkpoints: rank of the memory, repetition, word pairs

Papers: "Complex Phase-State Dynamics Reduce the Optimization Steps of Sequence Models" (QS, arXiv 2608.14691), section 8; PAM,
section III; CSP, section 3. Losses in the logs are in nats per token; divided by ln 2 they are bpc, bits per character, if the
tokens are bytes, and else bits a token. "+-" is half a 95 % confidence interval (Student's t), of differences paired by seed.
"""

import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from itertools import combinations, pairwise
from pathlib import Path

from data import InputError, Parser, cache_dir, command_line, explain, needs, replace_file

TARGETS = (4.0, 3.5, 3.0, 2.5, 2.2, 2.0)  # bpc; the last three are the paper's


class Log:
    """log.jsonl of a run, one JSON object a line."""

    def __init__(self, folder, start, keep=None, active=True):
        """Args: start: the time.monotonic() at which time_s is 0; keep: on resuming, events after this step are dropped;
        active: False for all ranks but the first, which alone writes."""
        self.path, self.start, self.active = folder / "log.jsonl", start, active
        if keep is not None and active and self.path.exists():
            kept = [e for e in read_log(self.path) if e["step"] <= keep and e["event"] not in ("final", "sample")]
            with explain(f"write {self.path}"):
                replace_file(self.path, lambda f: f.write("".join(json.dumps(e) + "\n" for e in kept).encode()))
        elif active and self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self.path.write_text(self.path.read_text(errors="replace") + "\n")  # after a line that a kill cut short

    def write(self, event, step, tokens, **values):
        if self.active:
            time_s = round(time.monotonic() - self.start, 3)
            line = json.dumps({"event": event, "step": step, "tokens": tokens, "time_s": time_s} | values)
            with explain(f"write {self.path}"), open(self.path, "a") as f:
                f.write(line + "\n")

    def sync(self):
        """What was written is on the disk when this returns."""
        with explain(f"write {self.path}"), open(self.path, "a") as f:
            os.fsync(f.fileno())


def run_name(*parts):
    """Parts of a run's name, of which the first is the model spec, as a name for its folder."""
    return re.sub(r"[:=/\\\0]", "_", "-".join(map(str, parts)))


def provenance(device, world):
    """What ran: code revision ("-dirty" if changed, None outside a git checkout), versions, device, ranks."""
    import numpy as np
    import torch

    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=True, timeout=2).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        git = None
    return {
        "git": git, "world": world, "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {platform.machine()}",
    }  # fmt: skip


def read_log(path):
    """Events of a run, in order. `path` is a log.jsonl or its run folder. Raises InputError if it holds no header.

    A line that a kill cut short, or that is no event, is left out, with a note on stderr."""
    path = Path(path)
    if path.is_dir() and not (path / "log.jsonl").exists() and any(path.glob("*.jsonl")):
        raise InputError(f"{path} is a folder of logs: name {path}/*.jsonl")
    path = path / "log.jsonl" if path.is_dir() else path
    with explain(f"read the log {path}"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    events = [e for e in map(_event, lines) if e]
    parts = [events[0].get(key) for key in ("settings", "data", "params")] if events else []
    if not parts or events[0]["event"] != "header" or not all(isinstance(part, dict) and part for part in parts):
        raise InputError(f"{path} is not a log of train.py or tasks.py: its first line is no header")
    if len([e for e in events if e["event"] == "header"]) > 1:
        raise InputError(
            f"{path} holds the logs of several runs, one behind the other: put them into files of their own"
        )
    if len(events) < len(lines):
        bad = [str(i) for i, line in enumerate(lines, 1) if not _event(line)]
        named = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        print(f"note: of {path} these lines cannot be read and are left out: {named}", file=sys.stderr)
    return events


def _event(line):
    """The event of a line, or None."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(event, dict) and isinstance(event.get("event"), str) and isinstance(event.get("step"), int)
    numbers = [event.get(key, 0.0) for key in ("step", "loss", "val_loss", "epoch", "tok_s")] if whole else []
    numbers += event.get("layers", []) if whole and isinstance(event.get("layers", []), list) else [None]
    return event if whole and all(map(_is_number, numbers)) else None


def _is_number(x):
    """A finite one, small enough to compute with."""
    return isinstance(x, (int, float)) and abs(x) < 1e100  # false for NaN


# ----------------------------------------------------------------------------------------------------------------------
# Tables and figures

# Two-sided 95 % quantiles of Student's t for 1 ... 30 degrees of freedom.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
       2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


def t95(freedom):
    """The 97.5 % quantile of Student's t, up to 4 % too large beyond 30 degrees of freedom."""
    return T95[min(freedom, len(T95)) - 1]


def mean_interval(values):
    """Mean and half-width of its 95 % confidence interval (Student's t); the half-width is None for a single value."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return mean, None
    return mean, t95(n - 1) * statistics.stdev(values) / math.sqrt(n)


def markdown(head, rows):
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in cells)


def pyplot():
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
                         "legend.frameon": False, "font.size": 9, "savefig.dpi": 150})  # fmt: skip
    return plt


def save_figure(plt, fig, path):
    fig.tight_layout()
    with explain(f"write {path}"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, bbox_inches="tight")  # or a long title would be cut
    plt.close(fig)


def write_tables(text, out):
    """Writes `text` into the folder `out`. Returns the path."""
    with explain(f"write {out}"):
        out.mkdir(parents=True, exist_ok=True)
        (out / "tables.md").write_text(text + "\n", encoding="utf-8")
    return out / "tables.md"


# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


# ----------------------------------------------------------------------------------------------------------------------
# Training runs (QS section 8: tables 3-8, figures 3-7)

# What the paper's text prints of its 253M models on enwik8, OpenWebText and FineWeb, one seed each. Its tables themselves are not in
# the text: of most cells it has a range, or one corpus, or "about".
PAPER_STEPS = {  # table 6
    2.5: {"hmamba": "75-79", "mamba": "237-252"},
    2.0: {"hmamba": "191 enwik8", "mamba": "575 enwik8", "htransformer": "219 owt", "transformer": "484 owt"},
}
PAPER_STEP_RATIOS = {"mamba": "about 3", "transformer": "about 2"}  # table 5
PAPER_GAPS = {  # table 7, at the end of the warmup (OpenWebText, FineWeb); tables 7-8, at 1000 steps (all three)
    "mamba": ("0.321 and 0.368", "0.315 to 0.396"),
    "transformer": ("larger than at the end", "-0.132 to 0.034"),
}
PAPER_LOSS = {"transformer": "1.384 enwik8", "htransformer": "1.516 enwik8"}  # table 8
PAPER_SPREAD = {"hmamba": "about 2", "mamba": "more than 10"}, {"mamba": "10 to 100"}  # 8.4
PAPER_COST = ("The paper, to 2.0 bpc: H-Mamba 0.23 and Mamba 0.79 billion tokens of FineWeb (9.3); H-Transformer 0.8 and Transformer "
              "0.9 hours on OpenWebText, four A100 (8.4).")  # fmt: skip
PAPER_WARMUP = 0.75  # of 1000 steps, table 4
COMPLEX = {"mamba": "hmamba", "transformer": "htransformer", "sam": "pam"}  # real model -> its complex realization
FAMILIES = {"hmamba": "state space", "htransformer": "attention", "pam": "associative memory"}
# What runs of one comparison may differ in: what tables name, and what does not change the course of a run.
NOT_SHARED = {"model", "seeds", "lr", "min_lr", "data", "out", "resume", "stop_at", "micro", "device", "compile",
              "checkpointing", "log_every", "ckpt_every", "sample_every", "eval_only", "split", "params"}  # fmt: skip


def val_curve(events):
    """(steps, bpc) of the evaluations on the fixed validation windows."""
    points = [(e["step"], e["val_loss"] / math.log(2)) for e in events if e["event"] == "val" and e["split"] == "val"]
    return [s for s, _ in points], [loss for _, loss in points]


def train_curve(events):
    """(steps, bpc) of the training batches."""
    points = [(e["step"], e["loss"] / math.log(2)) for e in events if e["event"] == "train"]
    return [s for s, _ in points], [loss for _, loss in points]


def unit(tokens):
    """Of a loss divided by ln 2, by the setting `tokens` of its run."""
    return "bits a token" if tokens == "gpt2" else "bpc"


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


def base(label):
    """The model's name in a label such as "hmamba:N=4, rate 0.002"."""
    return re.split("[:,]", label)[0]


def family(label):
    """The complex model that a label's model is, or is the twin of."""
    return COMPLEX.get(base(label), base(label))


def reference(label, labels):
    """What a row is compared with, or None: its complex realization with the same options, or else without; for a variant of a
    complex model that model; or else the first of its family, or of `labels`."""
    if label in FAMILIES:
        return None
    relatives = [x for x in labels if family(x) == family(label)]
    known = (label.replace(base(label), family(label), 1), family(label), *relatives[:1], next(iter(labels)))
    return next((other for other in known if other in labels and other != label), None)


def group_runs(logs):
    """[(shared settings, {label: {seed: events}})], a group for each set of settings that decide the course of a run; its labels
    are models (with their rates, where one has several), complex ones before their twins. Raises InputError for two runs of
    one label and seed, or of different configurations."""
    groups = []
    for events in logs:
        settings = {"tokens": "bytes"} | {k: v for k, v in events[0]["settings"].items() if v is not None}
        shared = {k: v for k, v in settings.items() if k not in NOT_SHARED} | {"data": events[0]["data"]}
        members = next((members for other, members in groups if other == shared), None)
        if members is None:
            groups.append((shared, members := []))
        members.append(events)
    return [(shared, _cells(members)) for shared, members in groups]


def run_labels(logs):
    """The runs' names: the model, and its rate if that model was run at several."""
    rates, settings = {}, [events[0]["settings"] for events in logs]
    for s in settings:
        rates.setdefault(s["model"], set()).add(s.get("lr"))
    return [s["model"] + (f", rate {s['lr']:g}" if len(rates[s["model"]]) > 1 else "") for s in settings]


def _cells(logs):
    families, cells = list(FAMILIES), {}
    for label, events in zip(run_labels(logs), logs):
        s = events[0]["settings"]
        runs = cells.setdefault(label, {})
        if runs.setdefault(s["seeds"], events) is not events:
            raise InputError(f"two runs of {label} with seed {s['seeds']}: name one of them")
        if any(other[0].get("config") != events[0].get("config") for other in runs.values()):
            raise InputError(f"the runs of {label} have different configurations: name those of one")
        ends = {other[0]["settings"].get("min_lr") for other in runs.values()}
        if len(ends) > 1 and s.get("schedule") != "constant":
            raise InputError(
                f"the runs of {label} end at different rates (min_lr {', '.join(map(str, sorted(ends)))}): name those of one"
            )
    order = sorted(cells, key=lambda x: (families.index(family(x)) if family(x) in families else 9, base(x) in COMPLEX))
    return {label: cells[label] for label in order}


def warmup_end(shared):
    """(step, what it is): the end of the warmup, or of the paper's share of the budget if the rate is constant."""
    steps, warmup = shared["steps"], shared.get("warmup", PAPER_WARMUP)
    if shared.get("schedule") == "constant":
        return PAPER_WARMUP * steps, f"{PAPER_WARMUP:.0%} of the budget"
    return warmup * steps if warmup < 1 else warmup, "end of warmup"


def loss_at(events, step):
    """The validation loss at `step`, interpolated between evaluations, bpc, or None."""
    steps, losses = val_curve(events)
    for i, at in enumerate(steps):
        if at >= step and (i or at == step):
            share = (at - step) / (at - steps[i - 1]) if i else 0
            return losses[i] + share * (losses[i - 1] - losses[i])
    return None


def final_loss(events):
    """bpc over the whole validation split, or None for a run that is not finished."""
    budget = events[0]["settings"]["steps"]  # --stop_at ends a run before it, with a "final" too
    return next((e["val_loss"] / math.log(2) for e in events if e["event"] == "final" and e["step"] >= budget), None)


def layer_spread(events):
    """Largest over smallest gradient norm of the layers, and last over first, medians over the evaluations (QS 8.4); None
    without any."""
    norms = [e["layers"] for e in events if e["event"] == "grad" and min(e["layers"]) > 0]
    return norms and (statistics.median(max(x) / min(x) for x in norms), statistics.median(x[-1] / x[0] for x in norms))


def with_range(values, digits):
    """Text: the mean of those that are not None, in brackets the lowest and the highest; empty if there are none."""
    found = [x for x in values if x is not None]
    if not found:
        return ""
    text = f"{statistics.fmean(found):.{digits}f}"
    text += f" ({min(found):.{digits}f}-{max(found):.{digits}f})" if len(found) > 1 else ""
    return text + of_seeds(len(found), len(values))


def difference(both):
    """Text: the mean of x - y over pairs (x, y), +- half of its 95 % interval."""
    mean, half = mean_interval([x - y for x, y in both])
    return f"{mean:+.3f}" + ("" if half is None else f" +- {half:.3f}")


def ratio(both):
    """Text: the geometric mean of x / y over pairs (x, y) above 0, and its 95 % interval."""
    logs = [math.log(x / y) for x, y in both if x > 0 < y]
    if not logs:
        return "-"
    mean, half = mean_interval(logs)
    return f"{math.exp(mean):.2f}" + (
        "" if half is None else f" [{math.exp(mean - half):.3f}, {math.exp(mean + half):.3f}]"
    )


def of_seeds(found, seeds):
    return f", {found} of {seeds} seeds" if found < seeds else ""


def pairs(cells, of):
    """[(label, its reference, [(value, reference's value)] over the seeds of both)] of the function `of` of a run."""
    found = []
    for label, runs in cells.items():
        other = reference(label, cells)
        both = [(of(runs[seed]), of(cells[other][seed])) for seed in runs if seed in cells[other]] if other else []
        both = [pair for pair in both if None not in pair]
        if both:
            found.append((label, other, both))
    return found


def targets(cells):
    """(losses, common). losses, falling: those of TARGETS that a run reaches, and for each family the tenth of a bit that all of its
    runs reach; common: the one that all runs reach, None without any evaluation."""

    def lowest(labels):
        curves = [val_curve(events)[1] for label in labels for events in cells[label].values()]
        return [min(losses) for losses in curves if losses[1:]] or [min(losses) for losses in curves if losses]

    commons = [math.ceil(10 * max(lowest(of))) / 10 for _, of in panels(cells) if lowest(of)]
    reached = {target for target in TARGETS if any(loss <= target for loss in lowest(cells))}
    return sorted(reached.union(commons), reverse=True), max(commons, default=None)


def describe(shared, cells):
    """One paragraph: the data, the protocol (QS table 4), and what ran it."""
    headers = [e for runs in cells.values() for log in runs.values() for e in log if e["event"] in ("header", "resume")]
    device, threads, git = (", ".join(sorted({str(h.get(k)) for h in headers})) for k in ("device", "threads", "git"))
    torch = ", ".join(sorted({str(h.get("versions", {}).get("torch", "?")) for h in headers}))
    d, (step, _) = shared["data"], warmup_end(shared)
    rate = "constant rate" if shared.get("schedule") == "constant" else f"{step:.0f} steps of warmup, then cosine"
    o = headers[0].get("optimizer")
    adamw = f", AdamW {tuple(o['betas'])}, decay {o['decay']}, gradients clipped at {o['clip']:g}" if o else ""
    return (
        f"Data: {d['name']}, {d.get('size', 0):,} tokens, SHA-256 {d.get('sha256', '?')[:12]}. {shared['steps']:,} steps of "
        f"{shared['batch']} x {shared['seq']} tokens, {rate}{adamw}, {shared['dtype']}. Validation every {shared.get('eval_every', '?')} steps on {shared['eval_seqs']} fixed windows, "
        f"at the end on the whole split. {device}; threads: {threads}; PyTorch {torch}; code {git}. In brackets: lowest and highest "
        "seed; +- and square brackets: 95 % interval, paired by seed; *italics*: the paper's, 253M parameters, one seed on each of three corpora."
    )


def training_tables(shared, cells):
    """Markdown of a group: models and protocol (QS tables 3-4), steps to a loss and their ratios (6, 5), gaps (7), losses at the
    budget (8), cost (9.3), spread of the layers' gradients (8.4), every run. *Italics: the paper's, at 253M.*"""
    loss, budget, (goals, common) = unit(shared["tokens"]), shared["steps"], targets(cells)
    at, what = warmup_end(shared)
    evaluated = {step for runs in cells.values() for events in runs.values() for step in val_curve(events)[0] if step}

    def paper(values, label):
        return f" *{values[label]}*" if label in values and loss == "bpc" else ""

    def speed(events):
        return statistics.median([e["tok_s"] for e in events if e["event"] == "train" and "tok_s" in e] or [math.nan])

    def mean_loss(events):
        """Mean of the losses at all evaluated steps but 0, or None if the run did not reach the budget."""
        losses = [loss_at(events, step) for step in sorted(evaluated)]
        return statistics.fmean(losses) if losses and None not in losses else None

    def reaches(goal):
        return lambda events: steps_to_target(*val_curve(events), goal)

    def paired(columns, join):
        """Rows of `columns`, [(function of a run, {label: the paper's})], for every pair; join: `difference` or `ratio`."""
        found = {}
        for i, (of, printed) in enumerate(columns):
            for label, other, both in pairs(cells, of):
                cell = join(both) + of_seeds(len(both), len(cells[label]))
                cell += paper(printed, label) if other == COMPLEX.get(label) else ""
                found.setdefault((label, other), ["-"] * len(columns))[i] = cell
        return found.items()

    rows = []
    for label, runs in cells.items():
        header = next(iter(runs.values()))[0]
        s, config = header["settings"], header.get("config", {})
        shape = ", ".join(f"{k}={config[k]}" for k in ("D", "L") if k in config)
        rate = f"{s['lr']:g}" + ("" if shared.get("schedule") == "constant" else f" to {s['min_lr']:g}")
        rows.append([label, f"{header['params']['total']:,}", shape, rate, len(runs)])
    text = [describe(shared, cells), markdown(["model", "parameters", "shape", "learning rate", "seeds"], rows)]

    heads = [f"{goal} {loss}" for goal in goals]
    if goals:
        rows = []
        for label, runs in cells.items():
            without = "not reached" if all(map(final_loss, runs.values())) else "not finished"
            steps = [with_range([*map(reaches(goal), runs.values())], 0) or without for goal in goals]
            rows.append([label, *(cell + paper(PAPER_STEPS.get(goal, {}), label) for goal, cell in zip(goals, steps))])
        text += ["#### Steps to a validation loss", markdown(["model", *heads], rows)]
        columns = [(reaches(goal), PAPER_STEP_RATIOS if goal in (2.5, 2.2, 2.0) else {}) for goal in goals]
        rows = [[f"{a} / {b}", *row] for (a, b), row in paired(columns, ratio)]
        if rows:
            text += ["#### Ratio of steps", "Above 1: the second is faster. Geometric means.", markdown(["pair", *heads], rows)]  # fmt: skip
    warmup = {} if shared.get("schedule") == "constant" else {label: gaps[0] for label, gaps in PAPER_GAPS.items()}
    columns = [(lambda e: loss_at(e, at), warmup), (lambda e: loss_at(e, budget), {label: gaps[1] for label, gaps in PAPER_GAPS.items()}),
               (final_loss, {}), (mean_loss, {})]  # fmt: skip
    rows = [[f"{a} - {b}", *row] for (a, b), row in paired(columns, difference)]
    if rows:
        text += [f"#### Gap in validation loss, {loss}", "Above 0: the second leads.",
                 markdown(["pair", f"at step {at:.0f}, {what}", f"at step {budget}, the budget", "there, whole split", "mean of all evaluations but the first"], rows)]  # fmt: skip
    rows = []
    for label, runs in cells.items():
        ends = [[loss_at(events, budget) for events in runs.values()], [*map(final_loss, runs.values())]]
        fixed, whole = (with_range(values, 3) or "not finished" for values in ends)
        rows.append([label, fixed, whole + paper(PAPER_LOSS, label)])
    text += [f"#### Validation loss at the budget, {loss}", markdown(["model", "fixed windows", "whole split"], rows)]
    if common:
        rows = []
        for label, runs in cells.items():
            tokens = [
                steps and steps * shared["batch"] * shared["seq"] for steps in map(reaches(common), runs.values())
            ]
            speeds = [*map(speed, runs.values())]
            rows.append([label, with_range([n and n / 1e6 for n in tokens], 2), with_range(speeds, 0),
                         with_range([n and v and n / v / 60 for n, v in zip(tokens, speeds)], 1)])  # fmt: skip
        text += [f"#### Cost of {common} {loss}", " ".join(["At the median speed of each run, without validation.", *[PAPER_COST] * (loss == "bpc")]),
                 markdown(["model", "tokens, millions", "tokens a second", "minutes"], rows)]  # fmt: skip
    spreads = {label: [*filter(None, map(layer_spread, runs.values()))] for label, runs in cells.items()}
    rows = [
        [label] + [with_range(values, 2) + paper(printed, label) for values, printed in zip(zip(*found), PAPER_SPREAD)]
        for label, found in spreads.items() if found
    ]  # fmt: skip
    if rows:
        text += ["#### Gradient norms of the layers", "Medians over the evaluations.",
                 markdown(["model", "largest over smallest", "last over first"], rows)]  # fmt: skip
    rows = []
    for label, seed, events in [(label, *run) for label, runs in cells.items() for run in runs.items()]:
        steps = [reaches(goal)(events) for goal in goals]
        ends = [loss_at(events, budget), final_loss(events)]
        rows.append([label, seed, *("-" if x is None else f"{x:.0f}" for x in steps), *("-" if x is None else f"{x:.3f}" for x in ends)])  # fmt: skip
    head = ["model", "seed", *heads, "at the budget", "whole split"]
    return "\n\n".join([*text, "#### Every run", markdown(head, rows)])


def panels(labels):
    """[(title, its labels)], a panel for each family among `labels`."""
    names = dict.fromkeys(FAMILIES.get(family(label), "others") for label in labels)
    return [(name, [x for x in labels if FAMILIES.get(family(x), "others") == name]) for name in names]


def style(labels, label):
    """Colour and line of a model, one of its panel's: complex models drawn through, real ones dashed."""
    place = next(of_panel.index(label) for _, of_panel in panels(labels) if label in of_panel)
    real = base(label) in COMPLEX or "field=real" in label
    return {"color": COLOURS[place % len(COLOURS)], "ls": "--" if real else "-"}


def mean_curve(curves):
    """The mean of curves [(x, y)] at the points that all have."""
    values = [dict(zip(x, y)) for x, y in curves if x] or [{}]
    common = sorted(set(values[0]).intersection(*values[1:]))
    return common, [statistics.fmean(v[x] for v in values) for x in common]


def draw_runs(ax, curves, label, **how):
    """Curves [(x, y)] of several seeds: each thin, and their mean."""
    for x, y in curves if len(curves) > 1 else ():
        ax.plot(x, y, **how, lw=0.6, alpha=0.4)
    ax.plot(*mean_curve(curves), **how, lw=1.6, label=label)


def caption(shared, cells):
    """What a figure shows, in a line for its title: data, budget, schedule, number of seeds."""
    seeds = "-".join(map(str, sorted({len(runs) for runs in cells.values()})))
    rate = "constant rate" if shared.get("schedule") == "constant" else f"warmup of {warmup_end(shared)[0]:.0f}"
    return f"{shared['data']['name']}, {shared['size']}, {shared['steps']} steps, {rate}; {seeds} seed{'s' * (seeds != '1')} a model"


def plot_curves(shared, cells, out):
    """Loss by optimization step: validation (QS figure 4) and training (figure 7), a row a family, into the PNG `out`."""
    plt = pyplot()
    rows = panels(cells)
    fig, axes = plt.subplots(
        len(rows), 2, figsize=(11, 3.1 * len(rows) + 0.4), sharex=True, sharey="row", squeeze=False
    )
    for (left, right), (name, labels) in zip(axes, rows):
        late = []
        for label in labels:
            runs = cells[label].values()
            legend = f"{label} ({next(iter(runs))[0]['params']['total'] / 1e6:.2f}M, n = {len(runs)})"
            for ax, curve in ((left, val_curve), (right, train_curve)):
                curves = [curve(events) for events in runs]
                draw_runs(ax, curves, legend, **style(cells, label))
                late += [y for x, ys in curves for x, y in zip(x, ys) if x >= 0.2 * shared["steps"]]
        if late:  # the fall from 8 bits a byte in the first steps would take most of the height
            left.set_ylim(min(late) - 0.1, max(late) + 0.1)
        left.set(ylabel=f"loss, {unit(shared['tokens'])}", title=f"{name}, validation")
        right.set_title("training batches")
        right.legend(*left.get_legend_handles_labels(), fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    for ax in axes[-1]:
        ax.set_xlabel("optimization step")
    fig.suptitle(caption(shared, cells), fontsize=10)
    save_figure(plt, fig, out)


def plot_steps(shared, cells, out):
    """QS figure 3: bars of the steps to each target, points the seeds, in a bar its ratio to its reference, into the PNG `out`."""
    plt = pyplot()
    goals, rows = targets(cells)[0], panels(cells)
    fig, axes = plt.subplots(len(rows), figsize=(9, 3.2 * len(rows)), squeeze=False)
    for ax, (name, labels) in zip(axes[:, 0], rows):
        width = 0.8 / len(labels)
        for i, label in enumerate(labels):
            other, how = reference(label, cells), style(cells, label)
            for j, goal in enumerate(goals):
                steps = {seed: steps_to_target(*val_curve(events), goal) for seed, events in cells[label].items()}
                x, reached = j + width * (i - (len(labels) - 1) / 2), [s for s in steps.values() if s is not None]
                legend = None if j else label + (f" / {other}" if other else "")
                if len(reached) < len(steps):
                    ax.bar(x, 0, color=how["color"], label=legend)
                    ax.plot([x] * len(reached), reached, ".", color="black", ms=3)
                    missing = " not reached" if not reached else f" {len(reached)} of {len(steps)} seeds"
                    ax.text(x, 0, missing, rotation=90, ha="center", va="bottom", fontsize=6, color=how["color"])
                    continue
                ax.bar(x, statistics.fmean(reached), 0.9 * width, color=how["color"], label=legend, alpha=0.75)
                ax.plot([x] * len(reached), reached, ".", color="black", ms=3)
                theirs = {s: steps_to_target(*val_curve(e), goal) for s, e in cells[other].items()} if other else {}
                ratios = [steps[seed] / theirs[seed] for seed in steps if theirs.get(seed)]
                if ratios:
                    ax.text(
                        x,
                        0,
                        f" {statistics.geometric_mean(ratios):.2f}",
                        rotation=90,
                        ha="center",
                        va="bottom",
                        fontsize=7,
                    )
        ax.set_xticks(range(len(goals)), [f"{goal} {unit(shared['tokens'])}" for goal in goals])
        ax.set_title(name, fontsize=10)
        ax.set_ylabel("steps to the validation loss")
        ax.legend(fontsize=7)
    fig.suptitle(f"{caption(shared, cells)}; numbers: ratio of steps", fontsize=9)
    save_figure(plt, fig, out)


def plot_gap(shared, cells, out):
    """QS figure 5: validation loss minus its reference's by step, the warmup shaded, into the PNG `out`. Thin: seeds."""
    plt = pyplot()
    compared = {label: pair for label, *pair in pairs(cells, lambda events: dict(zip(*val_curve(events))))}
    columns, shaded = panels(compared), "; shaded: warmup" * (shared.get("schedule") != "constant")
    fig, axes = plt.subplots(1, len(columns), figsize=(4.5 * len(columns), 4.2), squeeze=False)
    for ax, (name, labels) in zip(axes[0], columns):
        late = []
        for label in labels:
            other, both = compared[label]
            steps = [[x for x in ours if x in theirs] for ours, theirs in both]
            curves = [(at, [ours[x] - theirs[x] for x in at]) for at, (ours, theirs) in zip(steps, both)]
            draw_runs(ax, curves, f"{label} - {other}", **style(cells, label))
            late += [y for _, ys in curves for y in ys]
        ax.axhline(0, color="black", lw=0.8)
        if shaded:
            ax.axvspan(0, warmup_end(shared)[0], color="0.92", zorder=0)
        ax.set(xlabel="optimization step", title=name, ylim=(min([*late, 0]) - 0.02, max([*late, 0]) + 0.02))
        ax.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    axes[0][0].set_ylabel(f"gap in validation loss, {unit(shared['tokens'])}")
    fig.suptitle(f"{caption(shared, cells)}; above 0: the second leads{shaded}", fontsize=9)
    save_figure(plt, fig, out)


def plot_gradients(shared, cells, out):
    """QS figure 6: gradient norm of each layer by step, mean over seeds, a panel a model, into the PNG `out`."""
    plt = pyplot()
    columns = min(4, len(cells))
    rows = -(-len(cells) // columns)
    fig, axes = plt.subplots(
        rows, columns, figsize=(3 * columns, 2.6 * rows + 0.4), sharex=True, sharey=True, squeeze=False
    )
    for ax in axes.flat[len(cells) :]:
        ax.axis("off")
    for ax, (label, runs) in zip(axes.flat, cells.items()):
        logged = [[e for e in events if e["event"] == "grad"] for events in runs.values()]
        depth = min(len(e["layers"]) for events in logged for e in events)
        colours = plt.get_cmap("viridis", depth + 1)  # the last, a light yellow, is left out
        for layer in range(depth):
            curves = [([e["step"] for e in events], [e["layers"][layer] for e in events]) for events in logged]
            named = f"layer {layer}" if layer in (0, depth - 1) else None
            ax.semilogy(*mean_curve(curves), color=colours(layer), lw=1.2, label=named)
        ax.set_title(label, fontsize=9)
    for ax in axes.flat[max(0, len(cells) - columns) : len(cells)]:  # the lowest of each column
        ax.set_xlabel("optimization step")
        ax.tick_params(labelbottom=True)
    for ax in axes[:, 0]:
        ax.set_ylabel("gradient norm of a layer")
    axes[0][0].yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    axes[0][0].yaxis.set_major_formatter("{x:g}")
    axes[0][0].yaxis.set_minor_formatter("")
    axes[0][0].legend(fontsize=7)
    fig.suptitle(caption(shared, cells), fontsize=10)
    save_figure(plt, fig, out)


def plot_rates(shared, cells, out):
    """Validation loss at the budget by peak learning rate, a panel a family, points the seeds, into the PNG `out`."""
    plt = pyplot()
    found = {}
    for runs in cells.values():
        for events in runs.values():
            model, rate = events[0]["settings"]["model"], events[0]["settings"]["lr"]
            loss = loss_at(events, shared["steps"])
            if loss is not None:
                found.setdefault(model, {}).setdefault(rate, []).append(loss)
    columns = panels(found)
    fig, axes = plt.subplots(1, len(columns), figsize=(4.5 * len(columns), 4.2), squeeze=False)
    for ax, (name, models) in zip(axes[0], columns):
        for model in models:
            rates, how = sorted(found[model]), style(found, model)
            ax.plot(rates, [statistics.fmean(found[model][r]) for r in rates], marker="o", ms=3, **how, label=model)
            ax.plot(*zip(*[(r, loss) for r in rates for loss in found[model][r]]), "o", ms=3, color=how["color"])
        ax.set(xlabel="peak learning rate", title=name, xscale="log")
        ticks = sorted({rate for model in models for rate in found[model]})
        ax.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        ax.set_xticks([], minor=True)
        ax.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    axes[0][0].set_ylabel(f"validation loss at the budget, {unit(shared['tokens'])}")
    fig.suptitle(caption(shared, cells), fontsize=10)
    save_figure(plt, fig, out)


def training_report(logs, out=None):
    """Tables of all groups of runs and, into the folder `out`, these and the figures. Returns the tables, and the paths."""
    groups, text, figures, sweeps = group_runs(logs), [], [], {}
    keys = dict.fromkeys(key for shared, _ in groups for key in shared)
    differ = [key for key in keys if any(shared.get(key) != groups[0][0].get(key) for shared, _ in groups)]
    if differ:
        text.append(f"Runs of {len(groups)} kinds, which differ in {', '.join(differ)} and are not averaged.")
    for shared, cells in groups:
        corpus = f"{shared['data']['name']} {shared['data']['sha256'][:8]}"
        values = {key: corpus if key == "data" else shared.get(key) for key in differ}
        text += ["### " + ", ".join(f"{key} {value}" for key, value in values.items())] * bool(differ)
        text.append(training_tables(shared, cells))
        members = [events for runs in cells.values() for events in runs.values()]
        rates = len(cells) > len({events[0]["settings"]["model"] for events in members})
        in_epochs = [events for events in members if any(e.get("epoch") for e in events)]
        if in_epochs:
            text += ["#### Epochs", epochs_table(members)]
        if in_epochs and rates:
            text.append("No power laws: a model has several rates here.")
        elif in_epochs:
            protocol = json.dumps({key: value for key, value in shared.items() if key != "size"}, sort_keys=True)
            named = {key: value for key, value in values.items() if key != "size"}
            finished = [events for events in in_epochs if final_loss(events) is not None]
            sweeps.setdefault(protocol, (named, shared["tokens"], []))[-1].extend(finished)
        drawn = {
            "rates": (plot_rates, rates),
            "curves": (plot_curves, True),
            "steps": (plot_steps, targets(cells)[0]),
            "gap": (plot_gap, pairs(cells, val_curve)),
            "gradients": (plot_gradients, all(map(layer_spread, members))),
        }
        for figure, (plot, possible) in drawn.items():
            if possible and rates in (False, figure == "rates"):  # a curve for each rate of each model would say little
                figures.append((plot, shared, cells, run_name(figure, *values.values()) + ".png"))
    for named, tokens, finished in sweeps.values():
        sizes = {}
        for events in finished:
            sizes.setdefault(sweep_name(events)[0], set()).add(events[0]["params"]["total"])
        swept = [events for events in finished if len(sizes[sweep_name(events)[0]]) > 1]
        if swept:
            table, fits = scaling_table(swept, tokens)
            text += ["### " + ", ".join(["Scaling", *(f"{key} {value}" for key, value in named.items())]), table]
            figures.append((plot_scaling, fits, tokens, run_name("scaling", *named.values()) + ".png"))
    text = "\n\n".join(text)
    if not out:
        return text, []
    paths = [write_tables(text, out)]  # first: no fault in a figure can lose them
    for plot, *what, name in figures:
        plot(*what, out / name)
        paths.append(out / name)
    return text, paths


# ----------------------------------------------------------------------------------------------------------------------
# Tasks (CSP section 3, appendices A and B)

# CSP tables 2-4: mean accuracy at lengths 16, 32, 48 and 64, then the five seeds at 64. Table 1 prints other means at 16 and 32.
PAPER_LENGTHS = (16, 32, 48, 64)
PAPER_TASKS = {
    "parity": {
        "rnn": ((1.000, 1.000, 1.000, 1.000), (1.000, 1.000, 1.000, 1.000, 1.000)),
        "complex-rnn": ((1.000, 0.999, 0.998, 0.995), (1.000, 0.982, 0.995, 0.998, 1.000)),
        "csp-vanilla": ((1.000, 0.970, 0.884, 0.782), (0.731, 0.716, 1.000, 0.737, 0.724)),
        "csp-fast": ((1.000, 0.960, 0.891, 0.756), (0.895, 0.628, 0.775, 0.759, 0.721)),
        "signed-mamba": ((0.971, 0.824, 0.743, 0.661), (0.677, 0.666, 0.696, 0.595, 0.673)),
        "decoder": ((0.973, 0.729, 0.649, 0.606), (0.615, 0.602, 0.592, 0.616, 0.603)),
    },
    "mod3": {
        "rnn": ((1.000, 1.000, 1.000, 1.000), (1.000, 1.000, 1.000, 1.000, 1.000)),
        "complex-rnn": ((1.000, 1.000, 1.000, 1.000), (1.000, 1.000, 1.000, 1.000, 1.000)),
        "csp-vanilla": ((1.000, 0.965, 0.927, 0.927), (0.978, 0.836, 0.997, 0.826, 0.996)),
        "csp-fast": ((1.000, 0.888, 0.799, 0.684), (0.697, 0.663, 0.623, 0.746, 0.691)),
        "signed-mamba": ((1.000, 0.642, 0.608, 0.564), (0.569, 0.570, 0.571, 0.563, 0.549)),
        "decoder": ((1.000, 0.541, 0.509, 0.484), (0.485, 0.484, 0.480, 0.481, 0.492)),
    },
    "dyck1": {
        "rnn": ((1.000, 1.000, 0.994, 0.988), (0.994, 0.987, 0.995, 0.976, 0.985)),
        "complex-rnn": ((1.000, 0.990, 0.981, 0.967), (0.983, 0.973, 0.980, 0.937, 0.961)),
        "csp-vanilla": ((1.000, 0.899, 0.864, 0.845), (0.748, 0.785, 0.850, 0.934, 0.907)),
        "csp-fast": ((0.997, 0.919, 0.890, 0.871), (0.917, 0.916, 0.840, 0.751, 0.931)),
        "signed-mamba": ((1.000, 0.931, 0.901, 0.907), (0.958, 0.960, 0.868, 0.892, 0.857)),
        "decoder": ((1.000, 0.929, 0.917, 0.926), (0.919, 0.987, 0.979, 0.973, 0.769)),
    },
}
PAPER_ORDER = ("csp-vanilla", "csp-fast", "rnn", "complex-rnn", "signed-mamba", "decoder")


def check_training(events, path):
    """The events of a run of train.py, of which the header has all that the tables need, or InputError."""
    h, s, d = events[0], events[0]["settings"], events[0]["data"]
    numbers = [s.get(k) for k in ("steps", "batch", "seq", "lr", "min_lr", "eval_seqs")]
    numbers += [s.get("warmup") or 0, h["params"].get("total"), d.get("size")]
    texts = [*map(s.get, ("model", "size", "seeds", "dtype")), d.get("name"), d.get("sha256")]
    for e in events:
        numbers += (
            [e.get({"train": "loss"}.get(e["event"], "val_loss"))] if e["event"] in ("train", "val", "final") else []
        )
        texts += [e.get("split")] if e["event"] == "val" else []
    whole = all(map(_is_number, numbers)) and all(isinstance(x, str) for x in texts) and h["params"]["total"] > 0
    whole = whole and all(isinstance(h.get(k, {}), dict) for k in ("config", "versions"))
    if not (whole and all(e.get("layers") for e in events if e["event"] == "grad")):
        raise InputError(f"{path} is a damaged log: parts of a run of train.py are missing")
    return events


def check_task(events, path):
    """The events of a run of tasks.py, which if it is finished has all that the tables need, or InputError."""
    events = [e for e in events if e["event"] in ("header", "train", "eval", "final")]
    try:
        header, s = events[0], events[0]["settings"]
        whole = {"model", "task", "seed", "epochs", "train_length"} <= s.keys() and header["params"]["total"] > 0
        whole = whole and max(header["data"]["shares"]) <= 1
        if events[-1]["event"] == "final":
            lengths = {e["length"]: len(e["acc_by_pos"]) for e in events if e["event"] == "eval" and e["acc"] <= 1}
            whole = whole and lengths == {n: n for n in s["lengths"]} and events[-1]["skipped"] >= 0
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise InputError(f"{path} is a damaged log: parts of a run of tasks.py are missing")
    return events


def protocol(events):
    """What runs must have in common to stand in one table."""
    return {k: v for k, v in events[0]["settings"].items() if k not in ("model", "task", "seed")}


def group_tasks(logs):
    """{task: {model: {seed: events}}}, the paper's models first. Raises InputError if the runs do not belong together."""
    known = {model: i for i, model in enumerate(PAPER_ORDER)}
    logs = sorted(logs, key=lambda e: (known.get(e[0]["settings"]["model"], len(known)), e[0]["settings"]["seed"]))
    groups, first = {}, protocol(logs[0])
    for events in logs:
        s = events[0]["settings"]
        for k, v in first.items():
            if s.get(k) != v:
                raise InputError(f"runs of different protocols do not go into one table: {k} is {v} and {s.get(k)}")
        if events[-1]["event"] != "final":
            raise InputError(f"the run of {s['model']} on {s['task']}, seed {s['seed']}, is not finished: run it again")
        if groups.setdefault(s["task"], {}).setdefault(s["model"], {}).setdefault(s["seed"], events) is not events:
            raise InputError(f"two runs of {s['model']} on {s['task']} with seed {s['seed']}: name one of them")
    return groups


def accuracies(events):
    """{length: accuracy} of a finished run."""
    return {e["length"]: e["acc"] for e in events if e["event"] == "eval"}


def task_tables(logs):
    """Markdown: accuracy by length with the paper's (CSP tables 1-4), spread over seeds (table 5), paired differences,
    every seed, and the rotation that CSP learnt for each symbol."""
    groups, s = group_tasks(logs), logs[0][0]["settings"]
    lengths, longest = s["lengths"], s["lengths"][-1]
    intro = (
        f"Trained at length {s['train_length']} for {s['epochs']} epochs, tested on 1,000 sequences a length. Mean over the "
        "seeds; in brackets the lowest and the highest. *Italics: the paper's mean, at 300 epochs.*"
    )
    text = [intro]
    every_seed, spread, paired, angles, skipped = [], [], [], [], 0
    for task, models in groups.items():
        rows, earlier = [], {}
        for model, runs in models.items():
            acc = {seed: accuracies(events) for seed, events in runs.items()}
            paper, _ = PAPER_TASKS.get(task, {}).get(model, ((), ()))
            printed, cells = dict(zip(PAPER_LENGTHS, paper)), []
            for length in lengths:
                values = [a[length] for a in acc.values()]
                cell = f"{statistics.fmean(values):.3f}"
                cell += f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else ""
                cells.append(cell + (f" *{printed[length]:.3f}*" if length in printed else ""))
            parameters = next(iter(runs.values()))[0]["params"]["total"]
            rows.append([model, f"{parameters:,}", len(runs), *cells])
            every_seed += [[task, model, seed, *(f"{a[length]:.3f}" for length in lengths)] for seed, a in acc.items()]
            last = {seed: a[longest] for seed, a in acc.items()}
            if len(last) > 1:
                theirs = PAPER_TASKS.get(task, {}).get(model, ((), ()))[1]
                theirs = f"{statistics.stdev(theirs):.3f}" if theirs and longest == 64 else "-"
                spread.append([task, model, len(last), f"{statistics.stdev(last.values()):.3f}", theirs])
            for other, of_other in earlier.items():
                both = [(a, of_other[seed]) for seed, a in acc.items() if seed in of_other]
                if len(both) > 1:
                    intervals = [mean_interval([a[length] - b[length] for a, b in both]) for length in lengths]
                    cells = [f"{mean:+.3f} +- {half:.3f}" for mean, half in intervals]
                    paired.append([task, f"{model} - {other}", len(both), *cells])
            earlier[model] = acc
            for seed, events in runs.items():
                skipped += events[-1]["skipped"]
                for i, block in enumerate(events[-1].get("theta", ())):
                    (zero, sure0), (one, sure1) = block
                    turn = (one - zero + math.pi) % (2 * math.pi) - math.pi
                    angles.append([task, model, seed, i + 1, f"{zero:+.3f} ({sure0:.2f})", f"{one:+.3f} ({sure1:.2f})",
                                   f"{turn / math.pi:+.3f}"])  # fmt: skip
        at = [f"L={length}" for length in lengths]
        text += [f"### {task}", markdown(["model", "parameters", "seeds", *at], rows)]
    if paired:
        text += ["### Paired by seed", "Mean difference in accuracy and 95 % interval (Student's t).",
                 markdown(["task", "difference", "seeds", *at], paired)]  # fmt: skip
    if spread:
        text += [f"### Spread over the seeds, L={longest}", "Sample standard deviation; the paper's from the seeds of its tables 2-4 (its table 5 prints other numbers).",
                 markdown(["task", "model", "seeds", "ours", "paper"], spread)]  # fmt: skip
    text += ["### Every seed", markdown(["task", "model", "seed", *at], every_seed)]
    if angles:
        text += ["### What CSP turns its state by, at each symbol",
                 ("Radians; in brackets how constant the angle is (1: always the same). The last column is the difference in "
                 "units of pi: parity asks for 1, mod-3 for 2/3."),
                 markdown(["task", "model", "seed", "block", "at 0", "at 1", "difference"], angles)]  # fmt: skip
    text.append(f"Steps skipped because a gradient was not finite: {skipped} of all runs.")
    return "\n\n".join(text)


def plot_lengths(task, models, path):
    """Accuracy by length and, at the longest, by position (CSP figures 3-5): means as lines, seeds as points or thin lines."""
    plt = pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for i, (model, runs) in enumerate(models.items()):
        colour, acc = COLOURS[i % len(COLOURS)], [accuracies(events) for events in runs.values()]
        lengths = sorted(acc[0])
        left.plot(lengths, [statistics.fmean(a[n] for a in acc) for n in lengths], color=colour, label=model, lw=1.8)
        for a in acc:
            left.plot(lengths, [a[n] for n in lengths], ".", color=colour, alpha=0.5, ms=5)
        by_position = [next(e["acc_by_pos"] for e in ev if e.get("length") == lengths[-1]) for ev in runs.values()]
        for curve in by_position:
            right.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.25, lw=0.7)
        right.plot(range(1, lengths[-1] + 1), [statistics.fmean(c) for c in zip(*by_position)], color=colour, lw=1.8)
    header = next(iter(runs.values()))[0]
    for ax in (left, right):
        ax.axvline(header["settings"]["train_length"], color="0.4", ls=":", lw=1)
    right.axhline(max(header["data"]["shares"]), color="0.4", ls="--", lw=1)
    left.set(xlabel="length of the test sequences", ylabel="accuracy", ylim=(-0.03, 1.03))
    right.set(xlabel=f"position in sequences of length {lengths[-1]}")
    left.legend(fontsize=8, loc="lower left")
    seeds = sorted({len(runs) for runs in models.values()})
    s = header["settings"]
    fig.suptitle(
        f"{task}: {s['epochs']} epochs at length {s['train_length']} (dotted), {'-'.join(map(str, seeds))} seeds a model; "
        "dashed: always the commonest answer", fontsize=10,
    )  # fmt: skip
    save_figure(plt, fig, path)


def plot_seeds(groups, path):
    """Accuracy of every seed at the longest length beside the paper's (CSP appendix B)."""
    plt = pyplot()
    fig, axes = plt.subplots(1, len(groups), figsize=(3.2 * len(groups) + 1, 3.4), sharey=True, squeeze=False)
    for ax, (task, models) in zip(axes[0], groups.items()):
        for i, (model, runs) in enumerate(models.items()):
            acc = [accuracies(events) for events in runs.values()]
            longest = max(acc[0])
            ax.plot([i - 0.15] * len(acc), [a[longest] for a in acc], "o", color=COLOURS[0], alpha=0.7, ms=5,
                    label=None if i else "ours")  # fmt: skip
            theirs = PAPER_TASKS.get(task, {}).get(model, ((), ()))[1] if longest == 64 else ()
            ax.plot([i + 0.15] * len(theirs), theirs, "x", color=COLOURS[1], alpha=0.8, ms=5,
                    label=None if i else "paper")  # fmt: skip
        ax.set_xticks(range(len(models)), models, rotation=40, ha="right", fontsize=8)
        ax.set_title(task, fontsize=10)
    axes[0][0].set(ylabel=f"accuracy at length {longest}", ylim=(None, 1.03))
    axes[0][-1].legend(fontsize=8, loc="lower left")
    save_figure(plt, fig, path)


def plot_dynamics(groups, model, path):
    """Gradient norm and accuracy at the training length, by epoch (CSP figure 6)."""
    plt = pyplot()
    groups = {task: models[model] for task, models in groups.items() if model in models}
    fig, axes = plt.subplots(
        2, len(groups), figsize=(3.2 * len(groups) + 1, 4.2), sharex=True, sharey="row", squeeze=False
    )
    for (top, bottom), (task, runs) in zip(axes.T, groups.items()):
        for i, (seed, events) in enumerate(runs.items()):
            train = [e for e in events if e["event"] == "train"]
            epochs, colour = [e["epoch"] for e in train], COLOURS[i % len(COLOURS)]
            top.semilogy(
                epochs, [e["grad_max"] for e in train], color=colour, lw=1, label=f"seed {seed}" if i < 10 else None
            )
            bottom.plot(epochs, [e["acc"] for e in train], color=colour, lw=1)
        top.set_title(f"{model}, {task}", fontsize=10)
        bottom.set(xlabel="epoch")
    axes[0][0].set(ylabel="largest gradient norm\nsince the last point")
    axes[1][0].set(ylabel=f"accuracy at length {events[0]['settings']['train_length']}")
    axes[0][-1].legend(fontsize=7)
    save_figure(plt, fig, path)


def task_report(logs, out):
    """Writes tables and figures into the folder `out`. Returns the tables, and the paths."""
    groups, text, paths = group_tasks(logs), task_tables(logs), []
    if not out:
        return text, paths
    for task, models in groups.items():
        paths.append(out / f"lengths-{task}.png")
        plot_lengths(task, models, paths[-1])
    models = list(dict.fromkeys(model for models in groups.values() for model in models))
    dynamics = "csp-fast" if "csp-fast" in models else models[0]
    plot_seeds(groups, out / "seeds.png")
    plot_dynamics(groups, dynamics, out / "dynamics.png")
    return text, [write_tables(text, out), *paths, out / "seeds.png", out / "dynamics.png"]


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
    mean, sigma = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    return mean, sigma, sigma / (mean * math.log(10))


def epochs_table(logs):
    """Markdown table: validation loss in nats per token and perplexity at the end of each epoch, the best evaluation
    within it, and the paper's late metric of each run."""
    rows = []
    for label, events in zip(run_labels(logs), logs):
        points = [(e["epoch"], e["val_loss"]) for e in events if e["event"] == "val" and e.get("epoch")]
        if not points:  # begun, not yet evaluated
            continue
        settings, late = events[0]["settings"], late_losses(events)
        run = [label, settings["size"], settings["seeds"]]
        for epoch in range(1, int(points[-1][0]) + 1):
            end = next((loss for at, loss in points if at == epoch), math.nan)
            before = min((loss for at, loss in points if epoch - 1 < at < epoch), default=math.nan)
            rows.append([*run, epoch, f"{end:.4f}", f"{before:.4f}", f"{math.exp(end):.2f}"])
        (loss, sigma, _), (ppl, ppl_sigma, _) = late_metric(late), late_metric([math.exp(x) for x in late])
        rows.append([*run, f"late, n = {len(late)}", f"{loss:.4f} +- {sigma:.4f}", "", f"{ppl:.2f} +- {ppl_sigma:.2f}"])
    return markdown(["model", "size", "seed", "epoch", "loss", "best before", "perplexity"], rows)


def power_law(sizes, values):
    """log10 y = a + b log10 N by least squares, unweighted (PAM section III does not say). Returns a, b and their 2 x 2 covariance, from the
    scatter of the points about the line (nan for two points, which say nothing of it)."""
    import numpy as np

    x, y = np.log10(np.asarray(sizes, float)), np.log10(np.asarray(values, float))
    if len(np.unique(x)) < 2:
        raise InputError("a power law needs at least two sizes")
    X = np.stack((np.ones_like(x), x), 1)
    coefficients, *_ = np.linalg.lstsq(X, y, rcond=None)
    scatter = ((y - X @ coefficients) ** 2).sum() / (len(x) - 2) if len(x) > 2 else math.nan
    return float(coefficients[0]), float(coefficients[1]), scatter * np.linalg.inv(X.T @ X)


def crossing(first, second, freedom):
    """(N, y, standard error of log10 N) at which two power laws (a, b, covariance) meet; None if they may as well be parallel:
    if 0 lies in the 95 % interval of the difference of their slopes. freedom: degrees of freedom of both, points minus 4."""
    (a, b, covariance), (c, d, other) = first, second
    apart = freedom > 0 and abs(b - d) > t95(freedom) * math.sqrt(covariance[1, 1] + other[1, 1])  # nan: of two points
    if not apart:
        return None
    x = (c - a) / (b - d)
    if abs(x) > 100:  # all but parallel
        return None
    variance = (covariance + other) * [[1, x], [x, x * x]] / (b - d) ** 2  # of first order in the errors of a, b, c, d
    return 10**x, 10 ** (a + b * x), math.sqrt(abs(variance.sum()))  # abs: of a rounding error


PAPER_FITS = {  # PAM: slopes in loss and perplexity, (N, y) where the fits cross
    "loss": {"pam": -0.15, "sam": -0.12, "crossing": (4.5e9, 2.05)},
    "perplexity": {"pam": -0.65, "sam": -0.49, "crossing": (5.5e8, 10.6)},
}
PAPER_LOSSES = {"5m": {"pam": 5.56, "sam": 4.78}, "100m": {"pam": 3.56, "sam": 3.26}}  # ends of its sweep, in nats
PAPER_RATIOS = {"5m": 2.18, "100m": 1.36}  # PAM's perplexity to SAM's


SHAPE_OPTIONS = ("D", "L", "H", "N", "d", "heads", "mlp", "width")


def sweep_name(events):
    """(model with its other options, size with the options of shape) of a run."""
    s = events[0]["settings"]
    model, *options = s["model"].split(":")
    options.sort()
    shape = [option for option in options if option.split("=")[0] in SHAPE_OPTIONS]
    return ":".join([model, *(x for x in options if x not in shape)]), ":".join([s["size"], *shape])


def scaling_table(logs, tokens):
    """Fits of every model family in `logs` in loss and in perplexity, and the late loss at each size, beside the paper's:
    all of it if `tokens` are its own, "gpt2", else what does not depend on them, slopes of the loss and their crossing.
    Returns (Markdown, fits), fits being {quantity: {model: ([N], [y], [sigma_log10], (a, b, covariance))}}."""
    fits, late = {"loss": {}, "perplexity": {}}, {}  # late: {size: {model: {seed: {quantity: y, "parameters": N}}}}
    for quantity, of in (("loss", float), ("perplexity", math.exp)):
        points = {}
        for events in logs:
            mean, _, sigma_log = late_metric([of(x) for x in late_losses(events)])
            name, size = sweep_name(events)
            points.setdefault(name, []).append((events[0]["params"]["total"], mean, sigma_log))
            runs, seed = late.setdefault(size, {}).setdefault(name, {}), events[0]["settings"]["seeds"]
            if quantity in runs.setdefault(seed, {}):
                raise InputError(f"two runs of {name}, size {size}, with seed {seed}: name one of them")
            runs[seed] |= {quantity: mean, "parameters": events[0]["params"]["total"]}
        for name in sorted(points, key=lambda name: name != "pam"):  # the others are compared with the first
            sizes, values, sigmas = zip(*sorted(points[name]))
            fits[quantity][name] = sizes, values, sigmas, power_law(sizes, values)
    rows, ends, first = [], [], next(iter(fits["loss"]))
    for quantity, models in fits.items():
        paper = PAPER_FITS[quantity] if tokens == "gpt2" or quantity == "loss" else {}
        for name, (sizes, _, _, law) in models.items():
            slope, cells = f"{law[1]:.3f} +- {law[2][1, 1] ** 0.5:.3f}", ["-", "-", "-"]
            if name != first and (met := meeting(models, first, name)):
                cells[:2] = f"{met[0]:.2g} ({met[1]:.3g})", f"{math.log10(met[0]):.2f} +- {met[2]:.2f}"
            if paper and (first, name) == ("pam", "sam"):
                n, y = paper["crossing"]
                cells[2] = f"{n:.2g}" + f" ({y})" * (tokens == "gpt2")
            rows.append([quantity, name, len(sizes), len(set(sizes)), slope, paper.get(name, "-"), *cells])
    by_parameters = sorted(
        late.items(), key=lambda item: max(y["parameters"] for runs in item[1].values() for y in runs.values())
    )
    for size, models in by_parameters:
        reference = models.get(first, {})
        for name, runs in models.items():
            both = [(reference[seed]["perplexity"], y["perplexity"]) for seed, y in runs.items() if seed in reference]
            compared = ratio(both) + of_seeds(len(both), len(runs)) if both and name != first else "-"
            loss, printed = with_range([y["loss"] for y in runs.values()], 3), ("-", "-")
            if tokens == "gpt2":
                printed = (
                    PAPER_LOSSES.get(size, {}).get(name, "-"),
                    PAPER_RATIOS.get(size, "-") if (first, name) == ("pam", "sam") else "-",
                )
            parameters = f"{next(iter(runs.values()))['parameters']:,}"
            ends.append([size, name, parameters, len(runs), loss, printed[0], compared, printed[1]])
    head_of_sizes = ["size", "model", "parameters", "seeds", "late loss, nats", "the paper's", f"perplexity of {first} / its own", "the paper's"]  # fmt: skip
    head = ["quantity", "model", "runs", "sizes", "slope +- standard error", "the paper's slope",
            f"crosses {first} at N (y)", "log10 N +- standard error", "the paper's"]  # fmt: skip
    how = "Fits of log10 y = a + b log10 N to all finished runs. Where the slopes cannot be told apart (95 %), there is no crossing."
    return "\n\n".join([markdown(head_of_sizes, ends), how, markdown(head, rows)]), fits


def meeting(models, first, second):
    """Where the laws of two models of a fit of scaling_table cross, or None."""
    (sizes, *_, law), (others, *_, other) = models[first], models[second]
    return crossing(law, other, len(sizes) + len(others) - 4)


def plot_scaling(fits, tokens, out):
    """PAM figure 2: loss and perplexity against parameters, error bars, fits, their crossing unless it is far away, into the
    PNG `out`; hollow markers are the paper's ends of the sweep, of its `tokens`."""
    plt = pyplot()
    from matplotlib.ticker import LogFormatter

    fig, axes = plt.subplots(2, 1, figsize=(6, 7))
    for ax, (quantity, models) in zip(axes, fits.items()):
        names, paper = list(models), PAPER_FITS[quantity] if tokens == "gpt2" or quantity == "loss" else {}
        met = meeting(models, *names[:2]) if len(names) > 1 else None
        largest = max(max(sizes) for sizes, *_ in models.values())
        drawn = met if met and largest / 1e3 < met[0] < 1e3 * largest else None
        for i, (name, (sizes, values, sigmas, law)) in enumerate(models.items()):
            bars = [y * s * math.log(10) for y, s in zip(values, sigmas)]
            label = f"{name}, slope {law[1]:.3f} +- {law[2][1, 1] ** 0.5:.3f}"
            label += f" (the paper's {paper[name]})" if name in paper else ""
            marker, colour = "^*os"[i % 4], f"C{i}"
            ax.errorbar(sizes, values, bars, fmt=marker, color=colour, capsize=2, label=label)
            ends = [min(*sizes, *drawn[:1]) if drawn else min(sizes), max(*sizes, *drawn[:1]) if drawn else max(sizes)]
            ax.plot(ends, [10 ** (law[0] + law[1] * math.log10(n)) for n in ends], "--", color=colour, lw=1)
            for size, losses in PAPER_LOSSES.items():
                at = 1e6 * float(size[:-1])
                if tokens == "gpt2" and name in losses and sizes[0] / 2 < at < 2 * sizes[-1]:
                    theirs = losses[name] if quantity == "loss" else math.exp(losses[name])
                    ax.plot(at, theirs, marker, color=colour, mfc="none", ms=9)
        if drawn:
            theirs = f" (the paper's {paper['crossing'][0]:.2g})" if paper and names[:2] == ["pam", "sam"] else ""
            label = f"{names[1]} crosses {names[0]} at 10^({math.log10(drawn[0]):.2f} +- {drawn[2]:.2f}){theirs}"
            ax.axvline(drawn[0], ls=":", color="grey", label=label)
        ax.set(xscale="log", yscale="log", ylabel=f"validation {quantity}" + (", nats" if quantity == "loss" else ""))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(LogFormatter())
            axis.set_minor_formatter(LogFormatter())
        ax.legend(fontsize=8)
    axes[-1].set_xlabel("parameters")
    save_figure(plt, fig, out)


def effective_rank(S):
    """exp of the entropy of the normalised singular values of (..., n, n) (PAM section III); 0 for a zero matrix."""
    import torch

    s = torch.linalg.svdvals(S)
    p = s / s.sum(-1, keepdim=True).clamp(min=1e-30)
    return torch.where(s.sum(-1) > 0, torch.exp(-torch.xlogy(p, p).sum(-1)), 0.0)


PAPER_RANK, PAPER_SETTLED = 10, 15  # PAM section III: about 10 of d = 64 within 10-15 tokens
RANK_WINDOWS = 8  # of validation text


def state_ranks(model, tokens, positions):
    """Effective rank of the memories of a PAM or SAM that has read the first t of tokens (B, T), for each t of `positions`,
    ascending: (positions, layers, H, B)."""
    import torch

    state, ranks = None, []
    with torch.no_grad():
        for begin, end in pairwise([0, *positions]):
            _, _, state = model(tokens[:, begin:end], state=state)
            memories = torch.stack([layer[0] for layer in state if layer is not None])  # (layers, B, H, d, d, 2)
            memories = memories if model.real else torch.view_as_complex(memories.contiguous())
            ranks.append(effective_rank(memories).transpose(1, 2))
    return torch.stack(ranks)


def ranks_table(positions, trained, untrained, after):
    """Markdown: for each layer and head the effective rank after `after` tokens, and from there on its mean over positions,
    with the lowest and the highest. trained, untrained: of state_ranks; means over the windows."""

    def cell(curve):
        return f"{curve.mean():.2f} ({curve.min():.2f}-{curve.max():.2f})"

    first, rows = positions.index(after), []
    for layer in range(trained.shape[1]):
        for head in range(trained.shape[2]):
            ours, fresh = (ranks[first:, layer, head].mean(-1) for ranks in (trained, untrained))
            rows.append([layer, head, f"{ours[0]:.2f}", cell(ours), f"{fresh[0]:.2f}", cell(fresh)])
    at, on = f"after {after} tokens", f"from there to {positions[-1]} (range)"
    return markdown(["layer", "head", at, on, f"untrained, {at}", f"untrained, {on}"], rows)


def plot_ranks(positions, trained, untrained, d, out):
    """Effective rank against the tokens read, a line a layer (mean over heads and windows), into the PNG `out`. Grey: the
    layers of the untrained model; dotted: the bound, one pair a token. trained, untrained: of state_ranks."""
    plt = pyplot()
    fig, ax = plt.subplots(figsize=(6, 4))
    for layer, curve in enumerate(untrained.mean((2, 3)).T.tolist()):
        ax.plot(positions, curve, color="0.7", lw=1, label=None if layer else "untrained")
    colours = plt.get_cmap("viridis", trained.shape[1] + 1)  # the last, a light yellow, is left out
    for layer, curve in enumerate(trained.mean((2, 3)).T.tolist()):
        ax.plot(positions, curve, color=colours(layer), lw=1.5, label=f"layer {layer}")
    ax.plot(positions, [min(t, d) for t in positions], ":", color="black", lw=1, label="bound")
    if d == 64:
        ax.axhline(PAPER_RANK, ls="--", color=COLOURS[1], lw=1, label="the paper's")
    ax.set(xlabel="tokens read", ylabel=f"effective rank of S (of {d})", xscale="log", ylim=(0, 1.05 * d))
    ax.legend(fontsize=7, ncols=2)
    save_figure(plt, fig, out)


def repetition(tokens):
    """PAM section III: {"3-gram": share of the 3-grams that occurred before, "4-gram": ..., "unique": distinct tokens
    over tokens} of one sample, a list of tokens (or words)."""

    def repeated(n):
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        return 1 - len(set(grams)) / len(grams) if grams else 0.0

    return {"3-gram": repeated(3), "4-gram": repeated(4), "unique": len(set(tokens)) / max(1, len(tokens))}


PAPER_REPETITION = {"3-gram": 0.034, "4-gram": 0.011, "unique": 0.703}  # of one sample, PAM section III
PAPER_SAMPLE = 91  # tokens: the shortest text that has all three (3 of 89 3-grams, 1 of 88 4-grams, 64 of 91 tokens)
SAMPLING = {"generated": "temperature 1, top-k 50, top-p 0.9, penalty 1.2", "sample": "temperature 0.8, top-k 50"}


def repetitions(texts, split):
    """`repetition` of texts, {its key: [values]}, in pieces of PAPER_SAMPLE tokens, as all three numbers depend on the length;
    a text of less is one piece. split: text -> list of tokens or words."""
    found = []
    for tokens in map(split, texts):
        starts = range(0, max(1, len(tokens) - PAPER_SAMPLE + 1), PAPER_SAMPLE)
        found += [repetition(tokens[i : i + PAPER_SAMPLE]) for i in starts]
    return {key: [f[key] for f in found] for key in PAPER_REPETITION}


def repetition_rows(events, windows, split, decode):
    """Rows of a table: what the texts are, how many, and each kind of repetition with a 95 % interval; of the windows (B, T) of
    real text, and of the texts that a run logged in the last tenth of its steps. split, decode: of `repetitions`, of a token."""
    rows, end = [], 0.9 * events[-1]["step"]
    texts = {"validation text": [b"".join(map(decode, window)).decode(errors="replace") for window in windows.tolist()]}
    for event, how in SAMPLING.items():
        texts[how] = [e["text"] for e in events if e["event"] == event and e["step"] >= end]
    for how, of in texts.items():
        if of:
            intervals = map(mean_interval, repetitions(of, split).values())
            cells = [f"{mean:.3f}" + ("" if half is None else f" +- {half:.3f}") for mean, half in intervals]
            rows.append([how, len(of), *cells])
    return rows


def plot_repetition(curves, out):
    """Repetition of generated texts against the training step, a line a run, into the PNG `out`; dashed: the paper's, of its
    last epoch. curves: {run: ([step], {key of `repetition`: [mean]})}."""
    plt = pyplot()
    fig, axes = plt.subplots(1, 3, figsize=(9, 3))
    for ax, (key, paper) in zip(axes, PAPER_REPETITION.items()):
        for i, (name, (steps, means)) in enumerate(curves.items()):
            ax.plot(steps, means[key], ".-", color=COLOURS[i % len(COLOURS)], lw=1, label=name)
        ax.axhline(paper, ls="--", color="0.4", lw=1, label="the paper's")
        ax.set(xlabel="optimization step", ylim=(0, None))
        ax.set_title("unique tokens" if key == "unique" else f"{key}s that occurred before", fontsize=10)
    axes[0].legend(fontsize=7)
    save_figure(plt, fig, out)


def phase_coherence(embedding, pairs):
    """Normalised conjugate inner product <z1|z2> / (|z1| |z2|) of token pairs (PAM section II, figure 3).

    Args: embedding (V, D, 2) real pairs; pairs (n, 2) token ids.
    Returns: coherence, its modulus, and phase, its angle in (-pi, pi], (n,) each."""
    import torch

    z = torch.view_as_complex(embedding.double().contiguous())
    first, second = z[pairs[:, 0]], z[pairs[:, 1]]
    product = (first.conj() * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))
    return product.abs(), product.angle()


def word_tokens(tokens, decode):
    """{word: its token} of the tokens in `tokens` (size,) that are a space and then the word. decode: token -> bytes."""
    import numpy as np

    blocks = np.array_split(tokens, 1 + len(tokens) // (1 << 22))  # a large map is never copied whole
    seen = {token: decode(token) for token in set().union(*(np.unique(block).tolist() for block in blocks))}
    return {text[1:].decode(errors="replace"): token for token, text in seen.items() if text.startswith(b" ")}


WORDNET_URL = "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora/wordnet.zip"  # WordNet 3.0


def wordnet_pairs(folder):
    """Synonym and antonym pairs of WordNet (PAM section II) from its files data.noun, data.verb, data.adj and data.adv.

    Returns: (synonyms, antonyms), sets of (lemma, lemma) in alphabetical order, spaces for underscores; what is both is in
        neither. Raises InputError for a file that is missing or not WordNet's."""
    words, opposites = {}, []  # (part of speech, offset) -> lemmas; ((its synset, word number), (the other's))
    for pos in ("noun", "verb", "adj", "adv"):
        path = Path(folder) / f"data.{pos}"
        with explain(f"read WordNet's {path.name} (unzip {WORDNET_URL} in {cache_dir()} and name {cache_dir() / 'wordnet'}, or "
                     "/usr/share/wordnet of Debian's package wordnet-base)"):  # fmt: skip
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


REPAIRINGS = 100  # shuffles of the control


def near_zero(phase):
    """Share of angles within pi/4 of 0."""
    return (phase.abs() < math.pi / 4).double().mean().item()


def coherence_groups(embedding, untrained, pairs, ids, seed=1):
    """Phase coherence of word pairs, beside shuffled pairs of the same words (PAM section II, figure 3).

    Args: embedding, untrained (V, D, 2); pairs {name: set of (word, word)}; ids {word: token}. Pairs with a word that is not in
        `ids` are dropped. A group "random" is added: as many pairs as the first group has, of the words of all.
    Returns: {name: dict} with n; words, how many there are; coherence and phase (n,); untrained, the mean coherence there; and of
        each of REPAIRINGS shuffles of the second words its mean coherence, shuffled, and its near_zero, shuffled_near.
        Raises InputError if less than two pairs are left."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    embedding, untrained = embedding.double(), untrained.double()  # once for all calls of phase_coherence
    tokens = {
        name: torch.tensor([[ids[a], ids[b]] for a, b in sorted(group) if a in ids and b in ids])
        for name, group in pairs.items()
    }
    tokens = {name: group for name, group in tokens.items() if len(group) > 1}
    if not tokens:
        raise InputError(
            "fewer than two pairs of WordNet's words are tokens that occur in the training text: train on more"
        )
    words, n = torch.cat([*tokens.values()]).unique(), len(next(iter(tokens.values())))
    draws = words[torch.randint(len(words), (2 * n + 8, 2), generator=generator)]
    tokens["random"] = draws[draws[:, 0] != draws[:, 1]][:n]
    found = {}
    for name, group in tokens.items():
        g = found[name] = {"n": len(group), "words": len(group.unique()), "shuffled": [], "shuffled_near": []}
        g["coherence"], g["phase"] = phase_coherence(embedding, group)
        g["untrained"] = phase_coherence(untrained, group)[0].mean().item()
        for _ in range(REPAIRINGS):
            again = torch.stack((group[:, 0], group[torch.randperm(len(group), generator=generator), 1]), 1)
            coherence, phase = phase_coherence(embedding, again[again[:, 0] != again[:, 1]])
            g["shuffled"].append(coherence.mean().item())
            g["shuffled_near"].append(near_zero(phase))
    return found


def coherence_table(groups):
    """Markdown of coherence_groups. The interval of the mean takes pairs as independent, though they share words; the range
    of the shuffled means does not."""
    rows = []
    for name, g in groups.items():
        (mean, half), quantiles = mean_interval(g["coherence"].tolist()), statistics.quantiles(g["shuffled"], n=40)
        shuffled = f"{statistics.fmean(g['shuffled']):.4f} ({quantiles[0]:.4f}-{quantiles[-1]:.4f})"
        rows.append([name, g["n"], g["words"], f"{mean:.4f} +- {half:.4f}", shuffled, f"{g['untrained']:.4f}",
                     f"{near_zero(g['phase']):.3f}", f"{statistics.fmean(g['shuffled_near']):.3f}"])  # fmt: skip
    head = ["pairs", "n", "words", "coherence", "shuffled (95 % of shuffles)", "untrained",
            "phases within pi/4 of 0", "shuffled"]  # fmt: skip
    return markdown(head, rows)


def plot_coherence(groups, out):
    """PAM figure 3: coherence against phase, a panel for each group of coherence_groups; dashed: its mean coherence, dotted:
    that of its shuffled pairs; into the PNG `out`."""
    plt = pyplot()
    fig, axes = plt.subplots(1, len(groups), figsize=(3 * len(groups), 3.2), sharey=True, squeeze=False)
    for i, (ax, (name, g)) in enumerate(zip(axes[0], groups.items())):
        ax.plot(
            g["phase"], g["coherence"], ".", ms=2, alpha=min(1, 1000 / g["n"] + 0.1), color=COLOURS[i], rasterized=True
        )
        ax.axhline(g["coherence"].mean(), ls="--", lw=1.2, color="black", label="mean")
        ax.axhline(statistics.fmean(g["shuffled"]), ls=":", lw=1.2, color="black", label="shuffled")
        ax.set(xlabel="phase of <z1|z2>, radians", title=f"{name}, n = {g['n']:,}", xlim=(-math.pi, math.pi))
    axes[0][0].set(ylabel="coherence", ylim=(0, None))
    axes[0][0].legend(fontsize=8)
    save_figure(plt, fig, out)


def diagnose(runs, logs, out, wordnet=None):
    """What the PAM paper looks for in trained models, of runs of PAM and SAM: effective rank of the memory, beside the same
    model at its initialisation; repetition of the texts in the log; phase coherence of word pairs, if `wordnet` names the folder
    of WordNet's files. Writes tables.md and figures into the folder `out`.

    Returns: the tables, but for those of ranks by layer and head, and the paths. Raises InputError: another model, no
        checkpoint, other data than the run's, word pairs of bytes."""
    import torch

    import data
    import sample

    folders = [(run if run.is_dir() else run.parent).resolve() for run in map(Path, runs)]
    if len({folder.name for folder in folders}) < len(runs):
        raise InputError("two runs have the same name, and figures are named after them: rename one")
    for folder, events in zip(folders, logs):
        s = events[0]["settings"]
        if s["model"].split(":")[0] not in ("pam", "sam"):
            raise InputError(f"{folder} is no PAM or SAM, but {s['model']}: its state is not a matrix memory")
        if not {"data", "tokens", "seq"} <= s.keys():
            raise InputError(f"{folder} was written by another version of train.py")
        if wordnet and s["tokens"] != "gpt2":
            raise InputError(
                f"{folder} was trained on bytes, and no byte is a word: --wordnet takes runs with --tokens gpt2"
            )
    pairs = dict(zip(("synonyms", "antonyms"), wordnet_pairs(wordnet))) if wordnet else {}
    models = [sample.load(folder) for folder in folders]
    with explain(f"write {out}"):
        out.mkdir(parents=True, exist_ok=True)
    rank_rows, by_head, coherence, curves, paths = [], [], [], {}, [out / "tables.md"]
    repetition_table = [["the paper", "tokens", "its sample", 1, *PAPER_REPETITION.values()]]
    for folder, events, (model, meta) in zip(folders, logs, models):
        name, s, d = folder.name, events[0]["settings"], model.config.d
        corpus = data.load(s["data"], s["seq"], tokens=s["tokens"])
        if corpus.sha256 != meta["data"]["sha256"]:
            raise InputError(f"{corpus.path} is not the data of {folder}")
        torch.manual_seed(int(s["seeds"]))  # as train.py does
        fresh = type(model)(model.config).eval()

        val = corpus.split("val")
        windows, _ = data.get_windows(val, s["seq"], data.eval_index(data.num_windows(val, s["seq"]), RANK_WINDOWS))
        settled = min(PAPER_SETTLED, s["seq"])
        positions = sorted({settled, s["seq"]} | {int(1.15**i) for i in range(int(math.log(s["seq"], 1.15)) + 1)})
        ranks = [state_ranks(m, windows, positions) for m in (model, fresh)]
        heads = [r[positions.index(t)].mean(-1) for r in ranks for t in (settled, s["seq"])]
        cells = [f"{x.mean():.2f} ({x.min():.2f}-{x.max():.2f})" for x in heads]
        rank_rows.append([name, d, len(windows), s["seq"], *cells])
        by_head += [f"#### {name}", ranks_table(positions, *ranks, settled)]
        paths.append(out / f"ranks-{name}.png")
        plot_ranks(positions, *ranks, d, paths[-1])

        encode, decode = data.codec(model.config.V)
        if s["tokens"] == "bytes":
            unit, split = "words", str.split
        else:
            unit, split = "tokens", lambda text, encode=encode: encode(text.encode())
        repetition_table += [[name, unit, *row] for row in repetition_rows(events, windows, split, decode)]
        logged = [(e["step"], repetitions([e["text"]], split)) for e in events if e["event"] == "generated"]
        means = {key: [statistics.fmean(found[key]) for _, found in logged] for key in PAPER_REPETITION}
        curves[f"{name} ({unit})"] = [step for step, _ in logged], means

        if wordnet:
            # A real embedding is a complex one without imaginary parts: its coherence is |cosine|, its phase 0 or pi.
            embeddings = [m.embedding.weight.detach() for m in (model, fresh)]
            embeddings = [torch.stack((e, 0 * e), -1) if model.real else e.unflatten(-1, (-1, 2)) for e in embeddings]
            groups = coherence_groups(*embeddings, pairs, word_tokens(corpus.split("train"), decode))
            coherence += [f"#### {name}", coherence_table(groups)]
            paths.append(out / f"coherence-{name}.png")
            plot_coherence(groups, paths[-1])
    if any(steps for steps, _ in curves.values()):
        paths.append(out / "repetition.png")
        plot_repetition(curves, paths[-1])
    at = [f"{model}after {t}" for model in ("", "untrained, ") for t in (f"{PAPER_SETTLED} tokens", "all of it")]
    text = [
        "### Effective rank of the memory S_t",
        (f"The paper: about {PAPER_RANK} of d = 64 within 10-{PAPER_SETTLED} tokens. Ours: mean over layers, heads and windows "
         "of validation text (lowest-highest head)."),
        markdown(["run", "d", "windows", "tokens", *at], rank_rows),
        "### Repetition of the generated texts",
        f"In pieces of {PAPER_SAMPLE} tokens, or words where the tokens are bytes; means over pieces and 95 % intervals.",
        markdown(["run", "unit", "texts", "n", "3-grams repeated", "4-grams repeated", "unique"], repetition_table),
        "### Phase coherence of word pairs",
        ("The paper, without numbers: synonyms lie near phase 0 at elevated coherence, random pairs anywhere. Of uniform phases "
         "a quarter is within pi/4 of 0. +-: 95 %, as if pairs that share a word were independent."),
        *(coherence or [f"Not measured: --wordnet FOLDER names WordNet's files ({WORDNET_URL})."]),
    ]  # fmt: skip
    with explain(f"write {paths[0]}"):
        every = [*text, "### Effective rank by layer and head", *by_head]
        paths[0].write_text("\n\n".join(every) + "\n", encoding="utf-8")
    return "\n\n".join(text), paths


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders or log.jsonl files")
    parser.add_argument("--out", help="folder for the tables, as tables.md, and the figures")
    parser.add_argument(
        "--diagnostics",
        help="of pam and sam: ranks of their memory, repetition of their texts, word pairs; tables and figures into this folder",
    )
    parser.add_argument(
        "--wordnet", help="WordNet's folder, for the word pairs of --diagnostics; of runs on GPT-2's tokens"
    )
    args = parser.parse_args()
    logs = [read_log(run) for run in args.runs]
    of_tasks = ["task" in events[0]["settings"] for events in logs]
    if any(of_tasks) and not all(of_tasks):
        raise InputError("logs of train.py and of tasks.py do not go into one report")
    if args.out or args.diagnostics:
        with needs("matplotlib"):
            pyplot()
    if args.wordnet and not args.diagnostics:
        raise InputError("--wordnet belongs to --diagnostics FOLDER")
    if args.out and Path(args.out).suffix in (".png", ".md", ".jpg", ".pdf", ".svg"):
        raise InputError(f"--out {args.out} must be a folder: tables and figures go into it")
    text, paths = "", []
    if args.diagnostics:
        text, paths = diagnose(args.runs, logs, Path(args.diagnostics), args.wordnet)
    if args.out or not args.diagnostics:
        check, write = (check_task, task_report) if of_tasks[0] else (check_training, training_report)
        logs = [check(events, run) for events, run in zip(logs, args.runs)]
        tables, written = write(logs, Path(args.out) if args.out else None)
        text, paths = "\n\n".join(filter(None, (text, tables))), paths + written
    print(text)
    for path in paths:
        print(f"wrote {path}")


if __name__ == "__main__":
    command_line(main)
