"""A trained model leaves the lab: `translate.py --export` writes it for other programs, `--serve`
shows it on a page. The packages that this needs are in requirements-extras.txt.
"""

import sys
from functools import partial
from importlib.util import find_spec

from engine.errors import UserError


def start(config, trained, precision, decoder) -> None:
    """Do what translate.py's --export and --serve ask for, with the result of load_for_decoding."""
    if config.serve and (config.export or config.text):
        raise UserError("--serve takes neither a text nor --export; give one of them at a time")
    unused = {"beam", "nbest", "whole_lines"}  # the page asks for the beam, and splits lines itself
    if config.export:
        unused |= {"length_penalty", "precision"}
    if given := sorted(unused & getattr(config, "given", set())):
        action = "--export" if config.export else "--serve"
        raise UserError(f"{action} has no use for --{', --'.join(given)}; leave it out")
    if config.export:
        from tools.serving.export import export

        log = partial(print, file=sys.stderr)
        export(trained, config.export, config.text, config.quantization, log)
    else:
        need("--serve", "fastapi", "uvicorn")
        from tools.serving.server import serve

        serve(trained, precision, decoder, config)


def need(what: str, *modules: str) -> None:
    """Raise `UserError` if a package that `what` needs is not installed."""
    missing = [module for module in modules if not find_spec(module)]
    if missing:
        names = ", ".join(missing)
        raise UserError(f"{what} needs {names}; pip install -r requirements-extras.txt")
