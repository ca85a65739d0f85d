"""Measure how long reading a BOINC request takes: milliseconds for each file, and for 1 and 4 MB.

    python tests/bench/reader.py [DIR ...]

Reads the captured requests of tests/plugins/boinc/captures, or those in the directories given.
"""

import importlib.util
import sys
import timeit
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def load():
    """Load the reader alone."""
    path = ROOT / "plugins" / "boinc" / "reader.py"
    spec = importlib.util.spec_from_file_location("boinc_reader_measured", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grown(body, nbytes):
    """Repeat the results of a request until it has about so many bytes."""
    start, end = body.index(b"<result>"), body.rindex(b"</result>\n") + len(b"</result>\n")
    return body[:start] + body[start:end] * (nbytes // (end - start)) + body[end:]


def main():
    """Print a line for each request, shortest first."""
    read = load().read_request
    folders = sys.argv[1:] or [ROOT / "tests" / "plugins" / "boinc" / "captures"]
    found = [(path.name, path.read_bytes()) for folder in folders
             for path in Path(folder).glob("*.request.xml")]
    bodies = {name: body for name, body in found if b"<scheduler_request>" in body}
    most = max((body for body in bodies.values() if b"<result>" in body), key=len)
    for nbytes in 1 << 20, 4 << 20:
        bodies[f"results, {nbytes >> 20} MB"] = grown(most, nbytes)
        bodies[f"unclosed tags, {nbytes >> 20} MB"] = b"<scheduler_request>" + (
            b"<a><result><stderr_out>" * (nbytes // 23))
    for name, body in sorted(bodies.items(), key=lambda item: len(item[1])):
        number = max(1, 200_000 // len(body))
        best = min(timeit.repeat(lambda: read(body), number=number, repeat=5)) / number
        print(f"{len(body):9} bytes {best * 1e3:9.3f} ms  {name}")


if __name__ == "__main__":
    main()
