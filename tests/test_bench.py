"""The benches measure what they say: work that is really given out, reported, and found valid."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "tests" / "bench"


@pytest.fixture(scope="module")
def bench():
    """The modules of the benches, which are no package."""
    sys.path.insert(0, str(BENCH))
    import load
    import serving
    import stores
    yield load, serving, stores
    sys.path.remove(str(BENCH))


def test_the_command_takes_workunits_through_their_whole_life(tmp_path):
    """Uploads over HTTP, two copies of each workunit, three jobs in a request."""
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), "life", "--quick", "--outputs", "uploaded", "--dir",
         str(tmp_path), "--json", str(file)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["valid"] == row["total"]["reported"] == row["total"]["uploads"] == 80
    assert row["workunits"] == 40 and row["per_second"] > 0
    assert "| 2 | 3 | uploaded | 40 |" in done.stdout


def test_what_the_load_reports_is_found_valid(bench, tmp_path):
    """Both protocols, against one server: nothing is refused, lost, or sent twice."""
    _, serving, stores = bench
    with serving.project(tmp_path, [(3000, stores.UNSENT)]) as folder, \
            serving.Server(folder) as server:
        upload, reported = str(folder / "data" / "upload"), 0
        for protocol, jobs in (("xml", 1), ("json", 2)):
            figures = serving.load(server, protocol=protocol, jobs=jobs, connections=4,
                                   warm_up=1, reports=20, outputs=upload, hosts=serving.HOSTS[:8])
            total = figures["total"]
            assert total["jobs"] == total["reported"] >= 20
            assert not figures["without_work"]
            reported += total["reported"]
        server.wait_for(lambda: server.firings("valid") >= reported, seconds=120)
        assert server.firings("send") == server.firings("report success") == reported


def test_a_request_is_as_long_as_the_real_clients(bench):
    load, _, _ = bench
    talk = load.Xml(jobs=1)
    talk.signing_key = b"\n1024\n" + 8 * (b"0" * 64 + b"\n") + b".\n"
    host = load.Host("0" * 32, "1" * 32, 17, 3, [b"bench_123_0"])
    request = talk.request(host, True)
    head, _, body = request.partition(b"\r\n\r\n")
    assert abs(len(body) - 8000) < 30
    assert not re.search(rb"@[A-Z]+@", request) and body.count(b"<result>") == 1
    assert f"Content-Length: {len(body)}".encode() in head


@pytest.mark.parametrize("figure, met", [(657.0, "yes"), (656.9, "no")])
def test_a_target_is_met_or_it_is_not(bench, figure, met):
    """Three times what BOINC's server does at its best, and half of an empty route."""
    module = bench_command()
    row = dict(bench="requests", protocol="xml", jobs=1, connections=16, per_second=figure,
               boinc=(161, 219), empty_per_second=2 * 656.95)
    assert [line[3] for line in module.targets([row])] == [met, met]
    assert module.targets([{**row, "connections": 4}]) == []


def test_the_middle_of_a_run_is_reckoned_without_pauses(bench):
    _, serving, _ = bench
    import throughput
    pauses = serving.Pauses()
    pauses.found = [(3.0, 5.0), (99.0, 100.0)]
    timeline = [(at, 10 * at) for at in range(11)]
    assert throughput.middle(timeline, 100, pauses) == 40 / (7 - 3 - 2)  # 30 to 70
    assert pauses.within(4.5, 10) == 0.5 and pauses.within(5, 99) == 0


def bench_command():
    """Load the command's module, whose name is __main__."""
    spec = importlib.util.spec_from_file_location("bench_command", BENCH / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
