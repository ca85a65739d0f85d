"""The loader of native applications: what it refuses, which files become which version."""

import os
import random
import re
import sys
import threading

import make
import pytest
from waitress.server import create_server

import minigrid as m

NOW = 1_800_000_000
LINUX, MAC, WINDOWS = "x86_64-pc-linux-gnu", "arm64-apple-darwin", "windows_x86_64"
HERE = m.Path(__file__).resolve().parents[2] / "plugins"
APP = '''"""twice: doubles what it reads."""

takes = returns = "bytes"
rsc_fpops_est = 1e7


def workunit(i):
    return {"input": b"%d" % i} if i < 3 else None
'''
SCRIPT = "#!/bin/sh\nread n; echo $((2 * n))\n"


@pytest.fixture
def loader(plugins):
    return sys.modules["minigrid_plugin_native_apps"]


@pytest.fixture
def grid(folder, monkeypatch):
    """An open project without applications; BOINC clients would get a start program of one file."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(m, "plugins", [*m.plugins, Starter()])
    with make.project(folder, {}, stock=9, min_sendwork_interval=0, request_delay=0) as project:
        project.errors.clear()  # There is no application here, it says.
        yield project


class Starter:
    """In the place of the plugin that ships the start program; it is asked last, so it wins."""

    def __init__(self):
        self.text, self.start_files = b"start", self.files

    def files(self, which):
        ending = "cmd" if which == "windows" else "sh"
        files = [{"name": f"start.{ending}", "content": self.text, "boinc": which},
                 {"name": "start.py", "content": self.text + b" py", "boinc": "both"}]
        return files


def write(folder, files, name="twice"):
    """Write an application's folder; files are named from versions/ on, None removes one."""
    folder = folder / name
    for path, content in {"app.py": APP, **files}.items():
        path = folder / (path if path == "app.py" else f"versions/{path}")
        if content is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def refused(loader, folder, at):
    """Return the sentence that refuses an application; it begins with the path that is wrong."""
    with pytest.raises(m.PluginError) as caught:
        loader.load(folder)
    text = str(caught.value)
    begin = f"{folder.resolve() / at}: "
    assert text.startswith(begin) and len(text.splitlines()) == 1, text
    return text[len(begin):]


# ---- 1. Where an application is ------------------------------------------------


def test_folders_with_versions_are_native_applications(grid, loader, tmp_path):
    write(tmp_path, {f"{LINUX}/twice": SCRIPT})
    write(tmp_path, {f"{LINUX}/x": SCRIPT}, "_not")
    (tmp_path / "other.py").write_text(make.COUNT)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "app.py").write_text(make.COUNT)
    assert m.sync_apps([tmp_path], NOW) == []
    assert sorted(m.apps) == ["other", "twice"]
    for path in (tmp_path / "twice", tmp_path / "twice" / "app.py"):
        m.apps.clear()
        assert m.sync_apps([path], NOW) == []
        assert [v.platform for v in m.apps["twice"].versions] == [LINUX]
    assert loader.find(tmp_path / "nowhere") == loader.find(tmp_path / "other.py") == []


# ---- 2. What is refused --------------------------------------------------------

PROGRAM = {f"{LINUX}/twice": SCRIPT}
INI = f"{LINUX}/version.ini"
BAD = {  # what is wrong: files, the path that is named, parts of the sentence
    "no version": ({".hidden/x": ""}, "versions", ("there is no version", LINUX)),
    "a program outside of a platform": (
        {"twice": SCRIPT}, "versions/twice", ("named like a platform", LINUX)),
    "a platform that is no name": ({"my linux/twice": SCRIPT}, "versions/my linux", ("a folder",)),
    "a plan class that is no name": ({f"{LINUX}__é/twice": SCRIPT}, f"versions/{LINUX}__é", ()),
    "the platform of Python files": ({"python/twice": SCRIPT}, "versions/python", ("platform",)),
    "no file at all": ({f"{LINUX}/.x": ""}, f"versions/{LINUX}", ("main program", "no files")),
    "two files, none of the name": (
        {f"{LINUX}/a": "", f"{LINUX}/b": ""}, f"versions/{LINUX}",
        ("which is the main program", "twice.exe", "'main' in version.ini", "found: a, b")),
    "a main program that is not there": (
        {**PROGRAM, INI: "[version]\nmain = once\n"}, f"versions/{INI}",
        ("main: there is no file 'once'", "found: twice")),
    "a key nobody knows": ({**PROGRAM, INI: "[version]\nmane = twice\n"}, f"versions/{INI}",
                           ("unknown setting 'mane'", "command_line", "features")),
    "a number that is none": ({**PROGRAM, INI: "[version]\nncpus = all\n"}, f"versions/{INI}",
                              ("'ncpus' must be a number", "'all'")),
    "no processor": ({**PROGRAM, INI: "[version]\nncpus = 0\n"}, f"versions/{INI}",
                     ("between 0.01 and 1024", "found 0")),
    "not a number": ({**PROGRAM, INI: "[version]\nmin_memory = nan\n"}, f"versions/{INI}", ()),
    "yes or no": ({**PROGRAM, INI: "[version]\nboinc_api = maybe\n"}, f"versions/{INI}",
                  ("must be yes or no",)),
    "another section": ({**PROGRAM, INI: "[versions]\nncpus = 2\n"}, f"versions/{INI}",
                        ("one section, [version]", "versions")),
    "no section": ({**PROGRAM, INI: "ncpus = 2\n"}, f"versions/{INI}", ("section",)),
    "not a text": ({**PROGRAM, INI: b"\xff\xfe"}, f"versions/{INI}", ()),
    "arguments that are not ASCII": (
        {**PROGRAM, INI: "[version]\ncommand_line = é\n"}, f"versions/{INI}", ("ASCII",)),
    "arguments without end": (
        {**PROGRAM, INI: f"[version]\ncommand_line = {'x' * 251}\n"}, f"versions/{INI}", ("250",)),
    "another platform that is no name": (
        {**PROGRAM, INI: "[version]\nalso_for = a/b\n"}, f"versions/{INI}", ("also_for: 'a/b'",)),
    "two programs for a platform": (
        {**PROGRAM, f"{MAC}/twice": SCRIPT, INI: f"[version]\nalso_for = {MAC}\n"},
        f"versions/{LINUX}", (f"'{MAC}' has its program already", f"versions/{MAC}")),
    "a folder in the folder": ({**PROGRAM, f"{LINUX}/lib/a.so": ""}, f"versions/{LINUX}/lib",
                               ("wanted: a file",)),
    "a name of the clients": ({**PROGRAM, f"{LINUX}/OUT": ""}, f"versions/{LINUX}/OUT",
                              ("clients or systems use",)),
    "a name of the start program": ({**PROGRAM, f"{LINUX}/start.py": ""},
                                    f"versions/{LINUX}/start.py", ("clients or systems use",)),
    "a device of Windows": ({f"{LINUX}/nul.txt": ""}, f"versions/{LINUX}/nul.txt", ("systems",)),
    "a name with a blank": ({f"{LINUX}/my twice": ""}, f"versions/{LINUX}/my twice",
                            ("letters, digits",)),
    "a name that is too long": ({f"{LINUX}/{'x' * 101}": ""}, f"versions/{LINUX}/{'x' * 101}",
                                ("at most 100",)),
    "compute()": ({**PROGRAM, "app.py": APP + "\n\ndef compute(input):\n    pass\n"}, "app.py",
                  ("compute() would never be called", "versions")),
    "no workunit()": ({**PROGRAM, "app.py": "x = 1\n"}, "app.py", ("workunit is missing",)),
    "a hook with wrong parameters": (
        {**PROGRAM, "app.py": APP + "\n\ndef compare(a):\n    pass\n"}, "app.py",
        ("compare(a, b)",)),
    "no app.py": ({**PROGRAM, "app.py": None}, ".", ("app.py is missing", "workunit(i)")),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_in_one_line(grid, loader, tmp_path, case):
    files, at, parts = BAD[case]
    folder = write(tmp_path, PROGRAM) if None in files.values() else tmp_path
    text = refused(loader, write(tmp_path, files), at)
    for part in parts:
        assert part in text
    assert folder


@pytest.mark.parametrize("name", ["my-app", "2fast", "a b", "a" * 41])
def test_a_folder_whose_name_cannot_be_an_applications(grid, loader, tmp_path, name):
    assert "letters, digits and _" in refused(loader, write(tmp_path, PROGRAM, name), "app.py")


def test_links_out_of_the_folder_are_refused_and_others_followed(grid, loader, tmp_path):
    folder = write(tmp_path, {**PROGRAM, f"{MAC}/readme": "x"})
    secret = tmp_path / "secret"
    secret.write_text("not for volunteers")
    link = folder / "versions" / MAC / "twice"
    link.symlink_to(secret)
    assert "leads out of" in refused(loader, folder, f"versions/{MAC}/twice")
    link.unlink()
    link.symlink_to("nothing")
    assert "cannot be read" in refused(loader, folder, f"versions/{MAC}/twice")
    link.unlink()
    link.symlink_to("twice")
    assert "cannot be read" in refused(loader, folder, f"versions/{MAC}/twice")
    link.unlink()
    link.symlink_to(f"../{LINUX}/twice")
    assert m.sync_apps([folder], NOW) == []
    (main,) = [f for v in m.apps["twice"].versions if v.platform == MAC
               for f in v.files if f.get("main")]
    assert m.file_path("download", main["name"]).read_text() == SCRIPT


def test_devices_and_giants_are_refused(grid, loader, tmp_path, monkeypatch):
    folder = write(tmp_path, PROGRAM)
    pipe = folder / "versions" / LINUX / "pipe"
    os.mkfifo(pipe)
    assert "no folder or device" in refused(loader, folder, f"versions/{LINUX}/pipe")
    pipe.unlink()
    monkeypatch.setattr(loader, "FILE_BYTES_MAX", len(SCRIPT) - 1)
    assert f"found {len(SCRIPT)}" in refused(loader, folder, f"versions/{LINUX}/twice")
    with pytest.raises(m.PluginError, match="at most"):  # It has grown since it was looked at.
        loader.read_file(folder / "versions" / LINUX / "twice")


def test_a_faulty_application_stops_no_other(grid, tmp_path):
    write(tmp_path, {"nonsense": ""}, "bad")
    write(tmp_path, PROGRAM)
    (fault,) = m.sync_apps([tmp_path], NOW)
    assert "bad/versions/nonsense" in fault and list(m.apps) == ["twice"]
    assert [text for _, text in grid.errors] == [fault]


# ---- 3. The main program -------------------------------------------------------

MAIN = {  # files (a "!" = executable), version.ini -> the main program
    "named like the application": (["a!", "twice"], "", "twice"),
    "with .exe": (["a.dll", "twice.exe"], "", "twice.exe"),
    "with .sh": (["table!", "twice.sh"], "", "twice.sh"),
    "without an ending before .exe": (["twice.exe", "twice"], "", "twice"),
    "the only one": (["z.bin"], "", "z.bin"),
    "the only executable one": (["a", "b!", "c"], "", "b"),
    "version.ini above all": (["a", "twice"], "[version]\nmain = a\n", "a"),
}


@pytest.mark.parametrize("case", MAIN)
def test_the_main_program(grid, loader, tmp_path, case):
    names, ini, wanted = MAIN[case]
    folder = write(tmp_path, {f"{LINUX}/{name.strip('!')}": name for name in names})
    for name in names:
        (folder / "versions" / LINUX / name.strip("!")).chmod(0o755 if "!" in name else 0o644)
    if ini:
        (folder / "versions" / INI).write_text(ini)
    assert m.sync_apps([folder], NOW) == []
    (version,) = m.apps["twice"].versions
    files = [f for f in version.files if "boinc" not in f]
    assert [f["open_name"] for f in files if f.get("main")] == [wanted]
    assert {f["open_name"] for f in files if f.get("executable")} == {
        wanted, *(name[:-1] for name in names if "!" in name)}
    assert {f["open_name"] for f in files} == {name.strip("!") for name in names}


# ---- 4. Versions ---------------------------------------------------------------


def versions(platform=LINUX, plan_class=""):
    """What the store holds of the application: [(version_num, {open name: file name})]."""
    rows = m.AppVersion.select().where(
        m.AppVersion.platform == platform, m.AppVersion.plan_class == plan_class)
    return [(v.version_num, {f["open_name"]: f["name"] for f in v.files})
            for v in rows.order_by(m.AppVersion.id)]


def test_files_and_their_sums(grid, tmp_path):
    folder = write(tmp_path, {f"{LINUX}/twice": SCRIPT, f"{LINUX}/table.dat": b"\0\xff"})
    assert m.sync_apps([folder], NOW) == []
    (version,) = m.apps["twice"].versions
    assert (version.version_num, version.plan_class, version.options) == (1, "", {})
    for file in version.files:
        content = m.file_path("download", file["name"]).read_bytes()
        assert file == {**m.file_entry(file["name"], content),
                        **{k: file[k] for k in file if k not in (
                            "name", "sha256", "md5", "nbytes")}}
        if "boinc" not in file:
            assert file["name"] == f"twice_{file['sha256'][:16]}_{file['open_name']}"
    assert [f["open_name"] for f in version.files] == ["twice", "table.dat", "start.sh", "start.py"]
    assert [f.get("boinc") for f in version.files] == [None, None, "unix", "both"]
    assert [f.get("main") for f in version.files] == [True, None, None, None]


def test_what_changes_is_a_new_version_and_what_does_not_keeps_its_name(grid, tmp_path):
    """[WIRE 17]"""
    files = {f"{LINUX}/twice": SCRIPT, f"{LINUX}/table": "1", f"{MAC}/twice": SCRIPT}
    contents = [{}, {}, {f"{LINUX}/twice": SCRIPT + "#"}, {f"{LINUX}/table": "2"},
                {INI: "[version]\ncommand_line = -x\n"}, {INI: "[version]\n"}]
    for change in contents:
        assert m.sync_apps([write(tmp_path, {**files, **change})], NOW) == []
        files.update(change)
    found = versions()
    assert [number for number, _ in found] == [1, 2, 3, 4, 5]
    (_, one), (_, two), (_, three), (_, four), (_, five) = found
    assert one["twice"] != two["twice"] and one["table"] == two["table"]
    assert two["twice"] == three["twice"] and two["table"] != three["table"]
    assert three == four == five
    assert m.AppVersion.get(version_num=4, platform=LINUX).options == {"command_line": "-x"}
    assert [number for number, _ in versions(MAC)] == [1]
    assert {v.version_num for v in m.apps["twice"].versions} == {5, 1}


def test_a_file_under_another_name_is_another_version(grid, tmp_path):
    folder = write(tmp_path, {f"{LINUX}/twice": SCRIPT, f"{LINUX}/a": "1"})
    m.sync_apps([folder], NOW)
    (folder / "versions" / LINUX / "a").rename(folder / "versions" / LINUX / "b")
    m.sync_apps([folder], NOW)
    assert [set(files) - {"start.sh", "start.py"} for _, files in versions()] == [
        {"twice", "a"}, {"twice", "b"}]


def test_a_file_that_is_lost_or_damaged_is_put_back(grid, tmp_path):
    folder = write(tmp_path, {f"{LINUX}/twice": SCRIPT, f"{LINUX}/table": "1"})
    m.sync_apps([folder], NOW)
    ((_, names),) = versions()
    m.file_path("download", names["twice"]).unlink()
    m.file_path("download", names["table"]).write_text("2")
    m.sync_apps([folder], NOW)
    assert len(versions()) == 1
    assert m.file_path("download", names["twice"]).read_text() == SCRIPT
    assert m.file_path("download", names["table"]).read_text() == "1"


def test_plan_classes_and_options(grid, tmp_path):
    ini = ("[version]\ncommand_line = --fast 'a b'\nncpus = 2.5\nmin_ncpus = 4\nmin_memory = 2e9\n"
           "features = avx2  fma\nboinc_api = yes\n"
           f"also_for = windows_intelx86\n    {MAC}\n")
    folder = write(tmp_path, {
        **PROGRAM, f"{LINUX}__mt/twice": SCRIPT, f"{LINUX}__mt/version.ini": ini})
    assert m.sync_apps([folder], NOW) == []
    found = {(v.platform, v.plan_class): v for v in m.apps["twice"].versions}
    assert set(found) == {(LINUX, ""), (LINUX, "mt"), ("windows_intelx86", "mt"), (MAC, "mt")}
    fast = found[LINUX, "mt"]
    assert fast.options == {"command_line": "--fast 'a b'", "ncpus": 2.5, "min_ncpus": 4,
                            "min_memory": 2e9, "features": ["avx2", "fma"], "boinc_api": True}
    assert [f["open_name"] for f in fast.files] == ["twice"]  # It needs no start program.
    assert fast.version_num == found[LINUX, ""].version_num == 1
    m.sync_apps([folder], NOW)
    assert m.AppVersion.select().count() == 4, "options come back from the store as they went"
    assert not grid.errors


def test_platforms_that_boinc_does_not_know_are_served_with_a_warning(grid, tmp_path):
    assert m.sync_apps([write(tmp_path, {"sparc-sun-solaris/twice": SCRIPT})], NOW) == []
    ((_, text),) = grid.errors
    assert "sparc-sun-solaris" in text
    assert [v.platform for v in m.apps["twice"].versions] == ["sparc-sun-solaris"]


def test_the_start_program_of_each_system(grid, tmp_path):
    """A new one is a new version of everything that BOINC clients run by it."""
    (tmp_path / "count.py").write_text(make.COUNT)
    write(tmp_path, {**PROGRAM, f"{WINDOWS}/twice.exe": "MZ"})
    assert m.sync_apps([tmp_path], NOW) == []
    ((_, linux),), ((_, windows),) = versions(), versions(WINDOWS)
    ((_, python),) = versions("python")
    assert set(linux) == {"twice", "start.sh", "start.py"}
    assert set(windows) == {"twice.exe", "start.cmd", "start.py"}
    assert linux["start.py"] == windows["start.py"] == python["start.py"]
    assert re.fullmatch(r"start_[0-9a-f]{8}\.sh", linux["start.sh"])
    assert m.file_path("download", windows["start.cmd"]).read_bytes() == b"start"
    m.plugins[-1].text = b"better"
    assert m.sync_apps([tmp_path], NOW) == []
    assert [len(versions(p)) for p in (LINUX, WINDOWS, "python")] == [2, 2, 2]
    assert versions()[1][1]["start.sh"] != linux["start.sh"]
    assert versions()[1][1]["twice"] == linux["twice"]


@pytest.mark.parametrize("name, why", [
    ("twice", "a file of a version"), ("TWICE", "a file of a version"),
    ("in", "clients or systems use"), ("trickle_up.0", "clients"), ("output.new", "clients"),
    ("app.py", "clients"), ("helper.py", "a program's"), ("LIB.DLL", "a program's")])
def test_further_input_files_hide_no_file(grid, loader, tmp_path, name, why):
    app = APP.replace('{"input": b"%d" % i}', f'{{"input": b"", "files": {{{name!r}: b""}}}}')
    application = loader.load(write(tmp_path, {**PROGRAM, "app.py": app}))
    with pytest.raises(m.PluginError, match=rf"app.py: workunit\(1\): 'files': .*{why}"):
        application.hooks["workunit"](1)
    fine = loader.load(write(tmp_path, {"app.py": app.replace(repr(name), "'fine'")}))
    assert fine.hooks["workunit"](1)["files"] == {"fine": b""}
    assert fine.hooks["workunit"](3) is None


# ---- 5. Run by volunteers ------------------------------------------------------


@pytest.fixture
def server(grid):
    """The open project behind a socket, its passes run by hand."""
    server = create_server(m.make_app(lambda: NOW), host="127.0.0.1", port=0)
    thread = threading.Thread(target=make.run_until_closed, args=(server,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.effective_port}"
    server.task_dispatcher.shutdown()
    server.close()


@pytest.fixture
def volunteer(tmp_path, plugins):
    """Return a function that starts a client in this process; it is driven by compute()."""
    sys.path.insert(0, str(HERE))
    try:
        import volunteer as v
    finally:
        sys.path.remove(str(HERE))

    def function(url, name, **options):
        options = {"platforms": ("python", LINUX), **options}
        voice = v.Voice(stream=open(tmp_path / f"{name}.log", "w"), errors=sys.stderr)
        client = v.Client(tmp_path / name, [(url, None)], v.Options(name, **options), v.Transport(),
                          random.Random(1), voice, lambda: {"p_ncpus": 1})
        client.state.p_fpops = 3e7
        client.log = voice.stream
        return client

    return function


def compute(clients, turns=3000):
    """Turn clients and server until all workunits are assimilated."""
    now = NOW
    for _ in range(turns):
        for client in clients:
            client.step(now)
            client.wait(0.01 if client.busy else 0)
        now += 0.2
        m.run_pass(NOW + int(now - NOW) + 1)
        if not m.Workunit.select().where(m.Workunit.assimilate_state != 2).exists():
            break
    else:
        pytest.fail("the workunits were not finished")
    for client in clients:
        client.leave(lambda: now)
        client.log.close()


def answers(app="twice"):
    path = m.project.data / "results" / f"{app}.jsonl"
    lines = [m.json.loads(line) for line in path.read_text().splitlines()]
    return {line["number"]: line["answer"] for line in lines}


FULL = r'''#!/bin/sh
# Needs its arguments, a file beside it, a further input, and writes `out` instead of printing.
[ "$1" = "-f" ] && [ "$2" = "two words" ] && [ "$3" = "last" ] && [ $# = 3 ] || exit 7
read n < in
[ "$(cat)" = "$n" ] || exit 8
cat table more.txt > out
echo "$n" >> out
echo nothing that counts
'''


@pytest.mark.skipif(os.name != "posix", reason="runs a shell script")
def test_two_volunteers_run_it_and_agree(server, volunteer, tmp_path):
    """Files by their open names, arguments of version and workunit, sticky inputs."""
    app = APP.replace('{"input": b"%d" % i}', '{"input": b"%d" % i, "command_line": "last", '
                      '"files": {"more.txt": b"more\\n"}}')
    folder = write(tmp_path / "apps", {
        "app.py": app, f"{LINUX}/twice": FULL, f"{LINUX}/table": "table\n",
        INI: "[version]\ncommand_line = -f \"two words\"\n"})
    assert m.sync_apps([folder], NOW) == []
    m.run_pass(NOW)
    clients = [volunteer(server, name) for name in ("ann", "bob")]
    compute(clients)
    assert answers() == {n: (b"table\nmore\n%d\n" % n).hex() for n in range(3)}
    assert m.Result.select().where(m.Result.outcome == 1).count() == 6
    assert {v.platform for v in m.AppVersion.select().join(m.Result)} == {LINUX}
    kept = sorted(p.name.rpartition("_")[2] for p in tmp_path.glob("ann/projects/*/files/*"))
    assert kept == ["more.txt", "table", "twice"]
    assert not any((tmp_path / "ann" / "slots").iterdir())


@pytest.mark.skipif(os.name != "posix", reason="runs a shell script")
def test_a_program_that_fails_is_reported_with_its_status_and_last_words(
        server, volunteer, tmp_path):
    app = APP.replace("i < 3", "i < 1") + "max_error_results = 0\n"
    script = "#!/bin/sh\necho 'no such sheep' >&2\nexit 42\n"
    m.sync_apps([write(tmp_path / "apps", {"app.py": app, f"{LINUX}/twice": script})], NOW)
    m.run_pass(NOW)
    compute([volunteer(server, "ann")])
    r = m.Result.get(m.Result.outcome == 3)
    assert (r.client_state, r.exit_status) == (3, 42)
    assert "no such sheep" in r.stderr_out and "exit status 42" in r.stderr_out


def test_who_refuses_native_programs_gets_none(server, volunteer, tmp_path):
    m.sync_apps([write(tmp_path / "apps", PROGRAM)], NOW)
    m.run_pass(NOW)
    client = volunteer(server, "ann", platforms=("python",))
    for _ in range(200):
        client.step(NOW)
        client.wait(0.01)
        if client.projects[0].n_empty:
            break
    assert client.projects[0].n_empty and not client.jobs
    assert not m.Result.select().where(m.Result.server_state != 2).exists()
    client.leave(lambda: NOW)
    client.log.close()
