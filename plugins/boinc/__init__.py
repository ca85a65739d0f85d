"""The BOINC protocol: any unmodified BOINC client in the world can join [WIRE].

The modules: `scheduler` the RPC, `reader` what clients send, `accounts` attaching, `uploads`
outputs, `start` and `shipped` the program that BOINC clients start for a Python file or a
native program, `pages` and `stats` what links and statistics sites open. Files are signed by the
plugin `keys`.
"""

from minigrid import PluginError, plugged, project, read_settings

from . import accounts, pages, scheduler, shipped, stats, uploads

TABLES = scheduler.TABLES
NAV = pages.NAV
scheduler_path = "/boinc/scheduler"  # for the master page [WIRE 4]
at_contact = scheduler.at_contact
boinc_platforms = scheduler.boinc_platforms
cpid_of = scheduler.cpid_of
start_files = shipped.start_files
early_answer = uploads.early_answer
keeps_beginnings = uploads.ADDRESS.fullmatch


def at_once(request):
    """Say whether a request has no need of a thread of its own."""
    return request.path == scheduler_path or uploads.at_once(request)


def routes(app, clock):
    """Open the keys of the project and add the addresses of the protocol."""
    scheduler.settings = read_settings("setup.cfg", scheduler.Settings, "boinc")
    if not plugged("open_boinc_keys"):
        raise PluginError("the plugin boinc needs the plugin keys: add it to 'plugins'")
    scheduler.keys = uploads.keys = plugged("open_boinc_keys")[-1](project.data / "keys")
    for module in (scheduler, accounts, uploads, pages, stats):
        module.routes(app, clock)


def hourly(now):
    """Write the statistics when a day has gone by."""
    if scheduler.settings.statistics:
        stats.export(now)
