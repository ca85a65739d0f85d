"""Applications that are native programs: find and check them, enter their versions [D6].

Such an application is a folder that bears its name:

    collatz/
        app.py                          the server's part: workunit() and other hooks, no compute()
        versions/
            x86_64-pc-linux-gnu/        files for one platform, named as BOINC names it
            windows_x86_64__avx2/       for a plan class of it: the same platform, other needs
                collatz.exe             the main program: named like the application, or the only
                tables.dat              file, or what version.ini says; the others lie beside it
                version.ini             may be left out

A program knows nothing of minigrid or BOINC: it reads standard input, writes standard output, and
ends with exit status 0. Instead it may read the file `in` and write the file `out`. Its directory
is empty but for the version's files and the workunit's "files". If it writes a number between 0
and 1 to the file `fraction_done`, the volunteer sees how far it is; a file `checkpoint` is still
there when it is started again.

version.ini has one section, [version], with any of the fields of `VersionSettings`.
"""

import hashlib
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import minigrid
from minigrid import PluginError, remember

FILE_BYTES_MAX = 200 << 20
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")  # The application's name comes before.
PLATFORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
KNOWN_PLATFORMS = set("""
    windows_intelx86 windows_x86_64 windows_arm64 i686-pc-linux-gnu x86_64-pc-linux-gnu
    aarch64-unknown-linux-gnu arm-unknown-linux-gnueabihf riscv64-unknown-linux-gnu
    powerpc64le-unknown-linux-gnu i686-apple-darwin x86_64-apple-darwin arm64-apple-darwin
    x86_64-pc-freebsd i686-pc-freebsd arm-android-linux-gnu aarch64-android-linux-gnu
""".split())


@dataclass(frozen=True)
class VersionSettings:
    """The [version] section of a version.ini: how the program is run, and where it may be."""

    main: str = minigrid.setting("", "file name of the main program")
    also_for: str = minigrid.setting("", "further platforms that these files are for")
    command_line: str = minigrid.setting("", "arguments, before those of the workunit")
    ncpus: float = minigrid.setting(1, "processors that it keeps busy")
    min_ncpus: float = minigrid.setting(0, "processors that a computer must have")
    min_memory: float = minigrid.setting(0, "bytes of memory that a computer must have")
    features: str = minigrid.setting("", "words its processor must list, such as avx2")
    boinc_api: bool = minigrid.setting(False, "it is linked with BOINC's own library")


@dataclass
class Version:
    """The files of an application for one platform and plan class, as they lie in a folder."""

    folder: Path
    platform: str
    plan_class: str
    files: list  # paths, the main program first
    options: dict  # as in AppVersion.options


# ---- What a server asks of a loader --------------------------------------------


def find(path):
    """Return the folders of native applications at a path: itself, or those in it but _*."""
    if path.name == "app.py":
        path = path.parent
    if (path / "versions").is_dir():
        return [path]
    if not path.is_dir():
        return []
    return sorted(p for p in path.iterdir() if (p / "versions").is_dir() and p.name[0] not in "._")


def load(path):
    """Load and check one application folder; return an Application.

    Raises PluginError naming folder or file and what was wanted.
    """
    path = Path(path).resolve()
    if not (path / "app.py").is_file():
        raise PluginError(f"{path}: app.py is missing; wanted: a Python file with workunit(i), "
                          f"beside the folder versions")
    application = minigrid.plugged("load_hooks")[-1](path / "app.py", path.name, compute=False)
    taken = {file.name.lower() for v in read_versions(path) for file in v.files}
    application.hooks["workunit"] = guard(application, application.hooks["workunit"], taken)
    return application


def enter(application, row, now):
    """Enter the versions whose files or options are new. Runs in the writer."""
    rows = []
    for version in versions_of(application.path.parent):
        platform, (main, *_) = version["platform"], version["sources"]
        if platform not in KNOWN_PLATFORMS:
            remember(now, f"{main.parent}: BOINC knows no platform '{platform}'; only computers "
                          f"that call themselves so will get this program")
        rows.append(minigrid.plugged("enter_version")[-1](
            row, application, platform, version["plan_class"], version["files"],
            version["options"], now))
    application.versions = rows


def versions_of(folder):
    """Yield what volunteers get of the application in a folder: a dict for each version.

    `files` are as enter_version() wants them, `sources` the paths that they come from. Raises
    PluginError naming folder or file and what was wanted.
    """
    folder = folder.resolve()
    for version in read_versions(folder):
        main = version.files[0]
        yield dict(app=folder.name, platform=version.platform, plan_class=version.plan_class,
                   options=version.options, sources=version.files,
                   files=[describe(folder.name, path, path == main) for path in version.files])


def describe(name, path, main):
    """Return a file as enter_version() wants it. The same content keeps its name [WIRE 17]."""
    content = read_file(path)
    file = dict(name=f"{name}_{hashlib.sha256(content).hexdigest()[:16]}_{path.name}",
                content=content, open_name=path.name)
    if main:
        file["main"] = True
    if main or path.stat().st_mode & 0o111:
        file["executable"] = True
    return file


def guard(application, workunit, taken):
    """Return workunit() refusing further input files that would hide a file of a version."""
    def guarded(i):
        given = workunit(i)
        files = given.get("files") if given else None
        for name in files if isinstance(files, dict) else ():
            if str(name).lower() in taken:
                raise PluginError(f"{application.path}: workunit({i}): 'files': '{name}' is a file "
                                  f"of a version; wanted: another name")
        return given
    return guarded


# ---- Folders and files ---------------------------------------------------------


def read_versions(folder):
    """Read what lies under versions/ of an application's folder; return a list of Version.

    Contents are not read. Raises PluginError naming folder or file and what was wanted.
    """
    versions, places = [], {}
    for path in sorted((folder / "versions").iterdir()):
        if path.name.startswith("."):
            continue
        platform, _, plan_class = path.name.partition("__")
        if not path.is_dir() or not PLATFORM.fullmatch(platform) or platform == "python" \
                or plan_class and not PLATFORM.fullmatch(plan_class) or len(plan_class) > 63:
            raise PluginError(f"{path}: wanted: a folder named like a platform of BOINC, such as "
                              f"x86_64-pc-linux-gnu, or like platform__planclass")
        found = read_version(folder, path)
        for name in [platform] + found.also_for:
            other = places.setdefault((name, plan_class), path)
            if other != path:
                raise PluginError(f"{path}: '{name}' has its program already, in {other}")
            versions.append(Version(path, name, plan_class, found.files, found.options))
    if not versions:
        raise PluginError(f"{folder / 'versions'}: there is no version; wanted: folders named like "
                          f"platforms of BOINC, such as x86_64-pc-linux-gnu, with programs in them")
    return versions


def read_version(folder, path):
    """Read one folder of versions/: its files, the main one first, its options, `also_for`."""
    given = read_ini(path / "version.ini")
    files = []
    for file in sorted(path.iterdir()):
        if not file.name.startswith(".") and file.name not in ("version.ini", "__pycache__"):
            files.append(check_file(folder, file))
    main = find_main(folder.name, path, files, given.main)
    files.remove(main)
    return SimpleNamespace(files=[main] + files, options=options_of(given),
                           also_for=given.also_for.split())


def read_ini(path):
    """Read a version.ini, where there is one. Raises PluginError naming file and key."""
    if not path.exists():
        return VersionSettings()
    try:
        given = minigrid.read_settings(path, VersionSettings, "version")
        sections = re.findall(r"(?m)^\[(.*)\]", path.read_text(encoding="utf-8"))
    except minigrid.ClientError as error:
        raise PluginError(str(error)) from None
    if sections != ["version"]:
        raise PluginError(f"{path}: wanted: one section, [version]; found {sections}")
    if not re.fullmatch(r"[ -~]{0,250}", given.command_line):
        raise PluginError(f"{path}: command_line must be at most 250 ASCII characters")
    if not 0.01 <= given.ncpus <= 1024:
        raise PluginError(f"{path}: ncpus must be between 0.01 and 1024; found {given.ncpus:g}")
    for name in given.also_for.split():
        if not PLATFORM.fullmatch(name) or name == "python":
            raise PluginError(f"{path}: also_for: '{name}' is no name of a platform; wanted: "
                              f"names such as aarch64-unknown-linux-gnu, separated by blanks")
    return given


def options_of(given):
    """Return what differs from the defaults, as AppVersion.options keeps it."""
    options = {key: getattr(given, key) for key in (
        "command_line", "ncpus", "min_ncpus", "min_memory", "boinc_api")
        if getattr(given, key) != getattr(VersionSettings, key)}
    return {**options, **({"features": given.features.split()} if given.features.split() else {})}


def check_file(folder, path):
    """Return the path of one file of a version. Raises PluginError if it cannot be shipped."""
    if not FILE_NAME.fullmatch(path.name):
        raise PluginError(f"{path}: wanted: a file name of at most 100 letters, digits and _.-, "
                          f"beginning with a letter or digit")
    try:
        minigrid.plugged("check_open_name")[-1](path.name)
        if folder not in path.resolve(strict=True).parents:
            raise PluginError(f"{path}: it leads out of {folder}; wanted: a file in it")
        found = path.stat()
    except ValueError as error:
        raise PluginError(f"{path}: {error}; wanted: another name") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13.
        raise PluginError(f"{path}: it cannot be read: {error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise PluginError(f"{path}: wanted: a file, no folder or device")
    if found.st_size > FILE_BYTES_MAX:
        raise PluginError(f"{path}: wanted: at most {FILE_BYTES_MAX} bytes; "
                          f"found {found.st_size}")
    return path


def find_main(name, folder, files, wanted):
    """Return the main program among the files of a version."""
    by_name = {path.name: path for path in files}
    if wanted:
        if wanted not in by_name:
            raise PluginError(f"{folder / 'version.ini'}: main: there is no file '{wanted}' in "
                              f"{folder}; found: {', '.join(by_name) or 'none'}")
        return by_name[wanted]
    for ending in ("", ".exe", ".sh", ".cmd", ".bat"):
        if name + ending in by_name:
            return by_name[name + ending]
    executable = [path for path in files if path.stat().st_mode & 0o111]
    for choice in (executable, files):
        if len(choice) == 1:
            return choice[0]
    raise PluginError(f"{folder}: which is the main program? wanted: a file named {name}, "
                      f"{name}.exe or {name}.sh, or only one that is executable, or 'main' in "
                      f"version.ini; found: {', '.join(by_name) or 'no files'}")


def read_file(path):
    """Return the content of a file, at most FILE_BYTES_MAX. Raises PluginError."""
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise PluginError(f"{path}: it cannot be read: {error}") from None
    if len(content) > FILE_BYTES_MAX:
        raise PluginError(f"{path}: wanted: at most {FILE_BYTES_MAX} bytes")
    return content
