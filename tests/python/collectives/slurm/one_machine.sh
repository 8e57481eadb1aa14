#!/usr/bin/env bash
# A Slurm cluster of two nodes on this machine, for as long as a command runs:
#
#     sudo tests/python/collectives/slurm/one_machine.sh srun -N 2 -n 4 --mpi=pmi2 python script.py
#
# The cluster has its own directory, ports, configuration and key, so it neither needs nor touches
# an installed cluster. HBMCOMM_TEST_SLURM_PORTS may name its three ports. Needs root, slurm-wlm and
# munge (Debian, Ubuntu). Exits with the command's status; with 70, after printing the daemons'
# logs, if the cluster does not start.
set -euo pipefail

home=$(mktemp -d /tmp/hbmcomm-slurm.XXXXXX)  # TMPDIR may be long, or have a space
export SLURM_CONF=$home/slurm.conf
# The ports of the controller and of the nodes. The default depends on this process's id, so that
# another run is unlikely to choose the same ports.
read -r controller_port node0_port node1_port <<< \
  "${HBMCOMM_TEST_SLURM_PORTS:-$(seq -s ' ' $((10000 + $$ % 3000 * 3)) $((10002 + $$ % 3000 * 3)))}"
host=$(hostname)
host=${host%%.*}  # what Slurm calls this machine

# Ends a daemon by the pid that it wrote, and waits for it.
stop() {
  local pid
  pid=$(cat "$1" 2>/dev/null) || return 0
  kill "$pid" 2>/dev/null || return 0
  for _ in $(seq 100); do
    kill -0 "$pid" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null || true
}

cleanup() {
  scancel --user root --quiet 2>/dev/null || true
  stop "$home/node0.pid"
  stop "$home/node1.pid"
  stop "$home/controller.pid"
  stop "$home/munge.pid"
  rm -rf "$home"
}

fail() {
  echo "one_machine.sh: $1" >&2
  tail -n 20 "$home"/*.log >&2 || true
  exit 70
}

cat > "$SLURM_CONF" <<CONF
ClusterName=one-machine
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller_port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$home/munge.socket
CredType=cred/munge
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool-%n
SlurmctldPidFile=$home/controller.pid
SlurmdPidFile=$home/%n.pid
SlurmctldLogFile=$home/controller.log
SlurmdLogFile=$home/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=2
NodeName=node0 NodeHostname=$host NodeAddr=127.0.0.1 Port=$node0_port CPUs=8
NodeName=node1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$node1_port CPUs=8
PartitionName=all Nodes=ALL Default=YES
CONF

trap cleanup EXIT
mkdir "$home/state"
chmod 711 "$home"  # munged wants its socket to be within everybody's reach
(umask 077 && head -c 128 /dev/urandom > "$home/munge.key")
munged --key-file "$home/munge.key" --seed-file "$home/munge.seed" --pid-file "$home/munge.pid" \
  --socket "$home/munge.socket" --log-file "$home/munge.log" || fail "munged does not start"
slurmctld || fail "slurmctld does not start"
slurmd -N node0 || fail "slurmd does not start"
slurmd -N node1 || fail "slurmd does not start"
for _ in $(seq 600); do
  if [ "$(sinfo --noheader --format %T 2>/dev/null)" = idle ]; then ready=1; break; fi
  sleep 0.2
done
[ "${ready:-}" ] || fail "the nodes are not idle after 120 s"
"$@"
