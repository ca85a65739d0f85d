"""The work generator: asks applications for workunits while few results wait to be sent [S2-02].

BOINC's work generator, and X-Com's "next portion" (S3-05), in one.
"""

from peewee import fn

from minigrid import (CHUNK, CHUNKS_MAX, GENERATOR, UNSENT, App, PluginError, Result, add_work,
                      plugged, prepared, project, put_off, working)


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
    batch = []
    try:
        while len(batch) < n:
            given = application.hooks["workunit"](number + len(batch))
            if given is None:
                break
            batch.append(given)
    except PluginError as error:
        return batch, error
    return batch, None


def generate(application, number, batch, now):
    """Make workunits up to the first that is not right, and count on. Runs in the writer."""
    made, fault = 0, None
    try:
        for given in batch:
            add_work(application, number + made, given, now)
            made += 1
    except PluginError as error:
        fault = error
    App.update(next_number=number + made).where(App.id == application.id).execute()
    return made, fault


FIRST_STAGES = (generator,)
