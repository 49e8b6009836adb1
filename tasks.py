"""Tasks with a discrete state: train on short sequences, test on longer ones.

    python tasks.py --task mod3                                     CSP-Vanilla, 40 epochs: a minute or two
    python tasks.py --task parity --model csp-fast,rnn,hmamba --seeds 1-3
    python tasks.py --task all --model all --seeds 42-46 --epochs 300     the paper's tables 1-5

Paper: "State Propagation Also Satisfies: A Complex-Valued State-Space Model for Deterministic State Tracking" (CSP),
section 3 and appendix A. The target at t is a function of the symbols up to t; every position is scored.

parity       bits, fair and independent; their sum mod 2. mod3, mod5, ...: mod any other number from 2 to 99
dyck1        brackets; 1 as long as the prefix can be completed, 0 from the first bracket too many. Half of the
             sequences are drawn among those that stay valid to the end, half freely: 65 % of the targets are 1 at
             length 16, 59 % at 64. The paper says "balanced" and no more
dyck1-iid    all drawn freely: 29 % and 17 %
s3           not in the paper: six symbols, the permutations of three things; their product so far. Its order matters
yours        --task FILE.py:NAME, a `Task` of that file; a target NOT_SCORED takes no part
An epoch is 78 batches of 64 sequences, drawn anew. Accuracy is the mean over positions and 1,000 sequences, drawn
apart; of length 16 more than 90 % of them have been in the training too, after 40 epochs.

Models: csp-vanilla, csp-fast, rnn, complex-rnn, signed-mamba, decoder (csp.py), and the language models of this
repository, at CSP's width of 32 and 3 layers unless the spec says otherwise (hmamba:D=64). FILE.py:CLASS, a
class of yours, is of either kind. Settings as in train.py: csp-fast:scan=printed. Finished runs are kept: the same
command goes on with the others, from their beginning. No two commands work in one folder.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from itertools import accumulate, chain, permutations, product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import csp
import data
import report
import sample
from data import InputError, Parser, command_line

STEPS = 78  # full batches in 5,000 samples, CSP section 3.1
CLIP, L2 = 1.0, 1e-7  # CSP section 3.1; appendix E.3 says 1e-4
EVAL_SAMPLES, WATCH_SAMPLES = 1000, 256  # at the end; while training
EVAL_SYMBOLS = 16384  # in a pass of the evaluation
NOT_SCORED = -100  # target of a position that does not count, in training and in accuracies; cross_entropy ignores it


@dataclass
class Settings:
    """What a run depends on. Seeds are trained together, and each as if it were alone, but for rounding."""

    model: str
    task: str
    seed: int
    epochs: int
    train_length: int
    lengths: list
    batch: int
    lr: float


# ----------------------------------------------------------------------------------------------------------------------
# Tasks


@dataclass
class Task:
    symbols: int  # 0 ... symbols - 1
    classes: int
    draw: Callable  # (numpy RandomState, n, length) -> symbols, and targets or NOT_SCORED, (n, length) int64 each


@lru_cache(maxsize=16)
def chance_to_open(length):
    """p[n, depth]: the share that begins with an opening bracket, among the sequences of n more brackets that never go
    below depth 0, all equally likely."""
    ways = np.ones((length + 1, length + 2))  # ways[n, depth], scaled by 2^-n
    p = np.ones((length + 1, length + 1))
    for n in range(1, length + 1):
        up, down = ways[n - 1, 1:] / 2, np.concatenate(([0], ways[n - 1, :length] / 2))
        p[n] = (up / (up + down))[: length + 1]
        ways[n, : length + 1] = up + down
        ways[n, length + 1] = 1.0  # never reached
    return p


def draw_count(rng, n, length, modulus):
    x = rng.randint(0, 2, (n, length))
    return x, x.cumsum(1) % modulus


def draw_brackets(rng, n, length, balanced):
    x = rng.randint(0, 2, (n, length))  # 0 opens, 1 closes
    if balanced:
        p, draws, valid = chance_to_open(length), rng.random_sample((n, length)), rng.randint(0, 2, n) == 1
        depth = np.zeros(n, dtype=np.int64)
        for t in range(length):
            opens = draws[:, t] < p[length - t, depth]
            depth += np.where(opens, 1, -1)
            x[valid, t] = 1 - opens[valid]
    return x, (np.minimum.accumulate((1 - 2 * x).cumsum(1), 1) >= 0).astype(np.int64)


def draw_permutations(rng, n, length):
    group = list(permutations(range(3)))  # the first is the identity
    table = np.array([[group.index(tuple(second[i] for i in first)) for second in group] for first in group])
    x = rng.randint(0, 6, (n, length))
    return x, np.stack(list(accumulate(x.T, lambda state, new: table[state, new])), 1)


TASKS = {
    "parity": Task(2, 2, partial(draw_count, modulus=2)),
    **{f"mod{m}": Task(2, m, partial(draw_count, modulus=m)) for m in range(2, 100)},
    "dyck1": Task(2, 2, partial(draw_brackets, balanced=True)),
    "dyck1-iid": Task(2, 2, partial(draw_brackets, balanced=False)),
    "s3": Task(6, 6, draw_permutations),
}


def import_task(name):
    """The name of a task in TASKS; FILE.py:NAME, a Task of another file, becomes one."""
    if ".py:" in name:
        name, task = sample.import_name(name)
        if not all(hasattr(task, f.name) for f in fields(Task)):  # if this is the program, its Task is another class
            raise InputError(f"{name} is no Task")
        TASKS[name] = task
    return name


def make_batch(task, n, length, stream):
    """n sequences of a task of TASKS and their targets, (n, length) int64 each. `stream`, a tuple of integers, seeds
    them: numpy has frozen what RandomState draws, so that a run has the same data everywhere."""
    return TASKS[task].draw(np.random.RandomState(stream), n, length)


# ----------------------------------------------------------------------------------------------------------------------
# Models


class LanguageModel(nn.Module):
    """A model of sample.MODELS with the interface of csp.py; one seed, no dropout."""

    def __init__(self, model, classes):
        super().__init__()
        self.model, self.classes = model, classes

    def forward(self, idx, generators=None):
        return self.model(idx[0])[0][None, ..., : self.classes]


def build(spec, task, seeds):
    """The model of a spec for a task: for all seeds at once, or for the first alone if it is a language model.

    Raises InputError for an unknown task or model, and for settings that the model refuses."""
    model_class, (name, pairs) = sample.find_class(spec, csp.MODELS | sample.MODELS), sample.split_spec(spec)
    if task not in TASKS:
        known = [*(task for task in TASKS if not task.startswith("mod")), "mod2 ... mod99"]
        raise sample.unknown("unknown task", task, [*known, "all for the paper's three"])
    classes, V = TASKS[task].classes, max(csp.Config.V, TASKS[task].symbols)
    if issubclass(model_class, csp.Model):
        return csp.stack_seeds(model_class, sample.configure(spec, model_class.Config(), classes=classes, V=V), seeds)
    given, known = {pair.partition("=")[0] for pair in pairs}, {f.name for f in fields(model_class.Config)}
    pairs += [f"{key}={value}" for key, value in (("D", csp.WIDTH), ("L", 3)) if key in known and key not in given]
    model_class, config = sample.parse_spec(":".join([name, *pairs]), "tiny", max(V, classes))
    torch.manual_seed(seeds[0])
    return LanguageModel(model_class(config), classes)


def check(spec, task, seeds, device, lengths):
    """Raises InputError if the model cannot be built, or not be run as the environment variables ask, or not with
    several seeds, or if the task draws other symbols and targets than it says, at one of these lengths."""
    faults, longest = [], max(lengths)
    try:
        model, symbols, classes = build(spec, task, [0]).to(device), TASKS[task].symbols, TASKS[task].classes
        if isinstance(model, LanguageModel):
            faults = sample.step_faults(type(model.model), model.model.config, device, longest=longest)
        if not faults:
            model(torch.zeros(1, 1, 2, dtype=torch.long, device=device)).sum().backward()
            faults = sample.without_gradient(model)
            with torch.no_grad():
                model(torch.zeros(1, 1, longest, dtype=torch.long, device=device))
        if not faults and len(seeds) > 1 and isinstance(model, csp.Model):
            faults = ["several seeds at once score otherwise than each alone: each tensor needs a first axis for them "
                      "(csp.py, Linear), and what is drawn a generator for each; or give one seed"]  # fmt: skip
            with suppress(RuntimeError), torch.no_grad():
                both, *alone = (build(spec, task, of).to(device) for of in ([0, 1, 2], [0], [1], [2]))
                for p, *parts in zip(*(model.parameters() for model in (both, *alone))):
                    p.add_(0.1 * torch.randn(p.shape).to(p))  # as after some training
                    for part, own in zip(parts, p.chunk(3)):
                        part.copy_(own)
                x = torch.arange(105, device=device).view(3, 5, 7) % symbols  # no two axes alike
                scores = torch.cat([model(x[i : i + 1]) for i, model in enumerate(alone)])
                faults = [] if torch.allclose(both(x), scores, rtol=0.01, atol=0.01) else faults
        known = {*range(symbols)}, {*range(classes), NOT_SCORED}
        for n in () if faults else lengths:
            drawn = make_batch(task, 64, n, (0,))
            if len(drawn) != 2 or any(z.shape != (64, n) or z.dtype != np.int64 or {*z.flat} - values
                                      for z, values in zip(drawn, known)):  # fmt: skip
                faults = [f"draw(rng, n, length) must return symbols below {symbols}, and targets below {classes} or "
                          f"{NOT_SCORED}, int64 and (n, length) each"]  # fmt: skip
            elif any((z != again).any() for z, again in zip(drawn, make_batch(task, 64, n, (0,)))):
                faults = ["draw(rng, n, length) must take its random numbers from rng"]
            elif (drawn[1] == NOT_SCORED).all():
                faults = [f"at length {n} no position is scored"]
    except Exception as e:  # such as a backend that there is not, and whatever the code of a file does
        if isinstance(e, InputError) or data.is_out_of_memory(e):
            raise
        faults = [sample.reason(e)]
    if faults:
        raise InputError(f"{spec} on {task}: {'; '.join(faults)}")


# ----------------------------------------------------------------------------------------------------------------------
# Training


def batches(task, seeds, n, length, stream, device):
    """make_batch for each seed, stacked: x and y (S, n, length)."""
    pairs = [make_batch(task, n, length, (seed, *stream)) for seed in seeds]
    return [torch.from_numpy(np.stack(z)).to(device) for z in zip(*pairs)]


def losses(model, x, y, generators=None):
    """Mean over the scored positions of each seed, (S,); 0 where there is none."""
    each = F.cross_entropy(model(x, generators).flatten(0, 2), y.flatten(), reduction="none", ignore_index=NOT_SCORED)
    return each.view(len(y), -1).sum(1) / (y != NOT_SCORED).sum((1, 2)).clamp(min=1)


@torch.no_grad()
def accuracy(model, task, seeds, n, length, device):
    """Share of right answers among the scored positions (S,), and by position (S, length), NaN where none is scored.
    The sequences are those of epoch 0, in which nothing is trained."""
    x, y = batches(task, seeds, n, length, (0, length), device)
    answers, scored = [], y != NOT_SCORED
    for part in x.split(max(1, EVAL_SYMBOLS // length), 1):
        scores = model(part)
        answers.append(scores.argmax(-1).masked_fill(scores.isnan().any(-1), -1))  # argmax takes NaN for the largest
    right = torch.cat(answers, 1) == y  # never where none is scored
    return (right.sum((1, 2)) / scored.sum((1, 2))).cpu(), (right.sum(1) / scored.sum(1)).cpu()


def update(model, optimizer, loss):
    """One step of Adam for all seeds. loss (S,). The gradient of a seed that is not finite counts as zero.
    Returns the gradient norms before clipping, (S,)."""
    optimizer.zero_grad()
    loss.sum().backward()
    S, parameters = len(loss), [p for p in model.parameters() if p.grad is not None]  # but for frozen ones
    norm = torch.stack([p.grad.reshape(S, -1).abs().square().sum(1) for p in parameters]).sum(0).sqrt()
    finite = norm.isfinite()
    scale = torch.where(finite, CLIP / (norm + 1e-6), 0.0).clamp(max=1)
    if not finite.all():
        for p in parameters:
            p.grad.nan_to_num_(0, 0, 0)  # as 0 * inf is not 0
    for p in parameters:
        p.grad.mul_(scale[0] if S == 1 else scale.view(S, *[1] * (p.dim() - 1)))
    optimizer.step()
    return norm


@torch.no_grad()
def token_angles(model, task, seeds, device):
    """The angle that each CSP block computes at each of two symbols: the circular mean over the positions
    of 256 sequences, in radians, and the length of the mean vector (1: always the same angle). Else {}."""
    has_angle = isinstance(model, csp.CSPVanilla) and model.config.theta in ("cumulative", "step")
    if not has_angle or TASKS[task].symbols != 2:
        return {}
    x, _ = batches(task, seeds, WATCH_SAMPLES, 16, (0, 16), device)
    z, angles = model.embedding(x).unflatten(-1, (2, -1)), []
    for block in model.blocks:
        angles.append(block.angle(z).flatten(2))
        z = block(z)

    def direction(angle, chosen):
        mean = torch.polar(torch.ones_like(angle), angle)[chosen].mean()
        return [round(float(mean.angle()), 4), round(float(mean.abs()), 4)]

    return {"theta": [[[direction(a[i], x[i] == k) for k in (0, 1)] for a in angles] for i in range(len(seeds))]}


def train(s, seeds, device):
    """Trains `seeds` of one model on one task. Returns the events of each seed's log."""
    model = build(s.model, s.task, seeds).to(device)
    torch.manual_seed(seeds[0])  # of what a user's model draws
    S, start = len(seeds), time.monotonic()
    fused = device.type != "mps" and all(p.is_floating_point() for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=s.lr, weight_decay=L2, fused=fused)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]  # of the dropout
    y = batches(s.task, seeds, EVAL_SAMPLES, max(s.lengths), (0, max(s.lengths)), device)[1]
    shares = torch.bincount(y[y != NOT_SCORED], minlength=TASKS[s.task].classes) / (y != NOT_SCORED).sum()
    header = {
        "event": "header", "step": 0, "tokens": 0, "time_s": 0.0, "trained_together": seeds,
        "params": {"total": sum(p.numel() * (1 + p.is_complex()) for p in model.parameters()) // S},
        "data": {"name": s.task, "classes": TASKS[s.task].classes, "shares": shares.tolist()},
        "files": sample.file_hashes(s.task, s.model),
    } | report.provenance(device, 1)  # fmt: skip
    logs = [[header | {"settings": asdict(replace(s, seed=seed))}] for seed in seeds]

    def write(event, epoch, **values):
        """`values` hold one entry for each seed, or one for all."""
        step = epoch * STEPS
        common = {"event": event, "step": step, "tokens": step * s.batch * s.train_length,
                  "time_s": round(time.monotonic() - start, 1), "epoch": epoch}  # fmt: skip
        for i, log in enumerate(logs):
            log.append(common | {k: v[i] if isinstance(v, list) else v for k, v in values.items()})

    log_every, skipped = max(1, s.epochs // 60), torch.zeros(S, dtype=torch.int64)
    seen = []  # (loss, gradient norm) of the steps since the last log line
    bar = data.progress(total=s.epochs * STEPS, desc=f"{s.model} {s.task}", unit="step", unit_scale=False, delay=0)
    with bar:
        for epoch in range(1, s.epochs + 1):
            lr = s.lr * 0.5 * (1 + math.cos(math.pi * (epoch - 1) / s.epochs))
            optimizer.param_groups[0]["lr"] = lr
            model.train()
            for step in range(STEPS):
                x, y = batches(s.task, seeds, s.batch, s.train_length, (epoch, step), device)
                loss = losses(model, x, y, generators)
                norm = update(model, optimizer, loss)
                skipped += ~norm.isfinite().cpu()
                seen.append(torch.stack((loss.detach(), norm)))
                bar.update()
            if epoch % log_every == 0 or epoch == s.epochs:
                model.eval()
                acc, _ = accuracy(model, s.task, seeds, WATCH_SAMPLES, s.train_length, device)
                means, norms = torch.stack(seen, 1).cpu()  # (steps, S)
                watched = {"loss": means.mean(0), "grad_norm": norms.mean(0), "grad_max": norms.amax(0), "acc": acc}
                rounded = {k: [float(f"{v:.5g}") for v in values.tolist()] for k, values in watched.items()}
                write("train", epoch, lr=round(lr, 8), skipped=skipped.tolist(), **rounded)
                seen.clear()
                bar.set_postfix_str(f"acc {acc.min():.3f}-{acc.max():.3f}" if S > 1 else f"acc {acc[0]:.3f}")
    model.eval()
    for length in s.lengths:
        acc, by_position = accuracy(model, s.task, seeds, EVAL_SAMPLES, length, device)
        by_position = [[None if math.isnan(v) else round(v, 3) for v in row] for row in by_position.tolist()]
        write("eval", s.epochs, length=length, acc=[round(v, 5) for v in acc.tolist()], acc_by_pos=by_position)
    write("final", s.epochs, skipped=skipped.tolist(), **token_angles(model, s.task, seeds, device))
    return logs


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse_numbers(flag, text):
    """ "42-46" or "1,2,7" -> a list. Raises InputError."""
    numbers = []
    with suppress(ValueError):
        for part in text.split(","):
            first, _, last = part.partition("-")
            found = range(int(first), int(last if "-" in part else first) + 1)
            numbers += found if 0 < len(found) <= 10**4 else [2**32]
        if numbers and max(numbers) < 2**32:
            return numbers
    raise InputError(f"--{flag} {text!r} is no list of numbers and rising ranges, such as 42-46 or 1,2,7")


def split_names(text, all_of):
    """A comma-separated list; "all" in it stands for `all_of`."""
    return [name for part in text.split(",") for name in (all_of if part.strip() == "all" else [part.strip()])]


def log_path(out, s):
    return out / report.run_name(s.model, s.task, f"s{s.seed}") / "log.jsonl"


def read_folder(out):
    """({path: events} of the runs in the folder `out`, those of it that are finished)."""
    logs = report.read_logs(sorted(out.glob("*/log.jsonl")))
    return logs, {path: log for path, log in logs.items() if log[-1]["event"] == "final"}


def row(settings):
    """The row of the tables in which a run stands."""
    return [report.spec_label(settings[key]) for key in ("task", "model")]


def check_settings(folder, header, s):
    """Raises InputError if a run of this folder has other settings, but for the seed, or files than s."""
    files = sample.file_hashes(s.task, s.model)
    before, now = header["settings"] | header.get("files", files), asdict(s) | files
    differs = [key for key in now if key != "seed" and before.get(key) != now[key]]
    if differs:
        changed = "; ".join(f"{key} {before.get(key)} there, {now[key]} here" for key in differs)
        raise InputError(f"{folder} holds a run of other settings ({changed}): give another --out, or remove it")


def run_group(group, out, device):
    """Trains runs that differ in their seeds alone, prints how they ended, and saves their logs."""
    seeds = [s.seed for s in group]
    trained = train(group[0], seeds, device)
    mean = {n: statistics.fmean(report.accuracies(events)[n] for events in trained) for n in group[0].lengths}
    skipped = sum(events[-1]["skipped"] for events in trained)
    text = f"{group[0].model} on {group[0].task}, seeds {','.join(map(str, seeds))}: {trained[0][-1]['time_s']:.0f} s, "
    text += f"accuracy {', '.join(f'{v:.3f} at {n}' for n, v in mean.items())}"
    text += f"; {skipped} gradients were not finite, and counted as zero" if skipped else ""
    with suppress(OSError):  # other runs are to follow
        print(text, flush=True)
    failed = []
    for path, events in zip([log_path(out, s) for s in group], trained):
        try:
            report.write_log(path, events)
        except InputError as e:  # such as a full disk: what was computed is not lost
            failed.append(str(e))
            with suppress(InputError, OSError):  # there may be no such folder
                spare = Path(tempfile.gettempdir(), f"nanohilbert-{os.getpid()}")
                report.write_log(spare / path.parent.name / path.name, events)
                failed[-1] += f": it is in {spare}"
    if failed:
        raise InputError(failed[0])


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--task", default="mod3", help="a task, a comma-separated list, or all (default: %(default)s)")
    parser.add_argument("--model", default="csp-vanilla", help="a model spec, a list, or all (default: %(default)s)")
    parser.add_argument("--seeds", default="42", help="seeds, such as 42-46 or 1,2,7 (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="the paper trains 300 (default: %(default)s)")
    parser.add_argument("--train_length", type=int, default=16, help="length to train at (default: %(default)s)")
    parser.add_argument("--lengths", default="16,32,48,64", help="lengths to test at (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step and seed (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="of Adam, cosine to 0 (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    parser.add_argument("--out", help="folder for runs, tables and figures (default: runs/tasks-EPOCHS)")
    args = parser.parse_args()
    seeds, lengths = parse_numbers("seeds", args.seeds), sorted({*parse_numbers("lengths", args.lengths)})
    models = split_names(sample.import_models(args.model, (csp.Model,)), csp.MODELS)
    tasks = [import_task(name) for name in split_names(args.task, report.PAPER_TASKS)]
    numbers = {"epochs": args.epochs, "train_length": args.train_length, "lengths": lengths[0], "batch": args.batch}
    lists = {"model": [*map(report.run_name, models)], "task": [*map(report.run_name, tasks)], "seeds": seeds}
    for is_wrong, message in (
        *((value < 1, f"--{name} must be at least 1") for name, value in numbers.items()),
        (not 0 < args.lr < math.inf, "--lr must be above 0"),
        *((len({*values}) < len(values), f"--{name} gives two runs one name") for name, values in lists.items()),
    ):
        if is_wrong:
            raise InputError(message)
    device = sample.pick_device(args.device)
    out = report.parse_out(f"runs/tasks-{args.epochs}" if args.out is None else args.out)
    protocol = args.epochs, args.train_length, lengths, args.batch, args.lr
    if (out / "log.jsonl").exists():
        raise InputError(f"--out {out} is the folder of another run: name one of its own")
    groups = []
    for task, spec in product(tasks, models):
        check(spec, task, seeds, device, {args.train_length, *lengths})  # a fault of the last would end hours of work
        runs = [Settings(spec, task, seed, *protocol) for seed in seeds]
        together = issubclass(sample.find_class(spec, csp.MODELS | sample.MODELS), csp.Model)
        groups += [runs] if together else [[s] for s in runs]
    with data.explain(f"write into {out}"):
        out.mkdir(parents=True, exist_ok=True)
    alike = report.protocol([{"settings": vars(groups[0][0])}])
    with data.hold(out):
        logs, finished = read_folder(out)
        for s, (path, log) in product(chain(*groups), logs.items()):
            in_tables = path in finished and report.protocol(log) == alike
            if path == log_path(out, s) or (in_tables and row(log[0]["settings"]) == row(vars(s))):
                check_settings(path.parent, log[0], s)
        missing = [[s for s in group if log_path(out, s) not in finished] for group in groups]
        kept = sum(map(len, groups)) - sum(map(len, missing))
        if kept:
            data.note(f"finished runs kept in {out}: {kept}; a new --out trains anew")
        try:
            for group in filter(None, missing):
                run_group(group, out, device)
        except KeyboardInterrupt:
            data.note(f"stopped; finished runs are kept in {out}: the same command begins the others anew")
            raise
        # All that is finished here under this protocol, so that the tables hold more than the last command's runs.
        _, finished = read_folder(out)
        logs = {path: log for path, log in finished.items() if report.protocol(log) == alike}
        if len(logs) < len(finished):
            note = f"the tables leave out {len(finished) - len(logs)} finished runs of other settings in {out}"
            data.note(f"{note}: a new --out keeps the tables of both")
        text, figures = report.tables_and_figures(logs)
        shown = text if len(logs) <= 12 else text.split("### Every seed")[0].rstrip()  # the file has all
        report.show_report(shown, figures, out, text)


if __name__ == "__main__":
    command_line(main)
