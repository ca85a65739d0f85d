"""The work generator: asks applications for workunits while few results wait to be sent [S2-02].

BOINC's work generator, and X-Com's "next portion" (S3-05), in one.
"""

import hashlib
import re

from peewee import fn

from minigrid import (CHUNK, CHUNKS_MAX, FILE_NAME, GENERATOR, PARAMETERS, UNSENT, App, PluginError,
                      Result, SharedFile, Workunit, db, explain, file_entry, file_path,
                      plugged, prepared, project, put_off, save_all, store_file, store_files,
                      transition, working)


def generator(now):
    """Stage: ask applications for workunits while their stock of unsent results is low [S2-02]."""
    made = 0
    for application in working(now).values():
        for _ in range(CHUNKS_MAX * ((application.name, GENERATOR) not in project.put_off)):
            ((unsent,),) = unsent_of(application.id)
            stock = min(project.settings.stock - unsent, CHUNK)
            wanted = min(stock, *(room(application) for room in plugged("room_for_work")))
            ((number,),) = next_number_of(application.id)
            batch, fault = ask_for_work(application, number, wanted)
            store_inputs(application, number, batch)
            n, unfit = project.write(lambda: generate(application, number, batch, now)) \
                if batch else (0, None)
            made += n
            application.drained = n < stock and not (fault or unfit)  # or its window is full
            if fault or unfit:
                put_off(application, GENERATOR, now, unfit or fault)
            if n < max(wanted, 1):
                break
    return made


@prepared
def unsent_of(app_id):
    """Count the unsent results of an application."""
    return Result.select(fn.COUNT(Result.id)).where(UNSENT, Result.app == app_id).tuples()


@prepared
def next_number_of(app_id):
    """Find the number of an application's next workunit."""
    return App.select(App.next_number).where(App.id == app_id).tuples()


def ask_for_work(application, number, n):
    """Ask for up to n workunits; return them, and the error that came instead of one."""
    batch, workunit = [], application.hooks["workunit"]
    if hasattr(workunit, "several"):  # in less time than one after the other
        return workunit.several(number, n) if n > 0 else ([], None)
    try:
        while len(batch) < n:
            given = workunit(number + len(batch))
            if given is None:
                break
            batch.append(given)
    except PluginError as error:
        return batch, error
    return batch, None


def store_inputs(application, number, batch):
    """Write the large inputs of a batch: before its rows, not in the writer, where all would wait.

    What is not used then, since its numbers are not right, is written again with the next attempt.
    """
    large = {f"{application.name}_{number + k}_in": given["input"]
             for k, given in enumerate(batch) if len(given["input"]) > plugged("SMALL_BYTES")[-1]}
    if large:
        store_files("download", large)


def generate(application, number, batch, now):
    """Make workunits up to the first that is not right, and count on. Runs in the writer."""
    made, fault = 0, None
    try:
        for given in batch:
            add_work(application, number + made, given, now, stored=True)
            made += 1
    except PluginError as error:
        fault = error
    db.execute_sql("UPDATE app SET next_number = ? WHERE id = ?", (number + made, application.id))
    return made, fault


# ---- One workunit --------------------------------------------------------------


def add_work(application, number, given, now, stored=False):
    """Make one workunit with its input file and first results; return it [S2-02].

    `given` is what the hook workunit(number) returned; `stored`: a large input is written already.
    Raises PluginError if its numbers are not right. Runs in the writer. The name is made from the
    number, so that no crash can make a workunit twice.
    """
    given, project.now = {**application.parameters, **given}, now
    content, files = given.pop("input"), given.pop("files", {})
    command_line = given.pop("command_line", "")
    unknown = sorted(map(repr, set(given) - set(PARAMETERS)))
    try:
        if unknown:
            raise ValueError(f"unknown {', '.join(unknown)}; known are 'input', 'files', "
                             f"'command_line', {', '.join(map(repr, PARAMETERS))}")
        check_extras(files, command_line)
        for shape in plugged("shape_work"):  # Policies choose the number of copies.
            given = shape(application, given)
        why = given.pop("why", "")  # of a policy's choice, for those who ask
        numbers = check_parameters(given)
    except ValueError as error:
        raise PluginError(f"{application.path}: workunit({number}): {error}") from None
    credit = numbers.pop("credit", numbers["rsc_fpops_est"] / 1e8)
    name = f"{application.name}_{number}"
    if not stored or len(content) <= plugged("SMALL_BYTES")[-1]:
        plugged("keep_file")[-1]("download", f"{name}_in", content)
    shared = [share_file(application, open_name, data) for open_name, data in files.items()]
    wu = Workunit(app=application.id, name=name, number=number, create_time=now, mod_time=now,
                  input_files=[file_entry(f"{name}_in", content)] + shared,
                  command_line=command_line, transition_time=now,  # [S0-01]
                  canonical_credit=min(credit, project.settings.max_granted_credit), **numbers)
    save_all([wu])
    if why:
        explain(wu, why)
    save_all([SharedFile(name=file["name"], workunit=wu.id) for file in shared])
    save_all(transition(wu, [], now) + [wu])  # Its first copies at once: no pass need come by.
    return wu


def check_parameters(given):
    """Check the numbers of a workunit and return them completed. Raises ValueError.

    Numbers that could never end a workunit are refused here, by name: later it would only be seen
    to wait for ever.
    """
    full = {}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name} must be a number, found {value!r}")
        floor = {"priority": -2**31, "credit": 0, "complexity": 1e-9, "max_error_results": 0}.get(
            name, 1)
        ceiling = 2**31 - 1 if PARAMETERS[name] is int else 1e30
        if not floor <= value <= ceiling or PARAMETERS[name] is int and value != int(value):
            raise ValueError(f"{name} must be a {'whole ' * (PARAMETERS[name] is int)}number "
                             f"between {floor} and {ceiling:.10g}, found {value!r}")
        full[name] = PARAMETERS[name](value)
    target = full.setdefault("target_nresults", full.setdefault("min_quorum", 2))
    full.setdefault("max_success_results", max(6, target + 2))
    full.setdefault("max_total_results", max(10, full["max_success_results"] + 2))
    full.setdefault("max_error_results", min(3, full["max_total_results"]))
    full.setdefault("rsc_fpops_bound", 1000 * full.setdefault("rsc_fpops_est", 1e9))
    for pair in ("min_quorum target_nresults", "target_nresults max_success_results",
                 "max_success_results max_total_results", "max_error_results max_total_results",
                 "rsc_fpops_est rsc_fpops_bound"):
        less, more = pair.split()
        if full[less] > full[more]:
            raise ValueError(f"{less} ({full[less]:g}) must not be above {more} ({full[more]:g})")
    return full


def check_extras(files, command_line):
    """Check further input files and arguments of a workunit. Raises ValueError."""
    if not isinstance(files, dict) or not all(isinstance(v, bytes) for v in files.values()):
        raise ValueError("'files' must be a dict of file names and bytes")
    for name in files:
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name) or len(name) > 80:
            raise ValueError(f"'files': {name!r:.90} is not a plain file name")
    if not isinstance(command_line, str) or not re.fullmatch(r"[ -~]{0,250}", command_line) \
            or set(command_line) & set("&|<>^%"):  # which Windows would take for its own
        raise ValueError("'command_line' must be at most 250 ASCII characters, none of & | < > ^ %")


def share_file(application, open_name, content):
    """Store an input file named after its content, so that others may share it [WIRE 17.11]."""
    name = f"{application.name}_{hashlib.sha256(content).hexdigest()[:16]}_{open_name}"
    if not file_path("download", name).exists():
        store_file("download", name, content)
    return file_entry(name, content, open_name=open_name, sticky=True)


FIRST_STAGES = (generator,)
