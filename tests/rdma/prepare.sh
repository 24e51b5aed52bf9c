#!/usr/bin/env bash
# prepare.sh FOLDER: what the lab's virtual machine is made of, once: a kernel with Soft-RoCE, a first file system, and a
# layer of programs that the guest sees besides the host's own. Downloads 71 MB of Debian packages; installs QEMU alone.
# Exit 77: it can't be had here, and the last line says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
made_from=$(cat "$here/prepare.sh" "$here/init" "$here/modules.py" | sha256sum)
export DEBIAN_FRONTEND=noninteractive

skip() {
    echo "rdma lab: skipped: $*"
    exit 77
}

command -v apt-get >/dev/null && command -v dpkg >/dev/null || skip "apt-get and dpkg are needed, this is no Debian"
[ "$(uname -m)" = x86_64 ] || skip "the guest is x86_64, this machine is $(uname -m)"
missing=()
command -v qemu-system-x86_64 >/dev/null || missing+=(qemu-system-x86 seabios)
command -v cpio >/dev/null || missing+=(cpio)
is_made=$([ "$(cat "$folder/made-from" 2>/dev/null)" = "$made_from" ] && echo yes || true)
[ -z "${missing[*]}" ] && [ -n "$is_made" ] && exit 0

timeout 120 apt-get update -q >/dev/null 2>&1 || true # for all but root the lists that are there have to do
if [ -n "${missing[*]}" ]; then
    timeout 240 apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
        skip "apt-get install ${missing[*]} failed (it needs root)"
fi
[ -n "$is_made" ] && exit 0

rm -rf "$folder"/{made-from,packages,kernel,layer,first}
mkdir -p "$folder"/{packages,kernel,layer,first/{bin,proc,sys,dev,host,layer,upper,root,modules}}
cd "$folder/packages"
# the cloud kernel is smaller and has no Soft-RoCE
kernel=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends:/ && !n++ {print $2}' || true)
[ -n "$kernel" ] || skip "apt knows no linux-image-amd64"
timeout 240 apt-get download -qq "$kernel" busybox-static kmod libkmod2 iproute2 libbpf1 libelf1 libmnl0 libcap2 libxtables12 \
    libtirpc3 libibverbs1 ibverbs-providers librdmacm1 rdma-core libnl-3-200 libnl-route-3-200 libnuma1 libcurl4 2>/dev/null ||
    skip "apt-get download of $kernel and others failed"

for package in *.deb; do
    case $package in linux-image*) ;; *) dpkg -x "$package" "$folder/layer" ;; esac
done
cd "$folder/layer"
for old in bin sbin lib; do # the guest's root has links there, as the host's
    if [ -d $old ] && [ ! -L $old ]; then
        mkdir -p usr/$old
        cp -a $old/. usr/$old/
        rm -rf $old
    fi
done

dpkg --fsys-tarfile "$folder"/packages/linux-image*.deb | tar -x -C "$folder/kernel" --wildcards './boot/vmlinuz*' \
    './lib/modules/*/modules.*' './lib/modules/*/kernel/drivers/infiniband/*' './lib/modules/*/kernel/drivers/virtio/*' \
    './lib/modules/*/kernel/drivers/net/dummy.ko' './lib/modules/*/kernel/drivers/char/hw_random/*' \
    './lib/modules/*/kernel/net/*' './lib/modules/*/kernel/fs/*' './lib/modules/*/kernel/lib/*' \
    './lib/modules/*/kernel/crypto/*' './lib/modules/*/kernel/arch/x86/crypto/*'
ln -sf "$folder/layer/usr/bin/kmod" "$folder/depmod"
version=$(ls "$folder/kernel/lib/modules")
LD_LIBRARY_PATH="$folder/layer/usr/lib/x86_64-linux-gnu" "$folder/depmod" -b "$folder/kernel" "$version" 2>/dev/null
python3 "$here/modules.py" "$folder/kernel/lib/modules/$version" "$folder/first/modules"
cp "$folder"/kernel/boot/vmlinuz* "$folder/vmlinuz"
cp "$folder/layer/usr/bin/busybox" "$folder/first/bin/"
install -m 755 "$here/init" "$folder/first/init"
(cd "$folder/first" && find . | cpio -o -H newc --quiet | gzip -1 >"$folder/first.gz")
rm -rf "$folder"/{packages,kernel,first,depmod}
echo "$made_from" >"$folder/made-from"
