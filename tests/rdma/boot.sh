#!/usr/bin/env bash
# boot.sh FOLDER SHARED SECONDS: run SHARED/job.sh, which the guest sees as /lab/job.sh, in the virtual machine of FOLDER.
# Returns what the job returns; 99: the machine did not come to an end in time. KVM is not used: -cpu Nehalem, which is the
# least that numpy runs on, makes the emulation twice as fast as all that QEMU knows. With one processor QEMU need not make
# atomic what two could do at once. no_timer_check: on a busy host the emulated timer is late, and the kernel would take it
# for broken.
set -euo pipefail
folder=$1 shared=$2 seconds=$3
rm -f "$shared/exit-code"
timeout --kill-after 10 "$seconds" qemu-system-x86_64 -M pc,usb=off -accel tcg,thread=multi -cpu Nehalem -smp 1 -m 2048 \
    -nographic -nodefaults -no-reboot -serial stdio -kernel "$folder/vmlinuz" -initrd "$folder/first.gz" \
    -append "console=ttyS0 panic=-1 quiet loglevel=4 mitigations=off no_timer_check" \
    -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=host,mount_tag=host \
    -fsdev local,id=layer,path="$folder/layer",security_model=none,readonly=on \
    -device virtio-9p-pci,fsdev=layer,mount_tag=layer \
    -fsdev local,id=lab,path="$shared",security_model=none -device virtio-9p-pci,fsdev=lab,mount_tag=lab \
    -object rng-random,id=random,filename=/dev/urandom -device virtio-rng-pci,rng=random \
    </dev/null 2>&1 | tee "$shared/console.log" | sed -u 's/.*\x1b\[2J//' |
    grep -a --line-buffered -v -E 'SeaBIOS|Booting from|Power down|^\s*$' || true
[ -f "$shared/exit-code" ] || exit 99
exit "$(cat "$shared/exit-code")"
