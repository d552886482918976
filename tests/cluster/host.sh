#!/bin/sh
# Boot a host. This script is its first process, in new namespaces.
#   host.sh NAME FOLDER
# It prints "named" when the host name and the mounts are ready. Then it reads one line, which comes
# when the network interface exists. It prints "up" when all daemons have started.
set -eu
name=$1 folder=$2

hostname "$name"
# sshd refuses a root user whose password is locked, so our /etc/shadow has an unlocked entry.
for file in hosts nsswitch.conf shadow ssh munge slurm; do
    [ ! -e "/etc/$file" ] || mount --bind "$folder/etc/$file" "/etc/$file"
done
mount --bind "$folder/$name/log" /var/log
mount --bind "$folder/$name/spool" /var/spool
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 shm /dev/shm
# Hide the ssh keys and settings of the machine's root user.
[ ! -d /root/.ssh ] || mount -t tmpfs -o mode=700 ssh /root/.ssh
echo named

read -r _
ip link set lo up
ip address add "$(awk -v name="$name" '$2 == name { print $1; exit }' /etc/hosts)/24" dev eth0
ip link set eth0 up

mkdir -p /run/sshd /run/munge /run/lock /var/spool/slurmctld /var/spool/slurmd
/usr/sbin/sshd
munged --force --seed-file=/run/munge/seed --log-file=/var/log/munged.log
# The fake GPUs are copies of /dev/null.
mknod /run/gpu0 c 1 3
mknod /run/gpu1 c 1 3
if [ "$name" = head ]; then slurmctld; else slurmd; fi
echo up
# Because this first process ignores SIGCHLD, the kernel reaps the host's orphaned processes.
exec env --ignore-signal=CHLD sleep infinity </dev/null >/dev/null 2>&1
