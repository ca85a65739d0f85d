"""Applications that are one Python file: load and check them, enter their versions.

An application imports nothing of minigrid and runs on both sides [D6]. It is a module with a few
functions, checked here by name and parameters, so that a mistake shows at the start and not when
the first volunteer has worked an hour.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import queue
import re
import sys
import threading
import traceback
from pathlib import Path

import minigrid
from minigrid import (Application, AppVersion, PluginError, canonical_json, file_entry, file_path,
                      store_file)

HOOKS = {  # hook -> its parameters; those after "?" are optional
    "workunit": ("i",),
    "compute": ("input", "?", "progress", "checkpoint", "trickle"),
    "parse": ("output",),
    "compare": ("a", "b"),
    "check_set": ("answers",),
    "assimilate": ("workunit", "answer"),
    "trickle": ("workunit", "text"),
}
REQUIRED = ("workunit", "compute")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")  # no dot, no slash: it becomes file names
OWN_NAMES = re.compile(  # in a job's directory: the clients', the start program's, Windows' devices
    r"(?i)in|out|output|(job|done|checkpoint)\.json|(stdout|stderr|progress)\.txt|fraction_done|"
    r"checkpoint|harness|(harness|app)\.py|start\.\w+|init_data\.xml|(boinc|trickle)_.*|.*\.new|"
    r".*\.|(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def find(path):
    """Return the application files at a path: itself, or every *.py of a directory but _*.py.

    Beside a folder `versions` a Python file is the server's part of native programs.
    """
    if ((path if path.is_dir() else path.parent) / "versions").is_dir():
        return []
    return sorted(path.glob("[!_]*.py")) if path.is_dir() else [path] * (path.suffix == ".py")


def load(path):
    """Load and check one application file; return an Application.

    Raises PluginError naming file, hook and what was wanted.
    """
    path = Path(path).resolve()
    return load_hooks(path, path.stem)


def load_hooks(path, name, compute=True):
    """Load and check the hooks of an application; return an Application of that name.

    Without `compute` it has none, since programs compute. Raises PluginError naming file, hook and
    what was wanted.
    """
    if not NAME.fullmatch(name):
        raise PluginError(f"{path}: an application's file name must be letters, digits and _")
    spec = importlib.util.spec_from_file_location(f"minigrid_app_{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        bounded(execute, path, module)
    except Exception as error:
        raise PluginError(f"{path}: {where_raised(error, path)}") from error
    if not compute and hasattr(module, "compute"):
        raise PluginError(f"{path}: compute() would never be called, the programs in "
                          f"{path.parent / 'versions'} are; wanted: no compute()")
    known = {name: wanted for table in minigrid.plugged("HOOKS") for name, wanted in table.items()}
    hooks = {name: check_hook(path, module, name, wanted) for name, wanted in known.items()
             if compute or name != "compute"}
    kinds = {kind: getattr(module, kind, "json") for kind in ("takes", "returns")}
    for kind, value in kinds.items():
        if value not in ("json", "bytes"):
            raise PluginError(f"{path}: {kind} must be 'json' or 'bytes', found {value!r}")
    given = {key: getattr(module, key) for key in minigrid.PARAMETERS if hasattr(module, key)}
    try:
        minigrid.plugged("check_parameters")[-1](given)
        chosen = check_constants(module)
    except ValueError as error:
        raise PluginError(f"{path}: {error}") from None
    policies = {k: v for table in minigrid.plugged("VALIDATION") for k, v in table.items()}
    policy = getattr(module, "validation", "quorum")
    if not isinstance(policy, str) or policy not in policies:
        raise PluginError(f"{path}: validation must be one of {', '.join(map(repr, policies))}; "
                          f"found {policy!r}")
    about = getattr(module, "about", "") or (module.__doc__ or "").strip().split("\n")[0]
    judge = functools.reduce(lambda judge, around: around(judge), minigrid.plugged("around_judge"),
                             policies[policy])  # such as answers known beforehand
    application = Application(name, path, str(about), wrap(path, hooks, **kinds), given, judge,
                              {**chosen, "validation": policy})
    for check in minigrid.plugged("check_application"):
        try:
            check(application)
        except ValueError as error:
            raise PluginError(f"{path}: {error}") from None
    return application


def check_constants(module):
    """Return the constants of an application's file that plugins know: {name: value}.

    Each plugin may name some: CONSTANTS = {name: check}, where check(value) returns the value as it
    is to be used or raises ValueError, which says what is wanted.
    """
    chosen = {}
    for table in minigrid.plugged("CONSTANTS"):
        for name, check in table.items():
            # A function of that name is the application's own affair.
            if hasattr(module, name) and not callable(getattr(module, name)):
                try:
                    chosen[name] = check(getattr(module, name))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{name}: {error}; found {getattr(module, name)!r:.80}") \
                        from None
    return chosen


def execute(path, module):
    """Run a file as it stands now; a cache of its bytecode may miss an edit within the second."""
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    exec(code, module.__dict__)


def check_hook(path, module, name, required):
    """Return a hook that takes what it will be given, or None where it may be left out."""
    optional = ()
    if "?" in required:
        cut = required.index("?")
        required, optional = required[:cut], required[cut + 1:]
    wanted = f"def {name}({', '.join(required)})"
    if optional:
        wanted += f", and if you like {' and '.join(optional)}"
    hook = getattr(module, name, None)
    if hook is None and name not in REQUIRED:
        return None
    if not inspect.isfunction(hook):
        raise PluginError(f"{path}: {name} is {'missing' if hook is None else 'not a function'}; "
                          f"wanted: {wanted}")
    parameters = list(inspect.signature(hook).parameters.values())
    plain = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    extra = [p.name for p in parameters[len(required):] if p.default is p.empty]
    if len(plain) < len(required) or not set(extra) <= set(optional):
        raise PluginError(f"{path}: {name}() has the wrong parameters; wanted: {wanted}; "
                          f"found: {name}{inspect.signature(hook)}")
    return hook


def enter(application, row, now):
    """Enter a new version of an application if its content is new. Runs in the writer."""
    (version,) = versions_of(application.path)
    application.versions = [enter_version(
        row, application, "python", "", version["files"], {}, now)]


def versions_of(path):
    """Return what volunteers get of the application at a path: a dict for each version.

    `files` are as enter_version() wants them, `sources` the paths that they come from.
    """
    content = path.read_bytes()
    # With the number in its name: an older content that comes back gets a new name once more.
    name = f"{path.stem}_{{}}_{hashlib.sha256(content).hexdigest()[:8]}.py"
    return [dict(app=path.stem, platform="python", sources=[path], files=[
        dict(name=name, content=content, open_name="app.py", main=True)])]


def enter_version(row, application, platform, plan_class, files, options, now):
    """Enter a version of an application for a platform if it is new; return its AppVersion.

    `row` is the App. `files`: dicts of `name` ({} in it becomes the number of the version),
    `content`, and what else a file entry has (open_name, main, executable). BOINC clients get the
    start program as well, unless options["boinc_api"]. New is what differs in any content, name
    in the job's directory or option from the last version. New content must have a new file name:
    clients keep files by name [WIRE 17]. Runs in the writer.
    """
    files = files + ([] if options.get("boinc_api") else start_program(platform))
    last = (AppVersion.select().where(AppVersion.app == row, AppVersion.platform == platform,
                                      AppVersion.plan_class == plan_class)
            .order_by(AppVersion.version_num.desc()).first())
    number = last.version_num + 1 if last else 1
    entries = [file_entry(**{**file, "name": file["name"].format(number)}) for file in files]
    if last is None or last.options != options or unnamed(last.files) != unnamed(entries):
        last = AppVersion.create(app=row, create_time=now, platform=platform, version_num=number,
                                 plan_class=plan_class, files=entries, options=options)
    for entry, file in zip(last.files, files):
        path = file_path("download", entry["name"])
        if not path.exists() or path.read_bytes() != file["content"]:
            store_file("download", entry["name"], file["content"])
    return last


def unnamed(entries):
    """Return file entries without their names."""
    return [{key: value for key, value in entry.items() if key != "name"} for entry in entries]


def start_program(platform):
    """Return the files that BOINC clients of a platform need beside a program, if any plugin does.

    They are named by their content, once for all applications.
    """
    system = "windows" if platform.startswith("windows") else "unix"
    files = []
    for shipped in minigrid.plugged("start_files")[-1:]:
        for file in shipped("both" if platform == "python" else system):
            stem, _, ending = file["name"].partition(".")
            name = f"{stem}_{hashlib.sha256(file['content']).hexdigest()[:8]}.{ending}"
            files.append({**file, "name": name, "open_name": file["name"]})
            if ending != "py":
                files[-1]["executable"] = True
    return files


# ---- Calling hooks -----------------------------------------------------------

OF_OUTPUTS = ("check_set", "parse", "compare", "check", "same")  # get what strangers have sent
PLAIN = ("check", "same")  # a forgotten `return` would put honest hosts on the black list
MISTAKES = (NameError, ImportError, MemoryError, OSError)  # no output's fault, TimeoutError neither
DOUBT_SECONDS = 600  # until a hook that never worked may show that it does, with other outputs
hooks_at_work, hooks_in_doubt = set(), set()  # who returned since it was loaded, who only raised


def wrap(path, hooks, takes, returns):
    """Return the hooks as the core calls them: bytes in, bytes out, bounded, errors explained."""
    def hook(name):
        return functools.partial(call, path, name, hooks[name])

    def workunit(i):
        return check_workunit(path, i, hook("workunit")(i), takes)

    def parse(content):
        value = decode(content, returns)
        return hook("parse")(value) if hooks["parse"] else value

    def compare(a, b):
        if hooks["compare"]:
            return bool(hook("compare")(a, b))
        return a == b if returns == "bytes" else canonical_json(a) == canonical_json(b)

    def check_set(answers):
        index = given = hook("check_set")(answers)
        if isinstance(given, tuple) and len(given) == 2:
            index, credit = given
            if credit is not None and (type(credit) not in (int, float)
                                       or not 0 <= credit < math.inf):
                raise PluginError(f"{path}: check_set() must give a credit that is a finite number "
                                  f"and not negative; found {credit!r:.80}")
        if index is not None and (type(index) is not int or not 0 <= index < len(answers)):
            raise PluginError(f"{path}: check_set() must return the index of one of its "
                              f"{len(answers)} answers, or None; found {index!r:.80}")
        return given

    def assimilate(told, content):
        answer = None if content is None else parse(content)
        if hooks["assimilate"]:
            told.input = None if told.input is None else decode(told.input, takes)
        value = hook("assimilate")(told, answer) if hooks["assimilate"] else answer
        if hooks["assimilate"] and value == "defer" or value is None and not told.errors:
            return value
        kept = value.hex() if isinstance(value, bytes) else value
        try:
            line = dict(workunit=told.name, number=told.number, errors=told.errors, answer=kept)
            return encode(line, "json").decode()
        except (TypeError, ValueError, RecursionError):
            raise PluginError(f"{path}: assimilate() must return a JSON value, 'defer' or None; "
                              f"found {value!r:.80}") from None

    def trickle(told, text):
        reply = hook("trickle")(told, text)
        if reply is not None and not isinstance(reply, str):
            raise PluginError(f"{path}: trickle() must return a text for the running job, or None; "
                              f"found {reply!r:.80}")
        return reply

    workunit.several = functools.partial(several, path, hooks["workunit"], takes)
    # Hooks of other plugins get values as they are; read_input() makes one of an input file.
    others = {name: hook(name) if hooks[name] else None for name in hooks if name not in HOOKS}
    return dict(others, read_input=functools.partial(decode, kind=takes),
                write_input=functools.partial(encode, kind=takes), workunit=workunit, parse=parse,
                compare=compare, assimilate=assimilate,
                check_set=check_set if hooks["check_set"] else None,
                trickle=trickle if hooks["trickle"] else None)


def several(path, workunit, takes, first, n):
    """Return workunit(first) and so on, up to n or None, and the PluginError that came instead.

    All are asked for in one go: to hand over each would cost more than most of them.
    """
    def ask():
        while len(given) < n and not (given and given[-1] is None):
            given.append(workunit(first + len(given)))

    given, batch, error = [], [], None
    try:
        call(path, "workunit", ask, steps=given)
    except PluginError as fault:
        error = fault
    try:
        for i, one in enumerate(given[:n], first):
            if one is not None:
                batch.append(check_workunit(path, i, one, takes))
    except PluginError as fault:
        error = fault
    return batch, error


def check_workunit(path, i, given, takes):
    """Return what workunit(i) gave, its input as bytes. Raises PluginError if it is unfit."""
    if given is None:
        return None
    if not isinstance(given, dict) or "input" not in given:
        raise PluginError(f"{path}: workunit({i}) must return a dict with 'input', or None; "
                          f"found {given!r:.80}")
    what, files = "'files'", given.get("files")
    try:
        for name in files if isinstance(files, dict) else ():
            check_open_name(name)
            if str(name).lower().endswith(CODE_SUFFIXES):
                raise ValueError(f"the file name '{name:.80}' is a program's; inputs are not "
                                 f"signed, so volunteers refuse it; wanted: another name")
        what = "input"
        return {**given, "input": encode(given["input"], takes)}
    except (ValueError, TypeError, RecursionError) as error:
        raise PluginError(f"{path}: workunit({i}): {what}: {error}") from None


# As volunteer.py knows them: what a program next to it might import or load [D11].
CODE_SUFFIXES = (".py", ".pyc", ".pyd", ".so", ".dll", ".exe", ".dylib", ".bat", ".cmd", ".pth")


def check_open_name(name):
    """Raise ValueError for a name that no further file of a job may have in its directory."""
    if OWN_NAMES.fullmatch(str(name)):
        raise ValueError(f"the file name '{name:.80}' is one that clients or systems use")


def encode(value, kind):
    """Write an input or output value as the bytes of its file. Raises ValueError, TypeError."""
    if kind == "bytes":
        if not isinstance(value, (bytes, bytearray)):
            raise TypeError(f"must be bytes, as 'takes' says; found {value!r:.60}")
        return bytes(value)
    return canonical_json(value).encode()


def decode(content, kind):
    """Read what encode() wrote. Raises ValueError, RecursionError.

    What could not be written again is refused while it is still its volunteer's fault: NaN, 1e999,
    half a surrogate pair. Later it would stop the assimilation of everything.
    """
    if kind == "bytes":
        return content
    value = json.loads(content)
    encode(value, "json")
    return value


def call(path, name, hook, *args, steps=()):
    """Call a hook of an application; `steps` is as HookThread knows it.

    Lets ValueError and OSError of those through that look at outputs: they have a meaning.
    Raises PluginError with file, hook and line for all else; but outputs come from strangers. What
    a hook cannot take that has taken others is the output's fault, and a ValueError: nobody is to
    stop an application by sending it a word where it wants a number.
    """
    meant = (ValueError, OSError) if name in OF_OUTPUTS[1:] else ()
    try:
        value = bounded(hook, *args, steps=steps)
        if name in PLAIN and type(value).__name__ not in ("bool", "bool_"):  # or numpy's
            raise PluginError(f"must return True or False; found {value!r:.80}")
    except Exception as error:
        if isinstance(error, meant) and not isinstance(error, TimeoutError):
            raise
        told = f"{path}: {name}() " + (str(error) if isinstance(error, PluginError) else
                                       f"failed: {where_raised(error, path)}")
        fault = PluginError(told)
        if name in OF_OUTPUTS and not isinstance(error, MISTAKES):
            if hook in hooks_at_work:
                fault = ValueError(told)
            else:  # It is not known yet whose fault it is.
                fault.seconds = DOUBT_SECONDS
                hooks_in_doubt.add(hook)
        raise fault from error
    if name in OF_OUTPUTS:
        hooks_at_work.add(hook)
        if hook in hooks_in_doubt:
            hooks_in_doubt.remove(hook)
            try_again(path)
    return value


def try_again(path):
    """Let all that an application was put off for be tried again: a hook of it works after all."""
    names = {a.name for a in minigrid.apps.values() if a.path == path}
    for key in [key for key in list(minigrid.project.put_off) if key[0] in names]:
        minigrid.project.put_off.pop(key, None)


def where_raised(error, path):
    """Say in one line what went wrong and at which line of the application's file."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    place = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{place}"


class HookThread:
    """Runs hooks with a bound on their time; a hook that hangs is left behind."""

    def __init__(self):
        self.tasks = None

    def __call__(self, function, *args, steps=()):
        """Return function(*args). Raises what it raises, or TimeoutError after hook_seconds.

        `steps` is what grows while the function gets on: it may take as long for each.
        """
        if self.tasks is None:
            self.tasks = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self.tasks,), daemon=True).start()
        future = concurrent.futures.Future()
        self.tasks.put((future, function, args))
        seconds, done = minigrid.project.settings.hook_seconds, -1
        while len(steps) > done:
            done = len(steps)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return future.result(seconds)
            if future.done():  # By a TimeoutError of its own, or just when its time was up.
                return future.result()
        self.tasks = None  # Nobody can stop a thread; the next hook gets a new one.
        raise TimeoutError(f"no answer within {seconds:g} s")

    @staticmethod
    def _run(tasks):
        while True:
            future, function, args = tasks.get()
            try:
                future.set_result(function(*args))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # The hook's own SystemExit, nobody's wish to stop us.
                text = f"{type(error).__name__}: {error}"
                future.set_exception(RuntimeError(text).with_traceback(error.__traceback__))


bounded = HookThread()
