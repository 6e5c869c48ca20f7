"""Write the sample data set: a few thousand Chinese-English sentence pairs, split as WMT19 is on the hub.

    python sample/write_sample.py              # writes the three parquet files beside this script
    python sample/write_sample.py --out DIR    # writes them elsewhere

The rules of grammar.py are filled with the words of lexicon.py, the hand-written pairs of sentences.py are added, and
the whole is split.  The seed is fixed: the same files come out every time.
"""

import argparse
import random
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
from grammar import TOPICS
from sentences import SENTENCES

SEED = 19
TEST_PAIRS = VALIDATION_PAIRS = 300
DRAWS = 24  # sentences to choose from for each pair; among so many, one at least is new even in a small rule
SHARED_PRONOUN_SIGNS = "你我他她"


def conflict(values):
    """True where two places hold the same word, or two pronouns of one root: not "I gave us a book"."""
    names = [value.zh for value in values]
    roots = [name[0] for name in names if name.rstrip("们") in SHARED_PRONOUN_SIGNS]
    return len(set(names)) < len(names) or len(set(roots)) < len(roots)


def agree(sentence, agreement):
    """Choose the form for the subject: "am|are|is" has three, "like|likes" two, the first for all but he and she."""

    def chosen(match):
        forms = match.group().split("|")
        return forms[agreement] if len(forms) == 3 else forms[agreement == 2]

    return re.sub(r"\w+(\|\w+)+", chosen, sentence)


def derive(rule, chance):
    """One sentence pair of the rule, both sides filled with the same words; None where the words do not go together."""
    values = {name: chance.choice(choices) for name, choices in rule.choices.items()}
    if conflict([value for value in values.values() if hasattr(value, "zh")]):
        return None
    chinese, english = rule.zh.format(**values), rule.en.format(**values)
    if "who" in values:
        english = agree(english, values["who"].agreement)
    return chinese, english[0].upper() + english[1:]


def parts(pair):
    """The Chinese characters and the English words of a pair: what the sample must show often."""
    return [*pair[0], *re.findall(r"[\w'-]+", pair[1])]


def add_pairs(pairs, rule, counts, chance):
    """Add rule.pairs new pairs; neither side may have been seen before, so a sentence has one translation only.

    Of a few sentences drawn, the one with the rarest part is kept: thus every word comes often enough to be learnt.
    """
    seen_chinese, seen_english = {zh for zh, _ in pairs}, {en for _, en in pairs}
    for _ in range(rule.pairs):
        drawn = [derive(rule, chance) for _ in range(DRAWS)]
        fresh = [
            pair
            for pair in drawn
            if pair and pair[0] not in seen_chinese and pair[1] not in seen_english
        ]
        best = min(fresh, key=lambda pair: min(counts[part] for part in parts(pair)))
        pairs.append(best)
        seen_chinese.add(best[0])
        seen_english.add(best[1])
        counts.update(parts(best))


def make_splits():
    """Test and validation hold grammar sentences only: the words of a hand-written one may occur nowhere else."""
    chance = random.Random(SEED)
    pairs, counts = list(SENTENCES), Counter()
    for rules in TOPICS.values():
        for rule in rules:
            add_pairs(pairs, rule, counts, chance)
    made = pairs[len(SENTENCES) :]
    chance.shuffle(made)
    test, made = made[:TEST_PAIRS], made[TEST_PAIRS:]
    validation, made = made[:VALIDATION_PAIRS], made[VALIDATION_PAIRS:]
    train = [*made, *SENTENCES]
    chance.shuffle(train)
    return {"train": train, "validation": validation, "test": test}


def write_split(path, pairs):
    """One struct column "translation" with the fields zh and en; the options that shape the bytes are all given."""
    form = pa.schema([("translation", pa.struct([("zh", pa.string()), ("en", pa.string())]))])
    rows = [{"zh": zh, "en": en} for zh, en in pairs]
    table = pa.Table.from_arrays([pa.array(rows, form.field("translation").type)], schema=form)
    parquet.write_table(
        table,
        path,
        version="2.6",
        data_page_version="1.0",
        compression="snappy",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        row_group_size=len(rows),
    )


def main():
    parser = argparse.ArgumentParser(description="Write the sample data set.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder for the parquet files"
    )
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, pairs in make_splits().items():
        path = out / f"{name}-00000-of-00001.parquet"
        write_split(path, pairs)
        print(f"{path}: {len(pairs)} pairs, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
