#!/usr/bin/env bash
# Two emulated nodes on one machine: an allreduce whose bytes cross a network link.
#
#     sudo PYTHON="$(which python)" examples/two_nodes.sh [--mib N] [--iterations N] [--backend B]
#
# Two network namespaces emulate two hosts, joined by an emulated link (veth). torchrun starts one
# rank in each. HBMCOMM_NODE_ID keeps hbm from using shared memory between the ranks, and UCX_TLS
# keeps MPI from using it. The counters of the link must show that each rank received enough bytes:
# at least the size of the tensor for each sum, as random numbers do not compress.
#
# Needs root and iproute2. Removes the namespaces at exit.
set -euo pipefail

python=${PYTHON:-python}
mib=16
iterations=3
backend=hbm
while (($#)); do
  case $1 in
    --mib) mib=$2 ;;
    --iterations) iterations=$2 ;;
    --backend) backend=$2 ;;
    *) echo "two_nodes.sh: unknown option $1; see the head of the file" >&2; exit 2 ;;
  esac
  shift 2
done

here=$(cd "$(dirname "$0")" && pwd)
namespaces=("hbm$$-0" "hbm$$-1")

cleanup() {
  local namespace
  jobs -p | xargs -r kill 2>/dev/null || true
  wait
  for namespace in "${namespaces[@]}"; do
    ip netns delete "$namespace" 2>/dev/null || true  # also deletes its end of the link
  done
}
trap cleanup EXIT

for namespace in "${namespaces[@]}"; do
  ip netns add "$namespace"
  ip -n "$namespace" link set lo up
done
ip link add link0 netns "${namespaces[0]}" type veth peer name link1 netns "${namespaces[1]}"
for node in 0 1; do
  ip -n "${namespaces[node]}" address add "10.77.0.$((node + 1))/24" dev "link$node"
  ip -n "${namespaces[node]}" link set "link$node" up
done

# Prints the bytes that node $1 has received over the link.
received() {
  ip netns exec "${namespaces[$1]}" cat "/sys/class/net/link$1/statistics/rx_bytes"
}

# Starts the rank of node $1.
launch() {
  HBMCOMM_NODE_ID=$1 UCX_TLS=tcp,self UCX_NET_DEVICES=link$1 GLOO_SOCKET_IFNAME=link$1 \
    OMP_NUM_THREADS=1 exec ip netns exec "${namespaces[$1]}" "$python" -m torch.distributed.run \
    --nnodes 2 --nproc-per-node 1 --node-rank "$1" --master-addr 10.77.0.1 \
    "$here/allreduce_check.py" --backend "$backend" --mib "$mib" --iterations "$iterations"
}

before=("$(received 0)" "$(received 1)")
launch 0 &
launch 1 &
for _ in 0 1; do
  wait -n || { echo "FAILED: a node exited with status $?" >&2; exit 1; }
done

status=0
needed=$((mib * iterations * 1024 * 1024))
for node in 0 1; do
  crossed=$(($(received "$node") - before[node]))
  echo "link$node: ${before[node]} bytes received before, $crossed more now; the sums need $needed"
  if ((crossed < needed)); then
    echo "FAILED: too few bytes crossed to node $node: the tensors took another path" >&2
    status=1
  fi
done
((status)) || echo "OK: 2 nodes summed $iterations x $mib MiB over the link"
exit "$status"
