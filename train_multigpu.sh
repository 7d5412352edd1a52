#!/usr/bin/env bash
#
# Multi-GPU training: N processes on this machine, or this node's share of many. Needs bash 4.4.
#
#   ./train_multigpu.sh [--print] [N] [arguments of the training script]
#
#   ./train_multigpu.sh                                all visible GPUs; without a GPU, one CPU process
#   ./train_multigpu.sh 3 har --epochs 20              3 processes: train.py har --epochs 20
#   ./train_multigpu.sh 3 --config configs/har.yaml    with --config or key=value: train_ddp.py
#   CUDA_VISIBLE_DEVICES= ./train_multigpu.sh 2 har    2 CPU processes, GPU or not
#   ./train_multigpu.sh --print 3 har                  show the command instead of running it
#
# Several nodes, the same line on each:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./train_multigpu.sh har    (NODE_RANK=1 on the other)
#   RDZV=c10d NNODES=2 MASTER_ADDR=10.0.0.1 ./train_multigpu.sh har --save-dir runs/har    (no NODE_RANK)
#   srun --ntasks-per-node=1 ./train_multigpu.sh har                     (Slurm: all are known; tools/slurm.sbatch)
# They share the run's folder and meet at MASTER_PORT; if unset, at 29500, under Slurm at 10000 + job number; one node
# alone takes a free port. With RDZV=c10d and TORCHRUN_ARGS=--max-restarts=3 a lost node may be started again, alone.
# Kubernetes: PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ... of Kubeflow, which torchrun would read, count like those
# without PET_; so do RANK and WORLD_SIZE of its older pods. In an indexed Job, where NNODES is set, NODE_RANK is
# JOB_COMPLETION_INDEX if unset (kubernetes/).
# GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: the network interface; if unset, the one that leads to MASTER_ADDR.
#
# Environment:
#   CUDA_VISIBLE_DEVICES   the GPUs to use, indices or UUIDs; empty = none
#   PYTHON                 the interpreter; else the first with PyTorch: virtual environment, PATH, .venv/ here
#   TORCHRUN_ARGS          further options of torchrun, split at blanks: TORCHRUN_ARGS="--max-restarts=3"
#   OMP_NUM_THREADS        threads per process; if unset, one, and up to cores / processes if the model is large
#
# SIGTERM, SIGINT, SIGHUP and SIGUSR1 reach every process, which stop together with a checkpoint. Exit code: the run's:
# 0 done, 2 usage or data, 3 checkpoint, 4 diverged, 5 data loading, 6 distributed, 75 stopped (the same line resumes).

set -euo pipefail

self=$(readlink -f -- "${BASH_SOURCE[0]}")
here=${self%/*}

# A stdout or stderr that is full or closed ends no training.
show() { printf '%s\n' "$@" 2>/dev/null || true; }
warn() { show "warning: $1" >&2 || true; }
fail() { show "error: $1" >&2 || true; exit 2; }

check_configs() { # ARGUMENTS: refuse a missing file before anything is announced
    local word file before=''
    for word in "$@"; do
        file=''
        if [[ $word =~ ^--config([-_]path)?=(.+)$ ]]; then file=${BASH_REMATCH[2]}; fi
        if [[ $before =~ ^--config([-_]path)?$ ]]; then file=$word; fi
        [[ -z $file || -e $file ]] || fail "no file $file (--config): give the path of a YAML file"
        before=$word
    done
}

whole() { # NAME VALUE LOW HIGH
    if [[ ! $2 =~ ^[0-9]{1,6}$ ]] || ((10#$2 < $3 || 10#$2 > $4)); then fail "$1=$2: give a number from $3 to $4"; fi
}

# Sets `gpus`: the lines of `nvidia-smi -L` that CUDA will show, by its rules: it stops at the first invalid entry,
# sees nothing if one is repeated, and never more than one slice of a GPU in MIG mode. Where there is no nvidia-smi, but
# a device (ROCm, a slim container), torch is asked: importing it takes seconds.
find_gpus() {
    local listing line wanted entry i hits all=() slices=() taken=,
    gpus=()
    if ! command -v nvidia-smi >/dev/null; then
        [[ -e /dev/nvidiactl || -e /dev/kfd || -e /dev/dxg ]] || return 0
        listing='import torch
print(*[f"GPU {i}: {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())], sep="\n", end="")'
        mapfile -t gpus < <("$python" -c "$listing" 2>/dev/null)
        return 0
    fi
    listing=$(nvidia-smi -L 2>&1) || { warn "nvidia-smi failed, no GPU is used: ${listing%%$'\n'*}"; return 0; }
    while IFS= read -r line; do
        [[ $line != "GPU "* ]] || all+=("$line")
        [[ $line != *"MIG "*"(UUID: MIG-"* ]] || slices[${#all[@]} - 1]+=$line$'\n'
    done <<<"$listing"
    wanted=${CUDA_VISIBLE_DEVICES-$(IFS=,; echo "${!all[*]}")},
    while [[ -n $wanted ]]; do
        entry=${wanted%%,*} wanted=${wanted#*,} hits=()
        entry=${entry//[[:space:]]/}
        for i in "${!all[@]}"; do
            if [[ $entry =~ ^0*([0-9]+) && ${BASH_REMATCH[1]} == "$i" ]] ||
                [[ $entry =~ ^(GPU|MIG)- && ${all[i]}${slices[i]-} == *"(UUID: $entry"* ]]; then hits+=("$i"); fi
        done
        ((${#hits[@]} == 1)) || return 0
        i=${hits[0]}
        if [[ -n ${slices[i]-} ]]; then
            [[ $entry == MIG-* ]] || entry='MIG-'
            gpus=("$(grep -m1 -F "(UUID: $entry" <<<"${slices[i]}")")
            return 0
        fi
        [[ $taken != *",$i,"* ]] || { gpus=(); return 0; }
        taken+=$i, gpus+=("${all[i]}")
    done
}

# Sets `python`, and whether its torchrun has two options: `forwards` (--signals-to-handle) and `binds`
# (--numa-binding, since torch 2.9). Importing torch takes seconds, looking for it does not.
find_python() {
    local answers candidates probe='import importlib.util, pathlib
torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
options = (torch / "distributed" / "run.py").read_bytes()
print(b"signals_to_handle" in options, b"numa_binding" in options)'
    mapfile -t candidates < <(type -aP python)
    candidates=(${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} "${candidates[@]}" "$here/.venv/bin/python" python3)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for python in "${candidates[@]}"; do
        answers=$("$python" -c "$probe" 2>/dev/null) || continue
        read -r forwards binds <<<"$answers"
        return
    done
    fail "no PyTorch (tried ${candidates[*]}): \`pip install torch\`, or set PYTHON to an interpreter that has it"
}

# Sets `numa` to torchrun's option that keeps each process on the NUMA node of its GPU. Without a GPU, with one node, or
# where the GPUs are not on all nodes, cores would have no work: then `numa` is empty. torchrun fails where numactl is
# missing or forbidden (containers without CAP_SYS_NICE), or where the node of a GPU is unknown: this function tries both.
find_numa() { # WORD...
    local words=" $* ${TORCHRUN_ARGS:-} " list cores node places gpu nodes=() used=()
    numa=''
    ((${#gpus[@]})) && [[ ${binds:-} == True ]] || return 0
    [[ ! $words =~ --numa[-_]binding && ! ${words,,} =~ ddp\.bind[-_]cores[=\ ](false|no|off|0)\  ]] || return 0
    for list in /sys/devices/system/node/node*/cpulist; do
        node=${list%/cpulist} cores=''
        [[ ! -r $list ]] || read -r cores <"$list" || true
        [[ -z $cores ]] || nodes[${node##*node}]=$cores # a node without cores has memory only
    done
    ((${#nodes[@]} > 1)) || return 0
    places=$(nvidia-smi --query-gpu=uuid,pci.bus_id --format=csv,noheader 2>/dev/null) || return 0
    for gpu in "${gpus[@]:0:processes}"; do
        [[ $gpu =~ UUID:\ ([^\)]+) && $places =~ ${BASH_REMATCH[1]},\ *([0-9A-Fa-f]+)(:[0-9A-Fa-f:.]+) ]] || return 0
        printf -v gpu '%04x%s' "0x${BASH_REMATCH[1]}" "${BASH_REMATCH[2],,}"
        read -r node 2>/dev/null <"/sys/bus/pci/devices/$gpu/numa_node" || return 0
        [[ $node =~ ^[0-9]+$ && -n ${nodes[node]-} ]] || return 0 # -1: the system does not report it
        used[node]=yes
    done
    [[ ${!used[*]} == "${!nodes[*]}" ]] || return 0
    for cores in "${nodes[@]}"; do numactl --physcpubind="$cores" true 2>/dev/null || return 0; done
    numa=--numa-binding=node
}

same() { # NAME OTHER: NAME is OTHER's value where that is set, and must not be a third
    [[ -n ${!2:-} ]] || return 0
    [[ -z ${!1:-} || ${!1} == "${!2}" ]] || fail "$1=${!1} but $2=${!2}: unset the wrong one"
    printf -v "$1" %s "${!2}"
}

# Sets NNODES and the rest as Kubeflow does, by the names that torchrun reads where it is not told otherwise, or, in
# older versions, as if each pod were a rank.
find_pods() {
    local name
    if [[ ${PET_RDZV_ENDPOINT:-} =~ ^(.+):([0-9]+)$ ]]; then
        : "${PET_MASTER_ADDR:=${BASH_REMATCH[1]}}" "${PET_MASTER_PORT:=${BASH_REMATCH[2]}}"
    elif [[ -n ${PET_RDZV_ENDPOINT:-} ]]; then
        : "${PET_MASTER_ADDR:=$PET_RDZV_ENDPOINT}" "${PET_MASTER_PORT:=29400}" # torch's own port there
    fi
    for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT; do same "$name" "PET_$name"; done
    same RDZV PET_RDZV_BACKEND
    [[ -z ${NNODES:-} || $NNODES =~ ^0*1$ ]] || : "${NODE_RANK:=${JOB_COMPLETION_INDEX:-}}" # alone, it numbers runs
    if [[ -n ${RANK:-} && -n ${WORLD_SIZE:-} && -n ${MASTER_ADDR:-} && -z ${NNODES:-}${LOCAL_RANK:-} ]]; then
        NNODES=$WORLD_SIZE NODE_RANK=$RANK
    fi
}

# Sets `rendezvous` and `place`: this node alone, or its share of several.
find_nodes() {
    local slurm_nodes=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}} hosts=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}
    local nodes=${NNODES:-$slurm_nodes} node=${NODE_RANK:-} master=${MASTER_ADDR:-} port=${MASTER_PORT:-}
    local once="start one launcher per node, \`srun --ntasks-per-node=1 ./train_multigpu.sh\`"
    [[ ${SLURM_LOCALID:-0} == 0 ]] || fail "Slurm started several tasks on this node: $once"
    if [[ ${RDZV:-} == c10d ]]; then whole NNODES "${nodes%%:*}" 1 100000; fi # 2:4 are two to four
    whole NNODES "${nodes##*:}" 1 100000
    if [[ ${nodes##*:} =~ ^0*1$ ]]; then
        [[ $node =~ ^0*$ ]] || fail "NODE_RANK=$node but one node: set NNODES and MASTER_ADDR too, or unset NODE_RANK"
        rendezvous=(--standalone --nnodes=1) place='' # a free port: with a fixed one a second run here would die
        return
    fi
    if [[ $nodes == "$slurm_nodes" ]]; then
        [[ -n $node${SLURM_STEP_NODELIST:-} ]] || warn "not inside srun, the other nodes may never come: $once"
        node=${node:-${SLURM_NODEID:-}}
        if [[ -z $master ]] && command -v scontrol >/dev/null; then
            read -r master < <(scontrol show hostnames "$hosts") || true
        elif [[ -z $master && $hosts =~ ^([^],[]+)(\[([0-9]+)[-,0-9]*\])?(,|$) ]]; then
            master=${BASH_REMATCH[1]}${BASH_REMATCH[3]}
        fi
    fi
    [[ -n $master ]] || fail "NNODES=$nodes but MASTER_ADDR is not set: give node 0's address, the same on every node"
    # Jobs that share a node take other ports, below those that the kernel gives away.
    [[ -n $port || -z ${SLURM_JOB_ID:-} ]] || port=$((10000 + SLURM_JOB_ID % 20000))
    port=${port:-29500}
    whole MASTER_PORT "$port" 1 65535
    case ${RDZV:-static} in
        static)
            whole NNODES "$nodes" 1 100000
            [[ -n $node ]] || fail "NNODES=$nodes but NODE_RANK is not set: give 0 on the first node, 1 on the next"
            whole NODE_RANK "$node" 0 $((10#$nodes - 1))
            rendezvous=("--nnodes=$nodes" "--node_rank=$node" "--master_addr=$master" "--master_port=$port")
            place="Node $node of $nodes" ;;
        c10d)
            rendezvous=("--nnodes=$nodes" --rdzv_backend=c10d "--rdzv_endpoint=$master:$port")
            place="One of $nodes nodes" ;;
        *) fail "RDZV=$RDZV: give static or c10d" ;;
    esac
    place+=", meeting at $master:$port"
    [[ -n ${MASTER_PORT:-} ]] || place+=" (the default port; MASTER_PORT sets another)"
}

asked='' only_print='' words=("$@")
while (($#)); do
    case $1 in
        -h | --help) sed -n '3,/^$/s/^# \{0,1\}//p' "$self"; exit ;;
        --print) only_print=yes ;;
        [0-9]* | [-+][0-9]*)
            [[ -z $asked ]] || break
            [[ $1 =~ ^0*[1-9][0-9]{0,3}$ ]] ||
                fail "$1 is no number of processes: give 1 or more (without a GPU: of CPU processes), or none for all there is"
            asked=$((10#$1)) ;;
        *) break ;;
    esac
    shift
done

if [[ -z ${LOCKSTEP_COMMAND:-} ]]; then # for `resume with`: what stands before the script's own arguments
    typed=()
    for name in ${NNODES:+NNODES NODE_RANK MASTER_ADDR MASTER_PORT RDZV}; do
        [[ -z ${!name:-} ]] || typed+=("$name=${!name}")
    done
    [[ -z ${SLURM_STEP_NODELIST:-} ]] || typed+=(srun "--nodes=${SLURM_STEP_NUM_NODES:-1}" --ntasks-per-node=1)
    printf -v LOCKSTEP_COMMAND '%q ' "${typed[@]}" "$0" "${words[@]:0:${#words[@]} - $#}"
fi
export LOCKSTEP_COMMAND=${LOCKSTEP_COMMAND% }
trap '' PIPE # from here on the reader of a pipe may leave, too
script=$here/train.py
check_configs "$@"
for argument in "$@"; do
    [[ ! $argument =~ ^(--config([-_]path)?(=.*)?|[A-Za-z_][A-Za-z0-9_.-]*=.*)$ ]] || script=$here/train_ddp.py
done
[[ -f $script ]] || fail "no $script: keep train_multigpu.sh in the folder of the training scripts"
find_pods
find_nodes
if [[ ! ${PET_NPROC_PER_NODE:-auto} =~ ^(auto|gpu)$ ]]; then # these are all there are
    whole PET_NPROC_PER_NODE "$PET_NPROC_PER_NODE" 1 9999
    ((${asked:-10#$PET_NPROC_PER_NODE} == 10#$PET_NPROC_PER_NODE)) ||
        fail "$asked processes asked but PET_NPROC_PER_NODE=$PET_NPROC_PER_NODE: drop the number, or unset the variable"
    asked=$((10#$PET_NPROC_PER_NODE))
fi
find_python
find_gpus

found=${#gpus[@]} processes=${asked:-$((${#gpus[@]} ? ${#gpus[@]} : 1))}
visible="$found GPU$( ((found == 1)) || echo s) visible"
visible+=${CUDA_VISIBLE_DEVICES+ (CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES)}
if ((found && processes > found)); then
    fail "$processes processes asked, $visible: ask for at most $found, or set CUDA_VISIBLE_DEVICES= for CPU processes"
elif ((!found)) && [[ -n $asked${CUDA_VISIBLE_DEVICES:-} ]]; then
    warn "$visible: training on the CPU"
fi

by_rule=${OMP_NUM_THREADS:+no} # LOCKSTEP_THREADS: nobody has asked for this number, it is the most there may be
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores = $(nproc) / processes, cores > 0 ? cores : 1))}
[[ $by_rule ]] || export LOCKSTEP_THREADS=by_rule
# SIGUSR1, Slurm's warning, and SIGUSR2 would kill torchrun and orphan its workers: it passes them on, or ignores them.
signals="--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
if [[ $forwards != True ]]; then signals='' && trap '' USR1 USR2; fi
find_numa "$@"
read -r -d '' -a options <<<"--nproc_per_node=$processes $signals $numa ${TORCHRUN_ARGS:-}" || true
agent=("$here/plugins/resilience/agent.py")
[[ -f ${agent[0]} ]] || agent=(-m torch.distributed.run) # a copy without that plugin
command=("$python" "${agent[@]}" "${rendezvous[@]}" "${options[@]}" "$script" "$@")

if [[ -n $only_print ]]; then
    [[ -z ${LOCKSTEP_THREADS:-} ]] || printf 'LOCKSTEP_THREADS=%q ' "$LOCKSTEP_THREADS"
    printf 'OMP_NUM_THREADS=%q ' "$OMP_NUM_THREADS"
    printf '%q ' "${command[@]}"
    echo
    exit
fi

line='=========================================='
show "$line" "Multi-GPU Training Launcher" "$line"
if ((found)); then show "Number of GPUs: $processes"; else show "Number of processes: $processes (CPU)"; fi
[[ -z $place ]] || show "$place"
((!found)) || show '' "Available GPUs:" "${gpus[@]:0:processes}"
show '' "Launching distributed training..." ''
# exec: torchrun's agent takes over this process's id: signals are its own, and no shell waits in between.
exec "${command[@]}"
