"""A trained model leaves the lab: `translate.py --export` writes it for other programs, `--serve` shows it on a page.

What this needs beside the lab's own packages stands in requirements-extras.txt.
"""

import sys
from importlib.util import find_spec

from engine.errors import UserError


def start(config, trained, precision, decoder) -> None:
    """Do what translate.py's flags --export and --serve ask for, with what `load_for_decoding` gave."""
    if config.serve and (config.export or config.text):
        raise UserError("--serve takes neither a text nor --export; give one of them at a time")
    idle = {"beam", "whole_lines"}  # the page asks for the beam, and cuts lines itself
    idle |= {"length_penalty", "precision"} if config.export else set()
    if given := sorted(getattr(config, "given", set()) & idle):
        raise UserError(
            f"{'--export' if config.export else '--serve'} has no use for --{', --'.join(given)}; leave it out"
        )
    if config.export:
        from tools.serving.export import export

        export(
            trained,
            config.export,
            config.text,
            config.quantization,
            lambda line: print(line, file=sys.stderr),
        )
    else:
        need("--serve", "fastapi", "uvicorn")
        from tools.serving.server import serve

        serve(trained, precision, decoder, config)


def need(what: str, *modules: str) -> None:
    """Raises `UserError` in one line if a package that `what` needs is not installed."""
    if missing := [module for module in modules if not find_spec(module)]:
        raise UserError(
            f"{what} needs {', '.join(missing)}; pip install -r requirements-extras.txt"
        )
