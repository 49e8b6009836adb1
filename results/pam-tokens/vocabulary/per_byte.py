"""Losses of runs on several vocabularies, in bits a byte of one text: the table of results/pam-tokens/vocabulary.

    python results/pam-tokens/vocabulary/per_byte.py english-utf8.txt LOG ... > tables.md

A run's loss is over the whole validation split. A token counts as many bytes as those of this split have in the mean.
"""

import sys

from merges import data, use_merges  # first: it finds the files of the repository

import report

WIDTH = 88  # of SAM, where its blocks have PAM's parameters within 3 %; at 256 the totals are equal too
EQUAL = "SAM, equal blocks", "SAM, equal total"


def bytes_a_token(text, V):
    """In the mean over the validation split of a text, in GPT-2's first tokens; 1 if the tokens are bytes."""
    if V == 256:
        return 1
    use_merges(V)
    tokens = data.load(text, 256, tokens="gpt2").split("val").tolist()
    return len(data.gpt2_encoding().decode_bytes(tokens)) / len(tokens)


def main():
    text, *paths = sys.argv[1:]
    groups = {}  # (V, rate) -> model -> seed -> events
    for path in paths:
        events = report.read_log(path)
        c, s = events[0]["config"], events[0]["settings"]
        names = ("PAM",) if "width" not in c else EQUAL if c["V"] == 256 else EQUAL[c["width"] != WIDTH :][:1]
        for name in names:
            report.add_run(groups.setdefault((c["V"], s["lr"]), {}), name, s["seeds"], events)
    losses, gaps = [], []
    for (V, rate), models in sorted(groups.items()):
        size = bytes_a_token(text, V)
        runs = [models.get(name, {}) for name in ("PAM", *EQUAL)]
        bits = [{seed: report.final_loss(events) / size for seed, events in of_model.items()} for of_model in runs]
        losses.append([V, rate, f"{size:.3f}", *(report.range_text(x.values(), 3) for x in bits)])
        both = [[x - others[seed] for seed, x in bits[0].items() if seed in others] for others in bits[1:]]
        gaps.append([V, rate, *(report.interval_text(found, "+") if found else "-" for found in both)])
    note = "Bits a byte of the whole validation split: mean over the seeds, in brackets the lowest and the highest."
    head = ["vocabulary", "rate", "bytes a token", "PAM", *EQUAL]
    print(report.markdown(head, losses, "## Losses by vocabulary", note))
    note = "Bits a byte, paired by seed; +- half of the 95 % interval (Student's t). Above 0 SAM leads."
    print("\n" + report.markdown(["vocabulary", "rate", *EQUAL], gaps, "## PAM minus SAM", note))


if __name__ == "__main__":
    main()
