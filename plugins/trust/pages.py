"""What people see of trust: the page /trust, the same as JSON, and as plain text.

Public, as all pages are: numbers of computers and the names that their owners gave them, never an
address, a key or the real name of a BOINC client's computer.
"""

import json
import re

import bottle

from minigrid import App, Host, plugged

from . import blacklist, spots, suspects

ROWS = 200  # of one table
GROUP_SHOWN = 30  # computers of one group of suspects
KINDS = dict.fromkeys(("Since", "Until", "Ended"), "when")
LEVELS = {blacklist.NO_WORK: "no work", blacklist.REFUSED: "refused"}
INDEPENDENT = "Independent errors are assumed: against computers that lie together only their " \
              "own pattern helps, see the suspects."


def routes(app, clock):
    """Add the pages."""
    suspects.known.at = 0  # of another store, maybe

    @app.get("/trust")
    def _():
        now = clock()
        parts = [dict(title=section["title"], texts=filter(None, [section["text"]]),
                      head=section["columns"], kinds=KINDS,
                      rows=[with_link(row) for row in section["rows"]])
                 for section in sections(now)]
        return plugged("show_page")[-1]("Whom this project believes", parts, now,
                                        json="/trust.json")

    @app.get("/trust.json")
    def _():
        bottle.response.set_header("Cache-Control", "no-cache")
        return {"server_time": (now := clock()), "sections": sections(now), **figures(now)}


def with_link(row):
    """Return a row, its first cell a link to what happened to the computer, if it is one's."""
    number = re.search(r"computer ([0-9]+)\)?$", row[0])
    return [(row[0], f"/why/computer-{number[1]}") if number else row[0], *row[1:]]


def sections(now):
    """Return what there is to say: [{title, text, columns, rows}], those of other plugins too."""
    names = dict(App.select(App.id, App.name).tuples())
    found = [black_list(names, now), suspect_groups(now), applications(names, now)]
    return found + [section for facts in plugged("trust_facts") for section in facts(now)] + [
        history(names)]


def figures(now):
    """Return the entries in force and the error rates as numbers, for programs."""
    rows = open_rows(now)
    called = names_of({entry.host for entry in rows})
    entries = [{**entry.__data__, "evidence": json.loads(entry.evidence),
                "computer": called.get(entry.host, f"computer {entry.host}")} for entry in rows]
    rates = {app.name: dict(zip(("wrong", "compared"), blacklist.error_rate(app.id, now)))
             for app in App.select()}
    return {"entries": entries, "error_rates": rates,
            "suspects": [sorted(group.hosts) for group in suspects.suspects(now)]}


def names_of(ids):
    """Return how computers are called in public: {id: name}."""
    (name,) = plugged("computer_name")[-1:]
    rows = Host.select().where(Host.id.in_(list(ids)))
    return {host.id: name(host) if name(host) == f"computer {host.id}"
            else f"{name(host)} (computer {host.id})" for host in rows}


def open_rows(now):
    """Return the entries in force, the newest first."""
    rows = blacklist.BlackEntry.select().where(blacklist.OPEN).order_by(
        blacklist.BlackEntry.id.desc()).limit(ROWS)
    return [entry for entry in rows if not 0 < entry.end <= now]


def black_list(names, now):
    """Describe the entries in force."""
    rows = open_rows(now)
    called = names_of({entry.host for entry in rows})
    return dict(
        title="Black list",
        text="Who gives a wrong answer gets no work for a while, but tasks whose answers are "
             "known: right ones in a row end an entry before its time. An error of the program, a "
             "late or a lost task is never a reason."
             + ("" if rows else " Nobody is on the list."),
        columns=["Computer", "Application", "What", "Why", "Since", "Until", "Way back"],
        rows=[[called.get(e.host, f"computer {e.host}"), names.get(e.app, "all"),
               LEVELS.get(e.level, ""), because(e), blacklist.date(e.begin),
               blacklist.date(e.end) if e.end else "no end", blacklist.way_back(e)]
              for e in rows])


def because(entry):
    """Return the reason of an entry with its evidence."""
    evidence = json.loads(entry.evidence)
    parts = [entry.reason]
    if evidence.get("said"):
        parts.append(f"it said {evidence['said']}")
    if evidence.get("against"):
        parts.append("against it: " + ", ".join(
            f"computer {host}" for host in evidence["against"][:5]))
    if not entry.rule.startswith("operator"):
        parts.append(f"rule {entry.rule}")
    return "; ".join(parts)


def history(names):
    """Describe the last entries that have ended."""
    rows = list(blacklist.BlackEntry.select().where(blacklist.BlackEntry.ended > 0).order_by(
        blacklist.BlackEntry.id.desc()).limit(30))
    called = names_of({entry.host for entry in rows})
    return dict(
        title="Entries that have ended", text="" if rows else "There are none.",
        columns=["Computer", "Application", "Why", "Since", "Ended", "How"],
        rows=[[called.get(e.host, f"computer {e.host}"), names.get(e.app, "all"), e.reason,
               blacklist.date(e.begin), blacklist.date(e.ended), e.ended_why] for e in rows])


def suspect_groups(now):
    """Describe the groups that always agree with each other and with nobody else."""
    groups = suspects.suspects(now)[:20]
    called = names_of({host for group in groups for host in sorted(group.hosts)[:GROUP_SHOWN]})
    return dict(
        title="Suspects",
        text="Computers that, wherever answers differ, agree with each other and never with "
             "anybody else, and are not the majority. That is no proof, so nobody is punished for "
             "it: look at them, and use 'minigrid ban' if you are sure."
             + ("" if groups else " There are none."),
        columns=["Computers", "With each other", "Against others", "With others"],
        rows=[[", ".join(called.get(host, f"computer {host}") for host in
                         sorted(group.hosts)[:GROUP_SHOWN])
               + f" and {len(group.hosts) - GROUP_SHOWN} more" * (len(group.hosts) > GROUP_SHOWN),
               times(group.together), f"{times(group.apart)}, with {len(group.against)} computers",
               times(group.outside)] for group in groups])


def times(n):
    """Write how often something was."""
    return {0: "never", 1: "once"}.get(n, f"{n:,} times")


def applications(names, now):
    """Describe how often answers are wrong, application by application."""
    rows, doubts = [], []
    for all_ in blacklist.Measured.select().order_by(blacklist.Measured.app):
        name, (wrong, compared) = names.get(all_.app, "?"), blacklist.error_rate(all_.app, now)
        rate = f"{wrong / compared:.2%}" if compared >= 0.5 else "not known"
        pool = spots.Kept.select().where(spots.Kept.app == all_.app).count()
        rows.append([name, rate, f"{compared:,.0f}", f"{all_.losers:,} of {all_.hosts:,}",
                     f"{all_.spot_right:,} right, {all_.spot_wrong:,} wrong", f"{pool:,}"])
        if blacklist.is_doubtful(all_):
            doubts.append(f" {name} is in doubt: {all_.losers} of {all_.hosts} computers have "
                          f"given answers that others did not confirm. Does the application use "
                          f"the time or randomness of its own? Meanwhile an entry by votes takes "
                          f"ten wrong answers in a row.")
    return dict(
        title="How often answers are wrong",
        text="Counted where an answer was compared, by computers in good standing; what is a month "
             f"old counts half. {INDEPENDENT}{''.join(doubts)}",
        columns=["Application", "Wrong", "Answers compared", "Computers with wrong ones of late",
                 "Spot checks", "Kept for spot checks"], rows=rows)


def trust_of_host(host, now):
    """Say in sentences how a host stands: entries, then how often it was right."""
    return trust_of_hosts([host.id], now)[host.id]


def trust_of_hosts(host_ids, now):
    """Say the same of many hosts: {host id: sentences}."""
    found = {host_id: [] for host_id in host_ids}
    for entry in blacklist.open_entries(list(found), now):
        found[entry.host].append(f"On the black list: {blacklist.says(entry)}; way back: "
                                 f"{blacklist.way_back(entry)}.")
    names = dict(App.select(App.id, App.name).tuples())  # also where none is loaded: `minigrid why`
    for row in blacklist.Standing.select().where(blacklist.Standing.host.in_(list(found))):
        spot = f", {row.spot_right} of {row.spot_right + row.spot_wrong} spot checks right" \
            if row.spot_right + row.spot_wrong else ""
        found[row.host].append(
            f"{names.get(row.app, row.app)}: {row.checked - row.wrong} of {row.checked} compared "
            f"answers right, the last {row.run} in a row{spot}.")
    return found


def as_text(parts):
    """Yield the lines of the sections for a terminal."""
    for part in parts:
        yield f"{part['title']}\n{'-' * len(part['title'])}"
        if part["text"]:
            yield part["text"]
        for row in part["rows"]:
            first, *rest = zip(part["columns"], row)
            yield f"* {first[1]}"
            yield from (f"    {name.lower()}: {value}" for name, value in rest if value != "")
        yield ""
