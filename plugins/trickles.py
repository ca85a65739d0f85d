"""Trickles: messages between a running job and its application on the server [WIRE 13].

A job that runs for days says how far it is, or hands in a part; the application's hook
`trickle(workunit, text)` hears of it, and what it returns goes down to the job. A client repeats a
message until it is taken, so one that came twice is heard once.
"""

import hashlib
from types import SimpleNamespace

from peewee import BigIntegerField, CharField, ForeignKeyField, TextField, fn

from minigrid import (Host, PluginError, Record, Result, Workunit, apps, prepared, project,
                      remember, working)

TEXT_MAX = 1 << 16  # characters of one message
WAITING_MAX = 1000  # messages of one host that may wait for the application before it must
KEPT_MAX = 10_000  # messages of one job; what comes after them is not heard
AT_ONCE = 100  # messages handled in one pass, and sent down in one reply
KEPT_SECONDS = 30 * 86400  # how long a message is known, so that its repetition is none


class MsgFromHost(Record):
    """A message that a job has sent; its text goes once the application has heard it."""

    create_time = BigIntegerField(index=True)
    host = ForeignKeyField(Host)
    result = ForeignKeyField(Result, on_delete="CASCADE")
    sum = CharField()  # of time and text: the same message again is none
    text = TextField(null=True)  # None: handled
    answer_time = BigIntegerField(default=0)  # the time of what it sent down, 0 if nothing

    class Meta:
        indexes = ((("result", "sum"), True),)


class MsgToHost(Record):
    """A message for a running job; it goes with the next reply to its host."""

    create_time = BigIntegerField()  # no two of a job: clients make a file name of it
    host = ForeignKeyField(Host)
    result = ForeignKeyField(Result, on_delete="CASCADE")
    text = TextField()


TABLES = (MsgFromHost, MsgToHost)
MsgFromHost.add_index(MsgFromHost.index(
    MsgFromHost.id, where=MsgFromHost.text.is_null(False), name="trickle_waiting"))


def at_contact(request, reply, user, host, now):
    """Take the messages of a request, and give what waits for the host's running jobs."""
    if request.trickles:
        reply.trickles_taken = take(request.trickles, host, now)
    if request.other_results:
        reply.trickles = give(set(request.other_results), host)


def give(running, host):
    """Return the first messages for a host's running jobs, and forget them. Runs in the writer.

    A job that is not named as running would lose them [WIRE 13].
    """
    ids = [n for n, name in waiting_for(host.id) if name in running][:AT_ONCE]
    if not ids:
        return []
    chosen = MsgToHost.id.in_(ids)
    rows = (MsgToHost.select(Result.name, MsgToHost.create_time, MsgToHost.text).join(Result)
            .where(chosen).order_by(MsgToHost.id).tuples())
    down = [{"result": name, "time": at, "text": text} for name, at, text in rows]
    MsgToHost.delete().where(chosen).execute()
    return down


@prepared
def waiting_for(host_id):
    """Find the messages that wait for a host, and for which of its jobs they are."""
    return (MsgToHost.select(MsgToHost.id, Result.name).join(Result)
            .where(MsgToHost.host == host_id).order_by(MsgToHost.id).tuples())


def take(trickles, host, now):
    """Keep messages of a host's own results; say whether the client may forget them."""
    waiting = MsgFromHost.select().where(
        MsgFromHost.host == host, MsgFromHost.text.is_null(False)).count()
    if waiting >= WAITING_MAX:
        return False  # It repeats them, and by then some have been heard.
    mine = {r.name: r for r in Result.select(Result.id, Result.name, Result.app).where(
        Result.name.in_(list({t["result"] for t in trickles})), Result.host == host)}
    room = {name: KEPT_MAX - MsgFromHost.select().where(MsgFromHost.result == r).count()
            for name, r in mine.items()}
    listening = {a.id for a in apps.values() if a.hooks.get("trickle")}
    for message in trickles:
        r, text = mine.get(message["result"]), message["text"][:TEXT_MAX]
        if r is None or room[r.name] <= 0:
            continue  # Not sent to this host, or a flood: taken, so that it ends, and dropped.
        mark = hashlib.md5(f"{message['time']} {text}".encode()).hexdigest()
        room[r.name] -= 1
        (MsgFromHost.insert(create_time=now, host=host, result=r, sum=mark,
                            text=text if r.app_id in listening else None)
         .on_conflict_ignore().execute())
    return True


def trickle_handler(now):
    """Stage: let applications hear the messages of their running jobs, in order."""
    served = {n: a for n, a in working(now).items() if a.hooks.get("trickle")}
    rows = list(MsgFromHost.select(MsgFromHost, Result, Workunit).join(Result).join(Workunit)
                .where(MsgFromHost.text.is_null(False), Result.app.in_(list(served)))
                .order_by(MsgFromHost.id).limit(AT_ONCE)) if served else []
    heard = []
    for row in rows:
        application = served.get(row.result.app_id)
        if application is None:
            continue  # It failed in this pass.
        wu = row.result.workunit
        told = SimpleNamespace(name=wu.name, number=wu.number, app=application.name,
                               result=row.result.name, errors=[], input=None,
                               folder=(project.data / "results").resolve())
        try:
            heard.append((row, application.hooks["trickle"](told, row.text)))
        except PluginError as error:
            # Heard all the same: a message is no workunit. It may have taken all the time a hook
            # has, and whoever sent it may have sent more: the others wait for the next pass.
            heard.append((row, None))
            del served[application.id]
            if str(error) not in [text for _, text in project.errors]:
                remember(now, str(error))
    if heard:
        project.write(lambda: settle(heard, now))
    return len(heard)


def settle(heard, now):
    """Note what was heard, and what is to go down. Runs in the writer."""
    for row, text in heard:
        at = 0
        if text is not None and Result.select().where(Result.id == row.result_id).exists():
            last = MsgFromHost.select(fn.MAX(MsgFromHost.answer_time)).where(
                MsgFromHost.result == row.result_id).scalar()
            at = max(now, (last or 0) + 1)
            MsgToHost.create(create_time=at, host=row.host_id, result=row.result_id,
                             text=text[:TEXT_MAX])
        MsgFromHost.update(text=None, answer_time=at).where(MsgFromHost.id == row.id).execute()


def hourly(now):
    """Forget old messages, also of applications that are served no more."""
    old = MsgFromHost.create_time < now - KEPT_SECONDS
    if MsgFromHost.select().where(old).exists():
        project.write(lambda: MsgFromHost.delete().where(old).execute())


STAGES = (trickle_handler,)
