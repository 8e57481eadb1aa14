#!/bin/sh
# Makes a soft-RoCE device (rxe0, 10.9.0.1) in the guest, then runs a command.
set -e
ip link add v0 type dummy
ip addr add 10.9.0.1/24 dev v0
ip link set v0 mtu 4500 up
rdma link add rxe0 type rxe netdev v0
ulimit -l unlimited
exec "$@"
