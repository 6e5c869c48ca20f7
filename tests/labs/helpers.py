"""Shared by the labs' tests: mistakes that are one line, and processes that need each other."""

import contextlib
import re
import time
from pathlib import Path

import pytest
from conftest import HANGS, Forked, commands_of_section

from engine.errors import UserError


@contextlib.contextmanager
def refused(words: str):
    """What happens inside ends in a `UserError` of one line that holds `words`."""
    with pytest.raises(UserError, match=re.escape(words)) as error:
        yield error
    assert "\n" not in str(error.value)


def handout_commands(page: Path) -> list[tuple[str, list[str]]]:
    """(module, flags) of the commands in the table that a lab's page sets beside its handout."""
    text = page.read_text(encoding="utf-8")
    table = text.split("## The handout, line by line")[1].split("\n## ")[0]
    commands = re.findall(r"`(?:python|torchrun .*) -m (?:-- )?(labs\.[\w.]+)(.*?)`", table)
    return [(module, flags.split()) for module, flags in commands]


def handout_trainings(page: Path, module: str) -> list[tuple[str, list[str]]]:
    """(launcher, flags) of the module's commands in that section; a row may name flags only."""
    section = page.read_text(encoding="utf-8").split("## The handout, line by line")[1]
    starts = re.compile(rf"(python|torchrun) .*?-m (?:-- )?{re.escape(module)}(?: (.*))?")
    found = [starts.fullmatch(command) for command in commands_of_section(section)]
    return [(match[1], (match[2] or "").split()) for match in found if match]


def together(ranks: list[Forked]) -> None:
    """Wait until all end well. One that fails ends the others, which would wait for it."""
    begun = time.monotonic()
    while any(rank.process.exitcode is None for rank in ranks):
        if any(rank.process.exitcode for rank in ranks) or time.monotonic() > begun + HANGS:
            for rank in ranks:
                rank.process.kill()
        time.sleep(0.1)
    assert not any(rank.process.exitcode for rank in ranks), "\n".join(
        rank.output[-3000:] for rank in ranks
    )
