#!/bin/sh
# Prints the speeds of perftest's tools and of the transport, alternately, and the costs of segments
# and clients.
#
#   verbs_speed.sh PROGRAM MEBIBYTES SIZE...   (PROGRAM: guest_verbs_speed)
set -e
command -v ib_write_bw ib_read_bw >/dev/null
program=$1
total=$(($2 << 20))
shift 2

# Prints the lines of results of ib_write_bw or ib_read_bw, with 4 queue pairs and 16 transfers
# in flight, as the transport has.
perftest() {
  tool=$1 size=$2
  set -- "$tool" -d rxe0 -x 1 -F -q 4 -t 4 -s "$size" -n $(((total / size + 3) / 4 + 4))
  timeout 300 "$@" >/dev/null &
  until grep -q ':4853 .* 0A ' /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done  # it listens
  timeout 300 "$@" 10.9.0.1 | sed -n "s/^ *$size /$tool $size /p"
  wait
}

"$program" registration
"$program" clients 20
for size; do
  for _ in 1 2; do
    perftest ib_write_bw "$size"
    perftest ib_read_bw "$size"
    "$program" transfers "$size" "$total"
  done
done
