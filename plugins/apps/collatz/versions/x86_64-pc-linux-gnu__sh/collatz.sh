#!/bin/sh
# Reads two numbers from standard input and looks at the Collatz chains of all starts from the first
# up to, and without, the second. Writes one line: the start of the longest chain, its steps down to
# 1, the start of the chain that climbs highest, the highest number in it. Of equals the first wins.
#
# Knows nothing of minigrid or BOINC; try it: echo 1 1000 | ./collatz.sh
# The numbers of awk are doubles, exact below 2^53. %.0f, because %d ends at 2^31 in some.

LC_ALL=C exec awk '
NR == 1 && NF == 2 && $1 ~ /^[0-9]+$/ && $2 ~ /^[0-9]+$/ && $1 > 0 && $2 > $1 {
    from = $1 + 0; to = $2 + 0
    for (start = from; start < to; start++) {
        top = n = start
        for (steps = 0; n != 1; steps++) {
            if (n % 2) {
                n = 3 * n + 1
                if (n > top) top = n
            } else {
                n /= 2
            }
        }
        if (top >= 9007199254740992) exit failed = 3
        if (steps > longest || start == from) { longest = steps; long_start = start }
        if (top > highest) { highest = top; high_start = start }
        if (start % 1000 == 0) {  # for whoever wants to know how far it is
            printf "%.3f\n", (start - from) / (to - from) > "fraction_done"
            close("fraction_done")
        }
    }
    good = 1
}
END {
    if (failed) print "collatz: a number is too large for exact doubles" > "/dev/stderr"
    else if (!good || NR > 1) {
        print "collatz: wanted: two whole numbers, the second larger" > "/dev/stderr"
        failed = 2
    }
    if (failed) exit failed
    printf "%.0f %.0f %.0f %.0f\n", long_start, longest, high_start, highest
}'
