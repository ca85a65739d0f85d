"""The pages that links in BOINC Manager open, under the addresses they have on BOINC's web sites.

They are public and need no login. So they never show an e-mail address, a key, or the real name of
a BOINC client's computer, and not who else holds a copy, or what was found, before its workunit is
decided and no copy of it is out: a spot check looks like any other task. Each costs a few look-ups
in indexes, however much is in the store.
"""

import functools
import heapq
import re
import time
from collections import Counter

import bottle
from peewee import JOIN

from minigrid import (IN_PROGRESS, UNSENT, App, AppVersion, ClientError, ErrorMask, Host, Outcome,
                      Result, ServerState, User, ValidateState, Workunit, apps, plugged, project)

from .stats import elements, recent_credit, user_values, xml_answer

ROWS = 20  # of a list on one page
OFFSET_MAX = 10_000  # as far as lists can be turned over
COUNTED = 1000  # tasks of a computer that are counted by state: the last ones sent
TOP = 100  # volunteers or computers in the lists of those with most credit
COPIES_MAX = 200  # copies of a workunit that are shown
NAV = (("/top_users.php", "volunteers"), ("/top_hosts.php", "computers"),
       ("/apps.php", "applications"), ("/home.php", "your account"))
KINDS = dict.fromkeys(("Credit", "Credit a day, recently", "A day, recently"), "number")
NUMBER = {"inputmode": "numeric", "pattern": "[0-9]+"}  # of a field of a form
HOME = re.compile(r"(/home/|/Users/|\b[A-Za-z]:\\Users\\)[^/\\\n]{1,64}(?=[/\\])")
S, O, V = ServerState, Outcome, ValidateState
JUDGED = {  # validate_state of a copy that came back -> in a word, and in a sentence
    V.INIT: ("waiting", "It came back, and waits to be compared with others."),
    V.VALID: ("valid", "It agrees with what other computers found."),
    V.INVALID: ("invalid", "It differs from what other computers agree on."),
    V.NO_CHECK: ("not compared", "Its workunit was given up, so nobody will compare it."),
    V.INCONCLUSIVE: ("no agreement yet", "It was compared, but not enough copies agree yet."),
    V.TOO_LATE: ("too late", "It came when the answer it could be compared with was gone."),
}
ENDED = {  # outcome of a copy that did not come back as a success
    O.INIT: ("over", "It is over."),
    O.COULDNT_SEND: ("not sent", "Too many computers asked that are too small or slow for it."),
    O.CLIENT_ERROR: ("error", "Its computer could not compute it."),
    O.NO_REPLY: ("no reply", "Its computer did not report it by the deadline."),
    O.DIDNT_NEED: ("not needed", "The workunit was over before this copy was sent."),
    O.VALIDATE_ERROR: ("unreadable", "Its output is missing, or cannot be read."),
    O.CLIENT_DETACHED: ("left", "Its computer left the project, or lost its files."),
}
EXITS = {  # exit statuses that BOINC's clients give themselves [WIRE 12]
    -226: "the program stopped too often without a result", -187: "the output was not uploaded",
    -186: "a file could not be downloaded, or had the wrong content",
    -185: "the program could not be started", 0: "its output was missing, or too large",
    194: "the program did not finish", 195: "the program failed",
    196: "it used too much disk space", 197: "it took too long", 198: "it used too much memory",
    200: "it was not started before its deadline", 201: "a graphics processor was missing",
    202: "the project ended it", 203: "its user ended it",
}
LATER = ("came back", "What was found is told when its workunit is decided and no copy is out.")
GIVEN_UP = {
    ErrorMask.COULDNT_SEND_RESULT: "no computer was large and fast enough",
    ErrorMask.TOO_MANY_ERROR_RESULTS: "too many copies ended in an error",
    ErrorMask.TOO_MANY_SUCCESS_RESULTS: "too many copies came back without agreeing",
    ErrorMask.TOO_MANY_TOTAL_RESULTS: "too many copies were made",
    ErrorMask.CANCELLED: "the project does not want it any more",
    ErrorMask.NO_CANONICAL_RESULT: "its answer was lost",
}


def routes(app, clock):
    """Add the pages; each is made by one function of the query and the time."""
    pages = {
        "/home.php": home, "/show_user.php": show_user, "/hosts_user.php": hosts_user,
        "/show_host_detail.php": show_host, "/results.php": results, "/result.php": show_result,
        "/workunit.php": show_workunit, "/top_users.php": top_users, "/top_hosts.php": top_hosts,
        "/apps.php": show_apps,
    }
    for path, make in pages.items():
        app.route(path, callback=functools.partial(answer, make, clock))


def answer(make, clock):
    """Return the page that `make` makes of the query just now, or one that says what is wrong."""
    now, given, status = clock(), bottle.request.query, 200
    try:
        if make is show_user and given.get("format") == "xml":
            return xml_answer(user_xml(given, now))
        title, *parts = make(given, now)
    except ClientError as error:
        project.counts["refused requests"] += 1
        title, parts, status = "Not found", [dict(texts=(f"Sorry: {error}.",))], error.status
    return plugged("show_page")[-1](title, parts, now, status, allow={"form-action": "'self'"})


# ---- Parameters, rows and words -------------------------------------------------


def whole(given, name, default=None):
    """Return a parameter that must be a whole number. Raises ClientError."""
    text = given.get(name, "" if default is None else str(default))
    if not re.fullmatch("[0-9]{1,15}", text):
        raise ClientError(f"this page needs a number: ?{name}=1")
    return int(text)


def find(model, number, noun, *more):
    """Return the row of a number. Raises ClientError."""
    row = model.get_or_none(model.id == number, *more)
    if row is None:
        raise ClientError(f"there is no {noun} {number} here (any more)", 404)
    return row


def page_of(query, given, address):
    """Return the rows of a query that this page of its list shows, and links to its neighbours."""
    offset = min(whole(given, "offset", 0), OFFSET_MAX)
    rows, links = list(query.limit(ROWS + 1).offset(offset)), []
    if offset:
        links.append(("previous page", f"{address}&offset={max(offset - ROWS, 0)}"))
    if len(rows) > ROWS and offset + ROWS <= OFFSET_MAX:
        links.append(("next page", f"{address}&offset={offset + ROWS}"))
    return rows[:ROWS], tuple(links)


def date(t):
    """Write a time; people of all time zones read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(t)) if t else ""


def moment(t):
    """Write a time for a column whose head says UTC: there it would break each line in two."""
    return date(t)[:-len(" UTC")]


def past(t, now):
    """Write a time, and how long ago it is."""
    return f"{date(t)} ({plugged('ago')[-1](now - t)})" if t else "never"


def span(seconds):
    """Write a duration; short ones with fractions."""
    return plugged("span")[-1](int(seconds)) if seconds >= 10 else f"{seconds:.1f} seconds"


def amount(number):
    """Write an amount of credit."""
    return f"{number:,.1f}"


def user_link(user):
    """Return a link to a volunteer."""
    return plugged("volunteer_name")[-1](user), f"/show_user.php?userid={user.id}"


def host_link(host):
    """Return a link to a computer."""
    return plugged("computer_name")[-1](host), f"/show_host_detail.php?hostid={host.id}"


def standing(server_state, outcome, validate_state):
    """Say how a copy stands: (a word, a sentence)."""
    if server_state == S.IN_PROGRESS:
        return "in progress", "A computer has it."
    if server_state != S.OVER:
        return "unsent", "It waits for a computer."
    return JUDGED[validate_state] if outcome == O.SUCCESS else ENDED[outcome]


def state_of(r, told=True):
    """Return how a result stands; not what was found, unless all may know."""
    if not told and r.outcome in (O.SUCCESS, O.VALIDATE_ERROR):
        return LATER
    if not told and r.outcome == O.DIDNT_NEED:  # That would tell that it is decided.
        return standing(S.UNSENT, O.INIT, V.INIT)
    return standing(r.server_state, r.outcome, r.validate_state)


def why_failed(r):
    """Say why a computer could not compute a result; empty if it could, or does not say."""
    if r.outcome != O.CLIENT_ERROR:
        return ""
    why = EXITS.get(r.exit_status, "the program ended with an error")
    return f"{why} (exit status {r.exit_status})"


def program_of(r):
    """Name the version of the application that a result was sent with."""
    version = r.app_version
    if version is None:
        return ""
    extra = f" ({version.plan_class})" if version.plan_class else ""
    return f"{r.app.name} {version.version_num}, {version.platform}{extra}"


def is_told(wu):
    """Say whether all may know who computes a workunit, and what was found."""
    return wu.id in plugged("told")[-1]([wu])


# ---- Volunteers and computers -----------------------------------------------------


def home(given, now):
    """What a volunteer looks for first; no login, so it cannot know who asks."""
    return "Find your account", dict(texts=(
        "All pages here are public, so there is no login: your password is for BOINC Manager only.",
        "The links of this project in BOINC Manager lead straight to your own pages. Or give a "
        "number, or look for your name in the lists above."),
        forms=(("/show_user.php", "userid", "Number of a volunteer", NUMBER),
               ("/show_host_detail.php", "hostid", "Number of a computer", NUMBER),
               ("/result.php", "resultid", "Number of a task", NUMBER)))


def show_user(given, now):
    """Show what is known of a volunteer."""
    user = find(User, whole(given, "userid"), "volunteer")
    return plugged("volunteer_name")[-1](user), dict(facts=(
        ("Volunteer", f"number {user.id}"), ("Joined", past(user.create_time, now)),
        ("Credit", amount(user.total_credit)),
        ("Credit a day, recently", amount(recent_credit(user, now))),
        ("Computers", ("list of computers", f"/hosts_user.php?userid={user.id}")),
        ("Tasks", ("list of tasks", f"/results.php?userid={user.id}"))))


def user_xml(given, now):
    """Return show_user.php in BOINC's XML form; what is wrong, too."""
    try:
        values = user_values(find(User, whole(given, "userid"), "volunteer"), now)
    except ClientError as error:
        return elements("error", {"error_num": -136, "error_msg": error})
    return elements("user", {**values, "teamid": 0, "has_profile": 0})


def hosts_user(given, now):
    """List the computers of a volunteer, those heard of last first."""
    user = find(User, whole(given, "userid"), "volunteer")
    hosts, links = page_of(Host.select().where(Host.user == user).order_by(
        Host.rpc_time.desc(), Host.id.desc()), given, f"/hosts_user.php?userid={user.id}")
    rows = [(host_link(host), processor(host), system(host), amount(host.total_credit),
             amount(recent_credit(host, now)), plugged("ago")[-1](now - host.rpc_time),
             ("tasks", f"/results.php?hostid={host.id}")) for host in hosts]
    return f"Computers of {plugged('volunteer_name')[-1](user)}", dict(
        texts=() if rows else ("None yet.",), rows=rows, kinds=KINDS,
        links=(user_link(user), *links), head=(
            "Computer", "Processor", "System", "Credit", "A day, recently", "Last contact", ""))


def processor(host):
    """Name a computer's processors."""
    model = f"{host.p_vendor} {host.p_model}".strip()
    return f"{host.p_ncpus} x {model}" if model else str(host.p_ncpus)


def system(host):
    """Name a computer's operating system."""
    return f"{host.os_name} {host.os_version}".strip()


def show_host(given, now):
    """Show what is known of a computer, how its last tasks went, and why it got no work."""
    host = find(Host, whole(given, "hostid"), "computer")
    size = plugged("size")[-1]
    states = Counter(standing(*row)[0] for row in Result.select(
        Result.server_state, Result.outcome, Result.validate_state).where(Result.host == host)
        .order_by(Result.id.desc()).limit(COUNTED).tuples())
    number = sum(states.values())
    last = f"the last {number:,}" if number == COUNTED else "all"
    facts = (
        ("Volunteer", user_link(host.user)), ("Joined", past(host.create_time, now)),
        ("Last contact", past(host.rpc_time, now)), ("Credit", amount(host.total_credit)),
        ("Credit a day, recently", amount(recent_credit(host, now))),
        ("Processors", processor(host)), ("Operating system", system(host)),
        ("Memory", size(int(host.m_nbytes))), ("Free disk space", size(int(host.d_free))),
        ("Measured speed", f"{host.p_fpops / 1e9:.2f} billion operations a second and processor"),
        ("Client", f"BOINC {host.client_version}" if host.client_version[:1].isdigit()
         else host.client_version),
        ("From sending to report", host.avg_turnaround and span(host.avg_turnaround)),
        ("Got no work last time", host.why_no_work))
    return plugged("computer_name")[-1](host), dict(facts=facts), dict(
        title=f"Tasks in the store ({last})", facts=tuple(states.most_common()),
        texts=() if states else ("None.",),
        links=(("list of tasks", f"/results.php?hostid={host.id}"),))


def top_users(given, now):
    """List the volunteers with most credit."""
    return "Volunteers", top_list(User, given, now, ("Volunteer", "Joined (UTC)"),
                                  lambda user: (user_link(user), moment(user.create_time)))


def top_hosts(given, now):
    """List the computers with most credit."""
    return "Computers", top_list(Host, given, now, ("Computer", "Volunteer", "Processor", "System"),
                                 lambda host: (host_link(host), user_link(host.user),
                                               processor(host), system(host)))


def top_list(model, given, now, head, cells):
    """Return the part of those with most credit, recently or altogether."""
    kind = "total_credit" if given.get("sort_by") == "total_credit" else "expavg_credit"
    order = top(model, kind, now // 60, project.write)
    rows_by_id = {row.id: row for row in model.select().where(model.id.in_(order))}
    rows = [(n, *cells(row), amount(recent_credit(row, now)), amount(row.total_credit))
            for n, row in enumerate((rows_by_id[i] for i in order if i in rows_by_id), 1)]
    path = "/top_users.php" if model is User else "/top_hosts.php"
    return dict(rows=rows, head=("", *head, "Credit a day, recently", "Credit"), kinds=KINDS,
                texts=() if rows else ("None has credit yet.",), links=(
                    ("by recent credit", path), ("by all credit", f"{path}?sort_by=total_credit")))


@functools.lru_cache(maxsize=8)
def top(model, kind, minute, opened):
    """Return the ids of those with most credit, looked up once a minute: it reads all of them.

    `opened` changes with the project that is open, and is not looked at.
    """
    rows = model.select(model.id, model.total_credit, model.expavg_credit, model.expavg_time) \
        .where(model.total_credit > 0).order_by(model.id)
    credit = (lambda row: row.total_credit) if kind == "total_credit" else (
        lambda row: recent_credit(row, minute * 60))
    return [row.id for row in heapq.nlargest(TOP, rows.iterator(), key=credit)]


# ---- Tasks -------------------------------------------------------------------------


def results(given, now):
    """List the tasks of a volunteer or of a computer, those made last first."""
    if given.get("hostid"):
        host = find(Host, whole(given, "hostid"), "computer")
        whose, where = host_link(host), Result.host == host
        address = f"/results.php?hostid={host.id}"
    else:
        user = find(User, whole(given, "userid"), "volunteer")
        whose, where = user_link(user), Result.user == user
        address = f"/results.php?userid={user.id}"
    rows, links = page_of(
        Result.select(Result, Workunit, App, AppVersion).join(Workunit).switch(Result)
        .join(App).switch(Result).join(AppVersion, JOIN.LEFT_OUTER).where(where)
        .order_by(Result.id.desc()), given, address)
    told = plugged("told")[-1]([r.workunit for r in rows])
    return f"Tasks of {whose[0]}", dict(
        texts=() if rows else ("None in the store.",), kinds=KINDS, links=(whose, *links),
        head=("Task", "Workunit", "Computer", "Sent (UTC)", "Reported (UTC)", "State", "Run time",
              "CPU time", "Credit", "Application"),
        rows=[((r.name, f"/result.php?resultid={r.id}"),
               (r.workunit_id, f"/workunit.php?wuid={r.workunit_id}"),
               (r.host_id, f"/show_host_detail.php?hostid={r.host_id}"),
               *progress(r, r.workunit_id in told), program_of(r)) for r in rows])


def progress(r, told):
    """Return the cells of a table that tell what became of a task, as far as all may know it."""
    back = moment(r.received_time) or (
        f"due {moment(r.report_deadline)}" if r.report_deadline else "")
    return (moment(r.sent_time), back, state_of(r, told)[0],
            span(r.elapsed_time) if r.received_time else "",
            span(r.cpu_time) if r.received_time else "",
            amount(r.granted_credit) if r.server_state == S.OVER and told else "")


def show_result(given, now):
    """Show what is known of a task, and what its program said if it failed."""
    r = find(Result, whole(given, "resultid"), "task", Result.server_state != S.INACTIVE)
    wu, told = r.workunit, is_told(r.workunit)
    state = state_of(r, told)
    who = () if r.host is None else (("Volunteer", user_link(r.user)),
                                     ("Computer", host_link(r.host)))
    if r.host and not told:
        who = (("Computer", "told when its workunit is decided and no copy is out"),)
    facts = (
        ("Workunit", (wu.name, f"/workunit.php?wuid={wu.id}")), *who,
        ("Application", program_of(r) or r.app.name), ("Made", date(r.create_time) if told else ""),
        ("Sent", date(r.sent_time)), ("Deadline", date(r.report_deadline)),
        ("Reported", date(r.received_time)), ("State", f"{state[0]}: {state[1]}"),
        ("Why", why_failed(r)), ("Run time", span(r.elapsed_time) if r.received_time else ""),
        ("CPU time", span(r.cpu_time) if r.received_time else ""),
        ("Credit", amount(r.granted_credit) if r.server_state == S.OVER and told else ""),
        ("Why this credit", plugged("credit_sentence")[-1](r, wu) if told else ""))
    parts = [dict(facts=facts)]
    if r.stderr_out and (r.outcome == O.CLIENT_ERROR or told and r.outcome == O.VALIDATE_ERROR):
        parts.append(dict(title="What the program said", output=harmless(r.stderr_out, r.host)))
    return (f"Task {r.name}", *parts)


def harmless(text, host):
    """Take out of a program's messages what would tell who its volunteer is."""
    text = HOME.sub(r"\1...", text)
    if host and len(host.domain_name) > 3 and host.client_version[:1].isdigit():
        text = text.replace(host.domain_name, f"computer {host.id}")
    return text


def show_workunit(given, now):
    """Show a workunit and its copies; whose they are only when that helps nobody to cheat."""
    wu = find(Workunit, whole(given, "wuid"), "workunit")
    told = is_told(wu)
    copies = list(Result.select(Result, App, AppVersion, Host, User).join(App).switch(Result)
                  .join(AppVersion, JOIN.LEFT_OUTER).switch(Result).join(Host, JOIN.LEFT_OUTER)
                  .join(User, JOIN.LEFT_OUTER).where(
                      Result.workunit == wu, Result.server_state != S.INACTIVE)
                  .order_by(Result.id).limit(COPIES_MAX))
    canonical = next((r for r in copies if told and r.id == wu.canonical_resultid), None)
    reasons = [why for bit, why in GIVEN_UP.items() if wu.error_mask & bit]
    state = ("given up: " + ", ".join(reasons)) if reasons else \
        "done: enough copies agree" if canonical else "not decided yet, or copies are still out"
    facts = (
        ("Application", wu.app.name), ("Made", past(wu.create_time, now)), ("State", state),
        ("Answer taken from", canonical and (
            canonical.name, f"/result.php?resultid={canonical.id}")),
        ("Copies that must agree", wu.min_quorum if told else ""),
        ("Credit for each valid copy", amount(wu.canonical_credit) if told else ""))
    return f"Workunit {wu.name}", dict(facts=facts), dict(
        title="Copies", kinds=KINDS, texts=() if told else (
            "Whose they are, and what was found, is told when the workunit is decided and no copy "
            "is out, so that nobody can arrange it.",),
        head=("Task", "Volunteer", "Computer", "Sent (UTC)", "Reported (UTC)", "State",
              "Run time", "CPU time", "Credit", "Application"),
        rows=[((r.name, f"/result.php?resultid={r.id}"),
               user_link(r.host.user) if told and r.host_id else "",
               host_link(r.host) if told and r.host_id else "", *progress(r, told),
               program_of(r)) for r in copies])


def show_apps(given, now):
    """List the applications with their versions, and how much of them waits."""
    parts = []
    for app in App.select().order_by(App.name):
        served = apps.get(app.name)
        versions = [(v.platform, v.version_num, v.plan_class, moment(v.create_time))
                    for v in (served.versions if served else ())]
        unsent, out = (Result.select().where(condition, Result.app == app).count()
                       for condition in (UNSENT, IN_PROGRESS))
        parts.append(dict(
            title=app.name, texts=(served.about,) if served else ("Not served now.",),
            facts=(("Tasks ready to send", f"{unsent:,}"), ("With volunteers", f"{out:,}")),
            head=("Platform", "Version", "Plan class", "Since (UTC)"), rows=versions))
    return ("Applications", *(parts or [dict(texts=("None yet.",))]))
