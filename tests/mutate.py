"""What would the tests let through? Mutants drawn by lot: one operator, comparison, constant or condition is changed.

python tests/mutate.py 60 --seed 1                     # 60 mutants of all files below; who survives is listed
python tests/mutate.py 20 text/bleu.py decoding.py     # of these files

Each runs in a copy of the repository, in a process forked from this one, which has done the heavy imports.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import datasets  # noqa: F401
import nltk.translate.bleu_score  # noqa: F401
import pytest
import sacrebleu  # noqa: F401
import torch
import torch._dynamo  # two seconds, which the first optimiser of a process would take
import transformers  # noqa: F401
from hypothesis import strategies  # noqa: F401

ROOT = Path(__file__).parent.parent
DECODING, TEXT = (
    "test_decoding.py fast/test_compiled_decoding.py",
    "text/test_prepare.py text/test_faults.py",
)
TESTS = {  # of each file, in tests/
    "train.py": "test_train.py",
    "evaluate.py": "test_faults_scripts.py test_evaluate.py",
    "decoding.py": DECODING,
    "model.py": "test_model.py",
    "loading.py": "test_loading.py test_translate.py test_evaluate.py",
    "translate.py": "test_translate.py",
    "validation.py": "test_validation.py test_train.py",
    "engine/schedule.py": "engine/test_schedule.py",
    "fast/muon.py": "fast/test_muon.py test_train.py",
    "data.py": "test_data.py test_cuda.py",
    "text/bleu.py": "text/test_bleu.py",
    "text/cleaning.py": f"text/test_cleaning.py {TEXT}",
    "text/prepare.py": TEXT,
    "text/rows.py": "text/test_rows.py",
    "text/formats.py": "text/test_rows.py",
    "text/store.py": TEXT,
    "text/subwords.py": f"text/test_subwords.py {TEXT}",
    "text/output.py": "test_faults_scripts.py test_evaluate.py",
    "fast/build.py": "fast/test_build.py",
    "fast/decoding.py": "fast/test_compiled_decoding.py",
    "fast/kernels.py": "fast/test_kernels.py",
    "fast/training.py": "fast/test_training.py",
    "fast/__init__.py": "fast/test_training.py fast/test_compiled_decoding.py",
    "fast/captured.py": "fast/test_captured.py",
    "fast/cross_entropy.py": "fast/test_cross_entropy.py",
}
PAIRS = "Add Sub, Mult FloorDiv, Div Mult, Mod Mult, Lt LtE, Gt GtE, Eq NotEq, And Or, In NotIn, Is IsNot, BitAnd BitOr"
OTHER = {
    a: b for pair in PAIRS.split(", ") for first in [pair.split()] for a, b in (first, first[::-1])
}
SILENT = {
    "flag",
    "print",
    "say",
    "log",
    "UserError",
    "ValueError",
    "IndexError",
    "progress",
}  # words, mostly


def mutants(source: str) -> list[tuple[ast.AST, str]]:
    """(node, its new text): every change of one place outside annotations, strings and messages."""
    found = []

    def visit(node: ast.AST) -> None:
        called = isinstance(node, ast.Call) and getattr(
            node.func, "id", getattr(node.func, "attr", "")
        )
        if called in SILENT or isinstance(
            node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom
        ):
            return
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    visit(child) if isinstance(child, ast.AST) else None
        old = ast.unparse(node) if isinstance(node, ast.expr) else ""
        operator = type(getattr(node, "op", None) or getattr(node, "ops", [None])[0]).__name__
        if operator in OTHER and isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare):
            new = getattr(ast, OTHER[operator])()
            changed = (
                {"ops": [new, *node.ops[1:]]} if isinstance(node, ast.Compare) else {"op": new}
            )
            found.append(
                (node, f"({ast.unparse(type(node)(**(dict(ast.iter_fields(node)) | changed)))})")
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            found.append(
                (node, f"({not node.value})" if isinstance(node.value, bool) else f"({old} + 1)")
            )
        elif isinstance(node, ast.IfExp) or (
            isinstance(node, ast.If | ast.While)
            and ast.unparse(node.test) != "__name__ == '__main__'"
        ):
            found.append((node.test, f"(not ({ast.unparse(node.test)}))"))

    visit(ast.parse(source))
    return found


def spliced(source: str, node: ast.AST, new: str) -> str:
    """The source with this node's text replaced; columns count bytes."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    first, last = (
        starts[node.lineno - 1] + node.col_offset,
        starts[node.end_lineno - 1] + node.end_col_offset,
    )
    text = b"".join(lines)
    return (text[:first] + new.encode() + text[last:]).decode()


def tests_fail(copy: Path, names: str, most_seconds: float) -> bool:
    """Whether one of these test files fails, or takes longer than `most_seconds`."""
    child, begun = os.fork(), time.monotonic()
    if not child:
        os.setsid()
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        os.chdir(copy)
        sys.path[0] = str(copy)
        os._exit(
            pytest.main(
                [
                    "-x",
                    "-p",
                    "no:randomly",
                    "-p",
                    "no:cacheprovider",
                    *(f"tests/{n}" for n in names.split()),
                ]
            )
        )
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.1)
        if time.monotonic() > begun + most_seconds:
            os.killpg(child, signal.SIGKILL)
    return ended[1] != 0


def main() -> None:
    """Draw, run, list."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("files", nargs="*", default=list(TESTS))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"] = (
        "1"  # two mutants of one second and one size would share their bytecode
    )
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    every = [
        (name, *mutant)
        for name in given.files
        for mutant in mutants((ROOT / name).read_text(encoding="utf-8"))
    ]
    seconds, caught = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        for number, (name, node, new) in enumerate(
            random.Random(given.seed).sample(every, min(given.count, len(every)))
        ):
            source, begun = (ROOT / name).read_text(encoding="utf-8"), time.monotonic()
            if TESTS[name] not in seconds:
                if tests_fail(copy, TESTS[name], 3600):
                    sys.exit(f"{TESTS[name]}: fails without any change")
                seconds[TESTS[name]] = time.monotonic() - begun
                print(f"{TESTS[name]}: {seconds[TESTS[name]]:.0f} s", file=sys.stderr)
            (copy / name).write_text(spliced(source, node, new), encoding="utf-8")
            failed = tests_fail(copy, TESTS[name], 60 + 5 * seconds[TESTS[name]])
            (copy / name).write_text(source, encoding="utf-8")
            caught += failed
            change, line = (
                f"{ast.unparse(node)} → {new}",
                source.splitlines()[node.lineno - 1].strip(),
            )
            print(
                f"{'caught  ' if failed else 'SURVIVED'} {name}:{node.lineno}  {change}    {line}",
                flush=True,
            )
            print(f"{caught} of {number + 1} caught", file=sys.stderr)


if __name__ == "__main__":
    main()
