#!/bin/busybox sh
# The guest's first process. It mounts the host's root, read-only, under a layer in memory. In this
# root it runs the script that the host has put into the share (command.sh). It prints the script's
# exit status on the console.
/bin/busybox --install -s /bin
export PATH=/bin
mkdir -p /proc /sys /dev /host /layer /share /root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev

option() { sed -n "s/.*hbm\.$1=\([^ ]*\).*/\1/p" /proc/cmdline; }

for set in $(option modules | tr , ' '); do
  while read -r module; do
    insmod "/modules/$module" || echo "cannot load $module"
  done <"/modules/$set"
done

nine=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "$nine,ro,cache=loose" host /host
mount -t 9p -o "$nine" share /share
mount -t tmpfs layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work root /root
mount -t proc proc /root/proc
mount -t sysfs sysfs /root/sys
mount -t devtmpfs dev /root/dev
mkdir -p /root/dev/shm
mount -t tmpfs shm /root/dev/shm
ip link set lo up

chroot /root /bin/sh -c "$(cat /share/command.sh)" >/share/stdout 2>/share/stderr </dev/null
status=$?
dmesg >/share/dmesg
sync
echo "GUEST_EXIT=$status"
reboot -f
