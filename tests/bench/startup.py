"""How long a person waits: until the server answers, until the demo has its first answer."""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import serving

IMPORTS = "import bottle, waitress, peewee, playhouse.fields, apscheduler.schedulers.background"


def startup(options):
    """Seconds from the start of a process until what somebody waits for."""
    for what, measure in (("Python imports the packages used", import_packages),
                          ("serve: new project, first answer", new_project),
                          ("serve: existing project, first answer", old_project),
                          ("demo: from nothing to the first valid answer", demo)):
        times = [measure(options.dir) for _ in range(options.starts)]
        yield dict(bench="startup", what=what, seconds=statistics.median(times), worst=max(times))


def import_packages(directory):
    """Import what the server imports: no start can be faster."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.perf_counter() - begun


def new_project(directory):
    """Start a server where there is nothing yet: it makes store, directories and keys."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        (Path(folder) / "setup.cfg").write_text("[minigrid]\nhost = 127.0.0.1\nport = 0\n")
        return first_answer(Path(folder))


def old_project(directory):
    """Start a server on a project that has been served before."""
    with serving.project(directory, last=5) as folder:
        first_answer(folder)
        return first_answer(folder)


def first_answer(folder):
    """Start a server; return when it has answered."""
    with serving.Server(folder) as server:
        server.get("/status.json")
        return time.perf_counter() - server.started


def demo(directory):
    """Start the demo, and wait until two volunteers have agreed on something."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        begun = time.perf_counter()
        process = subprocess.Popen([sys.executable, str(serving.ROOT / "minigrid.py"), "demo"],
                                   cwd=folder, stdout=subprocess.DEVNULL)
        watched = serving.Watched(Path(folder), process)
        try:
            return watched.wait_for(lambda: watched.firings("consensus")) - begun
        finally:
            process.terminate()
            process.wait(60)
