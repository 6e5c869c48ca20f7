"""What each choice of the recipe brings: the same data and minutes (or steps), one setting changed a row.

    python -m benchmarks.recipes --data $MINIDATASET --minutes 20                      # every row of RECIPES
    python -m benchmarks.recipes --data $MINIDATASET --minutes 20 --rows "default; default but norm_first"
    python -m benchmarks.recipes --data $MINIDATASET --steps 1000                      # on a busy machine

Each row is a run of train.py and one of evaluate.py on the validation split; the test split is not looked at. A finished row is
kept in `--out` (name another after a change of defaults), an interrupted one goes on from its checkpoint. Rows compare at equal
minutes of the same cores, so let nothing else run on them; those whose steps cost the same compare at equal steps, too. Loss and
BLEU are of the best checkpoint. The loss stands a character of the references, too: vocabularies cut them into other numbers.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import call, markdown
from benchmarks.peers.contest import choose
from data import load_prepared
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from tools.reporting.reading import read_run

RECIPES = {  # name: what differs from the defaults of train.py, as its flags
    "plain": {"optimizer": "adamw", "lr": 1e-3, "dropout_after": 0},  # near the paper's
    "default": {},
    "default but AdamW, lr 1e-3": {"optimizer": "adamw", "lr": 1e-3},
    "default but AdamW, lr 2e-3": {"optimizer": "adamw", "lr": 2e-3},
    "default but lr 3e-3": {"lr": 3e-3},
    "default but dropout from the start": {"dropout_after": 0},
    "default but label smoothing 0": {"label_smoothing": 0.0},
    "default but norm_first": {"norm_first": True},
    "default but all pairs": {"select": False},
    "default but batch 2048": {"tokens_per_batch": 2048},
    "default but batch 8192": {"tokens_per_batch": 8192},
    "default but 5 and 2 layers": {"num_encoder_layers": 5, "num_decoder_layers": 2},
    "default but vocabulary 8000": {"source_vocab": 8000, "target_vocab": 8000},
    "default but vocabulary 32000": {"source_vocab": 32000, "target_vocab": 32000},
}
COLUMNS = {  # of the table
    "recipe": "{row}",
    "limit": "{limit}",
    "seed": "{seed}",
    "steps": "{steps:,}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "loss/token": "{loss_per_token:.4f}",
    "loss/character": "{loss_per_character:.4f}",
    "BLEU": "{bleu:.2f}",
    "chrF": "{chrf:.1f}",
}


@dataclass
class Config:
    data: str = flag("", "as train.py's --data", "Study")
    minutes: float = flag(20.0, "training minutes of a row", "Study", above=0)
    steps: int = flag(
        0, "training steps of a row, instead of --minutes; 0: use --minutes", "Study", min=0
    )
    rows: str = flag("", "names in RECIPES, with ';' between them; default: all", "Study")
    seed: int = flag(1, "as train.py's --seed", "Study", min=0)
    out: str = flag("runs/recipes", "folder of the runs and of results.json", "Study")


def main(config: Config) -> None:
    """Run what is missing; print the table after every row."""
    names = choose(config.rows, RECIPES, "--rows", ";") or list(RECIPES)
    store = Path(config.out).resolve() / "results.json"
    store.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(store.read_text()) if store.exists() else []
    if any(result.get("data", config.data) != config.data for result in results):
        raise UserError(f"{store} holds rows of other data; give another --out")
    for name in names:
        limit = {"max_steps": config.steps} if config.steps else {"minutes": config.minutes}
        which = {"row": name, "seed": config.seed} | limit
        if not any(which.items() <= result.items() for result in results):
            results.append(which | {"data": config.data} | one_row(config, name, store.parent))
            store.write_text(json.dumps(results, indent=1))
        print(table(results), flush=True)


def one_row(config: Config, name: str, out: Path) -> dict:
    """Train and score one recipe; → its figures."""
    limit = f"{config.steps}steps" if config.steps else f"{config.minutes:g}min"
    folder = out / f"{name.replace(', ', '_').replace(' ', '-')}-{limit}-{config.seed}"
    flags = (
        {"max_steps": config.steps}
        if config.steps
        else {"max_minutes": config.minutes, "epochs": 1000}
    )
    flags |= {"seed": config.seed, "eval_every": 2000, "keep": 1, "run": str(folder)} | RECIPES[
        name
    ]
    data = {"data": config.data} if config.data else {}
    call(
        "train.py", ({"resume": str(folder)} if (folder / "config.json").exists() else flags) | data
    )
    call("evaluate.py", {"ckpt": str(folder), "split": "validation"})
    run = read_run(folder)
    steps, losses = run.series("valid/loss")
    best, score = min(losses), run.results["eval/validation-greedy"]  # of the same checkpoint
    state = json.loads((folder / "checkpoints" / "last" / "state.json").read_text(encoding="utf-8"))
    prepared = load_prepared(out / ".cache" / state["data_key"])
    tokens = int((prepared.validation.lengths["target"] + 1).sum())
    characters = sum(len(target) for _, target in prepared.validation_rows)
    return {
        "steps": steps[-1],
        "tokens_per_second": statistics.median(run.series("speed/tokens_per_second")[1]),
        "loss_per_token": best,
        "loss_per_character": best * tokens / characters,
        "bleu": score["sacrebleu"],
        "chrf": score["chrf"],
        "low": score["low"],
        "high": score["high"],
        "losses": [*zip(steps, losses)],
    }


def table(results: list[dict]) -> str:
    """Markdown, the best loss first; runs of other minutes or steps apart."""
    limits = [
        f"{row['max_steps']:,} steps" if "max_steps" in row else f"{row['minutes']:g} min"
        for row in results
    ]
    rows = [row | {"limit": limit} for row, limit in zip(results, limits)]
    rows.sort(key=lambda row: (row["limit"], row["loss_per_character"]))
    return markdown(
        [list(COLUMNS), *([form.format(**row) for form in COLUMNS.values()] for row in rows)]
    )


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "what each choice of the recipe brings")))
