#!/usr/bin/env bash
# A real Slurm on this machine, for tests: loopback only, ports of its own, everything in one folder.
#
#   scripts/slurm.sh up [NODES [FOLDER]]    starts it and prints what to export
#   scripts/slurm.sh down FOLDER            ends it and removes the folder
#
# Needs root, and Debian's packages slurm-wlm and munge, which it installs where apt-get can. Without
# systemd, cgroups and accounting: as little as Slurm runs with. Several nodes are several slurmd.
set -euo pipefail

install() {
  for program in munged slurmctld slurmd sbatch; do command -v $program >/dev/null || missing=1; done
  [ -n "${missing:-}" ] || return 0
  command -v apt-get >/dev/null || { echo "no Slurm here, and no apt-get to install it" >&2; exit 3; }
  local get="env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq -y --no-install-recommends"
  # RUNLEVEL=1: the packages start no services.
  $get install slurm-wlm munge >/dev/null 2>&1 ||
    { apt-get -qq update >/dev/null 2>&1; $get install slurm-wlm munge >/dev/null 2>&1; } ||
    { echo "apt-get cannot install slurm-wlm and munge" >&2; exit 3; }
}

ports() {  # so many free ports
  python3 - "$1" <<'P'
import socket, sys
ends = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(end.getsockname()[1] for end in ends))
P
}

configure() {
  local host number; host=$(hostname -s)
  read -r controller nodes <<<"$(ports $((1 + count)))"
  cat <<C
ClusterName=swath
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_min_interval=100000,batch_sched_delay=0
ReturnToService=2
KillWait=2
MinJobAge=300
C
  for number in $(seq "$count"); do
    echo "NodeName=n$number NodeHostname=$host NodeAddr=127.0.0.1 Port=$(cut -d' ' -f"$number" <<<"$nodes") CPUs=4 RealMemory=1000"
  done
  echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
}

up() {
  [ "$(id -u)" = 0 ] || { echo "only root can start Slurm's daemons" >&2; exit 3; }
  install
  count=${1:-1} folder=${2:-$(mktemp -d /tmp/swath-slurm.XXXXXX)}
  mkdir -p "$folder/state"; chmod 755 "$folder"
  (umask 077; head -c 128 /dev/urandom >"$folder/munge.key")
  configure >"$folder/slurm.conf"
  munged --key-file="$folder/munge.key" --socket="$folder/munge.socket" --num-threads=2 \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
  slurmctld -f "$folder/slurm.conf"
  for number in $(seq "$count"); do slurmd -f "$folder/slurm.conf" -N "n$number"; done
  export SLURM_CONF=$folder/slurm.conf
  for _ in $(seq 100); do
    [ "$(timeout 2 sinfo -h -t idle -o %D 2>/dev/null)" = "$count" ] && break; sleep .1
  done
  timeout 5 sinfo -h -t idle >/dev/null || { tail -n 20 "$folder"/*.log >&2; down "$folder"; exit 1; }
  echo "export SLURM_CONF=$SLURM_CONF"
}

down() {
  folder=$1; export SLURM_CONF=$folder/slurm.conf
  timeout 10 scancel -u "$(id -un)" 2>/dev/null || true
  for _ in $(seq 50); do
    [ -z "$(timeout 2 squeue -h 2>/dev/null)" ] && break; sleep .1
  done
  pids=$(cat "$folder"/slurmd.*.pid "$folder/slurmctld.pid" "$folder/munged.pid" 2>/dev/null || true)
  for pid in $pids; do kill "$pid" 2>/dev/null || true; done
  for pid in $pids; do
    for _ in $(seq 20); do kill -0 "$pid" 2>/dev/null || break; sleep .1; done
    kill -9 "$pid" 2>/dev/null || true
  done
  rm -rf "$folder"
}

case ${1:-} in
  up) shift; up "$@" ;;
  down) [ -e "${2:?which folder?}/slurm.conf" ] || { echo "no Slurm in $2" >&2; exit 1; }; down "$2" ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
