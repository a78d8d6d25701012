#!/usr/bin/env bash
# Two hosts on this machine, for tests: network namespaces, each with a loopback of its own and an
# address that only the two can reach.
#
#   scripts/netns.sh up NAME          makes NAME-a (10.231.7.1) and NAME-b (10.231.7.2)
#   scripts/netns.sh cut NAME         takes the link between them down
#   scripts/netns.sh mend NAME        and up again
#   scripts/netns.sh down NAME        removes them
#
# Run something on one: ip netns exec NAME-a COMMAND. Needs root.
set -euo pipefail
[ $# = 2 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
name=$2
each() { for side in a b; do ip -n "$name-$side" "$@"; done; }

case $1 in
  up)
    command -v ip >/dev/null || { echo "no command ip" >&2; exit 3; }
    ip netns add "$name-a" && ip netns add "$name-b" || { echo "cannot make namespaces" >&2; exit 3; }
    ip link add between netns "$name-a" type veth peer name between netns "$name-b"
    ip -n "$name-a" address add 10.231.7.1/24 dev between
    ip -n "$name-b" address add 10.231.7.2/24 dev between
    each link set lo up; each link set between up ;;
  cut) ip -n "$name-a" link set between down ;;
  mend) ip -n "$name-a" link set between up ;;
  down) ip netns delete "$name-a"; ip netns delete "$name-b" ;;
  *) "$0" ;;
esac
