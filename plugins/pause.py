"""Pausing a project: volunteers keep their work and come back later; nothing is lost.

The text in data/paused is what they are told. The stages go on, uploads are still taken.
"""

import contextlib
import os
from pathlib import Path

from minigrid import ClientError, project, read_settings


def stopped(now):
    """Return what clients are told while the project is paused; empty while it is not."""
    if not os.path.lexists(f"{project.data}/paused"):  # asked at each request
        return ""
    try:
        text = (project.data / "paused").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:  # Just now.
        return ""
    except OSError as error:
        return f"the project has a problem on its side: {error.strerror}"
    text = " ".join(text.split())[:500]
    return text or "the project is paused for maintenance; your work is safe"


def commands(subparsers):
    """Add the commands pause and resume."""
    pause = subparsers.add_parser("pause", help="give no work for a while, and tell why")
    pause.add_argument("text", nargs="?", default="", help="what volunteers are told")
    resume = subparsers.add_parser("resume", help="end a pause")
    for parser, run in ((pause, run_pause), (resume, run_resume)):
        parser.add_argument("--data", metavar="DIR", help="data directory of the project")
        parser.set_defaults(run=run)


def folder(options):
    """Return the data directory of a project that exists. Raises ClientError."""
    data = Path(read_settings("setup.cfg", data=options.data).data)
    if not (data / "minigrid.db").exists():
        raise ClientError(f"there is no project in {data}: name its directory with --data")
    return data


@contextlib.contextmanager
def said(path):
    """Say in one sentence what cannot be done to a file. Raises ClientError."""
    try:
        yield
    except OSError as error:
        raise ClientError(f"cannot change {path}: {error.strerror}") from None


def run_pause(options):
    """Pause a project, also one that is running."""
    with said(path := folder(options) / "paused"):
        path.write_text(options.text + "\n", encoding="utf-8", errors="replace")
    print("Paused: volunteers are asked to come back later. `minigrid resume` ends it.")


def run_resume(options):
    """End a pause."""
    with said(path := folder(options) / "paused"):
        path.unlink(missing_ok=True)
    print("Resumed.")
