#!/bin/sh
# Starts a job of a minigrid project under a BOINC client on Linux, macOS and the like; the client
# runs it as ../../projects/PROJECT/NAME in the job's slot directory. What it does: start.py.
# A native program also runs where there is no Python; only that the job cannot be suspended then
# and has no progress.

say() {
    echo "start.sh: $1" >&2
}

# Is $1 a copy of one of the application's files, whose signatures the client has checked? Command
# line and input come unsigned: they must not decide what is run. The client lists those files at
# the very end of init_data.xml; what stands before may be text from the server.
signed() {
    awk -F '[<>]' '/^ *<app_file>/ { if (!run) names = ""; run = 1; names = names $3 "\n"; next }
                   { run = 0 }
                   END { printf "%s", names }' init_data.xml 2>/dev/null |
    {
        listed=
        while IFS= read -r name; do
            listed=yes
            cmp -s "$1" "$folder/$name" && exit 0
        done
        [ -z "$listed" ] # A client that lists no files cannot be asked.
    }
}

usable() {
    found=$(command -v "$1") || return 1
    # This one of a new Mac only asks its user to install the developer tools.
    if [ "$found" = /usr/bin/python3 ] && [ "$(uname)" = Darwin ]; then
        xcode-select -p >/dev/null 2>&1 || return 1
    fi
    "$found" -I -c 'import sys; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1
}

folder=${0%/*}
PATH=${PATH:-/usr/bin:/bin}:/usr/bin:/bin
for python in python3 /usr/local/bin/python3 /opt/homebrew/bin/python3 /opt/local/bin/python3 \
        /Library/Frameworks/Python.framework/Versions/Current/bin/python3 /usr/bin/python3 \
        python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 python; do
    usable "$python" || continue
    signed start.py || { say "start.py is none of the signed files"; exit 125; }
    exec "$found" -I -B start.py "$0" "$@" # -I: files of the slot are no modules of it.
done

if [ "$1" != native ]; then
    say "this job needs Python 3.9 or newer, and none was found here. Please install it: your
system's package python3, or https://www.python.org/downloads/"
    exit 127
fi
program=$2
case $program in
    '' | */* | -* | .*) say "there is no file '$program' to run"; exit 125 ;;
esac
signed "$program" || { say "$program is none of the signed files of its application"; exit 125; }
shift 2
chmod u+x "$program"
[ -f checkpoint ] || rm -f out
input=in
[ -f in ] || input=/dev/null
child=
stop() { # From outside: end by the same signal, and the client starts the job again later.
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
    trap - TERM
    kill -TERM $$
}
trap stop TERM INT HUP
"./$program" "$@" <"$input" >stdout.txt &
child=$!
wait "$child"
status=$?
if [ "$status" -ne 0 ]; then
    say "$program ended with exit status $status"
    exit "$status"
fi
[ -e out ] || mv stdout.txt out || exit 195
echo 0 >boinc_finish_called
exit 0
